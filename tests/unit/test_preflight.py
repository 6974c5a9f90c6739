"""Preflight: what a machine lacks is said before anything heavy starts."""

import os
import subprocess
import sys
from collections import namedtuple

import pytest

from helpers import preflight
from helpers.profiles import DEVICE_VARIABLE, RUNS_VARIABLE, load_profile

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))


def _failed(settings):
    return {c.name: c for c in preflight.machine_checks(settings) if not c.ok}


@pytest.mark.parametrize(("count", "profile"), [(0, "cpu"), (1, "gpu"), (7, "gpu"), (8, "cluster")])
def test_the_fitting_profile_follows_the_gpus(count, profile):
    assert preflight.fitting_profile(["NVIDIA H200"] * count) == profile


def test_a_gpu_profile_without_gpus_names_the_fitting_one(monkeypatch):
    monkeypatch.setattr(preflight, "gpu_names", lambda: [])
    check = _failed(load_profile("gpu"))["GPUs"]
    assert check.found == "none" and "fits profile cpu" in check.advice
    with pytest.raises(preflight.NotReady, match="fits profile cpu"):
        preflight.check_machine(load_profile("gpu"))


def test_too_few_gpus_for_the_cluster(monkeypatch):
    monkeypatch.setattr(preflight, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    assert "needs 8 GPU(s)" in _failed(load_profile("cluster"))["GPUs"].advice


def test_expandable_segments_are_refused_on_a_gpu_only(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "allocator" in _failed(load_profile("gpu"))
    assert "allocator" not in _failed(load_profile("cpu"))


def test_little_memory_disk_and_shared_memory_are_each_named(monkeypatch):
    monkeypatch.setattr(preflight, "memory_gib", lambda: 1.0)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: Usage(0, 0, 64 * 2**20))
    failed = _failed(load_profile("cpu"))
    assert {"memory available", "disk free", "/dev/shm free"} <= set(failed)
    assert "--shm-size" in failed["/dev/shm free"].advice
    with pytest.raises(preflight.NotReady) as refusal:
        preflight.check_machine(load_profile("cpu"))
    assert all(name in str(refusal.value) for name in failed)


def test_every_failed_line_has_advice(monkeypatch):
    monkeypatch.setattr(preflight, "memory_gib", lambda: 0.0)
    monkeypatch.setattr(preflight, "gpu_names", lambda: [])
    for name in ("cpu", "gpu", "gpu-20b", "cluster"):
        assert all(len(c.advice) > 10 for c in preflight.machine_checks(load_profile(name)))


def test_gpu_names_without_or_with_a_broken_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert preflight.gpu_names() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    assert preflight.gpu_names() == []
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200'\necho 'NVIDIA H200'\n")
    assert preflight.gpu_names() == ["NVIDIA H200"] * 2


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_pins_come_with_reasons(name):
    pins = {p.package: p for p in preflight.pins(load_profile(name))}
    assert {"torch", "transformers", "sglang", "megatron-core", "megatron-bridge", "ray"} <= set(pins)
    assert ("transformer-engine" in pins) == (name == "gpu")
    assert all(len(p.reason) > 10 and "\n" not in p.reason and "#" not in p.reason for p in pins.values())


def test_a_local_build_counts_as_its_version():
    assert preflight.Pin("torch", "2.11.0", "2.11.0+cu130", "-").ok
    assert not preflight.Pin("torch", "2.11.0", "2.11.1", "-").ok
    assert not preflight.Pin("torch", "2.11.0", "-", "-").ok


def _in_a_process(code, **environment):
    env = {k: v for k, v in os.environ.items() if k != DEVICE_VARIABLE} | environment
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


PREPARE = """
import os, sys
from helpers import preflight
from helpers.profiles import load_profile
preflight.check_machine = lambda settings: []
{before}
preflight.prepare_kernel(load_profile("cpu"))
print(os.environ["GRPO_DEVICE"], os.environ["OMP_NUM_THREADS"])
"""


def test_prepare_kernel_sets_the_environment():
    done = _in_a_process(PREPARE.format(before=""))
    assert done.stdout.split() == ["cpu", "1"], done.stderr


def test_prepare_kernel_refuses_a_torch_that_was_told_nothing():
    torch_is_there = "import types; sys.modules['torch'] = types.ModuleType('torch')"
    done = _in_a_process(PREPARE.format(before=torch_is_there))
    assert done.returncode and "restart the kernel" in done.stderr
    told_before = _in_a_process(PREPARE.format(before=torch_is_there), GRPO_DEVICE="cpu")
    assert told_before.returncode == 0, told_before.stderr


def test_a_process_told_another_device_is_refused_before_torch():
    code = (
        "import sys\nfrom helpers.bridge import prepare_process\nfrom helpers.profiles import load_profile\n"
        "try: prepare_process(load_profile('cpu'))\nexcept RuntimeError as e: print(e, 'torch' in sys.modules)"
    )
    for told in ({}, {DEVICE_VARIABLE: "cuda"}):
        done = _in_a_process(code, **told)
        assert "prepare_kernel(settings)" in done.stdout and done.stdout.strip().endswith("False"), (
            done.stderr
        )
