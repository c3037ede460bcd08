"""Progress and results of each cell for Weights & Biases, trackio or MLflow; off unless asked for (`tracker=`).

No run waits for a tracker. It lives in a process of its own, which is told by a thread what the task's status says now
and then: where it fails, hangs or asks for a password, the run does not notice. Its error is told once, and at a job's
end it has `patience_s` to finish before it is stopped.
"""

import contextvars
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Literal, Protocol, Self

import msgspec
from tqdm import tqdm

from analysis.records import COMPLETIONS_FILE, OUTCOMES, STATS_FILE, Shard, UserError, read_rows
from harness.sweep.heartbeat import Reporter, policy_label

if TYPE_CHECKING:  # the tracker's process has no need of torch
    from harness.grading.grader import CellSummary
    from harness.sweep.cell import Cell


Kind = Literal["none", "wandb", "trackio", "mlflow"]


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """Which tracker is told, and how often (`conf/tracker/`).

    Attributes:
        kind: the tracker's package; `none` tells nobody.
        project: what the tracker calls the collection of runs.
        interval_s: seconds between two looks at the progress.
        patience_s: seconds that the end of a job waits for the tracker.

    Raises:
        UserError: a number out of range; the package is not installed.
    """

    kind: Kind = "none"
    project: str = "kvsweep"
    interval_s: float = 15.0
    patience_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("interval_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"tracker.{name}={getattr(self, name)} is out of range: it must be above 0 seconds.")
        if self.kind != "none" and find_spec(self.kind) is None:
            raise UserError(
                f"tracker={self.kind} needs the package {self.kind}, which is not installed: "
                f"pip install 'kvsweep[{self.kind}]', or tracker=none."
            )


UNTRACKED = TrackerConfig()


class Run(Protocol):
    """One cell's run at a tracker."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add the values at a step; steps ascend."""

    def finish(self, *, ok: bool) -> None:
        """Close the run."""


class WandbRun:
    """A run of Weights & Biases, one of several that are open side by side."""

    def __init__(self, *, project: str, group: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        # Neither the console nor the machine is ours to watch: twenty cells would do it twenty times.
        settings = {"console": "off", "silent": True, "x_disable_stats": True}
        self._run = wandb.init(
            project=project, group=group, name=name, config=dict(config), reinit="create_new", settings=settings
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """As `Run.log`."""
        self._run.log(dict(values), step=step)

    def finish(self, *, ok: bool) -> None:
        """As `Run.finish`."""
        self._run.finish(exit_code=0 if ok else 1)


class TrackioRun:
    """A run of trackio."""

    def __init__(self, *, project: str, group: str, name: str, config: Mapping[str, Any]) -> None:
        import trackio

        # A context of its own: in the same one, `init` would end the run before.
        self._run = contextvars.Context().run(
            trackio.init, project=project, group=group, name=name, config=dict(config), embed=False
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """As `Run.log`."""
        self._run.log(dict(values), step=step)

    def finish(self, *, ok: bool) -> None:
        """As `Run.finish`; trackio knows no failed runs."""
        self._run.finish()


class MlflowRun:
    """A run of MLflow, by its client: the fluent functions know only one open run."""

    # What its server takes of a parameter's value.
    MOST_CHARACTERS = 6000

    def __init__(self, *, project: str, group: str, name: str, config: Mapping[str, Any]) -> None:
        import mlflow

        self._client = mlflow.MlflowClient()
        found = self._client.get_experiment_by_name(project)
        experiment = self._client.create_experiment(project) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=name, tags={"group": group}).info.run_id
        for key, value in _flat(config):
            self._client.log_param(self._id, key, str(value)[: self.MOST_CHARACTERS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """As `Run.log`."""
        for key, value in values.items():
            self._client.log_metric(self._id, key, value, step=step)

    def finish(self, *, ok: bool) -> None:
        """As `Run.finish`."""
        self._client.set_terminated(self._id, "FINISHED" if ok else "FAILED")


RUNS: Mapping[str, Callable[..., Run]] = {"wandb": WandbRun, "trackio": TrackioRun, "mlflow": MlflowRun}


def serve(kind: str) -> None:
    """What the tracker's process does: each line calls one cell's run, as JSON `[cell_id, method, arguments]`."""
    runs: dict[str, Run] = {}
    for line in sys.stdin:
        cell_id, method, arguments = json.loads(line)
        if method == "open":
            runs[cell_id] = RUNS[kind](**arguments)
        else:
            getattr(runs[cell_id], method)(**arguments)


class Tracking:
    """Tells the tracker of a task's cells while it runs. A context manager.

    Attributes:
        graded: what grading found, by cell_id; the task adds each cell's when it is there.
    """

    def __init__(self, config: TrackerConfig, group: str, cells: Mapping[str, "Cell"], reporter: Reporter) -> None:
        self.graded: dict[str, CellSummary] = {}
        self._config, self._group, self._cells, self._reporter = config, group, cells, reporter
        self._ok = self._late = False
        self._process: subprocess.Popen[str] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Self:
        if self._config.kind == "none":
            return self
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            self._errors = tempfile.TemporaryFile("w+")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from harness.sweep.tracker import serve; serve({self._config.kind!r})"],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                text=True,
                start_new_session=True,  # a Ctrl-C is the run's, and there is no terminal to ask
            )
        except OSError as error:
            self._note(str(error))
            return self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._ok = error is None
        self._end.set()
        try:
            self._thread.join(self._config.patience_s)
        finally:
            if self._thread.is_alive():
                self._late = True
                # With the processes that it has started itself.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._thread.join()
            self._errors.close()

    def _follow(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                self._tell(pipe)
        except BrokenPipeError:
            pass  # the process is no more, and its status says why
        except Exception as error:
            self._note(" ".join(str(error).split()))
        code = self._process.wait()
        if self._late:
            self._note(f"not finished after {self._config.patience_s:g} s")
        elif code:
            self._errors.seek(0)
            self._note((self._errors.read().strip() or f"it ended with status {code}").splitlines()[-1])

    def _note(self, reason: str) -> None:
        tqdm.write(f"note: tracker={self._config.kind} is told no more ({reason}); the run goes on.", file=sys.stderr)

    def _tell(self, pipe: IO[str]) -> None:
        for cell_id, cell in self._cells.items():
            _send(pipe, cell_id, "open", **self._settings(cell))
        step = 0
        while not self._end.wait(self._config.interval_s):
            step += 1
            for cell_id in self._cells:
                _send(pipe, cell_id, "log", values=self._progress(cell_id), step=step)
        for cell_id in self._cells:
            _send(pipe, cell_id, "log", values={**self._progress(cell_id), **self._result(cell_id)}, step=step + 1)
            _send(pipe, cell_id, "finish", ok=self._ok)

    def _settings(self, cell: "Cell") -> dict[str, Any]:
        status = self._reporter.status
        label = f"{cell.model.name} {cell.benchmark.name} {policy_label(cell.policy.identity())}"
        name = label if status.shard == "1/1" else f"{label} {status.shard}"
        config = {**cell.describe(), "shard": status.shard, "command": status.command}
        return {"project": self._config.project, "group": self._group, "name": name, "config": config}

    def _progress(self, cell_id: str) -> dict[str, float]:
        status = self._reporter.status
        seconds = max(time.time() - status.started, 1e-9)
        tokens = sum(count() for count in self._reporter.counters)
        finished, expected = status.cells[cell_id].finished, status.cells[cell_id].expected
        return {"completions": finished, "progress": finished / expected, "tokens_per_second": tokens / seconds}

    def _result(self, cell_id: str) -> dict[str, float]:
        summary = self.graded.get(cell_id)
        if summary is None or not summary.rows:
            return {}
        values: dict[str, float] = {
            name: summary.outcomes[name] / summary.rows for name in OUTCOMES if name != "correct"
        }
        if not self._cells[cell_id].model.random_weights:
            values["pass_at_1"] = summary.outcomes["correct"] / summary.rows
        return {**values, **_memory(summary, Shard.parse(self._reporter.status.shard))}


class _Lengths(msgspec.Struct):
    num_tokens: int
    prompt_tokens: int
    peak_length: int


def _memory(summary: "CellSummary", shard: Shard) -> dict[str, float]:
    """`kept_memory`, as the report has it, and the largest KV cache of any stretch in bytes, all slots together."""
    decode = msgspec.json.Decoder(_Lengths).decode
    with (summary.directory / shard.file(COMPLETIONS_FILE)).open("rb") as lines:
        rows = [decode(line) for line in lines]
    peak, full = sum(row.peak_length for row in rows), sum(row.prompt_tokens + row.num_tokens - 1 for row in rows)
    stretches = read_rows(summary.directory / shard.file(STATS_FILE), on_bad=lambda *_: None)
    allocated = max((row["kv_bytes_allocated"] for row in stretches), default=0)
    return {"kept_memory": min(peak / full, 1.0), "kv_bytes_allocated": allocated}


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(f"{prefix}{name}", value)]
    return flat


def _send(pipe: IO[str], cell_id: str, method: str, **arguments: Any) -> None:
    pipe.write(json.dumps([cell_id, method, arguments], default=str) + "\n")
    pipe.flush()
