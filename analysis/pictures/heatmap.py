"""Pictures of Pass@1: over keep_ratio and local_window, per benchmark and their mean, and over budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, get_args

import matplotlib
import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis import words as formats
from analysis.numbers.grids import Grid
from analysis.numbers.inference import LEVEL
from analysis.numbers.metrics import mean_over_benchmarks
from analysis.pictures.style import STYLE, model_title, new_figure

# How the panels of a figure are coloured: each over its own values, all over the same, or by the paired difference
# to the full cache around zero.
Scale = Literal["own", "shared", "diff_from_full"]
SCALES: tuple[Scale, ...] = get_args(Scale)
DIVERGING = "RdBu"
SIGNIFICANT = "†"

# Lightness falls evenly from low to high: safe for colour-blind readers and in grey print.
COLORMAP = "YlGnBu"
MAX_LINES = 8
NO_CELL = formats.MISSING
UNGRADED = "?"
UNFINISHED = "*"
MARKS = {
    NO_CELL: f"{NO_CELL} no result yet",
    UNGRADED: f"{UNGRADED} not graded yet",
    UNFINISHED: f"{UNFINISHED} not finished",
    SIGNIFICANT: f"{SIGNIFICANT} differs from the full cache (paired, Holm, 5%)",
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap.

    values: Pass@1 in percent [windows descending, ratios ascending], NaN where missing; labels: the text of
    each cell, same shape; full_cache: the full-cache score in words.
    """

    title: str
    full_cache: str
    values: pd.DataFrame
    labels: pd.DataFrame


def grid_figure(
    grid: Grid,
    model: str,
    metrics: pd.DataFrame,
    *,
    benchmarks: Sequence[str] | None = None,
    columns: int | None = None,
    scale: Scale = "own",
    marks: bool = False,
    interval: bool = False,
) -> Figure:
    """One panel per benchmark of one model.

    Args:
        metrics: all cells of the run, for the titles and the full-cache scores.
        benchmarks: which panels, in this order; by default all of the grid.
        columns: panels in a row; by default four panels lie 2 x 2.
        scale: see `Scale`; marks: a dagger on cells that differ from the full cache; interval: the 95% interval
        under each value.
    """
    panels = []
    for benchmark in benchmarks or grid.benchmarks:
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        full = metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]
        titles = metrics.loc[metrics["benchmark"] == benchmark, "benchmark_title"]
        title = f"{model_title(metrics, model)} | {titles.iloc[0]}"
        panels.append(_panel(grid, rows, full, title, scale=scale, marks=marks, interval=interval))
    return _heatmaps(panels, grid.title, columns, scale)


def mean_figure(grid: Grid, model: str, metrics: pd.DataFrame) -> Figure:
    """One panel: a model's Pass@1 averaged over the grid's benchmarks; a cell that lacks one is missing."""
    rows = grid.cells[grid.cells["model"] == model]
    full = metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]
    title = f"{model_title(metrics, model)} | mean of {len(grid.benchmarks)} benchmarks"
    mean, full_mean = (mean_over_benchmarks(frame, grid.benchmarks) for frame in (rows, full))
    return _heatmaps([_panel(grid, mean.dropna(subset="pass_at_1"), full_mean, title)], grid.title, None, "own")


def budget_figure(metrics: pd.DataFrame, model: str) -> Figure | None:
    """Pass@1 against budget for settings run at two budgets or more, the full cache as a line; else None.

    The mean over benchmarks comes first (points that lack a benchmark are left out), then each benchmark.
    At most `MAX_LINES` settings are drawn, those with the most budgets.
    """
    ours = metrics[metrics["model"] == model]
    lines = ["policy", "variant", "keep_ratio", "local_window"]
    compressed = ours[ours["budget"].notna() & ours["pass_at_1"].notna()]
    budgets = compressed.groupby(lines, dropna=False, sort=False)["budget"].nunique()
    budgets = budgets[budgets >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    if budgets.empty:
        return None
    chosen = compressed.merge(budgets.index.to_frame(index=False), on=lines)
    full = ours[(ours["policy"] == "full") & ours["condition"].isin(chosen["condition"])]
    names = list(chosen["benchmark"].unique())
    views = [
        _View(title=rows.iloc[0]["benchmark_title"], points=rows, full=full[full["benchmark"] == name])
        for name, rows in chosen.groupby("benchmark", sort=False)
    ]
    if len(names) > 1:
        means = [mean_over_benchmarks(frame, names) for frame in (chosen, full)]
        views.insert(0, _View(title=f"mean of {len(names)}", points=means[0], full=means[1]))
    return _budget_panels(views, model_title(metrics, model))


def _panel(
    grid: Grid,
    rows: pd.DataFrame,
    full: pd.DataFrame,
    title: str,
    *,
    scale: Scale = "own",
    marks: bool = False,
    interval: bool = False,
) -> Panel:
    points = rows.drop_duplicates(["keep_ratio", "local_window"])
    value = "diff_to_full" if scale == "diff_from_full" else "pass_at_1"
    texts = [_cell_text(row, value, marks=marks, interval=interval) for row in points.itertuples()]
    points = points.assign(label=texts)
    values, labels = (
        points.pivot(index="local_window", columns="keep_ratio", values=name).reindex(
            index=grid.windows, columns=grid.ratios
        )
        for name in (value, "label")
    )
    return Panel(
        title=title,
        full_cache=_full_cache(full),
        values=100 * values.astype("float64"),
        labels=labels.fillna(NO_CELL),
    )


def _cell_text(row: Any, value: str, *, marks: bool, interval: bool) -> str:
    number = getattr(row, value)
    if formats.missing(row.pass_at_1):
        return UNGRADED if row.completions else NO_CELL
    difference = value == "diff_to_full"
    text = formats.percent_pm(number, float("nan"), signed=difference)
    if text == NO_CELL:
        return text
    text += SIGNIFICANT if marks and row.p_holm < LEVEL else ""
    text += "" if row.status == "done" else UNFINISHED
    if not interval:
        return text
    ends = (row.diff_low, row.diff_high) if difference else (row.ci_low, row.ci_high)
    return f"{text}\n{formats.percent(ends[0])} to {formats.percent(ends[1])}"


def _full_cache(full: pd.DataFrame) -> str:
    if full.empty or formats.missing(full.iloc[0]["pass_at_1"]):
        return "no full-cache score"
    row = full.iloc[0]
    mark = "" if row["status"] == "done" else UNFINISHED
    return f"full cache {formats.percent_pm(row['pass_at_1'], row['se'])}{mark}"


def _heatmaps(panels: list[Panel], title: str, columns: int | None, scale: Scale) -> Figure:
    columns = columns or (len(panels) if len(panels) < 3 else 2 if len(panels) == 4 else 3)
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
        figure.supxlabel(_footnote(panels, scale), fontsize=7.5, color="0.3")
    return figure


def _limits(values: np.ndarray, scale: Scale) -> tuple[float, float]:
    numbers = values[~np.isnan(values)]
    if scale == "diff_from_full":
        most = float(np.abs(numbers).max(initial=1.0))
        return -most, most
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 100.0)
    # All values equal: a scale needs a width, and no colour should claim a difference.
    return (low, high) if low < high else (low - 1, high + 1)


def _heatmap(axes: Axes, panel: Panel, limits: tuple[float, float], scale: Scale) -> None:
    known = panel.values.notna().to_numpy()
    low, high = limits
    seaborn.heatmap(
        panel.values,
        ax=axes,
        annot=panel.labels,
        fmt="",
        mask=~known,
        cmap=DIVERGING if scale == "diff_from_full" else COLORMAP,
        vmin=low,
        vmax=high,
        linewidths=1,
        linecolor="white",
        cbar=bool(known.any()),
        cbar_kws={"label": "points to full cache" if scale == "diff_from_full" else "Pass@1 (%)"},
        xticklabels=False,
        yticklabels=False,
    )
    for row, column in np.argwhere(~known):
        _mark_missing(axes, row, column, panel.labels.iloc[row, column])
    ratios, windows = panel.values.columns, panel.values.index
    axes.set_xticks(np.arange(len(ratios)) + 0.5, [formats.number(ratio) for ratio in ratios])
    axes.set_yticks(np.arange(len(windows)) + 0.5, [formats.number(window) for window in windows])
    axes.set(xlabel="keep ratio", ylabel="local window")
    axes.set_title(f"{panel.title}\n{panel.full_cache}", linespacing=1.3)
    axes.tick_params(length=0)


def _mark_missing(axes: Axes, row: int, column: int, label: Any) -> None:
    look: dict[str, Any] = {"facecolor": "0.96", "edgecolor": "0.65", "hatch": "////", "linewidth": 0}
    axes.add_patch(Rectangle((column, row), 1, 1, zorder=1, **look))
    axes.add_patch(Rectangle((column, row), 1, 1, zorder=2, fill=False, edgecolor="white", linewidth=1))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "0.96", "edgecolor": "none"}
    axes.text(column + 0.5, row + 0.5, label, ha="center", va="center", color="0.2", bbox=box)


def _footnote(panels: list[Panel], scale: Scale) -> str:
    shown = "".join(panel.full_cache + "".join(panel.labels.to_numpy().ravel()) for panel in panels)
    marks = [text for mark, text in MARKS.items() if mark in shown]
    unit = "Pass@1 minus the full cache's, in points, on the same pairs" if scale == "diff_from_full" else "Pass@1 in %"
    return "   ".join([f"{unit}, ± standard error over problems" if scale != "diff_from_full" else unit, *marks])


@dataclass(frozen=True, kw_only=True)
class _View:
    title: str
    points: pd.DataFrame
    full: pd.DataFrame


def _budget_panels(views: list[_View], title: str) -> Figure:
    columns = min(len(views), 5)
    rows = ceil(len(views) / columns)
    names = pd.unique(pd.concat([_line_names(view.points) for view in views]))
    looks = zip(seaborn.color_palette("colorblind", MAX_LINES), "osD^vP*X", strict=True)
    styles = dict(zip(names, looks, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = new_figure((1.2 + 2.3 * columns, 1.2 + 2.4 * rows))
        grid = np.ravel(figure.subplots(rows, columns, sharey=True, sharex=True, squeeze=False))
        for axes, view in zip(grid, views, strict=False):
            _budget_lines(axes, view, styles)
        for axes in grid[len(views) :]:
            axes.set_visible(False)
        for axes in grid[::columns]:
            axes.set_ylabel("Pass@1 (%)")
        # One axis for all panels: a budget that one of them lacks keeps its tick.
        grid[0].set_xticks(sorted(set().union(*(view.points["budget"] for view in views))))
        legend: dict[str, Any] = {}
        for axes in grid:
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"{title}: Pass@1 against budget, ± standard error over problems", fontsize=11)
    return figure


def _line_names(points: pd.DataFrame) -> pd.Series:
    return pd.Series([formats.setting(row, budget=False) for row in points.itertuples()], index=points.index)


def _budget_lines(axes: Axes, view: _View, styles: dict[str, tuple[Any, str]]) -> None:
    for name, line in view.points.groupby(_line_names(view.points), sort=False):
        line = line.drop_duplicates("budget").sort_values("budget")
        color, marker = styles[str(name)]
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        look: dict[str, Any] = {
            "color": color,
            "marker": marker,
            "markersize": 4,
            "capsize": 2.5,
            "linewidth": 1.2,
        }
        axes.errorbar(line["budget"], score, error, label=str(name), **look)
    if not view.full.empty and not formats.missing(view.full.iloc[0]["pass_at_1"]):
        level, spread = 100 * view.full.iloc[0]["pass_at_1"], 100 * view.full.iloc[0]["se"]
        axes.axhline(level, color="0.25", linestyle="--", linewidth=1, label="full cache")
        axes.axhspan(level - spread, level + spread, color="0.25", alpha=0.12, linewidth=0)
    axes.set(title=view.title, xlabel="budget (tokens)")
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
