"""What the tagged cells of a text twin mean: exercises, instructor notes, and the forms of a notebook made from them.

An exercise is five kinds of cell in a row:

    # %% [markdown] tags=["exercise"]      statement: "### Exercise: ...", "(10 minutes, medium)", a folded hint
    # %% tags=["given"]                    optional, any number: what the exercise starts from
    # %% tags=["start"]                    the gap: `answer = ...  # your turn`, or a cell with a planted mistake
    # %% tags=["solution"]                 takes the place of the start
    # %% tags=["check"]                    check("name", answer), see helpers.exercises

and "instructor" tags a markdown cell of notes for whoever teaches. Forms:

    learner     the start, without solution and notes; what notebooks/NN_name.ipynb holds
    solutions   the solution in place of the start; a check that fails stops the run
    instructor  as solutions, with the notes
    slides      the opening cells as slides, the notes that stand among them as speaker's notes
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
import symtable
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FORMS = ("learner", "solutions", "instructor", "slides")
TAGS = ("parameters", "exercise", "given", "start", "solution", "check", "instructor")
LEVELS = ("easy", "medium", "hard")
STRICT = 'import os\n\nos.environ["GRPO_EXERCISES"] = "strict"  # a check that fails stops this form'
TITLE = re.compile(r"^#{3,} Exercise: (\S.*)$", re.MULTILINE)
EFFORT = re.compile(rf"\((\d+) minutes, ({'|'.join(LEVELS)})\)")
HINT = re.compile(r"<details>\s*<summary>Hint</summary>.*\S.*</details>", re.DOTALL)


@dataclass(frozen=True)
class Lesson:
    """One exercise of a notebook. given, start, solution, check: source text of its cells.

    number: of its statement among the twin's cells, from 1.  name: what its check calls it, "" where it has no name.
    minutes, level: as the statement says, 0 and "" where it does not.
    """

    number: int
    name: str
    title: str
    minutes: int
    level: str
    given: tuple[str, ...]
    start: str
    solution: str
    check: str

    @property
    def cells(self) -> tuple[str, ...]:
        """Source text of all its code cells."""
        return (*self.given, self.start, self.solution, self.check)


def tags_of(cell: Any) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def lessons(cells: Sequence[Any]) -> list[Lesson]:
    """The exercises of a twin's cells, in order. A cell that an exercise lacks is ""; `lint` tells of it."""
    return [_lesson(number, block) for number, block in _blocks(cells)]


def _blocks(cells: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """(number of the statement, its cells): a cell tagged "exercise" and what follows with a tag of an exercise."""
    for number, cell in enumerate(cells, start=1):
        if "exercise" not in tags_of(cell):
            continue
        block = [cell]
        for following in cells[number:]:
            if not {"given", "start", "solution", "check"} & set(tags_of(following)):
                break
            block.append(following)
        yield number, block


def _lesson(number: int, block: Sequence[Any]) -> Lesson:
    def sources(tag: str) -> list[str]:
        return [c.source for c in block if tag in tags_of(c)]

    statement = block[0].source
    title, effort = TITLE.search(statement), EFFORT.search(statement)
    check = "\n".join(sources("check"))
    called = re.search(r"\bcheck\(\s*\"([^\"]+)\"", check)
    return Lesson(
        number, called[1] if called else "", title[1] if title else "", int(effort[1]) if effort else 0,
        effort[2] if effort else "", tuple(sources("given")), "\n".join(sources("start")),
        "\n".join(sources("solution")), check,
    )  # fmt: skip


# --- forms --------------------------------------------------------------------------------------------------------------


def form_cells(cells: Sequence[Any], form: str) -> list[Any]:
    """The cells of one form of a notebook. Raises ValueError for a form that is not in FORMS."""
    if form not in FORMS:
        raise ValueError(f"unknown form {form!r}; use one of {', '.join(FORMS)}")
    if form == "slides":
        return _slides(cells)
    left_out = {
        "learner": {"solution", "instructor"},
        "solutions": {"start", "instructor"},
        "instructor": {"start"},
    }
    kept = []
    for cell in cells:
        if not left_out[form] & set(tags_of(cell)):
            kept.append(cell)
        if form != "learner" and "parameters" in tags_of(cell) and lessons(cells):
            kept.append(_code_cell(STRICT))
    return kept


def _slides(cells: Sequence[Any]) -> list[Any]:
    """Copies of the markdown cells before the parameters, each with what nbconvert's slides read."""
    shown = []
    for cell in cells:
        if "parameters" in tags_of(cell):
            break
        if cell.cell_type == "markdown":
            slide = copy.deepcopy(cell)
            kind = "notes" if "instructor" in tags_of(cell) else "slide"
            slide.metadata["slideshow"] = {"slide_type": kind}
            shown.append(slide)
    return shown


def _code_cell(source: str) -> Any:
    import nbformat

    return nbformat.v4.new_code_cell(source)


# --- what an exercise takes from its notebook -----------------------------------------------------------------------------


def bound_names(source: str) -> set[str]:
    """Names that a cell's top level binds: assignments, loops, imports, functions, `with ... as`."""
    bound: set[str] = set()
    for node in _top_level(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            bound.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((a.asname or a.name).split(".")[0] for a in node.names)
    return bound


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes outside of functions, classes, lambdas and comprehensions (whose inner names are their own)."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _top_level(node)


_SCOPES = (
    ast.FunctionDef,
    ast.ClassDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def used_names(source: str) -> set[str]:
    """Global names that a cell reads, builtins aside; those that it binds itself are among them.

    Targets of comprehensions are left out: Python 3.12's symbol table takes them for the cell's own names.
    """

    def globals_of(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for child in table.get_children():
            yield from globals_of(child)

    targets = {
        name.id
        for node in ast.walk(ast.parse(source)) if isinstance(node, ast.comprehension)
        for name in ast.walk(node.target) if isinstance(name, ast.Name)
    }  # fmt: skip
    return set(globals_of(symtable.symtable(source, "cell", "exec"))) - set(dir(builtins)) - targets


def borrowed_names(cells: Sequence[Any], lesson: Lesson) -> tuple[list[str], set[str]]:
    """(import statements, other names) that an exercise takes from the cells before it."""
    own = {name for source in lesson.cells for name in bound_names(source)}
    wanted = {name for source in lesson.cells for name in used_names(source)} - own
    statements: dict[str, str] = {}
    for cell in cells[: lesson.number - 1]:
        if cell.cell_type == "code" and "solution" not in tags_of(cell):
            statements |= _imports(cell.source)
    imports = dict.fromkeys(statements[name] for name in sorted(wanted & set(statements)))
    return list(imports), wanted - set(statements)


def _imports(source: str) -> dict[str, str]:
    """name -> the top-level import statement that binds it."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found[(alias.asname or alias.name).split(".")[0]] = ast.unparse(node)
    return found


# --- form of an exercise --------------------------------------------------------------------------------------------------


def lint(cells: Sequence[Any]) -> Iterator[str]:
    """Breaches of the form of exercises and notes."""
    yield from _tags_form(cells)
    inside: set[int] = set()
    for number, block in _blocks(cells):
        inside.update(range(number, number + len(block)))
        yield from _order_form(number, block)
        yield from _statement_form(number, block[0].source)
    names = [lesson.name for lesson in lessons(cells)]
    for name in sorted({n for n in names if n and names.count(n) > 1}):
        yield f"two exercises check {name!r}"
    for number, cell in enumerate(cells, start=1):
        if number not in inside and {"given", "start", "solution", "check"} & set(tags_of(cell)):
            yield f"cell {number} is tagged {tags_of(cell)} outside an exercise"
    yield from _names_form(cells, inside)


def _tags_form(cells: Sequence[Any]) -> Iterator[str]:
    for number, cell in enumerate(cells, start=1):
        for tag in set(tags_of(cell)) - set(TAGS):
            yield f"cell {number} has the unknown tag {tag!r}; known: {', '.join(TAGS)}"
        if {"exercise", "instructor"} & set(tags_of(cell)) and cell.cell_type != "markdown":
            yield f"cell {number} is tagged {tags_of(cell)} and is no markdown cell"


def _order_form(number: int, block: Sequence[Any]) -> Iterator[str]:
    order = [tags_of(c)[0] for c in block[1:]]
    if [tag for tag in order if tag != "given"] != ["start", "solution", "check"] or order != sorted(
        order, key=TAGS.index
    ):
        yield f"the exercise in cell {number} has {order}, needs given cells, then start, solution, check"
    elif not _lesson(number, block).name:
        yield f'the exercise in cell {number}: its check cell has no check("name", ...)'


def _statement_form(number: int, text: str) -> Iterator[str]:
    wanted = (
        (TITLE, "a title '### Exercise: ...'"),
        (EFFORT, f"its effort '(10 minutes, medium)', {', '.join(LEVELS)}"),
        (HINT, "a hint in <details><summary>Hint</summary> ... </details>"),
    )
    for pattern, what in wanted:
        if not pattern.search(text):
            yield f"the exercise in cell {number} lacks {what}"


def _names_form(cells: Sequence[Any], inside: set[int]) -> Iterator[str]:
    """An exercise may be wrong or left out, so the notebook must not use what it binds."""
    outside = [c.source for n, c in enumerate(cells, start=1) if c.cell_type == "code" and n not in inside]
    used = {name for source in outside for name in bound_names(source) | used_names(source)}
    for lesson in lessons(cells):
        for source in lesson.cells:
            for name in sorted((bound_names(source) - set(_imports(source))) & used):
                yield f"the exercise in cell {lesson.number} binds {name!r}, which the notebook uses too: rename it"
