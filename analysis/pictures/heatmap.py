"""Heatmaps of Pass@1 over keep_ratio and local_window, per benchmark and for their mean; ours beside published ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, HOLDS, LOSES, MARKS, MISSING, UNFINISHED, UNGRADED, UNSURE, Look
from kvsweep.analysis.numbers.grids import PolicyGrid
from kvsweep.analysis.numbers.metrics import mean_over_benchmarks, model_title
from kvsweep.analysis.pictures.style import DIVERGING, STYLE, heat_table, ink, new_figure

# Lightness falls evenly from low to high: safe for colour-blind readers and in grey print.
COLORMAP = "YlGnBu"

# The size of the numbers in points, and the widest panel in inches.
SIZE, WIDEST = 6.5, 3.5


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap: its title, a line below it, and the cells, [windows descending, ratios ascending].

    A cell has a value in percent or points, NaN where missing, and a label. Panels of one `scale` have one colour
    scale; that of differences lies around zero.
    """

    title: str
    note: str
    values: pd.DataFrame
    labels: pd.DataFrame
    scale: str
    difference: bool = False


def grid_figure(grid: PolicyGrid, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel per benchmark of one model.

    `metrics` has all cells of the run, for the titles and the full-cache scores. Differences to the full cache bear a
    mark where the setting holds or loses.
    """
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
    notes = ["Pass@1 in %, full cache ± standard error over problems"]
    return _heatmaps([_panel(grid, mean, full, title, look)], grid.title, look, notes)


def scores_figure(scores: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel per benchmark of one model of which only scores are known (`verdict.read_summary`)."""
    panels = []
    for _, rows in scores.groupby("benchmark", sort=False):
        names = [str(rows.iloc[0].get(f"{name}_title", rows.iloc[0][name])) for name in ("model", "benchmark")]
        panel = _score_panel(rows, " | ".join(names))
        panels.append(panel if look.scale == "own" else replace(panel, scale=""))
    titled = "policy" in scores and "budget" in scores
    title = format.setting_of({"name": scores["policy"].iloc[0], "budget": scores["budget"].iloc[0]}) if titled else ""
    return _heatmaps(panels, title, look, _notes(look, errors=False))


def published_figure(
    grid: PolicyGrid, model: str, metrics: pd.DataFrame, published: pd.DataFrame, look: Look = DEFAULT_LOOK
) -> Figure:
    """Draw a row per benchmark: the published scores, those of a run's grid on the same scale, and ours minus theirs.

    `published` is that of `reference.published_grid`.
    """
    panels = []
    for benchmark, theirs in published.groupby("benchmark", sort=False):
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        name = f"{model_title(metrics, model)} | {rows['benchmark_title'].iloc[0]}"
        first = _score_panel(theirs, f"{name}, published", grid)
        own = _panel(grid, rows, _full_cells(rows, metrics), f"{name}, ours")
        gap = own.values - first.values
        labels = gap.map(lambda points: format.percent(points / 100, signed=True))
        note = f"typical standard error of ours {format.percent(rows['se'].mean())}"
        both = [replace(panel, scale=str(benchmark)) for panel in (first, own)]
        points: dict[str, Any] = {"values": gap, "labels": labels, "scale": "", "difference": True}
        panels += [*both, Panel(title="ours minus published", note=note, **points)]
    look = Look(width=look.width, columns=3, map=look.map)
    scale = "published and ours have one colour scale per row, the differences one for all rows"
    return _heatmaps(panels, grid.title, look, ["Pass@1 in %, differences in points", scale])


def css_colors(share: float) -> tuple[str, str]:
    """The background and the ink of a value as CSS colours; `share` is its place between lowest (0) and highest (1)."""
    color = matplotlib.colormaps[COLORMAP](0.75 * share)
    red, green, blue = (round(255 * channel) for channel in color[:3])
    return f"rgb({red},{green},{blue})", "#fff" if ink(color) == "white" else "#000"


def _full_cells(rows: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    return metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]


def _panel(grid: PolicyGrid, rows: pd.DataFrame, full: pd.DataFrame, title: str, look: Look = DEFAULT_LOOK) -> Panel:
    points = rows.drop_duplicates(["keep_ratio", "local_window"])
    difference = look.scale == "diff_from_full"
    value = "diff_to_full" if difference else "pass_at_1"
    points = points.assign(label=[_cell_text(row, value, interval=look.interval) for row in points.itertuples()])
    values, labels = (_pivot(points, name, grid) for name in (value, "label"))
    values = 100 * values.astype("float64")
    scale = title if look.scale == "own" else ""
    note, labels = _full_cache(full), labels.fillna(MISSING)
    return Panel(title=title, note=note, values=values, labels=labels, scale=scale, difference=difference)


def _score_panel(rows: pd.DataFrame, title: str, grid: PolicyGrid | None = None) -> Panel:
    """The panel of scores in percent, on the axes of a grid or on its own."""
    values = _pivot(rows, "pass_at_1", grid).astype("float64")
    unsure = "sure" in rows and (rows["sure"] == "no").any()
    labels = values.map(lambda score: format.percent(score / 100))
    return Panel(title=f"{title}{UNSURE * bool(unsure)}", note="", values=values, labels=labels, scale=title)


def _pivot(rows: pd.DataFrame, value: str, grid: PolicyGrid | None) -> pd.DataFrame:
    rows = rows.drop_duplicates(["keep_ratio", "local_window"])
    table = rows.pivot(index="local_window", columns="keep_ratio", values=value)
    if grid is None:
        return table.sort_index(ascending=False).sort_index(axis=1)
    return table.reindex(grid.windows, columns=grid.ratios)


def _cell_text(row: Any, value: str, *, interval: bool) -> str:
    if format.missing(row.pass_at_1):
        return UNGRADED if row.completions else MISSING
    difference = value == "diff_to_full"
    text = format.percent(getattr(row, value), signed=difference)
    if text == MISSING:
        return text
    text += {"holds": HOLDS, "loses": LOSES}.get(row.decision, "") if difference else ""
    text += format.state_marks(row)
    if not interval:
        return text
    low, high = (row.diff_low, row.diff_high) if difference else (row.ci_low, row.ci_high)
    return f"{text}\n{format.percent(low)} to {format.percent(high)}"


def _full_cache(full: pd.DataFrame) -> str:
    if full.empty or format.missing(full.iloc[0]["pass_at_1"]):
        return "no full-cache score"
    row = full.iloc[0]
    mark = "" if row["status"] == "done" else UNFINISHED
    return f"full cache {format.percent_pm(row['pass_at_1'], row['se'])}{mark}"


def _notes(look: Look, *, errors: bool = True) -> list[str]:
    """The footnote's entries on values and colours."""
    if look.scale == "diff_from_full":
        notes = ["Pass@1 minus the full cache's, in points, on the same pairs; one colour scale for all panels"]
    else:
        scales = {"own": "each panel has its own colour scale", "shared": "one colour scale for all panels"}
        notes = [f"Pass@1 in %; {scales[look.scale]}"]
    notes += ["full cache ± standard error over problems"] if errors else []
    return notes + (["below each value its 95% interval"] if look.interval else [])


def _heatmaps(panels: list[Panel], title: str, look: Look, notes: list[str]) -> Figure:
    columns = min(look.columns or _fitting_columns(panels, look.width), len(panels))
    rows = ceil(len(panels) / columns)
    height = len(panels[0].values)
    lines = 1 + max(panel.labels.map(lambda text: text.count("\n")).to_numpy().max() for panel in panels)
    width = min(look.width, columns * WIDEST)
    # A line of the footnote has about 18 letters to the inch. It breaks between two entries only.
    shown = "".join(panel.title + panel.note + "".join(panel.labels.to_numpy().ravel()) for panel in panels)
    entries = [*notes, *(f"{mark} {meaning}" for mark, meaning in MARKS.items() if mark in shown)]
    note = fill("   ".join(entry.replace(" ", "\u00a0") for entry in entries), int(18 * width)).replace("\u00a0", " ")
    with matplotlib.rc_context(STYLE):
        figure = new_figure((width, rows * ((0.16 + 0.12 * lines) * height + 0.7) + 0.5))
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.ravel()):
            if place >= len(panels):
                axes.remove()
                continue
            limits = _limits([panel for panel in panels if panel.scale == panels[place].scale])
            _heatmap(axes, panels[place], limits, look.map or COLORMAP)
            if place % columns == 0:
                axes.set_ylabel("Local Window Size")
            elif panels[place].values.index.equals(panels[place - 1].values.index):
                axes.set_yticklabels([])
            if place + columns >= len(panels):
                axes.set_xlabel("Ratio")
        figure.suptitle(title)
        figure.supxlabel(note, fontsize=7, color="0.3")
    return figure


def _fitting_columns(panels: list[Panel], width: float) -> int:
    """The most panels in a row whose numbers fit into their cells; four panels lie in one row, or two and two."""
    texts = [text for panel in panels for text in panel.labels.to_numpy().ravel()]
    letters = max(len(line) for text in texts for line in text.split("\n"))
    cell = 0.6 * SIZE * letters / 72
    # Beside its cells a panel has a colour bar, and the first one of a row the names of its windows.
    fits = int((width - 0.4) / (len(panels[0].values.columns) * cell + 0.45))
    counts = [4, 2, 1] if len(panels) == 4 else [len(panels), 4, 3, 2, 1]
    return next(count for count in counts if count <= max(fits, 1))


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    numbers = np.concatenate([panel.values.to_numpy().ravel() for panel in panels])
    numbers = numbers[~np.isnan(numbers)]
    if panels[0].difference:
        most = float(np.abs(numbers).max(initial=1.0))
        return -most, most
    low, high = (float(numbers.min()), float(numbers.max())) if len(numbers) else (0.0, 100.0)
    # If all values are equal, the scale still needs a width, and no colour should claim a difference.
    return (low, high) if low < high else (low - 1, high + 1)


def _heatmap(axes: Axes, panel: Panel, limits: tuple[float, float], cmap: str) -> None:
    cmap = DIVERGING if panel.difference else cmap
    mesh = heat_table(axes, panel.values.to_numpy(), panel.labels.to_numpy(), cmap=cmap, limits=limits, size=SIZE)
    ratios, windows = panel.values.columns, panel.values.index
    axes.set_xticks(np.arange(len(ratios)) + 0.5, [format.number(ratio) for ratio in ratios])
    axes.set_yticks(np.arange(len(windows)) + 0.5, [format.number(window) for window in windows])
    axes.set_title("\n".join(line for line in (panel.title, panel.note) if line), linespacing=1.3)
    if panel.values.notna().any(axis=None):
        bar = axes.figure.colorbar(mesh, ax=axes, aspect=15, pad=0.03)
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2, pad=1)
