"""Decide if a setting holds up against the full cache: a non-inferiority test on paired answers, right or wrong.

Scores are arrays [problems, draws]: 1 right, 0 wrong, NaN where there is no grade. The difference is the cell's Pass@1
minus the full cache's, over the (problem, draw) pairs that both have; every problem has the same weight. Two
populations can be meant:

* `these` problems, with new draws. The draws are the sample, so only the variance within problems counts.
* problems `like_these`. The problems are the sample, and the draws of one problem are a cluster.

The interval is Tango's score interval for the difference of paired proportions (Tango 1998, Statistics in Medicine
17:891). It takes its variance from the hypothesis that it tests, so it has a width even where no pair differs. Tango's
pairs are independent. Here the table of pairs is scaled to the number of independent pairs that have the variance of
the design (Yang, Sun and Hardin 2012, Biometrics 68:1254), with the degrees of freedom of that variance
(Korn and Graubard 1998, Survey Methodology 24:193). scripts/study/simulate_statistics.py measures the errors.

The sweep imports this module between two rounds, so it needs numpy and scipy.special alone.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Population = Literal["these", "like_these"]
Label = Literal["holds", "loses", "open"]
Id = TypeVar("Id", bound=Hashable)

MARGIN = 0.05
LEVEL = 0.025
# A plan rests on few answers and may name too few draws. A plan for 95% leaves 90% on average over such plans.
PLANNED_POWER = 0.95


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A cell against the full cache; differences are fractions of accuracy.

    Attributes:
        label: holds, if the interval lies above -margin; else loses, if the interval, widened for the number of cells,
            lies below 0; else open.
        difference: the cell's Pass@1 minus the full cache's; NaN without a common pair.
        low, high: the interval, with the error `level` at either end; it is not widened for the number of cells.
        draws: the number of draws per problem, from the first one, that the decision rests on.
    """

    label: Label
    difference: float
    low: float
    high: float
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
) -> dict[Id, Decision]:
    """Decide about the cells of a grid.

    `level` is the chance of a wrong `holds` of each cell, and the chance of any wrong `loses` in the grid (Holm 1979).
    `family` is the number of cells to correct for, if that is more than `cells`.
    """
    tables = {name: _pairs(cell, full) for name, cell in cells.items()}
    losing = _losing(tables, level, population, family or len(cells))
    found = {}
    for name, pairs in tables.items():
        low, high = (_bound(pairs, level, population, side=side) for side in (-1, 1))
        label: Label = "holds" if low > -margin else "loses" if name in losing else "open"
        found[name] = Decision(label=label, difference=pairs.difference, low=low, high=high, draws=pairs.draws)
    return found


def level_of_round(rounds: int, total_level: float = LEVEL) -> float:
    """The error level of each of `rounds` looks at growing data, such that all of them together err by `total_level`.

    Bonferroni's split holds for any rounds, whatever their sizes, and together with Holm's correction over the cells.
    Pocock's (1977) constant levels are a little larger (0.0091 for four rounds, not 0.00625), but are valid only for
    rounds of equal size and normal scores.
    """
    return total_level / rounds


def decide_rounds(
    cells: Mapping[Id, Floats],
    full: Floats,
    *,
    rounds: Sequence[int],
    margin: float = MARGIN,
    level: float = LEVEL,
    population: Population = "these",
) -> dict[Id, Decision]:
    """Decide about the cells of a grid round by round; a decided cell keeps its decision and needs no more draws.

    The decisions depend on the scores of the rounds and on nothing else, so every reader of the same rows decides
    alike. A cell that lacks scores of a round is open from there on. With one round the decisions are those of
    `decide_grid`.

    Args:
        cells, full: scores [problems, draws]; a cell may lack the draws after its decision (NaN, or no such column).
        rounds: the draws per problem after each round, ascending, such as (2, 4, 6, 8).
        level: the error level of all rounds together, see `level_of_round`.
    """
    each = level_of_round(len(rounds), level)
    decided: dict[Id, Decision] = {}
    waiting = dict(cells)
    for draws in rounds:
        seen = {name: cell[:, :draws] for name, cell in waiting.items() if _complete(cell, draws)}
        if not seen or not _complete(full, draws):
            break
        # A cell that lost leaves Holm's family; a cell that holds stays in it, for its hypothesis was not rejected.
        family = len(cells) - sum(one.label == "loses" for one in decided.values())
        now = decide_grid(seen, full[:, :draws], margin=margin, level=each, population=population, family=family)
        decided |= {name: one for name, one in now.items() if one.label != "open"}
        waiting = {name: cells[name] for name in seen if name not in decided}
    rest = {name: cell for name, cell in cells.items() if name not in decided}
    undecided = decide_grid(rest, full, margin=margin, level=each, population=population)
    return {name: decided.get(name) or replace(undecided[name], label="open") for name in cells}


def draws_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the draws per problem with which a cell as good as the full cache holds with a probability of 90%.

    The count is for `these` problems. It takes from the scores how often a pair differs. With one draw per problem it
    is an upper bound, since the variance between problems cannot be told from the variance within them.
    """
    pairs = _pairs(cell, full)
    return max(1, math.ceil(_size_to_hold(pairs, margin, level) / _worth(pairs, "these")))


def problems_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the problems `like_these` with which a cell as good as the full cache holds with that probability.

    The count is for as many draws per problem as the scores have.
    """
    pairs = _pairs(cell, full)
    return max(2, math.ceil(_size_to_hold(pairs, margin, level) / _worth(pairs, "like_these")))


def _complete(scores: Floats, draws: int) -> bool:
    return scores.shape[1] >= draws and not np.isnan(scores[:, :draws]).any()


@dataclass(frozen=True, kw_only=True)
class _Pairs:
    """The pairs of a cell and the full cache.

    Attributes:
        won, lost: the share of pairs that only the cell has right, and that only the full cache has right.
        problems, draws: their number; draws are those of the problem that has most.
        pairs: the number of pairs; where problems differ in draws, that of an equal design with the same variance.
        within, within_df: the variance of the differences within problems, and its degrees of freedom (Satterthwaite).
        between: the variance of the mean differences of the problems.
    """

    won: float
    lost: float
    problems: int
    draws: int
    pairs: float
    within: float
    within_df: float
    between: float

    @property
    def difference(self) -> float:
        return self.won - self.lost

    @property
    def variance(self) -> float:
        """The variance of the difference of one pair of a random problem."""
        return self.won + self.lost - self.difference**2


def _pairs(cell: Floats, full: Floats) -> _Pairs:
    draws = min(cell.shape[1], full.shape[1])
    differences = cell[:, :draws] - full[:, :draws]
    counts = (~np.isnan(differences)).sum(1)
    differences, counts = differences[counts > 0], counts[counts > 0]
    problems = len(counts)
    if not problems:
        nan = math.nan
        return _Pairs(won=nan, lost=nan, problems=0, draws=0, pairs=0, within=nan, within_df=nan, between=nan)
    won, lost = ((differences == sign).sum(1) / counts for sign in (1, -1))
    several = counts > 1
    spread = np.nanvar(differences[several], axis=1, ddof=1)
    fourth = float((spread**2 / (counts[several] - 1)).sum())
    return _Pairs(
        won=float(won.mean()),
        lost=float(lost.mean()),
        problems=problems,
        draws=int(counts.max()),
        pairs=problems**2 / float((1 / counts).sum()),
        within=float(spread.mean()) if several.any() else 0.0,
        within_df=float(spread.sum()) ** 2 / fourth if fourth else 0.0,
        between=float((won - lost).var(ddof=1)) if problems > 1 else 0.0,
    )


def _effective_size(pairs: _Pairs, level: float, population: Population) -> float:
    """The number of independent pairs that the design is worth, less the price of a variance that is itself estimated.

    For `these` problems the design is worth the number of pairs or more: to draw from every problem is never worse than
    to draw from random ones. For problems `like_these` it is worth less.
    """
    several = max(1, pairs.problems - 1)
    pooled = pairs.pairs * _student(several, level)
    if population == "these":
        if pairs.within <= 0:
            return pooled
        freedom = min(several, pairs.within_df)
        return max(pooled, pairs.pairs * pairs.variance / pairs.within * _student(freedom, level))
    if pairs.between <= 0:
        return pairs.problems * _student(several, level)
    size = pairs.problems * pairs.variance / pairs.between
    return min(max(size, pairs.problems), pairs.pairs) * _student(several, level)


def _student(freedom: float, level: float) -> float:
    """The squared ratio of the normal to Student's quantile: what a size counts if the variance has `freedom`."""
    return float(special.ndtri(level) / special.stdtrit(freedom, level)) ** 2


def _score(won: float, lost: float, difference: float) -> tuple[float, float]:
    """Tango's score per pair against a true `difference`, and its variance per pair under it.

    `won` and `lost` are shares of the pairs. The variance is 2 q + d (1 - d), with q the maximum-likelihood estimate of
    `lost` under the difference d, the larger root of 2 q^2 - (won + lost - (2 - won + lost) d) q - lost d (1 - d) = 0.
    """
    linear = won + lost - (2 - won + lost) * difference
    root = math.sqrt(max(0.0, linear**2 + 8 * lost * difference * (1 - difference)))
    variance = (linear + root) / 2 + difference * (1 - difference)
    return won - lost - difference, variance


def _bound(pairs: _Pairs, level: float, population: Population, *, side: int) -> float:
    """The lower (`side` -1) or upper (1) end of the interval, the farthest difference that the score accepts."""
    if not pairs.problems:
        return math.nan
    most = float(special.ndtri(level)) ** 2 / _effective_size(pairs, level, population)
    inside, outside = pairs.difference, float(side)
    for _ in range(30):  # to a billionth
        middle = (inside + outside) / 2
        score, variance = _score(pairs.won, pairs.lost, middle)
        if score**2 > most * variance:
            outside = middle
        else:
            inside = middle
    return inside


def _losing(tables: Mapping[Id, _Pairs], level: float, population: Population, family: int) -> set[Id]:
    """The cells that lose by Holm's procedure: the clearest first, each against fewer cells, until one does not."""
    order = sorted((name for name in tables if tables[name].problems), key=lambda name: _clearness(tables[name]))
    found: set[Id] = set()
    for rank, name in enumerate(order):
        if not _bound(tables[name], level / (family - rank), population, side=1) < 0:
            break
        found.add(name)
    return found


def _clearness(pairs: _Pairs) -> float:
    score, variance = _score(pairs.won, pairs.lost, 0.0)
    return score * math.sqrt(pairs.pairs / variance) if variance > 0 else 0.0


def _size_to_hold(pairs: _Pairs, margin: float, level: float) -> float:
    """Independent pairs with which a cell as good as the full cache holds with probability `PLANNED_POWER`.

    The score test's size with its variance at -margin and at 0 (Nam 1997, Biometrics 53:1422).
    """
    differ = (pairs.won + pairs.lost) / 2
    _, at_margin = _score(differ, differ, -margin)
    quantile = -special.stdtrit(max(1, pairs.problems - 1), level)
    return float((quantile * math.sqrt(at_margin) + special.ndtri(PLANNED_POWER) * math.sqrt(2 * differ)) / margin) ** 2


def _worth(pairs: _Pairs, population: Population) -> float:
    """The independent pairs that one more draw of all problems, or one more problem, is worth."""
    if population == "these":
        return pairs.problems * max(1.0, pairs.variance / pairs.within) if pairs.within > 0 else pairs.problems
    return max(1.0, pairs.variance / pairs.between) if pairs.between > 0 else 1.0
