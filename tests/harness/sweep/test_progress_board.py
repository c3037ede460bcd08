"""The board of a sweep: a picture of all tasks on a terminal, a line a minute elsewhere, one sentence at the end."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsweep.harness.sweep import progress_board
from kvsweep.harness.sweep.progress_board import board
from kvsweep.run_files.task_status import CellProgress, TaskStatus, process_mark


def write_task(run: Path, name: str, benchmark: str, finished: int, **more: Any):
    cells = {
        f"{name}-{policy}": CellProgress(model="m", benchmark=benchmark, policy=policy, finished=finished, expected=10)
        for policy in ("full", "h2o")
    }
    now = time.time()
    alive = {"host": os.uname().nodename, "pid": os.getpid(), "process": process_mark(os.getpid())}
    alive |= {"started": now - 10, "heartbeat": now}
    own = {"state": "running", **alive, **more}
    TaskStatus(task=name, shard="1/1", command="kvsweep", cells=cells, **own).write(run)


def jobs(run: Path, *cell_ids: str) -> list[Any]:
    return [SimpleNamespace(run_directory=run, cells=[SimpleNamespace(cell_id=cell_id) for cell_id in cell_ids])]


@pytest.fixture
def sweep(tmp_path) -> list[Any]:
    write_task(tmp_path, "a", "chain", 4, pace=100.0, tokens_left=1000)
    write_task(tmp_path, "b", "groups", 0, state="queued", tokens_left=500)
    write_task(tmp_path, "other", "not_asked_for", 7, pace=1.0, tokens_left=9)
    return jobs(tmp_path, "a-full", "a-h2o", "b-full", "b-h2o")


def first_line(shown: AbstractContextManager[None], capfd: pytest.CaptureFixture[str]) -> str:
    """The first line that a file gets of the board."""
    end, said = time.monotonic() + 120, ""
    with shown:
        while "\n" not in said:
            assert time.monotonic() < end
            time.sleep(0.01)
            said += capfd.readouterr().err
    return said.splitlines()[0]


def test_a_file_gets_a_line_a_minute(sweep, monkeypatch, capfd):
    monkeypatch.setattr(progress_board, "LINE_S", 0.01)
    first = first_line(board(sweep), capfd)
    assert first[8:] == " 20.0%, 8 of 40 completions, left 0:00:15, 100 tokens/s"


def test_a_short_sweep_prints_no_line(sweep, capfd):
    with board(sweep):
        pass
    assert capfd.readouterr().err == ""


def terminal_text(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Put a terminal in place of stderr; the result reads what it shows."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    @contextmanager
    def terminal():
        yield drawn

    drawn = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_board, "_terminal", terminal)
    return lambda: re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.getvalue())


def test_a_terminal_shows_all_tasks_and_what_is_printed_above_them(sweep, monkeypatch):
    shown = terminal_text(monkeypatch)
    with board(sweep):
        print("a note\x1b[31m")
    text = shown()
    assert "a note\\x1b[31m" in text
    for part in ("20.0%, 8 of 40 completions", "0 of 4 cells done, 2 running, 2 queued", "left 0:00:15"):
        assert part in text
    assert text.index("a note") < text.index("20.0%")
    assert "not_asked_for" not in text


def test_a_terminal_shows_what_has_changed(sweep, tmp_path, monkeypatch):
    shown = terminal_text(monkeypatch)
    monkeypatch.setattr(progress_board, "LOOK_S", 0.01)
    monkeypatch.setattr(progress_board, "SHARE", 1)
    with board(sweep):
        for finished, said in ((4, "20.0%, 8 of 40"), (9, "45.0%, 18 of 40")):
            write_task(tmp_path, "a", "chain", finished)
            end = time.monotonic() + 120
            while said not in shown():
                assert time.monotonic() < end
                time.sleep(0.01)


def test_a_run_without_any_status_ends_well(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_board, "LINE_S", 0.01)
    with board(jobs(tmp_path / "nothing", "a")):
        time.sleep(0.05)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_all_signals_end_in_the_same_sentence(number, code):
    program = (
        # A test in a shell's background begins with a Ctrl-C that is ignored, one under nohup with SIGHUP.
        "import signal\nimport time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "from kvsweep.messages.command_line import GOES_ON, one_sentence\n"
        "with one_sentence('kvsweep', GOES_ON):\n    print('began', flush=True)\n    time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "began\n"
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == code
    assert said == "kvsweep: error: interrupted; the same command goes on where this one stopped.\n"


@pytest.mark.slow
def test_the_command_draws_it_on_a_terminal(tiny, tmp_path):
    """The whole way once: a real terminal, whose bytes end with the table of results."""
    program = [sys.executable, "-m", "kvsweep.cli", *tiny, "policy=full", f"results_dir={tmp_path}"]
    master, slave = pty.openpty()
    with subprocess.Popen(program, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                text += os.read(master, 65536)
            except OSError:  # the other end is closed
                break
    os.close(master)
    assert process.returncode == 0, text.decode()
    said = text.decode()
    assert said.index("3 slots x") < said.index("100.0%, 3 of 3 completions") < said.index("results: ")
