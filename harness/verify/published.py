"""A published folder that has answers and no completions: whether its numbers follow from its answers."""

import csv
import gzip
import math
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from kvsweep.analysis.statistics.pass_at_1 import mean_and_error
from kvsweep.command_line import counted
from kvsweep.errors import UserError
from kvsweep.files import read_file
from kvsweep.harness.verify.stored import Check

ANSWERS, CELLS = "answers.csv.gz", "cells.csv"
# The columns of cells.csv that follow from the answers alone.
_NUMBERS = ("graded", "problems", "pass_at_1", "se")


def is_published(directory: Path) -> bool:
    return (directory / ANSWERS).is_file() and (directory / CELLS).is_file()


def published_checks(directory: Path) -> Iterator[Check]:
    """Compare each cell's numbers with those of its answers; a file of other columns raises a UserError."""
    answers: dict[str, list[list[int]]] = defaultdict(list)
    for row in _rows(directory / ANSWERS, "cell_id", "problem_id", "grades"):
        if set(row["grades"]) - set("01-"):
            raise UserError(
                f"{directory / ANSWERS} has the grades {row['grades']!r:.40}: write 1, 0 or - for each draw."
            )
        answers[row["cell_id"]].append([int(letter) for letter in row["grades"] if letter != "-"])
    cells = {row["cell_id"]: row for row in _rows(directory / CELLS, "cell_id", *_NUMBERS)}
    alone = sorted(answers.keys() ^ cells.keys())
    lines = [f"{name} is in one of {ANSWERS} and {CELLS} alone" for name in alone]
    yield Check(
        name="cells",
        state="fails" if alone else "holds",
        text=f"{counted(len(cells), 'cell')} with answers",
        lines=lines,
    )
    lines = []
    for name in sorted(answers.keys() & cells.keys()):
        graded = [draws for draws in answers[name] if draws]
        score, error = mean_and_error([sum(draws) / len(draws) for draws in graded])
        found = dict(zip(_NUMBERS, (sum(map(len, graded)), len(graded), score, error), strict=True))
        for column, value in found.items():
            stated = float(cells[name][column] or "nan")
            if not (
                math.isclose(stated, value, rel_tol=1e-9, abs_tol=1e-12) or (math.isnan(stated) and math.isnan(value))
            ):
                lines.append(f"{name}: {column} is {stated:g} in {CELLS} and {value:g} by {ANSWERS}")
    text = f"{', '.join(_NUMBERS)} of {counted(len(cells), 'cell')} computed again from {ANSWERS}"
    yield Check(name="numbers", state="fails" if lines else "holds", text=text, lines=lines)
    missing = "texts, seals, weights and bits are not in this folder: run its command and compare with kvsweep compare"
    yield Check(name="completions", state="cannot", text=missing)


def _rows(path: Path, *columns: str) -> list[dict[str, str]]:
    rows = list(csv.DictReader(_text(path).splitlines()))
    if not rows or not {*columns} <= rows[0].keys() or any(None in row.values() or None in row for row in rows):
        raise UserError(f"{path} is no table with the columns {', '.join(columns)}: restore the file.")
    return rows


def _text(path: Path) -> str:
    """The text of a file that is packed by gzip or not; what gzip cannot read is no text."""
    raw = read_file(path)
    try:
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(errors="replace")
    except (OSError, EOFError, zlib.error):
        return ""
