"""Dynamic sampling (DAPO, arXiv 2503.14476): silent questions give way to fresh ones.

A group whose answers all earn the same has no advantage and teaches nothing. DAPO draws until the batch is
full; here the number of draws is bounded, and silent groups fill what is still missing, so that every step
has as many answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from helpers.records import Episode

Draw = Callable[[int], tuple[Sequence[Episode], Sequence[float]]]
STRIDE = 10**6 + 1


@dataclass(frozen=True)
class Sampled:
    """The episodes that a step trains on, and what all draws showed.

    episodes, rewards: of the chosen groups, which are numbered 0, 1, ... anew.
    sampled_reward: mean reward of all episodes drawn; that of the chosen ones says nothing about the policy.
    lengths: completion tokens of all episodes drawn.
    silent_share: share of all groups drawn whose rewards are equal, 0 to 1.
    draws: number of draws, 1 or more.
    """

    episodes: tuple[Episode, ...]
    rewards: tuple[float, ...]
    sampled_reward: float
    lengths: tuple[int, ...]
    silent_share: float
    draws: int


def draw_step(step: int, number: int) -> int:
    """What to pass as `step` to a task's sample for draw `number` of a GRPO step: no two are the same.

    >>> draw_step(7, 0), draw_step(7, 2)
    (7, 2000009)
    """
    return step + number * STRIDE


def fill_step(draw: Draw, groups: int, extra_draws: int = 0) -> Sampled:
    """Draw until `groups` groups have rewards that differ, at most 1 + extra_draws times.

    draw: called with 0, 1, ...; returns fresh episodes, group by group, and their rewards.
    Groups that differ come first, in the order drawn, then silent ones. One draw is returned as it is.
    Raises ValueError when the draws hold fewer groups than asked for.

    Two questions a draw; the first one's answers are all wrong, until the second draw.
    >>> answer = lambda group: Episode((1,), (2,), (-1.0,), "stop", group)
    >>> def draw(number):
    ...     return [answer(0), answer(0), answer(1), answer(1)], [0.0, float(number), 1.0, 0.0]
    >>> once, twice = fill_step(draw, groups=2), fill_step(draw, groups=2, extra_draws=3)
    >>> once.rewards, twice.rewards
    ((0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 1.0))
    >>> [e.group for e in twice.episodes], twice.draws, twice.silent_share
    ([0, 0, 1, 1], 2, 0.25)
    """
    drawn: list[list[tuple[Episode, float]]] = []
    draws = 0
    while draws == 0 or (draws <= extra_draws and _loud(drawn) < groups):
        drawn += _by_group(*draw(draws))
        draws += 1
    # a stable sort, and none where there was one draw: that step stays exactly as it was sampled
    chosen = drawn[:groups] if draws == 1 else sorted(drawn, key=_silent)[:groups]
    if len(chosen) < groups:
        raise ValueError(
            f"{draws} draws gave {len(drawn)} groups, and a step needs {groups}; draw as many questions"
        )
    pairs = [(replace(e, group=i), reward) for i, group in enumerate(chosen) for e, reward in group]
    everything = [pair for group in drawn for pair in group]
    return Sampled(
        episodes=tuple(e for e, _ in pairs),
        rewards=tuple(reward for _, reward in pairs),
        sampled_reward=sum(reward for _, reward in everything) / len(everything),
        lengths=tuple(len(e.completion_ids) for e, _ in everything),
        silent_share=1 - _loud(drawn) / len(drawn),
        draws=draws,
    )


def _by_group(episodes: Sequence[Episode], rewards: Sequence[float]) -> list[list[tuple[Episode, float]]]:
    """Pairs of episode and reward, a list for each group, in the order in which groups appear."""
    groups: dict[int, list[tuple[Episode, float]]] = {}
    for episode, reward in zip(episodes, rewards, strict=True):
        groups.setdefault(episode.group, []).append((episode, reward))
    return list(groups.values())


def _silent(group: list[tuple[Episode, float]]) -> bool:
    return len({reward for _, reward in group}) == 1


def _loud(groups: list[list[tuple[Episode, float]]]) -> int:
    return sum(not _silent(group) for group in groups)
