"""Folders of trainer checkpoints: whole or not there, the newest kept, a damaged one passed over."""

import json
import os

import pytest

from helpers.saves import (
    RUN_FILE, SaveError, partial_name, prune, publish, read_run, resume_newest, saved_steps, step_folder,
)  # fmt: skip


def written(root, step, keep=9, **data):
    """A published checkpoint with one file, newer than those before."""
    folder = step_folder(root, step)
    partial_name(folder).mkdir(parents=True)
    (partial_name(folder) / "weights").write_bytes(bytes([step % 256]) * 100)
    publish(folder, {"step": step, **data}, keep)
    written.clock += 10**9
    if folder.exists():
        os.utime(folder / RUN_FILE, ns=(written.clock, written.clock))
    return folder


written.clock = 10**18


def test_a_folder_exists_only_when_it_is_whole(tmp_path):
    partial_name(step_folder(tmp_path, 3)).mkdir(parents=True)
    assert saved_steps(tmp_path) == [] == saved_steps(tmp_path / "none")
    folder = written(tmp_path, 4)
    assert saved_steps(tmp_path) == [4] and read_run(folder) == {"step": 4}
    assert not partial_name(folder).exists()


def test_the_newest_stay_by_time_not_by_number(tmp_path):
    for step in (50, 100):
        written(tmp_path, step)
    for step in (20, 40):  # a new run in the same place
        written(tmp_path, step, keep=2)
    assert saved_steps(tmp_path) == [20, 40]
    written(tmp_path, 60)
    prune(tmp_path, 2)
    assert saved_steps(tmp_path) == [40, 60]


def test_saving_a_step_again_replaces_it(tmp_path):
    written(tmp_path, 5, rows=[1])
    written(tmp_path, 5, rows=[2])
    assert saved_steps(tmp_path) == [5] and read_run(step_folder(tmp_path, 5))["rows"] == [2]


def test_what_a_killed_save_left_is_cleared_by_the_next(tmp_path):
    partial_name(step_folder(tmp_path, 7)).mkdir(parents=True)
    written(tmp_path, 8)
    assert [p.name for p in tmp_path.iterdir()] == ["step-8"]


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_nothing_is_refused(tmp_path, keep):
    written(tmp_path, 1)
    with pytest.raises(ValueError, match="at least the newest"):
        prune(tmp_path, keep)
    assert saved_steps(tmp_path) == [1]


def test_the_newest_that_loads_is_resumed(tmp_path):
    for step in (1, 2, 3):
        written(tmp_path, step, rows=[step])
    asked = []

    def resume(folder):
        asked.append(folder.name)
        if folder.name == "step-3":
            raise SaveError("a file has changed")
        return 0

    assert resume_newest(tmp_path, resume) == (2, {"step": 2, "rows": [2]})
    assert asked == ["step-3", "step-2"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", "\udcff"])
def test_a_damaged_run_file_passes_the_checkpoint_over(tmp_path, damage):
    written(tmp_path, 1)
    folder = written(tmp_path, 2)
    (folder / RUN_FILE).write_bytes(damage.encode(errors="surrogateescape"))
    os.utime(folder / RUN_FILE, ns=(2 * 10**18, 2 * 10**18))
    assert resume_newest(tmp_path, lambda folder: 0)[0] == 1
    with pytest.raises(SaveError, match="not whole"):
        read_run(folder)


def test_a_run_file_that_is_gone_counts_as_oldest(tmp_path):
    (written(tmp_path, 2) / RUN_FILE).unlink()
    written(tmp_path, 1)
    assert saved_steps(tmp_path) == [2, 1]
    assert resume_newest(tmp_path, lambda folder: 0)[0] == 1


def test_nothing_to_resume_says_what_was_wrong_with_each(tmp_path):
    with pytest.raises(SaveError, match="there is none"):
        resume_newest(tmp_path, lambda folder: 0)
    (written(tmp_path, 6) / RUN_FILE).write_text("{")
    with pytest.raises(SaveError, match="step-6: .*JSONDecodeError"):
        resume_newest(tmp_path, lambda folder: 0)


def test_an_error_that_is_no_damage_is_not_hidden(tmp_path):
    """An older checkpoint is no cure for a failing trainer."""
    written(tmp_path, 1)
    written(tmp_path, 2)
    with pytest.raises(MemoryError):
        resume_newest(tmp_path, lambda folder: (_ for _ in ()).throw(MemoryError()))


def test_the_run_file_is_plain_json(tmp_path):
    folder = written(tmp_path, 1, rows=[{"reward": 0.5}])
    assert json.loads((folder / RUN_FILE).read_text()) == {"step": 1, "rows": [{"reward": 0.5}]}
