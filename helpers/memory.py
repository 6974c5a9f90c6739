"""Where memory goes: predicted from the config, measured from tensors and processes (helpers.processes has PSS)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.anatomy import total_parameters
from helpers.layout import Layout, architecture, rank_parameters
from helpers.processes import process_tree, pss
from helpers.profiles import Profile

if TYPE_CHECKING:
    from helpers.trainer import MegatronTrainer

_BYTES = {"float32": 4, "bfloat16": 2}
CHUNK_BYTES = 256 << 20  # of one fp32 copy of the logits that the trainer's loss works on at a time


# --- predicted --------------------------------------------------------------------------------------------------------
def parameter_count(settings: Profile) -> int:
    """Parameters of the profile's model, from its config alone."""
    return total_parameters(architecture(settings.model))


def predicted_trainer_bytes(
    settings: Profile, layout: Layout | None = None, stage: int = 0
) -> dict[str, int]:
    """Bytes of the trainer's long-lived tensors on one rank: weights, gradients, Adam.

    fp32: Megatron's optimizer updates the weights in place, so there is no master copy; bf16 adds an fp32 one.
    layout: None takes the profile's own. With the distributed optimizer, Adam's state of dense weights is spread over
    DP x CP ranks and that of experts over EDP; gradients stay whole (DDP's buffer). stage: of the pipeline.
    """
    layout = layout or Layout.of(settings.trainer)
    rank, size = rank_parameters(settings.model, layout, stage), _BYTES[settings.model.dtype]
    experts = 0 if settings.trainer.freeze_experts else rank.experts
    shared = layout.distributed_optimizer
    adam = -(-rank.dense // (layout.data * layout.context if shared else 1)) + -(
        -experts // (layout.expert_data if shared else 1)
    )
    return {
        "weights": rank.total * size,
        "gradients": (rank.dense + experts) * 4,  # DDP keeps the buffer in fp32 (grad_reduce_in_fp32)
        "Adam moments": adam * 8,
        "master weights": 0 if size == 4 else adam * 4,
    }


def predicted_logits_bytes(settings: Profile, episodes: int, sequence: int) -> int:
    """Bytes of one copy of the logits in fp32, [episodes, sequence, vocabulary]. A loss over them holds several."""
    return episodes * sequence * settings.model.vocab_size * 4


def predicted_attention_bytes(settings: Profile, episodes: int, sequence: int) -> int:
    """Bytes of one copy of all layers' attention probabilities with the sink's column: [episodes, heads, S, S + 1]."""
    m = settings.model
    return m.num_hidden_layers * episodes * m.num_attention_heads * sequence * (sequence + 1) * 4


def predicted_kv_bytes(settings: Profile, full_tokens: int, window_tokens: int, engine: int = 1) -> int:
    """Bytes of SGLang's two KV pools: full_tokens for full-attention layers, window_tokens for sliding ones.

    Each pool has one page more than its tokens (page size 1: the slot that padding writes to).
    engine: GPUs that an engine is cut over by heads (its tp); where they are more than key-value heads, a head is copied.
    """
    m = settings.model
    per_layer_token = 2 * max(m.num_key_value_heads // engine, 1) * m.head_dim * _BYTES[m.dtype]
    sliding = (m.num_hidden_layers + 1) // 2
    return per_layer_token * (
        sliding * (window_tokens + 1) + (m.num_hidden_layers - sliding) * (full_tokens + 1)
    )


def predicted_pools(settings: Profile) -> tuple[int, int]:
    """Tokens of SGLang's pools for full-attention and for sliding-window layers, from the profile alone.

    With the prefix tree the second is 0.8 of the first. Without it SGLang counts what the most requests can hold: each its
    window, 128 tokens until the next eviction, two pages, and one prefill chunk (8192 tokens) for all; no more than the first.
    Source: sglang/srt/model_executor/pool_configurator.py (0.5.17). Raises ValueError where max_total_tokens is left to
    SGLang, which then takes what memory there is.
    """
    r = settings.rollout
    if r.max_total_tokens is None:
        raise ValueError("rollout.max_total_tokens is None: SGLang fills its share of the card, whatever that is")
    if r.memory_saver and r.kv_saver == "plain":
        return r.max_total_tokens, r.max_total_tokens  # one pool for all layers
    if "--disable-radix-cache" not in r.server_arguments:
        return r.max_total_tokens, int(r.max_total_tokens * 0.8)
    chunks = 1 if "--disable-overlap-schedule" in r.server_arguments else 2
    cap = (settings.model.sliding_window + 128 + 2) * r.max_running_requests + chunks * 8192 + 1
    return r.max_total_tokens, min(cap, r.max_total_tokens)


def predicted_activation_bytes(
    settings: Profile, tokens: int, layout: Layout | None = None, stage: int = 0
) -> int:
    """Bytes that TransformerEngine's layers keep on one rank for the backward pass of a micro-batch of `tokens`.

    Elements a token and layer, as autograd saved them on an H200 (07_memory's components, recorded): q, k, v, the attention's
    output and an fp32 statistic a head; 4 x hidden for norms, projections and router; 4 x experts + 44 for routing. And for
    each of its top-k experts gate and up before and after the clamp (4 x intermediate), with the experts' input and product
    (hidden + intermediate) where their weights are trained. Once: the final norm's input and output. TP with sequence
    parallelism and CP cut all of it.
    recompute: each layer keeps its input, and one layer at a time the rest. A pipeline's first stages hold several micro-batches.
    """
    layout, m = layout or Layout.of(settings.trainer), settings.model
    heads, kv = m.num_attention_heads * m.head_dim, 2 * m.num_key_value_heads * m.head_dim
    dense = 4 * m.hidden_size + 2 * heads + kv + 2 * m.num_attention_heads + 4 * m.num_local_experts + 44
    trained = 0 if settings.trainer.freeze_experts else m.hidden_size + m.intermediate_size
    layer = dense + m.num_experts_per_tok * (4 * m.intermediate_size + trained)
    layers, in_flight = m.num_hidden_layers // layout.pipeline, layout.pipeline - stage
    kept = layers * in_flight * (m.hidden_size if layout.recompute else layer) + layout.recompute * layer
    kept += 2 * m.hidden_size * (stage == layout.pipeline - 1)
    return tokens * kept * _BYTES[m.dtype] // (layout.tensor * layout.context)


def predicted_layer_bytes(
    settings: Profile, tokens: int, backward: bool, layout: Layout | None = None
) -> int:
    """Bytes that one layer of experts works on at its peak and gives back, for a micro-batch of `tokens`.

    Elements a token and chosen expert. Forward: permuted input, gate and up before and after the clamp, activation, product,
    output, and the output with its bias in fp32 (4 x hidden + 6 x intermediate). Backward, beside what was kept: the output's
    gradient in fp32 and in the model's dtype, and the product's. Source: TEGroupedMLP (megatron/core/transformer/moe/experts.py).
    """
    layout, m = layout or Layout.of(settings.trainer), settings.model
    wide = 3 * m.hidden_size + m.intermediate_size if backward else 4 * m.hidden_size + 6 * m.intermediate_size
    return tokens * m.num_experts_per_tok * wide * _BYTES[m.dtype] // (layout.tensor * layout.context)


def predicted_loss_bytes(
    settings: Profile, tokens: int, backward: bool, layout: Layout | None = None
) -> int:
    """Bytes of the logits of one micro-batch and of what helpers.logprobs needs beside them at its peak.

    Megatron's Float16Module hands bf16 logits on as an fp32 copy: forward both are there, backward the copy and its gradient.
    Beside them one fp32 copy of a piece. Logits that are one piece are not computed twice: theirs is kept, and the gradient
    of the temperature's division is a second one. Each TP rank has its share of the vocabulary.
    """
    layout, m = layout or Layout.of(settings.trainer), settings.model
    copy = tokens * m.vocab_size * 4 // (layout.tensor * layout.context)
    original = 0 if m.dtype == "float32" else copy // 2
    piece = CHUNK_BYTES if copy > CHUNK_BYTES else 2 * copy
    return copy + (copy if backward else original) + piece


PHASES = (
    "server start", "load", "rollout", "release", "logprobs", "forward-backward", "optimizer step", "resume", "sync", "offload",
    "sync, offloaded", "load back",
)  # fmt: skip
TRAINER_AWAY = ("server start", "offload", "sync, offloaded")
SERVER_RELEASED = ("release", "logprobs", "forward-backward", "optimizer step")  # with the memory saver


def trainer_phases(
    settings: Profile, tokens: int, layout: Layout | None = None, stage: int = 0
) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes of one trainer rank's tensors at the phase's peak. tokens: of a micro-batch, padding included."""
    layout = layout or Layout.of(settings.trainer)
    static, last = predicted_trainer_bytes(settings, layout, stage), stage == layout.pipeline - 1
    held = {f"trainer {part}": static[part] for part in ("weights", "gradients")}
    fresh = held | {"trainer optimizer": static["master weights"]}
    later = held | {"trainer optimizer": static["master weights"] + static["Adam moments"]}
    loss, layer = (
        [function(settings, tokens, backward, layout) for backward in (False, True)]
        for function in (predicted_loss_bytes, predicted_layer_bytes)
    )
    if not last:
        loss = [0, 0]
    kept = {"activations": predicted_activation_bytes(settings, tokens, layout, stage)}
    export = {"export buffers": _largest_export(settings)}
    # after a layer's forward pass its working memory is free before the logits come, and so are they in its backward pass
    works = {
        "logprobs": fresh | {"logits": loss[0], "one layer": max(layer[0] - loss[0], 0)},
        "forward-backward": fresh | {"logits": loss[1], "one layer": max(layer[1] - loss[1], 0)} | kept,
        "optimizer step": later, "resume": later, "sync": later | export, "load back": later, "sync, offloaded": export,
    }  # fmt: skip
    return {
        phase: works.get(phase, {} if phase in TRAINER_AWAY else fresh) for phase in PHASES
    }


def server_bytes(settings: Profile, engine: int = 1) -> dict[str, int]:
    """Bytes of weights and KV cache on one GPU of an SGLang engine that is cut over `engine` GPUs (tp)."""
    rank = rank_parameters(settings.model, Layout())
    weights = rank.whole + (rank.split + rank.experts) // engine  # SGLang's tp cuts each expert's columns
    return {
        "server weights": weights * _BYTES[settings.model.dtype],
        "server KV cache": predicted_kv_bytes(settings, *predicted_pools(settings), engine),
    }


def predicted_phases(settings: Profile, tokens: int, context: int) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes on the card at the phase's peak, for one trainer rank and one server; written before the run.

    tokens: of one micro-batch, padding included; context: bytes that a process of ours holds for CUDA alone, measured once.
    CUDA graphs, libraries' workspaces and what allocators keep in reserve are not predicted ("rest of server" is its context
    alone). Raises ValueError for several ranks: helpers.planner predicts a card of any layout.
    """
    if settings.trainer.ranks > 1 or settings.rollout.engines > 1:
        raise ValueError(
            f"profile {settings.name!r} has several ranks or engines; this predicts one card with one of each, "
            "helpers.planner any layout"
        )
    server, saver = server_bytes(settings), settings.rollout.memory_saver
    phases = {}
    for phase, items in trainer_phases(settings, tokens).items():
        released = saver and phase in SERVER_RELEASED
        phases[phase] = {"CUDA context": context} | items | ({} if released else server)
        phases[phase] |= {"rest of server": context}
        phases[phase] = {name: size for name, size in phases[phase].items() if size}
    return phases


def _largest_export(settings: Profile, bucket: int = 1 << 30) -> int:
    """Bytes beside the model while weights are streamed: a bucket, and the experts of one layer before and after stacking."""
    m = settings.model
    fused = m.num_local_experts * m.hidden_size * 2 * m.intermediate_size * _BYTES[m.dtype]
    return min(bucket, parameter_count(settings) * _BYTES[m.dtype]) + 2 * fused


# --- measured: tensors ------------------------------------------------------------------------------------------------
def measured_trainer_bytes(trainer: MegatronTrainer) -> dict[str, int]:
    """Bytes of the trainer's real tensors, found by walking model, DDP buffers and optimizer state."""
    module, optimizer = trainer.model.module, trainer.optimizer
    own = {p.data_ptr() for p in module.parameters()}
    moments = [t for o in _torch_optimizers(optimizer) for t in _moments(o)]
    masters = {
        p.data_ptr(): p for o in _torch_optimizers(optimizer) for g in o.param_groups for p in g["params"]
    }
    return {
        "weights": sum(_size(p) for p in module.parameters()),
        "gradients": sum(_size(b.grad_data) for b in gradient_buffers(module)),
        "Adam moments": sum(_size(t) for t in moments),
        "master weights": sum(_size(p) for pointer, p in masters.items() if pointer not in own),
    }


def device_bytes(trainer: MegatronTrainer) -> dict[str, int]:
    """Bytes of the trainer's long-lived storages that are on the device now, by the names that predicted_phases uses."""
    from helpers.offload import parts_of

    found = parts_of(trainer.model.chunks, trainer.optimizer)
    return {f"trainer {part}": sum(s.nbytes() for s in storages) for part, storages in found.items()}


def gradient_buffers(chunk) -> list:
    """Megatron DDP's gradient buffers of a model chunk, those of expert-parallel weights too; each has grad_data."""
    return [*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", [])]


def optimizer_tensors(optimizer) -> list:
    """What Megatron's optimizer holds: Adam's moments so far, and the tensors that it updates (in bf16 fp32 copies)."""
    inner = _torch_optimizers(optimizer)
    return [t for o in inner for t in _moments(o)] + [
        p.data for o in inner for g in o.param_groups for p in g["params"]
    ]


def _moments(optimizer) -> list:
    return [s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq") if k in s]


def _torch_optimizers(optimizer) -> list:
    """The torch optimizers inside Megatron's wrapper (a ChainedOptimizer holds one for dense and one for expert weights)."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o.optimizer for o in chained if getattr(o, "optimizer", None) is not None]


def _size(tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass
class SavedBytes:
    """What saved_for_backward found. bytes: the most at one time. by_component: component -> bytes, at that time."""

    bytes: int = 0
    by_component: dict[str, int] = field(default_factory=dict)


_COMPONENTS = (  # part of a Megatron module's name -> component; the first that fits the innermost module wins
    ("core_attention", "attention weights"),
    ("self_attention", "attention projections"),
    ("router", "router"),
    ("experts", "experts"),
    ("norm", "norms"),
    ("mlp", "token dispatch"),
    ("output_layer", "head"),
    ("embedding", "embedding"),
)


@contextmanager
def saved_for_backward(model=None) -> Iterator[SavedBytes]:
    """Measure the most bytes that autograd keeps for backward passes at one time inside the block.

    Each storage counts once, from when a node saves it until the last node lets go of it; parameters are left out.
    model: a module whose parts the bytes are put down to; what is saved outside of them is "loss and rest".
    Source: torch.autograd.graph.saved_tensors_hooks.
    """
    import torch

    found, place = SavedBytes(), ["loss and rest"]
    users: dict[int, int] = {}  # storage address -> saved tensors that hold it
    held: dict[str, int] = {}

    class Saved:
        """What a node holds instead of the tensor; its end is the node's end."""

        def __init__(self, tensor):
            storage = tensor.untyped_storage()
            self.tensor, self.key, self.size, self.place = (
                tensor,
                storage.data_ptr(),
                storage.nbytes(),
                place[-1],
            )
            users[self.key] = users.get(self.key, 0) + 1
            if users[self.key] == 1:
                held[self.place] = held.get(self.place, 0) + self.size
                if sum(held.values()) > found.bytes:
                    found.bytes, found.by_component = sum(held.values()), dict(held)

        def __del__(self):
            users[self.key] -= 1
            if users[self.key] == 0:
                held[self.place] -= self.size

    def pack(tensor):
        return tensor if isinstance(tensor, torch.nn.Parameter) else Saved(tensor)

    def unpack(saved):
        return saved.tensor if isinstance(saved, Saved) else saved

    hooks = _place_hooks(model, place) if model is not None else []
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


def _place_hooks(model, place: list[str]) -> list:
    """Hooks that keep the name of the running component on top of `place`."""
    hooks = []
    for name, module in model.named_modules():
        component = next((c for part, c in _COMPONENTS if part in name.rsplit("layers.", 1)[-1]), None)
        if component:
            hooks.append(module.register_forward_pre_hook(lambda *_, c=component: place.append(c)))
            hooks.append(module.register_forward_hook(lambda *_: place.pop() and None))
    return hooks


def peak_allocated_bytes(work: Callable[[], object]) -> int:
    """Most bytes of host memory that torch had allocated at a time during `work`, beside what was there before.

    Source: the allocations that torch.profiler records.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    held = peak = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


# --- measured: processes ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ProcessMemory:
    """One process at one time. pss in bytes."""

    pid: int
    role: str
    pss: int


_ROLES = (  # what to call a process, by what its command line or title contains; the first that fits wins
    ("sglang::scheduler", "SGLang scheduler"),
    ("sglang::detokenizer", "SGLang detokenizer"),
    ("sglang::", "SGLang other"),
    ("sglang.launch_server", "SGLang HTTP server"),
    ("TrainerActor", "Megatron trainer"),
    ("RolloutActor", "Ray rollout actor"),
    ("ray", "Ray"),
    ("launcher.py", "launcher"),
    ("ipykernel", "notebook kernel"),
)


def role_of(pid: int) -> str:
    """What a process is in this course; "other" where nothing fits."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "other"
    if "launcher.py" in title:
        return "launcher"
    return next((role for part, role in _ROLES if part in title), "other")


def snapshot(roots: Sequence[int]) -> list[ProcessMemory]:
    """PSS of the roots and everything below them, now."""
    return [ProcessMemory(pid, role_of(pid), pss(pid)) for pid in process_tree(roots)]


def pss_by_role(roots: Sequence[int]) -> dict[str, int]:
    """role -> bytes of host memory (PSS) of the roots and everything below them, now."""
    totals: dict[str, int] = {}
    for process in snapshot(roots):
        totals[process.role] = totals.get(process.role, 0) + process.pss
    return totals


def gpu_by_role(roots: Sequence[int]) -> dict[str, int]:
    """role -> bytes of GPU memory of the roots and everything below them, over all GPUs, now; by NVML, CUDA contexts included.

    Raises RuntimeError where NVML finds no GPU, or does not tell processes apart (some containers).
    """
    import pynvml

    tree, totals = set(process_tree(roots)), {}
    try:
        pynvml.nvmlInit()
        for i in range(pynvml.nvmlDeviceGetCount()):
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(i)):
                if process.pid in tree:
                    role = role_of(process.pid)
                    totals[role] = totals.get(role, 0) + int(process.usedGpuMemory or 0)
    except pynvml.NVMLError as error:
        raise RuntimeError(f"NVML does not tell GPU memory by process here: {error}") from error
    return totals


def card_used() -> int:
    """Bytes in use on this process's first GPU, by whomever, now; by NVML, which counts cards in the bus's order."""
    import pynvml

    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    pynvml.nvmlInit()
    by_name = first.startswith("GPU-")
    handle = pynvml.nvmlDeviceGetHandleByUUID(first) if by_name else pynvml.nvmlDeviceGetHandleByIndex(int(first))
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def settled_card_use(still: float = 0.5, patience: float = 20.0) -> int:
    """card_used() once it has not moved by more than a MiB for `still` seconds: a release is answered before the memory is
    back (slime 579). Raises TimeoutError after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    level, since = card_used(), time.monotonic()
    while time.monotonic() < deadline:
        if time.monotonic() - since >= still:
            return level
        time.sleep(0.1)
        now = card_used()
        if abs(now - level) > 1 << 20:
            level, since = now, time.monotonic()
    raise TimeoutError(
        f"GPU memory does not stand still within {patience:.0f} s, now {level / 1e9:.2f} GB: what else runs here?"
    )


class CardPeak:
    """`with CardPeak() as peak: ...`: peak.extra is by how many bytes the card's use rose above what it was at the start.

    Sampled every few milliseconds, so a shorter peak can be missed; allocators that keep blocks hide reuse.
    """

    def __init__(self, interval: float = 0.003):
        self.interval, self.extra, self._stop = interval, 0, threading.Event()

    def __enter__(self) -> CardPeak:
        self._before = card_used()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join(5)
        self.extra = max(self.extra, card_used() - self._before)  # also says so where NVML does not answer

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.extra = max(self.extra, card_used() - self._before)


def cuda_context_bytes() -> int:
    """Bytes that CUDA alone takes for a process like this one: what NVML sees, less what torch reserved. Opens a context."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return sum(gpu_by_role([os.getpid()]).values()) - torch.cuda.memory_reserved()


class MemoryTimeline:
    """Samples memory by role in a thread, and remembers which phase each sample fell into.

    `with timeline.phase("rollout"): ...` names a stretch. A sample costs a few milliseconds of kernel time a process.
    gpu: also by NVML, as kind "GPU" beside kind "host".
    """

    def __init__(self, roots: Sequence[int], interval: float = 0.25, gpu: bool = False):
        self.roots, self.interval = list(roots), interval
        self.measures = ({"GPU": gpu_by_role} if gpu else {}) | {"host": pss_by_role}
        self.rows: list[tuple[float, str, str, str, int]] = []  # seconds, phase, kind, role, bytes
        self.ends: dict[tuple[str, str], dict[str, int]] = {}  # (phase, kind) -> role -> bytes when it was over
        self.torch: dict[str, dict[str, int]] = {}  # phase -> peak "allocated" and "reserved" of this process on its GPU
        self.static: dict[str, dict[str, int]] = {}  # phase -> what `count` said at its end
        self.count: Callable[[], dict[str, int]] = dict  # for instance partial(device_bytes, trainer), once there is one
        self.seconds: dict[str, float] = {}  # phase -> how long it took
        self._phase, self._stop, self._start = "idle", threading.Event(), time.monotonic()
        self.failure: Exception | None = None  # what ended the sampling early
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryTimeline:
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join(5)
        if self.failure and exc[0] is None:
            raise RuntimeError("memory was not sampled to the end, so peaks are missing") from self.failure

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        self._count_from_here()
        start = time.monotonic()
        try:
            yield
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            for kind, roles in self.sample().items():  # a phase shorter than the interval is still seen
                self.ends[name, kind] = roles
            self._keep_counts(name)
        finally:
            self._phase = before

    def _count_from_here(self) -> None:
        if self._has_torch():
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def _keep_counts(self, name: str) -> None:
        if self._has_torch():
            import torch

            torch.cuda.synchronize()
            self.static[name] = self.count()
            self.torch[name] = {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                "allocated at the end": torch.cuda.memory_allocated(),
                "reserved at the end": torch.cuda.memory_reserved(),
            }

    def _has_torch(self) -> bool:
        """Whether this process has CUDA memory to count; asking must not make it open a context."""
        torch = sys.modules.get("torch")
        return "GPU" in self.measures and torch is not None and torch.cuda.is_initialized()

    def sample(self) -> dict[str, dict[str, int]]:
        """Measure now; returns kind -> role -> bytes."""
        now, found = time.monotonic() - self._start, {}
        for kind, measure in self.measures.items():
            phase = self._phase
            found[kind] = measure(self.roots)
            if self._phase == phase:  # else it belongs to neither: reading PSS of large processes takes a while
                self.rows += [(now, phase, kind, role, size) for role, size in found[kind].items()]
        return found

    def _run(self) -> None:
        try:
            while not self._stop.wait(self.interval):
                self.sample()
        except Exception as error:  # told in __exit__: a thread's own traceback reaches nobody in a notebook
            self.failure = error

    def peak_by_phase(self, kind: str = "host") -> dict[str, dict[str, int]]:
        """phase -> role -> most bytes seen; phases in order of appearance, without the time between them."""
        peaks: dict[str, dict[str, int]] = {}
        for _, phase, measured, role, size in self.rows:
            if phase == "idle" or measured != kind:
                continue
            roles = peaks.setdefault(phase, {})
            roles[role] = max(size, roles.get(role, 0))
        return peaks


MOVES = ("server start", "load", "release", "resume", "offload", "load back")


def measured_phases(
    timeline: MemoryTimeline, usage: Mapping[str, float], released: Sequence[str] = ()
) -> dict[str, dict[str, int]]:
    """Phase -> item -> bytes on the card, beside predicted_phases: what NVML saw of the two processes, taken apart.

    The trainer is this process: its static items, what else was allocated at the peak ("working memory"), what torch kept in
    reserve, and the rest of what NVML sees (the CUDA context). The rest of the server is its graphs, workspaces and context. Of a phase in MOVES the state at its end is given, of the others
    the peak: while something moves, the peak is what was there before. usage: the server's own figures in GiB (memory_usage of
    /server_info: weight, kvcache); they count except in the phases `released`. Nothing here is taken from a prediction.
    """
    phases, gib = {}, 1 << 30
    for phase, roles in timeline.peak_by_phase("GPU").items():
        moved, suffix = phase in MOVES, " at the end" if phase in MOVES else ""
        roles = timeline.ends.get((phase, "GPU"), roles) if moved else roles
        items, counts = dict(timeline.static.get(phase, {})), timeline.torch.get(phase, {})
        allocated, reserved = (counts.get(name + suffix, 0) for name in ("allocated", "reserved"))
        items["working memory"] = max(allocated - sum(items.values()), 0)
        items["allocator's reserve"] = reserved - allocated
        items["CUDA context"] = max(roles.get("notebook kernel", 0) - reserved, 0)
        served = sum(size for role, size in roles.items() if "SGLang" in role)
        resident = {} if phase in released or not served else {
            "server weights": round(usage["weight"] * gib), "server KV cache": round(usage["kvcache"] * gib),
        }  # fmt: skip
        items |= resident | {"rest of server": max(served - sum(resident.values()), 0)}
        phases[phase] = {name: size for name, size in items.items() if size}
    return phases
