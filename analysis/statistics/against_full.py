"""Compare a run's cells with the full cache of their condition: labels, intervals, plans, and where a loss lies."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvsweep.analysis.load import is_control
from kvsweep.analysis.statistics import noninferiority
from kvsweep.analysis.statistics.inference import problem_means, score_array
from kvsweep.analysis.statistics.noninferiority import Decision, Floats, Groups, Population

COLUMNS = ["decision", "margin", "family", "rounds", "stopped_early", "these_low", "these_high", "p_holds", "p_loses"]
COLUMNS += ["diff_low", "diff_high", "draws_to_hold", "problems_to_hold", "population", "paired_draws", "fewest_draws"]
COLUMNS += ["lost_wholly", "diff_hard", "diff_middle", "diff_easy"]
# At least this many sizes of a policy form a chain, searched from the largest cache for the smallest safe one.
CHAIN = 3
Record = Mapping[str, Any]


class Plan(NamedTuple):
    """What decides about a cell besides its scores: rounds and grid of a sequential sweep, margin, population.

    Greedy decoding gives every draw the same answer, so its problems are the sample. The same holds for a server that
    ignores the seed; its record then has `copies` (analysis/load.py). Of variants of one question the questions are the
    sample; the record then has `groups`.
    """

    rounds: tuple[int, ...]
    margin: float
    grid: str
    population: Population = "these"


def plan_of(record: Record, margin: float | None = None) -> Plan:
    """Return a cell's plan; `record` is its provenance. `margin` (a fraction) replaces the run's own margin."""
    config = record.get("config") or {}
    rounds = tuple(record.get("rounds") or ())
    # In rounds each grid is corrected by itself, else all cells of a condition together.
    grid = str(config.get("grid")) if rounds else ""
    if margin is None:
        report = config.get("report") or {}
        margin = report.get("margin", 100 * noninferiority.MARGIN) / 100  # from points
    decoding = config.get("decoding") or {}
    draws_are_equal = decoding.get("temperature") == 0 or record.get("copies") is True
    has_variants = "groups" in record
    population: Population = "these"
    # Rounds decide by their draws, so they are always about these problems.
    if (draws_are_equal or has_variants) and not rounds:
        population = "like_these"
    return Plan(rounds=rounds, margin=margin, grid=grid, population=population)


def decide_cells(
    cells: pd.DataFrame, graded: pd.DataFrame, provenance: Mapping[str, Record], margin: float | None = None
) -> pd.DataFrame:
    """Decide about each cell that shares a (problem, draw) pair with the full cache of its condition.

    `cells` are a run's (`load.Run.cells`), `graded` has a row per graded completion, `provenance` a record by cell_id.
    The correction for several cells counts the cells of a condition with the same plan. A cell is unclear until it and
    its full cache are complete. A control is decided by itself. Returns `COLUMNS`, recommendable and beyond_control
    (docs/report.md), by cell_id.
    """
    rows = []
    for _, condition in cells.groupby("condition", sort=False):
        rows += _decide_condition(condition, graded, provenance, margin)
    return pd.DataFrame(rows, columns=["cell_id", *COLUMNS, "beyond_control", "recommendable"]).set_index("cell_id")


def _decide_condition(
    condition: pd.DataFrame, graded: pd.DataFrame, provenance: Mapping[str, Record], margin: float | None
) -> list[Any]:
    """Return the rows of `decide_cells` for the cells of one condition."""
    is_full = condition["policy"] == "full"
    # There is nothing to compare with, or nothing to compare.
    if not is_full.any() or is_full.all():
        return []
    baseline = condition.loc[is_full, "cell_id"].iloc[0]
    compressed = list(condition.loc[~is_full, "cell_id"])
    # One array for all, so that problems and draws have the same places in each cell's scores.
    full, *others = score_array(graded, [baseline, *compressed])
    scores = dict(zip(compressed, others, strict=True))
    # In the order of the scores' first axis.
    problems = graded.loc[graded["cell_id"].isin([baseline, *compressed]), "problem_id"].unique()
    # All cells of a condition have the same problems, so the baseline's record is enough.
    groups = _groups(problems, provenance.get(baseline, {}))
    controls = list(condition.loc[is_control(condition), "cell_id"])
    finished = set(condition.loc[condition["status"] == "done", "cell_id"])
    if baseline not in finished:
        finished = set()
    families = defaultdict[tuple[Plan, bool], dict[str, Floats]](dict)
    for cell_id in compressed:
        plan = plan_of(provenance.get(cell_id, {}), margin)
        families[plan, cell_id in controls][cell_id] = scores[cell_id]
    control = None
    for cell_id in controls:
        if cell_id in finished:
            # A sweep has one control or none. Of the controls of several sweeps the last one counts.
            control = scores[cell_id]
    rows = []
    for (plan, of_control), family in families.items():
        decisions = _decisions(family, full, plan, groups)
        beyond_control = dict[str, bool]()
        if control is not None and not of_control:
            # The pairs of these tests are replaced there.
            tests = dict.fromkeys(family, noninferiority.paired_test(full, full, plan.population, groups=groups))
            changed = noninferiority.beyond_control(tests, family, full, control)
            beyond_control = {cell_id: cell_id in changed for cell_id in finished}
        recommendable = set[str]()
        # The smallest safe cell is searched for among all cells of the plan, so all must be complete.
        if finished.issuperset(family) and not of_control:
            p_holds = {cell_id: decision.p_holds for cell_id, decision in decisions.items()}
            chains = _chains(condition[condition["cell_id"].isin(family)])
            recommendable = noninferiority.hold_in_search(p_holds, chains)
        for cell_id, decision in decisions.items():
            # A cell without a pair with the full cache has no difference, and gets no row.
            if math.isnan(decision.difference):
                continue
            cell = family[cell_id]
            row = {
                "cell_id": cell_id,
                "decision": decision.label if cell_id in finished else "unclear",
                "family": len(family),
                "fewest_draws": _fewest(cell, full, problems),
                "beyond_control": beyond_control.get(cell_id, math.nan),
                "recommendable": cell_id in recommendable,
            }
            rows.append(row | _where_lost(cell, full) | _row(cell, full, plan, decision, groups))
    return rows


def _groups(problems: NDArray[Any], record: Record) -> Groups:
    """Number each problem's question; a problem without one is a question by itself. None without variants.

    `problems` are ids, `record` is a cell's provenance.
    """
    if "groups" not in record:
        return None
    question_of = record["groups"]
    numbers, _ = pd.factorize(pd.Series([question_of.get(problem) or problem for problem in problems]))
    return numbers


def _decisions(family: Mapping[str, Floats], full: Floats, plan: Plan, groups: Groups) -> dict[str, Decision]:
    """Decide about the cells of one plan, by cell_id; scores are [problems, draws]."""
    if not plan.rounds:
        return noninferiority.decide_grid(family, full, margin=plan.margin, population=plan.population, groups=groups)
    # Rounds are always about these problems, so the groups of variants do not count; no sweep has rounds of variants.
    decisions = noninferiority.decide_rounds(family, full, rounds=plan.rounds, margin=plan.margin)
    # A cell that got its other draws after its decision is judged by all of them, at the level of a last round.
    all_draws = plan.rounds[-1]
    filled_up = {}
    for cell_id, decision in decisions.items():
        if decision.draws < all_draws and noninferiority.complete(family[cell_id], all_draws):
            filled_up[cell_id] = family[cell_id]
    return decisions | noninferiority.decide_grid(
        filled_up, full, family=len(family), looks=len(plan.rounds), margin=plan.margin
    )


def _chains(cells: pd.DataFrame) -> list[list[str]]:
    """Return each policy's cells, if it has at least `CHAIN` sizes, in the order of the settings' cache size."""
    kept = cells["local_window"] + cells["keep_ratio"] * (cells["budget"] - cells["local_window"])  # tokens
    sized = cells.assign(kept=kept).dropna(subset=["kept"])
    largest_first = sized.sort_values(["kept", "local_window"], ascending=False, kind="stable")
    policies = largest_first.groupby(["policy", "variant"], dropna=False, sort=False)
    return [list(rows["cell_id"]) for _, rows in policies if len(rows) >= CHAIN]


def _row(cell: Floats, full: Floats, plan: Plan, decision: Decision, groups: Groups) -> dict[str, Any]:
    """Return a cell's columns that follow from its decision. Scores are [problems, draws]."""
    paired_draws = noninferiority.paired(cell, full).shape[1]
    looks = max(1, len(plan.rounds))
    level = noninferiority.LEVEL / looks
    draws = decision.draws
    # A round's decision uses the first draws; any other decision uses all rows.
    if plan.rounds and noninferiority.complete(cell, draws) and noninferiority.complete(full, draws):
        cell = cell[:, :draws]
        full = full[:, :draws]
    # Also of a decision about these problems: the interval for problems like these, for this cell alone.
    test = noninferiority.paired_test(cell, full, "like_these", groups=groups)
    diff_low, diff_high = decision.low, decision.high
    if plan.population == "these":
        diff_low = test.lower_end(level)
        diff_high = test.upper_end(level)
    draws_to_hold, problems_to_hold = math.nan, math.nan
    if noninferiority.can_lose(full, plan.margin):
        draws_to_hold = test.draws_to_hold(plan.margin, level)
        problems_to_hold = test.problems_to_hold(plan.margin, level)
    return {
        "margin": plan.margin,
        "rounds": " ".join(map(str, plan.rounds)),
        "stopped_early": looks > 1 and decision.settled and draws < plan.rounds[-1],
        "these_low": decision.low,
        "these_high": decision.high,
        "p_holds": decision.p_holds,
        "p_loses": decision.p_loses,
        "diff_low": diff_low,
        "diff_high": diff_high,
        "draws_to_hold": draws_to_hold,
        "problems_to_hold": problems_to_hold,
        "population": plan.population if groups is None else "groups",
        "paired_draws": paired_draws,
    }


def _fewest(cell: Floats, full: Floats, problems: NDArray[Any]) -> str | None:
    """Return the problem with the fewest pairs of answers; None if all problems have equally many.

    Scores are [problems, draws], `problems` their ids. A problem without a pair is left out.
    """
    has_pair = np.isfinite(noninferiority.differences(cell, full))
    counts = has_pair.sum(1)
    # `initial` counts if no problem has a pair.
    fewest = counts[counts > 0].min(initial=counts.max())
    if fewest == counts.max():
        return None
    return str(problems[counts == fewest][0])


def _where_lost(cell: Floats, full: Floats) -> dict[str, float]:
    """Count problems that the full cache always solves and the cell never; return the difference per third.

    Scores are [problems, draws]. The thirds order problems by the full cache's Pass@1, hard ones first. Each draw is
    placed by the other draws: if its own answer placed it, easy problems would be those where the full cache was lucky.
    One draw gives no thirds.
    """
    differences = noninferiority.differences(cell, full)
    draws = differences.shape[1]
    full = full[:, :draws]
    # The mean of a problem's differences is -1 only if all are.
    lost_wholly = (problem_means(differences) == -1).sum()
    ranks = np.empty_like(full)
    for draw in range(draws):
        easiness = problem_means(np.delete(full, draw, axis=1))  # the full cache's Pass@1 of each problem
        ranks[:, draw] = pd.Series(easiness).rank(pct=True)  # above 0, hard, up to 1; missing without another draw
    # A rank of 1/3 is hard and one of 2/3 is middle, also where 3 * rank is rounded up.
    thirds = np.ceil(3 * ranks - 1e-9)
    # `mean` leaves out answers without a pair.
    means = pd.Series(differences.ravel()).groupby(thirds.ravel()).mean().reindex([1, 2, 3])
    hard, middle, easy = means
    return {"lost_wholly": int(lost_wholly), "diff_hard": hard, "diff_middle": middle, "diff_easy": easy}
