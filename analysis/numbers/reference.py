"""Published numbers beside ours, where model, benchmark and setting match."""

from pathlib import Path

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.numbers.grids import PolicyGrid

# Beside this package's folder, in the repository as in an installed wheel.
REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"
GRID_FILE = "dynts_heatmaps.csv"
SCORES_FILE = "scores.csv"
MATCH = ["model", "benchmark", "policy", "keep_ratio", "local_window", "budget"]


def published_grid(grid: PolicyGrid, model: str) -> pd.DataFrame | None:
    """The published scores at the points of a model's grid, in percent; None if they have no two rows and columns."""
    table = pd.read_csv(REFERENCE / GRID_FILE)
    alike = (table["model"] == model) & (table["policy"] == grid.policy) & (table["budget"] == grid.budget)
    on_axes = table["keep_ratio"].isin(grid.ratios) & table["local_window"].isin(grid.windows)
    found = table[alike & on_axes & table["benchmark"].isin(grid.benchmarks)]
    return found if found[["keep_ratio", "local_window"]].nunique().min() >= 2 else None


def beside_published(metrics: pd.DataFrame) -> pd.DataFrame | None:
    """Set our scores beside the published ones, as texts: a row per cell that has a published one; None without any."""
    ours = metrics[metrics["pass_at_1"].notna()]
    tables = [pd.read_csv(REFERENCE / name) for name in (GRID_FILE, SCORES_FILE)]
    published = pd.concat(tables, ignore_index=True)[[*MATCH, "pass_at_1", "source", "doubt"]]
    axes = ["keep_ratio", "local_window", "budget"]
    # The full cache has none of the axes, and a missing value matches nothing.
    left, right = ours.fillna(dict.fromkeys(axes, -1.0)), published.fillna(dict.fromkeys(axes, -1.0))
    both = left.merge(right, on=MATCH, suffixes=("", "_published"))
    texts = [
        {
            "model": row.model_title,
            "benchmark": row.benchmark_title,
            "setting": format.setting(row) if row.budget >= 0 else format.policy_title(row.policy),
            "ours ± SE": format.percent_pm(row.pass_at_1, row.se),
            "95% interval": format.interval(row.ci_low, row.ci_high),
            "published": f"{row.pass_at_1_published:.1f}",
            "source": row.source,
            "doubt": "" if pd.isna(row.doubt) else row.doubt,
        }
        for row in format.rows(both)
    ]
    return pd.DataFrame(texts).set_index("model") if texts else None
