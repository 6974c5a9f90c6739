"""How long a notebook takes: cells by the recorded run, reading by its length, exercises by what they say of themselves.

    python -m helpers.teaching      brings the tables of notebooks/teaching.md up to date

The seconds of cells are measured. The minutes of reading are an estimate: WORDS_A_MINUTE of prose and LINES_A_MINUTE of code;
nobody has been timed with a watch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from helpers import lessons
from helpers.results import PROJECT_ROOT, write_atomically

RECORDED = PROJECT_ROOT / "notebooks" / "recorded" / "cpu"
PLAN_FILE = PROJECT_ROOT / "notebooks" / "teaching.md"
WORDS_A_MINUTE = 130
LINES_A_MINUTE = 20
OPENING = "opening"
TIMING_MARK = "<!-- timing -->"


@dataclass
class Section:
    """A section of a notebook, "## ...". seconds: of its cells in the recorded run; None where that run has no such section."""

    title: str
    words: int = 0
    lines: int = 0
    exercises: int = 0
    exercise_minutes: int = 0
    seconds: float | None = None

    @property
    def reading_minutes(self) -> float:
        return self.words / WORDS_A_MINUTE + self.lines / LINES_A_MINUTE

    @property
    def minutes(self) -> float:
        """Reading, running and exercises."""
        return self.reading_minutes + (self.seconds or 0) / 60 + self.exercise_minutes


def sections(cells: Sequence[Any], recorded: Mapping[str, float]) -> list[Section]:
    """The sections of a twin's cells. recorded: what `recorded_seconds` found."""
    found = [Section(OPENING, seconds=recorded.get(OPENING))]
    for cell in cells:
        tags = lessons.tags_of(cell)
        if cell.cell_type == "markdown" and "instructor" not in tags:
            found += [Section(title, seconds=recorded.get(title)) for title in _titles(cell.source)]
            if "exercise" in tags:
                effort = lessons.EFFORT.search(cell.source)
                found[-1].exercises += 1
                found[-1].exercise_minutes += int(effort[1]) if effort else 0
            else:
                found[-1].words += len(cell.source.split())
        elif cell.cell_type == "code" and not {"given", "start", "solution", "check"} & set(tags):
            found[-1].lines += len(cell.source.splitlines())
    return found


def _titles(source: str) -> list[str]:
    return re.findall(r"^## (.+)$", source, re.MULTILINE)


def recorded_seconds(executed: Path) -> dict[str, float]:
    """Section -> seconds of its cells in an executed notebook; empty where there is none or it has no times."""
    if not executed.is_file():
        return {}
    seconds, section = {OPENING: 0.0}, OPENING
    for cell in json.loads(executed.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            section = (_titles("".join(cell["source"])) or [section])[-1]
        times = cell["metadata"].get("execution", {})
        start, end = times.get("iopub.execute_input"), times.get("shell.execute_reply")
        if start and end:
            took = datetime.fromisoformat(end) - datetime.fromisoformat(start)
            seconds[section] = seconds.get(section, 0.0) + took.total_seconds()
        else:
            seconds.setdefault(section, 0.0)
    return seconds


def timing_table(rows: Iterable[Section]) -> str:
    """Markdown: minutes of reading (estimated), seconds of cells (recorded), minutes of exercises, for each section."""
    lines = ["| section | reading, min | cells, s | exercises, min |", "|---|---|---|---|"]
    rows = list(rows)
    for row in rows:
        seconds = "not recorded" if row.seconds is None else f"{row.seconds:.1f}"
        lines.append(
            f"| {row.title} | {row.reading_minutes:.0f} | {seconds} | {row.exercise_minutes or ''} |"
        )
    total = sum(row.seconds or 0 for row in rows)
    lines.append(
        f"| all | {sum(r.reading_minutes for r in rows):.0f} | {total:.0f} | {sum(r.exercise_minutes for r in rows)} |"
    )
    return "\n".join(lines)


def with_timing(source: str, name: str, cells: Sequence[Any]) -> str:
    """An instructor cell's source with the timing table of notebook `name` where its mark stands."""
    if TIMING_MARK not in source:
        return source
    rows = sections(cells, recorded_seconds(RECORDED / name / f"{name}.ipynb"))
    note = "Reading is estimated from the length, cells were measured in the recorded run of profile `cpu`."
    return source.replace(TIMING_MARK, f"{timing_table(rows)}\n\n{note}")


# --- plans ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A part of a plan. only: beginnings of the sections that are done, all of them if empty. exercises: names; None: all.

    talk: minutes for questions, predictions and breaks.
    """

    notebook: str
    only: tuple[str, ...] = ()
    exercises: tuple[str, ...] | None = None
    talk: int = 5


HALF_DAY = (
    Slot("00_environment", ("1", "2", "The verdict"), ()),
    Slot("01_gpt_oss", ("1", "2", "3", "7"), ("half-sink",)),
    Slot("02_bridge", ("1", "2", "3", "4"), ("qkv-row",), talk=10),
    Slot("03_rollout", ("1", "2", "3", "4", "6", "7"), ("predict-the-grades",)),
    Slot("04_grpo_math", ("Set up", "1", "2", "3"), ("lone-advantage",), talk=10),
    Slot("05_grpo_step", (), ("by-group",)),
    Slot("06_train", (), ("sick-runs",), talk=10),
)
TWO_DAYS = (
    (
        Slot("00_environment"),
        Slot("01_gpt_oss", talk=20),
        Slot("02_bridge", talk=60),
        Slot("03_rollout", talk=20),
    ),
    (
        Slot("04_grpo_math", talk=30),
        Slot("05_grpo_step", talk=60),
        Slot("06_train", talk=20),
        Slot("07_memory", talk=20),
    ),
)


def slot_minutes(slot: Slot, cells: Sequence[Any]) -> tuple[float, float, int, int]:
    """(reading, running, exercises, in all) minutes of a slot. The sections left out of it are run, not read."""
    rows = sections(cells, recorded_seconds(RECORDED / slot.notebook / f"{slot.notebook}.ipynb"))
    read = [
        r
        for r in rows
        if not slot.only or r.title == OPENING or _takeaways(r) or r.title.startswith(slot.only)
    ]
    known = {lesson.name: lesson.minutes for lesson in lessons.lessons(cells)}
    chosen = known if slot.exercises is None else {name: known[name] for name in slot.exercises}
    reading = sum(r.reading_minutes for r in read)
    running, exercises = sum(r.seconds or 0 for r in rows) / 60, sum(chosen.values())
    return reading, running, exercises, round(reading + running + exercises + slot.talk)


def _takeaways(section: Section) -> bool:
    return section.title.startswith(("What you take away", "Three takeaways"))


def plan_table(slots: Sequence[Slot], twins: Mapping[str, Sequence[Any]]) -> str:
    """Markdown: when each slot begins, counted from 0:00, and what it is made of. twins: notebook -> its twin's cells."""
    lines = [
        "| from | notebook | sections | reading | running | exercises | questions, breaks |", "|---|---|---|---|---|---|---|"
    ]  # fmt: skip
    clock = 0
    for slot in slots:
        reading, running, exercises, whole = slot_minutes(slot, twins[slot.notebook])
        parts = ", ".join(slot.only) or "all"
        named = "all" if slot.exercises is None else ", ".join(slot.exercises)
        work = f"{exercises}{f' ({named})' if named else ''}"
        lines.append(
            f"| {_hours(clock)} | {slot.notebook[:2]} | {parts} | {reading:.0f} | {running:.1f} | {work} | {slot.talk} |"
        )
        clock += whole
    lines.append(f"| {_hours(clock)} | end | | | | | |")
    return "\n".join(lines)


def _hours(minutes: int) -> str:
    return f"{minutes // 60}:{minutes % 60:02d}"


def fill_plan(text: str, twins: Mapping[str, Sequence[Any]]) -> str:
    """teaching.md with the tables between its markers made anew. Raises ValueError where a marker is lost."""
    tables = {"half day": plan_table(HALF_DAY, twins)}
    tables |= {f"day {n}": plan_table(day, twins) for n, day in enumerate(TWO_DAYS, start=1)}
    tables["exercises"] = exercise_table(twins)
    for name, table in tables.items():
        start, end = f"<!-- {name}: made by helpers.teaching -->", f"<!-- end of {name} -->"
        if start not in text or end not in text:
            raise ValueError(
                f"teaching.md has lost its markers for the table {name!r}: put {start} and {end} back"
            )
        head, rest = text.split(start, 1)
        text = f"{head}{start}\n{table}\n{end}{rest.split(end, 1)[1]}"
    return text


def exercise_table(twins: Mapping[str, Sequence[Any]]) -> str:
    """Markdown: every exercise with its minutes and difficulty."""
    lines = ["| notebook | exercise | check | minutes | difficulty |", "|---|---|---|---|---|"]
    for name, cells in twins.items():
        for lesson in lessons.lessons(cells):
            lines.append(
                f"| {name[:2]} | {lesson.title} | `{lesson.name}` | {lesson.minutes} | {lesson.level} |"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    from helpers.messages import OneLineParser

    OneLineParser(prog="python -m helpers.teaching", description="Fill the tables of teaching.md.").parse_args(argv)
    from helpers.twins import read_cells, text_twins

    twins = {path.stem: read_cells(path) for path in text_twins()}
    write_atomically(PLAN_FILE, fill_plan(PLAN_FILE.read_text(encoding="utf-8"), twins))


if __name__ == "__main__":
    main()
