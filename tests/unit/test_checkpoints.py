"""Checkpoints: whole or absent, the same for the same seed, and named when something is missing."""

import json
import os
import subprocess
import sys

import pytest

from helpers.checkpoints import (
    PAD_TOKEN, publish_folder, require_checkpoint, save_weights, starting_checkpoint, tiny_vocabulary,
    tokenizer_and_pad, write_tiny_checkpoint,
)  # fmt: skip
from helpers.profiles import load_profile


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
