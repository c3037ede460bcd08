"""How every command of the project ends and prints: exit codes, one sentence for a traceback, no control characters."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from analysis.records import UserError

FAILED, BAD_INPUT, LOCKED, INTERRUPTED = 1, 2, 3, 130

# Control characters, line separators, marks that turn the direction of writing, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@contextmanager
def one_sentence(program: str, interrupted: str = "interrupted.") -> Iterator[None]:
    """Let a command's body end as a command should; usable as `with one_sentence(...)` and as a decorator of `main`.

    A UserError ends the process with its sentence and BAD_INPUT, or with the error's own `exit_code` where it has one;
    Ctrl-C ends it with the sentence `interrupted` and INTERRUPTED; a closed stdout ends it with FAILED and no word.
    From here on stdout and stderr show control characters as escapes (`guard_streams`).

    Args:
        program: the name before the sentence, as in `kvsweep: error: ...`.
        interrupted: the sentence after Ctrl-C.
    """
    guard_streams()
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter writes what is left in stdout as it exits, and would complain about the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except KeyboardInterrupt:
        sys.exit(say(program, interrupted, INTERRUPTED))
    except UserError as error:
        sys.exit(say(program, str(error), getattr(error, "exit_code", BAD_INPUT)))


def say(program: str, message: str, code: int) -> int:
    """Print a message as one line on stderr and return the exit code."""
    print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def visible(text: str) -> str:
    """The text with an escape such as `\\x1b` for each character that would act on a terminal or hide in a line.

    Line breaks and tabs stay. Letters of every script, and the joiners that some scripts need, stay too.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


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
        """Write the text; returns its length."""
        start = "\r" if text.startswith("\r") else ""
        shown = start + visible(text.removeprefix(start))
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)


def guard_streams() -> None:
    """Put a `VisibleStream` around stdout and stderr of this process, where there is none yet."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, VisibleStream):
            setattr(sys, name, VisibleStream(stream))
