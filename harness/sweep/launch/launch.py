"""Start the jobs of a command by its launcher, and print the results or how to follow them."""

from collections.abc import Sequence

from kvsweep.base.command_line import counted
from kvsweep.harness.sweep.launch.launcher import Launcher, by_round, split
from kvsweep.harness.sweep.plan.job import Job


def launch(jobs: Sequence[Job], launcher: Launcher) -> None:
    """Start the jobs as the launcher does, and print a table of the results, or the command that shows the progress.

    Raises:
        Exception: that of the first job that failed in this process, after all jobs have ended.
    """
    directories = list(dict.fromkeys(job.run_directory for job in jobs))
    is_finished = not any(job.unfinished_cells() for job in jobs)
    if is_finished:
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: {counted(cells, 'cell')} done already")
    else:
        rounds = [split(part, launcher) for part in by_round(jobs)]
        launcher.check(jobs)
        launcher.start(rounds)
    for directory in directories:
        if not is_finished and launcher.waits:
            from kvsweep.analysis.report.tables import summary_table  # imports pandas

            print(summary_table(directory))
        is_there = is_finished or launcher.waits
        print(f"results: {directory}" if is_there else f"progress: kvsweep-status {directory} --watch")
        print(f"report:  kvsweep-report {directory}")
