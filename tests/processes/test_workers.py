"""Workers: a call that hangs, crashes or fills the memory costs its own result alone, and no process is left over."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pebble.pool.process
import pytest

from kvsweep.messages.errors import UserError
from kvsweep.processes.workers import Workers

ROOT = Path(__file__).resolve().parents[2]


def wait_until(holds: Callable[[], object], seconds: float = 120):
    """Wait for a condition; that it never holds is an error."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def call(what: str, path: str = "") -> int:
    """Wait, die, raise or return the worker's process id, as `what` says."""
    print("a library that prints")
    if what == "together":
        mark = Path(path) / str(os.getpid())
        mark.touch()
        wait_until(lambda: len(list(mark.parent.iterdir())) == 2)
    if what == "sleep" or (what == "once" and not Path(path).exists()):
        Path(path or os.devnull).touch()
        time.sleep(600)
    if what == "die":
        os._exit(3)
    if what == "raise":
        raise ArithmeticError("no sense")
    if what == "fill":
        bytearray(6 << 30)
    if what == "note":
        Path(path).with_name(f"began-{os.getpid()}").touch()
        time.sleep(0.3)
    return os.getpid()


def heavy() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "datasets")]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_call_that_hangs_dies_or_fills_the_memory_costs_its_result_alone(capfd):
    lost = {3: "sleep", 4: "die", 5: "fill", 9: "sleep"}
    with Workers(workers=2, timeout_s=3) as workers:
        started = time.perf_counter()
        results = workers.map(call, [(lost.get(number, "ok"),) for number in range(12)])
        assert time.perf_counter() - started < 500  # a call that hangs sleeps for ten minutes
    assert [number for number, pid in enumerate(results) if pid is None] == list(lost)
    wait_until(lambda: all(is_gone(pid) for pid in results if pid))
    assert capfd.readouterr().out == ""


def test_few_calls_keep_every_worker_busy_and_workers_are_reused(tmp_path):
    with Workers(workers=2, timeout_s=200) as workers:
        used = set(workers.map(call, [("together", str(tmp_path))] * 4))
        assert len(used) == 2
        assert set(workers.map(call, [("ok",)] * 20)) <= used
        assert workers.map(call, []) == []


@pytest.mark.slow
def test_a_call_that_overran_once_is_tried_again(tmp_path):
    with Workers(workers=1, timeout_s=3) as workers:
        assert None not in workers.map(call, [("ok",), ("once", str(tmp_path / "mark")), ("ok",)])


def test_a_prepared_worker_is_another_one():
    with Workers(workers=1, prepare=partial(os.nice, 1)) as workers:
        [plain] = workers.map(os.nice, [(0,)])
        [prepared] = workers.map(os.nice, [(0,)], prepared=True)
        assert plain is not None
        assert prepared == plain + 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_between_calls_is_replaced(number):
    with Workers(workers=1) as workers:
        [pid] = workers.map(call, [("ok",)])
        assert pid is not None
        os.kill(pid, number)
        [other] = workers.map(call, [("ok",)])
        assert other not in (None, pid)
        time.sleep(0.5)
        assert workers.map(call, [("ok",)]) == [other]


@pytest.mark.slow
def test_an_error_of_the_function_is_raised_and_the_workers_go_on():
    with Workers(workers=1) as workers:
        with pytest.raises(ArithmeticError, match="no sense"):
            workers.map(call, [("raise",), ("sleep",)])
        assert None not in workers.map(call, [("ok",)])


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["parent", "workers", "both"])
def test_a_process_that_is_stopped_for_a_while_loses_no_result(tmp_path, whom):
    """A freeze of several times the time limit, while each call takes a part of that limit."""
    done = tmp_path / "done"
    program = (
        "from pathlib import Path; from tests.processes.test_workers import call\n"
        "from kvsweep.processes.workers import Workers\n"
        "with Workers(workers=2, timeout_s=3) as workers:\n"
        "    lost = False\n"
        f"    while not Path({str(done)!r}).exists():\n"
        f"        lost |= None in workers.map(call, [('note', {str(tmp_path / 'x')!r})] * 10)\n"
        "    print(lost)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("began-*"))) == 2 or process.poll() is not None)
    assert process.poll() is None
    pids = [int(path.name.removeprefix("began-")) for path in tmp_path.glob("began-*")]
    frozen = {"parent": [process.pid], "workers": pids, "both": [process.pid, *pids]}[whom]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 if whom == "workers" else 8)
    for pid in reversed(frozen):
        os.kill(pid, signal.SIGCONT)
    done.touch()
    assert process.communicate(timeout=120)[0].strip() == "False"


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    program = (
        "from tests.processes.test_workers import call; from kvsweep.processes.workers import Workers\n"
        f"Workers(workers=1).map(call, [('sleep', {str(tmp_path / 'mark')!r}), ('ok',)])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE)
    wait_until(lambda: (tmp_path / "mark").exists() or process.poll() is not None)
    process.kill()
    # The workers hold the other end of stderr as long as they live.
    assert b"Traceback" not in process.communicate(timeout=120)[1]


@pytest.mark.parametrize("words", [["main.py"], ["-"]], ids=["file", "pipe"])
def test_a_main_module_without_a_guard_runs_once(words, tmp_path):
    program = (
        "print('begins')\nfrom kvsweep.processes.workers import Workers\n"
        "print(Workers(workers=1).map(len, [('ok',)]))\n"
    )
    (tmp_path / "main.py").write_text(program)
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}, "timeout": 120}
    run = subprocess.run([sys.executable, *words], input=program, capture_output=True, text=True, **where)
    assert (run.stdout, run.stderr, run.returncode) == ("begins\n[2]\n", "", 0)


def test_a_worker_does_not_import_what_its_parent_has():
    import torch

    assert torch.__name__ in sys.modules
    with Workers(workers=1) as workers:
        assert workers.map(heavy, [()]) == [[]]


@pytest.fixture(scope="module")
def one() -> Iterator[Workers]:
    with Workers(workers=1) as workers:
        yield workers


def test_large_texts_and_half_characters_pass_through(one):
    assert one.map(len, [("é" * 1_000_000,), ("\ud800",)]) == [1_000_000, 1]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_pool_whose_threads_cannot_start_is_an_error_and_no_worker_is_left(monkeypatch, nth):
    """As with little memory: one of pebble's three threads does not start."""
    others = set(multiprocessing.active_children())
    started, launch = [], pebble.pool.process.launch_thread

    def launch_thread(*arguments: Any):
        started.append(arguments)
        if len(started) % nth == 0:
            raise RuntimeError("can't start new thread")
        return launch(*arguments)

    monkeypatch.setattr(pebble.pool.process, "launch_thread", launch_thread)
    with Workers(workers=1) as workers:
        for _ in range(2):
            with pytest.raises(UserError, match=r"no worker process can start .*can't start new thread"):
                workers.map(abs, [(-1,)])
            assert set(multiprocessing.active_children()) <= others
    assert len(started) == 2 * nth


def test_a_worker_that_does_not_start_is_an_error_and_no_worker_is_left(monkeypatch):
    """As with little memory: the second worker does not start."""
    others = set(multiprocessing.active_children())
    started, launch = [], pebble.pool.process.launch_process

    def launch_process(*arguments: Any):
        started.append(arguments)
        if len(started) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        return launch(*arguments)

    monkeypatch.setattr(pebble.pool.process, "launch_process", launch_process)
    with Workers(workers=2) as workers:
        with pytest.raises(UserError, match="no worker process can start"):
            workers.map(abs, [(-1,)])
        assert set(multiprocessing.active_children()) <= others


def test_a_worker_that_is_still_starting_ends_without_a_word(monkeypatch, tmp_path, capfd):
    """The second worker starts slowly and meets an end that leaves it time to say what has been taken away."""
    first = tmp_path / "first"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, time\ntry: os.mkdir({str(first)!r})\nexcept FileExistsError: time.sleep(0.3)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    stop = pebble.pool.process.stop_process

    def stop_process(process):
        time.sleep(0.3)
        stop(process)

    monkeypatch.setattr(pebble.pool.process, "stop_process", stop_process)
    with Workers(workers=2) as workers:
        assert workers.map(abs, [(-1,)]) == [1]
    assert first.is_dir()
    assert "Traceback" not in capfd.readouterr().err


def test_a_machine_without_shared_locks_is_refused_at_the_start(monkeypatch):
    def lacking(*_: object, **__: object):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", lacking)
    with pytest.raises(UserError, match=r"^/dev/shm, .* cannot be used \(Read-only file system\)"):
        Workers()
