"""The trainer's tensors away from its device: what still works, what refuses, and that a journey changes nothing."""

import pytest
import torch

from helpers.bridge import compare_weights, export_weights
from helpers.offload import OffloadError

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def at_home(trainer, checkpoint):
    yield
    trainer.memory.load_back()
    trainer.load_weights(checkpoint)


@pytest.fixture
def batch():
    from tests.integration.ranks import make_batch

    return make_batch()


def test_offloaded_weights_export_bit_by_bit(trainer, checkpoint):
    trainer.load_weights(checkpoint)
    trainer.memory.offload()
    assert sum(p.untyped_storage().nbytes() for p in trainer.model.module.parameters()) == 0
    assert not compare_weights(trainer.export(), checkpoint)


def test_the_bridge_alone_hands_out_empty_storage(trainer):
    """The origin's question (verl 4394): export_hf_weights(cpu=True) moves the *result*; its source is the emptied storage.

    Only the first tensor, and not read: on a CPU its address is 0, and reading it ends the process.
    """
    trainer.memory.offload()
    name, tensor = next(iter(export_weights(trainer.model)))
    assert tensor.numel() and tensor.untyped_storage().nbytes() == 0, (
        f"the bridge read {name}: staged_tasks may go"
    )


def test_a_journey_changes_neither_logprobs_nor_the_next_steps(trainer, batch, tmp_path):
    trainer.update(batch)  # Adam has no state before its first step
    trainer.save(tmp_path / "state")
    logprobs = trainer.logprobs(batch)
    steps = [trainer.update(batch) for _ in range(2)]
    trainer.resume(tmp_path / "state")
    for _ in range(3):
        trainer.memory.offload()
        trainer.memory.load_back()
    assert torch.equal(trainer.logprobs(batch), logprobs)
    again = [trainer.update(batch)]
    trainer.memory.offload()
    trainer.memory.load_back()
    again.append(trainer.update(batch))
    names = ("loss", "grad_norm", "entropy")
    assert [[s[n] for n in names] for s in again] == [[s[n] for n in names] for s in steps]


@pytest.mark.parametrize(
    "call", [lambda t, b: t.update(b), lambda t, b: t.logprobs(b), lambda t, b: t.gradients(b),
             lambda t, b: t.save("nowhere"), lambda t, b: t.resume("nowhere"), lambda t, b: t.load_weights("nowhere")]
)  # fmt: skip
def test_what_needs_the_weights_says_so(trainer, batch, call):
    trainer.memory.offload(["weights"])
    with pytest.raises(OffloadError, match=r"needs .*weights \(in host memory\).*load_back"):
        call(trainer, batch)


def test_the_optimizer_alone_may_be_away_for_everything_but_steps(trainer, batch):
    trainer.memory.offload(["optimizer", "gradients"])
    assert trainer.logprobs(batch).shape == batch.size
    assert trainer.export()
    with pytest.raises(OffloadError, match="update needs gradients .* optimizer"):
        trainer.update(batch)


def test_frozen_experts_have_neither_gradients_nor_optimizer_state(settings, checkpoint, batch):
    """They are frozen before DDP reserves its buffers; at 20b that is 7 GB instead of 84."""
    import dataclasses

    from helpers.memory import measured_trainer_bytes, predicted_trainer_bytes
    from helpers.trainer import MegatronTrainer

    frozen = dataclasses.replace(settings, trainer=dataclasses.replace(settings.trainer, freeze_experts=True))
    trainer = MegatronTrainer(frozen, checkpoint)
    before = trainer.export()
    trainer.update(batch)
    after = trainer.export()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if ".experts." not in name}
    measured, predicted = measured_trainer_bytes(trainer), predicted_trainer_bytes(frozen)
    assert measured["gradients"] < 0.5 * measured["weights"]
    uneven = sum(tensor.numel() for tensor in before.values()) * 4  # the fixture's model is not the profile's
    assert measured["weights"] == uneven and predicted["gradients"] < predicted["weights"]
    assert measured["Adam moments"] == 2 * measured["gradients"]
    assert trainer.memory.offload()[0].bytes == uneven, "frozen weights leave the device too"
