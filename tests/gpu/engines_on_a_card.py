"""One card, one trainer, one or several SGLang engines beside it: does every engine follow, and is it any faster?

    python tests/gpu/engines_on_a_card.py [--profile gpu] [--engines 1 2] [--rounds 6] [--out tests/gpu/recorded]

For each number of engines a cluster starts from the same checkpoint (fractions of the card in Ray's books, weights as CUDA IPC
handles, found by the card's UUID). A round: sample a step's answers, update on them, sync to all engines. Then each
engine's own answers are rated by the trainer: the gap is what the sync has to keep small.
Writes engines_on_a_card.csv, a row a round; fails when an engine's weights are not the trainer's.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from helpers.profiles import load_profile

GAP = 0.02  # nat, mean over an engine's tokens: tests/gpu's limit for bf16 on trained weights


def measured(cluster, step: int, card_gb) -> dict:
    """One round: seconds of rollout, update and sync, tokens/s, and each engine's mean gap (nat) after the sync."""
    from helpers.checkpoints import tokenizer_and_pad
    from helpers.collate import collate
    from helpers.objective import learn, step_advantages
    from helpers.rewards import score
    from helpers.tasks import load_task

    settings = cluster.settings
    tokenizer, pad = tokenizer_and_pad(Path(cluster.checkpoint))
    problems = load_task(settings.task, settings.seed).sample(settings.batch.prompts, step)
    seconds, start = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[name], start = now - start, now

    episodes = cluster.roll_out(problems, draw=step)
    lap("rollout_seconds")
    advantages = step_advantages(episodes, score(episodes, problems, tokenizer), settings)
    learn(cluster, collate(episodes, advantages, pad, settings.trainer.seq_length), settings)
    lap("update_seconds")
    cluster.sync_weights(f"step-{step + 1}")
    lap("sync_seconds")
    tokens = sum(len(e.completion_ids) for e in episodes)
    return {
        "step": step, **seconds, "tokens": tokens, "tokens_per_second": tokens / seconds["rollout_seconds"],
        "card_gb": card_gb(), **gaps(cluster, problems, step, pad),
    }  # fmt: skip


def gaps(cluster, problems, step: int, pad: int) -> dict[str, float]:
    """"gap_<i>" -> mean |trainer - rollout| logprob (nat a token) of answers that engine i alone samples now."""
    import ray
    import torch

    from helpers.collate import collate

    found = {}
    for i, engine in enumerate(cluster.engines):
        episodes = ray.get(engine.roll_out.remote(problems[:16], False, step))
        assert {v for e in episodes for v in e.weight_versions} == {f"step-{step + 1}"}
        batch = collate(episodes, torch.zeros(len(episodes)), pad, cluster.settings.trainer.seq_length)
        gap = (cluster.logprobs(batch) - batch.rollout_logprobs).abs() * batch.loss_mask
        found[f"gap_{i}"] = (gap.sum() / batch.loss_mask.sum()).item()
    return found


def used_gb() -> float:
    """GB (1e9 bytes) in use on the card, by everybody."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]) * 2**20 / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="gpu")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    a = parser.parse_args()
    from helpers.checkpoints import starting_checkpoint
    from helpers.cluster import GrpoCluster, RayHead
    from helpers.results import write_measured

    rows, widest = [], max(a.engines)
    for engines in a.engines:
        changes = {"rollout.engines": engines, "rollout.shared": False}
        if engines > 1 and load_profile(a.profile).device == "cuda":
            changes |= {"cluster.engines_per_card": engines, "rollout.mem_fraction": 0.6 / engines}
        settings = load_profile(a.profile, **changes)
        os.environ.update(settings.process_environment("kernel"))
        warm = settings.checkpoint("warm")
        checkpoint = warm if (warm / "config.json").is_file() else starting_checkpoint(settings)
        begun = time.perf_counter()
        with RayHead(settings):
            cluster = GrpoCluster(settings, checkpoint).start()
            try:
                ranks = cluster.ready()
                shared = {card for place in cluster.places for card in place["cards"]}
                print(f"{engines} engines up after {time.perf_counter() - begun:.0f} s on {len(shared)} card(s)", flush=True)
                assert settings.device == "cpu" or shared == {ranks[0]["card"]}
                for step in range(a.rounds):
                    row = measured(cluster, step, used_gb if settings.device == "cuda" else lambda: 0.0)
                    row = {"engines": engines} | row | {f"gap_{i}": "" for i in range(engines, widest)}
                    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    rows.append(row)
                    write_measured(a.out / "engines_on_a_card.csv", rows)
            finally:
                cluster.stop()
    for engines in a.engines:
        of = [row for row in rows[:] if row["engines"] == engines][1:]  # the first round warms up
        medians = {n: statistics.median(row[n] for row in of) for n in ("rollout_seconds", "sync_seconds", "card_gb")}
        print(engines, {name: round(value, 3) for name, value in medians.items()})
    worst = max(row[f"gap_{i}"] for row in rows for i in range(row["engines"]))
    print(f"worst mean gap of an engine: {worst:.4f} nat (limit {GAP})")
    return int(worst >= GAP)


if __name__ == "__main__":
    sys.exit(main())
