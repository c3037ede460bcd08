"""Cells that a failed sweep of servers left empty, beside cells of the same settings that hold completions."""

import shlex
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvsweep.command_line import counted
from kvsweep.records import Completion
from kvsweep.stored import is_served, read_cells, stored_cells
from kvsweep.task_status import TaskStatus


class Attempts(NamedTuple):
    """Ids of empty cells, the run's tasks without these cells, and a sentence that names them for a user."""

    cells: Collection[str]
    tasks: list[TaskStatus]
    notes: list[str]


def failed_attempts(run_directory: Path, tasks: Sequence[TaskStatus]) -> Attempts:
    """Return a run's empty cells of servers that no task works on, if their setting has another cell with rows."""
    empty = {cell.name for cell in stored_cells(run_directory) if not any(cell.sizes(Completion.file).values())}
    for task in tasks:
        if task.state in ("running", "queued"):
            empty -= task.cells.keys()
    if not empty:
        return Attempts((), [*tasks], [])
    by_setting = defaultdict[tuple[str, str], set[str]](set)
    for cell, settings in read_cells(run_directory):
        if is_served(settings):
            by_setting[settings["condition"], settings["policy"]["name"]].add(cell.name)
    failed = list[str]()
    for names in by_setting.values():
        if not names <= empty:
            failed += sorted(names & empty)
    return _without(failed, run_directory, tasks)


def _without(failed: Collection[str], run_directory: Path, tasks: Sequence[TaskStatus]) -> Attempts:
    kept = list[TaskStatus]()
    resuming = ""
    removed = [str(run_directory / name) for name in failed]
    for task in tasks:
        cells = {name: row for name, row in task.cells.items() if name not in failed}
        if len(cells) < len(task.cells):
            resuming += f" Resume: `{task.command}`."
        if cells:
            kept.append(replace(task, cells=cells))
        else:
            removed.append(str(TaskStatus.path(run_directory, task.task)))
    what = f"left out, without a completion: {counted(len(failed), 'cell')} of a failed sweep."
    sentence = f"{what}{resuming} Remove: `{shlex.join(['rm', '-r', *removed])}`."
    return Attempts(failed, kept, [sentence] if failed else [])
