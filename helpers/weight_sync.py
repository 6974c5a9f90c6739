"""Weight sync: the trainer's present weights into a running SGLang server, exactly and without a restart."""

from __future__ import annotations

import base64
import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.nodes import LOOPBACK
from helpers.rollout import RolloutError, RolloutServer, SGLangClient, flush_cache, free_port

if TYPE_CHECKING:
    from torch import Tensor

    from helpers.trainer import MegatronTrainer


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. buckets: requests to each server. Wall time is export_seconds + send_seconds.

    export_seconds: Megatron's tensors gathered (from other ranks, or from the host where they are offloaded) and converted;
    through disk it is part of the transfer. send_seconds: until the servers had taken them, as far as that was not hidden
    behind the export. transfer_seconds: of all sending, hidden or not, what it took to pack, broadcast or write.
    """

    version: str
    tensors: int
    megabytes: float
    export_seconds: float
    send_seconds: float
    transfer_seconds: float
    buckets: int = 1

    @property
    def seconds(self) -> float:
        return self.export_seconds + self.send_seconds


def sync_weights(
    trainer: MegatronTrainer,
    servers: SGLangClient | list[SGLangClient],
    version: str,
    bucket_bytes: int = 1 << 30,
    group: SyncGroup | None = None,
    overlap: bool = True,
    own: Sequence[int] | None = None,
) -> SyncReport:
    """Stream the trainer's weights into every server; episodes sampled afterwards carry `version`.

    With several trainer ranks all of them call this (the export is collective, and gives each rank the whole weights).
    own: places in `servers` of those that this rank sends to; None: all of them on rank 0, none on the others. Offloaded
    weights are streamed from the host and stay there.
    bucket_bytes: or one tensor, whichever is more, is held beside the model; twice that with overlap, where a bucket is sent
    while the next one is exported. group: broadcast through it (never overlapped: its collectives must not meet the export's);
    without one, tensors go as CUDA IPC handles on a GPU and by value on a CPU.
    Raises RolloutError before anything is sent when one of the servers cannot take these weights (see check_sync_target).
    """
    servers = servers if isinstance(servers, list) else [servers]
    clock = _Clock(trainer.settings.device)
    stream = trainer.export_stream()
    if own is None:
        own = [] if trainer.rank else range(len(servers))
    if not own:
        deque(stream, maxlen=0)
        return SyncReport(version, 0, 0.0, clock.lap(), 0.0, 0.0)
    post = partial(_post_to_each, [servers[i] for i in own])
    sender = _Sender(group.broadcast if group else post, overlap and group is None)
    tensors, size, export, waited, buckets = 0, 0, 0.0, 0.0, 0
    try:
        shapes = trainer.tensor_shapes()
        for server in servers:  # all of them before the first one changes
            check_sync_target(server, shapes, complete=True)
        for bucket in _buckets(stream, bucket_bytes):
            export += clock.lap()  # which also waits for the GPU: what is sent is there
            tensors, buckets = tensors + len(bucket), buckets + 1
            size += sum(t.numel() * t.element_size() for t in bucket.values())
            sender.send(bucket, version)
            waited += clock.lap()
        sender.finish()
        for i in own:
            flush_cache(servers[i].post)
    except BaseException:
        deque(stream, maxlen=0)  # the other ranks wait for it
        raise
    finally:
        sender.close()
    trainer.hand_back()  # the buckets' room, too
    return SyncReport(version, tensors, size / 1e6, export, waited + clock.lap(), sender.seconds, buckets)


class _Sender:
    """Sends buckets one after the other, in a thread of its own where they may overlap with what makes them."""

    def __init__(self, send: Callable[[dict[str, Tensor], str], float], overlap: bool):
        self._send, self._overlap, self.seconds = send, overlap, 0.0
        self._thread, self._pending = ThreadPoolExecutor(1), None

    def send(self, bucket: dict[str, Tensor], version: str) -> None:
        """Start sending; waits for the bucket before, and for this one too without overlap. Empties the bucket afterwards."""
        self.finish()
        self._pending = self._thread.submit(self._one, bucket, version)
        if not self._overlap:
            self.finish()

    def _one(self, bucket: dict[str, Tensor], version: str) -> None:
        self.seconds += self._send(bucket, version)
        bucket.clear()

    def finish(self) -> None:
        """Wait for what is being sent; raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        self._thread.shutdown()


def sync_through_disk(
    trainer: MegatronTrainer, server: RolloutServer, folder: Path, version: str
) -> SyncReport:
    """The trainer's weights as a Hugging Face folder, which the server then reads; needs disk for one copy.

    One rank, or all of them on one machine. What other machines can do when nothing else connects the two.
    """
    clock = _Clock(trainer.settings.device)
    written = trainer.export_checkpoint(folder)
    transfer = clock.lap()
    if written is None:
        return SyncReport(version, 0, 0.0, 0.0, transfer, transfer)
    server.load_weights(written, version)
    size = sum(file.stat().st_size for file in Path(written).glob("*.safetensors"))
    send = transfer + clock.lap()
    return SyncReport(version, len(trainer.tensor_shapes()), size / 1e6, 0.0, send, transfer)


class SyncGroup:
    """A torch.distributed group of this process (rank 0) and its servers, for weights where no memory is shared.

    `with SyncGroup(servers, "nccl") as group: sync_weights(trainer, servers, version, group=group)`; open it once a run.
    backend: nccl between GPUs; gloo on CPUs, and on one GPU, since NCCL refuses two ranks on the same card. Servers of one
    rank each (tp_size 1). address: of this machine, as the servers reach it. Source: sglang's /init_weights_update_group and /update_weights_from_distributed.
    """

    def __init__(
        self,
        servers: SGLangClient | list[SGLangClient],
        backend: str,
        name: str = "weights",
        timeout: float = 60.0,
        address: str = LOOPBACK,
    ):
        self.servers = servers if isinstance(servers, list) else [servers]
        self.backend, self.name, self.timeout, self.group = backend, name, timeout, None
        self.address = address

    def __enter__(self) -> SyncGroup:
        self._require_free_name()  # before a server starts to wait for us
        port, world = free_port(), len(self.servers) + 1
        pool = ThreadPoolExecutor(len(self.servers))  # no `with`: a server that waits for others must not hold us
        joining = [
            pool.submit(
                server.post, "/init_weights_update_group", master_address=self.address, master_port=port,
                rank_offset=rank, world_size=world, group_name=self.name, backend=self.backend,
            )
            for rank, server in enumerate(self.servers, start=1)
        ]  # fmt: skip
        pool.shutdown(wait=False)
        try:
            self.group = _join_group(self.backend, self.address, port, world, self.name, self.timeout)
            for reply in joining:
                _require_success(reply.result(self.timeout))
        except BaseException as error:
            joined = [s for s, reply in zip(self.servers, joining, strict=True) if _succeeded(reply)]
            self._leave(joined, quietly=True)
            _raise_first_refusal(joining, error)
            raise
        return self

    def _require_free_name(self) -> None:
        from torch.distributed import distributed_c10d as c10d

        if self.name in c10d._world.pg_names.values():
            raise RolloutError(f"this process is in a group called {self.name!r} already: leave it, or choose another name")

    def __exit__(self, *exc) -> None:
        self._leave(self.servers, quietly=exc[0] is not None)

    def close(self) -> None:
        """Leave the group; servers that are gone, or do not know it any more, are passed over."""
        self._leave(self.servers, quietly=True)

    def _leave(self, servers: list[SGLangClient], quietly: bool) -> None:
        """Destroy the group here and, as far as they answer, at the servers. quietly: another error is on its way."""
        import torch.distributed as dist

        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        for server in servers:
            try:
                server.post("/destroy_weights_update_group", group_name=self.name)
            except RolloutError:
                if not quietly:
                    raise

    def broadcast(self, bucket: dict[str, Tensor], version: str) -> float:
        """Send the tensors to every server; returns the seconds of the broadcasts, once the servers have loaded them.

        Raises RolloutError with the words of a server that refuses.
        """
        import torch
        import torch.distributed as dist

        description = {
            "names": list(bucket), "dtypes": [str(t.dtype).removeprefix("torch.") for t in bucket.values()],
            "shapes": [list(t.shape) for t in bucket.values()], "group_name": self.name, "flush_cache": False,
            "weight_version": version,
        }  # fmt: skip
        pool, path = ThreadPoolExecutor(len(self.servers)), "/update_weights_from_distributed"
        replies = [pool.submit(server.post, path, **description) for server in self.servers]
        pool.shutdown(wait=False)
        start = time.perf_counter()
        try:
            for tensor in bucket.values():
                dist.broadcast(tensor.contiguous(), src=0, group=self.group)
            if self.backend == "nccl":
                torch.cuda.synchronize()  # nccl only queues a broadcast
        except RuntimeError as error:
            _raise_first_refusal(replies, error)
            raise
        seconds = time.perf_counter() - start
        for reply in replies:
            _require_success(reply.result())
        return seconds


def _succeeded(reply: Future) -> bool:
    return reply.done() and not reply.exception() and bool(reply.result().get("success"))


def _raise_first_refusal(replies: list[Future], error: BaseException) -> None:
    """What a server said is the cause; that we then waited in vain is not."""
    for reply in replies:
        if reply.done() and reply.exception():
            raise reply.exception() from error
        if reply.done():
            _require_success(reply.result())


def _join_group(backend: str, address: str, port: int, world: int, name: str, timeout: float):
    """Rank 0 of a process group beside the default one, whose other ranks are in other programs.

    torch has no public call for that; this is the sequence that SGLang's servers go through at the same time
    (sglang.srt.utils.common.init_custom_process_group, which a trainer cannot import without all of SGLang).
    """
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=timeout)
    store, rank, world = next(c10d.rendezvous(f"tcp://{address}:{port}", 0, world, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        world, rank, [], c10d.Backend(backend), c10d.PrefixStore(name, store), group_name=name, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    return group


class _Clock:
    """Seconds between laps, with the work of the device's present stream done; copies ahead on other streams go on."""

    def __init__(self, device: str):
        self.device, self.last = device, time.perf_counter()

    def lap(self) -> float:
        if self.device == "cuda":
            import torch

            torch.cuda.current_stream().synchronize()
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
    _post_to_each([server], weights, version)
    flush_cache(server.post)


def _post_to_each(servers: list[SGLangClient], weights: dict[str, Tensor], version: str) -> float:
    """POST to each server's /update_weights_from_tensor; returns the seconds of packing, once the servers have loaded them.

    The payload is what SGLang's own MultiprocessingSerializer reads. GPU tensors travel as CUDA IPC handles. CPU tensors
    travel by value: handles would leave a shared-memory daemon alive for as long as the server remembers them, and a
    model that fits a CPU run is a megabyte.
    Source: sglang.srt.utils.MultiprocessingSerializer.
    """
    on_gpu, start = any(tensor.is_cuda for tensor in weights.values()), time.perf_counter()
    pack = _handles if on_gpu else _values
    # once a server: each of them opens, and so counts down, handles of its own
    payloads = [base64.b64encode(pack(list(weights.items()))).decode() for _ in servers]
    packing = time.perf_counter() - start

    def post(server: SGLangClient, payload: str) -> None:
        reply = server.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[payload],
            flush_cache=False,
            weight_version=version,
        )
        _require_success(reply)

    with ThreadPoolExecutor(len(servers)) as pool:  # they load at the same time
        list(pool.map(post, servers, payloads))
    if on_gpu:
        import torch

        torch.cuda.ipc_collect()  # else the memory behind the handles stays (slime 1731)
    return packing


def _require_success(reply: Mapping) -> None:
    if not reply.get("success"):
        raise RolloutError(f"SGLang did not take the weights: {reply.get('message')}")


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
        # a copy: numpy() would make the parameter's own storage one that cannot be offloaded
        raw = bytearray(item.detach().clone().contiguous().view(torch.uint8).numpy().tobytes())
        return partial(torch.frombuffer, dtype=item.dtype), (raw,)
