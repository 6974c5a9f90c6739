"""Seeded sampling on a CPU: an answer that depends on its request's seed, not on what the server drew before.

SGLang has it on GPUs (--enable-deterministic-inference): the n-th token of a request is the argmax of logprob + Gumbel noise, and
the noise is a hash of seed, position and token. The hash is a Triton kernel, and the switch also asks for attention back ends that
a CPU has not. Here are the two pieces that a CPU lacks; the sampling itself stays upstream's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MASK = 0xFFFF_FFFF


def murmur_hash32(seed: Tensor, positions: Tensor, col_indices: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of three words a cell, as int64 [n, m] in 0 ... 2^32 - 1.

    seed, positions: [n], one request each; col_indices: [m], the vocabulary.

    >>> import torch
    >>> table = murmur_hash32(torch.tensor([7, 7, 8]), torch.tensor([3, 4, 3]), torch.arange(4))
    >>> table.shape, len(set(table.flatten().tolist()))
    (torch.Size([3, 4]), 12)
    >>> bool((table == murmur_hash32(torch.tensor([7, 7, 8]), torch.tensor([3, 4, 3]), torch.arange(4))).all())
    True
    """
    import torch

    def words(tensor: Tensor) -> Tensor:
        return tensor.to(torch.int64).bitwise_and(_MASK)

    state = words(seed)[:, None]
    for word in (
        words(seed.to(torch.int64) >> 32)[:, None],
        words(positions)[:, None],
        words(col_indices)[None],
    ):
        state = _mixed(state, word)
    return _finished(state ^ 12)  # 12: bytes that were mixed in


def _rotated(word: Tensor, by: int) -> Tensor:
    return ((word << by) | (word >> (32 - by))) & _MASK


def _mixed(state: Tensor, word: Tensor) -> Tensor:
    word = _rotated(_times(word, 0xCC9E2D51), 15)
    state = _rotated(state ^ _times(word, 0x1B873593), 13)
    return (state * 5 + 0xE6546B64) & _MASK


def _finished(state: Tensor) -> Tensor:
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return state ^ (state >> 16)


def _times(word: Tensor, factor: int) -> Tensor:
    """word * factor mod 2^32; int64 wraps, which leaves the lower 32 bits right."""
    return (word * factor) & _MASK


def seeds_of_requests(upstream, cls, batch, vocab_size):
    """Around SamplingBatchInfo.from_schedule_batch: each request's sampling_seed; one drawn here where it has none.

    All requests of a batch take the same road, since batches with and without seeds cannot be merged.
    """
    import torch

    made = upstream(cls, batch, vocab_size)
    given = [request.sampling_params.sampling_seed for request in batch.reqs]
    drawn = torch.randint(2**62, (len(given),)).tolist()
    seeds = [own if seed is None else seed for seed, own in zip(given, drawn, strict=True)]
    made.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return made
