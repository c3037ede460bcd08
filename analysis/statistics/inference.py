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
    """Arrange graded rows (cell_id, problem_id, draw, correct) of some cells as [cells, problems, ascending draws].

    A cell may be named twice, such as one without an axis beside each value of that axis.
    """
    rows = graded[graded["cell_id"].isin(cell_ids)]
    # Ids as plain objects: categories match only the same categories.
    rows = rows.astype({"cell_id": "object", "problem_id": "object"})
    problem_ids = rows["problem_id"].unique()
    # A row for each cell and problem, a column for each draw.
    table = rows.pivot(index=["cell_id", "problem_id"], columns="draw", values="correct")
    table = table.reindex(pd.MultiIndex.from_product([cell_ids, problem_ids]))
    return table.to_numpy(float).reshape(len(cell_ids), len(problem_ids), len(table.columns))


def problem_means(scores: Floats) -> Floats:
    """Average over draws, the last axis: [cells, problems] or [problems]; missing if a problem has no draw."""
    counts = (~np.isnan(scores)).sum(-1)
    return np.where(counts, np.nansum(scores, -1) / np.maximum(counts, 1), np.nan)


def paired_tests(scores: Floats, reference: Floats) -> pd.DataFrame:
    """Compare each cell with a reference on the (problem, draw) pairs that both have.

    The test flips the signs of the mean differences per problem. It tries all patterns of signs if at most
    `EXACT_PROBLEMS` problems differ, else `RESAMPLES` random ones, and counts the observed pattern too (Phipson and
    Smyth 2010). The interval is Student's t over problems. Holm bounds the chance of any false alarm among the given
    cells.

    `scores` is [cells, problems, draws], `reference` is [problems, draws], or as `scores` with one for each cell.
    Returns the columns problems, difference, se, low, high, p and p_holm; missing without a pair.
    """
    from scipy import stats

    differences = problem_means(scores - reference)  # [cells, problems]
    by_cell = pd.DataFrame(differences.T)
    table = pd.DataFrame({"problems": by_cell.count(), "difference": by_cell.mean(), "se": by_cell.sem()})
    # With one problem the error is missing, and so is the width.
    half_width = stats.t.ppf(1 - LEVEL / 2, table["problems"] - 1) * table["se"]
    table["low"] = table["difference"] - half_width
    table["high"] = table["difference"] + half_width
    table["p"] = np.where(table["problems"] > 0, sign_flip_p(differences), np.nan)
    rising = table["p"].dropna().sort_values()
    table["p_holm"] = (rising * np.arange(len(rising), 0, -1)).cummax().clip(upper=1)
    return table


def sign_flip_p(differences: Floats) -> Floats:
    """Test rows of `differences` [cells, problems] (missing ones 0) against mean zero, by random signs; two-sided p."""
    values = np.nan_to_num(differences)
    observed = np.abs(values.sum(-1))
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(RESAMPLES, values.shape[1]))
    resampled = np.abs(signs @ values.T)  # [resamples, cells]
    # `_EPSILON`: sums that are equal may differ by rounding.
    p = (1 + (resampled >= observed - _EPSILON).sum(0)) / (RESAMPLES + 1)
    for cell, cell_values in enumerate(values):
        changed = cell_values[np.abs(cell_values) > _EPSILON]
        if len(changed) > EXACT_PROBLEMS:
            continue
        # Each number from 0 has a pattern of signs: its bit 0 stands for +1, its bit 1 for -1.
        numbers = np.arange(2 ** len(changed))[:, None]
        patterns = 1 - 2.0 * ((numbers >> np.arange(len(changed))) & 1)
        p[cell] = (np.abs(patterns @ changed) >= observed[cell] - _EPSILON).mean()
    return p


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """The spread of a grid's cells, and the spread that identical cells would show, both as fractions.

    A cell more than `critical` below the best cell is worse than the best; other cells are tied with the best.
    """

    scores: Floats  # of the cells, on the pairs that all cells have
    spread: float  # standard deviation of the cells' scores
    range: float  # of the cells' scores
    expected_range: tuple[float, float, float]  # 2.5%, 50% and 97.5% quantile of identical cells' range
    p: float  # the chance that identical cells spread at least as much
    critical: float  # the range that identical cells exceed in one of twenty grids
    common_answers: int | None = None  # of each cell, if some cells have more, which do not count here

    @property
    def words(self) -> list[str]:
        """The cells' span, that of identical cells, and the answers that count if some cells have more."""
        low, _, high = map(notation.percent, self.expected_range)
        words = [f"span {notation.percent(self.range)}, {notation.p_equals(self.p)}", f"by chance {low} to {high}"]
        if self.common_answers:
            words.append(f"on the {self.common_answers:,} answers that every setting has")
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
    common = common[:, np.isfinite(common).any((0, 2))]
    means = problem_means(common)
    cells, problems = means.shape
    if cells < 2 or problems < 2:
        return None
    observed = means.mean(-1)
    residuals = (means - observed[:, None]) * np.sqrt(problems / (problems - 1))
    null = _permuted(means, resamples, seed)
    # Other random numbers, so that `critical` does not depend on the shuffles of `null`.
    centred = _permuted(residuals, resamples, seed + 1)
    floor = _floor(observed, null, centred)
    answers = np.isfinite(common).sum()
    if np.isfinite(scores).sum() > answers:
        return replace(floor, common_answers=answers // cells)
    return floor


def _permuted(means: Floats, resamples: int, seed: int) -> Floats:
    """Shuffle the cells of each problem in `means` [cells, problems]; return the cells' means [resamples, cells]."""
    rng = np.random.default_rng(seed)
    cells, problems = means.shape
    most_at_once = max(1, _CHUNK // means.size)
    chunks = []
    for start in range(0, resamples, most_at_once):
        count = min(most_at_once, resamples - start)
        # For each resample and problem another order of the cells.
        order = rng.random((count, cells, problems)).argsort(1)
        shuffled = np.take_along_axis(means[None], order, 1)
        chunks.append(shuffled.mean(-1))
    return np.concatenate(chunks)


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
    concentration = (1 - between) / between  # the sum of the distribution's two parameters
    chance_right = rng.beta(mean * concentration, (1 - mean) * concentration, (resamples, 1, problems))
    right = rng.binomial(draws, np.broadcast_to(chance_right, (resamples, len(scores), problems)))
    null = right.mean(-1) / draws
    # Simulated cells differ by chance alone, so `critical` needs no others.
    return _floor(np.asarray(scores), null, null)


def _floor(observed: Floats, null: Floats, centred: Floats) -> NoiseFloor:
    """Compare the cells' means with identical cells' means, `null` and (for `critical`) `centred`: [grids, cells]."""
    spread = float(observed.std(ddof=1))
    as_wide = (null.std(-1, ddof=1) >= spread - _EPSILON).sum()
    low, middle, high = np.quantile(np.ptp(null, axis=-1), [0.025, 0.5, 0.975]).tolist()
    return NoiseFloor(
        scores=observed,
        spread=spread,
        range=float(np.ptp(observed)),
        expected_range=(low, middle, high),
        # The observed grid counts as one of the identical ones.
        p=float((1 + as_wide) / (len(null) + 1)),
        critical=float(np.quantile(np.ptp(centred, axis=-1), 1 - LEVEL)),
    )


def draws_to_separate(first: Floats, second: Floats) -> tuple[float, bool]:
    """Count the draws per problem that separate two cells [problems, draws], at level 5% with 80% power.

    More draws shrink only the variance between draws, which decides; with one draw per problem, the whole variance of
    the paired differences replaces it. Returns the number (infinite for equal scores, NaN with fewer than two common
    problems), and True for an upper bound.
    """
    pairs = first - second
    means = problem_means(pairs)
    problems = int(np.isfinite(means).sum())
    if problems < 2:
        return float("nan"), False
    has_several_draws = np.isfinite(pairs).sum(-1) > 1
    is_bound = not has_several_draws.any()
    if is_bound:
        variance = float(np.nanvar(means, ddof=1))
    else:
        variance = float(np.nanvar(pairs[has_several_draws], axis=-1, ddof=1).mean())
    difference = abs(float(np.nanmean(means)))
    if difference < _EPSILON:
        return float("inf"), is_bound
    if variance < _EPSILON:
        return 1.0, is_bound
    from statsmodels.stats.power import NormalIndPower

    # ratio=0: a test of one sample, the differences.
    answers = NormalIndPower().solve_power(difference / np.sqrt(variance), alpha=LEVEL, power=POWER, ratio=0)
    return float(np.ceil(answers / problems)), is_bound


def pass_at_k(right: Any, draws: Any, k: int) -> Floats:
    """Estimate pass@k without bias, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, eq. 1).

    `right` has c of each problem, its correct draws; `draws` has n, all its draws. Missing if n < k.
    """
    from scipy import stats

    right, draws = np.asarray(right, dtype=float), np.asarray(draws, dtype=float)
    # The chance that none is right among k draws, taken from n draws of which c are right.
    none_right = stats.hypergeom.pmf(0, draws, right, k)
    return np.where(draws >= k, 1 - none_right, np.nan)
