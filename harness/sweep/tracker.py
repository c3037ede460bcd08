"""Send each cell's progress and results to Weights & Biases, trackio or MLflow; off by default (`tracker=`).

A thread beside the decoding sends what the task's status says. An error of the tracker ends the thread with a note that
the status gets too, and the end of the job waits at most `patience_s`, so no tracker can stop or delay a job.
"""

import contextvars
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from kvsweep.analysis.statistics.pass_at_1 import read_score
from kvsweep.harness.sweep.job import TrackerConfig
from kvsweep.messages.escape import visible
from kvsweep.run_files import row_types
from kvsweep.run_files.run_reader import StoredCell, read_provenance
from kvsweep.run_files.task_status import TaskStatus

# MLflow's server refuses longer parameter values.
MLFLOW_CHARACTERS = 6000
# Of tasks that create a project at one moment, all but one get an error; a database takes seconds to be made.
PAUSES_S = (2.0, 8.0)


@contextmanager
def tracked(config: TrackerConfig, run_directory: Path, status: TaskStatus, cells: Collection[str]) -> Iterator[None]:
    """Send a task's status to the tracker inside the block, one run per cell_id; enter this before `Reporter`."""
    ended = threading.Event()
    cell_ids = list(cells)

    def note(reason: str) -> None:
        status.note = f"note: tracker={config.kind} gets no more values ({' '.join(reason.split())}); the run goes on."
        print(visible(status.note), file=sys.stderr, flush=True)
        with suppress(OSError):
            status.write(run_directory)

    def follow() -> None:
        """Send the cells' progress every `interval_s` until the block has ended, then their results."""
        try:
            runs = {cell_id: _open(config, run_directory, status, cell_id) for cell_id in cell_ids}
            for step in count(1):
                for cell_id, run in runs.items():
                    run.log(_progress(status, cell_id), step)
                if ended.wait(config.interval_s):
                    break
            shard = row_types.Shard.parse(status.shard)
            # The block has ended, so these are the last counts, and they come after the last step of the loop.
            for cell_id, run in runs.items():
                result = cell_result(run_directory / cell_id, shard)
                run.log({**_progress(status, cell_id), **result}, step + 1)
                run.finish(status.state == "done")
        except (Exception, SystemExit) as error:
            note(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(config.patience_s)
        if thread.is_alive():
            note(f"not finished after {config.patience_s:g} s")


def _open(config: TrackerConfig, run_directory: Path, status: TaskStatus, cell_id: str) -> "TrackerRun":
    """Start a cell's run at the tracker; after an error try again, twice."""
    settings = {**StoredCell(run_directory / cell_id).settings, "shard": status.shard, "command": status.command}
    cell = status.cells[cell_id]
    # Only a cell that is divided has a shard in its run's name.
    name = f"{cell.model} {cell.benchmark} {cell.policy} {status.shard}".removesuffix(f" {row_types.WHOLE}")
    start = partial(TRACKERS[config.kind], project=config.project, group=run_directory.name, name=name, config=settings)
    for pause in PAUSES_S:
        with suppress(Exception):
            return start()
        time.sleep(pause)
    return start()  # an error of the last attempt passes


def _progress(status: TaskStatus, cell_id: str) -> dict[str, float]:
    cell = status.cells[cell_id]
    speed = status.tokens / max(status.heartbeat - status.started, 1e-9)
    progress = cell.finished / max(cell.expected, 1)  # a shard may have no completion of a cell
    return {"completions": cell.finished, "progress": progress, "tokens_per_second": speed}


class TrackerRun(NamedTuple):
    """One cell's run at a tracker: call `log(values, step)` with ascending steps, then `finish(ok)`."""

    log: Callable[[dict[str, float], int], object]
    finish: Callable[[bool], object]


def wandb_run(**names: Any) -> TrackerRun:
    """Open a run; `names` are its project, group, name and config, as for the other trackers."""
    import wandb

    # Otherwise twenty cells would record the console and the machine twenty times.
    quiet = {"console": "off", "silent": True, "x_disable_stats": True}
    run = wandb.init(**names, reinit="create_new", settings=quiet)
    return TrackerRun(log=run.log, finish=lambda ok: run.finish(exit_code=0 if ok else 1))


def trackio_run(**names: Any) -> TrackerRun:
    """Open a run of trackio, which cannot mark a run as failed."""
    import trackio

    # In the same context a second `init` would end the run before it.
    run = contextvars.Context().run(trackio.init, **names, embed=False)
    return TrackerRun(log=lambda values, step: run.log(values, step=step), finish=lambda ok: run.finish())


def mlflow_run(*, project: str, group: str, name: str, config: dict[str, Any]) -> TrackerRun:
    """Open a run of MLflow with its client, because the fluent functions support only one open run."""
    import mlflow

    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name(project)
    experiment_id = client.create_experiment(project) if experiment is None else experiment.experiment_id
    run_id = client.create_run(experiment_id, run_name=name, tags={"group": group}).info.run_id
    for setting, value in row_types.leaves(config):
        client.log_param(run_id, setting, str(value)[:MLFLOW_CHARACTERS])

    def log(values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            client.log_metric(run_id, key, value, step=step)

    return TrackerRun(log=log, finish=lambda ok: client.set_terminated(run_id, "FINISHED" if ok else "FAILED"))


TRACKERS: Mapping[str, Callable[..., TrackerRun]] = {"wandb": wandb_run, "trackio": trackio_run, "mlflow": mlflow_run}


_Lengths = row_types.view(row_types.Completion, "num_tokens", "prompt_tokens", "peak_length")


def cell_result(folder: Path, shard: row_types.Shard) -> dict[str, float]:
    """Return one cell's results so far, of one shard, with the columns of cells.csv; empty without grades."""
    stored = StoredCell(folder)
    outcomes = Counter(grade.outcome for grade in stored.grades(shard=shard, on_bad=row_types.ignore).values())
    if not outcomes:
        return {}
    values = dict[str, float]()
    for outcome in row_types.OUTCOMES:
        if outcome != "correct":
            values[outcome] = outcomes[outcome] / outcomes.total()
    score = read_score(folder, shard).pass_at_1
    if score is not None and not stored.settings["model"].get("random_weights"):
        values["pass_at_1"] = score
    rows = list(stored.rows(_Lengths, shard=shard, on_bad=row_types.ignore))
    if any(row.peak_length is None for row in rows):  # rows of a server
        return values
    sizes = read_provenance(stored.files(row_types.PROVENANCE_FILE)[shard]).get("bytes", {})
    fixed_size_rows = len(rows) * sizes.get("fixed_rows", 0)  # a slot's memory of fixed size, in rows
    peak_rows = fixed_size_rows + sum(row.peak_length for row in rows)
    # The last token of a completion is not fed, and has no row.
    full_rows = fixed_size_rows + sum(row.prompt_tokens + row.num_tokens - 1 for row in rows)
    passes = stored.rows(row_types.DecodeStats, shard=shard, on_bad=row_types.ignore)
    allocated_bytes = max((row.kv_bytes_allocated for row in passes), default=0)
    # The peaks' sum, as a share of what a full cache would hold for the same texts.
    return {**values, "kept_memory_own": min(peak_rows / full_rows, 1.0), "kv_bytes_allocated": allocated_bytes}
