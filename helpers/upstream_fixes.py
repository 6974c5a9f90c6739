"""Corrections of Megatron and Megatron-Bridge for gpt-oss, on every device. Each is in the patch manifest.

The first two mend Megatron's parallel bookkeeping: the mistakes leave the loss curve of one rank alone and show only when
tensor parallelism is compared with it (tests/integration/test_parallel.py runs with and without these functions).
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import signal
import sys
from multiprocessing.managers import SyncManager


def sinks_are_sharded(models: list) -> list:
    """Mark each learned sink as split over the tensor-parallel ranks, which it is.

    Unmarked it is taken for a copy that every rank holds: the gradient norm counts the first rank's heads only, and
    clipping with it (Megatron-LM issue 7452, finding 8; pull request 7530).
    """
    for name, parameter in _named_parameters(models):
        if name.endswith("softmax_offset"):
            parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return models


def expert_biases_are_not_summed(models: list) -> list:
    """Take the sequence-parallel mark off expert biases.

    RowParallelLinear marks every bias under sequence parallelism, so that finalize_model_grads adds its gradient over the
    tensor-parallel group. With expert tensor parallelism 1 an expert sees all of its tokens on one rank: the sum doubles
    its bias's gradient at TP 2, and with expert parallelism adds those of two different experts. (Found with this
    course's parity test; relatives: Megatron-LM 7452, 6099.)
    """
    for name, parameter in _named_parameters(models):
        if ".experts." in name and getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False
    return models


CORRECTIONS = (sinks_are_sharded, expert_biases_are_not_summed)


def correct_models(models: list) -> list:
    """A pre-wrap hook for the model provider: DDP and the optimizer read these marks when they are built."""
    for correction in CORRECTIONS:
        models = correction(models)
    return models


def remember_absent_packages(names: tuple[str, ...] = ("modelopt",)) -> None:
    """Let the import of a package that is not installed fail at once, as it does after the search of the whole path.

    Megatron-Bridge asks for modelopt once a weight in every export (conversion/utils.py, is_modelopt_dynamic_module), and
    Python does not remember failed imports: 551 searches, a quarter of the profiled time, in an export of four layers of
    gpt-oss-20b (tests/gpu/recorded/sync_profile.txt). None in sys.modules is Python's own mark for "cannot be imported".
    """
    for name in names:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = None


def checkpoint_queue_ends_with_its_process() -> None:
    """Give Megatron's checkpoint writer a results queue whose process ends when this one does, however it ends.

    megatron-core makes one in a spawned manager (dist_checkpointing/strategies/filesystem_async.py) that outlives a killed
    trainer rank for good, with the 500 MB of a torch import. This one imports no torch.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(_end_with, (os.getpid(),))
        filesystem_async._results_queue = manager.Queue()


def _end_with(parent: int) -> None:
    """In the manager's process: be killed with the thread that started it (prctl PR_SET_PDEATHSIG, 1 in linux/prctl.h)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(0)


def _named_parameters(models: list):
    return (pair for model in models for pair in model.named_parameters())
