"""What does a rollout that differs from the trainer do to learning, and which remedy helps?

    python tests/bench/mismatch.py --knob int:3 [--seeds 0 1 2] [--steps 60] [--arms off tis] [--out FOLDER]

The arms are helpers.mismatch.ARMS. Within a seed all start from the same warm checkpoint, with a new trainer
(empty optimizer, schedule at 0), and see the same questions step by step; the answers are drawn afresh. A seed
has its own checkpoint (trained here if it is missing) and its own questions. One server serves all arms in
turn, and before each rollout takes the trainer's weights through the knob (helpers.mismatch.knob).
Held-out accuracy is that of the trainer's own weights: they are sent unchanged before they are judged, on
1,024 questions, greedily (standard error about 0.013).
Knobs were tried on seed 0 with the arms "no mismatch" and "off" first; nothing else was tuned.

Writes mismatch.csv (a row an arm, as it ends) and mismatch_curves.csv (a row a step); with a knob that has
rows there already, its rows are replaced arm by arm. About a minute an arm of 60 steps on two quiet cores.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from helpers.profiles import load_profile

HELD_OUT = 1024
WARM = (
    "from helpers.profiles import load_profile as p; from helpers.warm_start import warm_checkpoint as w;"
    "w(p('cpu', seed=%d))"
)
KEY = ("knob", "arm", "seed")


class Bench:
    """A server that is up, one seed's start and questions, and the present arm's trainer."""

    def __init__(self, knob: str, seed: int, server):
        from helpers.checkpoints import tokenizer_and_pad
        from helpers.tasks import load_task

        settings = load_profile("cpu", seed=seed)
        self.knob, self.seed, self.server = knob, seed, server
        self.checkpoint = settings.checkpoint("warm")
        if not (self.checkpoint / "config.json").exists():
            subprocess.run([sys.executable, "-W", "ignore", "-c", WARM % seed], check=True)
        self.tokenizer, self.pad = tokenizer_and_pad(self.checkpoint)
        self.task = load_task(settings.task, seed)
        self.held_out = self.task.held_out(HELD_OUT)

    def roll_out(self, problems, greedy: bool = False):
        """(episodes, rewards)"""
        from helpers.rewards import score
        from helpers.rollout import roll_out

        episodes = roll_out(self.server, problems, self.trainer.settings, greedy)
        return episodes, score(episodes, problems, self.tokenizer)

    def send(self, weights, version: str) -> None:
        from helpers.weight_sync import send_tensors

        send_tensors(self.server, weights, version)

    def accuracy(self) -> float:
        self.send(self.trainer.export(), "exact")
        return statistics.mean(self.roll_out(self.held_out, greedy=True)[1])

    def run(self, name: str, steps: int) -> list[dict]:
        """Train one arm from the start; returns a row a step."""
        from helpers.mismatch import ARMS, knob
        from helpers.trainer import MegatronTrainer

        arm = ARMS[name]
        self.trainer = MegatronTrainer(arm.profile("cpu", seed=self.seed), self.checkpoint)
        turn, rows, before = knob(self.knob if arm.mismatch else "exact"), [], self.accuracy()
        for number in range(steps):
            self.send(turn(self.trainer.export()), f"step-{number}")
            rows.append(self.label(name) | {"step": number} | self.step(number, arm.shuffled))
        after = self.accuracy()
        self.trainer.close()
        return [row | {"before": before, "after": after} for row in rows]

    def label(self, arm: str) -> dict:
        return dict(zip(KEY, (self.knob, arm, self.seed), strict=True))

    def step(self, number: int, wrong: bool) -> dict:
        from helpers.collate import collate
        from helpers.objective import learn, step_advantages
        from helpers.rewards import shuffled

        start, settings = time.perf_counter(), self.trainer.settings
        episodes, rewards = self.roll_out(self.task.sample(settings.batch.prompts, number))
        given = shuffled(rewards, f"{self.seed}-{number}") if wrong else rewards
        advantages = step_advantages(episodes, given, settings)
        stats = learn(self.trainer, collate(episodes, advantages, self.pad), settings)
        names = ("generation_kl", "token_multiplier", "kept_share", "clip_fraction", "grad_norm", "entropy")
        return {
            "reward": statistics.mean(rewards),
            "length": statistics.mean(len(e.completion_ids) for e in episodes),
            "seconds": time.perf_counter() - start,
            **{n: stats[n] for n in names if n in stats},
        }


def summary(rows: list[dict]) -> dict:
    """The arm's row of mismatch.csv."""

    def mean(name: str, part: slice = slice(None)) -> float:
        return statistics.mean(row.get(name, 1.0) for row in rows[part])  # kept_share: without a remedy all

    first = rows[0]
    return {
        **{name: first[name] for name in KEY}, "steps": len(rows), "before": first["before"],
        "after": first["after"], "gain": first["after"] - first["before"],
        "reward_last10": mean("reward", slice(-10, None)), "length_last10": mean("length", slice(-10, None)),
        "generation_kl": mean("generation_kl"), "token_multiplier": mean("token_multiplier"),
        "kept_share": mean("kept_share"), "clip_fraction": mean("clip_fraction"),
        "grad_norm": mean("grad_norm"), "entropy_last10": mean("entropy", slice(-10, None)),
        "step_seconds": statistics.median(row["seconds"] for row in rows),
    }  # fmt: skip


class Table:
    """A CSV that is written anew after each arm; rows of other arms, knobs and seeds in it are kept."""

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        if path.is_file():
            lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
            self.rows = list(csv.DictReader(lines))

    def replace(self, rows: list[dict], label: str) -> None:
        from helpers.results import write_rows

        key = tuple(str(rows[0][name]) for name in KEY)
        self.rows = [row for row in self.rows if tuple(row[name] for name in KEY) != key]
        self.rows += [{k: f"{v:.6g}" if isinstance(v, float) else str(v) for k, v in r.items()} for r in rows]
        write_rows(self.path, self.rows, label)


def label() -> str:
    from helpers.results import git_commit, hardware

    machine = hardware()
    return f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {machine['cpu']}, {machine['cores']} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--knob", required=True, help="as helpers.mismatch.knob names them, e.g. int:3")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--arms", nargs="+", default=[], help="all of helpers.mismatch.ARMS when empty")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    a = parser.parse_args()
    served = load_profile("cpu", **{"algorithm.routing_replay": True})  # a server that can return experts
    os.environ.update(served.process_environment("trainer"))
    from helpers.mismatch import ARMS
    from helpers.rollout import RolloutServer

    ends, curves = Table(a.out / "mismatch.csv"), Table(a.out / "mismatch_curves.csv")
    with RolloutServer(served, served.checkpoint("warm")) as server:
        for seed in a.seeds:
            bench = Bench(a.knob, seed, server)
            for name in a.arms or ARMS:
                rows = bench.run(name, a.steps)
                done = summary(rows)
                print({k: round(v, 4) if isinstance(v, float) else v for k, v in done.items()}, flush=True)
                kept = (*KEY, "step", "reward", "generation_kl")
                curves.replace([{name: row[name] for name in kept} for row in rows], label())
                ends.replace([done], label())


if __name__ == "__main__":
    sys.exit(main())
