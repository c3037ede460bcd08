"""Heatmaps: Pass@1 over keep_ratio and local_window, ours beside published scores, and the attribution of tokens.

`cells` says what a heatmap shows of each cell. The figures of this file and the page of a report both draw that.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.notation import COLUMN_WIDTH, DEFAULT_LOOK, MISSING, UNGRADED, Look
from kvsweep.analysis.statistics.grids import PolicyGrid
from kvsweep.analysis.statistics.inference import NoiseFloor
from kvsweep.analysis.statistics.metrics import mean_over_benchmarks, model_title
from kvsweep.analysis.statistics.sentences import PanelVerdict

# Size of the numbers and of a figure's own title in points; letters of a panel's title and of other texts in inches.
SIZE, TITLE_SIZE, TITLE, LETTER = 6.5, 9, 0.051, 0.047
# Inches: widest panel, space beside its cells, and least and largest height of a row of cells.
WIDEST, BESIDE, LOW, HIGH = COLUMN_WIDTH, 0.6, 0.25, 0.38

AXES = ["local_window", "keep_ratio"]
# Columns of metrics that a heatmap reads; means over benchmarks and published scores lack some of them.
READ = ["cell_id", "policy", "status", "completions", "graded", "ungraded", "evicted", "packed", "bits", "decision"]
READ += ["pass_at_1", "se", "ci_low", "ci_high", "diff_to_full", "these_low", "these_high", "stopped_early", "sure"]

# A column's head has room for this many letters of a reasoning step, a printed page for this many tokens and steps.
STEP_LETTERS, MOST_TOKENS, MOST_STEPS = 32, 36, 10


def cells(rows: pd.DataFrame, places: pd.Index, *, difference: bool) -> pd.DataFrame:
    """What a heatmap shows of each cell, in order of these places: cell_id, value, label, mark, error, interval.

    The rows of metrics are indexed by place. The value is Pass@1 in percent, or the difference to the full cache in
    points, NaN if unknown. The label is the value as text; `mark` has the marks of the cell's state and verdict;
    `error` has the standard error of Pass@1, with the number of graded completions if more will come.
    """
    sources = ["diff_to_full", "these_low", "these_high"] if difference else ["pass_at_1", "ci_low", "ci_high"]
    # Columns that the table lacks have missing values.
    numbers = rows.reindex(columns=READ)
    numbers[["value", "low", "high"]] = numbers[sources]
    shown = []
    for row in notation.rows(numbers):
        label = notation.percent(row.value, signed=difference)  # a dash if missing
        mark = error = interval = ""
        if not notation.missing(row.value):
            mark = notation.state_marks(row) + notation.DECISION_MARKS.get(row.decision, "")
        elif notation.missing(row.pass_at_1) and row.completions:  # none of them has a grade
            label = UNGRADED
        if not difference and not notation.missing(row.se):
            more_will_come = row.status != "done" or row.ungraded > 0
            graded = f" ({row.graded})" if more_will_come else ""
            error = f"±{notation.percent(row.se)}{graded}"
        if not notation.missing(row.low):
            interval = f"{100 * row.low:.0f} to {100 * row.high:.0f}"
        shown.append([row.cell_id, 100 * row.value, label, mark, error, interval])
    # At a place without a cell, a dash stands.
    empty = {"cell_id": "", "value": np.nan, "label": MISSING, "mark": "", "error": "", "interval": ""}
    table = pd.DataFrame(shown, rows.index, list(empty))
    # Of several cells at a place the first is shown.
    return table[~table.index.duplicated()].reindex(places).fillna(empty)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap: its title, and cells and full cache (one or none) from `cells`, row by row.

    `rows` and `columns` name the windows (descending) and the ratios (ascending). Panels of one `scale` share a range
    of colours; a scale of differences is centred on zero. `floor` says how far apart chance would put the scores; a
    panel with scores that may differ by chance alone is pale.
    """

    title: str
    cells: pd.DataFrame
    rows: list[str]
    columns: list[str]
    full: pd.DataFrame
    scale: str = ""
    difference: bool = False
    floor: NoiseFloor | None = None

    def matrix(self, name: str) -> np.ndarray:
        """One column of the cells as an array [windows, ratios]."""
        return self.cells[name].to_numpy().reshape(len(self.rows), -1)

    @property
    def pale(self) -> bool:
        return self.floor is not None and not self.floor.signal

    @property
    def note(self) -> list[str]:
        """The full cache's score; empty if unknown."""
        lines = [f"full cache {row.label}{row.mark} {row.error}" for row in notation.rows(self.full)]
        return [line.replace("±", "± ").rstrip() for line in lines]

    @property
    def lines(self) -> list[str]:
        """The text over the cells: title, full cache, and the span of the scores beside the chance span."""
        return [self.title, *self.note, *self.chance]

    @property
    def chance(self) -> list[str]:
        """The span of the scores and the chance span; empty if unknown."""
        return self.floor.words if self.floor else []

    def colors(self, cmap: str) -> str | Colormap:
        """Return the cells' colour map; `cmap` is the map for scores."""
        if self.difference:
            return style.DIVERGING
        return style.faded(cmap) if self.pale else cmap


def grid_panels(
    grid: PolicyGrid,
    model: str,
    metrics: pd.DataFrame,
    look: Look,
    verdicts: Sequence[PanelVerdict],
) -> list[Panel]:
    """Return a model's heatmap of each benchmark; `metrics` has all cells, for titles and full caches.

    A panel with a verdict also shows its chance span.
    """
    panels = []
    for benchmark in grid.benchmarks:
        rows = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        benchmark_title = metrics.loc[metrics["benchmark"] == benchmark, "benchmark_title"].iloc[0]
        title = f"{model_title(metrics, model)} | {benchmark_title}, {grid.label}".removesuffix(", ")
        panel = _panel(grid, rows, _full_cells(rows, metrics), title, difference=look.scale == "diff_from_full")
        # The floor is one of scores and says nothing of differences.
        floor = None if panel.difference else _floor(panel, verdicts)
        panels.append(replace(panel, floor=floor, scale=title if look.scale == "own" else ""))
    return panels


def grid_figure(
    grid: PolicyGrid,
    model: str,
    metrics: pd.DataFrame,
    look: Look = DEFAULT_LOOK,
    verdicts: Sequence[PanelVerdict] = (),
) -> Figure:
    """Draw the panels of `grid_panels`."""
    measure = "Pass@1 in %"
    interval = "its 95% interval"
    if look.scale == "diff_from_full":
        measure = "Pass@1 minus the full cache's, in points, on the same pairs"
        interval = "the interval of its verdict"
    scale = "each panel has its own colour scale" if look.scale == "own" else "one colour scale for all panels"
    notes = [measure, scale]
    panels = grid_panels(grid, model, metrics, look, verdicts)
    errors = grid.cells.loc[grid.cells["model"] == model, "se"].dropna()
    if look.interval:
        notes.append(f"below each value {interval}")
    elif look.scale != "diff_from_full" and len(errors):
        notes.append(f"standard error of a value {notation.percent(errors.min())} to {notation.percent(errors.max())}")
    return _heatmaps(panels, f"{model_title(metrics, model)}, {grid.title}", look, notes)


def _floor(panel: Panel, verdicts: Sequence[PanelVerdict]) -> NoiseFloor | None:
    """The noise floor of the verdict on these cells; None without one."""
    cells_of_panel = set(panel.cells["cell_id"])
    for verdict in verdicts:
        # A verdict has no cells without a grade, so it may have fewer than the panel.
        if verdict.floor and cells_of_panel >= set(verdict.cells["cell_id"]):
            return verdict.floor
    return None


def mean_figure(grid: PolicyGrid, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel, a model's Pass@1 averaged over the grid's benchmarks; a cell without one of them is missing."""
    rows = grid.cells[grid.cells["model"] == model]
    benchmarks = len(grid.benchmarks)
    full_mean = mean_over_benchmarks(_full_cells(rows, metrics), benchmarks)
    mean = mean_over_benchmarks(rows, benchmarks).dropna(subset="pass_at_1")
    # The mean of doubted readings is doubted too: of a place "no" comes before "yes".
    doubts = rows.reindex(columns=[*AXES, "sure"]).sort_values("sure").drop_duplicates([*AXES])
    mean = mean.merge(doubts, on=AXES)
    means = f"mean of {benchmarks} benchmarks"
    title = f"{model_title(metrics, model)} | {means}, {grid.label}".removesuffix(", ")
    return _heatmaps([_panel(grid, mean, full_mean, title)], f"{title}, {grid.title}", look, ["Pass@1 in %"])


def published_figure(
    grid: PolicyGrid, model: str, metrics: pd.DataFrame, published: pd.DataFrame, look: Look = DEFAULT_LOOK
) -> Figure:
    """Draw per benchmark the scores of `grids.published_grid`, ours on the same scale, and ours minus theirs."""
    panels: list[Panel] = []
    # A row per benchmark has its three panels, if they fit.
    look = replace(look, columns=3 if look.row > 5 else 1, interval=False)
    for benchmark, rows in published.groupby("benchmark", sort=False):
        cells_of_ours = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        scores = rows[[*AXES, "pass_at_1", "sure"]].assign(status="done")
        scores["pass_at_1"] /= 100
        both = cells_of_ours.drop(columns="decision").merge(scores, on=AXES, suffixes=("", "_published"))
        gaps = both.assign(diff_to_full=both["pass_at_1"] - both["pass_at_1_published"])
        name = f"{model_title(metrics, model)} | {cells_of_ours['benchmark_title'].iloc[0]}"
        no_full = cells_of_ours.head(0)
        theirs = _panel(grid, scores, no_full, f"{name}, published")
        ours = _panel(grid, cells_of_ours, _full_cells(cells_of_ours, metrics), f"{name}, ours")
        # All differences share a scale.
        panels += [replace(panel, scale=str(benchmark)) for panel in (theirs, ours)]
        panels.append(_panel(grid, gaps, no_full, "ours minus published", difference=True))
    errors = grid.cells.loc[grid.cells["model"] == model, "se"]
    notes = [
        "Pass@1 in % beside the published scores, differences in points",
        "published and ours have one colour scale per row, the differences one for all rows",
        f"typical standard error of ours {notation.percent(errors.mean())}",
    ]
    return _heatmaps(panels, f"{model_title(metrics, model)}, {grid.title}", look, notes)


def _full_cells(rows: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    return metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]


def _panel(grid: PolicyGrid, rows: pd.DataFrame, full: pd.DataFrame, title: str, *, difference: bool = False) -> Panel:
    """The panel of one benchmark: `rows` of metrics of its cells, and of its full cache, which may be none."""
    places = pd.MultiIndex.from_product([grid.windows, grid.ratios])
    full = full.head(1)
    return Panel(
        title=title,
        cells=cells(rows.set_index(AXES), places, difference=difference),
        rows=[notation.number(window) for window in grid.windows],
        columns=[notation.number(ratio) for ratio in grid.ratios],
        full=cells(full, full.index, difference=False),
        difference=difference,
    )


def limits(numbers: Iterable[float], *, difference: bool) -> tuple[float, float]:
    """Return the ends of a colour scale for some numbers, without NaN; centred on zero for differences."""
    values = [number for number in numbers if number == number]
    if difference:
        largest = max([1.0, *map(abs, values)])
        return -largest, largest
    if not values:
        return 0.0, 100.0
    low, high = min(values), max(values)
    if low < high:
        return low, high
    # If all values are equal, the scale still needs a width, and no colour should claim a difference.
    return max(0.0, low - 1), min(100.0, high + 1)


@matplotlib.rc_context(style.STYLE)
def _heatmaps(panels: list[Panel], name: str, look: Look, notes: list[str]) -> Figure:
    """Draw panels; the figure's label (its caption) has the name, the notes and what `look.marks` draws."""
    caption = _caption(panels, name, notes)  # of all marks, also where the panels lose theirs
    panels = [_with_texts(panel, look) for panel in panels]
    columns, width, height = _layout(panels, look)
    figure, grid = style.panels(width, len(panels), columns, row_height=height, extra_height=0.6 if look.title else 0.4)
    for index, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        scale_values = np.concatenate([other.cells["value"] for other in panels if other.scale == panel.scale])
        ends = limits(scale_values, difference=panel.difference)
        bar = _heatmap(axes, panel, ends, look.map or style.SEQUENTIAL)
        # The last bar of a row says what all of them measure.
        if bar is not None and (index + 1 == len(panels) or (index + 1) % columns == 0):
            bar.set_label("points" if panel.difference else "Pass@1 (%)")
        if index % columns == 0:
            axes.set_ylabel("Local Window Size")
        else:  # the panel to the left names the same windows
            axes.set_yticklabels([])
    for axes in grid[-columns:]:  # the lowest of each column
        axes.set_xlabel("Ratio")
    figure.set_label(caption)
    if look.title:
        figure.suptitle(look.title, fontsize=TITLE_SIZE)
    if look.marks:
        if any(panel.pale for panel in panels):
            notes = [*notes, "a pale panel is one whose settings may differ by chance alone (p of 0.05 or more)"]
        texts: list[str] = []
        for panel in panels:
            texts += [*panel.note, *panel.cells["text"]]
        style.footnote(figure, "   ".join(["; ".join(notes), *style.marks(texts)]))
    return figure


def _layout(panels: list[Panel], look: Look) -> tuple[int, float, float]:
    """Return how many panels stand in a row, and the width and height in inches of a row."""
    first = panels[0]
    ratios = len(first.columns)
    texts = pd.concat([panel.cells["text"] for panel in panels])
    # No two texts of cells touch, and the colour bar stands beside them.
    cells_width = LETTER * ratios * max(_longest(texts), 1 + _longest(first.columns)) + 0.45
    panel_width = max(cells_width, TITLE * max(_longest(panel.lines) for panel in panels))
    # The names of the windows beside the first panel of a row, and the last bar's label.
    edge = 0.35 + LETTER * _longest(first.rows)
    fitting = max(1, int((look.row - edge) / panel_width))
    rows = ceil(len(panels) / fitting)  # of about the same length
    columns = min(look.columns or ceil(len(panels) / rows), len(panels))
    width = min(look.row, columns * WIDEST)
    if columns == 1:  # in a narrower figure the numbers would lie on one another
        width = max(width, edge + cells_width)
    highest = HIGH if columns == len(panels) else LOW  # several rows of panels share a page
    cell_height = min(max(0.75 * (width / columns - BESIDE) / ratios, LOW), highest)
    # A further line in a cell takes 0.12 inches, a line of a title 0.15.
    cell_height += 0.12 * texts.str.count("\n").max()
    title_height = 0.15 * max(len(panel.lines) for panel in panels) + 0.32
    return columns, width, cell_height * len(first.rows) + title_height


def _longest(texts: Iterable[str]) -> int:
    """The letters of the longest line in any of the texts."""
    return max(map(len, "\n".join(texts).split("\n")))


def _caption(panels: list[Panel], name: str, notes: list[str]) -> str:
    """Return the name, the notes, each panel's full cache and chance span, and how many cells have each mark."""
    sentences = [f"{name}: {'; '.join(notes)}"]
    texts: list[str] = []
    for panel in panels:
        _, *facts = panel.lines  # without the title
        if facts:
            _, _, benchmark = panel.title.rpartition(" | ")
            sentences.append(f"{benchmark}: {', '.join(facts)}")
        texts += list(panel.cells["label"] + panel.cells["mark"])
    for mark, count in notation.marks(texts).items():
        sentences.append(f"{count} of {len(texts)} cells: {notation.MARKS[mark]}")
    return ". ".join(sentences) + "."


def _with_texts(panel: Panel, look: Look) -> Panel:
    """The panel with the column `text` of what is written into its cells: labels, with marks and intervals if wanted.

    Without marks a panel is as a paper shows it: its title and a number in each cell, in full colours.
    """
    if not look.marks:
        panel = replace(panel, full=panel.full.head(0), cells=panel.cells.assign(mark=""), floor=None)
    texts = panel.cells["label"] + panel.cells["mark"]
    if look.interval:
        intervals = panel.cells["interval"]
        texts += ("\n" + intervals).where(intervals != "", "")
    return replace(panel, cells=panel.cells.assign(text=texts))


def _heatmap(axes: Axes, panel: Panel, ends: tuple[float, float], cmap: str) -> Colorbar | None:
    """Draw one panel, with colours between these ends; return its colour bar, None without a value."""
    # Without any cell the column has no numbers but objects.
    values = pd.DataFrame(panel.matrix("value").astype(float), panel.rows, panel.columns)
    mesh = style.heat_table(axes, values, panel.cells["text"], cmap=panel.colors(cmap), limits=ends, size=SIZE)
    axes.set_title("\n".join(panel.lines), linespacing=1.3)
    if values.isna().all(axis=None):
        return None
    # As wide beside many cells as beside few.
    rows, columns = values.shape
    bar = axes.figure.colorbar(mesh, ax=axes, aspect=max(15, 4 * rows), fraction=min(0.15, 0.75 / columns), pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=2, pad=1)
    return bar


def attribution_table(values: np.ndarray, tokens: Sequence[str], steps: Sequence[str]) -> pd.DataFrame:
    """Name the columns of [tokens, steps] effects by the steps, and put the answer tokens before them."""
    table = pd.DataFrame(values, columns=list(steps))
    table.insert(0, "token", list(tokens))
    return table


@matplotlib.rc_context(style.STYLE)
def attribution_figure(
    values: np.ndarray,
    tokens: Sequence[str],
    steps: Sequence[str],
    *,
    title: str,
    cmap: str | None = None,
) -> Figure:
    """Draw signed effects on the log-probability [tokens, steps] with four decimals, red (-1) over white to blue (1).

    A value beyond the scale has its end's colour and is printed in full. Of many tokens and steps those with the
    largest effects are shown, in the text's order.
    """
    rows = strongest(values, axis=1, most=MOST_TOKENS)
    columns = strongest(values, axis=0, most=MOST_STEPS)
    names = [visible(tokens[row]) for row in rows]
    heads = [shortened(steps[column]) for column in columns]
    shown = pd.DataFrame(values[np.ix_(rows, columns)], names, heads)
    labels = shown.map("{:z.4f}".format).to_numpy().ravel()  # z: no minus sign before zero
    figure = style.new_figure((max(5.2, 1.6 + 0.55 * len(columns)), 2.6 + 0.165 * len(rows)))
    axes = figure.subplots()
    mesh = style.heat_table(axes, shown, labels, cmap=cmap or style.DIVERGING, limits=(-1.0, 1.0), size=6)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(axes.get_xticks(), heads, rotation=40, ha="left", rotation_mode="anchor")
    axes.tick_params(labelsize=6.5)
    axes.set(xlabel="Reasoning step", ylabel="Answer token")
    bar = figure.colorbar(mesh, ax=axes, extend="both", ticks=[-1.0, -0.5, 0.0, 0.5, 1.0], aspect=25, pad=0.02)
    bar.set_label("Token Attribution")
    figure.set_label(title)
    note = "effect of a step on each answer token's log-probability, by removal; the colours end at -1 and 1;"
    drawn = f"drawn: {len(rows)} of {len(tokens)} tokens and {len(columns)} of {len(steps)} steps"
    style.footnote(figure, f"{note} {drawn}, those with the largest effects")
    return figure


def strongest(values: np.ndarray, *, axis: int, most: int) -> list[int]:
    """The rows (axis 1) or columns (axis 0) with the largest absolute values, in order."""
    strength = np.abs(values).max(axis=axis)
    return sorted(np.argsort(-strength, kind="stable")[:most].tolist())


def visible(token: str) -> str:
    """Show the spaces and line breaks of a token."""
    return token.replace(" ", "␣").replace("\n", "↵")


def shortened(step: str) -> str:
    """Put a step's text on one line and cut it to a column's head; its last equation stays."""
    line = " ".join(step.split())
    if len(line) <= STEP_LETTERS:
        return line
    equation = "".join(re.findall(notation.EQUATION, line)[-1:])
    before = line[: line.rfind(equation)]
    room = STEP_LETTERS - len(equation)
    if len(before) > room:
        before = f"{before[: room - 1]}…"
    return before + equation
