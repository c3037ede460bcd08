"""How every command of the project ends: the exit codes, and one sentence on stderr in place of a traceback."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from analysis.records import UserError

FAILED, BAD_INPUT, LOCKED, INTERRUPTED = 1, 2, 3, 130


@contextmanager
def one_sentence(program: str, interrupted: str = "interrupted.") -> Iterator[None]:
    """Let a command's body end as a command should; usable as `with one_sentence(...)` and as a decorator of `main`.

    A UserError ends the process with its sentence and BAD_INPUT, or with the error's own `exit_code` where it has one;
    Ctrl-C ends it with the sentence `interrupted` and INTERRUPTED; a closed stdout ends it with FAILED and no word.
    """
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
