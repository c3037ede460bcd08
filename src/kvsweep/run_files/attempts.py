"""Cells that a failed sweep of servers left empty, beside cells of the same settings that hold completions."""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvsweep.messages.command_line import counted
from kvsweep.run_files.row_types import Completion
from kvsweep.run_files.run_reader import is_served, read_cells, stored_cells
from kvsweep.run_files.task_status import TaskStatus


class Attempts(NamedTuple):
    """Ids of empty cells, the run's tasks without these cells, and a sentence that names them for a user."""

    cells: set[str]
    tasks: list[TaskStatus]
    notes: list[str]


def failed_attempts(run_directory: Path, tasks: Sequence[TaskStatus]) -> Attempts:
    """Return a run's empty cells of servers that no task works on, if their setting has another cell with rows."""
    empty = {cell.name for cell in stored_cells(run_directory) if not any(cell.sizes(Completion.file).values())}
    for task in tasks:
        if task.state in ("running", "queued"):
            empty -= task.cells.keys()
    by_setting = defaultdict[tuple[str, str], set[str]](set)
    for cell, settings in read_cells(run_directory) if empty else ():
        if is_served(settings):
            by_setting[settings["condition"], settings["policy"]["name"]].add(cell.name)
    failed = set[str]()
    for names in by_setting.values():
        if not names <= empty:
            failed |= names & empty
    if not failed:
        return Attempts(failed, [*tasks], [])
    kept = list[TaskStatus]()
    sentence = f"left out, without a completion: {counted(len(failed), 'cell')} of a failed sweep."
    removed = [run_directory / name for name in sorted(failed)]
    for task in tasks:
        cells = {name: row for name, row in task.cells.items() if name not in failed}
        if len(cells) < len(task.cells):
            sentence += f" Resume: `{task.command}`."
        if cells:
            kept.append(replace(task, cells=cells))
        else:
            removed.append(TaskStatus.path(run_directory, task.task))
    return Attempts(failed, kept, [f"{sentence} Remove: `{shlex.join(['rm', '-r', *map(str, removed)])}`."])
