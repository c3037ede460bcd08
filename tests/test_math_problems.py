"""`scripts/math_problems.py`: the last box is the answer, and what a benchmark asks is left out."""

from scripts.math_problems import training_problems


def test_answers_are_last_boxes_and_problems_of_the_benchmark_are_left_out():
    rows = [
        {"problem": "What is 1 + 1?", "solution": r"It is \boxed{3}, no, \boxed{2}."},
        {"problem": "Solve x. ", "solution": r"So $x \in \boxed{\left[ \frac{5}{2}, \frac{7}{2} \right)}$."},
        {"problem": "What is 1 + 1?", "solution": r"\boxed{2}"},
        {"problem": "Asked in MATH500", "solution": r"\boxed{5}"},
        {"problem": "Why?", "solution": r"Because \boxed{12 (twelve)}."},
        {"problem": "No box", "solution": "7"},
    ]
    problems, left_out = training_problems(rows, {"Asked in MATH500"})
    assert problems == [
        {"problem": "What is 1 + 1?", "answer": "2"},
        {"problem": "Solve x.", "answer": r"\left[ \frac{5}{2}, \frac{7}{2} \right)"},
    ]
    assert left_out == {
        "in MATH500": 1,
        "the same text again": 1,
        "an answer that cannot be compared": 1,
        "no box": 1,
    }
