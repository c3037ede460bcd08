"""Pictures that compare policies: bars at equal settings, and accuracy against memory."""

from math import ceil
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, MISSING, UNFINISHED, Look
from kvsweep.analysis.load import in_order
from kvsweep.analysis.numbers.grids import AXES, SharedSetting
from kvsweep.analysis.numbers.metrics import benchmark_views, mean_over_benchmarks, model_title
from kvsweep.analysis.pictures.style import (
    MARKERS,
    STYLE,
    full_cache_level,
    new_figure,
    panels,
    percent_axis,
    policy_looks,
    tidy,
    wrapped,
)
from kvsweep.analysis.question import question_title

POLICY = ["policy", "variant"]

# Light enough for dark text on them, and different in grey print.
BAR_COLOR, FULL_COLOR, LENGTH_COLOR = "#9ecae1", "#d0d0d0", "#b3400d"

# Panels of bars in a row, and the height of a bar in inches.
MOST_PANELS, BAR = 6, 0.155


@matplotlib.rc_context(STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors and numbers, and in the last panel the cache length.

    The first panel is the mean over benchmarks, each further one a benchmark. The cache length is the mean over
    benchmarks of the mean over decoding steps (`metrics.cache_rows`). A policy that lacks a benchmark has no mean.
    `metrics` gives the title.
    """
    ours = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    bars = _policies(ours)
    ours = ours[ours["benchmark"].isin(_compressed_benchmarks(ours))]
    # Each panel has all policies, in the same places.
    views = [(title, bars.merge(rows, on=POLICY, how="left")) for title, rows in benchmark_views(ours)]
    columns = min(len(views) + 1, MOST_PANELS)
    lines = ceil((len(views) + 1) / columns)
    figure = new_figure((look.width, lines * (BAR * len(bars) + 0.6) + 1.15))
    axes = panels(figure, len(views) + 1, columns, sharey=True)
    for one, (title, rows) in zip(axes, views, strict=False):
        _bars(one, title, rows)
    _lengths(axes[-1], views[0][1])
    shown = pd.concat([rows for _, rows in views])
    unfinished = set(shown.loc[shown["status"] == "partial", POLICY].itertuples(index=False, name=None))
    keys = bars.itertuples(index=False, name=None)
    names = [format.policy_title(*key) + UNFINISHED * (key in unfinished) for key in keys]
    axes[0].set_yticks(bars.index, names)
    axes[0].set_ylim(len(bars) - 0.4, -0.6)
    _bars_legend(figure, shown)
    # The question's place may name policies, and takes a line of its own.
    title = setting.title.replace(", question", "\nquestion")
    figure.suptitle(wrapped(f"{model_title(metrics, model)}: Pass@1 at {title}", look.width))
    return figure


def _bars(axes: Axes, title: str, rows: pd.DataFrame) -> None:
    score, error = 100 * rows["pass_at_1"], 100 * rows["se"].fillna(0)
    colors = [FULL_COLOR if policy == "full" else BAR_COLOR for policy in rows["policy"]]
    whiskers: dict[str, Any] = {"ecolor": "0.25", "elinewidth": 0.8}
    ends = [error, error.where(score + error <= 100, 100 - score)]
    axes.barh(rows.index, score, xerr=ends, color=colors, edgecolor="0.45", linewidth=0.5, error_kw=whiskers)
    if (score == 0).any():  # a bar of no length is a stroke
        axes.plot(
            score[score == 0],
            rows.index[score == 0],
            "|",
            color="0.25",
            markersize=7,
            markeredgewidth=1.6,
            clip_on=False,
        )
    _numbers(axes, [format.percent(value) for value in rows["pass_at_1"]], 100)
    axes.set_title(title.replace(" benchmarks", "\nbenchmarks"))
    axes.set_xticks([0, 50, 100])


def _lengths(axes: Axes, rows: pd.DataFrame) -> None:
    most = 1.1 * rows["mean_cache_length"].fillna(1).max()
    axes.plot(rows["mean_cache_length"], rows.index, "o", color=LENGTH_COLOR, markersize=3.2)
    _numbers(axes, [format.decimal(length, 0) for length in rows["mean_cache_length"]], most)
    axes.set_title("cache length")
    axes.xaxis.set_major_locator(MaxNLocator(2))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most])


def _numbers(axes: Axes, numbers: list[str], most: float) -> None:
    """End the axis at `most`, and write a number beside each bar behind the end."""
    beside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "xytext": (26, 0), "textcoords": "offset points"}
    for place, number in enumerate(numbers):
        axes.annotate(number, (1, place), ha="right", va="center", fontsize=6.5, **beside)
    axes.set_xlim(0, most)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_color("0.7")


def _shown_name(row: Any) -> str:
    return format.policy_title(row.policy, row.variant) + (UNFINISHED if row.status == "partial" else "")


def _compressed_benchmarks(cells: pd.DataFrame) -> list[str]:
    return list(cells.loc[cells["policy"] != "full", "benchmark"].unique())


def _bars_legend(figure: Figure, shown: pd.DataFrame) -> None:
    blank = Line2D([], [], linestyle="none")
    entries: dict[str, Any] = {
        "Pass@1 (%) ± standard error over problems": Patch(facecolor=BAR_COLOR, edgecolor="0.45"),
        "mean cache length over the decoding steps (tokens)": Line2D(
            [], [], color=LENGTH_COLOR, marker="o", linewidth=0
        ),
    }
    if shown["pass_at_1"].isna().any():
        entries[f"{MISSING} no result"] = blank
    if (shown["status"] == "partial").any():
        entries[f"{UNFINISHED} not finished"] = blank
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=2, frameon=False)


def accuracy_memory_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against the mean cache length, both means over benchmarks; a line per policy through its settings.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values.
    The names stand beside the picture in the order of the scores, each tied to its line. Points that lack a benchmark
    are left out; there is no figure if no compressed setting has a score.
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
        lines = _named_lines(compressed)
        height = max(3.6, 0.135 * len(lines) + 1.2)
        figure = new_figure((look.width, height))
        axes = figure.add_subplot()
        _draw_lines(axes, lines)
        # The compressed policies set the limits; the full cache and the front are drawn up to them.
        axes.margins(x=0.05)
        axes.set_xlim(axes.get_xlim())
        rows: Any = full.itertuples()
        for row in rows:
            _full_cache(axes, row)
        _front(axes, points)
        percent_axis(axes)
        _direct_labels(axes, lines, height)
        mark = f"   {UNFINISHED} not finished" if (compressed["status"] == "partial").any() else ""
        axes.set_xlabel(f"mean cache length over the decoding steps (tokens){mark}")
        axes.set_ylabel("Pass@1 (%), ± standard error over problems")
        question = question_title(ours)
        first = f"{model_title(metrics, model)}: Pass@1 against memory, {over}; grey: the Pareto front"
        figure.suptitle(wrapped("\n".join(line for line in (first, question) if line), look.width))
        tidy(axes, grid="both")
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
    titles = [format.policy_title(*key) for key in policies.itertuples(index=False)]
    return in_order(policies.assign(title=titles), by=["policy", "title"])[POLICY]


def _full_cache(axes: Axes, row: Any) -> None:
    """Draw the full cache's level with its name; only the name, where the level would squeeze all other points."""
    low, high = axes.get_ylim()
    score = format.percent_pm(row.pass_at_1, row.se)
    name = f"{format.policy_title('full', row.variant)}: {score} at {format.decimal(row.mean_cache_length, 0)} tokens"
    place: dict[str, Any] = {"xytext": (2, 2), "textcoords": "offset points", "fontsize": 7}
    if 100 * row.pass_at_1 > high + 0.75 * (high - low):
        axes.annotate(f"{name}, above this picture", (0, 1), xycoords="axes fraction", **place)
        return
    full_cache_level(axes, row, name)
    axes.annotate(name, (axes.get_xlim()[0], 100 * row.pass_at_1), **place)


# A line of the memory figure: its name or None, its points, and its look.
Line = tuple[str | None, pd.DataFrame, dict[str, Any]]


def _named_lines(points: pd.DataFrame) -> list[Line]:
    keys = list(_policies(points).itertuples(index=False, name=None))
    parts = {key: series(points[(points[POLICY] == key).all(axis=1)]) for key in keys}
    split = [key for key in keys if len(parts[key]) > 1]
    lines: list[Line] = []
    for key, look in policy_looks(keys).items():
        name = _shown_name(next(pd.concat(parts[key]).sort_values("status", ascending=False).itertuples()))
        # The parts of one policy have names and markers of their own; of several policies that would be too many.
        named = split == [key] and len(parts[key]) <= len(MARKERS)
        for place, line in enumerate(parts[key]):
            own = f"{name}, {_part_name(line, parts[key])}" if named else None if place else name
            lines.append((own, line, look | {"marker": MARKERS[place]} if named else look))
    return lines


def _draw_lines(axes: Axes, lines: list[Line]) -> None:
    for name, line, look in lines:
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        ends = [error.where(score >= error, score), error.where(score + error <= 100, 100 - score)]
        more: dict[str, Any] = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
        more |= {"linewidth": 1, "elinewidth": 0.7, "label": name}
        axes.errorbar(line["mean_cache_length"], score, ends, **look, **more)


def _direct_labels(axes: Axes, lines: list[Line], height: float) -> None:
    """Write each line's name right of the picture, at the height of its last point or as near as there is room."""
    named = [(line.iloc[-1], name, look) for name, line, look in lines if name]
    named.sort(key=lambda item: item[0]["pass_at_1"])
    low, high = axes.get_ylim()
    # A line of text, as a share of the picture's height.
    gap = 1.25 * 7 / 72 / (height - 1.1)
    heights = spread([(100 * point["pass_at_1"] - low) / (high - low) for point, _, _ in named], gap)
    for at, (point, name, look) in zip(heights, named, strict=True):
        key: dict[str, Any] = {"color": look["color"], "marker": look["marker"], "markersize": 5, "clip_on": False}
        axes.plot([1.03], [at], transform=axes.transAxes, markeredgecolor="white", markeredgewidth=0.5, **key)
        axes.text(1.05, at, name, transform=axes.transAxes, va="center", fontsize=7)
        tie: dict[str, Any] = {"arrowstyle": "-", "color": "0.7", "linewidth": 0.4, "shrinkA": 0, "shrinkB": 3}
        place = (point["mean_cache_length"], 100 * point["pass_at_1"])
        axes.annotate("", place, (1.02, at), textcoords="axes fraction", arrowprops=tie, zorder=1)


def spread(wanted: list[float], gap: float) -> list[float]:
    """Move ascending heights so far apart that each lies `gap` above the one before, and none above 1 if possible."""
    heights = list(wanted)
    for place in range(1, len(heights)):
        heights[place] = max(heights[place], heights[place - 1] + gap)
    top = 1.0
    for place in reversed(range(len(heights))):
        heights[place] = min(heights[place], top)
        top = heights[place] - gap
    return heights


def _part_name(line: pd.DataFrame, parts: list[pd.DataFrame]) -> str:
    fixed = [name for name in AXES if all(part[name].nunique() == 1 for part in parts)]
    return format.axes({name: line[name].iloc[0] for name in fixed if pd.concat(parts)[name].nunique() > 1})


def _front(axes: Axes, points: pd.DataFrame) -> None:
    front = pareto_front(points)
    # The full cache may lie far to the right of the picture, and the step to it must not widen the limits.
    limits = axes.get_xlim(), axes.get_ylim()
    look: dict[str, Any] = {"color": "0.8", "linewidth": 4, "solid_joinstyle": "miter", "zorder": 0.5}
    scores = 100 * front["pass_at_1"]
    axes.step(front["mean_cache_length"], scores, where="post", label="Pareto front", **look)
    axes.set(xlim=limits[0], ylim=limits[1])
