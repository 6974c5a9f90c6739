"""The launcher: what it starts ends with its parent, its shared memory and its folder too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from helpers.processes import alive, process_tree
from helpers.rollout import LAUNCHER

# a command that leaves a grandchild of its own session, maps a shared-memory file and ignores the polite signal
STUBBORN = """
import mmap, os, signal, subprocess, sys, time
file = sys.argv[1]
with open(file, "w+b") as f:
    f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""


def launch(tmp_path, name):
    folder, shared = tmp_path / "gone", Path(f"/dev/shm/grpo-test-{os.getpid()}-{name}")
    folder.mkdir()
    command = [
        sys.executable,
        str(LAUNCHER),
        "--remove",
        str(folder),
        sys.executable,
        "-c",
        STUBBORN,
        str(shared),
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "up\n"
    deadline = time.monotonic() + 20
    while len(process_tree([process.pid])) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, folder, shared


def check_all_gone(process, tree, folder, shared):
    process.wait(20)
    assert len(tree) == 3
    assert alive(tree) == []
    assert not folder.exists()
    assert not shared.exists()


def test_closing_the_pipe_ends_everything(tmp_path):
    process, folder, shared = launch(tmp_path, "pipe")
    tree = process_tree([process.pid])
    process.stdin.close()
    check_all_gone(process, tree, folder, shared)


def test_terminating_the_launcher_ends_everything(tmp_path):
    process, folder, shared = launch(tmp_path, "term")
    tree = process_tree([process.pid])
    process.send_signal(signal.SIGTERM)
    check_all_gone(process, tree, folder, shared)
    process.stdin.close()


def test_an_interrupt_does_not_reach_the_command(tmp_path):
    process, folder, shared = launch(tmp_path, "int")
    tree = process_tree([process.pid])
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert sorted(alive(tree, patience=0)) == sorted(tree)
    process.stdin.close()
    check_all_gone(process, tree, folder, shared)


def test_the_commands_exit_code_is_passed_on():
    process = subprocess.Popen(
        [sys.executable, str(LAUNCHER), sys.executable, "-c", "raise SystemExit(7)"], stdin=subprocess.PIPE
    )
    assert process.wait(30) == 7
    process.stdin.close()


MAPS = """
import mmap, sys, time
kept = []
for file in sys.argv[1:]:
    with open(file, "r+b") as f:
        kept.append(mmap.mmap(f.fileno(), 4096))
print("up", flush=True)
time.sleep(600)
"""


def test_files_that_the_command_only_reads_stay(tmp_path):
    """A checkpoint kept in /dev/shm is mapped by the server: the launcher once took it for the server's own and deleted it."""
    stem = Path(f"/dev/shm/grpo-test-{os.getpid()}")
    nested, before = stem / "model.safetensors", Path(f"{stem}-before")
    weights, fresh = Path(f"{stem}.safetensors"), Path(f"{stem}-fresh")
    stem.mkdir()
    try:
        for file in (nested, before):
            file.write_bytes(bytes(4096))
        create = f"import pathlib; [pathlib.Path(p).write_bytes(bytes(4096)) for p in {[str(weights), str(fresh)]}]\n"
        files = [str(f) for f in (nested, before, weights, fresh)]
        command = [sys.executable, str(LAUNCHER), sys.executable, "-c", create + MAPS, *files]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout.readline() == "up\n"
        process.stdin.close()
        process.wait(30)
        assert [f.exists() for f in (nested, before, weights, fresh)] == [True, True, True, False]
    finally:
        for file in (nested, before, weights, fresh):
            file.unlink(missing_ok=True)
        stem.rmdir()
