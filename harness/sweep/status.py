"""Read the progress of a sweep from its tasks' status files; the command `kvsweep status`.

Each task writes its state to a small file every few seconds, because SLURM calls a task "completed" even if it raised
an error. The command reads these files, the cells' DONE and their grades. It reads no completion.
"""

import json
import math
import os
import shlex
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from kvsweep.analysis.notation import percent, percent_pm
from kvsweep.analysis.statistics.pass_at_1 import Score, read_score
from kvsweep.harness.sweep.slurm_queue import tasks_now
from kvsweep.messages.command_line import FAILED, counted
from kvsweep.messages.errors import BrokenCell, UserError
from kvsweep.messages.escape import visible
from kvsweep.run_files import row_types
from kvsweep.run_files.attempts import failed_attempts
from kvsweep.run_files.run_reader import StoredCell, stored_cells
from kvsweep.run_files.task_status import CellProgress, State, TaskStatus, policy_label

# A cell without DONE has the first of these states among its shards; if all shards are done, it has stopped.
WORST_FIRST: tuple[State, ...] = ("failed", "stopped", "running", "queued")
AT_WORK: tuple[State, ...] = ("running", "queued")


class CellStatus(CellProgress, kw_only=True):
    """One cell's progress over all shards: `graded` completions have a grade, `error` belongs to `pass_at_1`."""

    cell_id: str
    state: State
    graded: int = 0
    pass_at_1: float | None = None
    error: float | None = None

    @property
    def ungraded(self) -> int:
        return 0 if self.random_weights else max(0, self.finished - self.graded)


@dataclass(kw_only=True)
class SweepStatus:
    """All cells and tasks of a run directory; tasks as seen from outside."""

    directory: Path
    state: State  # running or queued if any task is, else done if all cells are, else stopped
    cells: list[CellStatus]
    tasks: list[TaskStatus]
    finished: int
    expected: int
    replayed: int  # stored rows of replayed completions
    to_replay: int  # all rows of replayed completions, stored or not
    tokens_per_second: float  # live tokens of the running tasks over the last minute
    seconds_left: float | None  # until all tasks have decoded and replayed, at the running tasks' pace
    failed: list[TaskStatus]  # tasks that failed or stopped before their cells were done, not taken over by newer tasks
    notes: list[str]  # on cells that are left out
    retry: list[str]  # the commands that resume work which no task is doing


def read_sweep(directory: Path, only: Collection[str] | None = None) -> SweepStatus:
    """Read the progress of a run directory's cells: all, or those with these ids."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; give the folder of a run, such as results/runs/demo.")
    attempts = failed_attempts(directory, tasks_now(directory))  # of servers: empty cells, which are left out here
    tasks = [task for task in attempts.tasks if only is None or not task.cells.keys().isdisjoint(only)]
    replays = [task for task in tasks if task.replays]
    cells = _cells_of_tasks(directory, replays)
    # A cell that is only replayed expects no completion; its state is its replay's.
    for cell in cells.values():
        if cell.finished >= cell.expected:
            cell.state = "done"
        cell.finished = cell.expected = 0
    cells |= _cells_of_tasks(directory, [task for task in tasks if not task.replays])
    # Cells that no task names, as without their status files.
    named = {*cells, *attempts.cells}
    for stored in stored_cells(directory):
        is_wanted = only is None or stored.name in only
        if is_wanted and stored.name not in named:
            with suppress(BrokenCell, OSError, KeyError, TypeError):
                cells[stored.name] = _cell_without_task(stored)
    # A task may name others, too.
    cells = {cell_id: cell for cell_id, cell in cells.items() if only is None or cell_id in only}
    if not cells:
        raise UserError(f"{directory} holds no cell and no status of one; give the folder of a run that has begun.")
    for cell in cells.values():
        with suppress(FileNotFoundError):  # a deleted cell.yaml comes back at the next start
            _add_grades(cell, directory / cell.cell_id)
    finished, expected = _counts(cells.values())
    replayed, to_replay = _counts(chain.from_iterable(task.cells.values() for task in replays))
    states = {cell.state for cell in cells.values()}
    # A cell that is being replayed may be done, but then the sweep is not.
    states.update(task.state for task in replays if task.state in AT_WORK)
    state: State = "done" if states == {"done"} else "stopped"
    state = min(states.intersection(AT_WORK), key=AT_WORK.index, default=state)
    done_cells = {cell_id for cell_id, cell in cells.items() if cell.state == "done"}
    resting = _resting(tasks, done_cells)
    # A task may be done although its cells lack rows: those of a round that has not begun, or of a failed task. While
    # other tasks are at work, such rows may still come; once all rest, the done tasks' command resumes too.
    failed = [task for task in resting if task.state != "done"]
    commands = set[str]()
    for task in failed if state in AT_WORK else resting:
        commands.update(_resuming(task, tasks))
    return SweepStatus(
        directory=directory,
        state=state,
        # By model and benchmark, the full cache first.
        cells=sorted(
            cells.values(), key=lambda cell: (*_panel(cell), cell.policy != "full", cell.policy, cell.cell_id)
        ),
        tasks=tasks,
        finished=finished,
        expected=expected,
        replayed=replayed,
        to_replay=to_replay,
        tokens_per_second=sum((task.pace for task in tasks if task.state == "running"), start=0.0),
        seconds_left=_seconds_left(tasks),
        failed=failed,
        notes=attempts.notes,
        retry=sorted(commands),
    )


def _panel(cell: CellStatus) -> tuple[str, str]:
    return cell.model, cell.benchmark


def _resting(tasks: Sequence[TaskStatus], done_ids: Collection[str]) -> list[TaskStatus]:
    """Return the tasks that are not at work although cells of theirs lack rows, which no newer task has taken over.

    `done_ids`: the ids of the cells that are done.
    """
    newest: dict[tuple[bool, str, str], TaskStatus] = {}  # by replay or not, shard and cell
    # A waiting task counts as newer than all others.
    for task in sorted(tasks, key=lambda task: task.heartbeat or math.inf):
        for cell_id in task.cells:
            newest[task.replays, task.shard, cell_id] = task  # in place of an earlier one
    resting = {}
    for (is_replay, _, cell_id), task in newest.items():
        progress = task.cells[cell_id]
        # A replay has no DONE, so its counts decide.
        is_complete = progress.finished >= progress.expected if is_replay else cell_id in done_ids
        if task.state not in AT_WORK and not is_complete:
            resting[task.task] = task
    return list(resting.values())


def _resuming(task: TaskStatus, tasks: Sequence[TaskStatus]) -> list[str]:
    """Return the commands that finish the cells of a task at rest: its command, to resume it.

    If the task itself is done, its cells lack rows of other shards: then the commands of the shards without a task.
    """
    shard = row_types.Shard.parse(task.shard)
    without_task = {f"{index}/{shard.count}" for index in range(1, shard.count + 1)}  # at first all of the split
    without_task -= {other.shard for other in tasks if not other.cells.keys().isdisjoint(task.cells)}
    if task.state != "done" or not without_task:
        return [task.command]
    return [task.command.replace(f"shard={shard}", f"shard={missing}") for missing in without_task]


def _seconds_left(tasks: Sequence[TaskStatus]) -> float | None:
    """Return the seconds until all tasks end, at the pace of those that run; None without a pace.

    A sweep replays and decodes one after the other, so the times add up. A task that has just begun has the mean pace
    of all tasks.
    """
    mean_pace = fmean([task.pace for task in tasks if task.pace] or [0.0])
    left = Counter[bool]()  # rows to replay by True, tokens to decode by False
    pace = defaultdict[bool, float](float)  # these per second
    for task in tasks:
        if task.state not in AT_WORK:
            continue
        task_left, task_pace = task.tokens_left, task.pace or mean_pace
        if task.replays:
            replayed, to_replay = _counts(task.cells.values())
            task_left = to_replay - replayed
            task_pace = task.made / max(task.heartbeat - task.started, 1e-9)  # both are equal at the start
        left[task.replays] += task_left
        if task.state == "running":
            pace[task.replays] += task_pace
    seconds = 0.0
    for kind in +left:  # that of which some is left
        if not pace[kind]:
            return None
        seconds += left[kind] / pace[kind]
    return seconds


def _counts(rows: Iterable[CellProgress]) -> tuple[int, int]:
    """Return the stored rows of cells, and how many there will be."""
    finished = expected = 0
    for row in rows:
        finished += row.finished
        expected += row.expected
    return finished, expected


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus]) -> dict[str, CellStatus]:
    """Return the progress of each cell that tasks name, by cell_id, over all shards of the newest split."""
    tasks_of_cell: dict[str, list[TaskStatus]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: task.heartbeat, reverse=True):
        for cell_id in task.cells:
            tasks_of_cell[cell_id].append(task)
    return {name: _cell_of_tasks(StoredCell(directory / name), of_cell) for name, of_cell in tasks_of_cell.items()}


def _cell_of_tasks(cell: StoredCell, tasks: Sequence[TaskStatus]) -> CellStatus:
    """Return the progress of a cell, which all these tasks name; the newest task is the first."""
    # If a sweep was split differently later, status files of both splits exist; the newest is current.
    newest = tasks[0]
    _, _, split = newest.shard.partition("/")
    # Several experiments may share a cell; each counts the completions that it needs. Of a shard the highest count is
    # taken (`|=` of a Counter), and the shards are added up.
    counts_of_shard = defaultdict[str, Counter[str]](Counter)  # a shard is such as "1/4"
    states = set[State]()
    for task in tasks:
        if task.shard.endswith(f"/{split}"):
            progress = task.cells[cell.name]
            counts_of_shard[task.shard] |= {
                "finished": progress.finished,
                "expected": progress.expected,
                "not_finite": progress.not_finite,
            }
            states.add(task.state)
    totals = sum(counts_of_shard.values(), Counter[str]())
    state: State = min(states.intersection(WORST_FIRST), key=WORST_FIRST.index, default="stopped")
    if cell.is_done:
        state = "done"
        totals["finished"] = totals["expected"]
    fields = msgspec.structs.asdict(newest.cells[cell.name])
    return CellStatus(cell_id=cell.name, state=state, **{**fields, **totals})


def _cell_without_task(stored: StoredCell) -> CellStatus:
    """Return the progress of a cell that no status file names: its DONE and cell.yaml say all that is known."""
    settings = stored.settings
    done = stored.done
    count = done.completions if done else 0
    return CellStatus(
        cell_id=stored.name,
        model=settings["model"]["name"],
        benchmark=settings["benchmark"]["name"],
        policy=policy_label(settings["policy"]),
        state="done" if stored.is_done else "stopped",
        finished=count,
        expected=count,
        random_weights=bool(settings["model"].get("random_weights")),
    )


def _add_grades(cell: CellStatus, folder: Path) -> None:
    """Fill in Pass@1 so far. A killed task has stored and graded more than its status file says."""
    files = StoredCell(folder).files(row_types.GRADES_FILE)
    score = _score(folder, tuple(path.stat() for path in files.values()))
    cell.graded = score.graded
    # At least the graded ones are stored; another command may have graded more than this sweep expects.
    cell.finished = max(cell.finished, min(cell.graded, cell.expected))
    if not cell.random_weights:
        cell.pass_at_1, cell.error = score.pass_at_1, score.error


@lru_cache(maxsize=10_000)
def _score(folder: Path, stamps: tuple[os.stat_result, ...]) -> Score:
    """Return a cell's score; `stamps` are those of its grade files, so that --watch sees changes."""
    return read_score(folder)


def show(directory: Path, *, cells: bool, watch: bool, interval: float, as_json: bool) -> int:
    """Print the progress of a run directory; return the exit code, FAILED if a task failed or stopped."""
    sweep = read_sweep(directory)
    if as_json:
        print(json.dumps(to_json(sweep), indent=2))
    else:
        console = VisibleConsole()
        if watch:
            sweep = _watch(console, directory, interval, per_cell=cells)
        else:
            console.print(f"{sweep.directory}: {sweep.state}", soft_wrap=True)  # a long path stays one line, to copy it
            console.print(render(sweep, per_cell=cells))
        _print_failures(sweep)
    return FAILED if sweep.failed else 0


class VisibleConsole(Console):
    """A console that shows text as it is: no markup, and escapes for control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False, "highlight": False})


def _watch(console: Console, directory: Path, interval: float, *, per_cell: bool) -> SweepStatus:
    """Redraw the progress every `interval` seconds until no task is at work; return the last progress."""
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            sweep = read_sweep(directory)
            live.update(Group(f"{sweep.directory}: {sweep.state}", render(sweep, per_cell=per_cell)))
            if sweep.state not in AT_WORK:
                return sweep
            time.sleep(interval)


def to_json(sweep: SweepStatus) -> dict[str, Any]:
    """Return the sweep as `kvsweep status --json` prints it: its fields, and how many cells have each state."""
    fields = msgspec.to_builtins(sweep, enc_hook=str)
    fields["states"] = dict(Counter(cell.state for cell in sweep.cells))
    del fields["failed"]  # they are among the tasks, each with its state
    return fields


def render(sweep: SweepStatus, *, per_cell: bool = False) -> Group:
    """Return the sweep as lines and a table, one row per model and benchmark, or per cell."""
    states = Counter(cell.state for cell in sweep.cells)
    counts = [f"{states['done']} of {counted(len(sweep.cells), 'cell')} done"]
    counts += [f"{states[state]} {state}" for state in ("running", "queued", "stopped", "failed") if states[state]]
    table = _cell_table(sweep.cells) if per_cell else _panel_table(sweep.cells)
    return Group(sentence(sweep), ", ".join(counts), table)


def sentence(sweep: SweepStatus) -> str:
    """Return what is stored, what is left and the pace: "50%, 48 of 96 completions, left 0:02:10, 812 tokens/s"."""
    share = (sweep.finished + sweep.replayed) / max(1, sweep.expected + sweep.to_replay)
    pieces = [f"{percent(share)}%", f"{sweep.finished} of {counted(sweep.expected, 'completion')}"]
    if sweep.to_replay:
        pieces.append(f"{sweep.replayed} of {counted(sweep.to_replay, 'text')} replayed")
    if sweep.state == "stopped":
        pieces.append("nothing runs")
    elif sweep.seconds_left is None:
        pieces.append("left unknown")
    else:
        pieces.append(f"left {timedelta(seconds=round(sweep.seconds_left))}")
    if sweep.tokens_per_second:
        pieces.append(f"{sweep.tokens_per_second:.0f} tokens/s")
    return ", ".join(pieces)


def _scores(panel: Sequence[CellStatus]) -> tuple[str, str]:
    """Return Pass@1 so far of a panel's full cache, and the lowest and highest of its other cells; "" without any."""
    # A panel has several full caches if its decoding settings differ.
    full = ", ".join(filter(None, [_percent(cell) for cell in panel if cell.policy == "full"]))
    scores = [cell.pass_at_1 for cell in panel if cell.policy != "full" and cell.pass_at_1 is not None]
    return full, f"{percent(min(scores))} to {percent(max(scores))}" if scores else ""


def _cell_table(cells: Sequence[CellStatus]) -> Table:
    """Return a table with a line per cell, below the names of its model and benchmark."""
    table = _table("policy", "state", "completions", "Pass@1 so far", "cell")
    for names, panel in _panels(cells):
        table.add_row(" ".join(names), style="bold")
        for cell in panel:
            # A cell that expects no completion is not decoded.
            state = cell.state if cell.expected else f"{cell.state}, replayed alone"
            table.add_row(cell.policy, state, f"{cell.finished}/{cell.expected}", _percent(cell), cell.cell_id)
    return table


def _panel_table(cells: Sequence[CellStatus]) -> Table:
    """Return a table with a line per model and benchmark."""
    table = _table("model", "benchmark", "cells", "completions", "Pass@1 of full cache", "of other cells")
    for names, panel in _panels(cells):
        done = sum(cell.state == "done" for cell in panel)
        finished, expected = _counts(panel)
        table.add_row(*names, f"{done}/{len(panel)}", f"{finished}/{expected}", *_scores(panel))
    return table


def _table(*heads: str) -> Table:
    """Return an empty table with these columns."""
    columns = [Column(head, overflow="fold") for head in heads]
    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _panels(cells: Sequence[CellStatus]) -> Iterator[tuple[tuple[str, str], list[CellStatus]]]:
    """Yield names and cells of each model and benchmark; the cells come in this order."""
    for names, panel in groupby(cells, key=_panel):
        yield names, list(panel)


def _percent(cell: CellStatus) -> str:
    """Return a cell's Pass@1 so far with its error, "no grade", or "" if nothing is stored."""
    if cell.pass_at_1 is None:
        return "no grade" if cell.ungraded else ""
    error = float("nan") if cell.error is None else cell.error  # NaN is written as nothing
    return percent_pm(cell.pass_at_1, error)


def _print_failures(sweep: SweepStatus) -> None:
    """Print what needs the user: missing grades, broken texts, waiting and failed tasks, and commands to go on with."""
    ungraded = sum(cell.ungraded for cell in sweep.cells)
    # A sweep at work still grades its completions.
    if ungraded and sweep.state in ("stopped", "done"):
        print(f"\nNot graded yet: {counted(ungraded, 'completion')}. This command grades the rest:")
        print(f"    kvsweep grade {shlex.quote(str(sweep.directory))}")
    not_finite = [cell.not_finite for cell in sweep.cells if cell.not_finite]
    if not_finite:
        texts = counted(sum(not_finite), "text")
        cells = counted(len(not_finite), "cell")
        print(f"\n{texts} of {cells} ended because logits were NaN or infinite (not_finite).")
    remarks = Counter[str]()
    for task in sweep.tasks:
        if task.state == "queued" and task.error:
            # Without the number within the array, so that tasks of an array that wait for one reason are one line.
            job_id = str(task.scheduler_job).partition("_")[0]
            remarks[f"queued as job {job_id}, {task.error}"] += 1
        if task.note:
            remarks[task.note] += 1
    for remark, count in remarks.items():
        print(f"\n{counted(count, 'task')}: {remark}")
    for note in sweep.notes:
        print(f"\nnote: {note}")
    for task in sweep.failed:
        job = f", job {task.scheduler_job}" if task.scheduler_job else ""
        print(f"\n{task.task} {task.state} (process {task.pid} on {task.host}{job})")
        if task.error:
            print(textwrap.indent(task.error, "    "))
    for command in sweep.retry:
        print(f"\nGo on with (finished work is not repeated):\n    {command}")
