"""Prints what a run of bytes_toy says, as Markdown: Pass@1 by bytes, pairs of nearly the same bytes, packing schemes.

python scripts/study/bytes_table.py results/runs/bytes_toy
"""

import argparse
import itertools
from pathlib import Path

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.inference import paired_tests, problem_means, score_array
from kvsweep.analysis.statistics.metrics import (
    SETTING,
    cell_metrics,
    cheapest_in_words,
    graded_rows,
    model_title,
    settings_by_bytes,
    size,
)

# Two settings count as equal in bytes if the larger takes at most this factor.
NEARLY = 1.15


def main() -> None:
    """Print a section per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = load_run(parser.parse_args().run)
    metrics, graded = cell_metrics(run), graded_rows(run)
    for model in metrics["model"].unique():
        settings = settings_by_bytes(metrics, model)
        print(f"\n## {model_title(metrics, model)}\n\n{_table(settings)}\n\n{cheapest_in_words(settings)}\n")
        print(_pairs(settings, metrics[metrics["model"] == model], graded))
        if metrics["variant"].str.contains("scheme=").any():
            print("\n" + _schemes(metrics[metrics["model"] == model], graded))


def _table(settings: pd.DataFrame) -> str:
    head = ["policy", "budget", "keep ratio", "stored", "bytes, mean", "bytes, peak", "Pass@1 (%)", "completions"]
    lines = [
        [
            notation.policy_title(row.policy),
            notation.number(row.budget),
            notation.number(row.keep_ratio),
            str(row.variant) or f"{row.bits:g} bits",
            size(row.kv_bytes_mean),
            size(row.kv_bytes_peak),
            notation.percent_pm(row.pass_at_1, row.se),
            f"{row.completions}",
        ]
        for row in settings.itertuples()
    ]
    return notation.markdown([head, *lines])


def _pairs(settings: pd.DataFrame, cells: pd.DataFrame, graded: pd.DataFrame) -> str:
    """Paired differences between settings of other bits and nearly the same bytes: fewer bits minus fewer rows."""
    head = ["fewer bits", "fewer rows", "bytes", "difference in points"]
    lines = []
    for one, other in itertools.combinations(settings.to_dict("records"), 2):
        fewer, more = sorted((one, other), key=lambda row: row["bits"])
        ratio = other["kv_bytes_mean"] / one["kv_bytes_mean"]
        if ratio > NEARLY or fewer["bits"] == more["bits"]:
            continue
        ids = [_cell_ids(cells, row) for row in (fewer, more)]
        both = [benchmark for benchmark in ids[0] if benchmark in ids[1]]
        if len(both) != 1:
            raise SystemExit("the pairs of several benchmarks are not averaged: give a run of one benchmark.")
        scores = score_array(graded, [ids[0][both[0]], ids[1][both[0]]])
        test = paired_tests(scores[:1], scores[1]).iloc[0]
        names = [_name(row) for row in (fewer, more)]
        sizes = f"{size(fewer['kv_bytes_mean'])}, {size(more['kv_bytes_mean'])}"
        lines.append([*names, sizes, notation.percent_pm(test["difference"], test["se"], signed=True)])
    return notation.markdown([head, *lines])


def _schemes(cells: pd.DataFrame, graded: pd.DataFrame) -> str:
    """Each cell packed by another scheme than the plain one beside that one at equal rows and bits: Pass@1, paired."""
    packed = cells[cells["bits"] < 16].assign(scheme=cells["variant"].str.extract(r"scheme=(\w+)")[0])
    packed["packed"] = packed["variant"].str.extract(r"bits=([\d/]+)")[0]
    keys = ["policy", "budget", "keep_ratio", "packed"]
    plain = packed[packed["scheme"] == "plain"]
    pairs = packed[packed["scheme"] != "plain"].merge(plain, on=keys, suffixes=("", "_plain"))
    differences = []
    for row in pairs.itertuples():
        one, other = score_array(graded, [row.cell_id, row.cell_id_plain])
        differences.append(problem_means((one - other)[None])[0])
    scores = np.stack(differences)[..., None]
    tests = paired_tests(scores, np.zeros(scores.shape[1:]))
    head = ["policy", "budget", "bits", "scheme", "Pass@1 (%)", "plain (%)", "difference (95%)", "p", "p, Holm"]
    lines = []
    for row, test in zip(pairs.itertuples(), tests.itertuples(), strict=True):
        means = [notation.percent_pm(row.pass_at_1, row.se), notation.percent_pm(row.pass_at_1_plain, row.se_plain)]
        interval = notation.interval(test.low, test.high, signed=True)
        difference = f"{notation.percent(test.difference, signed=True)} ({interval})"
        ends = [difference, notation.p_value(test.p), notation.p_value(test.p_holm)]
        lines.append(
            [notation.policy_title(row.policy), notation.number(row.budget), row.packed, row.scheme, *means, *ends]
        )
    return notation.markdown([head, *lines])


def _cell_ids(cells: pd.DataFrame, row: dict[str, object]) -> dict[str, str]:
    same = pd.Series(True, index=cells.index)
    for name in (*SETTING, "bits"):
        same &= (cells[name] == row[name]) | (cells[name].isna() & pd.isna(row[name]))
    return cells[same].set_index("benchmark")["cell_id"].to_dict()


def _name(row: dict[str, object]) -> str:
    sizes = notation.axes({name: row[name] for name in ("keep_ratio", "budget")})
    stored = str(row["variant"]) or f"{row['bits']:g} bits"
    return ", ".join(part for part in (notation.policy_title(str(row["policy"])), sizes, stored) if part)


if __name__ == "__main__":
    main()
