"""The clickable heatmaps at the top of the page: a row of panels per model, the full cache's score beside each."""

from typing import Any

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.load import in_order
from kvsweep.analysis.numbers.findings import Findings
from kvsweep.analysis.numbers.grids import PolicyGrid
from kvsweep.analysis.numbers.metrics import SETTING, model_title
from kvsweep.analysis.pictures.heatmap import HOLDS, LOSES, css_colors

MARKS = {"holds": HOLDS, "loses": LOSES}


def heat_rows(found: Findings) -> list[dict[str, Any]]:
    """Per model and grid a title and the panels, one per benchmark."""
    rows = []
    for grid in found.grids:
        for model, cells in grid.cells.groupby("model", sort=False):
            panels = [_panel(grid, part, found.metrics) for _, part in cells.groupby("condition", sort=False)]
            rows.append({"title": f"{model_title(found.metrics, str(model))} | {grid.title}", "panels": panels})
    return rows


def _panel(grid: PolicyGrid, cells: pd.DataFrame, metrics: pd.DataFrame) -> dict[str, Any]:
    """One heatmap of buttons: rows from the largest window down, each cell with its id, text and colours."""
    cells = cells.drop_duplicates(["keep_ratio", "local_window"])
    low, high = cells["pass_at_1"].min(), cells["pass_at_1"].max()
    buttons = {(row.local_window, row.keep_ratio): button(row, low, high) for row in cells.itertuples()}
    rows = [(format.number(window), [buttons.get((window, ratio)) for ratio in grid.ratios]) for window in grid.windows]
    condition = cells["condition"].iloc[0]
    full: Any = metrics[(metrics["condition"] == condition) & (metrics["policy"] == "full")].head(1).itertuples()
    return {
        "title": cells["benchmark_title"].iloc[0],
        "full": next((button(row, low, high) for row in full), None),
        "ratios": [format.number(ratio) for ratio in grid.ratios],
        "rows": rows,
    }


def policy_tables(found: Findings) -> list[dict[str, Any]]:
    """Per model a heatmap of the settings that lie in no grid, the full cache's first: settings by benchmarks."""
    in_grids = {cell_id for grid in found.grids for cell_id in grid.cells["cell_id"]}
    apart = found.metrics[~found.metrics["cell_id"].isin(in_grids)]
    tables = []
    for model, cells in apart.groupby("model", sort=False):
        cells = cells.drop_duplicates([*SETTING, "benchmark"])
        if found.grids and (cells["policy"] == "full").all():
            continue
        ranges = {str(name): (rows.min(), rows.max()) for name, rows in cells.groupby("benchmark")["pass_at_1"]}
        titles = dict(cells[["benchmark", "benchmark_title"]].to_numpy())
        rows_in_order: Any = in_order(cells, by=SETTING).itertuples()
        settings: dict[str, dict[str, Any]] = {}
        for row in rows_in_order:
            settings.setdefault(format.setting(row), {})[row.benchmark] = button(row, *ranges[row.benchmark])
        rows = [(name, [buttons.get(benchmark) for benchmark in titles]) for name, buttons in settings.items()]
        tables.append({"title": model_title(found.metrics, str(model)), "heads": list(titles.values()), "rows": rows})
    return tables


def button(row: Any, low: float, high: float) -> dict[str, Any]:
    """A cell of a heatmap: its score, error and marks as texts, its colours between `low` and `high`."""
    known = row.graded > 0
    share = (row.pass_at_1 - low) / (high - low) if known and high > low else 0.5
    background, ink = css_colors(min(max(share, 0.0), 1.0)) if known else ("#fff", "#1d2329")
    score = format.percent(row.pass_at_1) if known else format.UNGRADED if row.completions else format.MISSING
    partial = row.status != "done" or row.ungraded > 0
    untouched = format.untouched(row)
    mark = MARKS.get(row.decision, "") if isinstance(row.decision, str) else ""
    error = "" if not known or format.missing(row.se) else f"±{format.percent(row.se)}"
    spoken = [
        f"{row.model_title} | {row.benchmark_title}: {format.setting(row)}",
        f"Pass@1 {format.percent_pm(row.pass_at_1, row.se)}" if known else "no grade yet",
        f"{row.graded} of {row.completions} completions graded" if partial else "",
        row.decision if isinstance(row.decision, str) and not partial else "",
        "nothing was evicted, so this is the full cache" if untouched else "",
    ]
    return {
        "cell": row.cell_id,
        "score": score + format.UNTOUCHED * untouched + (format.UNFINISHED if known and row.status != "done" else ""),
        "mark": mark,
        "error": f"{error} ({row.graded})" if known and partial else error,
        "label": ", ".join(filter(None, spoken)),
        "background": background,
        "ink": ink,
    }
