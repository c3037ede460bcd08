"""Errors that a user can mend, each one sentence: the value, what is allowed, what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml


class UserError(Exception):
    """A mistake that the user can mend. The message is one sentence: the value, what is allowed, what to do."""

    def __init__(self, message: str) -> None:
        # A value may contain a line break; the message stays on one line.
        super().__init__(" ".join(message.splitlines()))


class UnusableFileError(UserError, OSError):
    """Something other than a plain file of a usable size where kvsweep reads or writes a file."""


class BrokenCell(UserError, yaml.YAMLError):
    """A cell.yaml that describes no cell, or not the cell in its folder's name."""


class OtherSchemaError(UserError):
    """A file of another schema than the one that this version reads."""


@contextmanager
def plain_disk_errors(directory: Path) -> Iterator[None]:
    """Turn an error of an unwritable disk into one sentence."""
    try:
        yield
    except UserError:  # an UnusableFileError is an OSError too, and already one sentence
        raise
    except OSError as error:
        place = error.filename2 or error.filename or directory
        hint = "make room or set results_dir= elsewhere, then run the same command again"
        raise UserError(
            f"{place} cannot be written to ({error.strerror}): {hint}; what is stored stays and is not made anew."
        ) from error
