"""Whether two files of outputs are about the same questions: every column that both share is compared."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvsweep.analysis.outputs import ASKED, OF_QUESTION, Outputs
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import visible


def refuse_unlike(outputs: Mapping[str, Outputs], baseline: str, ignored: Sequence[str]) -> None:
    """Raise UserError for settings of other questions or grades, and for an `ignored` name of no column of any."""
    columns = set[str]()
    for setting in outputs.values():
        columns |= setting.columns
    # The outputs were read without the ignored columns; here a name that is no column's is refused.
    for name in ignored:
        if name not in columns:
            has = visible(", ".join(sorted(columns)))
            raise UserError(f"--ignore {visible(name)} names no column: choose from {has:.300}.")
    questions = {}
    for name, setting in outputs.items():
        questions[name] = one_per_problem(setting.questions, setting.answers)
        _refuse_many_ids(questions[name], name)
    full = outputs[baseline]
    for name, setting in outputs.items():
        if full.score and setting.score and full.score != setting.score:
            raise UserError(
                f"{baseline} and {name} have the grades {full.score!r:.60} and {setting.score!r:.60}: give outputs of "
                "the same grades, or choose by --correct NAME, --where filter=NAME."
            )
        # The fewer draws count: with one, a file does not show which columns vary by draw.
        draws = min(full.answers["draw"].nunique(), setting.answers["draw"].nunique())
        problems = _differing(questions[baseline], questions[name], draws)  # by column
        # The error is about the first column; the others are only listed.
        for column, problem in problems.items():
            columns_text = ", ".join(map(visible, problems))
            differ = f"{baseline} and {name} differ in {columns_text:.200} for problem {visible(problem)!r:.60}"
            raise UserError(
                f"{differ}: give outputs of the same questions, or --ignore {visible(column)} if that is no part of "
                "the question (repeatable)."
            )


def refuse_unpaired(outputs: Mapping[str, Outputs], baseline: str) -> None:
    """Raise UserError for settings that share no problem, or whose draws are the same but for their first number."""
    full = outputs[baseline].answers
    for name, setting in outputs.items():
        answers = setting.answers
        if not answers["problem_id"].isin(full["problem_id"]).any():
            raise UserError(
                f"{baseline} has {_first_ids(full)} and {name} {_first_ids(answers)}, "
                "and they share no problem: --column id=NAME names the problem's id."
            )
        first, other_first = full["draw"].min(), answers["draw"].min()
        # Counted from 0 and from 1, for example: pairs would join different draws.
        if first != other_first and {*full["draw"] - first} == {*answers["draw"] - other_first}:
            raise UserError(
                f"{baseline} counts draws from {first} and {name} from {other_first}: count them alike, or give "
                "--draws rows, which pairs them in the order of their rows."
            )


def _first_ids(answers: pd.DataFrame) -> str:
    return visible(", ".join([*answers["problem_id"].unique()[:2], "..."]))


def one_per_problem(questions: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """The columns that have one value in all draws of each problem, a row a problem.

    A column that varies within a problem describes answers and is left out; it raises a UserError if its name is one
    of the question's.
    """
    columns = {}
    for name in questions:
        texts: Any = questions[name].dropna()
        by_problem = texts.groupby(answers["problem_id"])
        varies = by_problem.nunique() > 1
        if not varies.any():
            columns[name] = by_problem.first()
        elif name in OF_QUESTION:
            # The first problem in which it varies.
            problem = varies.idxmax()
            of_problem = texts[answers["problem_id"].eq(problem)]
            row = of_problem.ne(of_problem.iloc[0]).idxmax()  # the first with another text
            has = f"{answers['place'][row]} has another {name} ({visible(texts[row])!r:.60})"
            raise UserError(
                f"{has} than an earlier row of problem {visible(problem)!r:.60}: give one task's rows (--where "
                f"KEY=VALUE), or --ignore {name} if it is no part of the question."
            )
    return pd.DataFrame(columns, dtype=object)


def _refuse_many_ids(table: pd.DataFrame, name: str) -> None:
    """Raise UserError if most questions have several ids, so that draws would count as problems.

    One question that all ids have says how to answer and not what is asked.
    """
    prompts = table.columns.intersection([*ASKED])
    if prompts.empty:
        return
    questions = table[table.columns.intersection([*OF_QUESTION])].dropna(how="all", subset=prompts)
    different = len(questions.drop_duplicates())
    # Two ids or more for each question, on average.
    if 1 < different <= len(questions) / 2:
        raise UserError(
            f"{visible(name)} has {len(questions):,} ids for {different:,} questions, so that draws would count as "
            "problems: --column id=NAME names the problem's id and --column draw=NAME the draw, or --ignore a column "
            "that is no part of the question."
        )


def _differing(first: pd.DataFrame, second: pd.DataFrame, draws: int) -> dict[str, str]:
    """The first problem of each column that differs between two settings.

    With one draw no column varies between draws, also not one that describes answers. Then only sentences are compared,
    and the columns whose names are of the question. A column with one value in the whole file describes the run.
    """
    problems = {}
    for name in first.columns.intersection(second.columns, sort=False):
        texts, others = first[name].dropna(), second[name].dropna()
        if name not in OF_QUESTION:
            # Most of its values have three words or more.
            has_sentences = texts.str.count(" ").gt(1).mean() > 0.5
            describes_run = texts.nunique() == 1 or others.nunique() == 1
            if describes_run or (draws == 1 and not has_sentences):
                continue
        texts, others = texts.align(others, join="inner")
        differ = texts.ne(others)
        if differ.any():
            problems[str(name)] = str(differ.idxmax())
    return problems
