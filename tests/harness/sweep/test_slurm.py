"""Submissions to SLURM, beside programs that a test wrote in place of SLURM's."""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.harness.sweep.share import share_of, status_of
from kvsweep.harness.sweep.slurm import Slurm, _Preview
from kvsweep.messages.command_line import LOCKED
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Shard
from kvsweep.run_files.task_status import TaskStatus

Programs = Callable[..., None]
SLURM = ("policy=full", "launcher=slurm")


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`programs(sbatch="TEXT")` puts scripts of these texts in place of SLURM's programs; one without a text fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def write(**texts):
        (tmp_path / "bin").mkdir()
        for name in ("srun", "sbatch", "squeue", "scontrol"):
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{texts.get(name) or 'exit 1'}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return write


def at_work(job: Job) -> TaskStatus:
    """The status of a process that works at the job, with a number left over in its SLURM_JOB_ID."""
    status = status_of(share_of(job), "running")
    status.scheduler_job = "99999"
    status.sign()
    status.write(job.run_directory)
    return status


def test_what_sbatch_refuses_is_one_sentence_and_nothing_waits(kvsweep, tiny, programs, tmp_path):
    programs(sbatch="echo no such partition >&2; exit 1")
    ended = kvsweep(*tiny, "policy=full", "launcher=slurm", "launcher.shards=4", f"results_dir={tmp_path}/runs")
    assert ended.code == 2
    assert "launcher=slurm cannot submit" in ended.err
    assert "no such partition" in ended.err
    assert not list((tmp_path / "runs").glob("*/status/*.json"))


def test_a_submission_that_fails_keeps_the_status_of_the_task_before(kvsweep, tiny, programs, tmp_path):
    programs()
    words = [*tiny, "policy=full", f"results_dir={tmp_path}"]
    kvsweep(*words)
    [path] = tmp_path.glob("default/status/*.json")
    status = path.read_text()
    assert "cannot submit" in kvsweep(*words, "launcher=slurm", "benchmark.limit=4").err
    assert path.read_text() == status


def test_what_was_typed_beats_variables_of_sbatch_and_of_the_shells_job(kvsweep, tiny, programs, tmp_path, monkeypatch):
    programs(sbatch=f"env > {tmp_path}/seen\nfor last; do :; done; cp $last {tmp_path}/script; exit 1")
    beaten = {"SBATCH_TIMELIMIT": "7", "SBATCH_JOB_NAME": "mine", "SBATCH_CONSTRAINT": "old", "SBATCH_MEM_PER_CPU": "9"}
    beaten |= {"SBATCH_WAIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_GPUS": "2"}
    # A shell that SLURM started, or its terminal after the job's end; its sizes would be srun's for the new job.
    shell = {"SLURM_JOB_ID": "99999", "SLURM_NTASKS": "4", "SLURM_STEP_GRES": "gpu:7", "SLURM_EXCLUSIVE": "1"}
    kept = {"SBATCH_ACCOUNT": "lab", "SBATCH_EXPORT": "NONE", "SLURM_CONF": "/site/slurm.conf"}
    for name, value in {**beaten, **shell, **kept}.items():
        monkeypatch.setenv(name, value)
    words = [*SLURM, "launcher.timeout_min=20", "launcher.memory_gb=1", "launcher.additional.constraint=h200"]
    kvsweep(*tiny, *words, f"results_dir={tmp_path}/runs")
    script = (tmp_path / "script").read_text()
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert not seen.keys() & {*beaten, *shell}
    assert seen.items() >= kept.items(), "the launcher has no such setting of its own"
    assert {**os.environ}.items() >= {**beaten, **shell}.items()
    assert "#SBATCH --time=20\n" in script
    assert script.index("export SLURM_EXPORT_ENV=ALL\n") < script.index("\nsrun ")


def test_a_dry_run_shows_the_script_that_sbatch_gets_and_that_the_time_is_too_short(kvsweep, tiny, programs, tmp_path):
    programs(sbatch=f"for last; do :; done; cp $last {tmp_path}/script; exit 1")
    words = [*tiny, *SLURM, "launcher.timeout_min=20", "launcher.shards=3", "launcher.srun_args=['--mpi=none']"]
    words += ["launcher.python='apptainer exec image.sif python'", f"results_dir={tmp_path}/runs"]
    shown = kvsweep(*words, "--dry-run", "assume.tokens_per_second=0.01").out
    assert not (tmp_path / "runs").exists()
    assert "cannot submit" in kvsweep(*words).err
    script = (tmp_path / "script").read_text().splitlines()
    lines = [line for line in script if line and not line.startswith(("# ", "#!"))]
    assert [line.removeprefix("  ") for line in shown.splitlines() if line.startswith("  ")][-len(lines) :] == lines
    assert "sbatch would get one array of 3 tasks, 3 at once, each for at most 20 minutes:" in shown
    assert "warning: the longest task takes 1.1 hours, launcher.timeout_min=20 allows 0.333: SLURM stops it " in shown
    assert "#SBATCH --ntasks=1" in lines
    assert lines[-1].startswith("srun ")
    assert " --ntasks=1 --mpi=none apptainer exec image.sif python -P -u -m submitit.core._submit " in lines[-1]


@pytest.mark.parametrize(
    ("option", "value", "line"),
    [
        ("constraint", "h200", "--constraint=h200"),
        ("nice", 0, "--nice=0"),
        ("exclusive", True, "--exclusive"),
        ("exclusive", False, ""),
        ("gres", "nvme:1", "--gres=nvme:1"),
        # What the launcher's settings say, in each spelling that sbatch takes.
        ("cpus-per-task", 3, None),
        ("tim", 5, None),
        ("mem-per-cpu", "1G", None),
        ("gres", "gpu:2", None),
        ("open-mode", "truncate", None),
        ("parsable", True, None),  # hides the job's number
        ("comment --time", 5, None),
        ("comment", "two\nlines", None),
        ("comment", "%j", None),
    ],
)
def test_an_added_option_stands_in_the_script_or_is_refused(option, value, line, tmp_path):
    launcher = Slurm(gpus=1, memory_gb=4, additional={option: value})
    if line is None:
        with pytest.raises(UserError, match=option):
            launcher._parameters(tmp_path)
        return
    script = _Preview(folder=tmp_path)
    script.update_parameters(**launcher._parameters(tmp_path))
    lines = [text.removeprefix("#SBATCH ") for text in script.script(1).splitlines() if option in text]
    assert "".join(lines) == line


@pytest.mark.parametrize("name", ["half%j", "back\\\\slash", "two\nlines"])
def test_a_dry_run_refuses_a_folder_that_slurm_reads_as_a_pattern(name, kvsweep, tiny, tmp_path):
    ended = kvsweep(*tiny, *SLURM, f"results_dir={tmp_path}/{name}", "--dry-run")
    assert ended.code == 2
    assert "results_dir" in ended.err


@pytest.mark.parametrize(
    ("running", "submitted", "is_refused"),
    [("1/1", "1/1", True), ("1/1", "1/2", True), ("1/2", "1/2", True), ("1/2", "2/2", False)],
)
def test_cells_that_a_process_writes_are_not_submitted(
    running, submitted, is_refused, kvsweep, compose, tiny, programs, tmp_path
):
    """No job can wait for a process that SLURM does not know, whatever number is left over in its SLURM_JOB_ID."""
    programs(squeue="echo '7|RUNNING|None'")
    words = [*tiny, "policy=full", f"results_dir={tmp_path}"]
    job = replace(make_job(compose(*words)), shard=Shard.parse(running))
    status = at_work(job)
    ended = kvsweep(*words, *SLURM, f"shard={submitted}")
    assert (f"process {os.getpid()} on " if is_refused else "launcher=slurm cannot submit") in ended.err
    assert ended.code == (LOCKED if is_refused else 2)
    path = TaskStatus.path(job.run_directory, status.task)
    assert (f"if its machine is gone, delete {path}." in ended.err) == is_refused
    assert list(path.parent.iterdir()) == [path]


def test_cells_that_wait_on_another_cluster_are_not_submitted(kvsweep, compose, tiny, programs, tmp_path):
    programs(scontrol="echo ClusterName = here", squeue="echo '99999|RUNNING|None'")
    words = [*tiny, "policy=full", f"results_dir={tmp_path}"]
    job = make_job(compose(*words))
    status = at_work(job)
    status.cluster = "there"
    status.write(job.run_directory)
    ended = kvsweep(*words, *SLURM)
    assert ended.code == LOCKED
    assert "job 99999 of the cluster there works on the same cells" in ended.err


def test_a_shells_job_that_is_in_the_queue_goes_first(kvsweep, compose, tiny, programs, tmp_path):
    programs(squeue="echo '99999|RUNNING|None'", sbatch=f"for last; do :; done; cp $last {tmp_path}/script; exit 1")
    words = [*tiny, "policy=full", f"results_dir={tmp_path}/runs"]
    at_work(make_job(compose(*words)))
    ended = kvsweep(*words, *SLURM)
    assert "note: job 99999 works on the same cells" in ended.out
    assert "#SBATCH --dependency=afterany:99999\n" in (tmp_path / "script").read_text()
