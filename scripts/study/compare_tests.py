"""The test of non-inferiority beside those that a standard error or a bootstrap gives, on the same simulated cells.

Each of 208 cells loses exactly 5 points, each in another way (`structure` of simulate_statistics.py). A rule is wrong
where it calls such a cell safe at the level 2.5%. Power is the share of cells without a loss that a rule calls safe.
Prints a Markdown table and writes a CSV with a row per rule and cell; the last line is one JSON object. With --gaps the
cells lack answers, most of them where they lose, and the rules are ways to count problems that have fewer answers.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special

from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, constrained_variance, p_these
from kvsweep.harness.provenance import describe_machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.study import simulate_statistics
from scripts.study.simulate_statistics import p_above, tables

DRAWS = (1, 2, 5, 8)
SPREAD = ["beta 0.6 0.9", "beta 0.98 0.9", "won_and_lost 3", "half_lost 0.5", "half_lost 0.9", "coins 3"]
SPREAD += [f"lost_wholly {rest}" for rest in ("1 0", "2 0", "4 0", "1 0.02", "0 0.1")]
LOSSLESS = ["beta 0.45 0.9", "beta 0.6 1.0", "beta 0.6 0.6", "beta 0.87 0.9", "beta 0.98 0.9", "lost_wholly 0 0"]
RESAMPLES, FEWER = 200, 300  # of a bootstrap: its resamples, and the runs of a cell that it gets
# Answers won and lost, [runs, problems, draws], and the net losses that the hypothesis demands; returns [runs].
Rule = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def ours(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    return p_above(won, lost, -losses / won[0].size) <= LEVEL


def tango(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    """Tango's score test (1998) with its normal tail, on all pairs of answers."""
    right, wrong = won.sum((1, 2), dtype=float), lost.sum((1, 2), dtype=float)
    excess = right - wrong + losses
    return excess >= -special.ndtri(LEVEL) * np.sqrt(constrained_variance(right + wrong, losses, excess))


def _lead(won: np.ndarray, lost: np.ndarray) -> np.ndarray:
    return won.astype(float) - lost


def clustered_t(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    """Student's t on the problems' means: the clustered standard error of arXiv 2411.00640, eq. 4."""
    return _wald(_lead(won, lost), losses, -special.stdtrit(won.shape[1] - 1, LEVEL))


def clustered_z(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    return _wald(_lead(won, lost), losses, -special.ndtri(LEVEL))


def _wald(lead: np.ndarray, losses: float, quantile: float) -> np.ndarray:
    means, margin = lead.mean(2), losses / lead[0].size
    return means.mean(1) - quantile * means.std(1, ddof=1) / np.sqrt(means.shape[1]) > -margin


def stratified_wald(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    """The variance of each problem's draws; of one draw that of all answers."""
    lead = _lead(won, lost)
    if lead.shape[2] == 1:
        return clustered_z(won, lost, losses)
    error = np.sqrt((lead.var(2, ddof=1) / lead.shape[2]).sum(1)) / lead.shape[1]
    return lead.mean((1, 2)) + special.ndtri(LEVEL) * error > -losses / lead[0].size


def bootstrap_problems(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    """The percentile interval of resampled problems."""
    means = _lead(won, lost)[:FEWER].mean(2)
    problems = means.shape[1]
    weights = simulate_statistics.RNG.multinomial(problems, np.full(problems, 1 / problems), RESAMPLES) / problems
    return np.quantile(means @ weights.T, LEVEL, axis=1) > -losses / won[0].size


def bootstrap_draws(won: np.ndarray, lost: np.ndarray, losses: float) -> np.ndarray:
    """The percentile interval of resampled problems and, within each, resampled draws."""
    lead = _lead(won, lost)[:FEWER]
    runs, problems, draws = lead.shape
    found = np.empty((RESAMPLES, runs))
    for sample in found:
        some = lead[:, simulate_statistics.RNG.integers(problems, size=problems)]
        sample[:] = np.take_along_axis(
            some, simulate_statistics.RNG.integers(draws, size=(1, problems, draws)), 2
        ).mean((1, 2))
    return np.quantile(found, LEVEL, axis=0) > -losses / lead[0].size


RULES: dict[str, Rule] = {
    "Skellam's tail at Tango's estimate (ours)": ours,
    "Tango 1998 on all pairs": tango,
    "clustered standard error, t (2411.00640)": clustered_t,
    "clustered standard error, z": clustered_z,
    "stratified Wald": stratified_wald,
    "bootstrap of problems": bootstrap_problems,
    "bootstrap of problems and draws": bootstrap_draws,
}


def cells() -> Iterator[tuple[str, int, int, float]]:
    """Structure, problems, draws and loss: 208 that lose the margin, then those that lose nothing."""
    for name, problems, draws in itertools.product(SPREAD, (30, 60, 100), DRAWS):
        yield name, problems, draws, MARGIN
    for seed in range(76):
        rng = np.random.default_rng([seed, 5])
        yield f"groups {seed}", int(rng.choice([30, 60, 100])), int(rng.choice(DRAWS)), MARGIN
    for name, problems, draws in itertools.product(LOSSLESS, (30, 60, 100, 198), DRAWS):
        yield name, problems, draws, 0.0


# --- Problems that have fewer answers than others ---------------------------------------------------------------

# Of 8 draws: the problems that lack answers, the first ones, where `structure` puts a loss; and the draws they have.
GAPS = {
    "one has 1": (1, 1),
    "one has 7": (1, 7),
    "three have 4": (3, 4),
    "three have 1": (3, 1),
    "a third has 4": (0, 4),
}


def gaps_of(name: str, problems: int) -> np.ndarray:
    """The draws of each problem."""
    some, few = GAPS[name]
    return np.where(np.arange(problems) < (some or problems // 3), few, 8)


def in_gaps(won: np.ndarray, lost: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """How each way to count decides about tables [runs, problems, draws] whose problems have `counts` draws."""
    has = np.arange(won.shape[2]) < counts[:, None]
    few = counts.min()
    found = {"missing answers count as lost (ours)": ours(won & has, lost | ~has, MARGIN * has.size)}
    found["as many as the fewest"] = ours(won[..., :few], lost[..., :few], MARGIN * len(counts) * few)
    found["all pairs alike"] = (
        p_these((won & has).sum((1, 2)), (lost & has).sum((1, 2)), MARGIN * counts.sum()) <= LEVEL
    )
    # Each answer as many as the harmonic mean of the draws to those of its problem.
    mean = 1 / np.mean(1 / counts)
    right, wrong = ((one & has).sum(2) @ (mean / counts) for one in (won, lost))
    found["weighted by harmonic mean"] = p_these(right, wrong, MARGIN * len(counts) * mean) <= LEVEL
    return found


def compare_gaps(simulations: int, output: Path | None) -> None:
    rows = []
    for name, problems, gap in itertools.product((*SPREAD, "groups 3", "groups 5"), (30, 60, 100), GAPS):
        for loss in (MARGIN, 0.0):
            structure = name if loss else "lost_wholly 0 0.02"
            found = in_gaps(*tables(simulations, structure, problems, 8, loss), gaps_of(gap, problems))
            rows += [(way, name, problems, gap, 100 * loss, simulations, safe.mean()) for way, safe in found.items()]
    columns = ["way", "structure", "problems", "gap", "loss_points", "runs", "called_safe"]
    table = pd.DataFrame(rows, columns=columns)
    if output:
        table.to_csv(output, index=False, float_format="%.5f")
    print("| way | worst wrong *safe* | mean | power |\n|---|---|---|---|")
    for way, own in table.groupby("way", sort=False):
        null, lossless = (own.loc[own["loss_points"].gt(0) == loses, "called_safe"] for loses in (True, False))
        print(f"| {way} | {100 * null.max():.1f}% | {100 * null.mean():.2f}% | {100 * lossless.mean():.1f} |")


def looks_by_hand(simulations: int) -> float:
    """The largest share of runs of a cell at the margin that our rule calls safe at any of eight looks, a draw each."""
    worst = 0.0
    for name, problems in itertools.product(SPREAD, (30, 60, 100)):
        won, lost = tables(simulations, name, problems, 8, MARGIN)
        held = [ours(won[..., :n], lost[..., :n], MARGIN * problems * n) for n in range(1, 9)]
        worst = max(worst, float(np.any(held, 0).mean()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=10_000)
    parser.add_argument("--output", type=Path, help="the CSV")
    parser.add_argument("--gaps", action="store_true", help="cells that lack answers")
    options = parser.parse_args()
    if options.gaps:
        compare_gaps(options.simulations, options.output)
        print(json.dumps(describe_machine()))
        return
    rows = []
    for name, problems, draws, loss in cells():
        won, lost = tables(options.simulations, name, problems, draws, loss)
        for rule, safe in RULES.items():
            found = safe(won, lost, MARGIN * problems * draws)
            rows.append((rule, name, problems, draws, 100 * loss, len(found), found.mean()))
    columns = ["rule", "structure", "problems", "draws", "loss_points", "runs", "called_safe"]
    table = pd.DataFrame(rows, columns=columns)
    if options.output:
        table.to_csv(options.output, index=False, float_format="%.5f")
    print("| rule | worst wrong *safe* | mean | power at 1 / 2 / 5 / 8 draws |\n|---|---|---|---|")
    for rule, own in table.groupby("rule", sort=False):
        null, lossless = own[own["loss_points"] > 0]["called_safe"], own[own["loss_points"] == 0]
        power = " / ".join(f"{100 * share:.1f}" for share in lossless.groupby("draws")["called_safe"].mean())
        print(f"| {rule} | {100 * null.max():.1f}% | {100 * null.mean():.2f}% | {power} |")
    worst = looks_by_hand(options.simulations)
    print(f"Draws added by hand, with a look at 1, 2, ... 8: called safe at any look in at most {100 * worst:.1f}%.")
    print(json.dumps(describe_machine()))


if __name__ == "__main__":
    main()
