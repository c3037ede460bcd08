"""`launcher=inline`: one job after the other, in this process."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvsweep.harness.sweep.launch.launcher import Launcher, Task, queue


@dataclass(frozen=True, kw_only=True)
class Inline(Launcher):
    """Runs the jobs in this process."""

    def start(self, rounds: Sequence[Sequence[Task]]) -> None:
        """Run all jobs, then raise the error of the first one that failed."""
        from kvsweep.harness.sweep.run.execute import run  # imports torch

        queue(rounds[0])
        if failures := run([job for tasks in rounds for task in tasks for job in task]):
            raise failures[0]
