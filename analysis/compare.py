"""`kvsweep compare A B`: compare the cells that two run directories share, paired over (problem, draw)."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, load_run, refuse_unlike_golds, settings_of
from kvsweep.analysis.statistics.inference import LEVEL, paired_tests, score_array
from kvsweep.analysis.statistics.metrics import graded_rows
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import replace_text

# Cells are compared if these agree; everything else (code, decoding, weights, seed) may differ.
MATCH = ["model", "benchmark", "dataset_hash", "policy", "keep_ratio", "local_window", "budget", "question"]
MATCH += ["variant"]

# The text lists at most this many cells and different settings, which fit on a screen.
MAX_LISTED = 8


def compare(first: Run, second: Run) -> pd.DataFrame:
    """Compute B minus A for each setting that both runs have, on the (problem, draw) pairs that both have graded.

    Columns: `MATCH`, cell_id_a, cell_id_b, `paired_tests` over all settings, graded (answers that both have; graded_a,
    graded_b: each), and as text the settings that differ. Raises UserError without a common setting or answer.
    """
    refuse_unlike_golds(first, second)
    runs = f"{first.directory} and {second.directory}"
    shared = _pairs(first, second)
    if shared.empty:
        fault = "share no cell that cells.csv names alike (a run of several seeds names the seed)"
        raise UserError(f"{runs} {fault}: give runs of the same settings and problems.")
    rows = pd.concat([_graded_rows(first, "a"), _graded_rows(second, "b")])
    # A letter before each id, because both runs may have a cell with this id.
    ids = [*("a" + shared["cell_id_a"]), *("b" + shared["cell_id_b"])]
    # [cells of A and of B, problems, draws]: in one array problems and draws have the same places in both.
    scores_a, scores_b = np.split(score_array(rows, ids), 2)
    graded = _graded(scores_b - scores_a)
    if not graded.any():
        fault = "share no graded answer, of any problem and draw"
        raise UserError(f"{runs} {fault}: grade both, or give runs of the same draws.")
    # The correction runs over all settings.
    tests = paired_tests(scores_b, scores_a)
    table = shared.join(tests).assign(graded=graded, graded_a=_graded(scores_a), graded_b=_graded(scores_b))
    settings_a = shared["cell_id_a"].map(first.settings.get)
    settings_b = shared["cell_id_b"].map(second.settings.get)
    return table.assign(other_settings=list(map(_other_settings, settings_a, settings_b)))


def _graded_rows(run: Run, letter: str) -> pd.DataFrame:
    rows = graded_rows(run)
    # As text, because nothing can be added to a category.
    return rows.assign(cell_id=letter + rows["cell_id"].astype("str"))


def _pairs(first: Run, second: Run) -> pd.DataFrame:
    """Return the pairs to compare: cells with one id in both runs, and of the rest those that agree in `MATCH`.

    Columns: `MATCH`, titles, cell_id_a and cell_id_b.
    """
    cells_a = _distinct(first)[[*MATCH, "model_title", "benchmark_title", "cell_id"]]
    cells_b = _distinct(second)[[*MATCH, "cell_id"]]
    same_ids = {*cells_a["cell_id"]} & {*cells_b["cell_id"]}
    for cells in (cells_a, cells_b):
        # A cell with one id is the same one, even if its variant is named otherwise: each run names what varies in it.
        cells["key"] = cells["cell_id"].where(cells["cell_id"].isin(same_ids), cells["variant"])
    # `MATCH` without its last name, the variant.
    keys = [*MATCH[:-1], "key"]
    return cells_a.merge(cells_b.drop(columns="variant"), on=keys, suffixes=("_a", "_b")).drop(columns="key")


def _distinct(run: Run) -> pd.DataFrame:
    return run.cells.drop_duplicates(MATCH)


def _graded(scores: np.ndarray) -> np.ndarray:
    """The number of answers of each cell that have a score."""
    return (~np.isnan(scores)).sum((1, 2))


def _other_settings(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Return the settings that differ between two cells at one grid point, with A's and B's values."""
    settings_a = settings_of(first)
    settings_b = settings_of(second)
    texts = []
    differing = dict(settings_a.items() ^ settings_b.items())  # names and values that only one of them has
    for name in sorted(differing):
        texts.append(f"{name} ({settings_a.get(name, 'none')} and {settings_b.get(name, 'none')})")
    return ", ".join(texts)


def in_words(table: pd.DataFrame) -> str:
    """Return the comparison as text; the largest differences and the summary are last, on the last screen."""
    differing = table[table["p_holm"] < LEVEL]
    lines = []
    for row in notation.rows(differing.sort_values("difference", key=abs).tail(MAX_LISTED)):
        difference = notation.percent_pm(row.difference, row.se, signed=True)
        interval = notation.interval(row.low, row.high, signed=True)
        p = f"p {notation.p_value(row.p)}, Holm {notation.p_value(row.p_holm)}"
        lines.append(f"{row.model_title} | {row.benchmark_title}: {notation.setting(row)}")
        lines.append(f"    {difference} points on {row.problems} problems, 95% interval {interval}, {p}")
    return "\n".join([*lines, "", *_summary(table)]).strip()


def _summary(table: pd.DataFrame) -> Iterator[str]:
    """A line per panel, per difference of settings and on answers that one run lacks; last, how many cells differ."""
    compared = table[table["graded"] > 0]
    for title, cells in compared.groupby(["model_title", "benchmark_title"], sort=False):
        differences = cells.loc[cells["p_holm"] < LEVEL, "difference"]
        worse = (differences < 0).sum()
        better = (differences > 0).sum()
        mean = notation.percent(cells["difference"].mean(), signed=True)
        counts = f"{counted(len(cells), 'cell')}, B worse in {worse}, better in {better}, mean {mean} points"
        yield f"{' | '.join(map(str, title))}: {counts}"
    # Cells that differ in no setting have an empty text.
    settings = table["other_settings"].value_counts().drop("", errors="ignore")
    for names, number in settings.head(MAX_LISTED).items():
        yield f"settings differ in {counted(number, 'cell')}: {names}"
    partly = compared[compared["graded"] < compared[["graded_a", "graded_b"]].max(axis=1)]
    if len(partly):
        graded, graded_a, graded_b = map(notation.span, partly[["graded", "graded_a", "graded_b"]].to_numpy().T)
        counts = f"A has {graded_a}, B {graded_b}, both {graded}"
        yield f"counts of answers differ in {counted(len(partly), 'cell')}: {counts}"
    differing = (table["p_holm"] < LEVEL).sum()
    sentence = f"A and B differ in {differing} of {counted(len(compared), 'cell')} (B minus A, paired, Holm, 5%)"
    if differing > MAX_LISTED:
        sentence += f", the {MAX_LISTED} largest above"
    without_pair = len(table) - len(compared)
    if without_pair:
        sentence += f"; without a common graded answer: {counted(without_pair, 'cell')}"
    yield f"{sentence}."


def compare_runs(first: Path, second: Path, csv: Path | None = None) -> None:
    """Print how two runs' shared cells differ; with `csv`, write all of them to this file."""
    run_a = load_run(first)
    run_b = load_run(second)
    for notice in dict.fromkeys([*run_a.notices, *run_b.notices]):
        print(f"note: {notice}", file=sys.stderr)
    table = compare(run_a, run_b)
    print(in_words(table))
    for run in (run_a, run_b):
        unshared = len(_distinct(run)) - len(table)
        if unshared:
            print(f"not compared: {counted(unshared, 'cell')} of {run.directory} alone")
    if csv:
        replace_text(csv, notation.csv_text(table))
        print(f"all {len(table)} cells: {csv}")
