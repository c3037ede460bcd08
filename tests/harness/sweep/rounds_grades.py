"""Grades for texts that mean nothing: a text is right until evictions spoil it, more likely the more there are."""

from zlib import crc32

from kvsweep.harness.grading.grader import Grader
from kvsweep.run_files.row_types import Grade


def grade(self, completions, standard):
    grades = []
    for row in completions:
        right = int(crc32(bytes(str(row.token_ids), "ascii")) % 8 >= 2 * len(row.evictions))
        grade = Grade(
            problem_id=row.problem_id,
            draw=row.draw,
            answer=None,
            gold=standard.golds[row.problem_id],
            outcome="correct" if right else "wrong",
            correct=right,
            rule=standard.id,
        )
        grades.append(grade)
    return grades


def install():
    """Grade by this rule in the process that calls."""
    Grader.grade = grade
