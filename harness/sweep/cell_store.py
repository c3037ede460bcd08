"""The files of one cell: rows are appended, other files are replaced whole, DONE comes last.

docs/files.md describes the files of `<results_dir>/<run_name>/<cell_id>/`. Each shard writes its own files, such as
completions-1of4.jsonl; a reader joins the files of all shards.

Locks are `flock` locks, which end with their process in any case. NFS needs version 4 (or 3 with lockd), Lustre the
mount option `flock`. On a file system without such locks, two writers cannot be kept apart.
"""

import json
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Self

import msgspec
import yaml
from filelock import FileLock, Timeout

from kvsweep.annexes import annex
from kvsweep.compression.source import code_hash, is_same_code
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.estimate import TokensLeft
from kvsweep.harness.sweep.share import Share, status_of
from kvsweep.messages.command_line import LOCKED, counted
from kvsweep.messages.errors import BrokenCell, UserError, plain_disk_errors
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import (
    COMPLETIONS_FILE,
    WHOLE,
    Completion,
    Grade,
    Pair,
    PairRow,
    Problem,
    Shard,
    StoredRow,
)
from kvsweep.run_files.run_reader import DONE_NAMES, Done, StoredCell
from kvsweep.run_files.safe_files import locked, make_folder, open_file, read_file, read_lines, replace_text, replacing
from kvsweep.run_files.task_status import Reporter, last_lines

LOCK_FILE = ".lock"

# The most files that a process opens, and how many of them are not cells' locks.
_MOST_FILES, _OTHER_FILES = 1 << 16, 96

# A killed process loses none of its rows; if the machine dies, rows of the last second can be lost.
_SYNC_SECONDS = 1.0

_End = row_types.view(Completion, "stop_reason")


class CellLockedError(UserError):
    """Another process writes this cell."""

    exit_code = LOCKED


class CellStore:
    """One cell's folder, for one shard's process; entering raises CellLockedError if another process holds it."""

    def __init__(
        self, run: Path, cell: Cell, problems: Sequence[Problem], shard: Shard = WHOLE, rows: str = COMPLETIONS_FILE
    ) -> None:
        self.cell = cell
        self.problems = problems
        self.shard = shard
        self.directory = run / cell.cell_id
        self.stored = StoredCell(self.directory)
        self.finished_pairs: set[Pair] = set()
        self._rows = rows
        self._path = self._file(rows)
        self._lock = FileLock(self._file(LOCK_FILE), timeout=0)
        self._synced = 0.0
        self._provenance: dict[str, Any] = {}
        self.listener: Callable[[Any], object] = lambda row: None  # gets every appended row

    @classmethod
    def of(cls, share: Share, cell: Cell) -> Self:
        job = share.job
        return cls(job.run_directory, cell, job.benchmark.problems, job.shard, share.rows)

    def _file(self, name: str) -> Path:
        """Return this shard's file of a name, such as completions-1of4.jsonl of completions.jsonl."""
        return self.directory / self.shard.file(name)

    def __enter__(self) -> Self:
        with plain_disk_errors(self.directory):
            make_folder(self.directory)
            self._take_lock()
            try:
                self._open()
            except BaseException:
                self._lock.release()
                raise
        return self

    def _open(self) -> None:
        """Write the cell's settings and problems, clean its rows file, and read which pairs are stored."""
        # Read only so that a file of another schema is refused; a missing or a broken one is written below.
        with suppress(FileNotFoundError, BrokenCell):
            _ = self.stored.settings
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # both write the same bytes
        settings = yaml.dump(self.cell.describe(), None, dumper, sort_keys=False)
        replace_text(self.directory / row_types.CELL_FILE, settings)
        lines = [problem.to_line(self.directory).encode() for problem in self.problems]
        path = self.directory / row_types.PROBLEMS_FILE
        # A smaller limit takes the first of the same problems; the stored rows still need the others.
        starts_same = path.exists() and list(islice(read_lines(path), len(lines))) == lines
        if not starts_same:
            replace_text(path, b"".join(lines).decode())
        row_types.drop_torn_line(self._path)
        quarantine_broken_lines(self._path)
        open_file(self._path, "ab").close()  # makes the file if it is not there
        self.finished_pairs = self.stored.pairs(self._rows)

    def read_completions(self, wanted: Collection[Pair], kind: type[Any] = Completion) -> Iterator[Any]:
        """Yield the wanted pairs' completions of all shards, as `kind`; reads no file if none is wanted."""
        if not wanted:
            return iter(())
        return (row for row in self.stored.rows(kind, on_bad=row_types.ignore) if row.key in wanted)

    def __exit__(self, *exception: object) -> None:
        try:
            with plain_disk_errors(self.directory):
                self._sync()
        finally:
            self._lock.release()

    def append(self, row: PairRow) -> None:
        """Append one row as one line. The row survives a kill at once, a crash of the machine after a second."""
        assert self._lock.is_locked, "enter the store first"
        assert row.key not in self.finished_pairs, f"{row.key} written twice"
        with plain_disk_errors(self.directory):
            row_types.append_row(self._path, row)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self._sync()
        self.finished_pairs.add(row.key)
        self.listener(row)

    def _sync(self) -> None:
        """Let the disk write what this shard has appended to its rows and grades."""
        for path in (self._path, self._file(row_types.GRADES_FILE)):
            if path.exists():
                with open_file(path) as file:
                    os.fsync(file.fileno())
        self._synced = time.monotonic()

    def append_grade(self, grade: Grade) -> None:
        path = self._file(row_types.GRADES_FILE)
        with plain_disk_errors(self.directory), locked(path):
            row_types.append_row(path, grade)

    def append_row(self, row: StoredRow) -> None:
        with plain_disk_errors(self.directory):
            row_types.append_row(self._file(row.file), row)

    def begin_pass(self, provenance: dict[str, Any], decoding_pass: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Record the origin of the rows to come, beside earlier decoding passes, and delete DONE.

        `provenance` is the same for all passes of the cell, `decoding_pass` is of this process. Return the earlier
        passes of all shards. Raises UserError if other code of the policy has made rows of this cell.
        """
        path = self._file(row_types.PROVENANCE_FILE)
        code = code_hash(type(self.cell.policy))
        with plain_disk_errors(self.directory):
            passes = {path: list[Any]()}  # by the shards' files
            for file, record in self.stored.provenances(self._move_aside):
                if "decoding_passes" in record:
                    passes[file] = record["decoding_passes"]
                else:
                    self._move_aside(file)
            earlier_passes = list(chain(*passes.values()))
            self._check_code(code, earlier_passes)
            new_pass = {**decoding_pass, "policy_code": code}
            (self.directory / row_types.DONE_FILE).unlink(missing_ok=True)
            self._provenance = {"schema": row_types.SCHEMA, **provenance, "decoding_passes": [*passes[path], new_pass]}
            self._write_provenance()
        return earlier_passes

    def _move_aside(self, path: Path, error: Exception | None = None) -> None:
        """Move this shard's damaged provenance aside, with a note; another shard's is left to that shard's process.

        Raises an OSError again: the file may be whole.
        """
        if path == self._file(row_types.PROVENANCE_FILE):
            if isinstance(error, OSError):
                raise error
            aside = path.replace(path.with_name(f"{path.name}.quarantine"))
            print(f"note: {path} cannot be read; it is {aside.name} now, and a new one begins.", file=sys.stderr)

    def note(self, **facts: Any) -> None:
        """Record what this process's pass has learned since it began; facts that stand there are not written again."""
        last_pass = self._provenance["decoding_passes"][-1]  # that of this process, from `begin_pass`
        are_recorded = facts.items() <= last_pass.items()  # a subset
        if not are_recorded:
            last_pass |= facts
            with plain_disk_errors(self.directory):
                self._write_provenance()

    def _write_provenance(self) -> None:
        replace_text(self._file(row_types.PROVENANCE_FILE), json.dumps(self._provenance, indent=2) + "\n")

    def _check_code(self, code: str, passes: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError if a pass was made by code of the policy with another hash than `code`."""
        for earlier in passes:
            # A pass without "policy_code" is from a version that recorded none: nothing shows that its code differed.
            earlier_code = earlier.get("policy_code", code)
            if not is_same_code(earlier_code, code):
                begun = f"cell {self.cell.cell_id} was begun by other code of policy={self.cell.policy.name}"
                hint = "go on with that code, or take another run_name for cells of this code"
                raise UserError(f"{begun} ({earlier_code}, now {code}): {hint}.")

    def mark_done(
        self, problem_ids: Sequence[str], draws: int, grade: Callable[[Path], object] = lambda folder: None
    ) -> bool:
        """Write DONE if the shards have stored all these draws of all these problems, else delete DONE.

        `grade` gets the folder before DONE is written: another shard may have ended before grading its last rows.
        """
        pairs = set(product(problem_ids, range(draws)))
        path = self.directory / row_types.DONE_FILE
        # Read again: another shard's file may have lost rows since this process opened the cell.
        self.finished_pairs = self.stored.pairs()
        with plain_disk_errors(self.directory):
            if not pairs <= self.finished_pairs:
                path.unlink(missing_ok=True)
                return False
            if len(self.stored.files(COMPLETIONS_FILE)) > 1:
                grade(self.directory)
            self._sync()
            done = Done(
                completions=len(pairs),
                draws=draws,
                problems=list(problem_ids),
                files=self.stored.sizes(*DONE_NAMES),
                rule=row_types.grading_rule(self.cell.describe()),
            )
            replace_text(path, json.dumps(msgspec.to_builtins(done)) + "\n")
        return True

    def _take_lock(self) -> None:
        """Take the shard's lock and leave this process's name beside it; raises CellLockedError if another has it."""
        try:
            self._lock.acquire()
            for other in _locks_of_other_counts(self.directory, self.shard):
                with other:  # raises Timeout if a process holds it; else it is released at once
                    pass
        except Timeout as timeout:  # of this lock, or of one of the others
            self._lock.release()
            owner = "another process"
            with suppress(OSError):
                owner = read_file(Path(f"{timeout.lock_file}.owner")).decode(errors="replace")
            hint = "wait for it to end, stop it, or split the cell with shard=i/n, the same n for all"
            name = f"cell {self.cell.cell_id}, shard {self.shard}"
            raise CellLockedError(f"{name}, is being written by {owner}: {hint}.") from None
        replace_text(Path(f"{self._lock.lock_file}.owner"), f"process {os.getpid()} on {platform.node()}")


def allow_open_cells() -> int:
    """Raise this process's limit of open files; return how many cells, one lock each, it can then hold open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # "No limit" is -1, which `min` would take for the lowest.
    most_files = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, hard))
    return max(1, most_files - _OTHER_FILES)


def _locks_of_other_counts(directory: Path, shard: Shard) -> Iterator[FileLock]:
    """Return the locks of shards with another count; their writers could write the same pairs."""
    for path in directory.glob(f"{LOCK_FILE}*"):
        lock = re.fullmatch(rf"{LOCK_FILE}(?:-\d+of(\d+))?", path.name)  # .lock or .lock-1of4, and no .lock-1of4.owner
        if lock and int(lock[1] or 1) != shard.count:
            yield FileLock(path, timeout=0)


def quarantine_broken_lines(path: Path) -> None:
    """Move invalid lines to `<file>.quarantine`, and print a note that their rows are made again."""
    bad_lines: list[row_types.BadLine] = []
    for _ in row_types.read_rows(path, PairRow, on_bad=bad_lines.append):
        pass  # only the bad lines count
    if not bad_lines:
        return
    quarantine = path.with_name(f"{path.name}.quarantine")
    with open_file(quarantine, "ab") as file:
        file.writelines(line.text for line in bad_lines)
    bad_numbers = {line.number for line in bad_lines}
    with replacing(path) as temporary, temporary.open("wb") as file:
        for number, line in enumerate(read_lines(path), start=1):
            if number not in bad_numbers:
                file.write(line)
    moved = f"{counted(len(bad_lines), 'broken line')} (first: line {bad_lines[0].number}), now in {quarantine.name}"
    print(f"note: {path} had {moved}; the run makes their completions again.", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class OpenCells:
    """The unfinished cells of one share, open for writing: files by cell_id, status file, remaining tokens."""

    share: Share
    stores: Mapping[str, CellStore]
    reporter: Reporter
    left: TokensLeft  # a replay, which decodes nothing, leaves it as it is
    not_finite: set[Pair] = field(default_factory=set)  # completions of this process that ended in NaN or infinity

    def lacks(self, cell_id: str, pair: Pair) -> bool:
        return pair not in self.stores[cell_id].finished_pairs

    def append(self, cell_id: str, row: PairRow) -> None:
        """Store a row of a cell, and count it in the status and in the remaining tokens."""
        self.stores[cell_id].append(row)
        self.reporter.stored(cell_id)
        if isinstance(row, Completion):
            self.left.store(cell_id, row.key, row.num_tokens)
            if row.stop_reason == "not_finite":
                self.reporter.status.cells[cell_id].not_finite += 1
                self.not_finite.add(row.key)


@contextmanager
def open_cells(share: Share, cells: Sequence[Cell]) -> Iterator[OpenCells]:
    """Open the files of some of a share's cells, and keep the status current, while the block runs.

    Raises CellLockedError for a cell that another process writes; UserError for weights that changed since the job was
    planned, and for a file that cannot be written.
    """
    job = share.job
    status = status_of(share, "running")
    with ExitStack() as stack:
        try:
            job.check_inputs()
            stores = {cell.cell_id: stack.enter_context(CellStore.of(share, cell)) for cell in cells}
        except CellLockedError:
            raise  # the status file belongs to the process that holds the lock
        except Exception as error:
            status.state, status.error = "failed", last_lines(error)
            with suppress(OSError):
                status.write(job.run_directory)
            raise
        # What earlier processes have stored counts as progress.
        for cell_id, store in stores.items():
            stored = store.finished_pairs.intersection(share.pairs)
            status.cells[cell_id].finished = len(stored)
            if not share.replays:
                ends = store.read_completions(stored, _End)
                status.cells[cell_id].not_finite = sum(row.stop_reason == "not_finite" for row in ends)
        # Entered before the reporter, so that the tracker ends after it and sees the last status.
        if job.tracker.kind != "none":
            stack.enter_context(annex("tracker").tracked(job.tracker, job.run_directory, status, stores))
        reporter = Reporter(job.run_directory, status)
        left = TokensLeft(share, {cell_id: store.finished_pairs for cell_id, store in stores.items()})
        if not share.replays:
            reporter.tokens_left = left.__int__  # called for each status that is written
        yield OpenCells(share=share, stores=stores, reporter=stack.enter_context(reporter), left=left)
