"""The papermill runner: `python -m helpers.series run --profile cpu`.

Three processes a notebook: this runner, an executor (papermill), and the kernel. The runner never
waits without
a bound: the executor ends a cell that is over its limit, the runner ends an executor that falls
silent, and
whatever a notebook leaves behind is found and ended.
Left out on purpose: running notebooks in parallel. They share two cores, and their timings would
mean nothing.

    python -m helpers.series run --profile cpu [--only 03 05] [-p STEPS 20] [--runs DIR] [--keep-going]
    python -m helpers.series list | report

Exit codes: 0 all notebooks ok, 1 a notebook failed, 2 refused before anything started, 130 / 143
interrupted.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import errno
import fcntl
import json
import logging
import math
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from helpers.messages import OneLineParser, one_line
from helpers.preflight import NotReady, check_machine
from helpers.processes import ProcessWatch, become_subreaper, grow, process_name, process_table, send_signal
from helpers.profiles import PROFILES, RUNS_VARIABLE, Profile, load_profile
from helpers.results import (
    METRICS, METRICS_FILE, PROJECT_ROOT, SERIES_FILE, ResultError, command_for, git_commit, read_metrics,
    read_series_file, skipped_cells, write_atomically,
)  # fmt: skip

log = logging.getLogger(__name__)

LOG_FILE = "series.log"
NOTEBOOK_NAME = re.compile(r"^(\d\d)_[A-Za-z0-9_]+$")
CELL_SECONDS = 900.0
START_SECONDS = 120.0
INTERRUPT_SECONDS = 10.0  # from the interrupt of an overdue cell to SIGKILL of its kernel
SILENCE_SECONDS = 60.0  # beyond a cell's limit: the executor itself must be stuck
SETTLE_SECONDS = 15.0  # what a finished notebook's processes may take to end by themselves
MIN_FREE_GB = 2.0


class SeriesError(Exception):
    """Refused before anything started; the message says what, why and the next command."""


class Stopped(BaseException):
    """SIGINT, SIGTERM or SIGHUP reached the runner."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


# --- notebooks and their parameters ---------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell. kind: the annotation as text ("int"), or the type of the
    default."""

    name: str
    kind: str
    default: Any


@dataclass(frozen=True)
class Notebook:
    """A notebook of the series. name: "NN_name"."""

    name: str
    path: Path
    parameters: Mapping[str, Parameter]


def discover(folder: Path) -> list[Notebook]:
    """All NN_name.ipynb in a folder, in order. Raises SeriesError when there is none or one is not
    valid JSON."""
    paths = sorted(p for p in folder.glob("*.ipynb") if NOTEBOOK_NAME.match(p.stem))
    if not paths:
        raise SeriesError(
            f"no notebooks NN_name.ipynb in {folder}. Write them: python -m helpers.twins write"
        )
    return [Notebook(path.stem, path, read_parameters(path)) for path in paths]


def select_notebooks(notebooks: Sequence[Notebook], only: Sequence[str]) -> list[Notebook]:
    """Those that `only` names by number ("03", "3") or name, in the order of the series; all when
    it is empty."""
    if not only:
        return list(notebooks)
    chosen = set()
    for word in only:
        found = [n.name for n in notebooks if word and (word == n.name or word.zfill(2) == n.name[:2])]
        if not found:
            names = [n.name for n in notebooks]
            raise SeriesError(
                f"there is no notebook {word!r}{_nearest(word, names)}. Known: {', '.join(names)}"
            )
        chosen.update(found)
    return [n for n in notebooks if n.name in chosen]


def _nearest(word: str, known: Iterable[str]) -> str:
    by_case = {k.lower(): k for k in known}
    match = difflib.get_close_matches(word.lower(), by_case, n=1)
    return f" (did you mean {by_case[match[0]]}?)" if match else ""


def read_parameters(path: Path) -> dict[str, Parameter]:
    """The parameters cell of a notebook, read from its syntax tree; nothing is executed."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
        source = "".join(tagged[0]["source"]) if tagged else ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SeriesError(
            one_line(f"{path} is no readable notebook ({error}). Write it: python -m helpers.twins write")
        ) from error
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise SeriesError(one_line(f"{path}: the parameters cell is not valid Python ({error})")) from error
    found = (_parameter(node) for node in tree.body)
    return {p.name: p for p in found if p is not None}


def _parameter(node: ast.stmt) -> Parameter | None:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return Parameter(node.target.id, ast.unparse(node.annotation).strip("'\""), _literal(node.value))
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        default = _literal(node.value)
        return Parameter(node.targets[0].id, "Any" if default is None else type(default).__name__, default)
    return None


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        return None


def convert(parameter: Parameter, text: str) -> Any:
    """The value that `-p NAME text` means for this parameter. Raises SeriesError for a wrong type.

    "int" takes whole numbers, "float" any number, "bool" true or false, "str" the text as it
    stands; any other
    type takes a Python literal of that type.
    """
    kinds = [kind.strip() for kind in re.sub(r"^Optional\[(.*)\]$", r"\1 | None", parameter.kind).split("|")]
    if "None" in kinds and text == "None":
        return None
    for kind in (kind for kind in kinds if kind != "None"):
        try:
            return _CONVERTERS.get(kind, _literal_of(kind))(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise SeriesError(
        f"parameter {parameter.name} is {parameter.kind} (default {parameter.default!r}), {text!r} is not. "
        f"Give a value of that type: -p {parameter.name} {shlex.quote(str(parameter.default))}"
    )


def _bool(text: str) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": _float,
    "bool": _bool,
    "str": str,
}


def _literal_of(kind: str) -> Callable[[str], Any]:
    """Reads a Python literal of a container type, or any literal (else the text) for a type not
    known here."""
    wanted = {"list": list, "tuple": tuple, "dict": dict, "set": set}.get(kind.split("[")[0].lower())

    def read(text: str) -> Any:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        if wanted is not None and not isinstance(value, wanted):
            raise ValueError(text)
        return value

    return read


def bind_parameters(
    notebooks: Sequence[Notebook], given: Sequence[Sequence[str]], profile: str
) -> dict[str, dict[str, Any]]:
    """notebook name -> {parameter: value}, checked against every selected parameters cell.

    papermill only warns about an unknown name and runs on with the default; here it is an error,
    as is a value
    of the wrong type. A name counts as known when at least one selected notebook has it.
    """
    known = {name: p for n in notebooks for name, p in n.parameters.items()}
    for name, text in given:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise SeriesError(f"unknown parameter {name}{_nearest(name, known)}. Known here: {listed}")
        if name == "PROFILE" and text != profile:
            raise SeriesError(
                f"-p PROFILE {text} contradicts --profile {profile}. Use --profile {text} alone"
            )
    words = {"PROFILE": profile} | {name: text for name, text in given}
    return {
        n.name: {
            name: convert(n.parameters[name], text) for name, text in words.items() if name in n.parameters
        }
        for n in notebooks
    }


# --- the executor: a process of its own that runs one notebook with papermill ---------------------


class _Guard(threading.Thread):
    """Interrupts the kernel when a cell is overdue or the run is to stop, and kills it when that
    does not help."""

    def __init__(self, limit: float) -> None:
        super().__init__(name="cell-guard", daemon=True)
        self.limit = limit
        self.reason = ""
        self.kernel: Callable[[], int | None] = lambda: None
        self._deadline = float("inf")
        self._kill_at = float("inf")

    def cell_started(self) -> None:
        self._deadline = time.monotonic() + self.limit

    def cell_ended(self) -> None:
        self._deadline = float("inf")

    def stop(self, reason: str) -> None:
        """Interrupt the kernel now (KeyboardInterrupt in its cell lets `with` blocks close what
        they opened)."""
        if self.reason:
            return
        self.reason = reason
        self._kill_at = time.monotonic() + INTERRUPT_SECONDS
        self._send(signal.SIGINT)

    def _send(self, signum: int) -> None:
        pid = self.kernel()
        if pid:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                pass

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([0], [], [], 0.25)
            if ready and not os.read(0, 1):
                self.stop("runner gone")
                time.sleep(INTERRUPT_SECONDS)  # main ends the process earlier if the kernel gave way
                _kill_descendants()
                os._exit(1)
            if time.monotonic() > self._deadline:
                self.stop("time limit")
            if time.monotonic() > self._kill_at:
                self._send(signal.SIGKILL)
                self._kill_at = float("inf")


def _kill_descendants() -> None:
    """SIGKILL the kernel and what it started, where no runner is left to do it."""
    table = process_table()
    children: dict[int, list[int]] = {}
    for pid, (parent, _, _) in table.items():
        children.setdefault(parent, []).append(pid)
    starts = {pid: start for pid, (_, start, _) in table.items()}
    for pid, start in grow({os.getpid(): starts[os.getpid()]}, children, starts, ()).items():
        if pid != os.getpid():
            send_signal(pid, start, signal.SIGKILL)


def execute(job: Mapping[str, Any], emit: Callable[..., None]) -> None:
    """Run one notebook with papermill in this process; `emit` sends progress and one "end" event
    to the runner."""
    guard = _Guard(job["cell_seconds"])
    signal.signal(signal.SIGTERM, lambda *_: guard.stop("stopped"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides
    guard.start()
    place: dict[str, int] = {"cell": 0, "index": -1}
    try:
        _papermill(job, guard, place, emit)
        emit(event="end", ok=True)
    except Exception as error:
        emit(event="end", ok=False, **_describe_error(error, guard, place, job))


def _papermill(
    job: Mapping[str, Any], guard: _Guard, place: dict[str, int], emit: Callable[..., None]
) -> None:
    # jsonschema builds a grammar for web addresses at import, 1.5 to 3 s a notebook, that no
    # notebook check uses;
    # None makes that import fail, which jsonschema allows for
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import nbformat
    import papermill
    from papermill.engines import papermill_engines

    cells = nbformat.read(job["input"], as_version=4).cells
    # papermill adds one cell that holds the parameters
    total = sum(c.cell_type == "code" and bool(c.source.strip()) for c in cells) + bool(job["parameters"])

    def started(cell: Any, cell_index: int) -> None:
        if guard.reason:
            raise RuntimeError(guard.reason)
        place.update(cell=place["cell"] + 1, index=cell_index)
        guard.cell_started()
        emit(event="cell", cell=place["cell"], total=total)

    papermill_engines.register("series", _engine(guard))
    papermill.execute_notebook(
        _plain_path(job["input"]),
        _plain_path(job["output"]),
        parameters=job["parameters"],
        engine_name="series",
        kernel_name="python3",
        progress_bar=False,
        cwd=job["cwd"],
        start_timeout=job["start_seconds"],
        execution_timeout=int(job["cell_seconds"] + 2 * INTERRUPT_SECONDS) + 1,
        iopub_timeout=60,  # a busy machine needs more than the default 4 s to deliver a cell's last output
        on_cell_execute=started,
        on_cell_executed=lambda **_: guard.cell_ended(),
    )


def _plain_path(path: str) -> str:
    """A path for papermill, which fills {braces} in with parameters."""
    return path.replace("{", "{{").replace("}", "}}")


def _engine(guard: _Guard) -> type:
    """papermill's own engine with a kernel that is this very Python and that the guard can
    reach."""
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine
    from papermill.log import logger
    from papermill.utils import remove_args

    class Client(PapermillNotebookClient):
        def create_kernel_manager(self) -> Any:
            manager = super().create_kernel_manager()
            # a user's own "python3" kernel would otherwise take the notebook to another environment
            manager.kernel_spec.argv = [
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
            ]
            guard.kernel = lambda: getattr(manager.provisioner, "pid", None)
            return manager

    class SeriesEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(
            cls,
            nb_man: Any,
            kernel_name: str,
            start_timeout: float = 60,
            execution_timeout: float = 0,
            **options: Any,
        ) -> Any:
            options = remove_args(["input_path", "stdout_file", "stderr_file", "log_output"], **options)
            client = Client(
                nb_man, kernel_name=kernel_name, startup_timeout=int(start_timeout), timeout=execution_timeout,
                log=logger, **options,
            )  # fmt: skip
            return client.execute()

    return SeriesEngine


def _describe_error(
    error: Exception, guard: _Guard, place: Mapping[str, int], job: Mapping[str, Any]
) -> dict[str, Any]:
    """What the runner tells the reader: kind, message, code cell number, source line."""
    name, message = type(error).__name__, str(error).strip()
    line = ""
    if name == "PapermillExecutionError":
        name, message, line = error.ename, error.evalue, _source_line(error.traceback, error.source)
    if guard.reason == "time limit":
        message = f"the cell ran longer than its limit of {guard.limit:g} s"
        name = "CellTimeout"
    elif guard.reason:
        name, message = "Stopped", f"the run was stopped ({guard.reason})"
    elif name == "DeadKernelError":
        message = (
            "the kernel died in this cell: killed from outside, out of memory, or crashed in native code"
        )
    elif getattr(error, "errno", None) == errno.ENOSPC:
        name, message = (
            "DiskFull",
            "the disk is full; make room, or choose another place with --runs DIR",
        )
    elif place["cell"] == 0 and isinstance(error, (RuntimeError, TimeoutError)):
        message = f"the kernel did not start: {message}. Look at {LOG_FILE} beside the executed notebook"
    return {
        "ename": name,
        "evalue": message[:600],
        "cell": place["cell"],
        "line": line or _first_line(job, place["index"]),
    }


def _source_line(traceback: Sequence[str], source: str) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(traceback))
    numbers = re.findall(r"Cell In\s?\[\d+\], line (\d+)", text)
    lines = source.splitlines()
    number = int(numbers[0]) if numbers else 1
    return f"{number}: {lines[number - 1].strip()}" if 0 < number <= len(lines) else ""


def _first_line(job: Mapping[str, Any], index: int) -> str:
    """The first source line of a cell of the executed notebook, where no traceback tells a better
    one."""
    try:
        cells = json.loads(Path(job["output"]).read_text(encoding="utf-8"))["cells"]
        return "1: " + "".join(cells[index]["source"]).strip().splitlines()[0] if index >= 0 else ""
    except (OSError, ValueError, KeyError, IndexError):
        return ""


# --- stored outputs -------------------------------------------------------------------------------

_WARNING = re.compile(
    r"^[^\n]*(?:site-packages|dist-packages|<frozen)[^\n]*:\d+: "
    r"(?:Tqdm\w*|Import|Deprecation|PendingDeprecation|Future|Syntax)Warning: [^\n]*\n(?:[ \t]+[^\n]*\n?)?",
    re.MULTILINE,
)
_IPROGRESS = re.compile(r"^[^\n]*IProgress not found[^\n]*\n?(?:[ \t]+[^\n]*\n?)?", re.MULTILINE)


def clean_outputs(path: Path, root: Path = PROJECT_ROOT) -> None:
    """Take third-party import warnings and machine paths of papermill out of a stored notebook.

    Only warnings of installed packages go; what a cell itself writes to stderr stays. A file that
    is no valid
    JSON (its writer was killed) is left as it is.
    """
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = [o for o in cell["outputs"] if _cleaned(o)]
    stamp = notebook["metadata"].get("papermill", {})
    for key in ("input_path", "output_path"):
        if stamp.get(key):
            stamp[key] = (
                os.path.relpath(stamp[key], root)
                if Path(stamp[key]).is_relative_to(root)
                else Path(stamp[key]).name
            )
    write_atomically(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def _cleaned(output: dict[str, Any]) -> bool:
    """Filter one output in place; whether anything of it is left."""
    if output.get("output_type") != "stream" or output.get("name") != "stderr":
        return True
    text = "".join(output["text"])
    output["text"] = _WARNING.sub("", _IPROGRESS.sub("", text))
    return bool(output["text"].strip())


# --- the runner -----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of one notebook. status: "ok", "failed", "stopped" or "not run"; problem: what
    the reader is told."""

    notebook: str
    status: str = "not run"
    seconds: float = 0.0
    peak_pss_gib: float = 0.0
    peak_processes: list[dict[str, Any]] = field(default_factory=list)
    problem: str = ""
    finished: str = ""


@dataclass
class Options:
    """What the command line asked for, checked."""

    settings: Profile
    notebooks: list[Notebook]
    parameters: dict[str, dict[str, Any]]
    command: str
    keep_going: bool = False
    cell_seconds: float = CELL_SECONDS
    start_seconds: float = START_SECONDS
    min_free_gb: float = MIN_FREE_GB
    settle_seconds: float = SETTLE_SECONDS
    environment: dict[str, str] = field(default_factory=dict)  # of shared services, for every kernel


class Screen:
    """One line a notebook: rewritten in place on a terminal, once at the start and once at the end
    elsewhere."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.live = self.out.isatty()

    def start(self, name: str, number: int, total: int) -> None:
        self._write(f"{name}  starting ({number} of {total})")

    def update(self, name: str, cell: int, cells: int, seconds: float) -> None:
        if self.live:
            self._write(f"{name}  cell {cell}/{cells}  {seconds:.0f} s")

    def end(self, outcome: Outcome) -> None:
        self._write(
            f"{outcome.notebook}  {outcome.status}  {outcome.seconds:.1f} s  {outcome.peak_pss_gib:.2f} GiB",
            True,
        )

    def line(self, text: str = "") -> None:
        self._write(text, True)

    def _write(self, text: str, final: bool = False) -> None:
        before = "\r\x1b[K" if self.live else ""
        self.out.write(before + text + ("\n" if final or not self.live else ""))
        self.out.flush()


class Runner:
    """Runs notebooks one after the other and leaves no process behind."""

    def __init__(self, options: Options, watch: ProcessWatch, screen: Screen) -> None:
        self.options, self.watch, self.screen = options, watch, screen
        self.outcomes = [Outcome(n.name) for n in options.notebooks]
        self.hurry = False  # a second interrupt: do not wait any more
        self.closing = False  # from here on a signal must not break off the clean-up

    def run(self) -> None:
        """Fill in one Outcome a notebook. After a failure the rest is "not run" unless
        keep_going."""
        pairs = zip(self.options.notebooks, self.outcomes, strict=True)
        for number, (notebook, outcome) in enumerate(pairs, start=1):
            self.screen.start(notebook.name, number, len(self.outcomes))
            self._one(notebook, outcome)
            self.screen.end(outcome)
            if outcome.status != "ok":
                self.screen.line(self._explain(outcome))
            if outcome.status != "ok" and not self.options.keep_going:
                break

    def _one(self, notebook: Notebook, outcome: Outcome) -> None:
        folder = self.options.settings.run_folder(notebook.name)
        executed = folder / f"{notebook.name}.ipynb"
        (folder / METRICS_FILE).unlink(missing_ok=True)
        executed.unlink(missing_ok=True)
        self.watch.start_notebook()
        start = time.monotonic()
        problem = outcome.status = "stopped"
        try:
            problem = disk_problem(folder, self.options.min_free_gb) or self._execute(
                notebook, folder, executed
            )
        finally:
            left = self._end_processes(problem)
            outcome.seconds = round(time.monotonic() - start, 1)
            outcome.peak_pss_gib = round(self.watch.peak_mib / 1024, 3)
            outcome.peak_processes = self.watch.peak_processes
            outcome.finished = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            clean_outputs(executed)
        problem = problem or self._verify(notebook, folder, executed) or left
        outcome.status = "failed" if problem else "ok"
        outcome.problem = problem

    def _execute(self, notebook: Notebook, folder: Path, executed: Path) -> str:
        """Run the executor and follow its events; "" or what went wrong."""
        reader, writer = os.pipe()
        job = {
            "input": str(notebook.path), "output": str(executed), "cwd": str(PROJECT_ROOT), "events": writer,
            "parameters": self.options.parameters[notebook.name], "cell_seconds": self.options.cell_seconds,
            "start_seconds": self.options.start_seconds,
        }  # fmt: skip
        command = [sys.executable, "-m", "helpers.series", "_execute", json.dumps(job)]
        with (
            (folder / LOG_FILE).open("wb") as log_file,
            os.fdopen(reader, "rb", buffering=0) as events,
        ):
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file, pass_fds=[writer],
                env=self._environment(), cwd=PROJECT_ROOT, start_new_session=True,
            )  # fmt: skip
            os.close(writer)
            try:
                problem = self._follow(child, events, notebook.name)
                self._wait(child, 10)
                return problem
            finally:
                self._end_executor(child)

    def _environment(self) -> dict[str, str]:
        env = (
            dict(os.environ) | self.options.settings.process_environment("kernel") | self.options.environment
        )
        env.pop(
            "PYTHONDONTWRITEBYTECODE", None
        )  # else every process compiles every import anew: 50 s, not 20 s
        path = [str(PROJECT_ROOT), *filter(None, [env.get("PYTHONPATH")])]
        return env | {
            "PYTHONPATH": os.pathsep.join(path),
            "PAPERMILL_RUN": "1",
            "SERIES_COMMAND": self.options.command,
        }

    def _follow(self, child: subprocess.Popen, events: Any, name: str) -> str:
        start = last = time.monotonic()
        limit, buffer, cell = self.options.start_seconds, b"", (0, 0)
        while True:
            ready, _, _ = select.select([events], [], [], 0.5)
            chunk = events.read(65536) if ready else None
            if chunk == b"":
                self._wait(child, 10)
                return f"the executor of the notebook ended without a word (exit code {child.returncode}); see {LOG_FILE}"
            buffer += chunk or b""
            *lines, buffer = buffer.split(b"\n")
            for event in map(json.loads, lines):
                last, limit = time.monotonic(), self.options.cell_seconds
                if event["event"] == "end":
                    return "" if event["ok"] else _error_text(event)
                cell = (event["cell"], event["total"])
            self.screen.update(name, *cell, time.monotonic() - start)
            if time.monotonic() - last > limit + 2 * INTERRUPT_SECONDS + SILENCE_SECONDS:
                return f"the executor fell silent for {time.monotonic() - last:.0f} s after cell {cell[0]} and was ended"

    def _end_executor(self, child: subprocess.Popen) -> None:
        """Ask it to stop (it interrupts the kernel), then let end_all do the rest."""
        if child.poll() is None:
            child.terminate()
        self._wait(child, INTERRUPT_SECONDS + 8)
        if child.poll() is None:
            child.kill()
            child.wait(timeout=10)
        child.stdin.close()

    def _wait(self, child: subprocess.Popen, seconds: float) -> None:
        end = time.monotonic() + seconds
        while child.poll() is None and time.monotonic() < end and not self.hurry:
            time.sleep(0.1)

    def _end_processes(self, problem: str) -> str:
        """End what is left; a finished notebook gets time to settle, and leaving processes is its
        failure."""
        patience = self.options.settle_seconds
        left = self.watch.settle(min(6, patience) if problem else patience, lambda: self.hurry)
        names = sorted({process_name(pid) for pid in left})
        if left:
            self.watch.end_all(lambda: self.hurry)
        if not left:
            return ""
        return f"the notebook left {len(left)} processes running, which were ended: {'; '.join(names)[:300]}"

    def _verify(self, notebook: Notebook, folder: Path, executed: Path) -> str:
        """What a run that raised no error may still have missed."""
        try:
            skipped = skipped_cells(executed)
            if skipped:
                return f"cells {', '.join(map(str, skipped))} of the executed notebook were skipped (sys.exit in a cell?)"
            record = read_metrics(folder / METRICS_FILE)
        except ResultError as error:
            reason = str(error).replace(f"{folder}{os.sep}", "")
            return f"it ended without valid results; its last cell must call run.finish(). {reason}"
        wanted = (notebook.name, self.options.settings.name, "ok")
        found = (record["notebook"], record["profile"], record["status"])
        return (
            ""
            if found == wanted
            else f"metrics.json speaks of {found}, expected {wanted}: check NotebookRun(...)"
        )

    def _explain(self, outcome: Outcome) -> str:
        """Why a notebook failed, where to look and what to type next."""
        folder = self.options.settings.runs / outcome.notebook
        rows = [f"  {outcome.notebook} failed: {outcome.problem}"]
        for label, path in (
            ("executed so far", folder / f"{outcome.notebook}.ipynb"),
            ("log", folder / LOG_FILE),
        ):
            if path.exists() and path.stat().st_size:
                rows.append(f"  {label}: {_shown(path)}")
        rows.append(f"  next: correct it, then {command_for(self.options.settings.name, outcome.notebook)}")
        return "\n".join(rows)


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _error_text(event: Mapping[str, Any]) -> str:
    message = " / ".join(part for part in event["evalue"].splitlines() if part.strip())
    where = f" in cell [{event['cell']}]" if event["cell"] else ""
    line = f"\n  source line {event['line']}" if event["line"] else ""
    return f"{event['ename']}{where}: {message}{line}"


def disk_problem(folder: Path, min_free_gb: float) -> str:
    """One sentence when the disk is nearly full, else ""."""
    free = shutil.disk_usage(folder).free / 1e9
    if free >= min_free_gb:
        return ""
    return (
        f"only {free:.1f} GB are free where {folder} lies and a run needs {min_free_gb:g} GB for checkpoints and logs. "
        "Make room, or choose another place with --runs DIR"
    )


@contextmanager
def runs_lock(runs: Path) -> Iterator[None]:
    """Hold runs/<profile>/.lock; a second run on the same folder is refused at once."""
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise SeriesError(
                f"another run (process {other}) is using {runs}. Wait for it, or choose another place with --runs DIR"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


# --- shared services ------------------------------------------------------------------------------


def start_shared(settings: Profile, notebooks: Sequence[Notebook], stack: ExitStack) -> dict[str, str]:
    """Start what several notebooks share (one SGLang server), if the profile wants it and two or
    more use it.

    Each service is entered on `stack`, which ends it after the last notebook, also after an error
    or an interrupt.
    Returns environment variables that tell the kernels where it is.
    """
    users = [
        n for n in notebooks if any(word in n.path.read_text() for word in ("open_server", "GrpoCluster"))
    ]
    if not settings.rollout.shared or len(users) < 2:
        return {}
    from helpers.rollout import shared_server

    return stack.enter_context(shared_server(settings, _random_checkpoint(settings)))


def _random_checkpoint(settings: Profile) -> Path:
    """The random checkpoint of the profile, made by a child: the runner itself never imports
    torch."""
    folder = settings.checkpoint("random")
    if not (folder / "config.json").is_file():
        code = "import sys; from helpers import checkpoints, profiles; checkpoints.write_tiny_checkpoint(profiles.load_profile(sys.argv[1]))"
        env = os.environ | settings.process_environment("kernel")
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, settings.name],
            env=env,
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SeriesError(
                f"the tiny checkpoint could not be written to {folder}: {done.stderr.strip()[-400:]}"
            )
    return folder


# --- command line ---------------------------------------------------------------------------------


def run_series(options: Options, screen: Screen) -> int:
    """Run the notebooks of `options`, write series.json and the report, print the table; returns
    the exit code."""
    become_subreaper()
    watch, start = ProcessWatch(), time.monotonic()
    runner = Runner(options, watch, screen)
    code, left = 1, 0
    with _signals(runner), runs_lock(options.settings.runs):
        watch.start()
        try:
            with ExitStack() as stack:
                options.environment |= start_shared(options.settings, options.notebooks, stack)
                watch.mark_shared()
                runner.run()
            code = 0 if all(o.status == "ok" for o in runner.outcomes) else 1
        except Stopped as stopped:
            code = 128 + stopped.signum
            screen.line(
                f"stopped by {signal.Signals(stopped.signum).name}; the kernel and its processes were ended"
            )
        finally:
            runner.closing = True
            watch.end_all(lambda: runner.hurry)
            left = len(watch.scan())
            watch.close()
        _write_series(options, runner.outcomes, time.monotonic() - start, left)
        _close(options, runner.outcomes, screen)
    screen.line(f"processes left: {left}")
    return code if not left else code or 1


@contextmanager
def _signals(runner: Runner) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP raises Stopped in the main thread, a further one ends
    the waiting."""
    seen: list[int] = []

    def stop(signum: int, _frame: Any) -> None:
        seen.append(signum)
        if len(seen) > 1 or runner.closing:
            runner.hurry = True
            return
        raise Stopped(signum)

    old = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _write_series(options: Options, outcomes: Sequence[Outcome], seconds: float, left: int) -> None:
    """runs/<profile>/series.json; entries of notebooks that were not run this time are kept."""
    path = options.settings.runs / SERIES_FILE
    entries = read_series(options.settings.runs)
    entries |= {o.notebook: asdict(o) for o in outcomes if o.status != "not run"}
    record = {
        "schema": 1, "profile": options.settings.name, "command": options.command, "commit": git_commit(),
        "seconds": round(seconds, 1), "processes_left": left, "notebooks": [entries[n] for n in sorted(entries)],
    }  # fmt: skip
    write_atomically(path, json.dumps(record, indent=1) + "\n")


def read_series(runs: Path) -> dict[str, dict[str, Any]]:
    """notebook -> its entry of series.json; empty when there is none or it is broken."""
    try:
        return {entry["notebook"]: entry for entry in read_series_file(runs)["notebooks"]}
    except ResultError:
        return {}


def _close(options: Options, outcomes: Sequence[Outcome], screen: Screen) -> None:
    runs = options.settings.runs
    screen.line()
    screen.line(table(outcomes, runs))
    screen.line(f"\nexecuted notebooks, figures and metrics: {_shown(runs)}/<notebook>/")
    try:
        from helpers.report import write_report

        screen.line(f"report: {_shown(write_report(runs))}")
    except (OSError, ValueError) as error:
        screen.line(f"the report could not be written: {error}")


def table(outcomes: Sequence[Outcome], runs: Path) -> str:
    """Notebook, status, seconds, peak memory and key figures as aligned text."""
    rows = [("notebook", "status", "seconds", "GiB", "key figures")]
    for o in outcomes:
        numbers = ("", "") if o.status == "not run" else (f"{o.seconds:.1f}", f"{o.peak_pss_gib:.2f}")
        rows.append((o.notebook, o.status, *numbers, key_figures(runs / o.notebook)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        f"{r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]:>{widths[2]}}  {r[3]:>{widths[3]}}  {r[4]}".rstrip()
        for r in rows
    )


def key_figures(folder: Path, limit: int = 3) -> str:
    """The first metrics that a notebook recorded; "!" marks a value outside its healthy range."""
    try:
        record = read_metrics(folder / METRICS_FILE)
    except ResultError:
        return ""
    shown = []
    for name, value in list(record["metrics"].items())[:limit]:
        unit = record["units"].get(name, "1")
        mark = "" if name not in METRICS or METRICS[name].healthy(value) else " !"
        shown.append(f"{name} {value:.4g}{'' if unit in ('1', 'count') else ' ' + unit}{mark}")
    return ", ".join(shown)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="python -m helpers.series",
        description="Run the notebooks of the series with papermill.",
    )
    commands = parser.add_subparsers(dest="task", required=True)
    for task, words in (
        ("run", "run notebooks, one after the other"),
        ("list", "list the notebooks and their parameters"),
        ("report", "write report.html from what earlier runs left"),
    ):
        sub = commands.add_parser(task, help=words, description=words)
        sub.add_argument("--profile", default="cpu", help=f"one of {', '.join(PROFILES)} (default cpu)")
        sub.add_argument("--notebooks", type=Path, default=PROJECT_ROOT / "notebooks", metavar="DIR")
        sub.add_argument(
            "--runs", type=Path, metavar="DIR", help="results go to DIR/<profile> (default: runs/)"
        )
        if task == "run":
            _run_arguments(sub)
    return parser


def _run_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--only", nargs="+", default=[], metavar="NN", help="numbers or names of notebooks")
    sub.add_argument("-p", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), dest="given")
    sub.add_argument("--keep-going", action="store_true", help="go on after a failed notebook")
    sub.add_argument(
        "--cell-seconds",
        type=float,
        default=CELL_SECONDS,
        help="limit of one cell (default %(default)g)",
    )
    sub.add_argument(
        "--start-seconds",
        type=float,
        default=START_SECONDS,
        help="limit of a kernel's start (default %(default)g)",
    )
    sub.add_argument(
        "--min-free-gb",
        type=float,
        default=MIN_FREE_GB,
        help="refuse to start with less disk (default %(default)g)",
    )
    sub.add_argument(
        "--settle-seconds", type=float, default=SETTLE_SECONDS,
        help="what a finished notebook's processes may take to end (default %(default)g)",
    )  # fmt: skip


def _options(args: argparse.Namespace, settings: Profile, argv: Sequence[str]) -> Options:
    for name in ("cell_seconds", "start_seconds", "min_free_gb", "settle_seconds"):
        value = getattr(args, name)
        if not (0 <= value < math.inf if name in ("min_free_gb", "settle_seconds") else 0 < value < math.inf):
            raise SeriesError(f"--{name.replace('_', '-')} {value} has to be a positive number")
    notebooks = select_notebooks(discover(args.notebooks), args.only)
    parameters = bind_parameters(notebooks, args.given, settings.name)
    settings.runs.mkdir(parents=True, exist_ok=True)
    problem = disk_problem(settings.runs, args.min_free_gb)
    if problem:
        raise SeriesError(problem)
    command = shlex.join(["python", "-m", "helpers.series", *argv])
    return Options(
        settings, notebooks, parameters, command, args.keep_going, args.cell_seconds, args.start_seconds,
        args.min_free_gb, args.settle_seconds,
    )  # fmt: skip


def _list(args: argparse.Namespace) -> int:
    for notebook in discover(args.notebooks):
        words = ", ".join(f"{p.name}: {p.kind} = {p.default!r}" for p in notebook.parameters.values())
        print(f"{notebook.name}  {words}")
    return 0


def _execute_main(text: str) -> int:
    job = json.loads(text)
    os.set_inheritable(job["events"], False)  # the kernel must not hold the pipe open

    def emit(**event: Any) -> None:
        try:
            os.write(job["events"], (json.dumps(event) + "\n").encode())
        except OSError as error:
            log.warning("the runner does not listen any more: %s", error)

    execute(job, emit)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["_execute"]:  # the runner starts itself again as executor
        return _execute_main(argv[1])
    args = _parser().parse_args(argv)
    if args.runs:
        os.environ[RUNS_VARIABLE] = str(args.runs.resolve())
    try:
        if args.task == "list":
            return _list(args)
        settings = load_profile(args.profile)
        if args.task == "report":
            from helpers.report import write_report

            print(write_report(settings.runs))
            return 0
        options = _options(args, settings, argv)
        check_machine(settings)
        return run_series(options, Screen())
    except (SeriesError, ResultError, NotReady, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
