"""Figures: alt text everywhere, colours with markers, bounded size, nothing doubled."""

import re
import struct

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from helpers import figures  # noqa: E402
from helpers.figures import FigureError, LivePlot, progress, show_figure, use_style  # noqa: E402
from helpers.profiles import load_profile  # noqa: E402
from helpers.report import png_description  # noqa: E402
from helpers.results import NotebookRun  # noqa: E402


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("GRPO_RUNS", str(tmp_path))
    with matplotlib.rc_context():
        use_style()
        yield NotebookRun("04_grpo_math", load_profile("cpu"))
    plt.close("all")


def _line():
    fig, axis = plt.subplots()
    axis.plot([1, 2, 3])
    return fig


@pytest.mark.parametrize("alt", ["A line rises from 1 to 3.", 'Δ reward — größer als 0 <b>&"quoted"'])
def test_show_figure_saves_png_with_alt_and_csv(run, alt):
    show_figure(_line(), alt=alt, run=run, name="line", data={"y": [1, 2, 3]})
    assert png_description((run.folder / "line.png").read_bytes()) == alt
    assert (run.folder / "line.csv").read_text() == "y\n1\n2\n3\n"
    assert run.series_files == {"line": "line.csv"}
    assert plt.get_fignums() == [], "an open figure would be shown a second time"


@pytest.mark.parametrize("alt", ["", "  ", None])
def test_a_figure_without_alt_text_is_refused(run, alt):
    with pytest.raises(FigureError, match="'line' has no alt text"):
        show_figure(_line(), alt=alt, run=run, name="line")
    assert not (run.folder / "line.png").exists()


def test_lines_differ_in_colour_and_marker(run):
    _, axis = plt.subplots()
    lines = [axis.plot([0, 1])[0] for _ in range(8)]
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == 8


def test_png_size_is_capped(run):
    numpy = pytest.importorskip("numpy")
    fig, axis = plt.subplots(figsize=(30, 4))
    axis.imshow(numpy.random.default_rng(0).random((400, 3000)), aspect="auto")
    png = figures.png_bytes(fig, "noise")
    width, _ = struct.unpack(">II", png[16:24])
    assert width <= figures.MAX_SIDE_PIXELS and len(png) <= figures.MAX_PNG_BYTES


def test_equal_figures_give_equal_bytes(run):
    assert figures.png_bytes(_line(), "a") == figures.png_bytes(_line(), "a")


def test_the_bundle_carries_alt_for_nbconvert(run):
    nbconvert = pytest.importorskip("nbconvert")
    import nbformat.v4 as v4

    data, metadata = figures._bundle(figures.png_bytes(_line(), "a"), 'a "line" rises')
    output = v4.new_output("display_data", data=data, metadata=metadata)
    notebook = v4.new_notebook(cells=[v4.new_code_cell("x", outputs=[output])])
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    image = re.search(r"<img[^>]*data:image/png;base64[^>]*>", page).group()
    assert "alt=" in image and "line" in image.split("src=")[0] and "No description" not in page
    assert metadata["image/png"]["alt"] == data["text/plain"] == 'a "line" rises', "for other viewers"


def test_live_plot_keeps_all_points(run):
    plot = LivePlot({"reward": "mean reward", "length": "completion length (tokens)"})
    for step in range(3):
        plot.add(step, reward=step / 10, length=9 + step)
    plot.finish(run, "training", alt="Both rise.")
    assert (run.folder / "training.csv").read_text().splitlines()[1:] == [
        "0.0,0.0,9.0",
        "1.0,0.1,10.0",
        "2.0,0.2,11.0",
    ]
    assert png_description((run.folder / "training.png").read_bytes()) == "Both rise."


def test_live_plot_refuses_unknown_columns():
    with pytest.raises(FigureError, match="reward"):
        LivePlot(["reward"]).add(0, rewrad=1)
    with pytest.raises(FigureError, match="at least one"):
        LivePlot([])


def test_progress_leaves_one_line_under_papermill(monkeypatch, capsys):
    monkeypatch.setenv("PAPERMILL_RUN", "1")
    assert list(progress(range(300), "steps")) == list(range(300))
    out, err = capsys.readouterr()
    assert out.startswith("steps: 300 in ") and out.count("\n") == 1 and not err


def test_progress_shows_a_bar_elsewhere(monkeypatch, capsys):
    monkeypatch.delenv("PAPERMILL_RUN", raising=False)
    assert list(progress([1, 2], "steps")) == [1, 2]
    assert "IProgress" not in capsys.readouterr().err


def test_paired_stacks_keep_one_colour_an_item_and_their_heights():
    from helpers.figures import paired_stacks

    left = {"load": {"weights": 4.0, "cache": 2.0}, "step": {"weights": 4.0}}
    right = {"load": {"weights": 5.0, "rest": 1.0}, "other": {"weights": 9.0}}
    ax = paired_stacks(left, right, scale=2.0, ylabel="GB").axes[0]
    tops = {}
    for bar in ax.patches:
        centre = round(bar.get_x() + bar.get_width() / 2, 2)
        tops[centre] = max(tops.get(centre, 0), bar.get_y() + bar.get_height())
    assert tops == {-0.21: 3.0, 0.21: 3.0, 0.79: 2.0, 1.21: 0.0}
    assert [t.get_text() for t in ax.get_xticklabels()] == ["load", "step"]
    assert "left, hatched: predicted; right: measured" in ax.get_title(loc="left")
