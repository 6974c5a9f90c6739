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


# --- the card, phase by phase --------------------------------------------------------------------------------------
def test_pools_with_and_without_a_prefix_tree():
    """gpt-oss on a GPU: 0.8 of the full pool. Profile cpu without the tree: capped by the pool for full attention."""
    assert memory.predicted_pools(load_profile("gpu-20b")) == (131_072, 104_857)
    assert memory.predicted_pools(CPU) == (16_384, 16_384)
    few = load_profile("cpu", **{"rollout.max_running_requests": 8})
    assert memory.predicted_pools(few) == (16_384, (16 + 128 + 2) * 8 + 8192 + 1)
    plain = load_profile("gpu-20b", **{"rollout.kv_saver": "plain"})
    assert memory.predicted_pools(plain) == (131_072, 131_072)
    with pytest.raises(ValueError, match="max_total_tokens is None"):
        memory.predicted_pools(load_profile("gpu-20b", **{"rollout.max_total_tokens": None}))


def test_activations_of_20b_by_hand():
    """A token and layer: 4 x 2880 + 2 x 4096 + 1024 + 2 x 64 dense, 4 x 32 + 44 for routing, 4 frozen experts of 4 x 2880."""
    settings = load_profile("gpu-20b")
    by_hand = 24 * 2 * (4 * 2880 + 2 * 4096 + 1024 + 128 + 172 + 4 * 4 * 2880) + 2 * 2 * 2880
    assert memory.predicted_activation_bytes(settings, 1) == by_hand
    assert memory.predicted_activation_bytes(settings, 100) == 100 * by_hand


def test_phases_hold_what_is_there_and_nothing_else():
    settings = load_profile("gpu-20b")
    phases = memory.predicted_phases(settings, tokens=1000, context=7)
    weights = 2 * 20_914_757_184
    assert phases["server start"]["CUDA context"] == phases["server start"]["rest of server"] == 7
    for phase in ("release", "logprobs", "forward-backward", "optimizer step"):
        assert not any(item.startswith("server") for item in phases[phase]), "released for these"
        assert phases[phase]["rest of server"] == 7
    for phase in ("offload", "sync, offloaded"):
        assert not any(item.startswith("trainer") for item in phases[phase])
        assert phases[phase]["server weights"] == weights
    assert phases["load back"] == phases["resume"]
    moments = phases["optimizer step"]["trainer optimizer"] - phases["load"]["trainer optimizer"]
    assert moments == 2 * phases["load"]["trainer gradients"]


def test_a_server_that_keeps_its_memory_stays_in_every_phase():
    settings = load_profile("gpu")
    assert not settings.rollout.memory_saver
    phases = memory.predicted_phases(settings, tokens=1000, context=7)
    assert all("server KV cache" in items for items in phases.values())


def timeline_of(rows, torch_counts, static):
    timeline = memory.MemoryTimeline([os.getpid()])
    timeline.rows, timeline.torch, timeline.static = rows, torch_counts, static
    return timeline


def test_what_nvml_saw_is_taken_apart_without_a_remainder():
    gib = 1 << 30
    rows = [
        (0.0, "rollout", "GPU", "notebook kernel", 10 * gib), (0.0, "rollout", "GPU", "SGLang scheduler", 9 * gib),
        (1.0, "release", "GPU", "notebook kernel", 10 * gib), (1.0, "release", "GPU", "SGLang scheduler", 2 * gib),
    ]  # fmt: skip
    counts = {"allocated": 7 * gib, "reserved": 9 * gib}
    static = {"trainer weights": 4 * gib, "trainer gradients": gib, "trainer optimizer": 0}
    both = ("rollout", "release")
    counts |= {"allocated at the end": 7 * gib, "reserved at the end": 9 * gib}
    timeline = timeline_of(rows, dict.fromkeys(both, counts), dict.fromkeys(both, static))
    found = memory.measured_phases(timeline, {"weight": 5.0, "kvcache": 3.0}, released=["release"])
    assert {item: size / gib for item, size in found["rollout"].items()} == {
        "trainer weights": 4, "trainer gradients": 1, "working memory": 2, "allocator's reserve": 2, "CUDA context": 1,
        "server weights": 5, "server KV cache": 3, "rest of server": 1,
    }  # fmt: skip
    assert sum(found["rollout"].values()) == 19 * gib and sum(found["release"].values()) == 12 * gib
    assert found["release"]["rest of server"] == 2 * gib


def test_of_a_move_the_end_counts_and_of_work_the_peak():
    counts = {"allocated": 50, "reserved": 60, "allocated at the end": 5, "reserved at the end": 6}
    rows = [(0.0, phase, "GPU", "notebook kernel", 70) for phase in ("offload", "sync")]
    timeline = timeline_of(rows, dict.fromkeys(("offload", "sync"), counts), {})
    timeline.ends = {(phase, "GPU"): {"notebook kernel": 8} for phase in ("offload", "sync")}
    found = memory.measured_phases(timeline, {"weight": 0.0, "kvcache": 0.0})
    assert found["offload"] == {"working memory": 5, "allocator's reserve": 1, "CUDA context": 2}
    assert found["sync"] == {"working memory": 50, "allocator's reserve": 10, "CUDA context": 10}


def test_a_server_that_did_not_release_shows_as_unexplained():
    rows = [(0.0, "release", "GPU", "SGLang scheduler", 100)]
    found = memory.measured_phases(timeline_of(rows, {}, {}), {"weight": 0.0, "kvcache": 0.0}, ["release"])
    assert found == {"release": {"rest of server": 100}}


def test_a_timeline_knows_how_long_a_phase_took():
    with memory.MemoryTimeline([os.getpid()], interval=5) as timeline:
        for _ in range(2):
            with timeline.phase("sleep"):
                time.sleep(0.05)
    assert 0.1 <= timeline.seconds["sleep"] < 1.0 and not timeline.torch


def test_several_ranks_are_not_predicted():
    with pytest.raises(ValueError, match="several ranks"):
        memory.predicted_phases(load_profile("cluster"), tokens=1000, context=7)


def test_a_sample_that_spans_two_phases_counts_for_neither():
    timeline = memory.MemoryTimeline([os.getpid()])

    def slow(roots):
        timeline._phase = "next"
        return {"trainer": 5}

    timeline.measures = {"GPU": slow}
    timeline._phase = "first"
    timeline.sample()
    assert timeline.rows == []
    timeline.sample()
    assert [row[1] for row in timeline.rows] == ["next"]


def test_sampling_that_fails_is_told():
    timeline = memory.MemoryTimeline([os.getpid()], interval=0.01)
    timeline.measures = {"GPU": lambda roots: 1 / 0}
    with pytest.raises(RuntimeError, match="not sampled to the end"), timeline:
        time.sleep(0.2)


def test_activations_are_those_that_an_h200_held():
    """Recorded by component, in what autograd saved, and as working memory in forward-backward and logprobs.

    "loss and rest" is an fp32 copy of the logits, which Megatron's Float16Module makes of bf16 ones.
    """
    import csv

    def recorded(profile, name, key):
        file = memory.Path(__file__).parents[2] / f"notebooks/recorded/{profile}/07_memory/{name}.csv"
        with file.open(newline="") as rows:
            return {tuple(r[k] for k in key): int(r["bytes"]) for r in csv.DictReader(rows)}

    for profile, tokens in (("gpu", 512 * 64), ("gpu-20b", 4 * 1536)):
        settings = load_profile(profile)
        parts = recorded(profile, "components", ("component",))
        kept = sum(parts.values()) - parts["loss and rest",]
        activations = memory.predicted_activation_bytes(settings, tokens)
        assert activations == pytest.approx(kept, rel=0.003)
        assert parts["loss and rest",] == pytest.approx(tokens * settings.model.vocab_size * 4, abs=100 * tokens)
        found = recorded(profile, "measured_phases", ("phase", "item"))
        baseline = found["load", "working memory"]
        for phase, held in (("logprobs", 0), ("forward-backward", activations)):
            items = memory.trainer_phases(settings, tokens)[phase]
            working = held + items["logits"] + items["one layer"]
            assert found[phase, "working memory"] - baseline == pytest.approx(working, rel=0.02), phase


def test_the_loss_over_a_large_vocabulary_holds_a_piece_not_all_of_it():
    """4096 tokens of gpt-oss: 1.6 GB of logits in bf16, 3.3 GB as fp32, in which Megatron hands them on."""
    settings, chunk = load_profile("gpu-20b"), 256 << 20
    logits = 4096 * 201_088 * 2
    assert memory.predicted_loss_bytes(settings, 4096, backward=False) == 3 * logits + chunk
    assert memory.predicted_loss_bytes(settings, 4096, backward=True) == 4 * logits + chunk
    assert memory.predicted_loss_bytes(CPU, 10, backward=False) == 10 * 64 * 4 * 3


def test_card_use_is_read_when_it_stands_still(monkeypatch):
    readings = iter([5 << 30, 3 << 30, 1 << 30, *[1 << 30] * 100])
    monkeypatch.setattr(memory, "card_used", lambda: next(readings))
    assert memory.settled_card_use(still=0.15, patience=5) == 1 << 30


def test_card_use_that_never_stands_still_is_an_error(monkeypatch):
    readings = iter(range(0, 1 << 40, 1 << 30))
    monkeypatch.setattr(memory, "card_used", lambda: next(readings))
    with pytest.raises(TimeoutError, match="does not stand still within 0 s"):
        memory.settled_card_use(still=0.3, patience=0.4)
