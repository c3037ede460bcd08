"""Lines of Pass@1 against the budget, per benchmark and for their mean."""

from math import ceil
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.numbers.metrics import benchmark_views, model_title
from kvsweep.analysis.pictures import style

LINE = ["policy", "variant", "keep_ratio", "local_window"]
MAX_LINES = 8


def budget_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against budget for settings that ran at two budgets or more, the full cache as a level.

    The mean over benchmarks comes first, without the points that lack a benchmark; then each benchmark. At most
    `MAX_LINES` settings are drawn, those with the most budgets; there is no figure if no setting ran at two budgets.
    """
    ours = metrics[metrics["model"] == model]
    compressed = ours[ours["budget"].notna() & ours["pass_at_1"].notna()]
    budgets = compressed.groupby(LINE, dropna=False, sort=False)["budget"].nunique()
    budgets = budgets[budgets >= 2].sort_values(ascending=False, kind="stable").head(MAX_LINES)
    if budgets.empty:
        return None
    chosen = compressed.merge(budgets.index.to_frame(index=False), on=LINE)
    full = ours[(ours["policy"] == "full") & ours["condition"].isin(chosen["condition"])]
    return _panels(benchmark_views(pd.concat([chosen, full])), model_title(metrics, model), look)


@matplotlib.rc_context(style.STYLE)
def _panels(views: list[tuple[str, pd.DataFrame]], title: str, look: Look) -> Figure:
    columns = min(len(views), look.columns or (3 if look.width > 5 else 2))
    views = [(title, rows.dropna(subset="pass_at_1")) for title, rows in views]
    for _, rows in views:
        rows["line"] = [format.setting(row, budget=False) for row in rows.itertuples()]
    points = pd.concat([rows for _, rows in views])
    lines = list(points.loc[points["policy"] != "full", "line"].unique())
    figure = style.new_figure((look.width, 0.9 + 1.8 * ceil(len(views) / columns)))
    grid = style.panels(figure, len(views), columns, sharey=True, sharex=True)
    for axes, view in zip(grid, views, strict=True):
        _lines(axes, *view, lines)
    for place, axes in enumerate(grid):
        # Panels below each other share the axis of the lowest.
        axes.tick_params(labelbottom=place + columns >= len(grid))
        axes.set_xlabel("budget (tokens)" if place + columns >= len(grid) else "")
        axes.set_ylabel("" if place % columns else "Pass@1 (%)")
    style.percent_axis(grid[0])
    for axes in grid[1:]:
        axes.spines["left"].set_bounds(*grid[0].spines["left"].get_bounds())
    # All panels share an axis, which needs a tick for every budget of any panel.
    grid[0].set_xticks(sorted(points["budget"].dropna().unique()))
    legend: dict[str, Any] = {}
    for axes in grid:
        handles, labels = axes.get_legend_handles_labels()
        legend |= dict(zip(labels, handles, strict=True))
    figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(style.wrapped(f"{title}: Pass@1 against budget, ± standard error over problems", look.width))
    return figure


def _lines(axes: Axes, title: str, points: pd.DataFrame, lines: list[str]) -> None:
    full = points["policy"] == "full"
    budgets = points["budget"].dropna()
    # Points at one budget stand side by side, so that no error bar hides another.
    aside = 0.02 * (budgets.max() - budgets.min()) * (np.arange(len(lines)) - (len(lines) - 1) / 2)
    for place, name in enumerate(lines):
        line = points[~full & (points["line"] == name)].drop_duplicates("budget").sort_values("budget")
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        ends = [error, error.where(score + error <= 100, 100 - score)]
        look: dict[str, Any] = {
            "color": style.LINE_COLORS[place % len(style.LINE_COLORS)],
            "marker": style.MARKERS[place],
        }
        look |= {
            "linestyle": style.DASHES[place % len(style.DASHES)],
            "markersize": 4,
            "linewidth": 1.2,
            "elinewidth": 0.8,
        }
        axes.errorbar(line["budget"] + aside[place], score, ends, label=name, **look)
    for row in points[full].head(1).itertuples():
        style.full_cache_level(axes, row, format.policy_title("full"))
    axes.set_title(title)
    style.tidy(axes)
