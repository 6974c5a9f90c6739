"""The exercises' answers and likely mistakes. You come here to solve one? Its hint in the notebook spoils less.

EXERCISES: name -> helpers.exercises.Exercise, in the notebooks' order. A mistake is what a learner would have written, as a
value or a function, beside what to say to it; tests try each one and expect to be told just that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from helpers import anatomy
from helpers.exercises import Exercise

EXERCISES: dict[str, Exercise] = {}


def _add(name: str, answer: Any, praise: str, mistakes: Mapping[str, Any], **more: Any) -> None:
    EXERCISES[name] = Exercise(answer, praise, mistakes, **more)


# --- 01 gpt-oss -----------------------------------------------------------------------------------------------------------

_add(
    "half-sink",
    lambda keys: math.log(keys),
    "The sink joins as exp(sink), so it has to grow with the log of the number of keys: 4.85 for a whole window of 128.",
    {
        "a sink is a logit, and you gave the size of exp(sink): one step is missing": lambda keys: float(keys),
        "0 takes half of a query with one key; how much of one with 128?": lambda keys: 0.0,
        "the softmax works with e, and this is a logarithm to another base": lambda keys: math.log2(keys),
        "sign: this sink makes the head louder, not quieter": lambda keys: -math.log(keys),
    },
    cases=lambda: [(1,), (16,), (128,)],
)  # fmt: skip

_CACHE_ROOM = 16 * 2**30
_CONTEXT = 1024


def _answers_that_fit(bytes_each: float) -> int:
    return int(_CACHE_ROOM // bytes_each)


_add(
    "cache-room",
    _answers_that_fit(anatomy.kv_cache_bytes(anatomy.GPT_OSS_20B, _CONTEXT)),
    "Half of the layers keep 128 tokens of each answer; without windows it would be little more than half as many answers.",
    {
        "this is what fits when every layer keeps every token; half of the layers slide": _answers_that_fit(
            anatomy.kv_cache_bytes(anatomy.GPT_OSS_20B, _CONTEXT, windows=False)
        ),
        "you counted what each further token adds; the sliding layers' windows take memory, too": _answers_that_fit(
            _CONTEXT * anatomy.kv_cache_bytes_per_token(anatomy.GPT_OSS_20B)
        ),
        "you took GB, 10^9 bytes, for GiB, 2^30": int(
            16e9 // anatomy.kv_cache_bytes(anatomy.GPT_OSS_20B, _CONTEXT)
        ),
    },
    tolerance=0.0,
)  # fmt: skip


def _router(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    best, chosen = scores.topk(top_k, dim=-1)
    return best.softmax(-1), chosen


def _router_softmax_first(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    return scores.softmax(-1).topk(top_k, dim=-1)


def _router_smallest(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    best, chosen = scores.topk(top_k, dim=-1, largest=False)
    return best.softmax(-1), chosen


_add(
    "write-the-router",
    _router,
    "Softmax over the chosen scores alone: the weights of a token sum to one.",
    {
        "your weights do not sum to one: the softmax runs over all experts. That is the planted fault "
        "'router-softmax-first' of notebook 02": _router_softmax_first,
        "your weights still are scores: the softmax is missing": lambda s, k: s.topk(k, dim=-1),
        "you chose the experts with the smallest scores": _router_smallest,
    },
    cases=lambda: [(torch.tensor([[0.0, 2.0, 1.0]]), 2), (torch.tensor([[3.0, -1, 0.5, 1], [0, 0.25, 4, 2]]), 3)],
)  # fmt: skip

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _fp4(code: int) -> float:
    return _FP4[code % 8] * (-1 if code >= 8 else 1)


def _bytes_of_mxfp4() -> list[tuple[int, int]]:
    return [(0x7A, 125), (0x1F, 127), (0xC4, 130)]


_add(
    "unpack-mxfp4",
    lambda byte, scale: [_fp4(byte & 15) * 2.0 ** (scale - 127), _fp4(byte >> 4) * 2.0 ** (scale - 127)],
    "Low half first. Exchanged halves keep mean and spread of the weights, so only values tell.",
    {
        "the two are exchanged: the even element is in the low half": lambda b, s: [
            _fp4(b >> 4) * 2.0 ** (s - 127), _fp4(b & 15) * 2.0 ** (s - 127)],
        "the scale byte is an exponent with an offset: 127 stands for 1": lambda b, s: [
            _fp4(b & 15) * 2.0**s, _fp4(b >> 4) * 2.0**s],
        "the block's scale is missing": lambda b, s: [_fp4(b & 15), _fp4(b >> 4)],
        "codes from 8 on are the negative values": lambda b, s: [
            abs(_fp4(b & 15)) * 2.0 ** (s - 127), abs(_fp4(b >> 4)) * 2.0 ** (s - 127)],
    },
    cases=_bytes_of_mxfp4,
)  # fmt: skip


# --- 02 bridge ------------------------------------------------------------------------------------------------------------

_add(
    "qkv-row",
    3 * 10 * 64 + 8 * 64,
    "Three whole groups of ten heads, then the eight queries of group 3. A tensor-parallel cut between groups stays whole.",
    {
        "that is where it would be in all q, then all k, then all v: the planted fault 'qkv-split-flat'": 64 * 64 + 3 * 64,
        "a group also holds its value: eight queries, one key and one value are ten heads": 3 * 9 * 64 + 8 * 64,
        "you are at the first row of group 3; its queries come before its key": 3 * 10 * 64,
        "you counted the groups from 1; here the first one is group 0": 2 * 10 * 64 + 8 * 64,
        "that is a number of heads; each head is 64 rows": 3 * 10 + 8,
    },
    tolerance=0.0,
)  # fmt: skip


def _to_checkpoint(qkv: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor) -> dict[str, Tensor]:
    grouped = qkv.unflatten(0, (2, 4, -1))
    q, k, v = (part.flatten(0, 2) for part in grouped.split((2, 1, 1), dim=1))
    wide = torch.stack(gate_up.T.chunk(2, dim=1), dim=-1).flatten(1)
    narrow = torch.stack(bias.chunk(2), dim=-1).flatten()
    return {
        "q_proj": q, "k_proj": k, "v_proj": v, "gate_up_proj": wide, "gate_up_proj_bias": narrow, "down_proj": down.T,
    }  # fmt: skip


def _but(**changed: Callable[..., Tensor]) -> Callable[..., dict[str, Tensor]]:
    """`_to_checkpoint` with some tensors computed otherwise, from (qkv, gate_up, bias, down)."""

    def converter(*tensors: Tensor) -> dict[str, Tensor]:
        return _to_checkpoint(*tensors) | {name: make(*tensors) for name, make in changed.items()}

    return converter


def _megatron_tensors() -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2 * 4 * 32, 64), (2 * 128, 64), (2 * 128,), (64, 128))  # the tiny model's
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes)]


_add(
    "mend-the-bridge",
    _to_checkpoint,
    "The bias needs the same order as its matrix. Slime's issue 2004 is this mistake; its shape is right, so nothing complains.",
    {
        "that is the way *in*, from alternating to halves; here the bias comes out": _but(
            gate_up_proj_bias=lambda q, g, b, d: b.unflatten(0, (-1, 2)).T.flatten()
        ),
        "even places are gate, odd ones up: you have them exchanged in the bias": _but(
            gate_up_proj_bias=lambda q, g, b, d: torch.stack(b.chunk(2)[::-1], dim=-1).flatten()
        ),
        "the bias was wrong and the matrix was right; now both have changed": _but(
            gate_up_proj=lambda q, g, b, d: g.T
        ),
    },
    cases=_megatron_tensors,
    planted=(
        "the planted mistake is still in. Five of the six tensors are right; compare them one by one with the "
        "checkpoint's, as section 2 does",
        _but(gate_up_proj_bias=lambda q, g, b, d: b),
    ),
)  # fmt: skip

SECRET_FAULT = "window-one-short"

_add(
    "name-the-fault",
    SECRET_FAULT,
    "A mistake that reproduces the numbers to the last bit is found. `python -m helpers.doctor` does this for your server.",
    {
        "it is the window, but on the other side: compare how well the two explain the numbers": "window-one-long",
        "with no window at all the numbers would be further off: take the fault whose numbers fit, not one of its kind":
            "window-missing",
    },
)  # fmt: skip


# --- 03 rollout -----------------------------------------------------------------------------------------------------------

_add(
    "predict-the-grades",
    [1, 0, 0, 0],
    "Only the final message counts, exactly, and only in an answer that was ended.",
    {
        "look at the end of the second one: without <|return|> it hit the token budget, and is not well-formed": [1, 1, 0, 0],
        "a right digit in the analysis is thought, not answered: the final message decides": [1, 0, 1, 0],
        "the verifier is strict: '4.' is not '4'": [1, 0, 0, 1],
        "a lazy answer earns as much as a worked one, if its digit is right": [0, 0, 0, 0],
    },
    tolerance=0.0,
)  # fmt: skip


def _logits() -> list[tuple[Tensor, int, float]]:
    logits = torch.tensor([2.0, 0.5, -1.0, 0.0])
    return [(logits, 0, 1.0), (logits, 2, 0.5), (logits, 1, 2.0)]


_add(
    "engine-logprob",
    lambda logits, token, temperature: (logits / temperature).log_softmax(-1)[token],
    "Divide first, normalise afterwards: this is the distribution that was sampled from.",
    {
        "the temperature is missing: right at 1 only. That is the planted fault 'temperature'":
            lambda logits, token, temperature: logits.log_softmax(-1)[token],
        "you divide after the softmax, so the probabilities do not sum to one any more":
            lambda logits, token, temperature: logits.log_softmax(-1)[token] / temperature,
        "a higher temperature has to flatten the distribution: divide, do not multiply":
            lambda logits, token, temperature: (logits * temperature).log_softmax(-1)[token],
        "that is the probability; its logarithm is wanted":
            lambda logits, token, temperature: (logits / temperature).softmax(-1)[token],
    },
    cases=_logits,
)  # fmt: skip


def _sync_rows() -> list[tuple[Sequence, ...]]:
    """(kinds, change by the sync, error after it): arrived, dropped, arrived scrambled, without any effect."""
    kinds = ["sinks", "experts.down_proj", "qkv", "spare"]
    return [
        (kinds, [1.2, 0.0, 0.8, 0.0], [2e-6, 1.1, 0.9, 1e-6]),
        (["norm", "head"], [0.5, 2.0], [1e-6, 3e-6]),
    ]


def _names(keep: Callable[[float, float], bool]) -> Callable[..., list[int]]:
    def judge(kinds: Sequence[str], changes: Sequence[float], errors: Sequence[float]) -> list[int]:
        return [kind for kind, c, e in zip(kinds, changes, errors, strict=True) if keep(c, e)]

    return judge


_add(
    "dropped-updates",
    _names(lambda change, error: change < 1e-4 < error),
    "No change *and* a large error: the update was dropped. A large error with a change means that it arrived, and wrongly.",
    {
        "'spare' did not change either, and still agrees with transformers: noise on it has no effect at all. "
        "Ask for the error, too": _names(lambda change, error: change < 1e-4),
        "'qkv' did change: it arrived, in a wrong order. Dropped is only what did not change":
            _names(lambda change, error: error > 1e-4),
        "these are the kinds that arrived; the others are asked for": _names(lambda change, error: error < 1e-4),
    },
    cases=_sync_rows,
)  # fmt: skip


# --- 04 maths -------------------------------------------------------------------------------------------------------------

_add(
    "lone-advantage",
    15 / 4,
    "A lone right answer gets (n - 1) / sqrt(n): it grows with the root of the group size, 2.47 of 8 and 3.75 of 16.",
    {
        "you divided the variance by n; GRPO's code divides by n - 1": math.sqrt(15),
        "twice the group is not twice the advantage: work out mean and standard deviation": 2 * 7 / math.sqrt(8),
        "that is the distance from the mean, Dr. GRPO's advantage; 'std' divides by the standard deviation": 15 / 16,
        "that is RLOO's: the answer itself is left out of the mean": 1.0,
        "that is the group of 8, before the change": 7 / math.sqrt(8),
    },
    tolerance=2e-3,
)  # fmt: skip


def _ratios() -> list[tuple[Tensor, ...]]:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.25, 1.5])
    return [(ratio, 1.0), (ratio, -1.0)]


_add(
    "silent-tokens",
    lambda ratio, advantage: (ratio > 1.28) if advantage > 0 else (ratio < 0.8),
    "Only a move in the wanted direction is ever cut: up for a good token, down for a bad one.",
    {
        "you silence both sides. A good token that became rarer is put right, not clipped: look at the sign":
            lambda ratio, advantage: (ratio > 1.28) | (ratio < 0.8),
        "the sides are exchanged: a good token falls silent when it is *likelier* than 1.28 times":
            lambda ratio, advantage: (ratio < 0.8) if advantage > 0 else (ratio > 1.28),
        "this marks the tokens that still learn": lambda ratio, advantage: (
            (ratio <= 1.28) if advantage > 0 else (ratio >= 0.8)),
        "the upper limit is 1 + 0.28 here": lambda ratio, advantage: (
            (ratio > 1.2) if advantage > 0 else (ratio < 0.8)),
    },
    cases=_ratios,
)  # fmt: skip


_add(
    "mask-by-hand",
    [0, 0, 1, 1, 0, 0],
    "One position early, since position t predicts token t + 1: the last prompt token predicts the first of the answer.",
    {
        "these positions *hold* the answer's tokens; the mask is 1 where they are *predicted*": [0, 0, 0, 1, 1, 0],
        "the last token of the answer predicts padding, and nobody wants to learn that": [0, 0, 1, 1, 1, 0],
        "two positions early: the second prompt token predicts the third, which nobody sampled": [0, 1, 1, 0, 0, 0],
        "the first token of the answer was sampled as well: the last prompt token predicts it": [0, 0, 0, 1, 0, 0],
    },
    tolerance=0.0,
)  # fmt: skip


def _two_answers() -> list[tuple[Tensor, ...]]:
    old = torch.tensor([[0.25, 0.4, 0.5, 0.3], [0.2, 0.2, 0.9, 0.9]]).log()
    new = torch.tensor([[0.5, 0.4, 0.25, 0.6], [0.4, 0.4, 0.1, 0.1]]).log()
    return [(new, old, torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0]]))]


def _sequence_ratio(new: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    return (((new - old) * mask).sum(-1) / mask.sum(-1)).exp()


_add(
    "gspo-ratio",
    _sequence_ratio,
    "The geometric mean over the answer's own tokens. Remember that its clip range is a few 0.0001.",
    {
        "that is the product of the ratios: it explodes with the length. GSPO divides the sum of logs by it":
            lambda new, old, mask: ((new - old) * mask).sum(-1).exp(),
        "that is the arithmetic mean of the ratios; GSPO's is the geometric one: average the logs":
            lambda new, old, mask: ((new - old).exp() * mask).sum(-1) / mask.sum(-1),
        "you divide by the padded width; the second answer has two tokens, not four":
            lambda new, old, mask: ((new - old) * mask).mean(-1).exp(),
        "padding counts: multiply by the mask before you sum": lambda new, old, mask: (new - old).mean(-1).exp(),
        "still a logarithm: the ratio is its exp": lambda new, old, mask: ((new - old) * mask).sum(-1) / mask.sum(-1),
        "upside down: new over old": lambda new, old, mask: 1 / _sequence_ratio(new, old, mask),
    },
    cases=_two_answers,
)  # fmt: skip


# --- 05 one step ----------------------------------------------------------------------------------------------------------


def _silent_share(right: float, size: int) -> float:
    return right**size + (1 - right) ** size


_add(
    "silent-groups",
    _silent_share,
    "With a share right of 0.4 it is 16% in groups of 4 and 2% in groups of 8; at 0.9 it is 43% even of 8.",
    {
        "a group that is all wrong says nothing, too": lambda right, size: right**size,
        "a group that is all right says nothing, too": lambda right, size: (1 - right) ** size,
        "that is the share of groups that teach something": lambda right, size: 1 - _silent_share(right, size),
        "all answers are the same if each of the *other* size - 1 agrees with the first, right or wrong: "
        "the first one needs its own chance": lambda right, size: right ** (size - 1) + (1 - right) ** (size - 1),
    },
    cases=lambda: [(0.4, 4), (0.9, 8), (0.5, 2)],
)  # fmt: skip

_add(
    "by-group",
    lambda rewards, size: (rewards.view(-1, size) - rewards.view(-1, size).mean(1, keepdim=True)).flatten(),
    "Answers to one question stand beside each other, so a row of the table is a group.",
    {
        "that compares each answer with the whole batch: an easy question then looks like good work":
            lambda rewards, size: rewards - rewards.mean(),
        "the table is right, and the mean runs over the questions; each row needs its own":
            lambda rewards, size: (rewards.view(-1, size) - rewards.view(-1, size).mean(0)).flatten(),
    },
    cases=lambda: [
        (torch.tensor([1.0, 1, 0, 0, 0, 1]), 3),
        (torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1]), 4),
    ],
    planted=(
        "the planted mistake is still in. Print the table for two questions of three answers: which answers share a column?",
        lambda rewards, size: (rewards.view(size, -1) - rewards.view(size, -1).mean(0)).flatten(),
    ),
)  # fmt: skip

_ORDER = ["roll out", "score", "advantages", "release", "update", "resume", "sync"]

_add(
    "order-of-a-step",
    _ORDER,
    "The server has no memory to put new weights in before it resumes, and nothing new to get before the update.",
    {
        "sync stands before the update: the server gets the weights that it has, and samples one step behind":
            ["roll out", "score", "advantages", "release", "sync", "update", "resume"],
        "sync stands before resume: the server has no memory to put the weights in":
            ["roll out", "score", "advantages", "release", "update", "sync", "resume"],
        "update stands before release: both engines are on the card at its fullest moment":
            ["roll out", "score", "advantages", "update", "release", "resume", "sync"],
        "advantages are made of scores: score first":
            ["roll out", "advantages", "score", "release", "update", "resume", "sync"],
    },
)  # fmt: skip


# --- 06 training ----------------------------------------------------------------------------------------------------------

_add(
    "is-it-noise",
    lambda share, questions: math.sqrt(share * (1 - share) / questions),
    "2.5 to 3 points of a hundred with 256 questions: a gain of 40 is news, one of 2 is not.",
    {
        "that is the variance; the standard error is its root": lambda share, questions: share * (1 - share) / questions,
        "that is the spread of one question; the mean of many spreads less":
            lambda share, questions: math.sqrt(share * (1 - share)),
        "1 / sqrt(questions) is twice the largest it can be: use the share as well":
            lambda share, questions: 1 / math.sqrt(questions),
    },
    cases=lambda: [(0.4062, 256), (0.8047, 256), (0.5, 64)],
    tolerance=1e-3,
)  # fmt: skip

_CAUSES = {"A": "stop at <|end|>", "B": "stale weights", "C": "temperature 0", "D": "shuffled rewards"}

_add(
    "sick-runs",
    _CAUSES,
    "Length, silent groups and the gap say why; the reward alone cannot.",
    {
        "A and C both fail to rise; but in A the answers get shorter: what makes every worked answer earn nothing?":
            _CAUSES | {"A": "temperature 0", "C": "stop at <|end|>"},
        "B and D both fall; only in B do the two engines drift apart: who has other weights than who?":
            _CAUSES | {"B": "shuffled rewards", "D": "stale weights"},
    },
)  # fmt: skip

_add(
    "fill-the-step",
    32 / (1 - 0.4),
    "On average 53: dynamic sampling pays two thirds more rollout for a full batch of groups that teach.",
    {
        "40% more is not enough: of the extra ones, 40% are silent as well": 32 * 1.4,
        "that is how many of 32 teach something": 32 * 0.6,
        "that is how many of 32 are silent": 32 * 0.4,
    },
    tolerance=0.01,
)  # fmt: skip


# --- 07 memory ------------------------------------------------------------------------------------------------------------

_add(
    "bytes-a-parameter",
    2 + 4 + 4 + 8,
    "Nine times the bf16 weight itself; 376 GB for gpt-oss-20b if all of it is trained.",
    {
        "4 bytes are missing: the fp32 master copy that Adam updates in bf16 training, or one of its two moments": 14,
        "the gradient buffer is fp32, not bf16 (or was that fp32 training, which has no master copy?)": 16,
        "that is the optimizer's share alone: weight and gradient come on top": 12,
    },
    tolerance=0.0,
)  # fmt: skip

_LEFT = 40e9  # bytes of the card
_EPISODE = 1024  # tokens


def _episodes_that_fit(*terms: Callable, room: float = _LEFT) -> int:
    from helpers.profiles import load_profile

    settings = load_profile("gpu-20b")
    return max(n for n in range(1, 200) if sum(term(settings, n * _EPISODE) for term in terms) <= room)


def _loss(settings: Any, tokens: int) -> int:
    from helpers.memory import predicted_loss_bytes

    return predicted_loss_bytes(settings, tokens, True)


def _kept(settings: Any, tokens: int) -> int:
    from helpers.memory import predicted_activation_bytes

    return predicted_activation_bytes(settings, tokens)


_add(
    "largest-micro-batch",
    _episodes_that_fit(_loss, _kept),
    "Both grow with the tokens of the micro-batch, and the gradient of a step does not depend on how you cut it.",
    {
        "you left out what the layers keep for the backward pass": _episodes_that_fit(_loss),
        "you left out the logits: 201,088 numbers a token": _episodes_that_fit(_kept),
        "one too many: this one does not fit any more": _episodes_that_fit(_loss, _kept) + 1,
    },
    tolerance=0.0,
)  # fmt: skip


def _spendthrift(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def _in_pieces(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.cat([_spendthrift(*part) for part in zip(logits.split(32), labels.split(32), strict=True)])


def _one_copy(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float()
    return wide.gather(-1, labels[:, None])[:, 0] - wide.logsumexp(-1)


def _in_bfloat16(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].float()


def _judge_peak(given: Callable) -> str:
    """The values must be right to 1e-4, and the peak below a quarter of one fp32 copy of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(512, 4096, generator=generator).bfloat16()
    labels = torch.randint(4096, (512,), generator=generator)
    found = given(logits, labels)
    if found is ...:
        return "not done yet: put your function's body where ... stands"
    if not isinstance(found, Tensor) or found.shape != (512,):
        return (
            f"not yet: one logprob a label is wanted, [512], and this is {list(getattr(found, 'shape', []))}"
        )
    gap = (found.float() - _spendthrift(logits, labels)).abs().max().item()
    if not gap < 1e-4:
        reason = "did the arithmetic stay in bfloat16?" if gap < 0.5 else "compare two rows by hand"
        return f"not yet: a logprob is off by {gap:.2g}; {reason}"
    copies = _peak_of_new_tensors(lambda: given(logits, labels)) / (4 * logits.numel())
    return _judged(copies)


def _peak_of_new_tensors(work: Callable[[], object]) -> int:
    """Most bytes that the tensors made during `work` hold at a time, looked at after each torch operation.

    What an operation takes for itself meanwhile is not seen. helpers.memory.peak_allocated_bytes sees it, but its profiler
    writes warnings into the notebook.
    """
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    made: dict[int, tuple[StorageWeakRef, int]] = {}
    old: list[StorageWeakRef] = []
    peak = 0

    def refs(values: object) -> list[tuple[StorageWeakRef, int]]:
        storages = [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, Tensor)]
        return [(StorageWeakRef(s), s.nbytes()) for s in storages]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal peak
            old.extend(ref for ref, _ in refs((args, kwargs)) if ref.cdata not in made)
            output = function(*args, **(kwargs or {}))
            for key in [k for k, (ref, _) in made.items() if ref.expired()]:
                del made[key]
            before = {ref.cdata for ref in old}
            made.update({ref.cdata: (ref, size) for ref, size in refs(output) if ref.cdata not in before})
            peak = max(peak, sum(size for _, size in made.values()))
            return output

    with Watch():
        work()
    return peak


def _judged(copies: float) -> str:
    if copies > 1.9:
        return f"not done yet: its peak is {copies:.1f} fp32 copies of the logits, as at the start; 0.25 is the limit"
    if copies >= 0.25:
        return (
            f"not yet: its peak is {copies:.2f} fp32 copies of the logits, the limit is 0.25. Less than before, but as long "
            "as all tokens are converted at once it grows with the batch"
        )
    return ""


_add(
    "cut-the-peak",
    _in_pieces,
    "A few tokens at a time. In training each piece is also computed again in the backward pass: helpers/logprobs.py.",
    {
        "as at the start": _spendthrift,
        "as long as all tokens are converted at once it grows with the batch": _one_copy,
        "did the arithmetic stay in bfloat16?": _in_bfloat16,
        "compare two rows by hand": lambda logits, labels: _in_pieces(logits, labels.flip(0)),
        "one logprob a label is wanted": lambda logits, labels: _in_pieces(logits, labels)[:, None],
    },
    judge=_judge_peak,
)  # fmt: skip
