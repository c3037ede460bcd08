"""Which policies still matter where half of the layers have windows: the hybrid toy beside the plain one, paired.

    kvsweep -m experiment=hybrid && python scripts/publish.py hybrid
    python scripts/study/hybrid_study.py results/runs/hybrid --output results/published/hybrid

Loss is Pass@1 less than the same model's full cache, over the problems of all benchmarks together. The loss of one
model is paired with the other's by problem; p is that of `inference.paired_tests`, Holm over the
policies of one keep_ratio. Writes hybrid.csv and hybrid.png.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvsweep.analysis.figures import style
from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import policy_title
from kvsweep.analysis.statistics.inference import paired_tests, score_array
from kvsweep.analysis.statistics.metrics import graded_rows

# Title and colour of each model.
MODELS = {
    "toy_qwen": ("Toy-Qwen", "#56b4e9"),
    "toy_qwen_windows": ("Toy-Qwen, two of four layers with windows", "#d55e00"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    table = compare(options.run)
    table.round(4).to_csv(options.output / "hybrid.csv", index=False)
    figure(table).savefig(options.output / "hybrid.png", dpi=200)
    print(table.to_string(index=False, float_format="{:.3f}".format))


def compare(directory: Path) -> pd.DataFrame:
    """A row per keep_ratio and policy: Pass@1 of both models, tested against random_head and between the models."""
    run = load_run(directory)
    names = ["cell_id", "model", "benchmark", "policy", "keep_ratio"]
    rows = graded_rows(run).merge(run.cells[names], on="cell_id")
    rows["problem_id"] = rows["benchmark"].astype(str) + "/" + rows["problem_id"].astype(str)
    rows = rows.sort_values("problem_id")  # the same order in both models
    policies = [name for name in dict.fromkeys(run.cells["policy"].astype(str)) if name != "full"]
    tables = []
    for ratio in sorted(rows["keep_ratio"].dropna().unique()):
        scores = {}
        for model in MODELS:
            own = rows[(rows["model"] == model) & (rows["keep_ratio"].isna() | (rows["keep_ratio"] == ratio))]
            scores[model] = score_array(own.assign(cell_id=own["policy"].astype("object")), ["full", *policies])
        table = pd.DataFrame({"keep_ratio": ratio, "policy": policies})
        for model, found in scores.items():
            means = found.mean(axis=-1)  # of the draws
            table[f"{model}_full"] = means[0].mean()
            table[f"{model}"] = means[1:].mean(axis=1)
            table[f"{model}_se"] = means[1:].std(axis=1, ddof=1) / np.sqrt(means.shape[1])
            beside = paired_tests(found[1:], found[1 + policies.index("random_head")])
            table[f"{model}_above_random"], table[f"{model}_above_random_p"] = beside["difference"], beside["p_holm"]
        plain, hybrid = (scores[model][1:] - scores[model][:1] for model in MODELS)
        tests = paired_tests(hybrid, plain)
        tables.append(table.join(tests[["difference", "low", "high", "p", "p_holm"]]))
    return pd.concat(tables, ignore_index=True)


@matplotlib.rc_context(style.STYLE)
def figure(table: pd.DataFrame) -> Figure:
    """Pass@1 of each policy on both models, a panel per keep_ratio; dashed: the full cache."""
    ratios = sorted(table["keep_ratio"].unique())
    drawn = style.new_figure((7.1, 0.9 + 0.24 * table["policy"].nunique()))
    order = list(table[table["keep_ratio"] == ratios[-1]].sort_values("toy_qwen", ascending=False)["policy"])
    for panel, ratio in zip(drawn.subplots(1, len(ratios), sharey=True, squeeze=False)[0], ratios, strict=True):
        own = table[table["keep_ratio"] == ratio].set_index("policy").loc[order]
        for place, (model, (title, color)) in enumerate(MODELS.items()):
            at = np.arange(len(own)) + 0.2 * (2 * place - 1)
            bars = {"xerr": 196 * own[f"{model}_se"], "fmt": "o", "ms": 4, "lw": 1, "color": color, "label": title}
            panel.errorbar(100 * own[model], at, **bars)
            panel.axvline(100 * own[f"{model}_full"].iloc[0], ls="--", lw=0.8, color=color)
        panel.set_title(f"keep ratio {ratio:g}; dashed: the full cache")
        panel.set_xlabel("Pass@1 (%) with 95% interval")
        panel.set_xlim(0, 100)
        panel.set_yticks(range(len(order)), [policy_title(name) for name in order])
        style.tidy(panel)
    panel.invert_yaxis()
    style.legend_below(drawn)
    return drawn


if __name__ == "__main__":
    main()
