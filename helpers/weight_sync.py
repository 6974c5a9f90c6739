"""Weight sync: the trainer's present weights into a running SGLang server, exactly and without a restart."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.rollout import RolloutError, SGLangClient, flush_cache

if TYPE_CHECKING:
    from torch import Tensor

    from helpers.trainer import MegatronTrainer


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. seconds = export_seconds + send_seconds; buckets: requests to each server."""

    version: str
    tensors: int
    megabytes: float
    export_seconds: float
    send_seconds: float
    buckets: int = 1

    @property
    def seconds(self) -> float:
        return self.export_seconds + self.send_seconds


def sync_weights(
    trainer: MegatronTrainer,
    servers: SGLangClient | list[SGLangClient],
    version: str,
    bucket_bytes: int = 1 << 30,
) -> SyncReport:
    """Stream the trainer's weights into every server; episodes sampled afterwards carry `version`.

    With several trainer ranks all of them call this (the export is collective); rank 0 sends. At most bucket_bytes, or one
    tensor, is held beside the model. Raises RolloutError before anything is sent when one of the servers cannot take
    these weights (see check_sync_target).
    """
    servers = servers if isinstance(servers, list) else [servers]
    clock = _Clock(trainer.settings.device)
    stream = trainer.export_stream()
    if trainer.rank:
        deque(stream, maxlen=0)
        return SyncReport(version, 0, 0.0, clock.lap(), 0.0)
    tensors, size, export, send, buckets = 0, 0, 0.0, 0.0, 0
    try:
        shapes = trainer.tensor_shapes()
        for server in servers:  # all of them before the first one changes
            check_sync_target(server, shapes, complete=True)
        for bucket in _buckets(stream, bucket_bytes):
            export += clock.lap()
            for server in servers:
                _post_tensors(server, bucket, version)
            tensors, buckets = tensors + len(bucket), buckets + 1
            size += sum(t.numel() * t.element_size() for t in bucket.values())
            bucket.clear()
            send += clock.lap()
        for server in servers:
            flush_cache(server.post)
    except BaseException:
        deque(stream, maxlen=0)  # the other ranks wait for it
        raise
    return SyncReport(version, tensors, size / 1e6, export, send + clock.lap(), buckets)


class _Clock:
    """Seconds between laps, with the GPU's work done."""

    def __init__(self, device: str):
        self.device, self.last = device, time.perf_counter()

    def lap(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


def _buckets(stream: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, as many at a time as fit `limit` bytes; a larger one is a bucket by itself."""
    bucket, held = {}, 0
    for name, tensor in stream:
        size = tensor.numel() * tensor.element_size()
        if bucket and held + size > limit:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += size
    if bucket:
        yield bucket


def check_sync_target(
    server: SGLangClient, shapes: Mapping[str, Sequence[int]], complete: bool = False
) -> None:
    """Refuse, with a RolloutError, what the server would drop without a word or die of; asks it once a client.

    A server that loaded MXFP4 drops every expert update, any server drops a name that it does not have, and a wrong shape
    ends it. complete: the names have to be all of the model's, else a tensor would stay behind the others.
    """
    served = server.served_model()
    if served.quantisation:
        raise RolloutError(
            f"the server at {server.url} loaded {served.folder} in {served.quantisation} and would drop expert updates without "
            "a word; start it from helpers.checkpoints.rollout_checkpoint(settings, folder), a plain copy"
        )
    for name, shape in shapes.items():
        if name not in served.shapes:
            raise RolloutError(
                f"{name} is no tensor of {served.folder}, which the server at {server.url} serves: it would drop it without a "
                "word; helpers.anatomy.tensor_shapes lists the names"
            )
        if tuple(shape) != served.shapes[name]:
            raise RolloutError(
                f"{name} is {list(shape)} and the server at {server.url} has it as {list(served.shapes[name])}, which "
                f"would end the server; sync with one that serves the trainer's model, not {served.folder}"
            )
    left = served.shapes.keys() - shapes.keys()
    if complete and left:
        raise RolloutError(
            f"{min(left)} and {len(left) - 1} more tensors of the served model are not in the export"
        )


def send_tensors(server: SGLangClient, weights: dict[str, Tensor], version: str) -> None:
    """Hand tensors (all or some) to a server and drop its cache. Raises RolloutError when they are refused, here or there."""
    check_sync_target(server, {name: tensor.shape for name, tensor in weights.items()})
    _post_tensors(server, weights, version)
    flush_cache(server.post)


def _post_tensors(server: SGLangClient, weights: dict[str, Tensor], version: str) -> None:
    """POST to /update_weights_from_tensor; returns when the server has copied them.

    The payload is what SGLang's own MultiprocessingSerializer reads. GPU tensors travel as CUDA IPC handles. CPU tensors
    travel by value: handles would leave a shared-memory daemon alive for as long as the server remembers them, and a
    model that fits a CPU run is a megabyte.
    Source: sglang.srt.utils.MultiprocessingSerializer.
    """
    on_gpu = any(tensor.is_cuda for tensor in weights.values())
    payload = base64.b64encode((_handles if on_gpu else _values)(list(weights.items()))).decode()
    reply = server.post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[payload],
        flush_cache=False,
        weight_version=version,
    )
    if not reply.get("success"):
        raise RolloutError(f"SGLang did not take the weights: {reply.get('message')}")
    if on_gpu:
        import torch

        torch.cuda.ipc_collect()  # else the memory behind the handles stays (slime 1731)


def _handles(named_tensors: list) -> bytes:
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # noqa: F401  importing it registers the tensor reductions

    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(named_tensors)
    return buffer.getvalue()


def _values(named_tensors: list) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=4).dump(named_tensors)
    return buffer.getvalue()


class _ByValue(pickle.Pickler):
    """Pickles a CPU tensor as torch.frombuffer(bytes) and a reshape.

    torch's own reduction names torch.storage._load_from_bytes, which megatron-core replaces by a function of its own
    (megatron/core/safe_globals.py); SGLang's unpickler knows only torch's names and refuses that one.
    """

    def reducer_override(self, item):
        import torch

        if not isinstance(item, torch.Tensor):
            return NotImplemented
        if item.dim() != 1:
            return torch.reshape, (item.reshape(-1), tuple(item.shape))
        raw = bytearray(item.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return functools.partial(torch.frombuffer, dtype=item.dtype), (raw,)
