"""Reward shaping: what is added to a reward before the group's advantages are taken."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment: an answer pays for the last part of its token budget.

    lengths: [B] completion tokens of each episode.
    max_length: tokens; from here on the penalty is -1.
    buffer: tokens before max_length over which it falls from 0 to -1, 1 to max_length.
    Returns [B] float32, -1 to 0, to be added to the rewards before `group_advantages`:
        0                                        length <= max_length - buffer
        (max_length - buffer - length) / buffer  in between
        -1                                       length >= max_length
    The size fits rewards that differ by about 2 (DAPO: -1 and 1); with rewards 0 and 1 a right
    answer at the limit scores as low as a wrong short one, so scale it down there (by 0.5, say).
    A cut answer gets a graded signal, not the jump that a plain "wrong" would be.
    Source: arXiv 2503.14476 eq. 13 (max_length 20480, buffer 4096); TRL's
    get_soft_overlong_punishment.
    Raises ValueError: lengths that are not [B] or below 0, a buffer outside 1 to max_length.

    Three answers with a budget of 100 tokens, the last 20 of them taxed:
    >>> import torch
    >>> overlong_penalty(torch.tensor([80, 90, 100]), max_length=100, buffer=20)
    tensor([ 0.0000, -0.5000, -1.0000])
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(
            f"buffer={buffer} with max_length={max_length} leaves no room for a slope; "
            "use 1 <= buffer <= max_length, e.g. a fifth of max_length"
        )
    if lengths.ndim != 1 or (lengths < 0).any():
        raise ValueError(
            f"lengths have shape {tuple(lengths.shape)} and must be [B], 0 or more; "
            "pass the number of completion tokens of each episode"
        )
    return (max_length - buffer - lengths).clamp(-buffer, 0).float() / buffer
