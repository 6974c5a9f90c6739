"""Text twins: same text, same bytes; out of step and out of form are told."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("jupytext")

from helpers import twins  # noqa: E402
from helpers.profiles import PROJECT_ROOT  # noqa: E402

HEADER = """# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

"""
GOOD = """# %% [markdown]
# # Title
#
# ```bash
# # no heading
# ```

# %% tags=["parameters"]
PROFILE: str = "cpu"  # which profile
SEED: int = 0  # seed of every choice

# %% [markdown]
# ## Part

# %%
x = 1

# %%
x = 1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    return tmp_path


def _write(folder, text, name="00_a"):
    path = folder / "text" / f"{name}.py"
    path.write_text(HEADER + text)
    return path


def test_write_then_check_agree_and_bytes_do_not_churn(folder):
    _write(folder, GOOD)
    assert [p.name for p in twins.write(folder)] == ["00_a.ipynb"]
    assert twins.write(folder) == [], "a second write changes nothing"
    assert twins.check(folder) == []
    text = (folder / "00_a.ipynb").read_text()
    notebook = json.loads(text)
    assert "version" not in text and notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["cells"][1]["metadata"]["tags"] == ["parameters"]


def test_the_notebook_is_valid_and_ids_are_unique_and_stable(folder):
    nbformat = pytest.importorskip("nbformat")
    _write(folder, GOOD)
    twins.write(folder)
    nbformat.validate(nbformat.read(folder / "00_a.ipynb", as_version=4))
    before = [c["id"] for c in json.loads((folder / "00_a.ipynb").read_text())["cells"]]
    assert len(set(before)) == len(before)
    _write(folder, GOOD.replace("# ## Part", "# new words\n\n# %% [markdown]\n# ## Part"))
    twins.write(folder)
    after = [c["id"] for c in json.loads((folder / "00_a.ipynb").read_text())["cells"]]
    assert [i for i in after if i in before] == before, "a new cell changes no other cell's id"


def test_outputs_edits_orphans_and_missing_are_out_of_step(folder):
    _write(folder, GOOD)
    _write(folder, GOOD, "01_b")
    twins.write(folder, ["00"])
    path = folder / "00_a.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][3]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1"]}]
    path.write_text(json.dumps(notebook))
    (folder / "07_old.ipynb").write_text("{}")
    problems = "\n".join(twins.check(folder))
    assert "00_a.ipynb is out of step" in problems and "helpers.twins write" in problems
    assert "01_b.ipynb is missing" in problems and "07_old.ipynb has no text twin" in problems
    assert twins.main(["check", "--notebooks", str(folder)]) == 1
    assert twins.main(["write", "--notebooks", str(folder)]) == 0
    (folder / "07_old.ipynb").unlink()
    assert twins.main(["check", "--notebooks", str(folder)]) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t + "y = 1\n" * 25, "26 lines, at most 25"),
        (lambda t: t + "y = '" + "a" * 80 + "'\n", "86 columns, at most 79"),
        (lambda t: t.replace(' tags=["parameters"]', ""), "0 cells tagged 'parameters'"),
        (
            lambda t: t + '\n# %% tags=["parameters"]\nA: int = 1  # a\n',
            "2 cells tagged 'parameters'",
        ),
        (
            lambda t: t.replace("SEED: int = 0", "SEED = 0"),
            "one assignment NAME: type = value a line",
        ),
        (
            lambda t: t.replace("SEED: int = 0", "A: int = 1; SEED: int = 0"),
            "one assignment NAME: type",
        ),
        (
            lambda t: t.replace("SEED: int = 0", "SEED: list = [\n    0]"),
            "one assignment NAME: type",
        ),
        (lambda t: t.replace("  # seed of every choice", ""), "wants a comment behind: SEED"),
        (lambda t: t.replace("# # Title", "# ## Title"), "does not open with"),
        (lambda t: t.replace("# ## Part", "# # Part"), "second title: Part"),
        (lambda t: t.replace("# ## Part", "# #### Part"), "jumps from heading level 1 to 4"),
        (lambda t: t.replace("# %% tags", "# %%\nz = 1\n\n# %% tags"), "code stands before it"),
    ],
)
def test_lint_tells_each_breach(folder, change, says):
    assert twins.lint(_write(folder, GOOD)) == []
    problems = twins.lint(_write(folder, change(GOOD)))
    assert any(says in p for p in problems), problems
    assert all(p.startswith("00_a.py: ") for p in problems)


def test_unknown_names_are_refused(folder, capsys):
    _write(folder, GOOD)
    assert twins.main(["write", "09", "--notebooks", str(folder)]) == 2
    assert "no text twin 09" in capsys.readouterr().err


EXERCISE = """
# %% [markdown] tags=["exercise"]
# ### Exercise: add
#
# (5 minutes, easy) Add two numbers.
#
# <details><summary>Hint</summary>
#
# Use +.
#
# </details>

# %% tags=["given"]
numbers = (1, 2)

# %% tags=["start"]
total = ...  # your turn

# %% tags=["solution"]
total = sum(numbers)

# %% tags=["check"]
check("add", total)

# %% [markdown] tags=["instructor"]
# <!-- timing -->
#
# *Ask:* is it commutative?
"""


def _sources(folder, form, name="00_a"):
    notebook = json.loads(twins.render(folder / "text" / f"{name}.py", form))
    return ["".join(cell["source"]) for cell in notebook["cells"]]


def test_each_form_has_its_own_cells(folder):
    _write(folder, GOOD + EXERCISE)
    start, solution, notes = "total = ...  # your turn", "total = sum(numbers)", "commutative"
    holds = {form: "\n".join(_sources(folder, form)) for form in twins.lessons.FORMS}
    for form, wanted in {"learner": start, "solutions": solution, "instructor": solution}.items():
        others = {start, solution} - {wanted}
        assert wanted in holds[form] and not [text for text in others if text in holds[form]]
        assert 'check("add", total)' in holds[form] and "numbers = (1, 2)" in holds[form]
        assert ('GRPO_EXERCISES"] = "strict"' in holds[form]) == (form != "learner")
        assert (notes in holds[form]) == (form == "instructor")
    assert "| Part | 0 | not recorded | 5 |" in holds["instructor"], "the timing table is filled in"
    with pytest.raises(ValueError, match="unknown form 'teacher'; use one of learner"):
        twins.render(folder / "text" / "00_a.py", "teacher")


def test_slides_are_the_opening_with_its_notes(folder):
    notes = '# %% [markdown] tags=["instructor"]\n# Say hello.\n\n'
    _write(folder, GOOD.replace("# %% tags=", notes + "# %% tags=", 1))
    cells = json.loads(twins.render(folder / "text" / "00_a.py", "slides"))["cells"]
    assert [c["metadata"]["slideshow"]["slide_type"] for c in cells] == ["slide", "notes"]
    assert "# Title" in "".join(cells[0]["source"]) and cells[1]["source"] == ["Say hello."]


@pytest.mark.parametrize("form", ["solutions", "instructor", "slides"])
def test_every_form_of_the_real_notebooks_is_valid_and_keeps_the_cells_ids(form, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    assert twins.main(["write", "--form", form, "--out", str(tmp_path)]) == 0
    for path in sorted((PROJECT_ROOT / "notebooks").glob("[0-9]*.ipynb")):
        other = nbformat.read(tmp_path / path.name, as_version=4)
        nbformat.validate(other)
        ids = [cell["id"] for cell in json.loads(path.read_text())["cells"]]
        kept = [cell["id"] for cell in other.cells if cell["id"] in ids]
        assert kept == [i for i in ids if i in kept] and len(kept) >= (1 if form == "slides" else 5)


def test_forms_go_to_a_folder_of_their_own(folder, capsys):
    _write(folder, GOOD + EXERCISE)
    assert twins.main(["write", "--notebooks", str(folder), "--form", "slides", "--out", str(folder)]) == 2
    assert "holds the learner's form" in capsys.readouterr().err
    for words in (["--form", "solutions"], ["--out", str(folder / "x")]):
        with pytest.raises(SystemExit):
            twins.main(["write", "--notebooks", str(folder), *words])
        assert "go together" in capsys.readouterr().err
    assert not list(folder.glob("**/*.ipynb"))
    _write(folder, GOOD, "01_b")
    out = folder / "out"
    words = ["write", "--notebooks", str(folder), "--form", "solutions", "--out", str(out), "01"]
    assert twins.main(words) == 0 and [p.name for p in out.iterdir()] == ["01_b.ipynb"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('tags=["given"]', 'tags=["givn"]', "unknown tag 'givn'"),
        ('# %% tags=["solution"]\ntotal = sum(numbers)\n', "", "needs given cells, then start, solution, check"),
        ('tags=["given"]', 'tags=["check"]', "needs given cells, then start, solution, check"),
        ('tags=["start"]', 'tags=["solution"]', "needs given cells, then start, solution, check"),
        ('check("add", total)', "print(total)", 'has no check("name", ...)'),
        ("### Exercise: add", "### Add", "lacks a title"),
        ("(5 minutes, easy)", "(5 minutes, simple)", "lacks its effort"),
        ("(5 minutes, easy)", "Five minutes, easy.", "lacks its effort"),
        ("# Use +.\n", "", "lacks a hint"),
        ('[markdown] tags=["exercise"]', "[markdown]", "outside an exercise"),
        ('# %% [markdown] tags=["instructor"]', '# %% tags=["instructor"]', "is no markdown cell"),
        ("total", "x", "binds 'x', which the notebook uses too"),
    ],
)
def test_lint_tells_what_an_exercise_lacks(folder, old, new, says):
    assert twins.lint(_write(folder, GOOD + EXERCISE)) == []
    assert old in EXERCISE
    problems = twins.lint(_write(folder, GOOD + EXERCISE.replace(old, new)))
    assert any(says in p for p in problems), problems


def test_lint_tells_of_two_checks_of_one_name(folder):
    again = EXERCISE.split("# %% [markdown] tags=[\"instructor")[0]
    assert any("two exercises check 'add'" in p for p in twins.lint(_write(folder, GOOD + EXERCISE + again)))


def test_names_that_cells_bind_and_use():
    from helpers import lessons

    source = """
import os.path as p, sys
from a import b as c
d = [e for e in f]
def g(h):
    return h + i
with j() as k:
    for m, (n, *o) in q:
        d += len(n)
"""
    assert lessons.bound_names(source) == {"p", "sys", "c", "d", "g", "k", "m", "n", "o"}
    assert lessons.used_names(source) - lessons.bound_names(source) == {"f", "i", "j", "q"}


PREPARED = [  # the others start no engine
    twin for twin in sorted((PROJECT_ROOT / "notebooks" / "text").glob("[0-9][0-9]_*.py"))
    if "\nprepare_kernel(settings)" in twin.read_text()
]  # fmt: skip


@pytest.mark.parametrize("twin", PREPARED, ids=lambda path: path.stem)
def test_nothing_brings_torch_before_the_kernel_is_prepared(twin):
    """prepare_kernel sets what torch and the engines read when they are imported: device, threads, compiler."""
    before = twin.read_text().split("\nprepare_kernel(settings)")[0]
    imports = re.findall(
        r"^(?:from helpers\S* import (?:\([^)]*\)|[^\n]*)|import \w+)", before, re.MULTILINE
    )
    assert len(PREPARED) >= 5 and any("prepare_kernel" in line for line in imports)
    code = "\n".join([*imports, "import sys", "sys.exit('torch' in sys.modules)"])
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=PROJECT_ROOT).returncode == 0
