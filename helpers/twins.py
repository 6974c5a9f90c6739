"""Text twins: notebooks/text/NN_name.py is what people edit, notebooks/NN_name.ipynb is generated
from it.

    python -m helpers.twins write [NN ...]   text -> .ipynb, without outputs
    python -m helpers.twins write --form solutions --out DIR [NN ...]   another form, see helpers.lessons
    python -m helpers.twins check            exit 1 and a list when a notebook is out of step or out of form

The same text always gives the same bytes: cell ids come from the cells' text, and neither a Python
nor a
jupytext version is stored.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from helpers import lessons, teaching
from helpers.messages import OneLineParser
from helpers.results import PROJECT_ROOT, write_atomically

NOTEBOOKS = PROJECT_ROOT / "notebooks"
MAX_CODE_LINES = 25
MAX_COLUMNS = 79
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
NAME = re.compile(r"^\d\d_[A-Za-z0-9_]+$")


class TwinError(ValueError):
    """A text twin cannot be read; the message names file and line."""


def text_twins(folder: Path = NOTEBOOKS, only: Sequence[str] = ()) -> list[Path]:
    """The text twins in `folder`/text, in order; only those whose name starts with one of `only`,
    if given."""
    paths = [p for p in sorted((folder / "text").glob("*.py")) if NAME.match(p.stem)]
    chosen = [p for p in paths if not only or any(o and (p.stem == o or p.stem[:2] == o.zfill(2)) for o in only)]
    if not chosen:
        raise TwinError(f"no text twin {' '.join(only) or 'NN_name.py'} in {folder / 'text'}")
    return chosen


def notebook_of(twin: Path) -> Path:
    """notebooks/text/NN_name.py -> notebooks/NN_name.ipynb"""
    return twin.parent.parent / f"{twin.stem}.ipynb"


def render(twin: Path, form: str = "learner") -> str:
    """The .ipynb text of a text twin in one of lessons.FORMS: nbformat 4.5, no outputs, deterministic."""
    cells = [_cell(cell) for cell in lessons.form_cells(_timed(read_cells(twin), twin.stem), form)]
    seen: Counter[str] = Counter()
    for cell in cells:
        cell["id"] = _cell_id(cell, seen)
    notebook = {
        "cells": cells,
        "metadata": {"kernelspec": KERNEL, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _timed(cells: list[Any], name: str) -> list[Any]:
    """The cells with the timing tables of the instructor's notes filled in."""
    for cell in cells:
        if "instructor" in lessons.tags_of(cell):
            cell.source = teaching.with_timing(cell.source, name, cells)
    return cells


def read_cells(twin: Path) -> list[Any]:
    """The cells of a text twin as jupytext reads them (percent format)."""
    import jupytext

    try:
        return jupytext.read(twin, fmt="py:percent").cells
    except Exception as error:  # jupytext raises many kinds; every one means: this text is not readable
        raise TwinError(f"{twin} cannot be read as jupytext percent: {error}") from error


def _cell(cell: Any) -> dict[str, Any]:
    kept = {
        "cell_type": cell.cell_type,
        "metadata": dict(cell.metadata),
        "source": cell.source.splitlines(keepends=True),
    }
    return kept | ({"execution_count": None, "outputs": []} if cell.cell_type == "code" else {})


def _cell_id(cell: dict[str, Any], seen: Counter[str]) -> str:
    """Twelve hex digits of the cell's text, numbered when the text comes again: a new cell changes
    no other's id."""
    digest = hashlib.sha256(f"{cell['cell_type']}\n{''.join(cell['source'])}".encode()).hexdigest()[:12]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


def write(folder: Path = NOTEBOOKS, only: Sequence[str] = ()) -> list[Path]:
    """Write the notebooks of the text twins; returns those that changed."""
    changed = []
    for twin in text_twins(folder, only):
        path, text = notebook_of(twin), render(twin)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text)
            changed.append(path)
    return changed


def write_form(form: str, out: Path, folder: Path = NOTEBOOKS, only: Sequence[str] = ()) -> list[Path]:
    """Write one form of the notebooks into another folder; returns what was written.

    Raises TwinError where `out` is the notebooks' own folder, which holds the learner's form.
    """
    if out.resolve() == folder.resolve():
        raise TwinError(f"{out} holds the learner's form: choose another folder for the form {form!r}")
    paths = []
    for twin in text_twins(folder, only):
        path = out / f"{twin.stem}.ipynb"
        write_atomically(path, render(twin, form))
        paths.append(path)
    return paths


def check(folder: Path = NOTEBOOKS) -> list[str]:
    """One sentence for each notebook out of step with its twin, and for each breach of form; empty
    is good."""
    problems: list[str] = []
    twins = text_twins(folder)
    for twin in twins:
        problems += _out_of_step(twin) + lint(twin)
    names = {twin.stem for twin in twins}
    for path in sorted(folder.glob("*.ipynb")):
        if path.stem not in names:
            problems.append(
                f"{path.name} has no text twin text/{path.stem}.py: write one, or remove the notebook"
            )
    return problems


def _out_of_step(twin: Path) -> list[str]:
    path = notebook_of(twin)
    if not path.exists():
        return [f"{path.name} is missing: python -m helpers.twins write"]
    if path.read_text(encoding="utf-8") != render(twin):
        return [
            f"{path.name} is out of step with text/{twin.name} (edited, or saved with outputs). "
            "Put edits into the text, then: python -m helpers.twins write"
        ]
    return []


def lint(twin: Path) -> list[str]:
    """Breaches of the form of a lesson: cell length, line length, parameters cell, heading order, exercises."""
    cells = read_cells(twin)
    found = [*_code_form(cells), *_parameters_form(cells), *_heading_order(cells), *lessons.lint(cells)]
    return [f"{twin.name}: {problem}" for problem in found]


def _code_form(cells: Sequence[Any]) -> Iterator[str]:
    for number, cell in enumerate(cells, start=1):
        if cell.cell_type != "code":
            continue
        lines = cell.source.splitlines()
        if len(lines) > MAX_CODE_LINES:
            yield f"cell {number} has {len(lines)} lines, at most {MAX_CODE_LINES} (split it, or move code to helpers)"
        for line in lines:
            if len(line) > MAX_COLUMNS:
                yield f"cell {number} has a line of {len(line)} columns, at most {MAX_COLUMNS}: {line.strip()[:50]}"


def _parameters_form(cells: Sequence[Any]) -> Iterator[str]:
    tagged = [(n, c) for n, c in enumerate(cells, start=1) if "parameters" in c.metadata.get("tags", [])]
    if len(tagged) != 1:
        yield f"it has {len(tagged)} cells tagged 'parameters', needs exactly one (# %% tags=[\"parameters\"])"
        return
    number, cell = tagged[0]
    first_code = next((n for n, c in enumerate(cells, start=1) if c.cell_type == "code"), number)
    if number != first_code:
        yield f"the parameters cell is cell {number}, but code stands before it (cell {first_code})"
    try:
        tree = ast.parse(cell.source)
    except SyntaxError as error:
        yield f"the parameters cell is not valid Python: {error}"
        return
    yield from _assignments_form(cell.source.splitlines(), tree.body)


def _assignments_form(lines: Sequence[str], statements: Sequence[ast.stmt]) -> Iterator[str]:
    """papermill reads one assignment a line; type and comment are what its user sees."""
    starts = Counter(s.lineno for s in statements)
    for statement in statements:
        text = lines[statement.lineno - 1].strip()
        typed = isinstance(statement, ast.AnnAssign) and statement.value is not None
        if not typed or statement.lineno != statement.end_lineno or starts[statement.lineno] > 1:
            yield f"the parameters cell wants one assignment NAME: type = value a line, not: {text[:60]}"
        elif "#" not in lines[statement.lineno - 1][statement.end_col_offset :]:
            yield f"the parameters cell wants a comment behind: {text[:60]}"


def _heading_order(cells: Sequence[Any]) -> Iterator[str]:
    headings = list(_headings(cells))
    if not cells or cells[0].cell_type != "markdown" or not headings or headings[0][:2] != (1, 1):
        yield "it does not open with a markdown cell that holds its title ('# ...')"
    for number, level, text in headings[1:]:
        if level == 1:
            yield f"cell {number} has a second title: {text[:50]}"
    for (_, above, _), (number, level, text) in zip(headings, headings[1:], strict=False):
        if level > above + 1:
            yield f"cell {number} jumps from heading level {above} to {level}: {text[:50]}"


def _headings(cells: Sequence[Any]) -> Iterator[tuple[int, int, str]]:
    """(cell number, level, text) of each markdown heading outside fenced code."""
    for number, cell in enumerate(cells, start=1):
        fenced = False
        for line in cell.source.splitlines() if cell.cell_type == "markdown" else ():
            if line.lstrip().startswith(("```", "~~~")):
                fenced = not fenced
            match = re.match(r"(#{1,6})\s+(\S.*)", line)
            if match and not fenced:
                yield number, len(match.group(1)), match.group(2)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = OneLineParser(
        prog="python -m helpers.twins", description="Keep notebooks and their text twins in step."
    )
    parser.add_argument("task", choices=("write", "check"))
    parser.add_argument("only", nargs="*", metavar="NN", help="numbers or names, for write")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, metavar="DIR")
    parser.add_argument(
        "--form", choices=lessons.FORMS, default="learner", help="for write (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where another form than the learner's goes")
    args = parser.parse_intermixed_args(argv)  # NN may stand behind the options
    if (args.out is None) != (args.form == "learner"):
        parser.error("--form solutions, instructor or slides and --out DIR go together")
    try:
        if args.task == "write":
            for path in _write(args):
                print(f"written: {path.name}")
            return 0
        problems = check(args.notebooks)
    except (TwinError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(problems) or "notebooks and text twins agree")
    return 1 if problems else 0


def _write(args: argparse.Namespace) -> list[Path]:
    if args.out is None:
        return write(args.notebooks, args.only)
    return write_form(args.form, args.out, args.notebooks, args.only)


if __name__ == "__main__":
    sys.exit(main())
