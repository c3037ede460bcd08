"""Rankings: policies by Pass@1, the scores of a grid and which are tied with the best, and replays by KL."""

from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.load import in_order
from kvsweep.analysis.notation import DEFAULT_LOOK, UNFINISHED, Look
from kvsweep.analysis.statistics.grids import SharedSetting
from kvsweep.analysis.statistics.inference import NoiseFloor
from kvsweep.analysis.statistics.metrics import benchmark_views, compressed_benchmarks, model_title

POLICY = ["policy", "variant"]

# Light enough for dark text on top, and different in grey print.
BAR_COLOR, LENGTH_COLOR = "#9ecae1", "#fdd0a2"
BAND_COLOR, SIGNAL_COLOR, NOISE_COLOR = "0.85", "#0072B2", "#D55E00"

# Inches: a bar's height, the least width of a panel of bars with numbers, and a letter's width.
BAR, PANEL, LETTER = 0.155, 0.72, 0.047
# Inches of all strips of the noise figure together: with the note they fit on a page.
MOST_HIGH = 9.0
# A page has room for this many names of replayed settings above the other panels.
MOST = 40


@matplotlib.rc_context(style.STYLE)
def policy_bars_figure(setting: SharedSetting, model: str, metrics: pd.DataFrame, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw Pass@1 per policy as bars with standard errors and numbers, best first, with the cache length at the end.

    Of several benchmarks the first panel is their mean, missing if one of them is. Each further panel is a benchmark,
    with verdict marks; all are left out if they do not fit beside each other. The length is the mean over benchmarks
    and steps (`metrics.cache_rows`).
    """
    cells = setting.cells[setting.cells["model"] == model].drop_duplicates([*POLICY, "benchmark"])
    cells = cells[cells["benchmark"].isin(compressed_benchmarks(cells))]
    views = benchmark_views(cells)
    _, mean = views[0]
    # The full cache first, then the best scores.
    ranked = mean.assign(other=mean["policy"] != "full", loss=-mean["pass_at_1"])
    ranked = in_order(ranked, by=["other", "loss", "policy"]).drop_duplicates(POLICY, ignore_index=True)
    names = []
    for row in notation.rows(ranked):
        mark = "" if row.status == "done" else UNFINISHED
        names.append(notation.policy_title(row.policy, row.variant) + mark)
    if LETTER * max(map(len, names)) + PANEL * (len(views) + 1) > look.width:
        views = views[:1]
    count = len(views) + 1
    height = BAR * len(ranked)
    figure, panels = style.panels(look.width, count, count, row_height=height, extra_height=1.0, sharey=True)
    *score_panels, length_panel = panels
    texts = list(names)
    for axes, (title, rows) in zip(score_panels, views, strict=True):
        # Each panel has all policies, in the same places.
        shown = ranked[POLICY].merge(rows, on=POLICY, how="left")
        numbers = [notation.percent_pm(row.pass_at_1, row.se) for row in notation.rows(shown)]
        if "decision" in shown:  # a mean has none
            marks = shown["decision"].map(notation.DECISION_MARKS).fillna("")
            numbers = list(shown["pass_at_1"].map(notation.percent) + marks)
        scores, errors = style.percent_errors(shown.fillna({"pass_at_1": 0}))
        _bars(axes, scores, numbers, color=BAR_COLOR, xerr=errors)
        axes.set(title=title.replace(" benchmarks", "\nbenchmarks"), xlim=(0, 100), xlabel="Pass@1 (%)")
        texts += numbers
    lengths = ranked["mean_cache_length"]
    _bars(length_panel, lengths.fillna(0), [notation.decimal(length, 0) for length in lengths], color=LENGTH_COLOR)
    length_panel.set(title="cache\nlength", xlabel="tokens")
    first = panels[0]  # whose vertical axis all share
    first.set_yticks(ranked.index, names)
    first.invert_yaxis()
    notes = ["cache length: mean over the decoding steps", *style.marks(texts)]
    style.footnote(figure, "   ".join(notes))
    figure.set_label(f"{model_title(metrics, model)}: Pass@1 per policy at {setting.title}")
    return figure


def _bars(axes: Axes, values: pd.Series, numbers: list[str], **look: Any) -> None:
    """Draw bars with numbers behind them, the first on top."""
    bars = axes.barh(values.index, values, edgecolor="0.45", linewidth=0.5, error_kw={"elinewidth": 0.8}, **look)
    axes.bar_label(bars, numbers, padding=2, fontsize=6.5)
    axes.xaxis.set_major_locator(MaxNLocator(2))
    axes.tick_params(axis="y", length=0)
    style.tidy(axes, grid="x")


@matplotlib.rc_context(style.STYLE)
def noise_figure(floors: list[tuple[str, NoiseFloor]], look: Look = DEFAULT_LOOK) -> Figure:
    """Draw a strip per titled grid: a dot for each setting's Pass@1, over a grey band.

    The band reaches from the best score down by `NoiseFloor.critical`: settings inside are tied with the best.
    """
    figure = style.new_figure((look.width, min(0.5 * len(floors), MOST_HIGH) + 0.5))
    axes = figure.subplots()
    axes.use_sticky_edges = False  # the band's, which would cut the dot at its end
    for row, (title, floor) in enumerate(floors):
        scores = 100 * floor.scores
        best = scores.max()
        color = SIGNAL_COLOR if floor.signal else NOISE_COLOR
        axes.barh(row, -min(100 * floor.critical, best), 0.3, left=best, color=BAND_COLOR)
        axes.plot(scores, [row] * len(scores), "o", markersize=3.5, color=color, alpha=0.5)
        text = style.wrapped(f"{title}\nscores {', '.join(floor.words)}", look.width)
        axes.text(0, row - 0.2, text, transform=axes.get_yaxis_transform(), fontsize=6.5)
    axes.set(xlabel="Pass@1 (%)", yticks=[], ylim=(len(floors) - 0.7, -0.9))
    style.tidy(axes, grid="x")
    note = "one dot per setting: blue where they span more than chance, orange where not; grey: tied with the best"
    style.footnote(figure, note)
    figure.set_label("Each grid's scores, and which are statistically tied with the best")
    return figure


@matplotlib.rc_context(style.STYLE)
def fidelity_figure(table: pd.DataFrame, bins: pd.DataFrame, title: str, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw a model's KL per setting (a `fidelity` table), smallest first, and that of cells by `fidelity_bins`."""
    # If all settings share a trigger, the title names it.
    budgets = table["budget"].dropna().unique()
    named = table.assign(setting=notation.settings(table, trigger=len(budgets) > 1))
    settings = named.groupby("setting")["kl"].mean().sort_values().index
    nearest = settings[:MOST]
    height = 0.13 * len(nearest) + 0.9
    figure = style.new_figure((look.width, height + 3.2))
    first, *others = figure.subplots(3, height_ratios=[height, 1.6, 1.6])
    _kl_of_settings(first, named, nearest)
    darkest_last = named.sort_values("kl", ascending=False)["cell_id"]
    kinds = {"distance": "tokens since last eviction", "entropy": "entropy of full cache (nats)"}
    for axes, (kind, label) in zip(others, kinds.items(), strict=True):
        _kl_of_bins(axes, bins[bins["by"] == kind], darkest_last)
        axes.set_xlabel(label)
    style.legend_below(figure)
    trigger = f", trigger {notation.number(budgets[0])}" if len(budgets) == 1 else ""
    number = "" if len(nearest) == len(settings) else f", the {len(nearest)} nearest settings"
    meaning = f"KL of replayed texts with 95% intervals{number}; the darker a line, the nearer its cell"
    figure.set_label(f"{title}{trigger}: {meaning}")
    return figure


def _kl_of_settings(axes: Axes, table: pd.DataFrame, settings: pd.Index) -> None:
    """Draw the KL of these settings with its interval, a line per setting, a marker per benchmark."""
    axes.yaxis.update_units(list(settings))  # in this order
    shown = table[table["setting"].isin(settings)]
    for number, (benchmark, rows) in enumerate(shown.groupby("benchmark_title", sort=False)):
        look = style.look_of(number) | {"linestyle": "none", "label": benchmark, "markersize": 3, "elinewidth": 0.8}
        axes.errorbar(rows["kl"], rows["setting"], xerr=1.96 * rows["kl_se"].fillna(0), **look)
    axes.set(ylim=(len(settings) - 0.4, -0.6), xlabel="KL (nats per token)")
    axes.tick_params(axis="y", labelsize=6)
    style.tidy(axes, grid="both")


def _kl_of_bins(axes: Axes, bins: pd.DataFrame, cell_ids: pd.Series) -> None:
    """Draw the KL of each cell over the lower bounds of its bins, the last cell darkest."""
    # On a logarithmic axis.
    table = bins[bins["kl"] > 0].pivot(index="from", columns="cell_id", values="kl").reindex(columns=cell_ids)
    axes.set_prop_cycle(color=matplotlib.colormaps["viridis_r"](np.linspace(0, 1, len(cell_ids))))
    axes.plot(table.to_numpy(), marker=".", markersize=3, linewidth=0.6)
    axes.set_xticks(range(len(table)), [f"{bound:g}" for bound in table.index])
    axes.set(ylabel="KL (nats per token)", yscale="log")
    axes.yaxis.set_major_formatter(style.PlainLogFormatter())
    axes.yaxis.set_minor_formatter(style.PlainLogFormatter())
    style.tidy(axes, grid="both")
