"""Grade completions while the job decodes, so that a running or killed sweep shows its Pass@1 so far."""

import sys
import threading
from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import islice
from typing import Self

from tqdm import tqdm

from kvsweep.base import records
from kvsweep.base.files import open_file
from kvsweep.base.records import Completion, Grade, Pair, PairRow, decode
from kvsweep.harness.grading.grader import Grader, Standard, read_standard
from kvsweep.harness.sweep.run.store import CellStore

_LOOK_S = 0.5
# Rows that are graded at once: every worker has some, and the end of the job waits for few.
_BATCH = 4


class GradeThread:
    """A thread that reads the completions of open cells as they come, and appends their grades. A context manager.

    The thread waits for the grading workers, and the decoding goes on meanwhile. At the end `Grader.grade_cell` grades
    the completions that have no grade: the last ones, all that came after an error in the thread, and those that
    overran their time, because a row has less of the processor beside the decoding than after it. Nothing else may use
    the workers or write the cells' grades until the block ends.
    """

    def __init__(self, grader: Grader, stores: Collection[CellStore]) -> None:
        self._grader, self._cells = grader, [_OpenCell(store) for store in stores]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            while not self._end.wait(_LOOK_S):
                for cell in self._cells:
                    self._grade(cell)
        except Exception as error:  # no error of the grading may stop the decoding
            if not self._end.is_set():
                note = f"note: all completions are graded after decoding, none beside it any more ({error})."
                tqdm.write(note, file=sys.stderr)

    def _grade(self, cell: "_OpenCell") -> None:
        ungraded = cell.ungraded()
        while (rows := list(islice(ungraded, _BATCH))) and not self._end.is_set():
            for grade in self._grader.grade(rows, cell.standard):
                if grade.outcome != "grader_timeout":
                    cell.store.append_grade(grade)


class _OpenCell:
    """An open cell, and how many bytes of its completions have been read."""

    def __init__(self, store: CellStore) -> None:
        self.store, self._read = store, 0

    @cached_property
    def standard(self) -> Standard:
        return read_standard(self.store.directory)

    @cached_property
    def _graded_before(self) -> set[Pair]:
        path = self.store.directory / self.store.shard.file(records.GRADES_FILE)
        rows = records.read_rows(path, Grade, on_bad=records.ignore)
        return {row.key for row in rows if row.rule == self.standard.id and row.outcome != "grader_timeout"}

    def ungraded(self) -> Iterator[Completion]:
        """Yield the completions that came since the last call and have no grade."""
        path = self.store.directory / self.store.shard.file(records.COMPLETIONS_FILE)
        if path.stat().st_size == self._read:
            return
        with open_file(path) as lines:
            lines.seek(self._read)
            for line in lines:
                if not line.endswith(b"\n"):  # the line is still being written
                    return
                self._read += len(line)
                if decode(line, PairRow).key not in self._graded_before:
                    yield decode(line, Completion)
