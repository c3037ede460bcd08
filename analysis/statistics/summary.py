"""Read a CSV of grids with scores only, row by row; refuse numbers that no mean can have."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.run_files.other_rows import FileRow, rows_of_file
from kvsweep.run_files.row_types import MOST_TOKENS

SETTING = ("model", "benchmark", "policy", "keep_ratio", "local_window", "budget")
# A score with one decimal may be this far from the count that it rounds.
ROUNDING = 0.05
Size = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Count = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


@dataclass(frozen=True, kw_only=True)
class Score:
    """A row of the CSV: a setting and its Pass@1 in percent."""

    model: str
    benchmark: str
    policy: str | None = None
    keep_ratio: Annotated[float, Field(ge=0, le=1)]
    local_window: Size
    budget: Size | None = None  # some policies have no budget
    problems: Count
    draws: Count
    pass_at_1: Annotated[float, Field(ge=0, le=100)]


def read_summary(path: Path) -> pd.DataFrame:
    """Read a table of scores: the columns are the fields of `Score`, and any others as text."""
    rows = [_checked(row) for row in rows_of_file(path)]
    if not rows:
        raise UserError(f"{path} holds no score; give a row for each setting.")
    _refuse_fractions(path, rows)
    first_places = dict[Any, str]()
    first_rows = dict[Any, FileRow]()
    for row in rows:
        setting = tuple(map(row.values.get, SETTING))
        first_place = first_places.setdefault(setting, row.where)
        if first_place != row.where:
            raise UserError(f"{row.where} has the setting of {first_place}; delete one of the two.")
        # A noise floor needs one count of answers for a model and benchmark.
        first = first_rows.setdefault(setting[:2], row)
        for name in ("problems", "draws"):
            if row.values[name] != first.values[name]:
                raise UserError(
                    f"{row.where} has {name} {row.values[name]}, and {first.where} has {first.values[name]}; "
                    "give one count for a model and benchmark, or a file for each."
                )
    return pd.DataFrame([row.values for row in rows])


def _checked(row: FileRow) -> FileRow:
    """Return the row with its numbers as numbers, and all else as text."""
    texts = {name: "" if value is None else str(value).strip() for name, value in row.values.items()}
    filled = {name: text for name, text in texts.items() if text}
    # Without the axes `checked` would ask for them, which a full cache cannot have.
    has_grid_axes = filled.keys() >= {"keep_ratio", "local_window"}
    if filled.get("policy") == "full" and not has_grid_axes:
        raise UserError(f"{row.where} is the full cache, which no grid of scores has; delete the row.")
    score = dataclasses.asdict(checked(Score, filled, f"{row.where} ", extra=True))
    values = {name: score.get(name, text) for name, text in texts.items()}
    return FileRow(row.where, values)


def _refuse_fractions(path: Path, rows: list[FileRow]) -> None:
    """Refuse scores that are fractions: they would pass as percents, all below 1%."""
    way_out = "pass_at_1 is in percent; multiply by 100."
    scores = [row.values["pass_at_1"] for row in rows]
    # 0 and 1 alone may be percents.
    has_fraction = any(score % 1 for score in scores)
    if has_fraction and max(scores) <= 1:
        raise UserError(f"{path} has no pass_at_1 above 1, and {way_out}")
    for row in rows:
        score, problems, draws = row.values["pass_at_1"], row.values["problems"], row.values["draws"]
        least = 100 / (problems * draws)
        if 0 < score < least - ROUNDING:
            raise UserError(
                f"{row.where} has pass_at_1 {score}, but one right answer of {problems} x {draws} is {least:.3g}, "
                f"and {way_out}"
            )
