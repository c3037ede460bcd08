"""SLURM's word on the tasks of a run, from a squeue that a test wrote."""

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsweep.harness.sweep.slurm_queue import tasks_now, waiting_jobs
from kvsweep.run_files.task_status import CellProgress, TaskStatus, note_job, process_mark

Squeue = Callable[[str], None]


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """`squeue(text)` puts a squeue first on the path that prints the text, or fails if it is empty."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def write(text):
        program = tmp_path / "bin/squeue"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n" if text else "#!/bin/sh\nexit 1\n")
        program.chmod(0o755)

    return write


def task(run: Path, name: str, **fields: object):
    cell = CellProgress(model="m", benchmark="b", policy="p", finished=0, expected=1)
    values = {"state": "queued", "shard": "1/1", "command": "kvsweep", "cells": {"c": cell}, **fields}
    TaskStatus(task=name, **values).write(run)  # type: ignore[arg-type]


def seen(run: Path) -> dict[str, tuple[str, str]]:
    return {one.task: (one.state, one.error or "") for one in tasks_now(run)}


def states(run: Path) -> dict[str, str]:
    return {one.task: one.state for one in tasks_now(run)}


@pytest.mark.parametrize(
    ("line", "state", "words"),
    [
        ("7_0|PENDING|Resources\n", "queued", "no processors, memory or GPUs are free yet"),
        ("7_0|PENDING|(ReqNodeNotAvail, UnavailableNodes:n1)\n", "queued", "the node is down or reserved"),
        ("7_0|PENDING|launch failed requeued held\n", "queued", "scontrol release lets it go"),
        ("7_0|PENDING|SomethingNew\n", "queued", "SomethingNew"),
        ("7_0|RUNNING|None\n", "queued", ""),
        ("7_1|PENDING|Resources\n", "stopped", "job 7_0 left SLURM's queue before it began"),
    ],
)
def test_a_queued_task_has_slurms_reason(line, state, words, squeue, tmp_path):
    squeue(line)
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    found = seen(tmp_path)["t"]
    assert found[0] == state
    assert words in found[1]


def test_a_task_that_died_before_it_began_says_how_its_output_ends(squeue, tmp_path):
    squeue("8|RUNNING|None\n")
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/7_0_0_log.err").write_text("x\n" * 9999 + "ModuleNotFoundError: No module named 'torch'\n")
    state, error = seen(tmp_path)["t"]
    assert state == "stopped"
    assert error.endswith("\nx\nModuleNotFoundError: No module named 'torch'")
    assert len(error.splitlines()) == 13


def test_a_running_task_whose_job_is_gone_has_stopped_unless_it_ended_well(squeue, tmp_path):
    squeue("9|RUNNING|None\n")
    here = {"host": platform.node(), "pid": os.getpid(), "heartbeat": time.time(), "started": 1.0}
    task(tmp_path, "gone", state="running", scheduler_job="7_0", **{**here, "heartbeat": 1.0})
    silent(tmp_path, "gone")
    task(tmp_path, "there", state="running", scheduler_job="9", **here)
    task(tmp_path, "ended", state="done", scheduler_job="7_1", **here)
    task(tmp_path, "left over", state="running", scheduler_job="99999", **here)
    task(tmp_path, "elsewhere", state="running", **here)
    expected = {"gone": "stopped", "there": "running", "ended": "done", "left over": "running", "elsewhere": "running"}
    assert states(tmp_path) == expected
    assert seen(tmp_path)["gone"][1].startswith("job 7_0 left SLURM's queue while it ran")


def test_the_queue_is_that_of_the_tasks_owner(squeue, tmp_path, monkeypatch):
    squeue("7_0|RUNNING|None\n")
    program = tmp_path / "bin/squeue"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n')
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    monkeypatch.setenv("LOGNAME", "daemon")
    assert seen(tmp_path)["t"][0] == "stopped"
    assert f"--user={os.getuid()}\n" in (tmp_path / "asked").read_text()
    monkeypatch.setattr("os.getuid", lambda: 4711)  # a colleague, from whom SLURM may hide the job
    assert seen(tmp_path)["t"] == ("queued", "")


def test_the_queue_of_another_cluster_says_nothing_of_a_task(squeue, tmp_path):
    squeue("7_0|RUNNING|None\n")
    scontrol = tmp_path / "bin/scontrol"
    scontrol.write_text("#!/bin/sh\necho 'ClusterName             = here'\n")
    scontrol.chmod(0o755)
    for name, cluster, job in (("own", "here", "8_0"), ("other", "there", "8_0"), ("same number", "there", "7_0")):
        task(tmp_path, name, cluster=cluster)
        note_job(tmp_path, name, job)
    assert states(tmp_path) == {"own": "stopped", "other": "queued", "same number": "queued"}
    assert "on the cluster there" in seen(tmp_path)["same number"][1]


def test_a_users_variables_of_squeue_hide_no_job(squeue, tmp_path, monkeypatch):
    squeue("7_0|PENDING|Resources\n")
    program = tmp_path / "bin/squeue"
    program.write_text(f"#!/bin/sh\necho $* > {tmp_path}/asked; test $SQUEUE_STATES || echo '7_0|PENDING|Resources'")
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    assert seen(tmp_path)["t"][0] == "queued"
    assert "--all" in (tmp_path / "asked").read_text().split(), "jobs of hidden partitions"


def test_a_shells_job_says_nothing_of_a_task_at_work(squeue, tmp_path):
    squeue("7|SUSPENDED|None\n8_0|SUSPENDED|None\n")
    for name, job in (("shell", "7"), ("own", "8_0")):
        task(tmp_path, name, state="running", scheduler_job=job, heartbeat=time.time(), started=1.0)
    note_job(tmp_path, "own", "8_0")
    assert states(tmp_path) == {"shell": "running", "own": "queued"}


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("COMPLETING|None", "completing in SLURM"),
        ("PENDING|BeginTime", "SLURM has queued the task again"),
        ("CONFIGURING|None", "configuring in SLURM"),
        ("RUNNING|None", "running in SLURM, and the task gives no sign of life"),
    ],
)
def test_a_task_that_is_queued_again_has_not_stopped(listed, expected, squeue, tmp_path):
    squeue(f"7_0|{listed}\n8|{listed}\n")
    task(tmp_path, "t", state="stopped", scheduler_job="7_0", started=1.0)
    note_job(tmp_path, "t", "7_0")
    assert seen(tmp_path)["t"][0] == "queued"
    assert expected in seen(tmp_path)["t"][1]
    task(tmp_path, "shell", state="stopped", scheduler_job="8", started=1.0)
    if listed.startswith("RUNNING"):
        assert seen(tmp_path)["shell"][0] == "stopped", "Ctrl-C in a shell that SLURM started, which goes on"


def test_a_process_is_known_by_more_than_its_number(tmp_path):
    mark = process_mark(os.getpid())
    place, _, start = mark.rpartition(" ")
    fresh = {"state": "running", "pid": os.getpid(), "heartbeat": time.time()}
    task(tmp_path, "silent", **{**fresh, "process": mark, "heartbeat": 1.0})
    silent(tmp_path, "silent")
    task(tmp_path, "taken over", **{**fresh, "process": f"{place} {int(start) + 1}"})
    task(tmp_path, "ended", **{**fresh, "process": mark, "pid": 2**22 + 1})
    task(tmp_path, "other namespace", **{**fresh, "process": f"x {mark}", "pid": 2**22 + 1})
    task(tmp_path, "clock behind", **{**fresh, "heartbeat": time.time() - 4000})
    task(tmp_path, "clock ahead", **{**fresh, "heartbeat": time.time() + 4000})
    silent(tmp_path, "clock ahead")
    running = {name for name, state in states(tmp_path).items() if state == "running"}
    assert running == {"silent", "other namespace", "clock behind"}


def test_a_hidden_process_of_a_colleague_is_known_by_its_signs_of_life(tmp_path, monkeypatch):
    """A mount of /proc with hidepid=2 shows a user the own processes alone."""
    mark = process_mark(os.getpid())
    monkeypatch.setattr("kvsweep.run_files.task_status.process_mark", lambda pid: mark if pid == os.getpid() else "")

    def kill(pid, number):
        raise PermissionError if pid == 4711 else ProcessLookupError

    monkeypatch.setattr(os, "kill", kill)
    fresh = {"state": "running", "process": mark, "heartbeat": time.time()}
    task(tmp_path, "hidden", pid=4711, **fresh)
    task(tmp_path, "ended", pid=4712, **fresh)
    task(tmp_path, "silent", pid=4711, **{**fresh, "heartbeat": 1.0})
    silent(tmp_path, "silent")
    assert states(tmp_path) == {"hidden": "running", "ended": "stopped", "silent": "stopped"}


def silent(run: Path, name: str):
    """Let the file system's clock say that the task last wrote long ago."""
    os.utime(TaskStatus.path(run, name), (1, 1))


def test_a_slurm_that_does_not_answer_changes_nothing(squeue, tmp_path):
    squeue("")
    assert waiting_jobs(os.getuid()) is None
    task(tmp_path, "t", scheduler_job="7_0")
    assert seen(tmp_path) == {"t": ("queued", "")}


def test_a_task_that_its_dead_command_queued_will_never_begin(squeue, tmp_path):
    squeue("")
    mark = process_mark(os.getpid())
    task(tmp_path, "dead", pid=2**22 - 1, process=mark)
    task(tmp_path, "alive", pid=os.getpid(), process=mark)
    task(tmp_path, "elsewhere", pid=2**22 - 1, process=f"another {mark}")
    assert states(tmp_path) == {"dead": "stopped", "alive": "queued", "elsewhere": "queued"}
