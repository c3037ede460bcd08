"""Bytes of a cell's keys and values.

The bytes of a text are those of a slot as long as the text's cache: bytes per row times rows, and the newest rows that
a packed cache holds beside them (compression/config.py has the formula). The weights are counted apart.
"""

from typing import Any

import pandas as pd

from kvsweep.analysis import format


def with_bytes(cells: pd.DataFrame, provenance: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Add kv_bytes_mean (a text's, mean over the decoding steps), kv_bytes_peak (the longest's) and weight_bytes.

    The columns are missing for runs older than the provenance's `bytes`.
    """
    known = [provenance.get(cell, {}).get("bytes", {}) for cell in cells["cell_id"]]
    sizes = pd.DataFrame(known, index=cells.index, columns=["row", "newest", "weights"], dtype="float64")
    return cells.assign(
        kv_bytes_mean=sizes["row"] * cells["mean_cache_length"] + sizes["newest"],
        kv_bytes_peak=sizes["row"] * cells["max_peak_length"] + sizes["newest"],
        weight_bytes=sizes["weights"],
    )


def size(count: float) -> str:
    """Write a number of bytes: "12.3 KiB", "4.5 GiB"; a dash if missing."""
    if format.missing(count):
        return format.MISSING
    power = next((p for p in (3, 2, 1) if count >= 1024**p), 0)
    return f"{format.decimal(count / 1024**power, min(power, 1))} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
