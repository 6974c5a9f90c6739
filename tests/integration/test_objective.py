"""What a recipe adds to an update of the real trainer: old logprobs, the reference, several updates."""

import dataclasses

import pytest
import torch

from helpers.collate import collate
from helpers.objective import learn, policy_loss, rated
from helpers.profiles import load_profile
from helpers.records import Episode
from helpers.trainer import MegatronTrainer

pytestmark = pytest.mark.engine
LENGTHS = (5, 17, 33, 48, 9, 24, 40, 12)


def recipe(name, **changes):
    return load_profile("cpu", algorithm=name, **{f"algorithm.{k}": v for k, v in changes.items()})


@pytest.fixture(scope="module")
def learner(checkpoint, trainer):
    """A trainer with a reference. (`trainer` comes first: one parallel state a process.)"""
    return MegatronTrainer(recipe("verl_gpt_oss"), checkpoint)


@pytest.fixture(scope="module")
def batch(trainer):
    """Eight random answers with the trainer's own logprobs as the rollout's."""
    generator = torch.Generator().manual_seed(3)
    episodes = []
    for i, length in enumerate(LENGTHS):
        ids = tuple(torch.randint(1, 64, (length,), generator=generator).tolist())
        episodes.append(Episode(ids[:3], ids[3:], (-4.0,) * (length - 3), "stop", i // 2))
    made = collate(episodes, torch.linspace(-2.0, 2.0, len(LENGTHS)), pad_id=0)
    return dataclasses.replace(made, rollout_logprobs=trainer.logprobs(made))


def weights_of(trainer):
    return [p.detach().clone() for chunk in trainer.model.chunks for p in chunk.parameters()]


def gradients(trainer, batch, settings):
    return trainer.gradients(batch, policy_loss(settings))


def test_the_default_step_is_one_plain_update(trainer, batch, tmp_path):
    trainer.update(batch)  # an optimizer has no state to save before its first step
    folder = trainer.save(tmp_path / "state")
    plain = trainer.update(batch)
    trainer.resume(folder)
    learned = learn(trainer, batch, trainer.settings)
    assert {k: v for k, v in learned.items() if k != "seconds"} == {
        k: v for k, v in plain.items() if k != "seconds"
    }
    assert learned["generation_kl"] > 0 and learned["token_multiplier"] > 1  # the policy has moved since


def test_current_logprobs_save_the_pass_and_change_no_gradient(trainer, batch):
    """old = the update's own logprobs, against a forward pass of its own for them."""
    with_a_pass = recipe("on_policy", old_logprobs="trainer")
    saved = gradients(trainer, batch, recipe("on_policy"))
    paid = gradients(trainer, rated(trainer, batch, with_a_pass), with_a_pass)
    assert max(t.abs().max() for t in saved.values()) > 1e-3
    assert all((saved[name] - paid[name]).abs().max() < 1e-6 for name in saved)


def test_the_reference_stays_at_the_start_and_leaves_no_trace(learner, batch):
    start = learner.logprobs(batch)
    assert torch.equal(learner.reference_logprobs(batch), start)
    learn(learner, batch, learner.settings)
    moved, before = learner.logprobs(batch), weights_of(learner)
    assert (moved - start).abs().max() > 1e-3
    assert torch.equal(learner.reference_logprobs(batch), start)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(learner), strict=True))
    assert torch.equal(learner.logprobs(batch), moved)


def test_a_failed_reference_pass_puts_the_weights_back(learner, batch):
    before = weights_of(learner)
    with pytest.raises(ValueError, match="do not divide into micro-batches"):
        cut = dataclasses.replace(learner.settings.trainer, micro_batch=3)
        kept, learner.settings = learner.settings, dataclasses.replace(learner.settings, trainer=cut)
        try:
            learner.reference_logprobs(batch)
        finally:
            learner.settings = kept
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(learner), strict=True))


def test_a_kl_term_holds_the_policy_near_the_start(learner, batch, tmp_path):
    """From one state, ten steps with a strong term and ten without."""
    folder, ends = learner.save(tmp_path / "state"), {}
    for strength in (1e-9, 10.0):
        learner.resume(folder)
        learner.settings = recipe("verl_gpt_oss", kl_coefficient=strength, kl_kind="k3+")
        rows = [learn(learner, batch, learner.settings) for _ in range(10)]
        ends[strength] = rows[-1]["reference_kl"]
    learner.settings = recipe("verl_gpt_oss")
    assert ends[10.0] < ends[1e-9] / 2


def test_a_profile_without_a_kl_term_keeps_no_reference(trainer, batch):
    with pytest.raises(RuntimeError, match="set algorithm.kl_coefficient above 0"):
        trainer.reference_logprobs(batch)


def test_an_update_without_its_pass_is_refused_and_changes_nothing(learner, batch):
    before = weights_of(learner)
    with pytest.raises(ValueError, match="call helpers.objective.learn"):
        learner.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(learner), strict=True))
