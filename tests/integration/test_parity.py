"""Every kind of tensor, forward and backward, Megatron against transformers, on a gpt-oss of awkward shapes."""

import dataclasses

import pytest
import torch

from helpers.parity import padded_batch, parity_columns, parity_failures, parity_rows, parity_table
from helpers.profiles import load_profile
from helpers.results import write_csv

pytestmark = pytest.mark.engine
# Of a logit; of the size of a gradient's terms (measured: 4.6e-6; 1.2e-6 where nine tenths of a sink's gradient cancel).
LIMITS = dict(forward=1e-4, gradient=1e-5)


@pytest.fixture(scope="module")
def awkward_reference(load_reference, awkward_checkpoint):
    return load_reference(awkward_checkpoint)


def keep(rows, name: str) -> None:
    """Print the table (pytest -s shows it) and store it beside the session's other results."""
    print("\n" + parity_table(rows))
    write_csv(load_profile("cpu").run_folder("parity") / f"{name}.csv", parity_columns(rows))


def test_every_kind_of_tensor_forward_and_backward(awkward_trainer, awkward_reference, awkward_sequences):
    rows = parity_rows(awkward_trainer, awkward_reference, awkward_sequences)
    keep(rows, "before-training")
    assert len(rows) == 2 * 17 + 3
    assert parity_failures(rows, **LIMITS) == []


def test_the_comparison_leaves_both_models_as_they_were(
    awkward_trainer, awkward_reference, awkward_checkpoint
):
    from helpers.bridge import compare_weights

    assert not compare_weights(awkward_trainer.export(), awkward_checkpoint)
    assert not compare_weights(awkward_reference.state_dict(), awkward_checkpoint)


def test_every_kind_after_twenty_training_steps(
    awkward_trainer, awkward_reference, awkward_checkpoint, awkward_sequences
):
    """The optimizer moves every tensor, so that what only fresh weights satisfy shows now."""
    batch = padded_batch([tokens[::-1] for tokens in awkward_sequences])
    signs = torch.linspace(-1, 1, len(awkward_sequences))[:, None]
    batch = dataclasses.replace(batch, advantages=batch.loss_mask * signs)
    before = awkward_trainer.export()
    for _ in range(20):
        awkward_trainer.update(batch)
    after = awkward_trainer.export()
    assert [name for name in before if torch.equal(before[name], after[name])] == [], "these were not trained"
    awkward_reference.load_state_dict(after)
    rows = parity_rows(awkward_trainer, awkward_reference, awkward_sequences)
    keep(rows, "after-training")
    assert parity_failures(rows, **LIMITS) == []
    awkward_trainer.load_weights(awkward_checkpoint)  # as the next test expects it


def test_what_cannot_be_compared_is_refused(awkward_trainer, awkward_reference):
    with pytest.raises(ValueError, match="padding token 0"):
        parity_rows(awkward_trainer, awkward_reference, [[1, 0, 2]])
