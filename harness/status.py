"""What every task of a sweep is doing, told by the tasks themselves; the command `kvsweep-status`.

A scheduler's word is not enough: it calls a task completed that raised. So each task keeps one small file,
`<run_directory>/status/<task>.json`, and replaces it every few seconds while it lives. Reading the progress of a
sweep takes these files and the cells' DONE, never a row of results.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import yaml
from rich.console import Console
from rich.live import Live
from rich.table import Table

from harness.records import CELL_FILE, DONE_FILE, STATUS_FOLDER, UserError, content_hash

State = Literal["queued", "running", "done", "failed", "stopped"]
STATES: tuple[State, ...] = ("done", "running", "queued", "stopped", "failed")

HEARTBEAT_S = 5.0
# A file system shared over a network may show a change half a minute late.
LOST_AFTER_S = 60.0
_ERROR_LINES = 12


@dataclass(kw_only=True)
class CellProgress:
    """One cell within a task: its name for people, and how many of its completions are there."""

    model: str
    benchmark: str
    policy: str
    finished: int
    expected: int


@dataclass(kw_only=True)
class TaskStatus:
    """One task's file.

    Attributes:
        state: as the task last said it; `seen` also knows of tasks that died without a word.
        heartbeat: seconds since the epoch at the last sign of life.
        tokens: live tokens decoded since `started`.
        made: completions stored since `started`.
        error: the last lines of what made it fail.
        command: what to run to try again; finished work is not repeated.
    """

    task: str
    state: State
    shard: str
    command: str
    cells: dict[str, CellProgress]
    started: float = 0.0
    heartbeat: float = 0.0
    host: str = ""
    pid: int = 0
    scheduler_job: str | None = None
    tokens: int = 0
    made: int = 0
    error: str | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read one task's file; raises ValueError, KeyError or TypeError where it is none."""
        row = json.loads(path.read_text())
        return cls(**{**row, "cells": {k: CellProgress(**v) for k, v in row["cells"].items()}})

    def write(self, run_directory: Path) -> None:
        """Replace the task's file; readers see the old one or the new one, whole."""
        folder = run_directory / STATUS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.task}.json"
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self)) + "\n")
        temporary.replace(path)

    def seen(self, now: float) -> State:
        """The state as it looks from outside: a task that says it is running and gives no sign of life has stopped."""
        if self.state != "running":
            return self.state
        if self.host == platform.node() and not Path(f"/proc/{self.pid}").exists() and Path("/proc/self").exists():
            return "stopped"
        return "running" if now - self.heartbeat < LOST_AFTER_S else "stopped"


def task_name(model: str, benchmark: str, cell_ids: Iterable[str], shard: str) -> str:
    """The same for the same cells and shard, so that a rerun takes over its predecessor's file."""
    return f"{model}-{benchmark}-{shard.replace('/', 'of')}-{content_hash([sorted(cell_ids), shard])[:8]}"


class Reporter:
    """Keeps a task's file up to date while it runs. A context manager: what ends it, ends the file's story too.

    A status that cannot be written does not stop the work: the results themselves say so soon enough.

    Attributes:
        counters: each says how many live tokens one of the task's engines has decoded.
    """

    def __init__(self, run_directory: Path, status: TaskStatus) -> None:
        self.status, self._run_directory = status, run_directory
        self.counters: list[Callable[[], int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self.status.state, self.status.error = "running", None
        self.status.host, self.status.pid = platform.node(), os.getpid()
        self.status.scheduler_job = scheduler_job()
        self.status.started = time.time()
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        if error is None:
            self.status.state = "done"
        elif isinstance(error, Exception):
            self.status.state, self.status.error = "failed", last_lines(error)
        else:
            self.status.state = "stopped"
        self._write()

    def stored(self, cell_id: str) -> None:
        """Count one completion of a cell."""
        self.status.cells[cell_id].finished += 1
        self.status.made += 1

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_S):
            self._write()

    def _write(self) -> None:
        self.status.heartbeat, self.status.tokens = time.time(), sum(count() for count in self.counters)
        with suppress(OSError):
            self.status.write(self._run_directory)


def last_lines(error: BaseException) -> str:
    """What to show of an error: one sentence for a user's mistake, the end of the traceback for anything else."""
    if isinstance(error, UserError):
        return str(error)
    return "\n".join("".join(traceback.format_exception(error)).rstrip().splitlines()[-_ERROR_LINES:])


def scheduler_job() -> str | None:
    """The SLURM job that this process runs in, as squeue names it."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


# --- Reading a sweep ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class CellStatus:
    """One cell as the sweep's folder shows it."""

    cell_id: str
    model: str
    benchmark: str
    policy: str
    state: State
    finished: int
    expected: int


@dataclass(kw_only=True)
class SweepStatus:
    """All cells of a run directory, and what its tasks do.

    Attributes:
        tokens_per_second: live tokens of the tasks that run now.
        seconds_left: for what is missing, at the pace of the tasks that run now; None where none has got anywhere.
    """

    directory: Path
    cells: list[CellStatus]
    tasks: list[TaskStatus]
    tokens_per_second: float
    seconds_left: float | None
    failed: list[TaskStatus] = field(default_factory=list)

    @property
    def finished(self) -> int:
        """Completions that are there."""
        return sum(cell.finished for cell in self.cells)

    @property
    def expected(self) -> int:
        """Completions that the sweep is to have."""
        return sum(cell.expected for cell in self.cells)


def read_sweep(directory: Path, *, now: float | None = None) -> SweepStatus:
    """Read a run directory's status files and DONE marks.

    Raises:
        UserError: no such folder, or nothing of a sweep in it.
    """
    now = time.time() if now is None else now
    if not directory.is_dir():
        raise UserError(f"{directory} is no folder; give the folder of a run, such as results/runs/demo.")
    tasks = _read_tasks(directory)
    cells = _cells_of_tasks(directory, tasks, now)
    for path in directory.glob(f"*/{CELL_FILE}"):
        if path.parent.name not in cells:
            cells[path.parent.name] = _cell_without_task(path)
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
        with suppress(ValueError, KeyError, TypeError, OSError):
            tasks.append(TaskStatus.read(path))
    return tasks


def _cells_of_tasks(directory: Path, tasks: Sequence[TaskStatus], now: float) -> dict[str, CellStatus]:
    by_cell: dict[str, list[TaskStatus]] = {}
    for task in tasks:
        for cell_id in task.cells:
            by_cell.setdefault(cell_id, []).append(task)
    cells = {}
    for cell_id, entries in by_cell.items():
        # A sweep that was split anew has files of both ways; the newest says how it is split now.
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
    """A cell is what the unhappiest of its shards is; one whose shards all ended without a DONE has stopped."""
    found = set(states)
    order: tuple[State, ...] = ("failed", "stopped", "running", "queued")
    return next((state for state in order if state in found), "stopped")


def _cell_without_task(path: Path) -> CellStatus:
    described = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    done = path.with_name(DONE_FILE)
    count = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        count = int(json.loads(done.read_text())["completions"])
    return CellStatus(
        cell_id=path.parent.name,
        model=described["model"]["name"],
        benchmark=described["benchmark"]["name"],
        policy=policy_label(described["policy"]),
        state="done" if done.exists() else "stopped",
        finished=count,
        expected=count,
    )


def policy_label(settings: Mapping[str, Any]) -> str:
    """A policy and the settings that tell a grid's cells apart, short: `dynts 0.3 w64 b5000`."""
    parts = [str(settings["name"])]
    for key, prefix in (("keep_ratio", ""), ("local_window", "w"), ("budget", "b")):
        if settings.get(key) is not None:
            parts.append(f"{prefix}{settings[key]}")
    return " ".join(parts)


# --- The command --------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Console script: exit code 0; 1 if anything failed or stopped; 2 after a user's mistake."""
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
    """The sweep's status as plain values: totals, cells, tasks, and how to try the failed ones again."""
    now = time.time()
    return {
        "directory": str(sweep.directory),
        "finished": sweep.finished,
        "expected": sweep.expected,
        "tokens_per_second": sweep.tokens_per_second,
        "seconds_left": sweep.seconds_left,
        "states": dict(Counter(cell.state for cell in sweep.cells)),
        "cells": [asdict(cell) for cell in sweep.cells],
        "tasks": [{**asdict(task), "state": task.seen(now)} for task in sweep.tasks],
        "retry": sorted({task.command for task in sweep.failed}),
    }


def render(sweep: SweepStatus, *, per_cell: bool = False) -> Table:
    """The sweep as a table: a line for each model and benchmark, or for each cell."""
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


def command_line() -> str:
    """This process's command as one can type it again."""
    program = Path(sys.argv[0]).name
    return shlex.join(["kvsweep" if program in ("run.py", "-c", "") else program, *sys.argv[1:]])


if __name__ == "__main__":
    main()
