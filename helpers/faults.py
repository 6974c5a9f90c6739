"""Planted faults: a reference gpt-oss that computes what a broken engine would, and which of them explains given logprobs.

A wrong engine runs without an error, and its numbers are the only symptom. So the known mistakes are kept here as small
changes to a sound model: transformers' GptOssForCausalLM in float32 with attn_implementation="eager" and
experts_implementation="eager". Notebook 02, the parity tests and `python -m helpers.doctor` plant them one at a time and
see which one reproduces the numbers of the engine at hand.

    with FAULTS["sinks-ignored"].plant(model):
        broken = logprobs(model, sequences)

Left out: what a forward pass over whole sequences cannot show (caches, races, gradients). Threads are named as text,
"<project> <number>"; pitfalls are numbered as in tests/integration/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.anatomy import FULL, SLIDING, component_of, rope_inverse_frequencies, yarn_inverse_frequencies
from helpers.tensor_files import check_checkpoint, is_quantised, read_config, read_rows

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GptOssConfig, GptOssForCausalLM

Change = tuple[object, str, Any]  # (owner, attribute, its value while the fault is planted)
FAR_BELOW = -1e4  # a logit whose exp() is 0 in float32 and that bfloat16 still holds


@dataclass(frozen=True)
class Fault:
    """One known mistake. changes(model) lists what to swap; unfit(config) says why it cannot occur there, else "".

    references: public threads where people met it. weights: whether a checkpoint with other weights has the same effect
    (then `model.state_dict()` inside `plant` is that checkpoint).
    """

    name: str
    what: str
    cause: str
    cure: str
    references: str
    changes: Callable[[GptOssForCausalLM], Iterable[Change]]
    unfit: Callable[[GptOssConfig], str] = lambda config: ""
    weights: bool = False

    @contextmanager
    def plant(self, model: GptOssForCausalLM) -> Iterator[GptOssForCausalLM]:
        """`model` with the fault; restored exactly, also after an error. Raises ValueError where it cannot occur.

        New tensors stand beside the old ones meanwhile: at most the model's size once more.
        """
        if reason := self.unfit(model.config):
            raise ValueError(f"fault {self.name} cannot be planted in this model: {reason}")
        undo = []
        try:
            for owner, attribute, value in list(self.changes(model)):
                undo.append((owner, attribute, getattr(owner, attribute), attribute in vars(owner)))
                setattr(owner, attribute, value)
            yield model
        finally:
            for owner, attribute, old, own in reversed(undo):
                if callable(old) and not own:
                    delattr(owner, attribute)  # a method of the class, hidden by a function of the instance
                else:
                    setattr(owner, attribute, old)


FAULTS: dict[str, Fault] = {}


def _fault(name: str, what: str, cause: str, cure: str, references: str = "", **more):
    """Register the decorated function as the `changes` of a fault."""

    def register(changes: Callable) -> Callable:
        FAULTS[name] = Fault(name, what, cause, cure, references, changes, **more)
        return changes

    return register


# --- where things are ---------------------------------------------------------------------------------------------------


def _attentions(model):
    return [layer.self_attn for layer in model.model.layers]


def _experts(model):
    return [layer.mlp.experts for layer in model.model.layers]


def _routers(model):
    return [layer.mlp.router for layer in model.model.layers]


def _one_kv_head(config) -> str:
    groups = config.num_attention_heads // config.num_key_value_heads
    fits = groups > 1 and config.num_key_value_heads > 1
    return "" if fits else "it needs two key-value heads with two queries each"


# --- sinks --------------------------------------------------------------------------------------------------------------


@_fault(
    "sinks-ignored", "attention without the learned sink logits",
    "the attention kernel has no learnable softmax and drops the sinks without a word",
    "choose an attention backend that takes sinks (TransformerEngine with cuDNN >= 9.18, FlashAttention 3, Triton, eager)",
    "pitfalls 1 and 3: verl 3794, 3894, 5224; slime 996; TransformerEngine 2483, 2568", weights=True,
)  # fmt: skip
def _(model):
    for attention in _attentions(model):
        yield attention.sinks, "data", attention.sinks.new_full(attention.sinks.shape, FAR_BELOW)


@_fault(
    "sinks-of-other-heads", "each head uses the sink of another head (order reversed)",
    "sinks were split or gathered over tensor-parallel ranks in another order than the heads",
    "shard sinks along heads exactly as q_proj; compare sinks rank by rank after loading",
    "pitfall 2", weights=True, unfit=lambda c: "" if c.num_attention_heads > 1 else "it needs two heads",
)  # fmt: skip
def _(model):
    for attention in _attentions(model):
        yield attention.sinks, "data", attention.sinks.data.flip(0)


@_fault(
    "sinks-in-bfloat16", "sinks rounded to bfloat16",
    "SGLang keeps sinks in bfloat16 whatever --dtype says, unless the attention backend is trtllm_mha",
    "expected of SGLang 0.5.17 with float32 weights: round the trainer's sinks likewise, or keep the model in bfloat16",
    "sglang 0.5.17 models/gpt_oss.py", weights=True,
)  # fmt: skip
def _(model):
    for attention in _attentions(model):
        yield attention.sinks, "data", attention.sinks.data.bfloat16().float()


# --- window -------------------------------------------------------------------------------------------------------------


def _narrow(config) -> str:
    return "" if config.sliding_window > 1 else "a window of one token cannot be narrower"


@_fault(
    "window-one-short", "sliding layers see one token too few",
    "TransformerEngine's left size counts the tokens before the token, Hugging Face's sliding_window counts the token too; "
    "the correction by one was made twice",
    "give TransformerEngine (sliding_window - 1, 0), once; SGLang's sliding_window_size takes sliding_window - 1 as well",
    "pitfall 5: Megatron-Bridge 2656", unfit=_narrow,
)  # fmt: skip
def _(model):
    yield model.config, "sliding_window", model.config.sliding_window - 1


@_fault(
    "window-one-long", "sliding layers see one token too many",
    "sliding_window was handed over as a count of tokens before the token, without the correction by one",
    "give TransformerEngine (sliding_window - 1, 0): 128 tokens are the token itself and 127 before it",
    "pitfall 5: Megatron-Bridge 2656",
)  # fmt: skip
def _(model):
    yield model.config, "sliding_window", model.config.sliding_window + 1


@_fault(
    "window-on-odd-layers", "odd layers slide and even ones see everything",
    "the pattern was counted from one, or window_attn_skip_freq starts at the other parity",
    "layer 0 slides in gpt-oss: check layer_types, and window_attn_skip_freq = 2 in Megatron",
    "pitfall 5: Megatron-Bridge 2656", unfit=lambda c: "" if len(set(c.layer_types)) > 1 else "all layers are of one kind",
)  # fmt: skip
def _(model):
    other = {SLIDING: FULL, FULL: SLIDING}
    yield model.config, "layer_types", [other[kind] for kind in model.config.layer_types]


@_fault(
    "window-missing", "all layers see everything",
    "the attention backend ignores the window, or the config lost sliding_window or layer_types",
    "choose a backend with sliding windows and check sliding_window and layer_types in config.json",
    "pitfall 16: sglang 11634, 32087", unfit=lambda c: "" if SLIDING in c.layer_types else "no layer slides",
)  # fmt: skip
def _(model):
    yield model.config, "layer_types", [FULL] * len(model.config.layer_types)


# --- rotary positions ---------------------------------------------------------------------------------------------------


def _plain_rope(config) -> str:
    return "" if config.rope_parameters["rope_type"] == "yarn" else "its positions are not YaRN's"


@_fault(
    "yarn-missing", "plain RoPE: neither YaRN's frequencies nor its attention factor",
    "the engine or the converted config dropped rope_scaling (rope_parameters in transformers 5)",
    "set rope_type yarn, factor 32, original_max_position_embeddings 4096 (Megatron: position_embedding_type = 'yarn')",
    "pitfall 4: vllm 27722; NeMo-RL 869", unfit=_plain_rope,
)  # fmt: skip
def _(model):
    yield model.model.rotary_emb, "inv_freq", rope_inverse_frequencies(model.config)
    yield model.model.rotary_emb, "attention_scaling", 1.0


@_fault(
    "yarn-bounds-rounded", "YaRN's correction range rounded outward to whole pairs",
    "truncate (Megatron: yarn_correction_range_round_to_int) is true, as other YaRN models want it",
    "set truncate to false: gpt-oss blends from 8.0928 to 17.3980, not from 8 to 18",
    "pitfall 4: vllm 27722, 28244; NeMo-RL 1801",
    unfit=lambda c: _plain_rope(c) or ("it rounds already" if c.rope_parameters.get("truncate", True) else ""),
)  # fmt: skip
def _(model):
    rounded = {**model.config.to_dict()["rope_parameters"], "truncate": True}
    config = {**model.config.to_dict(), "rope_parameters": rounded}
    yield model.model.rotary_emb, "inv_freq", yarn_inverse_frequencies(config)


@_fault(
    "yarn-factor-missing", "cos and sin lack YaRN's attention factor 0.1 ln(factor) + 1 (gpt-oss: 1.34657)",
    "the frequencies were ported and mscale was not, or mscale was set to 1",
    "multiply cos and sin by 1.34657 (Megatron: leave yarn_mscale and yarn_mscale_all_dim at None)",
    "pitfall 4: Megatron-LM 2038; NeMo-RL 869", unfit=_plain_rope,
)  # fmt: skip
def _(model):
    yield model.model.rotary_emb, "attention_scaling", 1.0


@_fault(
    "rope-twice", "queries and keys are rotated twice",
    "a fused attention rotates again what the model rotated already",
    "switch one of the two off (Megatron: apply_rope_fusion)",
    "pitfall 4: Megatron-LM 2038; NeMo-RL 1801",
)  # fmt: skip
def _(model):
    rotary = model.model.rotary_emb  # two rotations by an angle are one by twice the angle
    yield rotary, "inv_freq", 2 * rotary.inv_freq
    yield rotary, "attention_scaling", rotary.attention_scaling**2


# --- attention weights --------------------------------------------------------------------------------------------------


@_fault(
    "kv-heads-in-turn", "query head h uses key-value head h mod n instead of h // (heads / n)",
    "keys and values were repeated as a block (repeat) instead of head by head (repeat_interleave)",
    "repeat each key-value head for its group of neighbouring query heads",
    "pitfall 6: Megatron-Bridge 3743", unfit=_one_kv_head,
)  # fmt: skip
def _(model):
    for attention in _attentions(model):
        yield attention, "num_key_value_groups", 1
        for projection in (attention.k_proj, attention.v_proj):
            heads = projection.weight.data.unflatten(0, (-1, attention.head_dim))
            yield projection.weight, "data", _repeated(heads, attention).flatten(0, 1)
            bias = projection.bias.data.unflatten(0, (-1, attention.head_dim))
            yield projection.bias, "data", _repeated(bias, attention).flatten(0, 1)


def _repeated(heads: Tensor, attention) -> Tensor:
    return heads.repeat(attention.num_key_value_groups, *[1] * (heads.ndim - 1))


@_fault(
    "qkv-split-flat", "Megatron's fused QKV, which is stored group by group, was split as all q, all k, all v",
    "the converter cut linear_qkv into three blocks of rows",
    "split linear_qkv by key-value group: heads/n queries, one key, one value, and again (Megatron-Bridge's QKVMapping)",
    "pitfall 6: Megatron-Bridge 3743; slime 1840", weights=True,
    unfit=lambda c: "" if c.num_key_value_heads > 1 else "one group is the same in both orders",
)  # fmt: skip
def _(model):
    for attention in _attentions(model):
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        for kind in ("weight", "bias"):
            tensors = [getattr(p, kind) for p in projections]
            yield from (
                (t, "data", new) for t, new in zip(tensors, _split_flat(tensors, attention), strict=True)
            )


def _split_flat(tensors, attention) -> tuple[Tensor, ...]:
    import torch

    groups = attention.config.num_key_value_heads
    fused = torch.cat([t.data.unflatten(0, (groups, -1)) for t in tensors], dim=1).flatten(0, 1)
    return fused.split([len(t) for t in tensors])


@_fault(
    "norms-swapped", "input_layernorm and post_attention_layernorm exchanged",
    "the name mapping gave each norm the other's weights; fresh norms are all ones and hide it",
    "map input_layernorm to the attention's norm and post_attention_layernorm to the MLP's; test with uneven norms",
    "pitfall 6", weights=True,
)  # fmt: skip
def _(model):
    for layer in model.model.layers:
        before, after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        yield from ((before, "data", after.data), (after, "data", before.data))


# --- experts and router -------------------------------------------------------------------------------------------------


def _gate_and_up(experts):
    return experts.gate_up_proj, experts.gate_up_proj_bias


@_fault(
    "gate-up-halves", "the first half of gate_up's columns taken as gate, the second as up",
    "gpt-oss interleaves the two (even columns gate, odd columns up); the engine expects two blocks and nobody reordered",
    "reorder gate_up_proj and its bias on the way in, and back on the way out",
    "pitfall 6: slime 1840, 2004; Megatron-Bridge 3743", weights=True,
)  # fmt: skip
def _(model):
    for tensor in (t for experts in _experts(model) for t in _gate_and_up(experts)):
        # what interleaving two halves of already interleaved columns gives
        yield tensor, "data", tensor.data.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).contiguous()


@_fault(
    "gate-up-exchanged", "even columns taken as up, odd ones as gate",
    "the two were joined as (up, gate), or the slices [::2] and [1::2] were exchanged",
    "even columns are gate, odd columns are up", "pitfall 6: slime 1840", weights=True,
)  # fmt: skip
def _(model):
    for tensor in (t for experts in _experts(model) for t in _gate_and_up(experts)):
        yield tensor, "data", tensor.data.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


@_fault(
    "gate-up-bias-in-halves", "gate_up_proj is read rightly and its bias as two halves",
    "the converter reorders the matrix and forgets the bias", "reorder gate_up_proj_bias exactly as gate_up_proj",
    "pitfall 6: slime 2004", weights=True,
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        bias = experts.gate_up_proj_bias
        yield bias, "data", bias.data.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2).contiguous()


@_fault(
    "down-proj-transposed", "down_proj used as [out, in]",
    "a plain checkpoint keeps experts [in, out], an MXFP4 one [out, in]; square matrices do not show which",
    "transpose down_proj of a plain checkpoint for Megatron, and do not transpose a de-quantised one",
    "pitfall 6: slime 1840, 2004; Megatron-Bridge 3743", weights=True,
    unfit=lambda c: "" if c.hidden_size == c.intermediate_size
    else "down_proj is not square, its shape would be refused",
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts.down_proj, "data", experts.down_proj.data.transpose(1, 2).contiguous()


@_fault(
    "gate-up-bias-dropped", "no bias on gate and up",
    "the expert kernel or the export has no bias for gate_up_proj", "choose an expert backend with biases; export them",
    "pitfall 26: sglang 25692, 27787", weights=True,
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts.gate_up_proj_bias, "data", experts.gate_up_proj_bias.data * 0


@_fault(
    "down-bias-dropped", "no bias on the experts' output",
    "the expert kernel or the export has no bias for down_proj", "choose an expert backend with biases; export them",
    "pitfall 26: sglang 25692, 27787", weights=True,
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts.down_proj_bias, "data", experts.down_proj_bias.data * 0


@_fault(
    "down-bias-twice", "the experts' output bias counted twice",
    "with expert tensor parallelism 2 each rank adds the whole bias before the sum over ranks",
    "set expert_tensor_parallel_size to 1, or add the bias on one rank only", "pitfall 8: Megatron-LM 2383", weights=True,
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts.down_proj_bias, "data", experts.down_proj_bias.data * 2


@_fault(
    "router-bias-dropped", "router logits without their bias",
    "the router's bias was taken for the bias of aux-loss-free balancing, or not mapped",
    "map mlp.router.bias to the router's linear bias (Megatron: add_bias_linear covers the router)",
    "pitfall 9: Megatron-LM 1971", weights=True,
)  # fmt: skip
def _(model):
    for router in _routers(model):
        yield router.bias, "data", router.bias.data * 0


@_fault(
    "router-softmax-first", "softmax over all experts, then top-k: the weights of a token do not sum to one",
    "moe_router_pre_softmax is on, or the kernel renormalises nothing", "top-k first, softmax over the chosen ones",
    "pitfall 9: Megatron-LM 1971",
    unfit=lambda c: "" if c.num_experts_per_tok < c.num_local_experts else "all experts are chosen anyway",
)  # fmt: skip
def _(model):
    for router in _routers(model):
        yield router, "forward", _softmax_first(router)


def _softmax_first(router):
    import torch

    def forward(hidden_states):
        logits = torch.nn.functional.linear(hidden_states, router.weight, router.bias)
        weights, chosen = logits.softmax(-1).topk(router.top_k, dim=-1)
        return logits, weights, chosen

    return forward


@_fault(
    "swiglu-unclamped", "gate and up are not clamped at 7",
    "swiglu_limit is missing from the config (transformers' GptOssConfig lacks the field) or from the kernel",
    "write swiglu_limit: 7.0 into config.json; in Megatron activation_func_clamp_value = 7.0",
    "sglang 0.5.17 models/gpt_oss.py",
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts, "limit", math.inf


@_fault(
    "swiglu-alpha-one", "gate * sigmoid(gate) instead of gate * sigmoid(1.702 gate)",
    "the usual SiLU was used in place of gpt-oss's quick GELU", "use alpha = 1.702 (Megatron: activation_func = quick_gelu)",
    "Megatron-Bridge models/gpt_oss/gpt_oss_bridge.py",
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts, "alpha", 1.0


@_fault(
    "swiglu-offset-missing", "up * glu instead of (up + 1) * glu",
    "the usual SwiGLU has no offset", "add one to up (Megatron: glu_linear_offset = 1.0)",
    "Megatron-Bridge models/gpt_oss/gpt_oss_bridge.py",
)  # fmt: skip
def _(model):
    for experts in _experts(model):
        yield experts, "_apply_gate", _without_offset(experts)


def _without_offset(experts):
    def apply_gate(gate_up):
        gate = gate_up[..., ::2].clamp(max=experts.limit)
        up = gate_up[..., 1::2].clamp(-experts.limit, experts.limit)
        return up * gate * (experts.alpha * gate).sigmoid()

    return apply_gate


# --- faults that need a number or a folder ------------------------------------------------------------------------------


def temperature(value: float) -> Fault:
    """Logprobs of logits / `value`: what one side reports when only the other one applies the sampling temperature."""

    def changes(model):
        head = model.lm_head
        yield head, "forward", lambda hidden: type(head).forward(head, hidden) / value

    return Fault(
        "temperature",
        f"logprobs at temperature {value:.3g} where 1 was expected",
        "one side divides its logits by the sampling temperature and the other does not",
        "apply the sampling temperature on both sides (SGLang's output logprobs have it) or sample at 1",
        "sglang 0.5.17: output logprobs are of logits / temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB",
        changes,
    )


FAULTS["temperature"] = temperature(0.5)


def stale_faults(older: Path | str) -> dict[str, Fault]:
    """ "stale-<component>" for each component of anatomy, "stale-experts" and "stale-all": parts of an older checkpoint.

    older: a plain (not quantised) folder of the same shape; its tensors are read when a fault is planted.
    """
    parts = {p: {p} for p in ("attention", "sinks", "norms", "router", "embedding", "head")}
    parts["expert matrices"], parts["expert biases"] = {"expert matrices"}, {"expert biases"}
    parts["experts"] = parts["expert matrices"] | parts["expert biases"]
    parts["all"] = set().union(*parts.values())
    faults = (_stale(Path(older), name, components) for name, components in parts.items())
    return {fault.name: fault for fault in faults}


def _stale(older: Path, part: str, components: set[str]) -> Fault:
    def changes(model):
        ours = {n: p for n, p in model.named_parameters() if component_of(n) in components}
        stored = check_checkpoint(older).tensors
        for name in ours:
            yield ours[name], "data", read_rows(stored[name]).to(ours[name].dtype)

    return Fault(
        f"stale-{part.replace(' ', '-')}",
        f"{part} of the older checkpoint {older.name}",
        "a weight sync reported success and did not change them (packed or quantised layout, unknown name)",
        "serve a plain checkpoint, send Hugging Face names, and ask for logprobs after each sync",
        "pitfalls 15 and 26: sglang 25692, 27787",
        changes,
        weights=True,
    )


def fitting_faults(config: GptOssConfig, faults: Mapping[str, Fault] = FAULTS) -> dict[str, Fault]:
    """Those faults that can occur in a model of this config."""
    return {name: fault for name, fault in faults.items() if not fault.unfit(config)}


# --- which fault explains these numbers? --------------------------------------------------------------------------------


def load_reference(folder: Path | str) -> GptOssForCausalLM:
    """The checkpoint in transformers' plainest implementation, float32, on the CPU: 4 bytes a parameter."""
    import torch
    from transformers import GptOssForCausalLM, Mxfp4Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    plain = {}
    if is_quantised(read_config(Path(folder))):
        plain["quantization_config"] = Mxfp4Config(dequantize=True)
    model = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", **plain
    )
    return model.float().eval()  # transformers de-quantises to bfloat16, whatever dtype says


def logprobs(
    model: GptOssForCausalLM, sequences: Sequence[Sequence[int]], temperature: float = 1.0
) -> Tensor:
    """float32 [sum of (length - 1)]: log p(tokens[t] | before) for t >= 1 of each sequence, one after the other."""
    import torch

    parts = [
        (logits / temperature).log_softmax(-1).gather(-1, following)[:, 0]
        for logits, following in _predictions(model, sequences)
    ]
    return torch.cat(parts)


def _predictions(model, sequences) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [length - 1, vocabulary], the tokens that follow [length - 1, 1]) of each sequence, by itself."""
    import torch

    for tokens in sequences:
        ids = torch.tensor([list(tokens)], device=model.device)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, :-1].float()
        yield logits, ids[0, 1:, None]


@dataclass(frozen=True)
class Fit:
    """How well a reference explains given logprobs. fault: None for the sound reference.

    worst, mean: |given - reference| in nats, largest and mean over the tokens that count.
    effect: largest change that the fault makes to the sound reference on these tokens (0 for the sound one).
    """

    fault: Fault | None
    worst: float
    mean: float
    effect: float = 0.0


def rank_faults(
    model: GptOssForCausalLM,
    sequences: Sequence[Sequence[int]],
    given: Tensor,
    faults: Mapping[str, Fault] = FAULTS,
) -> list[Fit]:
    """The sound reference first, then the faulted ones, best explanation first.

    given: [sum of (length - 1)] logprobs of an engine, in the order of `logprobs`; NaN where a token does not count.
    The temperature is fitted rather than tried at one value. Runs the model once a fault.
    """
    counts = given.isfinite()
    sound = logprobs(model, sequences)

    def fit(fault: Fault | None, theirs: Tensor) -> Fit:
        gap = (given - theirs)[counts].abs()
        return Fit(fault, gap.max().item(), gap.mean().item(), (theirs - sound)[counts].abs().max().item())

    fits = []
    for fault in fitting_faults(model.config, faults).values():
        if fault.name == "temperature":
            fault = temperature(fit_temperature(model, sequences, given))
        with fault.plant(model):
            fits.append(fit(fault, logprobs(model, sequences)))
    return [fit(None, sound), *sorted(fits, key=by_mean)]


def by_mean(fit: Fit) -> tuple[bool, float]:
    """Sorting key, best explanation first; a faulted model whose numbers overflowed (NaN) explains nothing."""
    return math.isnan(fit.mean), fit.mean


def shifted_fits(sequences: Sequence[Sequence[int]], given: Tensor, sound: Tensor) -> list[Fit]:
    """`given` as logprobs of the token after, or before, the one that each stands at: no fault of the model.

    given, sound: [sum of (length - 1)], as in `rank_faults`; sound: the reference's. Each sequence loses the token at its
    edge; a direction that leaves less than half of the tokens that count is left out.
    """
    import torch

    fits, lengths = [], [len(tokens) - 1 for tokens in sequences]
    for offset in (1, -1):
        parts = [torch.roll(part, -offset) for part in sound.split(lengths)]
        for part in parts:
            part[-1 if offset == 1 else 0] = math.nan
        theirs = torch.cat(parts)
        counts = given.isfinite() & theirs.isfinite()
        if 2 * counts.sum() >= given.isfinite().sum():
            gap, effect = (given - theirs)[counts].abs(), (theirs - sound)[counts].abs()
            fits.append(Fit(_shifted(offset), gap.max().item(), gap.mean().item(), effect.max().item()))
    return fits


def _shifted(offset: int) -> Fault:
    return Fault(
        "shifted by one",
        f"logprobs[t] is log p(tokens[t{offset:+d}] | before)",
        "labels are shifted twice or not at all",
        "shift once: the logits at t - 1 score tokens[t]; logprobs[0] is null, as nothing stands before it",
        "transformers shifts labels in its loss, Megatron-LM expects them shifted",
        lambda model: (),
    )


def fit_temperature(model: GptOssForCausalLM, sequences: Sequence[Sequence[int]], given: Tensor) -> float:
    """The temperature between 0.1 and 10 whose reference logprobs are nearest to `given` (mean |difference|)."""
    import torch

    logits, following = map(torch.cat, zip(*_predictions(model, sequences), strict=True))
    counts = given.isfinite()

    def distance(log_t: float) -> float:
        ours = (logits / math.exp(log_t)).log_softmax(-1).gather(-1, following)[:, 0]
        return (given - ours)[counts].abs().mean().item()

    return math.exp(_minimum(distance, math.log(0.1), math.log(10)))


def _minimum(
    f: Callable[[float], float], low: float, high: float, points: int = 12, rounds: int = 8
) -> float:
    """Argument of the smallest value of f in [low, high]: a grid that closes in on its best point."""
    for _ in range(rounds):
        step = (high - low) / points
        best = min((min(low + i * step, high) for i in range(points + 1)), key=f)
        low, high = max(low, best - step), min(high, best + step)
    return best
