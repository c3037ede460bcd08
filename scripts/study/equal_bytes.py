"""Pass@1 against bytes of a run of equal_bytes and equal_bytes_packed: a table as Markdown, and README's figure.

python scripts/study/equal_bytes.py results/runs/equal_bytes results/published/equal_bytes/equal_bytes.png
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.inference import paired_tests, score_array
from kvsweep.analysis.statistics.metrics import cell_metrics, graded_rows, size

SHARES = {1 / 2: "1/2", 1 / 4: "1/4", 1 / 8: "1/8"}
# All rows, by bits and scheme; without a scheme all cells of the run have the same.
STORED = {
    "16": "full cache, 16 bits",
    "8 fp8": "fp8",
    "8 fp8 tensor": "fp8, calibrated",
    "8 fp8 token": "fp8, a scale per token",
    "8 rotated": "8 bits",
    "4 rotated": "4 bits",
    "3 rotated": "4 and 2 bits",
    "3 kvarn": "KVarN, 4 and 2 bits",
    "2 kivi": "KIVI, 2 bits",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    run = load_run(args.run)
    cells = settings(cell_metrics(run), graded_rows(run))
    print(table(cells))
    print(f"\nThe eviction of the highest Pass@1 at 16 bits is {notation.policy_title(best(cells))}.")
    with matplotlib.rc_context(style.STYLE):
        draw(cells).savefig(args.figure)


def settings(metrics: pd.DataFrame, graded: pd.DataFrame) -> pd.DataFrame:
    """The cells with their name, their share of the full cache's bytes, and the paired difference to the full cache."""
    full = metrics[metrics["policy"] == "full"].iloc[0]
    scheme = metrics["variant"].str.extract(r"scheme=(\w+)")[0].fillna("rotated").where(metrics["bits"] < 16, "")
    scale = metrics["variant"].str.extract(r"scale=(\w+)")[0].fillna("none").where(scheme == "fp8", "none")
    stored = metrics["bits"].map("{:g}".format) + " " + scheme + " " + scale.replace("none", "")
    metrics = metrics.assign(stored=stored.str.strip())
    metrics["all_rows"] = metrics["policy"].isin(["full", "full_packed"])
    metrics["share"] = metrics["kv_bytes_mean"] / full["kv_bytes_mean"]
    metrics["peak"] = metrics["kv_bytes_peak"] / full["kv_bytes_peak"]
    scores = score_array(graded, list(metrics["cell_id"]))
    tests = paired_tests(scores, scores[metrics["policy"].eq("full").to_numpy()][0])
    metrics[["difference", "low", "high"]] = tests[["difference", "low", "high"]].clip(-1, 1).to_numpy()
    metrics["name"] = [name(row) for row in metrics.itertuples()]
    return metrics.sort_values(["share", "pass_at_1"], ascending=[False, False], ignore_index=True)


def name(row: Any) -> str:
    if row.all_rows:
        return STORED[row.stored]
    kept = ", question kept" if row.question == "on_top" else ""
    return notation.policy_title(row.policy) + kept + (" + " + STORED[row.stored] if row.stored != "16" else "")


def best(cells: pd.DataFrame) -> str:
    """The eviction of the highest Pass@1 at 16 bits."""
    evicted = cells[~cells["all_rows"] & (cells["stored"] == "16")]
    return str(evicted.loc[evicted["pass_at_1"].idxmax(), "policy"])


def table(cells: pd.DataFrame) -> str:
    head = [
        "setting",
        "rows after an eviction",
        "bytes, mean",
        "share",
        "share of the peak",
        "answers",
        "Pass@1 (%)",
        "beside the full cache (95%)",
    ]
    lines = []
    for row in cells.itertuples():
        rows = "all" if row.all_rows else f"{row.mean_length_after:.0f}"
        shares = [f"{notation.percent(one)}%" for one in (row.share, row.peak)]
        interval = (
            f"{notation.percent(row.difference, signed=True)} ({notation.interval(row.low, row.high, signed=True)})"
        )
        score = notation.percent_pm(row.pass_at_1, row.se)
        compared = "" if row.policy == "full" else interval
        lines.append([row.name, rows, size(row.kv_bytes_mean), *shares, f"{row.graded:.0f}", score, compared])
    return notation.markdown([head, *lines])


def draw(cells: pd.DataFrame) -> matplotlib.figure.Figure:
    """All rows as stars with their names, each eviction as a line, and the best one with fp8 dashed."""
    figure, [axes] = style.panels(7.1, 1, 1, row_height=3.4, extra_height=0.2)
    for at, title in SHARES.items():
        axes.axvline(at, color="0.85", linewidth=3, zorder=0)
        axes.annotate(title, (at, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom", fontsize=8)
    evicted = cells[~cells["all_rows"]]
    policies = sorted(evicted["policy"].unique(), key=notation.policy_title)
    for (policy, stored, question), line in evicted.groupby(["policy", "stored", "question"]):
        if stored != "16" and policy != best(cells):
            continue
        place = policies.index(policy)
        look: dict[str, Any] = {"color": style.LINE_COLORS[place], "marker": style.MARKERS[place]}
        look |= {"markersize": 7, "markeredgecolor": "black"} if question == "on_top" else {"markersize": 4}
        look |= {"linestyle": (0, (3, 2)), "markerfacecolor": "white"} if stored != "16" else {}
        score, ends = style.percent_errors(line)
        axes.errorbar(line["share"], score, ends, label=line["name"].iloc[0], linewidth=1, elinewidth=0.6, **look)
    whole = cells[cells["all_rows"]]
    score, ends = style.percent_errors(whole)
    axes.errorbar(
        whole["share"], score, ends, color="black", marker="*", markersize=9, linestyle="none", elinewidth=0.6
    )
    before, lower = np.inf, 0
    for row, height in zip(whole.itertuples(), score, strict=True):  # the largest share first
        lower = lower + 1 if row.share > before / 1.4 else 0
        before, below = row.share, height - 9 - 6 * lower
        place = (row.share, below if below > 0 else height + 12)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5, "shrinkB": 3}
        look = {"fontsize": 7.5, "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6}}
        axes.annotate(row.name, (row.share, height), place, ha="center", va="top", arrowprops=line, **look)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="keys and values of a text, share of the full cache's bytes, mean over its steps (log scale)",
        ylabel="Pass@1 (%)",
    )
    axes.set_xticks([1, *SHARES, 1 / 16], ["1", *SHARES.values(), "1/16"])
    axes.minorticks_off()
    style.tidy(axes, grid="y")
    style.percent_axis(axes)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


if __name__ == "__main__":
    main()
