"""The losses of the series as small pure functions: clipped policy loss and cross-entropy.

A loss is returned as a sum and its normaliser (`LossOutput`), never as a mean: micro-batches
and data-parallel ranks add both and divide once, so that how a batch is cut up cannot change
its gradient (Megatron-Core's `calculate_per_token_loss`).

| name | here |
|---|---|
| PPO, GRPO (1707.06347, 2402.03300) | ratio="token", clip_low = clip_high = 0.2 |
| DAPO (2503.14476) | clip_high=0.28, normaliser="token" |
| Dr. GRPO (2503.20783) | normaliser="constant", advantages of kind "mean" |
| GSPO (2507.18071) | ratio="sequence", normaliser="sequence", clips of a few 1e-4 |
| CISPO (2506.13585) | cispo_loss |
| dual clip (1912.09729) | dual_clip=3.0 (the paper) or 10.0 (verl's gpt-oss recipe) |
"""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.kl import LOG_RATIO_LIMIT, kl_estimate
from helpers.records import Batch, LossOutput

RATIOS = ("token", "sequence")
NORMALISERS = ("token", "sequence", "constant")


def clipped_policy_loss(
    logprobs: Tensor,
    batch: Batch,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio: str = "token",
    dual_clip: float | None = None,
    normaliser: str = "token",
    constant: float | None = None,
) -> LossOutput:
    """The negated clipped objective, summed, with what it must be divided by.

    logprobs: [B, S], the trainer's log-probability of batch.labels, with gradient.
    batch: advantages, loss_mask and rollout_logprobs are read; the latter are the old logprobs.
    clip_low, clip_high: the ratio's range is [1 - clip_low, 1 + clip_high].
    ratio: "token" (PPO, GRPO, DAPO) or "sequence" (GSPO).
    dual_clip: bound on the ratio where the advantage is negative; None for none.
    normaliser: "token"     total = -sum of tokens            divided by masked tokens
                "sequence"  total = -sum of episodes' means   divided by episodes with a token
                "constant"  total = -sum of tokens            divided by B * constant
    constant: tokens an episode for normaliser="constant", e.g. the token budget of an answer.
    Metrics, each (sum, count) over masked tokens: clip_fraction (tokens whose gradient the
    clips removed), approx_kl (k3 of KL(rollout || trainer), nats), ratio_mean, logprob_gap
    (mean absolute difference to the rollout, nats).
    What lies where the mask is 0 never reaches the loss, a metric or the gradient.
    Raises ValueError: unknown names, a bad clip, wrong shape, a constant missing or not used.

    Three tokens, all twice as likely as at the rollout: 2 is above 1 + 0.28, so with a positive
    advantage each counts 1.28, and the clip leaves no gradient.
    >>> one = torch.ones(1, 3)
    >>> ids = torch.zeros(1, 3, dtype=torch.int64)
    >>> old = torch.tensor([[0.25, 0.4, 0.5]]).log()
    >>> new = torch.tensor([[0.5, 0.8, 1.0]]).log().requires_grad_()
    >>> batch = Batch(ids, ids, ids, one, old, one, torch.tensor([0]))
    >>> output = clipped_policy_loss(new, batch)
    >>> round(output.total.item(), 4), output.normaliser.item(), round(output.loss.item(), 4)
    (-3.84, 3.0, -1.28)
    >>> torch.autograd.grad(output.total, new)[0]
    tensor([[0., 0., 0.]])
    """
    _check_options(clip_low, clip_high, ratio, dual_clip, normaliser, constant)
    _check_shape(logprobs, batch)
    mask = batch.loss_mask
    current, old, advantages = (
        _fill_masked(x, mask) for x in (logprobs, batch.rollout_logprobs, batch.advantages)
    )
    log_ratio = _LOG_RATIOS[ratio](current, old, mask)
    weight = log_ratio.exp()
    objective = clipped_objective(weight, advantages, clip_low, clip_high, dual_clip)
    total, divisor = reduce_tokens(-objective, mask, normaliser, constant)
    clipped = clipped_tokens(weight.detach(), advantages, clip_low, clip_high, dual_clip)
    metrics = _policy_metrics(current.detach(), old, weight.detach(), clipped, mask)
    return LossOutput(total, divisor, metrics)


def cispo_loss(
    logprobs: Tensor,
    batch: Batch,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    normaliser: str = "token",
    constant: float | None = None,
) -> LossOutput:
    """CISPO: the policy gradient with a clipped importance weight; no token stops learning.

    logprobs, batch: as in `clipped_policy_loss`.
    clip_low, clip_high: the weight's range is [1 - clip_low, 1 + clip_high]; clip_low = 1 is no
        lower limit, as in the paper, and clip_high = 4 is ScaleRL's largest weight of 5.
    normaliser, constant: as in `clipped_policy_loss`.
        total = -sum_t sg[clip(pi / pi_old)] * A * log pi          sg = no gradient
    The gradient of token t is -(clipped weight) * A, also where the weight is clipped: PPO's clip
    drops such tokens (often the rare ones at which an answer turns), this one only bounds them.
    The total's value means nothing by itself (it is not the objective); only its gradient does.
    Metrics as in `clipped_policy_loss`, but clip_fraction counts weights at a limit: their tokens
    keep their gradient.
    Sources: arXiv 2506.13585 (MiniMax-M1); 2510.13786 (ScaleRL); TRL's loss_type "cispo".
    Raises ValueError: as `clipped_policy_loss`.

    Three tokens, ratios 0.5, 1 and 8, advantage 1: the 8 is cut to 5 and still learns.
    >>> one = torch.ones(1, 3)
    >>> ids = torch.zeros(1, 3, dtype=torch.int64)
    >>> old = torch.tensor([[0.5, 0.5, 0.125]]).log()
    >>> new = torch.tensor([[0.25, 0.5, 1.0]]).log().requires_grad_()
    >>> output = cispo_loss(new, Batch(ids, ids, ids, one, old, one, torch.tensor([0])))
    >>> torch.autograd.grad(output.total, new)[0]
    tensor([[-0.5000, -1.0000, -5.0000]])
    >>> round(output.total.item(), 4)  # 0.5 log 4 + log 2 + 5 log 1
    1.3863
    """
    _check_options(clip_low, clip_high, "token", None, normaliser, constant)
    _check_shape(logprobs, batch)
    mask = batch.loss_mask
    current, old, advantages = (
        _fill_masked(x, mask) for x in (logprobs, batch.rollout_logprobs, batch.advantages)
    )
    log_ratio = token_log_ratio(current.detach(), old, mask)
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    total, divisor = reduce_tokens(-weight * advantages * current, mask, normaliser, constant)
    metrics = _policy_metrics(current.detach(), old, ratio, weight != ratio, mask)
    return LossOutput(total, divisor, metrics)


def supervised_loss(logprobs: Tensor, batch: Batch) -> LossOutput:
    """Cross-entropy on the completion tokens, token mean, for the warm start.

    logprobs: [B, S] with gradient.  batch: loss_mask is read.
    Metric: cross_entropy (sum, count), nats a token.

    Three tokens of probability 1/2, 1/4 and 1/8: (1 + 2 + 3) ln 2 over 3 tokens.
    >>> one = torch.ones(1, 3)
    >>> ids = torch.zeros(1, 3, dtype=torch.int64)
    >>> batch = Batch(ids, ids, ids, one, one, one, torch.tensor([0]))
    >>> output = supervised_loss(torch.tensor([[0.5, 0.25, 0.125]]).log(), batch)
    >>> round(output.total.item(), 4), round(output.loss.item(), 4)
    (4.1589, 1.3863)
    """
    _check_shape(logprobs, batch)
    current = _fill_masked(logprobs, batch.loss_mask)
    total, tokens = reduce_tokens(-current, batch.loss_mask, "token")
    return LossOutput(total, tokens, {"cross_entropy": (total.detach(), tokens.detach())})


def token_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log(pi / pi_old) of each token, 0 where masked, held within +-20.

    All [B, S]; returns [B, S]. Beyond 20 the ratio is a constant and has no gradient.
    Source: arXiv 1707.06347; the limit as in verl's compute_policy_loss_vanilla.

    >>> old, new = torch.tensor([[0.5, 0.25, 0.5]]).log(), torch.tensor([[0.5, 0.5, 0.5]]).log()
    >>> token_log_ratio(new, old, torch.tensor([[1.0, 1.0, 0.0]])).exp()
    tensor([[1., 2., 1.]])
    """
    difference = _fill_masked(logprobs, mask) - _fill_masked(old_logprobs, mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """GSPO's length-normalised log ratio of each episode, given to each of its tokens.

    All [B, S]; returns [B, S], 0 where masked:
        log s_i = (1 / |y_i|) sum_t log(pi / pi_old)         the geometric mean of the ratios
        log s_it = sg[log s_i] + logpi_t - sg[logpi_t]       sg = no gradient
    The value is log s_i at every token; the gradient of token t is its own. Averaged over the
    tokens this is the gradient of s_i itself.
    Sources: arXiv 2507.18071, section 4.3 (GSPO-token); verl's compute_policy_loss_gspo.

    Ratios 1, 2 and 4 of three tokens: geometric mean 2.
    >>> old, new = torch.tensor([[0.2, 0.2, 0.2]]).log(), torch.tensor([[0.2, 0.4, 0.8]]).log()
    >>> sequence_log_ratio(new, old, torch.ones(1, 3)).exp()
    tensor([[2., 2., 2.]])
    """
    current, old = _fill_masked(logprobs, mask), _fill_masked(old_logprobs, mask)
    length = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = (current - old).detach().sum(-1, keepdim=True) / length
    per_token = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + current - current.detach()
    return _fill_masked(per_token, mask)


def clipped_objective(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """What each token adds to the objective (to be maximised).

    ratio, advantages: same shape; returns that shape.
        min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)            PPO
        and, where A < 0, at least dual_clip * A                                dual clip
    Sources: arXiv 1707.06347 eq. 7; 2503.14476 eq. 10 (two limits); 1912.09729 eq. 5.

    Advantage 1 gains no more above 1.28; advantage -1 loses nothing more below 0.8.
    >>> ratio = torch.tensor([0.5, 1.0, 2.0])
    >>> clipped_objective(ratio, torch.ones(3))
    tensor([0.5000, 1.0000, 1.2800])
    >>> clipped_objective(ratio, -torch.ones(3))
    tensor([-0.8000, -1.0000, -2.0000])
    >>> clipped_objective(ratio, -torch.ones(3), dual_clip=1.5)
    tensor([-0.8000, -1.0000, -1.5000])
    """
    held = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, held * advantages)
    if dual_clip is None:
        return objective
    floor = torch.maximum(objective, dual_clip * advantages)
    return torch.where(advantages < 0, floor, objective)


def clipped_tokens(
    ratio: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Tensor:
    """Bool of the same shape: true where a clip has removed the token's gradient.

    >>> clipped_tokens(torch.tensor([0.5, 1.0, 2.0]), torch.ones(3))
    tensor([False, False,  True])
    >>> clipped_tokens(torch.tensor([0.5, 1.0, 2.0]), -torch.ones(3))
    tensor([ True, False, False])
    """
    too_likely = (advantages > 0) & (ratio > 1 + clip_high)
    too_rare = (advantages < 0) & (ratio < 1 - clip_low)
    if dual_clip is None:
        return too_likely | too_rare
    return too_likely | too_rare | ((advantages < 0) & (ratio > dual_clip))


def reduce_tokens(
    values: Tensor, mask: Tensor, normaliser: str = "token", constant: float | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of per-token values and what to divide it by; both [] float32.

    values, mask: [B, S].  normaliser, constant: as in `clipped_policy_loss`.
    Sources: token mean DAPO (2503.14476), episodes' means GRPO (2402.03300), constant
    Dr. GRPO (2503.20783). An episode's tokens must be on one rank for "sequence".

    Three tokens in two episodes: an answer of two tokens and one of one.
    >>> values = torch.tensor([[1.0, 2.0], [6.0, 0.0]])
    >>> mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    >>> reduce_tokens(values, mask, "token")  # 9 / 3 tokens
    (tensor(9.), tensor(3.))
    >>> reduce_tokens(values, mask, "sequence")  # (1.5 + 6) / 2 episodes
    (tensor(7.5000), tensor(2.))
    >>> reduce_tokens(values, mask, "constant", constant=4)  # 9 / (2 * 4)
    (tensor(9.), tensor(8.))
    """
    kept = _fill_masked(values, mask)
    if normaliser == "sequence":
        length = mask.sum(-1)
        return (kept.sum(-1) / length.clamp(min=1)).sum(), (length > 0).sum().float()
    if normaliser == "constant":
        return kept.sum(), mask.new_tensor(len(mask) * constant)
    return kept.sum(), mask.sum()


_LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}


def _fill_masked(values: Tensor, mask: Tensor) -> Tensor:
    """values where the mask is 1, else 0, in value and in gradient, whatever lies there."""
    return values.masked_fill(mask == 0, 0.0)


def _policy_metrics(
    logprobs: Tensor, old_logprobs: Tensor, ratio: Tensor, clipped: Tensor, mask: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (sum, count) over masked tokens; all inputs [B, S] and finite where masked."""
    tokens = mask.sum()
    # The tokens are the rollout's, so the estimate is of KL(rollout || trainer).
    kl = kl_estimate(old_logprobs, logprobs, "k3")
    per_token = {
        "clip_fraction": clipped.float(),
        "approx_kl": kl,
        "ratio_mean": ratio,
        "logprob_gap": (logprobs - old_logprobs).abs(),
    }
    return {name: (_fill_masked(v, mask).sum(), tokens) for name, v in per_token.items()}


def _check_options(
    clip_low: float,
    clip_high: float,
    ratio: str,
    dual_clip: float | None,
    normaliser: str,
    constant: float | None,
) -> None:
    if ratio not in RATIOS:
        raise ValueError(f"unknown ratio {ratio!r}; use one of {', '.join(RATIOS)}")
    if normaliser not in NORMALISERS:
        raise ValueError(f"unknown normaliser {normaliser!r}; use one of {', '.join(NORMALISERS)}")
    _check_clips(clip_low, clip_high, dual_clip)
    if normaliser == "constant" and not (constant and constant > 0):
        raise ValueError(
            f"normaliser='constant' divides by episodes * constant, and constant is {constant}; "
            "pass the token budget of an answer, e.g. constant=256"
        )
    if normaliser != "constant" and constant is not None:
        raise ValueError(
            f"constant={constant} has no effect with normaliser={normaliser!r}; "
            "drop it or use normaliser='constant'"
        )


def _check_clips(clip_low: float, clip_high: float, dual_clip: float | None) -> None:
    if not 0 <= clip_low <= 1 or not clip_high >= 0:
        raise ValueError(
            f"clip_low={clip_low} and clip_high={clip_high} give no range around a ratio of 1; "
            "use 0 <= clip_low <= 1 and clip_high >= 0, e.g. 0.2 and 0.28"
        )
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(
            f"dual_clip={dual_clip} would stop unchanged tokens (ratio 1) from learning; "
            "use a value above 1, e.g. 3 or 10, or None to switch it off"
        )


def _check_shape(logprobs: Tensor, batch: Batch) -> None:
    if logprobs.shape != batch.loss_mask.shape:
        raise ValueError(
            f"logprobs have shape {tuple(logprobs.shape)} and the batch "
            f"{tuple(batch.loss_mask.shape)}; pass the logprob of batch.labels at every position"
        )
