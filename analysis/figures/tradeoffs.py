"""Pass@1 against the cost of a setting: trigger, cache length, bytes, speed."""

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cbook import pts_to_poststep
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.transforms import Bbox

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.notation import AXES, DEFAULT_LOOK, UNFINISHED, Look
from kvsweep.analysis.statistics.grids import question_title
from kvsweep.analysis.statistics.metrics import (
    benchmark_views,
    compressed_benchmarks,
    mean_over_benchmarks,
    model_title,
    pareto_front,
    settings_by_bytes,
    size,
)

POLICY = ["policy", "variant"]
# What the points of a trigger line have in common, and the most lines.
LINE = [*POLICY, "keep_ratio", "local_window"]
MAX_LINES = 8
# The memory legend names this many policies, best first; others are grey, and names stand at the front's points.
MAX_NAMED = 12
ALL_ROWS = ("full", "full_packed")
# The full cache is a star in every figure, packed in several ways one of these.
ALL_ROWS_MARKERS = "*DPXd"
# Inches of all panels together: with a legend of forty names they fit on a page.
MOST_HIGH = 6.4
WHITE_EDGE: Any = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1}

# Places for a point's name, in points from the point.
NAME_PLACES: Any = [(x, y, side) for y in (0, 8, -8, 14, -14) for x, side in ((6, "left"), (-6, "right"))]

# A line: its name in the legend, points and look. A panel: title, all points and lines.
Line = tuple[str, pd.DataFrame, dict[str, Any]]
Panel = tuple[str, pd.DataFrame, list[Line]]


@matplotlib.rc_context(style.STYLE)
def tradeoff(
    x: str, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK, timed: pd.DataFrame | None = None
) -> Figure | None:
    """Draw a model's Pass@1 with its standard error against one of `COSTS`; None if the run has nothing to compare.

    For trigger and speed there is a panel per benchmark, and for the trigger one of their mean. For memory and bytes,
    one panel shows means over benchmarks with the Pareto front and the names of the policies on it. The speed needs
    `timed`, the table of `fidelity.timings`.
    """
    ours = metrics[metrics["model"] == model]
    if x == "speed" and timed is not None:
        ours = ours.merge(timed, on="cell_id", suffixes=("_together", ""))
    column, label, panels_of = COSTS[x]
    if x == "speed" and timed is not None and timed["peak_bytes"].isna().all():  # only a GPU counts them
        label = label.replace("the whole batch", "a batch on a CPU")
    title, panels = panels_of(ours)
    if not panels:
        return None
    front, most = x != "budget", max(points[column].max() for _, points, _ in panels)
    columns = min(len(panels), look.columns or (1 if x == "speed" else 2) + (look.width > 5))
    heights = {"row": 1.9 if x in ("budget", "speed") else 2.7, "rest": 0.7, "most": MOST_HIGH}
    figure, grid = style.panels(look.width, len(panels), columns, sharey=True, **heights)
    for place, (axes, (name, points, lines)) in enumerate(zip(grid, panels, strict=True)):
        for one, rows, own in lines:
            score, ends = style.percent_errors(rows)
            axes.errorbar(rows[column], score, ends, label=one, **{"markersize": 4, "elinewidth": 0.7, **own})
        axes.set(title=name, xlabel=label, ylabel="" if place % columns else "Pass@1 (%)")
        style.tidy(axes, grid="both")
        if x == "budget":
            axes.set_xticks(sorted({budget for _, rows, _ in panels for budget in rows["budget"].dropna()}))
        if x == "bytes":
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: size(value))
        if front:
            _draw_front(axes, points, column, most)
        else:
            style.full_cache_level(axes, points)
    for axes in grid:
        style.percent_axis(axes)
    figure.set_label(f"{model_title(metrics, model)}: Pass@1 ± standard error against {title}")
    style.legend_below(figure)
    if front:
        style.draw_glyphs(figure, figure.draw_without_rendering)
        for axes, (_, points, _) in zip(grid, panels, strict=True):
            _name_points(axes, points, column)
    return figure


def _triggers(ours: pd.DataFrame) -> tuple[str, list[Panel]]:
    """Return a line for each setting that ran at two or more triggers, for those with the most."""
    scored = ours[ours["pass_at_1"].notna()]
    compressed = scored[scored["budget"].notna()]
    budgets = compressed.groupby(LINE, dropna=False, sort=False)["budget"].nunique()
    budgets = budgets[budgets >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    chosen = compressed.merge(budgets.index.to_frame(index=False), on=LINE)
    full = scored[(scored["policy"] == "full") & scored["condition"].isin(chosen["condition"])]
    names = list(dict.fromkeys(notation.setting(row, trigger=False) for row in chosen.itertuples()))
    panels = []
    for title, rows in benchmark_views(pd.concat([chosen, full])) if names else []:
        points = rows.dropna(subset="pass_at_1")
        # Points at one trigger are shifted sideways, so that no error bar hides another.
        aside = 0.02 * np.ptp(points["budget"].dropna()) * (np.arange(len(names)) - (len(names) - 1) / 2)
        setting = pd.Series([notation.setting(row, trigger=False) for row in points.itertuples()], points.index)
        lines: list[Line] = []
        for place, name in enumerate(names):
            line = points[setting == name].drop_duplicates("budget").sort_values("budget")
            look = {"linewidth": 1.2, **style.look_of(place)}
            lines.append((name, line.assign(budget=line["budget"] + aside[place]), look))
        panels.append((title, points, lines))
    return "trigger of evictions", panels


def _memory(ours: pd.DataFrame) -> tuple[str, list[Panel]]:
    """Return a line per policy through its settings, the policy with the best score first.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values. Its
    lines share the policy's colour, and a shape stands for the window (or what else is fixed along a line). Settings
    without all benchmarks are left out.
    """
    names = compressed_benchmarks(ours)
    points = mean_over_benchmarks(ours, names).dropna(subset=["pass_at_1", "mean_cache_length"])
    parts: dict[Any, list[pd.DataFrame]] = {
        key: series(rows) for key, rows in points[points["policy"] != "full"].groupby(POLICY, sort=False)
    }
    lines: list[Line] = []
    every = [line for part in parts.values() for line in part]
    fixed = [name for name in AXES if all(line[name].nunique() < 2 for line in every)]
    shapes = list(dict.fromkeys(notation.axes(line.iloc[0][fixed]) for line in every))
    for number, (key, look) in enumerate(style.policy_looks(parts).items()):
        name = notation.policy_title(*key) + UNFINISHED * any((part["status"] != "done").any() for part in parts[key])
        for place, line in enumerate(parts[key]):
            label = ", ".join(filter(None, (name, _part_name(line, parts[key]))))
            shape = shapes.index(notation.axes(line.iloc[0][fixed]))
            apart = {"marker": style.MARKERS[shape % len(style.MARKERS)]} if len(shapes) > 1 else {}
            if apart:  # the shape says nothing of the policy, so the colour alone must
                apart["color"] = style.LINE_COLORS[number % len(style.LINE_COLORS)]
            dashes = {"linestyle": style.DASHES[place % len(style.DASHES)]}
            best = f"best {100 * line['pass_at_1'].max():.1f}"
            lines.append((f"{label}, {best}", line, look | WHITE_EDGE | dashes | apart))
    if not lines:
        return "", []
    lines.sort(key=lambda line: -line[1]["pass_at_1"].max())
    if len(others := lines[MAX_NAMED:]) > 1:
        grey = {"color": "0.75", "zorder": 1}
        names_of_others = [f"{len(others)} others, each below them", *["_"] * (len(others) - 1)]  # one for the legend
        greyed = zip(names_of_others, others, strict=True)
        lines[MAX_NAMED:] = [(name, rows, look | grey) for name, (_, rows, look) in greyed]
    over = f"mean of {len(names)} benchmarks" if len(names) > 1 else ours["benchmark_title"].iloc[0]
    mark = f" ({UNFINISHED} not finished)" if any(UNFINISHED in name for name, _, _ in lines) else ""
    title = f"memory{mark}, {over}, {question_title(ours)}".removesuffix(", ")
    title += f"; a colour for each policy, a shape for each of: {'; '.join(shapes)}" if len(shapes) > 1 else ""
    return title, [("", points, lines)]


def series(settings: pd.DataFrame) -> list[pd.DataFrame]:
    """Split one policy's settings into series for lines, each in order of mean_cache_length.

    One series if an axis tells all settings apart, else one along the axis with most values per value of the others.
    """
    values = settings[list(AXES)].nunique()
    ordered = settings.sort_values("mean_cache_length", kind="stable")
    if values.max() >= len(settings):
        return [ordered]
    others = [name for name in AXES if name != values.idxmax()]
    return [rows for _, rows in ordered.groupby(others, dropna=False)]


def _part_name(line: pd.DataFrame, parts: list[pd.DataFrame]) -> str:
    fixed = [name for name in AXES if all(part[name].nunique() == 1 for part in parts)]
    return notation.axes({name: line[name].iloc[0] for name in fixed if pd.concat(parts)[name].nunique() > 1})


def _bytes(ours: pd.DataFrame) -> tuple[str, list[Panel]]:
    """A colour per number of bits, a marker per policy; None with only one number of bits."""
    points = settings_by_bytes(ours, next(iter(ours["model"]), ""))
    if points["bits"].nunique() < 2:
        return "", []
    bits = sorted(points["bits"].unique(), reverse=True)
    policies = [name for name in points["policy"].unique() if name not in ALL_ROWS]
    lines: list[Line] = []
    schemes = points["variant"].str.extract(r"scheme=(\w+)", expand=False).fillna("")
    for (policy, width, scheme), line in points.groupby(["policy", "bits", schemes], sort=False):
        all_rows = policy in ALL_ROWS
        look: dict[str, Any] = {"color": style.LINE_COLORS[bits.index(width)], "linewidth": 1, "capsize": 1.5}
        way = ALL_ROWS_MARKERS[sorted(set(schemes)).index(str(scheme)) % len(ALL_ROWS_MARKERS)]
        look["marker"] = way if all_rows else style.MARKERS[policies.index(policy) % len(style.MARKERS)]
        name = "all rows" if all_rows else notation.policy_title(str(policy))
        lines.append((", ".join(filter(None, (name, f"{width:g} bits", str(scheme)))), line, look))
    weights = f"the weights take {size(points['weight_bytes'].max())} beside them"
    return f"bytes; {weights}", [("", points, lines)]


def _speeds(ours: pd.DataFrame) -> tuple[str, list[Panel]]:
    """A marker per policy on each benchmark, at the largest batch that was timed."""
    cells = ours[ours["pass_at_1"].notna() & (ours["slots"] == ours.groupby("cell_id")["slots"].transform("max"))]
    looks = style.policy_looks(cells[POLICY].drop_duplicates().itertuples(index=False, name=None))
    looks["full", ""] = {"color": "0.25", "marker": "*"}
    panels: list[Panel] = []
    for benchmark, points in cells.groupby("benchmark_title", sort=False):
        fewest, most = points["slots"].min(), points["slots"].max()
        texts = f"{most:g}" if fewest == most else f"{fewest:g} to {most:g}"
        groups: Any = points.groupby(POLICY, sort=False)
        lines: list[Line] = [
            (notation.policy_title(*key), rows, {**looks[key], "linestyle": "none"}) for key, rows in groups
        ]
        together = "in equal memory" if (points["why"] == "memory").all() else "side by side"
        panels.append((f"{benchmark}, {texts} texts {together}", points, lines))
    return "speed, each setting alone", panels


# Of each cost: its column, the label of its axis, and the function for title and panels.
COSTS: dict[str, tuple[str, str, Callable[[pd.DataFrame], tuple[str, list[Panel]]]]] = {
    "budget": ("budget", "trigger of evictions (tokens)", _triggers),
    "memory": ("mean_cache_length", "mean cache length (tokens)", _memory),
    "bytes": ("kv_bytes_mean", "keys and values of a text, mean over its steps (log scale)", _bytes),
    "speed": ("tokens_per_second", "tokens/s of the whole batch, median over rounds", _speeds),
}


def _front(points: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the Pareto front over a cost, or over the speed, where more is better."""
    cost = -points[column] if column == "tokens_per_second" else points[column]
    return pareto_front(points.assign(cost=cost), "cost")


def _draw_front(axes: Axes, points: pd.DataFrame, column: str, most: float) -> None:
    """Draw the full cache and the Pareto front.

    The axis starts at 0; for logarithmic axes, or data in the upper half, it starts just before the data.
    """
    axes.margins(x=0.05)
    least = points[column].min()
    apart = column != "tokens_per_second" and most / 2 < least < most
    start = least - 0.1 * (most - least) if apart else 0.0
    axes.set_xlim(axes.get_xlim() if column == "kv_bytes_mean" else (start, most + 0.05 * (most - start)))
    for row in notation.rows(points[points["policy"] == "full"].head(1)):
        cost = getattr(row, column)
        at = size(cost) if column == "kv_bytes_mean" else f"{notation.decimal(cost, 0)} tokens"
        said = f": {notation.percent_pm(row.pass_at_1, row.se)} at {at}" * (column != "tokens_per_second")
        style.full_cache_level(axes, points, notation.policy_title("full") + said)
        if column == "mean_cache_length":
            axes.plot(cost, 100 * row.pass_at_1, "*", color="0.25", markersize=8)
    front = _front(points, column)
    axes.step(
        front[column],
        100 * front["pass_at_1"],
        label="Pareto front",
        color="0.8",
        linewidth=4,
        solid_joinstyle="miter",
        zorder=0.5,
        where="post",
    )


def _name_points(axes: Axes, points: pd.DataFrame, column: str) -> None:
    """Write a front point's policy or setting beside it, unless the text covers a point, line or name."""
    joined = (line for line in axes.get_lines() if line.get_linestyle() != "None")
    lines = [(line, np.asarray(line.get_xydata())) for line in joined]
    steps = [pts_to_poststep(*xy.T).T if line.get_drawstyle() == "steps-post" else xy for line, xy in lines]
    paths = [Path(line.get_transform().transform(xy)) for (line, _), xy in zip(lines, steps, strict=True) if len(xy)]
    places = axes.transData.transform(np.column_stack([points[column], 100 * points["pass_at_1"]]))
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    front = _front(points, column)
    front = front[front["policy"] != "full"]
    speed = column == "tokens_per_second"
    for row in notation.rows(front if speed else front.drop_duplicates(POLICY, keep="last")):
        name = notation.setting(row, trigger=False) if speed else notation.policy_title(row.policy, row.variant)
        for x, y, side in NAME_PLACES:
            at = (getattr(row, column), 100 * row.pass_at_1)
            text = axes.annotate(name, at, (x, y), textcoords="offset points", ha=side, va="center", fontsize=6.5)
            text.set_in_layout(False)
            box = text.get_window_extent()
            free = not box.count_overlaps(taken) and not any(path.intersects_bbox(box, filled=False) for path in paths)
            if free and all(axes.bbox.contains(*corner) for corner in box.get_points()):
                taken.append(box)
                break
            text.remove()
