"""Procedural tasks with a verifier. `median`: the middle one of seven digits; `median-15`: of fifteen; `even-tokens`: a
stand-in for models with random weights.

A worked answer sorts the digits in the analysis channel and then gives the middle one; a lazy answer guesses at once. Train
and held-out questions differ in the *multiset* of digits, not only in their order, so nothing held out was seen in any order.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from helpers.harmony import parse_ids, render_completion, render_prompt

if TYPE_CHECKING:
    from tokenizers import Tokenizer

HELD_OUT_SHARE = 10  # one multiset in ten is never trained on


@dataclass(frozen=True)
class Problem:
    """A question and the exact answer that earns the reward."""

    question: str
    answer: str

    @property
    def prompt(self) -> str:
        return render_prompt(self.question)

    def reward(self, completion_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        """1.0 if the completion is well-formed harmony and its final message is exactly the answer, else 0.0.

        Ids are graded, not their text: an answer that only spells a channel's marks in characters was not given.
        """
        parsed = parse_ids(tokenizer, completion_ids)
        return float(parsed.well_formed and parsed.final == self.answer)


@dataclass(frozen=True)
class Demonstration:
    """A supervised example: prompt and completion as harmony text."""

    prompt: str
    completion: str


def is_held_out(question: str) -> bool:
    """Whether this question's multiset of digits is kept out of training.

    >>> is_held_out("1234567") == is_held_out("7654321")
    True
    """
    return zlib.crc32("".join(sorted(question)).encode()) % HELD_OUT_SHARE == 0


def _digits(rng: random.Random, held_out: bool, count: int) -> str:
    while True:
        question = "".join(str(rng.randint(0, 9)) for _ in range(count))
        if is_held_out(question) == held_out:
            return question


def _slipped_sort(question: str, rng: random.Random, slip_rate: float) -> list[str]:
    """The digits sorted, with slips: neighbours swapped or one digit misread, each further one with `slip_rate`."""
    order = sorted(question)
    while rng.random() < slip_rate:
        i = rng.randrange(len(order) - 1)
        order[i], order[i + 1] = order[i + 1], order[i]
        if rng.random() < 0.5:
            order[rng.randrange(len(order))] = str(rng.randint(0, 9))
    return order


@dataclass(frozen=True)
class MedianTask:
    """The median of an odd number of digits. Every stream is a pure function of (seed, step): a resumed run sees the same data."""

    seed: int = 0
    digits: int = 7

    def problem(self, question: str) -> Problem:
        return Problem(question, sorted(question)[len(question) // 2])

    def sample(self, count: int, step: int = 0) -> list[Problem]:
        """`count` training problems of GRPO step `step`."""
        rng = random.Random(f"train-{self.seed}-{step}")
        return [self.problem(_digits(rng, False, self.digits)) for _ in range(count)]

    def held_out(self, count: int = 256) -> list[Problem]:
        """The first `count` held-out problems: distinct multisets, the same for every seed of the run."""
        rng, seen, problems = random.Random("held-out"), set(), []
        while len(problems) < count:
            question = _digits(rng, True, self.digits)
            key = "".join(sorted(question))
            if key not in seen:
                seen.add(key)
                problems.append(self.problem(question))
        return problems

    def demonstrations(self, count: int, lazy_share: float, slip_rate: float) -> list[Demonstration]:
        """Supervised examples, mostly lazy, some worked with slips: GRPO has something to choose between."""
        rng = random.Random(f"demonstrations-{self.seed}")
        return [self._demonstration(rng, lazy_share, slip_rate) for _ in range(count)]

    def _demonstration(self, rng: random.Random, lazy_share: float, slip_rate: float) -> Demonstration:
        question = _digits(rng, False, self.digits)
        if rng.random() < lazy_share:
            return Demonstration(render_prompt(question), render_completion(rng.choice(question)))
        order = _slipped_sort(question, rng, slip_rate)
        return Demonstration(render_prompt(question), render_completion(order[self.digits // 2], "".join(order)))


@dataclass(frozen=True)
class EvenTokensProblem(Problem):
    """Any answer earns the share of its tokens whose id is even."""

    def reward(self, completion_ids: Sequence[int], tokenizer: Tokenizer) -> float:
        return sum(i % 2 == 0 for i in completion_ids) / max(len(completion_ids), 1)


@dataclass(frozen=True)
class EvenTokensTask(MedianTask):
    """For models with random weights, whose answers mean nothing but differ: a step's advantages and gradients are not zero.

    It serves to measure memory and speed; a reward that rises here says nothing about a language model. The question is a row
    of digits, long enough for a prompt of 512 tokens.
    """

    digits: int = 506  # and six tokens of harmony

    def problem(self, question: str) -> Problem:
        return EvenTokensProblem(question, "")

    def demonstrations(self, count: int, lazy_share: float, slip_rate: float) -> list[Demonstration]:
        raise ValueError("task 'even-tokens' has no demonstrations: set warm_start.steps = 0")


TASKS = {
    "median": MedianTask,
    "median-15": partial(MedianTask, digits=15),
    "even-tokens": EvenTokensTask,
}


def load_task(name: str, seed: int = 0) -> MedianTask:
    """The task `name`. Raises ValueError naming the known ones."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; tasks: {', '.join(TASKS)}")
    return TASKS[name](seed)
