"""Rewards: a strict verifier, and the score of a step's episodes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from helpers.harmony import parse_completion
from helpers.records import Episode
from helpers.tasks import Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def grade(text: str, answer: str) -> float:
    """1.0 if the completion is well-formed harmony and its final message is exactly `answer`, else 0.0.

    >>> grade("<|channel|>final<|message|>4<|return|>", "4")
    1.0
    >>> grade("<|channel|>final<|message|>4", "4")
    0.0
    """
    parsed = parse_completion(text)
    return float(parsed.well_formed and parsed.final == answer)


def score(episodes: Sequence[Episode], problems: Sequence[Problem], tokenizer: Tokenizer) -> list[float]:
    """One reward an episode, by its problem's own verifier; episode.group is the index of that problem."""
    return [problems[e.group].reward(e.completion_ids, tokenizer) for e in episodes]


def shuffled(rewards: Sequence[float], seed: str) -> list[float]:
    """The same rewards handed to the wrong episodes: the control that must not learn."""
    order = list(rewards)
    random.Random(seed).shuffle(order)
    return order
