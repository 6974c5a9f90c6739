"""helpers.kl: each estimator's exact expected value and gradient on a known categorical."""

from __future__ import annotations

import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import kl as module
from helpers.kl import KINDS, kl_estimate, straight_through_kl

quick = settings(max_examples=60, deadline=None)
logit_rows = st.lists(st.floats(-2, 2), min_size=3, max_size=5)
POLICY_LOGITS = torch.tensor([0.7, -0.4, 0.1, 1.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def expected_estimate(logits, reference, kind):
    """Exact expectation over the policy's own samples; the samples' weights carry no gradient."""
    logprobs = logits.log_softmax(-1)
    return (logprobs.exp().detach() * kl_estimate(logprobs, reference.log(), kind)).sum()


def divergence(p, q):
    return (p * (p.log() - q.log())).sum()


def gradient_at_policy(function):
    logits = POLICY_LOGITS.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_have_the_right_expected_value(kind):
    true = divergence(POLICY_LOGITS.softmax(-1), REFERENCE)
    torch.testing.assert_close(expected_estimate(POLICY_LOGITS, REFERENCE, kind), true)


def test_k2_has_another_expected_value():
    true = divergence(POLICY_LOGITS.softmax(-1), REFERENCE)
    assert (expected_estimate(POLICY_LOGITS, REFERENCE, "k2") - true).abs() > 0.01


def test_k2_has_the_gradient_of_kl_policy_reference():
    got = gradient_at_policy(lambda x: expected_estimate(x, REFERENCE, "k2"))
    true = gradient_at_policy(lambda x: divergence(x.softmax(-1), REFERENCE))
    torch.testing.assert_close(got, true)


def test_k1_has_no_expected_gradient():
    got = gradient_at_policy(lambda x: expected_estimate(x, REFERENCE, "k1"))
    torch.testing.assert_close(got, torch.zeros_like(got))


def test_k3_has_the_gradient_of_kl_reference_policy():
    got = gradient_at_policy(lambda x: expected_estimate(x, REFERENCE, "k3"))
    other = gradient_at_policy(lambda x: divergence(REFERENCE, x.softmax(-1)))
    wanted = gradient_at_policy(lambda x: divergence(x.softmax(-1), REFERENCE))
    torch.testing.assert_close(got, other)
    assert (got - wanted).abs().max() > 0.01


def test_the_straight_through_form_joins_value_and_gradient():
    def both(logits):
        logprobs = logits.log_softmax(-1)
        k2, k3 = (kl_estimate(logprobs, REFERENCE.log(), kind) for kind in ("k2", "k3"))
        return (logprobs.exp().detach() * (k2 - k2.detach() + k3.detach())).sum()

    true = gradient_at_policy(lambda x: divergence(x.softmax(-1), REFERENCE))
    value = expected_estimate(POLICY_LOGITS, REFERENCE, "k3")
    torch.testing.assert_close(both(POLICY_LOGITS), value)
    torch.testing.assert_close(gradient_at_policy(both), true)


@quick
@given(logit_rows, st.data())
def test_expected_values_on_any_categorical(row, data):
    logits = torch.tensor(row, dtype=torch.float64)
    other = data.draw(st.lists(st.floats(-2, 2), min_size=len(row), max_size=len(row)))
    reference = torch.tensor(other, dtype=torch.float64).softmax(-1)
    true = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(reference)
    )
    for kind in ("k1", "k3"):
        torch.testing.assert_close(expected_estimate(logits, reference, kind), true)


@quick
@given(st.lists(st.floats(-30, 0), min_size=1, max_size=4), st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_all_are_finite(row, reference):
    logprobs = torch.tensor([row])
    others = torch.full_like(logprobs, reference)
    estimates = {kind: kl_estimate(logprobs, others, kind) for kind in KINDS}
    assert all(e.isfinite().all() and e.shape == logprobs.shape for e in estimates.values())
    assert (estimates["k2"] >= 0).all() and (estimates["k3"] >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_logprobs_give_zero(kind):
    logprobs = torch.tensor([[-0.1, -3.0, -12.0]])
    assert kl_estimate(logprobs, logprobs, kind).tolist() == [[0.0, 0.0, 0.0]]


def test_k3_stays_finite_in_value_and_gradient_where_the_policy_excludes_a_token():
    logprobs = torch.tensor([[-300.0]], requires_grad=True)
    value = kl_estimate(logprobs, torch.tensor([[-1.0]]), "k3")
    assert value.isfinite().all()
    assert torch.autograd.grad(value.sum(), logprobs)[0].isfinite().all()


def test_messages():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; use one of k1, k2, k3"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 2), "k4")
    with pytest.raises(ValueError, match=r"shape \(1, 2\) and reference logprobs \(1, 3\)"):
        kl_estimate(torch.zeros(1, 2), torch.zeros(1, 3), "k1")


@quick
@given(st.lists(st.floats(-15, 0), min_size=1, max_size=4), st.floats(-15, 0), st.sampled_from(KINDS))
def test_straight_through_has_the_value_of_its_kind_and_the_gradient_of_k2(row, reference, kind):
    logprobs = torch.tensor([row], dtype=torch.float64, requires_grad=True)
    others = torch.full_like(logprobs, reference)
    estimate = straight_through_kl(logprobs, others, kind)
    assert torch.equal(estimate, kl_estimate(logprobs, others, kind))
    gradient = torch.autograd.grad(estimate.sum(), logprobs)[0]
    assert torch.equal(gradient, (logprobs - others).detach())  # of d^2 / 2


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_straight_through_descends_the_kl_that_it_reports(kind):
    """k1 and k3 alone have the value, but not this gradient (tests above)."""

    def expected(logits):
        logprobs = logits.log_softmax(-1)
        weights = logprobs.exp().detach()
        return (weights * straight_through_kl(logprobs, REFERENCE.log(), kind)).sum()

    true = divergence(POLICY_LOGITS.softmax(-1), REFERENCE)
    torch.testing.assert_close(expected(POLICY_LOGITS), true)
    wanted = gradient_at_policy(lambda x: divergence(x.softmax(-1), REFERENCE))
    torch.testing.assert_close(gradient_at_policy(expected), wanted)


def test_straight_through_gives_the_reference_no_gradient_of_its_own_kind():
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-3.0]], requires_grad=True)
    value = straight_through_kl(logprobs, reference).sum()
    assert torch.autograd.grad(value, reference)[0].item() == -2.0  # k2's: -(d), not k3's exp(-d) - 1


def test_straight_through_messages():
    with pytest.raises(ValueError, match="unknown KL estimator 'k3\\+'; use one of k1, k2, k3"):
        straight_through_kl(torch.zeros(1, 2), torch.zeros(1, 2), "k3+")
    with pytest.raises(ValueError, match=r"shape \(1, 2\) and reference logprobs \(1, 3\)"):
        straight_through_kl(torch.zeros(1, 2), torch.zeros(1, 3))
