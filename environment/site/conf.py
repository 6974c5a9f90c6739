"""Sphinx's settings for the site, whose sources are the project's own files. Build: bash environment/site.sh

The recorded notebooks are shown as they ran: nothing is executed. No page asks another host for anything:
formulas are MathML, which browsers draw by themselves, and fonts are the reader's own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import pages
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

from helpers.recorded import recorded_label

log = logging.getLogger(__name__)

RECORDED = "notebooks/recorded/cpu"
LEARNERS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
RUNS = {path: ROOT / RECORDED / path.stem / path.name for path in LEARNERS}
NOTEBOOKS = [(run if run.exists() else path).relative_to(ROOT).as_posix() for path, run in RUNS.items()]
GLOSSARY = ROOT / "notebooks/glossary.md"
CONTENTS = {
    "Notebooks": [name.removesuffix(".ipynb") for name in NOTEBOOKS],
    "Look it up": [
        "notebooks/symptoms", "notebooks/glossary", "notebooks/cards/README", "tests/integration/README",
    ],
    "Set up and teach": [
        "environment/README", "environment/clusters", "environment/versions", "notebooks/teaching", "tests/gpu/README",
    ],
}  # fmt: skip
CARDS = sorted(
    p.relative_to(ROOT / "notebooks/cards").as_posix().removesuffix(".md")
    for p in (ROOT / "notebooks/cards").glob("*.md")
    if p.stem != "README"
)
TERMS = {
    term: pages.slug(term) for term in pages.sections(GLOSSARY.read_text(encoding="utf-8"))
}  # term -> anchor

project = "GRPO of gpt-oss"
author = "the authors of this project"
extensions = ["myst_nb"]
root_doc = "README"
language = "en"
include_patterns = [
    "README.md", *NOTEBOOKS, "notebooks/*.md", "notebooks/cards/*.md", "environment/*.md",
    "tests/*/README.md",
]  # fmt: skip
exclude_patterns = [".*", "runs", "build", "**/.ipynb_checkpoints", "tests/bench", "environment/site"]
nitpicky = True

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

html_theme = "furo"
html_title = "GRPO of gpt-oss, in notebooks"
html_static_path = ["static"]
templates_path = ["templates"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_sourcelink = html_copy_source = html_use_index = False
html_show_copyright = False
html_math_renderer = "mathml"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"


# --- what the sources lack as pages of a site ---------------------------------------------------------------


def read_source(app, docname: str, source: list[str]) -> None:
    """Add tables of contents and each notebook's label; links to notebooks lead to recorded runs."""
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        source[0] = labelled(json.loads(source[0]), path)
        return
    text = pages.to_recorded(source[0], path.parent, ROOT / RECORDED)
    source[0] = pages.without_folder_links(text, path.parent)
    if docname == root_doc:
        source[0] += "".join(toctree(names, caption) for caption, names in CONTENTS.items())
    elif docname == "notebooks/cards/README":
        source[0] += toctree(CARDS, "Cards")


def toctree(names: list[str], caption: str) -> str:
    return "\n\n```{toctree}\n:hidden:\n:caption: " + caption + "\n\n" + "\n".join(names) + "\n```\n"


def labelled(notebook: dict, path: Path) -> str:
    """The notebook's text with a note below its title: where it ran, and the file to run yourself."""
    first = notebook["cells"][0]
    title, _, rest = "".join(first["source"]).partition("\n")
    label = recorded_label("cpu", path.stem).replace("RECORDED, not run here: ", "")
    state = (
        f"This page is a recorded run: {label}."
        if label
        else "This notebook has no recorded run yet: it is shown without outputs."
    )
    note = f"{state} The file: [{path.name}](path:{path.name})."
    first["source"] = f"{title}\n\n:::{{note}}\n{note}\n:::\n{rest}"
    return json.dumps(notebook)


# --- alt text, and terms ------------------------------------------------------------------------------------


def finish_page(app, doctree) -> None:
    """Pictures get their alt text, a notebook's first mention of a term its link."""
    path = Path(app.env.doc2path(app.env.docname))
    known = {}
    if path.suffix == ".ipynb":
        known = pages.alt_texts(json.loads(path.read_text(encoding="utf-8")))
        link_terms(app, doctree)
    # MyST-NB 1.x leaves a picture's alt text in the output's metadata
    for image in doctree.findall(nodes.image):
        image["alt"] = image.get("alt") or known.get(Path(image["uri"]).stem, "")
        if not image["alt"]:
            log.warning("a picture without alt text: %s", image["uri"], location=app.env.docname)


def link_terms(app, doctree) -> None:
    """The first mention of each term of the glossary in running text becomes a link to its entry."""
    here = Path(app.env.doc2path(app.env.docname)).parent
    address = Path(os.path.relpath(GLOSSARY, here)).with_suffix(".html").as_posix()
    waiting = {term: pages.mention(term) for term in sorted(TERMS, key=len, reverse=True)}
    for text in list(doctree.findall(nodes.Text)):
        block = text.parent
        if isinstance(block, nodes.paragraph) and not isinstance(block.parent, nodes.note):
            block.replace(text, with_links(text, waiting, address))


def with_links(text: nodes.Text, waiting: dict, address: str) -> list[nodes.Node]:
    """A text cut at the terms that are still waiting for their first mention; those it holds wait no more."""
    found = {term: match for term, pattern in waiting.items() if (match := pattern.search(text))}
    parts, place = [], 0
    for term, match in sorted(found.items(), key=lambda item: item[1].start()):
        if match.start() < place:  # inside another term: a later mention will do
            continue
        del waiting[term]
        goal = f"{address}#{TERMS[term]}"
        link = nodes.reference("", match[0], refuri=goal, internal=True, classes=["term"])
        parts += [nodes.Text(text[place : match.start()]), link]
        place = match.end()
    return [*parts, nodes.Text(text[place:])]


# --- formulas, and what keyboards need ----------------------------------------------------------------------


def inline_math(translator, node) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(translator, node) -> None:
    translator.body.append(f'<div class="math" tabindex="0">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def reach_by_keyboard(app, pagename, templatename, context, doctree) -> None:
    """What may scroll sideways (code, outputs, wide tables) can be focused, so that arrow keys scroll it.

    Sphinx 9 calls the captions of the contents headings, without the level that screen readers need.
    """
    menu = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = menu.replace('role="heading"', 'role="heading" aria-level="2"')
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        context["body"] = body.replace('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper')


def start_page(app, error) -> None:
    """README.html is also index.html, which is what a server or a person opens."""
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")


def setup(app) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))
    app.connect("source-read", read_source)
    app.connect("doctree-read", finish_page)
    app.connect("html-page-context", reach_by_keyboard, priority=900)
    app.connect("build-finished", start_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
