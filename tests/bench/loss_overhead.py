"""What do advantages, corrections and losses cost beside an update, and what do logprobs hold in memory?

    python tests/bench/loss_overhead.py [--out tests/bench/recorded]

Writes
    loss_overhead.csv   milliseconds of advantages and of each recipe's loss with its backward pass to the
                        logprobs, and their share of one update of the tiny gpt-oss on a batch of that shape
                        (forward, backward, optimizer), one thread; shapes: profile cpu's [256, 32], and
                        [64, 1536] in micro-batches of 2
    logprob_memory.csv  bytes at the peak of helpers.logprobs over gpt-oss's vocabulary, by torch's own record
                        of allocations
The checkpoint is notebook 02's warm start. About three minutes on two cores, most for the second shape.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from helpers.profiles import Profile, load_profile
from helpers.results import git_commit, hardware, write_rows

SHAPES = {"profile cpu": (256, 32, 256), "64 x 1536": (64, 1536, 2)}  # episodes, positions, micro-batch
EVERYTHING = {
    "algorithm.old_logprobs": "trainer", "algorithm.mini_batches": 2, "algorithm.dual_clip": 3.0,
    "algorithm.correction": "tis", "algorithm.correction_level": "sequence",
    "algorithm.trust_region": "sequence_kl", "algorithm.trust_region_bound": 0.01,
    "algorithm.kl_coefficient": 0.001, "algorithm.kl_kind": "k3+",
}  # fmt: skip
RECIPES: dict[str, dict] = {
    "default": {},
    "gspo": {"algorithm": "gspo"},
    "cispo": {"algorithm": "cispo"},
    "tis": {"algorithm": "tis"},
    "mis": {"algorithm": "mis"},
    "all at once": EVERYTHING,
}
TOKENS, VOCABULARY = 4096, 201_088


def random_batch(episodes: int, positions: int):
    """A batch with all logprobs that any recipe asks for; each row's last three quarters are its answer."""
    import torch

    from helpers.records import Batch

    generator = torch.Generator().manual_seed(0)
    shape, start = (episodes, positions), positions // 4
    mask = torch.zeros(shape)
    mask[:, start:-1] = 1.0
    rollout, old, reference = (-torch.rand(shape, generator=generator) * mask for _ in range(3))
    ids = torch.randint(1, 64, shape, generator=generator)
    advantages = torch.randn(episodes, 1, generator=generator) * mask
    places = torch.arange(positions).expand(shape).contiguous()
    return Batch(ids, ids, places, mask, rollout, advantages, torch.arange(episodes) // 8, old, reference)


def median_milliseconds(work: Callable[[], object], least_seconds: float = 2.0) -> float:
    """Median of at least 30 calls and of as many as fit in `least_seconds`: one hiccup must not decide."""
    for _ in range(3):
        work()
    times: list[float] = []
    while len(times) < 30 or sum(times) < least_seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def parts_of(settings: dict[str, Profile], batch) -> dict[str, float]:
    """Part of a step -> milliseconds."""
    import torch

    from helpers.advantages import group_advantages
    from helpers.objective import policy_loss

    rewards = (torch.arange(len(batch.group)) % 3 == 0).float()
    found = {"advantages": median_milliseconds(lambda: group_advantages(rewards, batch.group))}
    logprobs = (batch.rollout_logprobs - 0.01).requires_grad_()
    for name, profile in settings.items():
        loss = policy_loss(profile)
        found[f"loss: {name}"] = median_milliseconds(
            lambda: torch.autograd.grad(loss(logprobs, batch).total, logprobs)
        )
    return found


def update_milliseconds(trainer, micro_batch: int, batch, repeats: int) -> float:
    layout = replace(trainer.settings.trainer, micro_batch=micro_batch)
    trainer.settings = replace(trainer.settings, trainer=layout)
    times = [1e3 * trainer.update(batch)["seconds"] for _ in range(repeats + 1)]
    return statistics.median(times[1:])


def overhead(trainer) -> list[dict]:
    rows = []
    settings = {name: load_profile("cpu", **changes) for name, changes in RECIPES.items()}
    for shape, (episodes, positions, micro_batch) in SHAPES.items():
        batch = random_batch(episodes, positions)
        parts = parts_of(settings, batch)
        whole = update_milliseconds(trainer, micro_batch, batch, repeats=10 if positions < 100 else 1)
        for part, took in {**parts, "update": whole}.items():
            row = {
                "shape": shape,
                "part": part,
                "milliseconds": f"{took:.3f}",
                "share_of_update": f"{took / whole:.5f}",
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def memory() -> list[dict]:
    import torch

    from helpers.logprobs import CHUNK_BYTES, token_entropy, token_logprobs
    from helpers.memory import peak_allocated_bytes

    logits = torch.randn(1, TOKENS, VOCABULARY, dtype=torch.bfloat16).requires_grad_()
    labels, kept = torch.randint(0, VOCABULARY, (1, TOKENS)), []
    peaks = {
        "logits (bf16)": logits.nbytes,
        "a piece (fp32), at most": CHUNK_BYTES,
        "logprobs, forward": peak_allocated_bytes(lambda: kept.append(token_logprobs(logits, labels))),
        "logprobs, backward, with the logits' gradient": peak_allocated_bytes(lambda: kept[0].sum().backward()),
        "entropy": peak_allocated_bytes(lambda: token_entropy(logits)),
    }
    rows = [{"tokens": TOKENS, "vocabulary": VOCABULARY, "what": k, "bytes": v} for k, v in peaks.items()]
    print(*rows, sep="\n", flush=True)
    return rows


def conditions() -> str:
    machine = hardware()
    label = f"{time.strftime('%Y-%m-%d')}, commit {git_commit()}, {machine['cpu']}, {machine['cores']} cores"
    return f"{label}, load average {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("recorded"))
    out = parser.parse_args().out
    settings = load_profile("cpu")
    os.environ.update(settings.process_environment("trainer"))
    from helpers.checkpoints import require_checkpoint

    checkpoint = settings.checkpoint("warm")
    require_checkpoint(checkpoint)
    from helpers.trainer import MegatronTrainer

    trainer = MegatronTrainer(settings, checkpoint)
    write_rows(out / "logprob_memory.csv", memory(), conditions())
    write_rows(out / "loss_overhead.csv", overhead(trainer), conditions())


if __name__ == "__main__":
    sys.exit(main())
