"""`kvsweep-grade`: grade the stored completions of every cell below a folder, or say why a row has its grade."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvsweep.base.command_line import counted, one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.records import CELL_FILE, OUTCOMES, PROBLEMS_FILE
from kvsweep.harness.grading.grader import LENIENT_GRADES_FILE, CellSummary, Grader


def main(argv: Sequence[str] | None = None) -> int:
    """Grade every cell below a folder (`kvsweep-grade`): returns 0; exit code 2 bad input, 130 interrupted."""
    about = "Grade the stored completions of every cell below DIR, without a model."
    parser = argparse.ArgumentParser(prog="kvsweep-grade", description=about)
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path, help="a run's folder, or one cell's")
    add("--workers", type=int, default=2, metavar="N", help="grading processes (default: 2)")
    add("--timeout", type=float, default=5.0, metavar="S", help="seconds a row may take (default: 5)")
    add("--all", action="store_true", help="grade again the rows that have a grade")
    lenient = "grade truncated texts and unclosed thinking too, and take the last number where no answer is given"
    add("--lenient", action="store_true", help=f"{lenient}: into {LENIENT_GRADES_FILE}, which no report reads")
    shown = "what was extracted, both forms as they were compared, and the rule that decided"
    add("--why", metavar="PROBLEM", help=f"grade nothing; show for each completion of this problem {shown}")
    arguments = parser.parse_args(argv)
    with one_sentence("kvsweep-grade"):
        cells = _cells(arguments.dir)
        with Grader(workers=arguments.workers, timeout_s=arguments.timeout) as grader:
            (_grade_run if arguments.why is None else _explain)(grader, cells, arguments)
    return 0


def _cells(root: Path) -> list[Path]:
    if not root.is_dir():
        raise UserError(f"{root} is no folder; give the folder of a run, such as results/runs/demo.")
    cells = sorted(path.parent for path in root.rglob(CELL_FILE))
    if not cells:
        raise UserError(f"{root} holds no folder with a {CELL_FILE}, so no cell; give the folder of a run.")
    return cells


def _explain(grader: Grader, cells: Sequence[Path], arguments: argparse.Namespace) -> None:
    found = False
    for directory in cells:
        for text in grader.explain_problem(directory, arguments.why, lenient=arguments.lenient):
            found = True
            print(f"{_name(directory, arguments.dir)}: {text}")
    if not found:
        unknown = f"{arguments.dir} holds no completion of a problem {arguments.why!r}"
        raise UserError(f"{unknown}; give an id of its {PROBLEMS_FILE}.")


def _grade_run(grader: Grader, cells: Sequence[Path], arguments: argparse.Namespace) -> None:
    total = CellSummary(graded=0)
    for directory in cells:
        summary = grader.grade_cell(directory, regrade=arguments.all, lenient=arguments.lenient)
        print(_summary_line(_name(directory, arguments.dir), summary))
        total += summary
    print(_summary_line(f"{'lenient, ' * arguments.lenient}total of {counted(len(cells), 'cell')}", total))


def _name(directory: Path, root: Path) -> str:
    """A cell's folder as the root's part names it; the root itself, where it is the cell, has its own name."""
    return str(directory.relative_to(root)) if directory != root else root.resolve().name


def _summary_line(label: str, summary: CellSummary) -> str:
    counts = ", ".join(f"{outcome} {summary.outcomes[outcome]}" for outcome in OUTCOMES)
    return f"{label}: {counted(summary.rows, 'row')}, {summary.graded} graded now: {counts}"


if __name__ == "__main__":
    sys.exit(main())
