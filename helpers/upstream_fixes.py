"""Corrections of Megatron's parallel bookkeeping for gpt-oss, on every device. Each is in the patch manifest.

Both mistakes leave the loss curve of one rank alone and show only when tensor parallelism is compared with it
(tests/integration/test_parallel.py runs with and without these functions).
"""

from __future__ import annotations


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


def _named_parameters(models: list):
    return (pair for model in models for pair in model.named_parameters())
