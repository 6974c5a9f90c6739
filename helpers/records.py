"""The records that travel through one GRPO step: episodes, a batch, a loss.

They are frozen so that a stage can only hand on a new record, never change one that another stage still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the records are read by code that never needs torch (runner, report)
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True)
class Episode:
    """One sampled answer.

    prompt_ids, completion_ids: token ids; the completion includes its end token when it has one.
    logprobs: log-probability of each completion token under the policy that sampled it, at the sampling
        temperature (natural log; one a completion token).
    finish_reason: "stop" (end token), "length" (token budget used up) or "abort".
    group: index of the prompt within the step; episodes of one group share a prompt.
    weight_versions: the rollout engine's label of the weights that sampled each completion token; () where nobody said.
    routed_experts: int16 [tokens - 1, layers, experts a token], where the rollout engine sent each token; None
        unless routing replay asked for it. Row i is the token at position i; the last one was never run.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    group: int
    weight_versions: tuple[str, ...] = ()
    # no part of ==: numpy's compares element by element
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"an episode has {len(self.completion_ids)} completion tokens and {len(self.logprobs)} logprobs; "
                "ask the rollout engine for one logprob a token (return_logprob=True)"
            )
        if self.weight_versions and len(self.weight_versions) != len(self.completion_ids):
            raise ValueError(
                f"an episode has {len(self.completion_ids)} completion tokens and {len(self.weight_versions)} weight "
                "versions; give one a token, or none"
            )
        tokens = len(self.prompt_ids) + len(self.completion_ids)
        if self.routed_experts is not None and len(self.routed_experts) != tokens - 1:
            raise ValueError(
                f"an episode of {tokens} tokens has {len(self.routed_experts)} rows of routed experts, and "
                f"{tokens - 1} tokens were run (the last one was only sampled); ask the rollout engine for the rows "
                "from the prompt's first token on"
            )

    @property
    def weight_version(self) -> str:
        """Label of the weights in use when the episode finished."""
        return self.weight_versions[-1] if self.weight_versions else ""

    @property
    def unfinished(self) -> bool:
        """Whether the rollout was stopped before it came to an end."""
        return self.finish_reason == "abort"


@dataclass(frozen=True)
class Batch:
    """Episodes as right-padded tensors, all [B, S] in Megatron's convention: position t predicts labels[t] = tokens[t+1].

    tokens, labels, position_ids: int64.  loss_mask: float32, 1 where labels[t] is a completion token.
    rollout_logprobs: float32, the sampler's logprob of labels[t], 0 where masked.
    advantages: float32, the episode's advantage at each completion position, 0 where masked.
    group: int64 [B].
    old_logprobs, reference_logprobs: float32, 0 where masked; the trainer's logprob of labels[t] before the
        step's first update, and the start checkpoint's. None until a recipe needs them (helpers.objective.rated).
    routed_experts: int16 [B, S, layers, experts a token], the experts of tokens[t] in the rollout, -1 where it ran
        no token (the last one, padding). None without routing replay (helpers.routing_replay).
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    group: Tensor
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    routed_experts: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """(B, S)"""
        return tuple(self.tokens.shape)

    def rows(self, index) -> Batch:
        """The rows that `index` (slice or int64 tensor) picks: a micro-batch or a rank's share."""
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """A batch of what `function` makes of each tensor that is there."""
        present = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{name: t if t is None else function(t) for name, t in present.items()})


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
