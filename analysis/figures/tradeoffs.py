"""Pass@1 against the cost of a setting: trigger, cache length, bytes, speed."""

from collections.abc import Callable

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.notation import DEFAULT_LOOK, UNFINISHED, Look
from kvsweep.analysis.statistics.grids import question_title
from kvsweep.analysis.statistics.metrics import (
    benchmark_views,
    cells_of_model,
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
# Inches of all panels together: with a legend of forty names they fit on a page.
MOST_HIGH = 6.4

# What a caption says after "against", and the points: rows of metrics with `panel`, the title of the point's panel,
# and `line`, its name in the legend. Points with one value of `color` share a color, by default those of a line; of
# `shape`, a marker. No rows if there is nothing to compare.
Points = tuple[str, pd.DataFrame]


@matplotlib.rc_context(style.STYLE)
def tradeoff(
    x: str, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK, timed: pd.DataFrame | None = None
) -> Figure | None:
    """Draw a model's Pass@1 with its standard error against the cost `x` of `COSTS`; None with nothing to compare.

    For trigger and speed there is a panel per benchmark, and for the trigger one of their mean. For memory and bytes,
    one panel shows means over benchmarks. The caption names the settings on the Pareto front of each panel. The speed
    needs `timed`, the table of `fidelity.timings`.
    """
    cells = cells_of_model(metrics, model)
    column, label, points_of = COSTS[x]
    if column == SPEED and timed is not None:
        # The timed speed keeps the plain name; the other is that of cells decoded together.
        cells = cells.merge(timed, on="cell_id", suffixes=("_together", ""))
    title, points = points_of(cells)
    if points.empty:
        return None
    for key in ("color", "shape"):
        points[key], _ = pd.factorize(points.get(key, points["line"]))
    panels = points.groupby("panel", sort=False)
    columns = 1 if column == SPEED else 2
    if look.width > 5:  # a page's width, not a column's
        columns += 1
    columns = min(columns, len(panels))
    height = 2.7 if len(panels) == 1 else 1.9
    figure, grid = style.panels(
        look.width, len(panels), columns, row_height=height, extra_height=0.7, max_height=MOST_HIGH, sharey=True
    )
    caption = f"{model_title(metrics, model)}: Pass@1 ± standard error against {title}"
    for axes, (name, rows) in zip(grid, panels, strict=True):
        _draw_lines(axes, rows, column)
        _draw_full(axes, rows, column)
        axes.set(title=name, xlabel=label)
        if column == TRIGGER:
            axes.set_xticks(rows[column].dropna().unique())
        else:
            caption += f". Pareto front, {name}: {'; '.join(_draw_front(axes, rows, column))}"
        if column == BYTES:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: size(value))
    for axes in grid[::columns]:  # the first of each row
        axes.set_ylabel("Pass@1 (%)")
    # The panels share this axis, whose limits are known when all are drawn.
    for axes in grid:
        style.percent_axis(axes)
    figure.set_label(caption)
    style.legend_below(figure)
    return figure


def _draw_lines(axes: Axes, points: pd.DataFrame, column: str) -> None:
    """Draw the compressed points over a column, and join those of a line that have one window."""
    compressed = points[points["policy"] != "full"]
    for (name, _), rows in compressed.groupby(["line", "local_window"], dropna=False, sort=False):
        first = rows.iloc[0]
        look = style.look_of(first["color"]) | {"marker": style.look_of(first["shape"])["marker"]}
        if column == SPEED:
            look["linestyle"] = "none"
        ordered = rows.sort_values(column)
        scores, errors = style.percent_errors(ordered)
        axes.errorbar(ordered[column], scores, errors, label=name, markersize=4.5, linewidth=1, **look)
    axes.margins(x=0.1)
    style.tidy(axes, grid="both")


def _draw_full(axes: Axes, points: pd.DataFrame, column: str) -> None:
    """Draw the full cache, if the points have it, as a star at its cost on a dashed line over a band of its error."""
    full = points[points["policy"] == "full"].head(1)
    scores, (below, above) = style.percent_errors(full)
    for score, low, high in zip(scores, scores - below, scores + above, strict=True):
        axes.axhspan(low, high, color="0.25", alpha=0.1, linewidth=0)
        axes.axhline(score, color="0.25", linestyle="--", linewidth=0.9, label=notation.policy_title("full"))
    axes.plot(full[column], scores, "*", color="0.25", markersize=8)


def _draw_front(axes: Axes, points: pd.DataFrame, column: str) -> list[str]:
    """Draw the Pareto front over a cost, or over the speed, where more is better; return the names of its settings."""
    cost = -points[column] if column == SPEED else points[column]
    front = pareto_front(points.assign(cost=cost), "cost")
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
    return notation.settings(front)


def _titles(points: pd.DataFrame) -> list[str]:
    return [notation.policy_title(policy, variant) for policy, variant in points[POLICY].itertuples(index=False)]


def _scores(cells: pd.DataFrame) -> str:
    """Return the title of a panel of these cells' means: the benchmark's, or how many there are."""
    titles = cells["benchmark_title"].unique()
    return f"mean of {len(titles)} benchmarks" if len(titles) > 1 else titles[0]


def _triggers(cells: pd.DataFrame) -> Points:
    """A line for each setting that ran at two or more triggers; of many, for those with the most triggers."""
    scored = cells.dropna(subset="pass_at_1")
    compressed = scored[scored["budget"].notna()]
    triggers = compressed.groupby(LINE, dropna=False, sort=False)["budget"].nunique()
    most_triggers = triggers[triggers >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    chosen = compressed.merge(most_triggers.index.to_frame(index=False), on=LINE)  # the cells of these settings
    if chosen.empty:
        return "", chosen
    full = scored[(scored["policy"] == "full") & scored["condition"].isin(chosen["condition"])]
    views = benchmark_views(pd.concat([chosen, full]))
    points = pd.concat([rows.assign(panel=title) for title, rows in views], ignore_index=True)
    points["line"] = notation.settings(points, trigger=False)
    return "trigger of evictions", points.dropna(subset="pass_at_1")


def _memory(cells: pd.DataFrame) -> Points:
    """A line per policy, the policy with the best score first. Settings without all benchmarks are left out."""
    cells = cells[cells["benchmark"].isin(compressed_benchmarks(cells))]
    means = mean_over_benchmarks(cells).dropna(subset=["pass_at_1", LENGTH])
    points = means.sort_values("pass_at_1", ascending=False, kind="stable")
    if (points["policy"] == "full").all():
        return "", points.head(0)
    unfinished = points["status"].ne("done").groupby([points["policy"], points["variant"]]).transform("any")
    points = points.assign(panel=_scores(cells), line=_titles(points) + unfinished.map({True: UNFINISHED, False: ""}))
    mark = f" ({UNFINISHED} not finished)" if unfinished.any() else ""
    return f"memory{mark}, {question_title(cells)}".removesuffix(", "), points


def _bytes(cells: pd.DataFrame) -> Points:
    """A color per number of bits, a marker per policy and scheme; nothing with only one number of bits."""
    points = settings_by_bytes(cells, cells["model"].iloc[0])
    if points["bits"].nunique() < 2:
        return "", points.head(0)
    # The variant names how numbers are packed, as in "bits=4, scheme=kivi".
    scheme = (", " + points["variant"].str.extract(r"scheme=(\w+)", expand=False)).fillna("")
    titles = points["policy"].map(notation.policy_title)
    line = titles + points["bits"].map(", {:g} bits".format) + scheme
    points = points.assign(panel=_scores(cells), line=line, color=points["bits"], shape=titles + scheme)
    return f"bytes; the weights take {size(points['weight_bytes'].max())} beside them", points


def _speeds(timed: pd.DataFrame) -> Points:
    """A point per setting on each benchmark, at its largest batch; `timed` has a row per cell and batch."""
    largest_batch = timed.groupby("cell_id")["slots"].transform("max")
    points = timed[timed["slots"] == largest_batch].dropna(subset="pass_at_1").assign(line=_titles, panel="")
    for benchmark, slots in points.groupby("benchmark_title")["slots"]:
        points.loc[slots.index, "panel"] = f"{benchmark}, {notation.span(slots)} texts side by side"
    return "speed, each setting alone", points


# Of each cost: its column, the label of its axis, and the function for a caption's words and the points.
COSTS: dict[str, tuple[str, str, Callable[[pd.DataFrame], Points]]] = {
    "budget": (TRIGGER, "trigger of evictions (tokens)", _triggers),
    "memory": (LENGTH, "mean cache length (tokens)", _memory),
    "bytes": (BYTES, "keys and values of a text, mean over its steps (log scale)", _bytes),
    "speed": (SPEED, "tokens/s of the whole batch, median over rounds", _speeds),
}
