"""The demo in pandas, in cells for Jupyter or an editor: `python docs/demo_in_pandas.py [results/runs/demo]`."""

# %% A run as data frames
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics

given = Path(sys.argv[-1])  # the script itself, or a notebook's own file, where no run is given
directory = given if given.is_dir() else Path("results/runs/demo")
run = load_run(directory)
cells = cell_metrics(run)  # one row per cell: settings, Pass@1, intervals, memory; the columns of cells.csv
texts = run.completions  # one row per completion: cell_id, problem_id, draw, correct, num_tokens, evictions
print(f"{len(cells)} cells, {len(texts):,} completions, {texts['evictions'].sum():,} evictions")

# %% One model and benchmark: the full cache and the compressed settings
panel = cells[cells["condition"] == cells["condition"].iloc[0]]
full = panel[panel["policy"] == "full"].iloc[0]
compressed = panel[panel["policy"] != "full"].sort_values("pass_at_1", ascending=False)
best = compressed.iloc[0]
shown = ["policy", "keep_ratio", "local_window", "pass_at_1", "se", "kept_rows", "decision"]
print(f"\n{full['model_title']} | {full['benchmark_title']}, full cache {full['pass_at_1']:.3f} ± {full['se']:.3f}")
print(compressed[shown].head().to_string(index=False))

# %% A paired test: the best setting against the full cache, problem by problem
scores = texts.pivot_table(index="problem_id", columns="cell_id", values="correct", observed=True)  # means over draws
differences = (scores[best["cell_id"]] - scores[full["cell_id"]]).dropna()
test = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=9999, rng=0)
low, high = stats.bootstrap((differences,), np.mean, n_resamples=9999, rng=0).confidence_interval
print(
    f"\nbest minus full: {100 * differences.mean():+.1f} points, 95% {100 * low:+.1f} to {100 * high:+.1f}, "
    f"p = {test.pvalue:.4f} (the report's, for {best['family']:.0f} settings: {best['p_loses']:.4f})"
)

# %% A figure of one's own: does a text that is evicted more often fail more often? (It may also have a harder problem.)
rows = texts[texts["cell_id"].isin(compressed["cell_id"])]
by_count = rows.groupby("evictions")["correct"].agg(["mean", "sem", "size"])
by_count = by_count[by_count["size"] >= 20]
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.errorbar(by_count.index, 100 * by_count["mean"], 100 * by_count["sem"], marker="o", capsize=3)
axes.axhline(100 * full["pass_at_1"], color="0.5", linestyle="--", label="full cache")
axes.set(xlabel="evictions of a text", ylabel="correct (%)", title=f"{full['model_title']} | {full['benchmark_title']}")
axes.set_xticks(by_count.index)
axes.legend()
picture = directory / "report" / "by_evictions.png"
picture.parent.mkdir(exist_ok=True)
figure.savefig(picture, dpi=200)
print(f"\n{by_count.to_string()}\n\n{picture}")
