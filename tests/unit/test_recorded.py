"""Recorded runs: the README's tables come from them, and a run that names no commit is refused."""

import json
import shutil

import pytest

from helpers.profiles import PROJECT_ROOT
from helpers.recorded import RecordError, fill_readme, record_run, recorded_label, recorded_rows
from helpers.results import check_expectations

RECORDED = PROJECT_ROOT / "notebooks" / "recorded" / "cpu"
README = PROJECT_ROOT / "README.md"


def test_the_readme_is_that_of_the_recorded_run():
    text = README.read_text()
    assert fill_readme(text, RECORDED) == text, (
        "run python -m helpers.recorded after a run, or restore the tables"
    )


def test_every_notebook_is_recorded_with_outputs_and_one_commit():
    names = sorted(p.stem for p in (PROJECT_ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    commits = set()
    for name in names:
        executed = json.loads((RECORDED / name / f"{name}.ipynb").read_text())
        code = [c for c in executed["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]
        assert all(c["execution_count"] for c in code)
        commits.add(json.loads((RECORDED / name / "metrics.json").read_text())["commit"])
    assert len(commits) == 1
    assert "dirty" not in commits.pop()


@pytest.mark.parametrize("notebook", ["03_rollout", "05_grpo_step", "06_train"])
def test_the_recorded_run_syncs_in_time(notebook):
    """Under 0.3 s, the slowest of all syncs; judged on the recorded run, since a busy machine is no failure."""
    metrics = json.loads((RECORDED / notebook / "metrics.json").read_text())["metrics"]
    assert 0 < metrics["sync_seconds_max"] < 0.3


def test_the_recorded_series_is_in_time_and_in_memory():
    entries = json.loads((RECORDED / "series.json").read_text())["notebooks"]
    assert sum(e["seconds"] for e in entries) < 18 * 60
    assert max(e["peak_pss_gib"] for e in entries) < 12


def test_a_run_with_uncommitted_changes_is_not_recorded(tmp_path):
    runs = tmp_path / "cpu"
    shutil.copytree(RECORDED, runs)
    file = runs / "04_grpo_math" / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit": "abc+dirty"}))
    with pytest.raises(RecordError, match="commit everything"):
        record_run(runs, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_part_does_not_replace_the_whole(tmp_path):
    target = tmp_path / "cpu"
    shutil.copytree(RECORDED, target)
    with pytest.raises(RecordError, match="holds 00_environment.* does not replace"):
        record_run(RECORDED, target, only=["07"])
    with pytest.raises(RecordError, match="no notebook 42"):
        record_run(RECORDED, tmp_path / "other", only=["42"])
    assert len(record_run(RECORDED, tmp_path / "other", only=["07"])) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cpu", "other"]
    assert len(list(target.glob("[0-9][0-9]_*"))) == 10


def test_lost_markers_are_named():
    with pytest.raises(RecordError, match="markers for the table of notebooks"):
        fill_readme("# no tables here", RECORDED)


def test_a_recorded_run_is_never_shown_without_its_label(capsys):
    from helpers.recorded import show_recorded

    label = recorded_label("cpu", "07_memory")
    assert label.startswith("RECORDED, not run here: profile cpu, 2 CPU cores, torch 2.")
    assert "commit " in label
    show_recorded("cpu", "07_memory", "phases")
    assert capsys.readouterr().out.startswith("RECORDED")


def test_a_missing_record_says_so(capsys):
    from helpers.recorded import show_recorded

    assert recorded_label("cluster", "07_memory") == ""
    show_recorded("cluster", "07_memory", "card")
    show_recorded("cpu", "07_memory", "no_such_figure")
    assert capsys.readouterr().out.splitlines() == [
        "no recorded run of profile cluster, notebook 07_memory, with card",
        "no recorded run of profile cpu, notebook 07_memory, with no_such_figure",
    ]


@pytest.mark.parametrize("profile", ["gpu", "gpu-20b"])
def test_a_recorded_gpu_run_shows_what_it_must(profile):
    root = PROJECT_ROOT / "notebooks"
    problems = check_expectations(root / "recorded" / profile, root / "expectations" / f"{profile}.toml")
    assert problems == []
    assert "NVIDIA" in recorded_label(profile, "07_memory")


PREDICTIONS = "planner_predictions.csv"  # by helpers.planner, before the runs; its first line says when
BENCHES = sorted(
    p.name for p in (PROJECT_ROOT / "tests" / "gpu" / "recorded").glob("*.csv") if p.name != PREDICTIONS
)


def test_every_file_of_the_gpu_benches_is_labelled():
    folder = PROJECT_ROOT / "tests" / "gpu" / "recorded"
    labelled = json.loads((folder / "about.json").read_text()).keys()
    assert labelled | {"about.json", "gpu_tests.json", PREDICTIONS} == {p.name for p in folder.iterdir()} and len(BENCHES) >= 10


def test_the_gpu_tests_results_say_where_they_ran():
    """How many held stands in the README, with the name of each that did not."""
    found = json.loads((PROJECT_ROOT / "tests" / "gpu" / "recorded" / "gpu_tests.json").read_text())
    assert "H200" in str(found["hardware"]) and len(found["commit"]) == 40 and found["versions"]["sglang"]
    failed = sorted(name.rpartition("::")[2] for name, outcome in found["outcomes"].items() if outcome != "passed")
    readme = (PROJECT_ROOT / "tests" / "gpu" / "README.md").read_text()
    assert all(name in readme for name in failed)
    assert f"{sum(o == 'passed' for o in found['outcomes'].values())} of {len(found['outcomes'])}" in readme


@pytest.mark.parametrize("name", BENCHES)
def test_every_recorded_bench_says_where_it_ran(name, capsys):
    rows = recorded_rows(name)
    label = capsys.readouterr().out
    assert rows and label.startswith("RECORDED, not run here: 1 NVIDIA") and "commit " in label and "python tests/gpu/" in label


def test_the_hook_releases_what_the_issue_asks_for():
    """95% of weights and cache, stable over twenty cycles, logprobs as before."""
    stages = {(r["way"], r["stage"]): float(r["gigabytes"]) for r in recorded_rows("footprint.csv")}
    held = {way: stages[way, "released cuda_graph"] / stages[way, "started"] for way in ("stock", "hook")}
    assert held["hook"] < 0.05 and held["stock"] > 0.8
    cycles = recorded_rows("footprint_cycles.csv")
    assert len(cycles) == 20 and {float(r["logprob_gap"]) for r in cycles} == {0.0}
    assert max(float(r["released_gigabytes"]) for r in cycles) < 2.0


def test_a_record_whose_cards_are_no_list_is_refused(tmp_path):
    shutil.copytree(RECORDED / "06_train", tmp_path / "cpu" / "06_train")
    file = tmp_path / "cpu" / "06_train" / "metrics.json"
    record = json.loads(file.read_text())
    record["hardware"]["gpus"] = {"0": "a card"}
    file.write_text(json.dumps(record))
    with pytest.raises(RecordError, match="gpus are dict, not a list"):
        recorded_label("cpu", "06_train", tmp_path)
