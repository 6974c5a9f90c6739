"""The records that travel through one GRPO step: episodes, a batch, a loss.

They are frozen so that a stage can only hand on a new record, never change one that another stage still holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the records are read by code that never needs torch (runner, report)
    from torch import Tensor


@dataclass(frozen=True)
class Episode:
    """One sampled answer.

    prompt_ids, completion_ids: token ids; the completion includes its end token when it has one.
    logprobs: log-probability of each completion token under the policy that sampled it, at the sampling
        temperature (natural log; one a completion token).
    finish_reason: "stop" (end token), "length" (token budget used up) or "abort".
    group: index of the prompt within the step; episodes of one group share a prompt.
    weight_version: the rollout engine's label of the weights in use when the episode finished.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    group: int
    weight_version: str = ""

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"an episode has {len(self.completion_ids)} completion tokens and {len(self.logprobs)} logprobs; "
                "ask the rollout engine for one logprob a token (return_logprob=True)"
            )


@dataclass(frozen=True)
class Batch:
    """Episodes as right-padded tensors, all [B, S] in Megatron's convention: position t predicts labels[t] = tokens[t+1].

    tokens, labels, position_ids: int64.  loss_mask: float32, 1 where labels[t] is a completion token.
    rollout_logprobs: float32, the sampler's logprob of labels[t], 0 where masked.
    advantages: float32, the episode's advantage at each completion position, 0 where masked.
    group: int64 [B].
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    group: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """(B, S)"""
        return tuple(self.tokens.shape)

    def rows(self, index) -> Batch:
        """The rows that `index` (slice or int64 tensor) picks: a micro-batch or a rank's share."""
        return Batch(**{f.name: getattr(self, f.name)[index] for f in fields(self)})


@dataclass(frozen=True)
class LossOutput:
    """A loss as a sum and what divides it, so that micro-batches and ranks can be added before the division.

    total: [] summed loss, carries the gradient.  normaliser: [] tokens, sequences or a constant.
    metrics: name -> (sum, count), detached; the mean is sum / count over the whole batch.
    Source: Megatron-Core's `calculate_per_token_loss` (megatron/core/pipeline_parallel/schedules.py).
    """

    total: Tensor
    normaliser: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def loss(self) -> Tensor:
        """[] total / normaliser"""
        return self.total / self.normaliser.clamp(min=1)
