"""Processes: who belongs to whom, what they weigh, and how they are ended. Reads /proc; standard library only.

PSS (proportional set size, /proc/<pid>/smaps_rollup) divides a shared page among its users, so the sum over processes is
what the machine really holds; RSS would count the libraries that all of them map once for each.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
MIB = 2**20
SAMPLE_SECONDS = 1.5


def pss(pid: int) -> int:
    """Proportional set size of a process in bytes; 0 when it is gone, a zombie, or not ours to read."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def process_tree(roots: Sequence[int]) -> list[int]:
    """The roots and all their descendants that live now."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (parent, _, state) in table.items():
        if state != "Z":
            children.setdefault(parent, []).append(pid)
    found, todo = [], list(roots)
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.append(pid)
            todo += children.get(pid, [])
    return found


def alive(pids: Sequence[int], patience: float = 5.0) -> list[int]:
    """Which of these processes still run after up to `patience` seconds; zombies do not count."""
    deadline = time.monotonic() + patience
    while True:
        left = [pid for pid in pids if (entry := _entry(pid)) and entry[2] not in "ZX"]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def become_subreaper() -> None:
    """Make orphans of this process tree children of the runner instead of init, so that none
    escapes from view.

    SGLang servers and Ray daemons start sessions of their own and lose their parent. Source:
    prctl(2),
    PR_SET_CHILD_SUBREAPER = 36, Linux only; elsewhere the watch by pid and start time remains.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0)
    except (OSError, AttributeError) as error:
        log.info("orphans are not re-parented to the runner: %s", error)


def process_table() -> dict[int, tuple[int, str, str]]:
    """pid -> (parent pid, start time, state) of every process that /proc shows."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: entry for pid in pids if (entry := _entry(pid))}


def _entry(pid: int) -> tuple[int, str, str] | None:
    """(parent pid, start time, state) of one process; None when it is gone."""
    try:
        # the command name may hold spaces and brackets: split behind its last bracket
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return int(words[1]), words[19], words[0]


def process_name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    # the first words without folders: neither a report nor a message shall carry machine paths
    return " ".join(Path(word).name for word in words[:3] if word and not word.startswith("{"))[:80] or "?"


class ProcessWatch(threading.Thread):
    """Follows every descendant of the runner by (pid, start time) and samples memory.

    Processes that exist when `mark_shared` is called, and their descendants, belong to the series
    and not to a
    notebook: they count for memory but are not ended with a notebook.
    """

    def __init__(self) -> None:
        super().__init__(name="process-watch", daemon=True)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._known: dict[int, str] = {}  # pid -> start time, of the notebook
        self._shared: dict[int, str] = {}
        self._own = os.getpid()
        self._first_parent: dict[tuple[int, str], int] = {}
        self.peak_mib = 0.0
        self.peak_processes: list[dict[str, Any]] = []

    def run(self) -> None:
        last = 0.0
        while not self._over.wait(0.4):
            self.scan()
            if time.monotonic() - last >= SAMPLE_SECONDS:
                self._sample()
                last = time.monotonic()

    def close(self) -> None:
        self._over.set()
        self.join(timeout=10)

    def scan(self) -> dict[int, str]:
        """Look once; returns the notebook's live processes, pid -> start time."""
        with self._lock:
            table = process_table()
            live = {pid: start for pid, (_, start, state) in table.items() if state != "Z"}
            children: dict[int, list[int]] = {}
            for pid, (parent, _, _) in table.items():
                children.setdefault(parent, []).append(pid)
            self._shared = grow(self._shared, children, live, ())
            self._known = grow(
                self._known | {self._own: live.get(self._own, "")}, children, live, self._shared
            )
            self._known.pop(self._own, None)
            for pid, start in self._known.items():
                self._first_parent.setdefault((pid, start), table[pid][0])
            self._reap_orphans(table)
            return dict(self._known)

    def _reap_orphans(self, table: Mapping[int, tuple[int, str, str]]) -> None:
        """Collect adopted orphans that ended, so that nobody takes the zombie for a live process.

        The runner's own children are left to the code that started them.
        """
        for pid, (parent, start, state) in table.items():
            adopted = self._first_parent.get((pid, start), self._own) != self._own
            if state == "Z" and parent == self._own and adopted:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)

    def mark_shared(self) -> None:
        """Count everything that runs now as the series' own."""
        found = self.scan()
        with self._lock:
            self._shared |= found
            self._known = {}

    def start_notebook(self) -> None:
        """Forget the previous notebook's peak."""
        with self._lock:
            self.peak_mib, self.peak_processes = 0.0, []

    def _sample(self) -> None:
        with self._lock:
            pids = [*self._known, *self._shared]
        sizes = {pid: pss(pid) / MIB for pid in pids}
        total = sum(sizes.values())
        if total > self.peak_mib:
            largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:6]
            rows = [{"process": process_name(pid), "pss_mib": round(sizes[pid])} for pid in largest]
            with self._lock:
                self.peak_mib, self.peak_processes = total, rows

    def settle(self, seconds: float, hurry: Callable[[], bool] = lambda: False) -> dict[int, str]:
        """Wait up to `seconds` for the notebook's processes to end by themselves; returns those
        that did not."""
        end = time.monotonic() + seconds
        live = self.scan()
        while live and time.monotonic() < end and not hurry():
            time.sleep(0.2)
            live = self.scan()
        return live

    def end_all(self, hurry: Callable[[], bool] = lambda: False) -> int:
        """SIGTERM, then SIGKILL whatever the notebook still runs; returns how many resisted even
        that."""
        for signum, seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            for pid, start in self.scan().items():
                send_signal(pid, start, signum)
            if not self.settle(seconds, hurry if signum == signal.SIGTERM else lambda: False):
                return 0
        return len(self.scan())


def grow(
    roots: Mapping[int, str],
    children: Mapping[int, list[int]],
    live: Mapping[int, str],
    apart: Iterable[int],
) -> dict[int, str]:
    """`roots` that still live and all their live descendants, without those in `apart`."""
    apart = set(apart)
    todo = [pid for pid, start in roots.items() if live.get(pid) == start]
    found: dict[int, str] = {}
    while todo:
        pid = todo.pop()
        if pid in found or pid in apart or pid not in live:
            continue
        found[pid] = live[pid]
        todo += children.get(pid, [])
    return found


def send_signal(pid: int, start: str, signum: int) -> None:
    """Signal a process unless its number has gone to another one."""
    entry = _entry(pid)
    if entry is not None and entry[1] == start:
        try:
            os.kill(pid, signum)
        except OSError as error:
            log.info("process %s did not take signal %s: %s", pid, signum, error)
