"""Every kind of tensor, forward and backward, Megatron against transformers, on a gpt-oss of awkward shapes."""

import dataclasses
import os

import pytest
import torch

from helpers.parity import (
    megatron_logits,
    padded_batch,
    parity_columns,
    parity_rows,
    parity_table,
    reference_logits,
)
from helpers.profiles import load_profile
from helpers.results import write_csv

pytestmark = pytest.mark.engine
WINDOW = 16
LENGTHS = (5, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 3 * WINDOW)
# nothing equals anything: hidden 80, intermediate 96, 6 heads of 16 (96 wide), 3 key-value heads, 5 experts, 4 layers
AWKWARD = {
    "hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
    "num_local_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 4, "vocab_size": 72, "sliding_window": WINDOW,
}  # fmt: skip
FORWARD, GRADIENT, EFFECT = 1e-4, 1e-3, 1e-2  # logit, relative, logit


def sequences(seed=0):
    """Random tokens without the padding token, from shorter than the window to three of it."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, AWKWARD["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def awkward(settings):
    """Settings of the awkward model."""
    changed = load_profile("cpu", **{f"model.{name}": value for name, value in AWKWARD.items()})
    return dataclasses.replace(changed, trainer=dataclasses.replace(changed.trainer, learning_rate=1e-3))


@pytest.fixture(scope="module")
def uneven(awkward):
    """Its checkpoint: noise on every tensor, and sinks of the size of attention scores and more."""
    from safetensors.torch import load_file

    from helpers.checkpoints import save_weights, write_tiny_checkpoint

    random = write_tiny_checkpoint(awkward, awkward.runs / "awkward-random")
    generator = torch.Generator().manual_seed(1)
    weights = load_file(random / "model.safetensors")
    for name, tensor in weights.items():
        scale = 3.0 if name.endswith("sinks") else 0.1
        weights[name] = tensor + scale * torch.randn(tensor.shape, generator=generator)
    return save_weights(weights, random, awkward.runs / "awkward-uneven")


@pytest.fixture(scope="module")
def pair(awkward, uneven, load_reference, trainer):
    """The trainer and the reference of the awkward model. (`trainer` starts Megatron in this process.)"""
    from helpers.trainer import MegatronTrainer

    return MegatronTrainer(awkward, uneven), load_reference(uneven)


def check(rows):
    """What the suite demands of every row."""
    assert len(rows) == 2 * 17 + 3
    for row in rows:
        assert row.effect > EFFECT, (
            f"{row.kind} in {row.layers} layers changes nothing: the row shows nothing"
        )
        assert row.forward_abs < FORWARD, f"{row.kind} in {row.layers} layers, forward: {row}"
        assert row.gradient_rel < GRADIENT, f"{row.kind} in {row.layers} layers, gradient: {row}"


def keep(rows, name: str) -> None:
    """Print the table (pytest -s shows it) and store it beside the session's other results."""
    print("\n" + parity_table(rows))
    write_csv(load_profile("cpu").run_folder("parity") / f"{name}.csv", parity_columns(rows))


def test_every_kind_of_tensor_forward_and_backward(pair):
    rows = parity_rows(*pair, sequences())
    keep(rows, "before-training")
    check(rows)


def test_the_comparison_leaves_both_models_as_they_were(pair, uneven):
    from helpers.bridge import compare_weights

    trainer, reference = pair
    assert not compare_weights(trainer.export(), uneven)
    assert not compare_weights(reference.state_dict(), uneven)


def test_every_kind_after_twenty_training_steps(pair):
    """The optimizer moves every tensor, so that what only fresh weights satisfy shows now."""
    trainer, reference = pair
    batch = padded_batch(sequences(seed=3))
    batch = dataclasses.replace(
        batch, advantages=batch.loss_mask * torch.linspace(-1, 1, len(LENGTHS))[:, None]
    )
    before = trainer.export()
    for _ in range(20):
        trainer.update(batch)
    after = trainer.export()
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == [], "these tensors were not trained"
    reference.load_state_dict(after)
    rows = parity_rows(trainer, reference, sequences())
    keep(rows, "after-training")
    check(rows)
