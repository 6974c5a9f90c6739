"""Weight sync: the trainer's present weights into a running SGLang server, exactly and without a restart."""

from __future__ import annotations

import base64
import functools
import io
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers.rollout import RolloutError, SGLangClient, flush_cache

if TYPE_CHECKING:
    from torch import Tensor

    from helpers.trainer import MegatronTrainer


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. seconds = export_seconds + send_seconds."""

    version: str
    tensors: int
    megabytes: float
    export_seconds: float
    send_seconds: float

    @property
    def seconds(self) -> float:
        return self.export_seconds + self.send_seconds


def sync_weights(
    trainer: MegatronTrainer, servers: SGLangClient | list[SGLangClient], version: str
) -> SyncReport:
    """Export the trainer's weights and load them into every server; episodes sampled afterwards carry `version`.

    With several trainer ranks all of them call this (the export is collective); rank 0 sends.
    """
    servers = servers if isinstance(servers, list) else [servers]
    start = time.perf_counter()
    weights = trainer.export()
    exported = time.perf_counter()
    if trainer.rank == 0:
        for server in servers:
            send_tensors(server.post, weights, version)
    sent = time.perf_counter()
    size = sum(t.numel() * t.element_size() for t in weights.values()) / 1e6
    return SyncReport(version, len(weights), size, exported - start, sent - exported)


def send_tensors(post: Callable, weights: dict[str, Tensor], version: str) -> None:
    """Hand tensors to /update_weights_from_tensor. post: SGLangClient.post. Raises RolloutError when they are refused.

    The payload is what SGLang's own MultiprocessingSerializer reads. GPU tensors travel as CUDA IPC handles. CPU tensors
    travel by value: handles would leave a shared-memory daemon alive for as long as the server remembers them, and a
    model that fits a CPU run is a megabyte.
    Source: sglang.srt.utils.MultiprocessingSerializer.
    """
    on_gpu = any(tensor.is_cuda for tensor in weights.values())
    payload = base64.b64encode((_handles if on_gpu else _values)(list(weights.items()))).decode()
    reply = post(
        "/update_weights_from_tensor",
        serialized_named_tensors=[payload],
        flush_cache=False,
        weight_version=version,
    )
    if not reply.get("success"):
        raise RolloutError(f"SGLang did not take the weights: {reply.get('message')}")
    flush_cache(post)


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
