"""How Megatron cuts gpt-oss among its ranks: sizes of the groups, parameters of one rank, and what cannot be.

Dense parts are cut by TP x PP and copied DP x CP times. Experts have a grid of their own over the same ranks:
cut by ETP x EP x PP and copied EDP times, so EP may be larger than DP (TP8 EP8 on 8 ranks leaves DP1 and
EDP1). Source: megatron/core/parallel_state.py (0.19.2), initialize_model_parallel, order tp-cp-ep-dp-pp. No
torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from helpers.anatomy import Architecture, layer_tensors, read_architecture
from helpers.profiles import ModelSettings, TrainerSettings

# per layer, on every TP rank; all other dense tensors are cut by TP (attention by heads, vocabulary by rows)
_WHOLE = (
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.bias", "mlp.router.weight",
    "mlp.router.bias",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Sizes of the trainer's groups. ranks: all of its GPUs. recompute: each layer's forward pass again in
    its backward."""

    ranks: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    distributed_optimizer: bool = False
    recompute: bool = False

    @classmethod
    def of(cls, trainer: TrainerSettings) -> Layout:
        """That of a profile (which knows neither context parallelism nor recomputation)."""
        return cls(
            trainer.ranks, trainer.tensor_parallel, trainer.pipeline_parallel, 1, trainer.expert_parallel,
            trainer.expert_tensor_parallel, trainer.distributed_optimizer,
        )  # fmt: skip

    @property
    def data(self) -> int:
        """DP: ranks that hold the same dense weights and work on other episodes."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """EDP: ranks that hold the same experts."""
        return self.ranks // (self.expert_tensor * self.expert * self.pipeline)

    def __str__(self) -> str:
        """TP2 EP2 DP1 and so on; what is 1 is left out, except for TP, EP and DP."""
        parts = [
            ("TP", self.tensor),
            ("PP", self.pipeline),
            ("CP", self.context),
            ("EP", self.expert),
            ("ETP", self.expert_tensor),
        ]
        shown = [f"{name}{size}" for name, size in parts if size > 1 or name in ("TP", "EP")]
        return " ".join([*shown, f"DP{self.data}", *["recompute"] * self.recompute])


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank. split: its share of what TP cuts; whole: on every TP rank; experts: of its
    local experts."""

    split: int
    whole: int
    experts: int

    @property
    def dense(self) -> int:
        return self.split + self.whole

    @property
    def total(self) -> int:
        return self.dense + self.experts


_remembered = lru_cache(maxsize=256)(read_architecture)


def architecture(model: object) -> Architecture:
    """anatomy.read_architecture, remembered for a profile's model: a search asks a hundred thousand times."""
    return _remembered(model) if isinstance(model, ModelSettings) else read_architecture(model)


def rank_parameters(model: object, layout: Layout, stage: int = 0) -> RankParameters:
    """Parameters of a rank of pipeline stage `stage`. The layout must be possible (see `impossible`).

    All ranks together hold the model: over stages, TP x split + whole + EP x experts is its parameter count.
    """
    if not 0 <= stage < layout.pipeline:
        raise ValueError(f"there is no pipeline stage {stage} of {layout.pipeline}; the first is 0")
    return _rank_parameters(architecture(model), layout.tensor, layout.pipeline, layout.expert, stage)


@lru_cache(maxsize=4096)
def _rank_parameters(a: Architecture, tensor: int, pipeline: int, expert: int, stage: int) -> RankParameters:
    layers = a.num_hidden_layers // pipeline
    sizes = {name: prod(shape) for name, shape in layer_tensors(a).items()}
    experts = layers * sum(n for name, n in sizes.items() if ".experts." in name)
    whole = layers * sum(sizes[name] for name in _WHOLE)
    split = layers * sum(sizes.values()) - whole - experts
    table, last = a.vocab_size * a.hidden_size, stage == pipeline - 1
    # with tied embeddings a pipeline's last stage holds a copy of the first one's table
    tables = (stage == 0) + (last and not (a.tie_word_embeddings and pipeline == 1))
    return RankParameters((split + tables * table) // tensor, whole + last * a.hidden_size, experts // expert)


# --- what cannot be ---------------------------------------------------------------------------------------------------
REASONS = {  # kind -> the sentence; a layout is refused by the first that holds
    "expert tensors": (
        "ETP{etp}: gpt-oss's experts have biases, which each ETP rank would add once more "
        "(Megatron-LM 2383); use EP"
    ),
    "query heads": "TP{tp}: {heads} query heads do not divide by {tp}",
    "key-value heads": "TP{tp}: {kv} key-value heads do not divide by {tp}",
    "vocabulary": "TP{tp}: a vocabulary of {vocab} does not divide by {tp}",
    "layers": "PP{pp}: {layers} layers do not divide by {pp}",
    "experts": "EP{ep}: {experts} experts do not divide by {ep}",
    "context heads": (
        "CP{cp} with TP{tp}: sinks allow context parallelism by all-to-all over heads only "
        "(TransformerEngine, cp_comm_type a2a), and {kv} key-value heads do not divide by {tp} x {cp}"
    ),
    "context length": "CP{cp}: {sequence} tokens do not divide by 2 x {cp}",
    "sequence": (
        "TP{tp} with CP{cp}: {sequence} tokens do not divide by {tp} x {cp}, as sequence parallelism needs, "
        "which MoE with TP needs"
    ),
    "world": "{ranks} ranks do not divide by TP{tp} x PP{pp} x CP{cp}",
    "expert world": "{ranks} ranks do not divide by ETP{etp} x EP{ep} x PP{pp}",
    "batch": "DP{dp}: {episodes} episodes do not divide by {dp}",
}  # fmt: skip


def impossible(model: object, layout: Layout, episodes: int, sequence: int) -> tuple[str, str] | None:
    """(kind, one line) of why this layout cannot train this model on this batch; None where it can. Kinds:
    REASONS.

    Sources: parallel_state.py (world sizes),
    transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py (2.20.2: learnable softmax
    and windows with CP), moe_layer.py (sequence parallelism with TP), helpers.profiles.
    """
    a, x = architecture(model), layout
    kv, heads, share = a.num_key_value_heads, a.num_attention_heads, x.tensor * x.context
    model_ranks, expert_ranks = share * x.pipeline, x.expert_tensor * x.expert * x.pipeline
    found = {
        "expert tensors": x.expert_tensor > 1,
        "query heads": heads % x.tensor,
        "key-value heads": kv % x.tensor,
        "vocabulary": a.vocab_size % x.tensor,
        "layers": a.num_hidden_layers % x.pipeline,
        "experts": a.num_local_experts % x.expert,
        "context heads": x.context > 1 and (kv % share or heads % share),
        "context length": x.context > 1 and sequence % (2 * x.context),
        "sequence": x.tensor > 1 and sequence % share,
        "world": x.ranks % model_ranks,
        "expert world": x.ranks % expert_ranks,
        "batch": x.ranks % model_ranks or episodes % max(x.data, 1),
    }
    kind = next((kind for kind in REASONS if found[kind]), None)
    if kind is None:
        return None
    return kind, REASONS[kind].format(
        tp=x.tensor, pp=x.pipeline, cp=x.context, ep=x.expert, etp=x.expert_tensor, dp=x.data, ranks=x.ranks,
        heads=heads, kv=kv, vocab=a.vocab_size, layers=a.num_hidden_layers, experts=a.num_local_experts,
        episodes=episodes, sequence=sequence,
    )  # fmt: skip
