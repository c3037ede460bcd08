"""Rows of JSON, CSV and Parquet files. What could be read in two ways, or not at all, raises a UserError."""

import codecs
import csv
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

# Python's own zipfile reads what zstd has packed from Python 3.14 on.
from backports.zstd import ZstdError, zipfile
from pydantic import Field, StrictBool

from kvsweep.messages.checked import checked
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible
from kvsweep.run_files.row_types import MOST_TOKENS
from kvsweep.run_files.safe_files import MOST_BYTES, open_file

_LONGEST = 2**31 - 1  # characters of a value in a CSV file, where Python allows 131,072


class FileRow(NamedTuple):
    """One row: its place, such as FILE:LINE, and its values by column."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """A row of a file of texts. Its id is by default the row's number; gold and correct are the text's grade."""

    id: str
    problem: str
    text: str
    draw: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    gold: str | int | float | None = None
    correct: StrictBool | Literal[0, 1] | None = None


def texts_of_file(path: Path) -> Iterator[tuple[str, TextRow]]:
    """Yield the place and row of each text; raises UserError for a row without problem or text."""
    for number, (where, values) in enumerate(rows_of_file(path), start=1):
        filled = {name: value for name, value in values.items() if str(value).strip()}
        filled["id"] = str(filled.get("id", number))
        yield where, checked(TextRow, filled, f"{where} ", extra=True)


def rows_of_file(path: Path, *, keys: Sequence[str] = ()) -> Iterator[FileRow]:
    """Yield the rows of a file, which its contents tell for Parquet, JSON lines, a JSON list, or else CSV.

    With `keys` also those of a JSON object that has them as a list, or as an object's values, under one of these keys
    (`a.b` within `a`), and of a zip that has each as a JSON file in a folder of the first key's name. Text is UTF-8.
    """
    try:
        first_line = _first_line(path)
        first_object = _object_in(first_line)
        # What begins as JSON is one value if its first line is no whole object, or an object with the rows under a key.
        # Else that line is a row, and so are the others.
        is_one_value = first_object is None or _under(first_object, keys) is not None
        if first_line.startswith(b"PAR1"):
            yield from _parquet_rows(path)
        elif keys and first_line.startswith((b"PK\3\4", b"PK\5\6")):
            yield from _zip_rows(path, keys[0])
        elif first_line.startswith(b"\x1f\x8b"):
            raise UserError(f"{path} is packed by gzip; unpack it.")
        elif first_line.startswith((b"{", b"[")) and is_one_value:
            yield from _json_rows(path, keys)
        elif first_object is not None:
            _refuse_columns(first_object, path)
            with path.open(encoding="utf-8-sig", newline="\n") as text:
                for number, line in enumerate(text, start=1):
                    if line.strip():
                        yield _json_row(line, f"{path}:{number}")
        else:
            with path.open(encoding="utf-8-sig", newline="") as text:
                yield from _csv_rows(text, path)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; save it in that encoding.") from None
    except OSError as error:
        if isinstance(error, UserError):
            raise
        reason = error.strerror or type(error).__name__
        raise UserError(f"{path} cannot be read ({reason}); check the file and its rights.") from None


def _first_line(path: Path) -> bytes:
    """The first line that is not empty, without a byte order mark; b"" without any."""
    with open_file(path, linked=True) as file:
        for line in file:
            text = line.removeprefix(codecs.BOM_UTF8).strip()
            if text:
                return text
    return b""


def _object_in(line: bytes) -> dict[str, Any] | None:
    """The object that a line is by itself; None if it is none."""
    if line.startswith(b"{"):
        with suppress(ValueError, RecursionError):
            value: dict[str, Any] = json.loads(line)
            return value
    return None


def _refuse_columns(row: dict[str, Any], path: Path) -> None:
    if row and all(isinstance(value, dict) and "0" in value for value in row.values()):
        hint = 'write rows, orient="records", lines=True'
        raise UserError(f"{path} holds columns, as pandas' to_json writes them; {hint}.")


def _under(value: dict[str, Any], keys: Sequence[str]) -> list[Any] | None:
    """What stands under the first of the keys that has several values; None without any."""
    for key in keys:
        inner: Any = value
        for name in key.split("."):
            inner = inner.get(name) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            return list(inner.values())
        if isinstance(inner, list):
            return inner
    return None


def _json_row(text: str | bytes, where: str) -> FileRow:
    """The row that a JSON object is; UserError for anything else."""
    try:
        values = _parsed(text, where)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise UserError(f"{where} is not a JSON object; correct or delete that line.")
    return FileRow(where, values)


def _json_rows(path: Path, keys: Sequence[str]) -> Iterator[FileRow]:
    """Yield the rows of a file that is one JSON value: a list of objects, or an object with one under a key."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = _parsed(text, str(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON that can be read ({error}); correct it, or write a row a line.") from None
    rows = _under(value, keys) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} holds no list of rows; write a JSON object a line, or a list of them.")
    for number, row in enumerate(rows, start=1):
        yield FileRow(f"{path} item {number}", row)


def _parsed(text: str | bytes, where: str) -> Any:
    """The value that JSON writes; UserError for an object with a key twice, as one of the two values would be lost."""

    def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated([key for key, _ in pairs], where)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unrepeated)


def _refuse_repeated(columns: Sequence[str], where: str) -> None:
    for name, count in Counter(columns).items():
        if count > 1:
            raise UserError(f"{where} has {name!r:.60} twice; rename or delete one.")


def _zip_rows(path: Path, folder: str) -> Iterator[FileRow]:
    """Yield the rows of a zip that has each as a JSON file in this folder."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.filename.startswith(f"{folder}/"):
                    continue
                if member.file_size > MOST_BYTES:
                    raise UserError(f"{path} has a file of more than {MOST_BYTES:,} bytes; give a smaller one.")
                yield _json_row(archive.read(member), f"{path} {visible(member.filename)}")
    except (zipfile.BadZipFile, ZstdError, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(f"{path} cannot be unpacked ({visible(str(error)):.80}); pack it anew.") from error


def _csv_rows(lines: Iterable[str], path: Path) -> Iterator[FileRow]:
    """Yield the rows of a CSV file's lines; each row is named by its first line."""
    csv.field_size_limit(_LONGEST)
    reader = csv.DictReader(lines, strict=True)
    first_line = 2
    try:
        names = reader.fieldnames or ()
        _refuse_repeated(names, f"{path}:1")
        for values in reader:
            # `DictReader` puts cells beyond the header under None, and None where a row has too few. Unchecked, a stray
            # comma would shift a value into another column.
            if None in values or None in values.values():
                raise UserError(f"{path}:{first_line} has not the header's count of cells; quote its commas.")
            yield FileRow(f"{path}:{first_line}", values)
            first_line = reader.line_num + 1
    except csv.Error:
        raise UserError(f"{path}:{first_line} is not a CSV row; correct its quotes.") from None


def _parquet_rows(path: Path) -> Iterator[FileRow]:
    """Yield the rows of a Parquet file, batch by batch."""
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
        _refuse_repeated(file.schema_arrow.names, str(path))
        number = 0
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield FileRow(f"{path} row {number}", values)
    except ArrowException:  # some are ValueErrors
        raise UserError(f"{path} is not a Parquet file that can be read; write it again.") from None
    except (ValueError, OverflowError) as error:  # such as a date of the year 0
        raise UserError(f"{path} has a value that Python cannot hold ({error}): leave its column out.") from None
