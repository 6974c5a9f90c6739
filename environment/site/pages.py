"""What the site makes of Markdown and notebooks before Sphinx reads them. Uses the standard library only."""

from __future__ import annotations

import json
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]+)?\)")


def slug(heading: str) -> str:
    """The anchor that GitHub, and MyST with it, gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(text: str) -> Iterator[tuple[int, str]]:
    """(level, text) of each Markdown heading outside fenced code."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        match = re.match(r"(#{1,6})\s+(\S.*)", line)
        if match and not fenced:
            yield len(match[1]), match[2].strip()


def notebook_text(path: Path) -> str:
    """The Markdown of a notebook's cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a Markdown file or a notebook."""
    text = notebook_text(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    return {slug(heading) for _, heading in headings(text)}


def sections(text: str, by_slug: bool = False) -> dict[str, str]:
    """Heading -> the text up to the next heading; of level 3 alone, or of every level by its slug."""
    found: dict[str, str] = {}
    parts = re.split(r"^(#{1,6}) +(.+)$", text, flags=re.M)
    for marks, heading, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        if by_slug:
            found.setdefault(slug(heading), f"{heading}\n{body}")
        elif marks == "###":
            found[heading.strip()] = body
    return found


def mention(term: str) -> re.Pattern[str]:
    """Finds a term of the glossary in running text, also in the plural or across a line break.

    A name that is written in capitals must be written so; of "k1, k2, k3" each counts.
    """
    words = (re.split(r"[\s-]+", form) for form in FORMS.get(term, (term,)))
    forms = "|".join(r"[\s-]+".join(map(re.escape, form)) for form in words)
    flags = 0 if term.isupper() or re.search(r"[a-z][A-Z]|[A-Z]{2}", term) else re.IGNORECASE
    return re.compile(rf"(?<![\w-])(?:{forms})(?:s|ed|es)?(?![\w])", flags)


FORMS = {  # how the notebooks write a term, where that is not the term itself
    "k1, k2, k3": ("k1", "k2", "k3", "k_1", "k_2", "k_3"),
    "Attention sink": ("sink", "attention sink"),
    "Weight sync": ("sync", "weight sync"),
    "Master weights": ("master weights", "master copy"),
    "Adam moments": ("Adam moment", "moments"),
    "Bridge": ("bridge", "Megatron-Bridge"),
    "Sliding window": ("sliding window", "slide", "window"),
    "Clip": ("clip", "clipped", "clipping"),
    "Placement group": ("placement group", "GrpoCluster"),
    "Rollout": ("rollout", "roll out"),
    "Logprob": ("logprob", "log-probability"),
}


def to_recorded(text: str, folder: Path, recorded: Path) -> str:
    """Markdown of a page in `folder` whose links to notebooks NN_name.ipynb lead to their recorded runs.

    A heading that the recorded run does not have yet is left out of its link.
    """

    def led(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        path = recorded / Path(target).stem / Path(target).name
        if not re.fullmatch(r"\d\d_\w+\.ipynb", target) or not path.exists():
            return match[0]
        kept = anchor if anchor[1:] in anchors(path) else ""
        return f"[{words}]({os.path.relpath(path, folder)}{kept})"

    return LINK.sub(led, text)


def without_folder_links(text: str, folder: Path) -> str:
    """Markdown whose links to folders point to the folder's README, or are plain words where it has none."""

    def mended(match: re.Match[str]) -> str:
        target = folder / match[2]
        if not target.is_dir():
            return match[0]
        readme = f"{match[2].rstrip('/')}/README.md"
        return f"[{match[1]}]({readme})" if (folder / readme).exists() else f"`{match[1].strip('`')}`"

    return LINK.sub(mended, text)


def alt_texts(notebook: dict) -> dict[str, str]:
    """Hash of a picture's bytes -> its alt text. MyST-NB names a picture's file after that hash."""
    found = {}
    for output in (o for cell in notebook["cells"] for o in cell.get("outputs", ())):
        if "image/png" in output.get("data", {}):
            code = "".join(output["data"]["image/png"])
            found[sha256(b64decode(code)).hexdigest()] = (
                output.get("metadata", {}).get("image/png", {}).get("alt", "")
            )
    return found
