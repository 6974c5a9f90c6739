"""Run a command in a session of its own and end it, with all it started, when the parent goes away.

    Popen([python, ".../helpers/launcher.py", "--remove", folder, *command], stdin=PIPE, start_new_session=True)

--remove FOLDER (optional, first) is deleted at the very end: temp folders of a killed parent do not pile up.

The pipe on stdin is the life line: it closes when the parent closes it, ends, or is killed (even by SIGKILL). A notebook's
interrupt does not reach the command, since it is in another session. Standard library only; never imported by the engines.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
SHARED = "/dev/shm"
_GRACE = 12.0  # seconds between asking and ending


def _descendants(root: int) -> list[int]:
    """Process ids below `root`, from /proc; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = open(f"/proc/{entry}/stat").read().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _mapped(pids: list[int]) -> set[str]:
    """Files directly in /dev/shm that these processes map. Not those in folders: shm_open makes none."""
    found = set()
    for pid in pids:
        try:
            lines = open(f"/proc/{pid}/maps").read().splitlines()
        except OSError:
            continue
        paths = {line.split(None, 5)[5] for line in lines if "/dev/shm/" in line}
        found |= {path for path in paths if os.path.dirname(path) == SHARED}
    return found


def _remove_shared_files(ours: set[str]) -> None:
    """Unlink what our processes left in shared memory (semaphores, SGLang's load files) and nobody else maps.

    Mapping a file is no sign of having made it: a checkpoint that somebody keeps in /dev/shm is mapped too. So what lay there
    when we started stays, and so does anything in a folder or with the name of weights.
    """
    ours = {path for path in ours if not path.endswith(".safetensors")}
    others = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if ours else []
    for path in ours - _mapped(others):
        try:
            os.unlink(path)
        except OSError:  # already gone ("... (deleted)"), or not ours to remove
            pass


def _reap() -> None:
    """Collect what has ended: as the sub-reaper this process inherits orphans, and a zombie keeps its pid taken."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _end(process: subprocess.Popen, shared: set[str], there: set[str]) -> None:
    """Ask the main process to end (SGLang then ends its own children), and end whatever is left after the grace.

    shared: what our processes mapped in shared memory; there: what lay there before we started.
    """
    shared |= _mapped(_descendants(os.getpid()))
    process.poll()
    if process.returncode is None:
        process.terminate()
    deadline = time.monotonic() + _GRACE
    while _descendants(os.getpid()) and time.monotonic() < deadline:
        process.poll()
        if process.returncode is not None:
            for pid in _descendants(os.getpid()):
                _signal(pid, signal.SIGTERM)
            _reap()
        time.sleep(0.1)
    for pid in _descendants(os.getpid()):
        _signal(pid, signal.SIGKILL)
    while _descendants(os.getpid()):
        _reap()
        time.sleep(0.02)
    _remove_shared_files(shared - there)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def main(command: list[str]) -> int:
    folder, command = (command[1], command[2:]) if command[0] == "--remove" else ("", command)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))

    def in_child() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    there = {os.path.join(SHARED, name) for name in os.listdir(SHARED)} if os.path.isdir(SHARED) else set()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    shared, start, seen = (
        set(),
        time.monotonic(),
        0.0,
    )  # what a process mapped is unknown once it has died by itself
    while process.poll() is None and not stop:
        readable, _, _ = select.select([0], [], [], 0.3)
        if readable and not os.read(0, 4096):
            break
        now = time.monotonic()
        if now - seen > (
            1 if now - start < 120 else 30
        ):  # often while it starts, seldom later: reading maps costs time
            shared, seen = shared | _mapped(_descendants(os.getpid())), now
    died = process.returncode
    _end(process, shared, there)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return died if died is not None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
