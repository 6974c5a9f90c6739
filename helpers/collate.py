"""Episodes of different lengths become one right-padded batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from helpers.records import Batch, Episode
from helpers.routing_replay import NOT_RUN


def collate(
    episodes: Sequence[Episode],
    advantages: Tensor | None,
    pad_id: int,
    seq_length: int | None = None,
    round_to: int = 8,
) -> Batch:
    """Lay B episodes out as tensors [B, S] in which position t predicts token t + 1.

    advantages: [B] float32, one an episode; None (supervised loss) gives 0.
    pad_id: token that fills the right side; must be a real id of the vocabulary.
    seq_length: S; None takes the longest episode, rounded up to a multiple of `round_to`
        (tensor cores and sequence parallelism both want a multiple).
    Returns a Batch on the CPU. With P prompt and C completion tokens, the loss mask is 1 at
    positions P - 1 to P + C - 2: the last prompt token predicts the first completion token.
    Source: Megatron-LM's GPTDataset (labels = tokens shifted left by one).
    Raises ValueError: no episodes, an empty prompt, an episode too long, a logprob or an
    advantage that is not finite, advantages of another shape, a negative pad_id, a bad length,
    routed experts in some episodes only or of different shapes.

    Two prompt tokens and three completion tokens, padded to eight positions.
    >>> episode = Episode((11, 12), (21, 22, 23), (-0.1, -0.2, -0.3), "stop", group=0)
    >>> batch = collate([episode], torch.tensor([2.0]), pad_id=0)
    >>> batch.tokens
    tensor([[11, 12, 21, 22, 23,  0,  0,  0]])
    >>> batch.labels
    tensor([[12, 21, 22, 23,  0,  0,  0,  0]])
    >>> batch.loss_mask
    tensor([[0., 1., 1., 1., 0., 0., 0., 0.]])
    >>> batch.rollout_logprobs
    tensor([[ 0.0000, -0.1000, -0.2000, -0.3000,  0.0000,  0.0000,  0.0000,  0.0000]])
    >>> batch.advantages
    tensor([[0., 2., 2., 2., 0., 0., 0., 0.]])
    """
    _check_lengths(pad_id, seq_length, round_to)
    _check_episodes(episodes)
    length = seq_length or _rounded_length(episodes, round_to)
    _check_fit(episodes, length)
    tokens = _rows([e.prompt_ids + e.completion_ids for e in episodes], length, pad_id)
    # Column S - 1 predicts nothing inside the row; its label is padding and its mask 0.
    labels = _rows([(e.prompt_ids + e.completion_ids)[1:] for e in episodes], length, pad_id)
    mask = _completion_rows(episodes, [[1.0] * len(e.completion_ids) for e in episodes], length)
    return Batch(
        tokens=tokens,
        labels=labels,
        position_ids=torch.arange(length).expand(len(episodes), length).contiguous(),
        loss_mask=mask,
        rollout_logprobs=_completion_rows(episodes, [e.logprobs for e in episodes], length),
        advantages=torch.where(mask > 0, _checked_advantages(advantages, len(episodes)), 0.0),
        group=torch.tensor([e.group for e in episodes], dtype=torch.int64),
        routed_experts=_expert_rows(episodes, length),
    )


def _rounded_length(episodes: Sequence[Episode], round_to: int) -> int:
    longest = max(len(e.prompt_ids) + len(e.completion_ids) for e in episodes)
    return math.ceil(longest / round_to) * round_to


def _rows(rows: Sequence[Sequence[int]], length: int, pad_id: int) -> Tensor:
    """[B, length] int64, right-padded."""
    padded = [list(row) + [pad_id] * (length - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64)


def _completion_rows(episodes: Sequence[Episode], values: Sequence[Sequence[float]], length: int) -> Tensor:
    """[B, length] float32 with each episode's values where completion tokens are predicted."""
    out = torch.zeros(len(episodes), length)
    for row, (episode, numbers) in enumerate(zip(episodes, values, strict=True)):
        start = len(episode.prompt_ids) - 1
        out[row, start : start + len(numbers)] = torch.tensor(numbers, dtype=torch.float32)
    return out


def _expert_rows(episodes: Sequence[Episode], length: int) -> Tensor | None:
    """[B, length, layers, experts a token] int16, NOT_RUN from each episode's last token on; None without any."""
    shapes = {None if e.routed_experts is None else e.routed_experts.shape[1:] for e in episodes}
    if shapes == {None}:
        return None
    if len(shapes) > 1:
        raise ValueError(
            "episodes with different routed experts (layers x experts a token: "
            f"{', '.join(sorted(map(str, shapes)))}); roll all of them out with algorithm.routing_replay, from one model"
        )
    out = np.full((len(episodes), length, *shapes.pop()), NOT_RUN, np.int16)
    for row, episode in zip(out, episodes, strict=True):
        row[: len(episode.routed_experts)] = episode.routed_experts
    return torch.from_numpy(out)


def _checked_advantages(advantages: Tensor | None, count: int) -> Tensor:
    """[B, 1] float32 on the CPU, without gradient."""
    if advantages is None:
        return torch.zeros(count, 1)
    if tuple(advantages.shape) != (count,):
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)}, and there are {count} episodes; "
            "pass one advantage an episode, in the episodes' order"
        )
    if not torch.isfinite(advantages).all():
        raise ValueError("an advantage is not a finite number; check the rewards it came from")
    return advantages.detach().float().cpu()[:, None]


def _check_lengths(pad_id: int, seq_length: int | None, round_to: int) -> None:
    if pad_id < 0:
        raise ValueError(f"pad_id={pad_id} has no embedding; use the tokenizer's pad token id")
    if round_to < 1 or (seq_length is not None and seq_length < 1):
        raise ValueError(f"seq_length={seq_length} and round_to={round_to} must be at least 1 token")


def _check_episodes(episodes: Sequence[Episode]) -> None:
    if not episodes:
        raise ValueError(
            "no episodes to collate; if dynamic sampling dropped every group, sample more prompts"
        )
    for index, episode in enumerate(episodes):
        if not episode.prompt_ids:
            raise ValueError(
                f"episode {index} has an empty prompt, so nothing predicts its first completion "
                "token; give every prompt at least its start token"
            )
        if not all(math.isfinite(value) for value in episode.logprobs):
            raise ValueError(
                f"episode {index} has a rollout logprob that is not finite; its tokens cannot "
                "be weighted, so look into the rollout engine's log for that request"
            )


def _check_fit(episodes: Sequence[Episode], length: int) -> None:
    for index, episode in enumerate(episodes):
        prompt, completion = len(episode.prompt_ids), len(episode.completion_ids)
        if prompt + completion > length:
            raise ValueError(
                f"episode {index} has {prompt} + {completion} = {prompt + completion} tokens, "
                f"and seq_length is {length}; raise seq_length to at least the prompt's length "
                "plus the rollout's token budget, or lower that budget"
            )
