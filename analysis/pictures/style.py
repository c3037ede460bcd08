"""The look, the files and the file names that all pictures share."""

from collections.abc import Iterable
from itertools import count
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle

from kvsweep.analysis import format
from kvsweep.base.errors import UserError
from kvsweep.base.files import replacing

FORMATS = ("png", "svg", "pdf")

STYLE: Any = {
    "font.family": "DejaVu Sans",
    **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), 8),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 7),
    "figure.titlesize": 9,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
    "svg.hashsalt": "kvsweep",
    "text.parse_math": False,
    "hatch.linewidth": 0.6,
}

# Red below zero and blue above it: colour-blind readers tell the two apart.
DIVERGING = "RdBu"

# Okabe and Ito's colours, with indigo for their yellow, which is too light in print. Seven colours and eleven markers
# tell 77 policies apart; neighbours differ in both.
LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#332288")
MARKERS = "osD^vPX<>ph"
# Letters of an inch of a figure's title, and of a note.
LARGE, SMALL = 14, 17
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)))


def check_map(name: str | None) -> None:
    """Raise a UserError if matplotlib has no colour map of that name."""
    if name is not None and name not in matplotlib.colormaps:
        raise UserError(f"--map {name} is no colour map of matplotlib: give one such as viridis, PuOr or RdYlGn.")


def new_figure(size: tuple[float, float]) -> Figure:
    """An empty figure of that width and height in inches, whose parts make room for each other."""
    return Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.06))


def wrapped(title: str, width: float, letters: int = LARGE) -> str:
    """A figure's title with line breaks where a line of so many letters an inch would be wider than `width` inches."""
    return "\n".join(fill(line, round(letters * width)) for line in title.splitlines())


def footnote(figure: Figure, text: str) -> None:
    """Write a note below the figure, in lines that fit."""
    figure.supxlabel(wrapped(text, figure.get_figwidth(), SMALL), fontsize=7, color="0.3")


def panels(
    width: float, count: int, columns: int, *, row: float, rest: float, most: float = np.inf, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels in rows of `columns`; `shared` is for `Figure.subplots`.

    `row` is the height of a row, at most `most` for all rows, and `rest` that of all else, in inches like `width`.
    """
    rows = ceil(count / columns)
    figure = new_figure((width, min(row * rows, most) + rest))
    axes = figure.subplots(rows, columns, squeeze=False, **shared).ravel()
    for unused in axes[count:]:
        unused.remove()
    return figure, list(axes[:count])


def tidy(axes: Axes, *, grid: Literal["x", "y", "both"] = "y") -> None:
    """Draw a faint grid below the data and leave out the frame on top and on the right."""
    axes.grid(axis=grid, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def percent_axis(axes: Axes) -> None:
    """End a vertical axis of percents at 0 and 100, with room for a marker beyond."""
    low, high = axes.get_ylim()
    low, high = max(low, -2.0), min(high, 102.0)
    axes.set_yticks([tick for tick in axes.get_yticks() if max(low, 0) <= tick <= min(high, 100)])
    axes.set_ylim(low, high)
    axes.spines["left"].set_bounds(max(low, 0), min(high, 100))


def percent_errors(rows: Any) -> tuple[Any, list[Any]]:
    """Scores in percent, and the lengths of their error bars to either side, which end at 0 and 100."""
    score, error = 100 * rows["pass_at_1"], 100 * rows["se"].fillna(0)
    return score, [np.minimum(error, score), np.minimum(error, 100 - score)]


def score_points(axes: Axes, x: Any, rows: Any, **look: Any) -> None:
    """Draw the rows' Pass@1 in percent at `x`, with their standard errors."""
    score, ends = percent_errors(rows)
    axes.errorbar(x, score, ends, **{"markersize": 4, "elinewidth": 0.7, **look})


def full_cache_level(axes: Axes, rows: pd.DataFrame, label: str = "full cache") -> None:
    """Draw the full cache's Pass@1 in percent, if the rows have one, as a dashed line over a band of its error."""
    for full in format.rows(rows[rows["policy"] == "full"].head(1)):
        level, error = 100 * full.pass_at_1, 0 if format.missing(full.se) else 100 * full.se
        axes.axhspan(level - error, min(level + error, 100), color="0.25", alpha=0.1, linewidth=0)
        axes.axhline(level, color="0.25", linestyle="--", linewidth=0.9, label=label)


def legend_below(figure: Figure, columns: int, **how: Any) -> None:
    """Explain below a figure what its panels have drawn, each label once."""
    drawn = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles = {label: handle for pairs in drawn for handle, label in pairs}
    named: Any = (list(handles.values()), list(handles))
    figure.legend(*named, loc="outside lower center", ncols=columns, frameon=False, **how)


def look_of(place: int) -> dict[str, Any]:
    """The colour, marker and dashes of the line or policy with that number."""
    look = {"color": LINE_COLORS[place % len(LINE_COLORS)], "marker": MARKERS[place % len(MARKERS)]}
    return {**look, "linestyle": DASHES[place % len(DASHES)]}


def policy_looks(keys: Iterable[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The colour, marker and dashes by policy and variant; a known policy looks the same in every figure."""
    names = [name for name in format.POLICY_TITLES if name != "full"]
    others = count(len(names))
    found = {}
    for policy, variant in keys:
        place = names.index(policy) if policy in names and not variant else next(others)
        found[policy, variant] = look_of(place)
    return found


def luminance(color: Any) -> float:
    """The relative luminance of a colour, from 0 (black) to 1 (white), as WCAG 2 defines it."""
    channels = np.asarray(to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def ink(background: Any) -> str:
    """Black or white, whichever has the greater contrast to the background, which is at least 4.58."""
    # The contrast is (lighter + 0.05) / (darker + 0.05); black and white are equal at this luminance.
    return "black" if luminance(background) > (1.05 * 0.05) ** 0.5 - 0.05 else "white"


def heat_table(
    axes: Axes, values: np.ndarray, labels: np.ndarray, *, cmap: str, limits: tuple[float, float], size: float
) -> QuadMesh:
    """Draw values [rows, columns] as coloured cells with their labels, the first row on top; hatched where missing."""
    edge: dict[str, Any] = {"edgecolors": "white", "linewidth": 1}
    mesh = axes.pcolormesh(np.ma.masked_invalid(values), cmap=cmap, vmin=limits[0], vmax=limits[1], **edge)
    axes.invert_yaxis()
    for (row, column), label in np.ndenumerate(labels):
        place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
        if np.isnan(values[row, column]):
            hatch: dict[str, Any] = {"facecolor": "0.96", "edgecolor": "0.65", "hatch": "////", "linewidth": 0}
            axes.add_patch(Rectangle((column, row), 1, 1, zorder=1, **hatch))
            axes.add_patch(Rectangle((column, row), 1, 1, zorder=2, fill=False, edgecolor="white", linewidth=1))
            box = {"boxstyle": "round,pad=0.15", "facecolor": "0.96", "edgecolor": "none"}
            axes.text(column + 0.5, row + 0.5, label, color="0.2", bbox=box, **place)
        else:
            color = ink(mesh.to_rgba(values[row, column]))
            axes.text(column + 0.5, row + 0.5, label, color=color, **place)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return mesh


def save_figure(figure: Figure, directory: Path, name: str) -> dict[str, Path]:
    """Write a figure as PNG (200 dpi), SVG and PDF, always the same bytes; return the path of each format."""
    paths = {suffix: directory / f"{name}.{suffix}" for suffix in FORMATS}
    dates: dict[str, dict[str, Any]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with matplotlib.rc_context(STYLE):
        for suffix, path in paths.items():
            with replacing(path) as temporary:
                figure.savefig(temporary, format=suffix, metadata=dates[suffix])
            # The layout is the slow part. The first format computes it, and the other formats keep it.
            figure.set_layout_engine("none")
    return paths
