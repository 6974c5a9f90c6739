"""helpers.objective: what each setting does to a batch, an update and a loss, in value and in gradient."""

import csv
import doctest
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import objective as module
from helpers.advantages import group_advantages
from helpers.collate import collate
from helpers.corrections import mismatch
from helpers.kl import kl_estimate
from helpers.losses import cispo_loss, clipped_policy_loss
from helpers.objective import (
    correction_of,
    learn,
    mini_batches,
    policy_loss,
    rated,
    shaped_rewards,
    step_advantages,
    summarised,
)
from helpers.profiles import load_profile
from helpers.recipes import RECIPES
from helpers.records import Batch, Episode

quick = settings(max_examples=25, deadline=None)
SEEDS = st.integers(0, 10_000)


def profile(recipe="default", **changes):
    return load_profile("cpu", algorithm=recipe, **{f"algorithm.{k}": v for k, v in changes.items()})


def case(seed, rows=8, spread=0.5):
    """A ragged rated batch, and present logprobs near the rollout's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rows,), generator=generator).tolist()
    logprobs = [(-3 * torch.rand(n, generator=generator) - 0.1).tolist() for n in lengths]
    episodes = [
        Episode((1,) * (1 + i % 2), (2,) * len(row), tuple(row), "stop", i // 2)
        for i, row in enumerate(logprobs)
    ]
    batch = collate(episodes, torch.randn(rows, generator=generator), pad_id=0)
    noise = [spread * torch.randn(batch.size, generator=generator) for _ in range(3)]
    old, reference, now = (batch.rollout_logprobs + n for n in noise)
    masked = batch.loss_mask == 0
    batch = replace(
        batch, old_logprobs=old.masked_fill(masked, 0), reference_logprobs=reference.masked_fill(masked, 0)
    )
    return batch, now


def descent(loss, logprobs, batch):
    """(output, gradient of total / normaliser)"""
    leaf = logprobs.detach().clone().requires_grad_()
    out = loss(leaf, batch)
    return out, torch.autograd.grad(out.loss, leaf)[0]


def test_doctests():
    assert doctest.testmod(module).failed == 0


# --- the loss ----------------------------------------------------------------------------------------------
@quick
@given(SEEDS)
def test_the_default_is_the_clipped_loss_bit_by_bit(seed):
    batch, now = case(seed)
    out, gradient = descent(policy_loss(profile()), now, batch)
    plain, want = descent(clipped_policy_loss, now, batch)
    assert torch.equal(out.total, plain.total) and torch.equal(gradient, want)
    assert out.normaliser == plain.normaliser
    assert {
        name: out.metrics[name] for name in plain.metrics if name != "logprob_gap"
    }.keys() <= out.metrics.keys()


@quick
@given(SEEDS)
def test_gspo_dr_grpo_and_cispo_are_their_functions_with_the_trainers_old_logprobs(seed):
    batch, now = case(seed, spread=1e-3)
    old = replace(batch, rollout_logprobs=batch.old_logprobs)
    budget = profile().sampling.max_new_tokens
    pairs = {
        "gspo": lambda x, b: clipped_policy_loss(x, b, 3e-4, 4e-4, ratio="sequence", normaliser="sequence"),
        "cispo": lambda x, b: cispo_loss(x, b, 1.0, 4.0),
        "dual_clip": lambda x, b: clipped_policy_loss(x, b, 0.2, 0.2, dual_clip=3.0),
    }
    for name, function in pairs.items():
        assert torch.equal(
            descent(policy_loss(profile(name)), now, batch)[1], descent(function, now, old)[1]
        ), name
    got = descent(policy_loss(profile("dr_grpo")), now, batch)[1]
    want = descent(
        lambda x, b: clipped_policy_loss(x, b, 0.2, 0.2, normaliser="constant", constant=budget), now, batch
    )[1]
    assert torch.equal(got, want)


@quick
@given(SEEDS)
def test_on_policy_is_the_policy_gradient_and_needs_no_pass(seed):
    batch, now = case(seed)
    bare = replace(batch, old_logprobs=None, reference_logprobs=None)
    out, gradient = descent(policy_loss(profile("on_policy")), now, bare)
    torch.testing.assert_close(gradient, -batch.advantages / batch.loss_mask.sum())
    assert out.metrics["clip_fraction"][0] == 0
    as_trainer = replace(batch, old_logprobs=now)  # the pass that it saves
    assert torch.equal(descent(policy_loss(profile(old_logprobs="trainer")), now, as_trainer)[1], gradient)


@quick
@given(SEEDS)
def test_tis_weighs_each_token_by_the_truncated_ratio_of_trainer_and_rollout(seed):
    batch, now = case(seed, spread=1.0)
    out, gradient = descent(policy_loss(profile("tis")), now, batch)
    ratio = ((now - batch.rollout_logprobs) * batch.loss_mask).exp().clamp(max=2.0)
    torch.testing.assert_close(gradient, -ratio * batch.advantages / batch.loss_mask.sum())
    kept, tokens = out.metrics["kept_share"]
    assert kept == tokens == batch.loss_mask.sum()
    assert out.metrics["correction_max"][0] <= 2.0


@quick
@given(SEEDS)
def test_mis_drops_whole_answers_and_says_how_many_tokens_it_kept(seed):
    batch, now = case(seed, spread=1.0)
    out, gradient = descent(policy_loss(profile("mis")), now, batch)
    ratio = ((now - batch.rollout_logprobs) * batch.loss_mask).sum(-1, keepdim=True).exp()
    dropped = (ratio > 2.0).expand_as(gradient)
    assert (gradient[dropped] == 0).all()
    assert out.metrics["kept_share"][0] == (batch.loss_mask * ~dropped).sum()


@quick
@given(SEEDS)
def test_a_correction_with_several_updates_is_taken_from_before_the_step(seed):
    """The weight is old / rollout, whatever the updates have made of the present policy."""
    batch, now = case(seed, spread=0.3)
    tis = profile("tis", old_logprobs="trainer", mini_batches=4)
    weights = correction_of(batch.old_logprobs, batch, tis.algorithm).weights
    weighted = replace(batch, rollout_logprobs=batch.old_logprobs, advantages=batch.advantages * weights)
    want = descent(clipped_policy_loss, now, weighted)[1]
    torch.testing.assert_close(descent(policy_loss(tis), now, batch)[1], want)


@quick
@given(SEEDS, st.sampled_from(["rollout", "current", "trainer"]))
def test_a_trust_region_drops_tokens_and_changes_no_other(seed, old):
    batch, now = case(seed)
    bounded = profile(trust_region="token", trust_region_bound=0.4, old_logprobs=old)
    trainer = batch.old_logprobs if old == "trainer" else now
    inside = ((trainer - batch.rollout_logprobs).abs() <= 0.4) & (batch.loss_mask > 0)
    got = descent(policy_loss(bounded), now, batch)[1]
    free = descent(policy_loss(profile(old_logprobs=old)), now, batch)[1]
    assert torch.equal(got, free * inside)


@quick
@given(SEEDS, st.sampled_from(["k2", "k3", "k1+", "k3+"]), st.sampled_from(["token", "sequence", "constant"]))
def test_the_kl_term_adds_its_gradient_with_the_surrogates_normaliser(seed, kind, normaliser):
    batch, now = case(seed)
    alone = profile(normaliser=normaliser)
    both = profile(normaliser=normaliser, kl_coefficient=0.5, kl_kind=kind)
    out, gradient = descent(policy_loss(both), now, batch)
    _, surrogate = descent(policy_loss(alone), now, batch)
    difference = (now - batch.reference_logprobs) * batch.loss_mask
    slope = 1 - (-difference).exp() if kind == "k3" else difference
    share = {
        "token": batch.loss_mask / batch.loss_mask.sum(),
        "sequence": batch.loss_mask / batch.loss_mask.sum(-1, keepdim=True) / len(now),
        "constant": batch.loss_mask / (len(now) * alone.sampling.max_new_tokens),
    }[normaliser]
    torch.testing.assert_close(gradient - surrogate, 0.5 * slope * share, rtol=1e-4, atol=1e-6)
    value, tokens = out.metrics["reference_kl"]
    want = kl_estimate(now, batch.reference_logprobs, "k3") * batch.loss_mask
    torch.testing.assert_close(value / tokens, want.sum() / batch.loss_mask.sum())


@quick
@given(SEEDS, st.sampled_from(sorted(RECIPES)))
def test_the_mismatch_is_measured_against_the_rollout_with_every_recipe(seed, recipe):
    batch, now = case(seed)
    out, _ = descent(policy_loss(profile(recipe)), now, batch)
    want = mismatch(now, batch.rollout_logprobs, batch.loss_mask)
    mean = {name: (total / count).item() for name, (total, count) in out.metrics.items()}
    assert mean["generation_kl"] == pytest.approx(want.generation_kl_k3.item(), rel=1e-4, abs=1e-7)
    assert mean["token_multiplier"] == pytest.approx(want.token_multiplier.item(), rel=1e-5)


@quick
@given(SEEDS, st.sampled_from(sorted(RECIPES)), st.sampled_from([1, 2, 4]))
def test_micro_batches_of_every_recipe_add_up_to_the_whole(seed, recipe, size):
    batch, now = case(seed)
    loss = policy_loss(profile(recipe))
    whole = loss(now, batch)
    parts = [loss(now[i : i + size], batch.rows(slice(i, i + size))) for i in range(0, len(now), size)]
    torch.testing.assert_close(sum(p.total for p in parts), whole.total, rtol=1e-4, atol=1e-5)
    assert sum(p.normaliser for p in parts) == whole.normaliser
    for name, (total, count) in whole.metrics.items():
        if not name.endswith("_max"):
            torch.testing.assert_close(sum(p.metrics[name][0] for p in parts), total, rtol=1e-4, atol=1e-5)
            assert sum(p.metrics[name][1] for p in parts) == count


@pytest.mark.parametrize("recipe", sorted(RECIPES))
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30])
def test_what_is_masked_reaches_no_recipe(recipe, junk):
    batch, now = case(3)
    masked = batch.loss_mask == 0
    dirty = replace(
        batch,
        **{
            n: getattr(batch, n).masked_fill(masked, junk)
            for n in ("rollout_logprobs", "old_logprobs", "reference_logprobs")
        },
    )
    loss = policy_loss(profile(recipe))
    clean, want = descent(loss, now, batch)
    out, gradient = descent(loss, now.masked_fill(masked, junk), dirty)
    assert torch.equal(out.total, clean.total) and torch.equal(gradient, want)
    assert all(torch.equal(out.metrics[n][0], total) for n, (total, _) in clean.metrics.items())


@pytest.mark.parametrize(("recipe", "name"), [("gspo", "old_logprobs"), ("grpo", "reference_logprobs")])
def test_a_batch_that_nobody_rated_is_refused(recipe, name):
    batch, now = case(0)
    with pytest.raises(
        ValueError, match=f"needs batch.{name}, which nobody computed; call helpers.objective.learn"
    ):
        policy_loss(profile(recipe))(now, replace(batch, **{name: None}))


def test_no_correction_has_no_weights():
    batch, now = case(0)
    with pytest.raises(ValueError, match="nothing to combine"):
        correction_of(now, batch, profile().algorithm)


# --- the step ----------------------------------------------------------------------------------------------
class Recorder:
    """An engine whose policy moves by a fixed amount an update, and that remembers what it was asked."""

    def __init__(self, now):
        self.now, self.asked, self.batches = now, [], []

    def logprobs(self, batch):
        self.asked.append("logprobs")
        return self.now * batch.loss_mask

    def reference_logprobs(self, batch):
        self.asked.append("reference")
        return (self.now - 1) * batch.loss_mask

    def update(self, batch):
        self.asked.append("update")
        self.batches.append(batch)
        return {
            "loss": 1.0,
            "seconds": 1.0,
            "generation_kl": float(len(self.batches)),
            "learning_rate": float(len(self.batches)),
        }


PASSES = {
    "default": ["update"],
    "on_policy": ["update"],
    "tis": ["update"],
    "grpo": ["reference", "update"],
    "gspo": ["logprobs"] + 4 * ["update"],
    "verl_gpt_oss": ["logprobs", "reference"] + 2 * ["update"],
}


@pytest.mark.parametrize("recipe", PASSES)
def test_a_step_makes_the_passes_that_its_recipe_needs_and_no_more(recipe):
    batch, now = case(1)
    bare = replace(batch, old_logprobs=None, reference_logprobs=None)
    engine = Recorder(now)
    row = learn(engine, bare, profile(recipe))
    assert engine.asked == PASSES[recipe]
    updates = PASSES[recipe].count("update")
    assert row == {
        "loss": 1.0,
        "seconds": float(updates),
        "generation_kl": 1.0,
        "learning_rate": float(updates),
    }
    whole = torch.cat([b.tokens for b in engine.batches])
    assert torch.equal(whole, batch.tokens)
    if "logprobs" in PASSES[recipe]:
        old = torch.cat([b.old_logprobs for b in engine.batches])
        assert torch.equal(old, now * batch.loss_mask)


def test_mini_batches_keep_order_and_equal_size():
    batch, _ = case(2)
    parts = mini_batches(batch, profile("gspo"))
    assert [p.size[0] for p in parts] == [2, 2, 2, 2]
    assert torch.equal(torch.cat([p.group for p in parts]), batch.group)
    with pytest.raises(ValueError, match="6 episodes do not divide into 4 mini-batches"):
        mini_batches(batch.rows(slice(0, 6)), profile("gspo"))


@pytest.mark.parametrize("answer", [None, torch.zeros(4, 8)])
def test_one_ranks_share_is_not_taken_for_the_whole(answer):
    batch, now = case(2)
    engine = Recorder(now)
    engine.logprobs = lambda _: answer
    with pytest.raises(ValueError, match="rate a batch through GrpoCluster"):
        rated(engine, batch, profile("gspo"))


def test_a_summary_takes_the_largest_of_a_maximum():
    rows = [{"logprob_gap_max": 1.0, "correction_max": 1.0}, {"logprob_gap_max": 2.0, "correction_max": 2.0}]
    assert summarised(rows) == {
        "logprob_gap_max": 1.0,
        "correction_max": 2.0,
    }  # the mismatch is the first update's


# --- rewards -----------------------------------------------------------------------------------------------
def answers(lengths, group=0):
    return [Episode((1,), (2,) * n, (-1.0,) * n, "stop", group) for n in lengths]


def test_the_length_penalty_is_dapos_scaled():
    """Budget 24 tokens, the last 5 taxed (a fifth, rounded), at most half a reward."""
    shaped = shaped_rewards(answers([19, 20, 24]), [1.0, 1.0, 0.0], profile("dapo"))
    torch.testing.assert_close(shaped, torch.tensor([1.0, 1.0 - 0.5 / 5, -0.5]))
    assert shaped_rewards(answers([24]), [1.0], profile()).tolist() == [1.0]


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_advantages_are_those_of_the_recipe(recipe):
    rewards, p = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], profile(recipe)
    episodes = answers([3, 3, 3]) + answers([3, 3, 3], group=1)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    want = group_advantages(torch.tensor(rewards), groups, p.algorithm.advantage)
    assert torch.equal(step_advantages(episodes, rewards, p), want)


# --- cost ---------------------------------------------------------------------------------------------------
class CountedOperations(TorchDispatchMode):
    """How many operations torch is asked for inside the block."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations(work):
    with CountedOperations() as counted:
        work()
    return counted.count


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_number_of_operations_depends_on_neither_tokens_nor_answers(recipe):
    """No loop over tokens, episodes or groups, in either direction: only the tensors grow."""
    loss, found = policy_loss(profile(recipe)), set()
    for rows, tokens in ((4, 5), (4, 50), (40, 5)):
        shape = (rows, tokens)
        ids, one = torch.zeros(shape, dtype=torch.int64), torch.ones(shape)
        batch = Batch(ids, ids, ids, one, -one, one, torch.arange(rows) // 2, -one, -one)
        found.add(operations(lambda: descent(loss, -1.01 * one, batch)))
    assert len(found) == 1


def test_advantages_are_taken_for_all_groups_at_once():
    counts = set()
    for groups in (2, 20):
        labels = torch.arange(groups).repeat_interleave(4)
        rewards = torch.arange(4.0 * groups) % 3
        counts.add(operations(lambda: group_advantages(rewards, labels)))
    assert len(counts) == 1


def test_the_count_sees_a_loop():
    row = torch.ones(7)
    assert operations(lambda: [value * 2 for value in row]) > 7


def test_recorded_losses_cost_less_than_a_hundredth_of_an_update():
    """Judged on the recorded run (tests/bench/loss_overhead.py), since a busy machine is no failure.

    Of the update alone, for each recipe; what no recipe does, everything at once, for a whole step of over 1 s.
    """
    file = Path(__file__).parents[1] / "bench" / "recorded" / "loss_overhead.csv"
    with file.open() as lines:
        assert "commit " in next(lines)
        rows = list(csv.DictReader(lines))
    by_shape = {}
    for row in rows:
        by_shape.setdefault(row["shape"], {})[row["part"]] = float(row["share_of_update"])
    assert len(by_shape) == 2
    for parts in by_shape.values():
        everything = parts.pop("loss: all at once")
        dearest = max(share for part, share in parts.items() if part.startswith("loss: "))
        assert parts["advantages"] + dearest < 0.01 and everything < 0.02
