"""A judge that a worker calls in place of the grader's: the text "sleep" takes longer than any limit."""

import time

from kvsweep.harness.grading.answers import Verdict


def judge(text: str, *rest: object) -> Verdict:
    time.sleep(600 if text == "sleep" else 0)
    return Verdict("5", "correct", "a judge that sleeps")
