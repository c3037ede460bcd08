"""The worth of the question's place to each policy: paired differences of free, pinned and on top, as one figure.

    kvsweep -m experiment=methods && kvsweep -m experiment=methods_free
    kvsweep -m experiment=methods_pinned && kvsweep -m experiment=methods_on_top
    python scripts/study/question_study.py results/runs --output results/published/methods

A policy's cells that hold about as many rows (`PAIRS`: a keep ratio inside the budget of 192 and one with the question
on top of 128) are paired by problem over all four benchmarks. Writes question.csv and a picture per ratio, and prints
the rows that the first eviction leaves; intervals are those of `paired_tests`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure

from kvsweep.analysis.figures.style import STYLE
from kvsweep.analysis.notation import policy_title
from kvsweep.analysis.statistics.inference import paired_tests

RUNS = ("methods", "methods_free", "methods_pinned", "methods_on_top")
# (budget, keep_ratio) inside the budget, and with the question on top, that hold about the same rows.
PAIRS = {0.6: 0.3, 0.7: 0.5}
QUESTIONS = ("free", "pinned", "on_top")
PAIRED = (("pinned", "free"), ("on_top", "pinned"), ("on_top", "free"))
COLORS = ("#0072b2", "#d55e00", "#7f7f7f")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, help="the folder of the four runs")
    parser.add_argument("--output", type=Path, default=Path(), help="where the table and the picture go")
    options = parser.parse_args()
    rows = pd.DataFrame(row for name in RUNS for row in completions(options.runs / name))
    table = compare(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    table.round(4).to_csv(options.output / "question.csv", index=False)
    for ratio in table["keep_ratio"].unique():
        of_ratio = table[table["keep_ratio"] == ratio]
        with matplotlib.rc_context(STYLE):
            drawn = figure(of_ratio)
            for suffix in ("png", "svg"):
                drawn.savefig(options.output / f"question_ratio{ratio:g}.{suffix}", dpi=200)
        print(kept(of_ratio), end="\n\n")


def completions(run: Path) -> Iterator[dict[str, Any]]:
    """Each completion of the run's evicting cells: who wrote it, where the question lay, rows kept first, its grade."""
    for folder in sorted(path.parent for path in run.glob("*/DONE")):
        cell = yaml.safe_load((folder / "cell.yaml").read_text())
        policy = cell["policy"]
        if policy["name"] == "full":
            continue
        ratio = {on_top: inside for inside, on_top in PAIRS.items()}.get(policy["keep_ratio"], policy["keep_ratio"])
        key = {
            "model": cell["model"]["title"],
            "policy": policy["name"],
            "question": policy["question"],
            "keep_ratio": ratio,
        }
        grades = {row["problem_id"]: row["correct"] for row in lines(folder / "grades.jsonl")}
        for row in lines(folder / "completions.jsonl"):
            first = row["evictions"][0]["length_after"] if row["evictions"] else np.nan
            problem = f"{cell['benchmark']['name']}/{row['problem_id']}"
            yield {**key, "problem": problem, "kept_first": first, "correct": bool(grades[row["problem_id"]])}


def lines(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, path.read_text().splitlines())


def compare(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per model, policy, ratio and question: Pass@1, rows kept first, and the three paired differences."""
    rows = rows.drop_duplicates(["model", "policy", "question", "keep_ratio", "problem"])
    found = []
    for (model, policy, ratio), group in rows.groupby(["model", "policy", "keep_ratio"]):
        scores = group.pivot(index="problem", columns="question", values="correct").astype(float)
        row = {"model": model, "policy": policy, "keep_ratio": ratio, "problems": len(scores)}
        for question, of_question in group.groupby("question"):
            row[f"pass_{question}"] = of_question["correct"].mean()
            row[f"rows_{question}"] = of_question["kept_first"].mean()
        for one, other in PAIRED:
            if {one, other} <= set(scores):
                pair = scores[[one, other]].dropna()
                tested = paired_tests(pair[[one]].to_numpy().T[..., None], pair[[other]].to_numpy())
                row |= {f"{one}-{other}{part}": tested.iloc[0][name] for part, name in PARTS.items()}
        found.append(row)
    return pd.DataFrame(found)


PARTS = {"": "difference", "_low": "low", "_high": "high", "_p": "p"}


def kept(table: pd.DataFrame) -> str:
    """The rows that the first eviction leaves and Pass@1, per policy and question, as text."""
    named = [f"{what}_{question}" for what in ("rows", "pass") for question in QUESTIONS]
    shown = table.reindex(columns=["model", "policy", "keep_ratio", *named]).copy()
    passes = [name for name in named if name.startswith("pass")]
    shown[passes] = 100 * shown[passes]
    return shown.to_string(index=False, float_format="{:.1f}".format, na_rep="–")


def figure(table: pd.DataFrame) -> Figure:
    """A panel per model: per policy the three paired differences in points, with 95% intervals."""
    models = sorted(table["model"].unique(), reverse=True)
    order = list(table.groupby("policy")["pinned-free"].mean().sort_values().index)
    drawn = Figure(figsize=(7.1, 1.3 + 0.27 * len(order)), layout="constrained")
    panels = np.atleast_1d(drawn.subplots(1, len(models), sharey=True))
    for panel, model in zip(panels, models, strict=True):
        ours = table[table["model"] == model].set_index("policy").reindex(order)
        for place, ((one, other), color) in enumerate(zip(PAIRED[:2], COLORS, strict=False)):
            middle = 100 * ours[f"{one}-{other}"]
            reach = [middle - 100 * ours[f"{one}-{other}_low"], 100 * ours[f"{one}-{other}_high"] - middle]
            at = np.arange(len(order)) + 0.13 - 0.26 * place
            label = f"{one} − {other}".replace("_", " ")
            panel.errorbar(middle, at, xerr=reach, fmt="o", ms=3.5, lw=1, capsize=2, color=color, label=label)
        panel.axvline(0, color="0.4", lw=0.8)
        panel.set_title(model, fontsize=9)
        panel.set_xlabel("difference in Pass@1 (points)", fontsize=8)
        panel.tick_params(labelsize=7.5)
        panel.grid(axis="x", color="0.92", lw=0.6)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(order)), [policy_title(policy) for policy in order])
    panels[0].set_ylim(-0.6, len(order) - 0.4)
    rows = [table[f"rows_{question}"].median() for question in QUESTIONS]
    counts = f"{rows[0]:.0f} rows with a free question, {rows[1]:.0f} pinned, {rows[2]:.0f} on top"
    drawn.suptitle(
        f"What the question's place is worth: {table['problems'].max()} problems, paired\n{counts}", fontsize=9
    )
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return drawn


if __name__ == "__main__":
    main()
