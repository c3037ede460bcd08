"""Pass@1 and its standard error, without pandas: importing pandas takes longer than all of `kvsweep status`."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsweep.run_files.row_types import Grade, Shard, ignore, view
from kvsweep.run_files.run_reader import StoredCell

_Verdict = view(Grade, "correct", "rule")


@dataclass(frozen=True, kw_only=True)
class Score:
    """A cell's Pass@1 and standard error, None with too few grades; `graded` is the number of grades."""

    graded: int
    pass_at_1: float | None = None
    error: float | None = None


def mean_and_error(means: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the means per problem and its standard error: NaN with one problem.

    The draws of one problem are not independent, so the error is clustered: the standard deviation (n - 1) of the n
    means, divided by sqrt(n) (Miller 2024, "Adding error bars to evals", arXiv 2411.00640, section 2.2). It describes a
    new choice of problems like these, not a new run on the same problems.
    """
    count = len(means)
    score = math.fsum(means) / count
    if count == 1:
        return score, math.nan
    squares = math.fsum((mean - score) ** 2 for mean in means)
    return score, math.sqrt(squares / (count - 1) / count)


def read_score(folder: Path, shard: Shard | None = None) -> Score:
    """Return Pass@1 of a cell's grades, of one shard or all; every outcome but "correct" counts 0."""
    grades_of_problem: dict[str, list[int]] = defaultdict(list)  # 1 right, 0 wrong
    for grade in StoredCell(folder).grades(_Verdict, shard=shard, on_bad=ignore).values():
        grades_of_problem[grade.problem_id].append(grade.correct)
    if not grades_of_problem:
        return Score(graded=0)
    score, error = mean_and_error([sum(grades) / len(grades) for grades in grades_of_problem.values()])
    graded = sum(map(len, grades_of_problem.values()))
    return Score(graded=graded, pass_at_1=score, error=None if math.isnan(error) else error)
