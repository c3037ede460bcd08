"""Fidelity of replayed completions: means per token with errors over completions, and paired differences of cells."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from kvsweep.analysis import notation
from kvsweep.analysis.load import Run, row_dicts
from kvsweep.analysis.statistics.inference import paired_tests
from kvsweep.run_files.row_types import REPLAY_DISTANCES, REPLAY_ENTROPIES, Replay, Timing

# Numbers of a completion, and whether its tokens or its answer's tokens divide a sum.
NUMBERS = ("kl", "change", "flips", "answer_change", "first_other")


def replay_rows(run: Run, file: str) -> pd.DataFrame:
    """Return a row per cell and completion with the numbers per token; empty if nothing was replayed.

    A completion that another replayed cell of the condition lacks is left out, so that all means are comparable.
    """
    rows = rows_of_cells(run.directory, run.cells["cell_id"], file)
    condition_of_cell = run.cells.set_index("cell_id")["condition"]
    condition = rows["cell_id"].map(condition_of_cell)
    cells_of_condition = rows.groupby(condition)["cell_id"].transform("nunique")
    cells_with_problem = rows.groupby([condition, "problem_id"])["cell_id"].transform("nunique")
    return rows[cells_with_problem == cells_of_condition]


def rows_of_cells(directory: Path, cell_ids: Iterable[str], file: str) -> pd.DataFrame:
    """Return the rows of some cells of a run directory, with all completions."""
    rows = pd.DataFrame(
        row_dicts(directory, cell_ids, Replay, file=file), columns=["cell_id", *Replay.__struct_fields__]
    )
    # A number that a row lacks is NaN.
    rows = rows.astype({"answer_change": "float64", "first_other": "float64"})
    return rows.assign(
        kl=rows["kl_mean"],
        # Per token; the rows have sums.
        change=rows["change"] / rows["tokens"],
        answer_change=rows["answer_change"] / rows["answer_tokens"],
        flips=1 - rows["top1"],
        # A completion that never differs counts as differing right behind its end.
        first_other=rows["first_other"].fillna(rows["tokens"]),
    )


def fidelity(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per cell: completions, and each number's mean and standard error (completions as clusters)."""
    grouped = rows.groupby("cell_id", sort=False)
    table = grouped.agg(texts=("problem_id", "size"), tokens=("tokens", "sum"), evictions=("evictions", "mean"))
    for name in NUMBERS:
        table[name] = grouped[name].mean()
        table[f"{name}_se"] = grouped[name].std(ddof=1) / np.sqrt(grouped[name].count())
    return table.reset_index()


def paired_fidelity(rows: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Compare each cell's KL with a reference cell's, paired by completion: difference, interval, p, Holm's p.

    `rows` are `replay_rows`, `reference` is a cell_id.
    """
    by_cell = rows.pivot(index="cell_id", columns="problem_id", values="kl")
    others = by_cell.drop(index=reference)
    # [cells, problems, one draw] and [problems, one draw]
    tests = paired_tests(others.to_numpy()[..., None], by_cell.loc[reference].to_numpy()[:, None])
    return tests.assign(cell_id=others.index)


def fidelity_bins(run: Run, file: str) -> pd.DataFrame:
    """KL, change and top-1 agreement per token, by distance since the last eviction and by the full cache's entropy.

    A row per cell_id, `by` ("distance" or "entropy") and `from`, the lower bound of a bin.
    """
    names = ["cell_id", "by", "from"]
    numbers = ["kl", "change", "top1"]
    rows = []
    for row in notation.rows(replay_rows(run, file)):
        tables = (("distance", REPLAY_DISTANCES, row.by_distance), ("entropy", REPLAY_ENTROPIES, row.by_entropy))
        for by, lower_bounds, bins in tables:
            for bound, sums in zip(lower_bounds, bins, strict=True):
                rows.append({"cell_id": row.cell_id, "by": by, "from": float(bound), **sums})
    all_sums = pd.DataFrame(rows, columns=[*names, "tokens", *numbers])
    table = all_sums.groupby(names, sort=False, as_index=False).sum()
    table = table[table["tokens"] > 0].reset_index(drop=True)
    # Sums over tokens become means.
    table[numbers] = table[numbers].div(table["tokens"], axis=0)
    return table


def timings(run: Run) -> pd.DataFrame:
    """Return a row per cell and batch with medians over rounds; empty if nothing was timed.

    Columns: cell_id, why (what chose the batch), slots, rounds, tokens_per_second, times_full (this speed divided by
    the full cache's in the same round), eviction_share, ms_per_step, kv_bytes, peak_bytes.
    """
    timed = row_dicts(run.directory, run.cells["cell_id"], Timing)
    rows = pd.DataFrame(timed, columns=["cell_id", *Timing.__struct_fields__])
    table = rows[rows["seconds"] > 0].merge(run.cells[["cell_id", "condition", "policy"]], on="cell_id")
    table["tokens_per_second"] = table["tokens"] / table["seconds"]
    table["eviction_share"] = table["eviction_seconds"] / table["seconds"]
    table["ms_per_step"] = table["by_length"].map(_ms_per_step)
    # A repeated command, perhaps with other slots, starts again with round 0; only the last command counts.
    batch = [table["cell_id"], table["why"]]
    command_number = (table["round"] == 0).groupby(batch).cumsum()
    last_number = command_number.groupby(batch).transform("max")
    table = table[command_number == last_number]
    same_round = ["condition", "why", "round"]
    full = table[table["policy"] == "full"].drop_duplicates(same_round).set_index(same_round)
    table = table.join(full["tokens_per_second"].rename("full_speed"), on=same_round)
    table["times_full"] = table["tokens_per_second"] / table["full_speed"]
    averaged = ["slots", "tokens_per_second", "times_full", "eviction_share", "ms_per_step", "kv_bytes", "peak_bytes"]
    # As floats, in which a number without a GPU is NaN.
    batches = table.astype(dict.fromkeys(averaged, "float64")).groupby(["cell_id", "why"], sort=False)
    medians = batches[averaged].median()
    return medians.assign(rounds=batches["round"].nunique()).reset_index()


def _ms_per_step(by_length: list[tuple[int, int, float]]) -> float:
    """Return the mean time of a step; `by_length` has cache lengths, their steps, and the seconds of these."""
    steps = sum(count for _, count, _ in by_length)
    step_seconds = sum(seconds for _, _, seconds in by_length)
    # A batch without a step took no seconds either.
    return 1000 * step_seconds / max(1, steps)
