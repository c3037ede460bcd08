"""Rankings: policies by Pass@1, the scores of a grid and which are tied with the best, and replays by KL."""

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.load import in_order
from kvsweep.analysis.notation import DEFAULT_LOOK, UNFINISHED, Look
from kvsweep.analysis.statistics.grids import SharedSetting
from kvsweep.analysis.statistics.metrics import benchmark_views, compressed_benchmarks, model_title
from kvsweep.analysis.statistics.sentences import PanelVerdict

POLICY = ["policy", "variant"]

# Light enough for dark text on top, and different in grey print.
BAR_COLOR, FULL_COLOR, LENGTH_COLOR = "#9ecae1", "#d0d0d0", "#b3400d"
BAND_COLOR, SIGNAL_COLOR, NOISE_COLOR = "0.85", "#0072B2", "#D55E00"

# Inches: a bar's height, the least width of a panel of bars with numbers, and a letter's width.
BAR, PANEL, LETTER = 0.155, 0.72, 0.047
# If a row has fewer panels, only the mean is shown: more rows would make the figure higher than a page.
FEWEST_IN_A_ROW = 4
# Inches of all panels of the noise figure together: with the note they fit on a page.
MOST_HIGH = 9.0
# A page has room for this many names of replayed settings above the other panels.
MOST = 40


@matplotlib.rc_context(style.STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors and numbers, best first, with the cache length at the end.

    Of several benchmarks the first panel is their mean, missing if one of them is. Each further panel is a benchmark,
    with verdict marks, and is left out if the figure is narrow. The length is the mean over benchmarks and steps
    (`metrics.cache_rows`).
    """
    cells = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    cells = cells[cells["benchmark"].isin(compressed_benchmarks(cells))]
    views = benchmark_views(cells)
    _, mean = views[0]
    # The full cache first, then the best scores.
    ranked = mean.assign(other=mean["policy"] != "full", loss=-mean["pass_at_1"])
    bars = in_order(ranked, by=["other", "loss", "policy"])[POLICY].drop_duplicates(ignore_index=True)
    unfinished = set(cells.loc[cells["status"] != "done", POLICY].itertuples(index=False, name=None))
    names = []
    for policy in bars.itertuples(index=False, name=None):
        mark = UNFINISHED if policy in unfinished else ""
        names.append(notation.policy_title(*policy) + mark)
    # What the names and margins leave of the width; the lengths need a column too.
    columns = int((look.width - LETTER * max(map(len, names)) - 0.2) / PANEL)
    if columns < min(FEWEST_IN_A_ROW, len(views) + 1):
        views = views[:1]
        columns = 2  # the mean, and the lengths
    columns = min(columns, len(views) + 1)
    height = BAR * len(bars) + 0.55
    figure, panels = style.panels(look.width, len(views) + 1, columns, row_height=height, extra_height=0.8, sharey=True)
    *score_panels, length_panel = panels
    texts = list(names)
    for axes, (title, rows) in zip(score_panels, views, strict=True):
        # Each panel has all policies, in the same places.
        texts += _bars(axes, title, bars.merge(rows, on=POLICY, how="left"))
    _lengths(length_panel, bars.merge(mean, on=POLICY, how="left"))
    first = panels[0]  # whose vertical axis all share
    first.set_yticks(bars.index, names)
    first.set_ylim(len(bars) - 0.4, -0.6)
    # The legend of the bars explains ± already.
    for mark in style.marks(text.replace("±", "") for text in texts):
        first.plot([], [], " ", label=mark)  # draws nothing
    style.legend_below(figure)
    figure.set_label(f"{model_title(metrics, model)}: Pass@1 per policy at {setting.title}")
    return figure


def _bars(axes: Axes, title: str, rows: pd.DataFrame) -> list[str]:
    """Draw the bars of a benchmark, or of the mean, which has no verdicts; return the numbers beside them."""
    scores, errors = style.percent_errors(rows)
    colors = [FULL_COLOR if policy == "full" else BAR_COLOR for policy in rows["policy"]]
    error_look = {"ecolor": "0.25", "elinewidth": 0.8}
    axes.barh(rows.index, scores, xerr=errors, color=colors, edgecolor="0.45", linewidth=0.5, error_kw=error_look)
    # This draws nothing and gives the legend a bar.
    axes.fill_between([], [], color=BAR_COLOR, label="Pass@1 (%) ± standard error over problems")
    if "decision" in rows:
        marks = rows["decision"].map(notation.DECISION_MARKS).fillna("")
        numbers = list(rows["pass_at_1"].map(notation.percent) + marks)
    else:
        numbers = [notation.percent_pm(row.pass_at_1, row.se) for row in notation.rows(rows)]
    _numbers(axes, numbers, 100)
    axes.set_title(title.replace(" benchmarks", "\nbenchmarks"))
    axes.set_xticks([0, 50, 100])
    return numbers


def _lengths(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the mean cache lengths as dots, in the places of the bars, with numbers beside them."""
    lengths = rows["mean_cache_length"]
    end = 1.1 * lengths.fillna(1).max()
    label = "mean cache length over the decoding steps (tokens)"
    axes.plot(lengths, rows.index, "o", color=LENGTH_COLOR, markersize=3.2, label=label)
    _numbers(axes, [notation.decimal(length, 0) for length in lengths], end)
    axes.set_title("cache\nlength")
    axes.xaxis.set_major_locator(MaxNLocator(2))


def _numbers(axes: Axes, numbers: list[str], end: float) -> None:
    """Write a number before each bar, and end the axis at `end`."""
    for row, number in enumerate(numbers):
        axes.annotate(
            number, (0, row), fontsize=6.5, xytext=(-3, 0), textcoords="offset points", ha="right", va="center"
        )
    axes.set_xlim(0, end)
    style.tidy(axes, grid="x")
    # The names stand left of the numbers: `pad` is in points, 72 to an inch.
    axes.tick_params(axis="y", length=0, pad=72 * LETTER * max(map(len, numbers)) + 7)
    axes.spines["left"].set_color("0.7")


@matplotlib.rc_context(style.STYLE)
def noise_figure(verdicts: list[PanelVerdict], look: Look = DEFAULT_LOOK) -> Figure:
    """Draw one panel per verdict: its settings' Pass@1 in ascending order, and a grey band. All must have a floor.

    The band reaches from the best score down by `NoiseFloor.critical`: settings inside are tied with the best.
    """
    columns = min(2 if look.width > 5 else 1, len(verdicts))
    figure, grid = style.panels(
        look.width, len(verdicts), columns, row_height=1.8, extra_height=0.38, max_height=MOST_HIGH, sharey=True
    )
    floors = [verdict.floor for verdict in verdicts if verdict.floor is not None]
    for axes, verdict, floor in zip(grid, verdicts, floors, strict=True):
        scores = 100 * np.sort(floor.scores)
        # From the lowest score that is tied with the best.
        axes.axhspan(scores[-1] - 100 * floor.critical, scores[-1], color=BAND_COLOR, linewidth=0)
        color = SIGNAL_COLOR if floor.signal else NOISE_COLOR
        axes.plot(np.arange(1, len(scores) + 1), scores, "o", markersize=3.5, color=color)
        title = style.wrapped(f"{verdict.title}\nscores {', '.join(floor.words)}", look.width / columns)
        axes.set_title(title, fontsize=7, linespacing=1.3)
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    # The panels share this axis, whose limits are known when all are drawn.
    for axes in grid:
        style.percent_axis(axes)
    for axes in grid[-columns:]:  # the lowest of each column
        axes.set_xlabel("settings, the lowest score first")
    figure.supylabel("Pass@1 (%)", fontsize=8)
    note = "one dot per setting, on one axis: blue where they span more than chance, orange where not;"
    style.footnote(figure, f"{note} grey: tied with the best")
    figure.set_label("Each grid's scores in ascending order, and which are statistically tied with the best")
    return figure


@matplotlib.rc_context(style.STYLE)
def fidelity_figure(table: pd.DataFrame, bins: pd.DataFrame, title: str, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw a model's KL per setting (a `fidelity` table), smallest first, and that of cells by `fidelity_bins`."""
    # If all settings share a trigger, the title names it.
    budgets = table["budget"].dropna().unique()
    named = table.assign(setting=notation.settings(table, trigger=len(budgets) > 1))
    settings = named.groupby("setting")["kl"].mean().sort_values().index
    nearest = settings[:MOST]
    height = 0.13 * len(nearest) + 0.9
    figure = style.new_figure((look.width, height + 3.2))
    panels: Any = figure.subplot_mosaic([["cells"], ["distance"], ["entropy"]], height_ratios=[height, 1.6, 1.6])
    _kl_of_settings(panels["cells"], named, nearest)
    darkest_last = named.sort_values("kl", ascending=False)["cell_id"].tolist()
    for kind, label in {"distance": "tokens since last eviction", "entropy": "entropy of full cache (nats)"}.items():
        _kl_of_bins(panels[kind], bins[bins["by"] == kind], darkest_last)
        panels[kind].set_xlabel(label)
    style.legend_below(figure)
    trigger = f", trigger {notation.number(budgets[0])}" if len(budgets) == 1 else ""
    number = "" if len(nearest) == len(settings) else f", the {len(nearest)} nearest settings"
    meaning = f"KL of replayed texts with 95% intervals{number}; the darker a line, the nearer its cell"
    figure.set_label(f"{title}{trigger}: {meaning}")
    return figure


def _kl_of_settings(axes: Axes, table: pd.DataFrame, settings: pd.Index) -> None:
    """Draw the KL of these settings with its interval, a line per setting, a marker per benchmark."""
    shown = table[table["setting"].isin(settings)]
    for number, benchmark in enumerate(table["benchmark_title"].unique()):
        rows = shown[shown["benchmark_title"] == benchmark]
        look = style.look_of(number) | {"linestyle": "none", "label": benchmark, "markersize": 3, "elinewidth": 0.8}
        heights = settings.get_indexer(pd.Index(rows["setting"]))
        axes.errorbar(rows["kl"], heights, xerr=1.96 * rows["kl_se"].fillna(0), **look)
    axes.set_yticks(range(len(settings)), list(settings), fontsize=6)
    axes.set(ylim=(len(settings) - 0.4, -0.6), xlabel="KL (nats per token)")
    style.tidy(axes, grid="both")


def _kl_of_bins(axes: Axes, bins: pd.DataFrame, cell_ids: list[str]) -> None:
    """Draw the KL of each cell over the lower bounds of its bins, the last cell darkest."""
    drawn = bins[bins["kl"] > 0]  # on a logarithmic axis
    bounds = pd.Index(sorted(drawn["from"].unique()))
    for number, cell_id in enumerate(cell_ids):
        cell_bins = drawn[drawn["cell_id"] == cell_id]
        # The dark end of this map is 0.
        color = matplotlib.colormaps["viridis"](1 - number / max(1, len(cell_ids) - 1))
        places = bounds.get_indexer(pd.Index(cell_bins["from"]))
        axes.plot(places, cell_bins["kl"], marker=".", markersize=3, linewidth=0.6, color=color)
    axes.set_xticks(range(len(bounds)), [f"{bound:g}" for bound in bounds])
    axes.set(ylabel="KL (nats per token)", yscale="log")
    axes.yaxis.set_major_formatter(style.PlainLogFormatter())
    axes.yaxis.set_minor_formatter(style.PlainLogFormatter())
    style.tidy(axes, grid="both")
