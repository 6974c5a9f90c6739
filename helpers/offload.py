"""Where the trainer's tensors are: on the device, in host memory, or given up until they are needed again.

Trainer and rollout engine of one GPU take turns at its memory. What is moved here is the *storage* behind the tensors: it is
copied to pinned host memory and resized to nothing, so that every parameter, view and buffer stays the same object and
Megatron, DDP and the optimizer need not know. Megatron's own hooks do the same for DDP's buffers alone
(megatron/core/distributed/param_and_grad_buffer.py, offload_to_cpu); frozen experts lie in no such buffer, and at 20b they
are 38 of 42 GB.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PARTS = ("weights", "gradients", "optimizer")
ALIGNMENT = 512  # bytes; where a tensor may start in the host block
STAGED_BYTES = 1 << 28  # device memory that staged_tasks fills ahead of the conversion


class Where(Enum):
    """The state of one part. A part on DEVICE or HOST keeps its values; a DROPPED one comes back as zeros."""

    DEVICE = "on the device"
    HOST = "in host memory"
    DROPPED = "given up"


class OffloadError(RuntimeError):
    """A part is not where the caller needs it; the message says what to call first."""


@dataclass(frozen=True)
class Move:
    """What one move did. bytes: of the part, which the device gained or lost."""

    part: str
    where: Where
    bytes: int
    seconds: float
    pin_seconds: float = 0.0  # of these, to reserve and pin host memory: when a part first moves, or has grown


def storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """The storages behind tensors, each once, in order of appearance; empty ones left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def parts_of(model, optimizer) -> dict[str, list[torch.UntypedStorage]]:
    """The trainer's long-lived device memory by part, no storage in two of them.

    model: Megatron model chunks with DDP; optimizer: Megatron's wrapper. weights: all parameters, frozen ones too;
    gradients: DDP's buffers; optimizer: Adam's moments and, in bf16, the fp32 master weights.
    """
    from helpers.memory import gradient_buffers, optimizer_tensors

    weights = storages(p.data for chunk in model for p in chunk.parameters())
    held = {s.data_ptr() for s in weights}
    gradients = storages(b.grad_data for chunk in model for b in gradient_buffers(chunk))
    state = [s for s in storages(optimizer_tensors(optimizer)) if s.data_ptr() not in held]
    return {"weights": weights, "gradients": gradients, "optimizer": state}


class HostBlock:
    """One block of host memory with a place for each storage; pinned where a GPU copies from it.

    One registered block rather than a pinned tensor for each: torch's pinned allocator rounds each up to a power of two,
    which would take twice the memory for gpt-oss's experts.
    """

    def __init__(self, sizes: Sequence[int], pin: bool):
        import torch

        self.sizes, self.pinned = list(sizes), False
        self.starts, total = [], 0
        for size in self.sizes:
            self.starts.append(total)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self.data = torch.empty(total, dtype=torch.uint8)
        if pin and total:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(self.data.data_ptr(), total, 0)))
            self.pinned = True
            # memory must not be freed while it is registered, also where nobody calls close()
            self._unpin = weakref.finalize(self, _unpin, self.data)

    def __len__(self) -> int:
        return len(self.sizes)

    def place(self, index: int) -> Tensor:
        """uint8 view of the bytes that belong to storage `index`."""
        start = self.starts[index]
        return self.data[start : start + self.sizes[index]]

    def close(self) -> None:
        """Unpin; safe to call twice."""
        if self.pinned:
            self._unpin()
            self.pinned = False


def _unpin(data: Tensor) -> None:
    import torch

    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(data.data_ptr())))


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a uint8 tensor, sharing memory."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TrainerMemory:
    """Moves the parts of one trainer rank between its device and the host. Not collective: each rank moves its own.

    model: Megatron model chunks; optimizer: Megatron's wrapper; device: "cuda" or "cpu" (where "offloading" moves from one
    place of host memory to another: the same code, so that a laptop can test it).
    """

    def __init__(self, model: list, optimizer, device: str):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.where = dict.fromkeys(PARTS, Where.DEVICE)
        self._away: dict[
            str, list[torch.UntypedStorage]
        ] = {}  # emptied storages of a part, in the order of its block
        self._sizes: dict[str, list[int]] = {}  # their bytes before
        self._blocks: dict[
            str, HostBlock
        ] = {}  # kept from one move to the next: pinning takes longer than copying
        self._copier: _Copier | None = None
        self._index: dict[int, int] = {}  # storage of an offloaded weight -> its place in the block

    # --- moves --------------------------------------------------------------------------------------------------------
    def offload(self, parts: Sequence[str] = PARTS) -> list[Move]:
        """Take the parts off the device; gradients are dropped, the others copied to the host. What is away already stays.

        Raises ValueError for an unknown part, before anything moves.
        """
        self._check(parts)
        current = parts_of(self.model, self.optimizer)
        try:
            return [self._take_away(p, current[p]) for p in parts if self.where[p] is Where.DEVICE]
        finally:
            self.give_back()

    def load_back(self, parts: Sequence[str] = PARTS) -> list[Move]:
        """Bring the parts back to the device, with the values that they had; gradients as zeros."""
        self._check(parts)
        if any(self.where[p] is not Where.DEVICE and p not in self._away for p in parts):
            raise OffloadError("this trainer was closed: its weights are gone; make a new one")
        return [self._bring_back(p) for p in parts if self.where[p] is not Where.DEVICE]

    def require(self, *parts: str, call: str) -> None:
        """Raise OffloadError unless all these parts are on the device."""
        away = [f"{p} ({self.where[p].value})" for p in parts if self.where[p] is not Where.DEVICE]
        if away:
            raise OffloadError(
                f"{call} needs {', '.join(away)} on the device: call trainer.memory.load_back() first"
            )

    def discard(self) -> None:
        """Empty all storages and forget what was in them: the end of this trainer."""
        for part, found in parts_of(self.model, self.optimizer).items():
            self.where[part] = Where.DROPPED
            for storage in found:
                if storage.resizable():
                    storage.resize_(0)
            self._away.pop(part, None)
            if part in self._blocks:
                self._blocks.pop(part).close()
        self.give_back()

    def restore(self) -> None:
        """Bring everything back and give the host memory up."""
        self.load_back()
        for block in self._blocks.values():
            block.close()
        self._blocks.clear()

    def _check(self, parts: Sequence[str]) -> None:
        unknown = [p for p in parts if p not in PARTS]
        if unknown or isinstance(parts, str):
            raise ValueError(f"unknown parts {unknown or parts!r}: give a sequence of {', '.join(PARTS)}")

    def _take_away(self, part: str, found: list[torch.UntypedStorage]) -> Move:
        fixed = [s.nbytes() for s in found if not s.resizable()]
        if fixed:
            raise OffloadError(
                f"{len(fixed)} storages of {part} ({sum(fixed)} bytes) cannot be emptied: somebody holds them as numpy arrays or "
                "shared memory; clone such tensors before .numpy(). Nothing of this part was moved"
            )
        self._synchronize()
        start, pinning, sizes = time.perf_counter(), 0.0, [s.nbytes() for s in found]
        if part != "gradients":
            pinning = self._reserve(part, sizes)
            for i, storage in enumerate(found):
                self._blocks[part].place(i).copy_(_bytes_of(storage), non_blocking=True)
            self._synchronize()
        if part == "weights":
            self._index = {storage._cdata: i for i, storage in enumerate(found)}
        for storage in found:
            storage.resize_(0)
        self._away[part], self._sizes[part] = found, sizes
        self.where[part] = Where.DROPPED if part == "gradients" else Where.HOST
        return Move(part, self.where[part], sum(sizes), time.perf_counter() - start, pinning)

    def _bring_back(self, part: str) -> Move:
        start, sizes, away = time.perf_counter(), self._sizes[part], self._away[part]
        try:
            for i, storage in enumerate(away):
                storage.resize_(sizes[i])
                values = _bytes_of(storage)
                if part == "gradients":
                    values.zero_()
                else:
                    values.copy_(self._blocks[part].place(i), non_blocking=True)
            self._synchronize()
        except RuntimeError as error:  # torch's out-of-memory is one
            for storage in away:
                storage.resize_(0)
            self.give_back()
            raise OffloadError(
                f"no room for {part} ({sum(sizes) / 1e9:.1f} GB) on the device: let the server release its memory first. "
                f"Nothing is lost, call load_back() again. torch says: {str(error)[:160]}"
            ) from error
        del self._away[part]
        self.where[part] = Where.DEVICE
        return Move(part, Where.DEVICE, sum(sizes), time.perf_counter() - start)

    def _reserve(self, part: str, sizes: list[int]) -> float:
        """Host memory for the part, kept for its next move; returns the seconds that took."""
        start, block = time.perf_counter(), self._blocks.get(part)
        if block is None or block.sizes != sizes:
            if block is not None:
                self._blocks.pop(part).close()
                del block  # before the new one asks for as much again
            self._blocks[part] = HostBlock(sizes, pin=self.device == "cuda")
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()

    def give_back(self) -> None:
        """The freed blocks to the driver: the other process on this card cannot have them from torch's cache."""
        if self.device == "cuda":
            import torch

            torch.cuda.empty_cache()

    def copier(self) -> _Copier:
        """The stream for staging, one for all exports: each stream has an allocator's cache of its own."""
        if self._copier is None:
            self._copier = _Copier(self.device)
        return self._copier

    # --- reading while away -------------------------------------------------------------------------------------------
    def host_copy(self, tensor: Tensor) -> Tensor:
        """The values of an offloaded weight, as a view of pinned host memory with the same shape.

        Raises OffloadError where the tensor is none of the offloaded weights.
        """
        place = self._index.get(tensor.untyped_storage()._cdata)
        if self.where["weights"] is not Where.HOST or place is None:
            raise OffloadError("this tensor is not among the offloaded weights: offload them before you ask")
        flat = self._blocks["weights"].place(place).view(tensor.dtype)
        start = (
            flat.storage_offset() + tensor.storage_offset()
        )  # as_strided counts from the block's beginning
        return flat.as_strided(tensor.shape, tensor.stride(), start)


def staged_tasks(tasks: Iterable, memory: TrainerMemory, ahead: int = STAGED_BYTES) -> Iterator:
    """Megatron-Bridge's conversion tasks, each with its weight copied from the host to the device just before its turn.

    Copies run on a stream of their own, up to `ahead` bytes before the conversion. No more of the model is on the device at
    a time than that and what the consumer keeps.
    tasks: of AutoBridge.get_conversion_tasks; the tasks come out in the same order, those without a weight as they are.
    """
    waiting, held = deque(), 0
    copier = memory.copier()
    for task in tasks:
        size = 0
        if task is not None and task.param_weight is not None:
            source = memory.host_copy(task.param_weight)
            size = source.numel() * source.element_size()
            staged = copier.start(source)
            _copy_attributes(task.param_weight, staged)
            task = dataclasses.replace(task, param_weight=staged)
            del staged
        waiting.append((task, size, copier.mark()))
        del task
        held += size
        while waiting and held > ahead:
            held -= waiting[0][1]
            yield copier.finish(waiting.popleft())
    while waiting:
        yield copier.finish(waiting.popleft())
    memory.give_back()


def _copy_attributes(source: Tensor, target: Tensor) -> None:
    """What the bridge reads of a parameter when it gathers it over ranks."""
    for name in ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))


class _Copier:
    """Host to device on a stream of its own; on a CPU a plain copy."""

    def __init__(self, device: str):
        import torch

        self.device = device
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def start(self, source: Tensor) -> Tensor:
        import torch

        if self.stream is None:
            return source.clone()
        with torch.cuda.stream(self.stream):
            staged = torch.empty_like(source, device="cuda")
            staged.copy_(source, non_blocking=True)
        return staged

    def mark(self):
        return self.stream.record_event() if self.stream else None

    def finish(self, entry: tuple):
        """The task, once the device's own stream waits for its copy."""
        import torch

        task, _, event = entry
        if event is not None:
            here = torch.cuda.current_stream()
            here.wait_event(event)
            if task is not None and task.param_weight is not None:
                task.param_weight.record_stream(here)
        return task
