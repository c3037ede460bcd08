"""Seconds per setting: the rounds of `kvsweep-replay --time`, in which each cell decoded known texts alone."""

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.load import Run
from kvsweep.base import records
from kvsweep.base.records import Timing, read_rows, shard_files


def timings(run: Run) -> pd.DataFrame:
    """A row per cell and batch with medians over rounds; empty where nothing was timed.

    Columns: cell_id, why (what chose the batch), slots, rounds, tokens_per_second, times_full (this speed over the full
    cache's in the same round), eviction_share, ms_per_step, kv_bytes, peak_bytes.
    """
    rows = [
        {
            "cell_id": cell.cell_id,
            "condition": cell.condition,
            "full": cell.policy == "full",
            "why": row.why,
            "slots": row.slots,
            "round": row.round,
            "tokens_per_second": row.tokens / row.seconds,
            "eviction_share": row.eviction_seconds / row.seconds,
            "ms_per_step": 1000 * sum(s for _, _, s in row.by_length) / max(1, sum(n for _, n, _ in row.by_length)),
            **{"kv_bytes": row.kv_bytes, "peak_bytes": row.peak_bytes},
        }
        for cell in format.rows(run.cells)
        for path in shard_files(run.directory / cell.cell_id, records.SECONDS_FILE).values()
        for row in read_rows(path, Timing, on_bad=records.ignore)
        if row.seconds > 0
    ]
    averaged = ["slots", "tokens_per_second", "times_full", "eviction_share", "ms_per_step", "kv_bytes", "peak_bytes"]
    if not rows:
        return pd.DataFrame(columns=["cell_id", "why", *averaged, "rounds"])
    table = pd.DataFrame(rows).astype({"peak_bytes": "float64"})
    # A command that is given again, maybe with other slots, begins anew with round 0; the last command counts.
    batch = [table["cell_id"], table["why"]]
    command = (table["round"] == 0).groupby(batch).cumsum()
    table = table[command == command.groupby(batch).transform("max")]
    beside = ["condition", "why", "round"]
    full = table[table["full"]].drop_duplicates(beside).set_index(beside)["tokens_per_second"]
    table["times_full"] = table["tokens_per_second"] / full.reindex(pd.MultiIndex.from_frame(table[beside])).to_numpy()
    grouped = table.groupby(["cell_id", "why"], sort=False)
    found = grouped[averaged].median()
    return found.assign(rounds=grouped["round"].nunique()).reset_index()
