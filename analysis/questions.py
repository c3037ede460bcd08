"""Whether two files of outputs are about the same questions: every column that both share is compared."""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from kvsweep.analysis.answers import plain
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible

# Columns that describe a question, whatever else a file holds.
PROMPT, GOLD = ("prompt", "input"), ("gold", "target", "expected_answer")  # `answer` is as often the model's own
_ASKED = {*PROMPT, "question", "problem", "messages", "query", "instruction", "prompt_hash", "doc"}
OF_QUESTION = {*_ASKED, *GOLD, "choices", "options", "expected", "ground_truth", "reference", "reference_answer"}
OF_QUESTION |= {"correct_answer"}


def each(column: Any, read: Callable[[Any], Any]) -> Any:
    """A column of objects: pandas' own texts cannot hold half a character."""
    return pd.Series([read(value) for value in column], index=column.index, dtype=object)


def one_per_problem(questions: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """The columns that have one value in all draws of each problem, a row a problem.

    A column known to describe the question that has two values in a problem raises a UserError.
    """
    columns = {}
    for name in questions:
        texts = each(questions[name].dropna(), plain)
        by_problem = texts.groupby(answers["problem_id"])
        varying = by_problem.nunique() > 1
        if not varying.any():
            columns[name] = by_problem.first()
        elif name in OF_QUESTION:
            problem = varying.idxmax()
            of_problem = texts[answers["problem_id"].eq(problem)]
            other = of_problem[of_problem.ne(of_problem.iloc[0])]
            has = f"{answers['place'][other.index[0]]} has another {name} ({visible(other.iloc[0])!r:.60})"
            mend = f"give one task's rows (--where KEY=VALUE), or --ignore {name} if it is no part of the question"
            raise UserError(f"{has} than an earlier row of problem {visible(problem)!r:.60}: {mend}.")
    return pd.DataFrame(columns, dtype=object)


def refuse_many_ids(table: pd.DataFrame, name: str) -> None:
    """Raise UserError if most questions have several ids, so that draws would count as problems.

    One question that all ids have says how to answer and not what is asked.
    """
    asked = [column for column in table if column in _ASKED]
    questions = table[[column for column in table if column in OF_QUESTION]].dropna(how="all", subset=asked)
    different = len(questions.drop_duplicates()) if asked else 0
    if 1 < different <= len(questions) / 2:
        has = f"{visible(name)} has {len(questions):,} ids for {different:,} questions"
        mend = "--column id=NAME names the problem's id and --column draw=NAME the draw"
        end = "or --ignore a column that is no part of the question"
        raise UserError(f"{has}, so that draws would count as problems: {mend}, {end}.")


def differing(first: pd.DataFrame, second: pd.DataFrame, *, several: bool) -> Iterator[tuple[str, str]]:
    """Each column that differs between two files, with the first problem where it does.

    With one draw each column has one value in all draws. Then sentences alone are compared, and the columns that are
    known by name. A column with one value in the whole file describes the run.
    """
    for name in first.columns.intersection(second.columns, sort=False):
        ours, theirs = first[name].dropna().align(second[name].dropna(), join="inner")
        if name not in OF_QUESTION:
            sentences = first[name].dropna().str.count(" ").gt(1).mean() > 0.5
            if not (several or sentences) or 1 in (first[name].nunique(), second[name].nunique()):
                continue
        differ = ours.ne(theirs)
        if differ.any():
            yield str(name), str(differ.idxmax())
