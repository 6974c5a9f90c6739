"""Warm start: supervised steps in Megatron that give GRPO a policy with something to choose from."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from helpers.checkpoints import starting_checkpoint, tokenizer_and_pad
from helpers.collate import collate
from helpers.harmony import encode
from helpers.losses import supervised_loss
from helpers.profiles import Profile
from helpers.records import Batch, Episode
from helpers.tasks import Demonstration, load_task
from helpers.trainer import MegatronTrainer


def warm_start_settings(settings: Profile) -> Profile:
    """The profile with the supervised phase's optimizer: AdamW, 20 warm-up steps, cosine down to a tenth."""
    w = settings.warm_start
    trainer = replace(
        settings.trainer, learning_rate=w.learning_rate, warmup_steps=20, decay_steps=w.steps, beta1=0.9, beta2=0.95,
        weight_decay=0.01, micro_batch=w.batch,
    )  # fmt: skip
    return replace(settings, trainer=trainer)


def demonstration_batch(tokenizer, pad_id: int, demonstrations: list[Demonstration]) -> Batch:
    """Demonstrations as a batch whose loss mask covers the completions."""
    episodes = []
    for i, d in enumerate(demonstrations):
        completion = encode(tokenizer, d.completion)
        episodes.append(Episode(encode(tokenizer, d.prompt), completion, (0.0,) * len(completion), "stop", i))
    return collate(episodes, None, pad_id)


def supervised_steps(
    trainer: MegatronTrainer, tokenizer, pad_id: int, each: Callable[[int, dict], None] | None = None
) -> list[float]:
    """settings.warm_start.steps updates on the task's demonstrations; returns the loss of every step.

    each(step, stats) is called after each update, for a progress bar.
    """
    w, seed = trainer.settings.warm_start, trainer.settings.seed
    data = load_task(trainer.settings.task, seed).demonstrations(w.demonstrations, w.lazy_share, w.slip_rate)
    rng, losses = random.Random(f"warm-start-{seed}"), []
    for step in range(w.steps):
        batch = demonstration_batch(tokenizer, pad_id, rng.sample(data, w.batch))
        stats = trainer.update(batch, supervised_loss)
        losses.append(stats["loss"])
        if each:
            each(step, stats)
    return losses


def policy_folder(settings: Profile) -> Path:
    """Where the policy lies that GRPO starts from: warm-started, or as it came where the profile has no warm-start steps.

    Not made here, except that weights from a folder or the hub are checked, and a plain copy is written of MXFP4.
    """
    if settings.warm_start.steps:
        return settings.checkpoint("warm")
    return settings.checkpoint("random") if settings.model.source == "generated" else starting_checkpoint(settings)


def warm_checkpoint(settings: Profile) -> Path:
    """policy_folder(settings), made here (in this process; a warm start with Megatron) if it is missing."""
    folder = policy_folder(settings)
    if (folder / "config.json").is_file():
        return folder
    start = starting_checkpoint(settings)
    if start == folder:
        return folder
    tokenizer, pad = tokenizer_and_pad(start)
    trainer = MegatronTrainer(warm_start_settings(settings), start)
    supervised_steps(trainer, tokenizer, pad)
    made = trainer.export_checkpoint(folder)
    trainer.close()  # the caller's own trainer comes next, in this process
    return made
