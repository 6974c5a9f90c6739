"""Checkpoints: whole or absent, the same for the same seed, and named when something is missing."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from helpers.checkpoints import (
    HUB_DUPLICATES, HUB_FILES, PAD_TOKEN, check_megatron_import, publish_folder, require_checkpoint, rollout_checkpoint,
    save_streamed, save_weights, starting_checkpoint, tiny_vocabulary, tokenizer_and_pad, write_tiny_checkpoint,
)  # fmt: skip
from helpers.mxfp4 import write_mxfp4_checkpoint
from helpers.profiles import load_profile
from helpers.rollout import RolloutServer
from helpers.tensor_files import INDEX, CheckpointError, check_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    pytest.importorskip("transformers")
    return write_tiny_checkpoint(load_profile("cpu"), tmp_path_factory.mktemp("made") / "random")


def _weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_the_config_says_what_both_engines_read(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["swiglu_limit"] == 7.0  # SGLang's; GptOssConfig lacks it
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["rope_parameters"]["truncate"] is False and config["rope_parameters"]["factor"] == 32.0
    assert config["pad_token_id"] == tokenizer_and_pad(checkpoint)[1] == 0
    assert config["hidden_size"] != config["intermediate_size"]


def test_sinks_are_large_enough_to_be_missed(checkpoint):
    """Sinks near zero cannot show that attention ignores them (transformers starts them at 0.02)."""
    sinks = [tensor for name, tensor in _weights(checkpoint).items() if name.endswith("sinks")]
    assert len(sinks) == 2 and all(tensor.std() > 0.3 for tensor in sinks)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(checkpoint, tmp_path):
    import torch

    again = _weights(write_tiny_checkpoint(load_profile("cpu"), tmp_path / "again"))
    other = _weights(write_tiny_checkpoint(load_profile("cpu", seed=1), tmp_path / "other"))
    first = _weights(checkpoint)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_finished_folder_is_not_written_again(checkpoint):
    before = (checkpoint / "model.safetensors").stat().st_mtime_ns
    assert write_tiny_checkpoint(load_profile("cpu"), checkpoint) == checkpoint
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == before


def test_save_weights_changes_the_weights_only(checkpoint, tmp_path):
    import torch

    weights = {k: v + 1 for k, v in _weights(checkpoint).items()}
    folder = save_weights(weights, checkpoint, tmp_path / "warm")
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in checkpoint.iterdir())
    assert (folder / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert all(torch.equal(v, weights[k]) for k, v in _weights(folder).items())


def test_an_interrupted_write_leaves_the_old_folder_and_no_half(tmp_path):
    folder = tmp_path / "warm"
    publish_folder(folder, lambda t: (t / "config.json").write_text("old"))

    def stopped(temporary):
        (temporary / "config.json").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publish_folder(folder, stopped)
    assert (folder / "config.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["warm"]


def test_a_missing_checkpoint_names_the_next_command(tmp_path):
    with pytest.raises(FileNotFoundError, match="helpers.series run --only 02"):
        require_checkpoint(tmp_path)


def test_a_vocabulary_that_is_too_small_is_refused():
    assert len(tiny_vocabulary(64)) == 64 and list(tiny_vocabulary(64))[0] == PAD_TOKEN
    with pytest.raises(ValueError, match="too small"):
        tiny_vocabulary(20)


def test_the_source_of_a_model_is_explicit(tmp_path):
    folder = load_profile("cpu", **{"model.source": "folder", "model.path": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        starting_checkpoint(folder)
    with pytest.raises(ValueError, match="generated, folder or hub"):
        starting_checkpoint(load_profile("cpu", **{"model.source": "somewhere"}))


def test_of_the_hubs_files_the_duplicates_for_other_engines_are_left_out():
    """A pattern's * crosses folders in huggingface_hub, so that "*.safetensors" alone takes all three copies."""
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "chat_template.jinja",
        "config.json",
        INDEX,
        "model-00000-of-00002.safetensors",
        "tokenizer.json",
    ]
    others = ["README.md", "metal/model.bin", "original/config.json", "original/model.safetensors"]
    kept = filter_repo_objects(
        sorted(wanted + others), allow_patterns=HUB_FILES, ignore_patterns=HUB_DUPLICATES
    )
    assert sorted(kept) == sorted(wanted)


def test_a_hub_that_cannot_be_reached_says_what_to_do():
    """In a process of its own: huggingface_hub reads its settings when it is imported."""
    code = (
        "from helpers.checkpoints import starting_checkpoint as s; from helpers.profiles import load_profile as p;"
        "s(p('cpu', **{'model.source': 'hub', 'model.path': 'nobody/has-this-model'}))"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ConnectionError: the hub did not give 'nobody/has-this-model'")
    assert "model.source = 'folder'" in last


# --- export -------------------------------------------------------------------------------------


def _read(folder):
    from safetensors.torch import load_file

    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture(scope="module")
def quantised(checkpoint, tmp_path_factory):
    return write_mxfp4_checkpoint(checkpoint, tmp_path_factory.mktemp("quantised") / "mxfp4")


@pytest.mark.parametrize("shard_bytes", [5e9, 150_000])
def test_a_streamed_export_is_bit_exact_and_read_by_transformers(checkpoint, tmp_path, shard_bytes):
    import torch
    from transformers import GptOssForCausalLM

    weights = {name: tensor + 1 for name, tensor in _weights(checkpoint).items()}
    stream = ((name, weights[name]) for name in reversed(weights))  # the order is the exporter's
    folder = save_streamed(stream, checkpoint, tmp_path / "out", shard_bytes=shard_bytes)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _read(folder).items())
    assert check_checkpoint(folder).bytes == check_checkpoint(checkpoint).bytes
    assert (len(list(folder.glob("*.safetensors"))) > 3) == (folder / INDEX).exists() == (shard_bytes < 1e9)
    model = GptOssForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in weights.items())


def test_a_sharded_template_leaves_no_index_behind(checkpoint, tmp_path):
    many = save_streamed(_weights(checkpoint).items(), checkpoint, tmp_path / "many", shard_bytes=150_000)
    one = save_weights(_weights(checkpoint), many, tmp_path / "one")
    assert check_checkpoint(one).shards == ("model.safetensors",)


def test_a_dtype_is_changed_only_when_it_is_asked_for(checkpoint, tmp_path):
    import torch

    weights = _weights(checkpoint)
    half = save_streamed(weights.items(), checkpoint, tmp_path / "half", dtype=torch.bfloat16)
    assert all(torch.equal(t, weights[name].bfloat16()) for name, t in _read(half).items())
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(CheckpointError, match="arrives as torch.float32, the file holds torch.bfloat16"):
        save_streamed(weights.items(), half, tmp_path / "back")
    back = save_weights(weights, half, tmp_path / "back")
    assert all(torch.equal(t, weights[name]) for name, t in _read(back).items())
    assert json.loads((back / "config.json").read_text())["dtype"] == "float32"


def test_an_export_of_a_model_that_came_from_mxfp4_is_plain(quantised, checkpoint, tmp_path):
    """A config that still said MXFP4 would make every reader take the plain weights for blocks."""
    import torch

    weights = {name: tensor.bfloat16() for name, tensor in _weights(checkpoint).items()}
    for folder in (
        save_streamed(weights.items(), quantised, tmp_path / "streamed"),
        save_weights(weights, quantised, tmp_path / "whole"),
    ):
        report = check_checkpoint(folder)
        assert not report.quantised and report.config["dtype"] == "bfloat16"
        assert all(torch.equal(t, weights[name]) for name, t in _read(folder).items())


def _without(weights, name):
    return {k: v for k, v in weights.items() if k != name}


SINKS = "model.layers.1.self_attn.sinks"
BAD_EXPORTS = {
    "missing": (lambda w: _without(w, SINKS).items(), f"model.safetensors: {SINKS} did not arrive whole"),
    "twice": (lambda w: [*w.items(), (SINKS, w[SINKS])], f"model.safetensors: {SINKS} arrives twice"),
    "unknown": (lambda w: [*w.items(), ("extra", w[SINKS])], "extra arrives and is no tensor of the model"),
    "shape": (lambda w: (w | {SINKS: w[SINKS][:2]}).items(), rf"model.safetensors: {SINKS} arrives as \[2\]"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD_EXPORTS)
def test_an_export_that_does_not_fit_is_refused_by_name_and_publishes_nothing(checkpoint, tmp_path, fault):
    change, words = BAD_EXPORTS[fault]
    with pytest.raises(CheckpointError, match=words):
        save_streamed(change(_weights(checkpoint)), checkpoint, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_failing_export_is_drawn_to_its_end(checkpoint, tmp_path):
    """It is collective: where one rank stops early, all others wait in the next tensor."""
    stream = iter([("extra", None), *_weights(checkpoint).items()])
    with pytest.raises(CheckpointError, match="extra"):
        save_streamed(stream, checkpoint, tmp_path / "out")
    assert next(stream, "nothing left") == "nothing left"
    stream = iter(_weights(checkpoint).items())
    with pytest.raises(CheckpointError, match="no config.json"):
        save_streamed(stream, tmp_path / "no template", tmp_path / "out")
    assert next(stream, "nothing left") == "nothing left"


def test_an_exporter_that_fails_leaves_the_old_folder(checkpoint, tmp_path):
    def failing():
        yield from list(_weights(checkpoint).items())[:5]
        raise RuntimeError("a rank died")

    folder = save_weights(_weights(checkpoint), checkpoint, tmp_path / "out")
    before = (folder / "model.safetensors").stat()
    with pytest.raises(RuntimeError, match="a rank died"):
        save_streamed(failing(), checkpoint, folder)
    assert (folder / "model.safetensors").stat() == before and [p.name for p in tmp_path.iterdir()] == ["out"]


# --- refusals where a checkpoint is taken up ----------------------------------------------------


@pytest.fixture
def truncated(checkpoint, tmp_path):
    folder = save_weights(_weights(checkpoint), checkpoint, tmp_path / "truncated")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def test_a_broken_checkpoint_is_refused_wherever_it_is_taken_up(truncated):
    named = load_profile("cpu", **{"model.source": "folder", "model.path": str(truncated)})
    for take_up in (
        lambda: starting_checkpoint(named),
        lambda: RolloutServer(load_profile("cpu"), truncated),
        lambda: check_megatron_import(truncated),
        lambda: rollout_checkpoint(load_profile("cpu"), truncated),
    ):
        with pytest.raises(CheckpointError, match="model.safetensors is truncated: lm_head.weight"):
            take_up()


def test_the_shape_that_megatron_bridge_turns_wrongly_is_refused(checkpoint, tmp_path):
    assert check_megatron_import(checkpoint).folder == checkpoint
    settings = load_profile("cpu", **{"model.hidden_size": 64, "model.intermediate_size": 32})
    ambiguous = write_tiny_checkpoint(settings, tmp_path / "ambiguous")
    with pytest.raises(CheckpointError, match="config.json.*gate_up_proj is square"):
        check_megatron_import(ambiguous)


# --- a server never sees MXFP4 ------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path / "runs"))
    return load_profile("cpu")


def test_a_plain_checkpoint_serves_rollout_as_it_is(checkpoint, profile):
    assert rollout_checkpoint(profile, checkpoint) == checkpoint
    assert not profile.runs.exists()


def test_a_quantised_checkpoint_serves_rollout_by_a_plain_copy_made_once(quantised, profile):
    copy = rollout_checkpoint(profile, quantised)
    made = (copy / "model.safetensors").stat()
    assert not check_checkpoint(copy).quantised and copy.parent == profile.checkpoint("x").parent
    assert rollout_checkpoint(profile, quantised) == copy and (copy / "model.safetensors").stat() == made
    assert RolloutServer(profile, quantised).checkpoint == copy
    named = load_profile("cpu", **{"model.source": "folder", "model.path": str(quantised)})
    assert starting_checkpoint(named) == copy


def test_another_source_gets_another_copy(quantised, checkpoint, profile, tmp_path):
    first = rollout_checkpoint(profile, quantised)
    assert rollout_checkpoint(profile, write_mxfp4_checkpoint(checkpoint, tmp_path / "mxfp4")) != first
    os.utime(quantised / "model.safetensors")  # as if it had been fetched again
    assert rollout_checkpoint(profile, quantised) != first


def test_engines_that_start_at_once_make_one_copy(quantised, profile):
    code = (
        "import sys; from helpers.checkpoints import rollout_checkpoint as r; from helpers.profiles import load_profile as p;"
        "print(r(p('cpu'), sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(quantised)]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    copies = {engine.communicate(timeout=60)[0].strip() for engine in engines}
    assert [engine.returncode for engine in engines] == [0, 0, 0] and len(copies) == 1
    assert check_checkpoint(copies.pop()).shards == ("model.safetensors",)


def test_an_engine_waits_while_another_makes_the_copy(quantised, profile):
    copy = rollout_checkpoint(profile, quantised)
    shutil.rmtree(copy)
    waiting = threading.Thread(target=rollout_checkpoint, args=(profile, quantised))
    with (copy.parent / f".{copy.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and not copy.exists()
    waiting.join(30)
    assert not waiting.is_alive() and not check_checkpoint(copy).quantised


# --- memory -------------------------------------------------------------------------------------

# Largest tensor: 8 x 1024 x 2048 in bfloat16, 32 MiB; the whole model: 200 MiB.
LARGE = dict(
    model_type="gpt_oss", vocab_size=64, hidden_size=1024, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_local_experts=8, num_experts_per_tok=2,
    sliding_window=16, dtype="bfloat16",
)  # fmt: skip
LARGEST = 8 * 1024 * 2048 * 2
MEASURE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from helpers.anatomy import tensor_shapes
from helpers.checkpoints import save_streamed
from helpers.mxfp4 import dequantise_experts, dequantised_checkpoint, write_mxfp4_checkpoint
from helpers.tensor_files import check_checkpoint, read_rows

def status(key):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024

def export(template):
    for name, shape in tensor_shapes(check_checkpoint(template).config).items():
        yield name, torch.ones(shape, dtype=torch.bfloat16)

def dequantise_all(source, target):
    tensors = check_checkpoint(source).tensors
    plain = {}
    for name in tensors:
        if name.endswith("_blocks"):
            pair = read_rows(tensors[name]), read_rows(tensors[name[:-7] + "_scales"])
            plain[name[:-7]] = dequantise_experts(*pair, torch.bfloat16)
        elif not name.endswith("_scales"):
            plain[name] = read_rows(tensors[name])
    target.mkdir()
    save_file(plain, target / "model.safetensors")

ways = {
    "save_streamed": lambda a, b: save_streamed(export(a), a, b),
    "collected": lambda a, b: save_streamed(dict(export(a)).items(), a, b),
    "dequantised_checkpoint": dequantised_checkpoint,
    "write_mxfp4_checkpoint": write_mxfp4_checkpoint,
    "all dequantised": dequantise_all,
}
way, small, source, target = sys.argv[1], *map(Path, sys.argv[2:])
ways[way](small, target / "small")  # lazy imports and the allocator's first pages are no part of it
Path("/proc/self/clear_refs").write_text("5")  # sets the peak (VmHWM) to what is resident now
before = status("VmRSS")
ways[way](source, target / "large")
print(status("VmHWM") - before)
"""


def _large(folder, quantised, **changes):
    """A checkpoint of LARGE's shape, written tensor by tensor."""
    import torch

    from helpers.mxfp4 import QUANTIZATION_CONFIG
    from helpers.tensor_files import TensorSpec, TensorWriter, expected_tensors

    config = LARGE | changes | ({"quantization_config": QUANTIZATION_CONFIG} if quantised else {})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    expected = expected_tensors(config, quantised)
    specs = {
        n: TensorSpec(*(("U8",) if "U8" in d else ("BF16",)), shape) for n, (shape, d) in expected.items()
    }
    with TensorWriter(folder, specs) as writer:
        for name, spec in specs.items():
            writer.write(
                name, torch.full(spec.shape, 120, dtype=torch.uint8 if spec.dtype == "U8" else torch.bfloat16)
            )
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """quantised -> (a small checkpoint, a large one)."""
    folder, small = tmp_path_factory.mktemp("sources"), dict(hidden_size=64, intermediate_size=64)
    return {
        q: (_large(folder / f"small-{q}", q, **small), _large(folder / f"large-{q}", q))
        for q in (False, True)
    }


def _extra_peak(way, sources, tmp_path):
    """Bytes that a process of its own needed beyond what it had before."""
    command = [sys.executable, "-c", MEASURE, way, *map(str, sources), str(tmp_path)]
    # one thread: on busy cores torch's threads wait for each other ten times longer than they work
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


BOUND = 2.5 * LARGEST + 8 * 2**20


@pytest.mark.parametrize(
    ("way", "quantised"),
    [("save_streamed", False), ("write_mxfp4_checkpoint", False), ("dequantised_checkpoint", True)],
)
def test_the_peak_is_a_tensor_not_a_model(sources, tmp_path, way, quantised):
    extra = _extra_peak(way, sources[quantised], tmp_path)
    print(f"{way}: {extra / 2**20:.0f} MiB, {extra / LARGEST:.2f} times the largest tensor")
    assert extra < BOUND


@pytest.mark.parametrize(("way", "quantised"), [("collected", False), ("all dequantised", True)])
def test_what_holds_the_whole_model_breaks_the_bound(sources, tmp_path, way, quantised):
    assert _extra_peak(way, sources[quantised], tmp_path) > 2 * BOUND


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A small model written as a large one would be."""
    import helpers.checkpoints as module

    settings = load_profile("cpu")
    return settings, module.write_random_checkpoint(settings, tmp_path_factory.mktemp("streamed") / "random")


def test_a_streamed_random_checkpoint_is_one_that_transformers_loads(streamed):
    from transformers import GptOssForCausalLM

    settings, folder = streamed
    _, report = GptOssForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert check_checkpoint(folder).folder == folder
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["GptOssForCausalLM"]


def test_its_tensors_have_the_spread_that_was_asked_for(streamed):
    settings, folder = streamed
    weights = _weights(folder)
    for name, tensor in weights.items():
        if name.endswith("norm.weight"):
            assert bool((tensor == 1).all()), name
        elif "bias" in name:
            assert not tensor.any(), name
        elif tensor.numel() > 500:
            assert tensor.std().item() == pytest.approx(settings.model.initializer_range, rel=0.2), name
    assert all(w.abs().max() > 0.2 for n, w in weights.items() if n.endswith("sinks"))


def test_large_models_are_streamed(monkeypatch, tmp_path):
    import helpers.checkpoints as module

    asked = []
    monkeypatch.setattr(module, "write_random_checkpoint", lambda s, f: asked.append(f) or f)
    assert module.write_tiny_checkpoint(load_profile("gpu-20b"), tmp_path / "x") == asked[0]
    assert module.write_tiny_checkpoint(load_profile("cpu"), tmp_path / "y") == tmp_path / "y"
    assert len(asked) == 1
