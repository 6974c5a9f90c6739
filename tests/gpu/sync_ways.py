"""Weights from trainer to server on one GPU, four ways, and the question of verl 4394: must offloaded weights be loaded back?

    python tests/gpu/sync_ways.py --out DIR [--profile gpu-20b] [--layers 4] [--repeats 3] [--ways ...]

ipc: CUDA IPC handles, in buckets; "in turn": a bucket is not sent while the next is exported. offloaded: the same, streamed from pinned host memory while the trainer is away. group: a
torch.distributed group; gloo, since NCCL refuses two ranks on one card. disk: a Hugging Face folder. "loaded back" is load
back + ipc + offload, what `offloaded` replaces. Each runs once to warm up. Writes sync_ways.csv (one row a run) and
sync_stages.csv (seconds of gathering and converting alone, and this machine's host-to-device bandwidth).
"""

import argparse
import os
import statistics
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

from helpers.profiles import load_profile
from helpers.results import write_rows

WAYS = ("ipc", "ipc, in turn", "offloaded", "offloaded, in turn", "loaded back", "group", "disk")


def host_to_device() -> float:
    """GB/s of copies of 1 GiB from pinned memory to the GPU, median of ten: the bound of anything that is streamed."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    target, seconds = torch.empty_like(source, device="cuda"), []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return source.numel() / 1e9 / statistics.median(seconds)


def timed(work) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def stages(trainer) -> list[dict]:
    """Seconds of the parts of an export, alone: on the device, and from the host."""
    from helpers.offload import staged_tasks

    drain = lambda stream: timed(lambda: deque(stream(), maxlen=0))  # noqa: E731
    rows = [{"stage": "export on the device", "seconds": drain(trainer.export_stream)}]
    moves = trainer.memory.offload()
    tasks = trainer.model.bridge.get_conversion_tasks(trainer.model.chunks)
    rows.append({"stage": "gather from the host", "seconds": drain(lambda: staged_tasks(tasks, trainer.memory))})
    rows.append({"stage": "export from the host", "seconds": drain(trainer.export_stream)})
    away = checksums(trainer)
    moves += trainer.memory.load_back()
    if checksums(trainer) != away:
        raise SystemExit("weights exported from the host are not those of the device")
    for move in moves:
        name = f"{move.part}: {move.where.value}"
        rows.append({"stage": name, "seconds": move.seconds - move.pin_seconds, "gigabytes": move.bytes / 1e9})
        if move.pin_seconds:
            rows.append({"stage": f"{move.part}: reserve and pin", "seconds": move.pin_seconds})
    return rows


def checksums(trainer) -> dict[str, int]:
    """A sum over the bits of every exported tensor: equal ones are equal for our purpose, in little time and memory."""
    import torch

    return {n: int(t.contiguous().view(torch.int16).long().sum()) for n, t in trainer.export_stream()}


def one_sync(way: str, trainer, server, folder: Path, group) -> tuple:
    """(report, seconds of moving the trainer). The trainer is home before and after."""
    from helpers.weight_sync import sync_through_disk, sync_weights

    moving = 0.0
    if way == "loaded back":
        moving = timed(lambda: trainer.memory.load_back(["weights"]))
    report = (
        sync_through_disk(trainer, server, folder, way)
        if way == "disk"
        else sync_weights(trainer, server, way, group=group if way == "group" else None, overlap="in turn" not in way)
    )
    if way == "loaded back":
        moving += timed(lambda: trainer.memory.offload(["weights"]))
    return report, moving


def measure(way: str, number: int, trainer, server, folder: Path, group, sampled: bool) -> dict:
    """One run of one way. sampled: its memory peaks above the state in which it starts; else its seconds, undisturbed."""
    import torch

    if way.startswith(("offloaded", "loaded back")):
        trainer.memory.offload()
    torch.cuda.empty_cache()
    run = partial(one_sync, way, trainer, server, folder, group)
    row = peaks_of(run, trainer, server) if sampled else seconds_of(run)
    trainer.memory.load_back()
    return {"way": way, "run": "memory" if sampled else number} | row


def seconds_of(run) -> dict:
    report, moving = run()
    return {
        "gigabytes": report.megabytes / 1e3, "move_seconds": moving, "export_seconds": report.export_seconds,
        "send_seconds": report.send_seconds, "transfer_seconds": report.transfer_seconds,
        "total_seconds": moving + report.seconds, "buckets": report.buckets,
    }  # fmt: skip


def peaks_of(run, trainer, server) -> dict:
    """Peaks above the start, in GB: of the card, of torch's allocations in the trainer, and of both programs' host memory."""
    import torch

    from helpers.memory import CardPeak, MemoryTimeline

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with CardPeak() as card, MemoryTimeline([os.getpid(), server.pid], interval=0.1) as host:
        host.sample()
        run()
    totals = {}
    for seconds, _, _, _, size in host.rows:
        totals[seconds] = totals.get(seconds, 0) + size
    blocks = sum(len(block.data) for block in trainer.memory._blocks.values())
    return {
        "card_extra_gb": card.extra / 1e9, "trainer_extra_gb": (torch.cuda.max_memory_allocated() - before) / 1e9,
        "host_extra_gb": (max(totals.values()) - totals[min(totals)]) / 1e9, "host_pinned_gb": blocks / 1e9,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--profile", default="gpu-20b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    options = parser.parse_args()
    changes = {"model.num_hidden_layers": options.layers} if options.layers else {}
    settings = load_profile(options.profile, **changes, **{"rollout.memory_saver": False})
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(settings.process_environment("kernel"))
    from helpers.rollout import RolloutServer
    from helpers.trainer import MegatronTrainer
    from helpers.warm_start import warm_checkpoint
    from helpers.weight_sync import SyncGroup

    checkpoint = warm_checkpoint(settings)
    print("checkpoint is there", flush=True)
    server = RolloutServer(settings, checkpoint).start()
    try:
        trainer = MegatronTrainer(settings, checkpoint)
        print(f"trainer after {trainer.seconds}", flush=True)
        server.wait()
        print(f"server after {server.start_seconds:.0f} s", flush=True)
        rows = [{"stage": "1 GiB host to device", "seconds": (1 << 30) / 1e9 / (rate := host_to_device()), "gigabytes": rate}]
        rows += stages(trainer)
        write_rows(options.out / "sync_stages.csv", rows)
        print(*rows, sep="\n", flush=True)
        runs = []
        with SyncGroup(server, "gloo") as group:
            for number in range(options.repeats + 2):  # ways in turn: the machine's mood hits all of them
                for way in options.ways:
                    sampled = number == options.repeats + 1
                    row = measure(way, number, trainer, server, options.out / "exported", group, sampled)
                    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
                    if number:
                        runs.append(row)
                        write_rows(options.out / "sync_ways.csv", runs)
        return 0
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
