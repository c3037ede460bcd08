"""Which cells are complete: the contents of DONE, the mark that a cell gets last."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

import msgspec

from kvsweep.base.files import read_file
from kvsweep.base.records import (
    COMPLETIONS_FILE,
    DONE_FILE,
    GRADES_FILE,
    PROBLEMS_FILE,
    decode,
    grading_rule,
    shard_files,
)
from kvsweep.harness.sweep.plan.cell import Cell


class Done(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The contents of DONE: the stored completions, and the sizes of the files that hold them.

    Attributes:
        rule: the `grading_rule` of the grades.
        plans: the sequential jobs for which these draws are enough, because they have decided the cell (`Job.plan`).
    """

    completions: int
    draws: int
    problems: list[str]
    files: dict[str, int]
    plans: list[str] = []
    rule: str = ""

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Read a cell's DONE; None where there is none, or where the files have other sizes now. No rows are read."""
        try:
            done = decode(read_file(directory / DONE_FILE), cls)
        except (OSError, ValueError):
            return None
        return done if done.files == file_sizes(directory) and PROBLEMS_FILE in done.files else None

    def covers(self, problem_ids: Collection[str], draws: int) -> bool:
        return set(problem_ids) <= set(self.problems) and draws <= self.draws


def is_done(run_directory: Path, cell: Cell, problem_ids: Sequence[str], draws: int, plan: str | None = None) -> bool:
    """True if DONE lists all these completions, or the plan of a sequential job; reads no rows."""
    done = Done.read(run_directory / cell.cell_id)
    if done is None or done.rule != grading_rule(cell.describe()):
        return False
    return plan in done.plans or done.covers(problem_ids, draws)


def file_sizes(directory: Path) -> dict[str, int]:
    """The sizes in bytes of the files that DONE vouches for, by name."""
    names = (PROBLEMS_FILE, COMPLETIONS_FILE, GRADES_FILE)
    return {path.name: path.stat().st_size for name in names for path in shard_files(directory, name).values()}
