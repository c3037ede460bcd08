"""The progress of a sweep, read from its tasks' status files; the command `kvsweep-status`.

A scheduler calls a task completed that has raised. So each task keeps one small file,
`<run_directory>/status/<task>.json`, and replaces it every few seconds while it lives. The progress of a sweep is read
from these files and the cells' DONE; no row of results is read.
"""

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from analysis.command_line import FAILED, one_sentence
from analysis.records import CELL_FILE, DONE_FILE, BrokenCell, State, TaskStatus, UserError, read_cell
from analysis.safe import visible
from harness.sweep.heartbeat import policy_label
from harness.sweep.scheduler import read_tasks

STATES: tuple[State, ...] = ("done", "running", "queued", "stopped", "failed")
# A cell without DONE has the first of these states that one of its shards has; where all shards are done, it stopped.
WORST_FIRST: tuple[State, ...] = ("failed", "stopped", "running", "queued")


@dataclass(kw_only=True)
class CellStatus:
    """The progress of one cell, all its shards together."""

    cell_id: str
    model: str
    benchmark: str
    policy: str
    state: State
    finished: int
    expected: int


@dataclass(kw_only=True)
class SweepStatus:
    """All cells and tasks of a run directory.

    Attributes:
        tasks: the tasks, each with its state as seen from outside.
        finished, expected: numbers of stored completions and of all completions of the sweep.
        tokens_per_second: live tokens of the tasks that run now.
        seconds_left: time for the missing completions at the pace of the tasks that run now; None without such a pace.
        failed: tasks that failed or stopped before all their cells were done.
    """

    directory: Path
    cells: list[CellStatus]
    tasks: list[TaskStatus]
    finished: int
    expected: int
    tokens_per_second: float
    seconds_left: float | None
    failed: list[TaskStatus]


def read_sweep(directory: Path) -> SweepStatus:
    """Read a run directory's status files and DONE marks.

    Raises:
        UserError: no such folder, or nothing of a sweep in it.
    """
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; give the folder of a run, such as results/runs/demo.")
    tasks = read_tasks(directory)
    cells = _cells_of_tasks(directory, tasks)
    for path in directory.glob(f"*/{CELL_FILE}"):
        if path.parent.name not in cells:
            with suppress(BrokenCell, OSError, KeyError, TypeError):
                cells[path.parent.name] = _cell_without_task(path.parent)
    if not cells:
        raise UserError(f"{directory} holds no cell and no status of one; give the folder of a run that has begun.")
    running = [(task, max(task.heartbeat - task.started, 1e-9)) for task in tasks if task.state == "running"]
    pace = sum(task.made / seconds for task, seconds in running)
    finished, expected = (sum(getattr(cell, name) for cell in cells.values()) for name in ("finished", "expected"))
    return SweepStatus(
        directory=directory,
        cells=sorted(cells.values(), key=lambda c: (c.model, c.benchmark, c.policy, c.cell_id)),
        tasks=tasks,
        finished=finished,
        expected=expected,
        tokens_per_second=sum(task.tokens / seconds for task, seconds in running),
        seconds_left=(expected - finished) / pace if pace else None if expected > finished else 0.0,
        failed=[
            task
            for task in tasks
            if task.state in ("failed", "stopped") and any(cells[cell_id].state != "done" for cell_id in task.cells)
        ],
    )


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus]) -> dict[str, CellStatus]:
    by_cell: dict[str, list[TaskStatus]] = defaultdict(list)
    for task in tasks:
        for cell_id in task.cells:
            by_cell[cell_id].append(task)
    cells = {}
    for cell_id, entries in by_cell.items():
        # After a sweep was split in another way there are status files of both; the newest shows the present one.
        newest = max(entries, key=lambda task: task.heartbeat)
        parts = [t for t in entries if t.shard.partition("/")[2] == newest.shard.partition("/")[2]]
        done = (directory / cell_id / DONE_FILE).exists()
        states = {task.state for task in parts}
        named = newest.cells[cell_id]
        expected = sum(task.cells[cell_id].expected for task in parts)
        cells[cell_id] = CellStatus(
            cell_id=cell_id,
            model=named.model,
            benchmark=named.benchmark,
            policy=named.policy,
            state="done" if done else next((state for state in WORST_FIRST if state in states), "stopped"),
            finished=expected if done else sum(task.cells[cell_id].finished for task in parts),
            expected=expected,
        )
    return cells


def _cell_without_task(folder: Path) -> CellStatus:
    settings = read_cell(folder)
    done = folder / DONE_FILE
    count = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        count = int(json.loads(done.read_text())["completions"])
    return CellStatus(
        cell_id=folder.name,
        model=settings["model"]["name"],
        benchmark=settings["benchmark"]["name"],
        policy=policy_label(settings["policy"]),
        state="done" if done.exists() else "stopped",
        finished=count,
        expected=count,
    )


@one_sentence("kvsweep-status")
def main(argv: Sequence[str] | None = None) -> None:
    """Console script: exit code 0, 1 if a task failed or stopped, 2 after a user's mistake, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="kvsweep-status", description="Show how far the sweep in DIR has come.")
    parser.add_argument("dir", metavar="DIR", type=Path, help="a run's folder, such as results/runs/demo")
    parser.add_argument("--cells", action="store_true", help="one line per cell")
    parser.add_argument("--watch", action="store_true", help="keep showing it until nothing runs or waits")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    arguments = parser.parse_args(argv)
    sweep = read_sweep(arguments.dir)
    if arguments.json:
        print(json.dumps(as_json(sweep), indent=2))
    else:
        if arguments.watch:
            sweep = _watch(arguments.dir, arguments.interval)
        else:
            _Console().print(render(sweep, per_cell=arguments.cells))
        _print_failures(sweep)
    sys.exit(FAILED if sweep.failed else 0)


class _Console(Console):
    """A console that shows every text as it is: without markup, and with escapes for control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})


def _watch(directory: Path, interval: float) -> SweepStatus:
    with Live(console=_Console(), refresh_per_second=4) as live:
        while True:
            sweep = read_sweep(directory)
            live.update(render(sweep))
            if not any(cell.state in ("running", "queued") for cell in sweep.cells):
                return sweep
            time.sleep(max(interval, 0.1))


def as_json(sweep: SweepStatus) -> dict[str, Any]:
    """The sweep's status as plain values: totals, cells, tasks, and the commands that try the failed tasks again."""
    return {
        "directory": str(sweep.directory),
        "finished": sweep.finished,
        "expected": sweep.expected,
        "tokens_per_second": sweep.tokens_per_second,
        "seconds_left": sweep.seconds_left,
        "states": dict(Counter(cell.state for cell in sweep.cells)),
        "cells": [asdict(cell) for cell in sweep.cells],
        "tasks": msgspec.to_builtins(sweep.tasks),
        "retry": sorted({task.command for task in sweep.failed}),
    }


def render(sweep: SweepStatus, *, per_cell: bool = False) -> Table:
    """The sweep as a table with one line for each model and benchmark, or for each cell."""
    left = "unknown" if sweep.seconds_left is None else timedelta(seconds=round(sweep.seconds_left))
    done = sum(cell.state == "done" for cell in sweep.cells)
    caption = (
        f"{done} of {len(sweep.cells)} cells done, {sweep.finished} of {sweep.expected} completions, "
        f"{sweep.tokens_per_second:.0f} tokens/s, time left {left}"
    )
    table = Table(title=str(sweep.directory), caption=caption)
    for name in ("model", "benchmark", *(["policy", "state"] if per_cell else STATES), "completions"):
        table.add_column(name, justify="left" if name in ("model", "benchmark", "policy", "state") else "right")
    if per_cell:
        for cell in sweep.cells:
            table.add_row(cell.model, cell.benchmark, cell.policy, cell.state, f"{cell.finished}/{cell.expected}")
        return table
    groups: dict[tuple[str, str], list[CellStatus]] = defaultdict(list)
    for cell in sweep.cells:
        groups[cell.model, cell.benchmark].append(cell)
    for names, cells in groups.items():
        states = Counter(cell.state for cell in cells)
        counts = f"{sum(c.finished for c in cells)}/{sum(c.expected for c in cells)}"
        table.add_row(*names, *(str(states[state] or "") for state in STATES), counts)
    return table


def _print_failures(sweep: SweepStatus) -> None:
    waiting = [t for t in sweep.tasks if t.state == "queued" and t.error]
    held = Counter((str(t.scheduler_job).partition("_")[0], t.error) for t in waiting)
    for (job, reason), count in held.items():
        print(f"\n{count} queued as job {job}, {reason}")
    for task in sweep.failed:
        job = f", job {task.scheduler_job}" if task.scheduler_job else ""
        print(f"\n{task.task} {task.state} (process {task.pid} on {task.host}{job})")
        if task.error:
            print("\n".join(f"    {line}" for line in task.error.splitlines()))
    for command in sorted({task.command for task in sweep.failed}):
        print(f"\nTry again with (finished work is not repeated):\n    {command}")


if __name__ == "__main__":
    main()
