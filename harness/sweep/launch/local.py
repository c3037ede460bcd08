"""`launcher=local`: several processes of this machine at once."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import submitit

from kvsweep.base.command_line import FAILED, counted, say
from kvsweep.base.errors import UserError
from kvsweep.base.files import open_file
from kvsweep.harness.models.gpus import VISIBLE, visible_gpus
from kvsweep.harness.sweep.launch.launcher import AtLeastOne, Launcher, RunJobs, Task, logs, queue
from kvsweep.harness.sweep.plan.job import Job
from kvsweep.harness.sweep.watch.board import Board


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Runs `parallel` tasks at once (one a GPU, else one a core), each in a process, with one GPU if any."""

    parallel: AtLeastOne | None = None

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        cuda = [job.model.device for job in jobs if job.model.device.startswith("cuda")]
        if cuda and not visible_gpus():
            unseen = f"needs a GPU, and launcher=local sees none ({VISIBLE} and nvidia-smi name them)"
            raise UserError(f"model.device={cuda[0]} {unseen}: make one visible, or set model.device=cpu.")

    def start(self, rounds: Sequence[Sequence[Task]]) -> None:
        """Run the tasks, round by round; a round in which a task fails ends the process with code 1."""
        queue(rounds[0])
        with Board([job for task in rounds[0] for job in task]):  # each round has the same cells
            for tasks in rounds:
                tasks = [task for task in tasks if any(job.unfinished_cells() for job in task)]
                if tasks and (failed := self._run(tasks)):
                    said = f"{failed} of {len(tasks)} tasks failed: kvsweep-status says which."
                    sys.exit(say("kvsweep", said, FAILED))

    def _run(self, tasks: Sequence[Task]) -> int:
        """Run the tasks of one round; returns how many failed."""
        executor = submitit.LocalExecutor(folder=logs(tasks))
        executor.update_parameters(timeout_min=60 * 24 * 365)
        waiting, running, failed = list(tasks), dict[submitit.Job[None], str | None](), 0
        gpus = visible_gpus()
        parallel = self.parallel or len(gpus) or os.cpu_count() or 1
        if gpus:
            print(f"launcher=local: {parallel} at once on {counted(len(gpus), 'GPU')}: {', '.join(gpus)}")
        # The processes share the cores; a process with more threads than cores is many times slower than one thread.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // min(parallel, len(tasks)))))
        try:
            while waiting or running:
                while waiting and len(running) < parallel:
                    gpu = min(gpus, key=list(running.values()).count, default=None)
                    with _stderr_in(logs(tasks) / "launcher.err"):
                        running[executor.submit(RunJobs(gpu), waiting.pop(0))] = gpu
                for process in [process for process in running if process.done()]:
                    del running[process]
                    if process.exception() is not None:
                        failed += 1
                        print(f"note: a task failed; its output is {process.paths.stderr}", file=sys.stderr)
                time.sleep(0.2)
        except BaseException:
            for process in running:
                process.cancel()
            raise
        return failed


@contextmanager
def _stderr_in(path: Path) -> Iterator[None]:
    """Send errors of the processes that submitit starts meanwhile to a file: at Ctrl-C each would print a traceback."""
    terminal = os.dup(2)
    with open_file(path, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
