"""What of a run can be checked without decoding: seals, ids, weights, data, code of policies, grades."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from kvsweep.compression.source import code_hash, is_same_code
from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.settings import plain_config_errors
from kvsweep.harness.sweep.begun import begun_configs
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import BrokenCell, UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import Completion, Grade, leaves
from kvsweep.run_files.run_reader import StoredCell, is_served, read_cells, stored_cells
from kvsweep.run_files.safe_files import read_lines

# differs, other: something that can change bits, or a completion, is another one today. fails: what is stored is not
# what was made.
State = Literal["holds", "differs", "fails", "cannot", "same", "other"]
# The rows of a cell's files by the first word of their names; a shard's or a replay's file has more words.
_KINDS: dict[str, type[row_types.StoredRow]] = {
    "completions": Completion,
    "grades": Grade,
    "stats": row_types.DecodeStats,
    "problems": row_types.Problem,
    "seconds": row_types.Timing,
    "replay": row_types.Replay,
}
# What an id is made of, by the names in cell.yaml; the first prefix that fits counts.
_PARTS = {"weights": "model.", "data": "dataset_hash", "policies": "policy.", "settings": ""}
_HASHED = {"model", "dataset_hash", "policy", "decoding", "impl", "seed", "cache"}


@dataclass(frozen=True)
class Row:
    """One line of the result: of a check, or of a completion that was decoded again.

    Attributes: lines: the places where a check does not hold. facts: more of a completion, for programs.
    """

    name: str
    state: State
    text: str
    lines: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class CheckedCell:
    """A cell of a run beside the one that the same configuration gives today.

    Attributes: today: its job and cell, if today's weights, data, policies and settings give the id again. changed: the
    values in cell.yaml that differ if they do not: name to (then, now). unread: why there is nothing to compare.
    served: whether a server wrote the texts, which nobody can decode again. passes: its decoding passes.
    """

    stored: StoredCell
    today: tuple[Job, Cell] | None = None
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    unread: str = ""
    served: bool = False
    passes: list[Mapping[str, Any]] = field(default_factory=list)


def read_run(directory: Path) -> dict[str, CheckedCell]:
    """Make the jobs of a run directory again; return the cells by id. Raises UserError for a folder without a cell."""
    cells = {stored.name: CheckedCell(stored=stored) for stored in stored_cells(directory)}
    if not cells:
        raise UserError(f"{directory} holds no cell: give the folder of a run, such as results/runs/demo.")
    for stored, settings in read_cells(directory):
        cells[stored.name].served = is_served(settings)

    def no_config(folder: Path, reason: UserError) -> None:
        cells[folder.name].unread = str(reason)

    for config, ids in begun_configs(directory, no_config):
        begun = [cells[name] for name in ids]
        try:
            with plain_config_errors():
                job = make_job(OmegaConf.create(config))
        except UserError as error:
            for cell in begun:
                cell.unread = str(error)
            continue
        by_id = {cell.cell_id: cell for cell in job.cells}
        for cell in begun:
            if cell.stored.name in by_id:
                cell.today = job, by_id[cell.stored.name]
            else:
                then = _hashed(cell.stored.settings)
                # Of the cell of today that is most like the stored one.
                cell.changed = min((_changes(then, _hashed(other.describe())) for other in job.cells), key=len)
    for cell in cells.values():
        _read_origin(cell)
    return cells


def _read_origin(cell: CheckedCell) -> None:
    """Read a cell's decoding passes, and settle `changed` and `unread`.

    Several configurations may have begun a cell. If one gives it again, what the others left there no longer counts.
    """
    if cell.today is not None:
        cell.changed = {}
        cell.unread = ""

    def unread(path: Path, error: Exception) -> None:
        cell.unread = f"{path} cannot be read ({error})"

    for _, origin in cell.stored.provenances(unread):
        cell.passes += origin.get("decoding_passes", [])
    if not (cell.today or cell.changed or cell.unread):
        cell.unread = f"{cell.stored.folder} has no {row_types.PROVENANCE_FILE} and no whole {row_types.CELL_FILE}"


def _hashed(described: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a cell's id is made of, by their names in cell.yaml."""
    return dict(leaves({name: value for name, value in described.items() if name in _HASHED}))


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (then.get(name), now.get(name)) for name in {**then, **now} if then.get(name) != now.get(name)}


def stored_checks(cells: Sequence[CheckedCell]) -> Iterator[Row]:
    """The checks that need no model, in their order."""
    yield _check_rows(cells)
    yield _check_files(cells)
    yield from _compare(cells)
    yield _check_grades(cells)
    for why, number in Counter(cell.unread for cell in cells if cell.unread).items():
        yield Row("cells", "cannot", f"{number} of {counted(len(cells), 'cell')}: {why}")


def _check_rows(cells: Sequence[CheckedCell]) -> Row:
    """Whether the rows of all files are whole and have their seals."""
    bad = list[row_types.BadLine]()
    rows = unsealed = 0
    for cell in cells:
        for path in sorted(cell.stored.folder.glob("*.jsonl")):
            first_word = re.split(r"[-_.]", path.name)[0]
            kind = _KINDS.get(first_word)
            if kind is not None:
                rows += sum(1 for _ in row_types.read_rows(path, kind, on_bad=bad.append))
                unsealed += sum(not row_types.is_sealed(line) for line in read_lines(path))
    if bad:
        return Row("rows", "fails", f"{counted(len(bad), 'row')} broken", [*map(str, bad)])
    if unsealed:
        return Row("rows", "differs", f"{unsealed} of {counted(rows, 'row')} have no seal, as rows of other programs")
    return Row("rows", "holds", f"{counted(rows, 'row')} with the seals of their contents and cells")


def _check_files(cells: Sequence[CheckedCell]) -> Row:
    """Whether each cell's settings have their seal, and its files the sizes that DONE names."""
    lines = []
    for cell in cells:
        stored = cell.stored
        try:
            _ = stored.settings
        except (OSError, BrokenCell) as error:
            lines.append(str(error))
        done = stored.folder / row_types.DONE_FILE
        if done.exists() and not stored.is_done:
            lines.append(f"{done} names completions of other sizes: rows came or went since.")
    if lines:
        return Row("cells", "fails", "not whole", lines)
    return Row(
        "cells",
        "holds",
        f"{counted(len(cells), 'cell')} with the seals of their settings, and files of the sizes that DONE names",
    )


def _compare(cells: Sequence[CheckedCell]) -> Iterator[Row]:
    """Compare the cells with today's: the parts of their ids, the problems, and the policies' code."""
    changes = Counter[tuple[str, str]]()  # in how many cells it differs, by the comparison's name and what differs
    compared = Counter[str]()
    for cell in cells:
        if cell.today or cell.changed:
            compared.update(list(_PARTS))
        for leaf, (then, now) in cell.changed.items():
            part = next(part for part, prefix in _PARTS.items() if leaf.startswith(prefix))
            changes[part, f"{leaf} was {then} and is {now} now"] += 1
        if cell.today is None:
            continue
        job, cell_today = cell.today
        problems = {problem.id: problem for problem in job.benchmark.problems}
        # The data may no longer have a problem, as with a lower limit.
        rows = [row for row in cell.stored.rows(row_types.Problem, on_bad=row_types.ignore) if row.id in problems]
        compared["problems"] += bool(rows)
        for row in rows:
            if row != problems[row.id]:
                path = cell.stored.folder / row_types.PROBLEMS_FILE
                changes["problems", f"{path}: {row.id!r:.80} has another prompt or gold"] += 1
        policy = cell_today.policy
        code = code_hash(type(policy))
        codes = {str(record["policy_code"]) for record in cell.passes if "policy_code" in record}
        compared["policy code"] += bool(codes)
        for earlier in codes:
            if not is_same_code(earlier, code):
                changes["policy code", f"policy={policy.name} was decoded by code {earlier} and is {code} now"] += 1
    for name in (*_PARTS, "problems", "policy code"):
        lines = [f"{text} ({counted(count, 'cell')})" for (part, text), count in changes.items() if part == name]
        if lines:
            # Other code may still decode the same bits.
            yield Row(name, "differs" if name == "policy code" else "fails", "not as today", lines)
        elif compared[name]:
            yield Row(name, "holds", f"as today, in {counted(compared[name], 'cell')}")
        else:
            yield Row(name, "cannot", "nothing of today to compare with")


def _check_grades(cells: Sequence[CheckedCell]) -> Row:
    """Whether the grades that are stored are those that the texts get again; another version may grade otherwise."""
    wrong: list[str] = []  # a line for each grade that has changed although the rule is the same
    changed: list[str] = []  # a line for each that has changed by another rule
    graded = missing = older = 0
    with Grader() as grader:
        for cell in cells:
            try:
                standard = read_standard(cell.stored.folder)
            except UserError as error:
                wrong.append(str(error))
                continue
            texts = cell.stored.rows(Completion, on_bad=row_types.ignore)
            stored_grades = {grade.key: grade for grade in cell.stored.rows(Grade, on_bad=row_types.ignore)}
            for now in grader.grade([text for text in texts if text.problem_id in standard.golds], standard):
                graded += 1
                then = stored_grades.get(now.key)
                if then is None:
                    missing += 1
                    continue
                if "grader_timeout" in (now.outcome, then.outcome):  # without a verdict there is nothing to compare
                    continue
                older += then.rule != now.rule  # 1 or 0, whether or not the grade has changed
                if (then.answer, then.gold, then.outcome) != (now.answer, now.gold, now.outcome):
                    change = f"{then.outcome} ({then.answer!r:.40}) is {now.outcome} ({now.answer!r:.40}) now"
                    changes = wrong if then.rule == now.rule else changed
                    changes.append(f"{cell.stored.name}: {now.problem_id!r:.80} draw {now.draw}: {change}")
    text = f"{counted(graded, 'completion')} graded again"
    state: State = "holds"
    if missing:
        text += f", {missing} without a stored grade"
    if older:
        text += f", {older} stored by another rule"
        state = "differs"
    if wrong:
        state = "fails"
    return Row("grades", state, text, [*wrong, *changed])
