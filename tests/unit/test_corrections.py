"""helpers.corrections: bounds, a plain-Python formulation, padding, no gradient, use in the loss."""

from __future__ import annotations

import doctest
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import corrections as module
from helpers.corrections import (
    LEVELS,
    RULES,
    combine,
    corrected_batch,
    importance_ratios,
    masked_importance_sampling,
    mismatch,
    truncated_importance_sampling,
    trust_region_mask,
)
from helpers.losses import NORMALISERS, cispo_loss, clipped_policy_loss
from helpers.records import Batch

quick = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 10_000)
JUNK = (0.0, 1e9, math.inf, -math.inf, math.nan)
EVERY = [
    *((truncated_importance_sampling, {"level": level}) for level in LEVELS),
    *((masked_importance_sampling, {"level": level}) for level in LEVELS),
    *((trust_region_mask, {"bound": 0.6, "rule": rule}) for rule in RULES),
]


def random_case(seed, rows=4, columns=7, spread=0.6):
    """(trainer, rollout, mask) with ragged masks; the last row has no trained token."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, columns, generator=generator)
    trainer = rollout + spread * torch.randn(rows, columns, generator=generator)
    mask = (torch.rand(rows, columns, generator=generator) < 0.7).float()
    mask[:, 0] = 1.0
    mask[-1] = 0.0
    return trainer, rollout, mask


def rows_of(trainer, rollout, mask):
    """One {position: d} an episode, in plain floats."""
    columns = (trainer.tolist(), rollout.tolist(), mask.tolist())
    return [
        {i: new[i] - old[i] for i, m in enumerate(row) if m} for new, old, row in zip(*columns, strict=True)
    ]


def ratios_by_hand(gaps, level):
    """{position: ratio} of one episode."""
    product = math.prod(math.exp(d) for d in gaps.values())
    if level == "token":
        return {i: math.exp(d) for i, d in gaps.items()}
    value = product if level == "sequence" else product ** (1 / max(len(gaps), 1))
    return dict.fromkeys(gaps, value)


def weights_by_hand(case, weigh):
    """[B, S] nested lists from weigh(gaps of an episode) -> {position: weight}."""
    shape = case[2].shape
    rows = [weigh(gaps) for gaps in rows_of(*case)]
    return torch.tensor([[row.get(i, 0.0) for i in range(shape[1])] for row in rows])


def same(first, second):
    return all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in type(first).__dataclass_fields__
    )


def test_doctests():
    assert doctest.testmod(module).failed == 0


@quick
@given(SEEDS, st.sampled_from(LEVELS))
def test_ratios_agree_with_plain_python(seed, level):
    case = random_case(seed)
    expected = weights_by_hand(case, lambda gaps: ratios_by_hand(gaps, level))
    torch.testing.assert_close(importance_ratios(*case, level), expected)


@quick
@given(SEEDS, st.sampled_from(LEVELS), st.floats(0.3, 4))
def test_tis_agrees_with_plain_python_and_keeps_its_cap(seed, level, cap):
    case = random_case(seed)
    got = truncated_importance_sampling(*case, cap, level)
    expected = weights_by_hand(
        case, lambda gaps: {i: min(w, cap) for i, w in ratios_by_hand(gaps, level).items()}
    )
    torch.testing.assert_close(got.weights, expected)
    assert (got.weights <= cap).all() and (got.weights >= 0).all()
    assert got.kept_share == 1


@quick
@given(SEEDS, st.sampled_from(LEVELS), st.floats(0, 1), st.floats(1, 3))
def test_mis_agrees_with_plain_python(seed, level, low, high):
    case = random_case(seed)
    by_row = [ratios_by_hand(gaps, level) for gaps in rows_of(*case)]
    every = [w for row in by_row for w in row.values()]
    assume(all(abs(w - limit) > 1e-5 for w in every for limit in (low, high)))
    got = masked_importance_sampling(*case, low, high, level)
    expected = weights_by_hand(
        case,
        lambda gaps: {i: w if low <= w <= high else 0.0 for i, w in ratios_by_hand(gaps, level).items()},
    )
    torch.testing.assert_close(got.weights, expected)
    inside = sum(low <= w <= high for w in every)
    assert got.kept_share.item() == pytest.approx(inside / len(every))


def test_the_limits_themselves_are_inside():
    logprobs, mask = torch.full((1, 3), -1.0), torch.ones(1, 3)
    assert torch.equal(masked_importance_sampling(logprobs, logprobs, mask, 1.0, 2.0).weights, mask)
    assert torch.equal(masked_importance_sampling(logprobs, logprobs, mask, 0.5, 1.0).weights, mask)


def region_by_hand(gaps, bound, rule):
    if rule == "token":
        return {i: float(abs(d) <= bound) for i, d in gaps.items()}
    size = max((abs(d) for d in gaps.values()), default=0.0)
    if rule == "sequence_kl":  # k3 of KL(rollout || trainer) is w - 1 - log w
        size = sum(math.exp(d) - 1 - d for d in gaps.values()) / max(len(gaps), 1)
    return dict.fromkeys(gaps, float(size <= bound))


@quick
@given(SEEDS, st.sampled_from(RULES), st.floats(0.05, 1.5))
def test_trust_region_agrees_with_plain_python(seed, rule, bound):
    case = random_case(seed)
    got = trust_region_mask(*case, bound, rule)
    expected = weights_by_hand(case, lambda gaps: region_by_hand(gaps, bound, rule))
    assert torch.equal(got.weights, expected)
    assert got.kept_share.item() == pytest.approx((expected.sum() / case[2].sum()).item())


@pytest.mark.parametrize(
    ("rule", "kept"),
    [("token", [[1, 0, 1], [1, 1, 1]]), ("any_token", [[0, 0, 0], [1, 1, 1]])],
)
def test_one_token_outside_costs_itself_or_its_whole_episode(rule, kept):
    trainer = torch.tensor([[-1.0, -3.0, -1.0], [-1.0, -1.5, -1.0]])
    got = trust_region_mask(trainer, torch.full((2, 3), -1.0), torch.ones(2, 3), 0.5, rule)
    assert got.weights.tolist() == kept  # exactly at the bound is inside


@pytest.mark.parametrize("sign", [1, -1])
def test_the_trust_region_looks_at_both_sides(sign):
    trainer = torch.tensor([[-1.0 + sign * 0.7, -1.0]])
    got = trust_region_mask(trainer, torch.full((1, 2), -1.0), torch.ones(1, 2), 0.6)
    assert got.weights.tolist() == [[0, 1]]


@pytest.mark.parametrize(("correct", "keywords"), EVERY)
@pytest.mark.parametrize("seed", range(3))
def test_equal_policies_change_nothing(correct, keywords, seed):
    _, rollout, mask = random_case(seed)
    got = correct(rollout, rollout, mask, **keywords)
    assert torch.equal(got.weights, mask)
    assert got.kept_share == 1 and got.largest_weight == 1
    assert got.effective_sample_size == mask.sum()


@quick
@given(SEEDS, st.sampled_from(LEVELS))
def test_mis_is_tis_where_nothing_is_outside(seed, level):
    case = random_case(seed, spread=0.05)  # ratios of at most 7 tokens stay within 1/8 and 8
    mis = masked_importance_sampling(*case, 1 / 8, 8.0, level)
    assert same(mis, truncated_importance_sampling(*case, 8.0, level))


@quick
@given(
    SEEDS,
    st.sampled_from(
        [item for item in EVERY if item[1].get("level") != "token" and item[1].get("rule") != "token"]
    ),
)
def test_a_sequences_weight_is_constant_over_its_tokens(seed, choice):
    correct, keywords = choice
    case = random_case(seed)
    got = correct(*case, **keywords)
    for weights, mask in zip(got.weights, case[2], strict=True):
        assert len(set(weights[mask > 0].tolist())) <= 1
        assert (weights[mask == 0] == 0).all()


@quick
@given(SEEDS)
def test_a_geometric_mean_does_not_depend_on_the_length(seed):
    """The answer twice over: the geometric mean stays, the product is squared."""
    trainer, rollout, mask = random_case(seed)
    once = [importance_ratios(trainer, rollout, mask, level) for level in ("geometric", "sequence")]
    doubled = [x.repeat(1, 2) for x in (trainer, rollout, mask)]
    twice = [importance_ratios(*doubled, level)[:, :7] for level in ("geometric", "sequence")]
    torch.testing.assert_close(twice[0], once[0])
    torch.testing.assert_close(twice[1], once[1].square())


@pytest.mark.parametrize(("correct", "keywords"), EVERY)
def test_corrections_carry_no_gradient(correct, keywords):
    trainer, rollout, mask = random_case(0)
    got = correct(trainer.requires_grad_(), rollout.requires_grad_(), mask, **keywords)
    assert not any(getattr(got, name).requires_grad for name in type(got).__dataclass_fields__)
    assert got.weights.dtype == torch.float32


@pytest.mark.parametrize(("correct", "keywords"), EVERY)
@pytest.mark.parametrize("junk", JUNK)
def test_what_is_masked_never_leaks(correct, keywords, junk):
    trainer, rollout, mask = random_case(1)
    clean = correct(trainer, rollout, mask, **keywords)
    dirty = [x.masked_fill(mask == 0, junk) for x in (trainer, rollout)]
    assert same(correct(*dirty, mask, **keywords), clean)
    assert same(correct(dirty[0], rollout, mask, **keywords), clean)
    assert same(mismatch(*dirty, mask), mismatch(trainer, rollout, mask))


@pytest.mark.parametrize(("correct", "keywords"), EVERY)
def test_a_batch_without_trained_tokens_gives_zeros(correct, keywords):
    trainer, rollout, mask = random_case(2)
    got = correct(trainer, rollout, torch.zeros_like(mask), **keywords)
    assert not got.weights.any()
    assert [got.kept_share, got.largest_weight, got.effective_sample_size] == [0, 0, 0]
    gap = mismatch(trainer, rollout, torch.zeros_like(mask))
    assert [getattr(gap, name).item() for name in type(gap).__dataclass_fields__] == [0, 0, 0, 0]


def test_everything_dropped_has_no_effective_sample():
    got = masked_importance_sampling(torch.zeros(1, 3), torch.full((1, 3), -3.0), torch.ones(1, 3))
    assert [got.kept_share, got.largest_weight, got.effective_sample_size] == [0, 0, 0]


@given(st.floats(-400, 0), st.floats(-400, 0), st.sampled_from(LEVELS))
@quick
def test_far_away_tokens_stay_finite(new, old, level):
    case = (torch.full((1, 3), new), torch.full((1, 3), old), torch.ones(1, 3))
    assert importance_ratios(*case, level).isfinite().all()
    gap = mismatch(*case)
    assert all(getattr(gap, name).isfinite() for name in type(gap).__dataclass_fields__)


@quick
@given(SEEDS)
def test_the_effective_sample_is_kishs_and_at_most_the_kept_tokens(seed):
    case = random_case(seed, spread=1.5)
    got = masked_importance_sampling(*case, 0.2, 5.0)
    weights = [w for w in got.weights.flatten().tolist() if w > 0]
    assume(weights)
    kish = sum(weights) ** 2 / sum(w * w for w in weights)
    assert got.effective_sample_size.item() == pytest.approx(kish, rel=1e-5)
    assert 1 - 1e-5 <= kish <= len(weights) * (1 + 1e-6)
    assert got.largest_weight.item() == max(weights)


@quick
@given(SEEDS)
def test_mismatch_agrees_with_plain_python(seed):
    case = random_case(seed)
    gaps = [d for row in rows_of(*case) for d in row.values()]  # trainer - rollout
    got, n = mismatch(*case), len(gaps)
    assert got.tokens == n
    assert got.generation_kl_k1.item() == pytest.approx(-sum(gaps) / n, rel=1e-5, abs=1e-6)
    assert got.generation_kl_k3.item() == pytest.approx(sum(math.exp(d) - 1 - d for d in gaps) / n, rel=1e-5)
    assert got.token_multiplier.item() == pytest.approx(sum(math.exp(abs(d)) for d in gaps) / n, rel=1e-5)


def test_mismatch_estimates_kl_of_the_rollout_from_the_trainer():
    """On a whole categorical, each outcome as often as the rollout draws it, k1 and k3 are exact."""
    rollout, trainer = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.25, 0.5])
    drawn = torch.tensor([[0, 0, 1, 2]])
    got = mismatch(trainer.log()[drawn], rollout.log()[drawn], torch.ones(1, 4))
    true = (rollout * (rollout / trainer).log()).sum()
    torch.testing.assert_close(got.generation_kl_k1, true)
    torch.testing.assert_close(got.generation_kl_k3, true)


def test_mismatch_of_equal_policies_is_none():
    _, rollout, mask = random_case(3)
    got = mismatch(rollout, rollout, mask)
    assert [got.generation_kl_k1, got.generation_kl_k3, got.token_multiplier] == [0, 0, 1]


def test_mismatch_carries_no_gradient():
    trainer, rollout, mask = random_case(3)
    got = mismatch(trainer.requires_grad_(), rollout, mask)
    assert not any(getattr(got, name).requires_grad for name in type(got).__dataclass_fields__)


@quick
@given(SEEDS)
def test_combine_multiplies(seed):
    case = random_case(seed)
    region, tis = trust_region_mask(*case, 0.6, "any_token"), truncated_importance_sampling(*case)
    got = combine(case[2], region, tis)
    assert torch.equal(got.weights, region.weights * tis.weights)
    assert got.kept_share == region.kept_share
    assert same(combine(case[2], tis), tis)


def batch_of(rollout, mask, seed):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(len(mask), 1, generator=generator) * mask
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return Batch(ids, ids, ids, mask, rollout * mask, advantages, torch.arange(len(mask)))


@quick
@given(SEEDS, st.sampled_from(NORMALISERS), st.sampled_from([clipped_policy_loss, cispo_loss]))
def test_a_corrected_loss_has_the_weighted_policy_gradient(seed, normaliser, loss):
    """Before the first update current = trainer: the gradient is weight * A, not weight^2 * A."""
    trainer, rollout, mask = random_case(seed)
    batch = batch_of(rollout, mask, seed)
    tis = truncated_importance_sampling(trainer, rollout, mask)
    corrected = corrected_batch(batch, trainer, tis)
    current = trainer.clone().requires_grad_()
    constant = 5.0 if normaliser == "constant" else None
    output = loss(current, corrected, normaliser=normaliser, constant=constant)
    gradient = torch.autograd.grad(output.total, current)[0]
    length = mask.sum(-1, keepdim=True).clamp(min=1) if normaliser == "sequence" else 1
    torch.testing.assert_close(gradient, -tis.weights * batch.advantages / length)


@quick
@given(SEEDS)
def test_a_weight_on_the_advantage_is_a_weight_on_the_token(seed):
    """Also where tokens clip, and with a dual clip: the objective scales with the advantage."""
    trainer, rollout, mask = random_case(seed)
    batch = batch_of(rollout, mask, seed)
    tis = truncated_importance_sampling(trainer, rollout, mask)
    current = trainer + 0.5 * torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))

    def gradient(of):
        leaf = current.clone().requires_grad_()
        return torch.autograd.grad(clipped_policy_loss(leaf, of, dual_clip=2.0).total, leaf)[0]

    plain = corrected_batch(batch, trainer, trust_region_mask(trainer, rollout, mask, 100.0))
    weighted = corrected_batch(batch, trainer, tis)
    torch.testing.assert_close(gradient(weighted), tis.weights * gradient(plain))


@pytest.mark.parametrize("junk", JUNK)
def test_a_corrected_batch_is_clean_where_masked_and_detached(junk):
    trainer, rollout, mask = random_case(4)
    tis = truncated_importance_sampling(trainer, rollout, mask)
    dirty = trainer.masked_fill(mask == 0, junk).requires_grad_()
    got = corrected_batch(batch_of(rollout, mask, 4), dirty, tis)
    assert not got.rollout_logprobs.requires_grad
    assert torch.equal(got.rollout_logprobs, trainer * mask)
    assert got.advantages.isfinite().all() and not got.advantages[mask == 0].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("who", ["trainer", "rollout"])
def test_a_trained_logprob_that_is_not_finite_is_an_error(bad, who):
    values = {"trainer": torch.zeros(2, 3), "rollout": torch.zeros(2, 3)}
    values[who][1, 2] = bad
    message = f"the {who}'s logprob at row 1, position 2 is {bad} though the loss mask is 1"
    with pytest.raises(ValueError, match=message):
        trust_region_mask(values["trainer"], values["rollout"], torch.ones(2, 3), 1.0)
    with pytest.raises(ValueError, match=message):
        mismatch(values["trainer"], values["rollout"], torch.ones(2, 3))


ZEROS = torch.zeros(1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: importance_ratios(ZEROS, ZEROS, ZEROS, "episode"),
            "unknown level 'episode'; use one of token, sequence, geometric",
        ),
        (
            lambda: trust_region_mask(ZEROS, ZEROS, ZEROS, 1.0, "max"),
            "unknown rule 'max'; use one of token, any_token, sequence_kl",
        ),
        (lambda: truncated_importance_sampling(ZEROS, ZEROS, ZEROS, 0.0), "cap=0.0 leaves no weight above 0"),
        (lambda: truncated_importance_sampling(ZEROS, ZEROS, ZEROS, math.nan), "cap=nan"),
        (
            lambda: masked_importance_sampling(ZEROS, ZEROS, ZEROS, 2.0, 0.5),
            "low=2.0 and high=0.5 are no range",
        ),
        (lambda: masked_importance_sampling(ZEROS, ZEROS, ZEROS, -1.0, 2.0), "low=-1.0 and high=2.0"),
        (lambda: masked_importance_sampling(ZEROS, ZEROS, ZEROS, 0.0, 0.0), "low=0.0 and high=0.0"),
        (lambda: trust_region_mask(ZEROS, ZEROS, ZEROS, -0.1), "bound=-0.1 keeps nothing"),
        (
            lambda: mismatch(ZEROS, torch.zeros(1, 3), ZEROS),
            r"rollout_logprobs have shape \(1, 3\) and the mask",
        ),
        (lambda: mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2)), r"both must be \[B, S\]"),
        (lambda: mismatch(*[torch.zeros(0, 2)] * 3), "with at least one token"),
        (lambda: combine(ZEROS), "nothing to combine; pass at least one correction"),
        (
            lambda: corrected_batch(
                batch_of(ZEROS, torch.ones(1, 2), 0),
                torch.zeros(1, 3),
                truncated_importance_sampling(ZEROS, ZEROS, torch.ones(1, 2)),
            ),
            r"trainer_logprobs have shape \(1, 3\)",
        ),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
