"""`kvsweep compare A B`: compare the cells that two run directories share, paired over (problem, draw)."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, load_run, refuse_unlike_golds, settings_of
from kvsweep.analysis.statistics.inference import paired_tests, score_array
from kvsweep.analysis.statistics.metrics import graded_rows
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import replace_text

# Cells are compared if these agree; everything else (code, decoding, weights, seed) may differ.
MATCH = ["model", "benchmark", "dataset_hash", "policy", "keep_ratio", "local_window", "budget", "question"]
MATCH += ["variant"]

# The text lists at most this many different settings and panels, which fit on a screen.
MAX_LISTED = 8


def compare(first: Run, second: Run) -> pd.DataFrame:
    """Compute B minus A for each setting that both runs have, on the (problem, draw) pairs that both have graded.

    Columns: `MATCH`, cell_id_a, cell_id_b, `paired_tests` over all settings, graded (answers that both have; graded_a,
    graded_b: each), and as text the settings that differ. Raises UserError without a common setting or answer.
    """
    refuse_unlike_golds(first, second)
    shared = _pairs(first, second)
    if shared.empty:
        runs = f"{first.directory} and {second.directory}"
        named = "share no cell that cells.csv names alike (a run of several seeds names the seed)"
        raise UserError(f"{runs} {named}: give runs of the same settings and problems.")
    rows = pd.concat([_graded_rows(first, "a"), _graded_rows(second, "b")])
    # In one array, because the correction runs over all settings.
    scores = score_array(rows, [*("a" + shared["cell_id_a"]), *("b" + shared["cell_id_b"])])
    scores_a, scores_b = scores[: len(shared)], scores[len(shared) :]
    sizes = {"graded": _graded(scores_b - scores_a), "graded_a": _graded(scores_a), "graded_b": _graded(scores_b)}
    if not sizes["graded"].any():
        none = f"{first.directory} and {second.directory} share no graded answer, of any problem and draw"
        raise UserError(f"{none}: grade both, or give runs of the same draws.")
    tests = paired_tests(scores_b - scores_a, np.zeros(scores.shape[1:]))
    pairs = zip(shared["cell_id_a"], shared["cell_id_b"], strict=True)
    other = [_other_settings(first.settings[a], second.settings[b]) for a, b in pairs]
    return shared.join(tests).assign(**sizes, other_settings=other)


def _graded_rows(run: Run, side: str) -> pd.DataFrame:
    rows = graded_rows(run)
    return rows.assign(cell_id=side + rows["cell_id"].astype("str"))


def _pairs(first: Run, second: Run) -> pd.DataFrame:
    """The cells that are the same one in both runs, which name it by what varies there, and those that `MATCH`."""
    columns = [*MATCH, "model_title", "benchmark_title", "cell_id"]
    left = _distinct(first)[columns]
    right = _distinct(second)[[*MATCH, "cell_id"]]
    same = left.merge(right.drop(columns=MATCH[-1]), on=[*MATCH[:-1], "cell_id"])
    left = left[~left["cell_id"].isin(same["cell_id"])]
    right = right[~right["cell_id"].isin(same["cell_id"])]
    alike = left.merge(right, on=MATCH, suffixes=("_a", "_b"))
    same = same.rename(columns={"cell_id": "cell_id_a"})
    return pd.concat([same.assign(cell_id_b=same["cell_id_a"]), alike], ignore_index=True)


def _distinct(run: Run) -> pd.DataFrame:
    return run.cells.drop_duplicates(MATCH)


def _graded(scores: np.ndarray) -> np.ndarray:
    """The number of answers of each cell that have a score."""
    return (~np.isnan(scores)).sum((1, 2))


def _other_settings(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the settings that differ between two cells at one grid point, with A's and B's values."""
    a, b = settings_of(first), settings_of(second)
    names = [name for name in sorted(a | b) if a.get(name) != b.get(name)]
    return ", ".join(f"{name} ({a.get(name, 'none')} and {b.get(name, 'none')})" for name in names)


def in_words(table: pd.DataFrame) -> str:
    """Return the comparison as text; the largest differences and the summary are last, on the last screen."""
    clear = table[table["p_holm"] < 0.05]
    largest = clear.reindex(clear["difference"].abs().sort_values(ascending=False, kind="stable").index)
    lines = [
        f"{row.model_title} | {row.benchmark_title}: {notation.setting(row)}\n"
        f"    {notation.percent_pm(row.difference, row.se, signed=True)} points on {row.problems} problems, 95% "
        f"interval {notation.interval(row.low, row.high, signed=True)}, p {notation.p_value(row.p)}, "
        f"Holm {notation.p_value(row.p_holm)}"
        for row in notation.rows(largest.head(MAX_LISTED).iloc[::-1])
    ]
    return "\n".join([*lines, "", *_summary(table)]).strip()


def _summary(table: pd.DataFrame) -> list[str]:
    lines = []
    compared = table[table["graded"] > 0]
    for title, cells in compared.groupby(["model_title", "benchmark_title"], sort=False):
        differences = cells.loc[cells["p_holm"] < 0.05, "difference"]
        worse, better = (differences < 0).sum(), (differences > 0).sum()
        mean = notation.percent(cells["difference"].mean(), signed=True)
        counts = f"{counted(len(cells), 'cell')}, B worse in {worse}, better in {better}, mean {mean} points"
        lines.append(f"{' | '.join(map(str, title))}: {counts}")
    if len(lines) > MAX_LISTED:
        lines = [*lines[:MAX_LISTED], f"and {len(lines) - MAX_LISTED} more panels"]
    clear = int((table["p_holm"] < 0.05).sum())
    differ = f"A and B differ in {clear} of {counted(len(compared), 'cell')} (B minus A, paired, Holm, 5%)"
    if clear > MAX_LISTED:
        differ += f", the {MAX_LISTED} largest above"
    differ += "."
    others = len(compared) - clear
    if others:
        verb = "is" if others == 1 else "are"
        differ += f" {counted(others, 'cell')} {verb} not shown to differ."
    apart = len(table) - len(compared)
    if apart:
        verb = "has" if apart == 1 else "have"
        differ += f" {counted(apart, 'cell')} {verb} no common graded answer."
    settings = table["other_settings"].value_counts().drop("", errors="ignore")
    unlike = [f"settings differ in {counted(cells, 'cell')}: {names}" for names, cells in settings.items()]
    return [*lines, *unlike[:MAX_LISTED], *_partly(compared), differ]


def _partly(compared: pd.DataFrame) -> list[str]:
    """Say on how many problems and answers cells are compared, if A or B has more."""
    cells = compared[compared["graded"] < compared[["graded_a", "graded_b"]].max(axis=1)]
    if cells.empty:
        return []
    problems = counted(_span(cells["problems"]), "problem")
    answers = counted(_span(cells["graded"]), "common answer")
    where = f"counts of answers differ in {counted(len(cells), 'cell')}"
    counts = f"A has {_span(cells['graded_a'])}, B {_span(cells['graded_b'])}"
    return [f"{where}: compared on {problems} and {answers} (problem and draw); {counts}"]


def _span(counts: pd.Series) -> str:
    low, high = counts.min(), counts.max()
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _unshared(first: Run, second: Run, table: pd.DataFrame) -> str:
    """Say how many cells only one run has; empty if none."""
    alone = {"A": len(_distinct(first)) - len(table), "B": len(_distinct(second)) - len(table)}
    return "; ".join(f"{counted(count, 'cell')} only in {side}" for side, count in alone.items() if count)


def compare_runs(first: Path, second: Path, csv: Path | None = None) -> None:
    """Print how two runs' shared cells differ; with `csv`, write all of them to this file."""
    ours, theirs = load_run(first), load_run(second)
    for notice in dict.fromkeys([*ours.notices, *theirs.notices]):
        print(f"note: {notice}", file=sys.stderr)
    table = compare(ours, theirs)
    print(in_words(table))
    unshared = _unshared(ours, theirs, table)
    if unshared:
        print(f"not compared: {unshared}")
    if csv:
        replace_text(csv, notation.csv_text(table))
        print(f"all {len(table)} cells: {csv}")
