"""What follows from gpt-oss's config alone: tensors, parameters, bytes, masks, sinks, YaRN.

Every function takes `config` as a mapping (config.json), as transformers' GptOssConfig or as a
profile's `settings.model`; `read_architecture` is the one place that tells them apart.
Counting needs no torch, so planner and preflight stay light: the functions that work on tensors
import it themselves.

Sources: gpt-oss model card (arXiv 2508.10925), transformers' models/gpt_oss/modeling_gpt_oss.py,
YaRN (arXiv 2309.00071), attention sinks as a learned logit (arXiv 2309.17453, Miller's
"attention is off by one").
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

SLIDING, FULL = "sliding_attention", "full_attention"
CheckpointForm = Literal["bf16", "mxfp4"]

_YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)

# The published config.json of openai/gpt-oss-20b, in transformers 5's spelling.
GPT_OSS_20B: Mapping[str, Any] = MappingProxyType(
    {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": _YARN,
    }
)
# openai/gpt-oss-120b differs in depth and in the number of experts, and in nothing else.
GPT_OSS_120B: Mapping[str, Any] = MappingProxyType(
    {**GPT_OSS_20B, "num_hidden_layers": 36, "num_local_experts": 128}
)


@dataclass(frozen=True)
class Architecture:
    """The config fields that shapes, masks and rotary frequencies depend on (all plain numbers)."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int
    num_experts_per_tok: int
    vocab_size: int
    sliding_window: int
    tie_word_embeddings: bool = False
    layer_types: tuple[str, ...] | None = None
    rope_theta: float = _YARN["rope_theta"]
    factor: float = _YARN["factor"]
    beta_fast: float = _YARN["beta_fast"]
    beta_slow: float = _YARN["beta_slow"]
    truncate: bool = _YARN["truncate"]
    original_max_position_embeddings: int = _YARN["original_max_position_embeddings"]


@dataclass(frozen=True)
class ParameterRow:
    """One row of `parameter_table`: totals over all `layers` (1 for a part that occurs once)."""

    component: str
    layers: int
    tensors: int
    parameters: int


# --- the adapter -------------------------------------------------------------------------------


def read_architecture(config: object) -> Architecture:
    """Read `config` (mapping or object) into an Architecture.

    RoPE fields are looked for in `rope_parameters` (transformers 5), in `rope_scaling` (older
    files, and the hub's) and in the config itself; where a field is nowhere, gpt-oss's value holds.
    """
    if isinstance(config, Architecture):
        return config
    rope = {**_rope_fields(config, "rope_scaling"), **_rope_fields(config, "rope_parameters")}
    values = {}
    for field in fields(Architecture):
        value = _field(config, field.name, rope.get(field.name))
        if value is not None:
            values[field.name] = value
        elif field.default is MISSING:
            raise ValueError(_missing_field(config, field.name))
    if "layer_types" in values:
        values["layer_types"] = tuple(values["layer_types"])
    return _checked(Architecture(**values))


def _field(config: object, name: str, default: Any = None) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    value = getattr(config, name, None)
    return default if value is None else value


def _rope_fields(config: object, name: str) -> dict[str, Any]:
    rope = _field(config, name)
    return dict(rope) if isinstance(rope, Mapping) else {}


def _missing_field(config: object, name: str) -> str:
    return (
        f"the model config ({type(config).__name__}) has no '{name}': it is probably not a gpt-oss "
        "config. Compare it with helpers.anatomy.GPT_OSS_20B, which has every field that is needed"
    )


def _checked(arch: Architecture) -> Architecture:
    if arch.num_attention_heads % arch.num_key_value_heads:
        raise ValueError(
            f"{arch.num_attention_heads} attention heads do not divide into "
            f"{arch.num_key_value_heads} key-value heads: change one of the two in the config"
        )
    if arch.num_experts_per_tok > arch.num_local_experts:
        raise ValueError(
            f"top-{arch.num_experts_per_tok} routing needs at least as many experts, the config "
            f"has {arch.num_local_experts}: lower num_experts_per_tok"
        )
    if arch.layer_types is not None and len(arch.layer_types) != arch.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(arch.layer_types)} layers, num_hidden_layers is "
            f"{arch.num_hidden_layers}: drop layer_types, even layers slide without it"
        )
    return arch


# --- tensors, parameters, bytes ----------------------------------------------------------------


def layer_types(config: object) -> tuple[str, ...]:
    """ "sliding_attention" or "full_attention" for each layer; even layers slide, as in gpt-oss."""
    arch = read_architecture(config)
    return arch.layer_types or tuple(
        FULL if layer % 2 else SLIDING for layer in range(arch.num_hidden_layers)
    )


def layer_tensors(config: object) -> dict[str, tuple[int, ...]]:
    """Shape of each of the 17 tensors of one layer, by its name below `model.layers.N.`.

    Linear weights are [out, in]. The fused experts are the exception: Hugging Face keeps them
    [expert, in, out], with gate and up columns interleaved (even columns gate, odd columns up).
    """
    a = read_architecture(config)
    q, kv = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    hidden, wide, experts = a.hidden_size, a.intermediate_size, a.num_local_experts
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, rows, columns in (
        ("q_proj", q, hidden),
        ("k_proj", kv, hidden),
        ("v_proj", kv, hidden),
        ("o_proj", hidden, q),
    ):
        shapes[f"self_attn.{name}.weight"] = (rows, columns)
        shapes[f"self_attn.{name}.bias"] = (rows,)
    return shapes | {
        "self_attn.sinks": (a.num_attention_heads,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.router.weight": (experts, hidden),
        "mlp.router.bias": (experts,),
        "mlp.experts.gate_up_proj": (experts, hidden, 2 * wide),
        "mlp.experts.gate_up_proj_bias": (experts, 2 * wide),
        "mlp.experts.down_proj": (experts, wide, hidden),
        "mlp.experts.down_proj_bias": (experts, hidden),
    }


def tensor_shapes(config: object) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a plain (not quantised) Hugging Face checkpoint."""
    arch = read_architecture(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, arch.hidden_size)}
    for layer in range(arch.num_hidden_layers):
        for name, shape in layer_tensors(arch).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (arch.hidden_size,)
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden_size)
    return shapes


def component_of(name: str) -> str:
    """The row of `parameter_table` that a tensor name (plain or MXFP4) belongs to."""
    if ".mlp.experts." in name:
        return "expert biases" if name.endswith("_bias") else "expert matrices"
    for mark, component in (
        ("sinks", "sinks"),
        ("self_attn", "attention"),
        ("router", "router"),
        ("norm", "norms"),
        ("embed_tokens", "embedding"),
        ("lm_head", "head"),
    ):
        if mark in name:
            return component
    raise ValueError(
        f"'{name}' is not a tensor of gpt-oss: the checkpoint is of another model, or was renamed"
    )


def parameter_table(config: object) -> tuple[ParameterRow, ...]:
    """Where the parameters are: one row a component, in the order of the forward pass.

    Worked example: gpt-oss-20b gives 8 rows that sum to 20,914,757,184 parameters in 411 tensors;
    "expert matrices" alone is 19,110,297,600 in 48.
    "norms" counts the final norm too (its `layers` names the decoder layers).
    """
    return _parameter_table(read_architecture(config))


@lru_cache(maxsize=256)
def _parameter_table(arch: Architecture) -> tuple[ParameterRow, ...]:
    counts: dict[str, tuple[int, int]] = {}
    for name, shape in tensor_shapes(arch).items():
        tensors, parameters = counts.get(component_of(name), (0, 0))
        counts[component_of(name)] = (tensors + 1, parameters + math.prod(shape))
    once = ("embedding", "head")
    return tuple(
        ParameterRow(component, 1 if component in once else arch.num_hidden_layers, *count)
        for component, count in counts.items()
    )


def total_parameters(config: object) -> int:
    """All parameters (gpt-oss-20b: 20,914,757,184)."""
    return sum(row.parameters for row in parameter_table(config))


def active_parameters(config: object) -> int:
    """Parameters that one token multiplies with: top-k experts, no input embedding (a look-up).

    gpt-oss-20b: 3,608,307,264. Twice this is the forward FLOPs a token, attention scores aside.
    With tied embeddings the head still multiplies, so it is counted once.
    """
    arch = read_architecture(config)
    active = 0
    for row in parameter_table(arch):
        if row.component.startswith("expert"):
            active += row.parameters // arch.num_local_experts * arch.num_experts_per_tok
        elif row.component != "embedding" or arch.tie_word_embeddings:
            active += row.parameters
    return active


def component_bytes(config: object, form: CheckpointForm) -> dict[str, int]:
    """Bytes of tensor data by component in a "bf16" or an "mxfp4" checkpoint.

    bf16: 2 bytes a parameter. mxfp4: the expert matrices take half a byte a value and one scale
    byte for 32 values (17/32 byte each); every other tensor stays bf16.
    """
    if form not in ("bf16", "mxfp4"):
        raise ValueError(f"checkpoint form '{form}' is unknown: ask for 'bf16' or 'mxfp4'")
    sizes = {row.component: 2 * row.parameters for row in parameter_table(config)}
    if form == "mxfp4":
        sizes["expert matrices"] = sizes["expert matrices"] // 2 * 17 // 32
    return sizes


def checkpoint_bytes(config: object, form: CheckpointForm) -> int:
    """Bytes of tensor data in a checkpoint (20b: 41.83 GB in "bf16", 13.76 GB in "mxfp4").

    Counted: the data of every tensor. Not counted: the safetensors headers (tens of kilobytes),
    config and tokenizer files, and the duplicate `original/` and `metal/` folders on the hub.
    """
    return sum(component_bytes(config, form).values())


def kv_cache_bytes(config: object, tokens: int, value_bytes: int = 2, windows: bool = True) -> int:
    """Bytes of keys and values that one sequence of `tokens` must keep.

    With `windows` a sliding layer keeps `sliding_window` tokens at most; without (an engine that
    ignores the window) it keeps all of them.
    """
    arch, per_layer = read_architecture(config), _kv_bytes_per_layer(config, value_bytes)
    kept = min(tokens, arch.sliding_window) if windows else tokens
    sliding = layer_types(arch).count(SLIDING)
    return per_layer * (sliding * kept + (arch.num_hidden_layers - sliding) * tokens)


def kv_cache_bytes_per_token(config: object, value_bytes: int = 2, windows: bool = True) -> int:
    """Bytes that one more token adds once the windows are full.

    gpt-oss-20b in bf16: 24 KiB (12 full layers x 2 KiB); 48 KiB where the windows are ignored.
    """
    layers = layer_types(config)
    growing = layers.count(FULL) if windows else len(layers)
    return growing * _kv_bytes_per_layer(config, value_bytes)


def _kv_bytes_per_layer(config: object, value_bytes: int) -> int:
    arch = read_architecture(config)
    return 2 * arch.num_key_value_heads * arch.head_dim * value_bytes  # 2: a key and a value


# --- sliding window ----------------------------------------------------------------------------


def window_mask(length: int, window: int | None) -> Tensor:
    """bool [length, length], True where query (row) may see key (column).

    A token sees itself and the `window` - 1 tokens before it; None means full causal attention.
    """
    import torch

    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens sees nothing: it counts the token itself")
    back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def te_window(window: int | None) -> tuple[int, int]:
    """TransformerEngine's (left, right) for a Hugging Face `sliding_window`: 128 -> (127, 0).

    TE counts tokens to the left of the token, Hugging Face counts the token too (Megatron-Bridge
    issue 2656). Full causal attention is (-1, 0).
    """
    return (-1, 0) if window is None else (window - 1, 0)


# --- sinks -------------------------------------------------------------------------------------


def attention_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """[..., heads, queries, keys] attention weights under one learned sink logit a head.

    scores: [..., heads, queries, keys], scaled, -inf where masked. sinks: [heads].
    The sink joins the softmax and is then dropped, so rows sum to 1 - sink_share, below one.
    Worked example: scores (0, 0), sink 0 -> weights (1/3, 1/3); the sink took the last third.
    """
    import torch

    if sinks.ndim != 1 or scores.ndim < 3 or scores.shape[-3] != sinks.shape[0]:
        raise ValueError(
            f"scores {tuple(scores.shape)} and sinks {tuple(sinks.shape)} do not fit: scores end "
            "in [heads, queries, keys] and there is one sink a head"
        )
    column = sinks[:, None, None].to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]


def sink_share(weights: Tensor) -> Tensor:
    """[..., heads, queries] attention that went to the sink: what a row of weights lacks to one."""
    return 1 - weights.sum(dim=-1)


def apply_sink(output: Tensor, log_sum_exp: Tensor, sinks: Tensor) -> Tensor:
    """Turn the output of plain softmax attention into the output with sinks.

    output: [..., heads, queries, head_dim]; log_sum_exp: [..., heads, queries] of its scores.
    output * sigmoid(log_sum_exp - sink): exp(lse) / (exp(lse) + exp(sink)) is what the real keys
    keep. Flash kernels return the log-sum-exp, so a kernel without sinks can be corrected by this.
    """
    return output * (log_sum_exp - sinks[:, None]).sigmoid().unsqueeze(-1)


# --- routing and experts -----------------------------------------------------------------------


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(weights, experts), both [tokens, top_k]: pick the top-k first, then softmax over those.

    logits: [tokens, experts], the router's output with its bias. Weights of a token sum to one.
    """
    values, experts = logits.topk(top_k, dim=-1)
    return values.softmax(dim=-1), experts


def expert_load(experts: Tensor, num_experts: int) -> Tensor:
    """int64 [num_experts]: how many (token, choice) pairs picked each expert."""
    return experts.flatten().bincount(minlength=num_experts)


def clamped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """[..., intermediate] from [..., 2 * intermediate] with gate and up interleaved.

    (up + 1) * gate * sigmoid(alpha * gate), gate clamped above and up on both sides by `limit`.
    """
    gate = gate_up[..., ::2].clamp(max=limit)
    up = gate_up[..., 1::2].clamp(min=-limit, max=limit)
    return (up + 1) * gate * (alpha * gate).sigmoid()


# --- YaRN --------------------------------------------------------------------------------------


def yarn_correction_range(config: object = GPT_OSS_20B) -> tuple[float, float]:
    """(low, high): rotary pairs below `low` keep their frequency, above `high` it is divided.

    In between a linear ramp blends the two. gpt-oss: 8.092779115512402 to 17.39802450158856.
    `truncate` is false in gpt-oss: rounding these outward, as other YaRN models do, shifts the
    frequencies in between (vLLM pull requests 27722 and 28244).
    """
    arch = read_architecture(config)

    def pair_that_turns(times: float) -> float:
        """Index of the pair that makes `times` turns within the original context."""
        wavelength = arch.original_max_position_embeddings / (times * 2 * math.pi)
        return arch.head_dim * math.log(wavelength) / (2 * math.log(arch.rope_theta))

    low, high = pair_that_turns(arch.beta_fast), pair_that_turns(arch.beta_slow)
    if arch.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, arch.head_dim - 1)


def yarn_attention_factor(factor: float = _YARN["factor"]) -> float:
    """0.1 * ln(factor) + 1, which multiplies cos and sin (gpt-oss, factor 32: 1.34657)."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def rope_inverse_frequencies(config: object = GPT_OSS_20B) -> Tensor:
    """float32 [head_dim / 2], radians a token of each rotary pair, before YaRN."""
    import torch

    arch = read_architecture(config)
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    return 1 / arch.rope_theta**exponents


def yarn_inverse_frequencies(config: object = GPT_OSS_20B) -> Tensor:
    """float32 [head_dim / 2], radians a token of each rotary pair, after YaRN."""
    import torch

    arch, plain = read_architecture(config), rope_inverse_frequencies(config)
    low, high = yarn_correction_range(arch)
    high += 0.001 if low == high else 0  # as upstream: no division by zero
    ramp = ((torch.arange(len(plain), dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / arch.factor * ramp
