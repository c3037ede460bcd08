"""The clickable heatmaps of the page as data: the numbers of every cell, and where each cell lies in which heatmap."""

import math
from typing import Any

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.load import in_order
from kvsweep.analysis.numbers.findings import Findings
from kvsweep.analysis.numbers.grids import PolicyGrid
from kvsweep.analysis.numbers.metrics import SETTING, model_title

# The columns of metrics that the page shows, beside the names and those of several draws.
TEXTS = ["model_title", "benchmark_title", "policy", "variant", "status"]
NUMBERS = ["keep_ratio", "local_window", "budget", "draws", "graded", "completions", "expected"]
NUMBERS += ["pass_at_1", "se", "ci_low", "ci_high", "maj_at_n", "diff_to_full", "diff_se", "these_low", "these_high"]
NUMBERS += ["p_holds", "p_loses", "diff_low", "diff_high", "draws_to_hold", "problems_to_hold", "regressions", "gains"]
NUMBERS += ["diff_evicted", "diff_untouched", "lost_wholly", "diff_hard", "diff_middle", "diff_easy", "mean_tokens"]
NUMBERS += ["tokens_to_full", "tokens_per_answer", "tokens_per_solved", "mean_evictions", "evicted", "kept_memory"]
NUMBERS += ["kept_memory_own", "kept_rows", "kept_rows_own", "peak_rows_together", "kv_bytes_mean", "truncated"]
NUMBERS += ["looping_texts", "truncated_texts", "no_answer", "grader_timeout"]


def cell_data(metrics: pd.DataFrame) -> list[dict[str, Any]]:
    """The cells in order, each with its names, its numbers (without those that are unknown) and its marks."""
    several = [name for name in metrics if str(name).startswith("pass_at_")]
    numbers = metrics[[name for name in (*NUMBERS, *several) if name in metrics]].astype("float64")
    names = [str(name) for name in numbers]
    return [
        {
            **{name: getattr(row, name) for name in ("cell_id", *TEXTS)},
            **{name: round(value, 6) for name, value in zip(names, values, strict=True) if not math.isnan(value)},
            "setting": format.setting(row),
            "policy_title": format.policy_title(row.policy, row.variant),
            "recommendable": row.recommendable == True,  # noqa: E712 - NaN where nothing is compared
            "decision": row.decision if isinstance(row.decision, str) else "",
            "partial": bool(row.status != "done" or row.ungraded > 0),
            "marks": format.state_marks(row) + format.UNSURE * (getattr(row, "sure", "") == "no"),
        }
        for row, values in zip(format.rows(metrics), numbers.to_numpy().tolist(), strict=True)
    ]


def heatmaps(found: Findings) -> list[dict[str, Any]]:
    """Per model and grid a title, the axes, and a panel per benchmark with the ids of its cells, row by row."""
    rows = []
    for grid in found.grids:
        for model, cells in grid.cells.groupby("model", sort=False):
            panels = [_panel(grid, part, found.metrics) for _, part in cells.groupby("condition", sort=False)]
            axes = {"ratios": [*map(format.number, grid.ratios)], "windows": [*map(format.number, grid.windows)]}
            rows.append({"title": f"{model_title(found.metrics, str(model))} | {grid.title}", **axes, "panels": panels})
    return rows


def _panel(grid: PolicyGrid, cells: pd.DataFrame, metrics: pd.DataFrame) -> dict[str, Any]:
    ids = cells.drop_duplicates(["local_window", "keep_ratio"]).set_index(["local_window", "keep_ratio"])["cell_id"]
    full = metrics[(metrics["condition"] == cells["condition"].iloc[0]) & (metrics["policy"] == "full")]
    rows = [[ids.get((window, ratio)) for ratio in grid.ratios] for window in grid.windows]
    return {"title": cells["benchmark_title"].iloc[0], "full": next(iter(full["cell_id"]), None), "rows": rows}


def policy_tables(found: Findings) -> list[dict[str, Any]]:
    """Per model a heatmap of the settings that lie in no grid, the full cache's first: settings by benchmarks."""
    in_grids = {cell_id for grid in found.grids for cell_id in grid.cells["cell_id"]}
    apart = found.metrics[~found.metrics["cell_id"].isin(in_grids)].drop_duplicates([*SETTING, "benchmark"])
    tables = []
    for model, cells in apart.groupby("model", sort=False):
        if found.grids and (cells["policy"] == "full").all():
            continue
        titles = dict(cells[["benchmark", "benchmark_title"]].to_numpy())
        rows: dict[str, dict[str, str]] = {}
        for row in in_order(cells, by=SETTING).itertuples():
            rows.setdefault(format.setting(row), {})[str(row.benchmark)] = str(row.cell_id)
        lines = [[name, [ids.get(benchmark) for benchmark in titles]] for name, ids in rows.items()]
        tables.append({"title": model_title(found.metrics, str(model)), "heads": [*titles.values()], "rows": lines})
    return tables
