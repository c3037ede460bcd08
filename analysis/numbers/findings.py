"""All numbers and sentences of a run that its report shows."""

from dataclasses import dataclass

import pandas as pd

from analysis.load import Run
from analysis.numbers.grids import PolicyGrid, SharedSetting, find_grids, shared_settings
from analysis.numbers.metrics import cell_metrics, graded_rows
from analysis.numbers.verdict import PanelVerdict, panel_verdicts


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run with its numbers.

    Attributes:
        run: as it was read.
        metrics: `cell_metrics`.
        models: their names, in order of display.
        grids: `find_grids`.
        settings: `shared_settings`.
        verdicts: of all grids' panels.
    """

    run: Run
    metrics: pd.DataFrame
    models: list[str]
    grids: list[PolicyGrid]
    settings: list[SharedSetting]
    verdicts: list[PanelVerdict]


def analyse(run: Run) -> Findings:
    """Compute all numbers and verdicts of a run."""
    metrics = cell_metrics(run)
    grids = find_grids(metrics)
    graded = graded_rows(run)
    return Findings(
        run=run,
        metrics=metrics,
        models=list(metrics["model"].unique()),
        grids=grids,
        settings=shared_settings(metrics),
        verdicts=[verdict for grid in grids for verdict in panel_verdicts(grid, graded)],
    )
