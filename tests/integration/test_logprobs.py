"""Logprobs over gpt-oss's vocabulary: what they hold at their peak, by torch's own record of allocations.

tests/bench/loss_overhead.py measures 4096 tokens; these are fewer, so that the suite stays fast.
"""

import pytest
import torch

from helpers import logprobs as module
from helpers.memory import peak_allocated_bytes

pytestmark = pytest.mark.engine
TOKENS, VOCABULARY = 300, 201_088
SMALL = 1 << 20  # labels, logprobs, masks


@pytest.fixture(scope="module")
def drawn():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, TOKENS, VOCABULARY, generator=generator, dtype=torch.bfloat16)
    return logits, torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)


@pytest.fixture
def case(trainer, drawn, monkeypatch):
    """(bf16 logits, labels, bytes of a piece in fp32, bytes of the logits); a piece is 64 tokens; Megatron up."""
    piece = 64 * 4 * VOCABULARY
    monkeypatch.setattr(module, "CHUNK_BYTES", piece)
    logits, labels = drawn
    return logits.detach(), labels, piece, logits.nbytes


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_fp32_copy_of_a_piece_is_all_that_logprobs_hold(case, temperature):
    logits, labels, piece, whole = case
    leaf, found = logits.requires_grad_(), []
    forward = peak_allocated_bytes(lambda: found.append(module.token_logprobs(leaf, labels, temperature)))
    backward = peak_allocated_bytes(lambda: found[0].sum().backward())
    assert piece <= forward <= piece + SMALL
    assert whole + piece <= backward <= whole + piece + SMALL  # the gradient itself is as large as the logits
    with torch.no_grad():
        assert peak_allocated_bytes(lambda: module.token_logprobs(leaf, labels, temperature)) <= piece + SMALL


def test_entropy_stays_within_a_piece(case):
    logits, _, piece, _ = case
    assert piece / 2 < peak_allocated_bytes(lambda: module.token_entropy(logits)) <= piece + SMALL


def test_the_measurement_sees_what_is_not_cut(case, monkeypatch):
    """All at once: three full fp32 copies, so the bound above can fail."""
    logits, labels, piece, whole = case
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 40)
    logits.requires_grad_()
    assert peak_allocated_bytes(lambda: module.token_logprobs(logits, labels).sum().backward()) > 2 * 2 * whole > piece


def test_the_logits_are_left_as_they_were(case):
    logits, labels, _, _ = case
    kept, fp32 = logits.clone(), logits[:, :70].float().requires_grad_()
    before = fp32.detach().clone()
    module.token_logprobs(logits, labels)
    module.token_entropy(fp32)
    module.token_logprobs(fp32, labels[:, :70], 0.5).sum().backward()
    assert torch.equal(logits, kept) and torch.equal(fp32.detach(), before)
