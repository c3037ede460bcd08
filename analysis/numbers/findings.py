"""All numbers and sentences of a run that its report shows."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvsweep.analysis.load import Run, run_of_scores
from kvsweep.analysis.numbers.grids import PolicyGrid, SharedSetting, find_grids, shared_settings
from kvsweep.analysis.numbers.metrics import cell_metrics, graded_rows
from kvsweep.analysis.numbers.sentences import (
    PanelVerdict,
    answers,
    panel_verdicts,
    policy_verdicts,
    read_summary,
    summary_verdicts,
)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run with its numbers.

    `answers` has a sentence per model. The verdicts are those of all grids' panels, `policies` those of a run without
    grids.
    """

    run: Run
    metrics: pd.DataFrame
    models: list[str]
    grids: list[PolicyGrid]
    settings: list[SharedSetting]
    answers: list[tuple[str, str]]
    verdicts: list[PanelVerdict]
    policies: list[PanelVerdict]


def analyse(run: Run, margin: float | None = None) -> Findings:
    """Compute all numbers and verdicts of a run; `margin` is that of `cell_metrics`."""
    metrics, graded = cell_metrics(run, margin), graded_rows(run)
    grids, settings = find_grids(metrics), shared_settings(metrics)
    verdicts = [verdict for grid in grids for verdict in panel_verdicts(grid, graded)]
    models = list(metrics["model"].unique())
    policies = [] if verdicts else [verdict for setting in settings for verdict in policy_verdicts(setting, graded)]
    named = {"models": models, "grids": grids, "settings": settings, "verdicts": verdicts, "policies": policies}
    return Findings(run=run, metrics=metrics, answers=answers(metrics), **named)


def analyse_scores(path: Path) -> Findings:
    """The findings of grids of which only the scores are known, from a CSV as `verdict.read_summary` reads it."""
    table = read_summary(path)
    run = run_of_scores(table, path.with_suffix(""))
    known = table.reindex(columns=["pass_at_1", "problems", "draws", "sure", "doubt"]).set_axis(run.cells["cell_id"])
    known = known.assign(pass_at_1=table["pass_at_1"].to_numpy() / 100, graded=known["problems"] * known["draws"])
    metrics = cell_metrics(run).set_index("cell_id").drop(columns=known.columns, errors="ignore").join(known)
    metrics = metrics.reset_index()
    models, grids = list(metrics["model"].unique()), find_grids(metrics)
    named = {"models": models, "grids": grids, "settings": [], "answers": [], "policies": []}
    return Findings(run=run, metrics=metrics, verdicts=summary_verdicts(metrics), **named)
