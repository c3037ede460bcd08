"""KL of replayed texts: of each setting, by the distance since the last eviction and by the full cache's entropy."""

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.pictures import style

# A page has room for the names of so many settings, and a column for so many.
MOST, MOST_IN_A_COLUMN = 60, 40


@matplotlib.rc_context(style.STYLE)
def fidelity_figure(table: pd.DataFrame, bins: pd.DataFrame, title: str, look: Look = DEFAULT_LOOK) -> Figure:
    """Draw a model's KL per setting (a `fidelity` table), nearest first, and that of cells by `fidelity_bins`."""
    # A budget that all settings share stands in the title.
    budgets = table["budget"].dropna().unique()
    named = table.assign(setting=[format.setting(row, budget=len(budgets) > 1) for row in table.itertuples()])
    wide = look.width > 5
    nearest = named.groupby("setting")["kl"].mean().sort_values().index[: MOST if wide else MOST_IN_A_COLUMN]
    high = 0.13 * len(nearest) + 1.0
    parts: Any = [["cells", "distance"], ["cells", "entropy"]] if wide else [["cells"], ["distance"], ["entropy"]]
    figure = style.new_figure((look.width, max(high, 3.4) if wide else high + 3.4))
    axes = figure.subplot_mosaic(parts, height_ratios=None if wide else [high, 1.7, 1.7])
    for place, (benchmark, rows) in enumerate(named.groupby("benchmark_title", sort=False)):
        rows = rows[rows["setting"].isin(nearest)]
        own: dict[str, Any] = {"color": style.LINE_COLORS[place % len(style.LINE_COLORS)], "label": benchmark}
        own |= {"fmt": style.MARKERS[place % len(style.MARKERS)], "markersize": 3, "linewidth": 0.8}
        heights = nearest.get_indexer(pd.Index(rows["setting"]))
        axes["cells"].errorbar(rows["kl"], heights, xerr=1.96 * rows["kl_se"].fillna(0), **own)
    axes["cells"].set_yticks(range(len(nearest)), list(nearest), fontsize=6)
    axes["cells"].set(ylim=(len(nearest) - 0.4, -0.6), xlabel="KL (nats per token)")
    style.tidy(axes["cells"], grid="both")
    names = {"distance": "tokens since last eviction", "entropy": "entropy of full cache (nats)"}
    for kind, label in names.items():
        ours = bins[(bins["by"] == kind) & (bins["kl"] > 0)]
        bounds = pd.Index(sorted(ours["from"].unique()))
        ranked = named.sort_values("kl", ascending=False)["cell_id"].tolist()
        for place, cell_id in enumerate(ranked):
            one = ours[ours["cell_id"] == cell_id]
            shade = matplotlib.colormaps["viridis"](1 - place / max(1, len(ranked) - 1))
            place_of = bounds.get_indexer(pd.Index(one["from"]))
            axes[kind].plot(place_of, one["kl"], marker=".", markersize=3, linewidth=0.6, color=shade)
        axes[kind].set_xticks(range(len(bounds)), [f"{bound:g}" for bound in bounds])
        axes[kind].set(xlabel=label, ylabel="KL (nats per token)", yscale="log")
        axes[kind].yaxis.set_major_formatter("{x:g}")
        style.tidy(axes[kind], grid="both")
    style.legend_below(figure, 4 if wide else 2)
    shared = f", budget {format.number(budgets[0])}" if len(budgets) == 1 else ""
    most = "" if len(nearest) == named["setting"].nunique() else f", the {len(nearest)} nearest settings"
    said = f"{title}{shared}: KL of replayed texts with 95% intervals{most}; the darker a line, the nearer its cell"
    figure.suptitle(style.wrapped(said, look.width))
    return figure
