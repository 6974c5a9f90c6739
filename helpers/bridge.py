"""Hugging Face checkpoint <-> Megatron model, through Megatron-Bridge.

Megatron is imported inside the functions: the import costs 10 to 60 seconds of CPU.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.checkpoints import check_megatron_import
from helpers.profiles import DEVICE_VARIABLE, Profile
from helpers.upstream_fixes import correct_models, remember_absent_packages

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class MegatronModel:
    """A Megatron model and what made it. chunks: the model chunks of this rank (one, without virtual pipeline stages)."""

    bridge: object
    provider: object
    chunks: list
    seconds: dict[str, float]

    @property
    def module(self):
        return self.chunks[0]


def prepare_process(settings: Profile) -> float:
    """Make this process fit for Megatron on the profile's device; returns the seconds that took (imports, mostly).

    Raises RuntimeError where the process was told another device than the profile's, or CUDA is asked for and absent.
    """
    start = time.perf_counter()
    told = os.environ.get(DEVICE_VARIABLE)
    if told != settings.device:
        raise RuntimeError(
            f"profile {settings.name!r} runs on {settings.device!r} but this process was told {told!r}: call "
            "helpers.preflight.prepare_kernel(settings) before anything imports torch"
        )
    import torch

    logging.getLogger("megatron").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read when transformers is imported
    if settings.device == "cpu":
        from helpers.cpu import megatron_backend

        megatron_backend.install()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    elif not torch.cuda.is_available():
        raise RuntimeError(
            f"profile {settings.name!r} needs a GPU and torch sees none; profile cpu runs on this machine"
        )
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    with quiet_libraries():
        from megatron.bridge import AutoBridge  # noqa: F401  imported on demand, so ask for it here
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
    remember_absent_packages()
    return time.perf_counter() - start


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """No warnings, prints, log lines or progress bars of the libraries inside the block; errors still raise.

    Megatron warns once a missing optional package (Apex, TransformerEngine: none of them runs on a CPU), prints a parameter
    count, and draws a rich progress bar that has no switch on import.
    """
    import rich

    console = rich.get_console()
    before, logging_before = (console.quiet, console.is_jupyter), logging.root.manager.disable
    logging.disable(logging.WARNING)  # a traceback for each optional package that is absent
    console.quiet, console.is_jupyter = True, False
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),  # one Megatron module sets its own warning filter
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging_before)
        console.quiet, console.is_jupyter = before


def start_ranks(settings: Profile, rank: int = 0, store=None) -> None:
    """Join the trainer ranks' process group. store: torch.distributed store that all ranks share; not needed for one rank."""
    import torch.distributed as dist

    if dist.is_initialized():
        return
    world = settings.trainer.ranks
    store = store or dist.HashStore()  # one rank: no port, no file
    dist.init_process_group(settings.distributed_backend, rank=rank, world_size=world, store=store)


def make_provider(bridge, settings: Profile, load_weights: bool = True):
    """The Megatron model provider for this checkpoint with the profile's layout. Raises ValueError for a layout that cannot be."""
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    layout = settings.trainer
    provider.tensor_model_parallel_size = layout.tensor_parallel
    provider.pipeline_model_parallel_size = layout.pipeline_parallel
    provider.expert_model_parallel_size = layout.expert_parallel
    provider.expert_tensor_parallel_size = layout.expert_tensor_parallel  # 1: load_profile refuses more
    provider.sequence_parallel = layout.tensor_parallel > 1  # MoE training with TP demands it
    provider.moe_token_dispatcher_type = "alltoall"
    provider.gradient_accumulation_fusion = False  # needs APEX
    provider.calculate_per_token_loss = True  # losses come as (sum, count): see records.LossOutput
    provider.register_pre_wrap_hook(correct_models)
    if layout.freeze_experts:
        provider.register_pre_wrap_hook(freeze_experts)
    if settings.device == "cpu":
        from helpers.cpu.megatron_backend import configure_provider

        configure_provider(provider, settings.model.dtype)
    provider.finalize()
    return provider


def freeze_experts(chunks: list) -> list:
    """No gradients for expert weights and biases; returns the chunks, as the provider's hooks do.

    Before the model is wrapped: DDP reserves an fp32 gradient for each parameter that asks for one (78 GiB instead of 7 for
    gpt-oss-20b).
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.requires_grad_(False)
    return chunks


def load_megatron(folder: Path | str, settings: Profile, with_ddp: bool = True) -> MegatronModel:
    """The checkpoint in `folder` as a Megatron model of this rank; call prepare_process and start_ranks first.

    with_ddp: wrap in Megatron's DistributedDataParallel (gradient buffers in fp32), as training needs.
    Raises CheckpointError for a checkpoint that is not whole or that Megatron-Bridge would import wrongly.
    """
    from megatron.bridge import AutoBridge
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    start = time.perf_counter()
    check_megatron_import(folder)
    with quiet_libraries():
        bridge = AutoBridge.from_hf_pretrained(str(folder))
        provider = make_provider(bridge, settings)
        if not parallel_state.model_parallel_is_initialized():
            provider.initialize_model_parallel(
                seed=settings.seed, seed_kwargs={"inference_rng_tracker": True}
            )
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, check_for_nan_in_grad=True,
            use_distributed_optimizer=settings.trainer.distributed_optimizer,
        )  # fmt: skip
        chunks = provider.provide_distributed_model(
            ddp_config=ddp, wrap_with_ddp=with_ddp, use_cpu_initialization=settings.device == "cpu",
            bf16=settings.model.dtype == "bfloat16", fp16=False, data_parallel_random_init=False,
        )  # fmt: skip
    return MegatronModel(bridge, provider, chunks, {"load": time.perf_counter() - start})


def export_weights(
    model: MegatronModel, cpu: bool = True, tasks: Iterable | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, tensor) one after the other; every rank must iterate, each gets the full tensors.

    The tensors may share memory with live parameters: clone before keeping or sending them.
    cpu: move each finished tensor to the host; it is gathered and converted where the parameters are all the same.
    tasks: the bridge's conversion tasks with weights from elsewhere (helpers.offload.staged_tasks).
    """
    stream = model.bridge.export_hf_weights(
        model.chunks, cpu=cpu, show_progress=False, conversion_tasks=tasks
    )
    for weight in stream:
        yield weight.param_name, weight.weight.detach()


@dataclass(frozen=True)
class Difference:
    """Names that two sets of weights do not share, or hold with another shape or value."""

    missing: tuple[str, ...]
    extra: tuple[str, ...]
    unequal: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.extra or self.unequal)


def compare_weights(exported: dict[str, Tensor], folder: Path | str) -> Difference:
    """Compare exported weights bit by bit with the safetensors files in `folder`."""
    import torch
    from safetensors.torch import load_file

    reference = {
        k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(str(file)).items()
    }
    shared = sorted(reference.keys() & exported.keys())
    unequal = tuple(
        k for k in shared if not torch.equal(reference[k], exported[k].to(reference[k].dtype).cpu())
    )
    return Difference(
        tuple(sorted(reference.keys() - exported.keys())),
        tuple(sorted(exported.keys() - reference.keys())),
        unequal,
    )
