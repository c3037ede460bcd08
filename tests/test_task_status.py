"""SLURM's word on the tasks of a run, from a squeue that a test wrote."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsweep.task_status import CellProgress, TaskStatus, note_job, tasks_now, waiting_jobs

Squeue = Callable[[str], None]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Squeue:
    """`squeue(text)` puts a squeue first on the path that prints the text, or fails if it is empty."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def write(text: str) -> None:
        program = tmp_path / "bin/squeue"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n" if text else "#!/bin/sh\nexit 1\n")
        program.chmod(0o755)

    return write


def task(run: Path, name: str, **fields: object) -> None:
    cell = CellProgress(model="m", benchmark="b", policy="p", finished=0, expected=1)
    values = {"state": "queued", "shard": "1/1", "command": "kvsweep", "cells": {"c": cell}, **fields}
    TaskStatus(task=name, **values).write(run)  # type: ignore[arg-type]


def seen(run: Path) -> dict[str, tuple[str, str]]:
    return {one.task: (one.state, one.error or "") for one in tasks_now(run)}


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
def test_a_queued_task_has_slurms_reason(line: str, state: str, words: str, squeue: Squeue, tmp_path: Path) -> None:
    squeue(line)
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    found = seen(tmp_path)["t"]
    assert found[0] == state
    assert words in found[1]


def test_a_task_that_died_before_it_began_says_how_its_output_ends(squeue: Squeue, tmp_path: Path) -> None:
    squeue("8|RUNNING|None\n")
    task(tmp_path, "t")
    note_job(tmp_path, "t", "7_0")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/7_0_0_log.err").write_text("x\n" * 9999 + "ModuleNotFoundError: No module named 'torch'\n")
    state, error = seen(tmp_path)["t"]
    assert state == "stopped"
    assert error.endswith("\nx\nModuleNotFoundError: No module named 'torch'")
    assert len(error.splitlines()) == 13


def test_a_running_task_whose_job_is_gone_has_stopped_unless_it_ended_well(squeue: Squeue, tmp_path: Path) -> None:
    squeue("9|RUNNING|None\n")
    here = {"host": platform.node(), "pid": os.getpid(), "heartbeat": 9e9, "started": 1.0}
    task(tmp_path, "gone", state="running", scheduler_job="7_0", **here)
    task(tmp_path, "there", state="running", scheduler_job="9", **here)
    task(tmp_path, "ended", state="done", scheduler_job="7_1", **here)
    task(tmp_path, "elsewhere", state="running", **here)
    states = {name: state for name, (state, _) in seen(tmp_path).items()}
    assert states == {"gone": "stopped", "there": "running", "ended": "done", "elsewhere": "running"}


def test_a_slurm_that_does_not_answer_changes_nothing(squeue: Squeue, tmp_path: Path) -> None:
    squeue("")
    assert waiting_jobs() is None
    task(tmp_path, "t", scheduler_job="7_0")
    assert seen(tmp_path) == {"t": ("queued", "")}


def test_a_task_that_its_dead_command_queued_will_never_begin(squeue: Squeue, tmp_path: Path) -> None:
    squeue("")
    task(tmp_path, "dead", host=platform.node(), pid=2**22 - 1)
    task(tmp_path, "alive", host=platform.node(), pid=os.getpid())
    task(tmp_path, "elsewhere", host="another", pid=2**22 - 1)
    states = {name: state for name, (state, _) in seen(tmp_path).items()}
    assert states == {"dead": "stopped", "alive": "queued", "elsewhere": "queued"}
