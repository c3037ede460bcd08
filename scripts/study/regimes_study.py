"""When importance matters: each policy where a value is stated once beside the same where the text restates it.

    kvsweep -m experiment=regimes
    python scripts/study/regimes_study.py results/runs/regimes --output results/published/regimes

Writes regimes.csv (a row per model and policy: Pass@1 in both benchmarks with its standard error over problems, the
ranks, and the difference) and regimes.png. The benchmarks have problems of their own, so the error of a difference is
that of two independent means. Prints a table for each model, and the policies whose rank moves most.
"""

import argparse
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis.figures.style import LINE_COLORS, STYLE, new_figure, tidy
from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import PAGE_WIDTH, policy_title
from kvsweep.analysis.statistics.sentences import analyse

ONCE, AGAIN = "toy_regs", "toy_restated"
MOST_MOVED = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the run of experiment=regimes")
    parser.add_argument("--output", type=Path, default=Path(), help="where the table and the picture go")
    options = parser.parse_args()
    table = compare(analyse(load_run(options.run)).metrics)
    options.output.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(options.output / "regimes.csv", index=False)
    figure(table).savefig(options.output / "regimes.png", dpi=200)
    for model, rows in table.groupby("model_title", sort=False):
        print(f"\n{model}: rank correlation of the policies {correlation(rows):.2f}")
        print(markdown(rows))
        print(moved(rows))


def compare(metrics: pd.DataFrame) -> pd.DataFrame:
    """A row per model and policy, the best in the benchmark that states a value once first."""
    keys = ["model", "model_title", "policy"]
    sides = [metrics[metrics["benchmark"] == name].set_index(keys)[["pass_at_1", "se"]] for name in (ONCE, AGAIN)]
    table = pd.merge(*sides, left_index=True, right_index=True, suffixes=("_once", "_again")).reset_index()
    table["difference"] = table["pass_at_1_again"] - table["pass_at_1_once"]
    table["difference_se"] = (table["se_once"] ** 2 + table["se_again"] ** 2) ** 0.5
    compressed = table[table["policy"] != "full"].groupby("model")
    for side in ("once", "again"):
        table[f"rank_{side}"] = compressed[f"pass_at_1_{side}"].rank(ascending=False, method="min")
    return table.sort_values(["model", "pass_at_1_once"], ascending=[True, False], kind="stable")


def correlation(rows: pd.DataFrame) -> float:
    """Spearman's rank correlation of the compressed policies between the two benchmarks."""
    return float(rows["rank_once"].corr(rows["rank_again"], method="spearman"))


def markdown(rows: pd.DataFrame) -> str:
    lines = ["| policy | stated once | rank | restated | rank | difference |", "|---|---|---|---|---|---|"]
    for row in rows.itertuples():
        once, again = (f"{100 * mean:.1f} ± {100 * error:.1f}" for mean, error in sides(row))
        ranks = ["" if pd.isna(rank) else f"{rank:.0f}" for rank in (row.rank_once, row.rank_again)]
        gap = f"{100 * row.difference:+.1f} ± {100 * row.difference_se:.1f}"
        lines.append(f"| {policy_title(row.policy)} | {once} | {ranks[0]} | {again} | {ranks[1]} | {gap} |")
    return "\n".join(lines)


def sides(row) -> tuple[tuple[float, float], tuple[float, float]]:
    return (row.pass_at_1_once, row.se_once), (row.pass_at_1_again, row.se_again)


def moved(rows: pd.DataFrame) -> str:
    """The policies whose rank moves most, with the ranks in both benchmarks."""
    ranked = rows.dropna(subset=["rank_once"]).copy()
    ranked["move"] = ranked["rank_once"] - ranked["rank_again"]
    order = ranked["move"].abs().sort_values(ascending=False, kind="stable").index[:MOST_MOVED]
    told = (f"{policy_title(r.policy)} {r.rank_once:.0f} to {r.rank_again:.0f}" for r in ranked.loc[order].itertuples())
    return f"rank moves most: {', '.join(told)}"


def figure(table: pd.DataFrame) -> Figure:
    """A row per policy with a dot for each benchmark, a panel per model; policies in the order of the mean score."""
    score = table.assign(mean=table["pass_at_1_once"] + table["pass_at_1_again"]).groupby("policy")["mean"].mean()
    order = list(score.sort_values(kind="stable").index)
    models = table["model"].unique()
    with matplotlib.rc_context(STYLE):
        drawn = new_figure((PAGE_WIDTH, 1.2 + 0.17 * len(order)))
        panels = drawn.subplots(1, len(models), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            rows = table[table["model"] == model].set_index("policy").reindex(order)
            places = range(len(order))
            axes.hlines(places, 100 * rows["pass_at_1_once"], 100 * rows["pass_at_1_again"], color="0.75", linewidth=1)
            for side, name, color in (("once", "stated once", LINE_COLORS[0]), ("again", "restated", LINE_COLORS[3])):
                values, errors = 100 * rows[f"pass_at_1_{side}"], 100 * rows[f"se_{side}"]
                marker = "o" if side == "once" else "D"
                axes.errorbar(
                    values, places, xerr=errors, fmt=marker, color=color, markersize=3.5, elinewidth=0.8, label=name
                )
            axes.set_yticks(places, [policy_title(policy) for policy in order])
            axes.set_xlim(-2, 102)
            axes.set_xlabel("Pass@1 (%), ± standard error over problems")
            axes.set_title(rows["model_title"].iloc[0])
            tidy(axes, grid="both")
        handles, labels = panels[0].get_legend_handles_labels()
        drawn.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return drawn


if __name__ == "__main__":
    main()
