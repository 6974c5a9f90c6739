"""A Ray cluster whose nodes are processes of this machine, at loopback addresses of their own.

Each node is environment/clusters/node.sh, as on a host of its own. As a command (OUT CHECKPOINT) this is what
test_two_nodes.py submits as a job: the loop with two trainer ranks and an engine on three nodes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from helpers.processes import alive, process_tree
from helpers.profiles import PROJECT_ROOT, load_profile
from helpers.rollout import SGLangClient, free_port

SCRIPT = PROJECT_ROOT / "environment" / "clusters" / "node.sh"
RAY = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts"]


class Cluster:
    """Nodes at 127.0.0.2, 127.0.0.3, ... of one CPU each, so that no two actors of a run share one."""

    def __init__(self, logs: Path):
        self.logs, self.nodes = logs, []
        self.port, self.dashboard = free_port(), free_port()
        self.address = f"127.0.0.2:{self.port}"
        self.token = secrets.token_hex(32)
        self.environment = {
            **os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "PYTHONPATH": str(PROJECT_ROOT),
        }  # fmt: skip
        for name in (
            "RAY_ADDRESS",
            "GRPO_SHARED_SERVER",
            *load_profile("cpu").process_environment("trainer"),
        ):
            self.environment.pop(name, None)

    def add(self) -> None:
        """Start one more node; the first is the head."""
        own = f"127.0.0.{len(self.nodes) + 2}"
        role = ["worker", "--head", self.address] if self.nodes else [
            "head", "--port", str(self.port), "--dashboard-port", str(self.dashboard)
        ]  # fmt: skip
        command = ["bash", str(SCRIPT), *role, "--python", sys.executable, "--address", own,
                   "--", "--num-cpus=1", f"--object-store-memory={80 << 20}"]  # fmt: skip
        with (self.logs / f"node-{own}.log").open("w") as out:
            self.nodes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.environment, start_new_session=True
                )
            )  # fmt: skip

    def ray(self, *words: str, timeout: float = 60) -> subprocess.CompletedProcess:
        """A command of Ray's, through the dashboard's port."""
        command = [*RAY, *words[:2], f"--address=http://127.0.0.1:{self.dashboard}", *words[2:]]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=self.environment)

    def wait(self, count: int, seconds: float = 120) -> None:
        """Until `count` nodes live."""
        command = [sys.executable, "-m", "helpers.nodes", "wait", f"--dashboard=http://127.0.0.1:{self.dashboard}",
                   f"--nodes={count}", f"--seconds={seconds}"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        assert done.returncode == 0, done.stderr + self.words()

    def submit(self, name: str, *command: str, timeout: float = 400) -> subprocess.CompletedProcess:
        """Submit a job and follow it to its end."""
        return self.ray(
            "job",
            "submit",
            f"--submission-id={name}",
            "--",
            "env",
            "-C",
            str(PROJECT_ROOT),
            *command,
            timeout=timeout,
        )

    def words(self) -> str:
        """The last words of each node."""
        return "\n".join(
            f"{p.name}: {p.read_text(errors='replace')[-1000:]}" for p in sorted(self.logs.glob("node-*.log"))
        )

    def processes(self) -> list[int]:
        return [pid for pid in process_tree([n.pid for n in self.nodes if n.poll() is None])]

    def stop(self) -> list[int]:
        """End the nodes, workers first, one by SIGKILL; returns what is left of their processes."""
        started = self.processes()
        for number, node in reversed(list(enumerate(self.nodes))):
            node.send_signal(signal.SIGKILL if number == 1 else signal.SIGTERM)
            node.wait(60)
        return alive(started, patience=30)


@contextmanager
def cluster(logs: Path, nodes: int):
    """A cluster that is up; it is ended in any case."""
    made = Cluster(logs)
    try:
        for _ in range(nodes):
            made.add()
        made.wait(nodes)
        yield made
    finally:
        made.left = made.stop()


# --- the job ------------------------------------------------------------------------------------------------
def largest_gap(group, batch) -> float:
    return float(((group.logprobs(batch) - batch.rollout_logprobs) * batch.loss_mask).abs().max())


def main(out: str, checkpoint: str) -> None:
    """Two steps by value, one through a gloo group; writes what was seen."""
    import torch

    from helpers.advantages import group_advantages
    from helpers.cluster import GrpoCluster, RayHead
    from helpers.collate import collate
    from helpers.objective import learn
    from helpers.rollout import RolloutError
    from helpers.tasks import MedianTask

    settings = load_profile(
        "cpu",
        **{
            "trainer.ranks": 2,
            "cluster.strategy": "STRICT_SPREAD",
            "batch.prompts": 6,
            "batch.group_size": 4,
        },
    )
    with RayHead(settings) as head:
        group = GrpoCluster(settings, checkpoint).start()
        try:
            seen = {
                "attached": head.attached,
                "ranks": group.ready(),
                "engines": group.places,
                "urls": group.clients.urls,
            }
            seen["gaps"], seen["moved"], seen["versions"] = [], [], []
            for step in range(3):
                episodes = group.roll_out(MedianTask(0).sample(6, step=step), draw=step)
                rewards = torch.arange(24.0) % 5  # any rewards with a spread
                batch = collate(
                    episodes, group_advantages(rewards, torch.tensor([e.group for e in episodes])), 0
                )
                before = group.logprobs(batch)
                seen["gaps"].append(largest_gap(group, batch))
                seen["versions"].append(episodes[0].weight_version)
                learn(group, batch, settings)
                seen["moved"].append(float((group.logprobs(batch) - before).abs().max()))
                if step == 1:
                    group.clients = dataclasses.replace(group.clients, group="gloo")
                group.sync_weights(f"step-{step + 1}")
            episodes = group.roll_out(MedianTask(0).sample(6, step=9), draw=9)
            last = collate(episodes, torch.zeros(24), 0)
            seen["gaps"].append(largest_gap(group, last))
            seen["versions"].append(episodes[0].weight_version)
            try:
                SGLangClient(group.clients.urls[0], 30).post("/flush_cache")
                seen["without_key"] = "taken"
            except RolloutError as error:
                seen["without_key"] = str(error)
            seen["listens"] = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        finally:
            group.stop()
    Path(out).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
