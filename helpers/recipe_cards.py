"""Recipe cards: other projects' gpt-oss recipes, flag by flag, in the words of our profile.

    python -m helpers.recipe_cards            # write notebooks/cards/*.md anew
    python -m helpers.recipe_cards check      # say which of them is out of date

A card is notebooks/cards/<name>.toml: its sources, one row a flag, and the mistakes that were found in it.
A row names our setting and the value that means the same, or says why there is none. So a card is also a
profile: `card_profile(card)`. The markdown beside it is rendered from it, and mbridge.md from the recorded
bench. Imports no torch.
"""

from __future__ import annotations

import csv
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers.messages import one_line
from helpers.profiles import PROJECT_ROOT, Profile, load_profile

FOLDER = PROJECT_ROOT / "notebooks" / "cards"
BENCH = PROJECT_ROOT / "tests" / "bench" / "recorded" / "mbridge_vs_megatron_bridge.csv"
NOTHING = "None"  # TOML has no null


class CardError(ValueError):
    """A card that cannot be read; the message names the file and the row."""


@dataclass(frozen=True)
class Row:
    """One flag (or a few that go together). ours: our dotted setting, "" for none, and then the note says
    why.

    set: its value that means the same. has: instead of `set`, members of a tuple setting. other: the flag's
    second name.
    """

    key: str
    value: str
    other: str = ""
    ours: str = ""
    set: object = ""
    has: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Mistake:
    """What is wrong there, what comes of it, what we do, and the tests ("file::test") that show it."""

    what: str
    effect: str
    ours: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    what: str
    repository: str
    path: str
    commit: str


@dataclass(frozen=True)
class Card:
    """profile: the one that the settings of the rows are laid over, or already are in."""

    name: str
    title: str
    profile: str
    about: str
    columns: tuple[str, str, str]
    sources: tuple[Source, ...]
    groups: tuple[tuple[str, tuple[Row, ...]], ...]
    mistakes: tuple[Mistake, ...]

    @property
    def rows(self) -> Iterator[Row]:
        return (row for _, rows in self.groups for row in rows)


# --- reading ------------------------------------------------------------------------------------
def card_names(folder: Path = FOLDER) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


def read_card(name: str, folder: Path = FOLDER) -> Card:
    """The card `name`. Raises CardError for a file that is missing or no card."""
    path = folder / f"{name}.toml"
    try:
        content = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise CardError(
            f"there is no card {name!r}; cards: {', '.join(card_names(folder)) or 'none'}"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise CardError(f"{path.name} is no TOML: {error}") from error
    try:
        return _card(name, content)
    except (KeyError, TypeError) as error:
        raise CardError(f"{path.name}: a part of it has a missing or unknown field ({error})") from error


def _card(name: str, content: dict) -> Card:
    groups = tuple((group["name"], tuple(_row(row) for row in group["rows"])) for group in content["group"])
    mistakes = (Mistake(**{**m, "tests": tuple(m["tests"])}) for m in content.get("mistake", ()))
    sources = (Source(**source) for source in content["source"])
    plain = {key: content[key] for key in ("title", "profile")}
    columns = tuple(content["columns"])
    return Card(name, about=content["about"].strip(), columns=columns, sources=tuple(sources), groups=groups,
                mistakes=tuple(mistakes), **plain)  # fmt: skip


def _row(fields: dict) -> Row:
    row = Row(**{**fields, "has": tuple(fields.get("has", ()))})
    return row if row.set != NOTHING else Row(**{**vars(row), "set": None})


# --- a card as a profile ------------------------------------------------------------------------
def card_settings(card: Card) -> dict[str, object]:
    """{our dotted setting: value} of the card's rows. Raises CardError when two rows want different values.

    >>> card_settings(read_card("verl_4394"))["batch.group_size"]
    4
    """
    settings: dict[str, object] = {}
    for row in card.rows:
        if not row.ours:
            continue
        value = settings.get(row.ours, ()) + row.has if row.has else row.set
        if not row.has and settings.setdefault(row.ours, value) != value:
            raise CardError(
                f"{card.name}: {row.key} wants {row.ours} = {value!r}, and another row {settings[row.ours]!r}"
            )
        settings[row.ours] = value
    return settings


def card_profile(card: Card, **changes) -> Profile:
    """The profile that the card names with the card's settings in it, and `changes` of yours (as for
    load_profile).

    Raises ValueError for a setting that the profile does not have or that contradicts another one.
    """
    return load_profile(card.profile, **{**card_settings(card), **changes})


def setting(profile: Profile, dotted: str) -> object:
    """The value of a dotted setting. Raises AttributeError for one that is not there.

    >>> setting(load_profile("cpu"), "batch.prompts")
    32
    """
    value: object = profile
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def card_problems(card: Card) -> list[str]:
    """Rows that name no setting of ours, or another value than the profile's, or do not say why; [] for a
    sound card.
    """
    problems, profile = [], card_profile(card)
    for row in card.rows:
        if not row.ours:
            problems += [] if row.note else [f"{row.key}: none of ours, and no reason"]
            continue
        present = setting(profile, row.ours)
        if not (_holds(present, row.has) if row.has else present == row.set):
            problems.append(f"{row.key}: {row.ours} is {present!r}, the card says {row.has or row.set!r}")
    return problems


def _holds(present: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether `wanted` stands in `present`, in its order and in one piece."""
    starts = range(len(present) - len(wanted) + 1)
    return any(present[start : start + len(wanted)] == wanted for start in starts)


def missing_tests(card: Card, root: Path = PROJECT_ROOT) -> list[str]:
    """Tests that a mistake names and that do not exist."""
    named = [test for mistake in card.mistakes for test in mistake.tests]
    return [test for test in named if not _exists(root, *test.split("::"))]


def _exists(root: Path, file: str, test: str) -> bool:
    path = root / file
    return (
        path.is_file() and re.search(rf"^def {re.escape(test)}\(", path.read_text(), re.MULTILINE) is not None
    )


# --- markdown -----------------------------------------------------------------------------------
def render_card(card: Card) -> str:
    """The card as markdown: where it is from, a table a group, and the mistakes."""
    parts = [f"# {card.title}", card.about]
    lines = [f"- {s.what}: {s.repository}, `{s.path}`, commit {s.commit}" for s in card.sources]
    parts.append("\n".join(["Read from:", "", *lines]))
    for name, rows in card.groups:
        parts += [f"## {name}", table((*card.columns, "ours", "our value", "note"), map(_cells, rows))]
    if card.mistakes:
        cells = ([m.what, m.effect, m.ours, "<br>".join(f"`{t}`" for t in m.tests)] for m in card.mistakes)
        parts += ["## Mistakes found in it", table(("what", "what comes of it", "here", "shown by"), cells)]
    return "\n\n".join([*parts, _made(f"notebooks/cards/{card.name}.toml")]) + "\n"


def _cells(row: Row) -> list[str]:
    if not row.ours:
        return [code(row.key), row.value, code(row.other), "none", "", row.note]
    value = " ".join(row.has) if row.has else row.set
    return [code(row.key), row.value, code(row.other), code(row.ours), code(str(value)), row.note]


def code(text: str) -> str:
    return f"`{text}`" if text and text != "-" else text


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table; a bar inside a cell is escaped.

    >>> print(table(["a", "b"], [["1", "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(
        "|" + "|".join(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines
    )


def _made(source: str) -> str:
    return f"Made from {source} by `python -m helpers.recipe_cards`; change that and not this."


def render_index(cards: Iterable[Card]) -> str:
    """The folder's README: which card is for whom."""
    cells = (
        [f"[{c.title}]({c.name}.md)", str(_rows_with(c, True)), str(_rows_with(c, False))] for c in cards
    )
    parts = [
        "# Recipe cards",
        "Other projects' gpt-oss recipes in the words of `helpers/profiles.py`, flag by flag, so that you "
        "find your knob. A row without one says why. Every card is checked: its settings exist, and together "
        "they are a profile that loads.",
        table(("card", "rows with a setting of ours", "rows without"), cells),
        "[mbridge beside Megatron-Bridge](mbridge.md): what verl's `vanilla_mbridge=True` would do with the "
        "same checkpoint, measured.",
        "From a card to a run (its layout may want more GPUs than you have; then it is refused and says so):",
        "```python\nfrom helpers.recipe_cards import card_profile, read_card\n\n"
        'settings = card_profile(read_card("miles"), **{"batch.prompts": 16})\n```',
    ]
    return "\n\n".join([*parts, _made("notebooks/cards/*.toml")]) + "\n"


def _rows_with(card: Card, ours: bool) -> int:
    return sum(bool(row.ours) is ours for row in card.rows)


# --- mbridge beside Megatron-Bridge -------------------------------------------------------------
def read_bench(path: Path = BENCH) -> tuple[str, dict[str, dict[str, dict[str, str]]]]:
    """(conditions, {side: {check: row}}) of the recorded comparison. Raises CardError for a file that is
    none.
    """
    lines = path.read_text().splitlines()
    if not lines or not lines[0].startswith("# "):
        raise CardError(f"{path.name} does not say where it was measured; run tests/bench/{path.stem}.py")
    sides: dict[str, dict[str, dict[str, str]]] = {}
    for row in csv.DictReader(lines[1:]):
        sides.setdefault(row["side"], {})[row["check"]] = row
    return lines[0].removeprefix("# "), sides


def render_bench(path: Path = BENCH) -> str:
    """mbridge.md: the differences as one table, then what stopped mbridge, error by error."""
    conditions, sides = read_bench(path)
    longest_first = sorted(sides.values(), key=len, reverse=True)
    checks = list(dict.fromkeys(c for rows in longest_first for c in rows if not c.startswith("refused")))
    cells = [[check, *(_bench_cell(rows.get(check)) for rows in sides.values())] for check in checks]
    refused = [
        [side, check.removeprefix("refused: "), code(row["detail"]) or "works"]
        for side, rows in sides.items()
        for check, row in rows.items()
        if check.startswith("refused")
    ]
    parts = [_BENCH_HEAD, table(("", *sides), cells), "## What stopped it", _BENCH_STOPS]
    parts += [table(("", "what", "error"), refused), "## What differs, read in the code"]
    parts.append(table(("", "Megatron-Bridge 0.6.2", "mbridge, branch gpt-oss"), _BENCH_READ))
    source = path.relative_to(PROJECT_ROOT) if path.is_relative_to(PROJECT_ROOT) else path.name
    return "\n\n".join([*parts, f"Measured: {conditions}.", _made(str(source))]) + "\n"


def _bench_cell(row: dict[str, str] | None) -> str:
    if row is None:
        return "-"
    return f"{row['value']} ({row['detail']})" if row["detail"] else row["value"]


_BENCH_HEAD = """# mbridge beside Megatron-Bridge

verl has two bridges: `actor_rollout_ref.actor.megatron.vanilla_mbridge=False` is Megatron-Bridge, which
this course uses, and `True` (the default at commit b178a3cd) is mbridge. mbridge's release 0.15.1 and
its main branch (commit 10cb17f5) have no gpt-oss. Its branch `gpt-oss` (ISEEKYAN/mbridge, commit
606ddb90d1dc179363f2dd07356ed8c2aca80dcf) has, and verl's own gpt-oss script for Megatron asks for that
branch (verl release/v0.7.0, `recipe/dapo/test_dapo_gptoss_20b_megatron.sh`).

**In short: the branch moves every tensor rightly, in both directions and from MXFP4, and then computes
another model with them.** Its YaRN starts from 131072 positions instead of 4096, its window is one
token too wide, and it does not clamp the experts' activations at 7. With these three numbers put right
its logprobs are transformers' to 2e-6. The same YaRN number was corrected in NeMo (NeMo Speech issue
14686), the window in Megatron-Bridge (2656).

Both were given one tiny gpt-oss (profile cpu, noise on every tensor, float32, one rank, no
TransformerEngine). "logprob gap" is the largest difference to transformers, in nats, over 48 tokens
(three windows)."""

_BENCH_STOPS = """The versions of this project are newer than what the branch was written for: nothing
of mbridge builds a model with megatron-core 0.19.2 (mbridge issue 155, open). Each line was tried with
everything else out of the way; what had to be changed for the table above is in `adapted` of
tests/bench/mbridge_vs_megatron_bridge.py. The lines about fused permutation and local layers concern
machines without TransformerEngine only."""

_BENCH_READ = (  # what, Megatron-Bridge 0.6.2, mbridge's branch
    ("expert biases", "mapped with the weights, one fused tensor a layer", "the same"),
    ("gate and up", "rows in turn in the checkpoint, halves in Megatron; turned both ways", "the same"),
    (
        "sinks",
        "`softmax_offset`, marked as split by helpers/upstream_fixes.py",
        "gathered by name, marked by nobody: under TP a gradient norm counts the first rank's heads only",
    ),
    (
        "MXFP4",
        "de-quantised once for every expert of a fused tensor",
        "de-quantised once a fused tensor, to bfloat16; needs an index file",
    ),
    (
        "shape",
        "from config.json, sliding window included",
        "window 128, top-4 and expert width 2880 are constants; YaRN is one for all",
    ),
    ("dtype", "any", "bfloat16; float32 ends in a TypeError (`raise NotImplemented`)"),
    (
        "export of experts",
        "one fused tensor after the other",
        "the same, if they come in the order of TransformerEngine's grouped layer",
    ),
)


# --- files --------------------------------------------------------------------------------------
def rendered_files() -> dict[str, str]:
    """{file name: text} of everything that is rendered into the folder."""
    cards = [read_card(name) for name in card_names()]
    files = {f"{card.name}.md": render_card(card) for card in cards}
    return {**files, "mbridge.md": render_bench(), "README.md": render_index(cards)}


def stale_files(folder: Path = FOLDER) -> list[str]:
    """Names of files that are missing or not as they would be rendered now."""
    return list(_stale_texts(folder))


def _stale_texts(folder: Path) -> dict[str, str]:
    """{name: text as it would be rendered now} of the stale files."""
    present = {path.name: path.read_text() for path in folder.glob("*.md")}
    return {name: text for name, text in rendered_files().items() if present.get(name) != text}


def main(arguments: list[str], folder: Path = FOLDER) -> int:
    """Write the files, or with "check" name the stale ones and return 1."""
    stale = _stale_texts(folder)
    if arguments == ["check"]:
        print("\n".join(f"{name} is out of date: python -m helpers.recipe_cards" for name in stale))
        return int(bool(stale))
    if arguments:
        print(one_line(f"unknown arguments {arguments}; use none, or check"), file=sys.stderr)
        return 2
    for name, text in stale.items():
        (folder / name).write_text(text)
    print(f"written: {', '.join(stale) or 'nothing, all are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
