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
    names_of_setting = defaultdict[tuple[str, str], set[str]](set)
    # Most runs have no empty cell, and their settings need not be read.
    for cell, settings in read_cells(run_directory) if empty else ():
        if is_served(settings):
            names_of_setting[settings["condition"], settings["policy"]["name"]].add(cell.name)
    failed = set[str]()
    for names in names_of_setting.values():
        if not names <= empty:
            failed |= names & empty
    if not failed:
        return Attempts(failed, [*tasks], [])
    other_tasks = list[TaskStatus]()
    sentence = f"left out, without a completion: {counted(len(failed), 'cell')} of a failed sweep."
    useless = [run_directory / name for name in sorted(failed)]  # what the user may remove
    for task in tasks:
        cells = {name: progress for name, progress in task.cells.items() if name not in failed}
        if len(cells) < len(task.cells):
            sentence += f" Resume: `{task.command}`."
        if cells:
            other_tasks.append(replace(task, cells=cells))
        else:
            useless.append(TaskStatus.path(run_directory, task.task))
    return Attempts(failed, other_tasks, [f"{sentence} Remove: `{shlex.join(['rm', '-r', *map(str, useless)])}`."])
