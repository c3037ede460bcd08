"""Read a CSV of grids with scores only, row by row; refuse numbers that no mean can have."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from kvsweep.errors import UserError
from kvsweep.records import MOST_TOKENS
from kvsweep.row_files import FileRow, rows_of_file

SUMMARY_COLUMNS = ("model", "benchmark", "keep_ratio", "local_window", "problems", "draws", "pass_at_1")
SETTING = ("model", "benchmark", "policy", "keep_ratio", "local_window", "budget")
# A score with one decimal may be this far from the count that it rounds.
ROUNDING = 0.05


class _Range(NamedTuple):
    low: float
    high: float
    whole: bool

    def __str__(self) -> str:
        return f"a {'whole ' * self.whole}number from {self.low} to {self.high:,}"


RANGES = {
    "keep_ratio": _Range(0, 1, False),
    "local_window": _Range(0, MOST_TOKENS, True),
    "budget": _Range(0, MOST_TOKENS, True),
    "problems": _Range(1, MOST_TOKENS, True),
    "draws": _Range(1, MOST_TOKENS, True),
    "pass_at_1": _Range(0, 100, False),
}


def read_summary(path: Path) -> pd.DataFrame:
    """Read a table of scores: `SUMMARY_COLUMNS`, pass_at_1 in percent, and any other columns as text."""
    rows = [_checked(row) for row in rows_of_file(path)]
    if not rows:
        raise UserError(f"{path} holds no score; give a row for each setting.")
    _refuse_fractions(path, rows)
    _refuse_repeated(rows)
    _refuse_mixed_sizes(rows)
    return pd.DataFrame([row.values for row in rows])


def _checked(row: FileRow) -> FileRow:
    """Return the row with its numbers as numbers."""
    lacking = [name for name in SUMMARY_COLUMNS if name not in row.values]
    if lacking:
        columns = ", ".join(SUMMARY_COLUMNS)
        raise UserError(f"{row.where} lacks the columns {', '.join(lacking)}; a table of scores has {columns}.")
    values = {name: "" if value is None else str(value).strip() for name, value in row.values.items()}
    for name in ("model", "benchmark"):
        if not values[name]:
            raise UserError(f"{row.where} has no {name}; name it.")
    if values.get("policy") == "full" and not (values["keep_ratio"] and values["local_window"]):
        raise UserError(f"{row.where} is the full cache, which no grid of scores has; delete the row.")
    return FileRow(row.where, values | {name: _number(row.where, name, values) for name in RANGES if name in values})


def _number(where: str, name: str, values: Mapping[str, str]) -> float | None:
    text, allowed = values[name], RANGES[name]
    # Some policies have no budget.
    if name == "budget" and not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not allowed.low <= number <= allowed.high or (allowed.whole and number % 1):
        raise UserError(f"{where} has {name} {text!r:.60}; give {allowed}.")
    return int(number) if allowed.whole else number


def _refuse_fractions(path: Path, rows: list[FileRow]) -> None:
    """Refuse scores that are fractions: they would pass as percents, all below 1%."""
    way_out = "pass_at_1 is in percent; multiply by 100."
    scores = [row.values["pass_at_1"] for row in rows]
    if max(scores) <= 1 and any(score % 1 for score in scores):
        raise UserError(f"{path} has no pass_at_1 above 1, and {way_out}")
    for row in rows:
        score, problems, draws = (row.values[name] for name in ("pass_at_1", "problems", "draws"))
        least = 100 / (problems * draws)
        if 0 < score < least - ROUNDING:
            one = f"one right answer of {problems} x {draws} is {least:.3g}"
            raise UserError(f"{row.where} has pass_at_1 {score}, but {one}, and {way_out}")


def _refuse_repeated(rows: list[FileRow]) -> None:
    seen: dict[Any, str] = {}
    for row in rows:
        first = seen.setdefault(tuple(row.values.get(name) for name in SETTING), row.where)
        if first != row.where:
            raise UserError(f"{row.where} has the setting of {first}; delete one of the two.")


def _refuse_mixed_sizes(rows: list[FileRow]) -> None:
    """Refuse a model and benchmark with several counts of answers: a noise floor needs one count."""
    seen: dict[Any, FileRow] = {}
    for row in rows:
        first = seen.setdefault((row.values["model"], row.values["benchmark"]), row)
        for name in ("problems", "draws"):
            ours, theirs = row.values[name], first.values[name]
            if ours != theirs:
                differs = f"{row.where} has {name} {ours}, and {first.where} has {theirs}"
                raise UserError(f"{differs}; give one count for a model and benchmark, or a file for each.")
