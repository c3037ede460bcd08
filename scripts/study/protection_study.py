"""What of each policy's score is its protection: paired differences of the question pinned and of four sinks.

    kvsweep benchmark=toy_chain policy=snapkv policy.budget=192 policy.keep_ratio=0.5 run_name=protection \\
        'grid.policy=[full,dynts,snapkv,rkv,h2o,keydiff,knorm,caote,random_head,window]' \\
        'grid.question=[free,pinned]' 'grid.sinks=[0,4]'
    python scripts/study/protection_study.py results/runs/protection

All cells of such a run hold the same number of rows. A policy's four cells (question free or pinned, no sinks or four)
are paired by problem and draw. Prints Pass@1 of each and the differences to the cell that protects nothing, in points,
with intervals and p of `paired_tests`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvsweep.analysis.format import markdown, policy_title
from kvsweep.analysis.numbers.inference import paired_tests

NAMES = {("free", 0): "nothing", ("free", 4): "sinks", ("pinned", 0): "question", ("pinned", 4): "both"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of the run")
    rows = pd.DataFrame(graded(parser.parse_args().run))
    heads = ["policy", "completions", *NAMES.values(), *(f"{name} - nothing" for name in [*NAMES.values()][1:])]
    print(markdown([heads, *(line(name, group) for name, group in rows.groupby(["model", "policy"]))]))


def graded(run: Path) -> Iterator[dict[str, Any]]:
    """Each grade of the run's evicting cells, with the model, the policy and what was protected."""
    for path in sorted(run.glob("*/cell.yaml")):
        cell = yaml.safe_load(path.read_text())
        protected = NAMES.get((cell["policy"].get("question"), cell["policy"].get("sinks")))
        if protected is None:
            continue
        key = {"model": cell["model"]["title"], "policy": cell["policy"]["name"], "protected": protected}
        for text in (path.parent / "grades.jsonl").read_text().splitlines():
            grade = json.loads(text)
            pair = f"{cell['benchmark']['name']}/{grade['problem_id']}/{grade['draw']}"
            yield {**key, "pair": pair, "correct": float(bool(grade["correct"]))}


def line(name: tuple[str, str], group: pd.DataFrame) -> list[str]:
    """A policy's line of the table."""
    scores = group.drop_duplicates(["protected", "pair"], keep="last").pivot(
        index="pair", columns="protected", values="correct"
    )
    scores = scores.reindex(columns=list(NAMES.values())).dropna()
    cells = [f"{name[0]} {policy_title(name[1])}", str(len(scores)), *(f"{100 * mean:.1f}" for mean in scores.mean())]
    for protected in [*NAMES.values()][1:]:
        tested = paired_tests(scores[[protected]].to_numpy().T[..., None], scores[["nothing"]].to_numpy()).iloc[0]
        difference, low, high = (100 * tested[part] for part in ("difference", "low", "high"))
        cells.append(f"{difference:+.1f} [{low:.1f}, {high:.1f}], p {tested['p']:.2g}")
    return cells


if __name__ == "__main__":
    main()
