"""How every command of the project ends and prints: exit codes, one sentence for a traceback, no control characters."""

import difflib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from kvsweep.base.errors import UserError
from kvsweep.base.escape import visible

FAILED, BAD_INPUT, LOCKED, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143
# What Ctrl-C and SIGTERM print for a command that stores its work.
GOES_ON = "interrupted; the same command goes on where this one stopped."
# Faults of the machine or of a folder, which a user can mend and no program can.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG}
_NO_WAY = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR}


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated


@contextmanager
def one_sentence(program: str, interrupted: str = "interrupted.") -> Iterator[None]:
    """Let a command's body end as a command should; usable as `with one_sentence(...)` and as a decorator of `main`.

    A UserError ends the process with its sentence and its `exit_code`, else BAD_INPUT; so does a disk that is full or
    may not be written to; memory that does not suffice ends it with FAILED; Ctrl-C with the sentence `interrupted` and
    INTERRUPTED, SIGTERM with the same sentence and TERMINATED; a closed stdout with FAILED and no word. stdout and
    stderr show escapes (`guard_streams`).
    """
    guard_streams()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter writes what is left in stdout as it exits, and would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except Terminated:
        sys.exit(say(program, interrupted, TERMINATED))
    except KeyboardInterrupt:
        sys.exit(say(program, interrupted, INTERRUPTED))
    except UserError as error:
        sys.exit(say(program, str(error), getattr(error, "exit_code", BAD_INPUT)))
    except OSError as error:
        if error.errno not in _NO_ROOM | _NO_WAY:
            raise
        place = f"{error.filename}: " if error.filename else ""
        reason = f"{place}{error.strerror}: mend that or name another folder, then run the same command again."
        sys.exit(say(program, reason, BAD_INPUT))
    except MemoryError:
        sys.exit(say(program, "the memory does not suffice; what is stored stays.", FAILED))


def say(program: str, message: str, code: int) -> int:
    """Print a message as one line on stderr and return the exit code."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def counted(count: int | str, noun: str) -> str:
    """The count, which may be written already, and its noun: "1 cell", "2 cells"."""
    return f"{count} {noun}" if str(count) == "1" else f"{count} {noun}s"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ "did you mean NAME? " with the nearest of the names; nothing where none is near."""
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? " if near else ""


class VisibleStream:
    """A text stream that writes `visible` text to another stream, and is that stream in every other respect.

    A carriage return stays at the start of a write alone, where a progress bar has it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def rich_proxied_file(self) -> TextIO:
        """The stream that `rich` draws its tables to, with control characters of its own; its texts come `visible`."""
        return self._stream

    def write(self, text: str) -> int:
        start = "\r" if text.startswith("\r") else ""
        shown = start + visible(text.removeprefix(start))
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


def guard_streams() -> None:
    """Put a `VisibleStream` around stdout and stderr of this process, where there is none yet."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal's own characters cannot show
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))
