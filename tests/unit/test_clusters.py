"""The launch files of environment/clusters without a cluster: what they print and refuse, and their order.

No Slurm and no Kubernetes is here. What is checked: the scripts parse, their dry runs print commands whose
options Ray has, the manifest keeps to KubeRay's schema, and slurm.sh's order of steps, exit code and clean-up
with recorders for `srun`, `scontrol` and `python`. tests/notebooks/test_two_nodes.py runs node.sh for good.
"""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.processes import alive, process_tree

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = ROOT / "environment" / "clusters"
TOKEN = {"RAY_AUTH_TOKEN": "a-token-of-a-test"}


def run(script: str, *words: str, **environment) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_", "GRPO_"))}
    return subprocess.run(
        ["bash", str(CLUSTERS / script), *words],
        capture_output=True,
        text=True,
        env=clean | environment,
        timeout=60,
    )


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.sh")), ids=lambda p: p.name)
def test_scripts_parse_and_explain_themselves(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert "--dry-run" in run(path.name, "--help").stdout


# --- node.sh ------------------------------------------------------------------------------------------------
def printed_command(text: str) -> list[str]:
    """The command that a dry run of node.sh ends with."""
    return shlex.split(text.splitlines()[-1])


@pytest.fixture(scope="module")
def options_of_ray() -> set[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--help"],
        capture_output=True,
        text=True,
    )
    return set(re.findall(r"--[a-z][a-z-]+", done.stdout))


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_dry_run_prints_what_ray_would_be_started_with(options_of_ray, profile):
    words = ("--dry-run", "--profile", profile, "--python", sys.executable, "--address", "10.0.0.7")
    head = run("node.sh", "head", *words, "--port", "7000", **TOKEN)
    worker = run(
        "node.sh", "worker", *words, "--head", "10.0.0.7:7000", "--", "--resources", '{"engine": 1}', **TOKEN
    )
    for done in (head, worker):
        assert done.returncode == 0, done.stderr
        command = printed_command(done.stdout)
        assert {w.split("=")[0] for w in command if w.startswith("--")} <= options_of_ray
        assert ("--num-gpus=0" in command) == (profile == "cpu") and "--node-ip-address=10.0.0.7" in command
        assert "export RAY_AUTH_MODE=token" in done.stdout and TOKEN["RAY_AUTH_TOKEN"] not in done.stdout
        assert f"export GRPO_DEVICE={'cpu' if profile == 'cpu' else 'cuda'}" in done.stdout
    head, worker = printed_command(head.stdout), printed_command(worker.stdout)
    assert {"--head", "--port=7000", "--dashboard-host=127.0.0.1"} <= set(head)
    assert "--address=10.0.0.7:7000" in worker and worker[-2:] == ["--resources", '{"engine": 1}']
    assert "--head" not in worker


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["head"], {}, "there is no token"),
        (["worker"], TOKEN, "needs --head HOST:PORT"),
        (["worker", "--head", "10.0.0.7"], TOKEN, "needs --head HOST:PORT"),
        (["head", "--port", "six"], TOKEN, "'six' is no number"),
        (["head", "--port"], TOKEN, "--port needs a value"),
        (["head", "--prot", "7000"], TOKEN, "unknown option --prot"),
        (["head", "--temp-dir", "/tmp/" + "x" * 60], TOKEN, "longer than 40 characters"),
    ],
)
def test_what_cannot_work_is_refused_in_a_line_or_two(words, environment, message):
    done = run("node.sh", *words, "--dry-run", **environment)
    assert done.returncode == 2 and message in done.stderr and done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2


def test_a_worker_does_not_wait_for_ever_for_its_head():
    done = run(
        "node.sh", "worker", "--python", sys.executable, "--head", "127.0.0.1:9", "--wait", "1", **TOKEN
    )
    assert done.returncode == 1 and "no Ray head answers at 127.0.0.1:9 within 1 s" in done.stderr


# --- slurm.sh -----------------------------------------------------------------------------------------------
def test_a_dry_run_of_slurm_names_each_hosts_commands():
    done = run("slurm.sh", "--dry-run", "--nodes", "3", "--profile", "gpu", "--only", "06")
    assert done.returncode == 0, done.stderr
    steps = [
        shlex.split(line.removesuffix("&")) for line in done.stdout.splitlines() if line.startswith("'srun'")
    ]
    head, workers = steps
    assert {"--nodes=1", "--ntasks=1", "--nodelist=host1"} <= set(head)
    assert {"--nodes=2", "--ntasks=2", "--exclude=host1"} <= set(workers)
    port = head[head.index("--port") + 1]
    assert workers[workers.index("--head") + 1] == f"host1:{port}"
    submitted = shlex.split(done.stdout.splitlines()[-1])
    assert submitted[submitted.index("--") + 1 :][2:] == ["--profile", "gpu", "--only", "06"]
    for step in steps:  # what srun would run on a host is a command that node.sh takes
        words = step[step.index("bash") + 2 :]
        assert run("node.sh", *words, "--dry-run", "--python", sys.executable, **TOKEN).returncode == 0


def test_one_host_has_no_workers():
    done = run("slurm.sh", "--dry-run", "--nodes", "1")
    assert done.stdout.count("'srun'") == 1 and "'--nodes' '1'" in done.stdout


def test_outside_of_slurm_nothing_is_started():
    done = run("slurm.sh")
    assert done.returncode == 2 and "start it with sbatch" in done.stderr


STAND_IN = """#!/bin/bash
echo "{name} $* token=${{#RAY_AUTH_TOKEN}}" >>"$RECORD"
{then}
"""


@pytest.fixture
def job(tmp_path):
    """A folder like the project, recorders on PATH, and a batch script's environment on n1 of n1 and n2."""
    project, tools = tmp_path / "project", tmp_path / "bin"
    for folder in (project / "environment" / "clusters", tools):
        folder.mkdir(parents=True)
    for name in ("slurm.sh", "node.sh"):
        (project / "environment" / "clusters" / name).write_text((CLUSTERS / name).read_text())
    (project / "environment" / "run.sh").write_text("echo set-up $* >>$RECORD\n")
    (project / "environment" / "setup.sh").write_text("choose_environment() { :; }\nset_up() { :; }\n")
    python = 'case "$*" in *"job submit"*) exec bash -c "$SUBMITTED" ;; esac'
    stand_ins = {"srun": "exec sleep 60", "scontrol": "printf 'n1\\nn2\\n'", "python": python}
    for name, then in stand_ins.items():
        (tools / name).write_text(STAND_IN.format(name=name, then=then))
        (tools / name).chmod(0o755)
    environment = {
        "PATH": f"{tools}:/usr/bin:/bin", "RECORD": str(tmp_path / "record"), "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(project), "SLURM_CPUS_PER_TASK": "32",
    }  # fmt: skip

    def start(submitted: str) -> subprocess.Popen:
        script = tmp_path / "slurm_script"  # Slurm runs a copy from a folder of its own
        script.write_text((CLUSTERS / "slurm.sh").read_text())
        return subprocess.Popen(
            ["bash", str(script), "--profile", "gpu"], env=environment | {"SUBMITTED": submitted}
        )

    start.record = tmp_path / "record"
    return start


def test_slurms_steps_come_in_order_and_the_runs_exit_code_goes_out(job):
    process = job("exit 3")
    assert process.wait(20) == 3
    lines = job.record.read_text().splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["scontrol", "set-up"]
    heads = [line for line in lines if "node.sh head" in line]
    workers = [line for line in lines if "node.sh worker --profile gpu --head n1:24711" in line]
    assert len(heads) == len(workers) == 1
    assert "--cpus-per-task=32" in heads[0] and "--exclude=n1" in workers[0]
    assert all(line.endswith("token=64") for line in (*heads, *workers)), (
        "in the environment, and on no command line"
    )
    wait, submit = [line for line in lines if line.startswith("python ")][:2]
    assert (
        "helpers.nodes wait" in wait
        and "--nodes 2" in wait
        and "job submit" in submit
        and "slurm-4711" in submit
    )


def test_the_end_of_slurms_time_stops_the_run_first(job):
    process = job("sleep 60")
    deadline = time.monotonic() + 20
    while "job submit" not in (job.record.read_text() if job.record.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = process_tree([process.pid])
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert "job stop --address http://127.0.0.1:29711 slurm-4711" in job.record.read_text()
    assert len(children) >= 4 and alive(children) == []


# --- kuberay.yaml -------------------------------------------------------------------------------------------
def kuberay():
    spec = importlib.util.spec_from_file_location("kuberay", CLUSTERS / "kuberay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_manifest_is_sound_and_its_dry_run_says_what_runs_where():
    done = subprocess.run(
        [sys.executable, str(CLUSTERS / "kuberay.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^head: image \S+, cpu 32", done.stdout, re.MULTILINE)
    assert "workers workers x 1:" in done.stdout and "run.sh --profile cluster" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("maxReplicas: 1", "maxReplica: 1", "'maxReplica' was unexpected"),
        ("rayStartParams: {}", "rayStartParam: {}", "'rayStartParams' is a required property|was unexpected"),
        ("replicas: 1\n", "replicas: one\n", "'one' is not of type 'integer'"),
        ("mountPath: /dev/shm", "mountpath: /dev/shm", "'mountpath' was unexpected"),
        ("mode: token", "mode: disabled", "mode is not token"),
        ('rayVersion: "2.60.0"', 'rayVersion: "2.52.0"', "gpu.lock has ray"),
        ("claimName: grpo-runs", "claimName: other", "wants the claim other"),
        ('GRPO_DEVICE, value: "cuda"', 'GRPO_DEVICE, value: "cpu"', "profile cluster says 'cuda'"),
        (
            "{name: TOKENIZERS",
            "{name: RAY_AUTH_TOKEN, value: abc}\n                - {name: TOKENIZERS",
            "a token stands in",
        ),
        ("kind: RayJob", "kind: RayJobs", "0 documents of kind RayJob"),
        ("apiVersion: v1\n", "apiVersion: [v1\n", "is no RayJob manifest"),
    ],
)
def test_a_manifest_with_a_fault_is_refused(tmp_path, capsys, old, new, message):
    text = (CLUSTERS / "kuberay.yaml").read_text()
    assert old in text
    (tmp_path / "planted.yaml").write_text(text.replace(old, new))
    assert kuberay().main([str(tmp_path / "planted.yaml")]) == 1
    assert re.search(message, capsys.readouterr().err)
