"""The whole CPU series as one submitted job, on a Ray cluster of two nodes on this machine.

    python tests/bench/cluster_series.py

Writes recorded/cluster_series.csv: each notebook's seconds there, as its job's log and series.json say them,
and what the expectations say of its figures. Each node has one CPU for Ray, so notebook 06 has its trainer on
one node and its engine on the other; the other notebooks' engines are on the driver's machine. 15 minutes on
two cores that do nothing else.
"""

import csv
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "notebooks"))

from nodes import cluster

from helpers.results import check_expectations, git_commit, hardware

RECORDED = Path(__file__).parent / "recorded" / "cluster_series.csv"


def main() -> int:
    commit = git_commit()  # what runs; the tree may change meanwhile
    runs = Path(tempfile.mkdtemp(prefix="grpo-cluster-series-"))
    with cluster(runs, nodes=2) as made:
        start = time.perf_counter()
        done = made.submit(
            "series", sys.executable, "-m", "helpers.series", "run", "--profile", "cpu", "--runs", str(runs), "--keep-going",
            timeout=3600,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        logs = made.ray("job", "logs", "series").stdout
    print(logs[-4000:], done.stderr[-2000:] if done.returncode else "", flush=True)
    faults = check_expectations(runs / "cpu", ROOT / "notebooks" / "expectations" / "cpu.toml")
    print("\n".join(faults) or "all figures are as expected")
    entries = json.loads((runs / "cpu" / "series.json").read_text())["notebooks"]
    machine = hardware()
    with RECORDED.open("w", newline="") as file:
        file.write(
            f"# {time.strftime('%Y-%m-%d')}, commit {commit}, {machine['cpu']}, {machine['cores']} cores; job's exit code "
            f"{done.returncode}, {seconds:.0f} s from submit to end, {len(faults)} figures outside their expectation, "
            f"{len(made.left)} processes left\n"
        )
        writer = csv.writer(file)
        writer.writerow(["notebook", "status", "seconds", "peak_gib_below_the_driver", "in_job_log"])
        for e in entries:
            said = f"{e['notebook']}  {e['status']}" in logs
            writer.writerow([e["notebook"], e["status"], e["seconds"], e["peak_pss_gib"], int(said)])
    return done.returncode or bool(faults) or bool(made.left)


if __name__ == "__main__":
    sys.exit(main())
