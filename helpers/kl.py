"""Per-token estimates of a KL divergence from the logprobs of sampled tokens.

Source: J. Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("k1", "k2", "k3")
LOG_RATIO_LIMIT = 20.0  # exp(20) is 4.9e8: far outside any trust region, still finite in float32


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """Estimate of KL(policy || reference) at each token that the policy sampled.

    logprobs, reference_logprobs: [B, S], log-probability of the same tokens under the policy
        that sampled them and under the reference (natural log).
    Returns [B, S] in nats. Nothing is masked: multiply by the loss mask, and fill padding
    with finite numbers first (0 * inf is not a number).

    With d = logprobs - reference_logprobs:
        k1 = d                     expected value right, high spread, negative on some tokens
        k2 = d^2 / 2               expected value biased, low spread, never negative
        k3 = exp(-d) - 1 + d       expected value right, low spread near the reference, never
                                   negative
    Value is not gradient. Averaged over the policy's own samples, the gradient that autograd
    takes through each (the samples held fixed) is
        k1: 0                             E[grad log p] vanishes: as a loss it does nothing
        k2: the gradient of KL(policy || reference), what a KL penalty means
        k3: the gradient of KL(reference || policy), the other direction
    So log k3 or k1, and be aware which gradient you add when one of them is a loss term.
    GRPO (arXiv 2402.03300) adds k3. A straight-through form, k2 - k2.detach() + k3.detach(),
    has the value of k3 and the gradient of k2 (verl's "k3+").
    k3's exponent is held within +-20 so that a token that the policy almost excludes stays
    finite.
    Raises ValueError: unknown kind, different shapes.

    Three tokens; the policy makes the first half as likely as the reference does, the second
    equally likely, the third twice as likely.
    >>> policy = torch.tensor([[0.25, 0.5, 0.5]]).log()
    >>> reference = torch.tensor([[0.5, 0.5, 0.25]]).log()
    >>> kl_estimate(policy, reference, "k1")
    tensor([[-0.6931,  0.0000,  0.6931]])
    >>> kl_estimate(policy, reference, "k2")
    tensor([[0.2402, 0.0000, 0.2402]])
    >>> kl_estimate(policy, reference, "k3")
    tensor([[0.3069, 0.0000, 0.1931]])
    """
    _check(logprobs, reference_logprobs, kind)
    difference = logprobs - reference_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    held = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-held) + held


def straight_through_kl(logprobs: Tensor, reference_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """A KL loss term with the value of one estimator and the gradient of k2, the right one.

    logprobs, reference_logprobs: [B, S], as in `kl_estimate`; logprobs with gradient.
    kind: whose value it has, "k3" (verl's "k3+") or "k1" ("k1+"); "k2" is k2 itself.
    Returns [B, S] in nats: k2 - sg[k2] + sg[kind], sg = no gradient. Nothing is masked.
    So what is logged is an estimate with the right expected value, and what is descended is,
    in expectation, KL(policy || reference).
    Source: verl's kl_penalty.
    Raises ValueError: as `kl_estimate`.

    Three tokens as in `kl_estimate`: k3's values; the gradient is k2's, the log ratio.
    >>> policy = torch.tensor([[0.25, 0.5, 0.5]]).log().requires_grad_()
    >>> reference = torch.tensor([[0.5, 0.5, 0.25]]).log()
    >>> estimate = straight_through_kl(policy, reference)
    >>> estimate.detach()
    tensor([[0.3069, 0.0000, 0.1931]])
    >>> torch.autograd.grad(estimate.sum(), policy)[0]
    tensor([[-0.6931,  0.0000,  0.6931]])
    """
    k2 = kl_estimate(logprobs, reference_logprobs, "k2")
    return k2 - k2.detach() + kl_estimate(logprobs, reference_logprobs, kind).detach()


def _check(logprobs: Tensor, reference_logprobs: Tensor, kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown KL estimator {kind!r}; use one of {', '.join(KINDS)}")
    if logprobs.shape != reference_logprobs.shape:
        raise ValueError(
            f"logprobs have shape {tuple(logprobs.shape)} and reference logprobs "
            f"{tuple(reference_logprobs.shape)}; compute both for the same tokens of one batch"
        )
