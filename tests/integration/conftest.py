"""Fixtures with real engines: one Megatron trainer in this process, one SGLang server under a parent of its own.

The server's parent is killed by SIGKILL at the end, and nothing of the server may be left ten seconds later.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers.profiles import RUNS_VARIABLE, load_profile

os.environ.update(load_profile("cpu").process_environment("trainer"))  # before any test module imports torch
os.environ.pop("GRPO_SHARED_SERVER", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # engines import twice as slowly without byte code

PARENT = """
import json, sys, time
from dataclasses import asdict
from helpers.profiles import load_profile
from helpers.rollout import RolloutServer
settings = load_profile("cpu", **{"algorithm.routing_replay": True})  # it can return experts; asked for by few
server = RolloutServer(settings, sys.argv[1]).start()
print(json.dumps(asdict(server.address())), flush=True)
time.sleep(3600)
"""


def start_parent(checkpoint: Path) -> tuple[subprocess.Popen, dict]:
    """A process that owns a server, and the server's address."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(checkpoint)], stdout=subprocess.PIPE, text=True
    )
    return parent, json.loads(parent.stdout.readline())


def living(pids) -> list[int]:
    """Those that still run; a zombie that nobody has collected yet holds nothing."""
    from helpers.processes import pss

    return [pid for pid in pids if pss(pid)]


def kill_parent(parent: subprocess.Popen, server_pid: int, seconds: float = 10.0) -> list[int]:
    """SIGKILL the parent; returns what is left of the server after at most `seconds`."""
    from helpers.processes import process_tree

    tree = process_tree([server_pid])
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    deadline = time.monotonic() + seconds
    while living(tree) and time.monotonic() < deadline:
        time.sleep(0.1)
    return living(tree)


@pytest.fixture(scope="session")
def settings(tmp_path_factory):
    """Profile cpu with results in a folder of this test session."""
    os.environ[RUNS_VARIABLE] = str(tmp_path_factory.mktemp("runs"))
    return load_profile("cpu")


@pytest.fixture(scope="session")
def checkpoint(settings):
    """A tiny gpt-oss in which no tensor is constant: fresh norms are all ones and expert biases all zeros, and such
    tensors cannot show that they were lost or exchanged."""
    import torch
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights, write_tiny_checkpoint

    random = write_tiny_checkpoint(settings)
    generator = torch.Generator().manual_seed(1)
    weights = load_file(random / "model.safetensors")
    uneven = {name: t + 0.1 * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    return save_weights(uneven, random, settings.checkpoint("uneven"))


@pytest.fixture(scope="session", autouse=True)
def starting_server(request, settings, checkpoint):
    """Started first and waited for late, so that its imports overlap with the trainer's."""
    if not any("server" in item.fixturenames for item in request.session.items):
        yield None
        return
    parent, address = start_parent(checkpoint)
    yield address
    assert kill_parent(parent, address["pid"]) == [], (
        "the server outlived its parent by more than ten seconds"
    )


@pytest.fixture(scope="session")
def server(starting_server, settings, checkpoint):
    """The shared server, up, serving `checkpoint`."""
    from helpers.rollout import RolloutServer, ServerAddress

    return RolloutServer.attach(settings, checkpoint, ServerAddress(**starting_server)).wait()


@pytest.fixture(scope="session")
def trainer(settings, checkpoint):
    """Megatron in this process and its main thread; parallel state is initialised once a process."""
    from helpers.trainer import MegatronTrainer

    return MegatronTrainer(settings, checkpoint)


@pytest.fixture(scope="session")
def load_reference():
    """folder -> the checkpoint in transformers, in its plainest implementation. (Imported late: it brings torch.)"""
    from helpers.faults import load_reference

    return load_reference


@pytest.fixture
def reference(load_reference, checkpoint):
    """A fresh copy: tests change its weights."""
    return load_reference(checkpoint)


@pytest.fixture(scope="session")
def processes():
    """What the tests of starts and ends share: start_parent, kill_parent, living."""
    return SimpleNamespace(start_parent=start_parent, kill_parent=kill_parent, living=living)


# --- a model in which nothing equals anything ---------------------------------------------------------------------------
AWKWARD = {
    "hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24,
    "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 4, "vocab_size": 72, "sliding_window": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def awkward(settings):
    """Settings of a gpt-oss of awkward shapes: 6 heads of 24, 3 key-value heads, top-2 of 5 experts,
    hidden 80, inner 112, window 16, two layers of each kind."""
    return load_profile(
        "cpu", **{"trainer.learning_rate": 1e-3}, **{f"model.{k}": v for k, v in AWKWARD.items()}
    )


@pytest.fixture(scope="session")
def awkward_checkpoint(awkward):
    """Its checkpoint: noise on every tensor, sinks of the size of attention scores and larger, experts that meet the clamp."""
    import torch
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights, write_tiny_checkpoint

    random = write_tiny_checkpoint(awkward, awkward.runs / "awkward-random")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(random / "model.safetensors")
    for name, tensor in weights.items():
        scale = {"sinks": 3.0, "gate_up_proj": 0.5}.get(name.rpartition(".")[2], 0.1)
        weights[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    return save_weights(weights, random, awkward.runs / "awkward-uneven")


@pytest.fixture(scope="session")
def awkward_sequences():
    """Random tokens without the padding token, from shorter than the window to three of it."""
    import torch

    generator, window = torch.Generator().manual_seed(0), AWKWARD["sliding_window"]
    lengths = (5, window - 1, window, window + 1, 2 * window + 1, 3 * window)
    return [torch.randint(1, AWKWARD["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="session")
def awkward_trainer(awkward, awkward_checkpoint, trainer):
    """Megatron with that model. (`trainer` comes first: one gloo group and one parallel state a process.)"""
    from helpers.trainer import MegatronTrainer

    return MegatronTrainer(awkward, awkward_checkpoint)
