"""The papermill runner, with real kernels on tiny notebooks: every way to fail must end, be told, and leave nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers import series
from helpers.report import write_report
from helpers.results import PROJECT_ROOT, ResultError, read_metrics
from helpers.series import Parameter, SeriesError, convert

pytestmark = pytest.mark.skipif(find_spec("papermill") is None, reason="papermill is not installed")

PARAMETERS = 'PROFILE: str = "cpu"  # which profile\nSTEPS: int = 3  # GRPO steps'
START = """from helpers.profiles import load_profile
from helpers.results import NotebookRun
run = NotebookRun("{name}", load_profile(PROFILE))"""
FIGURE = """import matplotlib.pyplot as plt
from helpers.figures import LivePlot, progress, show_figure, use_style
use_style()
fig, axis = plt.subplots()
axis.plot([1, 2])
show_figure(fig, alt="A line.", run=run, name="line", data={"y": [1, 2]})
plot = LivePlot(["reward"], every_seconds=0)
for step in progress(range(40), "steps"):
    plot.add(step, reward=step)
plot.finish(run, "live", alt="Reward rises.")"""
ENVIRONMENT = """import os, sys, warnings
assert os.environ["PAPERMILL_RUN"] == "1" and os.environ["OMP_NUM_THREADS"] == "1"
assert "PYTHONDONTWRITEBYTECODE" not in os.environ
warnings.showwarning = lambda m, c, f, l, *_: sys.stderr.write(f"{f}:{l}: {c.__name__}: {m}\\n  code line\\n")
warnings.warn_explicit("IProgress not found.", UserWarning, "/v/site-packages/tqdm/auto.py", 21)
warnings.warn_explicit("old name", FutureWarning, "/v/site-packages/a/b.py", 3)
print("my own words", file=sys.stderr)
run.record("heldout_gain", STEPS / 10)"""


def write_notebook(folder: Path, name: str, *cells: str, parameters: str = PARAMETERS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    code = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "metadata": {},
            "source": text,
            "outputs": [],
            "execution_count": None,
        }
        for n, text in enumerate((parameters, *cells))
    ]
    code[0]["metadata"] = {"tags": ["parameters"]}
    title = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# Title"}
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = {
        "cells": [title, *code],
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    (folder / f"{name}.ipynb").write_text(json.dumps(notebook))
    return folder / f"{name}.ipynb"


def command(folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    line = [
        sys.executable,
        "-m",
        "helpers.series",
        "run",
        "--notebooks",
        str(folder / "notebooks"),
        "--runs",
        str(folder / "runs"),
    ]
    env = os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    env.pop("GRPO_RUNS", None)
    return [*line, "--min-free-gb", "0", "--settle-seconds", "1.5", *words], env


def run(folder: Path, *words: str, timeout: float = 55) -> subprocess.CompletedProcess:
    line, env = command(folder, *words)
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=timeout, cwd=folder)


def alive(mark: str) -> list[str]:
    """Command lines of live processes that hold `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in line:
                found.append(line)
    return found


# --- one run over every kind of notebook ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """All notebooks run once with --keep-going: one good, the others failing each in its own way."""
    folder = tmp_path_factory.mktemp("series")
    books = folder / "notebooks"
    start = lambda name: START.format(name=name)  # noqa: E731
    write_notebook(books, "00_good", start("00_good"), FIGURE, ENVIRONMENT, "run.finish()")
    write_notebook(
        books, "01_dead", start("01_dead"),
        "import os, subprocess, time\nsubprocess.Popen(['sleep', '86391'], start_new_session=True)\n"
        "time.sleep(1)\nos.kill(os.getpid(), 9)",
    )  # fmt: skip
    write_notebook(books, "02_error", start("02_error"), "x = 1\ny = {}\ny['missing']", "run.finish()")
    write_notebook(books, "03_slow", "import time\nfor i in range(10**6):\n    time.sleep(0.05)")
    write_notebook(books, "04_skip", start("04_skip") + "\nrun.finish()", "import sys\nsys.exit(0)", "x = 2")
    write_notebook(books, "05_unfinished", start("05_unfinished"), "run.record('heldout_gain', 1)")
    write_notebook(
        books, "06_leaves", start("06_leaves"),
        "import subprocess\n_ = subprocess.Popen(['setsid', 'sleep', '86392'])\nrun.finish()",
    )  # fmt: skip
    slow = run(folder, "--only", "03", "--cell-seconds", "1")
    assert slow.returncode == 1 and slow.stdout.rstrip().endswith("processes left: 0"), (
        slow.stdout + slow.stderr
    )
    others = ["00", "01", "02", "04", "05", "06"]
    done = run(folder, "--only", *others, "--keep-going", "-p", "STEPS", "7", timeout=150)
    return folder, done, json.loads((folder / "runs" / "cpu" / "series.json").read_text())


def outcome(world, name):
    return next(entry for entry in world[2]["notebooks"] if entry["notebook"] == name)


def executed(world, name):
    return json.loads((world[0] / "runs" / "cpu" / name / f"{name}.ipynb").read_text())


def test_the_run_fails_as_a_whole_and_leaves_no_process(world):
    folder, done, record = world
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("processes left: 0") and record["processes_left"] == 0
    assert not alive("8639") and not alive(str(folder))
    assert [e["status"] for e in record["notebooks"]] == ["ok"] + ["failed"] * 6
    lines = done.stdout.split("\nnotebook  ")[0].splitlines()
    assert sum(line.startswith("00_good  ") for line in lines) == 2, (
        "in CI one line at the start and one at the end"
    )
    assert "\r" not in done.stdout and "report.html" in done.stdout


def test_a_good_notebook_gets_its_parameter_and_environment(world):
    record = read_metrics(world[0] / "runs" / "cpu" / "00_good")
    assert record["metrics"] == {"heldout_gain": 0.7} and record["command"].startswith(
        "python -m helpers.series run"
    )
    entry = outcome(world, "00_good")
    assert entry["peak_pss_gib"] > 0.03 and entry["seconds"] > 1 and entry["problem"] == ""
    assert re.search(r"00_good +ok +[\d.]+ +[\d.]+ +heldout_gain 0.7", world[1].stdout)


def test_stored_outputs_are_readable(world):
    cells = [c for c in executed(world, "00_good")["cells"] if c["cell_type"] == "code"]
    pictures = [o for c in cells for o in c["outputs"] if "image/png" in o.get("data", {})]
    assert len(pictures) == 2, "a live plot leaves one picture"
    assert [p["metadata"]["image/png"]["alt"] for p in pictures] == ["A line.", "Reward rises."]
    text = "".join("".join(o["text"]) for c in cells for o in c["outputs"] if o["output_type"] == "stream")
    assert text.count("steps: 40 in") == 1
    assert (
        "my own words" in text
        and "IProgress" not in text
        and "old name" not in text
        and "code line" not in text
    )


def test_a_killed_kernel_ends_the_notebook_soon(world):
    entry = outcome(world, "01_dead")
    assert entry["seconds"] < 30 and "kernel died" in entry["problem"] and "[4]" in entry["problem"]
    counts = [c["execution_count"] for c in executed(world, "01_dead")["cells"] if c["cell_type"] == "code"]
    assert counts[:3] == [1, 2, 3], "what ran before is kept"


def test_a_failing_cell_is_told_with_its_source_line(world):
    entry = outcome(world, "02_error")
    assert (
        "KeyError in cell [4]: 'missing'" in entry["problem"]
        and "source line 3: y['missing']" in entry["problem"]
    )
    assert "next: correct it, then python -m helpers.series run --profile cpu --only 02" in world[1].stdout
    assert "executed so far: runs/cpu/02_error/02_error.ipynb" in world[1].stdout
    assert not (world[0] / "runs" / "cpu" / "02_error" / "metrics.json").exists()


def test_a_cell_over_its_limit_is_interrupted(world):
    entry = outcome(world, "03_slow")
    assert entry["seconds"] < 20 and "longer than its limit of 1 s" in entry["problem"]
    assert "source line 3: time.sleep(0.05)" in entry["problem"]


def test_skipped_cells_fail_though_metrics_are_there(world):
    assert (world[0] / "runs" / "cpu" / "04_skip" / "metrics.json").exists()
    assert "were skipped" in outcome(world, "04_skip")["problem"]


def test_a_notebook_without_results_fails(world):
    assert "must call run.finish()" in outcome(world, "05_unfinished")["problem"]


def test_a_notebook_that_leaves_a_process_fails(world):
    assert "left 1 processes running, which were ended: sleep 86392" in outcome(world, "06_leaves")["problem"]


def test_the_report_is_one_file_with_alt_texts(world):
    page = (world[0] / "runs" / "cpu" / "report.html").read_text()
    assert 'alt="A line."' in page and 'alt="Reward rises."' in page and "heldout_gain" in page
    assert not re.search(r"(src|href)=\"(?!data:|#)", page) and "url(" not in page and "<script" not in page
    assert "prefers-color-scheme: dark" in page and "Memory at its peak" in page and "kernel died" in page
    assert str(world[0]) not in page.replace(world[2]["command"], ""), (
        "no machine path outside the command line"
    )


def test_no_machine_path_in_stored_notebooks(world):
    assert str(world[0]) not in json.dumps(executed(world, "00_good"))


# --- one run at a time, and its end by signal -------------------------------------------------------------------


def test_a_second_run_is_refused_and_a_signal_ends_the_first(tmp_path):
    write_notebook(
        tmp_path / "notebooks", "00_long",
        "import subprocess, time\n_ = subprocess.Popen(['sleep', '86393'], start_new_session=True)\ntime.sleep(600)",
    )  # fmt: skip
    line, env = command(tmp_path)
    first = subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 30
    while not alive("sleep 86393") and time.monotonic() < end:
        time.sleep(0.1)
    begin = time.monotonic()
    second = run(tmp_path)
    assert second.returncode == 2 and time.monotonic() - begin < 5
    assert (
        f"another run (process {first.pid}) is using" in second.stderr
        and len(second.stderr.splitlines()) == 1
    )
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=30)
    assert first.returncode == 130, out
    assert "stopped by SIGINT" in out and out.rstrip().endswith("processes left: 0")
    assert not alive("86393") and not alive(str(tmp_path))


# --- refused before anything starts -----------------------------------------------------------------------------


@pytest.fixture
def books(tmp_path):
    write_notebook(tmp_path / "notebooks", "00_a")
    write_notebook(
        tmp_path / "notebooks",
        "01_b",
        parameters='PROFILE: str = "cpu"  # p\nRATE: float = 0.1  # r',
    )
    return tmp_path


def refused(books, capsys, *words):
    line, _ = command(books, *words)
    code = series.main(line[3:])
    assert code == 2 and not list((books / "runs").rglob("*.ipynb")), "nothing was started"
    error = capsys.readouterr().err
    assert error.startswith("error: ") and len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["-p", "STPES", "3"],
            "unknown parameter STPES (did you mean STEPS?). Known here: PROFILE, RATE, STEPS",
        ),
        (
            ["--only", "01", "-p", "STEPS", "3"],
            "unknown parameter STEPS. Known here: PROFILE, RATE",
        ),
        (["-p", "STEPS", "abc"], "STEPS is int (default 3), 'abc' is not"),
        (["-p", "STEPS", "3.5"], "STEPS is int"),
        (["-p", "RATE", "fast"], "RATE is float (default 0.1)"),
        (["-p", "PROFILE", "gpu"], "contradicts --profile cpu"),
        (["--only", "07"], "no notebook '07'. Known: 00_a, 01_b"),
        (["--only", "00_b"], "no notebook '00_b' (did you mean"),
        (["--profile", "cup"], "unknown profile 'cup' (did you mean 'cpu'?)"),
        (["--min-free-gb", "1e9"], "GB are free"),
    ],
)
def test_bad_input_is_refused_at_once(books, capsys, monkeypatch, words, says):
    monkeypatch.setenv("GRPO_RUNS", "")  # restored afterwards: main sets it
    assert says in refused(books, capsys, *words)


def test_no_or_broken_notebooks_are_refused(tmp_path):
    with pytest.raises(SeriesError, match="no notebooks NN_name.ipynb.*twins write"):
        series.discover(tmp_path)
    (tmp_path / "00_a.ipynb").write_text("{")
    with pytest.raises(SeriesError, match="00_a.ipynb is no readable notebook"):
        series.discover(tmp_path)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "-4", -4), ("float", "1e-3", 1e-3), ("float", "2", 2.0), ("str", "007", "007"), ("bool", "False", False),
        ("bool", "true", True), ("int | None", "None", None), ("int | None", "3", 3), ("Optional[int]", "None", None),
        ("list[int]", "[1, 2]", [1, 2]), ("tuple[int, ...]", "(1,)", (1,)), ("Any", "x", "x"), ("Any", "3", 3),
    ],
)  # fmt: skip
def test_values_get_the_declared_type(kind, text, value):
    result = convert(Parameter("P", kind, None), text)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("int", "1.5"), ("int", ""), ("float", "nan"), ("float", "inf"), ("bool", "maybe"), ("int | None", "x"),
     ("list[int]", "3"), ("list[int]", "[1,"), ("dict", "()")],
)  # fmt: skip
def test_values_of_another_type_are_refused(kind, text):
    with pytest.raises(SeriesError, match=f"parameter P is {re.escape(kind)}"):
        convert(Parameter("P", kind, 1), text)


def test_report_without_results_says_what_to_run(tmp_path):
    with pytest.raises(ResultError, match="holds no results.*helpers.series run"):
        write_report(tmp_path / "cpu")


def test_a_truncated_notebook_is_left_alone(tmp_path):
    path = tmp_path / "00_a.ipynb"
    path.write_text('{"cells": [')
    series.clean_outputs(path)
    assert path.read_text() == '{"cells": ['
