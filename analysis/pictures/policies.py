"""Bars of the policies that ran with one setting: Pass@1 per benchmark, and the cache length."""

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, MARKS, UNFINISHED, Look
from kvsweep.analysis.load import in_order
from kvsweep.analysis.numbers.grids import SharedSetting
from kvsweep.analysis.numbers.metrics import benchmark_views, compressed_benchmarks, model_title
from kvsweep.analysis.pictures import style

POLICY = ["policy", "variant"]

# Light enough for dark text on them, and different in grey print.
BAR_COLOR, FULL_COLOR, LENGTH_COLOR = "#9ecae1", "#d0d0d0", "#b3400d"

# In inches: the height of a bar, the least width of a panel of bars with its numbers, and a letter's width.
BAR, PANEL, LETTER = 0.155, 0.82, 0.056
# A row with fewer panels than this shows the mean alone: in more rows the figure would be higher than a page.
FEWEST_IN_A_ROW = 4


@matplotlib.rc_context(style.STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors and numbers, the best first, and at the end the cache length.

    The first panel is the mean over benchmarks, missing where one is; each further one is a benchmark with the marks of
    the verdicts, which a narrow figure lacks. The length is the mean over benchmarks and steps (`metrics.cache_rows`).
    """
    ours = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    ours = ours[ours["benchmark"].isin(compressed_benchmarks(ours))]
    views = benchmark_views(ours)
    bars = _best_first(views[0][1])
    names = [format.policy_title(*key) for key in bars.itertuples(index=False)]
    columns = int((look.width - LETTER * max(map(len, names)) - 0.2) / PANEL)
    if columns < min(FEWEST_IN_A_ROW, len(views) + 1):
        views, columns = views[:1], 2
    columns = min(columns, len(views) + 1)
    # Each panel has all policies, in the same places.
    views = [(title, bars.merge(rows, on=POLICY, how="left")) for title, rows in views]
    height = BAR * len(bars) + 0.55
    figure, axes = style.panels(look.width, len(views) + 1, columns, row=height, rest=1.0, sharey=True)
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


def _best_first(rows: pd.DataFrame) -> pd.DataFrame:
    """The policies by falling score, those without one last; the full cache is above all others."""
    ranked = rows.assign(other=rows["policy"] != "full", loss=-rows["pass_at_1"])
    return in_order(ranked, by=["other", "loss", "policy"])[POLICY].drop_duplicates(ignore_index=True)


def _bars(axes: Axes, title: str, rows: pd.DataFrame) -> None:
    score, ends = style.percent_errors(rows)
    colors = [FULL_COLOR if policy == "full" else BAR_COLOR for policy in rows["policy"]]
    whiskers: dict[str, Any] = {"ecolor": "0.25", "elinewidth": 0.8}
    axes.barh(rows.index, score, xerr=ends, color=colors, edgecolor="0.45", linewidth=0.5, error_kw=whiskers)
    if (score == 0).any():  # a bar of no length is a stroke
        stroke: dict[str, Any] = {"color": "0.25", "markersize": 7, "markeredgewidth": 1.6, "clip_on": False}
        axes.plot(score[score == 0], rows.index[score == 0], "|", **stroke)
    numbers = [format.percent_pm(*pair) for pair in zip(rows["pass_at_1"], rows["se"], strict=True)]
    if "decision" in rows:
        numbers = list(rows["pass_at_1"].map(format.percent) + rows["decision"].map(format.DECISION_MARKS).fillna(""))
    _numbers(axes, numbers, 100)
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
