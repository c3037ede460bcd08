"""Bytes of a cell's keys and values; the weights are counted apart.

A text's are those of a slot as long as its cache: bytes per row times rows, the newest rows that a packed cache holds
beside them, and what windows and linear layers take at any length (formulas: compression/config.py).
"""

from typing import Any

import pandas as pd

from kvsweep.analysis import format


def with_bytes(cells: pd.DataFrame, provenance: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Add the bytes of a text (mean over its steps, longest, fixed part) and of the weights; missing in older runs."""
    sizes = _sizes(cells["cell_id"], provenance)
    return cells.assign(
        kv_bytes_mean=sizes["row"] * cells["mean_cache_length"] + sizes["newest"] + sizes["fixed"],
        kv_bytes_peak=sizes["row"] * cells["max_peak_length"] + sizes["newest"] + sizes["fixed"],
        kv_bytes_fixed=sizes["fixed"],
        weight_bytes=sizes["weights"],
    )


def peak_bytes(completions: pd.DataFrame, provenance: dict[str, dict[str, Any]]) -> pd.Series:
    """The bytes of each completion's longest cache; missing where those of a row are not known."""
    sizes = _sizes(completions["cell_id"], provenance)
    return completions["peak_length"] * sizes["row"] + sizes["newest"] + sizes["fixed"]


def _sizes(cell_ids: "pd.Series[str]", provenance: dict[str, dict[str, Any]]) -> pd.DataFrame:
    known = [given.get("bytes", {}) for given in provenance.values()]
    sizes = pd.DataFrame(known, index=[*provenance], columns=["row", "newest", "fixed", "weights"], dtype="float64")
    return sizes.reindex(cell_ids).set_axis(cell_ids.index)


def size(count: float) -> str:
    """Write a number of bytes: "12.3 KiB", "4.5 GiB"; a dash if missing."""
    if format.missing(count):
        return format.MISSING
    power = next((p for p in (3, 2, 1) if count >= 1024**p), 0)
    return f"{format.decimal(count / 1024**power, min(power, 1))} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
