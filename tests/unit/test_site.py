"""The site's sources and its checks: links resolve, terms and tests exist, tables and figures can be read.

The build needs packages of its own (environment/site.sh), so it is no part of the tests; it checks itself.
"""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
SYMPTOMS, GLOSSARY = NOTEBOOKS / "symptoms.md", NOTEBOOKS / "glossary.md"
LEARNERS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
TWINS = sorted((NOTEBOOKS / "text").glob("[0-9][0-9]_*.py"))
PAGES = sorted([ROOT / "README.md", *NOTEBOOKS.glob("*.md"), *(NOTEBOOKS / "cards").glob("*.md"),
                *(ROOT / "environment").glob("*.md"), *(ROOT / "tests").glob("*/README.md")])  # fmt: skip


def load(name: str):
    """A module of environment/site, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "environment/site" / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(
        spec
    )  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


check, pages = load("check"), load("pages")


def broken(text: str, folder: Path) -> list[str]:
    """Links of a Markdown text whose file or heading is missing."""
    found = []
    for target in re.findall(r"(?<!\\)\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)):
        name, _, anchor = target.partition("#")
        path = folder / name
        if ":" not in name and not path.exists():
            found.append(f"{target}: there is no such file")
        elif anchor and path.suffix in (".md", ".ipynb") and anchor not in pages.anchors(path):
            found.append(f"{target}: there is no such heading")
    return found


# ---- symptoms and glossary ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(path):
    assert broken(path.read_text(), path.parent) == []


def test_a_broken_link_is_found():
    text = "[a](00_environment.ipynb#1--the-machine) [b](nowhere.md) [c](symptoms.md#no-such) `[d](code.md)`"
    assert broken(text, NOTEBOOKS) == [
        "nowhere.md: there is no such file", "symptoms.md#no-such: there is no such heading",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("1 · The machine", "1--the-machine"),
        ("k1, k2, k3", "k1-k2-k3"),
        ("5 · YaRN: positions beyond the `trained` context", "5--yarn-positions-beyond-the-trained-context"),
        ("Dr. GRPO", "dr-grpo"),
    ],
)
def test_slugs_are_githubs(heading, slug):
    assert pages.slug(heading) == slug


def symptoms() -> dict[str, str]:
    return pages.sections(SYMPTOMS.read_text())


@pytest.mark.parametrize("name", symptoms())
def test_a_symptom_has_cause_evidence_and_cure(name):
    text = symptoms()[name]
    parts = re.findall(r"^- \*\*(Likely cause|See it|Cure):\*\*\s+\S", text, re.M)
    assert parts == ["Likely cause", "See it", "Cure"]
    see = text.split("**See it:**")[1].split("**Cure:**")[0]
    assert ".ipynb#" in see or "::test_" in see, "it names neither a section nor a test"


@cache
def functions(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)}


def test_the_tests_that_symptoms_name_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SYMPTOMS.read_text())
    assert len(named) >= 20
    assert [f"{file}::{name}" for file, name in named if name not in functions(ROOT / file)] == []


def test_every_fault_of_the_ledgers_has_a_symptom():
    ledgers = [ROOT / "tests" / kind / "README.md" for kind in ("integration", "gpu")]
    rows = {int(n) for path in ledgers for n in re.findall(r"^\| (\d+) \|", path.read_text(), re.M)}
    told = {
        int(n) for part in re.findall(r"\(((?:\d+, )*\d+)\)", SYMPTOMS.read_text()) for n in part.split(", ")
    }
    assert len(rows) >= 20 and rows - told == set()


def test_the_symptoms_that_people_search_for_are_there():
    names = " ".join(symptoms()).lower()
    for words in (
        "grad norm is 1500",
        "stuck at 0",
        "out of memory after release",
        "gibberish after export",
        "falls after 30",
    ):
        assert words in names


@pytest.mark.parametrize("term", pages.sections(GLOSSARY.read_text()))
def test_a_term_is_used_where_its_entry_says(term):
    text = pages.sections(GLOSSARY.read_text())[term]
    links = re.findall(r"\]\((\w+\.ipynb)#([^)]+)\)", text)
    assert links and len(text.split("See [")[0].split()) >= 8, "an entry is a sentence and a link"
    for file, anchor in links:
        section = pages.sections(pages.notebook_text(NOTEBOOKS / file), by_slug=True)[anchor]
        assert pages.mention(term).search(section), f"{file}#{anchor} does not use {term!r}"


def test_terms_are_sorted_within_their_part():
    for part in re.split(r"^## ", GLOSSARY.read_text(), flags=re.M)[1:]:
        terms = [t.replace(",", "").lower() for t in re.findall(r"^### (.+)$", part, re.M)]
        assert terms == sorted(terms)


# ---- reading: tables, figures, headings --------------------------------------------------------------------


def table_problems(text: str) -> list[str]:
    """Tables without a head, with an unnamed column other than the first, or with uneven rows."""
    found = []
    plain = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for block in re.findall(r"(?:^\|.*\n?)+", plain, re.M):
        rows = [
            [c.strip() for c in re.split(r"(?<!\\)\|", line.strip())[1:-1]] for line in block.splitlines()
        ]
        if len(rows) < 2 or not all(re.fullmatch(r":?-+:?", cell) for cell in rows[1]):
            found.append(f"no head: {rows[0]}")
        elif len(rows[0]) > 2 and not all(rows[0][1:]):
            found.append(f"a column without a name: {rows[0]}")
        found += [f"{len(row)} cells below {len(rows[0])}: {row}" for row in rows if len(row) != len(rows[0])]
    return found


@pytest.mark.parametrize("path", [*LEARNERS, *PAGES], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_tables_have_heads(path):
    text = pages.notebook_text(path) if path.suffix == ".ipynb" else path.read_text()
    assert table_problems(text) == []


def test_tables_without_heads_are_found():
    good = "| a | b | c |\n|---|---|---|\n| 1 | 2 \\| 3 | 4 |\n"
    assert table_problems(good) == []
    assert "no head" in table_problems(good.replace("|---|---|---|\n", ""))[0]
    assert "without a name" in table_problems(good.replace("| b |", "| |"))[0]
    assert "2 cells below 3" in table_problems(good + "| 5 | 6 |\n")[0]


def figure_problems(source: str) -> list[str]:
    """Figures of a notebook that reach the reader without a sentence about them."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("show", "Image"):
            found.append(f"line {node.lineno}: {ast.unparse(node)[:40]} has no alt text: use show_figure")
        if name == "show_figure" or (name == "finish" and len(node.args) + len(node.keywords) > 0):
            alt = next((k.value for k in node.keywords if k.arg == "alt"), ast.Constant(""))
            words = "".join(str(c.value) for c in ast.walk(alt) if isinstance(c, ast.Constant))
            if len(words.split()) < 8 and not isinstance(
                alt, ast.Name
            ):  # what a name holds is seen in the recorded run
                found.append(f"line {node.lineno}: the alt text {words!r} says too little")
    return found


def source_of(twin: Path) -> str:
    return re.sub(r"^(?=[%!])", "# ", twin.read_text(), flags=re.M)


@pytest.mark.parametrize("twin", TWINS, ids=lambda p: p.stem)
def test_every_figure_says_what_it_shows(twin):
    assert figure_problems(source_of(twin)) == []
    assert "![](" not in twin.read_text()


def test_figures_without_alt_text_are_found():
    good = 'show_figure(fig, run=run, name="a", alt="Two lines rise with the step and cross at ten.")'
    assert figure_problems(good) == []
    for bad in ("plt.show()", 'show_figure(fig, run=run, name="a")', 'plot.finish(run, "a", alt="a plot")'):
        assert len(figure_problems(bad)) == 1


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_headings_of_pages_go_down_one_level_at_a_time(path):
    levels = [level for level, _ in pages.headings(path.read_text())]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(below <= above + 1 for above, below in zip(levels, levels[1:], strict=False))


# ---- the check of the built site ---------------------------------------------------------------------------
GOOD = """<!doctype html><html lang="en"><head><title>t</title><link rel="stylesheet" href="a.css">
<link rel="canonical" href="https://example.org/x"></head><body><h1 id="top">T</h1><input name="q"><h2>a</h2>
<img src="a.png" alt="a line"><a href="b.html#part">b</a><a href="https://example.org">out</a>
<a href="#top">up</a>
<table><tr><th>x</th></tr></table></body></html>"""
OTHER = '<html lang="en"><title>b</title><h1 id="part">B</h1><input name="q"></html>'


@pytest.fixture
def site(tmp_path):
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text(OTHER)
    (tmp_path / "a.css").write_text("p { color: red }")
    (tmp_path / "a.png").touch()
    return tmp_path


def test_a_good_site_passes(site):
    assert check.check_site(site) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('href="a.css"', 'href="https://cdn.example/a.css"', "from another host"),
        ('href="a.css"', 'href="//cdn.example/a.css"', "from another host"),
        ('src="a.png"', 'src="http://cdn.example/a.png"', "from another host"),
        ('src="a.png"', 'src="a.png" srcset="//cdn.example/a.png 2x"', "from another host"),
        ("<h2>", '<script src="https://cdn.example/a.js"></script><h2>', "from another host"),
        ("<h2>", "<style>@import 'https://cdn.example/a.css';</style><h2>", "from another host"),
        ("<h2>", '<p style="background: url(https://cdn.example/a.png)"></p><h2>', "from another host"),
        ('src="a.png"', 'src="b.png"', "b.png, which is not there"),
        ('alt="a line"', "", "no alt text"),
        ('alt="a line"', 'alt=" "', "no alt text"),
        ("b.html#part", "c.html", "c.html, which is not there"),
        ("b.html#part", "b.html#whole", "no such anchor"),
        ('"#top"', '"#bottom"', "no such anchor"),
        ("<th>x</th>", "<td>x</td>", "a table has no head"),
        ("<h2>", "<h3>", "jumps from level 1 to 3"),
        ("<h2>", "<h1>", "2 titles"),
        ("<h2>", '<h2 id="top">', "stands 2 times"),
        ("<h2>", '<p role="heading">x</p><h2>', "have no level"),
        ("<h2>", "<pre>x</pre><h2>", "reached by keyboard"),
        (' lang="en"', "", "no language"),
        ("<title>t</title>", "", "no title"),
        ('<input name="q">', "", "no search field"),
    ],
)
def test_the_check_finds_what_is_wrong(site, old, new, says):
    assert old in GOOD
    (site / "a.html").write_text(GOOD.replace(old, new, 1))
    problems = check.check_site(site)
    assert len(problems) == 1 and problems[0].startswith("a.html: ") and says in problems[0]


def test_the_check_reads_style_sheets_and_refuses_an_empty_folder(site, tmp_path, capsys, monkeypatch):
    (site / "a.css").write_text("@font-face { src: url(https://cdn.example/f.woff2) }")
    assert check.check_site(site) == ["a.css: it loads https://cdn.example/f.woff2 from another host"]
    monkeypatch.setattr("sys.argv", ["check.py", str(site)])
    assert check.main() == 1 and "f.woff2" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert "holds no page" in check.check_site(tmp_path / "empty")[0]


# ---- the command -------------------------------------------------------------------------------------------


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "precious").touch()
    done = subprocess.run(
        ["bash", ROOT / "environment/site.sh", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (
        done.returncode == 1 and "holds something else than a site" in done.stderr and "next:" in done.stderr
    )
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


# ---- what the site makes of the sources --------------------------------------------------------------------


def test_links_to_notebooks_lead_to_the_recorded_ones():
    text = "[a](00_environment.ipynb#1--the-machine), [b](00_environment.ipynb#no-such), [c](glossary.md)"
    recorded = "recorded/cpu/00_environment/00_environment.ipynb"
    assert pages.to_recorded(text, NOTEBOOKS, NOTEBOOKS / "recorded/cpu") == (
        f"[a]({recorded}#1--the-machine), [b]({recorded}), [c](glossary.md)"
    )


def test_links_to_folders_become_links_to_their_readme_or_plain_words():
    text = "[tests](tests/gpu) [runs](notebooks/recorded/gpu/) ![p](notebooks) [r](README.md)"
    assert pages.without_folder_links(text, ROOT).startswith("[tests](tests/gpu/README.md) ")
    assert pages.without_folder_links(text, ROOT).endswith("`runs` ![p](notebooks) [r](README.md)")


def test_pictures_of_recorded_notebooks_have_alt_text():
    for path in (NOTEBOOKS / "recorded/cpu").glob("*/*.ipynb"):
        alts = pages.alt_texts(json.loads(path.read_text()))
        assert all(len(alt.split()) >= 5 for alt in alts.values()), path.stem
