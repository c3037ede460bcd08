"""Truncated texts that end in a loop: how many they are, and what it would save to stop them."""

import numpy as np
import pandas as pd

from kvsweep.analysis.load import Run
from kvsweep.base.loops import LEAST_REPEATS, LEAST_TOKENS, find_loop
from kvsweep.base.records import COMPLETIONS_FILE, Completion, ignore, read_shards, view

COLUMNS = ["truncated_texts", "looping_texts", "loop_period", "loop_count", "tokens_in_loops"]
_Ends = view(Completion, "stop_reason", "token_ids")


def looping(run: Run) -> pd.DataFrame:
    """`COLUMNS` by cell_id: the truncated texts, and those of them that end in a loop (`base.loops.find_loop`).

    Then the loops' median period in tokens and copies, and the tokens that decoding.stop_on_loop would have saved.
    """
    cut_off = run.completions["stop_reason"] != "stop"
    rows = {cell_id: _loops(run, cell_id) for cell_id in run.completions.loc[cut_off, "cell_id"].unique()}
    rows = {cell_id: rows.get(cell_id, [0, 0, np.nan, np.nan, 0]) for cell_id in run.cells["cell_id"]}
    return pd.DataFrame.from_dict(rows, orient="index", columns=COLUMNS).rename_axis("cell_id")


def _loops(run: Run, cell_id: str) -> list[float]:
    ends = read_shards(run.directory / cell_id, COMPLETIONS_FILE, _Ends, on_bad=ignore)
    truncated = [find_loop(row.token_ids) for row in ends if row.stop_reason != "stop"]
    found = [loop for loop in truncated if loop is not None]
    saved = sum(loop.tokens - max(LEAST_REPEATS * loop.period, LEAST_TOKENS) for loop in found)
    period, count = np.median([(loop.period, loop.count) for loop in found], axis=0) if found else (np.nan, np.nan)
    return [len(truncated), len(found), period, count, saved]
