"""Where memory goes: predicted from the config, measured from tensors and processes (helpers.processes has PSS)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.anatomy import parameter_table, total_parameters
from helpers.processes import process_tree, pss
from helpers.profiles import Profile

if TYPE_CHECKING:
    from helpers.trainer import MegatronTrainer

_BYTES = {"float32": 4, "bfloat16": 2}


# --- predicted --------------------------------------------------------------------------------------------------------
def parameter_count(settings: Profile) -> int:
    """Parameters of the profile's model, from its config alone."""
    return total_parameters(settings.model)


def predicted_trainer_bytes(settings: Profile) -> dict[str, int]:
    """Bytes of the trainer's long-lived tensors on one rank without parallelism: weights, gradients, Adam.

    fp32: Megatron's optimizer updates the weights in place, so there is no master copy; bf16 adds an fp32 one.
    """
    n, size = parameter_count(settings), _BYTES[settings.model.dtype]
    trainable = n if not settings.trainer.freeze_experts else n - _expert_parameters(settings)
    return {
        "weights": n * size,
        "gradients": trainable * 4,  # DDP keeps the buffer in fp32 (grad_reduce_in_fp32)
        "Adam moments": trainable * 8,
        "master weights": 0 if size == 4 else trainable * 4,
    }


def _expert_parameters(settings: Profile) -> int:
    return sum(row.parameters for row in parameter_table(settings.model) if "expert" in row.component)


def predicted_logits_bytes(settings: Profile, episodes: int, sequence: int) -> int:
    """Bytes of one copy of the logits in fp32, [episodes, sequence, vocabulary]. A loss over them holds several."""
    return episodes * sequence * settings.model.vocab_size * 4


def predicted_attention_bytes(settings: Profile, episodes: int, sequence: int) -> int:
    """Bytes of one copy of all layers' attention probabilities with the sink's column: [episodes, heads, S, S + 1]."""
    m = settings.model
    return m.num_hidden_layers * episodes * m.num_attention_heads * sequence * (sequence + 1) * 4


def predicted_kv_bytes(settings: Profile, full_tokens: int, window_tokens: int) -> int:
    """Bytes of SGLang's two KV pools: full_tokens for full-attention layers, window_tokens for sliding ones.

    Each pool has one page more than its tokens (page size 1: the slot that padding writes to).
    """
    m = settings.model
    per_layer_token = 2 * m.num_key_value_heads * m.head_dim * _BYTES[m.dtype]
    sliding = (m.num_hidden_layers + 1) // 2
    return per_layer_token * (
        sliding * (window_tokens + 1) + (m.num_hidden_layers - sliding) * (full_tokens + 1)
    )


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


class MemoryTimeline:
    """Samples memory by role in a thread, and remembers which phase each sample fell into.

    `with timeline.phase("rollout"): ...` names a stretch. A sample costs a few milliseconds of kernel time a process.
    gpu: also by NVML, as kind "GPU" beside kind "host".
    """

    def __init__(self, roots: Sequence[int], interval: float = 0.25, gpu: bool = False):
        self.roots, self.interval = list(roots), interval
        self.measures = {"host": pss_by_role} | ({"GPU": gpu_by_role} if gpu else {})
        self.rows: list[tuple[float, str, str, str, int]] = []  # seconds, phase, kind, role, bytes
        self._phase, self._stop, self._start = "idle", threading.Event(), time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryTimeline:
        self._thread.start()
        return self

    def __exit__(self, *exc) -> None:
        self._stop.set()
        self._thread.join(5)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self._phase = self._phase, name
        try:
            yield
            self.sample()  # a phase shorter than the interval is still seen
        finally:
            self._phase = before

    def sample(self) -> None:
        now, phase = time.monotonic() - self._start, self._phase
        for kind, measure in self.measures.items():
            self.rows += [(now, phase, kind, role, size) for role, size in measure(self.roots).items()]

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.sample()

    def peak_by_phase(self, kind: str = "host") -> dict[str, dict[str, int]]:
        """phase -> role -> most bytes seen; phases in order of appearance, without the time between them."""
        peaks: dict[str, dict[str, int]] = {}
        for _, phase, measured, role, size in self.rows:
            if phase == "idle" or measured != kind:
                continue
            roles = peaks.setdefault(phase, {})
            roles[role] = max(size, roles.get(role, 0))
        return peaks
