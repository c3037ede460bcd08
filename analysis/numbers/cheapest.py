"""Accuracy against bytes: a model's settings by the bytes that they take, and the cheapest that holds."""

from typing import Any

import pandas as pd

from kvsweep.analysis import format
from kvsweep.analysis.numbers.kv_bytes import size
from kvsweep.analysis.numbers.metrics import SETTING, mean_over_benchmarks


def settings_by_bytes(metrics: pd.DataFrame, model: str) -> pd.DataFrame:
    """A model's settings with Pass@1, error, bits, bytes and if all cells hold; cheapest first, unknown left out."""
    ours = metrics[metrics["model"] == model].drop_duplicates([*SETTING, "benchmark"])
    ours = ours.assign(holds=ours["decision"].isin(["holds", "costs"]))
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
    shares = [f", {format.percent(row.kv_bytes_mean / mean)}% of the full's" for mean in full["kv_bytes_mean"].head(1)]
    mean = f"{size(row.kv_bytes_mean)} of keys and values a text in the mean over its steps{''.join(shares)}"
    peak = f"{size(row.kv_bytes_peak)} at the peak, beside {size(row.weight_bytes)} of weights"
    return f"By bytes, the cheapest setting that holds is {format.setting(row)}: {mean}, {peak}."
