"""Write the problems that DynTS's head learns from: MATH's training problems, each with its answer, as JSON lines.

    python scripts/math_problems.py MATH.jsonl

The problems are the 7,500 of the split `train` of DigitalLearningGmbH/MATH-lighteval at the commit below. MATH500 is
drawn from the split `test`; a problem whose text is one of MATH500's is left out all the same. The answer is what the
last box of the worked solution holds. A problem whose answer no text can be compared with is left out and counted.
The data of the authors' head was not released: that they took this split is a guess from their 405 steps.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets

from kvsweep.harness.benchmarks.golds import read_gold
from kvsweep.harness.grading.statements import boxes

MATH = ("DigitalLearningGmbH/MATH-lighteval", "0530c78699ea5e8eb5530600900e1f328b48acad", "train")
MATH500 = ("HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test")


def load(source: tuple[str, str, str]) -> Any:
    name, revision, split = source
    return datasets.load_dataset(name, revision=revision, split=split)


def main() -> None:
    [file] = sys.argv[1:]
    evaluated = {row["problem"].strip() for row in load(MATH500)}
    rows, left_out = training_problems(load(MATH), evaluated)
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{file}: {len(rows)} problems; left out: {dict(left_out)}")


def training_problems(data: Any, evaluated: set[str]) -> tuple[list[dict[str, str]], Counter[str]]:
    """Return the rows with problem and answer, and how many were left out for which reason."""
    rows, left_out = list[dict[str, str]](), Counter[str]()
    seen = set[str]()
    for row in data:
        problem = row["problem"].strip()
        last = next(boxes(row["solution"]), None)  # they come from the last to the first
        answer = last.content if last else None
        if problem in evaluated:
            left_out["in MATH500"] += 1
        elif problem in seen:
            left_out["the same text again"] += 1
        elif answer is None:
            left_out["no box"] += 1
        else:
            seen.add(problem)
            try:
                read_gold(answer, "expression")
            except ValueError:
                left_out["an answer that cannot be compared"] += 1
            else:
                rows.append({"problem": problem, "answer": answer})
    return rows, left_out


if __name__ == "__main__":
    main()
