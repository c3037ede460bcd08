"""Progress and results of each cell for Weights & Biases, trackio or MLflow; off unless asked for (`tracker=`).

The tracker is a process of its own that reads the task's status file and the cells' result files. The job sends it
nothing, so a tracker that fails, hangs or asks for a password cannot disturb the job, which waits at its end at most
`patience_s` for the last values to arrive.
"""

import contextvars
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvsweep.analysis.numbers.pass_at_1 import read_score
from kvsweep.base import records
from kvsweep.base.escape import visible
from kvsweep.base.tasks import State, TaskStatus, is_alive
from kvsweep.harness.sweep.plan.config import TrackerConfig

_LOOK_S = 0.5
# MLflow's server refuses a longer value of a parameter.
MLFLOW_CHARACTERS = 6000


# --- In the job ---------------------------------------------------------------------------------------------


@contextmanager
def tracked(config: TrackerConfig, run_directory: Path, task: str, cells: Collection[str]) -> Iterator[None]:
    """Let a tracker follow this process's task in the block, a run for each cell_id; enter it before `Reporter`."""
    asked = [config.kind, config.project, config.interval_s, str(run_directory), task, os.getpid(), list(cells)]
    process = _start(config.kind, asked) if config.kind != "none" else None
    try:
        yield
    finally:
        if process is not None:
            try:
                process.wait(config.patience_s)
            except subprocess.TimeoutExpired:
                # The tracker's own processes belong to its group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                print(_note(config.kind, f"not finished after {config.patience_s:g} s"), file=sys.stderr)


def _start(kind: str, asked: Sequence[Any]) -> "subprocess.Popen[bytes] | None":
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "kvsweep.harness.sweep.watch.tracker", json.dumps(asked)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C belongs to the job, and a tracker finds no terminal to ask at
        )
    except OSError as error:
        print(_note(kind, str(error)), file=sys.stderr)
        return None


def _note(kind: str, reason: str) -> str:
    return f"note: tracker={kind} gets no more values ({reason}); the run goes on."


# --- In the tracker's process -------------------------------------------------------------------------------


class TrackerRun(NamedTuple):
    """One cell's run at a tracker: `log(values, step)` with ascending steps, then `finish(ok)`."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[bool], object]


def wandb_run(*, project: str, group: str, name: str, config: dict[str, Any]) -> TrackerRun:
    import wandb

    # Twenty cells would record the console and the machine twenty times.
    settings = {"console": "off", "silent": True, "x_disable_stats": True}
    run = wandb.init(project=project, group=group, name=name, config=config, reinit="create_new", settings=settings)
    return TrackerRun(log=run.log, finish=lambda ok: run.finish(exit_code=0 if ok else 1))


def trackio_run(*, project: str, group: str, name: str, config: dict[str, Any]) -> TrackerRun:
    """Open a run of trackio, which has no failed runs."""
    import trackio

    # In one context a second `init` would end the run before it.
    run = contextvars.Context().run(trackio.init, project=project, group=group, name=name, config=config, embed=False)
    return TrackerRun(log=lambda values, step: run.log(values, step=step), finish=lambda ok: run.finish())


def mlflow_run(*, project: str, group: str, name: str, config: dict[str, Any]) -> TrackerRun:
    """Open a run of MLflow by its client, because the fluent functions know only one open run."""
    import mlflow

    client = mlflow.MlflowClient()
    found = client.get_experiment_by_name(project)
    experiment = client.create_experiment(project) if found is None else found.experiment_id
    run_id = client.create_run(experiment, run_name=name, tags={"group": group}).info.run_id
    for name, value in records.leaves(config):
        client.log_param(run_id, name, str(value)[:MLFLOW_CHARACTERS])

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            client.log_metric(run_id, key, value, step=step)

    return TrackerRun(log=log, finish=lambda ok: client.set_terminated(run_id, "FINISHED" if ok else "FAILED"))


TRACKERS: Mapping[str, Callable[..., TrackerRun]] = {"wandb": wandb_run, "trackio": trackio_run, "mlflow": mlflow_run}


def follow(kind: str, project: str, interval_s: float, directory: Path, task: str, pid: int, cells: list[str]) -> None:
    """Report a task's cells until the task of `pid` ends. Any error of the tracker's package passes through."""
    path = TaskStatus.path(directory, task)
    while not path.exists() or (status := TaskStatus.read(path)).pid != pid:
        if not is_alive(pid):
            return
        time.sleep(_LOOK_S)  # the task has not begun: this is an earlier task's file
    runs = {}
    for cell_id in cells:
        settings = {**records.read_cell(directory / cell_id), "shard": status.shard, "command": status.command}
        cell = status.cells[cell_id]
        part = "" if status.shard == str(records.WHOLE) else f" {status.shard}"
        name = f"{cell.model} {cell.benchmark} {cell.policy}{part}"
        runs[cell_id] = TRACKERS[kind](project=project, group=directory.name, name=name, config=settings)
    step = 0
    state: State = "running"
    while state == "running":
        step += 1
        for cell_id, run in runs.items():
            run.log(_progress(status, cell_id), step)
        until = time.monotonic() + interval_s
        while state == "running" and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _LOOK_S))
            status = TaskStatus.read(path)
            state = status.seen(time.time())
    for cell_id, run in runs.items():
        result = cell_result(directory / cell_id, records.Shard.parse(status.shard))
        run.log({**_progress(status, cell_id), **result}, step + 1)
        run.finish(state == "done")


def _progress(status: TaskStatus, cell_id: str) -> dict[str, float]:
    cell = status.cells[cell_id]
    speed = status.tokens / max(status.heartbeat - status.started, 1e-9)
    return {"completions": cell.finished, "progress": cell.finished / cell.expected, "tokens_per_second": speed}


_Lengths = records.view(records.Completion, "num_tokens", "prompt_tokens", "peak_length")


def cell_result(folder: Path, shard: records.Shard) -> dict[str, float]:
    """One cell's results so far, of one shard, with columns as in cells.csv; empty without grades."""
    grades = Counter(row.outcome for row in records.read_grades(folder, shard=shard, on_bad=records.ignore))
    if not grades:
        return {}
    values: dict[str, float] = {name: grades[name] / grades.total() for name in records.OUTCOMES if name != "correct"}
    score = read_score(folder, shard).pass_at_1
    if score is not None and not records.read_cell(folder)["model"].get("random_weights"):
        values["pass_at_1"] = score
    rows = list(records.latest_rows([folder / shard.file(records.COMPLETIONS_FILE)], _Lengths, on_bad=records.ignore))
    sizes = records.read_provenance(folder / shard.file(records.PROVENANCE_FILE)).get("bytes", {})
    fixed = len(rows) * sizes.get("fixed_rows", 0)
    peak = fixed + sum(row.peak_length for row in rows)
    full = fixed + sum(row.prompt_tokens + row.num_tokens - 1 for row in rows)
    passes = records.read_rows(folder / shard.file(records.STATS_FILE), records.DecodeStats, on_bad=records.ignore)
    allocated = max((row.kv_bytes_allocated for row in passes), default=0)
    return {**values, "kept_memory_own": min(peak / full, 1.0), "kv_bytes_allocated": allocated}


def main() -> None:
    """Follow a run as a process of its own, whose one argument is a JSON list of the arguments of `follow`."""
    kind, project, interval_s, run_directory, *rest = json.loads(sys.argv[1])
    # The tracker's package may print lines, which must not appear between the lines of the job.
    terminal = os.fdopen(os.dup(2), "w")
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    try:
        follow(kind, project, interval_s, Path(run_directory), *rest)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        print(visible(_note(kind, f"{type(error).__name__}: {reason}")), file=terminal, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
