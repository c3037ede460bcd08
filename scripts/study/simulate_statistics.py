"""Check the report's statistics on simulated sweeps: coverage of the intervals, false alarms, false holds and power.

Difficulties are Beta distributed over problems; answers are drawn independently given the difficulty. The script prints
a table and writes it as CSV (results/published/statistics.csv is one); the last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from kvsweep.analysis.numbers.inference import noise_floor, paired_tests, summary_noise_floor
from kvsweep.analysis.numbers.margin_test import (
    MARGIN,
    decide,
    decide_grid,
    decide_rounds,
    draws_to_hold,
    problems_to_hold,
)
from kvsweep.analysis.numbers.metrics import score_intervals

RNG = np.random.default_rng(20260121)


def difficulties(mean: float, between: float, shape: tuple[int, ...]) -> np.ndarray:
    size = (1 - between) / between
    return RNG.beta(mean * size, (1 - mean) * size, shape)


def answers(chance: np.ndarray, draws: int) -> np.ndarray:
    """Draw answers, 1 right or 0 wrong, [..., draws], for chances [...]."""
    return (RNG.random((*chance.shape, draws)) < chance[..., None]).astype(float)


def rate(happened: np.ndarray) -> tuple[float, int]:
    return float(np.mean(happened)), len(happened)


def coverage(simulations: int, problems: int, draws: int, mean: float, between: float) -> dict[str, tuple[float, int]]:
    right = answers(difficulties(mean, between, (simulations, problems)), draws)
    cell, problem = np.meshgrid(np.arange(simulations), np.arange(problems), indexing="ij")
    rows = pd.DataFrame({"cell_id": cell.ravel().repeat(draws), "problem_id": problem.ravel().repeat(draws)})
    table = score_intervals(rows.assign(correct=right.ravel()))
    return {"coverage ci": rate(((table["ci_low"] <= mean) & (mean <= table["ci_high"])).to_numpy())}


def grids(simulations: int, cells: int, problems: int, draws: int, mean: float, between: float, planted: float) -> dict:
    """Simulate grids in which one cell is `planted` better than all others, on every problem alike (clipped at 1)."""
    significant, told_apart, best_named, paired = [], [], [], []
    for seed in range(simulations):
        chance = np.repeat(difficulties(mean, between, (1, problems)), cells, axis=0)
        chance[-1] = np.minimum(1, chance[-1] + planted)
        scores = answers(chance, draws)
        floor = noise_floor(scores, resamples=999, seed=seed)
        assert floor is not None
        means = scores.mean((1, 2))
        significant.append(floor.signal)
        told_apart.append(floor.range > floor.critical)
        best_named.append(means[-1] >= means.max() - floor.critical)
        paired.append(
            (paired_tests(scores[1:], scores[0])["p_holm"] < 0.05).to_numpy()[-1 if planted else slice(None)].any()
        )
    named = {"grid significant": significant, "any cell worse than the best": told_apart, "true best kept": best_named}
    named["planted cell found, paired, Holm" if planted else "any false alarm, paired, Holm"] = paired
    return {name: rate(np.array(values)) for name, values in named.items()}


def summary_grids(simulations: int, mean: float, between: float, assumed: float) -> dict[str, tuple[float, int]]:
    """Simulate grids of 20 identical cells, 30 problems and 5 draws, of which only the scores are known."""
    found = []
    for seed in range(simulations):
        chance = np.repeat(difficulties(mean, between, (1, 30)), 20, axis=0)
        means = answers(chance, 5).mean((1, 2))
        found.append(summary_noise_floor(means, 30, 5, between=assumed, resamples=499, seed=seed).signal)
    return {"grid significant": rate(np.array(found))}


def chances(problems: int, cells: int, mean: float, loss: float, alike: float, exact: bool) -> np.ndarray:
    """The chances of the full cache and of cells that lose `loss` on average, [1 + cells, problems].

    Args:
        alike: the correlation of a cell's difficulties with the full cache's, on the normal scale.
        exact: let every cell lose exactly `loss` over these problems, and not only over all problems like these.
    """
    ours = RNG.standard_normal(problems)
    mixed = alike * ours + np.sqrt(1 - alike**2) * RNG.standard_normal((cells, problems))
    ranks = stats.norm.cdf(np.vstack([ours, mixed]))
    means = np.array([mean, *[mean - loss] * cells])[:, None]
    found = stats.beta.ppf(ranks, means, 1 - means)  # half of the variance of an answer lies between problems
    if exact:
        now, target = found.mean(1, keepdims=True), found[0].mean() - loss
        scaled = np.where(now > target, found * target / now, 1 - (1 - found) * (1 - target) / (1 - now))
        found[1:] = scaled[1:]
    return found


def paired_answers(chance: np.ndarray, draws: int) -> np.ndarray:
    """Answers [cells, problems, draws]; half of them are drawn with the numbers that the full cache drew with."""
    common = RNG.random((1, chance.shape[1], draws))
    own = RNG.random((*chance.shape, draws))
    luck = np.where(RNG.random(own.shape) < 0.5, common, own)
    return (luck < chance[..., None]).astype(float)


def at_the_margin(simulations: int, problems: int, draws: int, mean: float, alike: float) -> dict:
    """Simulate grids of 5 cells that all lose exactly the margin."""
    found: dict[str, list[float]] = {}
    rounds = sorted({2**i for i in range(1, draws.bit_length()) if 2**i <= draws} | {draws})
    for _ in range(simulations):
        for exact, population, named in (
            (True, "these", "these problems"),
            (False, "like_these", "problems like these"),
        ):
            full, *cells = paired_answers(chances(problems, 5, mean, MARGIN, alike, exact), draws)
            grid = dict(enumerate(cells))
            decisions = decide_grid(grid, full, population=population).values()  # type: ignore[arg-type]
            found.setdefault(f"holds, {named}", []).extend(one.label == "holds" for one in decisions)
            found.setdefault(f"interval covers, {named}", []).extend(
                one.low <= -MARGIN <= one.high for one in decisions
            )
            if exact and len(rounds) > 1:
                decisions = decide_rounds(grid, full, rounds=rounds).values()
                found.setdefault("holds, in rounds", []).extend(one.label == "holds" for one in decisions)
                found.setdefault("draws in rounds, share of all", []).extend(one.draws / draws for one in decisions)
    # The cells of a grid share a full cache, so the grids are counted and not the cells.
    return {name: (float(np.mean(values)), simulations) for name, values in found.items()}


def as_good_as_planned(simulations: int, problems: int, draws: int, mean: float, alike: float) -> dict:
    """Plan with a first run of cells that lose nothing, and repeat the run with the planned draws or problems."""
    by_draws, by_problems, loses = [], [], []
    for _ in range(simulations):
        chance = chances(problems, 5, mean, 0.0, alike, exact=True)
        full, *cells = paired_answers(chance, draws)
        loses.append(any(one.label == "loses" for one in decide_grid(dict(enumerate(cells)), full).values()))
        full_again, cell_again = paired_answers(chance[:2], draws_to_hold(cells[0], full))
        by_draws.append(decide(cell_again, full_again).label == "holds")
        more = chances(problems_to_hold(cells[0], full), 1, mean, 0.0, alike, exact=False)
        full_more, cell_more = paired_answers(more, draws)
        by_problems.append(decide(cell_more, full_more, population="like_these").label == "holds")
    return {
        "holds at the planned draws": rate(np.array(by_draws)),
        "holds at the planned problems": rate(np.array(by_problems)),
        "any cell loses": rate(np.array(loses)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--only", default="", help="run only the settings whose name contains this text")
    parser.add_argument("--output", type=Path, help="the CSV; rows are added if it exists")
    options = parser.parse_args()
    count = options.simulations
    jobs: list[tuple[str, Callable[[], dict[str, tuple[float, int]]]]] = []
    for problems, draws, mean, between in (
        *((30, draws, mean, 0.5) for draws in (1, 5, 64) for mean in (0.45, 0.87)),
        *((10, draws, 0.45, 0.5) for draws in (1, 5)),
        *((100, 1, mean, 0.5) for mean in (0.45, 0.87)),
        (198, 5, 0.47, 0.5),
    ):
        name = f"interval: {problems} problems, {draws} draws, mean {mean}"
        jobs.append((name, lambda a=(problems, draws, mean, between): coverage(2 * count, *a)))  # type: ignore[misc]
    for draws, planted in ((5, 0.0), (1, 0.0), (64, 0.0), (5, 0.08), (64, 0.08)):
        name = f"grid: 20 cells, 30 problems, {draws} draws, planted {100 * planted:g} points"
        jobs.append((name, lambda a=(draws, planted): grids(count, 20, 30, a[0], 0.45, 0.5, a[1])))  # type: ignore[misc]
    for between, assumed in ((0.5, 0.5), (0.5, 0.35), (0.5, 0.65)):
        name = f"summary grid: between {between}, assumed {assumed}"
        jobs.append((name, lambda a=(between, assumed): summary_grids(count, 0.45, *a)))  # type: ignore[misc]
    for problems, draws, mean, alike in (
        *((problems, 8, mean, 0.9) for problems in (30, 60, 100) for mean in (0.45, 0.87)),
        *((60, draws, 0.45, 0.9) for draws in (1, 2, 4, 16)),
        (60, 8, 0.45, 1.0),
        (60, 8, 0.45, 0.6),
    ):
        name = f"at the margin: {problems} problems, {draws} draws, mean {mean}, alike {alike}"
        jobs.append((name, lambda a=(problems, draws, mean, alike): at_the_margin(count, *a)))  # type: ignore[misc]
    for problems, draws, mean, alike in (
        (30, 4, 0.45, 0.9),
        (60, 1, 0.45, 1.0),
        (60, 4, 0.87, 0.9),
        (100, 2, 0.87, 1.0),
    ):
        name = f"as good: {problems} problems, {draws} draws first, mean {mean}, alike {alike}"
        jobs.append((name, lambda a=(problems, draws, mean, alike): as_good_as_planned(count, *a)))  # type: ignore[misc]
    rows = []
    for name, job in ((name, job) for name, job in jobs if options.only in name):
        for quantity, (value, n) in job().items():
            low, high = stats.binomtest(round(value * n), n).proportion_ci(method="wilson")
            rows.append(
                {"setting": name, "quantity": quantity, "rate": value, "low": low, "high": high, "simulations": n}
            )
            print(f"{name:64} {quantity:35} {100 * value:6.1f}%  [{100 * low:.1f}, {100 * high:.1f}]", flush=True)
    if options.output:
        is_new = not options.output.exists()
        pd.DataFrame(rows).round(4).to_csv(options.output, index=False, mode="a", header=is_new)
    print(json.dumps({f"{row['setting']}: {row['quantity']}": round(row["rate"], 4) for row in rows}))


if __name__ == "__main__":
    main()
