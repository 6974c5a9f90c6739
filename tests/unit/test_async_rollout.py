"""Which answers a loop gets when they are sampled ahead, with engines whose order of events is the test's."""

import doctest
import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from helpers import async_rollout as module
from helpers.async_rollout import AsyncRollout, staleness
from helpers.profiles import load_profile
from helpers.records import Episode
from helpers.tasks import Problem

WHOLE = 4  # tokens of a whole answer


@dataclass
class Engines:
    """Samples one token of every answer a tick, with the version that is loaded. What GrpoCluster promises, in one thread."""

    version: str = "initial"
    under_way: dict = field(default_factory=dict)

    def start_rollout(self, problems, greedy=False, draw=None, partial=None):
        self.under_way[draw] = list(partial or [Episode((draw,), (), (), "abort", i) for i in range(len(problems))])
        return draw

    def tick(self):
        for draw, episodes in self.under_way.items():
            self.under_way[draw] = [self._longer(e) if e.unfinished else e for e in episodes]

    def _longer(self, e):
        ids = (*e.completion_ids, len(e.completion_ids))
        full = "stop" if len(ids) == WHOLE - e.group else "abort"
        return Episode(e.prompt_ids, ids, (-1.0,) * len(ids), full, e.group, (*e.weight_versions, self.version))

    def finish_rollout(self, draw):
        while not self.stopped and any(e.unfinished for e in self.under_way[draw]):
            self.tick()
        return self.under_way.pop(draw)

    stopped = False

    def stop_rollouts(self, pending):
        self.stopped = True

    def roll_out(self, problems, draw):
        self.start_rollout(problems, draw=draw)
        return self.finish_rollout(draw)

    def sync_weights(self, version):
        assert self.stopped or not self.under_way, "weights changed under running requests"
        self.version, self.stopped = version, False
        return version


def loop(engines, ahead, steps, ticks=2):
    """The episodes that each step trains on."""
    seen = []
    for step in range(steps):
        problems, episodes = ahead.take(step)
        assert [p.question for p in problems] == [f"{step}+0", f"{step}+1"]
        assert {e.prompt_ids for e in episodes} == {(step,)} and not any(e.unfinished for e in episodes)
        seen.append(episodes)
        ahead.start_ahead(step)
        for _ in range(ticks):
            engines.tick()
        ahead.sync_weights(f"step-{step + 1}")
    return seen


def sample(draw):
    return [Problem(f"{draw}+{i}", "0") for i in range(2)]


def settings(steps=6, **rollout):
    return load_profile("cpu", steps=steps, **{f"rollout.{k}": v for k, v in rollout.items()})


def ages(seen):
    return [staleness(episodes, step)[1] for step, episodes in enumerate(seen)]


def test_without_staleness_every_token_is_of_the_present_weights():
    engines = Engines()
    seen = loop(engines, AsyncRollout(engines, sample, settings()), 6)
    assert ages(seen) == [0] * 6


def test_finish_is_one_step_old_from_the_second_step_on_and_of_one_version():
    engines = Engines()
    seen = loop(engines, AsyncRollout(engines, sample, settings(max_staleness=1)), 6)
    assert ages(seen) == [0, 1, 1, 1, 1, 1]
    assert all(len(set(e.weight_versions)) == 1 for episodes in seen for e in episodes)
    assert not engines.under_way, "sampled for a step that does not come"


@pytest.mark.parametrize("most", [1, 2, 4])
def test_continue_keeps_each_tokens_version_and_never_exceeds_the_bound(most):
    engines = Engines()
    seen = loop(engines, AsyncRollout(engines, sample, settings(12, max_staleness=most, at_sync="continue")), 12, 1)
    assert max(ages(seen)) == most
    assert any(len(set(e.weight_versions)) > 1 for episodes in seen for e in episodes)
    for e in (e for episodes in seen for e in episodes):
        assert e.completion_ids == tuple(range(WHOLE - e.group))
        assert list(e.weight_versions) == sorted(e.weight_versions, key=module.version_number)


def test_drop_keeps_what_has_ended_and_samples_the_rest_again():
    engines = Engines()
    ahead = AsyncRollout(engines, sample, settings(max_staleness=1, at_sync="drop"))
    seen = loop(engines, ahead, 6, ticks=3)  # the second answer of each draw has ended by then, the first has not
    for step, (long, short) in enumerate(seen[1:], start=1):
        assert set(short.weight_versions) == {f"step-{step - 1}" if step > 1 else "initial"}
        assert set(long.weight_versions) == {f"step-{step}"}


def test_a_resumed_loop_trains_on_what_was_sampled_before():
    engines = Engines()
    ahead = AsyncRollout(engines, sample, settings(max_staleness=1))
    whole = loop(engines, ahead, 6)
    engines = Engines()
    first = AsyncRollout(engines, sample, settings(max_staleness=1))
    seen = loop(engines, first, 3)
    again = AsyncRollout(engines, sample, settings(max_staleness=1))
    again.restore(json.loads(json.dumps(first.state())))
    for step in range(3, 6):
        seen.append(again.take(step)[1])
        again.start_ahead(step)
        again.sync_weights(f"step-{step + 1}")
    assert seen == whole


def test_routed_experts_survive_a_checkpoint():
    experts = np.arange(12, dtype=np.int16).reshape(2, 3, 2)
    e = Episode((1,), (2, 3), (-1.0, -0.1 - 0.2), "stop", 3, ("a", "b"), experts)
    got = module._from_json(json.loads(json.dumps(module._as_json(e))))
    assert got == e and got.routed_experts.dtype == np.int16 and (got.routed_experts == experts).all()


def test_versions():
    assert [module.version_number(v) for v in ("initial", "step-7", "warm start", "")] == [0, 7, 0, 0]
    assert staleness([], 3) == (0.0, 0)


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.max_staleness": -1}, "rollout.max_staleness = -1 must be at least 0"),
        ({"rollout.at_sync": "halt"}, "rollout.at_sync = 'halt'; it can be finish, continue, drop"),
        ({"rollout.max_staleness": 2}, "with rollout.at_sync = 'finish'.*use 'continue'"),
        ({"rollout.max_staleness": 1, "algorithm.old_logprobs": "current"}, "older weights; use old_logprobs"),
        ({"cluster.placement": "apart"}, "it can be colocated or split"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_ahead_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        load_profile("cpu", **changes)


def test_released_memory_cannot_be_sampled_with():
    with pytest.raises(ValueError, match="turn rollout.memory_saver off"):
        load_profile("gpu-20b", **{"rollout.max_staleness": 1, "rollout.memory_saver": True})
