"""Logprobs and entropy of tokens from logits, in pieces: an fp32 copy of all would be a step's largest.

For gpt-oss's vocabulary of 201,088 the logits of 4096 tokens are 1.6 GB in bf16. Nothing here holds more than
CHUNK_BYTES of them in fp32 at a time, in the forward pass or in the backward pass. Each tensor-parallel rank
has its share of the vocabulary; the cross-entropy is Megatron's (megatron.core.tensor_parallel).
"""

from __future__ import annotations

import torch
from torch import Tensor

from helpers.memory import CHUNK_BYTES


def token_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(labels) [B, S] from this rank's share of the logits [B, S, V / TP], in fp32, differentiable.

    Longer inputs than one piece are cut by tokens. Each piece is then computed once more in the backward pass
    instead of being kept, and its gradient is written where it belongs in that of the logits.
    """
    several = len(_pieces(logits, labels, CHUNK_BYTES)) > 1
    if several and torch.is_grad_enabled() and logits.requires_grad:
        return _RecomputedLogprobs.apply(logits, labels, temperature)
    return _in_pieces(logits, labels, temperature)


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy [B, S] in nats of the next-token distribution, over all tensor-parallel shares; no gradient."""
    with torch.no_grad():
        pieces = _pieces(logits, logits[..., 0], CHUNK_BYTES // 2)  # of which it takes two copies
        return torch.cat([_entropy_of(_scaled(part, temperature)) for part, _ in pieces]).view(
            logits.shape[:-1]
        )


class _RecomputedLogprobs(torch.autograd.Function):
    """token_logprobs piece by piece, with nothing kept for the backward pass but its inputs."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.temperature = temperature
        return _in_pieces(logits, labels, temperature)

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
        outputs = zip(
            _pieces(gradient, slope, CHUNK_BYTES), _pieces(logits, labels, CHUNK_BYTES), strict=True
        )
        for (out, part_slope), (part, ids) in outputs:
            out.copy_(_gradient_of(part, ids, part_slope, ctx.temperature))
        return gradient, None, None


def _in_pieces(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """[B, S] from [B, S, V / TP] and [B, S], one piece after the other."""
    pieces = _pieces(logits, labels, CHUNK_BYTES)
    return torch.cat([_logprobs_of(_scaled(part, temperature), ids) for part, ids in pieces]).view(
        labels.shape
    )


def _gradient_of(part: Tensor, labels: Tensor, slope: Tensor, temperature: float) -> Tensor:
    """[n, V / TP] fp32, in one copy: Megatron's cross-entropy overwrites its input, last with its gradient."""
    scaled = _scaled(part, temperature).requires_grad_()
    with torch.enable_grad():
        logprobs = _logprobs_of(scaled, labels)
    return torch.autograd.grad(logprobs, scaled, slope)[0].div_(temperature)


def _pieces(logits: Tensor, labels: Tensor, most: int) -> list[tuple[Tensor, Tensor]]:
    """Views of ([n, V / TP], [n]) in a row, each of at most `most` bytes in fp32, or one token."""
    width = logits.shape[-1]
    tokens = max(most // (4 * width), 1)
    return list(zip(logits.reshape(-1, width).split(tokens), labels.reshape(-1).split(tokens), strict=True))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature as one new fp32 tensor, which its receiver may overwrite."""
    return logits.to(torch.float32, copy=True).div_(temperature)


def _logprobs_of(scaled: Tensor, labels: Tensor) -> Tensor:
    """[n] from [n, V / TP], which is overwritten, and [n]. The cross-entropy wants [S, B, V / TP]."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(scaled[:, None], labels[:, None])[:, 0]


def _entropy_of(scaled: Tensor) -> Tensor:
    """[n] from [n, V / TP], which is overwritten."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    peak = scaled.amax(-1, keepdim=True)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    scaled -= peak
    weight = scaled.exp()
    sums = torch.stack([weight.sum(-1), scaled.mul_(weight).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
