"""What must hold for every page of the built site: `python environment/site/check.py FOLDER` lists breaches.

- nothing is loaded from another host: scripts, styles, fonts, pictures, frames, forms
- every link inside the site leads to a file that is there, and to an anchor that is there
- every picture says what it shows, every table has a head, headings go down one level at a time
- every page has a language, a title and a search field, and no id twice

Uses the standard library only.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# element -> attributes that make a browser fetch something
LOADS = {
    "script": ("src",), "img": ("src", "srcset"), "source": ("src", "srcset"), "iframe": ("src",),
    "embed": ("src",), "audio": ("src",), "video": ("src", "poster"), "track": ("src",), "object": ("data",),
    "form": ("action",),
    "input": ("src",), "image": ("href", "xlink:href"), "use": ("href", "xlink:href"),
}  # fmt: skip
LINKS_THAT_LOAD = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "preconnect",
    "dns-prefetch",
    "modulepreload",
    "manifest",
}
IN_CSS = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")


@dataclass
class Page(HTMLParser):
    """What one page loads, links to and holds. alts: (source, alt or None); heads: header cells a table."""

    path: Path
    loads: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: Counter[str] = field(default_factory=Counter)
    headings: list[int] = field(default_factory=list)
    alts: list[tuple[str, str | None]] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    language: str = ""
    title: str = ""
    search: bool = False
    unlevelled: int = 0  # elements with the role of a heading and no level
    unreachable: int = 0  # code and outputs that may scroll and that the keyboard does not reach

    def __post_init__(self) -> None:
        super().__init__()
        self._open_tables: list[int] = []
        self._style = self._title = False
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._note_loads(tag, given)
        if "id" in given:
            self.ids[given["id"]] += 1
        if tag == "html":
            self.language = given.get("lang", "")
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "img":
            self.alts.append((given.get("src", "")[:60], given.get("alt")))
        elif re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        elif tag == "input" and given.get("name") == "q":
            self.search = True
        self.unlevelled += given.get("role") == "heading" and "aria-level" not in given
        self.unreachable += tag == "pre" and "tabindex" not in given
        self._note_tables(tag)
        self._style, self._title = tag == "style", self._title or tag == "title"

    def _note_loads(self, tag: str, given: dict[str, str]) -> None:
        for name in LOADS.get(tag, ()):
            if name in given:
                parts = given[name].split(",") if name == "srcset" else [given[name]]
                self.loads += [part.strip().split(" ")[0] for part in parts]
        if tag == "link" and LINKS_THAT_LOAD & set(given.get("rel", "").split()):
            self.loads.append(given.get("href", ""))
        self.loads += css_loads(given.get("style", ""))

    def _note_tables(self, tag: str) -> None:
        if tag == "table":
            self._open_tables.append(0)
        elif tag == "th" and self._open_tables:
            self._open_tables[-1] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "table" and self._open_tables:
            self.heads.append(self._open_tables.pop())
        self._style = self._style and tag != "style"
        self._title = self._title and tag != "title"

    def handle_data(self, data: str) -> None:
        if self._style:
            self.loads += css_loads(data)
        if self._title:
            self.title += data.strip()


def css_loads(text: str) -> list[str]:
    """What a style sheet makes a browser fetch."""
    return [a or b for a, b in IN_CSS.findall(text)]


def is_elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def check_site(folder: Path) -> list[str]:
    """One sentence a breach, the page's path in front; empty is good."""
    pages = {path.resolve(): Page(path) for path in sorted(folder.rglob("*.html"))}
    if not pages:
        return [f"{folder} holds no page: bash environment/site.sh"]
    problems = []
    for page in pages.values():
        name = page.path.relative_to(folder)
        found = [*page_problems(page), *load_problems(page.path, page.loads), *link_problems(page, pages)]
        problems += [f"{name}: {problem}" for problem in found]
    for sheet in sorted(folder.rglob("*.css")):
        found = load_problems(sheet, css_loads(sheet.read_text(encoding="utf-8")))
        problems += [f"{sheet.relative_to(folder)}: {problem}" for problem in found]
    return problems


def page_problems(page: Page) -> Iterator[str]:
    """What a page lacks for readers who do not see it, or not all of it."""
    for wanted, what in ((page.language, "language"), (page.title, "title"), (page.search, "search field")):
        if not wanted:
            yield f"it has no {what}"
    yield from (f"the id {name!r} stands {count} times" for name, count in page.ids.items() if count > 1)
    yield from (
        f"the picture {source} has no alt text" for source, alt in page.alts if not (alt or "").strip()
    )
    yield from ("a table has no head" for heads in page.heads if heads == 0)
    if page.unlevelled:
        yield f"{page.unlevelled} elements are called headings and have no level"
    if page.unreachable:
        yield f"{page.unreachable} blocks of code cannot be reached by keyboard"
    if page.headings.count(1) != 1:
        yield f"it has {page.headings.count(1)} titles (h1), needs one"
    for above, below in zip(page.headings, page.headings[1:], strict=False):
        if below > above + 1:
            yield f"a heading jumps from level {above} to {below}"


def load_problems(file: Path, loads: list[str]) -> Iterator[str]:
    """Addresses of other hosts, and files that are not there."""
    for address in loads:
        parts = urlsplit(address)
        if is_elsewhere(address):
            yield f"it loads {address} from another host"
        elif parts.path and not parts.scheme and not (file.parent / unquote(parts.path)).exists():
            yield f"it loads {address}, which is not there"


def link_problems(page: Page, pages: dict[Path, Page]) -> Iterator[str]:
    """Links inside the site whose file or anchor is missing."""
    for address in page.links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path.resolve()
        if not target.is_file():
            yield f"it links to {address}, which is not there"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
            yield f"it links to {address}: {target.name} has no such anchor"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    problems = check_site(folder)
    print("\n".join(problems) or f"{len(list(folder.rglob('*.html')))} pages checked: nothing amiss")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
