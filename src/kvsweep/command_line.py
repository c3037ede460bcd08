"""How every command of the project ends and prints: exit codes, one sentence for a traceback, no control characters."""

import difflib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, NoReturn, TextIO

from kvsweep.errors import UserError
from kvsweep.escape import visible

FAILED, BAD_INPUT, LOCKED, UNCLEAR, HUNG_UP, INTERRUPTED, TERMINATED = 1, 2, 3, 4, 129, 130, 143
# What Ctrl-C, SIGTERM and a terminal that closes print for a command that stores its work.
GOES_ON = "interrupted; the same command goes on where this one stopped."
# The packages of the extra `engine`.
ENGINE = ("torch", "transformers", "datasets", "safetensors", "peft", "tqdm")
# What a thread's start, a mapped file, torch, C++ and the loader of libraries say where they find no memory.
_NO_MEMORY = ("can't start new thread", "allocate memory", "not enough memory", "bad_alloc", "failed to map segment")
# Faults of a disk or a folder, which a user can mend and no program can.
_MENDABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG),
    *(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR),
}
_TOO_SMALL = "the memory does not suffice; what is stored stays."


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that closes; each ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


def _terminate(number: int, frame: object) -> None:
    raise Terminated(number)


@contextmanager
def one_sentence(program: str, interrupted: str = "interrupted.") -> Iterator[None]:
    """End the process with one sentence on stderr and an exit code where the body of a command raises an error.

    A UserError has its own sentence and its `exit_code`, else BAD_INPUT. A disk that is full or may not be written to
    has BAD_INPUT, and memory that does not suffice FAILED. Ctrl-C has the sentence `interrupted` and INTERRUPTED,
    SIGTERM and SIGHUP the same sentence, TERMINATED and HUNG_UP. A stdout that is or gets closed has FAILED and no
    sentence, also where the body ends with a status of its own. Other errors pass.
    """
    _open_closed_streams()
    if sys.stdout is None:  # Python's value where stdout was closed before the process started, as by `>&-`
        sys.stdout = _closed_stdout()
    guard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup a terminal may close
            signal.signal(number, _terminate)
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
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
        if error.errno not in _MENDABLE:
            raise
        place = f"{error.filename}: " if error.filename else ""
        mend = "mend that or name another folder, then run the same command again."
        _end(program, f"{place}{error.strerror}: {mend}", BAD_INPUT)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not isinstance(error, MemoryError) and not any(mark in str(error) for mark in _NO_MEMORY):
            raise
        _end(program, _TOO_SMALL, FAILED)


def _end(program: str, sentence: str, code: int) -> NoReturn:
    with suppress(OSError):  # a terminal that has closed
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
    """Send to nowhere what the interpreter writes to stdout as it exits; it would complain about a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_closed_streams() -> None:
    """Give a stdin or stderr that was closed, as by `2>&-`, the null device: a file would get its number otherwise."""
    for number, name, mode in ((0, "stdin", "r"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def _closed_stdout() -> TextIO:
    """A stdout whose reader has gone. It has stdout's number, which a file that is opened later would get otherwise."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.set_inheritable(1, True)
    return os.fdopen(1, "w", encoding="utf-8")


def check_engine(asked: str) -> None:
    """Refuse what decodes where a package of the extra is missing, before a task is queued that lacks it too."""
    if missing := [name for name in ENGINE if find_spec(name) is None]:
        raise UserError(f"{asked} needs {', '.join(missing)}: pip install 'kvsweep[engine]'.")


def counted(count: int | str, noun: str) -> str:
    """The count, a number or a number's text, and its noun: "1 cell", "2 cells"."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The question whether the nearest of the names was meant, a space behind it; "" where none is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


class VisibleStream:
    """A text stream that writes `visible` text to another stream, and is that stream in every other respect.

    A terminal that has closed takes no more words, and the command that was disowned goes on. A carriage return stays
    only at the start of a write, where a progress bar has it; in a log the bar begins a line there.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_terminal = stream, stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream that `rich` draws its tables to, with control characters of its own; its texts come `visible`."""
        return self._stream

    def write(self, text: str) -> int:
        bar = text.startswith("\r")
        with self._while_there():
            self._stream.write(("\r" if self._is_terminal else "\n") * bar + visible(text[bar:]))
        return len(text)

    def flush(self) -> None:
        with self._while_there():
            self._stream.flush()

    @contextmanager
    def _while_there(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not (self._is_terminal and error.errno == errno.EIO):
                raise

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def guard_streams() -> None:
    """Put a `VisibleStream` around stdout and stderr of this process, where there is none yet.

    Characters that the encoding of a terminal or a file lacks are written as escapes too.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))
