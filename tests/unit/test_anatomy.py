"""Counts, masks, sinks, routing and YaRN: published figures, hand-sized cases, and transformers."""

import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssExperts,
    GptOssRotaryEmbedding,
    GptOssTopKRouter,
    eager_attention_forward,
)

from helpers import anatomy
from helpers.anatomy import GPT_OSS_20B, GPT_OSS_120B
from helpers.profiles import PROFILES, load_profile

TINY = dict(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=3,
    num_experts_per_tok=2,
    sliding_window=8,
    pad_token_id=0,
    eos_token_id=1,
)


# --- the adapter --------------------------------------------------------------------------------


def test_mapping_config_object_profile_and_json_give_the_same_architecture():
    config = GptOssConfig(**TINY)
    from_json = json.loads(config.to_json_string(use_diff=False))
    fields = SimpleNamespace(**TINY)
    counts = {anatomy.total_parameters(c) for c in (TINY, config, from_json, fields)}
    assert len(counts) == 1
    assert anatomy.yarn_correction_range(from_json) == anatomy.yarn_correction_range(TINY)
    assert anatomy.layer_types(config) == anatomy.layer_types(TINY)


@pytest.mark.parametrize("name", PROFILES)
def test_reads_every_profile(name):
    model = load_profile(name).model
    if name in ("gpu-20b", "cluster"):
        assert anatomy.total_parameters(model) == 20_914_757_184
    assert anatomy.layer_types(model)[:2] == (anatomy.SLIDING, anatomy.FULL)


def test_reads_the_hubs_older_spelling():
    old = {k: v for k, v in GPT_OSS_20B.items() if k != "rope_parameters"} | {
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "factor": 8.0,
            "beta_fast": 16.0,
            "original_max_position_embeddings": 2048,
        },  # fmt: skip
    }
    arch = anatomy.read_architecture(old)
    assert (arch.rope_theta, arch.factor, arch.beta_fast) == (10_000.0, 8.0, 16.0)
    assert arch.original_max_position_embeddings == 2048


def test_configs_cannot_be_changed_by_accident():
    with pytest.raises(TypeError):
        GPT_OSS_20B["hidden_size"] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_key_value_heads": 3}, "do not divide"), ({"num_experts_per_tok": 4}, "top-4"),
     ({"layer_types": ["full_attention"]}, "names 1 layers")],
)  # fmt: skip
def test_refuses_configs_that_contradict_themselves(change, message):
    with pytest.raises(ValueError, match=message):
        anatomy.read_architecture(TINY | change)


def test_a_missing_field_is_named():
    config = {k: v for k, v in TINY.items() if k != "head_dim"}
    with pytest.raises(ValueError, match="has no 'head_dim'"):
        anatomy.parameter_table(config)


def test_counting_needs_no_torch():
    code = (
        "import sys; from helpers.anatomy import *; from helpers.anatomy import GPT_OSS_20B;"
        "checkpoint_bytes(GPT_OSS_20B, 'mxfp4'); yarn_correction_range();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- parameters and bytes -----------------------------------------------------------------------


def test_gpt_oss_20b_to_the_last_parameter():
    rows = {row.component: row for row in anatomy.parameter_table(GPT_OSS_20B)}
    assert anatomy.total_parameters(GPT_OSS_20B) == 20_914_757_184
    assert sum(row.tensors for row in rows.values()) == 411
    assert len(anatomy.tensor_shapes(GPT_OSS_20B)) == 411
    assert rows["attention"].parameters + rows["sinks"].parameters == 24 * 26_550_144
    assert rows["router"].parameters == 24 * 92_192
    experts = rows["expert matrices"].parameters + rows["expert biases"].parameters
    assert experts == 24 * 32 * 24_891_840
    assert rows["norms"].parameters == 24 * 5_760 + 2_880
    assert rows["embedding"].parameters == rows["head"].parameters == 579_133_440


def test_both_sizes_match_the_model_card():
    """Billions of parameters as printed in arXiv 2508.10925, table 1."""
    assert anatomy.active_parameters(GPT_OSS_20B) == 3_608_307_264
    assert round(anatomy.total_parameters(GPT_OSS_120B) / 1e9, 2) == 116.83
    assert round(anatomy.active_parameters(GPT_OSS_120B) / 1e9, 2) == 5.13


def test_checkpoint_bytes():
    assert anatomy.checkpoint_bytes(GPT_OSS_20B, "bf16") == 41_829_514_368
    assert anatomy.checkpoint_bytes(GPT_OSS_20B, "mxfp4") == 13_761_264_768
    assert round(anatomy.checkpoint_bytes(GPT_OSS_20B, "mxfp4") / 2**30, 1) == 12.8  # model card
    with pytest.raises(ValueError, match="'bf16' or 'mxfp4'"):
        anatomy.checkpoint_bytes(GPT_OSS_20B, "fp8")


def test_gpt_oss_120b_to_the_last_parameter_and_byte():
    """Worked by hand: 36 layers of 26,550,144 attention, 368,768 router, 128 x 24,891,840 expert and 5,760 norm parameters."""
    layers = 36 * (26_550_144 + 368_768 + 128 * 24_891_840 + 5_760)
    assert anatomy.total_parameters(GPT_OSS_120B) == layers + 2 * 579_133_440 + 2_880 == 116_829_156_672
    assert len(anatomy.tensor_shapes(GPT_OSS_120B)) == 36 * 17 + 3 == 615
    assert anatomy.checkpoint_bytes(GPT_OSS_120B, "bf16") == 2 * 116_829_156_672
    matrices = 36 * 128 * 24_883_200  # 4 bits a value and 8 for every 32: 17/32 of a byte each
    assert anatomy.checkpoint_bytes(GPT_OSS_120B, "mxfp4") == matrices * 17 // 32 + 2 * (116_829_156_672 - matrices)


def test_names_and_shapes_are_transformers_own():
    model = GptOssForCausalLM(GptOssConfig(**TINY))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert anatomy.tensor_shapes(TINY) == theirs
    assert sum(row.parameters for row in anatomy.parameter_table(TINY)) == model.num_parameters()


def test_the_real_shape_has_transformers_names_and_counts_too():
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**dict(GPT_OSS_20B, rope_parameters=None)))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert theirs == anatomy.tensor_shapes(GPT_OSS_20B)


def test_tied_embeddings_are_stored_once_and_still_multiply():
    tied = TINY | {"tie_word_embeddings": True}
    embedding = TINY["vocab_size"] * TINY["hidden_size"]
    assert anatomy.total_parameters(tied) == anatomy.total_parameters(TINY) - embedding
    assert anatomy.active_parameters(tied) == anatomy.active_parameters(TINY)


def test_a_foreign_tensor_name_is_refused():
    with pytest.raises(ValueError, match="not a tensor of gpt-oss"):
        anatomy.component_of("model.layers.0.mlp.up.weight")


def test_kv_cache():
    assert anatomy.kv_cache_bytes_per_token(GPT_OSS_20B) == 24 * 1024
    assert anatomy.kv_cache_bytes_per_token(GPT_OSS_20B, windows=False) == 48 * 1024
    long, longer = (anatomy.kv_cache_bytes(GPT_OSS_20B, n) for n in (4096, 4097))
    assert longer - long == 24 * 1024
    assert long == 4096 * 24 * 1024 + 3 * 2**20
    assert anatomy.kv_cache_bytes(GPT_OSS_20B, 100) == anatomy.kv_cache_bytes(GPT_OSS_20B, 100, windows=False)


# --- sliding window -----------------------------------------------------------------------------


def test_a_window_counts_the_token_itself():
    mask = anatomy.window_mask(6, 3)
    assert mask[5].tolist() == [False, False, False, True, True, True]
    assert mask.sum(-1).tolist() == [1, 2, 3, 3, 3, 3]
    assert torch.equal(anatomy.window_mask(6, None), torch.ones(6, 6).tril().bool())
    assert anatomy.te_window(128) == (127, 0)
    assert anatomy.te_window(None) == (-1, 0)
    with pytest.raises(ValueError, match="sees nothing"):
        anatomy.window_mask(4, 0)


def test_the_mask_is_what_transformers_attends_to():
    torch.manual_seed(0)
    model = GptOssForCausalLM._from_config(GptOssConfig(**TINY), attn_implementation="eager")
    with torch.no_grad():
        weights = model(torch.randint(2, 40, (1, 20)), output_attentions=True).attentions
    for kind, layer in zip(anatomy.layer_types(TINY), weights, strict=True):
        window = TINY["sliding_window"] if kind == anatomy.SLIDING else None
        assert torch.equal(layer[0, 0] > 0, anatomy.window_mask(20, window))


# --- sinks --------------------------------------------------------------------------------------


def masked_scores(seed, heads=3, length=7, window=4):
    scores = torch.randn(2, heads, length, length, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(~anatomy.window_mask(length, window), -math.inf).double()


def test_a_sink_by_hand():
    weights = anatomy.attention_with_sinks(torch.zeros(1, 1, 2), torch.zeros(1))
    torch.testing.assert_close(weights, torch.full((1, 1, 2), 1 / 3))
    torch.testing.assert_close(anatomy.sink_share(weights), torch.full((1, 1), 1 / 3))


@given(st.integers(0, 10**6), st.lists(st.floats(-30, 30), min_size=3, max_size=3))
@settings(max_examples=50, deadline=None)
def test_rescaling_plain_attention_equals_the_extra_column_forward_and_backward(seed, sink):
    scores, sinks = masked_scores(seed), torch.tensor(sink, dtype=torch.float64)
    values = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(seed)).double()

    def column(scores, sinks, values):
        return anatomy.attention_with_sinks(scores, sinks) @ values

    def rescaled(scores, sinks, values):
        return anatomy.apply_sink(scores.softmax(-1) @ values, scores.logsumexp(-1), sinks)

    results = []
    for function in (column, rescaled):
        inputs = [t.clone().requires_grad_() for t in (scores, sinks, values)]
        output = function(*inputs)
        output.square().sum().backward()
        results.append([output.detach(), *(t.grad for t in inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_equals_transformers_attention():
    scores, sinks = masked_scores(5).float(), torch.tensor([4.0, -2.0, 0.0])
    values = torch.randn(2, 3, 7, 7)
    module = SimpleNamespace(num_key_value_groups=1, sinks=sinks, training=False)
    identity = torch.eye(7).expand(2, 3, 7, 7)
    mask = torch.zeros(7, 7)
    scores = scores.nan_to_num()  # -inf times the identity would be NaN
    output, weights = eager_attention_forward(module, scores, identity, values, mask, 1.0)
    ours = anatomy.attention_with_sinks(scores, sinks)
    torch.testing.assert_close(ours, weights)
    torch.testing.assert_close((ours @ values).transpose(1, 2), output)


def test_a_fully_masked_row_gives_everything_to_the_sink():
    weights = anatomy.attention_with_sinks(torch.full((1, 1, 4), -math.inf), torch.zeros(1))
    assert weights.tolist() == [[[0.0] * 4]]


def test_a_large_sink_does_not_overflow():
    weights = anatomy.attention_with_sinks(torch.full((1, 1, 4), 1e4), torch.tensor([9e3]))
    assert torch.isfinite(weights).all()


def test_sinks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="one sink a head"):
        anatomy.attention_with_sinks(torch.zeros(2, 4, 4), torch.zeros(3))


# --- routing and experts ------------------------------------------------------------------------


def test_routing_equals_transformers():
    router = GptOssTopKRouter(GptOssConfig(**TINY))
    torch.nn.init.normal_(router.weight)
    logits, scores, indices = router(torch.randn(11, 64))
    weights, experts = anatomy.route(logits, 2)
    assert torch.equal(experts, indices)
    torch.testing.assert_close(weights, scores)
    torch.testing.assert_close(weights.sum(-1), torch.ones(11))


def test_routing_by_hand():
    weights, experts = anatomy.route(torch.tensor([[0.0, 2.0, 1.0]]), 2)
    assert experts.tolist() == [[1, 2]]
    assert weights[0, 0].item() == pytest.approx(1 / (1 + math.exp(-1)))


def test_load_counts_every_expert_even_the_idle_ones():
    experts = torch.tensor([[0, 2], [2, 0], [2, 3]])
    assert anatomy.expert_load(experts, 5).tolist() == [2, 0, 3, 1, 0]


def test_clamped_swiglu_equals_transformers():
    experts = GptOssExperts(GptOssConfig(**TINY))
    gate_up = 10 * torch.randn(5, 192)
    torch.testing.assert_close(anatomy.clamped_swiglu(gate_up), experts._apply_gate(gate_up))


# --- YaRN ---------------------------------------------------------------------------------------


def test_golden_values():
    assert anatomy.yarn_correction_range(GPT_OSS_20B) == (8.092779115512402, 17.39802450158856)
    assert anatomy.yarn_attention_factor() == pytest.approx(1.34657, abs=5e-6)
    assert anatomy.yarn_attention_factor(1.0) == 1.0


def test_truncation_is_off_and_would_change_the_frequencies():
    rope = dict(GPT_OSS_20B["rope_parameters"], truncate=True)
    rounded = dict(GPT_OSS_20B, rope_parameters=rope)
    assert anatomy.yarn_correction_range(rounded) == (8, 18)
    ours, theirs = (anatomy.yarn_inverse_frequencies(c) for c in (GPT_OSS_20B, rounded))
    assert (ours / theirs - 1).abs().max() > 0.01


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64])
def test_frequencies_equal_transformers(head_dim, truncate):
    rope = dict(GPT_OSS_20B["rope_parameters"], truncate=truncate)
    config = GptOssConfig(**(TINY | {"head_dim": head_dim, "rope_parameters": rope}))
    theirs = GptOssRotaryEmbedding(config)
    ours = anatomy.yarn_inverse_frequencies(config)
    torch.testing.assert_close(ours, theirs.inv_freq, rtol=1e-6, atol=0)
    assert theirs.attention_scaling == pytest.approx(anatomy.yarn_attention_factor(32.0))


def test_fast_pairs_keep_their_frequency_and_slow_ones_lose_a_factor_of_32():
    plain, yarn = anatomy.rope_inverse_frequencies(), anatomy.yarn_inverse_frequencies()
    assert torch.equal(plain[:9], yarn[:9])
    torch.testing.assert_close(yarn[18:] * 32, plain[18:])
