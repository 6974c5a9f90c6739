"""What `profile.algorithm` makes of a step: rewards to advantages, a batch to updates, logprobs to a loss.

Everything that a recipe switches passes through these functions, with one rank or several:
    rewards -> step_advantages -> collate -> learn(engine, batch, settings)
where engine is a `MegatronTrainer` or a `GrpoCluster`, and learn is rated, mini_batches, engine.update.
`policy_loss` is what each update descends.

The mismatch needs no pass of its own: in a step's first update the trainer's weights are still those that the
rollout had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from helpers.advantages import group_advantages
from helpers.corrections import (
    Correction,
    combine,
    corrected_batch,
    masked_importance_sampling,
    truncated_importance_sampling,
    trust_region_mask,
)
from helpers.kl import LOG_RATIO_LIMIT, kl_estimate, straight_through_kl
from helpers.losses import cispo_loss, clipped_policy_loss, reduce_tokens
from helpers.profiles import AlgorithmSettings, Profile
from helpers.records import Batch, Episode, LossOutput
from helpers.shaping import overlong_penalty

Loss = Callable[[Tensor, Batch], LossOutput]
MISMATCH = ("generation_kl", "token_multiplier", "logprob_gap", "logprob_gap_max")


class Engine(Protocol):
    """What a step asks of a trainer: helpers.trainer.MegatronTrainer or helpers.cluster.GrpoCluster."""

    def update(self, batch: Batch) -> dict[str, float]: ...
    def logprobs(self, batch: Batch) -> Tensor: ...
    def reference_logprobs(self, batch: Batch) -> Tensor: ...


# --- before the batch ---------------------------------------------------------------------------------------
def step_advantages(episodes: Sequence[Episode], rewards: Sequence[float], settings: Profile) -> Tensor:
    """Advantage [B] float32 of each episode, after the length penalty where the recipe has one.

    rewards: one an episode, as the verifier gave them.

    >>> from helpers.profiles import load_profile
    >>> long, short = (Episode((1,), (2,) * n, (-1.0,) * n, "stop", 0) for n in (24, 4))
    >>> step_advantages([long, short], [1.0, 1.0], load_profile("cpu"))
    tensor([0., 0.])
    >>> step_advantages([long, short], [1.0, 1.0], load_profile("cpu", algorithm="dapo")).sign()
    tensor([-1.,  1.])
    """
    groups = torch.tensor([e.group for e in episodes])
    return group_advantages(shaped_rewards(episodes, rewards, settings), groups, settings.algorithm.advantage)


def shaped_rewards(episodes: Sequence[Episode], rewards: Sequence[float], settings: Profile) -> Tensor:
    """Rewards [B] float32, less DAPO's penalty on the end of the token budget where the recipe has one."""
    a, budget = settings.algorithm, settings.sampling.max_new_tokens
    shaped = torch.tensor(rewards, dtype=torch.float32)
    if not a.overlong_buffer:
        return shaped
    lengths = torch.tensor([len(e.completion_ids) for e in episodes])
    buffer = max(round(a.overlong_buffer * budget), 1)
    return shaped + a.overlong_scale * overlong_penalty(lengths, budget, buffer)


# --- from the batch to updates ------------------------------------------------------------------------------
def learn(engine: Engine, batch: Batch, settings: Profile) -> dict[str, float]:
    """The optimizer steps of one GRPO step; returns one row of statistics (`summarised`)."""
    parts = mini_batches(rated(engine, batch, settings), settings)
    return summarised([engine.update(part) for part in parts])


def rated(engine: Engine, batch: Batch, settings: Profile) -> Batch:
    """The batch with the logprobs that the recipe asks for beside the rollout's, each a forward pass over it.

    old_logprobs: of the trainer as it is now, for old_logprobs = "trainer".
    reference_logprobs: of the start checkpoint, for kl_coefficient > 0.
    """
    a = settings.algorithm
    if a.old_logprobs == "trainer":
        batch = replace(batch, old_logprobs=_of_all(engine.logprobs(batch), batch))
    if a.kl_coefficient:
        batch = replace(batch, reference_logprobs=_of_all(engine.reference_logprobs(batch), batch))
    return batch


def mini_batches(batch: Batch, settings: Profile) -> list[Batch]:
    """Consecutive equal parts, one an update. Raises ValueError when the episodes do not divide.

    Groups stay whole where they divide too; advantages are taken before, so nothing depends on it.
    """
    count, rows = settings.algorithm.mini_batches, batch.size[0]
    if rows % count:
        raise ValueError(
            f"{rows} episodes do not divide into {count} mini-batches; "
            "change algorithm.mini_batches or batch.prompts"
        )
    size = rows // count
    return [batch.rows(slice(first, first + size)) for first in range(0, rows, size)]


def summarised(stats: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row for the updates of a step.

    The mismatch (`MISMATCH`) is the first update's, seconds are added, of a name that ends in _max the
    largest counts, the learning rate is the last one's, and everything else is the mean over the updates.

    >>> summarised([{"loss": 1.0, "seconds": 2.0}, {"loss": 3.0, "seconds": 1.0}])
    {'loss': 2.0, 'seconds': 3.0}
    """
    return {name: _summary(name, [row[name] for row in stats]) for name in stats[0]}


def _summary(name: str, values: list[float]) -> float:
    if name in MISMATCH:
        return values[0]
    if name == "learning_rate":
        return values[-1]
    if name.endswith("_max"):
        return max(values)
    return sum(values) / (1 if name == "seconds" else len(values))


def _of_all(logprobs: Tensor | None, batch: Batch) -> Tensor:
    """logprobs if they are those of the whole batch; one rank of several has only its own rows."""
    if logprobs is None or logprobs.shape != batch.loss_mask.shape:
        raise ValueError(
            f"the engine rated {'no' if logprobs is None else len(logprobs)} of {batch.size[0]} episodes: "
            "with several ranks, rate a batch through GrpoCluster, which gathers the ranks' shares"
        )
    return logprobs


# --- from logprobs to a loss --------------------------------------------------------------------------------
def policy_loss(settings: Profile) -> Loss:
    """The loss that settings.algorithm describes, of (logprobs [B, S] with gradient, batch)."""
    a = settings.algorithm
    constant = settings.sampling.max_new_tokens if a.normaliser == "constant" else None
    return partial(recipe_loss, algorithm=a, constant=constant)


def recipe_loss(
    logprobs: Tensor, batch: Batch, algorithm: AlgorithmSettings, constant: float | None = None
) -> LossOutput:
    """Surrogate with the recipe's old policy and correction, and its KL term.

    logprobs: [B, S], the trainer's log-probability of batch.labels, with gradient.
    batch: as `rated` left it.  constant: tokens an episode for normaliser = "constant".
        total = surrogate(logprobs, old, weight * advantage) + kl_coefficient * KL(policy || start)
    with one normaliser for both.
    Metrics, each (sum, count): those of `clipped_policy_loss`, but logprob_gap is always that to the rollout;
    generation_kl (k3 of KL(rollout || trainer), nats) and token_multiplier (mean exp |trainer - rollout|),
    NeMo-RL's two gauges of the mismatch; with a correction kept_share (tokens with a weight above 0),
    correction_mean and correction_max; with a KL term reference_kl (k3, nats).
    Raises ValueError when the batch lacks logprobs that the recipe needs.
    """
    old, weights = _old_policy(logprobs, batch, algorithm), None
    if algorithm.correction != "none" or algorithm.trust_region != "none":
        present = logprobs if algorithm.old_logprobs == "rollout" else old
        weights = correction_of(present, batch, algorithm)
    out = _surrogate(logprobs, _with_old_policy(batch, old, weights), algorithm, constant)
    metrics = out.metrics | _mismatch(logprobs.detach(), batch) | _kept(weights, batch.loss_mask)
    if not algorithm.kl_coefficient:
        return replace(out, metrics=metrics)
    penalty, value = _penalty(logprobs, batch, algorithm, constant)
    total = out.total + algorithm.kl_coefficient * penalty
    return LossOutput(total, out.normaliser, metrics | {"reference_kl": value})


def correction_of(trainer_logprobs: Tensor, batch: Batch, algorithm: AlgorithmSettings) -> Correction:
    """The recipe's weights for the mismatch between trainer_logprobs [B, S] and batch.rollout_logprobs.

    Raises ValueError when the recipe corrects nothing.
    """
    a, three = algorithm, (trainer_logprobs, batch.rollout_logprobs, batch.loss_mask)
    made = []
    if a.trust_region != "none":
        made.append(trust_region_mask(*three, bound=a.trust_region_bound, rule=a.trust_region))
    if a.correction == "tis":
        made.append(truncated_importance_sampling(*three, cap=a.correction_cap, level=a.correction_level))
    if a.correction == "mis":
        low, high = a.correction_floor, a.correction_cap
        made.append(masked_importance_sampling(*three, low=low, high=high, level=a.correction_level))
    return made[0] if len(made) == 1 else combine(batch.loss_mask, *made)


def _old_policy(logprobs: Tensor, batch: Batch, algorithm: AlgorithmSettings) -> Tensor:
    if algorithm.old_logprobs == "current":
        return logprobs.detach()
    if algorithm.old_logprobs == "rollout":
        return batch.rollout_logprobs
    return _rated(batch.old_logprobs, "old_logprobs")


def _rated(logprobs: Tensor | None, name: str) -> Tensor:
    if logprobs is None:
        raise ValueError(
            f"the recipe needs batch.{name}, which nobody computed; call helpers.objective.learn, "
            "or rated before update"
        )
    return logprobs


def _with_old_policy(batch: Batch, old: Tensor, weights: Correction | None) -> Batch:
    """The batch as the surrogate reads it: `old` where the rollout's logprobs were, weighted advantages."""
    if weights is not None:
        return corrected_batch(batch, old, weights)
    return batch if old is batch.rollout_logprobs else replace(batch, rollout_logprobs=old)


def _surrogate(logprobs: Tensor, batch: Batch, a: AlgorithmSettings, constant: float | None) -> LossOutput:
    shared = dict(clip_low=a.clip_low, clip_high=a.clip_high, normaliser=a.normaliser, constant=constant)
    if a.loss == "cispo":
        return cispo_loss(logprobs, batch, **shared)
    return clipped_policy_loss(logprobs, batch, ratio=a.ratio, dual_clip=a.dual_clip, **shared)


def _penalty(
    logprobs: Tensor, batch: Batch, a: AlgorithmSettings, constant: float | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The summed KL term with gradient, and k3's (sum, count) for the record."""
    mask = batch.loss_mask
    reference = _rated(batch.reference_logprobs, "reference_logprobs")
    policy, reference = (x.masked_fill(mask == 0, 0.0) for x in (logprobs, reference))
    estimate = straight_through_kl if a.kl_kind.endswith("+") else kl_estimate
    per_token = estimate(policy, reference, a.kl_kind.rstrip("+"))
    penalty, _ = reduce_tokens(per_token, mask, a.normaliser, constant)
    value = kl_estimate(policy.detach(), reference, "k3").sum()
    return penalty, (value, mask.sum())


def _mismatch(logprobs: Tensor, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """What helpers.corrections.mismatch averages, as sums that micro-batches and ranks can add."""
    mask = batch.loss_mask
    current, rollout = (x.masked_fill(mask == 0, 0.0) for x in (logprobs, batch.rollout_logprobs))
    gap = (current - rollout).abs()
    multiplier = gap.clamp(max=LOG_RATIO_LIMIT).exp().masked_fill(mask == 0, 0.0)
    sums = {
        "generation_kl": kl_estimate(rollout, current, "k3").sum(),
        "token_multiplier": multiplier.sum(),
        "logprob_gap": gap.sum(),
    }
    return {name: (total, mask.sum()) for name, total in sums.items()}


def _kept(correction: Correction | None, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    if correction is None:
        return {}
    weights, tokens = correction.weights, mask.sum()
    return {
        "kept_share": ((weights > 0).sum(), tokens),
        "correction_mean": (weights.sum(), tokens),
        "correction_max": (weights.amax(), tokens.new_ones(())),
    }
