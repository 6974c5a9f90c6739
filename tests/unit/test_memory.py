"""Predicted bytes by hand, measured bytes on tensors of known size, and processes of known shape."""

import dataclasses
import os
import subprocess
import sys
import time

import pytest
import torch

from helpers import memory, processes
from helpers.profiles import load_profile

CPU = load_profile("cpu")


def test_trainer_bytes_by_hand():
    """258,000 fp32 parameters: 4 bytes of weight, 4 of gradient, 8 of Adam, no master copy."""
    found = memory.predicted_trainer_bytes(CPU)
    assert found == {
        "weights": 1_032_000,
        "gradients": 1_032_000,
        "Adam moments": 2_064_000,
        "master weights": 0,
    }


def test_frozen_experts_train_the_known_number():
    """gpt-oss-20b without expert parameters trains 1.798 billion (counted on an H200)."""
    found = memory.predicted_trainer_bytes(load_profile("gpu-20b"))
    assert found["gradients"] / 4 == pytest.approx(1.798e9, rel=1e-3)
    assert found["weights"] == 2 * 20_914_757_184


def test_kv_bytes_by_hand():
    """Two layers, one of each kind; a token costs 2 * 2 heads * 32 * 4 bytes in a layer."""
    assert memory.predicted_kv_bytes(CPU, 100, 50) == 512 * (101 + 51)


def test_one_copy_of_logits_and_attention():
    assert memory.predicted_logits_bytes(CPU, 3, 5) == 3 * 5 * 64 * 4
    assert memory.predicted_attention_bytes(CPU, 3, 5) == 2 * 3 * 4 * 5 * 6 * 4


def test_saved_bytes_of_a_product():
    """A product saves both factors, 4 kB each; a second use of one of them adds nothing."""
    a, b = torch.ones(1000, requires_grad=True), torch.ones(1000, requires_grad=True)
    with memory.saved_for_backward() as found:
        product = a * b
        other = product * a
    assert found.bytes == 3 * 4000  # a, b and product
    other.sum().backward()


def test_saved_bytes_fall_with_the_graph():
    """Two passes one after the other keep as much at one time as one of them."""
    x = torch.ones(1000, requires_grad=True)

    def one_pass():
        (x.exp()).sum().backward()

    with memory.saved_for_backward() as once:
        one_pass()
    with memory.saved_for_backward() as twice:
        one_pass()
        one_pass()
    assert twice.bytes == once.bytes == 4000


def test_saved_bytes_are_put_down_to_components():
    model = torch.nn.ModuleDict({"router": torch.nn.Linear(4, 4), "experts": torch.nn.Linear(4, 4)})
    x = torch.ones(10, 4, requires_grad=True)
    with memory.saved_for_backward(model) as found:
        model["experts"](model["router"](x)).sum()
    assert set(found.by_component) == {"router", "experts"}
    assert sum(found.by_component.values()) == found.bytes


def test_pss_and_tree_of_a_child():
    code = (
        "import subprocess, sys; x = bytearray(50 << 20); subprocess.run([sys.executable, '-c', 'input()'])"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while len(processes.process_tree([child.pid])) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        tree = processes.process_tree([child.pid])
        assert len(tree) == 2
        assert processes.pss(child.pid) > 50 * processes.MIB
        assert child.pid in processes.process_tree([os.getpid()])
    finally:
        child.communicate(b"\n", timeout=20)
    assert processes.alive(tree) == []
    assert processes.pss(child.pid) == 0


def test_timeline_knows_its_phases():
    with memory.MemoryTimeline([os.getpid()], interval=60) as timeline:
        with timeline.phase("load"):
            pass
        timeline.sample()  # between phases
    assert list(timeline.peak_by_phase()) == ["load"]
    assert all(size > processes.MIB for roles in timeline.peak_by_phase().values() for size in roles.values())


def test_bf16_needs_a_master_copy():
    bf16 = dataclasses.replace(CPU, model=dataclasses.replace(CPU.model, dtype="bfloat16"))
    assert memory.predicted_trainer_bytes(bf16)["master weights"] == 4 * 258_000
