"""Checks of the notebooks' exercises: right, not done yet, or which mistake it looks like.

    check("gspo-ratio", gspo_ratio)     the last line of a check cell; shows its verdict, never stops the notebook

A wrong answer is compared with what the likely mistakes would give, as helpers.faults does with a broken engine: the
mistake whose result it reproduces is named. The exercises' answers and mistakes are in helpers.answers (it spoils them).
With GRPO_EXERCISES=strict, as in the solution form of a notebook, a check that fails raises ExerciseError.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STRICT_VARIABLE = "GRPO_EXERCISES"
GAP = "put your answer where ... stands, run both cells again; the hint is folded above"


class ExerciseError(AssertionError):
    """A check failed where it had to pass (GRPO_EXERCISES=strict)."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check; true if the answer is right. message: what to show the learner."""

    name: str
    passed: bool
    message: str

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        mark = "✓" if self.passed else "✗"
        return textwrap.fill(
            f"{mark} {self.name}: {self.message}", 79, subsequent_indent="  ", break_on_hyphens=False
        )


@dataclass(frozen=True)
class Exercise:
    """What a check knows. answer: a value, or a function that is right.

    cases: makes fresh arguments for function answers, one tuple a call.
    mistakes: what to say -> an answer (value or function, like `answer`) that is wrong in this way.
    planted: where the start is a function with a mistake in it: what to say while it is still in, and that function.
    praise: what to say to a right answer.
    tolerance: of numbers, relative; where 0 is right, absolute.
    judge: for answers that comparing cannot tell; called with the learner's function in place of the comparison,
        returns "" if it is right, else what to say. The mistakes then only show what it must be able to tell.
    """

    answer: Any
    praise: str
    mistakes: Mapping[str, Any] = field(default_factory=dict)
    cases: Callable[[], Sequence[tuple]] = lambda: [()]
    tolerance: float = 1e-4
    judge: Callable[[Any], str] | None = None
    planted: tuple[str, Callable] | None = None


def check(name: str, given: Any) -> Verdict:
    """The verdict on the answer `given` to the exercise `name`.

    Raises KeyError for an unknown exercise (a slip of whoever wrote the notebook), ExerciseError under GRPO_EXERCISES=strict.

    >>> check("lone-advantage", ...)
    ✗ lone-advantage: not done yet: put your answer where ... stands, run both
      cells again; the hint is folded above
    """
    problem = _problem(_known(name), given)
    verdict = Verdict(name, not problem, problem or f"right. {_known(name).praise}")
    if problem and os.environ.get(STRICT_VARIABLE) == "strict":
        raise ExerciseError(repr(verdict))
    return verdict


def mystery_logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> Any:
    """What an engine with one of helpers.faults' mistakes reports: [sum of (length - 1)] logprobs of `sequences`.

    model: the sound one, as helpers.faults plants mistakes in it. For the exercise "name-the-fault" of notebook 02.
    """
    from helpers.answers import SECRET_FAULT
    from helpers.faults import FAULTS, logprobs

    with FAULTS[SECRET_FAULT].plant(model):
        return logprobs(model, sequences)


def _known(name: str) -> Exercise:
    from helpers.answers import EXERCISES

    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, n=1)
        raise KeyError(
            f"no exercise {name!r} in helpers/answers.py" + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return EXERCISES[name]


def _problem(exercise: Exercise, given: Any) -> str:
    """What is wrong with an answer; "" if nothing is."""
    parts = list(given.values()) if isinstance(given, Mapping) else [given]
    if parts and all(part is ... for part in parts):
        return f"not done yet: {GAP}"
    if not callable(exercise.answer):
        return _value_problem(exercise, given)
    if not callable(given):
        return f"a function is wanted here, and this is a {type(given).__name__}: hand over its name, without ( )"
    if exercise.judge is not None:
        return _guarded(lambda: exercise.judge(given))
    return _guarded(lambda: _function_problem(exercise, given))


def _guarded(judge: Callable[[], str]) -> str:
    try:
        return judge()
    except Exception as error:  # the learner's code: whatever it raises is what it must be told
        return f"your function stops with {type(error).__name__}: {error}"


def _value_problem(exercise: Exercise, given: Any) -> str:
    if not (difference := _difference(given, exercise.answer, exercise.tolerance)):
        return ""
    for says, wrong in exercise.mistakes.items():
        if not _difference(given, wrong, exercise.tolerance):
            return f"not yet: {says}"
    return f"not yet: {difference}. The hint above may help"


def _function_problem(exercise: Exercise, given: Callable) -> str:
    theirs, right = _outputs(exercise, given), _outputs(exercise, exercise.answer)
    if any(output is ... for output in theirs):
        return f"not done yet: {GAP}"
    if all(output is None for output in theirs):
        return "not yet: your function returns None; does its last line say return?"
    differences = [_difference(a, b, exercise.tolerance) for a, b in zip(theirs, right, strict=True)]
    if not any(differences):
        return ""
    likely = {says: ("not yet", wrong) for says, wrong in exercise.mistakes.items()}
    if exercise.planted:
        likely[exercise.planted[0]] = ("not done yet", exercise.planted[1])
    for says, (state, wrong) in likely.items():
        outputs = _outputs(exercise, wrong)
        if not any(_difference(a, b, exercise.tolerance) for a, b in zip(theirs, outputs, strict=True)):
            return f"{state}: {says}"
    return f"not yet: {_first_failure(exercise, differences)}. The hint above may help"


def _outputs(exercise: Exercise, function: Callable) -> list[Any]:
    return [function(*arguments) for arguments in exercise.cases()]


def _first_failure(exercise: Exercise, differences: Sequence[str]) -> str:
    number = next(i for i, difference in enumerate(differences) if difference)
    arguments = ", ".join(_shown(a) for a in exercise.cases()[number])
    return f"for ({arguments}): {differences[number]}"


def _difference(given: Any, right: Any, tolerance: float) -> str:
    """How `given` differs from `right`, in words that do not give the right value away; "" if it does not."""
    if isinstance(right, Mapping):
        return _mapping_difference(given, right, tolerance)
    if isinstance(right, str):
        return "" if given == right else f"{given!r} is not it"
    if getattr(right, "ndim", 0) > 1 and hasattr(given, "ndim"):
        return _table_difference(given, right, tolerance)
    given, right = _plain(given), _plain(right)
    if isinstance(right, list):
        return _list_difference(given, right, tolerance)
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        return f"a number is wanted where {_shown(given)} stands"
    if math.isclose(given, right, rel_tol=tolerance, abs_tol=1e-7 if right else tolerance):
        return ""
    return f"{_shown(given)} is not it"


def _mapping_difference(given: Any, right: Mapping, tolerance: float) -> str:
    if not isinstance(given, Mapping) or set(given) != set(right):
        keys = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        return f"a dict with {', '.join(map(str, right))} is wanted, and this has: {keys}"
    if any(value is ... for value in given.values()):
        return f"{', '.join(str(k) for k in given if given[k] is ...)} still to do"
    wrong = [str(key) for key in right if _difference(given[key], right[key], tolerance)]
    if not wrong:
        return ""
    return f"{len(right) - len(wrong)} of {len(right)} are right; look again at {', '.join(wrong)}"


def _table_difference(given: Any, right: Any, tolerance: float) -> str:
    """As `_difference`, for two tensors of which the right one has rows and columns: too many numbers to look at singly."""
    if given.shape != right.shape:
        return f"shape {list(right.shape)} is wanted, and this is {list(given.shape)}"
    far = (given - right).abs() > 1e-7 + tolerance * right.abs()
    return (
        f"{far.double().mean().item():.0%} of the numbers are wrong"
        if far.any() or given.isnan().any()
        else ""
    )


def _list_difference(given: Any, right: list, tolerance: float) -> str:
    if not isinstance(given, list):
        return f"{_shape(right)} is wanted, and this is {_shown(given)}"
    if _shape(given) != _shape(right):
        return f"{_shape(right)} is wanted, and this is {_shape(given)}"
    wrong = [i for i, (a, b) in enumerate(zip(given, right, strict=True)) if _differs(a, b, tolerance)]
    return f"{_shown(given)} is wrong at {', '.join(map(str, wrong))} (counted from 0)" if wrong else ""


def _differs(given: Any, right: Any, tolerance: float) -> bool:
    if isinstance(right, bool) or isinstance(given, bool):
        return bool(given) != bool(right)
    return bool(_difference(given, right, tolerance))


def _shape(values: list) -> str:
    sizes, inner = [], values
    while isinstance(inner, list):
        sizes.append(len(inner))
        inner = inner[0] if inner else None
    return f"a list of {' x '.join(map(str, sizes))}"


def _plain(value: Any) -> Any:
    """Tensors, arrays and tuples as lists or numbers; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def _shown(value: Any) -> str:
    """A value in a few characters."""
    if getattr(value, "ndim", 0) and getattr(value, "numel", lambda: 0)() > 16:
        return f"tensor {list(value.shape)}"
    value = _plain(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        text = "[" + ", ".join(_shown(v) for v in value) + "]"
    else:
        text = repr(value)
    return textwrap.shorten(text, 90, placeholder=" ...")
