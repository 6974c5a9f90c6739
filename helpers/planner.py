"""Which parallel layout fits a cluster, how much memory a GPU needs in each phase, and how long a GRPO step
takes.

    python -m helpers.planner --profile gpu-20b --gpus 8 --card h100 [--model 120b] [--top 8]
    python -m helpers.planner judge                        # predictions beside the recorded runs
    python -m helpers.planner predict --out tests/gpu/recorded/planner_predictions.csv

Bytes come from helpers.memory, FLOPs and bytes of a decode step from helpers.throughput, what a layout cuts
from helpers.layout, and what no formula gives (hosts, libraries) from helpers.calibration. Left out on
purpose: uneven experts, stragglers, overlap of collectives with products, Adam on the CPU, virtual pipeline
stages. No torch, no engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from helpers import calibration
from helpers.anatomy import GPT_OSS_120B
from helpers.calibration import ADAM_BYTES, FITS, LOSS_BYTES, Constants, fitted
from helpers.layout import Layout, architecture, impossible, rank_parameters
from helpers.memory import PHASES, SERVER_RELEASED, parameter_count, server_bytes, trainer_phases
from helpers.messages import OneLineParser
from helpers.profiles import PROFILES, Profile, load_profile, nearest_name
from helpers.results import git_commit, write_rows
from helpers.throughput import Rates, forward_flops, rollout_limit, training_flops

COLOCATED, OFFLOADED, SPLIT = "colocated", "colocated, trainer offloaded", "split"
PLACEMENTS = (COLOCATED, OFFLOADED, SPLIT)
MARGIN = 0.05  # of a card's memory that a plan leaves free: the recorded 20b peaks were predicted within 3%
GIGABYTE = 1e9


# --- hardware ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Card:
    """One GPU. memory in bytes; rates as reached by a large copy and a square bf16 product."""

    name: str
    memory: float
    rates: Rates


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal cards. inside, between: bytes/s of a GPU's link in one direction, within and between
    nodes (data sheets: NVLink 4, one 400 Gbit/s adapter a GPU). host_memory: bytes of a node."""

    card: Card
    gpus: int = 1
    gpus_per_node: int = 8
    inside: float = 450e9
    between: float = 50e9
    host_memory: float = 2e12

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus_per_node < 1:
            raise ValueError(
                f"a cluster of {self.gpus} GPUs, {self.gpus_per_node} a node: both must be at least 1"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"{self.gpus} GPUs do not fill nodes of {self.gpus_per_node}: give a multiple, "
                "or another gpus_per_node"
            )

    def link(self, span: int) -> float:
        """bytes/s of a group whose members lie among `span` consecutive ranks."""
        return self.inside if span <= self.gpus_per_node else self.between


def cards() -> dict[str, Card]:
    """H200: memory as NVML says, rates measured. H100: the same share of its data sheet's bandwidth (3.35
    TB/s, H200 4.8)."""
    rates = calibration.measured_rates()
    slower = Rates(rates.bandwidth * 3.35 / 4.8, rates.flops)  # the same chip with other memory
    return {"h200": Card("H200", 150.75e9, rates), "h100": Card("H100 80 GB", 85.52e9, slower)}


# --- memory -----------------------------------------------------------------------------------------------------------
def trainer_card(
    settings: Profile, tokens: int, layout: Layout, stage: int, constants: Constants
) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes of one trainer process on its card: tensors, CUDA context, libraries, the
    allocator's reserve.

    What torch reserved for forward and backward stays until it must make room for the server, or the trainer
    is offloaded.
    """
    keeps = ("optimizer step",) if settings.rollout.memory_saver else ("optimizer step", "resume", "sync")
    phases, peak = {}, 0.0
    for phase, items in trainer_phases(settings, tokens, layout, stage).items():
        libraries = 0.0 if phase == "server start" else constants.baseline
        libraries += constants.after_step if PHASES.index(phase) >= PHASES.index("optimizer step") else 0.0
        own = sum(items.values()) + libraries
        reserve = max(own * constants.reserve, peak - own if phase in keeps else 0.0)
        if phase == "forward-backward":
            peak = own + reserve
        phases[phase] = items | {
            "libraries": round(libraries), "allocator's reserve": round(reserve),
            "CUDA context": round(constants.contexts[phase]),
        }  # fmt: skip
    return phases


def server_card(settings: Profile, engine: int, constants: Constants) -> dict[str, int]:
    """Item -> bytes of one SGLang process of an engine over `engine` GPUs, awake."""
    return server_bytes(settings, engine) | {"rest of server": round(constants.server_rest)}


def predicted_card(settings: Profile, tokens: int, constants: Constants) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes on the card of a profile with one trainer rank and one server, to compare with a
    recording."""
    server, phases = server_card(settings, 1, constants), {}
    for phase, items in trainer_card(settings, tokens, Layout(), 0, constants).items():
        asleep = settings.rollout.memory_saver and phase in SERVER_RELEASED
        phases[phase] = items | ({"rest of server": server["rest of server"]} if asleep else server)
    return phases


# --- time -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Work:
    """What a step has to do. prompt, response: tokens of an answer. episodes: answers a step."""

    episodes: int
    prompt: int
    response: int

    @property
    def sequence(self) -> int:
        """Tokens that an answer is padded to."""
        return -(-(self.prompt + self.response) // 8) * 8


def work_of(settings: Profile, prompt: int = 512) -> Work:
    """A profile's step, with answers as long as it allows. prompt: tokens of a question; a profile does not
    know them."""
    return Work(settings.batch.episodes, prompt, settings.sampling.max_new_tokens)


def at_once(settings: Profile, work: Work, engines: int) -> tuple[int, int]:
    """(requests that an engine works on at a time, such rounds): limited by the profile's requests and by its
    KV pool."""
    share, r = -(-work.episodes // engines), settings.rollout
    room = (r.max_total_tokens or sys.maxsize) // (work.prompt + work.response)
    most = min(share, r.max_running_requests, room)
    if most < 1:
        raise ValueError(
            f"rollout.max_total_tokens = {r.max_total_tokens} does not hold one answer of "
            f"{work.prompt + work.response} tokens"
        )
    return most, -(-share // most)


@lru_cache(maxsize=4096)
def _generation_limit(model: object, requests: int, prompt: int, response: int, rates: Rates) -> float:
    return requests * response / rollout_limit(model, requests, prompt, response, rates)


def rollout_seconds(
    settings: Profile, work: Work, engines: int, engine: int, card: Card, constants: Constants
) -> float:
    """Seconds until all answers are there: engines side by side, each one machine with `engine` cards' rates.

    An engine over several cards adds two small all-reduces a layer and decode step.
    """
    most, rounds = at_once(settings, work, engines)
    rates = Rates(card.rates.bandwidth * engine, card.rates.flops * engine)
    limit = _generation_limit(architecture(settings.model), most, work.prompt, work.response, rates)
    step = constants.decode_step + (engine > 1) * 2 * settings.model.num_hidden_layers * constants.latency
    # the host's part of a request grows with all requests: one process of ours sends and reads them
    return rounds * (limit + work.response * step) + work.episodes * constants.request


@lru_cache(maxsize=256)
def _flops(model: object, sequence: int, frozen: bool, recompute: bool) -> float:
    again = sum(forward_flops(model, sequence).values()) if recompute else 0.0
    return sum(training_flops(model, sequence, frozen).values()) + again


def update_seconds(
    settings: Profile, work: Work, layout: Layout, micro_batch: int, cluster: Cluster, constants: Constants
) -> dict[str, float]:
    """Part -> seconds of one update: "compute", "host" (what the host keeps the card waiting), "collectives",
    "bubble", "optimizer". A layer takes the longer of its products and of its launches by the host; the loss
    reads and writes logits.
    """
    m, card = settings.model, cluster.card
    passes = work.episodes // layout.data // micro_batch
    cut = layout.tensor * layout.context
    tokens = micro_batch * work.sequence / cut
    flops = _flops(architecture(m), work.sequence, settings.trainer.freeze_experts, layout.recompute)
    compute = tokens * flops / layout.pipeline / (card.rates.flops * constants.matrix_share)
    layer = constants.host_layer_frozen if settings.trainer.freeze_experts else constants.host_layer
    host = m.num_hidden_layers / layout.pipeline * layer * (4 / 3 if layout.recompute else 1)
    loss = tokens * m.vocab_size * LOSS_BYTES / card.rates.bandwidth
    waits = pass_collectives(settings, work, layout, micro_batch, cluster, constants)
    one = max(compute, host) + loss + waits
    trained = rank_parameters(m, layout, 0)
    held = trained.dense + (0 if settings.trainer.freeze_experts else trained.experts)
    shared = max(layout.data, 1) if layout.distributed_optimizer else 1
    return {
        "compute": passes * (compute + loss),
        "host": passes * max(host - compute, 0.0),
        "collectives": passes * waits + step_collectives(settings, layout, cluster, constants),
        "bubble": (layout.pipeline - 1) * one,
        "optimizer": constants.optimizer + held / shared * ADAM_BYTES / card.rates.bandwidth,
    }


def _exchange(bytes_: float, members: int, span: int, cluster: Cluster, constants: Constants) -> float:
    """Seconds of an all-gather, reduce-scatter or all-to-all of `bytes_` (the whole tensor) among `members`
    ranks."""
    if members == 1:
        return 0.0
    rate = cluster.link(span) * constants.link_share
    return constants.latency + bytes_ * (members - 1) / members / rate


def pass_collectives(
    settings: Profile, work: Work, layout: Layout, micro_batch: int, cluster: Cluster, constants: Constants
) -> float:
    """Seconds that one micro-batch's forward and backward wait for other ranks, none of it hidden behind
    products.

    A layer: TP with sequence parallelism gathers and scatters its hidden states (2 forward, 3 backward),
    experts are reached by all-to-all (there and back, twice), CP swaps tokens for heads (there and back,
    twice). Recomputation does the forward's share again. Stages hand hidden states on, both ways.
    """
    m, x, size = settings.model, layout, 2 if settings.model.dtype == "bfloat16" else 4
    tokens, again = micro_batch * work.sequence, layout.recompute
    hidden = tokens * m.hidden_size * size / x.context
    own = hidden / x.tensor  # a rank's part of the sequence
    heads = (
        (2 * m.num_attention_heads + 2 * m.num_key_value_heads)
        * m.head_dim
        * tokens
        * size
        / (x.tensor * x.context)
    )
    layer = (5 + 2 * again) * _exchange(hidden, x.tensor, x.tensor, cluster, constants)
    layer += (4 + 2 * again) * _exchange(
        own * m.num_experts_per_tok, x.expert, x.expert * x.expert_tensor, cluster, constants
    )
    layer += (2 + again) * _exchange(heads, x.context, x.tensor * x.context, cluster, constants)
    handed = 0.0 if x.pipeline == 1 else 2 * own / (cluster.link(x.ranks) * constants.link_share)
    return layer * m.num_hidden_layers / x.pipeline + handed


def step_collectives(settings: Profile, layout: Layout, cluster: Cluster, constants: Constants) -> float:
    """Seconds of a step's gradient reduction: fp32 all-reduce, or reduce-scatter and the weights' all-gather
    back."""
    rank, x = rank_parameters(settings.model, layout, 0), layout
    back = 2 if x.distributed_optimizer else 4
    groups = [(rank.dense, x.data * x.context)]
    if not settings.trainer.freeze_experts:
        groups.append((rank.experts, x.expert_data))
    span = x.ranks // x.pipeline
    return sum(
        _exchange(4.0 * n, members, span, cluster, constants)
        + _exchange(back * n, members, span, cluster, constants)
        for n, members in groups
    )


def sync_seconds(
    settings: Profile,
    layout: Layout,
    engines: int,
    cluster: Cluster,
    constants: Constants,
    offloaded: bool = False,
) -> float:
    """Seconds of one weight sync: every trainer rank gathers full tensors, rank 0 hands them to one engine
    after the other while it makes the next. Offloaded weights come over the host's link first.
    """
    m, size = settings.model, 2 if settings.model.dtype == "bfloat16" else 4
    total = size * parameter_count(settings)
    ranks = layout.tensor * layout.pipeline * layout.expert
    base = m.num_hidden_layers * constants.sync_layer + total / constants.sync_rate
    base += _exchange(total, min(ranks, layout.ranks), layout.ranks, cluster, constants)
    if offloaded:
        base += rank_parameters(m, layout, 0).total * size / constants.host_link
    return max(base, engines * total / constants.load_rate)


# --- plans ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """One way to use a cluster. memory: kind of GPU ("trainer", "server" or "both") -> phase -> item -> bytes
    of its largest GPU.

    seconds: part -> seconds of a step, of which a split placement's rollout and update overlap. engine: GPUs
    of each engine.
    """

    settings: Profile
    cluster: Cluster
    layout: Layout
    placement: str
    engines: int
    engine: int
    micro_batch: int
    memory: dict[str, dict[str, dict[str, int]]] = field(hash=False)
    seconds: dict[str, float] = field(hash=False)
    warnings: tuple[str, ...] = ()

    @property
    def peaks(self) -> dict[str, tuple[str, int]]:
        """Kind of GPU -> (phase, bytes) of its largest phase."""
        sums = {
            gpu: {p: sum(items.values()) for p, items in phases.items()}
            for gpu, phases in self.memory.items()
        }
        return {gpu: max(s.items(), key=lambda entry: entry[1]) for gpu, s in sums.items()}

    @property
    def peak(self) -> int:
        """Bytes of the fullest GPU in its fullest phase."""
        return max(size for _, size in self.peaks.values())

    @property
    def fits(self) -> bool:
        return self.peak <= (1 - MARGIN) * self.cluster.card.memory

    @property
    def step(self) -> float:
        """Seconds of a step. Split: rollout of the next batch and update of this one go on side by side."""
        return step_seconds(self.seconds, self.placement)

    def __str__(self) -> str:
        where = (
            f"{self.layout.ranks} train, {self.engines * self.engine} generate"
            if self.placement == SPLIT
            else self.placement
        )
        return (
            f"{self.layout}, {where}, SGLang {self.engines} x TP{self.engine}, micro-batch {self.micro_batch}"
        )


UPDATE_PARTS = ("compute", "host", "collectives", "bubble", "optimizer")


def step_seconds(seconds: dict[str, float], placement: str) -> float:
    """Seconds of a step from its parts."""
    rollout, update = seconds["rollout"] + seconds["score"], sum(seconds[part] for part in UPDATE_PARTS)
    work = max(rollout, update) if placement == SPLIT else rollout + update
    return work + seconds["sync"] + seconds["moves"]


@dataclass(frozen=True)
class Refusal:
    """What cannot be: the layout or plan in words, the kind of reason, and the reason in one line."""

    what: str
    kind: str
    reason: str


PLAN_REASONS = {  # kinds of refusals beyond helpers.layout.REASONS
    "engine heads": "SGLang TP{engine}: {heads} query heads or {kv} key-value heads do not divide",
    "engine node": "SGLang TP{engine}: an engine lives in one node, and a node has {node} GPUs",
    "KV pool": "rollout.max_total_tokens = {pool} does not hold one answer of {tokens} tokens",
    "micro-batch": "a rank's {share} episodes do not divide into micro-batches of {micro}",
    "memory": "needs {peak:.0f} GB in phase {phase}, a card has {card:.0f} GB and {margin:.0%} stay free",
    "host memory": "offloading takes {need:.0f} GB of a node's {host:.0f} GB",
}


def engine_refusal(settings: Profile, work: Work, engine: int, cluster: Cluster) -> Refusal | None:
    """Why an SGLang engine cannot be cut over `engine` GPUs. Source: sglang/srt/models/gpt_oss.py
    (0.5.17)."""
    m, pool = settings.model, settings.rollout.max_total_tokens
    heads, kv, tokens = m.num_attention_heads, m.num_key_value_heads, work.prompt + work.response
    shared = kv % engine if kv >= engine else engine % kv
    found = {
        "engine heads": heads % engine or shared,
        "engine node": engine > cluster.gpus_per_node,
        "KV pool": pool is not None and pool < tokens,
    }
    kind = next((kind for kind, holds in found.items() if holds), None)
    if kind is None:
        return None
    values = dict(engine=engine, heads=heads, kv=kv, node=cluster.gpus_per_node, pool=pool, tokens=tokens)
    return Refusal(f"SGLang TP{engine}", kind, PLAN_REASONS[kind].format(**values))


def make_plan(
    settings: Profile, work: Work, cluster: Cluster, layout: Layout, placement: str = COLOCATED,
    engines: int = 1, engine: int = 1, micro_batch: int | None = None, constants: Constants | None = None,
) -> Plan:  # fmt: skip
    """Memory and time of one way to use a cluster; it may not fit (plan.fits). Raises ValueError for one that
    cannot be."""
    if placement not in PLACEMENTS:
        raise ValueError(f"unknown placement {placement!r}{nearest_name(placement, PLACEMENTS)}")
    refusal = impossible(settings.model, layout, work.episodes, work.sequence)
    other = engine_refusal(settings, work, engine, cluster)
    micro = micro_batch or min(settings.trainer.micro_batch, work.episodes // max(layout.data, 1))
    if refusal or other:
        raise ValueError(refusal[1] if refusal else other.reason)
    if work.episodes // layout.data % micro:
        raise ValueError(PLAN_REASONS["micro-batch"].format(share=work.episodes // layout.data, micro=micro))
    constants = constants or fitted()
    training = _Training(settings, work, cluster, layout, micro, constants)
    return _joined(training, _Serving(settings, work, cluster, engines, engine, constants), placement)


class _Training:
    """The trainer's half of a plan, worked out once for all placements and engines."""

    def __init__(
        self,
        settings: Profile,
        work: Work,
        cluster: Cluster,
        layout: Layout,
        micro_batch: int,
        constants: Constants,
    ):
        self.settings, self.work, self.cluster, self.layout = settings, work, cluster, layout
        self.micro_batch, self.constants = micro_batch, constants
        tokens, stages = micro_batch * work.sequence, sorted({0, layout.pipeline - 1})
        found = [trainer_card(settings, tokens, layout, stage, constants) for stage in stages]
        # of each phase the stage that needs most
        self.card = {
            phase: max((c[phase] for c in found), key=lambda items: sum(items.values())) for phase in PHASES
        }
        self.sizes = {phase: sum(items.values()) for phase, items in self.card.items()}
        self.seconds = update_seconds(settings, work, layout, micro_batch, cluster, constants)

    @property
    def moved(self) -> int:
        """Bytes of a rank that go to the host and come back when it is offloaded."""
        items = self.card["load back"]
        return items["trainer weights"] + items["trainer optimizer"]


class _Serving:
    """The rollout's half of a plan."""

    def __init__(
        self, settings: Profile, work: Work, cluster: Cluster, engines: int, engine: int, constants: Constants
    ):
        self.engines, self.engine = engines, engine
        self.awake = server_card(settings, engine, constants)
        self.asleep = (
            {"rest of server": self.awake["rest of server"]} if settings.rollout.memory_saver else self.awake
        )
        self.seconds = rollout_seconds(settings, work, engines, engine, cluster.card, constants)

    def beside(self, phase: str) -> dict[str, int]:
        """Items of a server on the trainer's card in a phase."""
        return self.asleep if phase in SERVER_RELEASED else self.awake


_STEP = ("rollout", *SERVER_RELEASED, "resume", "sync")
_PHASES = {  # of a step, on a GPU with a trainer
    COLOCATED: _STEP,
    OFFLOADED: ("offload", *SERVER_RELEASED, "sync, offloaded"),
    SPLIT: tuple(p for p in _STEP if p not in ("release", "resume")),
}


def _seconds(t: _Training, serving: _Serving, placement: str) -> dict[str, float]:
    c, offloaded = t.constants, placement == OFFLOADED
    moves = c.switch if placement != SPLIT and t.settings.rollout.memory_saver else 0.0
    moves += 2 * t.moved / c.host_link if offloaded else 0.0
    sync = sync_seconds(t.settings, t.layout, serving.engines, t.cluster, c, offloaded)
    score = t.work.episodes * c.episode
    return {"rollout": serving.seconds, "score": score, **t.seconds, "sync": sync, "moves": moves}


def _joined(t: _Training, serving: _Serving, placement: str) -> Plan:
    trainer = {phase: t.card[phase] for phase in _PHASES[placement]}
    if placement == SPLIT:
        memory = {"trainer": trainer, "server": {"rollout": serving.awake}}
    else:
        memory = {"both": {phase: items | serving.beside(phase) for phase, items in trainer.items()}}
    return Plan(
        t.settings, t.cluster, t.layout, placement, serving.engines, serving.engine, t.micro_batch, memory,
        _seconds(t, serving, placement), _warnings(t.layout, serving.engine, t.cluster),
    )  # fmt: skip


def _warnings(layout: Layout, engine: int, cluster: Cluster) -> tuple[str, ...]:
    node, found = cluster.gpus_per_node, []
    if layout.tensor > node:
        found.append(
            f"TP{layout.tensor} crosses nodes of {node} GPUs: 5 exchanges a layer over the slow link"
        )
    if layout.expert * layout.expert_tensor > node:
        found.append(
            f"EP{layout.expert} crosses nodes of {node} GPUs: tokens reach their experts over the slow link"
        )
    if engine > 1:
        found.append(
            f"SGLang TP{engine} needs --tp-size and {engine} visible GPUs; helpers.rollout's servers have one"
        )
    if layout.context > 1:
        found.append("CP needs cp_comm_type a2a in Megatron's config; helpers.trainer does not set it")
    if layout.recompute:
        found.append(
            "recomputation is Megatron's recompute_granularity full; helpers.trainer does not set it"
        )
    return tuple(found)


# --- search -----------------------------------------------------------------------------------------------------------
def powers(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def layouts(ranks: int, model: object, wide: bool = False) -> Iterator[Layout]:
    """Every layout of so many ranks with groups of powers of two; one beyond what the model divides by, so
    that it is refused.

    The distributed optimizer is on wherever there is somebody to share with. wide: also context parallelism
    and recomputation, which Megatron has and helpers.trainer does not set.
    """
    heads, experts, depth = (
        getattr(model, name) for name in ("num_key_value_heads", "num_local_experts", "num_hidden_layers")
    )
    for tensor in powers(min(ranks, 2 * heads)):
        for pipeline in powers(min(ranks // tensor, depth)):
            for context in powers(min(ranks // (tensor * pipeline), 4 if wide else 1)):
                for expert in powers(min(ranks // pipeline, 2 * experts)):
                    for split in {1, tensor}:
                        for recompute in (False, True)[: 1 + wide]:
                            layout = Layout(ranks, tensor, pipeline, context, expert, split, False, recompute)
                            shared = layout.data * context > 1 or layout.expert_data > 1
                            yield dataclasses.replace(layout, distributed_optimizer=shared)


@dataclass(frozen=True)
class Search:
    """What a search found: plans that fit, fastest first, and everything refused."""

    plans: list[Plan]
    refused: list[Refusal]

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    def reason(self) -> str:
        """Why the first plan is recommended, or what is nearest to fitting, in one sentence."""
        if not self.plans:
            tight = [r for r in self.refused if r.kind == "memory"]
            nearest = min(tight, key=lambda r: float(r.reason.split()[1]), default=None)
            return (
                f"nothing fits; nearest: {nearest.what} {nearest.reason}"
                if nearest
                else "nothing is possible"
            )
        best = self.plans[0]
        part = max(best.seconds, key=best.seconds.get)
        other = next((p for p in self.plans if p.layout != best.layout), None)
        behind = (
            f"; the next layout ({other.layout}, {other.placement}) takes {other.step:.1f} s" if other else ""
        )
        return (
            f"fastest of {len(self.plans)} that fit: {best.step:.1f} s a step, most of it {part} "
            f"({best.seconds[part]:.1f} s), "
            f"{best.peak / GIGABYTE:.0f} of {best.cluster.card.memory / GIGABYTE:.0f} GB{behind}"
        )


def search(
    settings: Profile, cluster: Cluster, work: Work | None = None, constants: Constants | None = None,
    wide: bool = False,
) -> Search:  # fmt: skip
    """All plans for a profile's model and step on a cluster, ranked by time. The profile's own layout is not
    used.

    Where layouts differ by less than a tenth of a second, the one that cuts the model less comes first. wide:
    see `layouts`.
    """
    work, constants = work or work_of(settings), constants or fitted()
    plans, refused = [], []
    for placement in PLACEMENTS:
        for ranks, rest in _shares(cluster.gpus, placement):
            servings = list(_servings(settings, work, cluster, rest, constants, refused))
            for trainings in _trainings(settings, work, cluster, ranks, constants, refused, wide):
                for serving in servings:
                    found = _fastest(trainings, serving, placement)
                    (plans if isinstance(found, Plan) else refused).append(found)
    plans.sort(key=_rank)
    return Search(plans, list(dict.fromkeys(refused)))


def _rank(plan: Plan) -> tuple:
    x = plan.layout
    return (
        round(plan.step, 1),
        x.tensor * x.pipeline * x.context * x.expert,
        PLACEMENTS.index(plan.placement),
        plan.peak,
    )


def _shares(gpus: int, placement: str) -> list[tuple[int, int]]:
    """(GPUs that train, GPUs that generate)."""
    if placement != SPLIT:
        return [(gpus, gpus)]
    return [(n, gpus - n) for n in sorted({gpus // 4, gpus // 2, gpus - gpus // 4}) if 0 < n < gpus]


def _servings(
    settings: Profile, work: Work, cluster: Cluster, gpus: int, constants: Constants, refused: list[Refusal]
) -> Iterator[_Serving]:
    for engine in powers(min(gpus, 2 * cluster.gpus_per_node)):
        problem = engine_refusal(settings, work, engine, cluster)
        if problem:
            refused.append(problem)
        elif gpus % engine == 0:
            yield _Serving(settings, work, cluster, gpus // engine, engine, constants)


def _trainings(
    settings: Profile,
    work: Work,
    cluster: Cluster,
    ranks: int,
    constants: Constants,
    refused: list[Refusal],
    wide: bool,
) -> Iterator[list[_Training]]:
    """For each layout that is possible, one for each micro-batch (powers of two up to 32 that divide a rank's
    share)."""
    for layout in layouts(ranks, settings.model, wide):
        problem = impossible(settings.model, layout, work.episodes, work.sequence)
        if problem:
            refused.append(Refusal(str(layout), *problem))
            continue
        share = work.episodes // layout.data
        sizes = [micro for micro in powers(min(share, 32)) if share % micro == 0]
        yield [_Training(settings, work, cluster, layout, micro, constants) for micro in sizes]


def _fastest(trainings: Sequence[_Training], serving: _Serving, placement: str) -> Plan | Refusal:
    """The plan of the micro-batch that fits and is fastest, or why none fits (of the smallest one)."""
    fitting = [t for t in trainings if _refused_for_size(t, serving, placement) is None]
    if not fitting:
        kind, reason = _refused_for_size(trainings[0], serving, placement)
        return Refusal(f"{trainings[0].layout}, {placement}, SGLang TP{serving.engine}", kind, reason)
    best = min(fitting, key=lambda t: step_seconds(_seconds(t, serving, placement), placement))
    return _joined(best, serving, placement)


def _refused_for_size(t: _Training, serving: _Serving, placement: str) -> tuple[str, str] | None:
    room, split = (1 - MARGIN) * t.cluster.card.memory, placement == SPLIT
    awake, asleep = sum(serving.awake.values()), sum(serving.asleep.values())
    sizes = {
        phase: t.sizes[phase] + (0 if split else asleep if phase in SERVER_RELEASED else awake)
        for phase in _PHASES[placement]
    } | ({"rollout on the server's card": awake} if split else {})
    phase = max(sizes, key=sizes.get)
    if sizes[phase] > room:
        values = dict(
            peak=sizes[phase] / GIGABYTE, phase=phase, card=t.cluster.card.memory / GIGABYTE, margin=MARGIN
        )
        return "memory", PLAN_REASONS["memory"].format(**values)
    need = t.moved * min(t.layout.ranks, t.cluster.gpus_per_node)
    if placement == OFFLOADED and need > t.cluster.host_memory:
        values = dict(need=need / GIGABYTE, host=t.cluster.host_memory / GIGABYTE)
        return "host memory", PLAN_REASONS["host memory"].format(**values)
    return None


# --- predictions beside recordings ------------------------------------------------------------------------------------
def judge(fit: str = "small") -> list[dict]:
    """Rows of quantity, predicted, measured and error for every recorded GPU run.

    role: "fit" where the constants are from that run, "judged" where they are not, "first step" for the first
    of a process, which compiles kernels and which nobody predicts.
    """
    constants, rows = fitted(fit), []
    for profile, prompt, tokens in (
        ("gpu", 20, calibration.GPU_TOKENS),
        ("gpu-20b", 512, calibration.GPU_20B_TOKENS),
    ):
        rows += _judged_memory(profile, tokens, constants)
        predicted = _one_card_step(load_profile(profile), prompt, constants)
        for part, measured in calibration.recorded_step(profile).items():
            seen = (fit, profile) == ("all", "gpu-20b") and part in ("update", "step")
            role = "fit" if seen else "judged"
            rows.append(_row(profile, "06_train", role, part, "s", predicted[part], measured))
        for part, measured in calibration.recorded_first_step(profile).items():
            rows.append(_row(profile, "05_grpo_step", "first step", part, "s", predicted[part], measured))
    return rows


def _judged_memory(profile: str, tokens: int, constants: Constants) -> list[dict]:
    card, role = (
        predicted_card(load_profile(profile), tokens, constants),
        "fit" if profile == "gpu" else "judged",
    )
    sizes = {
        phase: (sum(card[phase].values()) / GIGABYTE, sum(items.values()) / GIGABYTE)
        for phase, items in calibration.recorded_phases(profile).items()
    }
    return [
        _row(profile, "07_memory", role, f"memory: {phase}", "GB", *pair) for phase, pair in sizes.items()
    ]


def _row(
    profile: str, notebook: str, role: str, quantity: str, unit: str, predicted: float, measured: float
) -> dict:
    return {
        "profile": profile, "run": notebook, "role": role, "quantity": quantity, "unit": unit,
        "predicted": predicted, "measured": measured, "error": predicted / measured - 1,
    }  # fmt: skip


def _one_card_step(settings: Profile, prompt: int, constants: Constants) -> dict[str, float]:
    plan = make_plan(
        settings, work_of(settings, prompt), Cluster(cards()["h200"]), Layout(), constants=constants,
        micro_batch=settings.trainer.micro_batch,
    )  # fmt: skip
    seconds = plan.seconds
    return {
        "rollout": seconds["rollout"], "score": seconds["score"], "sync": seconds["sync"], "step": plan.step,
        "update": sum(seconds[p] for p in UPDATE_PARTS),
    }  # fmt: skip


def worst(rows: Sequence[dict], role: str = "judged") -> tuple[float, float]:
    """(largest relative error of a memory row, of a step row) among those of a role."""
    chosen = [row for row in rows if row["role"] == role]
    memory = [abs(row["error"]) for row in chosen if row["quantity"].startswith("memory")]
    steps = [abs(row["error"]) for row in chosen if row["quantity"] == "step"]
    return max(memory), max(steps)


def targets() -> dict[str, Plan]:
    """The runs with two H200 (experts frozen) and eight (all trained) that are predicted before they are
    made.

    With what the profiles say of batch and micro-batch, and the planner's own recommendation for each.
    """
    card, plans = cards()["h200"], {}
    frozen, full = load_profile("gpu-20b"), load_profile("cluster")
    two, eight = Cluster(card, 2), Cluster(card, 8)
    for layout in (
        Layout(2, tensor=2),
        Layout(2, tensor=2, expert=2),
        Layout(2, expert=2, distributed_optimizer=True),
    ):
        plans[f"2 GPUs, {layout}, colocated, 2 x TP1"] = make_plan(
            frozen, work_of(frozen), two, layout, COLOCATED, 2
        )
    tp2 = Layout(2, tensor=2, expert=2)
    plans[f"2 GPUs, {tp2}, colocated, 1 x TP2"] = make_plan(
        frozen, work_of(frozen), two, tp2, COLOCATED, 1, 2
    )
    plans["2 GPUs, TP1, split 1 + 1"] = make_plan(frozen, work_of(frozen), two, Layout(), SPLIT, 1)
    for layout in (
        Layout(8, tensor=8, expert=8),
        Layout(8, expert=8, distributed_optimizer=True),
        Layout(8, tensor=2, expert=8, distributed_optimizer=True),
    ):
        for engines, engine in ((1, 8), (8, 1)):
            for placement in (COLOCATED, OFFLOADED):
                name = f"8 GPUs, {layout}, {placement}, {engines} x TP{engine}"
                plans[name] = make_plan(full, work_of(full), eight, layout, placement, engines, engine)
    for settings, cluster in ((frozen, two), (full, eight)):
        best = search(settings, cluster).best
        plans[f"{cluster.gpus} GPUs, recommended: {best}"] = best
    return plans


def prediction_rows(plans: dict[str, Plan]) -> list[dict]:
    """Long table: a row for each phase's memory of the fullest GPU and for each part of a step."""
    rows = []
    for name, plan in plans.items():
        common = {
            "target": name,
            "model": plan.settings.name,
            "micro_batch": plan.micro_batch,
            "fits": plan.fits,
        }
        for gpu, phases in plan.memory.items():
            rows += [
                common
                | {
                    "quantity": f"memory, {gpu}: {phase}",
                    "value": round(sum(items.values()) / GIGABYTE, 2),
                    "unit": "GB",
                }
                for phase, items in phases.items()
            ]
        update = sum(plan.seconds[p] for p in UPDATE_PARTS)
        parts = plan.seconds | {"update": update, "step": plan.step}
        rows += [common | {"quantity": part, "value": round(s, 3), "unit": "s"} for part, s in parts.items()]
    return rows


# --- command line -----------------------------------------------------------------------------------------------------
def with_model(settings: Profile, model: str, all_trained: bool | None = None) -> Profile:
    """The profile with gpt-oss-20b's or -120b's shape; all_trained: also the experts, or not (None: as the
    profile says)."""
    if model not in ("", "20b", "120b"):
        raise ValueError(f"unknown model {model!r}: 20b or 120b, or leave it to the profile")
    shape = dataclasses.replace(
        load_profile("gpu-20b").model, num_hidden_layers=GPT_OSS_120B["num_hidden_layers"],
        num_local_experts=GPT_OSS_120B["num_local_experts"],
    )  # fmt: skip
    chosen = {"": settings.model, "20b": load_profile("gpu-20b").model, "120b": shape}[model]
    trainer = settings.trainer
    if all_trained is not None:
        trainer = dataclasses.replace(trainer, freeze_experts=not all_trained)
    return dataclasses.replace(settings, model=chosen, trainer=trainer)


def refusal_table(refused: Sequence[Refusal]) -> list[tuple[str, int, str]]:
    """(kind, how many, one example) of refusals, the commonest first."""
    kinds: dict[str, list[Refusal]] = {}
    for refusal in refused:
        kinds.setdefault(refusal.kind, []).append(refusal)
    ordered = sorted(kinds.items(), key=lambda entry: -len(entry[1]))
    return [(kind, len(found), f"{found[0].what}: {found[0].reason}") for kind, found in ordered]


def _print_plans(found: Search, top: int) -> None:
    print(f"{'step s':>7s} {'GB a GPU':>9s}  plan")
    for plan in found.plans[:top]:
        print(f"{plan.step:7.1f} {plan.peak / GIGABYTE:9.1f}  {plan}")
        for warning in plan.warnings:
            print(f"{'':19s}note: {warning}")
    print(f"recommended: {found.best or 'none'}\n  {found.reason()}")
    print(f"refused: {len(found.refused)}")
    for kind, count, example in refusal_table(found.refused):
        print(f"  {count:6d}  {kind}; for instance {example}")


def _print_judged(fit: str) -> None:
    print(
        f"constants: fit {fit!r}\n{'profile':8s} {'run':13s} {'role':10s} {'quantity':26s} "
        f"{'predicted':>9s} {'measured':>9s} error"
    )
    for r in judge(fit):
        print(f"{r['profile']:8s} {r['run']:13s} {r['role']:10s} {r['quantity']:26s} {r['predicted']:9.2f} "
              f"{r['measured']:9.2f} {r['error']:+6.1%}")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", default="plan", choices=("plan", "judge", "predict"))
    parser.add_argument("--profile", default="gpu-20b", choices=PROFILES)
    parser.add_argument("--model", default="", help="20b or 120b instead of the profile's own")
    parser.add_argument(
        "--all-trained", action="store_true", help="train the experts too, whatever the profile says"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--card", default="h200", choices=tuple(cards()))
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a question")
    parser.add_argument("--wide", action="store_true", help="also context parallelism and recomputation")
    parser.add_argument("--top", type=int, default=8, help="plans to print")
    parser.add_argument("--fit", default="", choices=("", *FITS), help="constants; judge: small, else all")
    parser.add_argument("--out", type=Path, help="predict: the CSV to write")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top {options.top}: print one plan at least")
    try:
        if options.command == "judge":
            _print_judged(options.fit or "small")
        elif options.command == "predict":
            _write_predictions(options.out)
        else:
            settings = with_model(load_profile(options.profile), options.model, options.all_trained or None)
            cluster = Cluster(cards()[options.card], options.gpus, options.gpus_per_node)
            work, constants = work_of(settings, options.prompt), fitted(options.fit or "all")
            _print_plans(search(settings, cluster, work, constants, options.wide), options.top)
    except (ValueError, OSError) as error:
        print(f"no plan: {error}", file=sys.stderr)
        return 2
    return 0


def _write_predictions(out: Path | None) -> None:
    if out is None:
        raise ValueError("predict needs --out FILE")
    rows = prediction_rows(targets())
    date = time.strftime("%Y-%m-%d", time.gmtime())
    command = "python -m helpers.planner predict"
    note = f"{date}, commit {git_commit()}, {command}; constants of all one-GPU runs, before any of these ran"
    write_rows(out, rows, note)
    print(f"{len(rows)} predictions written")


if __name__ == "__main__":
    sys.exit(main())
