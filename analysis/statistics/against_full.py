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
from kvsweep.analysis.statistics.noninferiority import Decision, Floats, Population

COLUMNS = ["decision", "margin", "family", "rounds", "stopped_early", "these_low", "these_high", "p_holds", "p_loses"]
COLUMNS += ["diff_low", "diff_high", "draws_to_hold", "problems_to_hold", "population", "paired_draws", "fewest_draws"]
COLUMNS += ["lost_wholly", "diff_hard", "diff_middle", "diff_easy"]
# At least this many sizes of a policy form a chain, searched from the largest cache for the smallest safe one.
CHAIN = 3
Record = Mapping[str, Any]


class Plan(NamedTuple):
    """What decides about a cell besides its scores: rounds and grid of a sequential sweep, margin, population.

    Greedy decoding gives every draw the same answer, so its problems are the sample. The same holds for a server that
    ignores the seed; its record then has `copies` (analysis/load.py).
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
    population: Population = "like_these" if is_greedy and not rounds else "these"
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
    rows: dict[str, list[Any]] = {}
    recommendable, beyond = set[str](), dict[str, bool]()
    for _, group in cells.groupby("condition", sort=False):
        is_full = group["policy"] == "full"
        names = [*group.loc[is_full, "cell_id"].head(1), *group.loc[~is_full, "cell_id"]]
        if not is_full.any() or len(names) == 1:
            continue
        full, *others = score_array(graded, names)
        problems = graded.loc[graded["cell_id"].isin(names), "problem_id"].unique()
        plans = {name: plan_of(provenance.get(name, {}), margin) for name in names[1:]}
        scores = dict(zip(plans, others, strict=True))
        controls = set(group.loc[is_control(group), "cell_id"])
        families = {name: (plan, name in controls) for name, plan in plans.items()}
        unfinished = set(group.loc[group["status"] != "done", "cell_id"])
        for plan, of_control in dict.fromkeys(families.values()):
            family = {name: scores[name] for name in scores if families[name] == (plan, of_control)}
            found = _decisions(family, full, plan)
            ready = {name: one for name, one in found.items() if not {name, names[0]} & unfinished}
            for name, one in found.items():
                if not math.isnan(one.difference):
                    row = _row(family[name], full, plan, one, len(family), name in ready)
                    rows[name] = [*row, _fewest(family[name], full, problems), *_where_lost(family[name], full)]
            for control in controls if not of_control else ():
                surely = noninferiority.beyond_control(family, full, scores[control], population=plan.population)
                beyond |= {name: name in surely for name in ready if control not in unfinished}
            if len(ready) == len(found) and not of_control:
                chains = _chains(group[group["cell_id"].isin(list(ready))])
                recommendable |= noninferiority.hold_in_search(
                    {name: one.p_holds for name, one in ready.items()}, chains
                )
    table = pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS).rename_axis("cell_id")
    table["beyond_control"] = pd.Series(beyond, dtype="object").reindex(table.index)
    return table.assign(recommendable=[name in recommendable for name in table.index])


def _decisions(family: Mapping[str, Floats], full: Floats, plan: Plan) -> dict[str, Decision]:
    if plan.rounds:
        found = noninferiority.decide_rounds(family, full, rounds=plan.rounds, margin=plan.margin)
        # A cell that got its other draws after its decision is judged by all of them, at the level of a last round.
        last = plan.rounds[-1]
        later = [
            name for name, one in found.items() if one.draws < last and noninferiority.complete(family[name], last)
        ]
        return found | noninferiority.decide_grid(
            {name: family[name] for name in later}, full, family=len(family), looks=len(plan.rounds), margin=plan.margin
        )
    return noninferiority.decide_grid(family, full, margin=plan.margin, population=plan.population)


def _chains(cells: pd.DataFrame) -> list[list[str]]:
    """Return each policy's cells, if it has at least `CHAIN` sizes, in the order of the settings' cache size."""
    room = cells["local_window"] + cells["keep_ratio"] * (cells["budget"] - cells["local_window"])
    order = cells.assign(room=room).sort_values(["room", "local_window"], ascending=False, kind="stable")
    groups = order.dropna(subset=["room"]).groupby(["policy", "variant"], dropna=False, sort=False)
    return [list(rows["cell_id"]) for _, rows in groups if len(rows) >= CHAIN]


def _row(cell: Floats, full: Floats, plan: Plan, decision: Decision, family: int, finished: bool) -> list[Any]:
    looks = max(1, len(plan.rounds))
    level = noninferiority.LEVEL / looks
    draws = decision.draws
    # A round's decision uses the first draws; any other decision uses all rows.
    by_round = plan.rounds and all(noninferiority.complete(one, draws) for one in (cell, full))
    seen = (cell[:, :draws], full[:, :draws]) if by_round else (cell, full)
    elsewhere = decision  # widened for the number of cells
    if plan.population == "these":
        elsewhere = noninferiority.decide(*seen, margin=plan.margin, level=level, population="like_these")
    planners = noninferiority.draws_to_hold, noninferiority.problems_to_hold
    losable = noninferiority.can_lose(seen[1], plan.margin)
    needed = [plan_for(*seen, margin=plan.margin, level=level) if losable else math.nan for plan_for in planners]
    label, rounds = decision.label if finished else "unclear", " ".join(map(str, plan.rounds))
    stopped_early = looks > 1 and decision.settled and decision.draws < plan.rounds[-1]
    tests = [decision.low, decision.high, decision.p_holds, decision.p_loses, elsewhere.low, elsewhere.high]
    row = [label, plan.margin, family, rounds, stopped_early, *tests, *needed, plan.population]
    return [*row, noninferiority.paired(cell, full).shape[1]]


def _fewest(cell: Floats, full: Floats, problems: NDArray[Any]) -> str | None:
    """Return the problem with the fewest pairs of answers; None if all problems have equally many."""
    draws = min(cell.shape[1], full.shape[1])
    pairs = (~np.isnan(cell[:, :draws] - full[:, :draws])).sum(1)
    counts = pairs[pairs > 0]
    return None if len(set(counts)) < 2 else str(problems[int(np.flatnonzero(pairs == counts.min())[0])])


def _where_lost(cell: Floats, full: Floats) -> list[float]:
    """Count problems that the full cache always solves and the cell never; return the difference per third.

    The thirds order problems by the full cache's Pass@1, hard ones first. Each draw is placed by the other draws: if
    its own answer placed it, easy problems would be those where the full cache was lucky. One draw gives no thirds.
    """
    draws = min(cell.shape[1], full.shape[1])
    cell, full = cell[:, :draws], full[:, :draws]
    both = ~np.isnan(cell) & ~np.isnan(full)
    asked = both.any(1)
    lost = asked & ((full == 1) | ~both).all(1) & ((cell == 0) | ~both).all(1)
    thirds: list[list[float]] = [[], [], []]
    for draw in range(draws if draws > 1 else 0):
        others = problem_means(np.delete(full, draw, axis=1)[None])[0]
        for rank, difference in zip(pd.Series(others).rank(pct=True), cell[:, draw] - full[:, draw], strict=True):
            if not math.isnan(rank + difference):
                thirds[min(2, math.ceil(3 * rank - 1e-9) - 1)].append(difference)
    return [int(lost.sum()), *(float(np.mean(part)) if part else math.nan for part in thirds)]
