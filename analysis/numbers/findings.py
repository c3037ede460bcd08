"""All numbers and sentences of a run that its report shows."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvsweep.analysis.load import Run, run_of_scores
from kvsweep.analysis.numbers import sentences
from kvsweep.analysis.numbers.grids import PolicyGrid, SharedSetting, find_grids, shared_settings
from kvsweep.analysis.numbers.metrics import cell_metrics, graded_rows

# A grid of several policies shares as many settings as it has points; so many are compared, and get a bar chart.
MAX_COMPARED = 6


@dataclass(frozen=True, kw_only=True)
class Findings:
    """A run with its numbers and verdicts; `pairs` are of the first `MAX_COMPARED` settings that policies share."""

    run: Run
    metrics: pd.DataFrame
    grids: list[PolicyGrid]
    verdicts: list[sentences.PanelVerdict]
    settings: list[SharedSetting] = field(default_factory=list)
    policies: list[sentences.PanelVerdict] = field(default_factory=list)
    pairs: list[sentences.PolicyPairs] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        return list(self.metrics["model"].unique())


def analyse(run: Run, margin: float | None = None) -> Findings:
    """Compute all numbers and verdicts of a run; `margin` is that of `cell_metrics`."""
    metrics, graded = cell_metrics(run, margin), graded_rows(run)
    grids, settings = find_grids(metrics), shared_settings(metrics)
    verdicts = [verdict for grid in grids for verdict in sentences.panel_verdicts(grid, graded)]
    policies = [] if verdicts else [verdict for setting in settings for verdict in sentences.policy_verdicts(setting)]
    pairs = [one for setting in settings[:MAX_COMPARED] for one in sentences.policy_pairs(setting, graded)]
    named: dict[str, Any] = {"grids": grids, "settings": settings, "policies": policies, "pairs": pairs}
    return Findings(run=run, metrics=metrics, verdicts=verdicts, **named)


def analyse_scores(path: Path) -> Findings:
    """The findings of grids of which only the scores are known, from a CSV as `read_summary` reads it."""
    table = sentences.read_summary(path)
    run = run_of_scores(table, path.with_suffix(""))
    known = table.reindex(columns=["pass_at_1", "problems", "draws", "sure", "doubt"])
    known = known.assign(pass_at_1=table["pass_at_1"] / 100, graded=known["problems"] * known["draws"])
    metrics = cell_metrics(run).drop(columns=known.columns, errors="ignore").join(known)
    return Findings(run=run, metrics=metrics, grids=find_grids(metrics), verdicts=sentences.summary_verdicts(metrics))
