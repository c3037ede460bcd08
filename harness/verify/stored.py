"""What of a run can be checked without decoding: seals, ids, weights, data, code of policies, grades."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf

from kvsweep import records
from kvsweep.command_line import counted
from kvsweep.compression.source import code_hash, is_same_code
from kvsweep.errors import BrokenCell, UserError
from kvsweep.files import read_lines
from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.replay.replay_share import begun_configs
from kvsweep.harness.settings import plain_config_errors
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.job import Job, make_job
from kvsweep.records import BadLine, Completion, Grade, leaves
from kvsweep.stored import StoredCell, is_served, read_cells, stored_cells

# differs: something that can change bits is another one today. fails: what is stored is not what was made.
State = Literal["holds", "differs", "fails", "cannot"]
# The rows of a cell's files by the first word of their names; a shard's or a replay's file has more words.
_KINDS: dict[str, type[records.StoredRow]] = {
    "completions": Completion,
    "grades": Grade,
    "stats": records.DecodeStats,
    "problems": records.Problem,
    "seconds": records.Timing,
    "replay": records.Replay,
}
# What an id is made of, by the names in cell.yaml; the first prefix that fits counts.
_PARTS = {"weights": "model.", "data": "dataset_hash", "policies": "policy.", "settings": ""}
_HASHED = {"model", "dataset_hash", "policy", "decoding", "impl", "seed", "cache"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was checked: whether it holds, a sentence, and a line for each place where it does not."""

    name: str
    state: State
    text: str
    lines: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """The cells of a run directory beside those that the same configurations have today.

    Attributes:
        found: job and cell of each id that today's weights, data, policies and settings give again.
        changed: for each id that they do not give, the values that differ in cell.yaml: name to (then, now).
        unread: why there is nothing to compare a cell with, by id: a server's texts, missing weights.
        served: the ids of the cells that servers wrote, whose texts nobody can decode again.
        passes: the decoding passes of each cell, as its provenance has them.
    """

    folders: list[Path]
    found: dict[str, tuple[Job, Cell]] = field(default_factory=dict)
    changed: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    served: set[str] = field(default_factory=set)
    passes: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)


def read_run(directory: Path) -> StoredRun:
    """Make the jobs of a run directory again; a folder without a cell raises a UserError."""
    run = StoredRun(folders=[cell.folder for cell in stored_cells(directory)])
    if not run.folders:
        raise UserError(f"{directory} holds no cell: give the folder of a run, such as results/runs/demo.")
    for config, ids in begun_configs(directory, lambda folder, why: run.unread.setdefault(folder.name, str(why))):
        try:
            with plain_config_errors():
                job = make_job(OmegaConf.create(config))
        except UserError as error:
            run.unread.update(dict.fromkeys(ids, str(error)))
            continue
        cells = {cell.cell_id: cell for cell in job.cells}
        run.found.update({name: (job, cells[name]) for name in ids & cells.keys()})
        for name in ids - cells.keys():
            run.changed[name] = _least_changed(StoredCell(directory / name).settings, job.cells)

    def unread(path: Path, error: Exception) -> None:
        run.unread.setdefault(path.parent.name, f"{path} cannot be read ({error})")

    for other in (run.changed, run.unread):  # several commands may have begun a cell
        for name in run.found.keys() & other.keys():
            del other[name]
    run.served.update(cell.name for cell, has in read_cells(directory) if is_served(has))
    for folder in run.folders:
        if folder.name not in {*run.found, *run.changed}:
            run.unread.setdefault(
                folder.name, f"{folder} has no {records.PROVENANCE_FILE} and no whole {records.CELL_FILE}"
            )
        for path, origin in StoredCell(folder).provenances(unread):
            try:
                run.passes.setdefault(folder.name, []).extend(origin["decoding_passes"])
            except KeyError as error:
                unread(path, error)
    return run


def _least_changed(stored: Mapping[str, Any], cells: Iterable[Cell]) -> dict[str, tuple[Any, Any]]:
    """What differs between a stored cell and the cell of today that is most like it: name to (then, now)."""

    def hashed(described: Mapping[str, Any]) -> dict[str, Any]:
        return dict(leaves({name: value for name, value in described.items() if name in _HASHED}))

    then = hashed(stored)
    others = [hashed(cell.describe()) for cell in cells]
    compared = [{k: (then.get(k), now.get(k)) for k in {*then, *now} if then.get(k) != now.get(k)} for now in others]
    return min(compared, key=len)


def stored_checks(run: StoredRun) -> Iterator[Check]:
    """The checks that need neither a model nor a grade, in their order."""
    yield _check_rows(run.folders)
    yield _check_cells(run.folders)
    for name in _PARTS:
        yield _check_part(run, name)
    yield _check_problems(run)
    yield _check_policy_code(run)


def _check_rows(folders: Sequence[Path]) -> Check:
    bad, rows, unsealed = list[BadLine](), 0, 0
    for path in (path for folder in folders for path in sorted(folder.glob("*.jsonl"))):
        if (kind := _KINDS.get(re.split(r"[-_.]", path.name)[0])) is not None:
            rows += sum(1 for _ in records.read_rows(path, kind, on_bad=bad.append))
            unsealed += sum(not records.is_sealed(line) for line in read_lines(path))
    if bad:
        return Check(name="rows", state="fails", text=f"{counted(len(bad), 'row')} broken", lines=[*map(str, bad)])
    if unsealed:
        text = f"{unsealed} of {counted(rows, 'row')} have no seal, as rows of other programs"
        return Check(name="rows", state="differs", text=text)
    return Check(name="rows", state="holds", text=f"{counted(rows, 'row')} with the seals of their contents and cells")


def _check_cells(folders: Sequence[Path]) -> Check:
    lines = []
    for folder in folders:
        try:
            _ = StoredCell(folder).settings
        except (OSError, BrokenCell) as error:
            lines.append(str(error))
        if (folder / records.DONE_FILE).exists() and not StoredCell(folder).is_done:
            lines.append(f"{folder / records.DONE_FILE} names completions of other sizes: rows came or went since.")
    text = f"{counted(len(folders), 'cell')} with the seals of their settings, and files of the sizes that DONE names"
    return Check(
        name="cells", state="fails" if lines else "holds", text=text if not lines else "not whole", lines=lines
    )


def _check_part(run: StoredRun, name: str) -> Check:
    """Whether the ids follow again from one part of what they are made of."""
    then_and_now: Counter[str] = Counter()
    for changed in run.changed.values():
        for leaf, (then, now) in changed.items():
            if name == next(part for part, prefix in _PARTS.items() if leaf.startswith(prefix)):
                then_and_now[f"{leaf} was {then} and is {now} now"] += 1
    if then_and_now:
        lines = [f"{line}: {counted(cells, 'cell')}" for line, cells in then_and_now.items()]
        return Check(name=name, state="fails", text="not those that the ids of the cells were made of", lines=lines)
    known = len(run.found) + len(run.changed)
    if not known:
        return Check(name=name, state="cannot", text="nothing of today to compare with, see below")
    return Check(name=name, state="holds", text=f"those that {counted(known, 'id')} were made of")


def _check_problems(run: StoredRun) -> Check:
    """Whether the problems beside the completions are those of the data."""
    lines, compared = [], 0
    for folder in run.folders:
        if folder.name in run.found:
            asked = {one.id: one for one in run.found[folder.name][0].benchmark.problems}
            for row in StoredCell(folder).rows(records.Problem, on_bad=records.ignore):
                compared += row.id in asked
                if row != asked.get(row.id, row):
                    lines.append(f"{folder / records.PROBLEMS_FILE}: {row.id!r:.80} has another prompt or gold")
    if not compared:
        return Check(name="problems", state="cannot", text="the data are not here to compare with")
    text = "others than the data's" if lines else f"{counted(compared, 'stored problem')} as the data have them"
    return Check(name="problems", state="fails" if lines else "holds", text=text, lines=lines)


def _check_policy_code(run: StoredRun) -> Check:
    changed: Counter[str] = Counter()
    known = 0
    for name, (_, cell) in run.found.items():
        now = code_hash(type(cell.policy))
        codes = {str(one["policy_code"]) for one in run.passes.get(name, []) if "policy_code" in one}
        known += bool(codes)
        for then in (code for code in codes if not is_same_code(code, now)):
            changed[f"policy={cell.policy.name} was decoded by code {then} and is {now} now"] += 1
    if changed:
        lines = [f"{line}: {counted(cells, 'cell')}" for line, cells in changed.items()]
        return Check(name="policy code", state="differs", text="not the code that decoded", lines=lines)
    text = f"that which {counted(known, 'cell')} were decoded by" if known else "no cell has a hash of it"
    return Check(name="policy code", state="holds" if known else "cannot", text=text)


def check_grades(folders: Sequence[Path], grader: Grader) -> Check:
    """Whether the grades that are stored are those that the texts get again; another version may grade otherwise."""
    wrong, lacking, older, others = list[str](), 0, 0, list[str]()
    made = 0
    for folder in folders:
        try:
            standard = read_standard(folder)
        except UserError as error:
            wrong.append(str(error))
            continue
        cell = StoredCell(folder)
        texts = cell.rows(Completion, on_bad=records.ignore)
        stored = {row.key: row for row in cell.rows(Grade, on_bad=records.ignore)}
        for row in grader.grade([text for text in texts if text.problem_id in standard.golds], standard):
            made, then = made + 1, stored.get(row.key)
            lacking += then is None
            if then is None or "grader_timeout" in (row.outcome, then.outcome):
                continue
            older += then.rule != row.rule
            if _verdict(row) != _verdict(then):
                change = f"{then.outcome} ({then.answer!r:.40}) is {row.outcome} ({row.answer!r:.40}) now"
                line = f"{folder.name}: {row.problem_id!r:.80} draw {row.draw}: {change}"
                (wrong if then.rule == row.rule else others).append(line)
    text = f"{counted(made, 'completion')} graded again"
    text += f", {lacking} without a stored grade" if lacking else ""
    text += f", {older} stored by another rule" if older else ""
    state: State = "fails" if wrong else "differs" if older else "holds"
    return Check(name="grades", state=state, text=text, lines=[*wrong, *others])


def _verdict(grade: Grade) -> tuple[Any, ...]:
    return grade.answer, grade.gold, grade.outcome
