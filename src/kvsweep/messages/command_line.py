"""How every command ends and prints: exit codes, one sentence instead of a traceback, no control characters."""

import difflib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NoReturn, TextIO

from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible

FAILED, BAD_INPUT, LOCKED, UNCLEAR, HUNG_UP, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 129, 130, 143
# What a command that stores its work prints at Ctrl-C, SIGTERM or a closed terminal.
GOES_ON = "interrupted; the same command goes on where this one stopped."
# The packages of the extra `engine`.
ENGINE = ("torch", "transformers", "datasets", "safetensors", "peft", "tqdm")
# What threads, mapped files, torch, C++ and the library loader say when memory runs out.
_NO_MEMORY = ("can't start new thread", "allocate memory", "not enough memory", "bad_alloc", "failed to map segment")
# Numbers of errors that only a fault of the program has (None: no number): a file that it should have looked for, and
# calls that it should not have made. A user mends the others.
_FAULTS_OF_OURS = (None, errno.ENOENT, errno.EBADF, errno.EINVAL)
_TOO_SMALL = "the memory does not suffice; what is stored stays."


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP when a terminal closes; each ends a command like Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def _terminate(number: int, frame: object) -> None:
    raise Terminated(number)


@contextmanager
def _interrupts_kept() -> Iterator[None]:
    """Send a signal again whose exception came in a destructor or a callback, from where Python raises nothing."""
    earlier_hook = sys.unraisablehook

    def send_again(lost: Any) -> None:
        error = lost.exc_value
        if not isinstance(error, KeyboardInterrupt):
            earlier_hook(lost)
            return
        number = getattr(error, "exit_code", INTERRUPTED) - 128  # of the signal
        seconds = 0.01  # until the callback has ended
        while True:
            try:
                threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
                return
            except KeyboardInterrupt:
                # Before start() had returned, a signal came, mostly the timer's own: once more with a longer wait.
                seconds *= 2

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = earlier_hook


@contextmanager
def one_sentence(program: str, interrupted: str = "interrupted.") -> Iterator[None]:
    """If the body of a command raises an error, end the process with one sentence on stderr and an exit code.

    A UserError: its sentence and its `exit_code`, else BAD_INPUT. An error of a disk: BAD_INPUT. Too little
    memory: FAILED. Ctrl-C: the sentence `interrupted` and INTERRUPTED; SIGTERM and SIGHUP: the same sentence,
    TERMINATED and HUNG_UP. A closed stdout: FAILED and no sentence, even if the body ends with its own status. Other
    errors pass.
    """
    _open_closed_streams()
    guard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores a closing terminal
            signal.signal(number, _terminate)
    try:
        try:
            with _interrupts_kept():
                yield
        except SystemExit:
            sys.stdout.flush()  # a closed stdout shows here, and counts more than the body's own status
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        sys.exit(FAILED)
    except Terminated as end:
        _end(program, interrupted, end.exit_code)
    except KeyboardInterrupt:
        _end(program, interrupted, INTERRUPTED)
    except UserError as error:
        _end(program, str(error), getattr(error, "exit_code", BAD_INPUT))
    except OSError as error:
        if error.errno == errno.ENOMEM:
            _end(program, _TOO_SMALL, FAILED)
        if error.errno == errno.ENOENT and not _has_working_directory():
            _end(program, "the working directory was deleted: cd to a folder that is there.", BAD_INPUT)
        if error.errno in _FAULTS_OF_OURS:
            raise
        place = f"{error.filename}: " if error.filename else ""
        _end(
            program,
            f"{place}{error.strerror}: mend that or name another folder, then run the same command again.",
            BAD_INPUT,
        )
    except (MemoryError, RuntimeError, ImportError) as error:
        if str(error).startswith("Symlink loop"):  # of Path.resolve
            _end(program, f"{error}: name another folder.", BAD_INPUT)
        speaks_of_memory = any(words in str(error) for words in _NO_MEMORY)
        if not isinstance(error, MemoryError) and not speaks_of_memory:
            raise
        _end(program, _TOO_SMALL, FAILED)


def _end(program: str, sentence: str, code: int) -> NoReturn:
    """End the process with this sentence on stderr and this exit code, whatever streams have closed."""
    with suppress(OSError):  # the terminal has closed
        print(f"{program}: error: {' '.join(sentence.split())}", file=sys.stderr)
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()
    sys.exit(code)


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())  # noqa: PTH109
    except FileNotFoundError:
        return False


def _drop_stdout() -> None:
    """Discard what the interpreter writes to stdout as it exits; it would complain about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Give a stream that was closed, as by `2>&-`, its number again, which a file or a pipe would take otherwise.

    It becomes the null device, in processes that start later too.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this stream's
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def check_engine(asked: str) -> None:
    """Refuse a command that decodes if a package of the extra is missing, before a task is queued."""
    missing = [name for name in ENGINE if find_spec(name) is None]
    if missing:
        raise UserError(f"{asked} needs {', '.join(missing)}: pip install 'kvsweep[engine]'.")


def counted(count: int | str, noun: str) -> str:
    """Return the count (a number or its text) and its noun: "1 cell", "2 cells"."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the question whether the nearest of the names was meant, with a space behind it; "" if none is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


class VisibleStream:
    """A text stream that writes `visible` text to another stream, and otherwise behaves like that stream.

    After the terminal has closed, or the reader of stderr has ended, it drops the text and the command continues. A
    carriage return stays only at the start of a write, where a progress bar has it; in a log the bar starts a line.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> TextIO:
        """Return the stream for `rich`'s tables, which have their own control characters; their texts are `visible`."""
        return self._stream

    def write(self, text: str) -> int:
        written = visible(text.removeprefix("\r"))
        if text.startswith("\r"):  # a progress bar
            written = ("\r" if self._is_terminal else "\n") + written
        with self._while_there():
            self._stream.write(written)
        return len(text)

    def flush(self) -> None:
        with self._while_there():
            self._stream.flush()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        """Ignore the error of a terminal that has closed, and of a reader of stderr that has ended."""
        try:
            yield
        except OSError as error:
            terminal_closed = self._is_terminal and error.errno == errno.EIO
            reader_ended = self is sys.stderr and error.errno == errno.EPIPE
            if not terminal_closed and not reader_ended:
                raise


def guard_streams() -> None:
    """Put a `VisibleStream` around this process's stdout and stderr, once.

    Characters that the encoding of a terminal or a file does not have are written as escapes too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))
