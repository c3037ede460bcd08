"""Each cell of a run beside the full cache: if the cell holds, and else what would show that it does."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pandas as pd

from kvsweep.analysis.numbers import decisions
from kvsweep.analysis.numbers.decisions import Decision, Floats
from kvsweep.analysis.numbers.inference import score_array

COLUMNS = ["decision", "margin", "rounds", "confidence", "these_low", "these_high", "diff_low", "diff_high"]
COLUMNS += ["draws_to_hold", "problems_to_hold"]
Record = Mapping[str, Any]


class Plan(NamedTuple):
    """What decides about a cell beside the scores: the rounds of a sequential sweep, the margin, the sweep's grid."""

    rounds: tuple[int, ...]
    margin: float
    grid: str

    @property
    def level(self) -> float:
        """The error level of each look at the data."""
        return decisions.level_of_round(max(1, len(self.rounds)))


def plan_of(record: Record, margin: float | None = None) -> Plan:
    """The plan of a cell, from its provenance. A `margin` (a fraction) takes the place of the run's own."""
    config = record.get("config") or {}
    rounds = tuple(record.get("rounds") or ())
    points = (config.get("report") or {}).get("margin", 100 * decisions.MARGIN)
    grid = str(config.get("grid")) if rounds else ""
    return Plan(rounds=rounds, margin=points / 100 if margin is None else margin, grid=grid)


def decide_cells(
    cells: pd.DataFrame, graded: pd.DataFrame, provenance: Mapping[str, Record], margin: float | None = None
) -> pd.DataFrame:
    """Decide about each cell that shares a (problem, draw) pair with the full cache of its condition.

    The correction for the number of cells runs over the cells of a condition that have the same plan. A cell is open
    as long as it or its full cache is unfinished.

    Args:
        cells, graded, provenance: as in `Run`; of the completions those that have a grade.
        margin: see `plan_of`.

    Returns:
        `COLUMNS` by cell_id, as docs/report.md describes them.
    """
    rows: dict[str, list[Any]] = {}
    for _, group in cells.groupby("condition", sort=False):
        is_full = group["policy"] == "full"
        names = [*group.loc[is_full, "cell_id"].head(1), *group.loc[~is_full, "cell_id"]]
        if not is_full.any() or len(names) == 1:
            continue
        full, *others = score_array(graded, names)
        plans = {name: plan_of(provenance.get(name, {}), margin) for name in names[1:]}
        scores = dict(zip(plans, others, strict=True))
        unfinished = set(group.loc[group["status"] != "done", "cell_id"])
        for plan in dict.fromkeys(plans.values()):
            family = {name: scores[name] for name in scores if plans[name] == plan}
            for name, decision in _decisions(family, full, plan).items():
                if not math.isnan(decision.difference):
                    rows[name] = _row(family[name], full, plan, decision, finished=not {name, names[0]} & unfinished)
    return pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS).rename_axis("cell_id")


def _decisions(family: Mapping[str, Floats], full: Floats, plan: Plan) -> dict[str, Decision]:
    if plan.rounds:
        return decisions.decide_rounds(family, full, rounds=plan.rounds, margin=plan.margin)
    return decisions.decide_grid(family, full, margin=plan.margin)


def _row(cell: Floats, full: Floats, plan: Plan, decision: Decision, *, finished: bool) -> list[Any]:
    label = decision.label if finished else "open"
    elsewhere = decisions.decide(cell, full, margin=plan.margin, population="like_these")
    planners = decisions.draws_to_hold, decisions.problems_to_hold
    needed = [plan_for(cell, full, margin=plan.margin, level=plan.level) for plan_for in planners]
    interval = decision.low, decision.high, elsewhere.low, elsewhere.high
    rounds = " ".join(map(str, plan.rounds))
    return [label, plan.margin, rounds, 1 - 2 * plan.level, *interval, *needed]
