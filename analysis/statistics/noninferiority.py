"""Decide if a setting is as good as the full cache: a non-inferiority test on paired answers, right or wrong.

Scores are arrays [problems, draws]: 1 right, 0 wrong, NaN without a grade. The difference is the cell's Pass@1 minus
the full cache's, over the (problem, draw) pairs that both have; every problem has the same weight. There are two
possible populations:

* `these` problems, with new draws. The draws are the sample; chance acts only within problems.
* problems `like_these`. The problems are the sample, whatever their draws.

For `these`, wins and losses of answers follow Poisson distributions. The hypothesis fixes the mean of the lead (answers
won minus answers lost). Tango's (1998) constrained estimate gives its variance: the most likely one under the
hypothesis. The p-value is the exact chance of a lead at least as high as observed, Skellam's (1946) tail. If nothing is
won, this is the exact Poisson test for few losses. scripts/study/compare_tests.py compares it with tests based on a
standard error, which far too often call a cell safe that loses the margin.

For problems `like_these`, the bound is Gaffke's (2005; Learned-Miller and Thomas 2019, arXiv 1905.06208): the quantile
of a mean of the problems' differences under Dirichlet weights, with the worst possible difference as one more problem.
With one draw and no gains it is Clopper and Pearson's.

A missing pair (`paired`) counts as lost in the test for safety, and as won in the test for a loss: whatever made
answers missing, the tests err no more than with all answers. One more wrong answer of the cell never raises an end of
an interval. scipy loads slowly: the functions that need it import it.

Where texts repeat, a `share` of the answers counts: the exact test then has so many fewer wins, losses and pairs.
Problems that are variants of one question are no sample by themselves: `groups` numbers each problem's question, and
the questions are the sample, with the same weight each.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Population = Literal["these", "like_these"]
Label = Literal["safe", "small loss", "unclear", "worse"]
Groups = NDArray[np.int64] | None
Id = TypeVar("Id", bound=Hashable)

MARGIN = 0.05
LEVEL = 0.025
# A plan from few answers may ask for too few draws. Plans for 95% average 90% power over such plans.
PLANNED_POWER = 0.95
# Between points on the path of `_chance_below_zero`, the next one where the points before do not suffice.
_SPACINGS = (0.1, 0.05, 0.025, 0.0125, 0.00625, 0.003125)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision about a cell; differences are fractions of accuracy, NaN without a common pair.

    Safe: the interval lies above -margin; it is a small loss if it also lies below 0. Worse: else, if it lies below 0.
    Unclear: all others. No cell is safe if the full cache solves at most the margin (`can_lose`). The lower end errs
    with chance `level`; so does any upper end among all cells, which is widened for their number (Holm).
    """

    label: Label
    difference: float  # the cell's Pass@1 minus the full cache's
    low: float
    high: float
    p_holds: float  # of the test of the lower end: the cell loses the margin or more
    p_loses: float  # of the test of the upper end, with Holm: the cell loses nothing
    settled: bool  # the interval lies on one side of -margin; more draws cannot change the result
    draws: int  # draws per problem behind the decision; a problem may have fewer


def decide(
    cell: Floats, full: Floats, *, margin: float = MARGIN, population: Population = "these", looks: int = 1
) -> Decision:
    """Decide about one cell, by the rules of `decide_tests`."""
    return decide_grid({"cell": cell}, full, margin=margin, population=population, looks=looks)["cell"]


def decide_grid(
    cells: Mapping[Id, Floats],
    full: Floats,
    *,
    margin: float = MARGIN,
    population: Population = "these",
    family: int | None = None,
    looks: int = 1,
    groups: Groups = None,
) -> dict[Id, Decision]:
    """Decide about the cells of a grid by the rules of `decide_tests`."""
    tests = {name: paired_test(cell, full, population, groups=groups) for name, cell in cells.items()}
    losable = can_lose(full, margin)
    return decide_tests(tests, losable, margin=margin, family=family, looks=looks)


def decide_tests(
    tests: Mapping[Id, "PairedTest"],
    losable: bool,
    *,
    margin: float = MARGIN,
    family: int | None = None,
    looks: int = 1,
) -> dict[Id, Decision]:
    """Decide about the cells of a grid by their tests, which may be of different populations.

    `losable` is `can_lose` of the full cache. `LEVEL` is the chance of a wrong *safe* for each cell, and of any wrong
    loss in the grid (Holm 1979). `family`: the number of cells to correct for, if larger than `tests`. `looks` at
    growing data share the level evenly (Bonferroni), so that the intervals of all looks together err with this chance.
    """
    level = LEVEL / looks
    p_loses = {name: test.opposite.p_above(0.0) for name, test in tests.items()}
    # Holm: by rising p, each loss is tested at the level divided by the hypotheses that are left, until one is not
    # rejected; the intervals of all later cells have the divisor of that one.
    decisions = {}
    remaining = divisor = family or len(tests)
    adjusted = 0.0
    for name in sorted(tests, key=lambda name: p_loses[name]):
        test = tests[name]
        # `adjusted` is here the p of the loss before, at first 0: only if that is rejected, the divisor falls.
        if adjusted <= LEVEL:
            divisor = remaining
        adjusted = min(1.0, max(adjusted, remaining * looks * p_loses[name]))
        remaining -= 1
        low = test.lower_end(level)
        high = test.upper_end(level / divisor)
        is_safe = losable and low > -margin
        if is_safe:
            label: Label = "small loss" if high < 0 else "safe"
        else:
            label = "worse" if high < 0 else "unclear"
        decisions[name] = Decision(
            label=label,
            difference=test.difference,
            low=low,
            high=high,
            # Beside a full cache that cannot lose the margin, nothing shows that a cell holds.
            p_holds=min(1.0, looks * test.p_above(-margin)) if losable else 1.0,
            p_loses=adjusted,
            settled=is_safe or high < -margin,
            draws=test.pairs.shape[1],
        )
        if not len(test.pairs):
            decisions[name] = replace(decisions[name], p_holds=math.nan, p_loses=math.nan)
    return {name: decisions[name] for name in tests}


def decide_rounds(
    cells: Mapping[Id, Floats], full: Floats, *, rounds: Sequence[int], margin: float = MARGIN
) -> dict[Id, Decision]:
    """Decide about the cells of a grid round by round; a settled cell keeps its decision and needs no more draws.

    The decisions depend only on the rounds' scores, so all readers of the same rows decide alike. A cell that lacks
    scores of a round is decided by the rounds before. One round gives the decisions of `decide_grid`.

    A settled cell may lack later draws. `rounds`: the draws per problem after each round, ascending, such as (2, 4, 8);
    all of them together err with the chance `LEVEL`.
    """
    options: dict[str, Any] = {"margin": margin, "looks": len(rounds)}
    decisions: dict[Id, Decision] = {}
    waiting = dict(cells)
    for draws in rounds:
        ready = {name: scores[:, :draws] for name, scores in waiting.items() if complete(scores, draws)}
        if not ready or not complete(full, draws):
            break
        # A settled cell that lost leaves Holm's family; a safe one stays, because its hypothesis was not rejected.
        lost = sum(decision.settled and decision.high < 0 for decision in decisions.values())
        decisions |= decide_grid(ready, full[:, :draws], family=len(cells) - lost, **options)
        waiting = {name: cells[name] for name in ready if not decisions[name].settled}
    # Cells without all scores of the first round.
    undecided = {name: scores for name, scores in cells.items() if name not in decisions}
    for name, decision in decide_grid(undecided, full, family=len(cells), **options).items():
        decisions[name] = replace(decision, label="unclear", settled=False)
    return {name: decisions[name] for name in cells}


def hold_in_search(p_holds: Mapping[Id, float], chains: Sequence[Sequence[Id]]) -> set[Id]:
    """Return cells that are safe even if the best of all is searched for: any is wrong with chance 2 `LEVEL`.

    One `LEVEL` goes to Holm's procedure over all cells. The other is divided evenly among the `chains`: each lists
    cells from the largest cache to the smallest, and they are safe until the first that is not.
    """
    safe = set[Id]()
    for rank, name in enumerate(sorted(p_holds, key=lambda name: p_holds[name])):
        if not p_holds[name] * (len(p_holds) - rank) <= LEVEL:  # also if p is NaN
            break
        safe.add(name)
    for chain in chains:
        for name in chain:
            if not p_holds[name] <= LEVEL / len(chains):
                break
            safe.add(name)
    return safe


def beyond_control(
    tests: Mapping[Id, "PairedTest"], cells: Mapping[Id, Floats], full: Floats, control: Floats
) -> set[Id]:
    """Return the cells in which surely more answers are lost or won than where the full cache is asked again.

    Where a cell changes nothing, it and the control are alike; Holm bounds the chance of any error by `LEVEL`. `tests`
    are the cells' own, from which population, share and groups are taken.
    """
    # 1 where an answer agrees with the full cache's, 0 where one of the two is right: fewer agreements are a loss.
    control_agreements = 1 - np.abs(differences(control, full))
    agreement_tests = {}
    for name, scores in cells.items():
        agreements = 1 - np.abs(differences(scores, full))
        agreement_tests[name] = replace(tests[name], pairs=paired(agreements, control_agreements))
    decisions = decide_tests(agreement_tests, losable=True)
    return {name for name, decision in decisions.items() if decision.high < 0}


def power(problems: int, draws: int, differ: float, *, margin: float = MARGIN, level: float = LEVEL) -> float:
    """Return the chance that a lossless cell is called safe, if a pair differs with chance `differ`.

    It is the share of 10,000 simulated cells.
    """
    pairs = problems * draws
    chances = (differ / 2, 1 - differ, differ / 2)  # that a pair is won, alike, lost
    won, _, lost = np.random.default_rng(0).multinomial(pairs, chances, 10_000).T.astype(float)
    p = p_these(won, lost, margin * pairs)
    return float((p <= level).mean())


def pairs_to_hold(differ: float, *, margin: float, level: float) -> float:
    """Return about how many pairs of answers give `PLANNED_POWER`, by the normal approximation of `power`."""
    # The margin has to cover the error of a lossless cell's lead, and that of the lead under the hypothesis.
    errors = NormalDist().inv_cdf(PLANNED_POWER) * math.sqrt(differ)
    # The quantile of a small chance is negative, so this adds.
    errors -= NormalDist().inv_cdf(level) * math.sqrt(constrained_variance(differ, margin, margin))
    return (errors / margin) ** 2


def can_lose(full: Floats, margin: float) -> bool:
    """True if the full cache solves more than the margin; else even a cell that solves nothing would be safe."""
    return bool(np.nansum(full) > margin * np.isfinite(full).sum())


def complete(scores: Floats, draws: int) -> bool:
    """True if each problem has a score for each of the first `draws` draws."""
    return scores.shape[1] >= draws and not np.isnan(scores[:, :draws]).any()


@dataclass(frozen=True)
class PairedTest:
    """The tests of one cell, on its `paired` differences; a missing pair is NaN."""

    pairs: Floats
    population: Population
    share: float = 1
    groups: Groups = None

    @property
    def means(self) -> Floats:
        """The mean difference of each problem, or group of problems, that has a pair."""
        has_pair = np.isfinite(self.pairs).any(1)
        problem_means = np.nanmean(self.pairs[has_pair], 1)
        if self.groups is None:
            return problem_means
        return group_means(problem_means, self.groups[has_pair])

    @property
    def difference(self) -> float:
        return float(self.means.mean()) if len(self.pairs) else math.nan

    def p_above(self, value: float) -> float:
        """p of the hypothesis that the true difference is at most `value`."""
        if not len(self.pairs):
            return 1.0
        if self.population == "these":
            won, lost = self._won_and_lost
            return float(p_these(won, lost, -value * self.share * self.pairs.size))
        means, counts = self._distinct_means
        return _chance_below_zero(means - value, counts)

    # A search for a bound computes p many times, so what its pairs sum to is computed once.
    @cached_property
    def _won_and_lost(self) -> tuple[int, int]:
        """The numbers of answers won and lost that count, a missing pair as lost.

        The share of the wins is rounded down and that of the losses up, so that p is rather too large.
        """
        pairs = np.nan_to_num(self.pairs, nan=-1.0)
        won = math.floor(self.share * (pairs > 0).sum())
        lost = math.ceil(self.share * (pairs < 0).sum())
        return won, lost

    @cached_property
    def _distinct_means(self) -> tuple[Floats, NDArray[Any]]:
        """The problems' mean differences and how often each occurs, with the worst possible one as one more problem.

        With `groups`, those of the groups.
        """
        means = group_means(np.nan_to_num(self.pairs, nan=-1.0).mean(1), self.groups)
        return np.unique(np.append(means, -1.0), return_counts=True)

    @cached_property
    def opposite(self) -> "PairedTest":
        """The test of the full cache beside the cell: its p and its end are those of the interval's other side."""
        return replace(self, pairs=-self.pairs)

    def lower_end(self, level: float) -> float:
        """The lower end of the interval, the lowest difference that is not rejected."""
        if not len(self.pairs):
            return math.nan
        # Not even the lowest possible difference is rejected.
        if self.p_above(-1.0) > level:
            return -1.0
        from scipy import optimize

        def height(value: float) -> float:
            # The logarithm of p is nearer to a line than p is. p may be 0, so it counts at least the level's square.
            return math.log(max(self.p_above(value), level**2) / level)

        return optimize.brentq(height, self.difference, -1.0, xtol=1e-9)

    def upper_end(self, level: float) -> float:
        """The upper end of the interval, the highest difference that is not rejected."""
        return -self.opposite.lower_end(level)

    def draws_to_hold(self, margin: float, level: float = LEVEL) -> int:
        """The draws per problem that make a lossless cell safe with 90% chance, for `these` problems."""
        # At least one answer, because none in so few does not show that none ever differs.
        differing = max(1.0, float(np.nansum(np.abs(self.pairs))))
        share = differing / np.isfinite(self.pairs).sum()
        needed = pairs_to_hold(share, margin=margin, level=level)
        return max(1, math.ceil(needed / len(self.pairs)))

    def problems_to_hold(self, margin: float, level: float = LEVEL) -> int:
        """The problems `like_these` for the cell of `draws_to_hold`, with as many draws each as here.

        With `groups` these are groups.
        """
        means = self.means
        variance = 1 / len(means) ** 2  # the least: equal means of a few problems may be luck
        if len(means) > 1:
            variance = max(variance, float(means.var(ddof=1)))
        return max(2, math.ceil(pairs_to_hold(variance, margin=margin, level=level)))


def paired_test(
    cell: Floats, full: Floats, population: Population = "these", share: float = 1, groups: Groups = None
) -> PairedTest:
    return PairedTest(paired(cell, full), population, share, groups)


def group_means(values: Floats, groups: Groups) -> Floats:
    """Return the mean of each group's values; the values themselves without groups."""
    if groups is None:
        return values
    # A number of a group without a problem here counts 0 and is left out.
    counts = np.bincount(groups)
    return np.bincount(groups, values)[counts > 0] / counts[counts > 0]


def differences(cell: Floats, full: Floats) -> Floats:
    """Return the cell's scores minus the full cache's, [problems, draws], NaN without a pair."""
    draws = min(cell.shape[1], full.shape[1])
    return cell[:, :draws] - full[:, :draws]


def paired(cell: Floats, full: Floats) -> Floats:
    """Return the differences of all expected pairs, [problems, draws], NaN if one is missing; none without a pair.

    Expected is each problem in each draw that has at least half the pairs of the fullest draw, because in a draw that a
    run has only started, nearly all pairs are missing.
    """
    pairs = differences(cell, full)
    counts = np.isfinite(pairs).sum(0)
    if not counts.any():
        return pairs[:0, :0]
    return pairs[:, 2 * counts >= counts.max()]


def p_these(won: Any, lost: Any, losses: float) -> Floats:
    """Return p of the hypothesis that the cell loses `losses` or more answers net, given `won` and `lost` ones.

    p is at least the p of the table with one more win, which is the larger one if no answer differs.
    """
    return np.maximum(_skellam_tail(won, lost, losses), _skellam_tail(won + 1, lost, losses))


def _skellam_tail(won: Any, lost: Any, losses: float) -> Floats:
    """Return the chance of a lead of at least `won` - `lost`, with mean -`losses` and its most likely variance."""
    from scipy import special

    lead = np.asarray(won - lost, dtype=float)
    variance = constrained_variance(won + lost, losses, lead + losses)
    # `chndtr` needs numbers above 0.
    wins = np.maximum((variance - losses) / 2, 1e-9)  # the expected numbers of answers won and lost
    misses = np.maximum((variance + losses) / 2, 1e-9)
    # Johnson (1959): the difference of two Poisson numbers has the tails of noncentral chi-squared distributions.
    # Both branches are computed everywhere, so `maximum` keeps the one that is not taken valid.
    chance = np.where(
        lead >= 1,
        special.chndtr(2 * wins, 2 * np.maximum(lead, 1), 2 * misses),
        1 - special.chndtr(2 * misses, 2 * np.maximum(1 - lead, 1), 2 * wins),
    )
    # A lead at the hypothesis's mean or below says nothing against the hypothesis.
    return np.where(lead + losses > 0, chance, 1.0)


def constrained_variance(differ: Any, losses: float, excess: Any) -> Any:
    """Return the most likely variance of a lead with mean -`losses`, which lies `excess` below the observed lead.

    If answers are won at rate a and lost at rate a + losses, the most likely x = 2 a + losses solves the equation x^2 -
    differ x = losses excess; `differ` is the number of answers won or lost (Tango 1998, Statistics in Medicine 17:891).
    """
    return (differ + np.sqrt(np.maximum(0, differ**2 + 4 * losses * excess))) / 2


def _chance_below_zero(steps: Floats, counts: NDArray[Any]) -> float:
    """Return the chance that the mean of `steps` under Dirichlet weights (`counts` weights each) is below zero.

    Rice (1980, SIAM Journal on Scientific and Statistical Computing 1:438): invert the Laplace transform along a path
    through its saddle point that equals steepest descent up to the third order. Two halves of the points have to agree.
    """
    if steps.max() <= 0 or steps.min() >= 0:
        return float(steps.max() <= 0)
    # Only the chance of the rarer side is computed, which keeps its relative error small.
    if counts @ steps < 0:
        return 1 - _chance_below_zero(-steps, counts)
    # Between 0 and -1 / steps.min() the integrand has its least value, and 1 + saddle * step is positive for all steps.
    # Its logarithm is self-concordant there, so that Newton's damped steps stay between the ends and converge (Nesterov
    # 2004, Introductory Lectures on Convex Optimization, 4.1.5).
    saddle = -0.5 / steps.min()
    decrement = 1.0
    while abs(decrement) > 1e-8:
        ratios = steps / (1 + saddle * steps)
        # From the second derivative the path's width, and below from the third its bend.
        width = 1 / math.sqrt(saddle**-2 + counts @ ratios**2)
        decrement = width * (1 / saddle + counts @ ratios)
        saddle += width * decrement / (1 + abs(decrement))
    third_order_bend = -2 / 3 * width**3 * (saddle**-3 + counts @ ratios**3)
    # Far from the saddle the integrand may grow along the bent path. Along a straight one it falls, but may turn often.
    for spacing, bend in itertools.product(_SPACINGS, (third_order_bend, 0)):
        times = np.arange(0, 24, spacing)
        path = saddle + width * (1j * np.sinh(times) + bend * (np.cosh(times) - 1))
        # The derivative of the path.
        pace = width * (1j * np.cosh(times) + bend * np.sinh(times))
        with np.errstate(over="ignore", invalid="ignore"):
            values = (np.exp(-np.log1p(np.multiply.outer(path, steps)) @ counts) / path * pace).imag
        # The trapezoid rule on half of the path; the other half is its mirror image.
        values[0] /= 2
        even = values[::2].sum()
        odd = values[1::2].sum()
        # If every other point is enough, all are more than enough.
        if math.isclose(even, odd, rel_tol=1e-6, abs_tol=1e-300):
            return float((even + odd) * spacing / math.pi)
    raise ArithmeticError(f"no chance from the means {steps} with {counts} weights")
