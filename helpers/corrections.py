"""Corrections for rollout tokens that the trainer rates differently: the trainer-rollout mismatch.

Rollout engine and trainer hold the same weights and still give the same token slightly different
logprobs (other kernels, other routing of experts). The samples are then off-policy, and
w = pi_trainer / pi_rollout puts their expectation right, at the price of a spread that has to
be bounded. Three ways to bound it, all `Correction` records:

| name | here | token or sequence outside the bound |
|---|---|---|
| TIS (off-policy-rl notes; OpenReview 8MHqvb4lK9) | truncated_importance_sampling | weight = cap |
| MIS (rl-collapse notes) | masked_importance_sampling | weight = 0 |
| trust-region masking (2512.23075) | trust_region_mask | weight = 0, inside exactly 1 |

`mismatch` says how far apart the two are, `corrected_batch` applies a correction.
Shapes are the batch's [B, S]. Weights carry no gradient. What lies where the mask is 0 (NaN and
infinities included) reaches no result, and an episode without a trained token gives 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from helpers.kl import LOG_RATIO_LIMIT, kl_estimate
from helpers.records import Batch

LEVELS = ("token", "sequence", "geometric")
RULES = ("token", "any_token", "sequence_kl")


@dataclass(frozen=True)
class Correction:
    """Weights for the tokens of a batch, and what they cost.

    weights: [B, S] float32, detached, 0 where masked or dropped.
    kept_share: [] share of the trained tokens whose weight is above 0, 0 to 1.
    largest_weight: [] the largest weight.
    effective_sample_size: [] tokens, (sum w)^2 / sum w^2 over trained tokens (Kish): the number of
        equally weighted tokens with the same spread. All weights equal: the number of kept tokens.
    The last three are float32 and 0 where the batch has no trained token.
    """

    weights: Tensor
    kept_share: Tensor
    largest_weight: Tensor
    effective_sample_size: Tensor


@dataclass(frozen=True)
class Mismatch:
    """How far the trainer is from the rollout, means over trained tokens; all [] float32.

    generation_kl_k1: k1 of KL(rollout || trainer), nats; can be negative.
    generation_kl_k3: k3 of the same, nats; NeMo-RL's gen_kl_error, which its tests hold below 0.002.
    token_multiplier: mean of exp(|trainer - rollout|), 1 where both agree; NeMo-RL's
        token_mult_prob_error, healthy below 1.05.
    tokens: trained tokens, the number by which to weight when several batches are averaged.
    """

    generation_kl_k1: Tensor
    generation_kl_k3: Tensor
    token_multiplier: Tensor
    tokens: Tensor


def importance_ratios(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, level: str = "token"
) -> Tensor:
    """pi_trainer / pi_rollout, unbounded but for float32's sake, without gradient.

    trainer_logprobs, rollout_logprobs: [B, S], logprobs of the same tokens at the same temperature.
    mask: [B, S], the loss mask.
    level: "token"      exp(d_t), with d = trainer - rollout
           "sequence"   exp(sum_t d_t), at each token of the episode: the exact ratio of the answers
           "geometric"  exp(mean_t d_t), at each token: per-token size, whatever the length
    Returns [B, S] float32, 0 where masked. The exponent is held within +-20.
    Sources: the rl-collapse notes; verl's compute_rollout_correction_weights.
    Raises ValueError: unknown level, different shapes, a logprob under the mask that is not finite.

    Three tokens; the trainer finds them half as likely, equally likely and 3 times as likely.
    >>> rollout = torch.tensor([[0.25, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.375]]).log()
    >>> importance_ratios(trainer, rollout, torch.ones(1, 3))
    tensor([[0.5000, 1.0000, 3.0000]])
    >>> importance_ratios(trainer, rollout, torch.ones(1, 3), "sequence")  # 0.5 * 1 * 3
    tensor([[1.5000, 1.5000, 1.5000]])
    >>> importance_ratios(trainer, rollout, torch.ones(1, 3), "geometric")  # its cube root
    tensor([[1.1447, 1.1447, 1.1447]])
    """
    _check_name("level", level, LEVELS)
    log_ratio = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    if level != "token":
        length = (mask != 0).sum(-1, keepdim=True).clamp(min=1)
        total = log_ratio.sum(-1, keepdim=True)
        log_ratio = (total / length if level == "geometric" else total).expand_as(log_ratio)
    held = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return held.exp().masked_fill(mask == 0, 0.0).float()


def truncated_importance_sampling(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    cap: float = 2.0,
    level: str = "token",
) -> Correction:
    """TIS: weights min(pi_trainer / pi_rollout, cap). Every token still counts.

    trainer_logprobs, rollout_logprobs, mask: [B, S].  level: as in `importance_ratios`.
    cap: the largest weight, above 0; at least 1, or tokens on which both agree are scaled down too.
    Sources: "Your efficient RL framework secretly brings you off-policy RL training" (2025, the
    off-policy-rl notes; OpenReview 8MHqvb4lK9), cap 2; sequence level: the rl-collapse notes.
    Raises ValueError: a cap that is not above 0, and what `importance_ratios` raises.

    Ratios 0.5, 1 and 3: the 3 is cut to 2. (0.5 + 1 + 2)^2 / (0.25 + 1 + 4) = 2.33 tokens.
    >>> rollout = torch.tensor([[0.25, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.375]]).log()
    >>> tis = truncated_importance_sampling(trainer, rollout, torch.ones(1, 3))
    >>> tis.weights
    tensor([[0.5000, 1.0000, 2.0000]])
    >>> round(tis.kept_share.item(), 4), round(tis.effective_sample_size.item(), 4)
    (1.0, 2.3333)
    """
    if not cap > 0:
        raise ValueError(f"cap={cap} leaves no weight above 0; use a cap of 1 or more, e.g. 2")
    ratios = importance_ratios(trainer_logprobs, rollout_logprobs, mask, level)
    return _correction(ratios.clamp(max=cap), mask)


def masked_importance_sampling(
    trainer_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    low: float = 0.5,
    high: float = 2.0,
    level: str = "token",
) -> Correction:
    """MIS: the importance ratio where it lies within [low, high], else 0.

    trainer_logprobs, rollout_logprobs, mask: [B, S].  level: as in `importance_ratios`; with
        "sequence" and "geometric" an episode is kept or dropped as a whole.
    low, high: the range of kept ratios, limits included. The ratio of a sequence grows with its
        length, a geometric mean stays near 1: give "geometric" a range far narrower than 0.5 to 2.
    TIS keeps tokens whose ratio is far off (often faults rather than information); MIS lets
    them teach nothing.
    Sources: "When speed kills stability" (2025, the rl-collapse notes); TRL's "token_mask" and
    "sequence_mask".
    Raises ValueError: low and high that are no range, and what `importance_ratios` raises.

    Ratios 0.5, 1 and 3: the 3 is dropped.
    >>> rollout = torch.tensor([[0.25, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.375]]).log()
    >>> mis = masked_importance_sampling(trainer, rollout, torch.ones(1, 3), low=0.4)
    >>> mis.weights
    tensor([[0.5000, 1.0000, 0.0000]])
    >>> round(mis.kept_share.item(), 4), mis.largest_weight.item()
    (0.6667, 1.0)
    """
    if not 0 <= low <= high or not high > 0:
        raise ValueError(
            f"low={low} and high={high} are no range of ratios; use 0 <= low <= high, e.g. 0.5 and 2"
        )
    ratios = importance_ratios(trainer_logprobs, rollout_logprobs, mask, level)
    return _correction(ratios.masked_fill((ratios < low) | (ratios > high), 0.0), mask)


def trust_region_mask(
    trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, bound: float, rule: str = "token"
) -> Correction:
    """Weights 1 inside the trust region and 0 outside; nothing is re-weighted.

    trainer_logprobs, rollout_logprobs, mask: [B, S].
    bound: nats; a token or an episode exactly at the bound is kept. With d = trainer - rollout:
    rule: "token"        drops each token with |d| > bound
          "any_token"    drops the whole episode when one of its tokens has |d| > bound
          "sequence_kl"  drops the whole episode when the mean k3 of KL(rollout || trainer) over its
                         tokens is above the bound
    Whole episodes, because each token's context holds all tokens before it: after one token outside
    the region, the bound on the rest no longer holds (arXiv 2512.23075).
    To re-weight what is kept, `combine` the mask with a truncated_importance_sampling.
    Sources: arXiv 2512.23075; verl's rollout rejection sampling.
    Raises ValueError: unknown rule, a bound below 0, and what `importance_ratios` raises.

    Three tokens, |d| = 0.69, 0 and 1.10: one is outside a bound of 1 nat. With w = exp(d), k3 is
    w - 1 - log w: 0.19, 0 and 0.90, on average 0.36, which is inside.
    >>> rollout = torch.tensor([[0.25, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.375]]).log()
    >>> trust_region_mask(trainer, rollout, torch.ones(1, 3), bound=1.0).weights
    tensor([[1., 1., 0.]])
    >>> trust_region_mask(trainer, rollout, torch.ones(1, 3), bound=1.0, rule="any_token").weights
    tensor([[0., 0., 0.]])
    >>> trust_region_mask(trainer, rollout, torch.ones(1, 3), bound=1.0, rule="sequence_kl").weights
    tensor([[1., 1., 1.]])
    """
    _check_name("rule", rule, RULES)
    if not bound >= 0:
        raise ValueError(f"bound={bound} keeps nothing; use a bound of 0 or more, in nats")
    log_ratio = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    size = log_ratio.abs()
    if rule == "any_token":
        size = size.amax(-1, keepdim=True)
    elif rule == "sequence_kl":
        length = (mask != 0).sum(-1, keepdim=True).clamp(min=1)
        size = _divergence(log_ratio, "k3").sum(-1, keepdim=True) / length
    return _correction(((size <= bound) & (mask != 0)).double(), mask)


def combine(mask: Tensor, *corrections: Correction) -> Correction:
    """The product of several corrections' weights, e.g. of a trust-region mask and TIS.

    mask: [B, S], the loss mask of which they were made.
    Raises ValueError: none given.

    Three tokens: the mask drops the first, TIS cuts the third.
    >>> rollout = torch.tensor([[0.5, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.25]]).log()
    >>> region = trust_region_mask(trainer, rollout, torch.ones(1, 3), bound=1.0)
    >>> tis = truncated_importance_sampling(trainer, rollout, torch.ones(1, 3), cap=1.5)
    >>> combine(torch.ones(1, 3), region, tis).weights
    tensor([[0.0000, 1.0000, 1.5000]])
    """
    if not corrections:
        raise ValueError("nothing to combine; pass at least one correction after the mask")
    return _correction(torch.stack([c.weights for c in corrections]).prod(0), mask)


def corrected_batch(batch: Batch, trainer_logprobs: Tensor, correction: Correction) -> Batch:
    """The batch whose policy loss is corrected: trainer logprobs as the old policy, weighted advantages.

    batch: its rollout_logprobs and advantages are replaced.
    trainer_logprobs: [B, S], what the trainer gave the tokens before the step (detached here).
    correction: made of the same trainer_logprobs and of batch.rollout_logprobs.
    The clipped ratio then measures the update alone (current / trainer), the weight measures the
    mismatch alone (trainer / rollout). Left as it is, the ratio of `clipped_policy_loss` is
    current / rollout and holds the mismatch already: a weight on top would count it twice.
    A policy loss is linear in the advantage as long as its sign stays, so that a weight (never
    below 0) may be multiplied into the advantage. Dropped tokens still count in the normaliser.
    Source: decoupled PPO, arXiv 2110.00641.

    Ratios 0.5, 1 and 3 and a cap of 2 on an advantage of 3:
    >>> ids, one = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)
    >>> rollout = torch.tensor([[0.25, 0.25, 0.125]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.375]]).log()
    >>> batch = Batch(ids, ids, ids, one, rollout, 3 * one, torch.tensor([0]))
    >>> tis = truncated_importance_sampling(trainer, rollout, one)
    >>> corrected_batch(batch, trainer, tis).advantages
    tensor([[1.5000, 3.0000, 6.0000]])
    """
    _check_shapes(batch.loss_mask, trainer_logprobs=trainer_logprobs, weights=correction.weights)
    masked = batch.loss_mask == 0
    old = trainer_logprobs.detach().masked_fill(masked, 0.0)
    weighted = (batch.advantages * correction.weights).masked_fill(masked, 0.0)
    return replace(batch, rollout_logprobs=old, advantages=weighted)


def mismatch(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Mismatch:
    """The generation KL and the token probability multiplier of a batch.

    trainer_logprobs, rollout_logprobs, mask: [B, S].
    With d = rollout - trainer, means over trained tokens of
        k1 = d,   k3 = exp(-d) - 1 + d,   token multiplier = exp(|d|)
    Exponents are held within +-20.
    Source: NeMo-RL's ClippedPGLossFn (gen_kl_error, token_mult_prob_error).
    Raises ValueError: different shapes, a logprob under the mask that is not finite.

    Three tokens; the trainer finds them half as likely, equally likely and twice as likely:
    k1 cancels out, k3 is (0.1931 + 0 + 0.3069) / 3, the multiplier (2 + 1 + 2) / 3.
    >>> rollout = torch.tensor([[0.25, 0.25, 0.25]]).log()
    >>> trainer = torch.tensor([[0.125, 0.25, 0.5]]).log()
    >>> gap = mismatch(trainer, rollout, torch.ones(1, 3))
    >>> [round(x.item(), 4) + 0.0 for x in (gap.generation_kl_k1, gap.generation_kl_k3)]
    [0.0, 0.1667]
    >>> round(gap.token_multiplier.item(), 4), gap.tokens.item()
    (1.6667, 3.0)
    """
    log_ratio = _log_ratio(trainer_logprobs, rollout_logprobs, mask)
    trained = mask != 0
    multiplier = log_ratio.abs().clamp(max=LOG_RATIO_LIMIT).exp()
    k1, k3 = (_divergence(log_ratio, kind) for kind in ("k1", "k3"))
    tokens = trained.sum()
    means = ((x.masked_fill(~trained, 0.0).sum() / tokens.clamp(min=1)).float() for x in (k1, k3, multiplier))
    return Mismatch(*means, tokens.float())


def _log_ratio(trainer_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[B, S] float64 trainer - rollout without gradient, 0 where masked.

    float64: sums over thousands of tokens, and inputs that may be bfloat16.
    """
    _check_shapes(mask, trainer_logprobs=trainer_logprobs, rollout_logprobs=rollout_logprobs)
    _check_finite("trainer", trainer_logprobs, mask)
    _check_finite("rollout", rollout_logprobs, mask)
    difference = trainer_logprobs.detach().double() - rollout_logprobs.detach().double()
    return difference.masked_fill(mask == 0, 0.0)


def _divergence(log_ratio: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(rollout || trainer) from trainer - rollout; same shape."""
    return kl_estimate(torch.zeros_like(log_ratio), log_ratio, kind)


def _correction(weights: Tensor, mask: Tensor) -> Correction:
    """The record of weights [B, S] that are 0 where masked."""
    tokens, exact = (mask != 0).sum(), weights.double()
    kept = (exact > 0).sum() / tokens.clamp(min=1)
    squares = exact.square().sum()
    effective = exact.sum().square() / torch.where(squares > 0, squares, 1.0)
    return Correction(weights.float(), kept.float(), weights.amax().float(), effective.float())


def _check_name(what: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; use one of {', '.join(known)}")


def _check_shapes(mask: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != mask.shape or mask.ndim != 2 or mask.numel() == 0:
            raise ValueError(
                f"{name} have shape {tuple(tensor.shape)} and the mask {tuple(mask.shape)}; both must be "
                "[B, S] with at least one token: pass one value at every position of batch.labels"
            )


def _check_finite(who: str, logprobs: Tensor, mask: Tensor) -> None:
    bad = (~torch.isfinite(logprobs) & (mask != 0)).nonzero()
    if len(bad):
        row, position = bad[0].tolist()
        raise ValueError(
            f"the {who}'s logprob at row {row}, position {position} is {logprobs[row, position].item()} "
            "though the loss mask is 1 there; a mask that drops it would hide the fault, so find where "
            f"the {who} made it (wrong label, overflow in the logits)"
        )
