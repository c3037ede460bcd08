"""Pictures that compare policies: bars at equal settings, and accuracy against memory."""

from math import ceil
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from kvsweep.analysis import format
from kvsweep.analysis.format import AXES, DEFAULT_LOOK, MARKS, UNFINISHED, Look
from kvsweep.analysis.load import in_order
from kvsweep.analysis.numbers.grids import SharedSetting
from kvsweep.analysis.numbers.metrics import benchmark_views, mean_over_benchmarks, model_title
from kvsweep.analysis.pictures import style
from kvsweep.analysis.question import question_title

POLICY = ["policy", "variant"]

# Light enough for dark text on them, and different in grey print.
BAR_COLOR, FULL_COLOR, LENGTH_COLOR = "#9ecae1", "#d0d0d0", "#b3400d"

# In inches: the height of a bar, the least width of a panel of bars with its numbers, a letter's width, a small one's.
BAR, PANEL, LETTER, SMALL = 0.155, 0.82, 0.056, 0.046
# A row with fewer panels than this shows the mean alone: in more rows the figure would be higher than a page.
FEWEST_IN_A_ROW = 4


@matplotlib.rc_context(style.STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors and numbers, the best first, and at the end the cache length.

    The first panel is the mean over benchmarks, each further one a benchmark with the mark of each policy's verdict; a
    narrow figure has the mean alone. The cache length is the mean over benchmarks of the mean over decoding steps
    (`metrics.cache_rows`). A policy that lacks a benchmark has no mean. `metrics` gives the title.
    """
    ours = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    ours = ours[ours["benchmark"].isin(_compressed_benchmarks(ours))]
    views = benchmark_views(ours)
    bars = _best_first(_policies(ours), views[0][1])
    names = [format.policy_title(*key) for key in bars.itertuples(index=False)]
    columns = int((look.width - LETTER * max(map(len, names)) - 0.2) / PANEL)
    if columns < min(FEWEST_IN_A_ROW, len(views) + 1):
        views, columns = views[:1], 2
    columns = min(columns, len(views) + 1)
    # Each panel has all policies, in the same places.
    views = [(title, bars.merge(rows, on=POLICY, how="left")) for title, rows in views]
    lines = ceil((len(views) + 1) / columns)
    figure = style.new_figure((look.width, lines * (BAR * len(bars) + 0.55) + 1.0))
    axes = style.panels(figure, len(views) + 1, columns, sharey=True)
    for one, (title, rows) in zip(axes, views, strict=False):
        _bars(one, title, rows)
    _lengths(axes[-1], views[0][1])
    unfinished = set(ours.loc[ours["status"] != "done", POLICY].itertuples(index=False, name=None))
    keys = bars.itertuples(index=False, name=None)
    marked = [name + UNFINISHED * (key in unfinished) for name, key in zip(names, keys, strict=True)]
    axes[0].set_yticks(bars.index, marked)
    axes[0].set_ylim(len(bars) - 0.4, -0.6)
    written = {text.get_text()[-1] for one in axes for text in one.texts} | {UNFINISHED for _ in unfinished}
    _bars_legend(figure, look.width, written)
    figure.suptitle(style.wrapped(f"{model_title(metrics, model)}: Pass@1 at {setting.title}", look.width))
    return figure


def _best_first(policies: pd.DataFrame, scores: pd.DataFrame) -> pd.DataFrame:
    """The policies by falling score, those without one last; the full cache is above all others."""
    rows = policies.merge(scores[[*POLICY, "pass_at_1"]], on=POLICY, how="left")
    rows = rows.assign(other=rows["policy"] != "full", loss=-rows["pass_at_1"])
    return rows.sort_values(["other", "loss"], kind="stable", ignore_index=True)[POLICY]


def _bars(axes: Axes, title: str, rows: pd.DataFrame) -> None:
    score, ends = style.percent_errors(rows)
    colors = [FULL_COLOR if policy == "full" else BAR_COLOR for policy in rows["policy"]]
    whiskers: dict[str, Any] = {"ecolor": "0.25", "elinewidth": 0.8}
    axes.barh(rows.index, score, xerr=ends, color=colors, edgecolor="0.45", linewidth=0.5, error_kw=whiskers)
    if (score == 0).any():  # a bar of no length is a stroke
        stroke: dict[str, Any] = {"color": "0.25", "markersize": 7, "markeredgewidth": 1.6, "clip_on": False}
        axes.plot(score[score == 0], rows.index[score == 0], "|", **stroke)
    shown: Any = rows.itertuples()
    if "decision" in rows:
        marks = format.DECISION_MARKS
        _numbers(axes, [format.percent(row.pass_at_1) + marks.get(row.decision, "") for row in shown], 100)
    else:
        _numbers(axes, [format.percent_pm(row.pass_at_1, row.se) for row in shown], 100)
    axes.set_title(title.replace(" benchmarks", "\nbenchmarks"))
    axes.set_xticks([0, 50, 100])


def _lengths(axes: Axes, rows: pd.DataFrame) -> None:
    most = 1.1 * rows["mean_cache_length"].fillna(1).max()
    axes.plot(rows["mean_cache_length"], rows.index, "o", color=LENGTH_COLOR, markersize=3.2)
    _numbers(axes, [format.decimal(length, 0) for length in rows["mean_cache_length"]], most)
    axes.set_title("cache\nlength")
    axes.xaxis.set_major_locator(MaxNLocator(2))
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= most])


def _numbers(axes: Axes, numbers: list[str], most: float) -> None:
    """Write a number before each bar, and end the axis at `most`."""
    place: dict[str, Any] = {"xytext": (-3, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
    for line, number in enumerate(numbers):
        axes.annotate(number, (0, line), fontsize=6.5, **place)
    axes.set_xlim(0, most)
    style.tidy(axes, grid="x")
    # The names stand left of the numbers.
    axes.tick_params(axis="y", length=0, pad=72 * LETTER * max(map(len, numbers)) + 1)
    axes.spines["left"].set_color("0.7")


def _compressed_benchmarks(cells: pd.DataFrame) -> list[str]:
    return list(cells.loc[cells["policy"] != "full", "benchmark"].unique())


def _bars_legend(figure: Figure, width: float, marks: set[str]) -> None:
    """Explain the bars, the dots and those `marks` that are written."""
    dot = Line2D([], [], color=LENGTH_COLOR, marker="o", linewidth=0)
    entries: dict[str, Any] = {
        "Pass@1 (%) ± standard error over problems": Patch(facecolor=BAR_COLOR, edgecolor="0.45"),
        "mean cache length over the decoding steps (tokens)": dot,
    }
    entries |= {f"{mark} {text}": Line2D([], [], linestyle="none") for mark, text in MARKS.items() if mark in marks}
    columns = 2 if width > 6 else 1
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=columns, frameon=False)


@matplotlib.rc_context(style.STYLE)
def accuracy_memory_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against the mean cache length, both means over benchmarks; a line per policy through its settings.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values.
    The points of the Pareto front have names; the legend has all, the best first. Points that lack a benchmark are left
    out; there is no figure if no compressed setting has a score.
    """
    ours = metrics[metrics["model"] == model]
    names = _compressed_benchmarks(ours)
    points = mean_over_benchmarks(ours, names).dropna(subset=["pass_at_1", "mean_cache_length"])
    compressed, full = points[points["policy"] != "full"], points[points["policy"] == "full"]
    if compressed.empty:
        return None
    lines = _named_lines(compressed)
    # The legend lies beside the picture, or below a narrow one in as many columns as fit.
    entries = len([name for name, _, _ in lines if name]) + 2
    longest = max(len(name) for name, _, _ in lines if name) + 7
    beside = look.width > 6
    columns = 1 if beside else max(1, int(look.width / (SMALL * longest + 0.25)))
    height = (0.16 if beside else 0.13) * ceil(entries / columns) + (0.9 if beside else 3.1)
    figure = style.new_figure((look.width, max(height, 3.4)))
    axes = figure.add_subplot()
    _draw_lines(axes, lines)
    # The compressed policies set the limits; the full cache and the front are drawn up to them.
    axes.margins(x=0.05)
    axes.set_xlim(axes.get_xlim())
    rows: Any = full.itertuples()
    for row in rows:
        _full_cache(axes, row)
    front = _front(axes, points)
    style.percent_axis(axes)
    mark = f" ({UNFINISHED} not finished)" if (compressed["status"] == "partial").any() else ""
    axes.set_xlabel(f"mean cache length (tokens){mark}")
    axes.set_ylabel("Pass@1 (%) ± standard error")
    over = f"mean of {len(names)} benchmarks" if len(names) > 1 else ours["benchmark_title"].iloc[0]
    title = f"{model_title(metrics, model)}: Pass@1 against memory, {over}, {question_title(ours)}".removesuffix(", ")
    figure.suptitle(style.wrapped(title, look.width))
    style.tidy(axes, grid="both")
    handles, labels = axes.get_legend_handles_labels()
    how: dict[str, Any] = {"frameon": False, "columnspacing": 0.8, "handlelength": 1.6}
    if beside:
        axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1.02), **how)
    else:
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **how | {"fontsize": 6})
    _name_points(axes, front[front["policy"] != "full"], points)
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
    values = settings[list(AXES)].nunique()
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
    """Draw the full cache's level; only its name, where the level would squeeze all other points."""
    low, high = axes.get_ylim()
    score = format.percent_pm(row.pass_at_1, row.se)
    name = f"{format.policy_title('full', row.variant)}: {score}\nat {format.decimal(row.mean_cache_length, 0)} tokens"
    if 100 * row.pass_at_1 > high + 0.75 * (high - low):
        axes.plot([], [], " ", label=f"{name}, above this picture")
    else:
        style.full_cache_level(axes, row, name)


# A line of the memory figure: its name or None, its points, and its look.
Line = tuple[str | None, pd.DataFrame, dict[str, Any]]


def _named_lines(points: pd.DataFrame) -> list[Line]:
    """The lines of all policies, the one with the best score first."""
    keys = list(_policies(points).itertuples(index=False, name=None))
    parts = {key: series(points[(points[POLICY] == key).all(axis=1)]) for key in keys}
    split = [key for key in keys if len(parts[key]) > 1]
    lines: list[Line] = []
    for key, look in style.policy_looks(keys).items():
        name = format.policy_title(*key) + UNFINISHED * bool((pd.concat(parts[key])["status"] != "done").any())
        # The parts of one policy have names and markers of their own; of several policies that would be too many.
        named = split == [key] and len(parts[key]) <= len(style.MARKERS)
        for place, line in enumerate(parts[key]):
            own = f"{name}, {_part_name(line, parts[key])}" if named else None if place else name
            shade = matplotlib.colormaps["viridis"](0.85 * place / max(1, len(parts[key]) - 1))
            apart = {"marker": style.MARKERS[place % len(style.MARKERS)], "color": shade, "linestyle": "-"}
            lines.append((own, line, look | apart if named else look))
    return sorted(lines, key=lambda line: -line[1]["pass_at_1"].max())


def _draw_lines(axes: Axes, lines: list[Line]) -> None:
    for name, line, look in lines:
        score, ends = style.percent_errors(line)
        more: dict[str, Any] = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5}
        label = fill(f"{name}  {score.max():.1f}", 34) if name else None
        axes.errorbar(line["mean_cache_length"], score, ends, linewidth=1, elinewidth=0.7, label=label, **look, **more)


def _part_name(line: pd.DataFrame, parts: list[pd.DataFrame]) -> str:
    fixed = [name for name in AXES if all(part[name].nunique() == 1 for part in parts)]
    return format.axes({name: line[name].iloc[0] for name in fixed if pd.concat(parts)[name].nunique() > 1})


def _front(axes: Axes, points: pd.DataFrame) -> pd.DataFrame:
    front = pareto_front(points)
    # The full cache may lie far to the right of the picture, and the step to it must not widen the limits.
    limits = axes.get_xlim(), axes.get_ylim()
    look: dict[str, Any] = {"color": "0.8", "linewidth": 4, "solid_joinstyle": "miter", "zorder": 0.5}
    scores = 100 * front["pass_at_1"]
    axes.step(front["mean_cache_length"], scores, where="post", label="Pareto front", **look)
    axes.set(xlim=limits[0], ylim=limits[1])
    return front


def _name_points(axes: Axes, named: pd.DataFrame, points: pd.DataFrame) -> None:
    """Write names beside some points, each where it covers neither a point nor another name; else none."""
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    places = axes.transData.transform(np.column_stack([points["mean_cache_length"], 100 * points["pass_at_1"]]))
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    rows: Any = named.drop_duplicates(POLICY, keep="last").itertuples()
    for row in rows:
        for x, y, side in ((6, 0, "left"), (-6, 0, "right"), (4, 8, "left"), (-4, 8, "right"), (4, -8, "left")):
            how: dict[str, Any] = {"textcoords": "offset points", "ha": side, "va": "center", "fontsize": 6.5}
            at = (row.mean_cache_length, 100 * row.pass_at_1)
            text = axes.annotate(format.policy_title(row.policy, row.variant), at, (x, y), **how)
            text.set_in_layout(False)
            box = text.get_window_extent()
            if axes.bbox.containsx(box.x0) and axes.bbox.containsx(box.x1) and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()
