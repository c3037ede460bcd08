"""Compare a run's cells with the full cache of their condition: labels, intervals, plans, and where a loss lies."""

import math
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
    """Return a cell's plan, from its provenance. `margin` (a fraction) replaces the run's own margin."""
    config = record.get("config") or {}
    rounds = tuple(record.get("rounds") or ())
    points = (config.get("report") or {}).get("margin", 100 * noninferiority.MARGIN)
    grid = str(config.get("grid")) if rounds else ""
    is_greedy = (config.get("decoding") or {}).get("temperature") == 0 or record.get("copies") is True
    is_sample = is_greedy or "groups" in record
    population: Population = "like_these" if is_sample and not rounds else "these"
    margin = points / 100 if margin is None else margin
    return Plan(rounds=rounds, margin=margin, grid=grid, population=population)


def decide_cells(
    cells: pd.DataFrame, graded: pd.DataFrame, provenance: Mapping[str, Record], margin: float | None = None
) -> pd.DataFrame:
    """Decide about each cell that shares a (problem, draw) pair with the full cache of its condition.

    The correction for several cells counts the cells of a condition with the same plan. A cell is unclear until it and
    its full cache are complete. A control is decided by itself. Returns `COLUMNS`, recommendable and beyond_control
    (docs/report.md), by cell_id.
    """
    rows: list[dict[str, Any]] = []
    recommendable = set[str]()
    beyond_control = dict[str, bool]()
    for _, group in cells.groupby("condition", sort=False):
        is_full = group["policy"] == "full"
        if not is_full.any() or is_full.all():
            continue
        baseline = group.loc[is_full, "cell_id"].iloc[0]
        names = list(group.loc[~is_full, "cell_id"])
        full, *others = score_array(graded, [baseline, *names])
        scores = dict(zip(names, others, strict=True))
        problems = graded.loc[graded["cell_id"].isin([baseline, *names]), "problem_id"].unique()
        groups = _groups(problems, provenance.get(baseline, {}))
        controls = list(group.loc[is_control(group), "cell_id"])
        unfinished = set(group.loc[group["status"] != "done", "cell_id"])
        families: dict[tuple[Plan, bool], dict[str, Floats]] = {}
        for name in names:
            plan = plan_of(provenance.get(name, {}), margin)
            families.setdefault((plan, name in controls), {})[name] = scores[name]
        for (plan, of_control), family in families.items():
            decisions = _decisions(family, full, plan, groups)
            finished = {name: decision for name, decision in decisions.items() if not {name, baseline} & unfinished}
            for name, decision in decisions.items():
                if math.isnan(decision.difference):
                    continue
                row = _row(family[name], full, plan, decision, len(family), name in finished, groups)
                row |= _where_lost(family[name], full)
                rows.append({"cell_id": name, **row, "fewest_draws": _fewest(family[name], full, problems)})
            if of_control:
                continue
            for control in controls:
                if control in unfinished:
                    continue
                changed = noninferiority.beyond_control(family, full, scores[control], plan.population, groups)
                beyond_control |= {name: name in changed for name in finished}
            if len(finished) == len(decisions):
                p_holds = {name: decision.p_holds for name, decision in finished.items()}
                chains = _chains(group[group["cell_id"].isin(list(finished))])
                recommendable |= noninferiority.hold_in_search(p_holds, chains)
    table = pd.DataFrame(rows, columns=["cell_id", *COLUMNS]).set_index("cell_id")
    table["beyond_control"] = pd.Series(beyond_control, dtype="object").reindex(table.index)
    return table.assign(recommendable=[name in recommendable for name in table.index])


def _groups(problems: NDArray[Any], record: Record) -> Groups:
    """Number each problem's question; a problem without one is a question by itself. None without variants."""
    if "groups" not in record:
        return None
    names = [record["groups"].get(problem) or problem for problem in problems]
    return pd.factorize(pd.Series(names))[0]


def _decisions(family: Mapping[str, Floats], full: Floats, plan: Plan, groups: Groups) -> dict[str, Decision]:
    if not plan.rounds:
        return noninferiority.decide_grid(family, full, margin=plan.margin, population=plan.population, groups=groups)
    decisions = noninferiority.decide_rounds(family, full, rounds=plan.rounds, margin=plan.margin)
    # A cell that got its other draws after its decision is judged by all of them, at the level of a last round.
    last = plan.rounds[-1]
    later = {}
    for name, decision in decisions.items():
        if decision.draws < last and noninferiority.complete(family[name], last):
            later[name] = family[name]
    return decisions | noninferiority.decide_grid(
        later, full, family=len(family), looks=len(plan.rounds), margin=plan.margin
    )


def _chains(cells: pd.DataFrame) -> list[list[str]]:
    """Return each policy's cells, if it has at least `CHAIN` sizes, in the order of the settings' cache size."""
    room = cells["local_window"] + cells["keep_ratio"] * (cells["budget"] - cells["local_window"])
    order = cells.assign(room=room).sort_values(["room", "local_window"], ascending=False, kind="stable")
    groups = order.dropna(subset=["room"]).groupby(["policy", "variant"], dropna=False, sort=False)
    return [list(rows["cell_id"]) for _, rows in groups if len(rows) >= CHAIN]


def _row(
    cell: Floats, full: Floats, plan: Plan, decision: Decision, family: int, finished: bool, groups: Groups
) -> dict[str, Any]:
    """Return a cell's columns that follow from its decision."""
    pairs_of_draws = noninferiority.paired(cell, full).shape[1]
    looks = max(1, len(plan.rounds))
    level = noninferiority.LEVEL / looks
    draws = decision.draws
    # A round's decision uses the first draws; any other decision uses all rows.
    if plan.rounds and noninferiority.complete(cell, draws) and noninferiority.complete(full, draws):
        cell, full = cell[:, :draws], full[:, :draws]
    elsewhere = decision  # widened for the number of cells
    if plan.population == "these":
        elsewhere = noninferiority.decide(cell, full, margin=plan.margin, level=level, population="like_these")
    draws_to_hold, problems_to_hold = math.nan, math.nan
    if noninferiority.can_lose(full, plan.margin):
        draws_to_hold = noninferiority.draws_to_hold(cell, full, margin=plan.margin, level=level)
        problems_to_hold = noninferiority.problems_to_hold(cell, full, margin=plan.margin, level=level, groups=groups)
    return {
        "decision": decision.label if finished else "unclear",
        "margin": plan.margin,
        "family": family,
        "rounds": " ".join(map(str, plan.rounds)),
        "stopped_early": looks > 1 and decision.settled and draws < plan.rounds[-1],
        "these_low": decision.low,
        "these_high": decision.high,
        "p_holds": decision.p_holds,
        "p_loses": decision.p_loses,
        "diff_low": elsewhere.low,
        "diff_high": elsewhere.high,
        "draws_to_hold": draws_to_hold,
        "problems_to_hold": problems_to_hold,
        "population": plan.population if groups is None else "groups",
        "paired_draws": pairs_of_draws,
    }


def _fewest(cell: Floats, full: Floats, problems: NDArray[Any]) -> str | None:
    """Return the problem with the fewest pairs of answers; None if all problems have equally many."""
    draws = min(cell.shape[1], full.shape[1])
    pairs = (~np.isnan(cell[:, :draws] - full[:, :draws])).sum(1)
    counts = pairs[pairs > 0]
    if len(set(counts)) < 2:
        return None
    return str(problems[np.flatnonzero(pairs == counts.min())[0]])


def _where_lost(cell: Floats, full: Floats) -> dict[str, float]:
    """Count problems that the full cache always solves and the cell never; return the difference per third.

    The thirds order problems by the full cache's Pass@1, hard ones first. Each draw is placed by the other draws: if
    its own answer placed it, easy problems would be those where the full cache was lucky. One draw gives no thirds.
    """
    draws = min(cell.shape[1], full.shape[1])
    cell, full = cell[:, :draws], full[:, :draws]
    missing = np.isnan(cell) | np.isnan(full)
    has_pair = ~missing.all(1)
    lost = has_pair & ((full == 1) | missing).all(1) & ((cell == 0) | missing).all(1)
    thirds: list[list[float]] = [[], [], []]
    for draw in range(draws if draws > 1 else 0):
        other_draws = problem_means(np.delete(full, draw, axis=1)[None])[0]
        ranks = pd.Series(other_draws).rank(pct=True)
        for rank, difference in zip(ranks, cell[:, draw] - full[:, draw], strict=True):
            if not math.isnan(rank + difference):
                third = math.ceil(3 * rank - 1e-9) - 1
                thirds[min(2, third)].append(difference)
    columns: dict[str, float] = {"lost_wholly": int(lost.sum())}
    for name, third_differences in zip(("diff_hard", "diff_middle", "diff_easy"), thirds, strict=True):
        columns[name] = float(np.mean(third_differences)) if third_differences else math.nan
    return columns
