"""Make text from data safe for a terminal, a line, a table, a file name or a folder."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import content_hash

# Control characters, line separators, marks that change the writing direction, and halves of surrogate pairs.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_FORMULA = re.compile(r"(?![+-][\d.]+\Z)[=+\-@\t\r].")
# A picture with a longer title would take minutes to draw.
LONGEST_TEXT = 500


def visible(text: str) -> str:
    """Return the text with an escape such as `\\x1b` for each character that would act on a terminal or stay hidden.

    Line breaks and tabs stay. Letters of every script, and the joiners that some scripts need, stay too.
    """
    return _HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def each_text(change: Callable[[str], str], value: Any) -> Any:
    """Return the value with a change of each text in it, keys too; dictionaries and lists may nest."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {each_text(change, name): each_text(change, item) for name, item in value.items()}
    if isinstance(value, list):
        return [each_text(change, item) for item in value]
    return value


def in_one_line(value: Any) -> Any:
    """Return the value with each text `visible`, on one line, at most `LONGEST_TEXT` characters; lists may nest."""
    return each_text(_line, value)


def _line(text: str) -> str:
    line = visible(" ".join(text[: 2 * LONGEST_TEXT].splitlines()))
    return line if len(line) <= LONGEST_TEXT else f"{line[:LONGEST_TEXT]}…"


def csv_cell(value: Any) -> Any:
    """A CSV cell; a text that a spreadsheet would run as a formula (=, +, - or @, no number) gets an apostrophe."""
    if isinstance(value, str) and _FORMULA.match(value):
        return f"'{value}"
    return value


def markdown_text(text: str) -> str:
    """Return the text for a cell of a Markdown table: one line that starts no column, tag or link."""
    return re.sub(r"[|<\[\]]", r"\\\g<0>", " ".join(text.splitlines()))


def file_name(*parts: str) -> str:
    """Make a file name without suffix from texts of any characters; different texts give different names."""
    raw = "_".join(part for part in parts if part)
    safe = re.sub(r"[^A-Za-z0-9.-]+", "_", raw).strip("._")
    if safe == raw and len(safe) <= 80:
        return safe
    return f"{safe[:80]}_{content_hash(raw)[:6]}"


def folder_below(parent: str, name: str) -> Path:
    """Return the folder of a run below its parent; `name` is its run_name, which may have slashes."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise UserError(f"run_name={name} must name a folder below {parent}: leave out .. and the first slash.")
    # In names of log files SLURM replaces %j and the like, unless there is a backslash (sbatch, "filename pattern").
    if _HIDDEN.search(name) or set("%\\\n\t") & set(name):
        rule = "take neither control characters nor % nor \\"
        raise UserError(f"run_name={visible(name):.80} is no name for a folder: {rule}.")
    return Path(parent) / name


def is_text(text: str) -> bool:
    """False if the text contains half a character (a lone surrogate), which no report file can store."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def as_text(text: str) -> str:
    """Return the text with `?` for half a character (a lone surrogate), which a model may write."""
    return text.encode(errors="replace").decode()
