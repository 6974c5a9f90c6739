"""Runs the whole series on this machine's CPU, as a reader does, and judges what it leaves behind.

About ten minutes on two cores; the progress lines go to the terminal. Results: runs/tests/cpu.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.profiles import PROJECT_ROOT
from helpers.results import check_expectations, read_metrics, skipped_cells

NOTEBOOKS = sorted(p.stem for p in (PROJECT_ROOT / "notebooks").glob("[0-9]*.ipynb"))
EXPECTATIONS = PROJECT_ROOT / "notebooks" / "expectations" / "cpu.toml"
pytestmark = [pytest.mark.engine, pytest.mark.timeout(2400)]


def leftovers() -> set[str]:
    """Names of what engines could leave in shared memory and temp folders."""
    places = [*Path("/dev/shm").glob("*"), *Path("/tmp").glob("ray-*"), *Path("/tmp").glob("ray")]
    return {str(p) for p in places}


@pytest.fixture(scope="session")
def series(request):
    """(exit code, folder of results, things left behind) of one complete run."""
    runs = PROJECT_ROOT / "runs" / "tests"
    shutil.rmtree(runs, ignore_errors=True)
    before = leftovers()
    command = [sys.executable, "-m", "helpers.series", "run", "--profile", "cpu", "--runs", "runs/tests", "--keep-going"]
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(flush=True)
        done = subprocess.run(command, cwd=PROJECT_ROOT, stdin=subprocess.DEVNULL, timeout=2300)
    return done.returncode, runs / "cpu", leftovers() - before


def test_every_notebook_ran(series):
    code, runs, _ = series
    record = json.loads((runs / "series.json").read_text())
    status = {entry["notebook"]: entry["status"] for entry in record["notebooks"]}
    assert status == dict.fromkeys(NOTEBOOKS, "ok")
    assert code == 0


def test_nothing_is_left_behind(series):
    _, runs, left = series
    assert json.loads((runs / "series.json").read_text())["processes_left"] == 0
    assert left == set()


def test_the_figures_are_as_expected(series):
    _, runs, _ = series
    assert check_expectations(runs, EXPECTATIONS) == []


def test_every_notebook_has_an_expectation(series):
    text = EXPECTATIONS.read_text()
    assert [name for name in NOTEBOOKS if f"[{name}]" not in text] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_result_contract(series, notebook):
    _, runs, _ = series
    record = read_metrics(runs / notebook / "metrics.json")
    assert (record["notebook"], record["profile"], record["status"]) == (notebook, "cpu", "ok")
    assert record["seconds"] > 0.5, "a notebook that ran in no time did nothing"
    assert skipped_cells(runs / notebook / f"{notebook}.ipynb") == []
    for file in record["series"].values():
        assert (runs / notebook / file).is_file()


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_stored_outputs_are_readable(series, notebook):
    """No tracebacks, warnings, machine paths or tokens in what a reader on the web sees."""
    _, runs, _ = series
    executed = json.loads((runs / notebook / f"{notebook}.ipynb").read_text())
    outputs = [o for cell in executed["cells"] for o in cell.get("outputs", [])]
    texts = ["".join(o.get("text", "")) + "".join(o.get("data", {}).get("text/plain", "")) for o in outputs]
    whole = "\n".join(texts)
    assert not [o for o in outputs if o["output_type"] == "error"]
    for word in ("Warning", "Traceback", str(PROJECT_ROOT), str(Path.home()) + "/", "IProgress"):
        assert word not in whole
    assert not re.search(r"\b[0-9a-f]{64}\b", whole), "looks like Ray's token"


def test_the_policy_learned_to_work_it_out(series):
    """Accuracy rises because answers grow from guesses to worked ones, and the policy still explores."""
    _, runs, _ = series
    metrics = read_metrics(runs / "06_train" / "metrics.json")["metrics"]
    assert metrics["completion_length_last10"] > metrics["completion_length_first10"] + 4
    assert metrics["reward_last10"] > metrics["reward_first10"] + 0.15
    assert metrics["entropy_last10"] > 0.05


def test_the_report_needs_no_other_host(series):
    _, runs, _ = series
    page = (runs / "report.html").read_text()
    assert all(name in page for name in NOTEBOOKS)
    assert not re.search(r"""(?:src|href)=["']?https?://|@import|url\(https?:""", page)


def test_the_trained_policy_is_a_hugging_face_folder(series):
    _, runs, _ = series
    folder = runs / "checkpoints" / "grpo-seed0"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in folder.iterdir()}
