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
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec.structs import replace
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
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
    seconds: float  # with at least one task at work, since each task's last start
    seconds_left: float | None  # until all tasks have decoded and replayed, at the running tasks' pace (`_pace`)
    failed: list[TaskStatus]  # tasks that failed or stopped before their cells were done, not taken over by newer tasks
    notes: list[str]  # on cells that are left out
    retry: list[str]  # the commands that resume work which no task is doing


def read_sweep(directory: Path, only: Collection[str] | None = None) -> SweepStatus:
    """Read the progress of a run directory's cells: all, or those with these ids."""
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; give the folder of a run, such as results/runs/demo.")
    attempts = failed_attempts(directory, tasks_now(directory))  # of servers: empty cells, which are left out here
    tasks = [task for task in attempts.tasks if only is None or not task.cells.keys().isdisjoint(only)]
    cells = _cells_of_run(directory, tasks, attempts.cells, only)
    if not cells:
        raise UserError(f"{directory} holds no cell and no status of one; give the folder of a run that has begun.")
    for cell in cells.values():
        with suppress(FileNotFoundError):  # a deleted cell.yaml comes back at the next start
            _add_grades(cell, directory / cell.cell_id)
    finished, expected = _counts(cells.values())
    replayed, to_replay = _counts_of_replays(tasks)
    tokens_per_second, seconds_left = _pace(tasks)
    states = {cell.state for cell in cells.values()}
    # A cell that is being replayed may be done, but then the sweep is not.
    states.update(task.state for task in tasks if task.replays and task.state in AT_WORK)
    state: State = _first(AT_WORK, states) or ("done" if states == {"done"} else "stopped")
    done_cells = {cell_id for cell_id, cell in cells.items() if cell.state == "done"}
    resting = _resting(tasks, done_cells)
    # A task may be done although its cells lack rows: those of a round that has not begun, or of a failed task. While
    # other tasks are at work, such rows may still come; once all rest, the done tasks' command resumes too.
    failed = [task for task in resting if task.state != "done"]
    to_resume = failed if state in AT_WORK else resting
    commands = set[str]()
    for task in to_resume:
        commands.update(_resuming(task, tasks))
    return SweepStatus(
        directory=directory,
        state=state,
        cells=sorted(cells.values(), key=_place_in_table),
        tasks=tasks,
        finished=finished,
        expected=expected,
        replayed=replayed,
        to_replay=to_replay,
        tokens_per_second=tokens_per_second,
        seconds=_seconds_at_work(tasks),
        seconds_left=seconds_left,
        failed=failed,
        notes=attempts.notes,
        retry=sorted(commands),
    )


def _cells_of_run(
    directory: Path, tasks: Sequence[TaskStatus], left_out: Collection[str], only: Collection[str] | None
) -> dict[str, CellStatus]:
    """Return the progress of a run directory's cells, by cell_id, as `read_sweep` takes them; grades come later."""
    cells = _cells_of_tasks(directory, [task for task in tasks if not task.replays])
    # A cell that is only replayed expects no completion; its state is its replay's.
    for cell_id, cell in _cells_of_tasks(directory, [task for task in tasks if task.replays]).items():
        if cell_id not in cells:
            state = cell.state if cell.finished < cell.expected else "done"
            cells[cell_id] = replace(cell, state=state, finished=0, expected=0)
    # Cells that no task names, as without their status files.
    for stored in stored_cells(directory):
        is_requested = only is None or stored.name in only
        if is_requested and stored.name not in {*cells, *left_out}:
            with suppress(BrokenCell, OSError, KeyError, TypeError):
                cells[stored.name] = _cell_without_task(stored)
    if only is None:
        return cells
    return {cell_id: cell for cell_id, cell in cells.items() if cell_id in only}  # a task may name others, too


def _place_in_table(cell: CellStatus) -> tuple[Any, ...]:
    """Return what sorts cells by model and benchmark, the full cache first."""
    return cell.model, cell.benchmark, cell.policy != "full", cell.policy, cell.cell_id


def _resting(tasks: Sequence[TaskStatus], done_ids: Collection[str]) -> list[TaskStatus]:
    """Return the tasks that are not at work although cells of theirs lack rows, which no newer task has taken over.

    `done_ids`: the ids of the cells that are done.
    """
    newest: dict[tuple[bool, str, str], TaskStatus] = {}  # by replay or not, shard and cell
    for task in sorted(tasks, key=_last_sign):
        for cell_id in task.cells:
            # A later task replaces the earlier ones.
            newest[task.replays, task.shard, cell_id] = task
    resting = []
    for task in tasks:
        if task.state in AT_WORK:
            continue
        for cell_id, progress in task.cells.items():
            # A replay has no DONE, so its counts decide.
            is_complete = progress.finished >= progress.expected if task.replays else cell_id in done_ids
            if not is_complete and newest[task.replays, task.shard, cell_id] is task:
                resting.append(task)
                break
    return resting


def _resuming(task: TaskStatus, tasks: Sequence[TaskStatus]) -> list[str]:
    """Return the commands that finish the cells of a task at rest: its command, to resume it.

    If the task itself is done, its cells lack rows of other shards: then the commands of the shards without a task.
    """
    shard = row_types.Shard.parse(task.shard)
    shards_with_task = {other.shard for other in tasks if not other.cells.keys().isdisjoint(task.cells)}
    shards = {f"{index}/{shard.count}" for index in range(1, shard.count + 1)}  # all that the cells are divided into
    without_task = shards - shards_with_task
    if task.state != "done" or not without_task:
        return [task.command]
    return [task.command.replace(f"shard={shard}", f"shard={missing}") for missing in without_task]


def _pace(tasks: Sequence[TaskStatus]) -> tuple[float, float | None]:
    """Return tokens per second of the running tasks, and seconds until all tasks end; None without a pace.

    A task that has just started counts with the mean pace of the earlier tasks.
    """
    at_work = [task for task in tasks if task.state in AT_WORK]
    running = [task for task in at_work if task.state == "running"]
    mean_pace = fmean([task.pace for task in tasks if task.pace] or [0.0])
    token_pace = row_pace = 0.0  # of decoding and of replaying tasks, per second
    for task in running:
        if task.replays:
            row_pace += task.made / max(task.heartbeat - task.started, 1e-9)  # both are equal at the start
        else:
            token_pace += task.pace or mean_pace
    tokens_left = sum(task.tokens_left for task in at_work)
    replayed, to_replay = _counts_of_replays(at_work)
    tokens_per_second = sum((task.pace for task in running), start=0.0)  # to show: without the pace of other tasks
    seconds = 0.0
    # A sweep replays and decodes one after the other, so the times add up.
    for left, pace in ((tokens_left, token_pace), (to_replay - replayed, row_pace)):
        if left > 0:
            if not pace:
                return tokens_per_second, None
            seconds += left / pace
    return tokens_per_second, seconds


def _counts(rows: Collection[CellProgress]) -> tuple[int, int]:
    """Return the stored rows of cells, and how many there will be."""
    return sum(row.finished for row in rows), sum(row.expected for row in rows)


def _counts_of_replays(tasks: Sequence[TaskStatus]) -> tuple[int, int]:
    """Return the rows that replays have stored, and how many there will be."""
    rows: list[CellProgress] = []
    for task in tasks:
        if task.replays:
            rows += task.cells.values()
    return _counts(rows)


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus]) -> dict[str, CellStatus]:
    """Return the progress of each cell that tasks name, by cell_id, over all shards of the newest split."""
    tasks_of_cell: dict[str, list[TaskStatus]] = defaultdict(list)
    for task in tasks:
        for cell_id in task.cells:
            tasks_of_cell[cell_id].append(task)
    cells = {}
    for cell_id, tasks_here in tasks_of_cell.items():
        cells[cell_id] = _cell_of_tasks(directory, cell_id, tasks_here)
    return cells


def _cell_of_tasks(directory: Path, cell_id: str, tasks: Sequence[TaskStatus]) -> CellStatus:
    """Return the progress of a cell, which all these tasks name."""
    # If a sweep was split differently later, status files of both splits exist; the newest is current.
    newest = max(tasks, key=lambda task: task.heartbeat)
    shard_count = row_types.Shard.parse(newest.shard).count
    # Several experiments may share a cell; each counts the completions that it needs. Of a shard the highest count is
    # taken (`|=` of a Counter), and the shards are added up (`total`).
    finished_by_shard = Counter[str]()  # a shard is such as "1/4"
    expected_by_shard = Counter[str]()
    not_finite_by_shard = Counter[str]()
    states = set[State]()
    for task in tasks:
        if row_types.Shard.parse(task.shard).count == shard_count:
            progress = task.cells[cell_id]
            finished_by_shard |= {task.shard: progress.finished}
            expected_by_shard |= {task.shard: progress.expected}
            not_finite_by_shard |= {task.shard: progress.not_finite}
            states.add(task.state)
    fields = msgspec.structs.asdict(newest.cells[cell_id])
    fields |= {"expected": expected_by_shard.total(), "not_finite": not_finite_by_shard.total()}
    if StoredCell(directory / cell_id).is_done:
        fields |= {"state": "done", "finished": expected_by_shard.total()}
    else:
        fields |= {"state": _first(WORST_FIRST, states) or "stopped", "finished": finished_by_shard.total()}
    return CellStatus(cell_id=cell_id, **fields)


def _first(order: Sequence[State], states: Collection[State]) -> State | None:
    """Return the first state of an order that is among the states."""
    for state in order:
        if state in states:
            return state
    return None


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


def _last_sign(task: TaskStatus) -> float:
    """Return the time of a task's last sign of life; a waiting task counts as newer than all others."""
    return task.heartbeat or math.inf


def _seconds_at_work(tasks: Sequence[TaskStatus]) -> float:
    """Return the seconds in which at least one task worked; seconds of several tasks count once."""
    total = until = 0.0  # seconds, and the time up to which they are counted
    for task in sorted(tasks, key=lambda task: task.started):
        if task.started:  # 0 while it waits
            total += max(0.0, task.heartbeat - max(task.started, until))  # 0 if it ended before `until`
            until = max(until, task.heartbeat)
    return total


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
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})


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
    """Return the sweep as a bar and a table, one line per model and benchmark, or per cell."""
    states = Counter(cell.state for cell in sweep.cells)
    counts = [f"{states['done']} of {counted(len(sweep.cells), 'cell')} done"]
    counts += [f"{states[state]} {state}" for state in ("running", "queued", "stopped", "failed") if states[state]]
    done, total = _stored(sweep)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=total, completed=done, width=30), _share(sweep))
    return Group(
        bar,
        ", ".join(counts),
        f"elapsed {timedelta(seconds=round(sweep.seconds))}, {_left(sweep)}",
        _cell_table(sweep.cells) if per_cell else _panel_table(sweep.cells),
    )


def sentence(sweep: SweepStatus) -> str:
    """Return the sweep as one line, with Pass@1 so far of each model and benchmark."""
    pieces = [f"{_share(sweep)}, {_left(sweep)}"]
    for names, panel in _panels(sweep.cells):
        scores = ", ".join(filter(None, _scores(panel)))
        if scores:
            pieces.append(f"{' '.join(names)} {scores}")
    return visible("; ".join(pieces))


def _stored(sweep: SweepStatus) -> tuple[int, int]:
    """Return the stored completions and replay rows, and how many there will be (at least 1)."""
    return sweep.finished + sweep.replayed, max(1, sweep.expected + sweep.to_replay)


def _share(sweep: SweepStatus) -> str:
    """Return what is stored, as in "50%, 48 of 96 completions"."""
    done, total = _stored(sweep)
    pieces = [f"{percent(done / total)}%", f"{sweep.finished} of {counted(sweep.expected, 'completion')}"]
    if sweep.to_replay:
        pieces.append(f"{sweep.replayed} of {counted(sweep.to_replay, 'text')} replayed")
    return ", ".join(pieces)


def _left(sweep: SweepStatus) -> str:
    """Return the time that is left and the pace, as in "left 0:02:10, 812 tokens/s"."""
    if sweep.state == "stopped":
        return "nothing runs"
    left = "left unknown"
    if sweep.seconds_left is not None:
        left = f"left {timedelta(seconds=round(sweep.seconds_left))}"
    return f"{left}, {sweep.tokens_per_second:.0f} tokens/s" if sweep.tokens_per_second else left


def _scores(panel: Sequence[CellStatus]) -> tuple[str, str]:
    """Return Pass@1 so far of a panel's full cache, and the lowest and highest of its other cells; "" without any."""
    full_texts = []
    scores = []
    for cell in panel:
        if cell.policy == "full":
            full_texts.append(_percent(cell))
        elif cell.pass_at_1 is not None:
            scores.append(cell.pass_at_1)
    full = ", ".join(filter(None, full_texts))  # a panel has several full caches if its decoding settings differ
    if not scores:
        return full, ""
    return full, f"{percent(min(scores))} to {percent(max(scores))}"


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
    table = _table("model", "benchmark", "cells", "completions", "full cache", "other cells")
    for names, panel in _panels(cells):
        done = sum(cell.state == "done" for cell in panel)
        finished, expected = _counts(panel)
        table.add_row(*names, f"{done}/{len(panel)}", f"{finished}/{expected}", *_scores(panel))
    if any(cell.pass_at_1 is not None for cell in cells):
        table.caption = "full cache, other cells: Pass@1 so far in %; --cells shows each"
    return table


def _table(*heads: str) -> Table:
    """Return an empty table with these columns: words stand left, numbers right."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    for head in heads:
        has_words = head in ("model", "benchmark", "policy", "state", "cell")
        table.add_column(head, justify="left" if has_words else "right", overflow="fold")
    return table


def _panels(cells: Sequence[CellStatus]) -> Iterator[tuple[tuple[str, str], list[CellStatus]]]:
    """Yield names and cells of each model and benchmark; the cells come in this order."""
    for names, panel in groupby(cells, key=lambda cell: (cell.model, cell.benchmark)):
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
    waiting = Counter[str]()
    notes = Counter[str]()
    for task in sweep.tasks:
        if task.state == "queued" and task.error:
            # Without the number within the array, so that tasks of an array that wait for one reason are one line.
            job_id = str(task.scheduler_job).partition("_")[0]
            waiting[f"queued as job {job_id}, {task.error}"] += 1
        if task.note:
            notes[task.note] += 1
    for reason, count in waiting.items():
        print(f"\n{count} {reason}")
    for note in sweep.notes:
        print(f"\nnote: {note}")
    for note, count in notes.items():
        print(f"\n{counted(count, 'task')}: {note}")
    for task in sweep.failed:
        job = f", job {task.scheduler_job}" if task.scheduler_job else ""
        print(f"\n{task.task} {task.state} (process {task.pid} on {task.host}{job})")
        if task.error:
            print(textwrap.indent(task.error, "    "))
    for command in sweep.retry:
        print(f"\nGo on with (finished work is not repeated):\n    {command}")
