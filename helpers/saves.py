"""Trainer checkpoints of a run: `step-<n>` folders below one root, each whole or not there, the newest few kept.

The trainer writes a folder (helpers.trainer.MegatronTrainer.save, in the background if asked to) and gives it its name last.
What the run itself has to remember, its rows and figures so far, lies beside it as plain JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers.messages import one_line

log = logging.getLogger(__name__)
RUN_FILE = "run.json"
_NAME = re.compile(r"step-(\d+)")


class SaveError(RuntimeError):
    """A trainer checkpoint could not be written, or the one that was asked for cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def partial_name(folder: Path) -> Path:
    """Where a checkpoint is written before it is whole; a leading dot keeps it out of saved_steps."""
    return folder.with_name(f".{folder.name}.partial")


def publish(folder: Path, data: dict[str, Any], keep: int) -> None:
    """Turn the partial folder into `folder`, with data as its run.json: from here on it exists. Then prune to `keep`."""
    partial = partial_name(folder)
    with (partial / RUN_FILE).open("w") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    prune(folder.parent, keep)


def saved_steps(root: Path | str) -> list[int]:
    """Steps that have a folder below root, in the order of writing; partial ones are not among them.

    Not by number: a new run in the folder of an old one starts at step 0 again, and its step 20 is the newer one.
    """
    folders = [path for path in Path(root).glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return [int(path.name.removeprefix("step-")) for path in sorted(folders, key=_written)]


def _written(folder: Path) -> tuple[int, int]:
    """When a checkpoint became whole (ns), and its step, for two of one moment; a damaged one counts as oldest."""
    file = folder / RUN_FILE
    return (file.stat().st_mtime_ns if file.is_file() else 0), int(folder.name.removeprefix("step-"))


def step_folder(root: Path | str, step: int) -> Path:
    return Path(root) / f"step-{step}"


def prune(root: Path | str, keep: int) -> list[int]:
    """Remove all but the `keep` steps written last and what a killed save left behind; returns the removed steps.

    Call it between saves only: a partial folder may be one that is still being written.
    Raises ValueError for keep < 1.
    """
    if keep < 1:
        raise ValueError(f"keep = {keep}: at least the newest checkpoint has to stay")
    old = saved_steps(root)[:-keep]
    for step in old:
        shutil.rmtree(step_folder(root, step))
    for leftover in Path(root).glob(".step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
    return old


def read_run(folder: Path | str) -> dict[str, Any]:
    """What the run kept beside a checkpoint. Raises SaveError where that is missing or no JSON object."""
    path = Path(folder) / RUN_FILE
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SaveError(
            f"{path} cannot be read ({type(error).__name__}): the checkpoint is not whole"
        ) from error
    if not isinstance(data, dict):
        raise SaveError(f"{path} holds {type(data).__name__}, not an object: the checkpoint is not whole")
    return data


def resume_newest(root: Path | str, resume: Callable[[Path], int]) -> tuple[int, dict[str, Any]]:
    """Load the checkpoint written last that can be loaded; returns (its step, what the run kept).

    resume: a trainer's or cluster's; raises SaveError for a folder that is damaged, and the next older one is tried.
    Raises SaveError when none is left, with what was wrong with each.
    """
    reasons = []
    for step in reversed(saved_steps(root)):
        folder = step_folder(root, step)
        try:
            data = read_run(folder)
            resume(folder)
            return step, data
        except SaveError as error:
            reasons.append(f"step-{step}: {error}")
            log.warning("%s cannot be resumed, trying an older one: %s", folder, error)
    found = "; ".join(reasons) or "there is none"
    raise SaveError(f"no checkpoint below {root} can be resumed ({found}); start again without resuming")
