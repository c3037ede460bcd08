"""Pass@1 against the bytes of keys and values, a curve per number of bits and scheme: fewer rows or fewer bits."""

from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.numbers.cheapest import settings_by_bytes
from kvsweep.analysis.numbers.kv_bytes import size
from kvsweep.analysis.numbers.metrics import model_title
from kvsweep.analysis.pictures import style
from kvsweep.analysis.pictures.comparison import pareto_front

ALL_ROWS = ("full", "full_packed")


@matplotlib.rc_context(style.STYLE)
def bytes_figure(metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw Pass@1 against mean bytes of a text's keys and values, a color per number of bits, a marker per policy.

    Scores and bytes are means over the benchmarks. A step line is the Pareto front over all settings. There is no
    figure if the run has a single number of bits.
    """
    points = settings_by_bytes(metrics, model)
    if points["bits"].nunique() < 2:
        return None
    bits = sorted(points["bits"].unique(), reverse=True)
    policies = [name for name in points["policy"].unique() if name not in ALL_ROWS]
    figure = style.new_figure((look.width, 4.4))
    axes = figure.add_subplot()
    schemes = points["variant"].str.extract(r"scheme=(\w+)", expand=False).fillna("")
    for (policy, width, scheme), line in points.groupby(["policy", "bits", schemes], sort=False):
        all_rows = policy in ALL_ROWS
        own: dict[str, Any] = {"color": style.LINE_COLORS[bits.index(width)], "linewidth": 1, "capsize": 1.5}
        own["marker"] = "*" if all_rows else style.MARKERS[policies.index(policy) % len(style.MARKERS)]
        name = "all rows" if all_rows else format.policy_title(str(policy))
        score, error = 100 * line["pass_at_1"], 100 * line["se"].fillna(0)
        own["label"] = ", ".join(filter(None, (name, f"{width:g} bits", str(scheme))))
        axes.errorbar(line["kv_bytes_mean"], score, error, markersize=5, **own)
    for row in points[points["policy"] == "full"].head(1).itertuples():
        style.full_cache_level(axes, row, format.policy_title("full"))
    front = pareto_front(points.assign(mean_cache_length=points["kv_bytes_mean"]))
    axes.step(front["kv_bytes_mean"], 100 * front["pass_at_1"], where="post", color="0.6", label="Pareto front")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.set_xlabel("keys and values of a text, mean over its decoding steps")
    axes.set_ylabel("Pass@1 (%), ± standard error over problems")
    weights = f"the weights take {size(points['weight_bytes'].max())} beside them"
    axes.set_title(f"{model_title(metrics, model)}: Pass@1 against bytes\n{weights}", linespacing=1.3)
    style.tidy(axes, grid="both")
    figure.legend(loc="outside right upper", frameon=False, fontsize=7.5)
    return figure
