"""Parity: Megatron against transformers on the same weights, tensor kind by tensor kind, forward and backward.

A comparison of whole models has a blind spot: a tensor that happens not to matter (all zeros, all ones) can be lost or
exchanged unseen. So each kind of tensor is changed in turn, in both models, and both are asked again: the change must show
and the two must agree about it. Gradients are compared in the checkpoint's layout.

For small models in float32 on one rank: the whole checkpoint is written and read once a kind.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.anatomy import layer_types
from helpers.checkpoints import save_weights
from helpers.collate import collate
from helpers.losses import supervised_loss
from helpers.records import Batch, Episode

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GptOssForCausalLM

    from helpers.trainer import MegatronTrainer

Kind = tuple[str, str]
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_CHANGE = 0.05  # standard deviation of the noise that is added to a kind of tensor


@dataclass(frozen=True)
class ParityRow:
    """One kind of tensor in one kind of layer; all largest values over its tensors and all real positions.

    effect: change of a logit when noise is added to these tensors; small means that the row shows little.
    forward_abs: difference of a logit between the two models with that noise. forward_rel: divided by the largest logit.
    gradient_abs: difference of a gradient. gradient_rel: divided by its terms' size (gradient_gaps).
    """

    kind: str
    layers: str  # sliding, full, or - outside the layers
    effect: float
    forward_abs: float
    forward_rel: float
    gradient_abs: float
    gradient_rel: float


def tensor_kinds(config: object, names: Iterable[str]) -> dict[Kind, list[str]]:
    """(kind, layers) -> checkpoint names; kind is the name below `model.layers.N.`.

    >>> from helpers.anatomy import GPT_OSS_20B
    >>> tensor_kinds(GPT_OSS_20B, ["model.layers.1.self_attn.sinks", "lm_head.weight"])
    {('self_attn.sinks', 'full'): ['model.layers.1.self_attn.sinks'], ('lm_head.weight', '-'): ['lm_head.weight']}
    """
    types, kinds = layer_types(config), {}
    for name in names:
        match = _LAYER.fullmatch(name)
        short = types[int(match[1])].removesuffix("_attention") if match else "-"
        kinds.setdefault((match[2] if match else name, short), []).append(name)
    return kinds


def parity_rows(
    trainer: MegatronTrainer,
    reference: GptOssForCausalLM,
    sequences: Sequence[Sequence[int]],
    pad_id: int = 0,
) -> list[ParityRow]:
    """Compare trainer and reference, which must hold the same weights; both are as before afterwards.

    sequences: token ids of different lengths. Megatron gets them as one right-padded batch, transformers one by one and
    unpadded, so padding that leaks shows. They must not hold pad_id: transformers gives its embedding no gradient.
    Raises ValueError for several ranks or pad_id among the tokens.
    """
    import torch

    if trainer.settings.trainer.ranks > 1:
        raise ValueError(
            "parity_rows compares one rank with transformers; tests/integration/ranks.py compares ranks"
        )
    if any(pad_id in sequence for sequence in sequences):
        raise ValueError(
            f"a sequence holds the padding token {pad_id}, whose embedding transformers does not train"
        )
    batch = padded_batch(sequences, pad_id)
    gradients = gradient_gaps(trainer, reference, sequences, pad_id)
    plain = reference_logits(reference, sequences)
    kinds = tensor_kinds(reference.config, (name for name, _ in reference.named_parameters()))
    rows = []
    for key, names in kinds.items():
        with _changed(trainer, reference, names):
            theirs = reference_logits(reference, sequences)
            ours = megatron_logits(trainer, batch, sequences)
        effect, gap = largest(theirs - plain), largest(ours - theirs)
        worst = [largest(torch.tensor(column)) for column in zip(*(gradients[n] for n in names), strict=True)]
        rows.append(ParityRow(*key, effect, gap, gap / largest(theirs), *worst))
    return rows


def largest(values: Tensor) -> float:
    """The largest absolute value, NaN if there is one. (Python's max drops a NaN that is not the first.)"""
    return values.abs().max().item()


def padded_batch(sequences: Sequence[Sequence[int]], pad_id: int = 0) -> Batch:
    """The sequences as one batch whose loss mask covers all but the first token of each."""
    rows = [
        Episode(tuple(s[:1]), tuple(s[1:]), (0.0,) * (len(s) - 1), "stop", i) for i, s in enumerate(sequences)
    ]
    return collate(rows, None, pad_id)


def megatron_logits(trainer: MegatronTrainer, batch: Batch, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[sum of lengths, V] in fp32, real positions only, without gradient."""
    import torch

    device = trainer.settings.device
    with torch.no_grad():
        logits = trainer.model.module(batch.tokens.to(device), batch.position_ids.to(device), None)
    return torch.cat([row[: len(s)] for row, s in zip(logits, sequences, strict=True)]).float()


def reference_logits(reference: GptOssForCausalLM, sequences: Sequence[Sequence[int]]) -> Tensor:
    """[sum of lengths, V] in fp32 from transformers, each sequence by itself, without gradient."""
    import torch

    with torch.no_grad():
        rows = [reference(torch.tensor([list(s)], device=reference.device)).logits[0] for s in sequences]
    return torch.cat(rows).float()


def reference_gradients(
    reference: GptOssForCausalLM, sequences: Sequence[Sequence[int]]
) -> dict[str, Tensor]:
    """{name: gradient of the mean cross-entropy of all tokens but each sequence's first}, each sequence by itself."""
    import torch
    from torch.nn.functional import cross_entropy

    reference.zero_grad()
    count = sum(len(s) - 1 for s in sequences)
    for sequence in sequences:
        tokens = torch.tensor([list(sequence)], device=reference.device)
        logits = reference(tokens).logits[0, :-1].float()
        (cross_entropy(logits, tokens[0, 1:], reduction="sum") / count).backward()
    gradients = {name: p.grad.detach().clone() for name, p in reference.named_parameters()}
    reference.zero_grad()
    return gradients


def gradient_terms(
    reference: GptOssForCausalLM, sequences: Sequence[Sequence[int]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """{name: (the gradient of reference_gradients, the sum of its terms' absolute values)}, both in float64.

    The terms are the gradients of the single tokens' losses: one backward pass a token, on a float64 copy of the model.
    """
    import torch
    from torch.nn.functional import cross_entropy

    exact = copy.deepcopy(reference).double()
    parameters = dict(exact.named_parameters())
    found = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    count = sum(len(s) - 1 for s in sequences)
    for sequence in sequences:
        tokens = torch.tensor([list(sequence)], device=exact.device)
        losses = cross_entropy(exact(tokens).logits[0, :-1], tokens[0, 1:], reduction="none") / count
        for loss in losses:
            terms = torch.autograd.grad(
                loss, list(parameters.values()), retain_graph=True, materialize_grads=True
            )
            for (total, size), term in zip(found.values(), terms, strict=True):
                total += term
                size += term.abs()
    return found


def gradient_gaps(
    trainer: MegatronTrainer,
    reference: GptOssForCausalLM,
    sequences: Sequence[Sequence[int]],
    pad_id: int = 0,
) -> dict[str, tuple[float, float]]:
    """{checkpoint name: (largest difference of a gradient, the same divided by the size of the tensor's terms)}.

    The loss is the mean cross-entropy of all tokens but each sequence's first, padded in Megatron, unpadded in transformers,
    which computes in float64. The size is the tensor's largest sum, over tokens, of the absolute gradients of single tokens'
    losses: what floating point promises of a sum is a share of that (Higham, Accuracy and Stability of Numerical Algorithms,
    4.2), however little is left where the terms cancel. A gradient that is wrong by half is off by 1/2 of what is left.
    """
    ours = trainer.gradients(padded_batch(sequences, pad_id), supervised_loss)
    gaps = {}
    for name, (theirs, terms) in gradient_terms(reference, sequences).items():
        gap, size = largest(ours[name].to(theirs) - theirs), largest(terms)
        gaps[name] = gap, gap / size if size else (0.0 if gap == 0 else math.inf)
    return gaps


@contextmanager
def _changed(trainer: MegatronTrainer, reference: GptOssForCausalLM, names: Sequence[str]) -> Iterator[None]:
    """Both models with noise on these tensors; Megatron takes them through the bridge, as at the start of a run."""
    import torch

    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    noise = torch.Generator().manual_seed(len(names[0]))
    after = dict(before)
    for name in names:
        step = _CHANGE * torch.randn(before[name].shape, generator=noise)
        after[name] = before[name] + step.to(before[name])
    try:
        _load(trainer, reference, after)
        yield
    finally:
        _load(trainer, reference, before)


def _load(trainer: MegatronTrainer, reference: GptOssForCausalLM, weights: dict[str, Tensor]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = {name: tensor.cpu() for name, tensor in weights.items()}
        trainer.load_weights(save_weights(plain, trainer.checkpoint, Path(folder) / "changed"))
    reference.load_state_dict(weights)


def parity_failures(
    rows: Sequence[ParityRow], forward: float, gradient: float, effect: float = 1e-2
) -> list[str]:
    """One sentence for each row that breaks a limit; empty when the two models agree and every row could have shown it.

    forward: limit of forward_abs (logit). gradient: limit of gradient_rel. effect: least effect (logit) of a row that counts.
    A comparison with NaN fails.
    """
    problems = []
    for row in rows:
        where = f"{row.kind} ({row.layers})"
        if not row.effect > effect:
            problems.append(
                f"{where}: changing it moves no logit by more than {row.effect:.1e}, so the row shows nothing"
            )
        if not row.forward_abs < forward:
            problems.append(f"{where}: forward differs by {row.forward_abs:.1e}, the limit is {forward:g}")
        if not row.gradient_rel < gradient:
            problems.append(
                f"{where}: gradient differs by {row.gradient_rel:.1e} of its terms' size, the limit is {gradient:g}"
            )
    return problems


def parity_table(rows: Sequence[ParityRow]) -> str:
    """The rows as text, one a line; "relative" belongs to the column on its left."""
    head = f"{'kind':33}{'layers':8}{'effect':>8}{'forward':>9}{'relative':>9}{'gradient':>9}{'relative':>9}"
    lines = [
        f"{r.kind:33}{r.layers:8}{r.effect:8.1e}"
        + "".join(f"{x:9.1e}" for x in (r.forward_abs, r.forward_rel, r.gradient_abs, r.gradient_rel))
        for r in rows
    ]
    return "\n".join([head, *lines])


def parity_columns(rows: Sequence[ParityRow]) -> dict[str, list]:
    """The rows as columns, for results.write_csv or a figure's data."""
    records = [asdict(row) for row in rows]
    return {name: [record[name] for record in records] for name in records[0]}
