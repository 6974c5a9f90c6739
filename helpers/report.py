"""report.html: what a series of runs left behind, in one file that asks no other host for anything.

Pictures are inlined, the alt text of each comes from the PNG itself (helpers/figures.py puts it
there).
"""

from __future__ import annotations

import base64
import html
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.results import METRICS, METRICS_FILE, ResultError, read_metrics, read_series_file, write_atomically

REPORT_FILE = "report.html"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
STYLE = """
:root { color-scheme: light dark; --line: #8888; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --bad: #ffb4ab; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-size: .92rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem; text-align: left; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
.bad { color: var(--bad); font-weight: 600; }
figure { margin: 1.2rem 0; } figcaption { font-size: .9rem; }
img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
pre { white-space: pre-wrap; }
"""


def write_report(runs: Path | str) -> Path:
    """Write report.html into runs/<profile> from the notebooks' folders and return its path.

    Raises ResultError when the folder holds no run at all.
    """
    runs = Path(runs)
    series = _read_series(runs)
    folders = _notebook_folders(runs, series)
    if not folders:
        raise ResultError(
            f"{runs} holds no results. Run the series: python -m helpers.series run --profile {runs.name}"
        )
    records = {folder.name: _record(folder) for folder in folders}
    body = [_head(runs.name, series), _summary(folders, records, series)]
    body += [
        _section(folder, records[folder.name], series["notebooks"].get(folder.name, {})) for folder in folders
    ]
    path = runs / REPORT_FILE
    write_atomically(path, _page(f"Results, profile {runs.name}", "\n".join(body)))
    return path


def _read_series(runs: Path) -> dict[str, Any]:
    """series.json with its notebooks as a mapping; empty when there is none or it is broken."""
    try:
        record = read_series_file(runs)
    except ResultError:
        return {"notebooks": {}}
    return record | {"notebooks": {entry["notebook"]: entry for entry in record["notebooks"]}}


def _notebook_folders(runs: Path, series: Mapping[str, Any]) -> list[Path]:
    if not runs.is_dir():
        return []
    found = [p for p in sorted(runs.iterdir()) if p.is_dir() and p.name[:2].isdigit()]
    return [p for p in found if p.name in series["notebooks"] or (p / METRICS_FILE).exists()]


def _record(folder: Path) -> dict[str, Any] | str:
    """The notebook's record, or the sentence that says why there is none."""
    try:
        return read_metrics(folder / METRICS_FILE)
    except ResultError as error:
        return str(error)


def _page(title: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        # an explicit promise to the reader's browser: nothing is loaded from anywhere
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n</body>\n</html>\n"
    )


def _head(profile: str, series: Mapping[str, Any]) -> str:
    facts = [f"<h1>Results of the series, profile {html.escape(profile)}</h1>"]
    if "command" in series:
        facts.append(
            f"<p>Last run: <code>{html.escape(str(series['command']))}</code>, {series.get('seconds', 0):.0f} s, "
            f"commit <code>{html.escape(str(series.get('commit', 'unknown'))[:18])}</code>, "
            f"processes left: {series.get('processes_left', 'unknown')}.</p>"
        )
    return "\n".join(facts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """An HTML table; cells are HTML already, `numbers` names the right-aligned columns."""

    def cells(tag: str, row: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        kinds = [' class="number"' if i in numbers else "" for i in range(len(row))]
        return "".join(f"<{tag}{scope}{kind}>{cell}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _summary(folders: Sequence[Path], records: Mapping[str, Any], series: Mapping[str, Any]) -> str:
    rows = []
    for folder in folders:
        entry, record = series["notebooks"].get(folder.name, {}), records[folder.name]
        finished = isinstance(record, dict)
        status = entry.get("status", "ok" if finished else "failed")
        seconds = entry.get("seconds", record["seconds"] if finished else None)
        rows.append([
            f'<a href="#{html.escape(folder.name)}">{html.escape(folder.name)}</a>',
            html.escape(status) if status == "ok" else f'<span class="bad">{html.escape(status)}</span>',
            "" if seconds is None else f"{seconds:.1f}",
            f"{entry['peak_pss_gib']:.2f}" if entry.get("peak_pss_gib") else "",
            str(len(record["metrics"])) if finished else "0",
        ])  # fmt: skip
    head = ["notebook", "status", "seconds", "peak memory (GiB)", "metrics"]
    return f"<h2>Overview</h2>\n{_table(head, rows, (2, 3, 4))}"


def _section(folder: Path, record: dict[str, Any] | str, entry: Mapping[str, Any]) -> str:
    name = html.escape(folder.name)
    parts = [f'<section id="{name}">', f"<h2>{name}</h2>"]
    if entry.get("problem"):
        parts.append(f'<pre class="bad">{html.escape(entry["problem"])}</pre>')
    if isinstance(record, dict):
        parts += [_origin(record), _metrics_table(record)]
    elif not entry.get("problem"):
        parts.append(f'<p class="bad">{html.escape(record)}</p>')
    if entry.get("peak_processes"):
        parts.append(_memory(entry))
    parts += [
        _figure(path) for path in sorted(folder.glob("*.png"), key=lambda p: (p.stat().st_mtime, p.name))
    ]
    return "\n".join([*parts, "</section>"])


def _origin(record: Mapping[str, Any]) -> str:
    machine = record["hardware"]
    gpus = f", {', '.join(machine['gpus'])}" if machine.get("gpus") else ""
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    text = (
        f"Seed {record['seed']}, commit {record['commit'][:18]}, {machine.get('cpu')} ({machine.get('cores')} cores, "
        f"{machine.get('memory_gib')} GiB){gpus}. {packages}. Again: {record['command']}"
    )
    return f"<p>{html.escape(text)}</p>"


def _metrics_table(record: Mapping[str, Any]) -> str:
    rows = []
    for name, value in record["metrics"].items():
        metric = METRICS.get(name)
        meaning, healthy = (
            (metric.meaning, metric.range_text()) if metric else ("not registered any more", "")
        )
        number = (
            f"{value:.6g}"
            if metric is None or metric.healthy(value)
            else f'<span class="bad">{value:.6g} !</span>'
        )
        unit = record["units"].get(name, "")
        rows.append(
            [
                f"<code>{html.escape(name)}</code>",
                number,
                *map(html.escape, (unit, meaning, healthy)),
            ]
        )
    return _table(["metric", "value", "unit", "what it says", "healthy"], rows, (1,)) if rows else ""


def _memory(entry: Mapping[str, Any]) -> str:
    rows = [[html.escape(p["process"]), str(p["pss_mib"])] for p in entry["peak_processes"]]
    title = f"<h3>Memory at its peak: {entry.get('peak_pss_gib', 0):.2f} GiB</h3>"
    return title + _table(["largest processes", "MiB (PSS)"], rows, (1,))


def _figure(path: Path) -> str:
    png = path.read_bytes()
    alt = html.escape(png_description(png) or path.stem, quote=True)
    data = base64.b64encode(png).decode()
    table = path.with_suffix(".csv")
    numbers = f" Numbers: <code>{html.escape(table.name)}</code>." if table.exists() else ""
    return (
        f'<figure><img alt="{alt}" src="data:image/png;base64,{data}">'
        f"<figcaption><strong>{html.escape(path.stem)}.</strong> {alt}{numbers}</figcaption></figure>"
    )


def png_description(png: bytes) -> str:
    """The Description text of a PNG, "" without one. Source: PNG specification, chunks tEXt and
    iTXt."""
    position = len(PNG_SIGNATURE)
    while png.startswith(PNG_SIGNATURE) and position + 8 <= len(png):
        length, kind = struct.unpack(">I4s", png[position : position + 8])
        chunk = png[position + 8 : position + 8 + length]
        if kind == b"tEXt" and chunk.startswith(b"Description\0"):
            return chunk.split(b"\0", 1)[1].decode("latin-1")
        if kind == b"iTXt" and chunk.startswith(
            b"Description\0\0"
        ):  # uncompressed; two more empty or short fields
            return chunk.split(b"\0", 5)[-1].decode("utf-8", errors="replace")
        position += length + 12
    return ""
