"""Decide if a setting holds up against the full cache: a non-inferiority test on paired answers, right or wrong.

Scores are arrays [problems, draws]: 1 right, 0 wrong, NaN where there is no grade. The difference is the cell's Pass@1
minus the full cache's, over the (problem, draw) pairs that both have; every problem has the same weight. Two
populations can be meant:

* `these` problems, with new draws. The draws are the sample, and chance acts within problems alone.
* problems `like_these`. The problems are the sample, whatever their draws.

For `these`, the statistic is a score: the lead of the observed difference over the tested one, by the standard error
that the tested one implies (after Tango 1998, Statistics in Medicine 17:891). The missing losses that the hypothesis
demands are placed where they vary most: evenly over all draws. A problem that is lost in all its draws varies less than
as many scattered losses, and the statistic credits that within limits, see `_z`.

For problems `like_these`, the bound is Gaffke's (2005; Learned-Miller and Thomas 2019, arXiv 1905.06208): the quantile
of a mean of the problems' differences under Dirichlet weights, with the worst possible difference as one more problem.
With one draw and no gains it is Clopper and Pearson's.

Both bounds are monotone: one more wrong answer of the cell never raises an end of its interval.
scripts/simulate_statistics.py measures the errors. The sweep imports this module between two rounds, so it needs numpy
and scipy.special alone.
"""

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Population = Literal["these", "like_these"]
Label = Literal["holds", "costs", "open", "loses"]
Id = TypeVar("Id", bound=Hashable)

MARGIN = 0.05
LEVEL = 0.025
# A plan rests on few answers and may name too few draws. A plan for 95% leaves 90% on average over such plans.
PLANNED_POWER = 0.95

# The limits of the credit for problems whose draws agree: the part of it for problems that the cell wins, what is left
# out because coin flips agree as well (with two draws a problem that agrees has 2), its largest share of the variance,
# and its size in lost answers that the hypothesis demands. Without them, luck in few problems would pass for certainty.
_CREDIT_WON, _CREDIT_LUCK, _CREDIT_SHARE, _CREDIT_LOSSES = 0.9, 3.7, 0.6, 4.0

# Imhof's integral runs over the logarithm of the frequency.
_FREQUENCY_STEP = 0.05
_FREQUENCIES = np.exp(np.arange(-14, 14, _FREQUENCY_STEP))


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A cell against the full cache; differences are fractions of accuracy.

    Attributes:
        label: holds, if the interval lies above -margin, or costs, if it lies above -margin and below 0; else loses, if
            it lies below 0; else open.
        difference: the cell's Pass@1 minus the full cache's; NaN without a common pair.
        low, high: the interval. Its lower end errs with the chance `level`. Its upper end is widened for the number of
            cells (Holm), so that any of them is wrongly shown to lose with the chance `level`.
        p_holds, p_loses: the p-values of the same tests, that the cell loses the margin or more, and that it loses
            nothing (Holm).
        settled: more draws cannot change what matters: the interval lies on one side of -margin.
        draws: the number of draws per problem, from the first one, that the decision rests on.
    """

    label: Label
    difference: float
    low: float
    high: float
    p_holds: float
    p_loses: float
    settled: bool
    draws: int


def decide(
    cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL, population: Population = "these"
) -> Decision:
    """Decide about one cell; `level` is the chance of a wrong `holds` and the chance of a wrong `loses`."""
    return decide_grid({"cell": cell}, full, margin=margin, level=level, population=population)["cell"]


def decide_grid(
    cells: Mapping[Id, Floats],
    full: Floats,
    *,
    margin: float = MARGIN,
    level: float = LEVEL,
    population: Population = "these",
    family: int | None = None,
    looks: int = 1,
) -> dict[Id, Decision]:
    """Decide about the cells of a grid.

    `level` is the chance of a wrong `holds` of each cell, and the chance of any wrong loss in the grid (Holm 1979).
    `family` is the number of cells to correct for, if that is more than `cells`. `looks` at growing data share the
    level evenly (Bonferroni's split, which holds whatever the sizes of the looks), so that the intervals of all looks
    together err by it.
    """
    tests = {name: paired_test(cell, full, population) for name, cell in cells.items()}
    p_loses = {name: test.p_below(0.0) for name, test in tests.items()}
    size, adjusted, found = family or len(cells), 0.0, {}
    for rank, name in enumerate(sorted(cells, key=lambda name: p_loses[name])):
        if adjusted <= level:
            share = size - rank
        adjusted = min(1.0, max(adjusted, (size - rank) * looks * p_loses[name]))
        found[name] = _decision(tests[name], margin, level / looks, share, looks, adjusted)
    return {name: found[name] for name in cells}


def _decision(test: "PairedTest", margin: float, level: float, share: int, looks: int, p_loses: float) -> Decision:
    low, high = test.bound(level, side=-1), test.bound(level / share, side=1)
    label: Label = "open"
    if low > -margin:
        label = "costs" if high < 0 else "holds"
    elif high < 0:
        label = "loses"
    return Decision(
        label=label,
        difference=test.difference,
        low=low,
        high=high,
        p_holds=min(1.0, looks * test.p_above(-margin)) if test.problems else math.nan,
        p_loses=p_loses if test.problems else math.nan,
        settled=low > -margin or high < -margin,
        draws=test.draws,
    )


def decide_rounds(
    cells: Mapping[Id, Floats],
    full: Floats,
    *,
    rounds: Sequence[int],
    margin: float = MARGIN,
    level: float = LEVEL,
    population: Population = "these",
) -> dict[Id, Decision]:
    """Decide about the cells of a grid round by round; a settled cell keeps its decision and needs no more draws.

    The decisions depend on the scores of the rounds and on nothing else, so every reader of the same rows decides
    alike. A cell that lacks scores of a round is decided by the rounds before. With one round the decisions are those
    of `decide_grid`.

    Args:
        cells, full: scores [problems, draws]; a settled cell may lack the draws after its decision.
        rounds: the draws per problem after each round, ascending, such as (2, 4, 8).
        level: the error level of all rounds together.
    """
    options: dict[str, Any] = {"margin": margin, "level": level, "population": population, "looks": len(rounds)}
    found: dict[Id, Decision] = {}
    waiting = dict(cells)
    for draws in rounds:
        seen = {name: cell[:, :draws] for name, cell in waiting.items() if _complete(cell, draws)}
        if not seen or not _complete(full, draws):
            break
        # A settled cell that lost leaves Holm's family; one that holds stays, for its hypothesis was not rejected.
        gone = sum(one.settled and one.high < 0 for one in found.values())
        found |= decide_grid(seen, full[:, :draws], family=len(cells) - gone, **options)
        waiting = {name: cells[name] for name in seen if not found[name].settled}
    unseen = {name: cell for name, cell in cells.items() if name not in found}
    undecided = decide_grid(unseen, full, family=len(cells), **options)
    found |= {name: replace(one, label="open", settled=False) for name, one in undecided.items()}
    return {name: found[name] for name in cells}


def hold_in_search(p_holds: Mapping[Id, float], chains: Sequence[Sequence[Id]], *, level: float = LEVEL) -> set[Id]:
    """The cells that hold even though the best of all is looked for: any of them is wrong with the chance 2 `level`.

    One `level` goes to Holm's procedure over all cells. The other goes to the `chains`, in equal parts: each names
    cells from the largest cache to the smallest, and they hold until the first that does not.
    """
    found: set[Id] = set()
    for rank, name in enumerate(sorted(p_holds, key=lambda name: p_holds[name])):
        if not (len(p_holds) - rank) * p_holds[name] <= level:
            break
        found.add(name)
    for chain in chains:
        found.update(itertools.takewhile(lambda name: p_holds[name] <= level / len(chains), chain))
    return found


def power(problems: float, draws: float, differ: float, *, margin: float = MARGIN, level: float = LEVEL) -> float:
    """The chance that a cell which loses nothing holds, where a pair of answers differs with the chance `differ`."""
    pairs = problems * draws
    spread = math.sqrt(max(pairs * differ, 1e-9))
    return float(
        special.ndtr((margin * pairs + special.ndtri(level) * math.sqrt(pairs * _implied(differ, margin))) / spread)
    )


def pairs_to_hold(
    differ: float, *, margin: float = MARGIN, level: float = LEVEL, chance: float = PLANNED_POWER
) -> float:
    """The pairs of answers with which `power` is `chance`."""
    root = -special.ndtri(level) * math.sqrt(_implied(differ, margin)) + special.ndtri(chance) * math.sqrt(differ)
    return float((root / margin) ** 2)


def _implied(differ: float, margin: float) -> float:
    """The variance of a pair under a loss of `margin`, if the observed difference is 0."""
    return (differ + math.hypot(differ, 2 * margin)) / 2 - margin**2


def draws_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the draws per problem with which a cell as good as the full cache holds with a probability of 90%.

    The count is for `these` problems. It takes from the scores how often a pair differs. With one draw per problem it
    is an upper bound, since the variance between problems cannot be told from the variance within them.
    """
    test = _these(cell, full)
    discordant, credit = test.sums[0].discordant[0], test.sums[0].credit[0]
    differ = max(discordant - min(credit, discordant / 2), 1.0) / test.pairs
    return max(1, math.ceil(pairs_to_hold(differ, margin=margin, level=level) / test.problems))


def problems_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the problems `like_these` with which a cell as good as the full cache holds with that probability.

    The count is for as many draws per problem as the scores have.
    """
    means = _like_these(cell, full).means
    differ = max(float(means.var(ddof=1)) if len(means) > 1 else 0.0, 1 / len(means) ** 2)
    return max(2, math.ceil(pairs_to_hold(differ, margin=margin, level=level)))


def _complete(scores: Floats, draws: int) -> bool:
    return scores.shape[1] >= draws and not np.isnan(scores[:, :draws]).any()


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The tests of one cell: problems and draws (of the problem that has most) are counts."""

    problems: int
    draws: int
    difference: float

    def p_above(self, value: float) -> float:
        """The p-value of the hypothesis that the true difference is `value` or less."""
        raise NotImplementedError

    def p_below(self, value: float) -> float:
        """The p-value of the hypothesis that the true difference is `value` or more."""
        raise NotImplementedError

    def bound(self, level: float, *, side: int) -> float:
        """The lower (`side` -1) or upper (1) end of the interval, the farthest difference that is not rejected."""
        if not self.problems:
            return math.nan
        p_value = self.p_above if side < 0 else self.p_below
        inside, outside = self.difference, float(side)
        for _ in range(32):
            middle = (inside + outside) / 2
            if p_value(middle) > level:
                inside = middle
            else:
                outside = middle
        return inside


def paired_test(cell: Floats, full: Floats, population: Population = "these") -> PairedTest:
    return _these(cell, full) if population == "these" else _like_these(cell, full)


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums over the pairs of a cell and the full cache: of the table itself, and of tables that are better by 1, 2, ...

    Attributes:
        lead: the answers that the cell won, less those that it lost.
        discordant: the answers that it won or lost.
        credit: by how much `discordant` overstates the variance of `lead`.
    """

    lead: Floats
    discordant: Floats
    credit: Floats

    def score(self, losses: float, pairs: float, axis: int | None = None) -> Any:
        """The standard score of the lead above a true one of -`losses`; the least of all tables, or along one axis.

        Under the hypothesis, answers are won at a rate a and lost at a rate a + losses. The variance 2 a + losses at
        the likeliest a is the larger root of x^2 - variance x = losses excess.

        An answer more or less is a step, and few steps lie unevenly about their mean. Losses that the hypothesis
        demands smooth the steps, and their skewness works against a wrong rejection; gains that it demands work
        towards it (Cornish and Fisher's term).
        """
        excess = self.lead + losses
        most = np.minimum(_CREDIT_SHARE * self.discordant, max(0.0, _CREDIT_LOSSES * losses - 2))
        variance = self.discordant - np.minimum(self.credit, most)
        implied = (variance + np.sqrt(np.maximum(0, variance**2 + 4 * losses * excess))) / 2
        if losses > 0:  # a rate of losses is at most 1, so its variance is less than its mean
            implied -= np.minimum(np.minimum(excess, losses) ** 2 / pairs, implied / 10)
            # Below this, an answer more could add more variance than lead.
            implied = np.maximum(implied, excess / 2)
        error = np.sqrt(np.maximum(implied, 1e-12))
        score = (excess - math.exp(-max(0.0, losses) / 2) / 2) / error
        skewed = np.minimum(1, max(0.0, -losses) / error**2) / (6 * error)
        score -= skewed * (score * np.minimum(score, 3 * error) - 1)
        return np.where(excess > 0, score, -math.inf).min(axis)


@dataclass(frozen=True, kw_only=True)
class _These(PairedTest):
    """The tests for `these` problems: from below, and from above with the signs of all differences reversed."""

    pairs: float
    sums: tuple[_Sums, _Sums]

    def p_above(self, value: float) -> float:
        return float(special.ndtr(-self.sums[0].score(-value * self.pairs, self.pairs)))

    def p_below(self, value: float) -> float:
        return float(special.ndtr(-self.sums[1].score(value * self.pairs, self.pairs)))


def _these(cell: Floats, full: Floats) -> _These:
    """The sums; where problems differ in draws, each answer counts as one of a problem with the fewest draws."""
    differences, counts = _differences(cell, full)
    lead, discordant = np.nansum(differences, 1), np.nansum(np.abs(differences), 1)
    fewest = int(counts.min()) if len(counts) else 0
    return _These(
        problems=len(counts),
        draws=int(counts.max(initial=0)),
        difference=float((lead / counts).mean()) if len(counts) else math.nan,
        pairs=float(fewest * len(counts)),
        sums=(_sums(lead, discordant, counts, fewest / counts), _sums(-lead, discordant, counts, fewest / counts)),
    )


def _sums(lead: Floats, discordant: Floats, counts: NDArray[np.int64], weight: Floats) -> _Sums:
    """The sums over problems of the table, and of the better tables whose variance is largest.

    The variance of a problem's lead S is estimated by (n Q - S^2) / (n - 1), with Q discordant answers of n. It falls
    where the only win of a problem that is lost else is lost too. A table counts at most as much as each better one.
    """
    freedom = np.maximum(counts - 1, 1)
    credit = weight**2 * (lead**2 - discordant) / freedom * (counts > 1)
    credit = np.where((lead > 0) & (credit > 0), _CREDIT_WON * credit, credit)
    # A step turns a tie into a win: the credit changes by 2 S / (n - 1), as long as more answers are lost than won.
    steps = np.where(counts > 1, np.clip(np.minimum(-lead, counts - discordant), 0, None), 0).astype(np.int64)
    begin = steps.cumsum() - steps
    at = np.repeat(lead, steps) + np.arange(steps.sum()) - np.repeat(begin, steps)
    gained = np.repeat(weight, steps)
    fewer = 2 * gained**2 * at / np.repeat(freedom, steps)
    order = np.argsort(fewer / np.maximum(gained, 1e-12), kind="stable")
    better = np.array([gained[order], gained[order] ** 2, fewer[order]]).cumsum(1)
    start = np.array([[(weight * lead).sum()], [(weight**2 * discordant).sum()], [credit.sum()]])
    lead, discordant, credit = np.hstack([start, start + better])
    luck = _CREDIT_LUCK / max(1, min(counts, default=2) - 1)
    credit = np.where(credit > 0, np.maximum(0, credit - luck), credit)
    return _Sums(lead=lead, discordant=discordant, credit=credit)


@dataclass(frozen=True, kw_only=True)
class _LikeThese(PairedTest):
    """The problems' mean differences, as a sample of problems."""

    means: Floats

    def p_above(self, value: float) -> float:
        return _dirichlet_below(self.means, value)

    def p_below(self, value: float) -> float:
        return _dirichlet_below(-self.means, -value)


def _like_these(cell: Floats, full: Floats) -> _LikeThese:
    differences, counts = _differences(cell, full)
    means = np.nansum(differences, 1) / counts
    mean = float(means.mean()) if len(means) else math.nan
    return _LikeThese(problems=len(means), draws=int(counts.max(initial=0)), difference=mean, means=means)


def _dirichlet_below(means: Floats, value: float) -> float:
    """The chance that the Dirichlet-weighted mean of `means` and -1 lies below `value`.

    It is the chance that a sum of exponential variables times (mean - value) is negative, by Imhof's (1961) integral.
    """
    steps, counts = np.unique(np.append(means, -1.0) - value, return_counts=True)
    turns = np.multiply.outer(_FREQUENCIES / max(1e-12, float(np.abs(steps).max())), steps)
    damped = np.exp(-np.log1p(turns**2) @ counts / 2)
    return float(0.5 - (np.sin(np.arctan(turns) @ counts) * damped).sum() * _FREQUENCY_STEP / math.pi)


def _differences(cell: Floats, full: Floats) -> tuple[Floats, NDArray[np.int64]]:
    """The differences [problems, draws] of the problems that have one, and their number per problem."""
    draws = min(cell.shape[1], full.shape[1])
    differences = cell[:, :draws] - full[:, :draws]
    counts = (~np.isnan(differences)).sum(1)
    return differences[counts > 0], counts[counts > 0]
