"""Accuracy against bytes: what a setting's keys and values take, and the cheapest setting that holds.

The bytes of a text are those of a slot as long as the text's cache: bytes per row times rows, and the newest rows that
a packed cache holds beside them (compression/config.py has the formula). The weights are counted apart.
"""

from typing import Any

import pandas as pd

from analysis import words
from analysis.numbers.metrics import SETTING, mean_over_benchmarks

BYTES = ["kv_bytes_mean", "kv_bytes_peak", "weight_bytes"]


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


def settings_by_bytes(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """One row per setting of a model, cheapest first: Pass@1 and its error over benchmarks, bits, `BYTES`, holds.

    A setting holds if its cells of all benchmarks do. Settings that lack a benchmark or whose bytes are unknown are
    left out.
    """
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    ours = ours.assign(holds=ours["decision"] == "holds")
    rules = {"bits": "first", "holds": "all", "kv_bytes_mean": "mean", "kv_bytes_peak": "max", "weight_bytes": "max"}
    sizes = ours.groupby(SETTING, dropna=False, sort=False).agg(rules).reset_index()
    means = mean_over_benchmarks(ours, list(ours["benchmark"].unique()))
    table = means.merge(sizes, on=SETTING).dropna(subset=["pass_at_1", "kv_bytes_mean"])
    return table.sort_values(["kv_bytes_mean", "pass_at_1"], ascending=[True, False], kind="stable", ignore_index=True)


def cheapest_in_words(settings: pd.DataFrame) -> str:
    """Name the setting that holds with the fewest bytes, of `settings_by_bytes`."""
    full = settings[settings["policy"] == "full"]
    rest = settings[settings["holds"] & (settings["policy"] != "full")]
    if rest.empty:
        return "By bytes, no setting is shown to hold."
    row: Any = next(rest.itertuples())
    share = "" if full.empty else f", {words.percent(row.kv_bytes_mean / full['kv_bytes_mean'].iloc[0])}% of the full's"
    return (
        f"By bytes, the cheapest setting that holds is {words.setting(row)}: {size(row.kv_bytes_mean)} of keys and "
        f"values a text in the mean over its steps{share}, {size(row.kv_bytes_peak)} at the peak, beside "
        f"{size(row.weight_bytes)} of weights."
    )


def size(count: float) -> str:
    """Write a number of bytes: "12.3 KiB", "4.5 GiB"; a dash if missing."""
    if words.missing(count):
        return words.MISSING
    power = next((p for p in (3, 2, 1) if count >= 1024**p), 0)
    return f"{words.decimal(count / 1024**power, min(power, 1))} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
