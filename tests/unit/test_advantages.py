"""helpers.advantages: hand-computed values, an independent formulation, invariances, messages."""

from __future__ import annotations

import doctest
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import advantages as module
from helpers.advantages import KINDS, group_advantages, zero_variance_share

quick = settings(max_examples=60, deadline=None)
reward = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 2.0])
answers = st.lists(st.lists(reward, min_size=2, max_size=5), min_size=1, max_size=4)


def flatten(rewards_of_groups):
    rewards = [r for group in rewards_of_groups for r in group]
    groups = [3 * g for g, group in enumerate(rewards_of_groups) for _ in group]
    return torch.tensor(rewards), torch.tensor(groups)


def by_statistics(rewards, kind, eps):
    """The same in plain Python, one group at a time."""
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)
    if kind == "std":
        mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
        return [(r - mean) / (std + eps) for r in rewards]
    if kind == "mean":
        return [r - statistics.fmean(rewards) for r in rewards]
    others = [rewards[:i] + rewards[i + 1 :] for i in range(len(rewards))]
    return [r - statistics.fmean(o) for r, o in zip(rewards, others, strict=True)]


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("std", [3 / 2 / 1.0, -1 / 2, -1 / 2, -1 / 2]),  # mean 1/4, std 1/2
        ("mean", [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ],
)
def test_by_hand(kind, expected):
    rewards, groups = torch.tensor([1.0, 0, 0, 0]), torch.zeros(4, dtype=torch.int64)
    torch.testing.assert_close(group_advantages(rewards, groups, kind, 0.0), torch.tensor(expected))


@quick
@given(answers, st.sampled_from(KINDS), st.sampled_from([0.0, 1e-4, 0.1]))
def test_agrees_with_plain_python(rewards_of_groups, kind, eps):
    rewards, groups = flatten(rewards_of_groups)
    expected = [a for group in rewards_of_groups for a in by_statistics(group, kind, eps)]
    got = group_advantages(rewards, groups, kind, eps)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected), rtol=1e-5, atol=1e-6)


@quick
@given(answers, st.sampled_from(KINDS), st.randoms(use_true_random=False))
def test_permuting_episodes_permutes_advantages(rewards_of_groups, kind, random):
    rewards, groups = flatten(rewards_of_groups)
    order = list(range(len(rewards)))
    random.shuffle(order)
    torch.testing.assert_close(
        group_advantages(rewards[order], groups[order], kind),
        group_advantages(rewards, groups, kind)[order],
    )


@quick
@given(answers, st.sampled_from(KINDS), st.floats(-1000, 1000))
def test_a_common_offset_changes_nothing(rewards_of_groups, kind, offset):
    rewards, groups = flatten(rewards_of_groups)
    torch.testing.assert_close(
        group_advantages(rewards.double() + offset, groups, kind),
        group_advantages(rewards.double(), groups, kind),
        atol=1e-5,
        rtol=1e-5,
    )


@quick
@given(answers, st.floats(0.01, 100))
def test_scale_cancels_with_std_and_only_there(rewards_of_groups, scale):
    rewards, groups = flatten(rewards_of_groups)
    rewards = rewards.double()
    for kind, factor in (("std", 1.0), ("mean", scale), ("leave_one_out", scale)):
        torch.testing.assert_close(
            group_advantages(scale * rewards, groups, kind, eps=0.0),
            factor * group_advantages(rewards, groups, kind, eps=0.0),
            atol=1e-5,
            rtol=1e-5,
        )


@quick
@given(answers, st.sampled_from(KINDS))
def test_each_group_sums_to_zero(rewards_of_groups, kind):
    rewards, groups = flatten(rewards_of_groups)
    got = group_advantages(rewards, groups, kind)
    for group in groups.unique():
        assert got[groups == group].sum().abs() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(kind, value):
    """0.1 * 3 / 3 is not 0.1 in floating point; divided by a tiny std it would blow up."""
    rewards, groups = torch.full((3,), value), torch.zeros(3, dtype=torch.int64)
    assert group_advantages(rewards, groups, kind, eps=0.0).tolist() == [0.0, 0.0, 0.0]


def test_a_lone_episode_with_mean_is_zero():
    assert group_advantages(torch.tensor([5.0]), torch.tensor([0]), "mean").tolist() == [0.0]


def test_zero_variance_share_counts_groups_not_episodes():
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 1, 1, 0])
    groups = torch.tensor([0, 0, 0, 0, 0, 0, 4, 9])
    assert zero_variance_share(rewards, groups) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("rewards", "groups", "kind", "message"),
    [
        ([1.0, 0.0], [0, 0], "stdev", "unknown kind of advantage 'stdev'; use one of std"),
        ([1.0, 0.0, 1.0], [0, 0, 8], "std", "group 8 has one episode.*at least 2 answers"),
        ([1.0, 0.0, 1.0], [0, 0, 8], "leave_one_out", "group 8 has one episode"),
        ([1.0, 0.0], [0], "mean", r"shape \(2,\) and groups \(1,\)"),
        ([], [], "mean", "at least one episode"),
        ([1.0, float("nan")], [0, 0], "mean", "reward of episode 1 is nan"),
    ],
)
def test_messages(rewards, groups, kind, message):
    groups = torch.tensor(groups, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.tensor(rewards), groups, kind)
