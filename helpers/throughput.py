"""How fast gpt-oss can be at most: FLOPs a token and bytes a decode step from the config, limits from a card's rates.

Two rates of the machine bound everything here: decoding reads weights and keys and values (memory bandwidth), training and
prefill multiply matrices (FLOP rate). Measure both in the run whose speed they bound (tests/gpu/throughput.py does), or give a
data sheet's numbers and say so.

Counted as FLOPs: matrix products, 2 for each multiply-add. Not counted: norms, softmax, RoPE, activations, the optimizer, and
what an implementation does twice (recomputation, scores that a mask throws away). This is "model FLOPs" as in PaLM (arXiv
2204.02311, appendix B) with the causal mask and the windows taken into account. `config`: as in helpers.anatomy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from helpers.anatomy import SLIDING, kv_cache_bytes, layer_types, parameter_table, read_architecture


@dataclass(frozen=True)
class Rates:
    """What a machine can do. bandwidth: bytes/s read or written in memory. flops: FLOP/s of matrix products in the dtype used."""

    bandwidth: float
    flops: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"a machine's {name} is {value}; give a positive rate, measured or from its data sheet"
                )


# --- FLOPs ------------------------------------------------------------------------------------------------------------
def mean_context(sequence: int, window: int | None = None) -> float:
    """Keys that a query sees on average over a causal sequence; a window counts the token itself.

    >>> mean_context(4)  # 1, 2, 3, 4
    2.5
    >>> mean_context(4, window=2)  # 1, 2, 2, 2
    1.75
    """
    _positive(sequence=sequence, window=1 if window is None else window)
    kept = sequence if window is None else min(sequence, window)
    return (kept * (kept + 1) / 2 + (sequence - kept) * kept) / sequence


def token_flops(config: object, full_keys: float, window_keys: float) -> dict[str, float]:
    """Forward FLOPs of one token by component; its query meets so many keys in full and in sliding layers.

    Components: those of helpers.anatomy.parameter_table that multiply, plus "attention scores" (Q K^T and P V).
    """
    a = read_architecture(config)
    rows = {row.component: row.parameters for row in parameter_table(a)}
    q, kv = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    sliding = layer_types(a).count(SLIDING)
    keys = sliding * window_keys + (a.num_hidden_layers - sliding) * full_keys
    return {
        "attention": 2.0 * a.num_hidden_layers * a.hidden_size * (2 * q + 2 * kv),
        "attention scores": 2.0 * 2 * q * keys,
        "router": 2.0 * a.num_hidden_layers * a.hidden_size * a.num_local_experts,
        "expert matrices": 2.0 * rows["expert matrices"] * a.num_experts_per_tok / a.num_local_experts,
        "head": 2.0 * a.vocab_size * a.hidden_size,
    }


def forward_flops(config: object, sequence: int) -> dict[str, float]:
    """Forward FLOPs a token by component, averaged over a causal sequence of this length, logits at every position."""
    window = read_architecture(config).sliding_window
    return token_flops(config, mean_context(sequence), mean_context(sequence, window))


def training_flops(config: object, sequence: int, freeze_experts: bool = False) -> dict[str, float]:
    """FLOPs a token of forward and backward by component: three times the forward's.

    A backward multiplies once for the gradient of the input and once for that of the weight. Frozen experts need the first
    only, since what lies below them is trained: twice the forward.
    """
    passes = {"expert matrices": 2} if freeze_experts else {}
    return {name: passes.get(name, 3) * flops for name, flops in forward_flops(config, sequence).items()}


def model_flop_utilisation(tokens_per_second: float, flops_per_token: float, rates: Rates) -> float:
    """Share of the FLOP rate that went into the model's own products (MFU, PaLM's definition).

    >>> model_flop_utilisation(1000, flops_per_token=2e9, rates=Rates(bandwidth=1e12, flops=1e13))
    0.2
    """
    return tokens_per_second * flops_per_token / rates.flops


def training_limit(config: object, sequence: int, rates: Rates, freeze_experts: bool = False) -> float:
    """Tokens/s at which forward and backward alone would use the whole FLOP rate."""
    return rates.flops / sum(training_flops(config, sequence, freeze_experts).values())


# --- bytes of a decode step -------------------------------------------------------------------------------------------
def experts_hit(experts: int, top_k: int, tokens: int) -> float:
    """Experts of one layer that a batch of tokens is expected to use, if each picks its top_k evenly and by itself.

    A token misses a given expert with probability 1 - top_k / experts. A trained router is not even: it hits fewer.

    >>> experts_hit(32, 4, 1)
    4.0
    >>> round(experts_hit(32, 4, 64), 2)
    31.99
    """
    _positive(experts=experts, top_k=top_k, tokens=tokens)
    if top_k > experts:
        raise ValueError(f"top-{top_k} routing needs at least as many experts, and there are {experts}")
    return experts * (1 - (1 - top_k / experts) ** tokens)


def decode_bytes(config: object, requests: int, context: int, value_bytes: int = 2) -> dict[str, float]:
    """Bytes that one decode step of `requests` sequences reads at least, each at its token number `context`.

    "dense weights": everything but experts, once, with one embedding row a request. "experts": those expected to be hit, once.
    "kv cache": keys and values, min(context, window) in sliding layers. value_bytes: of a weight and of a cached value.
    """
    _positive(requests=requests, context=context)
    a = read_architecture(config)
    rows = {row.component: row.parameters for row in parameter_table(a)}
    expert = sum(size for name, size in rows.items() if name.startswith("expert"))
    table = 0 if a.tie_word_embeddings else rows["embedding"]
    dense = sum(rows.values()) - expert - table + requests * a.hidden_size
    share = experts_hit(a.num_local_experts, a.num_experts_per_tok, requests) / a.num_local_experts
    return {
        "dense weights": float(dense * value_bytes),
        "experts": expert * share * value_bytes,
        "kv cache": float(requests * kv_cache_bytes(a, context, value_bytes)),
    }


def decode_seconds(config: object, requests: int, context: int, rates: Rates, value_bytes: int = 2) -> float:
    """Least time of one decode step: the slower of its reads and its products (they overlap at best)."""
    a = read_architecture(config)
    reads = sum(decode_bytes(a, requests, context, value_bytes).values()) / rates.bandwidth
    flops = requests * sum(token_flops(a, context, min(context, a.sliding_window)).values())
    return max(reads, flops / rates.flops)


def rollout_limit(
    config: object, requests: int, prompt: int, response: int, rates: Rates, value_bytes: int = 2
) -> float:
    """Response tokens/s at most, for `requests` at once of `prompt` tokens each, answered with `response` tokens each.

    The prefill of all prompts (products; the head at the last position only), which gives the first token, then one decode
    step for each of the others with a context that grows. No prefix is shared. Sampling, scheduling and transport cost nothing.
    """
    _positive(requests=requests, prompt=prompt, response=response)
    flops = forward_flops(config, prompt)
    head = flops.pop("head")
    prefill = requests * (prompt * sum(flops.values()) + head) / rates.flops
    contexts = range(prompt + 1, prompt + response)
    return (
        requests
        * response
        / (
            prefill
            + sum(decode_seconds(config, requests, context, rates, value_bytes) for context in contexts)
        )
    )


def _positive(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
