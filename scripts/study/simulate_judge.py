"""How often `kvsweep judge` errs: made outputs whose truth is known, judged as files are.

    python scripts/study/simulate_judge.py --output results/published/judge_errors.csv

A *safe* is wrong where 5 points are lost, a *worse* or *small loss* where nothing is. Each case has a share of both,
and of equal servers that are called beyond their control. A case is how the loss lies or what is odd about the rows:

    even        each problem's chance of a right answer is lower in proportion
    gaps        the same, and the setting lacks a third of the answers that it would get wrong
    versions    the same, and a server's texts are one of two versions of each problem, at random
    answers     the same, and the texts are the answers alone, so that many are equal
    greedy      5% of all problems are lost for certain, and all draws are copies
    clusters    5% of all questions are lost for certain, of which each has three variants: with --group
    no group    the same without --group, which is outside what judge promises
    luck        like even, and the three variants of a question are right or wrong together: with --group

Prints a line a case; the CSV file has the counts of wrong verdicts.
"""

import argparse
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd

from kvsweep.analysis.statistics.noninferiority import MARGIN
from kvsweep.harness.judge import judged

SIZES = ((30, 1), (30, 4), (30, 16), (198, 1), (198, 4), (198, 16))
Rng = np.random.Generator
Scores = np.ndarray


def table(right: Scores, texts: list[list[str]], groups: bool = False) -> pd.DataFrame:
    """The answers of a setting, NaN where it has none, as judge reads them from a file."""
    rows = []
    for problem, draws in enumerate(right.tolist()):
        for draw, grade in enumerate(draws):
            rows.append((f"p{problem}", draw, grade, texts[problem][draw], f"g{problem // 3}"))
    answers = pd.DataFrame(rows, columns=["problem_id", "draw", "correct", "text", "group"])
    return answers if groups else answers.drop(columns="group")


def even(rng: Rng, problems: int, draws: int, loss: float, case: str) -> list[pd.DataFrame]:
    variants = 3 if case == "luck" else 1
    chance = np.repeat(rng.beta(0.6, 0.4, problems // variants), variants)
    sides = []
    for number, share in enumerate((1, 1 - loss / chance.mean())):
        versions = np.arange(draws) + np.zeros((problems, 1), int)
        if case == "versions":
            versions = rng.integers(0, 2, (problems, draws))
        luck = np.repeat(rng.random((problems // variants, draws)), variants, axis=0)
        right = (np.take_along_axis(luck, versions, 1) < (share * chance)[:, None]).astype(float)
        if case == "gaps" and number == 1:
            right[(right == 0) & (rng.random(right.shape) < 1 / 3)] = np.nan
        names = [[f"{number} {p} {version}" for version in own] for p, own in enumerate(versions)]
        if case == "answers":
            names = [[f"{p} {grade}" for grade in own] for p, own in enumerate(right)]
        sides.append(table(right, names, groups=case == "luck"))
    return sides


def lost_wholly(rng: Rng, problems: int, draws: int, loss: float, case: str) -> list[pd.DataFrame]:
    size = 1 if case == "greedy" else 3
    lost = np.repeat(rng.random(problems // size) < loss, size)
    right = np.ones((problems, draws))
    texts = [[f"{p} {0 if case == 'greedy' else d}" for d in range(draws)] for p in range(problems)]
    return [table(one, texts, groups=case == "clusters") for one in (right, right * ~lost[:, None])]


SEVERAL = [size for size in SIZES if size[1] > 1]
CASES = {
    "even": (even, SIZES),
    "gaps": (even, SIZES),
    "versions": (even, SEVERAL),
    "answers": (even, SEVERAL),
    "greedy": (lost_wholly, SEVERAL),
    "clusters": (lost_wholly, SIZES),
    "no group": (lost_wholly, [size for size in SIZES if size[1] == 1]),
    "luck": (even, SIZES),
    "control": (None, SIZES),
}


def label(sides: list[pd.DataFrame]) -> str:
    answers = dict(zip(("full", "cell"), sides, strict=True))
    return judged(answers, "full", None, margin=MARGIN, sizes={})["cell"].label


def beyond(rng: Rng, problems: int, draws: int) -> bool:
    chance = rng.beta(0.6, 0.4, problems)[:, None]
    answers = {}
    for name in ("full", "again", "cell"):
        right = (rng.random((problems, draws)) < chance).astype(float)
        answers[name] = table(right, [[f"{name} {p} {d}" for d in range(draws)] for p in range(problems)])
    return judged(answers, "full", "again", margin=MARGIN, sizes={})["cell"].beyond_control


def wrong(case: str, problems: int, draws: int, sets: int) -> dict[str, int]:
    """How many sets have a wrong verdict, of each kind."""
    make, _ = CASES[case]
    rng = np.random.default_rng(zlib.crc32(f"{case}, {problems} x {draws}".encode()))
    if make is None:
        return {"beyond_control": sum(beyond(rng, problems, draws) for _ in range(sets))}
    lossy = Counter(label(make(rng, problems, draws, MARGIN, case)) for _ in range(sets))
    equal = Counter(label(make(rng, problems, draws, 0, case)) for _ in range(sets))
    return {
        "wrong_safe": lossy["safe"] + lossy["small loss"] + lossy["better"],
        "wrong_worse": equal["worse"] + equal["small loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", type=int, default=1000, help="made sets of answers in each case")
    parser.add_argument("--only", default="", help="cases whose name begins so, as 'even, 198 x 16'")
    parser.add_argument("--output", type=Path, help="a CSV file for the counts")
    options = parser.parse_args()
    rows = []
    for case, (_, sizes) in CASES.items():
        for problems, draws in sizes:
            name = f"{case}, {problems} x {draws}"
            if not name.startswith(options.only):
                continue
            counts = wrong(case, problems, draws, options.sets)
            rows.append({"case": case, "n": problems, "draws": draws, "sets": options.sets, **counts})
            shares = ", ".join(f"{name} {count / options.sets:.1%}" for name, count in counts.items())
            print(f"{name}: {shares}", flush=True)
    print(f"{time.process_time():.0f} CPU seconds")
    if options.output:
        pd.DataFrame(rows).astype("Int64", errors="ignore").to_csv(options.output, index=False)


if __name__ == "__main__":
    main()
