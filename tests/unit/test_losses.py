"""helpers.losses: hand-computed values, a plain-Python formulation, padding, micro-batches."""

from __future__ import annotations

import doctest
import itertools
import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers import losses as module
from helpers.collate import collate
from helpers.losses import (
    NORMALISERS,
    RATIOS,
    cispo_loss,
    clipped_objective,
    clipped_policy_loss,
    clipped_tokens,
    sequence_log_ratio,
    supervised_loss,
    token_log_ratio,
)
from helpers.records import Batch, Episode

quick = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 10_000)
MODES = list(itertools.product(RATIOS, NORMALISERS, (None, 3.0)))


def random_case(seed, rows=4, spread=0.5):
    """A ragged batch and logprobs near the rollout's, so that some tokens clip and some do not."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (rows,), generator=generator).tolist()
    logprobs = [(-3 * torch.rand(n, generator=generator)).tolist() for n in lengths]
    episodes = [
        Episode((1,) * (1 + i % 2), (2,) * len(row), tuple(row), "stop", i // 2)
        for i, row in enumerate(logprobs)
    ]
    batch = collate(episodes, torch.randn(rows, generator=generator), pad_id=0)
    noise = spread * torch.randn(batch.size, generator=generator)
    return batch, batch.rollout_logprobs + noise


def one_row(old, new, advantage):
    """A batch of one episode without padding, from probabilities."""
    shape = (1, len(old))
    ids, ones = torch.zeros(shape, dtype=torch.int64), torch.ones(shape)
    old = torch.tensor([old], dtype=torch.float64).log()
    new = torch.tensor([new], dtype=torch.float64).log().requires_grad_()
    batch = Batch(ids, ids, ids, ones, old, advantage * ones, torch.zeros(1, dtype=torch.int64))
    return batch, new


def options(ratio, normaliser, dual_clip):
    constant = 7.0 if normaliser == "constant" else None
    return dict(ratio=ratio, normaliser=normaliser, dual_clip=dual_clip, constant=constant)


def value_and_gradient(logprobs, batch, **keywords):
    logprobs = logprobs.detach().clone().requires_grad_()
    output = clipped_policy_loss(logprobs, batch, **keywords)
    return output, torch.autograd.grad(output.total, logprobs)[0]


def by_plain_python(logprobs, batch, ratio, normaliser, dual_clip, constant, low=0.2, high=0.28):
    """The paper's formula with loops and floats; returns (total, normaliser)."""
    sums, lengths = [], []
    columns = (logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask)
    for new, old, adv, mask in zip(*(c.tolist() for c in columns), strict=True):
        kept = [i for i, m in enumerate(mask) if m]
        ratios = {i: math.exp(new[i] - old[i]) for i in kept}
        if ratio == "sequence":
            geometric = math.prod(ratios.values()) ** (1 / len(kept))
            ratios = dict.fromkeys(kept, geometric)
        objective = 0.0
        for i in kept:
            term = min(ratios[i] * adv[i], min(max(ratios[i], 1 - low), 1 + high) * adv[i])
            objective += max(term, dual_clip * adv[i]) if dual_clip and adv[i] < 0 else term
        sums.append(objective)
        lengths.append(len(kept))
    if normaliser == "sequence":
        return -sum(s / n for s, n in zip(sums, lengths, strict=True)), len(sums)
    return -sum(sums), sum(lengths) if normaliser == "token" else len(sums) * constant


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_the_gradient_is_zero_exactly_where_the_clip_says(advantage, dual_clip):
    """Ratios 0.5, 0.8, 1, 1.28, 2, 4: a limit itself still learns, one step beyond it does not."""
    ratios = torch.tensor([0.5, 0.8, 0.81, 1.0, 1.27, 1.28, 2.0, 4.0])
    ratio = ratios.clone().requires_grad_()
    advantages = torch.full_like(ratios, advantage)
    objective = clipped_objective(ratio, advantages, dual_clip=dual_clip)
    gradient = torch.autograd.grad(objective.sum(), ratio)[0]
    if advantage > 0:
        stopped = ratios > 1.28
    else:
        stopped = (ratios < 0.8) | (ratios > (dual_clip or math.inf))
    assert torch.equal(gradient == 0, stopped)
    assert (gradient[~stopped] == advantage).all()
    assert torch.equal(clipped_tokens(ratios, advantages, dual_clip=dual_clip), stopped)


@quick
@given(SEEDS)
def test_clipped_tokens_are_the_ones_without_gradient(seed):
    batch, logprobs = random_case(seed, spread=1.0)
    output, gradient = value_and_gradient(logprobs, batch, dual_clip=2.0)
    without = ((gradient == 0) & (batch.loss_mask > 0)).sum()
    assert output.metrics["clip_fraction"][0] == without


def test_three_tokens_by_hand():
    batch, new = one_row([0.2, 0.4, 0.5], [0.4, 0.4, 0.125], advantage=1.0)  # 2, 1, 1/4
    output = clipped_policy_loss(new, batch)
    assert output.total.item() == pytest.approx(-(1.28 + 1 + 0.25))
    assert output.normaliser.item() == 3
    gradient = torch.autograd.grad(output.total, new)[0]
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1.0, -0.25]], dtype=torch.float64))
    log2 = math.log(2)
    expected = {
        "clip_fraction": 1 / 3,
        "ratio_mean": 3.25 / 3,
        "logprob_gap": 3 * log2 / 3,
        "approx_kl": ((2 - 1 - log2) + (0.25 - 1 + 2 * log2)) / 3,  # KL(rollout || trainer)
    }
    for name, mean in expected.items():
        total, count = output.metrics[name]
        assert (total / count).item() == pytest.approx(mean), name
        assert not total.requires_grad


def test_sequence_ratio_by_hand():
    """Ratios 8, 1, 1: geometric mean 2. Token t's gradient is -A * 2 / 3, and sums to -A ds/dx."""
    batch, new = one_row([0.1, 0.5, 0.5], [0.8, 0.5, 0.5], advantage=-1.0)
    output = clipped_policy_loss(new, batch, ratio="sequence", normaliser="sequence")
    assert output.loss.item() == pytest.approx(2.0)
    gradient = torch.autograd.grad(output.total, new)[0]
    torch.testing.assert_close(gradient, torch.full((1, 3), 2 / 3, dtype=torch.float64))


@quick
@given(SEEDS)
def test_straight_through_gradient_is_that_of_the_geometric_mean(seed):
    batch, logprobs = random_case(seed)
    mask, old = batch.loss_mask, batch.rollout_logprobs
    length = mask.sum(-1)

    def gradient(function):
        x = logprobs.clone().requires_grad_()
        return torch.autograd.grad(function(x), x)[0]

    def direct(x):
        return (((x - old) * mask).sum(-1) / length).exp().sum()

    def through_tokens(x):
        return ((sequence_log_ratio(x, old, mask).exp() * mask).sum(-1) / length).sum()

    torch.testing.assert_close(gradient(through_tokens), gradient(direct))


@pytest.mark.parametrize(("ratio", "normaliser", "dual_clip"), MODES)
@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_plain_python(ratio, normaliser, dual_clip, seed):
    batch, logprobs = random_case(seed)
    keywords = options(ratio, normaliser, dual_clip)
    output = clipped_policy_loss(logprobs, batch, **keywords)
    total, divisor = by_plain_python(logprobs, batch, **keywords)
    assert output.total.item() == pytest.approx(total, rel=1e-4, abs=1e-5)
    assert output.normaliser.item() == pytest.approx(divisor)
    assert output.loss.item() == pytest.approx(total / divisor, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("junk", [0.0, 1e9, -1e9, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("ratio", "normaliser", "dual_clip"), MODES)
def test_padding_reaches_neither_value_nor_gradient(ratio, normaliser, dual_clip, junk):
    batch, logprobs = random_case(1)
    keywords = options(ratio, normaliser, dual_clip)
    output, gradient = value_and_gradient(logprobs, batch, **keywords)
    padded = logprobs.masked_fill(batch.loss_mask == 0, junk)
    other, other_gradient = value_and_gradient(padded, batch, **keywords)
    assert torch.equal(output.total, other.total)
    assert torch.equal(gradient, other_gradient)
    assert (gradient[batch.loss_mask == 0] == 0).all()
    assert all(torch.equal(output.metrics[k][0], other.metrics[k][0]) for k in output.metrics)


@pytest.mark.parametrize(("ratio", "normaliser", "dual_clip"), MODES)
def test_a_longer_row_changes_nothing(ratio, normaliser, dual_clip):
    batch, logprobs = random_case(2)
    wide_batch = batch.map(lambda value: torch.nn.functional.pad(value, (0, 8)) if value.ndim == 2 else value)
    keywords = options(ratio, normaliser, dual_clip)
    output, gradient = value_and_gradient(logprobs, batch, **keywords)
    wide = torch.nn.functional.pad(logprobs, (0, 8), value=-5.0)
    other, wider = value_and_gradient(wide, wide_batch, **keywords)
    torch.testing.assert_close(output.loss, other.loss)
    torch.testing.assert_close(gradient, wider[:, :-8])


@quick
@given(SEEDS, st.sampled_from(MODES), st.integers(1, 4))
def test_micro_batches_add_up_to_the_whole(seed, mode, micro):
    batch, logprobs = random_case(seed)
    keywords = options(*mode)
    whole, gradient = value_and_gradient(logprobs, batch, **keywords)
    parts = [
        value_and_gradient(logprobs[s], batch.rows(s), **keywords)
        for s in (slice(i, i + micro) for i in range(0, 4, micro))
    ]
    torch.testing.assert_close(sum(o.total for o, _ in parts), whole.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(o.normaliser for o, _ in parts), whole.normaliser)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient)
    for name, (total, count) in whole.metrics.items():
        torch.testing.assert_close(sum(o.metrics[name][0] for o, _ in parts), total)
        torch.testing.assert_close(sum(o.metrics[name][1] for o, _ in parts), count)


@quick
@given(SEEDS, st.sampled_from(MODES), st.permutations(range(4)))
def test_the_order_of_episodes_does_not_matter(seed, mode, order):
    batch, logprobs = random_case(seed)
    order = torch.tensor(order)
    whole, gradient = value_and_gradient(logprobs, batch, **options(*mode))
    other, permuted = value_and_gradient(logprobs[order], batch.rows(order), **options(*mode))
    torch.testing.assert_close(whole.loss, other.loss)
    torch.testing.assert_close(gradient[order], permuted)


@quick
@given(SEEDS, st.sampled_from(RATIOS))
def test_on_policy_the_gradient_is_the_policy_gradient(seed, ratio):
    """Ratio 1 everywhere: nothing clips, and the gradient is -A at each token."""
    batch, _ = random_case(seed)
    output, gradient = value_and_gradient(batch.rollout_logprobs, batch, ratio=ratio)
    torch.testing.assert_close(gradient, -batch.advantages)
    assert output.metrics["clip_fraction"][0] == 0
    assert output.metrics["approx_kl"][0] == 0


@given(st.floats(-400, 0), st.floats(-400, 0), st.sampled_from([-1.0, 1.0]))
@example(0.0, -400.0, -1.0)
@example(-400.0, 0.0, 1.0)
@quick
def test_far_away_tokens_stay_finite(new, old, advantage):
    ids, ones = torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 3)
    batch = Batch(ids, ids, ids, ones, old * ones, advantage * ones, torch.zeros(1))
    for ratio in RATIOS:
        output, gradient = value_and_gradient(new * ones, batch, ratio=ratio)
        assert output.total.isfinite() and gradient.isfinite().all()
        assert all(total.isfinite() for total, _ in output.metrics.values())


def test_an_episode_without_tokens_is_no_sequence():
    batch, logprobs = random_case(3)
    mask = batch.loss_mask * torch.tensor([[1.0], [0.0], [1.0], [1.0]])
    empty = Batch(**(vars(batch) | {"loss_mask": mask}))
    output, gradient = value_and_gradient(logprobs, empty, normaliser="sequence", ratio="sequence")
    assert output.normaliser == 3 and gradient.isfinite().all()


def test_the_dual_clip_itself_is_not_beyond_the_dual_clip():
    assert not clipped_tokens(torch.tensor([3.0]), -torch.ones(1), dual_clip=3.0).any()


@pytest.mark.parametrize("log_ratio", [token_log_ratio, sequence_log_ratio])
def test_log_ratios_are_zero_where_masked(log_ratio):
    new, old, mask = (torch.tensor([row]) for row in ([-1.0, 5.0], [-2.0, 0.0], [1.0, 0.0]))
    assert log_ratio(new, old, mask).tolist() == [[1, 0]]


def test_supervised_loss_is_torchs_cross_entropy():
    batch, _ = random_case(5)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*batch.size, 10, generator=generator).requires_grad_()
    logprobs = logits.log_softmax(-1).gather(-1, batch.labels[..., None]).squeeze(-1)
    output = supervised_loss(logprobs, batch)
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected)
    got = torch.autograd.grad(output.loss, logits, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(expected, logits))
    assert output.metrics["cross_entropy"][0] == output.total


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"ratio": "episode"}, "unknown ratio 'episode'; use one of token, sequence"),
        ({"normaliser": "mean"}, "unknown normaliser 'mean'; use one of token, sequence, constant"),
        ({"normaliser": "constant"}, "constant is None; pass the token budget"),
        ({"normaliser": "constant", "constant": 0}, "constant is 0"),
        ({"constant": 8}, "constant=8 has no effect with normaliser='token'"),
        ({"clip_low": 1.5}, "clip_low=1.5 and clip_high=0.28 give no range"),
        ({"clip_high": -0.1}, "give no range around a ratio of 1"),
        ({"dual_clip": 1.0}, "dual_clip=1.0 would stop unchanged tokens"),
    ],
)
def test_messages(keywords, message):
    batch, logprobs = random_case(0)
    with pytest.raises(ValueError, match=message):
        clipped_policy_loss(logprobs, batch, **keywords)


@pytest.mark.parametrize("loss", [clipped_policy_loss, supervised_loss])
def test_a_wrong_shape_says_what_to_pass(loss):
    batch, logprobs = random_case(0)
    with pytest.raises(ValueError, match="pass the logprob of batch.labels at every position"):
        loss(logprobs[:, 1:], batch)


def cispo_value_and_gradient(logprobs, batch, **keywords):
    logprobs = logprobs.detach().clone().requires_grad_()
    output = cispo_loss(logprobs, batch, **keywords)
    return output, torch.autograd.grad(output.total, logprobs)[0]


def cispo_by_plain_python(logprobs, batch, low, high, normaliser):
    """(total, weights): the loss with loops and floats, weights {(row, position): clipped weight}."""
    total, weights = 0.0, {}
    columns = (logprobs, batch.rollout_logprobs, batch.advantages, batch.loss_mask)
    for row, (new, old, adv, mask) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        kept = [i for i, m in enumerate(mask) if m]
        for i in kept:
            weights[row, i] = min(max(math.exp(new[i] - old[i]), 1 - low), 1 + high)
            share = len(kept) if normaliser == "sequence" else 1
            total -= weights[row, i] * adv[i] * new[i] / share
    return total, weights


@quick
@given(SEEDS, st.sampled_from(NORMALISERS), st.sampled_from([(1.0, 4.0), (0.2, 0.28), (0.0, 0.0)]))
def test_cispo_agrees_with_plain_python(seed, normaliser, clips):
    batch, logprobs = random_case(seed, spread=1.0)
    constant = 7.0 if normaliser == "constant" else None
    output = cispo_loss(logprobs, batch, *clips, normaliser=normaliser, constant=constant)
    total, weights = cispo_by_plain_python(logprobs, batch, *clips, normaliser)
    assert output.total.item() == pytest.approx(total, rel=1e-4, abs=1e-5)
    divisors = {"token": len(weights), "sequence": 4, "constant": 4 * 7.0}
    assert output.normaliser.item() == divisors[normaliser]


@quick
@given(SEEDS)
def test_cispos_gradient_is_the_clipped_weight_also_where_clipped(seed):
    batch, logprobs = random_case(seed, spread=1.0)
    output, gradient = cispo_value_and_gradient(logprobs, batch, clip_low=0.2, clip_high=0.28)
    _, weights = cispo_by_plain_python(logprobs, batch, 0.2, 0.28, "token")
    expected = torch.zeros(batch.size)
    for where, weight in weights.items():
        expected[where] = -weight * batch.advantages[where]
    torch.testing.assert_close(gradient, expected)
    ratio = (logprobs - batch.rollout_logprobs).exp()
    held = ((ratio < 0.8) | (ratio > 1.28)) & (batch.loss_mask > 0)
    assert output.metrics["clip_fraction"][0] == held.sum()
    assert (gradient[held] != 0).all()


def test_cispo_learns_where_ppo_stops():
    """Ratio 4 with advantage 1: above PPO's limit and below CISPO's; at 16 CISPO holds the weight at 5."""
    batch, new = one_row([0.2, 0.05], [0.8, 0.8], advantage=1.0)
    assert not torch.autograd.grad(clipped_policy_loss(new, batch).total, new)[0].any()
    gradient = torch.autograd.grad(cispo_loss(new, batch).total, new)[0]
    torch.testing.assert_close(gradient, torch.tensor([[-4.0, -5.0]], dtype=torch.float64))


@quick
@given(SEEDS)
def test_cispo_on_policy_is_the_policy_gradient(seed):
    batch, _ = random_case(seed)
    output, gradient = cispo_value_and_gradient(batch.rollout_logprobs, batch)
    torch.testing.assert_close(gradient, -batch.advantages)
    assert output.metrics["clip_fraction"][0] == 0


@pytest.mark.parametrize("junk", [0.0, 1e9, -1e9, math.inf, -math.inf, math.nan])
def test_cispo_padding_reaches_neither_value_nor_gradient(junk):
    batch, logprobs = random_case(1)
    output, gradient = cispo_value_and_gradient(logprobs, batch)
    padded = logprobs.masked_fill(batch.loss_mask == 0, junk)
    other, other_gradient = cispo_value_and_gradient(padded, batch)
    assert torch.equal(output.total, other.total) and torch.equal(gradient, other_gradient)
    assert all(torch.equal(output.metrics[k][0], other.metrics[k][0]) for k in output.metrics)


@quick
@given(SEEDS, st.integers(1, 4))
def test_cispo_micro_batches_add_up_to_the_whole(seed, micro):
    batch, logprobs = random_case(seed)
    whole = cispo_loss(logprobs, batch)
    slices = [slice(i, i + micro) for i in range(0, 4, micro)]
    parts = [cispo_loss(logprobs[s], batch.rows(s)) for s in slices]
    torch.testing.assert_close(sum(o.total for o in parts), whole.total, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(o.normaliser for o in parts), whole.normaliser)


def test_cispo_has_the_metrics_of_the_clipped_loss_without_gradient():
    batch, logprobs = random_case(2)
    output = cispo_loss(logprobs.requires_grad_(), batch)
    assert output.metrics.keys() == clipped_policy_loss(logprobs, batch).metrics.keys()
    assert not any(total.requires_grad for total, _ in output.metrics.values())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"normaliser": "mean"}, "unknown normaliser 'mean'"),
        ({"normaliser": "constant"}, "constant is None; pass the token budget"),
        ({"constant": 8}, "constant=8 has no effect"),
        ({"clip_low": 1.5}, "clip_low=1.5 and clip_high=4.0 give no range"),
        ({"clip_high": -0.1}, "give no range around a ratio of 1"),
    ],
)
def test_cispo_messages(keywords, message):
    batch, logprobs = random_case(0)
    with pytest.raises(ValueError, match=message):
        cispo_loss(logprobs, batch, **keywords)
    with pytest.raises(ValueError, match="pass the logprob of batch.labels at every position"):
        cispo_loss(logprobs[:, 1:], batch)
