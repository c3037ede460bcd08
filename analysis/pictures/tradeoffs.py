"""Pass@1 against what a setting takes: its budget, its cache length, its bytes, its speed."""

from math import ceil
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from kvsweep.analysis import format
from kvsweep.analysis.format import AXES, DEFAULT_LOOK, UNFINISHED, Look
from kvsweep.analysis.numbers.cheapest import settings_by_bytes
from kvsweep.analysis.numbers.kv_bytes import size
from kvsweep.analysis.numbers.metrics import benchmark_views, compressed_benchmarks, mean_over_benchmarks, model_title
from kvsweep.analysis.pictures import style
from kvsweep.analysis.question import question_title

POLICY = ["policy", "variant"]
# What a line of the budget figure has in common, and how many lines a figure has.
LINE = [*POLICY, "keep_ratio", "local_window"]
MAX_LINES = 8
ALL_ROWS = ("full", "full_packed")
# The width of a small letter, in inches.
SMALL = 0.046

# A line of the memory figure: its name or None, its points, and its look.
Line = tuple[str | None, pd.DataFrame, dict[str, Any]]


@matplotlib.rc_context(style.STYLE)
def budget_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against budget for settings that ran at two budgets or more, the full cache as a level.

    The mean over benchmarks comes first, without the points that lack a benchmark; then each benchmark. At most
    `MAX_LINES` settings are drawn, those with the most budgets; there is no figure if no setting ran at two budgets.
    """
    ours = metrics[(metrics["model"] == model) & metrics["pass_at_1"].notna()]
    compressed = ours[ours["budget"].notna()]
    budgets = compressed.groupby(LINE, dropna=False, sort=False)["budget"].nunique()
    budgets = budgets[budgets >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    if budgets.empty:
        return None
    chosen = compressed.merge(budgets.index.to_frame(index=False), on=LINE)
    full = ours[(ours["policy"] == "full") & ours["condition"].isin(chosen["condition"])]
    views = benchmark_views(pd.concat([chosen, full]))
    columns = min(len(views), look.columns or (3 if look.width > 5 else 2))
    figure, grid = style.panels(look.width, len(views), columns, row=1.8, rest=0.9, sharey=True, sharex=True)
    lines = list(dict.fromkeys(format.setting(row, budget=False) for row in chosen.itertuples()))
    for place, (axes, (title, rows)) in enumerate(zip(grid, views, strict=True)):
        _lines(axes, rows.dropna(subset="pass_at_1"), lines)
        axes.set_title(title)
        # Panels below each other share the axis of the lowest.
        lowest = place + columns >= len(grid)
        axes.tick_params(labelbottom=lowest)
        axes.set(xlabel="budget (tokens)" if lowest else "", ylabel="" if place % columns else "Pass@1 (%)")
    style.percent_axis(grid[0])
    for axes in grid[1:]:
        axes.spines["left"].set_bounds(*grid[0].spines["left"].get_bounds())
    # All panels share an axis, which needs a tick for every budget of any panel.
    grid[0].set_xticks(sorted(chosen["budget"].unique()))
    style.legend_below(figure, columns)
    title = f"{model_title(metrics, model)}: Pass@1 against budget, ± standard error over problems"
    figure.suptitle(style.wrapped(title, look.width))
    return figure


def _lines(axes: Axes, points: pd.DataFrame, lines: list[str]) -> None:
    named = points.assign(line=[format.setting(row, budget=False) for row in points.itertuples()])
    # Points at one budget stand side by side, so that no error bar hides another.
    aside = 0.02 * np.ptp(points["budget"].dropna()) * (np.arange(len(lines)) - (len(lines) - 1) / 2)
    for place, name in enumerate(lines):
        line = named[named["line"] == name].drop_duplicates("budget").sort_values("budget")
        style.score_points(axes, line["budget"] + aside[place], line, label=name, linewidth=1.2, **style.look_of(place))
    style.full_cache_level(axes, points)
    style.tidy(axes)


@matplotlib.rc_context(style.STYLE)
def accuracy_memory_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against the mean cache length, both means over benchmarks; a line per policy through its settings.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values.
    The points of the Pareto front have names; the legend has all, the best first. Points that lack a benchmark are left
    out; there is no figure if no compressed setting has a score.
    """
    ours = metrics[metrics["model"] == model]
    names = compressed_benchmarks(ours)
    points = mean_over_benchmarks(ours, names).dropna(subset=["pass_at_1", "mean_cache_length"])
    compressed = points[points["policy"] != "full"]
    if compressed.empty:
        return None
    lines = _named_lines(compressed)
    # The legend lies beside the picture, or below a narrow one in as many columns as fit.
    named = [name for name, _, _ in lines if name]
    beside = look.width > 6
    columns = 1 if beside else max(1, int(look.width / (SMALL * (max(map(len, named)) + 7) + 0.25)))
    height = (0.16 if beside else 0.13) * ceil((len(named) + 2) / columns) + (0.9 if beside else 3.1)
    figure = style.new_figure((look.width, max(height, 3.4)))
    axes = figure.add_subplot()
    for name, line, own in lines:
        label = fill(f"{name}  {100 * line['pass_at_1'].max():.1f}", 34) if name else None
        white: dict[str, Any] = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1}
        style.score_points(axes, line["mean_cache_length"], line, label=label, **own, **white)
    # The compressed policies set the limits; the full cache and the front are drawn up to them.
    axes.margins(x=0.05)
    axes.set_xlim(axes.get_xlim())
    _full_cache(axes, points)
    limits = axes.get_xlim(), axes.get_ylim()
    front = pareto_front(points, "mean_cache_length")
    steps: dict[str, Any] = {"color": "0.8", "linewidth": 4, "solid_joinstyle": "miter", "zorder": 0.5, "where": "post"}
    axes.step(front["mean_cache_length"], 100 * front["pass_at_1"], label="Pareto front", **steps)
    axes.set(xlim=limits[0], ylim=limits[1])
    style.percent_axis(axes)
    mark = f" ({UNFINISHED} not finished)" if (compressed["status"] == "partial").any() else ""
    axes.set(xlabel=f"mean cache length (tokens){mark}", ylabel="Pass@1 (%) ± standard error")
    over = f"mean of {len(names)} benchmarks" if len(names) > 1 else ours["benchmark_title"].iloc[0]
    title = f"{model_title(metrics, model)}: Pass@1 against memory, {over}, {question_title(ours)}".removesuffix(", ")
    figure.suptitle(style.wrapped(title, look.width))
    style.tidy(axes, grid="both")
    how: dict[str, Any] = {"columnspacing": 0.8, "handlelength": 1.6}
    if beside:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False, **how)
    else:
        style.legend_below(figure, columns, fontsize=6, **how)
    _name_points(axes, front[front["policy"] != "full"], points)
    return figure


def series(settings: pd.DataFrame) -> list[pd.DataFrame]:
    """Split one policy's settings into the series that a line goes through, each in order of mean_cache_length.

    That is one if an axis tells all settings apart, else one along the axis with most values per value of the others.
    """
    values = settings[list(AXES)].nunique()
    ordered = settings.sort_values("mean_cache_length", kind="stable")
    if values.max() >= len(settings):
        return [ordered]
    others = [name for name in AXES if name != values.idxmax()]
    return [rows for _, rows in ordered.groupby(others, dropna=False)]


def _full_cache(axes: Axes, points: pd.DataFrame) -> None:
    """Draw the full cache's level; only its name, where the level would squeeze all other points."""
    low, high = axes.get_ylim()
    for row in format.rows(points[points["policy"] == "full"].head(1)):
        score = format.percent_pm(row.pass_at_1, row.se)
        name = f"{format.policy_title('full')}: {score}\nat {format.decimal(row.mean_cache_length, 0)} tokens"
        if 100 * row.pass_at_1 > high + 0.75 * (high - low):
            axes.plot([], [], " ", label=f"{name}, above this picture")
        else:
            style.full_cache_level(axes, points, name)


def _named_lines(points: pd.DataFrame) -> list[Line]:
    """The lines of all policies, the one with the best score first."""
    parts: dict[Any, list[pd.DataFrame]] = {key: series(rows) for key, rows in points.groupby(POLICY, sort=False)}
    split = [key for key in parts if len(parts[key]) > 1]
    lines: list[Line] = []
    for key, look in style.policy_looks(parts).items():
        name = format.policy_title(*key) + UNFINISHED * any((part["status"] != "done").any() for part in parts[key])
        # The parts of one policy have names and markers of their own; of several policies that would be too many.
        named = split == [key] and len(parts[key]) <= len(style.MARKERS)
        for place, line in enumerate(parts[key]):
            own = f"{name}, {_part_name(line, parts[key])}" if named else None if place else name
            shade = matplotlib.colormaps["viridis"](0.85 * place / max(1, len(parts[key]) - 1))
            apart = {"marker": style.MARKERS[place % len(style.MARKERS)], "color": shade, "linestyle": "-"}
            lines.append((own, line, look | apart if named else look))
    return sorted(lines, key=lambda line: -line[1]["pass_at_1"].max())


def _part_name(line: pd.DataFrame, parts: list[pd.DataFrame]) -> str:
    fixed = [name for name in AXES if all(part[name].nunique() == 1 for part in parts)]
    return format.axes({name: line[name].iloc[0] for name in fixed if pd.concat(parts)[name].nunique() > 1})


def _name_points(axes: Axes, named: pd.DataFrame, points: pd.DataFrame) -> None:
    """Write names beside some points, each where it covers neither a point nor another name; else none."""
    axes.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    places = axes.transData.transform(np.column_stack([points["mean_cache_length"], 100 * points["pass_at_1"]]))
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for row in format.rows(named.drop_duplicates(POLICY, keep="last")):
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


@matplotlib.rc_context(style.STYLE)
def bytes_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against mean bytes of a text's keys and values, a color per number of bits, a marker per policy.

    Both are means over benchmarks; a step line is the Pareto front. A single number of bits has no figure.
    """
    points = settings_by_bytes(metrics, model)
    if points["bits"].nunique() < 2:
        return None
    bits = sorted(points["bits"].unique(), reverse=True)
    policies = [name for name in points["policy"].unique() if name not in ALL_ROWS]
    figure = style.new_figure((look.width, 3.4 if look.width > 5 else 4.4))
    axes = figure.add_subplot()
    schemes = points["variant"].str.extract(r"scheme=(\w+)", expand=False).fillna("")
    for (policy, width, scheme), line in points.groupby(["policy", "bits", schemes], sort=False):
        all_rows = policy in ALL_ROWS
        own: dict[str, Any] = {"color": style.LINE_COLORS[bits.index(width)], "linewidth": 1, "capsize": 1.5}
        own["marker"] = "*" if all_rows else style.MARKERS[policies.index(policy) % len(style.MARKERS)]
        name = "all rows" if all_rows else format.policy_title(str(policy))
        own["label"] = ", ".join(filter(None, (name, f"{width:g} bits", str(scheme))))
        style.score_points(axes, line["kv_bytes_mean"], line, **own)
    style.full_cache_level(axes, points)
    front = pareto_front(points, "kv_bytes_mean")
    axes.step(front["kv_bytes_mean"], 100 * front["pass_at_1"], where="post", color="0.6", label="Pareto front")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.set_xlabel("keys and values of a text, mean over its steps")
    axes.set_ylabel("Pass@1 (%), ± standard error")
    weights = f"the weights take {size(points['weight_bytes'].max())} beside them"
    figure.suptitle(style.wrapped(f"{model_title(metrics, model)}: Pass@1 against bytes; {weights}", look.width))
    style.tidy(axes, grid="both")
    style.legend_below(figure, 4 if look.width > 5 else 2)
    return figure


def pareto_front(points: pd.DataFrame, memory: str) -> pd.DataFrame:
    """The points that no other beats with less or equal `memory` (a column) and a higher score, in order of memory."""
    ordered = points.sort_values([memory, "pass_at_1"], ascending=[True, False], kind="stable")
    before = ordered["pass_at_1"].cummax().shift(fill_value=-np.inf)
    return ordered[ordered["pass_at_1"] > before]


@matplotlib.rc_context(style.STYLE)
def speed_figure(timed: pd.DataFrame, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw a panel per benchmark, at the largest batch that was timed; no figure if no cell of the model was."""
    cells = metrics[(metrics["model"] == model) & metrics["pass_at_1"].notna()]
    cells = cells.merge(timed, on="cell_id", suffixes=("_together", ""))
    if cells.empty:
        return None
    cells = cells[cells["slots"] == cells.groupby("cell_id")["slots"].transform("max")]
    panels = list(cells.groupby("benchmark_title", sort=False))
    columns = min(len(panels), 2 if look.width > 5 else 1)
    figure, grid = style.panels(look.width, len(panels), columns, row=2.2, rest=0.7)
    looks = style.policy_looks(cells[POLICY].drop_duplicates().itertuples(index=False, name=None))
    for axes, (benchmark, ours) in zip(grid, panels, strict=True):
        groups: Any = ours.groupby(POLICY, sort=False)
        for key, rows in groups:
            own = {**looks[key], "linestyle": "none", "label": format.policy_title(*key)}
            style.score_points(axes, rows["tokens_per_second"], rows, **own)
        fewest, most = ours["slots"].min(), ours["slots"].max()
        texts = f"{most:g}" if fewest == most else f"{fewest:g} to {most:g}"
        axes.set_title(f"{benchmark}, {texts} texts side by side")
        axes.set(xlabel="tokens/s, median over rounds", ylabel="Pass@1 (%)")
        style.tidy(axes, grid="both")
    style.legend_below(figure, 4 if look.width > 5 else 2)
    title = f"{model_title(metrics, model)}: Pass@1 against speed, each setting alone"
    figure.suptitle(style.wrapped(title, look.width))
    return figure
