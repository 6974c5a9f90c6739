"""Megatron against transformers: logits, logprobs, export, and what a trainer may not do. (Tensor by tensor: test_parity.)"""

import dataclasses

import pytest
import torch

from helpers.collate import collate
from helpers.records import Batch, Episode

pytestmark = pytest.mark.engine


def sequences(lengths, seed=0):
    """Random token lists without the padding token: transformers gives its embedding no gradient."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(1, 64, (n,), generator=generator).tolist()) for n in lengths]


def batch_of(lengths, prompt=3, advantages=None, seed=0) -> Batch:
    """Episodes of these lengths as one right-padded batch."""
    episodes = [
        Episode(s[:prompt], s[prompt:], (-3.0,) * (len(s) - prompt), "stop", i)
        for i, s in enumerate(sequences(lengths, seed))
    ]
    return collate(episodes, advantages, pad_id=0)


def reference_logprobs(model, tokens):
    """log p(tokens[t] | before), t >= 1."""
    logits = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


def test_logits_agree_over_three_windows(trainer, reference):
    tokens = torch.tensor(sequences([48] * 4))
    with torch.no_grad():
        ours = trainer.model.module(tokens, torch.arange(48).expand_as(tokens), None)
        gap = (ours - reference(tokens).logits).abs().max()
    assert gap < 1e-4


def test_padded_logprobs_are_those_of_the_unpadded_sequences(trainer, reference):
    lengths = (5, 17, 33, 48)
    with torch.no_grad():
        ours = trainer.logprobs(batch_of(lengths))
        for row, tokens in zip(ours, sequences(lengths), strict=True):
            wanted = reference_logprobs(reference, tokens)[2:]  # the prompt's three tokens are masked
            assert (row[2 : 2 + len(wanted)] - wanted).abs().max() < 1e-4
            assert not row[:2].any() and not row[2 + len(wanted) :].any()


def test_export_is_bit_exact(trainer, checkpoint):
    from helpers.bridge import compare_weights

    assert not compare_weights(trainer.export(), checkpoint)


def test_a_difference_is_found_by_name(trainer, checkpoint):
    from helpers.bridge import compare_weights

    weights = trainer.export()
    weights["model.layers.0.self_attn.sinks"] = weights["model.layers.0.self_attn.sinks"].nextafter(
        torch.tensor(9.0)
    )
    weights["surplus"] = weights.pop("lm_head.weight")
    difference = compare_weights(weights, checkpoint)
    assert difference.unequal == ("model.layers.0.self_attn.sinks",)
    assert difference.missing == ("lm_head.weight",) and difference.extra == ("surplus",)


def test_exported_tensors_are_the_receivers_own(trainer):
    first = trainer.export()
    pointers = {p.data_ptr() for p in trainer.model.module.parameters()}
    assert not pointers & {t.data_ptr() for t in first.values()}


def test_a_micro_batch_changes_nothing(trainer):
    batch = batch_of((5, 17, 33, 48))
    whole = trainer.logprobs(batch)
    before = trainer.settings
    try:
        trainer.settings = dataclasses.replace(
            before, trainer=dataclasses.replace(before.trainer, micro_batch=2)
        )
        assert (trainer.logprobs(batch) - whole).abs().max() < 1e-5
        trainer.settings = dataclasses.replace(
            before, trainer=dataclasses.replace(before.trainer, micro_batch=3)
        )
        with pytest.raises(ValueError, match="do not divide into micro-batches of 3"):
            trainer.logprobs(batch)
    finally:
        trainer.settings = before


def test_logits_in_pieces_give_the_same_logprobs_entropy_and_gradients(trainer, monkeypatch):
    """Pieces of three tokens, which divide neither the batch nor a row."""
    import helpers.logprobs as module

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 11, 64, generator=generator)
    labels = torch.randint(0, 64, (4, 11), generator=generator)
    weight = torch.randn(4, 11, generator=generator)
    found = []
    for size in (module.CHUNK_BYTES, 3 * 64 * 4, 1):
        monkeypatch.setattr(module, "CHUNK_BYTES", size)
        leaf = logits.clone().requires_grad_()
        logprobs = module.token_logprobs(leaf, labels, 0.7)
        (logprobs * weight).sum().backward()
        found.append((logprobs.detach(), module.token_entropy(logits, 0.7), leaf.grad))
    exact = torch.log_softmax(logits.double() / 0.7, -1)
    assert (found[0][0] - exact.gather(-1, labels[..., None])[..., 0]).abs().max() < 1e-5
    assert (found[0][1] + (exact.exp() * exact).sum(-1)).abs().max() < 1e-5
    for pieces in found[1:]:
        assert all((a - b).abs().max() < 1e-6 for a, b in zip(pieces, found[0], strict=True))


def test_an_update_in_pieces_is_the_same_update(trainer, monkeypatch, tmp_path):
    import helpers.logprobs as module

    batch = batch_of((5, 17, 33, 48), advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))
    trainer.update(batch)
    trainer.save(tmp_path / "state")
    whole = trainer.update(batch)
    trainer.resume(tmp_path / "state")
    monkeypatch.setattr(module, "CHUNK_BYTES", 7 * 64 * 4)
    pieces = trainer.update(batch)
    for name in ("loss", "grad_norm", "entropy"):
        assert abs(pieces[name] - whole[name]) <= 1e-5 * abs(whole[name])


def test_advantages_that_are_not_finite_are_refused_where_they_enter():
    with pytest.raises(ValueError, match="not a finite number"):
        batch_of((9, 9), advantages=torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(trainer, value):
    batch = batch_of((9, 17), advantages=torch.tensor([1.0, -1.0]))
    broken = dataclasses.replace(batch, advantages=batch.advantages * value)
    before, steps = trainer.export(), trainer.steps_done
    with pytest.raises(FloatingPointError):
        trainer.update(broken)
    after = trainer.export()
    assert all(torch.equal(before[k], after[k]) for k in before) and trainer.steps_done == steps
    assert trainer.update(batch)["grad_norm"] > 0  # and the trainer is as good as before


def test_resume_gives_the_same_logprobs_and_the_same_next_steps(trainer, tmp_path):
    batch = batch_of((9, 17, 33, 20), advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))
    trainer.update(batch)
    folder = trainer.save(tmp_path / "state")
    saved, steps = trainer.logprobs(batch), trainer.steps_done
    following = [trainer.update(batch) for _ in range(2)]
    assert not torch.equal(trainer.logprobs(batch), saved)
    assert trainer.resume(folder) == steps
    assert torch.equal(trainer.logprobs(batch), saved)
    for wanted in following:
        got = trainer.update(batch)
        assert {k: v for k, v in got.items() if k != "seconds"} == {
            k: v for k, v in wanted.items() if k != "seconds"
        }
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_resume_from_nothing_is_refused(trainer, tmp_path):
    with pytest.raises(FileNotFoundError, match="no trainer checkpoint"):
        trainer.resume(tmp_path / "none")


def test_an_export_searches_for_modelopt_once_a_weight_unless_its_absence_is_remembered(trainer, monkeypatch):
    """helpers/upstream_fixes.py is still needed: Python does not remember a failed import, and the bridge tries again."""
    import sys

    from helpers.upstream_fixes import remember_absent_packages

    class Spy:
        """A finder that finds nothing and counts who asks for modelopt."""

        asked = 0

        def find_spec(self, name, path=None, target=None):
            self.asked += name.partition(".")[0] == "modelopt"

    spy = Spy()
    monkeypatch.setattr(sys, "meta_path", [spy, *sys.meta_path])
    assert sys.modules["modelopt"] is None, "prepare_process has not marked it"
    weights = len(trainer.export())
    assert spy.asked == 0
    monkeypatch.delitem(sys.modules, "modelopt")
    trainer.export()
    assert spy.asked >= weights
    remember_absent_packages()
    assert sys.modules["modelopt"] is None
