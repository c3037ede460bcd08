"""The console script `kvsweep`. What only shows the configuration, such as Tab completion, does not wait for torch."""

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from analysis.records import STATUS_FOLDER, UserError, plain_disk_errors
from analysis.report.tables import summary_table
from harness.settings import CONF, build
from harness.sweep.decode_cells import _check_device
from harness.sweep.estimate import describe
from harness.sweep.heartbeat import TaskStatus
from harness.sweep.job import Job, plan
from harness.sweep.launch import LauncherConfig, run_local, split, submit
from harness.sweep.run import _status, run
from harness.sweep.store import CellLockedError, is_done

FAILED, BAD_INPUT, LOCKED, INTERRUPTED = 1, 2, 3, 130
SHOWS = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion", "--version"}


def main() -> None:
    """Console script: exit code 0 done, 1 a job failed, 2 bad input, 3 locked by another process, 130 interrupted."""
    # Hydra would print its own errors and exit 1; ours are one sentence and exit 2.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        if not _show():
            _sweep()
    except BrokenPipeError:
        # Whoever read what this prints has seen enough; the interpreter must not write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show() -> bool:
    """Show what Hydra is asked to show; False if it is asked for something else, or made a mistake in asking."""
    if SHOWS.isdisjoint(argument.partition("=")[0] for argument in sys.argv[1:]):
        return False
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(lambda config: None)()
        sys.stdout.flush()
        return True
    except (HydraException, OmegaConfBaseException):
        return False  # said in one sentence by the rest
    except ValueError as error:  # options that exclude each other, such as -m and --cfg
        print(f"kvsweep: error: {error}", file=sys.stderr)
        sys.exit(2)


def _sweep() -> None:
    """Collect the jobs of the command line and launch or describe them."""
    # Ours and not Hydra's, which would refuse it.
    dry_run = "--dry-run" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--dry-run"]
    try:
        jobs, launcher = collect_jobs()
        if not jobs:  # Hydra was only asked to show something, such as --cfg job
            return
        if dry_run:
            print(describe([job for task in split(jobs, launcher) for job in task]))
        else:
            launch(jobs, launcher)
    except CellLockedError as error:
        sys.exit(_say(str(error), LOCKED))
    except (UserError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_say(str(error), BAD_INPUT))
    except KeyboardInterrupt:
        sys.exit(_say("interrupted; the same command goes on where this one stopped.", INTERRUPTED))


def collect_jobs() -> tuple[list[Job], LauncherConfig]:
    """Compose and check every job of the command line before anything is run.

    Raises:
        UserError, HydraException, OmegaConfBaseException: the first mistake in any job.
    """
    jobs: list[Job] = []
    launchers: list[LauncherConfig] = []
    mistakes: list[Exception] = []

    def collect(config: DictConfig) -> None:
        try:
            jobs.append(plan(config))
            launchers.append(build(LauncherConfig, "launcher", config.launcher))
        except (UserError, OmegaConfBaseException) as mistake:
            mistakes.append(mistake)

    _compose(collect)
    if mistakes:
        raise mistakes[0]
    if any(launcher != launchers[0] for launcher in launchers):
        raise UserError("launcher differs between the jobs of one command: give it one value, not a list.")
    return jobs, launchers[0] if launchers else LauncherConfig()


def _compose(collect: Callable[[DictConfig], None]) -> None:
    """Let Hydra hand over every job's configuration."""
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)()
    except (HydraException, BrokenPipeError):  # some are an OSError as well
        raise
    except OSError as error:
        raise UserError(f"results_dir cannot be written to ({error.strerror}): set results_dir= elsewhere.") from error


def launch(jobs: Sequence[Job], launcher: LauncherConfig) -> None:
    """Run the jobs as the launcher says, and print what came out or where to look.

    Raises:
        Exception: the first job's that failed, once the others have ended.
    """
    tasks = split(jobs, launcher)
    parts = [job for task in tasks for job in task]
    directories = list(dict.fromkeys(job.run_directory for job in jobs))
    if all(map(_has_nothing_left, jobs)):
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: all {cells} cells are done")
        for directory in directories:
            print(f"results: {directory}\nreport:  kvsweep-report {directory}")
        return
    if launcher.kind != "slurm":
        for job in jobs:
            _check_device(job)
    for job in parts:
        _queue(job)
    if launcher.kind == "slurm":
        submitted = submit(tasks, launcher)
        print(f"submitted {len(submitted)} tasks as job {submitted[0].job_id.partition('_')[0]}")
        for directory in directories:
            print(f"progress: kvsweep-status {directory} --watch\nreport:   kvsweep-report {directory}")
        return
    if launcher.kind == "local":
        failed = run_local(tasks, launcher)
        if failed:
            print(f"kvsweep: error: {failed} of {len(tasks)} tasks failed: kvsweep-status says which.", file=sys.stderr)
            sys.exit(FAILED)
    elif failures := run(parts):
        raise failures[0]
    for directory in directories:
        print(summary_table(directory))
        print(f"results: {directory}\nreport:  kvsweep-report {directory}")


def _has_nothing_left(job: Job) -> bool:
    return all(is_done(job.run_directory, cell, job.problem_ids, job.draws) for cell in job.cells)


def _queue(job: Job) -> None:
    """Say that the job is to be run, unless it is running already or nothing of it is left to do."""
    if _has_nothing_left(job):
        return
    status = _status(job, "queued")
    path = job.run_directory / STATUS_FOLDER / f"{status.task}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path.exists() and TaskStatus.read(path).seen(time.time()) == "running":
            return
    with plain_disk_errors(job.run_directory):
        status.write(job.run_directory)


def _say(message: str, code: int) -> int:
    sentence = re.sub(r"\s+", " ", message.split("\nConfig search path:")[0]).strip()
    print(f"kvsweep: error: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
