"""Routing replay (R3, arXiv 2510.11370): the trainer sends each token to the experts that the rollout took.

Where two router scores lie close together, the last bits decide which expert a token takes, so two engines on
the same weights run different functions for some tokens. What is replayed is the choice alone: the chosen
experts are weighted by the softmax of the trainer's own router logits, so that the router keeps its gradient.
The switch is megatron-core's (megatron/core/transformer/moe/router_replay.py); when it is thrown and with
which rows is decided here.

    SGLang, an answer            Batch.routed_experts              Megatron, a router
    base64 int32 [T - 1, L, K]   int16 [B, S, L, K], -1: not run   int64 [S / TP * B, K], position by position
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import GptOssForCausalLM

    from helpers.records import Batch
    from helpers.trainer import MegatronTrainer

NOT_RUN = -1  # in place of an expert: the rollout engine never ran this position


@dataclass(frozen=True)
class RoutingShape:
    """layers of the model, experts of a layer, experts that each token takes (chosen)."""

    layers: int
    experts: int
    chosen: int

    @classmethod
    def of(cls, config: Mapping) -> RoutingShape:
        """From a gpt-oss checkpoint's config.json, in which every layer has experts."""
        return cls(config["num_hidden_layers"], config["num_local_experts"], config["num_experts_per_tok"])


class RoutingDifference(NamedTuple):
    """How often two engines chose differently, the order of a token's experts aside.

    routers: share of (token, layer) with another set of experts.
    tokens: share of tokens with one such layer or more.
    """

    routers: float
    tokens: float


# --- from the rollout ---------------------------------------------------------------------------------------
def decode_experts(encoded: str, tokens: int, shape: RoutingShape) -> np.ndarray:
    """int16 [tokens - 1, layers, chosen] from SGLang's meta_info["routed_experts"] (base64 of int32).

    tokens: length of prompt and completion; the last token was sampled and never run.
    Raises ValueError for another size, and as check_experts does.

    Two tokens of which one was run, two layers, top-2 of 4 experts:
    >>> import numpy as np
    >>> text = base64.b64encode(np.array([[[3, 0], [1, 2]]], np.int32).tobytes()).decode()
    >>> decode_experts(text, 2, RoutingShape(2, 4, 2)).tolist()
    [[[3, 0], [1, 2]]]
    """
    import numpy as np

    flat = np.frombuffer(base64.b64decode(encoded), np.int32)
    wanted = (tokens - 1, shape.layers, shape.chosen)
    if flat.size != np.prod(wanted):
        raise ValueError(
            f"SGLang returned {flat.size} routed experts for an answer of {tokens} tokens; "
            f"{wanted[0]} tokens that were run x {shape.layers} layers x top-{shape.chosen} are "
            f"{np.prod(wanted)}; check that server and config.json belong together and that "
            "routed_experts_start_len is 0"
        )
    experts = flat.reshape(wanted)
    check_experts(experts, shape)
    return experts.astype(np.int16)


def check_experts(experts: np.ndarray | Tensor, shape: RoutingShape) -> None:
    """Refuse a choice that no router can have made.

    experts: [..., layers, chosen]; a token's row may be NOT_RUN as a whole.
    Raises ValueError: other layers or top-k, an expert that is not there, one expert twice for a token.
    """
    if tuple(experts.shape[-2:]) != (shape.layers, shape.chosen):
        raise ValueError(
            f"routed experts of shape {tuple(experts.shape)} end in layers x top-k; the model has "
            f"{shape.layers} x {shape.chosen}, so they come from another model"
        )
    absent = experts < 0
    foreign = (experts >= shape.experts) | (experts < NOT_RUN)
    if foreign.any() or (absent.any(-1) ^ absent.all(-1)).any():
        raise ValueError(
            f"a routed expert is none of 0 to {shape.experts - 1} (they lie in {int(experts.min())} to "
            f"{int(experts.max())}); check that rollout and trainer serve the same checkpoint"
        )
    pairs = combinations(range(shape.chosen), 2)
    if any(((experts[..., i] == experts[..., j]) & ~absent[..., i]).any() for i, j in pairs):
        raise ValueError(
            "a token takes the same expert twice, which no top-k gives; an engine that records nothing "
            "answers with zeros, as SGLang does under --moe-runner-backend triton_kernel (its own choice for "
            "gpt-oss on Hopper): start it with --moe-runner-backend triton"
        )


def routing_difference(ours: Tensor, theirs: Tensor) -> RoutingDifference:
    """Compare two choices [B, S, layers, chosen] where both ran the token.

    Two tokens, two layers: the first token's second layer differs, the third position was not run.
    >>> import torch
    >>> ours = torch.tensor([[[[0, 1], [0, 1]], [[2, 3], [2, 3]], [[0, 1], [0, 1]]]])
    >>> theirs = torch.tensor([[[[1, 0], [0, 2]], [[2, 3], [3, 2]], [[-1, -1], [-1, -1]]]])
    >>> routing_difference(ours, theirs)
    RoutingDifference(routers=0.25, tokens=0.5)
    """
    ran = ((ours >= 0) & (theirs >= 0)).all(-1).all(-1)
    if not ran.any():
        raise ValueError("no token was run by both engines, so there is nothing to compare")
    differ = (ours[ran].sort(-1).values != theirs[ran].sort(-1).values).any(-1)
    return RoutingDifference(differ.float().mean().item(), differ.any(-1).float().mean().item())


# --- into the trainer ---------------------------------------------------------------------------------------
@contextmanager
def replaying(chunks: Sequence, experts: Tensor | None) -> Iterator[None]:
    """Inside the block, the model chunks of this rank take the experts that `choose_experts` hands them.

    experts: Batch.routed_experts of the whole batch, for its check; with None nothing happens.
    Raises ValueError as check_experts does, and for settings under which Megatron would ignore the choice.
    """
    if experts is None:
        yield
        return
    from megatron.core.utils import get_model_config

    _check(get_model_config(chunks[0]), experts)
    routers = [router for chunk in chunks for router in moe_routers(chunk)]
    hooks = [_switch(router).register_forward_pre_hook(_before_routing) for router in routers]
    try:
        yield
    finally:
        _release(routers, hooks)


def choose_experts(model, experts: Tensor) -> None:
    """The next forward pass of this model chunk, and its recomputation, send the tokens to these experts.

    experts: [B, S, layers, chosen] of the micro-batch, on the model's device. Inside `replaying`, each pass.
    """
    routers = moe_routers(model)
    layers = [router.layer_number - 1 for router in routers]
    for router, rows in zip(routers, _router_rows(experts[:, :, layers], routers[0].config), strict=True):
        if router.config.recompute_granularity is None:
            router.router_replay.clear_indices()  # else they are kept until the backward pass asks for them
        router.router_replay.set_target_indices(rows)


def moe_routers(model) -> list:
    """Megatron's routers of a model chunk; router.layer_number counts from 1 over all pipeline stages."""
    from megatron.core.transformer.moe.router import TopKRouter

    return [module for module in model.modules() if isinstance(module, TopKRouter)]


def own_experts(trainer: MegatronTrainer, batch: Batch) -> Tensor:
    """int16 [B, S, layers, chosen] on the CPU: what the trainer's routers choose by themselves, everywhere.

    For one rank. Raises ValueError for several.
    """
    if trainer.settings.trainer.ranks > 1:
        raise ValueError("own_experts reads the routers of one rank; ask a trainer with trainer.ranks = 1")
    routers = [router for chunk in trainer.model.chunks for router in moe_routers(chunk)]
    seen: dict[int, list[Tensor]] = {router.layer_number: [] for router in routers}
    hooks = [_record(router, seen[router.layer_number]) for router in routers]
    try:
        trainer.logprobs(replace(batch, routed_experts=None))
    finally:
        _release(routers, hooks)
    return _batch_order([seen[layer] for layer in sorted(seen)], batch.size[1])


# --- the same in transformers, as a second opinion ----------------------------------------------------------
@contextmanager
def replaying_reference(
    reference: GptOssForCausalLM, experts: Tensor, lengths: Sequence[int]
) -> Iterator[None]:
    """Inside the block, transformers' routers take the experts of one sequence after the other.

    experts: [B, S, layers, chosen]; where NOT_RUN, a router chooses by itself. lengths: of the sequences.
    For one forward pass a sequence, as helpers.faults.logprobs and helpers.parity.reference_gradients do.
    """
    routers = [block.mlp.router for block in reference.model.layers]
    for layer, router in enumerate(routers):
        rows = [experts[i, :length, layer].to(reference.device) for i, length in enumerate(lengths)]
        router.forward = partial(_route_as_told, router, iter(rows))
    try:
        yield
    finally:
        for router in routers:
            del router.forward  # the class's own


def _route_as_told(router, rows: Iterator[Tensor], hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """GptOssTopKRouter.forward (transformers 5.12) with the choice given: logits, weights and indices."""
    from torch import where
    from torch.nn.functional import linear

    logits, told = linear(hidden, router.weight, router.bias), next(rows)
    chosen = where(told < 0, logits.topk(router.top_k, dim=-1).indices, told.long())
    return logits, logits.gather(-1, chosen).softmax(-1), chosen


# --- inside -------------------------------------------------------------------------------------------------
def _check(config, experts: Tensor) -> None:
    """Refuse what would go wrong in silence. config: Megatron's TransformerConfig."""
    if config.moe_router_fusion:
        raise ValueError(
            "moe_router_fusion is on: TransformerEngine's fused router looks at no replay; switch it off to "
            "replay routing"
        )
    if config.context_parallel_size > 1:
        raise ValueError(
            "routing replay does not cut sequences for context parallelism; keep context_parallel_size 1"
        )
    check_experts(experts, RoutingShape(config.num_layers, config.num_moe_experts, config.moe_router_topk))


def _switch(router):
    """The router with megatron-core's switch, which moe_enable_routing_replay would have built in."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    if router.router_replay is None:
        router.router_replay = RouterReplay()
    return router


def _before_routing(router, inputs) -> None:
    """A recomputation runs inside the backward pass, with the rows of the oldest pass that is still open."""
    import torch
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    recomputing = torch._C._current_graph_task_id() != -1  # as torch.utils.checkpoint tells it
    action = RouterReplayAction.REPLAY_BACKWARD if recomputing else RouterReplayAction.REPLAY_FORWARD
    router.router_replay.set_router_replay_action(action)


def _release(routers: Sequence, hooks: Sequence) -> None:
    for hook in hooks:
        hook.remove()
    for router in routers:
        router.router_replay.clear_indices()
        router.router_replay.clear_router_replay_action()


def _record(router, seen: list[Tensor]):
    """Collect what the router chooses in each forward pass; returns the hook."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    _switch(router).router_replay.set_router_replay_action(RouterReplayAction.RECORD)
    return router.register_forward_hook(
        lambda router, inputs, output: seen.append(router.router_replay.get_recorded_indices())
    )


def _router_rows(experts: Tensor, config) -> Tensor:
    """int64 [layers, tokens of this rank, chosen] from [B, S, layers, chosen], in Megatron's order.

    That is position first. Positions that were not run take the experts in turn: no expert twice, as the
    dispatcher demands, and no expert all of the padding. Their outputs reach no trained token: attention is
    causal, and they are masked.
    """
    import torch

    rows = experts.permute(2, 1, 0, 3)
    if config.sequence_parallel:
        from megatron.core import parallel_state

        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rows = rows.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    rows = rows.flatten(1, 2).long()
    count = rows.shape[1] * rows.shape[2]
    in_turn = torch.arange(count, device=rows.device).view(rows.shape[1:]) % config.num_moe_experts
    return torch.where(rows < 0, in_turn, rows)


def _batch_order(layers: Sequence[Sequence[Tensor]], length: int) -> Tensor:
    """int16 [B, S, layers, chosen] from each layer's micro-batches [S * b, chosen]."""
    import torch

    table = [
        torch.cat([rows.unflatten(0, (length, -1)) for rows in passes], dim=1).transpose(0, 1)
        for passes in layers
    ]
    return torch.stack(table, dim=2).short().cpu()
