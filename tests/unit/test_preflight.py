"""Preflight: what a machine lacks is said before anything heavy starts."""

import doctest
import os
import re
import subprocess
import sys
import types
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


# --- attention with sinks (pitfall 1) -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("layout", "engine", "cudnn", "deterministic", "words"),
    [
        ("SBHD", "2.7.0", (9, 19, 0), False, "TransformerEngine 2.7.0 has no learnable softmax: install 2.8"),
        ("SBHD", "-", (9, 19, 0), False, "TransformerEngine - has no learnable softmax"),
        ("THD", "2.20.2", (9, 17, 1), False, "cuDNN 9.17.1 has no learnable softmax for packed .* 9.18 or later"),
        ("THD", "2.20.2", (9, 18, 0), True, "deterministic mode: set NVTE_ALLOW_NONDETERMINISTIC_ALGO=1"),
        ("SBHD", "2.20.2", (9, 17, 1), False, "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"),
        ("THD", "2.10.0+cu13", (9, 18, 0), False, "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2"),
    ],
)  # fmt: skip
def test_a_closed_gate_is_named_with_its_cure(layout, engine, cudnn, deterministic, words):
    problem = preflight.attention_problem("no backend", layout, engine, cudnn, deterministic)
    assert problem.startswith(f"attention with sinks would run as no backend in {layout}: ")
    assert re.search(words, problem)


def _gpu_report(monkeypatch, fused, engine="2.20.2", cudnn=(9, 19, 0), **question):
    """attention_report of profile gpu (or with these changes), with TransformerEngine's answers given."""
    asked = []

    def backend(settings, layout, window, length, deterministic):
        asked.append((layout, window, deterministic))
        return "FusedAttention" if fused(window) else "UnfusedDotProductAttention"

    utils = types.ModuleType("transformer_engine.pytorch.utils")
    utils.get_cudnn_version = lambda: cudnn
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.utils", utils)
    monkeypatch.setattr(preflight, "_version", lambda package: engine)
    monkeypatch.setattr(preflight, "_te_backend", backend)
    packed = question.pop("packed", False)
    return preflight.attention_report(load_profile("gpu", **question), packed), asked


def test_the_attention_report_names_backend_versions_layout_and_windows(monkeypatch):
    report, asked = _gpu_report(monkeypatch, lambda window: True)
    assert str(report) == (
        "FusedAttention, TransformerEngine 2.20.2, cuDNN 9.19.0, SBHD, learnable softmax, window (127, 0) and full"
    )
    assert sorted(asked) == [("SBHD", (-1, 0), False), ("SBHD", (127, 0), False)]
    assert _gpu_report(monkeypatch, lambda window: True, packed=True)[0].layout == "THD"


def test_one_kind_of_layer_without_fused_attention_is_refused(monkeypatch):
    with pytest.raises(preflight.NotReady, match="as FusedAttention and UnfusedDotProductAttention in SBHD"):
        _gpu_report(monkeypatch, lambda window: window == (-1, 0))


def test_an_old_transformer_engine_is_refused_before_it_is_asked(monkeypatch):
    with pytest.raises(preflight.NotReady, match="TransformerEngine 2.7 has no learnable softmax"):
        _gpu_report(monkeypatch, None, engine="2.7")  # asking would fail: None is no function


def test_unfused_attention_is_right_for_float32(monkeypatch):
    report, _ = _gpu_report(monkeypatch, lambda window: False, **{"model.dtype": "float32"})
    assert report.backend == "UnfusedDotProductAttention"


def test_deterministic_mode_is_what_transformer_engine_takes_for_it(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with pytest.raises(preflight.NotReady, match="deterministic mode"):
        _gpu_report(monkeypatch, lambda window: False)


def test_on_a_cpu_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(preflight, "_te_backend", None)
    report = preflight.attention_report(load_profile("cpu"))
    assert report.transformer_engine == report.cudnn == "-" and report.windows == ((15, 0), (-1, 0))


def test_doctests():
    assert doctest.testmod(preflight).failed == 0
