"""Five rules that say if a setting is worse, on the same answers: wrong passes, wrong failures, inconclusive.

    python scripts/study/valid_at_thirty.py --nemo-python NEMO/bin/python --output results/published/valid_at_thirty.csv

NEMO is a virtual environment with `nemo-evaluator[stats]`, whose rules of `nel gate` and `nel compare` are called there
(nemo_rules.py); without it their rows are left out. The margin is 5 points for all. A pass is wrong where 5 points or
more are lost, a failure where nothing is. Each case is drawn from a seed of its own. Real difficulties are those of
results/published/paper_grids/repeated.csv, real tables those of the cells.csv with one draw.

Prints results/published/valid_at_thirty.md's tables and what published claims can carry.
"""

import argparse
import functools
import itertools
import json
import subprocess
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special, stats

from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, decide, power

PUBLISHED = Path(__file__).resolve().parents[2] / "results/published"
SIZES = ((30, 1), (30, 8), (60, 8), (198, 4))
CONCENTRATION = 0.5  # of Beta difficulties: between the two that repeated.csv's answers have
RESAMPLES = 1000
ELSEWHERE, DRAWN = "5 of problems like these", "of these problems, as drawn"
# Runs that `nel compare` gets where it shuffles each table 10,000 times: up to 100 problems, and above.
SLOW = (500, 200)
PASS, FAIL, OPEN = "pass", "fail", "inconclusive"
OURS = {"safe": PASS, "small loss": PASS, "worse": FAIL, "unclear": OPEN}
THEIRS = {"GO": PASS, "NO-GO": FAIL, "PASS": PASS, "BLOCK": FAIL, "WARN": OPEN, "INCONCLUSIVE": OPEN}
TOYS = {60: ("methods", "methods_on_top", "methods_pinned", "hybrid"), 32: ("methods_smol", "bytes_smol")}


# Published totals: who, right answers with the full and the compressed cache, problems, draws. SGLang's are shares of
# 150 (AIME25) in its docs/advanced_features/quantized_kv_cache.md (03cd2ec); the last is results/published/servers.
TOTALS = (
    ("vLLM 46613", 71, 65, 90, 1),
    ("SGLang, Qwen3-235B-A22B, fp8", 116, 110, 30, 5),
    ("SGLang, Qwen3-235B-A22B, fp4", 116, 90, 30, 5),
    ("SGLang, DeepSeek-R1-0528, fp8", 76, 74, 30, 5),
    ("SGLang, DeepSeek-R1-0528, fp4", 76, 60, 30, 5),
    ("SGLang, GPT-OSS-120B, fp8", 113, 115, 30, 5),
    ("SGLang, GPT-OSS-120B, fp4", 113, 53, 30, 5),
    ("our own, SmolLM2-135M, q4_0", 100, 87, 120, 1),
)


@dataclass(frozen=True)
class Case:
    """Answers of many runs, [runs, problems, draws], right or not; per truth the points lost in each run."""

    name: str
    full: np.ndarray
    cell: np.ndarray
    lost: Mapping[str, np.ndarray]


Rule = Callable[[Case], np.ndarray]


# --- cases -----------------------------------------------------------------------------------------------------------


def cases(runs: int) -> Iterator[Case]:
    for problems, draws in SIZES:
        equal = np.ones((1, problems, draws), dtype=bool)
        yield Case("equal texts", equal, equal, {"0": np.zeros(1)})
    for accuracy, (problems, draws) in itertools.product((0.3, 0.6, 0.9), SIZES):
        yield drawn(f"new draws, accuracy {accuracy:g}", runs, problems, draws, accuracy, 0)
    for loss, (kind, accuracy), size in itertools.product(
        (5, 10), (("new draws, accuracy 0.6", 0.6), ("texts equal but for the loss", None)), SIZES
    ):
        yield drawn(kind, runs, *size, accuracy or 0.6, loss, same_luck=accuracy is None)
    for problems, draws in SIZES:
        yield lost_wholly(runs, problems, draws)
    yield one_lost_one_won()
    answers = pd.read_csv(PUBLISHED / "paper_grids/repeated.csv")
    answers = answers[answers["source"] == answers["source"].iloc[0]]
    chance = np.broadcast_to((answers["right"] / answers["answers"]).to_numpy(), (runs, len(answers)))
    for loss, draws in itertools.product((0, 5), (1, 4)):
        yield asked("78 problems of MATH as a model solved them", chance, draws, loss)
    for problems, studies in TOYS.items():
        yield toys(problems, studies)


def seeded(*names: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(names).encode()))


def drawn(
    name: str, runs: int, problems: int, draws: int, accuracy: float, loss: int, *, same_luck: bool = False
) -> Case:
    """New problems in each run, of Beta difficulties."""
    size = accuracy * CONCENTRATION, (1 - accuracy) * CONCENTRATION
    chance = seeded("difficulties", name, problems, draws, loss).beta(*size, (runs, problems))
    return asked(name, chance, draws, loss, same_luck=same_luck)


def asked(name: str, chance: np.ndarray, draws: int, loss: int, *, same_luck: bool = False) -> Case:
    """Answers of these chances, and of chances that are lower in proportion: by `loss` points in the mean."""
    rng = seeded(name, chance.shape, draws, loss)
    luck = rng.random((*chance.shape, draws))
    theirs = luck if same_luck else rng.random(luck.shape)
    less = chance * (1 - loss / 100 / chance.mean(1, keepdims=True))
    return Case(name, luck < chance[..., None], theirs < less[..., None], {f"{loss}": np.full(len(chance), loss)})


def lost_wholly(runs: int, problems: int, draws: int) -> Case:
    """The other texts are equal; each problem is one of the 5% that are always solved, and never by the cell."""
    lost = seeded("lost wholly", problems, draws).random((runs, problems)) < MARGIN
    full = np.ones((runs, problems, draws), dtype=bool)
    truths = {ELSEWHERE: np.full(runs, 5.0), DRAWN: 100 * lost.mean(1)}
    return Case("5% of all problems lost for certain", full, full & ~lost[..., None], truths)


def one_lost_one_won() -> Case:
    full = np.ones((1, 500, 1), dtype=bool)
    cell = full.copy()
    full[0, 0], cell[0, 1] = False, False
    return Case("one lost, one won", full, cell, {"0": np.zeros(1)})


def toys(problems: int, studies: tuple[str, ...]) -> Case:
    """With one draw a cell's answers lost and won are the whole table; problems that both solve stand for the rest."""
    cells = pd.concat([pd.read_csv(PUBLISHED / study / "cells.csv") for study in studies])
    cells = cells[cells["regressions"].notna()]
    if not ((cells["draws"] == 1) & (cells["diff_problems"] == problems)).all():
        raise SystemExit(f"{', '.join(studies)}: a cell has not one draw of {problems} problems.")
    lost, won = (cells[name].to_numpy(int)[:, None] for name in ("regressions", "gains"))
    place = np.arange(problems)
    full, cell = place >= won, (place < won) | (place >= won + lost)
    name = f"toy runs: {', '.join(studies)}"
    return Case(name, full[..., None], cell[..., None], {"unknown": np.full(len(cells), np.nan)})


# --- rules -----------------------------------------------------------------------------------------------------------


def ours(case: Case) -> np.ndarray:
    """As `kvsweep judge` labels; the label hangs on the answers won and lost alone."""
    won, lost = (side.sum((1, 2)) for side in (case.cell & ~case.full, case.full & ~case.cell))
    return np.array([_label(*pair, *case.full.shape[1:]) for pair in zip(won, lost, strict=True)])


@functools.cache
def _label(won: int, lost: int, problems: int, draws: int) -> str:
    cell, full = np.ones((2, problems * draws))  # a baseline with answers to lose
    full[:won], cell[won : won + lost] = 0, 0
    population = "these" if draws > 1 else "like_these"
    shape = (problems, draws)
    return OURS[decide(cell.reshape(shape), full.reshape(shape), population=population).label]


def ours_elsewhere(case: Case) -> np.ndarray:
    """The interval `problems like these` of `kvsweep judge`."""
    net = np.sort(case.cell.sum(2) - case.full.sum(2))
    return np.array([_label_elsewhere(tuple(run), case.full.shape[2]) for run in net.tolist()])


@functools.cache
def _label_elsewhere(net: tuple[int, ...], draws: int) -> str:
    won = np.array(net)[:, None]
    cell, full = (np.arange(draws) >= -won).astype(float), (np.arange(draws) >= won).astype(float)
    return OURS[decide(cell, full, population="like_these").label]


def clustered_t(case: Case) -> np.ndarray:
    means = leads(case)
    problems = means.shape[1]
    half = -special.stdtrit(problems - 1, LEVEL) * means.std(1, ddof=1) / np.sqrt(problems)
    return by_interval(means.mean(1) - half, means.mean(1) + half)


def bootstrap(case: Case) -> np.ndarray:
    """The percentile interval of resampled problems."""
    rng = seeded("bootstrap", case.name, case.full.shape)
    ends = []
    for means in leads(case):
        resampled = means[rng.integers(len(means), size=(RESAMPLES, len(means)))].mean(1)
        ends.append(np.quantile(resampled, [LEVEL, 1 - LEVEL]))
    return by_interval(*np.array(ends).T)


def leads(case: Case) -> np.ndarray:
    return (case.cell.astype(float) - case.full).mean(2)


def by_interval(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.where(low > -MARGIN + 1e-9, PASS, np.where(high < -1e-9, FAIL, OPEN))


def nemo(python: str, case: Case) -> Iterator[tuple[str, np.ndarray]]:
    """Their verdicts. Tables with the same counts, in any order of the problems, are asked once."""
    problems, draws = case.full.shape[1:]
    counts = np.sort(case.full.sum(2) * (draws + 1) + case.cell.sum(2))
    questions, places = [], []
    for rule in ("gate", "compare"):
        runs = SLOW[problems > 100] if rule == "compare" and draws > 1 else len(counts)
        tables, which = np.unique(counts[:runs], axis=0, return_inverse=True)
        asked = np.stack(np.divmod(tables, draws + 1), -1).tolist()
        questions.append({"rule": rule, "margin": MARGIN, "draws": draws, "tables": asked})
        places.append(which.ravel())
    command = [python, str(Path(__file__).with_name("nemo_rules.py"))]
    found = subprocess.run(command, input=json.dumps(questions), stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(found.stdout)
    for question, verdicts, which in zip(questions, answer["verdicts"], places, strict=True):
        yield f"nel {question['rule']} ({answer['version']})", np.array([THEIRS[name] for name in verdicts])[which]


def verdicts(case: Case, nemo_python: str | None) -> Iterator[tuple[str, np.ndarray]]:
    if nemo_python:
        yield from nemo(nemo_python, case)
    own: dict[str, Rule] = {"t interval": clustered_t, "bootstrap": bootstrap}
    own |= {"judge": ours, "judge, problems like these": ours_elsewhere}
    for name, rule_of in own.items():
        yield name, rule_of(case)


def rows(case: Case, nemo_python: str | None) -> Iterator[dict[str, object]]:
    for rule, found in verdicts(case, nemo_python):
        for truth, lost in case.lost.items():
            known, points = not np.isnan(lost).any(), lost[: len(found)]
            wrong = (found == PASS) & (points >= 100 * MARGIN - 1e-9), (found == FAIL) & (points == 0)
            yield {
                "rule": rule,
                "case": case.name,
                "n": case.full.shape[1],
                "draws": case.full.shape[2],
                "truth": truth,
                "simulations": len(found),
                **{f"{verdict}_percent": 100 * (found == verdict).mean() for verdict in (PASS, FAIL, OPEN)},
                "wrong_pass_percent": 100 * wrong[0].mean() if known else None,
                "wrong_fail_percent": 100 * wrong[1].mean() if known else None,
            }


# --- the page --------------------------------------------------------------------------------------------------------


def summary(table: pd.DataFrame) -> Iterator[str]:
    """Per rule: the largest shares of wrong verdicts; of settings that lose nothing, with new draws, what passes."""
    sizes = [f"{problems} x {draws}" for problems, draws in SIZES]
    yield f"| rule | wrong pass | of problems like these | wrong failure | {' | '.join(sizes)} | inconclusive |"
    yield "|---" * (len(sizes) + 5) + "|"
    new = table[table["case"].str.startswith("new draws") & (table["truth"] == "0")]
    for rule, own in table.groupby("rule", sort=False):
        elsewhere = own["truth"] == ELSEWHERE
        shares = [own[~elsewhere]["wrong_pass_percent"].max(), own[elsewhere]["wrong_pass_percent"].max()]
        shares.append(own["wrong_fail_percent"].max())
        mine = new[new["rule"] == rule]
        shares += [mine[(mine["n"] == n) & (mine["draws"] == draws)]["pass_percent"].mean() for n, draws in SIZES]
        shares.append(mine["inconclusive_percent"].mean())
        yield f"| {rule} | {' | '.join(f'{share:.1f}' for share in shares)} |"


def in_full(table: pd.DataFrame) -> Iterator[str]:
    """Of each rule the shares of passes, failures and inconclusive verdicts, where problems are few."""
    rules = list(table["rule"].unique())
    left_out = table["truth"].isin([DRAWN, "unknown"]) | table["case"].str.contains("accuracy 0.3|accuracy 0.9")
    table = table[~left_out & ~table["n"].isin([60, 198])]
    yield f"| case | n x draws | points lost | {' | '.join(rules)} |"
    yield "|---" * (len(rules) + 3) + "|"
    for (case, n, draws, truth), own in table.groupby(["case", "n", "draws", "truth"], sort=False):
        shares = own.set_index("rule")[[f"{verdict}_percent" for verdict in (PASS, FAIL, OPEN)]].loc[rules]
        cells = [" / ".join(f"{share:.0f}" for share in one) for one in shares.to_numpy()]
        yield f"| {case} | {n} x {draws} | {truth} | {' | '.join(cells)} |"


def claims() -> Iterator[str]:
    """What published numbers can carry."""
    for name, full, cell, problems, draws in TOTALS:
        lost = range(max(0, full - cell), min(full, problems * draws - cell) + 1)
        labels = [_label(one - full + cell, one, problems, draws) for one in lost]
        counts = ", ".join(f"{labels.count(verdict)} {verdict}" for verdict in (FAIL, OPEN, PASS))
        fits = f"{len(labels)} tables of pairs, {lost[0]} to {lost[-1]} lost"
        yield f"{name}: {full} and {cell} of {problems} x {draws}: {fits}: {counts}"
    equal = np.random.default_rng(0).choice(np.zeros(30), (RESAMPLES, 30)).mean(1)
    yield f"illate-parity 0.1.0, 30 equal answers: {np.quantile(equal, [0.025, 0.975])}, which passes"
    for right, of in ((124, 200), (58, 210)):
        ends = stats.binomtest(right, of).proportion_ci(method="exact")
        yield f"{right} of {of}: {100 * right / of:.1f}%, 95% interval {100 * ends.low:.1f} to {100 * ends.high:.1f}"
    for differ in (0.1, 0.25):
        yield f"200 pairs, {differ:.0%} differ: a cell that loses nothing is safe in {100 * power(200, 1, differ):.0f}%"
    grids = pd.read_csv(PUBLISHED / "paper_grids/grids.csv")
    for size, own in grids.groupby("concentration"):
        yield f"DynTS, concentration {size}: {(own['p_holm'] < 0.05).sum()} of {len(own)} grids differ from chance"
    yield f"DynTS: ranges {grids['range'].min():.1f} to {grids['range'].max():.1f} points"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulations", type=int, default=4000)
    parser.add_argument("--nemo-python", help="the Python of an environment with nemo-evaluator[stats]")
    parser.add_argument("--output", type=Path, required=True, help="the CSV")
    options = parser.parse_args()
    found = []
    for case in cases(options.simulations):
        found += rows(case, options.nemo_python)
        print(case.name, case.full.shape, flush=True)
    table = pd.DataFrame(found)
    table.round(3).to_csv(options.output, index=False)
    if not options.nemo_python:
        print("The rules of nel gate and nel compare are left out: --nemo-python names no environment.")
    print("", *summary(table), "", *in_full(table), "", *claims(), sep="\n")


if __name__ == "__main__":
    main()
