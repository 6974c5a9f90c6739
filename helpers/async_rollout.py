"""Asynchronous rollout: the engines sample the answers of coming steps while the trainers work on this one's.

At most rollout.max_staleness steps lie between the weights that sample a token and the update that trains on it, and
each token keeps its weights' version and logprob, so that the ratio of the loss (and a correction) speaks of the policy
that really sampled it. With max_staleness 0 nothing is sampled ahead and the loop is the synchronous one.

Weights change only while no engine samples. What is then under way is (rollout.at_sync):

- "finish": waited for; one step ahead is all that this can use (verl's one_step_off_policy, slime's train_async);
- "continue": stopped, and gone on with from its last token under the new weights (partial rollouts, Kimi k1.5
  arXiv 2501.12599, AReaL arXiv 2505.24298);
- "drop": stopped and sampled again from the question, if it had not ended. Long answers are then sampled more often than
  short ones until they come out short: a bias, shown in notebook 09 and in nobody's recipe.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from helpers.dynamic_sampling import draw_step
from helpers.profiles import Profile
from helpers.records import Episode
from helpers.tasks import Problem

if TYPE_CHECKING:
    from helpers.cluster import GrpoCluster, PendingRollout
    from helpers.weight_sync import SyncReport

_VERSION = re.compile(r"step-(\d+)")


class AsyncRollout:
    """The source of a training loop's answers, and the only one that changes the engines' weights meanwhile.

    sample: draw -> its problems, a function of the draw alone (such as partial(task.sample, prompts)).
    One step of the loop: take, start_ahead, update, sync_weights.
    """

    def __init__(
        self, cluster: GrpoCluster, sample: Callable[[int], Sequence[Problem]], settings: Profile
    ):
        self.cluster, self.sample, self.settings = cluster, sample, settings
        self._pending: dict[int, PendingRollout] = {}  # draw -> what is under way
        self._finished: dict[int, list[Episode]] = {}  # draw -> its episodes, all ended

    def take(self, draw: int) -> tuple[list[Problem], list[Episode]]:
        """Problems and episodes of a draw: those sampled ahead, once they have ended, or else sampled now."""
        problems = list(self.sample(draw))
        if draw in self._pending:
            self._finished[draw] = self.cluster.finish_rollout(self._pending.pop(draw))
        if draw in self._finished:
            return problems, self._finished.pop(draw)
        return problems, self.cluster.roll_out(problems, draw=draw)

    def start_ahead(self, step: int) -> None:
        """Have the engines sample for the steps that come after `step`, as far as they may; returns at once.

        Only the first draw of a step: whether dynamic sampling needs another is known when its rewards are.
        """
        last = min(step + self.settings.rollout.max_staleness, self.settings.steps - 1)
        for draw in (draw_step(ahead, 0) for ahead in range(step + 1, last + 1)):
            if draw not in self._pending and draw not in self._finished:
                self._pending[draw] = self.cluster.start_rollout(list(self.sample(draw)), draw=draw)

    def sync_weights(self, version: str) -> SyncReport:
        """The trainer's weights into every engine; what was under way goes on as rollout.at_sync says."""
        settled = self._settle()
        report = self.cluster.sync_weights(version)
        for draw, episodes in settled.items():
            self._go_on(draw, episodes)
        return report

    def _settle(self) -> dict[int, list[Episode]]:
        """draw -> its episodes, ended or not; no engine samples afterwards."""
        if self.settings.rollout.at_sync != "finish":
            self.cluster.stop_rollouts(list(self._pending.values()))
        settled = {draw: self.cluster.finish_rollout(pending) for draw, pending in self._pending.items()}
        self._pending.clear()
        return settled

    def _go_on(self, draw: int, episodes: list[Episode]) -> None:
        if not any(e.unfinished for e in episodes):
            self._finished[draw] = episodes
            return
        if self.settings.rollout.at_sync == "drop":
            episodes = [_blank(e) if e.unfinished else e for e in episodes]
        self._pending[draw] = self.cluster.start_rollout(list(self.sample(draw)), draw=draw, partial=episodes)

    # --- a checkpoint ---------------------------------------------------------------------------------------------------
    def state(self) -> dict:
        """What a checkpoint keeps of the answers sampled ahead: those of draws that have ended. As JSON.

        With at_sync "finish" that is all there is after a sync, and a resumed run goes on as if it had not stopped. What
        is under way otherwise is sampled anew after a resume, by newer weights.
        """
        return {str(draw): [_as_json(e) for e in episodes] for draw, episodes in self._finished.items()}

    def restore(self, state: dict) -> None:
        """Take over what `state` returned, in an AsyncRollout with nothing under way."""
        self._finished = {int(draw): [_from_json(e) for e in episodes] for draw, episodes in state.items()}


def staleness(episodes: Sequence[Episode], step: int) -> tuple[float, int]:
    """Mean and largest number of updates between a token's weights and the update of `step`, over all tokens that tell.

    >>> staleness([Episode((1,), (2, 3), (-1.0, -1.0), "stop", 0, ("initial", "step-1"))], step=2)
    (1.5, 2)
    """
    ages = [step - version_number(v) for e in episodes for v in e.weight_versions]
    return (sum(ages) / len(ages), max(ages)) if ages else (0.0, 0)


def version_number(version: str) -> int:
    """Updates behind weights that were synchronised as "step-N"; 0 for those that a server started with."""
    match = _VERSION.fullmatch(version)
    return int(match[1]) if match else 0


def _blank(episode: Episode) -> Episode:
    """The episode with nothing sampled yet."""
    return Episode(episode.prompt_ids, (), (), "abort", episode.group)


def _as_json(episode: Episode) -> dict:
    fields = {f.name: getattr(episode, f.name) for f in dataclasses.fields(episode)}
    experts = fields["routed_experts"]
    if experts is not None:
        packed = np.ascontiguousarray(experts)
        fields["routed_experts"] = {
            "shape": packed.shape, "type": packed.dtype.str, "base64": base64.b64encode(packed.tobytes()).decode(),
        }  # fmt: skip
    return fields


def _from_json(fields: dict) -> Episode:
    experts = fields["routed_experts"]
    if experts is not None:
        raw = np.frombuffer(base64.b64decode(experts["base64"]), np.dtype(experts["type"]))
        experts = raw.reshape(experts["shape"])
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Episode(**given | {"routed_experts": experts})
