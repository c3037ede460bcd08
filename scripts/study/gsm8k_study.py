"""The tables and the heatmap of the runs of gsm8k_qwen.sh.

python scripts/study/gsm8k_study.py results/runs/gsm8k_qwen_bfloat16 results/runs/gsm8k_qwen_drawn_bfloat16 \
    results/published/gsm8k

The first run is the greedy one, with the replayed grid: replay_grid.csv and replay_grid.png. Of the second, each
setting beside the full cache, over the problems that both have answered: settings.csv, answers_drawn.csv.gz, a table.
`--run NAME=RUN` does so for a run of another model or head: settings_NAME.csv, answers_NAME.csv.gz, a table. With
`--run NAME=RUN,ANSWERS` only the settings that have so many answers are compared, over their shared problems.
All must be graded (`kvsweep grade RUN`, if their sweep was interrupted).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style
from kvsweep.analysis.load import Run, load_run
from kvsweep.analysis.report.tables import fidelity_by_cell
from kvsweep.analysis.statistics.inference import score_array
from kvsweep.analysis.statistics.metrics import cell_metrics, graded_rows
from kvsweep.analysis.statistics.noninferiority import decide_grid
from scripts.publish import write_answers

SIZE = ["policy", "keep_ratio", "local_window"]
# What stands for the hash of scales: those of the texts, and those that `layers` of gsm8k_qwen.sh makes.
SCALES = {", scales=103faac3d59c8a03": "", ", scales=1751d06ebd17c3c3": ", keys / 1.25"}
LEAST = 96  # answers of a setting; with fewer it is still being decoded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("greedy", "drawn", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--run", action="append", default=[], metavar="NAME=RUN[,ANSWERS]")
    args = parser.parse_args()
    grid = fidelity_by_cell(load_run(args.greedy), "replay.jsonl")
    grid = grid[[*SIZE, "texts", "tokens", "evictions", "kl", "kl_se", "change", "flips", "answer_change"]]
    grid.sort_values(SIZE).round(6).to_csv(args.out / "replay_grid.csv", index=False)
    with matplotlib.rc_context(style.STYLE):
        heatmaps(grid[grid["keep_ratio"].notna()]).savefig(args.out / "replay_grid.png")
    write_settings(args.drawn, args.out / "answers_drawn.csv.gz", args.out / "settings.csv")
    for named_run in args.run:
        name, _, place = named_run.partition("=")
        folder, _, least = place.partition(",")
        files = args.out / f"answers_{name}.csv.gz", args.out / f"settings_{name}.csv"
        write_settings(Path(folder), *files, int(least or LEAST))


def write_settings(folder: Path, answers: Path, file: Path, least: int = LEAST) -> None:
    """Write the grades of settings with at least so many answers, and each beside the full cache; print the table."""
    run = of_shared_draws(load_run(folder), least)
    graded = graded_rows(run)
    write_answers(graded, answers)
    metrics = cell_metrics(run)
    metrics = metrics[metrics["graded"] >= LEAST]  # else the setting has no answer here
    metrics["variant"] = metrics["variant"].replace(SCALES, regex=True)
    cells = settings(metrics, graded)
    cells.round(6).to_csv(file, index=False)
    print(table(cells))


def of_shared_draws(run: Run, least: int) -> Run:
    """Keep the settings with at least so many answers, and of them the draws that each has."""
    completions = run.completions.groupby("cell_id").filter(lambda decoded: len(decoded) >= least)
    pairs = pd.MultiIndex.from_frame(completions[["problem_id", "draw"]].astype({"problem_id": str}))
    shared = pairs.unique()
    for cell in completions["cell_id"].unique():
        shared = shared.intersection(pairs[completions["cell_id"] == cell])
    return replace(run, completions=completions[pairs.isin(shared)])


def heatmaps(grid: pd.DataFrame) -> matplotlib.figure.Figure:
    """The mean KL of each policy's settings, in thousandths of a nat, on one scale."""
    policies = sorted(grid["policy"].unique(), key=notation.policy_title)
    figure, axes = style.panels(7.1, len(policies), len(policies), row_height=1.9, extra_height=0.4)
    limits = (0.0, 1000 * float(grid["kl"].max()))
    for place, (panel, policy) in enumerate(zip(axes, policies, strict=True)):
        own = (
            1000
            * grid[grid["policy"] == policy].pivot(index="local_window", columns="keep_ratio", values="kl").iloc[::-1]
        )
        labels = own.map("{:.0f}".format).to_numpy().ravel()
        own = own.rename("{:g}".format).rename(columns="{:g}".format)
        mesh = style.heat_table(panel, own, labels, cmap=f"{style.SEQUENTIAL}_r", limits=limits, size=8)
        if place:
            panel.set_yticks([])
        panel.set(title=notation.policy_title(policy), xlabel="Ratio", ylabel="" if place else "Local Window Size")
    figure.colorbar(mesh, ax=axes, label="KL (thousandths of a nat per token)", pad=0.01)
    return figure


def settings(metrics: pd.DataFrame, graded: pd.DataFrame) -> pd.DataFrame:
    """Each setting beside the full cache on the same problems, with the labels of docs/statistics.md.

    One draw stands for problems like these, and the settings are a grid of one model (Holm's correction).
    """
    scores = score_array(graded, list(metrics["cell_id"]))
    by_cell = dict(zip(metrics["cell_id"], scores, strict=True))
    is_full = metrics["policy"].eq("full")
    full = by_cell.pop(metrics.loc[is_full, "cell_id"].item())
    rows = []
    for cell, decision in decide_grid(by_cell, full, population="like_these").items():
        change = by_cell[cell] - full
        counts = {"answers": (~np.isnan(change)).sum(), "lost": (change < 0).sum(), "won": (change > 0).sum()}
        interval = {"difference": decision.difference, "low": decision.low, "high": decision.high}
        rows.append({"cell_id": cell, **counts, **interval, "label": decision.label})
    names = ["cell_id", *SIZE, "mean_length_after", "kv_bytes_mean", "pass_at_1", "mean_tokens"]
    stored = metrics[names].assign(stored=metrics["variant"].fillna(""))
    return stored.merge(pd.DataFrame(rows), on="cell_id", how="left")


def table(cells: pd.DataFrame) -> str:
    head = ["setting", "rows after an eviction", "Pass@1 (%)", "lost, won", "difference (95%)", "label"]
    lines = []
    for row in cells.sort_values(["keep_ratio", "pass_at_1"], ascending=False, na_position="first").itertuples():
        size = "" if np.isnan(row.keep_ratio) else f" {row.keep_ratio:g}"
        rows_after = "all" if np.isnan(row.mean_length_after) else f"{row.mean_length_after:.0f}"
        stored = f", {row.stored}" if row.stored else ""
        compared = ["", "", ""]
        if row.policy != "full":
            interval = notation.interval(row.low, row.high, signed=True)
            difference = notation.percent(row.difference, signed=True)
            compared = [f"{row.lost:.0f}, {row.won:.0f}", f"{difference} ({interval})", row.label]
        name = f"{notation.policy_title(row.policy)}{size}{stored}"
        lines.append([name, rows_after, notation.percent(row.pass_at_1), *compared])
    return notation.markdown([head, *lines])


if __name__ == "__main__":
    main()
