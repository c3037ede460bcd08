"""The draws and tokens that `until=decided` saves on a finished run, and whether its decisions are those of all draws.

    kvsweep -m experiment=demo_full draws=8 run_name=demo8
    python scripts/study/sequential_saving.py results/runs/demo8

A sequential sweep writes some of the rows of the run with all draws, and which ones follows from those rows. So the
script reads the run and decides round by round; nothing is decoded. For each model and benchmark it prints the labels
with all draws at one look, the labels of the sequential sweep, how many cells that are decided both times have the same
label, and the sweep's share of the tokens. The last line is one JSON object.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import numpy as np

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.inference import score_array
from kvsweep.analysis.statistics.metrics import graded_rows
from kvsweep.analysis.statistics.noninferiority import decide_rounds
from kvsweep.harness.sweep.checks import doubled


def main() -> None:
    args = parse_args()
    run = load_run(args.run)
    graded = graded_rows(run).sort_values("draw")
    found = {}
    for names, cells in run.cells.groupby(["model", "benchmark"], sort=False):
        [full] = cells.loc[cells["policy"] == "full", "cell_id"]
        ids = [full, *cells.loc[cells["policy"] != "full", "cell_id"]]
        rows = graded[graded["cell_id"].isin(ids)]
        scores = dict(zip(ids, score_array(rows, ids), strict=True))
        baseline = scores.pop(full)
        draws = baseline.shape[1]
        once, rounds = (
            decide_rounds(scores, baseline, rounds=looks, margin=args.margin / 100)
            for looks in ((draws,), doubled(draws))
        )
        taken = {cell_id: draws if one.label == "unclear" else one.draws for cell_id, one in rounds.items()}
        taken[full] = max(taken.values())
        kept = rows["draw"] < rows["cell_id"].astype(object).map(taken)
        decided = [cell_id for cell_id in scores if "unclear" not in (once[cell_id].label, rounds[cell_id].label)]
        found[" ".join(map(str, names))] = {
            "all draws": Counter(one.label for one in once.values()),
            "sequential": Counter(one.label for one in rounds.values()),
            "decided": len(decided),
            "same": sum(once[cell_id].label == rounds[cell_id].label for cell_id in decided),
            "share of tokens": float(rows.loc[kept, "num_tokens"].sum() / rows["num_tokens"].sum()),
            "mean draws": float(np.mean(list(taken.values()))),
        }
    for panel, told in found.items():
        print(panel, *(f"{name} {value}" for name, value in told.items()), sep="; ")
    print(json.dumps({"run": str(args.run), "margin": args.margin, "panels": found}))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a finished run with several draws and the full cache")
    parser.add_argument("--margin", type=float, default=5, help="points of Pass@1 (default: 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
