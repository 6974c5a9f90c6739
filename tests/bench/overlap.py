"""What does sampling ahead (helpers/async_rollout.py) do to a step's time and to learning?

    python tests/bench/overlap.py [--profile cpu] [--seeds 0 1] [--steps 60] [--out tests/bench/recorded]

One cluster serves all arms of a seed in turn, there and back (A B C C B A), so that a machine that gets slower
meets all of them. Each arm resumes from the checkpoint of the same first step: same weights, optimizer, questions
and sampling seeds. The loss is the profile's: a ratio to the logprobs that each token was sampled with, clipped.
Held-out accuracy is on 1,024 questions, greedily (standard error about 0.013). Nothing was tuned.

Writes overlap.csv (a row an arm, seed and turn, as it ends) and overlap_steps.csv (a row a step). About a minute a
turn of 60 steps on two quiet cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from helpers.profiles import Profile, load_profile

ARMS = {  # name -> steps ahead, what happens at a sync
    "synchronous": (0, "finish"),
    "finish, 1 ahead": (1, "finish"),
    "continue, 1 ahead": (1, "continue"),
    "continue, 2 ahead": (2, "continue"),
    "continue, 4 ahead": (4, "continue"),
    "drop, 1 ahead": (1, "drop"),
}
HELD_OUT = 1024
FIRST = 1  # steps that all arms share; a checkpoint has to be of an updated optimizer
WARM = (
    "from helpers.profiles import load_profile as p; from helpers.warm_start import warm_checkpoint as w;"
    "w(p('%s', seed=%d))"
)


def settings_of(profile: str, seed: int, steps: int, arm: str) -> Profile:
    ahead, at_sync = ARMS[arm]
    return load_profile(
        profile, seed=seed, steps=FIRST + steps,
        **{"rollout.max_staleness": ahead, "rollout.at_sync": at_sync, "rollout.memory_saver": False},
    )  # fmt: skip


def started(settings: Profile) -> Path:
    """The warm checkpoint of the profile and seed, trained here if it is missing."""
    from helpers.warm_start import policy_folder

    checkpoint = policy_folder(settings)
    if not (checkpoint / "config.json").exists():
        code = WARM % (settings.name, settings.seed)
        subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return checkpoint


class Bench:
    """A cluster that is up, and the state that every arm starts from."""

    def __init__(self, cluster, checkpoint: Path):
        from helpers.checkpoints import tokenizer_and_pad
        from helpers.saves import step_folder
        from helpers.tasks import load_task

        self.cluster, self.settings = cluster, cluster.settings
        self.tokenizer, self.pad = tokenizer_and_pad(checkpoint)
        self.task = load_task(self.settings.task, self.settings.seed)
        self.held_out = self.task.held_out(HELD_OUT)
        self.start = step_folder(self.settings.run_folder("overlap") / f"seed-{self.settings.seed}", FIRST)
        self.step(0, self._source(replace(self.settings, rollout=replace(self.settings.rollout, max_staleness=0))))
        cluster.save(self.start)

    def _source(self, settings: Profile):
        from helpers.async_rollout import AsyncRollout

        return AsyncRollout(self.cluster, partial(self.task.sample, settings.batch.prompts), settings)

    def accuracy(self) -> float:
        from helpers.rewards import score

        episodes = self.cluster.roll_out(self.held_out, greedy=True)
        return statistics.mean(score(episodes, self.held_out, self.tokenizer))

    def run(self, settings: Profile) -> tuple[list[dict], float, float]:
        """Train one arm from the start: a row a step, accuracy before and after."""
        self.cluster.resume(self.start)
        self.cluster.sync_weights(f"step-{FIRST}")
        source, before = self._source(settings), self.accuracy()
        rows = [self.step(number, source) for number in range(FIRST, settings.steps)]
        return rows, before, self.accuracy()

    def step(self, number: int, source) -> dict:
        from helpers.async_rollout import staleness
        from helpers.collate import collate
        from helpers.objective import learn, step_advantages
        from helpers.rewards import score

        spent = {}

        @contextmanager
        def clock(part):
            start = time.perf_counter()
            yield
            spent[part] = time.perf_counter() - start

        with clock("step_seconds"):
            with clock("wait_seconds"):
                problems, episodes = source.take(number)
            source.start_ahead(number)
            rewards = score(episodes, problems, self.tokenizer)
            advantages = step_advantages(episodes, rewards, self.settings)
            batch = collate(episodes, advantages, self.pad, self.settings.trainer.seq_length)
            with clock("update_seconds"):
                stats = learn(self.cluster, batch, self.settings)
            with clock("sync_seconds"):  # with the wait for what is under way
                source.sync_weights(f"step-{number + 1}")
        mean, most = staleness(episodes, number)
        return {
            "step": number, "reward": statistics.mean(rewards),
            "length": statistics.mean(len(e.completion_ids) for e in episodes),
            "staleness": mean, "staleness_max": most,
            "mixed": statistics.mean(len(set(e.weight_versions)) > 1 for e in episodes),
            **{k: stats[k] for k in ("clip_fraction", "generation_kl", "grad_norm", "entropy")}, **spent,
        }  # fmt: skip


def summary(rows: list[dict], before: float, after: float) -> dict:
    def mean(name: str, part: slice = slice(None)) -> float:
        return statistics.mean(row[name] for row in rows[part])

    seconds = ("step_seconds", "wait_seconds", "update_seconds", "sync_seconds")
    return {
        "steps": len(rows), **{k: statistics.median(row[k] for row in rows) for k in seconds},
        "staleness": mean("staleness"), "staleness_max": max(row["staleness_max"] for row in rows),
        "mixed": mean("mixed"), "clip_fraction": mean("clip_fraction"), "generation_kl": mean("generation_kl"),
        "before": before, "after": after, "reward_last10": mean("reward", slice(-10, None)),
        "length_last10": mean("length", slice(-10, None)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    a = parser.parse_args()
    widest = max(a.arms, key=lambda arm: ARMS[arm])
    from helpers.cluster import GrpoCluster, RayHead
    from helpers.results import write_measured

    done, steps = [], []
    for seed in a.seeds:
        settings = settings_of(a.profile, seed, a.steps, widest)
        os.environ.update(settings.process_environment("kernel"))
        checkpoint = started(settings)
        with RayHead(settings):
            cluster = GrpoCluster(settings, checkpoint).start()
            cluster.ready()
            try:
                bench = Bench(cluster, checkpoint)
                for turn, arms in enumerate((a.arms, a.arms[::-1])):
                    for arm in arms:
                        label = {"arm": arm, "seed": seed, "turn": turn}
                        rows, before, after = bench.run(settings_of(a.profile, seed, a.steps, arm))
                        done.append(label | summary(rows, before, after))
                        steps += [label | row for row in rows]
                        print({k: round(v, 4) if isinstance(v, float) else v for k, v in done[-1].items()}, flush=True)
                        write_measured(a.out / "overlap.csv", done)
                        write_measured(a.out / "overlap_steps.csv", steps)
            finally:
                cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
