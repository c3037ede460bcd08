"""Lines of Pass@1 against the budget, per benchmark and for their mean."""

from math import ceil
from typing import Any

import matplotlib
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import words
from analysis.numbers.metrics import benchmark_views, model_title
from analysis.pictures.style import STYLE, full_cache_level, new_figure, panels, tidy

LINE = ["policy", "variant", "keep_ratio", "local_window"]
MAX_LINES = 8


def budget_figure(metrics: pd.DataFrame, model: str) -> Figure | None:
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
    return _panels(benchmark_views(pd.concat([chosen, full])), model_title(metrics, model))


def _panels(views: list[tuple[str, pd.DataFrame]], title: str) -> Figure:
    columns = min(len(views), 5)
    views = [(title, rows.dropna(subset="pass_at_1")) for title, rows in views]
    for _, rows in views:
        rows["line"] = [words.setting(row, budget=False) for row in rows.itertuples()]
    points = pd.concat([rows for _, rows in views])
    looks = zip(seaborn.color_palette("colorblind", MAX_LINES), "osD^vP*X", strict=True)
    styles = dict(zip(points.loc[points["policy"] != "full", "line"].unique(), looks, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = new_figure((1.2 + 2.3 * columns, 1.2 + 2.4 * ceil(len(views) / columns)))
        grid = panels(figure, len(views), columns, sharey=True, sharex=True)
        for axes, view in zip(grid, views, strict=True):
            _lines(axes, *view, styles)
        for axes in grid[::columns]:
            axes.set_ylabel("Pass@1 (%)")
        # All panels share an axis, which needs a tick for every budget of any panel.
        grid[0].set_xticks(sorted(points["budget"].dropna().unique()))
        legend: dict[str, Any] = {}
        for axes in grid:
            handles, labels = axes.get_legend_handles_labels()
            legend |= dict(zip(labels, handles, strict=True))
        figure.legend(list(legend.values()), list(legend), loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(f"{title}: Pass@1 against budget, ± standard error over problems", fontsize=11)
    return figure


def _lines(axes: Axes, title: str, points: pd.DataFrame, styles: dict[str, tuple[Any, str]]) -> None:
    full = points["policy"] == "full"
    for name, line in points[~full].groupby("line", sort=False):
        line = line.drop_duplicates("budget").sort_values("budget")
        color, marker = styles[str(name)]
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4, "capsize": 2.5, "linewidth": 1.2}
        axes.errorbar(line["budget"], score, error, label=str(name), **look)
    for row in points[full].head(1).itertuples():
        full_cache_level(axes, row, "full cache")
    axes.set(title=title, xlabel="budget (tokens)")
    tidy(axes)
