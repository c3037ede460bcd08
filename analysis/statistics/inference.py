"""Tell signal from noise: paired tests over problems, and the spread that identical cells would show.

Scores are arrays [cells, problems, draws] of 0 and 1, missing (NaN) if a pair has no grade. Problems are the
independent units; the draws of one problem are averaged first. All cells of a grid share their resamples, which the
range over cells needs. scipy's `permutation_test` takes only one statistic at a time, so numpy resamples here, and the
tests compare the results with scipy's.

scipy and statsmodels load slowly. Functions import them, so that the summary at a sweep's end does not wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsweep.analysis import notation
from kvsweep.analysis.statistics.noninferiority import Floats

LEVEL = 0.05
POWER = 0.8
RESAMPLES = 9999
FLOOR_RESAMPLES = 1999

# If at most this many problems differ, the sign-flip test tries every pattern of signs.
EXACT_PROBLEMS = 12

# Share of the variance of single answers that lies between problems, measured from repeated answers of real models
# (results/published/paper_grids). If only scores are known, the noise floor is given for all three shares.
BETWEEN_PROBLEMS = (0.5, 0.65, 0.77)
_CHUNK = 4_000_000
_EPSILON = 1e-9


def score_array(graded: pd.DataFrame, cell_ids: Sequence[str]) -> Floats:
    """Arrange graded rows (cell_id, problem_id, draw, correct) of some cells as [cells, problems, ascending draws]."""
    rows = graded[graded["cell_id"].isin(cell_ids)]
    cells = pd.Categorical(rows["cell_id"].astype("object"), categories=list(cell_ids)).codes
    problems, names = pd.factorize(rows["problem_id"])
    draws, numbers = pd.factorize(rows["draw"], sort=True)
    scores = np.full((len(cell_ids), len(names), len(numbers)), np.nan)
    scores[cells, problems, draws] = rows["correct"]
    return scores


def problem_means(scores: Floats) -> Floats:
    """Average over draws: [cells, problems]; missing if a problem has no draw."""
    counts = (~np.isnan(scores)).sum(-1)
    return np.where(counts, np.nansum(scores, -1) / np.maximum(counts, 1), np.nan)


def paired_tests(scores: Floats, reference: Floats) -> pd.DataFrame:
    """Compare each cell with a reference on the (problem, draw) pairs that both have.

    The test flips the signs of the mean differences per problem. It tries all patterns of signs if at most
    `EXACT_PROBLEMS` problems differ, else `RESAMPLES` random ones, and counts the observed pattern too (Phipson and
    Smyth 2010). The interval is Student's t over problems. Holm bounds the chance of any false alarm among the given
    cells, Benjamini-Hochberg the expected share of false alarms.

    `scores` is [cells, problems, draws], `reference` [problems, draws]. Returns the columns problems, difference, se,
    low, high, p, p_holm and p_bh; missing without a pair.
    """
    from scipy import stats
    from statsmodels.stats.multitest import multipletests

    differences = problem_means(scores - reference)
    count = (~np.isnan(differences)).sum(-1)
    table = pd.DataFrame({"problems": count})
    has_pair = count > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        table["difference"] = np.where(has_pair, np.nansum(differences, -1) / count, np.nan)
        centred = differences - table["difference"].to_numpy()[:, None]
        table["se"] = np.sqrt(np.nansum(centred**2, -1) / (count - 1) / count)
    half = stats.t.ppf(1 - LEVEL / 2, np.maximum(count - 1, 1)) * table["se"]
    table["low"] = table["difference"] - half
    table["high"] = table["difference"] + half
    table["p"] = np.where(has_pair, sign_flip_p(differences), np.nan)
    for name, method in (("p_holm", "holm"), ("p_bh", "fdr_bh")):
        table[name] = np.nan
        if has_pair.any():
            table.loc[has_pair, name] = multipletests(table.loc[has_pair, "p"], method=method)[1]
    return table


def sign_flip_p(differences: Floats, *, resamples: int = RESAMPLES, seed: int = 0) -> Floats:
    """Test rows of `differences` [cells, problems] (missing ones 0) against mean zero, by random signs; two-sided p."""
    values = np.nan_to_num(differences)
    observed = np.abs(values.sum(-1))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(resamples, values.shape[1]))
    drawn = np.abs(signs @ values.T)
    p = (1 + (drawn >= observed - _EPSILON).sum(0)) / (resamples + 1)
    for row, cell in enumerate(values):
        changed = cell[np.abs(cell) > _EPSILON]
        if len(changed) <= EXACT_PROBLEMS:
            patterns = 1 - 2.0 * ((np.arange(2 ** len(changed))[:, None] >> np.arange(len(changed))) & 1)
            p[row] = (np.abs(patterns @ changed) >= observed[row] - _EPSILON).mean()
    return p


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The spread of a grid's cells, and the spread that identical cells would show, both as fractions.

    A cell more than `critical` below the best cell is worse than the best; other cells are tied with the best.
    """

    scores: Floats  # of the cells, on the pairs that all cells have
    cells: int
    problems: int
    draws: float  # the mean over problems
    spread: float  # standard deviation of the cells' scores
    range: float  # of the cells' scores
    expected_spread: float  # mean standard deviation of identical cells
    expected_range: tuple[float, float, float]  # 2.5%, 50% and 97.5% quantile of identical cells' range
    p: float  # the chance that identical cells spread at least as much
    critical: float  # the range that identical cells exceed in one of twenty grids
    partial: bool = False  # some cells have more answers, which do not count here

    @property
    def words(self) -> list[str]:
        """The cells' span, that of identical cells, and the answers that count if some cells have more."""
        low, _, high = map(notation.percent, self.expected_range)
        words = [f"span {notation.percent(self.range)}, {notation.p_equals(self.p)}", f"by chance {low} to {high}"]
        if self.partial:
            words.append(f"on the {self.problems * self.draws:,.0f} answers that every setting has")
        return words

    @property
    def signal(self) -> bool:
        """True if identical cells would seldom have this much spread."""
        return self.p < LEVEL

    @property
    def tied(self) -> NDArray[np.bool_]:
        """Mask of the cells that are tied with the best cell, including the best."""
        return np.asarray(self.scores >= self.scores.max() - self.critical)


def noise_floor(scores: Floats, *, resamples: int = FLOOR_RESAMPLES, seed: int = 0) -> NoiseFloor | None:
    """Estimate the noise floor by permuting the cells within each problem.

    If no setting matters, the cells' order within a problem carries no information, at any difficulty and any
    correlation between cells. `p` compares the variance of the cells' means. `critical` permutes the residuals after
    each cell's mean is subtracted, so that real differences do not widen it; the subtraction takes a degree of freedom,
    so the residuals are scaled by sqrt(n / (n - 1)).

    A problem or draw that one cell lacks is left out of `scores` [cells, problems, draws] for all cells. Returns None
    with fewer than two cells or two common problems.
    """
    common = np.where(np.isnan(scores).any(0), np.nan, scores)
    means = problem_means(common)
    compared = ~np.isnan(means).any(0)
    means = means[:, compared]
    cells, problems = means.shape
    if cells < 2 or problems < 2:
        return None
    observed = means.mean(-1)
    residuals = (means - observed[:, None]) * np.sqrt(problems / (problems - 1))
    draws = float((~np.isnan(common[0])).sum(-1)[compared].mean())
    null = _permuted(means, resamples, seed)
    centred = _permuted(residuals, resamples, seed + 1)
    partial = np.isfinite(scores).sum() > np.isfinite(common[:, compared]).sum()
    return replace(_floor(observed, null, problems, draws, centred), partial=bool(partial))


def _permuted(means: Floats, resamples: int, seed: int) -> Floats:
    """Shuffle the cells of each problem; return the cells' means [resamples, cells]."""
    rng = np.random.default_rng(seed)
    cells, problems = means.shape
    size = max(1, _CHUNK // means.size)
    parts = []
    for start in range(0, resamples, size):
        count = min(size, resamples - start)
        order = rng.random((count, cells, problems)).argsort(1)
        parts.append(np.take_along_axis(means[None], order, 1).mean(-1))
    return np.concatenate(parts)


def summary_noise_floor(
    scores: Floats, problems: int, draws: int, *, between: float, resamples: int = FLOOR_RESAMPLES, seed: int = 0
) -> NoiseFloor:
    """Estimate the noise floor from the cells' scores alone, with binomial draws for each problem.

    All cells share the problems' difficulties, a Beta distribution around the grid's mean, and draw independently.
    `scores` are fractions; the share `between` (0 to 1) of single answers' variance lies between problems.
    """
    rng = np.random.default_rng(seed)
    # If all answers are right (or all wrong), all simulated answers are too.
    mean = float(np.clip(np.mean(scores), _EPSILON, 1 - _EPSILON))
    size = (1 - between) / between
    chance = rng.beta(mean * size, (1 - mean) * size, (resamples, 1, problems))
    null = rng.binomial(draws, np.broadcast_to(chance, (resamples, len(scores), problems))).mean(-1) / draws
    return _floor(np.asarray(scores), null, problems, draws, null)


def _floor(observed: Floats, null: Floats, problems: int, draws: float, centred: Floats) -> NoiseFloor:
    """Compare the cells' means with identical cells' means, `null` and (for `critical`) `centred`: [grids, cells]."""
    spread = float(observed.std(ddof=1))
    null_spreads = null.std(-1, ddof=1)
    low, middle, high = np.quantile(np.ptp(null, axis=-1), [0.025, 0.5, 0.975]).tolist()
    return NoiseFloor(
        scores=observed,
        cells=len(observed),
        problems=problems,
        draws=draws,
        spread=spread,
        range=float(np.ptp(observed)),
        expected_spread=float(null_spreads.mean()),
        expected_range=(low, middle, high),
        p=float((1 + (null_spreads >= spread - _EPSILON).sum()) / (len(null) + 1)),
        critical=float(np.quantile(np.ptp(centred, axis=-1), 1 - LEVEL)),
    )


def draws_to_separate(first: Floats, second: Floats) -> tuple[float, bool]:
    """Count the draws per problem that separate two cells [problems, draws], at level 5% with 80% power.

    More draws shrink only the variance between draws, which decides; with one draw per problem, the whole variance of
    the paired differences replaces it. Returns the number (infinite for equal scores), and True for an upper bound.
    """
    pairs = first - second
    means = problem_means(pairs[None])[0]
    problems = int((~np.isnan(means)).sum())
    if problems < 2:
        return float("nan"), False
    counts = (~np.isnan(pairs)).sum(-1)
    several = counts > 1
    bound = not several.any()
    variances = np.nanvar(means, ddof=1) if bound else np.nanvar(pairs[several], axis=-1, ddof=1)
    variance = float(variances.mean())
    difference = abs(float(np.nanmean(means)))
    if difference < _EPSILON:
        return float("inf"), bound
    if variance < _EPSILON:
        return 1.0, bound
    from statsmodels.stats.power import NormalIndPower

    size = NormalIndPower().solve_power(difference / np.sqrt(variance), alpha=LEVEL, power=POWER, ratio=0)
    return float(np.ceil(size / problems)), bound


def pass_at_k(right: Any, draws: Any, k: int) -> Floats:
    """Estimate pass@k without bias, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    `right` has c of each problem, its correct draws; `draws` has n, all its draws. Missing if n < k.
    """
    from scipy import stats

    right, draws = np.asarray(right, dtype=float), np.asarray(draws, dtype=float)
    none_right = stats.hypergeom.pmf(0, draws, right, k)
    return np.where(draws >= k, 1 - none_right, np.nan)
