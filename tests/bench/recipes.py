"""Does each recipe of helpers/recipes.py teach on the CPU profile, with its paper's numbers?

    python tests/bench/recipes.py [--steps 80] [--seed 0] [--only gspo,cispo] [--out tests/bench/recorded]

One server serves all recipes in turn, with a new trainer each: the same weights, a fresh optimizer, the same
questions step by step. The learning rate is the profile's, so that recipes with four updates a batch move
about four times as far. Nothing was tuned.
One seed. On 256 held-out questions the standard error is about 0.025; and default, on_policy, tis and mis are
one algorithm here, where the engines agree to 1e-6, so that the range of their results is noise.
`shuffled` is the control: the default recipe, with the rewards given to the wrong answers of the step.

Writes recipes.csv (a row a recipe, as it ends) and recipes_curves.csv (reward by step). Two to four minutes a
recipe on two cores.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

from helpers.profiles import Profile, load_profile
from helpers.recipes import RECIPES

CONTROL = "shuffled"


def settings_of(name: str, seed: int) -> Profile:
    return load_profile("cpu", seed=seed, algorithm="default" if name == CONTROL else name)


class Bench:
    """A server that is up, the start of every recipe, and the present recipe's trainer."""

    def __init__(self, seed: int, server):
        from helpers.checkpoints import tokenizer_and_pad
        from helpers.tasks import load_task

        settings = settings_of("default", seed)
        self.seed, self.server, self.checkpoint = seed, server, settings.checkpoint("warm")
        self.tokenizer, self.pad = tokenizer_and_pad(self.checkpoint)
        self.task = load_task(settings.task, seed)
        self.held_out = self.task.held_out(settings.heldout)

    def roll_out(self, problems, greedy: bool = False, draw: int | None = None):
        """(episodes, rewards)"""
        from helpers.rewards import score
        from helpers.rollout import roll_out

        episodes = roll_out(self.server, problems, self.trainer.settings, greedy, draw)
        return episodes, score(episodes, problems, self.tokenizer)

    def accuracy(self) -> float:
        return statistics.mean(self.roll_out(self.held_out, greedy=True)[1])

    def run(self, name: str, steps: int) -> list[dict]:
        """Train with one recipe from the start; returns a row a step."""
        from helpers.trainer import MegatronTrainer
        from helpers.weight_sync import sync_weights

        self.trainer = MegatronTrainer(settings_of(name, self.seed), self.checkpoint)
        sync_weights(self.trainer, self.server, f"{name}-0")
        rows, before = [], self.accuracy()
        for number in range(steps):
            rows.append({"recipe": name, "step": number, **self.step(name, number)})
        return [row | {"before": before, "after": self.accuracy()} for row in rows]

    def step(self, name: str, number: int) -> dict:
        from helpers.collate import collate
        from helpers.dynamic_sampling import draw_step, fill_step
        from helpers.objective import learn, step_advantages
        from helpers.rewards import shuffled
        from helpers.weight_sync import sync_weights

        start, settings = time.perf_counter(), self.trainer.settings
        count = settings.batch.prompts

        def draw(extra: int):
            place = draw_step(number, extra)
            return self.roll_out(self.task.sample(count, place), draw=place)

        sampled = fill_step(draw, count, settings.algorithm.extra_draws)
        rewards = shuffled(sampled.rewards, f"{self.seed}-{number}") if name == CONTROL else sampled.rewards
        advantages = step_advantages(sampled.episodes, rewards, settings)
        stats = learn(self.trainer, collate(sampled.episodes, advantages, self.pad), settings)
        sync_weights(self.trainer, self.server, f"{name}-{number + 1}")
        return {
            "reward": sampled.sampled_reward, "length": statistics.mean(sampled.lengths),
            "draws": sampled.draws, "seconds": time.perf_counter() - start,
            **{k: v for k, v in stats.items() if k not in ("seconds", "loss")},
        }  # fmt: skip


def summary(rows: list[dict], seed: int) -> dict:
    """The recipe's row of recipes.csv."""
    a = settings_of(rows[0]["recipe"], seed).algorithm

    def mean(name: str, part: slice = slice(None)) -> float:
        return statistics.mean(row[name] for row in rows[part])

    return {
        "recipe": rows[0]["recipe"], "seed": seed, "steps": len(rows), "updates": len(rows) * a.mini_batches,
        "before": rows[0]["before"], "after": rows[0]["after"], "gain": rows[0]["after"] - rows[0]["before"],
        "reward_last10": mean("reward", slice(-10, None)), "length_last10": mean("length", slice(-10, None)),
        "entropy_last10": mean("entropy", slice(-10, None)), "clip_fraction": mean("clip_fraction"),
        "grad_norm": mean("grad_norm"), "generation_kl_max": max(row["generation_kl"] for row in rows),
        "token_multiplier_max": max(row["token_multiplier"] for row in rows),
        "draws": mean("draws"), "step_seconds": statistics.median(row["seconds"] for row in rows),
    }  # fmt: skip


def write(path: Path, rows: list[dict]) -> None:
    from helpers.results import git_commit, hardware, write_rows

    machine = hardware()
    label = f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {machine['cpu']}, {machine['cores']} cores"
    short = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
    write_rows(path, short, label)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", default="", help="recipes, comma-separated; all of them and the control when empty"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    a = parser.parse_args()
    names = a.only.split(",") if a.only else [*RECIPES, CONTROL]
    os.environ.update(settings_of("default", a.seed).process_environment("trainer"))
    from helpers.checkpoints import require_checkpoint
    from helpers.rollout import RolloutServer

    settings = settings_of("default", a.seed)
    require_checkpoint(settings.checkpoint("warm"))
    done, curves = [], []
    with RolloutServer(settings, settings.checkpoint("warm")) as server:
        bench = Bench(a.seed, server)
        for name in names:
            rows = bench.run(name, a.steps)
            done.append(summary(rows, a.seed))
            curves += [
                {"recipe": r["recipe"], "seed": a.seed, "step": r["step"], "reward": r["reward"]}
                for r in rows
            ]
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in done[-1].items()}, flush=True)
            write(a.out / "recipes.csv", done)
            write(a.out / "recipes_curves.csv", curves)


if __name__ == "__main__":
    sys.exit(main())
