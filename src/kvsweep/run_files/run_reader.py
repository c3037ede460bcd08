"""The one reader of a run's folders: a cell's settings, rows, grades, provenance and DONE (docs/files.md).

Every call reads the disk, so that a sweep at work is seen as it is now.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvsweep.messages.errors import BrokenCell, UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import Completion, Grade, OnBad, Pair, PairRow, Problem, Shard, decode, refuse
from kvsweep.run_files.safe_files import open_file, read_file

# The fields that `Cell.describe` writes, except the check.
_CELL_FIELDS = {"schema", "cell_id", "condition", "model", "benchmark", "dataset_hash", "policy", "decoding", "impl"}
_CELL_FIELDS |= {"seed", "cache"}
_NEEDED = (row_types.CELL_FILE, row_types.PROBLEMS_FILE)
# The name of a server's setting that asks the baseline again.
CONTROL = "control"
DONE_NAMES = (*_NEEDED, Completion.file, Grade.file)  # the files whose sizes DONE names


class Done(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The contents of DONE: the stored completions, and the sizes in bytes of the cell's files by name.

    Attributes: rule: the `grading_rule` of the grades.
    """

    completions: int = 0
    draws: int = 0
    problems: list[str] = []
    files: dict[str, int]
    rule: str = ""


@dataclass(frozen=True)
class StoredCell:
    """One cell's folder; the shards' files are read together (`Shard.file`)."""

    folder: Path

    @property
    def name(self) -> str:
        """The cell's id, which is its folder's name."""
        return self.folder.name

    @property
    def settings(self) -> Any:
        """The contents of cell.yaml, a dictionary; raises BrokenCell if it describes no cell."""
        path = self.folder / row_types.CELL_FILE
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        cell = None
        with suppress(UnicodeDecodeError, yaml.YAMLError, RecursionError):
            text = read_file(path, 1 << 20).decode()
            # With YAML aliases a short file could describe more than any memory holds; no cell has aliases.
            events = yaml.parse(text, Loader=loader) if "&" in text else ()
            if not any(isinstance(event, yaml.AliasEvent) for event in events):
                cell = yaml.load(text, loader)
        if not isinstance(cell, dict):
            way_out = "restore the file, or delete its folder and run the cell again"
            raise BrokenCell(f"{path} describes no cell: {way_out}.")
        row_types.check_schema(cell, path)
        check_fits = True
        if "check" in cell:
            check_fits = cell.pop("check") == row_types.content_hash([row_types.cell_of(self.folder), cell])
        # A field that no cell has may be a misspelt check.
        if not check_fits or not cell.keys() <= _CELL_FIELDS:
            edited = "was edited, or is another cell's"
            raise BrokenCell(f"{path} {edited}: restore it, or delete it and run the cell again.")
        return cell

    def files(self, name: str) -> dict[Shard, Path]:
        """The files called `name`: the whole cell's (`completions.jsonl`) first, then the shards'."""
        return row_types.shard_files(self.folder, name)

    def rows(
        self, kind: type[Any], *, file: str = "", shard: Shard | None = None, on_bad: OnBad = refuse
    ) -> Iterator[Any]:
        """Yield the rows of `kind`'s file (or `file`), of a shard or all; a pair's row once (`latest_rows`)."""
        files = self.files(file or kind.file)
        paths = [path for of_shard, path in files.items() if shard in (None, of_shard)]  # None: all shards
        if issubclass(kind, PairRow):
            return row_types.latest_rows(paths, kind, on_bad=on_bad)
        return chain.from_iterable(row_types.read_rows(path, kind, on_bad=on_bad) for path in paths)

    def pairs(self, file: str = Completion.file) -> set[Pair]:
        """The (problem_id, draw) of the rows that `file` and its shards hold; broken lines count as missing."""
        pairs = set[Pair]()
        # `rows` would read each file twice, to say which row of a pair is the last.
        for path in self.files(file).values():
            pairs.update(row.key for row in row_types.read_rows(path, PairRow, on_bad=row_types.ignore))
        return pairs

    def problems(self, *, on_bad: OnBad = refuse) -> dict[str, Problem]:
        """The problems as asked, by id; empty if the file is missing."""
        return {row.id: row for row in self.rows(Problem, on_bad=on_bad)}

    def grades(self, kind: type[Any] = Grade, *, shard: Shard | None = None, on_bad: OnBad = refuse) -> dict[Pair, Any]:
        """The grades by (problem_id, draw), of one shard or all; grades by another rule than cell.yaml's are bad.

        `kind` is `Grade` or a view of it that has `rule`.
        """
        grades = dict[Pair, Any]()
        rule = None
        by_other_rule = 0
        for row in self.rows(kind, shard=shard, on_bad=on_bad):
            # The rule of cell.yaml is made when the first row names one; a row of another program names none.
            if row.rule is not None and rule is None:
                rule = row_types.grading_rule(self.settings)
            if row.rule in (rule, None):
                grades[row.key] = row
            else:
                by_other_rule += 1
        if by_other_rule:
            reason = f"{by_other_rule} of its grades are by another rule than {row_types.CELL_FILE} names"
            hint = "grade the cell again with kvsweep grade"
            first = next(iter(self.files(Grade.file).values()))
            on_bad(row_types.BadLine(path=first, number=0, text=b"", reason=reason, hint=hint))
        return grades

    def provenances(self, on_bad: Callable[[Path, Exception], object]) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yield each shard's provenance with its file; one that cannot be read goes to `on_bad`."""
        for path in self.files(row_types.PROVENANCE_FILE).values():
            try:
                yield path, read_provenance(path)
            except (OSError, ValueError, RecursionError) as error:
                on_bad(path, error)

    def sizes(self, *names: str) -> dict[str, int]:
        """The sizes in bytes of files and their shards, by name; -1 if the last line is incomplete."""
        paths = chain(*(self.files(name).values() for name in names))
        return {path.name: _whole_size(path) for path in paths}

    @property
    def done(self) -> Done | None:
        """The contents of DONE; None if it is missing or cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            return decode(read_file(self.folder / row_types.DONE_FILE), Done)
        return None

    @property
    def is_done(self) -> bool:
        """True if the files of completions have the sizes in DONE; grades may be made again without a sweep."""
        done = self.done
        if done is None:
            return False
        stem, _, _ = Completion.file.partition(".")
        sizes_when_done = {name: size for name, size in done.files.items() if name.startswith(stem)}
        return self.sizes(Completion.file) == sizes_when_done

    def covers(self, problem_ids: Collection[str], draws: int, rule: str) -> bool:
        """True if DONE names all these completions, graded by `rule`, and its files' sizes; reads no rows."""
        done = self.done
        if done is None or done.rule != rule:
            return False
        has_all = draws <= done.draws and {*problem_ids} <= {*done.problems}
        has_files = done.files.keys() >= {*_NEEDED}
        return has_all and has_files and done.files == self.sizes(*DONE_NAMES)


def _whole_size(path: Path) -> int:
    """The bytes of a file; -1 if its last line has no end."""
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        last_byte = file.read()
        return size if last_byte in (b"", b"\n") else -1


def is_served(settings: Mapping[str, Any]) -> bool:
    """True if a server wrote the completions of the cell with these settings."""
    return settings.get("impl") == "openai"


def stored_cells(run_directory: Path) -> list[StoredCell]:
    """Return the cells of a run directory, in the order of their ids, whatever their cell.yaml says."""
    return [StoredCell(path.parent) for path in sorted(run_directory.glob(f"*/{row_types.CELL_FILE}"))]


def read_cells(run_directory: Path) -> Iterator[tuple[StoredCell, dict[str, Any]]]:
    """Yield each valid cell with its settings; raises OtherSchemaError for another schema."""
    for cell in stored_cells(run_directory):
        try:
            settings = cell.settings
        except (OSError, BrokenCell):
            continue
        yield cell, settings


def read_screen(directory: Path) -> dict[str, row_types.Screened]:
    """Return the cells of a run directory that a screen left out, by cell_id; UserError for a broken file."""
    path = directory / row_types.SCREEN_FILE
    try:
        return decode(read_file(path), dict[str, row_types.Screened])
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        reason = f"{path} names no screened cells ({error})"
        raise UserError(f"{reason}: delete the file, and run the sweep with its screen= again.") from error


def read_provenance(path: Path) -> dict[str, Any]:
    """Return the contents of a provenance file; raises ValueError if it is no JSON object."""
    provenance = decode(read_file(path), dict[str, Any])
    row_types.check_schema(provenance, path)
    return provenance
