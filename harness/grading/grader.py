"""From a cell's completions to its grades: a pass without a model that can be repeated, judged in worker processes."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvsweep.harness.grading.answers import AnswerKind, Rule, Ungraded, Verdict, canonical_gold, judge, prepare
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import BrokenCell, OtherSchemaError, UserError
from kvsweep.processes.workers import Workers
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import CELL_FILE, OUTCOMES, PROBLEMS_FILE, Completion, Grade, Shard
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import locked, make_folder, replace_text

_KILLED = Verdict(None, "grader_timeout", "no verdict: the worker was killed")


@dataclass(frozen=True, kw_only=True)
class Standard:
    """A cell's standard: each problem's gold, their kind, the rule of reading, the `grading_rule` as `id`."""

    golds: dict[str, str]
    kind: AnswerKind
    rule: Rule
    id: str

    def job(self, row: Completion) -> Ungraded:
        gold = self.golds[row.problem_id]
        return Ungraded(text=row.text, stop_reason=row.stop_reason, gold=gold, kind=self.kind, rule=self.rule)


class Grader(Workers):
    """Worker processes that grade whole cells: a hostile text costs no grade but that of its row."""

    def __init__(self, *, workers: int = 2, timeout_s: float = 5.0) -> None:
        super().__init__(workers=workers, timeout_s=timeout_s, prepare=prepare)

    def judge(self, jobs: Sequence[Ungraded]) -> list[Verdict]:
        """Judge rows, in their order; a row that overran its limits twice is `grader_timeout`: no answer is known."""
        compares = any(job.kind == "expression" for job in jobs)  # only these need what takes seconds to import
        return [verdict or _KILLED for verdict in self.map(judge, jobs, prepared=compares)]

    def grade_cell(self, directory: Path, *, regrade: bool = False, shard: Shard | None = None) -> Counter[str]:
        """Grade the completions of a cell folder that have no grade yet, or all of them.

        Reads `completions.jsonl`, and the golds from `problems.jsonl`; writes `grades.jsonl` as a whole, in the order
        of the completions, without those that ran out of time, which every later call grades again; a shard's
        completions have grades of their own. A grade whose gold has changed since is made anew; a grade without a
        completion is dropped. `regrade` grades every row, `shard` the completions of one shard.

        Returns how many rows have each outcome, and under "graded" how many were graded now.
        """
        counts = Counter[str]()
        for stored_shard in StoredCell(directory).files(row_types.COMPLETIONS_FILE):
            if shard in (None, stored_shard):
                counts += self._grade_shard(directory, stored_shard, regrade=regrade)
        return counts

    def _grade_shard(self, directory: Path, shard: Shard, *, regrade: bool) -> Counter[str]:
        """Grade one shard's completions as `grade_cell` does, and write its grades if they differ from those stored."""
        stored = StoredCell(directory)
        completions = {row.key: row for row in stored.rows(Completion, shard=shard)}
        if not completions:
            return Counter()
        standard = read_standard(directory)
        golds = standard.golds
        for completion in completions.values():
            if completion.problem_id not in golds:
                raise UserError(
                    f"{directory / shard.file(row_types.COMPLETIONS_FILE)} holds problem {completion.problem_id!r}, "
                    f"and {PROBLEMS_FILE} does not; restore it, or delete the folder and run the cell again."
                )
        old_grades, is_clean = _stored_grades(stored, shard)
        grades = {}
        for key, grade in old_grades.items():
            is_current = key in completions and grade.rule == standard.id and grade.gold == golds[grade.problem_id]
            if is_current and not regrade:
                grades[key] = grade
        missing = [completion for key, completion in completions.items() if key not in grades]
        grades |= {grade.key: grade for grade in self.grade(missing, standard)}
        ordered = [grades[key] for key in completions]
        in_time = [grade for grade in ordered if grade.outcome != "grader_timeout"]
        # A file that already says all this is not written again.
        if not is_clean or in_time != list(old_grades.values()):
            make_folder(directory)
            path = directory / shard.file(row_types.GRADES_FILE)
            with locked(path):
                # A sweep that runs may have graded more completions meanwhile: their grades stay behind these. A grade
                # that `old_grades` had too is no such one: its completion is gone.
                grades_now, _ = _stored_grades(stored, shard)
                newer = []
                for key, grade in grades_now.items():
                    if key not in grades and old_grades.get(key) != grade:
                        newer.append(grade)
                replace_text(path, "".join(grade.to_line(directory) for grade in [*in_time, *newer]))
        counts = Counter[str](grade.outcome for grade in ordered)
        counts["graded"] = len(missing)
        return counts

    def grade(self, completions: Sequence[Completion], standard: Standard) -> list[Grade]:
        """Grade completions of a cell, in their order; no row is read from a file or written to one."""
        verdicts = self.judge([standard.job(completion) for completion in completions])
        grades = []
        for completion, verdict in zip(completions, verdicts, strict=True):
            grade = Grade(
                problem_id=completion.problem_id,
                draw=completion.draw,
                answer=verdict.answer,
                gold=standard.golds[completion.problem_id],
                outcome=verdict.outcome,
                correct=1 if verdict.outcome == "correct" else 0,
                rule=standard.id,
            )
            grades.append(grade)
        return grades

    def explain_problem(self, directory: Path, problem_id: str) -> Iterator[str]:
        """A text for every completion of one problem of a cell: what was read, compared, and decided by what.

        Nothing for a problem that the cell does not have.
        """
        standard = read_standard(directory)
        rows = []
        if problem_id in standard.golds:
            rows = [row for row in StoredCell(directory).rows(Completion) if row.problem_id == problem_id]
        verdicts = self.judge([standard.job(row) for row in rows])
        for row, verdict in zip(rows, verdicts, strict=True):
            answer_form, gold_form = verdict.forms
            yield (
                f"{directory}: {problem_id} draw {row.draw}: {verdict.outcome}\n"
                f"  stated in  {verdict.place}\n  extracted  {verdict.answer}\n"
                f"  gold       {standard.golds[problem_id]}\n"
                f"  compared   {answer_form}\n  with       {gold_form}\n  decided by {verdict.rule}"
            )


def _stored_grades(stored: StoredCell, shard: Shard) -> tuple[dict[row_types.Pair, Grade], bool]:
    """The shard's grades by pair, and whether their file holds nothing else: a broken grade is made anew."""
    broken = list[row_types.BadLine]()
    try:
        rows = stored.rows(Grade, shard=shard, on_bad=broken.append)
        return {row.key: row for row in rows}, not broken
    except OtherSchemaError:
        return {}, False


def standard_of(cell: Mapping[str, Any], golds: dict[str, str]) -> Standard:
    """The standard that a cell's settings (`cell.yaml`) name, with these golds by problem_id.

    Raises msgspec's ValidationError for a kind of answer, or a way to read it, that is unknown here.
    """
    benchmark, model = cell["benchmark"], cell.get("model", {})
    tags = {}
    for name in ("start", "end"):
        if f"think_{name}" in model:
            tags[name] = model[f"think_{name}"]
    rule = {"answer_from": benchmark.get("answer_from", "after_think"), "tags": tags}
    standard = {"golds": golds, "kind": benchmark["answer_kind"], "rule": rule, "id": row_types.grading_rule(cell)}
    return msgspec.convert(standard, Standard)


def read_standard(directory: Path) -> Standard:
    """The standard of a cell's folder, as its `cell.yaml` and `problems.jsonl` have it."""
    path = directory / row_types.CELL_FILE
    try:
        standard = standard_of(StoredCell(directory).settings, {})
    except (KeyError, TypeError, AttributeError):
        raise UserError(f"{path} names no benchmark.answer_kind; restore the file or run the cell again.") from None
    except msgspec.ValidationError as error:
        raise UserError(
            f"{path} has an answer_kind or answer_from of another version ({error}); grade it with that one."
        ) from None
    return replace(standard, golds=_read_golds(StoredCell(directory), standard.kind))


def _read_golds(cell: StoredCell, kind: AnswerKind) -> dict[str, str]:
    """The golds of a cell's problems by problem_id; raises UserError for one that is not of the kind."""
    path = cell.folder / PROBLEMS_FILE
    if not path.exists():
        raise UserError(f"{path} is missing, and with it the reference answers; run the cell again.")
    golds = {problem_id: problem.gold for problem_id, problem in cell.problems().items()}
    for problem_id, gold in golds.items():
        if canonical_gold(gold, kind) is None:
            raise UserError(f"{path} has the gold {gold!r} for {problem_id!r}, which is no {kind}; correct it.")
    return golds


def grade(directory: Path, *, workers: int, timeout: float, regrade: bool, why: str | None) -> None:
    """Grade every cell below a folder, or print what decided each completion of the problem `why`.

    Prints a line for each cell and one for all; raises UserError if no cell has a completion of the problem.
    """
    cells = _cells(directory)
    total = Counter[str]()
    texts = list[str]()
    with Grader(workers=workers, timeout_s=timeout) as grader:
        for cell in cells:
            if why is not None:
                texts += grader.explain_problem(cell, why)
            else:
                counts = grader.grade_cell(cell, regrade=regrade)
                print(_summary_line(str(cell), counts))
                total += counts
    if why is None:
        texts = [_summary_line(f"total of {counted(len(cells), 'cell')}", total)]
    elif not texts:
        raise UserError(f"{directory} holds no completion of a problem {why!r}; give an id of its {PROBLEMS_FILE}.")
    print("\n".join(texts))


def _cells(root: Path) -> list[Path]:
    """The cells' folders below a folder, with a note of each broken one; raises UserError if there is no other."""
    cells = list[Path]()
    for path in sorted(root.rglob(CELL_FILE)):
        try:
            _ = StoredCell(path.parent).settings  # reads and checks cell.yaml
        except BrokenCell as error:  # also a copy of a cell in a folder of another name, which no reader counts
            print(f"note: left out: {error}", file=sys.stderr)
        else:
            cells.append(path.parent)
    if not cells:
        raise UserError(f"{root} has no {CELL_FILE} below it that can be read, so no cell; give a run's folder.")
    return cells


def _summary_line(label: str, counts: Counter[str]) -> str:
    outcomes = ", ".join(f"{outcome} {counts[outcome]}" for outcome in OUTCOMES)
    return f"{label}: {counted(counts.total() - counts['graded'], 'row')}, {counts['graded']} graded now: {outcomes}"
