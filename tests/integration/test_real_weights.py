"""`python -m helpers.real_weights` as somebody with weights runs it: one run of the command, real engines, a tiny checkpoint."""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from helpers.checkpoints import save_weights, tiny_vocabulary, write_tiny_checkpoint
from helpers.profiles import PROJECT_ROOT, RUNS_VARIABLE, load_profile

pytestmark = pytest.mark.engine
GUESSES = "0123"


def write_guesser(folder):
    """A tiny gpt-oss that answers every question in perfect harmony with one of four digits, at random.

    Embedding and output matrix make it a table of which token follows which; attention and experts are random, only weak. So
    rewards differ within a group without any training, and every tensor still has a gradient.
    """
    import torch
    from safetensors.torch import load_file

    settings = load_profile("cpu")
    random = write_tiny_checkpoint(settings, folder / "random")
    weights = load_file(random / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():  # no tensor constant, as in a trained model
        weights[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    ids = tiny_vocabulary(settings.model.vocab_size)
    follows = {
        "assistant": ["<|channel|>"], "<|channel|>": ["final"], "final": ["<|message|>"], "<|message|>": [*GUESSES],
        **{digit: ["<|return|>"] for digit in GUESSES},
    }  # fmt: skip
    size = settings.model.vocab_size
    assert size == settings.model.hidden_size  # one direction of the residual stream a token
    weights["model.embed_tokens.weight"] += 20 * torch.eye(size)
    for token, nexts in follows.items():
        for following in nexts:
            weights["lm_head.weight"][ids[following], ids[token]] += 3.0
    return save_weights(weights, random, folder / "guesser")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(what the command printed, exit code, its result file's text) of one run."""
    folder = tmp_path_factory.mktemp("real")
    checkpoint = write_guesser(folder)
    lines = [
        json.dumps({"question": f"{a}+{b}=?", "answer": f"{a}+{b}={a + b}\n#### {a + b}"})
        for a in range(4)
        for b in range(4 - a)
    ]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    sums = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}" for f in checkpoint.iterdir()]
    (folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    command = [
        sys.executable, "-m", "helpers.real_weights", "--checkpoint", checkpoint, "--profile", "cpu", "--sums",
        folder / "SHA256SUMS", "--repository", "none", "--questions", folder / "questions.jsonl", "--no-preamble",
        "--out", folder / "result.json", "--max-new-tokens", "16",
    ]  # fmt: skip
    environment = {**os.environ, RUNS_VARIABLE: str(folder / "runs")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=PROJECT_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done, (folder / "result.json").read_text(), folder


@pytest.fixture(scope="module")
def steps(finished):
    return {step["name"]: step for step in json.loads(finished[1])["steps"]}


def test_a_sound_checkpoint_passes_every_step(finished, steps):
    done, text, _ = finished
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert {name: step["status"] for name, step in steps.items()} == dict.fromkeys(
        (
            "checksums",
            "checkpoint",
            "server",
            "doctor",
            "roll out",
            "advantages",
            "trainer",
            "update",
            "sync",
        ),
        "ok",
    )
    assert json.loads(text)["status"] == "finished"
    assert "nothing is wrong" in done.stdout.splitlines()[-1]


def test_what_the_step_measured(steps):
    answers, trainer, update, sync = (
        steps[name]["numbers"] for name in ("roll out", "trainer", "update", "sync")
    )
    assert answers["answers"] == 32 and 0 < answers["reward_mean"] < 1 and answers["format_rate"] > 0.9
    assert trainer["logprob_gap_max_nats"] < 1e-4 and abs(trainer["generation_kl_k3_nats"]) < 1e-6
    assert update["grad_norm"] > 0 and update["sink_layers_with_gradient"] == update["sink_layers"] == 2
    assert (
        update["learning_rate"] == load_profile("cpu").trainer.learning_rate
    )  # no warm-up: one step is all there is
    assert sync["worst_nats"] < 1e-4 < sync["moved_nats"] and sync["noise_nats"] < 1e-6
    assert all(step["seconds"] > 0 for step in steps.values())


def test_the_doctor_examined_files_server_and_trainer(steps):
    probes = {f["probe"]: f["verdict"] for name in ("checkpoint", "doctor", "trainer") for f in
              steps[name]["details"]["findings"]}  # fmt: skip
    for probe in (
        "checkpoint: finite",
        "server: prefill logprobs",
        "server: updates arrive",
        "trainer: logprobs",
    ):
        assert probes[probe] == "pass", probe


def test_the_result_names_no_folder_of_this_machine(finished):
    _, text, folder = finished
    assert str(folder) not in text and str(PROJECT_ROOT) not in text
    assert '"checkpoint": "guesser"' in text
    assert "--checkpoint guesser" in json.loads(text)["command"]
