"""Heatmaps of Pass@1 over keep_ratio and local_window, per benchmark and for their mean."""

from dataclasses import dataclass
from math import ceil
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import words
from analysis.numbers.grids import PolicyGrid
from analysis.numbers.metrics import mean_over_benchmarks, model_title
from analysis.pictures.style import STYLE, new_figure
from analysis.words import MISSING, UNFINISHED, UNGRADED, Scale

DIVERGING = "RdBu"
HOLDS, LOSES = "✓", "†"

# Lightness falls evenly from low to high: safe for colour-blind readers and in grey print.
COLORMAP = "YlGnBu"
MARKS = {
    MISSING: "no result yet",
    UNGRADED: "not graded yet",
    UNFINISHED: "not finished",
    HOLDS: "holds: loses less than the margin",
    LOSES: "loses accuracy",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap: its title, the full cache's score in words, and the cells, [windows descending, ratios ascending].

    A cell has a value in percent or points, NaN where missing, and a label.
    """

    title: str
    full_cache: str
    values: pd.DataFrame
    labels: pd.DataFrame


def grid_figure(
    grid: PolicyGrid, model: str, metrics: pd.DataFrame, *, scale: Scale = "own", interval: bool = False
) -> Figure:
    """Draw one panel per benchmark of one model.

    Args:
        grid, model: the cells.
        metrics: all cells of the run, for the titles and the full-cache scores.
        scale: see `Scale`. Differences bear a mark where the setting holds or loses.
        interval: write the 95% interval under each value.
    """
    panels = []
    for benchmark in grid.benchmarks:
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        title = metrics.loc[metrics["benchmark"] == benchmark, "benchmark_title"].iloc[0]
        title = f"{model_title(metrics, model)} | {title}"
        panels.append(_panel(grid, rows, _full_cells(rows, metrics), title, scale, interval))
    return _heatmaps(panels, grid.title, scale)


def css_colors(share: float) -> tuple[str, str]:
    """The background and the ink of a value as CSS colours; `share` is its place between lowest (0) and highest (1)."""
    red, green, blue, _ = matplotlib.colormaps[COLORMAP](0.75 * share, bytes=True)
    return f"rgb({red},{green},{blue})", "#fff" if share > 0.75 else "#111"


def mean_figure(grid: PolicyGrid, model: str, metrics: pd.DataFrame) -> Figure:
    """Draw one panel, a model's Pass@1 averaged over the grid's benchmarks; a cell that lacks one is missing."""
    rows = grid.cells[grid.cells["model"] == model]
    full = mean_over_benchmarks(_full_cells(rows, metrics), grid.benchmarks)
    mean = mean_over_benchmarks(rows, grid.benchmarks).dropna(subset="pass_at_1")
    title = f"{model_title(metrics, model)} | mean of {len(grid.benchmarks)} benchmarks"
    return _heatmaps([_panel(grid, mean, full, title)], grid.title)


def _full_cells(rows: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    return metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]


def _panel(
    grid: PolicyGrid, rows: pd.DataFrame, full: pd.DataFrame, title: str, scale: Scale = "own", interval: bool = False
) -> Panel:
    points = rows.drop_duplicates(["keep_ratio", "local_window"])
    value = "diff_to_full" if scale == "diff_from_full" else "pass_at_1"
    points = points.assign(label=[_cell_text(row, value, interval=interval) for row in points.itertuples()])
    values, labels = (
        points.pivot(index="local_window", columns="keep_ratio", values=name).reindex(grid.windows, columns=grid.ratios)
        for name in (value, "label")
    )
    return Panel(
        title=title, full_cache=_full_cache(full), values=100 * values.astype("float64"), labels=labels.fillna(MISSING)
    )


def _cell_text(row: Any, value: str, *, interval: bool) -> str:
    if words.missing(row.pass_at_1):
        return UNGRADED if row.completions else MISSING
    difference = value == "diff_to_full"
    text = words.percent(getattr(row, value), signed=difference)
    if text == MISSING:
        return text
    text += {"holds": HOLDS, "loses": LOSES}.get(row.decision, "") if difference else ""
    text += "" if row.status == "done" else UNFINISHED
    if not interval:
        return text
    low, high = (row.diff_low, row.diff_high) if difference else (row.ci_low, row.ci_high)
    return f"{text}\n{words.percent(low)} to {words.percent(high)}"


def _full_cache(full: pd.DataFrame) -> str:
    if full.empty or words.missing(full.iloc[0]["pass_at_1"]):
        return "no full-cache score"
    row = full.iloc[0]
    mark = "" if row["status"] == "done" else UNFINISHED
    return f"full cache {words.percent_pm(row['pass_at_1'], row['se'])}{mark}"


def _heatmaps(panels: list[Panel], title: str, scale: Scale = "own") -> Figure:
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = ceil(len(panels) / columns)
    height, width = panels[0].values.shape
    lines = 1 + max(panel.labels.map(lambda text: text.count("\n")).to_numpy().max() for panel in panels)
    size = (
        columns * max(3.7, (0.58 if lines == 1 else 0.85) * width + 1.5),
        rows * max(2.3, (0.24 + 0.18 * lines) * height + 1.3) + 0.5,
    )
    limits = [_limits(panel.values.to_numpy(), scale) for panel in panels]
    if scale != "own":
        limits = [(min(low for low, _ in limits), max(high for _, high in limits))] * len(panels)
    with matplotlib.rc_context(STYLE):
        figure = new_figure(size)
        for place, panel in enumerate(panels):
            _heatmap(figure.add_subplot(rows, columns, place + 1), panel, limits[place], scale)
        figure.suptitle(title, fontsize=11)
        # A line of this size has about 18 letters to the inch.
        figure.supxlabel(_footnote(panels, scale, int(18 * size[0])), fontsize=7.5, color="0.3")
    return figure


def _limits(values: np.ndarray, scale: Scale) -> tuple[float, float]:
    numbers = values[~np.isnan(values)]
    if scale == "diff_from_full":
        most = float(np.abs(numbers).max(initial=1.0))
        return -most, most
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 100.0)
    # If all values are equal, the scale still needs a width, and no colour should claim a difference.
    return (low, high) if low < high else (low - 1, high + 1)


def _heatmap(axes: Axes, panel: Panel, limits: tuple[float, float], scale: Scale) -> None:
    known = panel.values.notna().to_numpy()
    cmap, unit = (DIVERGING, "points to full cache") if scale == "diff_from_full" else (COLORMAP, "Pass@1 (%)")
    colors: dict[str, Any] = {"cmap": cmap, "vmin": limits[0], "vmax": limits[1], "linewidths": 1, "linecolor": "white"}
    bar: dict[str, Any] = {"cbar": bool(known.any()), "cbar_kws": {"label": unit}}
    ticks: dict[str, Any] = {"xticklabels": False, "yticklabels": False}
    seaborn.heatmap(panel.values, ax=axes, annot=panel.labels, fmt="", mask=~known, **colors, **bar, **ticks)
    for row, column in np.argwhere(~known):
        _mark_missing(axes, row, column, panel.labels.iloc[row, column])
    ratios, windows = panel.values.columns, panel.values.index
    axes.set_xticks(np.arange(len(ratios)) + 0.5, [words.number(ratio) for ratio in ratios])
    axes.set_yticks(np.arange(len(windows)) + 0.5, [words.number(window) for window in windows])
    axes.set(xlabel="keep ratio", ylabel="local window")
    axes.set_title(f"{panel.title}\n{panel.full_cache}", linespacing=1.3)
    axes.tick_params(length=0)


def _mark_missing(axes: Axes, row: int, column: int, label: Any) -> None:
    look: dict[str, Any] = {"facecolor": "0.96", "edgecolor": "0.65", "hatch": "////", "linewidth": 0}
    axes.add_patch(Rectangle((column, row), 1, 1, zorder=1, **look))
    axes.add_patch(Rectangle((column, row), 1, 1, zorder=2, fill=False, edgecolor="white", linewidth=1))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "0.96", "edgecolor": "none"}
    axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", color="0.2", bbox=box)


def _footnote(panels: list[Panel], scale: Scale, letters: int) -> str:
    unit = "Pass@1 in %, ± standard error over problems"
    if scale == "diff_from_full":
        unit = "Pass@1 minus the full cache's, in points, on the same pairs"
    shown = "".join(panel.full_cache + "".join(panel.labels.to_numpy().ravel()) for panel in panels)
    entries = [unit, *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in shown)]
    # A line breaks between two entries only.
    return fill("   ".join(entry.replace(" ", "\u00a0") for entry in entries), letters).replace("\u00a0", " ")
