"""Run the trainer in many parallel layouts on a CPU and write what each computed: `python ranks.py CHECKPOINT OUT WORLD...`.

Megatron is imported once; the ranks are forked from that process and keep one gloo process group for all layouts of their
world size, in which only Megatron's own parallel groups are made anew. OUT/<world>-<layout>.pt holds rank 0's measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import traceback
from functools import partial
from pathlib import Path

from helpers import upstream_fixes
from helpers.profiles import load_profile

STEPS = 5
FOLLOWING = 2  # more steps, after a trainer checkpoint was written
LENGTHS = (5, 17, 33, 48, 48, 9, 24, 40)  # shorter than the window of 16, and up to three of it
LAYOUTS = {  # world size -> layout -> settings of the trainer
    1: {"one": {}},
    2: {
        "dp2": {},
        "dp2-distributed-optimizer": {"distributed_optimizer": True},
        "tp2-sp": {"tensor_parallel": 2},
        "ep2": {"expert_parallel": 2},
        "ep2-distributed-optimizer": {"expert_parallel": 2, "distributed_optimizer": True},
        "pp2": {"pipeline_parallel": 2},
        "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2},
        # as Megatron is: what the two corrections in helpers/upstream_fixes.py are for
        "tp2-sp-uncorrected": {"tensor_parallel": 2},
        "tp2-ep2-uncorrected": {"tensor_parallel": 2, "expert_parallel": 2},
    },
    4: {
        "tp2-ep2-dp2": {"tensor_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True},
        "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
        "ep2-pp2": {"expert_parallel": 2, "pipeline_parallel": 2, "distributed_optimizer": True},
        "ep4": {"expert_parallel": 4},
    },
}


@contextlib.contextmanager
def uncorrected(yes: bool):
    """Without helpers/upstream_fixes.py inside the block."""
    kept = upstream_fixes.CORRECTIONS
    upstream_fixes.CORRECTIONS = () if yes else kept
    try:
        yield
    finally:
        upstream_fixes.CORRECTIONS = kept


def profile(world: int, layout: dict):
    """Profile cpu in this layout; two micro-batches a rank at least (one at DP4), so that a pipeline has what to overlap."""
    changes = {"ranks": world, "micro_batch": 2, **layout}
    return load_profile("cpu", **{f"trainer.{name}": value for name, value in changes.items()})


def make_batch():
    """The same eight episodes in every process, with advantages of both signs."""
    import torch

    from helpers.collate import collate
    from helpers.records import Episode

    generator = torch.Generator().manual_seed(5)
    episodes = []
    for i, length in enumerate(LENGTHS):
        ids = tuple(torch.randint(1, 64, (length,), generator=generator).tolist())
        episodes.append(Episode(ids[:3], ids[3:], (-4.0,) * (length - 3), "stop", i))
    return collate(episodes, torch.linspace(-2.0, 2.0, len(LENGTHS)), pad_id=0)


def replayed(batch, settings):
    """The batch with experts that no router chose; the last token and the padding of each row with none."""
    import torch

    m = settings.model
    scores = torch.rand(
        *batch.size, m.num_hidden_layers, m.num_local_experts, generator=torch.Generator().manual_seed(7)
    )
    experts = scores.topk(m.num_experts_per_tok).indices.short()
    for row, length in zip(experts, LENGTHS, strict=True):
        row[length - 1 :] = -1
    return dataclasses.replace(batch, routed_experts=experts)


def logits_of(trainer, batch):
    """[B, S, V] of the whole batch on every rank of the last pipeline stage, through Megatron's own schedule; else None."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    parts, kept = trainer._share(batch), []

    def step(parts, model):
        part = next(parts)
        logits = model(part.tokens, part.position_ids, None)

        def keep(logits):
            kept.append(gather(logits.detach()))
            return logits.sum() * 0, torch.ones((), dtype=torch.int), {}

        return logits, keep

    get_forward_backward_func()(
        forward_step_func=step, data_iterator=iter(parts), model=trainer.model.chunks, num_microbatches=len(parts),
        seq_length=batch.size[1], micro_batch_size=parts[0].size[0], forward_only=True,
    )  # fmt: skip
    if not kept:
        return None
    share = torch.cat(kept)
    shares = [torch.empty_like(share) for _ in range(parallel_state.get_data_parallel_world_size())]
    dist.all_gather(shares, share, group=parallel_state.get_data_parallel_group())
    return torch.cat(shares)


def measure(settings, checkpoint: Path, rank: int, folder: Path) -> dict:
    """What this layout computes: logits, the export before training, a pass's metrics with other experts, STEPS
    steps, the export after them, and FOLLOWING more steps after a trainer checkpoint.

    The export once more in `folder`, written from offloaded weights; the trainer checkpoint is in `folder`.saved.
    """
    import torch.distributed as dist

    from helpers.bridge import compare_weights
    from helpers.trainer import MegatronTrainer

    trainer, batch = MegatronTrainer(settings, checkpoint, rank), make_batch()
    difference = compare_weights(trainer.export(), checkpoint)
    logits = logits_of(trainer, batch)
    metrics = trainer.backward(replayed(batch, settings))
    steps = [trainer.update(batch) for _ in range(STEPS)]
    weights = trainer.export()
    trainer.memory.offload()
    trainer.export_checkpoint(folder)
    dist.barrier()
    trainer.memory.restore()
    written = compare_weights(weights, folder)
    trainer.save(folder.with_name(f"{folder.name}.saved"))
    following = [trainer.update(batch) for _ in range(FOLLOWING)]
    return {
        "following": following,
        "difference": difference,
        "logits": logits,
        "replayed": metrics,
        "steps": steps,
        "weights": weights,
        "written": written,
    }


def master_weights(world: int, checkpoint: Path, rank: int) -> dict:
    """In bf16 with the distributed optimizer: stale fp32 shards at step 0, after a step, and after a change behind its back."""
    import torch

    from helpers.trainer import MegatronTrainer

    changes = {"trainer.ranks": world, "trainer.distributed_optimizer": True, "model.dtype": "bfloat16"}
    trainer = MegatronTrainer(load_profile("cpu", **changes), checkpoint, rank)
    found = {"at the start": trainer.stale_master_weights()}
    trainer.update(make_batch())
    found["after a step"] = trainer.stale_master_weights()
    with torch.no_grad():
        for chunk in trainer.model.chunks:
            for parameter in chunk.parameters():
                parameter.add_(1.0)
    held = [p.main_param for c in trainer.model.chunks for p in c.parameters() if p.main_param is not None]
    return found | {"behind its back": trainer.stale_master_weights(), "shards": len(held)}


def run_rank(rank: int, world: int, port: int, checkpoint: Path, out: Path) -> None:
    """One rank: join the group once, then go through the layouts."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    for name, layout in LAYOUTS[world].items():
        with uncorrected(name.endswith("uncorrected")):
            result = measure(profile(world, layout), checkpoint, rank, out / f"{world}-{name}")
        # the loss is known to the last pipeline stage, which holds the last rank
        if rank == world - 1:
            torch.save(result, out / f"{world}-{name}.pt")
        dist.barrier()
        parallel_state.destroy_model_parallel()
    if world == 2:
        torch.save(master_weights(world, checkpoint, rank), out / f"masters-{rank}.pt")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(work) -> int:
    """A child that runs `work` and ends; returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(checkpoint: Path, out: Path, worlds: list[int]) -> int:
    os.environ.update(load_profile("cpu").process_environment("trainer"))
    from helpers.bridge import prepare_process

    prepare_process(load_profile("cpu"))
    for world in worlds:
        port = free_port()
        pids = [fork(partial(run_rank, rank, world, port, checkpoint, out)) for rank in range(world)]
        for _ in pids:  # a rank that fails leaves the others waiting for it
            pid, status = os.wait()
            if status:
                for other in pids:
                    if other != pid:
                        os.kill(other, 9)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), [int(w) for w in sys.argv[3:]]))
