"""Pass@1 against the cost of a setting: trigger, cache length, bytes, speed."""

import itertools
from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
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

# Columns that panels are drawn over. A trigger is no cost by itself, so it has no Pareto front.
TRIGGER, LENGTH, BYTES, SPEED = "budget", "mean_cache_length", "kv_bytes_mean", "tokens_per_second"
POLICY = ["policy", "variant"]
# What the points of a trigger line have in common, and the most lines.
LINE = [*POLICY, "keep_ratio", "local_window"]
MAX_LINES = 8
ALL_ROWS = ("full", "full_packed")
# The full cache is a star in every figure, packed in several ways one of these.
ALL_ROWS_MARKERS = "*DPXd"
# Inches of all panels together: with a legend of forty names they fit on a page.
MOST_HIGH = 6.4
WHITE_EDGE: Any = {"markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.5, "linewidth": 1}

# Heights of a point's name beside it, in points from the point, and its sides.
NAME_HEIGHTS = (0, 8, -8, 14, -14)
NAME_SIDES: Any = ((6, "left"), (-6, "right"))

# A line: its name in the legend, points and look. A panel: title, all points and lines.
Line = tuple[str, pd.DataFrame, dict[str, Any]]
Panel = tuple[str, pd.DataFrame, list[Line]]
# What a caption says after "against", and the panels; none if there is nothing to compare.
Panels = tuple[str, list[Panel]]


@matplotlib.rc_context(style.STYLE)
def tradeoff(
    x: str, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK, timed: pd.DataFrame | None = None
) -> Figure | None:
    """Draw a model's Pass@1 with its standard error against the cost `x` of `COSTS`; None with nothing to compare.

    For trigger and speed there is a panel per benchmark, and for the trigger one of their mean. For memory and bytes,
    one panel shows means over benchmarks with the Pareto front and the names of the policies on it. The speed needs
    `timed`, the table of `fidelity.timings`.
    """
    cells = metrics[metrics["model"] == model]
    column, label, panels_of = COSTS[x]
    if column == SPEED and timed is not None:
        # The timed speed keeps the plain name; the other is that of cells decoded together.
        cells = cells.merge(timed, on="cell_id", suffixes=("_together", ""))
    title, panels = panels_of(cells)
    if not panels:
        return None
    columns = look.columns
    if columns is None:
        columns = 1 if column == SPEED else 2
        if look.width > 5:  # a page's width, not a column's
            columns += 1
    columns = min(len(panels), columns)
    height = 1.9 if column in (TRIGGER, SPEED) else 2.7
    figure, grid = style.panels(
        look.width, len(panels), columns, row_height=height, extra_height=0.7, max_height=MOST_HIGH, sharey=True
    )
    for axes, panel in zip(grid, panels, strict=True):
        _draw_panel(axes, panel, column)
        axes.set_xlabel(label)
    for axes in grid[::columns]:  # the first of each row
        axes.set_ylabel("Pass@1 (%)")
    # The panels share this axis, whose limits are known when all are drawn.
    for axes in grid:
        style.percent_axis(axes)
    figure.set_label(f"{model_title(metrics, model)}: Pass@1 ± standard error against {title}")
    style.legend_below(figure)
    # Only the points of a Pareto front have names, and over triggers there is no front.
    if column != TRIGGER:
        # Names can be placed only when the layout is known.
        style.add_fonts(figure)
        figure.draw_without_rendering()
        for axes, (_, points, _) in zip(grid, panels, strict=True):
            _name_points(axes, points, column)
    return figure


def _draw_panel(axes: Axes, panel: Panel, column: str) -> None:
    """Draw a panel's lines over a column, its full cache, and but for triggers a front."""
    title, points, lines = panel
    for name, rows, look in lines:
        scores, errors = style.percent_errors(rows)
        axes.errorbar(rows[column], scores, errors, label=name, **{"markersize": 4, "elinewidth": 0.7, **look})
    axes.set_title(title)
    style.tidy(axes, grid="both")
    if column == TRIGGER:
        axes.set_xticks(points[column].dropna().unique())
        style.full_cache_level(axes, points)
        return
    if column == BYTES:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: size(value))
    _draw_full_and_front(axes, points, column)


def _triggers(cells: pd.DataFrame) -> Panels:
    """Return a line for each setting that ran at two or more triggers; of many, for those with the most triggers."""
    scored = cells[cells["pass_at_1"].notna()]
    compressed = scored[scored["budget"].notna()]
    triggers = compressed.groupby(LINE, dropna=False, sort=False)["budget"].nunique()
    most_triggers = triggers[triggers >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    chosen = compressed.merge(most_triggers.index.to_frame(index=False), on=LINE)  # the cells of these settings
    if chosen.empty:
        return "", []
    # In no line: `_draw_panel` draws it as a level.
    full = scored[(scored["policy"] == "full") & scored["condition"].isin(chosen["condition"])]
    names = list(dict.fromkeys(notation.settings(chosen, trigger=False)))
    panels: list[Panel] = []
    for title, rows in benchmark_views(pd.concat([chosen, full])):
        points = rows.dropna(subset="pass_at_1")
        settings = np.array(notation.settings(points, trigger=False))
        lines: list[Line] = []
        for index, name in enumerate(names):
            line = points[settings == name].drop_duplicates("budget").sort_values("budget")
            lines.append((name, line, {"linewidth": 1.2, **style.look_of(index)}))
        panels.append((title, points, lines))
    return "trigger of evictions", panels


def _memory(cells: pd.DataFrame) -> Panels:
    """Return a line per policy through its settings, the policy with the best score first.

    A policy with settings along several axes (a grid) has a line for each series of the axis with the most values, with
    a shape for each. Settings without all benchmarks are left out.
    """
    benchmarks = compressed_benchmarks(cells)
    points = mean_over_benchmarks(cells, benchmarks).dropna(subset=["pass_at_1", LENGTH])
    compressed = points[points["policy"] != "full"]
    if compressed.empty:
        return "", []
    lines = _policy_lines(compressed)
    lines.sort(key=lambda line: -line[1]["pass_at_1"].max())
    scores = f"mean of {len(benchmarks)} benchmarks" if len(benchmarks) > 1 else cells["benchmark_title"].iloc[0]
    mark = f" ({UNFINISHED} not finished)" if any(UNFINISHED in label for label, _, _ in lines) else ""
    caption = f"memory{mark}, {scores}, {question_title(cells)}".removesuffix(", ")
    return caption, [("", points, lines)]


def _policy_lines(compressed: pd.DataFrame) -> list[Line]:
    """Return the lines of all policies; a line's name ends with its best score."""
    best_first = compressed.sort_values("pass_at_1", ascending=False, kind="stable")
    policies: Any = best_first.groupby(POLICY, sort=False)
    looks = style.policy_looks(policies.groups)
    lines: list[Line] = []
    for place, (policy, settings) in enumerate(policies):
        title = notation.policy_title(*policy)
        if (settings["status"] != "done").any():
            title += UNFINISHED
        policy_lines = series(settings)
        # Axes with one value along each of the policy's lines, and another along another line: they name the lines.
        along = pd.DataFrame([line[list(AXES)].nunique() for line in policy_lines]).max()
        name_axes = [axis for axis in AXES if along[axis] < 2 and settings[axis].nunique() > 1]
        for number, line in enumerate(policy_lines):
            label = f"{title}, {notation.axes(line.iloc[0][name_axes])}".removesuffix(", ")
            # The best policies differ in their colours. So shapes can tell the lines of one apart.
            look = looks[policy] | WHITE_EDGE | {"color": style.look_of(place)["color"]}
            if len(policy_lines) > 1:
                look["marker"] = style.look_of(number)["marker"]
            lines.append((f"{label}, best {100 * line['pass_at_1'].max():.1f}", line, look))
    return lines


def series(settings: pd.DataFrame) -> list[pd.DataFrame]:
    """Split one policy's settings into series for lines, each in order of mean_cache_length.

    One series if an axis has another value in each setting. Else series go along the axis with the most values, one
    for each combination of values on the other axes.
    """
    counts = settings[list(AXES)].nunique()  # of each axis's values
    ordered = settings.sort_values("mean_cache_length", kind="stable")
    if counts.max() >= len(settings):
        return [ordered]
    others = [axis for axis in AXES if axis != counts.idxmax()]
    return [line for _, line in ordered.groupby(others, dropna=False)]


def _bytes(cells: pd.DataFrame) -> Panels:
    """A colour per number of bits, a marker per policy; no panel with only one number of bits."""
    points = settings_by_bytes(cells, cells["model"].iloc[0])
    if points["bits"].nunique() < 2:
        return "", []
    all_bits = sorted(points["bits"].unique(), reverse=True)
    policies = [policy for policy in points["policy"].unique() if policy not in ALL_ROWS]
    # The variant names how numbers are packed, as in "bits=4, scheme=kivi".
    scheme_of = points["variant"].str.extract(r"scheme=(\w+)", expand=False).fillna("")
    schemes = sorted(set(scheme_of))
    lines: list[Line] = []
    groups: Any = points.groupby(["policy", "bits", scheme_of], sort=False)
    for (policy, bits, scheme), line in groups:
        if policy in ALL_ROWS:
            title = "all rows"
            marker = ALL_ROWS_MARKERS[schemes.index(scheme) % len(ALL_ROWS_MARKERS)]
        else:
            title = notation.policy_title(policy)
            marker = style.look_of(policies.index(policy))["marker"]
        label = f"{title}, {bits:g} bits, {scheme}".removesuffix(", ")
        color = style.LINE_COLORS[all_bits.index(bits)]
        lines.append((label, line, {"color": color, "linewidth": 1, "capsize": 1.5, "marker": marker}))
    weights = f"the weights take {size(points['weight_bytes'].max())} beside them"
    return f"bytes; {weights}", [("", points, lines)]


def _speeds(timed: pd.DataFrame) -> Panels:
    """A marker per policy on each benchmark, at each cell's largest batch; `timed` has a row per cell and batch."""
    largest_batch = timed.groupby("cell_id")["slots"].transform("max")
    cells = timed[timed["pass_at_1"].notna() & (timed["slots"] == largest_batch)]
    looks = style.policy_looks(cells[POLICY].drop_duplicates().itertuples(index=False, name=None))
    looks["full", ""] = {"color": "0.25", "marker": "*"}
    panels: list[Panel] = []
    for benchmark, points in cells.groupby("benchmark_title", sort=False):
        lines: list[Line] = []
        groups: Any = points.groupby(POLICY, sort=False)
        for policy, rows in groups:
            lines.append((notation.policy_title(*policy), rows, {**looks[policy], "linestyle": "none"}))
        panels.append((f"{benchmark}, {notation.span(points['slots'])} texts side by side", points, lines))
    return "speed, each setting alone", panels


# Of each cost: its column, the label of its axis, and the function for title and panels.
COSTS: dict[str, tuple[str, str, Callable[[pd.DataFrame], Panels]]] = {
    "budget": (TRIGGER, "trigger of evictions (tokens)", _triggers),
    "memory": (LENGTH, "mean cache length (tokens)", _memory),
    "bytes": (BYTES, "keys and values of a text, mean over its steps (log scale)", _bytes),
    "speed": (SPEED, "tokens/s of the whole batch, median over rounds", _speeds),
}


def _front(points: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return the Pareto front over a cost, or over the speed, where more is better."""
    cost = -points[column] if column == SPEED else points[column]
    return pareto_front(points.assign(cost=cost), "cost")


def _draw_full_and_front(axes: Axes, points: pd.DataFrame, column: str) -> None:
    """Draw the full cache and the Pareto front."""
    axes.margins(x=0.15)  # room for a name beside the first and the last point
    for row in notation.rows(points[points["policy"] == "full"].head(1)):
        cost = getattr(row, column)
        label = notation.policy_title("full")
        # Speed has several panels with one legend, in which each panel's numbers would make another line.
        if column != SPEED:
            cost_text = size(cost) if column == BYTES else f"{notation.decimal(cost, 0)} tokens"
            label += f": {notation.percent_pm(row.pass_at_1, row.se)} at {cost_text}"
        style.full_cache_level(axes, points, label)
        if column == LENGTH:  # for bytes and speed the full cache is one of the panel's lines
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
    """Write a front point's policy or setting at the first place beside it where the text covers nothing drawn.

    A point without such a place has no name: all texts that were tried there are removed.
    """
    # The paths of the lines that are drawn, in dots of the figure.
    line_paths = []
    for line in axes.get_lines():
        if line.get_linestyle() != "None":
            line_paths.append(line.get_transform().transform_path(line.get_path()))
    places = axes.transData.transform(np.column_stack([points[column], 100 * points["pass_at_1"]]))
    # A marker takes about 4 dots to each side.
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    front = _front(points, column)
    front = front[front["policy"] != "full"]
    is_speed = column == SPEED
    if not is_speed:
        # A policy has its name once, at its largest cache.
        front = front.drop_duplicates(POLICY, keep="last")
    for row in notation.rows(front):
        name = notation.setting(row, trigger=False) if is_speed else notation.policy_title(row.policy, row.variant)
        point = (getattr(row, column), 100 * row.pass_at_1)
        for y, (x, side) in itertools.product(NAME_HEIGHTS, NAME_SIDES):
            text = axes.annotate(name, point, (x, y), textcoords="offset points", ha=side, va="center", fontsize=6.5)
            # The panels keep their places, and with them the points.
            text.set_in_layout(False)
            box = text.get_window_extent()
            is_inside = all(axes.bbox.contains(*corner) for corner in box.get_points())
            crosses_line = any(path.intersects_bbox(box, filled=False) for path in line_paths)
            if is_inside and not crosses_line and not box.count_overlaps(taken):
                taken.append(box)
                break
            text.remove()
