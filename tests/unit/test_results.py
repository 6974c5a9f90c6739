"""The result contract: what is stored, and what is refused with a sentence that helps."""

import json
import math
import os
import subprocess
import sys

import pytest

from helpers import results
from helpers.profiles import load_profile
from helpers.results import (
    METRICS,
    METRICS_FILE,
    NotebookRun,
    ResultError,
    check_expectations,
    write_rows,
    read_metrics,
)

NAME = "04_grpo_math"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path))
    return load_profile("cpu", seed=3)


@pytest.fixture
def run(settings):
    return NotebookRun(NAME, settings)


def test_metrics_json_follows_schema_1(run):
    run.record("heldout_gain", 0.25)
    run.record("export_missing", 0)
    run.series("clip", {"ratio": [0.5, 1.0], "loss": [1, 2]})
    run.finish()
    record = read_metrics(run.folder / METRICS_FILE)
    assert list(record) == [
        "schema", "notebook", "profile", "status", "seed", "commit", "date", "hardware", "versions", "command", "seconds",
        "metrics", "units", "series",
    ]  # fmt: skip
    assert (record["schema"], record["notebook"], record["profile"], record["seed"]) == (
        1,
        NAME,
        "cpu",
        3,
    )
    assert record["metrics"] == {"heldout_gain": 0.25, "export_missing": 0}
    assert record["units"] == {"heldout_gain": "1", "export_missing": "count"}
    assert record["series"] == {"clip": "clip.csv"}
    assert (run.folder / "clip.csv").read_text() == "ratio,loss\n0.5,1\n1.0,2\n"
    assert (
        record["versions"]["python"]
        and record["hardware"]["cores"] >= 1
        and record["hardware"]["memory_gib"] > 0
    )
    assert not list(run.folder.glob("*.tmp")), "drafts must not stay"


def test_a_new_run_removes_the_old_result(run, settings):
    run.finish()
    NotebookRun(NAME, settings)
    assert not (run.folder / METRICS_FILE).exists()


def test_an_unregistered_metric_is_refused_and_the_list_is_named(run):
    with pytest.raises(ResultError, match="heldout_gian.*not registered.*heldout_gain.*helpers/results.py"):
        run.record("heldout_gian", 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0.3", None, True, [1.0], 1j])
def test_only_finite_numbers_are_stored(run, value):
    with pytest.raises(ResultError, match="heldout_gain"):
        run.record("heldout_gain", value)
    assert run.metrics == {}


def test_scalars_of_numpy_become_plain_numbers(run):
    numpy = pytest.importorskip("numpy")
    run.record("heldout_gain", numpy.float32(0.5))
    run.record("export_missing", numpy.array(2))
    run.series("s", {"x": numpy.arange(2)})
    assert json.dumps(run.metrics) == '{"heldout_gain": 0.5, "export_missing": 2}'
    assert (run.folder / "s.csv").read_text() == "x\n0\n1\n"


@pytest.mark.parametrize("columns", [{}, {"a": [1], "b": [1, 2]}])
def test_series_columns_must_have_one_length(run, columns):
    with pytest.raises(ResultError, match="one length"):
        run.series("bad", columns)


@pytest.mark.parametrize("name", ["", "../escape", "a b", "a/b"])
def test_series_names_stay_in_the_run_folder(run, name):
    with pytest.raises(ResultError, match="file name"):
        run.series(name, {"a": [1]})


def _broken(text):
    def change(path):
        path.write_text(text(path.read_text()))

    return change


def _without(field):
    return lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != field})


def _with(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text[: len(text) // 2], "not valid JSON.*truncated"),
        (lambda text: "", "not valid JSON"),
        (lambda text: "[]", "no JSON object"),
        (_with(schema=2), "schema 2.*reads schema 1"),
        (_without("metrics"), "lacks metrics"),
        (_with(metrics=[]), "wrong type in metrics"),
        (_with(metrics={"a": math.nan}), "no finite numbers: a"),
        (_with(metrics={"a": "1"}), "no finite numbers: a"),
    ],
)
def test_a_broken_record_names_file_and_next_command(run, change, says):
    run.finish()
    path = run.folder / METRICS_FILE
    _broken(change)(path)
    with pytest.raises(ResultError, match=says) as error:
        read_metrics(path)
    assert str(path) in str(error.value)
    assert "python -m helpers.series run --profile cpu --only 04" in str(error.value)


def test_a_missing_record_is_explained(tmp_path):
    with pytest.raises(ResultError, match="does not exist.*has not finished.*--profile cpu --only 06"):
        read_metrics(tmp_path / "cpu" / "06_train" / METRICS_FILE)


def _git(folder, *words):
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=t", "-c", "user.email=t@example.org", *words],
        check=True,
        capture_output=True,
    )


def test_commit_is_unknown_plain_or_dirty(tmp_path, monkeypatch):
    assert results.git_commit(tmp_path) == "unknown", "no repository"
    _git(tmp_path, "init", "-q")
    assert results.git_commit(tmp_path) == "unknown", "no commit"
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-q", "-m", "first")
    clean = results.git_commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x").write_text("1")
    assert results.git_commit(tmp_path) == clean, "results do not make a tree dirty"
    (tmp_path / "a").write_text("2")
    assert results.git_commit(tmp_path) == f"{clean}+dirty"
    monkeypatch.setenv("PATH", "")
    assert results.git_commit(tmp_path) == "unknown", "no git"
    monkeypatch.setenv(results.COMMIT_VARIABLE, "f" * 40)
    assert results.git_commit(tmp_path) == "f" * 40, "a copy without history is told"


def _expect(tmp_path, text):
    path = tmp_path / "cpu.toml"
    path.write_text(text)
    return check_expectations(tmp_path / "cpu", path)


def test_expectations_hold(run, tmp_path):
    run.record("heldout_gain", 0.5)
    run.finish()
    assert _expect(tmp_path, "[04_grpo_math]\nheldout_gain = {min = 0.2, max = 1}\n") == []


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        (
            "[04_grpo_math]\nheldout_gain = {min = 0.6}",
            "heldout_gain is 0.5, expected at least 0.6",
        ),
        ("[04_grpo_math]\nheldout_gain = {max = 0.1}", "expected at most 0.1"),
        ("[04_grpo_math]\nwarm_start_loss = {max = 1}", "warm_start_loss was not recorded"),
        ("[04_grpo_math]\nnonsense = {max = 1}", "nonsense is expected but not registered"),
        ("[04_grpo_math]\nheldout_gain = 0.2", "a bound is written"),
        ("[04_grpo_math]\nheldout_gain = {mim = 0.2}", "a bound is written"),
        ("[05_grpo_step]", "05_grpo_step.*has not finished"),
    ],
)
def test_expectations_fail_with_one_sentence(run, tmp_path, toml, says):
    run.record("heldout_gain", 0.5)
    run.finish()
    failures = _expect(tmp_path, toml)
    assert len(failures) == 1 and says.split(".*")[-1] in failures[0]


def test_expectations_see_skipped_cells(run, tmp_path):
    run.finish()
    code = {"cell_type": "code", "source": ["x = 1"], "execution_count": 1}
    cells = [code, code | {"execution_count": None}, code | {"source": [], "execution_count": None}]
    (run.folder / f"{NAME}.ipynb").write_text(json.dumps({"cells": cells}))
    assert _expect(tmp_path, "[04_grpo_math]") == [f"{NAME}: code cells [2] were not run"]


def test_a_broken_expectations_file_is_named(tmp_path):
    with pytest.raises(ResultError, match="cpu.toml"):
        _expect(tmp_path, "[04_grpo_math\n")


def test_every_metric_is_described():
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning and metric.range_text(), name
        assert metric.low is None or metric.high is None or metric.low <= metric.high, name
    table = results.metrics_table_markdown(["export_extra", "heldout_gain"])
    assert table.splitlines()[2].startswith("| `export_extra` | count |") and len(table.splitlines()) == 4


def test_results_series_and_report_need_no_engine():
    code = (
        "import sys, helpers.results, helpers.series, helpers.report, helpers.figures, helpers.twins\n"
        "heavy = {'torch', 'ray', 'sglang', 'megatron', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=os.environ | {"PYTHONPATH": str(results.PROJECT_ROOT)},
    )


def test_rows_of_different_names_become_one_table(tmp_path):
    write_rows(tmp_path / "x.csv", [{"a": 1, "b": 2.5}, {"a": 3, "c": "x"}])
    assert (tmp_path / "x.csv").read_text() == "a,b,c\n1,2.5,\n3,,x\n"
    with pytest.raises(ResultError, match="columns of one length"):
        write_rows(tmp_path / "y.csv", [])


def test_a_note_stands_above_the_header(tmp_path):
    results.write_rows(tmp_path / "a.csv", [{"x": 1, "y": "b"}], "2026-11-30, 2 cores")
    assert (tmp_path / "a.csv").read_text() == "# 2026-11-30, 2 cores\nx,y\n1,b\n"
