"""Rollout-trainer mismatch raised on purpose: weights that differ in one known way, and gauges of what follows.

Two kinds of thing, for notebook 08 and tests/bench/mismatch.py:
    knobs   {Hugging Face name: tensor} -> the same names with other values, to be sent to the rollout server
            (helpers.weight_sync.send_tensors) while the trainer keeps what it has
    gauges  how far the two then are apart on a batch that the server sampled
and `ARMS`, the training runs that the two compare. Everything here is a copy: no input tensor changes.

A real low-precision rollout rounds activations and KV cache too. Rounding the weights alone is what a CPU in
float32 can do, and it can be undone: the next send is exact again.
"""

from __future__ import annotations

import csv
import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from helpers.corrections import mismatch
from helpers.mxfp4 import dequantise_experts, quantise_experts
from helpers.profiles import PROJECT_ROOT, Profile, load_profile, nearest_name
from helpers.records import Batch
from helpers.routing_replay import own_experts, routing_difference

if TYPE_CHECKING:
    from helpers.trainer import MegatronTrainer

Weights = Mapping[str, Tensor]
Knob = Callable[[Weights], dict[str, Tensor]]
BENCH = PROJECT_ROOT / "tests" / "bench" / "recorded" / "mismatch.csv"
CURVES = BENCH.with_name("mismatch_curves.csv")
GATES = {"generation_kl": 0.002, "token_multiplier": 1.05}  # NeMo-RL's tests hold both gauges below these
ATTENTION = r"\.self_attn\.[qkvo]_proj\.weight$"
EXPERTS = r"\.mlp\.experts\.(gate_up|down)_proj$"
ROUTER = r"\.mlp\.router\.weight$"


# --- knobs --------------------------------------------------------------------------------------------------
def rounded(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor to `dtype` and back to its own: what a rollout engine in bfloat16 holds of float32 weights.

    bfloat16 keeps 8 significant bits, so that |error| <= 2^-8 |w| (half a step; for numbers that are not
    subnormal).

    >>> rounded({"norm": torch.tensor([1.0, 1.001])}, torch.bfloat16)
    {'norm': tensor([1., 1.])}
    """
    return {name: tensor.to(dtype).to(tensor.dtype) for name, tensor in weights.items()}


def quantised(weights: Weights, bits: int) -> dict[str, Tensor]:
    """Attention and expert matrices on a symmetric integer grid of `bits` bits, a scale an output row.

    weights: {Hugging Face name: tensor}; experts are [experts, in, out], attention's matrices [out, in].
        Routers, embeddings, norms, sinks and biases stay as they are, as in engines that quantise.
    Returns float tensors with the values that the integers stand for ("fake quantisation").
    Raises ValueError for bits outside 2 to 16, and where no name is one of these matrices.
    """
    return _with(
        weights, f"{ATTENTION}|{EXPERTS}", lambda name, tensor: quantised_matrix(tensor, bits, _inputs(name))
    )


def quantised_matrix(weight: Tensor, bits: int, inputs: int) -> Tensor:
    """weight [...] on the grid scale * {-L, ..., L}, L = 2^(bits - 1) - 1, scale = max |w| / L of each row.

    inputs: the dimension that a row runs along, that is over which the product sums.
    |error| <= scale / 2, and the largest weight of a row stays what it is.
    Source: scale quantisation, arXiv 2004.09602, section 3. A scale a channel is what SGLang's w8a8_int8 has;
    int4 engines take one for each 32 to 128 inputs, and a row of the tiny model is 64 or 128 long.

    Two bits have L = 1: a row keeps only -max, 0 and max.
    >>> quantised_matrix(torch.tensor([[1.0, 0.6, -0.4], [0.0, 0.0, 0.0]]), bits=2, inputs=-1)
    tensor([[1., 1., -0.],
            [0., 0., 0.]])
    """
    if not 2 <= bits <= 16:
        raise ValueError(f"bits={bits} makes no signed grid; use 2 to 16, e.g. 8 or 4")
    largest = 2 ** (bits - 1) - 1
    scale = weight.abs().amax(inputs, keepdim=True) / largest
    return (weight / scale.masked_fill(scale == 0, 1.0)).round() * scale


def in_mxfp4(weights: Weights) -> dict[str, Tensor]:
    """Expert matrices as the released gpt-oss stores them: 4-bit floats, a power of two for each 32 of a row.

    weights: {Hugging Face name: tensor}. The rest stays as it is, as in the released checkpoint.
    Source: helpers/mxfp4.py, which decodes as transformers does. Raises ValueError where no name is an expert's.
    """
    return _with(
        weights,
        EXPERTS,
        lambda name, tensor: dequantise_experts(*quantise_experts(tensor), dtype=tensor.dtype),
    )


def perturbed_routers(weights: Weights, relative: float, seed: int = 0) -> dict[str, Tensor]:
    """Router matrices with Gaussian noise of `relative` times their root mean square; everything else as it is.

    Where two experts' logits lie closer than the noise, a token takes another expert. Small noise stands for
    what two kernels do to a router's input. The noise is a function of seed: the same at every call.
    Raises ValueError for a negative size, and where no name is a router.
    """
    if not relative >= 0:
        raise ValueError(f"relative={relative} is the size of noise; use 0 or more, e.g. 0.01")
    generator = torch.Generator().manual_seed(seed)

    def noisy(name: str, tensor: Tensor) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor + relative * tensor.square().mean().sqrt() * noise

    return _with(weights, ROUTER, noisy)


class Stale:
    """A knob with a memory: the weights that it was handed `steps` calls ago, the oldest while there are fewer.

    Called once a step it makes a rollout that lags `steps` GRPO steps behind, as in asynchronous training.

    >>> late = Stale(1)
    >>> [late({"norm": torch.tensor(float(step))})["norm"].item() for step in range(4)]
    [0.0, 0.0, 1.0, 2.0]
    """

    def __init__(self, steps: int):
        if steps < 0:
            raise ValueError(f"steps={steps} would be weights of the future; use 0 or more")
        self._past: deque[Weights] = deque(maxlen=steps + 1)

    def __call__(self, weights: Weights) -> dict[str, Tensor]:
        self._past.append(weights)
        return dict(self._past[0])


PLAIN_KNOBS = {"exact": dict, "bf16": partial(rounded, dtype=torch.bfloat16), "mxfp4": in_mxfp4}
SIZED_KNOBS = {
    "int": lambda number: partial(quantised, bits=int(number)),
    "stale": lambda number: Stale(int(number)),
    "router": lambda number: partial(perturbed_routers, relative=float(number)),
}


def knob(name: str) -> Knob:
    """A knob by name: exact, bf16, mxfp4, or with its number int:4, stale:4, router:0.01.

    Raises ValueError for a name or a number that is none.

    >>> knob("int:2")({"x.mlp.experts.down_proj": torch.tensor([[[1.0], [0.3]]])})
    {'x.mlp.experts.down_proj': tensor([[[1.],
             [0.]]])}
    """
    kind, colon, number = name.partition(":")
    if kind in PLAIN_KNOBS and not colon:
        return PLAIN_KNOBS[kind]
    if kind not in SIZED_KNOBS:
        known = [*PLAIN_KNOBS, *SIZED_KNOBS]
        raise ValueError(f"unknown knob {name!r}{nearest_name(kind, known)}; knobs: {', '.join(known)}")
    try:
        return SIZED_KNOBS[kind](number)
    except ValueError as error:
        raise ValueError(
            f"knob {name!r} needs a number behind it, e.g. int:4, router:0.01 ({error})"
        ) from error


def _with(weights: Weights, pattern: str, change: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Copies of all tensors, of those whose name matches the pattern what `change` makes of them."""
    chosen = {name for name in weights if re.search(pattern, name)}
    if not chosen:
        raise ValueError(
            f"none of the {len(weights)} names is a tensor that this knob turns; pass trainer.export(), "
            "whose names are those of Hugging Face"
        )
    return {name: change(name, t) if name in chosen else t.clone() for name, t in weights.items()}


def _inputs(name: str) -> int:
    """The dimension over which a matrix's product sums: [experts, in, out] in experts, [out, in] elsewhere."""
    return -2 if ".experts." in name else -1


# --- gauges -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gauges:
    """How far trainer and rollout are apart on one batch; means over its trained tokens.

    logprob_gap, logprob_gap_max: |trainer - rollout| logprob of a token, nats; mean and largest.
    generation_kl: KL(rollout || trainer) by k3, nats a token. token_multiplier: mean exp |trainer - rollout|.
    other_experts: share of (token, layer) for which the engines took different experts.
    replayed_kl: generation_kl when the trainer replays the rollout's experts (R3).
    """

    logprob_gap: float
    logprob_gap_max: float
    generation_kl: float
    token_multiplier: float
    other_experts: float
    replayed_kl: float

    def as_row(self) -> dict[str, float]:
        """Name -> value, for a table."""
        return asdict(self)


def measure(trainer: MegatronTrainer, batch: Batch) -> Gauges:
    """The gauges of a batch against the trainer's present weights: three forward passes, nothing changes.

    batch: sampled by the server with algorithm.routing_replay, so that it holds the rollout's experts.
    Raises ValueError for a batch without them.
    """
    if batch.routed_experts is None:
        raise ValueError("the batch holds no routed experts; roll it out with algorithm.routing_replay on")
    alone = replace(batch, routed_experts=None)
    return gauges(batch, trainer.logprobs(alone), trainer.logprobs(batch), own_experts(trainer, batch))


def gauges(batch: Batch, plain: Tensor, replayed: Tensor, own: Tensor) -> Gauges:
    """The gauges from what the trainer says of the batch.

    plain, replayed: [B, S], its logprobs with its own experts and with the rollout's. own: [B, S, layers,
    chosen], its own experts.
    """
    rollout, mask = batch.rollout_logprobs, batch.loss_mask
    gap, apart = (plain - rollout).abs()[mask > 0], mismatch(plain, rollout, mask)
    return Gauges(
        logprob_gap=gap.mean().item(),
        logprob_gap_max=gap.max().item(),
        generation_kl=apart.generation_kl_k3.item(),
        token_multiplier=apart.token_multiplier.item(),
        other_experts=routing_difference(own, batch.routed_experts).routers,
        replayed_kl=mismatch(replayed, rollout, mask).generation_kl_k3.item(),
    )


# --- arms ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Arm:
    """A training run of the comparison.

    algorithm: a recipe (helpers/recipes.py), with `changes` to its settings.
    mismatch: whether the rollout's weights go through the knob. shuffled: the control, with rewards that
        went to the wrong answers.
    """

    algorithm: str
    mismatch: bool = True
    shuffled: bool = False
    changes: Mapping[str, object] = field(default_factory=dict)

    def profile(self, name: str, **changes) -> Profile:
        """load_profile(name, ...) with this arm's algorithm; changes: top-level or dotted, as there."""
        own = {f"algorithm.{key}": value for key, value in self.changes.items()}
        return load_profile(name, algorithm=self.algorithm, **own, **changes)


REPLAY = {"routing_replay": True}
BY_TOKEN = {"correction_level": "token", "correction_floor": 0.5}
# All but "ratio" take the update's own logprobs as old ones: their ratio is 1, no clip acts, and nothing but the
# named remedy touches the mismatch. "ratio" is the default recipe: old logprobs are the rollout's, so that the
# clipped ratio holds the mismatch. The trust region's bound is that recipe's clip in nats, ln 1.28.
ARMS = {
    "no mismatch": Arm("on_policy", mismatch=False),
    "off": Arm("on_policy"),
    "ratio": Arm("default"),
    "tis": Arm("tis"),
    "mis token": Arm("mis", changes=BY_TOKEN),
    "mis sequence": Arm("mis"),
    "trust region": Arm("on_policy", changes={"trust_region": "token", "trust_region_bound": 0.25}),
    "r3": Arm("on_policy", changes=REPLAY),
    "tis + r3": Arm("tis", changes=REPLAY),
    "shuffled": Arm("on_policy", shuffled=True),
}


def recorded_arms(
    name: str, column: str = "after", path: Path = BENCH
) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """What tests/bench/mismatch.py wrote down for one knob: where and when, and arm -> seed -> values.

    column: of the file, e.g. "after" (held-out accuracy at the end, one value), or "reward" of `CURVES` (one a
    step). Raises ValueError for a file without its first line "# date, commit, machine", and for a knob that was
    not run.
    """
    head, *lines = path.read_text().splitlines()
    if not head.startswith("# "):
        raise ValueError(f"{path.name} does not say where it was measured; run tests/bench/mismatch.py")
    rows = list(csv.DictReader(lines))
    arms: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["knob"] == name:
            arms.setdefault(row["arm"], {}).setdefault(row["seed"], []).append(float(row[column]))
    if not arms:
        known = ", ".join(sorted({row["knob"] for row in rows}))
        raise ValueError(f"{path.name} has no run with knob {name!r}; it has {known}")
    return head.removeprefix("# "), arms
