"""How a command ends and prints: its exit code, one sentence on stderr, and escapes for what acts on a terminal."""

import errno
import io
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from kvsweep.messages import command_line
from kvsweep.messages.command_line import (
    BAD_INPUT,
    FAILED,
    HUNG_UP,
    INTERRUPTED,
    LOCKED,
    TERMINATED,
    Terminated,
    VisibleStream,
    counted,
    guard_streams,
    one_sentence,
)
from kvsweep.messages.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{ROOT / 'src'}:{ROOT}"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b1m\x7f\u202egnp.exe\u2028\ud83d"
SHOWN = "\\x1b]0;owned\\x07\\x1b[2J\\x9b1m\\x7f\\u202egnp.exe\\u2028\\ud83d"
MEND = "mend that or name another folder, then run the same command again."


class Locked(UserError):
    exit_code = LOCKED


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("x=1 is\nwrong:  use 2."), BAD_INPUT, "x=1 is wrong: use 2."),
        (UserError(f"x={ESCAPES} is wrong."), BAD_INPUT, f"x={SHOWN} is wrong.".replace("\\u2028", " ")),
        (Locked("held."), LOCKED, "held."),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted; go on."),
        (Terminated(signal.SIGHUP), HUNG_UP, "interrupted; go on."),
        (Terminated(signal.SIGTERM), TERMINATED, "interrupted; go on."),
        (MemoryError(), FAILED, "the memory does not suffice; what is stored stays."),
        (OSError(errno.ENOSPC, "No space left on device"), BAD_INPUT, f"No space left on device: {MEND}"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), BAD_INPUT, f"a/b: Read-only file system: {MEND}"),
        (OSError(errno.ESTALE, "Stale file handle", "a/b"), BAD_INPUT, f"a/b: Stale file handle: {MEND}"),
        (RuntimeError("Symlink loop from 'a'"), BAD_INPUT, "Symlink loop from 'a': name another folder."),
    ],
)
def test_an_end_in_one_sentence(error, code, sentence, capsys):
    with pytest.raises(SystemExit) as ended, one_sentence("kvsweep x", "interrupted; go on."):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == f"kvsweep x: error: {sentence}\n"


# So that a signal sent again comes while the hook that sends it still runs, as on a busy machine.
SLOW_START = """
import threading
start = threading.Timer.start
threading.Timer.start = lambda self: (start(self), time.sleep(0.3))
"""


@pytest.mark.parametrize("setup", ["", SLOW_START], ids=["quiet", "busy"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_a_signal_that_comes_in_a_destructor_is_not_lost(number, code, setup):
    """Python raises nothing from there: it prints the exception and goes on."""
    script = f"""
import signal, time
from kvsweep.messages.command_line import one_sentence
{setup}
class Struck:
    def __del__(self):
        signal.raise_signal({number})

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with one_sentence("kvsweep x"):
    Struck()
    time.sleep(120)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert (ended.returncode, ended.stderr) == (code, "kvsweep x: error: interrupted.\n")


def test_a_terminal_that_has_closed_is_no_error_of_the_command():
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        stream = VisibleStream(terminal)
        os.close(master)
        stream.write("x\n")
        stream.flush()
        with pytest.raises(OSError, match="Input/output error"):
            terminal.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), slave)  # so that it can be closed


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&-", ">&-", "<&- >&- 2>&-"])
def test_streams_that_were_closed_have_their_numbers_here_and_in_later_processes(closed, tmp_path):
    seen = tmp_path / "seen"
    code = "import os, subprocess\nfrom kvsweep.messages.command_line import one_sentence\nwith one_sentence('x'):\n"
    code += f"    file = open({str(seen)!r}, 'w')\n"
    code += "    subprocess.run(['ls', '/proc/self/fd'], stdout=file, close_fds=False)\n"
    code += "    print(file.fileno(), file=file)"
    command = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code]
    subprocess.run(command, capture_output=True, timeout=120, env=os.environ | {"PYTHONPATH": PATH})
    *numbers, own = seen.read_text().split()
    assert {"0", "1", "2"} < {*numbers}
    assert int(own) > 2


def test_a_command_goes_on_where_the_reader_of_its_errors_has_ended(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        guard_streams()
        print("note: x", file=sys.stderr)
        monkeypatch.setattr(sys, "stdout", VisibleStream(stream))
        with pytest.raises(BrokenPipeError):
            print("x", flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # so that it can be closed


def test_a_working_directory_that_was_deleted_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended, one_sentence("kvsweep x"):
        Path("x").absolute()
    assert ended.value.code == BAD_INPUT
    assert capsys.readouterr().err.startswith("kvsweep x: error: the working directory was deleted")


@pytest.mark.parametrize("error", [ValueError("a bug"), FileNotFoundError(errno.ENOENT, "a bug")])
def test_other_errors_keep_their_traceback(error):
    with pytest.raises(type(error), match="a bug"), one_sentence("kvsweep x"):
        raise error


def test_a_count_has_the_number_of_its_noun():
    assert [counted(count, "cell") for count in (0, 1, "1", 2)] == ["0 cells", "1 cell", "1 cell", "2 cells"]


def test_a_stream_shows_what_would_act_on_a_terminal():
    under = io.StringIO()
    stream = VisibleStream(under)
    print(f"a\tb {ESCAPES}", file=stream)
    stream.write("\rbar")
    stream.write("a\rb")
    assert under.getvalue() == f"a\tb {SHOWN}\n\nbara\\rb", "a progress bar begins a line of a log"
    assert stream.write(ESCAPES) == len(ESCAPES)


def test_a_terminal_of_few_characters_gets_escapes_and_the_colours_of_rich(monkeypatch):
    under = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", under)
    guard_streams()
    guard_streams()
    assert sys.stdout.rich_proxied_file is under  # type: ignore[attr-defined]
    Console(force_terminal=True, color_system="standard").print("[red]表[/red]")
    print("47.3 ± 2.1 \x1b")
    sys.stdout.flush()
    assert under.buffer.getvalue() == b"\x1b[31m\\u8868\x1b[0m\n47.3 \\xb1 2.1 \\x1b\n"  # type: ignore[attr-defined]


def test_a_progress_bar_moves_on_a_terminal_and_the_text_in_it_does_not():
    program = (
        "import tqdm\n"
        "from kvsweep.messages.command_line import one_sentence\n"
        "with one_sentence('x'):\n"
        f"    for _ in tqdm.tqdm(range(3), desc={ESCAPES!r}, mininterval=0): pass\n"
    )
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 200))
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=follower, stdout=follower, stderr=follower, env=env
    )
    assert process.wait(120) == 0
    said = os.read(leader, 1 << 16)
    os.close(follower)
    os.close(leader)
    assert said.count(b"\r") >= 3
    assert b"3/3" in said
    assert not set(said) & {0x1B, 0x07, 0x9B, 0x7F}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        # A file of weights under `ulimit -v`.
        RuntimeError("unable to mmap 98680 bytes from file </x/predictor.safetensors>: Cannot allocate memory (12)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_memory_that_does_not_suffice_is_one_sentence(error, capsys):
    with pytest.raises(SystemExit) as end, command_line.one_sentence("kvsweep", "interrupted."):
        raise error
    assert end.value.code == command_line.FAILED
    assert capsys.readouterr().err == "kvsweep: error: the memory does not suffice; what is stored stays.\n"
