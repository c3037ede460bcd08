"""Pass@1 against tokens per second, each setting decoded alone beside the full cache (`kvsweep-replay --time`)."""

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis import format
from kvsweep.analysis.format import DEFAULT_LOOK, Look
from kvsweep.analysis.numbers.metrics import model_title
from kvsweep.analysis.pictures import style


@matplotlib.rc_context(style.STYLE)
def speed_figure(timed: pd.DataFrame, metrics: pd.DataFrame, model: str, look: Look = DEFAULT_LOOK) -> Figure | None:
    """Draw a panel per benchmark, at the largest batch that was timed; no figure if no cell of the model was."""
    cells = metrics[metrics["model"] == model].merge(timed, on="cell_id", suffixes=("_together", ""))
    cells = cells[cells["pass_at_1"].notna()]
    if cells.empty:
        return None
    cells = cells[cells["slots"] == cells.groupby("cell_id")["slots"].transform("max")]
    benchmarks = list(cells["benchmark_title"].unique())
    columns = min(len(benchmarks), 2)
    figure = style.new_figure((look.width, 2.3 * -(-len(benchmarks) // columns) + 0.7))
    looks = style.policy_looks(list(cells[["policy", "variant"]].drop_duplicates().itertuples(index=False, name=None)))
    for axes, benchmark in zip(style.panels(figure, len(benchmarks), columns), benchmarks, strict=True):
        for (policy, variant), rows in cells[cells["benchmark_title"] == benchmark].groupby(["policy", "variant"]):
            score, ends = style.percent_errors(rows)
            own = {**looks[policy, variant], "linestyle": "none", "label": format.policy_title(policy, variant)}
            axes.errorbar(rows["tokens_per_second"], score, ends, markersize=4, elinewidth=0.6, **own)
        axes.set_title(f"{benchmark}, {cells['slots'].max():g} texts side by side")
        axes.set_xlabel("tokens/s, median over rounds")
        axes.set_ylabel("Pass@1 (%)")
        style.tidy(axes, grid="both")
    drawn = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles = {label: handle for pairs in drawn for handle, label in pairs}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{model_title(metrics, model)}: Pass@1 against speed, each setting alone")
    return figure
