"""The Megatron trainer: logprobs, updates, export, checkpoints.

A plain class without Ray: notebook 05 holds one in its kernel, helpers.cluster puts one in each trainer rank's actor.
Forward and backward go through Megatron's own schedule, DDP, gradient finalisation and optimizer.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from helpers.anatomy import tensor_shapes
from helpers.bridge import (
    MegatronModel, export_weights, load_megatron, prepare_process, quiet_libraries, start_ranks,
)  # fmt: skip
from helpers.checkpoints import save_streamed
from helpers.logprobs import token_entropy, token_logprobs
from helpers.objective import Loss, policy_loss
from helpers.offload import PARTS, OffloadError, TrainerMemory, Where, staged_tasks
from helpers.profiles import Profile
from helpers.records import Batch, LossOutput
from helpers.routing_replay import choose_experts, replaying
from helpers.saves import SaveError, partial_name, publish
from helpers.upstream_fixes import checkpoint_queue_ends_with_its_process
from helpers.tensor_files import read_config

if TYPE_CHECKING:
    from torch import Tensor


class MegatronTrainer:
    """One rank of the trainer.

    settings.trainer gives layout and optimizer; checkpoint is a Hugging Face folder; rank and store as in start_ranks.
    Every method is collective: all ranks call it with the same arguments, each works on its data-parallel share.
    """

    def __init__(self, settings: Profile, checkpoint: Path | str, rank: int = 0, store=None):
        self.settings, self.rank, self.steps_done = settings, rank, 0
        self.checkpoint = Path(checkpoint)
        self.seconds = {"import": prepare_process(settings)}
        import torch
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        torch.manual_seed(settings.seed)
        start_ranks(settings, rank, store)
        self._saves = AsyncCallsQueue()
        self.model: MegatronModel = load_megatron(checkpoint, settings)
        self.seconds |= self.model.seconds
        with quiet_libraries():
            self._build_optimizer()
        self._require_fresh_master_weights()
        self.memory = TrainerMemory(self.model.chunks, self.optimizer, settings.device)
        self.reference = self._copy_of_trained_weights() if settings.algorithm.kl_coefficient else None

    # --- what one step needs ------------------------------------------------------------------------------------------
    def update(
        self,
        batch: Batch,
        loss: Loss | None = None,
        phase: Callable[[str], AbstractContextManager] = nullcontext,
    ) -> dict[str, float]:
        """One optimizer step on the batch. Returns loss, grad_norm, learning_rate, entropy, seconds and the loss's metrics.

        phase: called with the name of each half, for a context manager around it (helpers.memory.MemoryTimeline.phase).
        Raises FloatingPointError when the loss or the gradient norm is not finite; the weights are then unchanged.
        """
        start = time.perf_counter()
        self._require("update", *PARTS)
        self.finish_saves(wait=False)
        with phase("forward-backward"):
            means = self.backward(batch, loss)
        with phase("optimizer step"):
            self.scheduler.step(increment=1)
            grad_norm = self._optimizer_step()
        self.steps_done += 1
        self.hand_back()
        rate = self.optimizer.param_groups[0]["lr"]
        return means | {"grad_norm": grad_norm, "learning_rate": rate, "seconds": time.perf_counter() - start}

    def backward(self, batch: Batch, loss: Loss | None = None) -> dict[str, float]:
        """Gradients of the batch into main_grad of this rank's parameters, no step; returns the loss's metrics as update does.

        With several data-parallel ranks the gradients are summed already. Raises FloatingPointError as update does.
        """
        self._require("backward", "weights", "gradients")
        self._zero_gradients()
        sums = self._finite_gradients(batch, loss or policy_loss(self.settings))
        return {name: total / max(count, 1e-12) for name, (total, count) in sums.items()}

    def logprobs(self, batch: Batch) -> Tensor | None:
        """[B, S] log-probability of batch.labels under the present weights, on the CPU; no gradient, 0 where masked.

        Of this data-parallel rank's rows; None on a pipeline stage that has no logits.
        """
        import torch

        self._require("logprobs", "weights")
        kept: list[Tensor] = []

        def keep(logprobs: Tensor, part: Batch) -> LossOutput:
            kept.append((logprobs * part.loss_mask).detach().cpu())
            return LossOutput(logprobs.sum() * 0, part.loss_mask.sum())

        # forward_only alone keeps the graph: Megatron's schedule leaves no_grad to its caller
        with torch.no_grad():
            self._forward_backward(batch, keep, forward_only=True)
        self.hand_back()
        return torch.cat(kept) if kept else None

    def reference_logprobs(self, batch: Batch) -> Tensor | None:
        """As logprobs, under the checkpoint that this trainer was built from: the reference of a KL term.

        Its trained weights wait in host memory (this rank's own, in a profile with a KL term only) and stand in
        for the present ones during this pass. Raises RuntimeError in a profile without a KL term.
        """
        if self.reference is None:
            raise RuntimeError(
                "no reference weights were kept: set algorithm.kl_coefficient above 0 in the profile"
            )
        self._require("reference_logprobs", "weights")
        with self._weights_replaced(self.reference):
            # a policy of its own chooses its own experts
            return self.logprobs(replace(batch, routed_experts=None))

    def gradients(self, batch: Batch, loss: Loss | None = None) -> dict[str, Tensor]:
        """{checkpoint name: gradient of the loss}, fp32, as the optimizer would get it before clipping; no step is taken.

        The bridge only moves numbers, so gradients written over the weights come out in the checkpoint's layout; the
        weights are put back. With trainable parameters only: a frozen one has gradient 0.
        """
        import torch

        self.backward(batch, loss)
        parameters = [p for chunk in self.model.chunks for p in chunk.parameters()]
        kept = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            for p in parameters:
                p.copy_(p.main_grad) if p.requires_grad else p.zero_()
            gradients = self.export()
            for p, weight in zip(parameters, kept, strict=True):
                p.copy_(weight)
        self._zero_gradients()
        return gradients

    def export(self) -> dict[str, Tensor]:
        """{Hugging Face name: tensor} on the CPU, cloned: the receiver's own, not live parameters."""
        return {name: tensor.clone().contiguous() for name, tensor in self.export_stream(cpu=True)}

    def export_stream(self, cpu: bool | None = None) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) one after the other; every rank must take all of them.

        On the trainer's device, or in host memory with cpu=True. The tensors may share memory with live parameters: copy or
        send each before the next update. Offloaded weights are streamed from the host: a few of them are on the device at a
        time, and the trainer stays as it was.
        """
        if self.memory.where["weights"] is Where.DROPPED:
            raise OffloadError("this trainer was closed: its weights are gone; make a new one")
        self._require("export")
        cpu = self.settings.device == "cpu" if cpu is None else cpu
        if self.memory.where["weights"] is Where.DEVICE:
            return export_weights(self.model, cpu)
        tasks = self.model.bridge.get_conversion_tasks(self.model.chunks)
        return export_weights(self.model, cpu, staged_tasks(tasks, self.memory))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that an export gives, from the checkpoint's config."""
        return tensor_shapes(read_config(self.checkpoint))

    def export_checkpoint(self, folder: Path | str) -> Path | None:
        """Write the present weights as a Hugging Face folder, tensor by tensor; its path on rank 0, None on the others."""
        import torch

        stream = self.export_stream(cpu=True)
        if self.rank:
            deque(stream, maxlen=0)
            return None
        return save_streamed(stream, self.checkpoint, folder, getattr(torch, self.settings.model.dtype))

    def load_weights(self, folder: Path | str) -> None:
        """Another checkpoint of the same shape, master weights included; optimizer moments and step count stay as they are."""
        self._require("load_weights", "weights", "optimizer")
        with quiet_libraries():
            self.model.bridge.load_hf_weights(self.model.chunks, str(folder))
        self.optimizer.reload_model_params()
        self._require_fresh_master_weights()

    def stale_master_weights(self) -> list[str]:
        """Parameters of this rank whose fp32 master copy, rounded, is not the parameter. In fp32 there are no copies.

        An optimizer step starts from the master copy: a stale one throws the weights back to what they were (Megatron-LM
        4042, NeMo-RL 2372; seen with CPU-offloaded Adam and with weights loaded after the optimizer was built).
        """
        stale = []
        for chunk in self.model.chunks:
            for name, parameter in chunk.named_parameters():
                master = getattr(parameter, "main_param", None)
                if master is None:
                    continue
                held = parameter.detach().view(-1)
                if getattr(parameter, "main_param_sharded", False):
                    held = held[self._shard_range(parameter)]
                if not bool((master.detach().view(-1).to(held) == held).all()):
                    stale.append(name.removeprefix("module.").removeprefix("module."))
        return stale

    def save(self, folder: Path | str, data: Mapping[str, Any] | None = None, wait: bool = True) -> Path:
        """Write model, optimizer, schedule, random state and step count as a Megatron distributed checkpoint.

        Any layout can resume it. Written beside its place and renamed when it is whole, with a SHA-256 of every file; of
        the `step-<n>` folders beside it the newest settings.trainer.keep_saves stay.
        data: what the run has to remember, JSON, kept in run.json. wait=False: a forked process writes what the weights are
        now while training goes on; the folder appears at the first update, save or finish_saves after that process is done.
        Raises SaveError when it cannot be written, this one or the one before it.
        """
        from megatron.core import dist_checkpointing

        self._require("save", "weights", "optimizer")
        self.finish_saves()  # one writer at a time; and what it left behind may be cleared
        checkpoint_queue_ends_with_its_process()
        folder = Path(folder)
        self._together(partial(_empty_partial, folder), f"{folder} cannot be written")
        with quiet_libraries():
            request = dist_checkpointing.save(
                self._state(loading=False), str(partial_name(folder)), async_sharded_save=True, async_strategy="mcore",
                verify_integrity=True,
            )  # fmt: skip
            request.add_finalize_fn(partial(self._publish, folder, dict(data or {})))
            self._saves.schedule_async_request(request)
        if wait:
            self.finish_saves()
        return folder

    def finish_saves(self, wait: bool = True) -> None:
        """Give a checkpoint that was being written its name; wait=False only looks whether it is ready. Raises SaveError."""
        from torch.distributed.checkpoint.api import CheckpointException

        if not self._saves.get_num_unfinalized_calls():
            return
        try:
            with quiet_libraries():
                self._saves.maybe_finalize_async_calls(blocking=wait)
        except SaveError:
            raise
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            raise SaveError(
                f"a checkpoint could not be written: {_root_cause(error)}; training can go on, its last whole checkpoint "
                "stays. Free space or choose another folder"
            ) from error

    def resume(self, folder: Path | str) -> int:
        """Load what `save` wrote, in this layout or another; returns the number of steps done.

        Raises FileNotFoundError where there is none, SaveError where a file is missing, cut or changed.
        """
        import torch

        self._require("resume", "weights", "optimizer")
        if not Path(folder).is_dir():
            raise FileNotFoundError(
                f"no trainer checkpoint in {folder}: it is written every few steps by notebook 06"
            )
        state = self._loaded(Path(folder))
        for i, chunk in enumerate(self._unwrapped()):
            chunk.load_state_dict(state[f"model{i}"])
        self.optimizer.load_state_dict(self._optimizer_of_this_layout(state))
        self.scheduler.num_steps = 0  # Megatron's load_state_dict adds to the present count
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])
        self.steps_done = state["steps_done"]
        self._require_fresh_master_weights()
        return self.steps_done

    def close(self) -> None:
        """Finish saves and give the device's memory back for good; the trainer cannot be used afterwards.

        Megatron's global state keeps references to a model, so that dropping the trainer frees nothing.
        """
        self.finish_saves()
        self.memory.discard()

    # --- inside -------------------------------------------------------------------------------------------------------
    def _require(self, call: str, *parts: str) -> None:
        """Megatron's CPU back end must hold in this thread, and these parts must be on the device."""
        self.memory.require(*parts, call=call)
        if self.settings.device == "cpu":
            from helpers.cpu.megatron_backend import require_mode

            require_mode()

    def _trained_parameters(self) -> list:
        return [p for chunk in self.model.chunks for p in chunk.parameters() if p.requires_grad]

    def _copy_of_trained_weights(self) -> list[Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self._trained_parameters()]

    @contextmanager
    def _weights_replaced(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """Other values in the trained parameters for a while; afterwards each is what it was, bit by bit."""
        present = self._copy_of_trained_weights()
        try:
            self._write_trained_weights(weights)
            yield
        finally:
            self._write_trained_weights(present)

    def _write_trained_weights(self, weights: Sequence[Tensor]) -> None:
        for parameter, weight in zip(self._trained_parameters(), weights, strict=True):
            parameter.data.copy_(weight)

    def hand_back(self) -> None:
        """Give the driver what torch's allocator keeps for the next pass, where a server comes back to this card meanwhile."""
        if self.settings.rollout.memory_saver:
            import torch

            torch.cuda.empty_cache()

    def _require_fresh_master_weights(self) -> None:
        stale = self.stale_master_weights()
        if stale:
            raise RuntimeError(
                f"{len(stale)} master weights are not those of the model (first: {stale[0]}): the next step would undo the "
                "load. Call optimizer.reload_model_params() after every change of the weights from outside"
            )

    def _shard_range(self, parameter) -> slice:
        """The part of a flat parameter whose master copy this data-parallel rank holds (distributed optimizer)."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if parameter in getattr(optimizer, "model_param_gbuf_map", {}):
                owned = optimizer._get_model_param_range_map(parameter)["param"]
                return slice(owned.start, owned.end)
        return slice(0, 0)

    def _build_optimizer(self) -> None:
        """Megatron's Adam (decoupled weight decay) and its scheduler: linear warm-up, then constant or cosine."""
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.utils import get_model_config

        t, bf16 = self.settings.trainer, self.settings.model.dtype == "bfloat16"
        config = OptimizerConfig(
            optimizer="adam", lr=t.learning_rate, min_lr=0.0, weight_decay=t.weight_decay, adam_beta1=t.beta1,
            adam_beta2=t.beta2, clip_grad=t.clip_grad, bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32, use_distributed_optimizer=t.distributed_optimizer,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(config, self.model.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=t.learning_rate,
            min_lr=t.learning_rate * (0.1 if t.decay_steps else 1.0), lr_warmup_steps=t.warmup_steps,
            lr_decay_steps=t.decay_steps or 10**9, lr_decay_style="cosine" if t.decay_steps else "constant",
            start_wd=t.weight_decay, end_wd=t.weight_decay, wd_incr_steps=0, wd_incr_style="constant",
        )  # fmt: skip
        model_config = get_model_config(self.model.module)
        model_config.finalize_model_grads_func = finalize_model_grads
        model_config.grad_scale_func = self.optimizer.scale_loss

    def _unwrapped(self) -> list:
        """The model chunks without DDP and precision wrappers: their names are those of the checkpoint."""
        from megatron.core.utils import unwrap_model

        return unwrap_model(self.model.chunks)

    def _state(self, loading: bool) -> dict:
        """Megatron's sharded state dict of everything that a resumed run needs."""
        import torch

        state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(self._unwrapped())}
        # For any layout: a key a parameter, whatever optimizer of a chain holds it. (The distributed optimizer's own default,
        # shards cut from flat buffers, is no longer saved: "ShardedTensor.flattened_range is not supported".)
        any_layout = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        optimizer = self.optimizer.sharded_state_dict(
            state["model0"], is_loading=loading, metadata=any_layout
        )
        return state | {
            "optimizer": optimizer, "scheduler": self.scheduler.state_dict(), "random": torch.get_rng_state(),
            "steps_done": self.steps_done,
        }  # fmt: skip

    def _loaded(self, folder: Path) -> dict:
        """The state dict of a checkpoint whose files are what they were when written; of all ranks or of none."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.core import CheckpointingException
        from torch.distributed.checkpoint.api import CheckpointException

        # rank 0 reads every byte and tells the others, who would wait in a collective for a rank that has raised
        self._together(partial(_check_integrity, folder), f"{folder} cannot be used")
        try:
            with quiet_libraries():
                return dist_checkpointing.load(self._state(loading=True), str(folder))
        except (CheckpointingException, CheckpointException) as error:
            raise SaveError(f"{folder} is no checkpoint of this model: {_root_cause(error)}") from error

    def _optimizer_of_this_layout(self, state: dict) -> dict:
        """What the optimizer loads, of a checkpoint of any layout.

        Adam's moments have a key a parameter, and are there already. How parameters are grouped, and into how many chained
        optimizers, is the layout's: the groups are our own, with the number of steps that the checkpoint has done.
        """
        import torch

        own = _unwrapped_locals(self._state(loading=True)["optimizer"])
        chained = 0 in own
        loaded = {}
        for number in [n for n in own if isinstance(n, int)] if chained else [None]:
            wanted = own[number] if chained else own
            found = state["optimizer"][number] if chained else state["optimizer"]
            piece = {name: found.get(name, value) for name, value in wanted.items()}
            # below "optimizer" in bf16 and where it is distributed
            adam, ours = (part.get("optimizer", part) for part in (piece, wanted))
            adam["param_groups"] = [
                group | ({"step": state["steps_done"]} if "step" in group else {})
                for group in ours["param_groups"]
            ]
            if "state" in ours and not any("step" in group for group in ours["param_groups"]):
                adam["state"]["common_step"] = torch.tensor(float(state["steps_done"]))  # torch's Adam
            loaded[number] = piece
        return loaded if chained else loaded[None]

    def _publish(self, folder: Path, data: dict) -> None:
        keep = self.settings.trainer.keep_saves
        self._together(partial(publish, folder, data, keep), f"{folder} could not be given its name")

    def _together(self, work: Callable[[], None], problem: str) -> None:
        """Do something once, on rank 0; all ranks raise SaveError when it fails, so that none waits for another."""
        import torch.distributed as dist

        reason: list[str] = [""]
        if self.rank == 0:
            try:
                work()
            except Exception as error:
                reason = [_root_cause(error)]
        dist.broadcast_object_list(reason, src=0)
        if reason[0]:
            raise SaveError(f"{problem}: {reason[0]}")

    def _zero_gradients(self) -> None:
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _share(self, batch: Batch) -> list[Batch]:
        """This data-parallel rank's rows, cut into micro-batches. Raises ValueError when they do not divide."""
        from megatron.core import parallel_state

        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        rows = batch.size[0]
        if rows % ranks:
            raise ValueError(
                f"{rows} episodes do not divide among {ranks} data-parallel ranks; change batch.prompts or group_size"
            )
        share = rows // ranks
        size = min(self.settings.trainer.micro_batch, share)
        if share % size:
            raise ValueError(
                f"a rank's {share} episodes do not divide into micro-batches of {size}; change trainer.micro_batch"
            )
        first = rank * share
        return [batch.rows(slice(i, i + size)) for i in range(first, first + share, size)]

    def _forward_backward(
        self, batch: Batch, loss: Loss, forward_only: bool
    ) -> dict[str, tuple[float, float]]:
        """Run Megatron's schedule over the micro-batches; returns metric -> (sum, count) over the global batch."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts = self._share(batch)
        with replaying(self.model.chunks, batch.routed_experts):
            results = get_forward_backward_func()(
                forward_step_func=partial(self._forward_step, loss=loss), data_iterator=iter(parts), model=self.model.chunks,
                num_microbatches=len(parts), seq_length=batch.size[1], micro_batch_size=parts[0].size[0],
                forward_only=forward_only,
            )  # fmt: skip
        return self._reduce(results)

    def _forward_step(self, parts: Iterator[Batch], model, loss: Loss):
        """What the schedule calls once a micro-batch: (logits, function of the logits -> loss sum, count, metrics)."""

        part, temperature = next(parts), self.settings.sampling.temperature
        if self.settings.device == "cuda":
            part = part.map(lambda tensor: tensor.cuda(non_blocking=True))
        if part.routed_experts is not None:
            choose_experts(model, part.routed_experts)
        logits = model(part.tokens, part.position_ids, None)

        def loss_of(logits: Tensor):
            logprobs = token_logprobs(logits, part.labels, temperature)
            out = loss(logprobs, part)
            entropy = (token_entropy(logits, temperature) * part.loss_mask).sum()
            metrics = out.metrics | {
                "loss": (out.total.detach(), out.normaliser),
                "entropy": (entropy, part.loss_mask.sum()),
            }
            if "logprob_gap" in metrics:
                gap = (logprobs.detach() - part.rollout_logprobs).abs() * part.loss_mask
                metrics["logprob_gap_max"] = (gap.max(), gap.new_ones(()))
            return out.total, out.normaliser.int(), metrics

        return logits, loss_of

    def _reduce(self, results: Sequence[dict]) -> dict[str, tuple[float, float]]:
        """Add the metrics of all micro-batches and data-parallel ranks; of a name that ends in _max take the largest."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        if not results:  # not the last pipeline stage
            return {}
        names = list(results[0])
        table = torch.stack(
            [torch.stack([torch.stack([a.float(), b.float()]) for a, b in r.values()]) for r in results]
        )
        group = parallel_state.get_data_parallel_group()
        total, peak = table.double().sum(0).to("cuda"), table.double().amax(0).to("cuda")
        dist.all_reduce(total, group=group)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        picked = [peak[i] if name.endswith("_max") else total[i] for i, name in enumerate(names)]
        return {name: (row[0].item(), row[1].item()) for name, row in zip(names, picked)}

    def _finite_gradients(self, batch: Batch, loss: Loss) -> dict[str, tuple[float, float]]:
        """Forward and backward; raises FloatingPointError when loss or gradients are not finite.

        Megatron's DDP looks at every gradient buffer (check_for_nan_in_grad) and raises a bare RuntimeError.
        """
        try:
            sums = self._forward_backward(batch, loss, forward_only=False)
        except RuntimeError as error:
            if "Unexpected result" not in str(error):
                raise
            raise FloatingPointError(
                f"loss or gradients are not finite at step {self.steps_done}; the weights are unchanged. Look at the "
                f"batch's rewards and logprobs, then at trainer.learning_rate. Megatron says: {str(error)[:160]}"
            ) from error
        total, count = sums.get("loss", (0.0, 1.0))
        if not math.isfinite(total / max(count, 1e-12)):
            raise FloatingPointError(
                f"the loss is {total} at step {self.steps_done}; the weights are unchanged"
            )
        return sums

    def _optimizer_step(self) -> float:
        """Clip, step; returns the gradient norm before clipping."""
        ok, grad_norm, _ = self.optimizer.step()
        if not ok:
            raise FloatingPointError(f"the optimizer refused step {self.steps_done}: its gradients overflow")
        return float(grad_norm or 0.0)


def _unwrapped_locals(state):
    """A sharded state dict with the plain values that Megatron marks as not to be saved."""
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

    if isinstance(state, LocalNonpersistentObject):
        return state.unwrap()
    if isinstance(state, dict):
        return {name: _unwrapped_locals(value) for name, value in state.items()}
    return [_unwrapped_locals(value) for value in state] if isinstance(state, list) else state


def _empty_partial(folder: Path) -> None:
    import shutil

    shutil.rmtree(partial_name(folder), ignore_errors=True)
    partial_name(folder).mkdir(parents=True)


def _check_integrity(folder: Path) -> None:
    """Every byte of a checkpoint against the sums that were written with it. Raises CheckpointingException or OSError.

    Megatron's public verify_integrity_manifest is this and a broadcast of one kind of error: a file that is missing on rank 0
    would leave the other ranks waiting.
    """
    from megatron.core.dist_checkpointing.validation import _verify_integrity_manifest_impl

    with quiet_libraries():
        _verify_integrity_manifest_impl(str(folder))


def _root_cause(error: BaseException) -> str:
    """Type and first line of what stands at the bottom of a chain of exceptions."""
    while error.__cause__ is not None:
        error = error.__cause__
    for failed, _ in getattr(error, "failures", {}).values():  # rank -> (exception, traceback)
        return _root_cause(failed)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
