"""Trainer checkpoints with the real engines: written in the background, whole or not there, and the same curve after a resume."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from helpers.collate import collate
from helpers.objective import learn, step_advantages
from helpers.processes import alive, process_tree
from helpers.rewards import score
from helpers.rollout import roll_out
from helpers.saves import SaveError, partial_name, read_run, resume_newest, saved_steps, step_folder
from helpers.tasks import load_task
from helpers.weight_sync import sync_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def weights_as_before(trainer, checkpoint):
    """The trainer is the whole session's."""
    yield
    trainer.load_weights(checkpoint)


@pytest.fixture(scope="module")
def task(settings):
    return load_task(settings.task, settings.seed)


def roll(server, trainer, task, step):
    problems = task.sample(6, step)
    episodes = roll_out(server, problems, trainer.settings, draw=step)
    return episodes, score(episodes, problems, server.tokenizer)


def one_step(server, trainer, task, step) -> dict:
    """A GRPO step of 48 answers; what it saw and did, bit by bit."""
    episodes, rewards = roll(server, trainer, task, step)
    # an untrained policy is never right: any rewards with a spread teach as well here
    rewards = [sum(e.completion_ids) % 7 / 7 for e in episodes]
    advantages = step_advantages(episodes, rewards, trainer.settings)
    stats = learn(trainer, collate(episodes, advantages, 0), trainer.settings)
    sync_weights(trainer, server, f"saves-{step}")
    return {"answers": [e.completion_ids for e in episodes]} | {
        k: v for k, v in stats.items() if k != "seconds"
    }


@pytest.fixture(scope="module")
def batch(server, trainer, task):
    episodes, _ = roll(server, trainer, task, 0)
    return collate(episodes, step_advantages(episodes, list(range(48)), trainer.settings), 0)


def test_a_resumed_run_repeats_the_curve_bit_by_bit(server, trainer, task, checkpoint, tmp_path):
    """Answers, rewards, loss and gradient norm of each step after a checkpoint that was written in the background."""
    trainer.load_weights(checkpoint)
    sync_weights(trainer, server, "saves-start")
    first = [one_step(server, trainer, task, step) for step in range(2)]
    trainer.save(step_folder(tmp_path, 2), {"rows": [1, 2]}, wait=False)
    following = [one_step(server, trainer, task, step) for step in (2, 3, 4)]
    trainer.finish_saves()
    assert following[0]["loss"] != following[1]["loss"] and following[0]["answers"] != first[0]["answers"]
    assert resume_newest(tmp_path, trainer.resume) == (2, {"rows": [1, 2]})
    sync_weights(trainer, server, "saves-again")
    assert [one_step(server, trainer, task, step) for step in (2, 3, 4)] == following


def test_what_is_written_in_the_background_is_the_moment_of_the_call(trainer, batch, tmp_path):
    trainer.update(batch)
    then = trainer.logprobs(batch)
    trainer.save(step_folder(tmp_path, 1), wait=False)
    for _ in range(3):
        trainer.update(batch)
    trainer.finish_saves()
    assert not torch.equal(trainer.logprobs(batch), then)
    trainer.resume(step_folder(tmp_path, 1))
    assert torch.equal(trainer.logprobs(batch), then)


def test_only_the_newest_are_kept(trainer, tmp_path):
    for step in range(1, 5):
        trainer.save(step_folder(tmp_path, step), {"step": step}, wait=False)
    trainer.finish_saves()
    assert saved_steps(tmp_path) == [3, 4] and read_run(step_folder(tmp_path, 4)) == {"step": 4}


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "a flipped bit": flip,
    "a cut file": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a missing file": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(trainer, batch, tmp_path, damage):
    trainer.save(step_folder(tmp_path, 1), {"step": 1})
    then = trainer.logprobs(batch)
    trainer.update(batch)
    newest = trainer.save(step_folder(tmp_path, 2), {"step": 2})
    DAMAGE[damage](max(newest.glob("*.distcp"), key=lambda file: file.stat().st_size))
    with pytest.raises(SaveError, match="step-2 cannot be used"):
        trainer.resume(newest)
    assert resume_newest(tmp_path, trainer.resume) == (1, {"step": 1})
    assert torch.equal(trainer.logprobs(batch), then)


@contextmanager
def a_full_disk(size: int):
    """No file of this process and its children may grow beyond `size` bytes (EFBIG, where a full disk says ENOSPC)."""
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, kept[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_stops_the_save_and_not_the_training(trainer, batch, tmp_path, wait):
    trainer.update(batch)
    whole = trainer.save(step_folder(tmp_path, 1), {"step": 1})
    with a_full_disk(20_000), pytest.raises(SaveError, match="could not be written"):
        trainer.save(step_folder(tmp_path, 2), wait=wait)
        trainer.finish_saves()
    assert saved_steps(tmp_path) == [1] and trainer.update(batch)["grad_norm"] > 0
    trainer.save(step_folder(tmp_path, 3))
    assert saved_steps(tmp_path) == [1, 3] and not partial_name(step_folder(tmp_path, 2)).exists()
    trainer.resume(whole)


def test_a_folder_that_cannot_be_made_is_named(trainer, batch):
    with pytest.raises(SaveError, match="/proc/nothing/step-1 cannot be written: FileNotFoundError"):
        trainer.save("/proc/nothing/step-1")
    assert trainer.update(batch)["grad_norm"] > 0


OWNER = """
import time
from multiprocessing import current_process
from helpers.upstream_fixes import checkpoint_queue_ends_with_its_process
if __name__ == "__main__":
    checkpoint_queue_ends_with_its_process()
    print("up", flush=True)
    time.sleep(600)
"""


def test_a_killed_rank_leaves_no_queue_behind(tmp_path):
    """megatron-core's own would stay for good: its spawned manager does not watch the process that made it."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(script)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout.readline() == "up\n"
    tree = process_tree([owner.pid])
    assert len(tree) >= 2
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    assert alive(tree, patience=10) == []
