"""helpers.dynamic_sampling: bounded, in order, nothing invented and nothing left out that teaches."""

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import dynamic_sampling as module
from helpers.dynamic_sampling import fill_step
from helpers.records import Episode

quick = settings(max_examples=60, deadline=None)
GROUP = st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=3)
# a draw is a list of groups, a group a list of rewards
DRAWS = st.integers(1, 4).flatmap(
    lambda groups: st.lists(st.lists(GROUP, min_size=groups, max_size=groups), min_size=1, max_size=5)
)


def drawer(draws):
    """draw(number) over `draws`; an episode's only completion token says which draw and answer it is."""
    calls = []

    def draw(number):
        calls.append(number)
        named = [
            (Episode((1,), (100 * number + 10 * g + i,), (-1.0,), "stop", g), reward)
            for g, group in enumerate(draws[number])
            for i, reward in enumerate(group)
        ]
        return [e for e, _ in named], [r for _, r in named]

    return draw, calls


def test_doctests():
    assert doctest.testmod(module).failed == 0


@quick
@given(DRAWS)
def test_loud_groups_come_first_in_the_order_drawn_and_draws_are_bounded(draws):
    draw, calls = drawer(draws)
    count, extra = len(draws[0]), len(draws) - 1
    sampled = fill_step(draw, count, extra)
    assert calls == list(range(sampled.draws)) and 1 <= sampled.draws <= 1 + extra
    seen = [(d, g) for d in calls for g in range(count)]
    loud = [at for at in seen if len(set(draws[at[0]][at[1]])) > 1]
    silent = [at for at in seen if at not in loud]
    assert len(loud) >= count or sampled.draws == 1 + extra
    assert sum(len(set(g)) > 1 for d in calls[:-1] for g in draws[d]) < count  # not one draw more than needed
    want = seen if sampled.draws == 1 else (loud + silent)[:count]
    got = [e.completion_ids[0] for e in sampled.episodes]
    assert got == [100 * d + 10 * g + i for d, g in want for i in range(3)]
    assert [e.group for e in sampled.episodes] == [g for g in range(count) for _ in range(3)]
    assert sampled.silent_share == pytest.approx(len(silent) / len(seen))


@quick
@given(DRAWS)
def test_rewards_stay_with_their_episodes_and_the_mean_is_of_all(draws):
    draw, calls = drawer(draws)
    sampled = fill_step(draw, len(draws[0]), len(draws) - 1)
    for episode, reward in zip(sampled.episodes, sampled.rewards, strict=True):
        number, rest = divmod(episode.completion_ids[0], 100)
        assert draws[number][rest // 10][rest % 10] == reward
    everything = [r for d in calls for group in draws[d] for r in group]
    assert sampled.sampled_reward == pytest.approx(sum(everything) / len(everything))
    assert sampled.lengths == (1,) * len(everything)


@quick
@given(DRAWS)
def test_without_extra_draws_a_step_is_what_was_sampled(draws):
    draw, calls = drawer(draws)
    sampled = fill_step(draw, len(draws[0]))
    episodes, rewards = drawer(draws)[0](0)
    assert calls == [0] and (list(sampled.episodes), list(sampled.rewards)) == (episodes, rewards)


def test_too_few_questions_are_named():
    with pytest.raises(ValueError, match="1 draws gave 2 groups, and a step needs 3"):
        fill_step(drawer([[[0.0, 1.0], [0.0, 0.0]]])[0], groups=3)
