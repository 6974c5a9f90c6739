"""Does GRPO teach, and is it GRPO that teaches? Three seeds and two controls on the CPU profile.

    python tests/bench/learning.py [--steps 100] [--out tests/bench/recorded]

Runs, one after the other, each in a process of its own:
    grpo      seeds 0, 1, 2       the recipe of notebook 06
    shuffled  seed 0              the same, but the rewards go to the wrong answers of the step
    supervised seed 0             no rewards: more demonstrations, batch 256, for the seconds that grpo seed 0 took
Writes learning.csv (one row a run) and learning_curves.csv (reward by step). About fifteen minutes on two cores.
"""

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from helpers.profiles import load_profile

RUNS = [("grpo", 0), ("grpo", 1), ("grpo", 2), ("shuffled", 0), ("supervised", 0)]


def one_run(kind: str, seed: int, steps: int, seconds: float) -> dict:
    """One run in this process; returns its row and its rewards by step."""
    settings = load_profile("cpu", seed=seed, steps=steps)
    os.environ.update(settings.process_environment("trainer"))
    import torch

    from helpers.advantages import group_advantages
    from helpers.checkpoints import tokenizer_and_pad
    from helpers.collate import collate
    from helpers.losses import supervised_loss
    from helpers.rewards import score, shuffled
    from helpers.rollout import RolloutServer, roll_out
    from helpers.tasks import load_task
    from helpers.trainer import MegatronTrainer
    from helpers.warm_start import demonstration_batch
    from helpers.weight_sync import sync_weights

    checkpoint = settings.checkpoint("warm")
    if not checkpoint.exists():
        warm = "from helpers.profiles import load_profile as p; from helpers.warm_start import warm_checkpoint as w; w(p('cpu', seed=%d))"
        subprocess.run([sys.executable, "-W", "ignore", "-c", warm % seed], check=True)
    tokenizer, pad = tokenizer_and_pad(checkpoint)
    task = load_task(settings.task, seed)
    held_out = task.held_out(settings.heldout)
    w = settings.warm_start
    demonstrations = task.demonstrations(w.demonstrations, w.lazy_share, w.slip_rate)
    rng, rewards_by_step = random.Random(f"bench-{seed}"), []

    with RolloutServer(settings, checkpoint).start() as server:
        trainer = MegatronTrainer(settings, checkpoint)

        def accuracy() -> float:
            return statistics.mean(
                score(roll_out(server, held_out, settings, greedy=True), held_out, tokenizer)
            )

        before, start, done = accuracy(), time.monotonic(), 0
        while (time.monotonic() - start < seconds) if kind == "supervised" else (done < steps):
            if kind == "supervised":
                batch = demonstration_batch(
                    tokenizer, pad, rng.sample(demonstrations, settings.batch.episodes)
                )
                trainer.update(batch, supervised_loss)
            else:
                problems = task.sample(settings.batch.prompts, done)
                episodes = roll_out(server, problems, settings)
                rewards = score(episodes, problems, tokenizer)
                rewards_by_step.append(statistics.mean(rewards))
                learned = shuffled(rewards, f"{seed}-{done}") if kind == "shuffled" else rewards
                groups = torch.tensor([e.group for e in episodes])
                advantages = group_advantages(torch.tensor(learned), groups, settings.algorithm.advantage)
                trainer.update(collate(episodes, advantages, pad))
                sync_weights(trainer, server, f"step-{done + 1}")
            done += 1
        took = time.monotonic() - start
        sync_weights(trainer, server, "final")
        after = accuracy()
    row = {
        "run": kind,
        "seed": seed,
        "steps": done,
        "before": before,
        "after": after,
        "gain": after - before,
        "seconds": took,
    }
    return {"row": row, "rewards": rewards_by_step}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    parser.add_argument(
        "--one", nargs=3, metavar=("KIND", "SEED", "SECONDS"), help="internal: one run, result as JSON"
    )
    a = parser.parse_args()
    if a.one:
        result = one_run(a.one[0], int(a.one[1]), a.steps, float(a.one[2]))
        print("RESULT " + json.dumps(result), flush=True)
        return
    rows, curves, seconds = [], [], 0.0
    for kind, seed in RUNS:
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--steps",
            str(a.steps),
            "--one",
            kind,
            str(seed),
            str(seconds),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
        rows.append(result["row"])
        curves += [
            {"run": kind, "seed": seed, "step": i, "reward": r} for i, r in enumerate(result["rewards"])
        ]
        seconds = seconds or result["row"]["seconds"]
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in result["row"].items()}, flush=True)
    from helpers.results import git_commit, hardware

    note = f"# {time.strftime('%Y-%m-%d')} commit {git_commit()} {hardware()}"
    for name, table in (("learning.csv", rows), ("learning_curves.csv", curves)):
        with (a.out / name).open("w", newline="") as file:
            file.write(note + "\n")
            writer = csv.DictWriter(file, table[0].keys())
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
