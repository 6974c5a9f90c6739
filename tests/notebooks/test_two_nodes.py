"""The series on a Ray cluster of two nodes, which are two processes of this machine, by `ray job submit`.

About three minutes on two cores, and a minute more where no earlier test left a warm-started policy.
"""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from helpers.processes import process_name
from helpers.profiles import PROJECT_ROOT
from helpers.results import read_metrics
from nodes import cluster as start_cluster

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
SERIES = PROJECT_ROOT / "runs" / "tests" / "cpu" / "checkpoints"  # what test_series_cpu.py leaves


def folders() -> set[str]:
    """What node.sh and a server with a key make."""
    return {str(p) for pattern in ("ray-" + "?" * 6, "grpo-key-*") for p in Path("/tmp").glob(pattern)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for results, with the policy of an earlier run of the series if there is one."""
    folder = tmp_path_factory.mktemp("two-nodes")
    for name in ("random-seed0", "warm-seed0"):
        if (SERIES / name / "config.json").is_file():
            shutil.copytree(SERIES / name, folder / "cpu" / "checkpoints" / name)
    return folder


@pytest.fixture(scope="module")
def cluster(runs):
    """Two nodes; afterwards nothing of them is left, though one was killed."""
    before = folders()
    with start_cluster(runs, nodes=2) as made:
        yield made
        processes = made.processes()
    assert len(processes) > 15
    assert made.left == []
    assert folders() == before


@pytest.fixture(scope="module")
def train(cluster, runs):
    """Notebook 06 as a job: trainer and engine on different nodes, since each has one CPU for Ray."""
    return cluster.submit(
        "train", sys.executable, "-m", "helpers.series", "run", "--profile", "cpu", "--runs", str(runs), "--only", "06",
        "-p", "STEPS", "3", "-p", "EVAL_EVERY", "3", "-p", "SAVE_EVERY", "3",
    )  # fmt: skip


def outputs(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(o.get("text", "")) for cell in cells for o in cell.get("outputs", []))


def test_a_job_trains_on_two_nodes(train, cluster, runs):
    assert train.returncode == 0, train.stdout[-3000:] + cluster.words()
    record = read_metrics(runs / "cpu" / "06_train" / "metrics.json")
    assert record["status"] == "ok"
    # trainer and server, on different nodes, computed the same after each sync; saved and resumed there
    assert record["metrics"]["logprob_gap_max"] < 1e-4
    assert record["metrics"]["resume_max_abs_logprob"] < 1e-4
    said = outputs(runs / "cpu" / "06_train" / "06_train.ipynb")
    assert float(re.search(r"one more step moved them by (\S+)", said)[1]) > 1e-3
    assert re.search(r"rollout engine at http://127\.0\.0\.[23]:\d+", said), (
        "the engine has its node's address"
    )


def test_what_a_job_said_can_be_read_later(train, cluster):
    logs = cluster.ray("job", "logs", "train")
    assert "06_train  ok" in logs.stdout and "processes left: 0" in logs.stdout
    assert (
        "SUCCEEDED" in (lambda done: done.stdout + done.stderr)(cluster.ray("job", "status", "train")).upper()
    )


def test_no_server_outlives_its_job(train, cluster):
    names = [process_name(pid) for pid in cluster.processes()]
    assert any("raylet" in name for name in names)
    assert not [name for name in names if "sglang" in name or "Actor" in name]


def test_the_token_is_on_no_command_line_and_in_no_log(train, cluster):
    lines = [Path(f"/proc/{pid}/cmdline") for pid in cluster.processes()]
    assert not any(cluster.token in line.read_text(errors="replace") for line in lines if line.exists())
    assert cluster.token not in train.stdout + train.stderr + cluster.words()


def test_without_the_token_nothing_is_answered(cluster):
    cluster.environment |= {"RAY_AUTH_TOKEN": "0" * 64}
    try:
        done = cluster.ray("job", "submit", "--submission-id=stranger", "--", "true")
    finally:
        cluster.environment |= {"RAY_AUTH_TOKEN": cluster.token}
    assert done.returncode != 0 and "authentication" in (done.stdout + done.stderr).lower()


def test_ranks_and_engine_on_three_nodes(train, cluster, runs):
    """A node joins; two ranks meet at their addresses; weights go by value and through a group."""
    cluster.add()
    cluster.wait(3)
    out, policy = runs / "three.json", runs / "cpu" / "checkpoints" / "warm-seed0"
    done = cluster.submit(
        "three", sys.executable, str(Path(__file__).with_name("nodes.py")), str(out), str(policy)
    )
    assert done.returncode == 0, done.stdout[-3000:]
    seen = json.loads(out.read_text())
    assert seen["attached"]
    places = [*seen["ranks"], *seen["engines"]]
    assert sorted(p["address"] for p in places) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    assert all(p["interface"] == "lo" and p["device"] == "cpu" for p in places)
    assert all(rank["interfaces"]["GLOO_SOCKET_IFNAME"] == "lo" for rank in seen["ranks"])
    assert seen["versions"] == ["initial", "step-1", "step-2", "step-3"]
    assert max(seen["gaps"]) < 1e-4 and min(seen["moved"]) > 1e-3
    assert "401" in seen["without_key"]
    host, port = re.fullmatch(r"http://(127\.0\.0\.\d):(\d+)", seen["urls"][0]).groups()
    assert host == seen["engines"][0]["address"]
    listens = re.findall(rf"^ *\d+: ([0-9A-F]+):{int(port):04X} \S+ 0A ", seen["listens"], re.MULTILINE)
    assert listens == ["".join(f"{int(part):02X}" for part in reversed(host.split(".")))], (
        "and at no other address"
    )
