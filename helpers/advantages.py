"""Group advantages: how much better an answer is than the other answers to the same prompt.

Three kinds, all with a group mean of zero:
    "std"            GRPO (arXiv 2402.03300)       (r - mean) / (std + eps), std unbiased (n - 1)
    "mean"           Dr. GRPO (arXiv 2503.20783)   r - mean
    "leave_one_out"  RLOO (arXiv 2402.14740)       r - mean of the other answers of the group
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("std", "mean", "leave_one_out")


def group_advantages(rewards: Tensor, groups: Tensor, kind: str = "std", eps: float = 1e-4) -> Tensor:
    """Advantage of every episode within its group.

    rewards: [B] float32, one an episode.  groups: [B] int64, any labels, in any order.
    kind: "std", "mean" or "leave_one_out" (see the module's table).
    eps: what "std" adds to the standard deviation, in units of reward.
    Returns [B] float32. A group whose rewards are all equal gives exactly 0.

    The sums run in float64, so that an offset common to all rewards leaves no rounding behind.
    Sources: TRL's GRPOTrainer and verl's compute_grpo_outcome_advantage, both with torch's
    unbiased std; TRL's eps is 1e-4, verl's 1e-6.
    Raises ValueError: unknown kind, wrong shapes, a reward that is not finite, a group of one
    with "std" or "leave_one_out".

    Three answers to one prompt, one of them right: mean 1/3, std sqrt(1/3) = 0.577.
    >>> rewards, groups = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([7, 7, 7])
    >>> group_advantages(rewards, groups, eps=0.0)
    tensor([ 1.1547, -0.5774, -0.5774])
    >>> group_advantages(rewards, groups, kind="mean")
    tensor([ 0.6667, -0.3333, -0.3333])
    >>> group_advantages(rewards, groups, kind="leave_one_out")
    tensor([ 1.0000, -0.5000, -0.5000])
    """
    _check_kind(kind)
    _check_rewards(rewards, groups)
    index, size = _group_index(groups)
    if kind != "mean":
        _check_group_sizes(groups, index, size, kind)
    values = rewards.double()
    centred = values - (_group_sum(values, index, size) / size)[index]
    if kind == "std":
        variance = _group_sum(centred.square(), index, size) / (size - 1)
        centred = centred / (variance.sqrt() + eps)[index]
    elif kind == "leave_one_out":
        centred = centred * (size / (size - 1))[index]
    return centred.masked_fill(_all_equal(values, index, size)[index], 0.0).float()


def zero_variance_share(rewards: Tensor, groups: Tensor) -> float:
    """Share of groups, 0 to 1, whose rewards are all equal and which therefore teach nothing.

    rewards: [B] float32.  groups: [B] int64.  A group of one counts as equal.
    DAPO's dynamic sampling (arXiv 2503.14476) draws prompts until this share is 0.

    Two groups; the answers of the second are all wrong.
    >>> zero_variance_share(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]))
    0.5
    """
    _check_rewards(rewards, groups)
    index, size = _group_index(groups)
    return _all_equal(rewards.double(), index, size).double().mean().item()


def _group_index(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[B] position of each episode's group in 0..G-1, and [G] episodes a group."""
    _, index, size = torch.unique(groups, return_inverse=True, return_counts=True)
    return index, size


def _group_sum(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """[G] sum of values [B] within each group."""
    return values.new_zeros(len(size)).index_add(0, index, values)


def _all_equal(values: Tensor, index: Tensor, size: Tensor) -> Tensor:
    """[G] bool, true where every reward of the group is the same number."""
    low, high = (
        values.new_zeros(len(size)).scatter_reduce(0, index, values, how, include_self=False)
        for how in ("amin", "amax")
    )
    return low == high


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown kind of advantage {kind!r}; use one of {', '.join(KINDS)}")


def _check_rewards(rewards: Tensor, groups: Tensor) -> None:
    if rewards.ndim != 1 or rewards.shape != groups.shape or len(rewards) == 0:
        raise ValueError(
            f"rewards have shape {tuple(rewards.shape)} and groups {tuple(groups.shape)}; "
            "both must be [B] with one entry an episode and at least one episode"
        )
    bad = (~torch.isfinite(rewards)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"the reward of episode {bad[0]} is {rewards[bad[0]].item()}, not a finite number; "
            "one such reward spoils its whole group, so mend the reward function first"
        )


def _check_group_sizes(groups: Tensor, index: Tensor, size: Tensor, kind: str) -> None:
    alone = (size[index] == 1).nonzero().flatten().tolist()
    if alone:
        raise ValueError(
            f"group {groups[alone[0]].item()} has one episode, and kind={kind!r} compares an "
            "episode with others of its group; sample at least 2 answers a prompt, "
            "or use kind='mean' (which gives a lone episode 0)"
        )
