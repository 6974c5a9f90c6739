"""Every exercise: its solution passes, its start fails with a helpful message, each likely mistake is named."""

import doctest
import json
import os

import pytest

pytest.importorskip("jupytext")

import torch  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from helpers import anatomy, answers, exercises, lessons, teaching  # noqa: E402
from helpers.checkpoints import write_tiny_checkpoint  # noqa: E402
from helpers.exercises import STRICT_VARIABLE, Exercise, ExerciseError, Verdict, check  # noqa: E402
from helpers.faults import load_reference  # noqa: E402
from helpers.profiles import load_profile  # noqa: E402
from helpers.twins import read_cells, text_twins  # noqa: E402

TWINS = {path.stem: read_cells(path) for path in text_twins()}
LESSONS = [(name, lesson) for name, cells in TWINS.items() for lesson in lessons.lessons(cells)]
PLANNED = [slot.notebook for day in teaching.TWO_DAYS for slot in day]
by_name = pytest.mark.parametrize(("notebook", "lesson"), LESSONS, ids=lambda x: getattr(x, "name", x))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_reference(
        write_tiny_checkpoint(load_profile("cpu"), tmp_path_factory.mktemp("tiny") / "random")
    )


@pytest.fixture(scope="module")
def values(tiny):
    """What exercises take from their notebook beside imports: name -> value."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 64, (8, 3 * tiny.config.sliding_window), generator=generator)
    return {"hugging_face": tiny, "tokens": tokens, "real": anatomy.GPT_OSS_20B}


def run(notebook, lesson, values, cell):
    """The verdict that the notebook would show with this cell in place of the gap; only what it borrows is there."""
    imports, names = lessons.borrowed_names(TWINS[notebook], lesson)
    space = {name: values[name] for name in names}
    for source in (*imports, *lesson.given, cell):
        exec(source, space)
    *before, last = lesson.check.splitlines()
    exec("\n".join(before), space)
    return eval(last, space)


@by_name
def test_the_solution_is_right(notebook, lesson, values):
    verdict = run(notebook, lesson, values, lesson.solution)
    assert isinstance(verdict, Verdict) and verdict, verdict
    assert repr(verdict).startswith(f"✓ {lesson.name}: right. ")


@by_name
def test_the_untouched_exercise_fails_and_helps(notebook, lesson, values):
    verdict = run(notebook, lesson, values, lesson.start)
    assert not verdict and verdict.message.startswith("not done yet: "), verdict
    assert all(len(line) <= 79 for line in repr(verdict).splitlines())


@by_name
def test_an_exercise_borrows_only_what_its_notebook_has(notebook, lesson):
    cells = TWINS[notebook][: lesson.number - 1]
    there = {n for c in cells if c.cell_type == "code" for n in lessons.bound_names(c.source)}
    assert lessons.borrowed_names(TWINS[notebook], lesson)[1] <= there


MISTAKES = [(n, says, wrong) for n, e in answers.EXERCISES.items() for says, wrong in e.mistakes.items()]
MISTAKES += [(n, *e.planted) for n, e in answers.EXERCISES.items() if e.planted]


@pytest.mark.parametrize(
    ("name", "says", "wrong"), MISTAKES, ids=lambda x: x[:40] if isinstance(x, str) else ""
)
def test_each_likely_mistake_is_named(name, says, wrong):
    verdict = check(name, wrong)
    assert not verdict and says in verdict.message, verdict


def test_every_notebook_has_two_to_four_exercises_and_every_check_is_used():
    count = {name: sum(n == name for n, _ in LESSONS) for name in TWINS}
    assert {name: count[name] for name in PLANNED[1:] if not 2 <= count[name] <= 4} == {}, "00 has none"
    assert sorted(lesson.name for _, lesson in LESSONS) == sorted(answers.EXERCISES)
    assert {n: len(e.mistakes) for n, e in answers.EXERCISES.items() if len(e.mistakes) < 2} == {}


def test_every_notebook_has_notes_for_the_instructor():
    for name in PLANNED:
        notes = "\n".join(c.source for c in TWINS[name] if "instructor" in lessons.tags_of(c))
        for part in (teaching.TIMING_MARK, "*Usually goes wrong:*", "*Say:*", "*Ask:*", "*A late learner*"):
            assert part in " ".join(notes.split()), (name, part)


# --- the checks themselves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", answers.EXERCISES)
def test_a_wrong_kind_of_answer_is_told_without_an_error(name):
    for odd in (
        None,
        "four",
        [1, [2]],
        object(),
        {"A": 1},
        lambda *_: None,
        lambda: 1,
        float("nan"),
        torch.ones(3, 3),
    ):
        verdict = check(name, odd)
        assert not verdict and len(verdict.message) > 20, verdict


def test_doctests():
    assert doctest.testmod(exercises).failed == 0


def test_what_a_function_raises_is_told():
    verdict = check("half-sink", lambda keys: 1 / 0)
    assert "ZeroDivisionError: division by zero" in verdict.message
    assert "hand over its name" in check("half-sink", 4.85).message
    assert "does its last line say return?" in check("half-sink", lambda keys: None).message
    assert (
        "for (16): 2 is not it"
        in check("half-sink", lambda keys: 2.0 if keys == 16 else answers.math.log(keys)).message
    )


def test_parts_that_are_right_are_told_apart():
    half = {"A": "stop at <|end|>", "B": "stale weights", "C": "temperature 0", "D": ...}
    assert "D still to do" in check("sick-runs", half).message
    assert "3 of 4 are right; look again at D" in check("sick-runs", half | {"D": "stale weights"}).message
    assert "a list of 6 is wanted, and this is a list of 5" in check("mask-by-hand", [0, 0, 1, 1, 0]).message
    assert "wrong at 5 (counted from 0)" in check("mask-by-hand", [0, 0, 1, 1, 0, 1]).message


@given(st.floats(allow_nan=False), st.integers(0, 3))
def test_a_number_is_right_within_the_tolerance_alone(factor, place):
    right = answers.EXERCISES["lone-advantage"]
    given_answer = right.answer * factor
    assert bool(check("lone-advantage", given_answer)) == (abs(given_answer - right.answer) <= right.tolerance * max(
        abs(given_answer), right.answer)) or abs(given_answer) == float("inf")  # fmt: skip
    mask = [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert check("mask-by-hand", mask) and not check("mask-by-hand", [*mask[:place], 2, *mask[place + 1 :]])


def test_tensors_lists_and_masks_of_truth_values_count_alike():
    for mask in (
        (0, 0, 1, 1, 0, 0),
        torch.tensor([0.0, 0, 1, 1, 0, 0]),
        torch.tensor([0, 0, 1, 1, 0, 0]).bool(),
    ):
        assert check("mask-by-hand", mask)


def test_strict_stops_where_an_answer_is_wrong(monkeypatch):
    monkeypatch.setenv(STRICT_VARIABLE, "strict")
    assert check("lone-advantage", 3.75)
    with pytest.raises(ExerciseError, match="✗ lone-advantage: not done yet"):
        check("lone-advantage", ...)


def test_an_unknown_exercise_names_the_nearest():
    with pytest.raises(KeyError, match="did you mean 'gspo-ratio'"):
        check("gspo_ratio", 1)


def test_the_peak_is_measured_after_each_operation():
    ones = torch.ones(1000)
    assert answers._peak_of_new_tensors(lambda: ones.view(10, 100).sum()) == 4, "a view is no new tensor"
    assert answers._peak_of_new_tensors(lambda: [ones + i for i in range(5)]) == 5 * 4000
    assert answers._peak_of_new_tensors(lambda: [(ones + i).sum() for i in range(5)]) <= 4000 + 5 * 4


def test_an_exercise_without_mistakes_still_says_something(monkeypatch):
    monkeypatch.setitem(answers.EXERCISES, "bare", Exercise(1.0, "Good."))
    assert repr(check("bare", 1.0)) == "✓ bare: right. Good."
    assert "2 is not it" in check("bare", 2.0).message


# --- timing -----------------------------------------------------------------------------------------------------------------


def test_the_plan_is_in_step_with_twins_and_recorded_run():
    text = teaching.PLAN_FILE.read_text(encoding="utf-8")
    assert text == teaching.fill_plan(text, TWINS), "python -m helpers.teaching"
    with pytest.raises(ValueError, match="lost its markers for the table 'half day'"):
        teaching.fill_plan("nothing", TWINS)


def test_the_command_mends_a_plan_that_is_out_of_step(tmp_path, monkeypatch):
    text = teaching.PLAN_FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(teaching, "PLAN_FILE", tmp_path / "teaching.md")
    teaching.PLAN_FILE.write_text(text.replace("| 0:00 | 00 |", "| 9:99 | 00 |"), encoding="utf-8")
    teaching.main([])
    assert teaching.PLAN_FILE.read_text(encoding="utf-8") == text


def test_the_half_day_is_half_a_day():
    minutes = [teaching.slot_minutes(slot, TWINS[slot.notebook])[-1] for slot in teaching.HALF_DAY]
    assert sum(minutes) <= 240
    assert [slot.notebook[:2] for slot in teaching.HALF_DAY] == [f"0{n}" for n in range(7)]


def test_seconds_are_those_of_the_recorded_cells(tmp_path):
    def cell(start, end):
        times = {
            "iopub.execute_input": f"2026-01-01T00:00:{start}Z",
            "shell.execute_reply": f"2026-01-01T00:00:{end}Z",
        }
        return {"cell_type": "code", "source": [], "metadata": {"execution": times}}

    def text(source):
        return {"cell_type": "markdown", "source": [source], "metadata": {}}

    cells = [
        cell("01.5", "02.0"),
        text("## One\n"),
        cell("02.0", "05.0"),
        cell("05.0", "06.5"),
        text("## Two\n"),
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert teaching.recorded_seconds(path) == {"opening": 0.5, "One": 4.5, "Two": 0.0}
    assert teaching.recorded_seconds(tmp_path / "none.ipynb") == {}
    rows = [teaching.Section("One", 260, 20, 1, 5, 4.5), teaching.Section("New", 13)]
    table = teaching.timing_table(rows)
    assert "| One | 3 | 4.5 | 5 |" in table and "| New | 0 | not recorded |  |" in table


def test_reading_is_counted_without_notes_and_exercises():
    cells = TWINS["04_grpo_math"]
    rows = teaching.sections(cells, {})
    assert sum(row.exercises for row in rows) == len(lessons.lessons(cells))
    notes = sum(len(c.source.split()) for c in cells if "instructor" in lessons.tags_of(c))
    prose = sum(len(c.source.split()) for c in cells if c.cell_type == "markdown")
    assert sum(row.words for row in rows) < prose - notes
    assert os.environ.get(STRICT_VARIABLE) is None
