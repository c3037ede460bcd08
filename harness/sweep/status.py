"""Read the progress of a sweep from its tasks' status files; the command `kvsweep status`.

Each task writes its state to a small file every few seconds, because SLURM calls a task "completed" even if it raised
an error. The command reads these files, the cells' DONE and their grades. It reads no completion.
"""

import json
import math
import shlex
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
        return 0 if self.random_weights else self.finished - min(self.graded, self.finished)


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
    attempts = failed_attempts(directory, tasks_now(directory))
    tasks = [task for task in attempts.tasks if only is None or not task.cells.keys().isdisjoint(only)]
    replaying = [task for task in tasks if task.replays]
    cells = _cells_of_tasks(directory, [task for task in tasks if not task.replays])
    # A cell that is only replayed expects no completion; its state is its replay's.
    for cell_id, cell in _cells_of_tasks(directory, replaying).items():
        state = cell.state if cell.finished < cell.expected else "done"
        cells.setdefault(cell_id, replace(cell, state=state, finished=0, expected=0))
    for stored in stored_cells(directory):
        if stored.name not in {*cells, *attempts.cells} and (only is None or stored.name in only):
            with suppress(BrokenCell, OSError, KeyError, TypeError):
                cells[stored.name] = _cell_without_task(stored)
    if only is not None:
        cells = {cell_id: cell for cell_id, cell in cells.items() if cell_id in only}
    if not cells:
        raise UserError(f"{directory} holds no cell and no status of one; give the folder of a run that has begun.")
    for cell in cells.values():
        with suppress(FileNotFoundError):  # a deleted cell.yaml comes back at the next start
            _add_grades(cell, directory / cell.cell_id)
    finished, expected = _counts(cells.values())
    replayed, to_replay = _counts([row for task in replaying for row in task.cells.values()])
    tokens_per_second, seconds_left = _pace(tasks)

    newest = {
        (task.replays, task.shard, cell_id): task for task in sorted(tasks, key=_last_sign) for cell_id in task.cells
    }

    def lacks_rows(task: TaskStatus) -> bool:
        rows = {c: row for c, row in task.cells.items() if newest[task.replays, task.shard, c] is task}
        if task.replays:
            return any(row.finished < row.expected for row in rows.values())
        return any(cells[cell_id].state != "done" for cell_id in rows)

    lacking = [task for task in tasks if task.state not in AT_WORK and lacks_rows(task)]
    state = _state({c.state for c in cells.values()} | {t.state for t in replaying}.intersection(AT_WORK))
    failed = [task for task in lacking if task.state != "done"]
    return SweepStatus(
        directory=directory,
        state=state,
        cells=sorted(cells.values(), key=lambda c: (c.model, c.benchmark, c.policy != "full", c.policy, c.cell_id)),
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
        # Between two rounds nothing has failed, and the same command resumes.
        retry=sorted({one for task in (failed if state in AT_WORK else lacking) for one in _resuming(task, tasks)}),
    )


def _resuming(task: TaskStatus, tasks: Sequence[TaskStatus]) -> list[str]:
    """The commands that do what a task lacks: its own, or of a shard that has ended those of shards without a task."""
    shard = row_types.Shard.parse(task.shard)
    begun = {one.shard for one in tasks if not one.cells.keys().isdisjoint(task.cells)}
    others = {f"{index}/{shard.count}" for index in range(1, shard.count + 1)} - begun
    if task.state != "done" or not others:
        return [task.command]
    return [task.command.replace(f"shard={shard}", f"shard={other}") for other in others]


def _pace(tasks: Sequence[TaskStatus]) -> tuple[float, float | None]:
    """Return tokens per second of the running tasks, and seconds until all tasks end; None without a pace.

    A task that has just started counts with the mean pace of the earlier tasks.
    """
    known = [task.pace for task in tasks if task.pace]
    going = [task for task in tasks if task.state in ("running", "queued")]
    running = [task for task in going if task.state == "running"]
    tokens = sum(task.pace for task in running)
    assumed = sum(task.pace or fmean(known) for task in running if not task.replays) if known else 0.0
    rows = sum(task.made / max(task.heartbeat - task.started, 1e-9) for task in running if task.replays)
    replayed, to_replay = _counts([row for task in going if task.replays for row in task.cells.values()])
    seconds = 0.0
    for left, pace in ((sum(task.tokens_left for task in going), assumed), (to_replay - replayed, rows)):
        if left > 0 and not pace:
            return tokens, None
        seconds += left / pace if left > 0 else 0.0
    return tokens, seconds


def _counts(rows: Collection[CellProgress]) -> tuple[int, int]:
    return sum(row.finished for row in rows), sum(row.expected for row in rows)


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus]) -> dict[str, CellStatus]:
    by_cell: dict[str, list[TaskStatus]] = defaultdict(list)
    for task in tasks:
        for cell_id in task.cells:
            by_cell[cell_id].append(task)
    cells = {}
    for cell_id, entries in by_cell.items():
        # If a sweep was split differently later, status files of both splits exist; the newest is current.
        newest = max(entries, key=lambda task: task.heartbeat)
        count = row_types.Shard.parse(newest.shard).count
        parts = [task for task in entries if row_types.Shard.parse(task.shard).count == count]
        done = StoredCell(directory / cell_id).is_done
        states = {task.state for task in parts}
        # Several experiments may share a cell; each counts the completions that it needs.
        finished, expected, not_finite = Counter[str](), Counter[str](), Counter[str]()
        for task in parts:
            finished |= {task.shard: task.cells[cell_id].finished}
            expected |= {task.shard: task.cells[cell_id].expected}
            not_finite |= {task.shard: task.cells[cell_id].not_finite}
        state = "done" if done else next((state for state in WORST_FIRST if state in states), "stopped")
        named = msgspec.structs.asdict(newest.cells[cell_id])
        named |= {"finished": (expected if done else finished).total(), "expected": expected.total(), "state": state}
        named["not_finite"] = not_finite.total()
        cells[cell_id] = CellStatus(cell_id=cell_id, **named)
    return cells


def _cell_without_task(stored: StoredCell) -> CellStatus:
    settings, done = stored.settings, stored.done
    count = done.completions if done else 0
    named = {name: settings[name]["name"] for name in ("model", "benchmark")}
    named |= {"policy": policy_label(settings["policy"]), "state": "done" if stored.is_done else "stopped"}
    named["random_weights"] = bool(settings["model"].get("random_weights"))
    return CellStatus(cell_id=stored.name, finished=count, expected=count, **named)


def _add_grades(cell: CellStatus, folder: Path) -> None:
    """Fill in Pass@1 so far. A killed task has stored and graded more than its status file says."""
    files = StoredCell(folder).files(row_types.GRADES_FILE).values()
    score = _score(folder, tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in files))
    cell.graded = score.graded
    cell.finished = max(cell.finished, min(cell.graded, cell.expected))
    if not cell.random_weights:
        cell.pass_at_1, cell.error = score.pass_at_1, score.error


@lru_cache(maxsize=10_000)
def _score(folder: Path, stamps: tuple[tuple[int, int], ...]) -> Score:
    """Return a cell's score; `stamps` are sizes and times of its grade files, so that --watch sees changes."""
    return read_score(folder)


def _last_sign(task: TaskStatus) -> float:
    """Return the time of a task's last sign of life; a waiting task counts as newer than all others."""
    return task.heartbeat or math.inf


def _state(states: set[State]) -> State:
    return next((state for state in AT_WORK if state in states), "done" if states == {"done"} else "stopped")


def _seconds_at_work(tasks: Sequence[TaskStatus]) -> float:
    total = until = 0.0
    for task in sorted(tasks, key=lambda task: task.started):
        if task.started:
            total += max(0.0, task.heartbeat - max(task.started, until))
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
    with Live(console=console, refresh_per_second=4) as live:
        while True:
            sweep = read_sweep(directory)
            live.update(Group(f"{sweep.directory}: {sweep.state}", render(sweep, per_cell=per_cell)))
            if sweep.state not in AT_WORK:
                return sweep
            time.sleep(interval)


def to_json(sweep: SweepStatus) -> dict[str, Any]:
    values = msgspec.to_builtins(sweep, enc_hook=str)
    values["states"] = dict(Counter(cell.state for cell in sweep.cells))
    del values["failed"]
    return values


def render(sweep: SweepStatus, *, per_cell: bool = False) -> Group:
    """Return the sweep as a bar and a table, one line per model and benchmark, or per cell."""
    states = Counter(cell.state for cell in sweep.cells)
    counts = [f"{states['done']} of {counted(len(sweep.cells), 'cell')} done"]
    panels = [{cell.state for cell in panel} == {"done"} for _, panel in _panels(sweep.cells)]
    if len(panels) > 1:
        counts.insert(0, f"{sum(panels)} of {len(panels)} panels")
    counts += [f"{states[state]} {state}" for state in ("running", "queued", "stopped", "failed") if states[state]]
    done, wanted = _stored(sweep)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=wanted, completed=done, width=30), _share(sweep))
    return Group(
        bar,
        ", ".join(counts),
        f"elapsed {timedelta(seconds=round(sweep.seconds))}, {_left(sweep)}",
        _cell_table(sweep.cells) if per_cell else _panel_table(sweep.cells),
    )


def sentence(sweep: SweepStatus) -> str:
    """Return the sweep as one line, with Pass@1 so far of each model and benchmark."""
    said = [(names, ", ".join(filter(None, _scores(panel)))) for names, panel in _panels(sweep.cells)]
    scores = [f"{' '.join(names)} {score}" for names, score in said if score]
    return visible("; ".join([f"{_share(sweep)}, {_left(sweep)}", *scores]))


def _stored(sweep: SweepStatus) -> tuple[int, int]:
    """Return the stored completions and replay rows, and how many there will be (at least 1)."""
    return sweep.finished + sweep.replayed, max(1, sweep.expected + sweep.to_replay)


def _share(sweep: SweepStatus) -> str:
    done, wanted = _stored(sweep)
    replayed = f", {sweep.replayed} of {counted(sweep.to_replay, 'text')} replayed" if sweep.to_replay else ""
    # Until the first completion ends, which takes minutes, the tokens show that the sweep is running.
    tokens = sum(task.tokens for task in sweep.tasks if task.state == "running")
    begun = f", {tokens:,} tokens of texts that go on" if tokens and not sweep.finished else ""
    completions = f"{sweep.finished} of {counted(sweep.expected, 'completion')}"
    return f"{percent(done / wanted)}%, {completions}{replayed}{begun}"


def _left(sweep: SweepStatus) -> str:
    if sweep.state == "stopped":
        return "nothing runs"
    left = "unknown" if sweep.seconds_left is None else timedelta(seconds=round(sweep.seconds_left))
    return f"left {left}" + (f", {sweep.tokens_per_second:.0f} tokens/s" if sweep.tokens_per_second else "")


def _scores(panel: Sequence[CellStatus]) -> tuple[str, str]:
    """Return Pass@1 so far of a panel's full cache, and the lowest and highest of its other cells."""
    full = ", ".join(filter(None, (_percent(cell) for cell in panel if cell.policy == "full")))
    others = [cell.pass_at_1 for cell in panel if cell.policy != "full" and cell.pass_at_1 is not None]
    return full, f"{percent(min(others))} to {percent(max(others))}" if others else ""


def _cell_table(cells: Sequence[CellStatus]) -> Table:
    table = _table("policy", "state", "completions", "Pass@1 so far", "cell")
    for names, panel in _panels(cells):
        table.add_row(" ".join(names), style="bold")
        for cell in panel:
            state = cell.state + ", replayed alone" * (not cell.expected)
            table.add_row(cell.policy, state, f"{cell.finished}/{cell.expected}", _percent(cell), cell.cell_id)
    return table


def _panel_table(cells: Sequence[CellStatus]) -> Table:
    table = _table("model", "benchmark", "cells", "completions", "full cache", "other cells")
    for names, panel in _panels(cells):
        done, (finished, expected) = sum(cell.state == "done" for cell in panel), _counts(panel)
        table.add_row(*names, f"{done}/{len(panel)}", f"{finished}/{expected}", *_scores(panel))
    if any(cell.pass_at_1 is not None for cell in cells):
        table.caption = "full cache, other cells: Pass@1 so far in %; --cells shows each"
    return table


def _table(*heads: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, caption_justify="left")
    for head in heads:
        names = head in ("model", "benchmark", "policy", "state", "cell")
        table.add_column(head, justify="left" if names else "right", overflow="fold")
    return table


def _panels(cells: Sequence[CellStatus]) -> Iterator[tuple[tuple[str, str], list[CellStatus]]]:
    """Yield names and cells of each model and benchmark; the cells come in this order."""
    return ((names, list(panel)) for names, panel in groupby(cells, key=lambda cell: (cell.model, cell.benchmark)))


def _percent(cell: CellStatus) -> str:
    if cell.pass_at_1 is None:
        return "no grade" if cell.ungraded else ""
    return percent_pm(cell.pass_at_1, float("nan") if cell.error is None else cell.error)


def _print_failures(sweep: SweepStatus) -> None:
    ungraded = sum(cell.ungraded for cell in sweep.cells)
    if ungraded and sweep.state in ("stopped", "done"):
        print(f"\nNot graded yet: {counted(ungraded, 'completion')}. This command grades the rest:")
        print(f"    kvsweep grade {shlex.quote(str(sweep.directory))}")
    if broken := [cell for cell in sweep.cells if cell.not_finite]:
        texts = counted(sum(cell.not_finite for cell in broken), "text")
        print(f"\n{texts} of {counted(len(broken), 'cell')} ended because logits were NaN or infinite (not_finite).")
    waiting = [t for t in sweep.tasks if t.state == "queued" and t.error]
    held = Counter((str(t.scheduler_job).partition("_")[0], t.error) for t in waiting)
    for (job, reason), count in held.items():
        print(f"\n{count} queued as job {job}, {reason}")
    for note in sweep.notes:
        print(f"\nnote: {note}")
    for note, count in Counter(task.note for task in sweep.tasks if task.note).items():
        print(f"\n{counted(count, 'task')}: {note}")
    for task in sweep.failed:
        job = f", job {task.scheduler_job}" if task.scheduler_job else ""
        print(f"\n{task.task} {task.state} (process {task.pid} on {task.host}{job})")
        if task.error:
            print("\n".join(f"    {line}" for line in task.error.splitlines()))
    for sentence, count in Counter(_without_done(sweep)).items():
        print(f"\n{counted(count, 'cell')} without DONE: {sentence}.")
    for command in sweep.retry:
        print(f"\nGo on with (finished work is not repeated):\n    {command}")


def _without_done(sweep: SweepStatus) -> Iterator[str]:
    """Yield the reason for each cell whose shards all have what they were asked for, and which is not done."""
    for cell in sweep.cells:
        tasks = [task for task in sweep.tasks if cell.cell_id in task.cells]
        sizes = {row_types.Shard.parse(task.shard): task.cells[cell.cell_id].expected for task in tasks}
        is_whole = len(sizes) > 1 and {shard.count for shard in sizes} == {len(sizes)}
        if cell.state != "stopped" or not is_whole or cell.finished < cell.expected:
            continue
        rows = range(cell.expected)
        if all(len(shard.of(rows)) == size for shard, size in sizes.items()):
            yield "all rows are there, as of shards from several disks, and a command below writes it"
        else:
            yield "its shards were asked for unlike rows; give each the same benchmark.limit and draws, the most of one"
