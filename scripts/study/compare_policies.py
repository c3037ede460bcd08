"""Compare the policies of one run with one of them, paired over the problems of all benchmarks together.

    python scripts/study/compare_policies.py results/runs/labels --reference dynts_far_max --output table.csv

Pairs are the same (benchmark, problem, draw) at the same keep_ratio, local_window and budget. Errors, intervals and p
are those of `inference.paired_tests`, Holm over the policies of one setting.
"""

import argparse
from pathlib import Path

import pandas as pd

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.inference import paired_tests, score_array
from kvsweep.analysis.statistics.metrics import graded_rows, pass_at_1

SETTING = ["model", "keep_ratio", "local_window", "budget"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--reference", required=True, help="the policy with which all others are compared")
    parser.add_argument("--output", type=Path, help="also write the table as CSV")
    options = parser.parse_args()
    table = compare(options.run, options.reference)
    print(table.to_string(index=False, float_format="{:.3f}".format, na_rep=""))
    if options.output:
        table.round(4).to_csv(options.output, index=False)


def rows_of_policies(directory: Path) -> pd.DataFrame:
    """Return a run's graded rows with `SETTING`, where the policy stands for the cells of all benchmarks."""
    run = load_run(directory)
    rows = graded_rows(run).merge(run.cells[["cell_id", *SETTING, "benchmark", "policy"]], on="cell_id")
    rows["problem_id"] = rows["benchmark"].astype(str) + "/" + rows["problem_id"].astype(str)
    rows["cell_id"] = rows["policy"].astype("object")  # within one setting a policy's cells are one
    return rows


def compare(directory: Path, reference: str) -> pd.DataFrame:
    """A row per model, setting and policy: Pass@1 of all benchmarks' problems, and the difference to the reference."""
    rows = rows_of_policies(directory)
    tables = []
    for setting, group in rows.groupby(SETTING, observed=True):
        policies = sorted(group["cell_id"].unique())
        scores = score_array(group, policies)
        tests = paired_tests(scores, scores[policies.index(reference)]).drop(columns="problems")
        means = pass_at_1(group).loc[policies, ["problems", "pass_at_1", "se"]].reset_index(drop=True)
        named = pd.DataFrame({**dict(zip(SETTING, setting, strict=True)), "policy": policies})
        tables.append(named.join(means).join(tests.add_prefix("difference_").rename(columns=_plain)))
    return pd.concat(tables, ignore_index=True)


def _plain(name: str) -> str:
    return {"difference_difference": "difference", "difference_p": "p", "difference_p_holm": "p_holm"}.get(name, name)


if __name__ == "__main__":
    main()
