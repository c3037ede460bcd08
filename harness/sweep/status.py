"""The progress of a sweep, read from its tasks' status files; the command `kvsweep-status`.

A scheduler calls a task completed that has raised. So each task keeps one small file,
`<run_directory>/status/<task>.json`, and replaces it every few seconds while it lives. The progress of a sweep is read
from these files and the cells' DONE; no row of results is read.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from analysis.records import CELL_FILE, DONE_FILE, STATUS_FOLDER, State, TaskStatus, UserError, read_cell
from harness.sweep.heartbeat import policy_label

STATES: tuple[State, ...] = ("done", "running", "queued", "stopped", "failed")


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
        tokens_per_second: live tokens of the tasks that run now.
        seconds_left: time for the missing completions at the pace of the tasks that run now; None without such a pace.
        failed: tasks that failed or stopped before all their cells were done.
    """

    directory: Path
    cells: list[CellStatus]
    tasks: list[TaskStatus]
    tokens_per_second: float
    seconds_left: float | None
    failed: list[TaskStatus]

    @property
    def finished(self) -> int:
        """Number of stored completions."""
        return sum(cell.finished for cell in self.cells)

    @property
    def expected(self) -> int:
        """Number of completions of the whole sweep."""
        return sum(cell.expected for cell in self.cells)


def read_sweep(directory: Path) -> SweepStatus:
    """Read a run directory's status files and DONE marks.

    Raises:
        UserError: no such folder, or nothing of a sweep in it.
    """
    now = time.time()
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; give the folder of a run, such as results/runs/demo.")
    tasks = _read_tasks(directory)
    cells = _cells_of_tasks(directory, tasks, now)
    for path in directory.glob(f"*/{CELL_FILE}"):
        if path.parent.name not in cells:
            cells[path.parent.name] = _cell_without_task(path.parent)
    if not cells:
        raise UserError(f"{directory} holds no cell and no status of one; give the folder of a run that has begun.")
    running = [task for task in tasks if task.seen(now) == "running"]
    pace = sum(task.made / max(task.heartbeat - task.started, 1e-9) for task in running if task.made)
    missing = sum(cell.expected - cell.finished for cell in cells.values())
    return SweepStatus(
        directory=directory,
        cells=sorted(cells.values(), key=lambda c: (c.model, c.benchmark, c.policy, c.cell_id)),
        tasks=tasks,
        tokens_per_second=sum(t.tokens / max(t.heartbeat - t.started, 1e-9) for t in running),
        seconds_left=missing / pace if pace else None if missing else 0.0,
        failed=[
            task
            for task in tasks
            if task.seen(now) in ("failed", "stopped") and any(cells[c].state != "done" for c in task.cells)
        ],
    )


def _read_tasks(directory: Path) -> list[TaskStatus]:
    tasks = []
    for path in sorted((directory / STATUS_FOLDER).glob("*.json")):
        with suppress(ValueError, OSError):
            tasks.append(TaskStatus.read(path))
    return tasks


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus], now: float) -> dict[str, CellStatus]:
    by_cell: dict[str, list[TaskStatus]] = {}
    for task in tasks:
        for cell_id in task.cells:
            by_cell.setdefault(cell_id, []).append(task)
    cells = {}
    for cell_id, entries in by_cell.items():
        # After a sweep was split in another way there are status files of both; the newest shows the present one.
        newest = max(entries, key=lambda task: task.heartbeat)
        parts = [t for t in entries if t.shard.partition("/")[2] == newest.shard.partition("/")[2]]
        done = (directory / cell_id / DONE_FILE).exists()
        named = newest.cells[cell_id]
        expected = sum(task.cells[cell_id].expected for task in parts)
        cells[cell_id] = CellStatus(
            cell_id=cell_id,
            model=named.model,
            benchmark=named.benchmark,
            policy=named.policy,
            state="done" if done else _worst(task.seen(now) for task in parts),
            finished=expected if done else sum(task.cells[cell_id].finished for task in parts),
            expected=expected,
        )
    return cells


def _worst(states: Iterable[State]) -> State:
    """The state of a cell from those of its shards; a cell without DONE whose shards have all ended has stopped."""
    found = set(states)
    order: tuple[State, ...] = ("failed", "stopped", "running", "queued")
    return next((state for state in order if state in found), "stopped")


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


def main(argv: Sequence[str] | None = None) -> None:
    """Console script: exit code 0, 1 if a task failed or stopped, 2 after a user's mistake, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        sweep = read_sweep(arguments.dir)
        if arguments.json:
            print(json.dumps(as_json(sweep), indent=2))
        elif arguments.watch:
            sweep = _watch(arguments.dir, arguments.interval)
        else:
            Console().print(render(sweep, per_cell=arguments.cells))
            _print_failures(sweep)
    except UserError as error:
        print(f"kvsweep-status: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(1 if sweep.failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvsweep-status", description="Show how far the sweep in DIR has come.")
    parser.add_argument("dir", metavar="DIR", type=Path, help="a run's folder, such as results/runs/demo")
    parser.add_argument("--cells", action="store_true", help="one line per cell")
    parser.add_argument("--watch", action="store_true", help="keep showing it until nothing runs or waits")
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between looks (default: 2)")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    return parser


def _watch(directory: Path, interval: float) -> SweepStatus:
    with Live(console=Console(), refresh_per_second=4) as live:
        while True:
            sweep = read_sweep(directory)
            live.update(render(sweep))
            if not any(cell.state in ("running", "queued") for cell in sweep.cells):
                break
            time.sleep(max(interval, 0.1))
    _print_failures(sweep)
    return sweep


def as_json(sweep: SweepStatus) -> dict[str, Any]:
    """The sweep's status as plain values: totals, cells, tasks, and the commands that try the failed tasks again."""
    now = time.time()
    return {
        "directory": str(sweep.directory),
        "finished": sweep.finished,
        "expected": sweep.expected,
        "tokens_per_second": sweep.tokens_per_second,
        "seconds_left": sweep.seconds_left,
        "states": dict(Counter(cell.state for cell in sweep.cells)),
        "cells": [asdict(cell) for cell in sweep.cells],
        "tasks": [{**msgspec.to_builtins(task), "state": task.seen(now)} for task in sweep.tasks],
        "retry": sorted({task.command for task in sweep.failed}),
    }


def render(sweep: SweepStatus, *, per_cell: bool = False) -> Table:
    """The sweep as a table with one line for each model and benchmark, or for each cell."""
    left = "unknown" if sweep.seconds_left is None else _duration(sweep.seconds_left)
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
    groups: dict[tuple[str, str], list[CellStatus]] = {}
    for cell in sweep.cells:
        groups.setdefault((cell.model, cell.benchmark), []).append(cell)
    for (model, benchmark), cells in groups.items():
        states = Counter(cell.state for cell in cells)
        counts = f"{sum(c.finished for c in cells)}/{sum(c.expected for c in cells)}"
        table.add_row(model, benchmark, *(str(states[state] or "") for state in STATES), counts)
    return table


def _print_failures(sweep: SweepStatus) -> None:
    now = time.time()
    for task in sweep.failed:
        job = f", job {task.scheduler_job}" if task.scheduler_job else ""
        print(f"\n{task.task} {task.seen(now)} (process {task.pid} on {task.host}{job})")
        if task.error:
            print("\n".join(f"    {line}" for line in task.error.splitlines()))
    for command in sorted({task.command for task in sweep.failed}):
        print(f"\nTry again with (finished work is not repeated):\n    {command}")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


if __name__ == "__main__":
    main()
