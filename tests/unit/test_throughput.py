"""FLOPs against torch's own counter and the published active parameters, bytes and limits by hand."""

import doctest
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import throughput
from helpers.anatomy import GPT_OSS_20B, active_parameters, parameter_table
from helpers.profiles import load_profile
from helpers.throughput import Rates

H200 = Rates(bandwidth=4.8e12, flops=9.9e14)  # data sheet: HBM3e, dense bf16
ROWS, SEQUENCE = 2, 24  # longer than the tiny model's window of 16
# no two dimensions equal, so that an exchanged one shows
ODD = {
    "hidden_size": 80, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24,
    "num_local_experts": 5, "num_experts_per_tok": 2, "num_hidden_layers": 3, "vocab_size": 72,
}  # fmt: skip


def test_doctests():
    assert doctest.testmod(throughput).failed == 0


# --- FLOPs ------------------------------------------------------------------------------------------------------------
def counted(model, backward: bool) -> int:
    """Matrix-product FLOPs that torch sees; without the rotary embedding, whose outer product other implementations look up."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    tokens = torch.randint(0, model.config.vocab_size, (ROWS, SEQUENCE))
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens).logits
        if backward:
            logits.sum().backward()
    rotary = counter.get_flop_counts()["GptOssForCausalLM.model.rotary_emb"]
    return counter.get_total_flops() - sum(rotary.values())


@pytest.fixture(scope="module")
def model():
    """transformers' gpt-oss in its plainest form: every expert sees its own tokens only, every query scores every key."""
    import torch
    from transformers import GptOssForCausalLM

    from helpers.checkpoints import gpt_oss_config

    torch.manual_seed(0)
    config = gpt_oss_config(load_profile("cpu", **{f"model.{k}": v for k, v in ODD.items()}).model)
    config._attn_implementation = config._experts_implementation = "eager"
    return GptOssForCausalLM(config)


def test_forward_is_what_torch_counts(model):
    """To the last FLOP. The eager attention multiplies what the mask then drops, so all keys are counted here."""
    ours = throughput.token_flops(model.config, SEQUENCE, SEQUENCE)
    assert ROWS * SEQUENCE * sum(ours.values()) == counted(model, backward=False)


@pytest.mark.parametrize("frozen", [False, True])
def test_training_is_what_torch_counts(model, frozen):
    """Three times the forward; twice for frozen experts, which still pass a gradient on."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and ".experts." in name))
    forward = throughput.forward_flops(model.config, SEQUENCE)
    passes = {
        name: flops / forward[name]
        for name, flops in throughput.training_flops(model.config, SEQUENCE, frozen).items()
    }
    every_key = throughput.token_flops(model.config, SEQUENCE, SEQUENCE)
    ours = ROWS * SEQUENCE * sum(passes[name] * flops for name, flops in every_key.items())
    assert ours == pytest.approx(counted(model, backward=True), rel=1e-12)


def test_scores_count_only_what_mask_and_window_leave():
    """Mean keys of a query, counted in the mask itself."""
    from helpers.anatomy import window_mask

    for sequence, window in itertools.product((1, 15, 16, 17, 40), (None, 1, 16)):
        kept = window_mask(sequence, window).sum().item()
        assert throughput.mean_context(sequence, window) == pytest.approx(kept / sequence)


def test_20b_is_twice_its_active_parameters():
    """3.6 billion; what is active without a product is norms, sinks and biases."""
    flops = throughput.token_flops(GPT_OSS_20B, 0, 0)
    rows = {row.component: row.parameters for row in parameter_table(GPT_OSS_20B)}
    q, kv, hidden, layers = 64 * 64, 8 * 64, 2880, 24
    biases = layers * (q + 2 * kv + hidden + 32) + rows["expert biases"] * 4 // 32
    without_product = rows["norms"] + rows["sinks"] + biases
    assert sum(flops.values()) == 2 * (active_parameters(GPT_OSS_20B) - without_product)
    assert sum(flops.values()) == pytest.approx(2 * 3.6e9, rel=0.01)


def test_freezing_saves_one_pass_over_the_experts():
    open_, frozen = (throughput.training_flops(GPT_OSS_20B, 1536, freeze) for freeze in (False, True))
    saved = {name: open_[name] - frozen[name] for name in open_ if open_[name] != frozen[name]}
    assert saved == {"expert matrices": throughput.forward_flops(GPT_OSS_20B, 1536)["expert matrices"]}


# --- bytes ------------------------------------------------------------------------------------------------------------
def test_experts_hit_against_a_draw():
    """2000 draws of the real thing: each token picks 4 different of 32."""
    import random

    rng, tokens, rounds = random.Random(0), 8, 2000
    drawn = sum(len({e for _ in range(tokens) for e in rng.sample(range(32), 4)}) for _ in range(rounds))
    assert throughput.experts_hit(32, 4, tokens) == pytest.approx(drawn / rounds, rel=0.01)


@given(st.integers(1, 128), st.data())
@settings(max_examples=50, deadline=None)
def test_experts_hit_is_bounded_and_grows(experts, data):
    top_k, tokens = data.draw(st.integers(1, experts)), data.draw(st.integers(1, 300))
    hit, more = (throughput.experts_hit(experts, top_k, n) for n in (tokens, tokens + 1))
    assert top_k - 1e-9 <= hit <= more <= experts
    assert hit <= top_k * tokens + 1e-9


def test_one_request_reads_its_active_parameters():
    """Top-4 experts and everything dense, 2 bytes each, with one row of the embedding; 24 KiB + 24 KiB of cache a token."""
    found = throughput.decode_bytes(GPT_OSS_20B, 1, 100)
    assert found["dense weights"] + found["experts"] == pytest.approx(
        2 * (active_parameters(GPT_OSS_20B) + 2880)
    )
    assert found["kv cache"] == 100 * 2 * 24 * 1024
    assert throughput.decode_bytes(GPT_OSS_20B, 1, 128 + 7)["kv cache"] == (128 * 2 + 7) * 24 * 1024


def test_a_large_batch_reads_every_weight_once():
    found = throughput.decode_bytes(GPT_OSS_20B, 4096, 1)
    parameters = sum(row.parameters for row in parameter_table(GPT_OSS_20B))
    assert found["dense weights"] + found["experts"] == pytest.approx(
        2 * (parameters - 201_088 * 2880 + 4096 * 2880)
    )


# --- limits -----------------------------------------------------------------------------------------------------------
def test_decode_is_bound_by_reads_and_then_by_products():
    """One request waits for memory; a machine whose memory costs nothing waits for its products."""
    read = sum(throughput.decode_bytes(GPT_OSS_20B, 1, 100).values())
    assert throughput.decode_seconds(GPT_OSS_20B, 1, 100, H200) == read / H200.bandwidth
    flops = sum(throughput.token_flops(GPT_OSS_20B, 200, 128).values())
    fast_memory = Rates(bandwidth=1e30, flops=H200.flops)
    assert throughput.decode_seconds(GPT_OSS_20B, 64, 200, fast_memory) == pytest.approx(
        64 * flops / H200.flops
    )


def test_rollout_limit_by_hand():
    """Two response tokens: the first from the prefill, the second from one decode step at token prompt + 1."""
    flops = throughput.forward_flops(GPT_OSS_20B, 50)
    prefill = 3 * (50 * (sum(flops.values()) - flops["head"]) + flops["head"]) / H200.flops
    step = throughput.decode_seconds(GPT_OSS_20B, 3, 51, H200)
    assert throughput.rollout_limit(GPT_OSS_20B, 3, 50, 2, H200) == pytest.approx(6 / (prefill + step))


def test_training_at_the_limit_is_full_use():
    limit = throughput.training_limit(GPT_OSS_20B, 1536, H200, freeze_experts=True)
    flops = sum(throughput.training_flops(GPT_OSS_20B, 1536, freeze_experts=True).values())
    assert throughput.model_flop_utilisation(limit, flops, H200) == pytest.approx(1)
    assert throughput.model_flop_utilisation(limit / 4, flops, H200) == pytest.approx(0.25)


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["bandwidth", "flops"])
def test_a_rate_must_be_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} is"):
        Rates(**{"bandwidth": 1.0, "flops": 1.0, name: value})


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: throughput.mean_context(0), "sequence is 0"),
        (lambda: throughput.mean_context(4, 0), "window is 0"),
        (lambda: throughput.experts_hit(4, 5, 1), "top-5"),
        (lambda: throughput.experts_hit(4, 2, 0), "tokens is 0"),
        (lambda: throughput.decode_bytes(GPT_OSS_20B, 0, 1), "requests is 0"),
        (lambda: throughput.decode_bytes(GPT_OSS_20B, 1, 0), "context is 0"),
        (lambda: throughput.rollout_limit(GPT_OSS_20B, 1, 0, 1, H200), "prompt is 0"),
        (lambda: throughput.rollout_limit(GPT_OSS_20B, 1, 1, 0, H200), "response is 0"),
    ],
)
def test_counts_must_be_positive(call, named):
    with pytest.raises(ValueError, match=named):
        call()
