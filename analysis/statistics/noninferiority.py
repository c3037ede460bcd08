"""Decide if a setting holds up against the full cache: a non-inferiority test on paired answers, right or wrong.

Scores are arrays [problems, draws]: 1 right, 0 wrong, NaN where there is no grade. The difference is the cell's Pass@1
minus the full cache's, over the (problem, draw) pairs that both have; every problem has the same weight. Two
populations can be meant:

* `these` problems, with new draws. The draws are the sample, and chance acts within problems alone.
* problems `like_these`. The problems are the sample, whatever their draws.

For `these`, the p-value is the chance of a lead (answers won less answers lost) as high as the observed one, if wins
and losses follow Poisson distributions. The hypothesis fixes the mean of the lead; `_implied` is its likeliest
variance. Where nothing is won, this is the exact test for a small number of losses. Agreement among the draws of a
problem lowers the variance, see `_variance`.

For problems `like_these`, the bound is Gaffke's (2005; Learned-Miller and Thomas 2019, arXiv 1905.06208): the quantile
of a mean of the problems' differences under Dirichlet weights, with the worst possible difference as one more problem.
With one draw and no gains it is Clopper and Pearson's.

Both bounds are monotone: one more wrong answer of the cell never raises an end of its interval.
scripts/study/simulate_statistics.py measures the errors. scipy loads slowly, so the functions that need it import it.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Population = Literal["these", "like_these"]
Label = Literal["holds", "costs", "open", "loses"]
Id = TypeVar("Id", bound=Hashable)

MARGIN = 0.05
LEVEL = 0.025
# A plan rests on few answers and may name too few draws. A plan for 95% leaves 90% on average over such plans.
PLANNED_POWER = 0.95
# The most answers that `power` draws.
_MOST_DRAWN = 2_000_000

# The limits of the credit for problems whose draws agree, chosen by simulation: the part of it for problems that the
# cell wins, the luck that is left out (of the 2 for a problem whose two draws agree), its largest share of the
# variance, and its size in lost answers that the hypothesis demands.
_CREDIT_WON, _CREDIT_LUCK, _CREDIT_SHARE, _CREDIT_LOSSES = 0.85, 1.5, 0.5, 4.0

# A lead is a whole number. Where clearly more answers than this are won, the test of one draw looks half a step ahead,
# as a mid-p does; where none is won, it is exact as it stands.
_RATE_OF_HALF_STEPS = 0.6

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
    cells: Mapping[Id, Floats], full: Floats, *, rounds: Sequence[int], margin: float = MARGIN, level: float = LEVEL
) -> dict[Id, Decision]:
    """Decide about the cells of a grid round by round; a settled cell keeps its decision and needs no more draws.

    The decisions depend on the rounds' scores alone, so every reader of the same rows decides alike. A cell that lacks
    scores of a round is decided by the rounds before. With one round the decisions are those of `decide_grid`.

    `cells` and `full` are scores [problems, draws], where a settled cell may lack later draws; `rounds` the draws per
    problem after each round, ascending, such as (2, 4, 8); `level` the error level of all rounds together.
    """
    options: dict[str, Any] = {"margin": margin, "level": level, "looks": len(rounds)}
    found: dict[Id, Decision] = {}
    waiting = dict(cells)
    for draws in rounds:
        seen = {name: cell[:, :draws] for name, cell in waiting.items() if complete(cell, draws)}
        if not seen or not complete(full, draws):
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


def power(problems: int, draws: int, differ: float, *, margin: float = MARGIN, level: float = LEVEL) -> float:
    """The chance that a cell which loses nothing holds, where a pair differs with chance `differ`: 1,000 draws."""
    tables = max(100, min(1000, _MOST_DRAWN // (problems * draws)))
    rates = (differ / 2, 1 - differ, differ / 2)
    won, _, lost = np.moveaxis(np.random.default_rng(0).multinomial(draws, rates, (tables, problems)), -1, 0)
    p = p_these((won - lost).astype(float), (won + lost).astype(float), np.full(problems, float(draws)), -margin)
    return float((p <= level).mean())


def pairs_to_hold(differ: float, *, margin: float = MARGIN, level: float = LEVEL) -> float:
    """About the pairs of answers with which `power` is `PLANNED_POWER`, by the normal approximation."""
    from scipy import special

    implied = _implied(differ, margin, margin)
    errors = special.ndtri(PLANNED_POWER) * math.sqrt(differ) - special.ndtri(level) * math.sqrt(implied)
    return float((errors / margin) ** 2)


def draws_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the draws per problem with which a cell as good as the full cache holds with a probability of 90%.

    The count is for `these` problems. It takes from the scores how often a pair differs. With one draw per problem it
    is an upper bound, since the variance between problems cannot be told from the variance within them.
    """
    lead, discordant, counts = _counts(cell, full)
    variance = _variance(own_sums(lead, discordant, counts), math.inf, counts.min())
    differ = max(1.0, float(variance)) / (len(counts) * counts.min())
    return max(1, math.ceil(pairs_to_hold(differ, margin=margin, level=level) / len(counts)))


def problems_to_hold(cell: Floats, full: Floats, *, margin: float = MARGIN, level: float = LEVEL) -> int:
    """Count the problems `like_these` that `draws_to_hold`'s cell needs, with as many draws each as the scores have."""
    lead, _, counts = _counts(cell, full)
    means = lead / counts
    differ = max(float(means.var(ddof=1)) if len(means) > 1 else 0.0, 1 / len(means) ** 2)
    return max(2, math.ceil(pairs_to_hold(differ, margin=margin, level=level)))


def complete(scores: Floats, draws: int) -> bool:
    """Say if each problem has a score for each of the first `draws` draws."""
    return scores.shape[1] >= draws and not np.isnan(scores[:, :draws]).any()


@dataclass(frozen=True, kw_only=True)
class PairedTest:
    """The tests of one cell.

    Attributes:
        problems, draws: how many problems there are, and how many draws the problem has that has most.
        difference: the observed difference.
        p_above, p_below: the p-values of the hypotheses that the true difference is at most and at least a value.
    """

    problems: int
    draws: int
    difference: float
    p_above: Callable[[float], float]
    p_below: Callable[[float], float]

    def bound(self, level: float, *, side: int) -> float:
        """The lower (`side` -1) or upper (1) end of the interval, the farthest difference that is not rejected."""
        from scipy import optimize

        if not self.problems:
            return math.nan
        p_value = self.p_above if side < 0 else self.p_below
        if p_value(float(side)) > level:
            return float(side)
        return float(optimize.brentq(lambda value: p_value(value) - level, self.difference, side, xtol=1e-9))


def paired_test(cell: Floats, full: Floats, population: Population = "these") -> PairedTest:
    lead, discordant, counts = _counts(cell, full)
    means = lead / counts

    def p(sign: int, value: float) -> float:
        if not len(means):
            return 1.0
        if population == "like_these":
            return _dirichlet_below(sign * means, value)
        return float(p_these(sign * lead, discordant, counts, value))

    return PairedTest(
        problems=len(means),
        draws=int(counts.max(initial=0)),
        difference=float(means.mean()) if len(means) else math.nan,
        p_above=lambda value: p(1, value),
        p_below=lambda value: p(-1, -value),
    )


def _counts(cell: Floats, full: Floats) -> tuple[Floats, Floats, Floats]:
    """Answers that the cell won less those that it lost, those that it won or lost, and pairs, of problems with one."""
    draws = min(cell.shape[1], full.shape[1])
    differences = cell[:, :draws] - full[:, :draws]
    counts = (~np.isnan(differences)).sum(1).astype(float)
    asked = counts > 0
    return np.nansum(differences, 1)[asked], np.nansum(np.abs(differences), 1)[asked], counts[asked]


def p_these(lead: Floats, discordant: Floats, counts: Floats, value: float) -> Floats:
    """p of a true difference of `value` or less, of tables [..., problems]; each counts at most as a better one."""
    draws = counts.min()
    pairs = draws * len(counts)
    return p_of_sums(better_sums(lead, discordant, counts), -value * pairs, pairs, draws).max(-1)


def p_of_sums(sums: Floats, losses: float, pairs: float, draws: float) -> Floats:
    """The chance of a lead as high as in `sums` (see `own_sums`), if its mean is -`losses`.

    Wins and losses follow Poisson distributions, and their rates add up to the implied variance. If this is less than
    `losses`, some losses are certain. Student's t allows for a variance that is estimated from few pairs.
    """
    from scipy import special

    lead = sums[0]
    variance = np.maximum(_implied(_variance(sums, losses, draws), losses, lead + losses), 1e-9)
    by_chance = np.clip(losses, -variance, variance)
    won, lost = (variance - by_chance) / 2, (variance + by_chance) / 2
    at_least_two_lost = special.gammainc(2, max(0.0, losses))
    half = won / (won + _RATE_OF_HALF_STEPS) / 2 * at_least_two_lost / math.sqrt(draws)
    least = lead + losses - by_chance + half
    # The sum of Skellam's probabilities from `least` up, which chi-squared distributions give between integers too.
    chance = np.where(
        least > 1,
        special.chndtr(2 * won, 2 * np.maximum(least, 1), 2 * lost),
        1 - special.chndtr(2 * lost, 2 * np.maximum(1 - least, 1e-9), 2 * won),
    )
    p = special.stdtr(max(1.0, pairs - 1), special.ndtri(chance))
    return np.where(lead + losses > 0, p, 1.0)


def _implied(variance: Any, losses: float, excess: Any) -> Any:
    """The likeliest variance of a lead whose mean is -`losses`, `excess` below the observed one.

    If answers are won at a rate a and lost at a rate a + losses, the likeliest 2 a + losses solves the equation
    x^2 - variance x = losses excess (Tango 1998, Statistics in Medicine 17:891).
    """
    return (variance + np.sqrt(np.maximum(0, variance**2 + 4 * losses * excess))) / 2


def _variance(sums: Floats, losses: float, draws: float) -> Floats:
    """The variance of the lead: each answer won or lost counts 1, less the credit within its limits.

    Without the limits, luck would pass for certainty: the draws of a problem that flips coins may agree.
    """
    lead, discordant, credit = sums
    if losses <= 0:
        return np.maximum(discordant, np.abs(lead))
    credit = np.maximum(np.minimum(credit, 0), credit - _CREDIT_LUCK / max(1.0, draws - 1))
    return discordant - np.minimum(credit, np.minimum(_CREDIT_SHARE * discordant, _CREDIT_LOSSES * losses))


def own_sums(lead: Floats, discordant: Floats, counts: Floats) -> Floats:
    """The sums of lead, discordant and credit over problems, [3, ...].

    The variance of a problem's lead S with Q discordant answers of n is estimated by (n Q - S^2) / (n - 1). The credit
    (S^2 - Q) / (n - 1) is what it lacks to Q. Where problems differ in draws, each answer counts as one of a problem
    with the fewest draws.
    """
    weight = counts.min() / counts
    credit = weight**2 * (lead**2 - discordant) / np.maximum(counts - 1, 1) * (counts > 1)
    credit = np.where((lead > 0) & (credit > 0), _CREDIT_WON * credit, credit)
    return np.stack([(weight * lead).sum(-1), (weight**2 * discordant).sum(-1), credit.sum(-1)])


def better_sums(lead: Floats, discordant: Floats, counts: Floats) -> Floats:
    """The sums [3, ..., tables] of the tables that are better by 0, 1, ... wins and have the largest variance.

    A tie that becomes a win changes the credit by 2 S / (n - 1), so a table whose lost problems are lost wholly may
    look more certain than a better one; so may a table without differences, whose first win brings the first variance.
    """
    wins = np.arange(counts.max())
    at = lead[..., None] + wins
    steps = (at <= 0) & (wins < (counts - discordant)[..., None])
    most = int((steps & (at < 0)).sum((-1, -2)).max()) + 1
    weight, freedom = (counts.min() / counts)[:, None], np.maximum(counts - 1, 1)[:, None]
    flat = (*lead.shape[:-1], -1)
    fewer = np.where(steps, 2 * weight * at / freedom, 0.0).reshape(flat)
    order = np.argsort(np.where(steps.reshape(flat), fewer, 1.0), -1, kind="stable")[..., :most]
    gained = np.take_along_axis(np.where(steps, weight, 0.0).reshape(flat), order, -1)
    changes = np.stack([gained, gained**2, gained * np.take_along_axis(fewer, order, -1)])
    own = own_sums(lead, discordant, counts)[..., None]
    return np.concatenate([own, own + changes.cumsum(-1)], -1)


def _dirichlet_below(means: Floats, value: float) -> float:
    """The chance that the Dirichlet-weighted mean of `means` and -1 lies below `value`, by Imhof's (1961) integral."""
    steps, counts = np.unique(np.append(means, -1.0) - value, return_counts=True)
    turns = np.multiply.outer(_FREQUENCIES / max(1e-12, float(np.abs(steps).max())), steps)
    damped = np.exp(-np.log1p(turns**2) @ counts / 2)
    return float(0.5 - (np.sin(np.arctan(turns) @ counts) * damped).sum() * _FREQUENCY_STEP / math.pi)
