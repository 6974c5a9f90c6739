"""Figures that everyone can read, progress that a stored notebook can hold.

Colours are Okabe and Ito's colour-blind-safe set, always together with markers. Every figure has a
text that
says what it shows, and the CSV behind it.
Source of the colours: Okabe and Ito, "Color Universal Design" (2002), in matplotlib's `okabe_ito`
sequence.
"""

from __future__ import annotations

import html
import io
import logging
import os
import sys
import time
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from helpers.results import file_stem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from helpers.results import NotebookRun

log = logging.getLogger(__name__)
T = TypeVar("T")

DPI = 110
MAX_SIDE_PIXELS = 1300
MAX_PNG_BYTES = 300_000
# Yellow comes last: it is the one colour of the set that is weak on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


class FigureError(ValueError):
    """A figure lacks what a reader needs; the message says what to add."""


def use_style() -> None:
    """Set matplotlib's defaults for the whole notebook: colours with markers, readable sizes.

    The background stays opaque white: the same picture is then readable in a light and in a dark
    JupyterLab,
    where a transparent one would lose its black text.
    """
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS) + cycler(marker=MARKERS),
            "lines.markersize": 4.5,
            "lines.linewidth": 1.6,
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.labelsize": 11,
            "legend.fontsize": 10,
            "legend.framealpha": 0.9,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "image.cmap": "cividis",
            "figure.figsize": (7.0, 3.8),
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
        }
    )


def show_figure(
    fig: Figure,
    alt: str,
    run: NotebookRun,
    name: str,
    data: Mapping[str, Iterable[Any]] | None = None,
) -> None:
    """Save a figure as <name>.png, with its data as <name>.csv, in the run folder, and show it.

    alt: one or two sentences that tell someone who cannot see the picture what it shows.
    data: columns of one length behind the picture.  The figure is closed afterwards.
    Raises FigureError when alt is empty.
    """
    png = _save(fig, alt, run, name, data)
    _show(png.read_bytes(), alt)


def paired_stacks(
    left: Mapping[str, Mapping[str, float]], right: Mapping[str, Mapping[str, float]], scale: float, ylabel: str
) -> Figure:
    """Two stacked bars for each key of `left`: predicted (hatched) and measured. Values are divided by `scale`.

    An item has one colour in both bars: shades of blue for the trainer's, of orange for the server's, of grey for the rest.
    Keys of `right` beyond those of `left` are left out.
    """
    import matplotlib.pyplot as plt

    items = list(dict.fromkeys(i for part in (left, right) for stack in part.values() for i in stack))
    items.sort(key=_family)
    palette = _shades(items)
    fig, ax = plt.subplots(figsize=(10, 4.6))
    for place, key in enumerate(left):
        for shift, stack, hatch in ((-0.21, left[key], "///"), (0.21, right.get(key, {}), "")):
            bottom = 0.0
            for item, colour in zip(items, palette):
                height = stack.get(item, 0.0) / scale
                ax.bar(place + shift, height, 0.4, bottom, color=colour, hatch=hatch, edgecolor="w", linewidth=0.4)
                bottom += height
    ax.set_xticks(range(len(left)), list(left), rotation=25, ha="right")
    ax.set_ylabel(ylabel)
    ax.set_title("left, hatched: predicted; right: measured", fontsize=10, loc="left")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in palette]
    fig.legend(handles, items, loc="outside right upper", fontsize=8)
    return fig


_FAMILIES = (("trainer", "Blues"), ("server", "Oranges"), ("", "Greys"))  # of an item: how it begins -> colour map


def _family(item: str) -> int:
    return next(i for i, (start, _) in enumerate(_FAMILIES) if item.startswith(start))


def _shades(items: Sequence[str]) -> list:
    """A colour for each item, from dark to light within its family."""
    import matplotlib.pyplot as plt

    colours = []
    for item in items:
        family = [other for other in items if _family(other) == _family(item)]
        shade = 0.85 - 0.6 * family.index(item) / max(len(family) - 1, 1)
        colours.append(plt.get_cmap(_FAMILIES[_family(item)][1])(shade))
    return colours


def _save(
    fig: Figure, alt: str, run: NotebookRun, name: str, data: Mapping[str, Iterable[Any]] | None
) -> Path:
    import matplotlib.pyplot as plt

    check_alt(alt, name)
    if data is not None:
        run.series(name, data)
    path = Path(run.folder) / f"{file_stem(name)}.png"
    path.write_bytes(png_bytes(fig, alt))
    plt.close(fig)  # else the inline backend shows the open figure a second time, without alt text
    return path


def check_alt(alt: str, name: str) -> None:
    """Refuse an empty alt text."""
    if not isinstance(alt, str) or not alt.strip():
        raise FigureError(
            f"figure {name!r} has no alt text. Pass alt='...' with one or two sentences that say what it shows, "
            "for readers who cannot see it."
        )


def png_bytes(fig: Figure, alt: str) -> bytes:
    """The figure as PNG, alt text in its Description chunk, at most MAX_SIDE_PIXELS wide and
    MAX_PNG_BYTES big.

    The resolution starts at DPI and falls until both limits hold: a notebook stays small enough to
    review.
    """
    dpi = min(DPI, int(MAX_SIDE_PIXELS / max(fig.get_size_inches())))
    while True:
        buffer = io.BytesIO()
        # no software version in the file: equal pictures give equal bytes
        fig.savefig(buffer, format="png", dpi=dpi, metadata={"Description": alt, "Software": None})
        if buffer.tell() <= MAX_PNG_BYTES or dpi <= 20:
            return buffer.getvalue()
        dpi = int(dpi * 0.85)


def _bundle(png: bytes, alt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Jupyter's data and metadata of one picture.

    Why HTML and PNG in one output: JupyterLab 4 and nbconvert's lab template drop the alt of
    image/png (read in
    JupyterLab 4.6 and nbconvert 7.17), but both prefer text/html, where <img alt> holds. image/png
    with its alt
    metadata stays beside it for viewers that take no data: address in HTML, text/plain for those
    without pictures.
    """
    code = b64encode(png).decode()
    page = f'<img alt="{html.escape(alt)}" style="max-width:100%" src="data:image/png;base64,{code}">'
    return {"text/html": page, "image/png": code, "text/plain": alt}, {"image/png": {"alt": alt}}


def _show(png: bytes, alt: str) -> None:
    if not _in_kernel():
        return
    from IPython.display import display

    data, metadata = _bundle(png, alt)
    display(data, metadata=metadata, raw=True)


def _in_kernel() -> bool:
    """Whether a Jupyter kernel runs this code (a plain script or test shows nothing)."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return hasattr(get_ipython(), "kernel")


def under_papermill() -> bool:
    """Whether the runner started this kernel: it sets PAPERMILL_RUN=1."""
    return os.environ.get("PAPERMILL_RUN") == "1"


class LivePlot:
    """A plot that grows while you watch, one panel a column.

        plot = LivePlot({"reward": "mean reward", "length": "completion length (tokens)"})
        for step in range(steps):
            ...
            plot.add(step, reward=0.4, length=11.5)
        plot.finish(run, "training", alt="Mean reward rises ...")

    columns: name -> axis label with its unit (or just names).  In JupyterLab the picture is
    replaced in place,
    at most once in `every_seconds`; under papermill only the finished picture is stored.
    """

    def __init__(
        self,
        columns: Mapping[str, str] | Sequence[str],
        xlabel: str = "step",
        every_seconds: float = 1.0,
    ) -> None:
        self.labels = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
        if not self.labels:
            raise FigureError("LivePlot needs at least one column, for instance {'reward': 'mean reward'}")
        self.xlabel = xlabel
        self.every_seconds = every_seconds
        self.data: dict[str, list[float]] = {xlabel: [], **{name: [] for name in self.labels}}
        self._handle: Any = None
        self._drawn = 0.0

    def add(self, x: float, **values: float) -> None:
        """Append one point a column and redraw if it is time."""
        if set(values) != set(self.labels):
            raise FigureError(f"LivePlot wants the columns {sorted(self.labels)}, got {sorted(values)}")
        self.data[self.xlabel].append(float(x))
        for name, value in values.items():
            self.data[name].append(float(value))
        due = time.monotonic() - self._drawn >= self.every_seconds
        if due and _in_kernel() and not under_papermill():
            self._redraw()

    def figure(self) -> Figure:
        """The figure of what was added so far; panels stand side by side."""
        import matplotlib.pyplot as plt

        count = len(self.labels)
        fig, axes = plt.subplots(1, count, figsize=(max(7.0, 4.2 * count), 3.4), squeeze=False)
        for number, (axis, (name, label)) in enumerate(zip(axes[0], self.labels.items(), strict=True)):
            style = {
                "color": COLOURS[number % len(COLOURS)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            sparse = max(
                1, len(self.data[name]) // 20
            )  # a marker on each of a hundred points hides the curve
            axis.plot(self.data[self.xlabel], self.data[name], markevery=sparse, **style)
            axis.set_xlabel(self.xlabel)
            axis.set_ylabel(label)
        return fig

    def _redraw(self) -> None:
        import matplotlib.pyplot as plt
        from IPython.display import display

        fig = self.figure()
        self._display(png_bytes(fig, f"{', '.join(self.labels)} so far"), display)
        plt.close(fig)
        self._drawn = time.monotonic()

    def _display(self, png: bytes, display: Any, alt: str = "plot in progress") -> None:
        data, metadata = _bundle(png, alt)
        if self._handle is None:
            self._handle = display(data, metadata=metadata, raw=True, display_id=True)
        else:
            self._handle.update(data, metadata=metadata, raw=True)

    def finish(self, run: NotebookRun, name: str, alt: str) -> None:
        """Draw the last state, save PNG and CSV like show_figure, and leave one output with its
        alt text."""
        png = _save(self.figure(), alt, run, name, self.data)
        if _in_kernel():
            from IPython.display import display

            self._display(png.read_bytes(), display, alt)


def progress(iterable: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Loop with a progress bar in JupyterLab, and with one closing line under papermill.

    A stored bar is hundreds of carriage returns that no reader wants; the closing line keeps what
    matters:
    how many, in how many seconds.
    """
    if under_papermill():
        yield from _one_line(iterable, label)
        return
    if find_spec("ipywidgets") is not None:  # without it tqdm.auto warns about IProgress
        from tqdm.auto import tqdm
    else:
        from tqdm import tqdm
    yield from tqdm(iterable, desc=label or None, total=total)


def _one_line(iterable: Iterable[T], label: str) -> Iterator[T]:
    start, count = time.monotonic(), 0
    try:
        for item in iterable:
            count += 1
            yield item
    finally:  # also after a break in the loop
        sys.stdout.write(f"{label or 'done'}: {count} in {time.monotonic() - start:.1f} s\n")
