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
