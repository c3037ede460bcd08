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
from kvsweep.analysis.notation import (
    COLUMN_WIDTH,
    DEFAULT_LOOK,
    MISSING,
    PAGE_WIDTH,
    UNFINISHED,
    UNGRADED,
    UNSURE,
    Look,
)
from kvsweep.analysis.statistics.grids import PolicyGrid
from kvsweep.analysis.statistics.inference import NoiseFloor
from kvsweep.analysis.statistics.metrics import mean_over_benchmarks, model_title
from kvsweep.analysis.statistics.sentences import PanelVerdict
from kvsweep.messages.command_line import counted

# Size of the numbers and of a figure's own title in points; letters of a panel's title and of an axis in inches.
SIZE, TITLE_SIZE, TITLE, LETTER = 6.5, 9, 0.051, 0.046
# Inches: widest panel, space beside its cells, and least and largest height of a row of cells.
WIDEST, BESIDE, LOW, HIGH = COLUMN_WIDTH, 0.6, 0.25, 0.38

# Columns of metrics that a heatmap reads; means over benchmarks and published scores lack some of them.
READ = ["cell_id", "policy", "status", "completions", "graded", "ungraded", "evicted", "packed", "bits", "decision"]
READ += ["pass_at_1", "se", "ci_low", "ci_high", "diff_to_full", "these_low", "these_high", "stopped_early"]

# A column's head has room for this many letters of a reasoning step, a printed page for this many tokens and steps.
STEP_LETTERS, MOST_TOKENS, MOST_STEPS = 32, 36, 9


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
    no_texts = {"label": MISSING, "mark": "", "error": "", "interval": ""}
    shown = []
    for row in notation.rows(numbers):
        texts = {**no_texts}
        if not notation.missing(row.value):
            texts["label"] = notation.percent(row.value, signed=difference)
            texts["mark"] = notation.state_marks(row) + notation.DECISION_MARKS.get(row.decision, "")
        elif notation.missing(row.pass_at_1) and row.completions:  # none of them has a grade
            texts["label"] = UNGRADED
        if not difference and not notation.missing(row.se):
            more_will_come = row.status != "done" or row.ungraded > 0
            graded = f" ({row.graded})" if more_will_come else ""
            texts["error"] = f"±{notation.percent(row.se)}{graded}"
        if not notation.missing(row.low):
            texts["interval"] = f"{100 * row.low:.0f} to {100 * row.high:.0f}"
        shown.append({"cell_id": row.cell_id, "value": 100 * row.value, **texts})
    table = pd.DataFrame(shown, rows.index, ["cell_id", "value", *no_texts])
    # Of several cells at a place the first is shown.
    table = table[~table.index.duplicated()].reindex(places)
    return table.fillna({"cell_id": "", **no_texts})


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One heatmap: its title, a line below it, and cells and full cache from `cells`, row by row.

    `rows` and `columns` name the windows (descending) and the ratios (ascending). Panels of one `scale` share a range
    of colours; a scale of differences is centred on zero. `floor` says how far apart chance would put the scores; a
    panel with scores that may differ by chance alone is pale.
    """

    title: str
    note: str
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
    def lines(self) -> list[str]:
        """The text over the cells: title, note, and the span of the scores beside the chance span."""
        return [text for text in (self.title, self.note, *self.chance) if text]

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
        title = _labelled(grid, f"{model_title(metrics, model)} | {benchmark_title}")
        panel = _panel(grid, rows, _full_cells(rows, metrics), title, look)
        # The floor is one of scores and says nothing of differences.
        if not panel.difference:
            panel = replace(panel, floor=_floor(panel, verdicts))
        panels.append(panel)
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


def _labelled(grid: PolicyGrid, title: str) -> str:
    """A panel's title, with the grid's label if it has one."""
    return f"{title}, {grid.label}" if grid.label else title


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
    full_mean = mean_over_benchmarks(_full_cells(rows, metrics), grid.benchmarks)
    mean = mean_over_benchmarks(rows, grid.benchmarks).dropna(subset="pass_at_1")
    title = _labelled(grid, f"{model_title(metrics, model)} | mean of {len(grid.benchmarks)} benchmarks")
    # A mean has no difference to the full cache.
    look = replace(look, scale="own")
    panel = _panel(grid, mean, full_mean, title, look)
    panel = replace(panel, rows=_windows(grid, rows))  # the mean has no column of doubts
    return _heatmaps([panel], f"{title}, {grid.title}", look, ["Pass@1 in %"])


def published_figure(
    grid: PolicyGrid, model: str, metrics: pd.DataFrame, published: pd.DataFrame, look: Look = DEFAULT_LOOK
) -> Figure:
    """Draw per benchmark the scores of `grids.published_grid`, ours on the same scale, and ours minus theirs."""
    panels: list[Panel] = []
    # A row per benchmark has its three panels, if they fit. All panels share a scale but those that get another below.
    look = replace(look, columns=3 if look.row > 5 else 1, scale="shared", interval=False)
    for benchmark, rows in published.groupby("benchmark", sort=False):
        scale = str(benchmark)
        our_cells = grid.cells[(grid.cells["model"] == model) & (grid.cells["benchmark"] == benchmark)]
        name = f"{model_title(metrics, model)} | {our_cells['benchmark_title'].iloc[0]}"
        ours = _panel(grid, our_cells, _full_cells(our_cells, metrics), f"{name}, ours", look)
        scores = rows.assign(pass_at_1=rows["pass_at_1"] / 100, status="done", completions=0)
        theirs = _panel(grid, scores, our_cells.head(0), f"{name}, published", look)
        gaps = ours.cells["value"] - theirs.cells["value"]  # in points
        labels = (gaps / 100).map(lambda gap: notation.percent(gap, signed=True))
        gap_cells = ours.cells.assign(value=gaps, label=labels, mark="")
        note = f"typical standard error of ours {notation.percent(our_cells['se'].mean())}"
        title = "ours minus published"
        difference = replace(ours, title=title, note=note, cells=gap_cells, difference=True)
        panels += [replace(theirs, scale=scale), replace(ours, scale=scale), difference]
    scales = "published and ours have one colour scale per row, the differences one for all rows"
    notes = ["Pass@1 in % beside the published scores, differences in points", scales]
    return _heatmaps(panels, f"{model_title(metrics, model)}, {grid.title}", look, notes)


def _full_cells(rows: pd.DataFrame, metrics: pd.DataFrame) -> pd.DataFrame:
    return metrics[(metrics["policy"] == "full") & metrics["condition"].isin(rows["condition"])]


def _panel(grid: PolicyGrid, rows: pd.DataFrame, full: pd.DataFrame, title: str, look: Look) -> Panel:
    """The panel of one benchmark: `rows` of metrics of its cells, and of its full cache, which may be none."""
    difference = look.scale == "diff_from_full"
    axes = ["local_window", "keep_ratio"]
    places = pd.MultiIndex.from_product([grid.windows, grid.ratios])
    full = full.head(1)
    note = ""
    for row in notation.rows(full):  # one or none
        score = notation.percent_pm(row.pass_at_1, row.se)
        if score == MISSING:
            note = "no full-cache score"
        else:
            note = f"full cache {score}{'' if row.status == 'done' else UNFINISHED}"
    return Panel(
        title=title,
        note=note,
        cells=cells(rows.set_index(axes), places, difference=difference),
        rows=_windows(grid, rows),
        columns=[notation.number(ratio) for ratio in grid.ratios],
        full=cells(full, full.index, difference=False),
        scale=title if look.scale == "own" else "",
        difference=difference,
    )


def _windows(grid: PolicyGrid, rows: pd.DataFrame) -> list[str]:
    """Return the names of the grid's windows, with a mark if a published figure's reading is in doubt."""
    doubted = set(rows.loc[rows["sure"] == "no", "local_window"]) if "sure" in rows else set()
    return [notation.number(window) + (UNSURE if window in doubted else "") for window in grid.windows]


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
    columns = min(look.columns or _fitting_columns(panels, look.row), len(panels))
    width, height = _panel_row_size(panels, columns, look.row)
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
        # The panel to the left names the same windows.
        elif panel.rows == panels[index - 1].rows:
            axes.set_yticklabels([])
    for axes in grid[-columns:]:  # the lowest of each column
        axes.set_xlabel("Ratio")
    figure.set_label(caption)
    if look.title:
        figure.suptitle(look.title, fontsize=TITLE_SIZE)
    if look.marks:
        _write_marks(figure, panels, notes)
    return figure


def _panel_row_size(panels: list[Panel], columns: int, most_width: float) -> tuple[float, float]:
    """Return the width and height in inches of a row of so many panels."""
    width = min(most_width, columns * WIDEST)
    if columns == 1:  # in a narrower figure the numbers would lie on one another
        width = max(width, _edge(panels) + _panel_width(panels))
    windows, ratios = len(panels[0].rows), len(panels[0].columns)
    # A line of a title takes 0.15 inches, a further line in a cell 0.12.
    title_height = 0.15 * max(len(panel.lines) for panel in panels) + 0.32
    text_lines = 1 + max(panel.cells["text"].str.count("\n").max() for panel in panels)
    cell_width = (width / columns - BESIDE) / ratios
    highest = HIGH if columns == len(panels) else LOW  # several rows of panels share a page
    cell_height = 0.12 * (text_lines - 1) + min(max(0.75 * cell_width, LOW), highest)
    height = cell_height * windows + title_height
    return width, height


def _caption(panels: list[Panel], name: str, notes: list[str]) -> str:
    """Return the name, the notes, each panel's full cache and chance span, and how many cells have each mark."""
    sentences = [f"{name}: {'; '.join(notes)}"]
    texts: list[str] = []
    total = 0
    for panel in panels:
        _, *facts = panel.lines  # without the title
        if facts:
            _, _, benchmark = panel.title.rpartition(" | ")
            sentences.append(f"{benchmark}: {', '.join(facts)}")
        # A doubtful window counts for each of its cells: [windows, 1] beside [windows, ratios].
        doubts = np.where([[window.endswith(UNSURE)] for window in panel.rows], UNSURE, "")
        texts += (panel.matrix("label") + panel.matrix("mark") + doubts).ravel().tolist()
        total += len(panel.cells)
    for mark, count in notation.marks(texts).items():
        sentences.append(f"{count} of {total} cells: {notation.MARKS[mark]}")
    return ". ".join(sentences) + "."


def _write_marks(figure: Figure, panels: list[Panel], notes: list[str]) -> None:
    """Explain below a figure its marks and notes."""
    sentences = ["; ".join(notes)]
    if any(panel.pale for panel in panels):
        sentences.append("a pale panel is one whose settings may differ by chance alone (p of 0.05 or more)")
    texts: list[str] = []
    for panel in panels:
        texts += [panel.note, *panel.rows, *panel.cells["text"]]
    sentences += style.marks(texts)
    style.footnote(figure, "   ".join(sentences))


def _with_texts(panel: Panel, look: Look) -> Panel:
    """The panel with the column `text` of what is written into its cells: labels, with marks and intervals if wanted.

    Without marks a panel is as a paper shows it: its title and a number in each cell, in full colours.
    """
    if not look.marks:
        rows = [name.removesuffix(UNSURE) for name in panel.rows]
        panel = replace(panel, note="", cells=panel.cells.assign(mark=""), rows=rows, floor=None)
    texts = panel.cells["label"] + panel.cells["mark"]
    if look.interval:
        intervals = panel.cells["interval"]
        texts += ("\n" + intervals).where(intervals != "", "")
    return replace(panel, cells=panel.cells.assign(text=texts))


def _fitting_columns(panels: list[Panel], width: float) -> int:
    """Return how many panels fit into a row, so that rows have about the same length."""
    title_width = TITLE * max(_longest(panel.lines) for panel in panels)
    panel_width = max(_panel_width(panels), title_width)
    fitting = max(1, int((width - _edge(panels)) / panel_width))
    rows = ceil(len(panels) / fitting)
    return ceil(len(panels) / rows)


def _longest(texts: Iterable[str]) -> int:
    """The letters of the longest line in any of the texts."""
    return max(map(len, "\n".join(texts).split("\n")))


def _panel_width(panels: list[Panel]) -> float:
    """The inches that the cells of a panel take if no two texts touch, with the colour bar beside them."""
    ratios = panels[0].columns
    letters = max(_longest(pd.concat([panel.cells["text"] for panel in panels])), 1 + _longest(ratios))
    # A letter is about 0.52 of the font's size wide; an inch has 72 points.
    return len(ratios) * 0.52 * SIZE * letters / 72 + 0.45


def _edge(panels: list[Panel]) -> float:
    """The inches of the names of the windows beside the first panel of a row, and of the last bar's label."""
    return 0.35 + LETTER * max(_longest(panel.rows) for panel in panels)


def _heatmap(axes: Axes, panel: Panel, ends: tuple[float, float], cmap: str) -> Colorbar | None:
    """Draw one panel, with colours between these ends; return its colour bar, None without a value."""
    # Without any cell the column has no numbers but objects.
    values = panel.matrix("value").astype(float)
    mesh = style.heat_table(axes, values, panel.matrix("text"), cmap=panel.colors(cmap), limits=ends, size=SIZE)
    axes.set_xticks(np.arange(len(panel.columns)) + 0.5, panel.columns)
    axes.set_yticks(np.arange(len(panel.rows)) + 0.5, panel.rows)
    axes.set_title("\n".join(panel.lines), linespacing=1.3)
    if np.isnan(values).all():
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

    A value beyond the scale has its end's colour and is printed in full. The steps with the largest effects have a
    column each, in the text's order; the last column sums the others. Of many tokens only the strongest are shown.
    """
    rows = strongest(values, axis=1, most=MOST_TOKENS)
    columns = strongest(values, axis=0, most=MOST_STEPS)
    shown = values[:, columns]
    names = [shortened(steps[column]) for column in columns]
    notes = ["effect of a step on each answer token's log-probability, by removal; the colours end at -1 and 1"]
    others = len(steps) - len(columns)
    if others:
        sum_of_others = values.sum(axis=1) - shown.sum(axis=1)
        shown = np.column_stack([shown, sum_of_others])
        names.append(f"sum of {counted(others, 'other')}")
        notes.append(f"the {len(columns)} of {len(steps)} steps with the largest effects")
    shown = shown[rows]
    if len(rows) < len(tokens):
        notes.append(f"the {len(rows)} of {len(tokens)} tokens with the largest effects")
    width = min(PAGE_WIDTH, max(5.2, 1.6 + 0.55 * len(names)))
    height = 2.6 + 0.165 * len(rows)
    figure = style.new_figure((width, height))
    axes = figure.subplots()
    labels = np.vectorize("{:z.4f}".format)(shown)  # z: no minus sign before zero
    mesh = style.heat_table(axes, shown, labels, cmap=cmap or style.DIVERGING, limits=(-1.0, 1.0), size=6)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xticks(np.arange(len(names)) + 0.5, names, rotation=40, ha="left", rotation_mode="anchor", fontsize=6.5)
    axes.set_yticks(np.arange(len(rows)) + 0.5, [visible(tokens[row]) for row in rows], fontsize=6.5)
    axes.set(xlabel="Reasoning step", ylabel="Answer token")
    bar = figure.colorbar(mesh, ax=axes, extend="both", ticks=[-1.0, -0.5, 0.0, 0.5, 1.0], aspect=25, pad=0.02)
    bar.set_label("Token Attribution")
    figure.set_label(title)
    figure.supxlabel("\n".join(notes), fontsize=7, color="0.3")
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
    before = line
    equation = ""
    for match in re.finditer(notation.EQUATION, line):  # the last one stays
        equation = match.group()
        before = line[: match.start()]
    room = STEP_LETTERS - len(equation)
    if len(before) > room:
        before = f"{before[: room - 1]}…"
    return before + equation
