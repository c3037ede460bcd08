"""Pictures that compare policies: bars at equal settings, and accuracy against memory."""

from math import ceil
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import words
from analysis.load import in_order
from analysis.numbers.grids import AXES, SharedSetting
from analysis.numbers.metrics import benchmark_views, mean_over_benchmarks, model_title
from analysis.pictures.style import LINE_COLORS, MARKERS, PAGE_WIDTH, STYLE, TURNED, full_cache_level, new_figure, tidy
from analysis.question import question_title
from analysis.words import MISSING, UNFINISHED

POLICY = ["policy", "variant"]

# Light enough for dark text on them, and different in grey print.
BAR_COLOR, FULL_COLOR = "#9ecae1", "#d0d0d0"
LENGTH_COLOR = "#b3400d"
LENGTH_LOOK: dict[str, Any] = {"color": LENGTH_COLOR, "marker": "o", "markersize": 3.2, "linewidth": 1}

# The bars' share of a panel's height, and where the axis of the cache lengths begins above them.
BARS_TOP, LENGTHS_BOTTOM = 0.7, 0.76


@matplotlib.rc_context(STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors, and above them the cache length as a line.

    The first panel is the mean over benchmarks, each other panel one benchmark. The cache length is the mean over
    decoding steps (`metrics.cache_rows`). A policy that lacks a benchmark has no mean. `metrics` gives the title.
    """
    ours = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    bars = _policies(ours)
    ours = ours[ours["benchmark"].isin(_compressed_benchmarks(ours))]
    # Each panel has all policies, in the same places.
    panels = [(title, bars.merge(rows, on=POLICY, how="left")) for title, rows in benchmark_views(ours)]
    small = len(panels) - 1
    lines = ceil(small / 2)
    figure = new_figure((PAGE_WIDTH, 3.4 + 1.6 * lines + (0.6 if small else 0)))
    grid = figure.add_gridspec(1 + lines, 2, height_ratios=[1.5, *[1.0] * lines])
    places = [grid[0, :], *(grid[1 + i // 2, i % 2] for i in range(small))]
    axes = [figure.add_subplot(place) for place in places]
    twins = [one.twinx() for one in axes]
    shown = pd.concat([rows for _, rows in panels])
    # In a sweep that has just begun, no score or length may be known.
    score = (100 * (shown["pass_at_1"] + shown["se"].fillna(0))).fillna(1).max()
    length = shown["mean_cache_length"].fillna(1).max()
    for place, ((title, rows), left, right) in enumerate(zip(panels, axes, twins, strict=True)):
        _bars(left, title, rows, 10 * ceil(score / 10), wide=place == 0)
        _length_line(right, rows, length)
        # The lowest small panel of a column names the policies; the outer panels show the axes' numbers.
        if 0 < place <= small - 2:
            left.set_xticklabels([])
        if place > 0 and place % 2 == 0:
            left.set_yticklabels([])
        if place % 2 == 1 and place < small:
            right.set_yticklabels([])
    axes[0].set_ylabel("Pass@1 (%)", y=BARS_TOP / 2)
    twins[0].set_ylabel("mean cache\nlength (tokens)", y=(1 + LENGTHS_BOTTOM) / 2, color=LENGTH_COLOR, fontsize=8)
    _bars_legend(figure, shown)
    # The question's place may name policies, and takes a line of its own.
    title = setting.title.replace(", question", "\nquestion")
    figure.suptitle(f"{model_title(metrics, model)}: Pass@1 at {title}", fontsize=10)
    return figure


def _bars(axes: Axes, title: str, rows: pd.DataFrame, most: float, *, wide: bool) -> None:
    score, error = 100 * rows["pass_at_1"], 100 * rows["se"].fillna(0)
    colors = [FULL_COLOR if policy == "full" else BAR_COLOR for policy in rows["policy"]]
    whiskers: dict[str, Any] = {"ecolor": "0.25", "capsize": 2, "elinewidth": 0.8, "capthick": 0.8}
    axes.bar(rows.index, score, yerr=error, color=colors, edgecolor="0.45", linewidth=0.5, error_kw=whiskers)
    for place, top, value in zip(rows.index, (score + error).fillna(0), rows["pass_at_1"], strict=True):
        if wide or words.missing(value):
            offset: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "fontsize": 6.5}
            axes.annotate(words.percent(value), (place, top), ha="center", **offset)
    turned = TURNED if wide or len(rows) <= 10 else {**TURNED, "rotation": 90, "va": "center"}
    names = [_shown_name(row) for row in rows.itertuples()]
    axes.set_xticks(rows.index, names, fontsize=7.5 if wide else 6.5, **turned)
    axes.set(xlim=(-0.6, len(rows) - 0.4), ylim=(0, most / BARS_TOP), yticks=_ticks(most, 5))
    axes.set_title(title, fontsize=9)
    axes.tick_params(axis="x", length=0, pad=2)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines["left"].set_bounds(0, most)
    tidy(axes)


def _shown_name(row: Any) -> str:
    return words.policy_title(row.policy, row.variant) + (UNFINISHED if row.status == "partial" else "")


def _length_line(axes: Axes, rows: pd.DataFrame, most: float) -> None:
    axes.plot(rows.index, rows["mean_cache_length"], markeredgecolor="white", markeredgewidth=0.5, **LENGTH_LOOK)
    top = 1.1 * most
    axes.set(ylim=(-top * LENGTHS_BOTTOM / (1 - LENGTHS_BOTTOM), top), yticks=_ticks(top, 3))
    axes.tick_params(axis="y", labelsize=8, colors=LENGTH_COLOR)
    axes.spines["right"].set_color(LENGTH_COLOR)
    axes.spines["right"].set_bounds(0, top)
    axes.spines[["top", "left"]].set_visible(False)


def _ticks(most: float, parts: int) -> list[float]:
    ticks = MaxNLocator(parts, steps=[1, 2, 5, 10]).tick_values(0, most)
    return [tick for tick in ticks if 0 <= tick <= most]


def _compressed_benchmarks(cells: pd.DataFrame) -> list[str]:
    return list(cells.loc[cells["policy"] != "full", "benchmark"].unique())


def _bars_legend(figure: Figure, shown: pd.DataFrame) -> None:
    bars = (Patch(facecolor=FULL_COLOR, edgecolor="0.45"), Patch(facecolor=BAR_COLOR, edgecolor="0.45"))
    line = Line2D([], [], **LENGTH_LOOK)
    entries: dict[str, Any] = {"Pass@1 ± standard error over problems": bars}
    entries["mean cache length over the decoding steps"] = line
    if shown["pass_at_1"].isna().any():
        entries[f"{MISSING} no result"] = Line2D([], [], linestyle="none")
    if (shown["status"] == "partial").any():
        entries[f"{UNFINISHED} not finished"] = Line2D([], [], linestyle="none")
    look: dict[str, Any] = {"ncols": 4, "frameon": False, "fontsize": 7, "columnspacing": 1.2}
    look |= {"handletextpad": 0.5, "handler_map": {tuple: HandlerTuple(ndivide=None)}}
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", **look)


def accuracy_memory_figure(metrics: pd.DataFrame, model: str) -> Figure | None:
    """Draw Pass@1 against the mean cache length, both means over benchmarks; a line per policy through its settings.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values.
    Points that lack a benchmark are left out; there is no figure if no compressed setting has a score. All cells of the
    run are in `metrics`, so that a policy looks the same in the figures of all models.
    """
    ours = metrics[metrics["model"] == model]
    names = _compressed_benchmarks(ours)
    points = mean_over_benchmarks(ours, names).dropna(subset=["pass_at_1", "mean_cache_length"])
    compressed, full = points[points["policy"] != "full"], points[points["policy"] == "full"]
    if compressed.empty:
        return None
    titles = ours.loc[ours["benchmark"].isin(names), "benchmark_title"]
    over = f"mean of {len(names)} benchmarks" if len(names) > 1 else titles.iloc[0]
    with matplotlib.rc_context(STYLE):
        figure = new_figure((PAGE_WIDTH, 4.4))
        axes = figure.add_subplot()
        _lines(axes, compressed, _styles(metrics))
        rows: Any = full.itertuples()
        for row in rows:
            name = f"{words.policy_title('full', row.variant)}:\n{words.decimal(row.mean_cache_length, 0)} tokens"
            full_cache_level(axes, row, name)
        _front(axes, points)
        mark = f"   {UNFINISHED} not finished" if (compressed["status"] == "partial").any() else ""
        axes.set_xlabel(f"mean cache length over the decoding steps (tokens){mark}")
        axes.set_ylabel("Pass@1 (%), ± standard error over problems")
        lines = [f"{model_title(metrics, model)}: Pass@1 against memory", over, question_title(ours)]
        axes.set_title("\n".join(line for line in lines if line), linespacing=1.3)
        tidy(axes, grid="both")
        figure.legend(loc="outside right upper", frameon=False, fontsize=7.5, labelspacing=0.45)
    return figure


def pareto_front(points: pd.DataFrame) -> pd.DataFrame:
    """Select the points that no other point beats with less or equal memory and a higher score, or less and as high.

    The points are rows with mean_cache_length and pass_at_1; they come in order of memory, of equal ones the first.
    """
    ordered = points.sort_values(["mean_cache_length", "pass_at_1"], ascending=[True, False], kind="stable")
    before = ordered["pass_at_1"].cummax().shift(fill_value=-np.inf)
    return ordered[ordered["pass_at_1"] > before]


def series(settings: pd.DataFrame) -> list[pd.DataFrame]:
    """Split one policy's settings into the series that a line goes through, each in order of mean_cache_length.

    There is one series if one axis alone tells all settings apart; otherwise one for each value of the other axes,
    along the axis with the most values.
    """
    values = settings[AXES].nunique()
    ordered = settings.sort_values("mean_cache_length", kind="stable")
    if values.max() >= len(settings):
        return [ordered]
    others = [name for name in AXES if name != values.idxmax()]
    return [rows for _, rows in ordered.groupby(others, dropna=False)]


def _policies(cells: pd.DataFrame) -> pd.DataFrame:
    """The policies and variants of the cells in the order of display; a policy's original form comes first."""
    policies = cells[POLICY].drop_duplicates()
    titles = [words.policy_title(*key) for key in policies.itertuples(index=False)]
    return in_order(policies.assign(title=titles), by=["policy", "title"])[POLICY]


def _styles(metrics: pd.DataFrame) -> dict[Any, tuple[str, str]]:
    keys = _policies(metrics[metrics["policy"] != "full"]).itertuples(index=False, name=None)
    return {key: (LINE_COLORS[i % len(LINE_COLORS)], MARKERS[i % len(MARKERS)]) for i, key in enumerate(keys)}


def _lines(axes: Axes, points: pd.DataFrame, styles: dict[Any, tuple[str, str]]) -> None:
    keys = _policies(points).itertuples(index=False, name=None)
    lines = {key: series(points[(points[POLICY] == key).all(axis=1)]) for key in keys}
    split = [key for key, parts in lines.items() if len(parts) > 1]
    for key, parts in lines.items():
        # The legend has room for the parts of one policy only.
        _policy_lines(axes, parts, *styles[key], named=split == [key] and len(parts) <= len(MARKERS))
    # The compressed policies set the limits; the full cache and the front are drawn up to them.
    left, right = axes.get_xlim()
    axes.set_xlim(left - 0.05 * (right - left), right + 0.05 * (right - left))


def _policy_lines(axes: Axes, parts: list[pd.DataFrame], color: str, marker: str, *, named: bool) -> None:
    look: dict[str, Any] = {"color": color, "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
    look |= {"linewidth": 1, "elinewidth": 0.7, "capsize": 1.5}
    name = _shown_name(next(pd.concat(parts).sort_values("status", ascending=False).itertuples()))
    for place, line in enumerate(parts):
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        label = f"{name}, {_part_name(line, parts)}" if named else None if place else name
        own = MARKERS[place % len(MARKERS)] if named else marker
        axes.errorbar(line["mean_cache_length"], score, error, label=label, marker=own, **look)


def _part_name(line: pd.DataFrame, parts: list[pd.DataFrame]) -> str:
    fixed = [name for name in AXES if all(part[name].nunique() == 1 for part in parts)]
    return words.axes({name: line[name].iloc[0] for name in fixed if pd.concat(parts)[name].nunique() > 1})


def _front(axes: Axes, points: pd.DataFrame) -> None:
    front = pareto_front(points)
    # The full cache may lie far to the right of the picture, and the step to it must not widen the limits.
    limits = axes.get_xlim(), axes.get_ylim()
    look: dict[str, Any] = {"color": "0.8", "linewidth": 4, "solid_joinstyle": "miter", "zorder": 0.5}
    scores = 100 * front["pass_at_1"]
    axes.step(front["mean_cache_length"], scores, where="post", label="Pareto front", **look)
    axes.set(xlim=limits[0], ylim=limits[1])
