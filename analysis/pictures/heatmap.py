"""Heatmaps of Pass@1 over keep_ratio and local_window, per benchmark and for their mean; ours beside published ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, MARKS, MISSING, UNFINISHED, UNGRADED, UNSURE, Look
from kvsweep.analysis.numbers.grids import PolicyGrid
from kvsweep.analysis.numbers.metrics import mean_over_benchmarks, model_title
from kvsweep.analysis.pictures import style

# Lightness falls evenly from low to high: safe for colour-blind readers and in grey print.
COLORMAP = "YlGnBu"

# The size of the numbers in points; the widest panel, a letter of its title and one of an axis in inches.
SIZE, WIDEST, TITLE, LETTER = 6.5, 3.55, 0.062, 0.055


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap: its title, a line below it, and the cells, [windows descending, ratios ascending].

    A cell has a value in percent or points, NaN where missing, and a label. Panels of one `scale` have one colour
    scale, which reaches to their full caches' scores; that of differences lies around zero. `windows` names the rows.
    """

    title: str
    note: str
    values: pd.DataFrame
    labels: pd.DataFrame
    windows: list[str]
    scale: str = ""
    difference: bool = False
    full: float = np.nan


def grid_figure(grid: PolicyGrid, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel per benchmark, differences with marks; `metrics` has all cells, for titles and full caches."""
    panels = []
    for benchmark in grid.benchmarks:
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        title = metrics.loc[metrics["benchmark"] == benchmark, "benchmark_title"].iloc[0]
        title = f"{model_title(metrics, model)} | {title}"
        panels.append(_panel(grid, rows, _full_cells(rows, metrics), title, look))
    return _heatmaps(panels, grid.title, look, _notes(look))


def mean_figure(grid: PolicyGrid, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel, a model's Pass@1 averaged over the grid's benchmarks; a cell that lacks one is missing."""
    rows = grid.cells[grid.cells["model"] == model]
    full = mean_over_benchmarks(_full_cells(rows, metrics), grid.benchmarks)
    mean = mean_over_benchmarks(rows, grid.benchmarks).dropna(subset="pass_at_1")
    title = f"{model_title(metrics, model)} | mean of {len(grid.benchmarks)} benchmarks"
    look = Look(width=look.width, map=look.map)
    panel = replace(_panel(grid, mean, full, title, look), windows=_windows(grid, rows))
    return _heatmaps([panel], grid.title, look, ["Pass@1 in %"])


def published_figure(
    grid: PolicyGrid, model: str, metrics: pd.DataFrame, published: pd.DataFrame, look: Look = DEFAULT_LOOK
) -> Figure:
    """Draw per benchmark the scores of `reference.published_grid`, ours on the same scale, and ours minus theirs."""
    panels = []
    for benchmark, theirs in published.groupby("benchmark", sort=False):
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        name = f"{model_title(metrics, model)} | {rows['benchmark_title'].iloc[0]}"
        own = replace(_panel(grid, rows, _full_cells(rows, metrics), f"{name}, ours"), scale=str(benchmark))
        scores = _pivot(theirs, "pass_at_1", grid)
        read, gap = scores.map("{:.1f}".format, na_action="ignore").fillna(MISSING), own.values - scores
        both: dict[str, Any] = {"values": scores, "labels": read, "windows": _windows(grid, theirs)}
        note = f"typical standard error of ours {format.percent(rows['se'].mean())}"
        points: dict[str, Any] = {"values": gap, "labels": gap.map(_points), "windows": own.windows}
        panels += [
            replace(own, title=f"{name}, published", note="", full=np.nan, **both),
            own,
            Panel(title="ours minus published", note=note, difference=True, **points),
        ]
    look = Look(width=look.width, columns=3 if look.width > 5 else 1, map=look.map)
    scale = "published and ours have one colour scale per row, the differences one for all rows"
    return _heatmaps(panels, grid.title, look, ["Pass@1 in %, differences in points", scale])


def _full_cells(rows: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    return metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]


def _panel(grid: PolicyGrid, rows: pd.DataFrame, full: pd.DataFrame, title: str, look: Look = DEFAULT_LOOK) -> Panel:
    difference = look.scale == "diff_from_full"
    value = "diff_to_full" if difference else "pass_at_1"
    rows = rows.assign(label=[_cell_text(row, value, interval=look.interval) for row in rows.itertuples()])
    return Panel(
        title=title,
        note=_full_cache(full),
        values=100 * _pivot(rows, value, grid).astype("float64"),
        labels=_pivot(rows, "label", grid).fillna(MISSING),
        windows=_windows(grid, rows),
        scale=title if look.scale == "own" else "",
        difference=difference,
        full=100 * full["pass_at_1"].astype("float64").mean(),
    )


def _windows(grid: PolicyGrid, rows: pd.DataFrame) -> list[str]:
    """The names of the grid's windows, with a mark where a reading of a published figure is doubted."""
    doubted = set(rows.loc[rows["sure"] == "no", "local_window"]) if "sure" in rows else set()
    return [format.number(window) + UNSURE * (window in doubted) for window in grid.windows]


def _pivot(rows: pd.DataFrame, value: str, grid: PolicyGrid) -> pd.DataFrame:
    table = rows.drop_duplicates(["keep_ratio", "local_window"])
    table = table.pivot(index="local_window", columns="keep_ratio", values=value)
    return table.reindex(grid.windows, columns=grid.ratios)


def _points(difference: float) -> str:
    return format.percent(difference / 100, signed=True)


def _cell_text(row: Any, value: str, *, interval: bool) -> str:
    if format.missing(row.pass_at_1):
        return UNGRADED if row.completions else MISSING
    difference = value == "diff_to_full"
    text = format.percent(getattr(row, value), signed=difference)
    if text == MISSING:
        return text
    text += format.DECISION_MARKS.get(row.decision, "") if difference else ""
    text += format.state_marks(row)
    if not interval:
        return text
    low, high = (row.these_low, row.these_high) if difference else (row.ci_low, row.ci_high)
    return f"{text}\n{100 * low:.0f} to {100 * high:.0f}"


def _full_cache(full: pd.DataFrame) -> str:
    if full.empty:
        return ""
    row = full.iloc[0]
    if format.missing(row["pass_at_1"]):
        return "no full-cache score"
    mark = "" if row["status"] == "done" else UNFINISHED
    return f"full cache {format.percent_pm(row['pass_at_1'], row['se'])}{mark}"


def _notes(look: Look) -> list[str]:
    """The footnote's entries on values and colours."""
    difference = look.scale == "diff_from_full"
    what = "Pass@1 minus the full cache's, in points, on the same pairs" if difference else "Pass@1 in %"
    scale = "each panel has its own colour scale" if look.scale == "own" else "one colour scale for all panels"
    below = f"below each value {'the interval of its verdict' if difference else 'its 95% interval'}"
    return [f"{what}; {scale}", *([below] if look.interval else [])]


@matplotlib.rc_context(style.STYLE)
def _heatmaps(panels: list[Panel], title: str, look: Look, notes: list[str]) -> Figure:
    columns = min(look.columns or _fitting_columns(panels, look.width), len(panels))
    rows = ceil(len(panels) / columns)
    height = len(panels[0].values)
    lines = 1 + max(panel.labels.map(lambda text: text.count("\n")).to_numpy().max() for panel in panels)
    width = min(look.width, columns * WIDEST)
    shown = "".join("".join([panel.note, *panel.windows, *panel.labels.to_numpy().ravel()]) for panel in panels)
    stroke = any(bool(panel.full == panel.full) and not panel.difference for panel in panels)
    notes += ["a stroke on the colour bar is the full cache"] if stroke else []
    entries = [*notes, *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in shown)]
    entries += ["±\N{NO-BREAK SPACE}standard error over problems"] if "±" in shown else []
    figure = style.new_figure((width, rows * ((0.13 + 0.12 * lines) * height + 0.62) + 0.6))
    grid = figure.subplots(rows, columns, squeeze=False)
    for place, axes in enumerate(grid.ravel()):
        if place >= len(panels):
            axes.remove()
            continue
        limits = _limits([panel for panel in panels if panel.scale == panels[place].scale])
        bar = _heatmap(axes, panels[place], limits, look.map or COLORMAP)
        if bar is not None and (place % columns == columns - 1 or place == len(panels) - 1):
            bar.set_label("points" if panels[place].difference else "Pass@1")
        if place % columns == 0:
            axes.set_ylabel("Local Window Size")
        elif panels[place].windows == panels[place - 1].windows:
            axes.set_yticklabels([])
        if place + columns >= len(panels):
            axes.set_xlabel("Ratio")
    figure.suptitle(style.wrapped(title, width))
    style.footnote(figure, "   ".join(entries))
    return figure


def _fitting_columns(panels: list[Panel], width: float) -> int:
    """The most panels in a row whose texts fit; four panels lie in one row, or two and two."""
    texts = [text for panel in panels for text in panel.labels.to_numpy().ravel()]
    ratios = [f"{format.number(ratio)} " for ratio in panels[0].values.columns]
    letters = max(len(line) for text in (*texts, *ratios) for line in text.split("\n"))
    titles = max(len(text) for panel in panels for text in (panel.title, panel.note))
    cells = len(ratios) * 0.6 * SIZE * letters / 72
    # Beside its cells a panel has a colour bar, and the first one of a row the names of its windows.
    windows = LETTER * max(len(name) for panel in panels for name in panel.windows)
    fits = int((width - 0.2 - windows) / max(cells + 0.45, TITLE * titles))
    counts = [4, 2, 1] if len(panels) == 4 else [len(panels), 4, 3, 2, 1]
    return next(count for count in counts if count <= max(fits, 1))


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    fulls = [] if panels[0].difference else [panel.full for panel in panels]
    numbers = np.concatenate([fulls, *(panel.values.to_numpy().ravel() for panel in panels)])
    numbers = numbers[~np.isnan(numbers)]
    if panels[0].difference:
        most = float(np.abs(numbers).max(initial=1.0))
        return -most, most
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 100.0)
    # If all values are equal, the scale still needs a width, and no colour should claim a difference.
    return (low, high) if low < high else (low - 1, high + 1)


def _heatmap(axes: Axes, panel: Panel, limits: tuple[float, float], cmap: str) -> Colorbar | None:
    cmap = style.DIVERGING if panel.difference else cmap
    mesh = style.heat_table(axes, panel.values.to_numpy(), panel.labels.to_numpy(), cmap=cmap, limits=limits, size=SIZE)
    ratios = panel.values.columns
    axes.set_xticks(np.arange(len(ratios)) + 0.5, [format.number(ratio) for ratio in ratios])
    axes.set_yticks(np.arange(len(panel.windows)) + 0.5, panel.windows)
    axes.set_title("\n".join(line for line in (panel.title, panel.note) if line), linespacing=1.3)
    if not panel.values.notna().any(axis=None):
        return None
    bar = axes.figure.colorbar(mesh, ax=axes, aspect=15, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, pad=1)
    if not panel.difference and limits[0] <= panel.full <= limits[1]:
        for color, width in (("white", 3.5), ("black", 1.5)):  # seen on light and on dark colours
            bar.ax.axhline(panel.full, color=color, linewidth=width, clip_on=False)
    return bar
