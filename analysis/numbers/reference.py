"""Published numbers, set beside ours where model, benchmark and setting match."""

from pathlib import Path
from typing import Any

import pandas as pd

from analysis import words as formats

GRID_FILE = "dynts_heatmaps.csv"
SCORES_FILE = "scores.csv"
MATCH = ["model", "benchmark", "policy", "keep_ratio", "local_window", "budget"]


def reference_folder() -> Path:
    """results/reference of a checkout, or the copy that an installed package carries."""
    inside = Path(__file__).parents[1] / "reference"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "results" / "reference"


def beside_published(metrics: pd.DataFrame) -> list[dict[str, str]]:
    """Texts, a row per cell that has a published counterpart: ours, theirs, source and doubts.

    Models with random weights have none.
    """
    ours = metrics[metrics["pass_at_1"].notna()]
    tables = [pd.read_csv(reference_folder() / name) for name in (GRID_FILE, SCORES_FILE)]
    published = pd.concat(tables, ignore_index=True)[[*MATCH, "pass_at_1", "source", "doubt"]]
    axes = ["keep_ratio", "local_window", "budget"]
    # The full cache has none of the axes; -1 lets them meet.
    left, right = ours.fillna(dict.fromkeys(axes, -1.0)), published.fillna(dict.fromkeys(axes, -1.0))
    rows: Any = left.merge(right, on=MATCH, suffixes=("", "_published"))
    return [
        {
            "model": row.model_title,
            "benchmark": row.benchmark_title,
            "setting": formats.setting(row) if row.budget >= 0 else row.policy,
            "ours ± SE": formats.percent_pm(row.pass_at_1, row.se),
            "95% interval": f"{formats.percent(row.ci_low)} to {formats.percent(row.ci_high)}",
            "published": f"{row.pass_at_1_published:.1f}",
            "source": row.source,
            "doubt": "" if pd.isna(row.doubt) else row.doubt,
        }
        for row in rows.itertuples()
    ]
