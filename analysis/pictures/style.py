"""The look, the files and the file names that all pictures share."""

from math import ceil
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analysis.words import missing

FORMATS = ("png", "svg", "pdf")

# The width of a printed page between its margins, 18 cm, in inches.
PAGE_WIDTH = 18 / 2.54
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvsweep",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
}
# Tick labels that are too long to stand side by side.
TURNED: Any = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of that width and height in inches, whose parts make room for each other."""
    return Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))


def panels(figure: Figure, count: int, columns: int, **shared: Any) -> list[Axes]:
    """Add `count` panels in rows of `columns`; `shared` is for `Figure.subplots`."""
    axes = figure.subplots(ceil(count / columns), columns, squeeze=False, **shared).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    return list(axes[:count])


def tidy(axes: Axes, *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Draw a faint grid below the data and leave out the frame on top and on the right."""
    axes.grid(axis=grid, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def full_cache_level(axes: Axes, row: Any, label: str) -> None:
    """Draw the full cache's Pass@1 in percent as a dashed line over a band of its standard error."""
    level, error = 100 * row.pass_at_1, 0 if missing(row.se) else 100 * row.se
    axes.axhspan(level - error, level + error, color="0.25", alpha=0.1, linewidth=0)
    axes.axhline(level, color="0.25", linestyle="--", linewidth=0.9, label=label)


def save_figure(figure: Figure, directory: Path, name: str) -> dict[str, Path]:
    """Write a figure as PNG (200 dpi), SVG and PDF; the same figure gives the same bytes.

    Returns:
        The written path per format.
    """
    paths = {suffix: directory / f"{name}.{suffix}" for suffix in FORMATS}
    dates: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(STYLE):
        for suffix, path in paths.items():
            figure.savefig(path, metadata=dates[suffix])
            # The layout is the slow part. The first format computes it, and the other formats keep it.
            figure.set_layout_engine("none")
    return paths


# Okabe and Ito's colours, with indigo for their yellow, which is too light in print. Seven colours and eleven markers
# tell 77 policies apart; neighbours differ in both.
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#332288")
MARKERS = "osD^vPX<>ph"
