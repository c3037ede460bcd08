"""Do the published heatmaps differ from chance? Each grid's spread beside that of 20 identical cells.

    python scripts/study/paper_grids.py --output results/published/paper_grids

Only the scores of the grids are known, so the spread of identical cells hangs on how unequal the problems are: Beta
difficulties with a concentration a + b. OUTPUT/repeated.csv has answers of real models that were repeated (right of
answers, per problem); its likeliest concentrations, with their 95% intervals, say which values are plausible. All cells
of a grid share their problems and draw independently. Writes concentrations.csv, grids.csv, slopes.csv
and grids.png.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy import optimize, special
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.figures.style import LINE_COLORS, STYLE, new_figure, tidy
from kvsweep.analysis.notation import PAGE_WIDTH
from kvsweep.analysis.statistics.grids import GRID_FILE, REFERENCE
from kvsweep.analysis.statistics.inference import summary_noise_floor

CONCENTRATIONS = (1.0, 0.6, 0.3, 0.2)
TRIED = np.geomspace(0.02, 50, 400)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the folder of repeated.csv")
    parser.add_argument("--resamples", type=int, default=9999)
    options = parser.parse_args()
    repeated = pd.read_csv(options.output / "repeated.csv")
    table = pd.DataFrame(
        concentration(rows) | {"source": name} for name, rows in repeated.groupby("source", sort=False)
    )
    table.round(3).to_csv(options.output / "concentrations.csv", index=False)
    grids = floors(pd.read_csv(REFERENCE / GRID_FILE), options.resamples)
    grids.round(4).to_csv(options.output / "grids.csv", index=False)
    pooled = slopes(pd.read_csv(REFERENCE / GRID_FILE), options.resamples)
    pooled.round(4).to_csv(options.output / "slopes.csv", index=False)
    with matplotlib.rc_context(STYLE):
        figure(grids).savefig(options.output / "grids.png", dpi=200)
    print(table.to_string(index=False), grids.round(3).to_string(index=False), sep="\n\n")


def slopes(scores: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """The mean slope of Pass@1 over the keep ratio, in points per 0.1, and its p if a grid's cells are exchangeable.

    Shuffling the cells of each grid needs no assumption on the problems. Rows: all grids, each model's, and all grids
    without the smallest keep ratio.
    """
    rng, rows = np.random.default_rng(0), []
    ratio = scores["keep_ratio"]
    groups = {"all grids": scores, **dict(iter(scores.groupby("model_title", sort=False)))}
    groups[f"all grids without keep ratio {ratio.min():g}"] = scores[ratio > ratio.min()]
    for name, some in groups.items():
        slope, shuffled = 0.0, np.zeros(resamples)
        grids = [cells for _, cells in some.groupby(["model", "benchmark"])]
        for cells in grids:
            centred = (cells["keep_ratio"] - cells["keep_ratio"].mean()).to_numpy()
            weights = centred / (centred**2).sum() / 10 / len(grids)
            values = np.tile(cells["pass_at_1"].to_numpy(), (resamples, 1))
            slope += float(weights @ values[0])
            shuffled += rng.permuted(values, axis=1) @ weights
        p = (1 + (np.abs(shuffled) >= abs(slope) - 1e-12).sum()) / (resamples + 1)
        rows.append({"cells": name, "grids": len(grids), "points_per_tenth": slope, "p": p})
    return pd.DataFrame(rows)


def concentration(rows: pd.DataFrame) -> dict[str, float]:
    """The likeliest concentration of a Beta-binomial distribution, and its interval by the likelihood ratio."""
    right, answers = rows["right"].to_numpy(), rows["answers"].to_numpy()

    def minus_log_likelihood(mean: float, size: float) -> float:
        a, b = mean * size, (1 - mean) * size
        return float(-(special.betaln(right + a, answers - right + b) - special.betaln(a, b)).sum())

    least = np.array(
        [
            optimize.minimize_scalar(minus_log_likelihood, bounds=(0.01, 0.99), method="bounded", args=(size,)).fun
            for size in TRIED
        ]
    )
    inside = TRIED[least <= least.min() + special.chdtri(1, 0.05) / 2]
    found = {"concentration": TRIED[least.argmin()], "low": inside[0], "high": inside[-1]}
    return {"problems": len(rows), "answers": int(answers.sum()), "right": right.sum() / answers.sum(), **found}


def floors(scores: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """A row per grid and concentration: the spread, that of identical cells, p, and Holm's p over the grids."""
    parts = []
    for size in CONCENTRATIONS:
        found = []
        for names, cells in scores.groupby(["model_title", "benchmark_title"], sort=False):
            problems, draws = int(cells["problems"].iloc[0]), int(cells["draws"].iloc[0])
            values = cells["pass_at_1"].to_numpy() / 100
            floor = summary_noise_floor(values, problems, draws, between=1 / (1 + size), resamples=resamples)
            spreads = {"range": 100 * floor.range, "range_low": 100 * floor.expected_range[0]}
            spreads |= {"range_high": 100 * floor.expected_range[2], "spread": 100 * floor.spread}
            found.append(
                dict(zip(("model", "benchmark"), names, strict=True)) | {"cells": len(cells)} | spreads | {"p": floor.p}
            )
        table = pd.DataFrame(found).assign(concentration=size)
        parts.append(table.assign(p_holm=multipletests(table["p"], method="holm")[1]))
    return pd.concat(parts, ignore_index=True)


def figure(grids: pd.DataFrame) -> Figure:
    """Each grid's range as a line, and bars of the ranges that identical cells have in 95 of 100 runs.

    Of the answers' variance the share 1 / (1 + a + b) lies between problems.
    """
    names = list(dict.fromkeys(zip(grids["model"], grids["benchmark"], strict=True)))
    drawn = new_figure((PAGE_WIDTH, 3.0))
    axes = drawn.subplots()
    for place, (size, color) in enumerate(
        zip(CONCENTRATIONS, (LINE_COLORS[0], LINE_COLORS[1], LINE_COLORS[2], LINE_COLORS[3]), strict=True)
    ):
        rows = grids[grids["concentration"] == size]
        at = np.arange(len(names)) + 0.19 * (place - 1.5)
        between = f"{100 / (1 + size):.0f}% of the variance between problems"
        label = f"20 equal settings, a + b = {size:g}: {between}"
        axes.bar(
            at,
            rows["range_high"] - rows["range_low"],
            0.2,
            bottom=rows["range_low"],
            color=color,
            alpha=0.5,
            label=label,
        )
    rows = grids[grids["concentration"] == CONCENTRATIONS[0]]
    axes.hlines(
        rows["range"], np.arange(len(names)) - 0.38, np.arange(len(names)) + 0.38, color="black", label="published grid"
    )
    axes.set_xticks(range(len(names)), [f"{model}\n{benchmark}" for model, benchmark in names])
    axes.set_ylabel("best minus worst setting (points)")
    axes.set_ylim(0)
    tidy(axes)
    drawn.legend(loc="outside upper center", ncols=2)
    return drawn


if __name__ == "__main__":
    main()
