"""Is the order of the methods on a real model that of the toys? Pass@1 on three models, and KL on replayed R1 traces.

    kvsweep -m experiment=methods_smol && python scripts/publish.py methods_smol
    python scripts/study/smol_study.py --kl results/published/smol/r1_replay.csv --output results/published/smol

Reads the published cells of methods_on_top (the toys) and methods_smol (the question on top in all of them), and, with
--kl, a table of fidelity by policy and rows. Writes ranking.csv, ranking.png and correlations.csv: Spearman's
correlations with intervals over normal draws within the standard errors.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from kvsweep.analysis import notation
from kvsweep.analysis.figures import style

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
DRAWS = 2000
MODELS = {
    "smollm2_reasons": ("SmolLM2-reasons", "#d55e00"),
    "toy_qwen": ("Toy-Qwen", "#0072b2"),
    "toy_llama": ("Toy-Llama", "#56b4e9"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kl", type=Path, help="a CSV with policy, rows, kl and kl_se")
    parser.add_argument("--output", type=Path, default=Path())
    options = parser.parse_args()
    cells = pd.concat([pd.read_csv(PUBLISHED / name / "cells.csv") for name in ("methods_on_top", "methods_smol")])
    table = by_model(cells)
    if options.kl:
        fidelity = pd.read_csv(options.kl).set_index("policy")
        for rows, group in fidelity.groupby("rows"):
            # Less divergence is better, so that all columns rank alike.
            table[f"kl_{rows}"], table[f"kl_{rows}_se"] = -group["kl"], group["kl_se"]
    table.round(4).to_csv(options.output / "ranking.csv")
    correlations = correlate(table.drop(index="full"))
    correlations.round(3).to_csv(options.output / "correlations.csv", index=False)
    figure(table).savefig(options.output / "ranking.png", dpi=200)
    print(table.to_string(float_format="{:.3f}".format), correlations.to_string(index=False), sep="\n\n")


def by_model(cells: pd.DataFrame) -> pd.DataFrame:
    """Mean Pass@1 over the benchmarks of each model and its standard error, for the policies that all models have."""
    found = {}
    for model, group in cells.groupby("model"):
        groups = group.groupby("policy")
        found[model] = groups["pass_at_1"].mean()
        found[f"{model}_se"] = groups["se"].agg(lambda errors: np.sqrt((errors**2).sum()) / len(errors))
    return pd.DataFrame(found).dropna().sort_values("smollm2_reasons", ascending=False)


def correlate(table: pd.DataFrame) -> pd.DataFrame:
    """Spearman's correlation of each pair of columns, with the middle 95% of it over draws within the errors."""
    names = [name for name in table if not name.endswith("_se")]
    rng = np.random.default_rng(0)
    drawn = {n: rng.normal(table[n], table[f"{n}_se"].fillna(0), size=(DRAWS, len(table))) for n in names}
    rows = []
    for place, one in enumerate(names):
        for other in names[place + 1 :]:
            known = table[[one, other]].notna().all(axis=1).to_numpy()
            pairs = zip(drawn[one][:, known], drawn[other][:, known], strict=True)
            low, high = np.quantile([spearmanr(a, b).statistic for a, b in pairs], [0.025, 0.975])
            middle = spearmanr(table[one][known], table[other][known])
            named = {"one": one, "other": other, "policies": int(known.sum())}
            rows.append({**named, "spearman": middle.statistic, "low": low, "high": high, "p": middle.pvalue})
    return pd.DataFrame(rows)


@matplotlib.rc_context(style.STYLE)
def figure(table: pd.DataFrame) -> Figure:
    """Pass@1 of each policy on each model, with its standard error."""
    drawn = style.new_figure((7.1, 1.2 + 0.26 * len(table)))
    panel = drawn.subplots()
    for place, (model, (title, color)) in enumerate(MODELS.items()):
        at = np.arange(len(table)) + 0.22 * (place - 1)
        error = 100 * table[f"{model}_se"]
        panel.errorbar(100 * table[model], at, xerr=error, fmt="o", ms=3.5, lw=1, color=color, label=title)
    panel.set_yticks(range(len(table)), [notation.policy_title(str(name)) for name in table.index])
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.set_xlabel("Pass@1 (%) ± standard error")
    panel.legend(loc="lower right", frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    return drawn


if __name__ == "__main__":
    main()
