"""How often `kvsweep judge` errs: made outputs whose truth is known, judged as files are.

    python scripts/study/simulate_judge.py --runs 200

A *safe* is wrong where 5 points are lost, a *worse* or *small loss* where nothing is. Each case has a share of both,
and of equal servers that are called beyond their control. A case is how the loss lies or what is odd about the rows:

    even        each problem's chance of a right answer is lower in proportion
    gaps        the same, and the setting lacks a third of the answers that it would get wrong
    versions    the same, and a server's texts are one of two versions of each problem, at random
    answers     the same, and the texts are the answers alone, so that many are equal
    greedy      5% of all problems are lost for certain, and all draws are copies
    clusters    5% of all questions are lost for certain, of which each has three variants: with --group
    no group    the same without --group, which is outside what judge promises

Prints a line a case and, as its last line, one JSON object.
"""

import argparse
import json
import zlib

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
    chance = rng.beta(0.6, 0.4, problems)
    sides = []
    for number, share in enumerate((1, 1 - loss / chance.mean())):
        versions = np.arange(draws) + np.zeros((problems, 1), int)
        if case == "versions":
            versions = rng.integers(0, 2, (problems, draws))
        luck = rng.random((problems, draws))
        right = (np.take_along_axis(luck, versions, 1) < (share * chance)[:, None]).astype(float)
        if case == "gaps" and number == 1:
            right[(right == 0) & (rng.random(right.shape) < 1 / 3)] = np.nan
        names = [[f"{number} {p} {version}" for version in own] for p, own in enumerate(versions)]
        if case == "answers":
            names = [[f"{p} {grade}" for grade in own] for p, own in enumerate(right)]
        sides.append(table(right, names))
    return sides


def lost_wholly(rng: Rng, problems: int, draws: int, loss: float, case: str) -> list[pd.DataFrame]:
    size = 1 if case == "greedy" else 3
    lost = np.repeat(rng.random(problems // size) < loss, size)
    right = np.ones((problems, draws))
    texts = [[f"{p} {0 if case == 'greedy' else d}" for d in range(draws)] for p in range(problems)]
    return [table(one, texts, groups=case == "clusters") for one in (right, right * ~lost[:, None])]


CASES = {
    "even": (even, SIZES),
    "gaps": (even, SIZES),
    "versions": (even, [size for size in SIZES if size[1] > 1]),
    "answers": (even, [size for size in SIZES if size[1] > 1]),
    "greedy": (lost_wholly, ((30, 4), (198, 4))),
    "clusters": (lost_wholly, ((30, 1), (198, 1), (198, 4))),
    "no group": (lost_wholly, ((198, 1),)),
}


def label(sides: list[pd.DataFrame]) -> str:
    answers = dict(zip(("full", "cell"), sides, strict=True))
    return judged(answers, "full", None, margin=MARGIN)["cell"].label


def beyond(rng: Rng, problems: int, draws: int) -> bool:
    chance = rng.beta(0.6, 0.4, problems)[:, None]
    answers = {}
    for name in ("full", "again", "cell"):
        right = (rng.random((problems, draws)) < chance).astype(float)
        answers[name] = table(right, [[f"{name} {p} {d}" for d in range(draws)] for p in range(problems)])
    return judged(answers, "full", "again", margin=MARGIN)["cell"].beyond_control


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--only", choices=[*CASES, "control"])
    options = parser.parse_args()
    shares = {}
    for case, (make, sizes) in CASES.items():
        for problems, draws in sizes if options.only in (None, case) else ():
            name = f"{case}, {problems} x {draws}"
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            lossy, equal = (
                [label(make(rng, problems, draws, loss, case)) for _ in range(options.runs)] for loss in (MARGIN, 0)
            )
            safe = np.mean([one in ("safe", "small loss", "better") for one in lossy])
            worse = np.mean([one in ("worse", "small loss") for one in equal])
            shares[name] = {"wrong safe": round(float(safe), 4), "wrong worse": round(float(worse), 4)}
            print(f"{name}: wrong safe {safe:.1%}, wrong worse {worse:.1%}", flush=True)
    for problems, draws in SIZES if options.only in (None, "control") else ():
        rng = np.random.default_rng(draws)
        share = np.mean([beyond(rng, problems, draws) for _ in range(options.runs)])
        shares[f"control, {problems} x {draws}"] = {"beyond control": round(float(share), 4)}
        print(f"control, {problems} x {draws}: beyond control {share:.1%}", flush=True)
    print(json.dumps(shares))


if __name__ == "__main__":
    main()
