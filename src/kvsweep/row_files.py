"""Rows of JSON, CSV and Parquet files. What could be read in two ways, or not at all, raises a UserError."""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvsweep.errors import UserError

_LONGEST = 2**31 - 1  # characters of a value in a CSV file, where Python allows 131,072


class Row(NamedTuple):
    """One row: its place, such as FILE:LINE, and its values by column."""

    where: str
    values: dict[str, Any]


def json_lines(lines: Iterable[str | bytes], path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield json_row(line, f"{path}:{number}")


def json_row(text: str | bytes, where: str) -> Row:
    try:
        values = _parsed(text, where)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object; correct or delete that line.")
    return Row(where, values)


def json_file(text: str | bytes, path: Path) -> Any:
    """What a whole file of JSON holds."""
    try:
        return _parsed(text, str(path))
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line} is not JSON that can be read; correct it, or write a row a line.") from None


def _parsed(text: str | bytes, where: str) -> Any:
    return json.loads(text, object_pairs_hook=partial(_object, where))


def _object(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one that has a key twice is refused, as one of the two values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        _refuse_repeated([key for key, _ in pairs], where, "key")
    return found


def _refuse_repeated(names: Sequence[str], where: str, noun: str) -> None:
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"{where} has the {noun} {repeated!r:.60} twice; rename or delete one.")


def csv_rows(lines: Iterable[str], path: Path) -> Iterator[Row]:
    csv.field_size_limit(_LONGEST)
    reader, first_line = csv.DictReader(lines, strict=True), 2
    try:
        _refuse_repeated(reader.fieldnames or (), f"{path}:1", "column")
        for values in reader:
            # Otherwise a stray comma would shift a value into another column.
            if None in values or None in values.values():
                raise UserError(f"{path}:{first_line} has not the header's count of cells; quote its commas.")
            yield Row(f"{path}:{first_line}", values)
            first_line = reader.line_num + 1
    except csv.Error:
        raise UserError(f"{path}:{first_line} is not a CSV row; correct its quotes.") from None


def parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        _refuse_repeated(file.schema_arrow.names, str(path), "column")
        number = 0
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path} row {number}", values)
    except ArrowException:
        raise UserError(f"{path} is not a Parquet file that can be read; write it again.") from None
