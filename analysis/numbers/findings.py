"""All numbers and sentences of a run that its report shows."""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from kvsweep.analysis.load import Run, run_of_scores
from kvsweep.analysis.numbers.grids import PolicyGrid, SharedSetting, find_grids, shared_settings
from kvsweep.analysis.numbers.metrics import cell_metrics, graded_rows
from kvsweep.analysis.numbers.sentences import (
    PanelVerdict,
    PolicyPairs,
    panel_verdicts,
    policy_pairs,
    policy_verdicts,
    read_summary,
    summary_verdicts,
)

# A grid of several policies shares as many settings as it has points; so many are compared, and get a bar chart.
MAX_COMPARED = 6


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run with its numbers.

    The verdicts are those of all grids' panels, `policies` those of a run without grids; `pairs` compares the policies
    with each other in the first `MAX_COMPARED` settings that they share.
    """

    run: Run
    metrics: pd.DataFrame
    models: list[str]
    grids: list[PolicyGrid]
    settings: list[SharedSetting]
    verdicts: list[PanelVerdict]
    policies: list[PanelVerdict]
    pairs: list[PolicyPairs]


def analyse(run: Run, margin: float | None = None) -> Findings:
    """Compute all numbers and verdicts of a run; `margin` is that of `cell_metrics`."""
    metrics, graded = cell_metrics(run, margin), graded_rows(run)
    grids, settings = find_grids(metrics), shared_settings(metrics)
    verdicts = [verdict for grid in grids for verdict in panel_verdicts(grid, graded)]
    models = list(metrics["model"].unique())
    policies = [] if verdicts else [verdict for setting in settings for verdict in policy_verdicts(setting)]
    pairs = [one for setting in settings[:MAX_COMPARED] for one in policy_pairs(setting, graded)]
    named = {"models": models, "grids": grids, "settings": settings, "verdicts": verdicts, "policies": policies}
    return Findings(run=run, metrics=metrics, pairs=pairs, **named)


def analyse_scores(path: Path) -> Findings:
    """The findings of grids of which only the scores are known, from a CSV as `verdict.read_summary` reads it."""
    table = read_summary(path)
    run = run_of_scores(table, path.with_suffix(""))
    known = table.reindex(columns=["pass_at_1", "problems", "draws", "sure", "doubt"]).set_axis(run.cells["cell_id"])
    known = known.assign(pass_at_1=table["pass_at_1"].to_numpy() / 100, graded=known["problems"] * known["draws"])
    metrics = cell_metrics(run).set_index("cell_id").drop(columns=known.columns, errors="ignore").join(known)
    metrics = metrics.reset_index()
    models, grids = list(metrics["model"].unique()), find_grids(metrics)
    named = {"models": models, "grids": grids, "settings": [], "pairs": [], "policies": []}
    return Findings(run=run, metrics=metrics, verdicts=summary_verdicts(metrics), **named)
