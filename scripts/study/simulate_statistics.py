"""Check the report's statistics on simulated sweeps: coverage of the intervals, false alarms, false holds and power.

`structure` says where a loss sits: spread evenly, in problems that are lost wholly, in few problems that are lost half
of the time, beside problems that flip coins, or in up to three groups of problems drawn at random. The script prints a
table and adds each row to a CSV (results/published/statistics.csv is one); the last line is one JSON object.
"""

import argparse
import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import special, stats

from kvsweep.analysis.statistics.inference import noise_floor, paired_tests, summary_noise_floor
from kvsweep.analysis.statistics.metrics import score_intervals
from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, hold_in_search, p_these, paired_test, power

RNG = np.random.default_rng(20260121)


def difficulties(mean: float, between: float, shape: tuple[int, ...]) -> np.ndarray:
    size = (1 - between) / between
    return RNG.beta(mean * size, (1 - mean) * size, shape)


def answers(chance: np.ndarray, draws: int) -> np.ndarray:
    """Draw answers, 1 right or 0 wrong, [..., draws], for chances [...]."""
    return (RNG.random((*chance.shape, draws)) < chance[..., None]).astype(float)


def rate(happened: np.ndarray) -> tuple[float, int]:
    return float(np.mean(happened)), len(happened)


def coverage(simulations: int, problems: int, draws: int, mean: float, between: float) -> dict[str, tuple[float, int]]:
    right = answers(difficulties(mean, between, (simulations, problems)), draws)
    cell, problem = np.meshgrid(np.arange(simulations), np.arange(problems), indexing="ij")
    rows = pd.DataFrame({"cell_id": cell.ravel().repeat(draws), "problem_id": problem.ravel().repeat(draws)})
    table = score_intervals(rows.assign(correct=right.ravel()))
    return {"coverage ci": rate(((table["ci_low"] <= mean) & (mean <= table["ci_high"])).to_numpy())}


def grids(simulations: int, cells: int, problems: int, draws: int, mean: float, between: float, planted: float) -> dict:
    """Simulate grids in which one cell is `planted` better than all others, on every problem alike (clipped at 1)."""
    significant, told_apart, best_named, paired = [], [], [], []
    for seed in range(simulations):
        chance = np.repeat(difficulties(mean, between, (1, problems)), cells, axis=0)
        chance[-1] = np.minimum(1, chance[-1] + planted)
        scores = answers(chance, draws)
        floor = noise_floor(scores, resamples=999, seed=seed)
        assert floor is not None
        means = scores.mean((1, 2))
        significant.append(floor.signal)
        told_apart.append(floor.range > floor.critical)
        best_named.append(means[-1] >= means.max() - floor.critical)
        paired.append(
            (paired_tests(scores[1:], scores[0])["p_holm"] < 0.05).to_numpy()[-1 if planted else slice(None)].any()
        )
    named = {"grid significant": significant, "any cell worse than the best": told_apart, "true best kept": best_named}
    named["planted cell found, paired, Holm" if planted else "any false alarm, paired, Holm"] = paired
    return {name: rate(np.array(values)) for name, values in named.items()}


def summary_grids(simulations: int, mean: float, between: float, assumed: float) -> dict[str, tuple[float, int]]:
    """Simulate grids of 20 identical cells, 30 problems and 5 draws, of which only the scores are known."""
    found = []
    for seed in range(simulations):
        chance = np.repeat(difficulties(mean, between, (1, 30)), 20, axis=0)
        means = answers(chance, 5).mean((1, 2))
        found.append(summary_noise_floor(means, 30, 5, between=assumed, resamples=499, seed=seed).signal)
    return {"grid significant": rate(np.array(found))}


# --- cells beside the full cache -------------------------------------------------------------------------------------


def structure(name: str, problems: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """The chances per problem that the cell alone is right, and that the full cache alone is; `loss` in the mean."""
    won, lost = np.zeros((2, problems))
    kind, *numbers = name.split()
    values = [float(number) for number in numbers]
    if kind == "lost_wholly":  # so many problems are lost for certain; symmetric flips; the rest spread evenly
        count, flips = min(int(values[0]), int(loss * problems)), values[1]
        lost[:count] = 1
        won[count:] += flips
        lost[count:] += flips + (loss * problems - count) / (problems - count)
    elif kind == "won_and_lost":  # so many problems are won for certain, and one more than the loss makes up for lost
        count = int(values[0])
        won[:count] = 1
        lost[count : 2 * count] = 1
        lost[2 * count :] = loss * problems / (problems - 2 * count)
    elif kind == "half_lost":  # the loss sits in few problems, each lost with this chance
        count = int(loss * problems / values[0])
        lost[:count] = values[0]
        lost[count:] = (loss * problems - count * values[0]) / (problems - count)
    elif kind == "groups":  # up to three groups of problems that are won or lost with some chance, from this seed
        return random_groups(np.random.default_rng(int(values[0])), problems, loss)
    elif kind == "coins":  # so many problems are coin flips
        won[: int(values[0])] = lost[: int(values[0])] = 0.5
        lost[int(values[0]) :] = loss * problems / (problems - int(values[0]))
    else:  # Beta difficulties of this mean, as alike on the normal scale as given, half of the luck shared
        mean, alike = values
        ours = RNG.standard_normal(problems)
        theirs = alike * ours + np.sqrt(1 - alike**2) * RNG.standard_normal(problems)
        full = special.betaincinv(mean, 1 - mean, special.ndtr(ours))
        cell = special.betaincinv(mean - loss, 1 - mean + loss, special.ndtr(theirs))
        now, target = cell.mean(), full.mean() - loss
        cell = cell * target / now if now > target else 1 - (1 - cell) * (1 - target) / (1 - now)
        won = (np.maximum(cell - full, 0) + cell * (1 - full)) / 2
        lost = (np.maximum(full - cell, 0) + full * (1 - cell)) / 2
    return won, lost


def random_groups(rng: np.random.Generator, problems: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """As `structure`: one to three groups of problems, and a rest that brings the mean to `loss`."""
    while True:
        won, lost = np.zeros((2, problems))
        begin = 0
        for _ in range(rng.integers(1, 4)):
            end = min(problems - 1, begin + int(rng.choice([1, 2, 3, 4, 6, 10, problems // 4, problems // 2])))
            flip = rng.choice([0.02, 0.1, 0.25, 0.5])
            some = [(rng.random() / 2, 0), (0, rng.random())]
            kinds = [*some, (1, 0), (0, 1), (flip, flip), rng.dirichlet([1, 1, 1])[:2]]
            won[begin:end], lost[begin:end] = kinds[rng.integers(len(kinds))]
            begin = end
        each = (loss * problems - (lost - won).sum()) / (problems - begin)
        flips = rng.choice([0, 0, 0.02, 0.1])
        won[begin:], lost[begin:] = flips + max(-each, 0), flips + max(each, 0)
        if abs(each) < 0.3:
            return won, lost


def outcomes(chances: tuple[np.ndarray, np.ndarray], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Answers of a cell and of the full cache, [problems, draws] each."""
    luck = RNG.random((len(chances[0]), draws))
    won, lost = luck < chances[0][:, None], luck > 1 - chances[1][:, None]
    return (~lost).astype(float), (~won).astype(float)


def unequal(cell: np.ndarray) -> np.ndarray:
    """The same answers without the later half of the draws of every third problem."""
    cell = cell.copy()
    cell[::3, (cell.shape[1] + 1) // 2 :] = np.nan
    return cell


def looks_of(draws: int) -> tuple[int, ...]:
    return {8: (2, 4, 8), 5: (2, 4, 5)}.get(draws, ())


def tables(simulations: int, name: str, problems: int, draws: int, loss: float) -> tuple[np.ndarray, np.ndarray]:
    """Where the cell alone, and where the full cache alone, is right, [simulations, problems, draws] each."""
    blocks = simulations // 20 if name.startswith("beta") else 1
    won, lost = [], []
    for _ in range(blocks):
        chances = structure(name, problems, loss)
        luck = RNG.random((simulations // blocks, problems, draws))
        won.append(luck < chances[0][:, None])
        lost.append(luck > 1 - chances[1][:, None])
    return np.concatenate(won), np.concatenate(lost)


def p_above(won: np.ndarray, lost: np.ndarray, value: float) -> np.ndarray:
    """`paired_test(...).p_above(value)` of many tables [simulations, problems, draws] at once."""
    return p_these(won.sum((1, 2), dtype=float), lost.sum((1, 2), dtype=float), -value * won[0].size)


def one_cell(
    simulations: int, name: str, problems: int, draws: int, loss: float, margin: float = MARGIN
) -> dict[str, tuple[float, int]]:
    """How often a cell that loses `loss` holds, at one look and in rounds, and the intervals cover the loss."""
    if name.endswith("unequal"):
        return unequal_cell(simulations // 5, name.removesuffix(" unequal"), problems, draws, loss)
    won, lost = tables(simulations, name, problems, draws, loss)
    looks = looks_of(draws)
    found: dict[str, np.ndarray] = {}
    for named, parts in (("", (draws,)), (", in rounds", looks)):
        if not parts:
            continue
        level = LEVEL / len(parts)
        seen = [(won[..., :n], lost[..., :n]) for n in parts]
        held = [p_above(*one, -margin) <= level for one in seen]
        found[f"{'holds' if loss == 0 else 'wrong holds'}{named}"] = np.any(held, 0)
        inside = [(p_above(*one, -loss) > level) & (p_above(*one[::-1], loss) > level) for one in seen]
        found[f"interval covers{', all rounds' if named else ''}"] = np.all(inside, 0)
    return {quantity: rate(values) for quantity, values in found.items()}


def unequal_cell(simulations: int, name: str, problems: int, draws: int, loss: float) -> dict[str, tuple[float, int]]:
    """`one_cell` for answers of which some are missing."""
    found: dict[str, list[bool]] = {}
    for _ in range(simulations):
        cell, full = outcomes(structure(name, problems, loss), draws)
        test = paired_test(unequal(cell), full)
        add(found, "wrong holds", test.p_above(-MARGIN) <= LEVEL)
        add(found, "interval covers", min(test.p_above(-loss), test.opposite.p_above(loss)) > LEVEL)
    return {quantity: rate(np.array(values)) for quantity, values in found.items()}


def add(found: dict[str, list[bool]], quantity: str, happened: bool) -> None:
    found.setdefault(quantity, []).append(happened)


def elsewhere(simulations: int, problems: int, draws: int, flips: float) -> dict[str, tuple[float, int]]:
    """Problems of which 5% fail wholly and the others flip symmetrically: what is said about problems like these."""
    found: dict[str, list[bool]] = {}
    for _ in range(simulations):
        fails = RNG.random(problems) < MARGIN
        chances = np.where(fails, 0.0, flips), np.where(fails, 1.0, flips)
        test = paired_test(*outcomes(chances, draws), "like_these")
        add(found, "wrong holds, problems like these", test.p_above(-MARGIN) <= LEVEL)
        covers = min(test.p_above(-MARGIN), test.opposite.p_above(MARGIN)) > LEVEL
        add(found, "interval covers, problems like these", covers)
    return {quantity: rate(np.array(values)) for quantity, values in found.items()}


def grid_of_20(
    simulations: int, problems: int, draws: int, losses: tuple[float, float]
) -> dict[str, tuple[float, int]]:
    """Grids of 20 cells that share the full cache and half of their luck; the ten largest and the ten smallest lose so.

    Difficulties are Beta of mean 0.6.
    """
    found: dict[str, list[bool]] = {}
    bad = [size for size in range(20) if losses[size >= 10] >= MARGIN]
    for _ in range(simulations):
        full = RNG.beta(0.6, 0.4, problems)
        common = RNG.random((problems, draws))
        right = (common < full[:, None]).astype(float)
        tests = []
        for size in range(20):
            chance = full * (1 - losses[size >= 10] / full.mean())
            luck = np.where(RNG.random(common.shape) < 0.5, common, RNG.random(common.shape))
            tests.append(
                [paired_test((luck < chance[:, None])[:, :n] * 1.0, right[:, :n]) for n in looks_of(draws) or [draws]]
            )
        rounds = len(tests[0])
        p = {size: min(1.0, rounds * min(test.p_above(-MARGIN) for test in own)) for size, own in enumerate(tests)}
        chosen = max(hold_in_search(p, [range(20)]), default=-1)
        named = f"20 cells{', in rounds' * (rounds > 1)}"
        if bad:
            found.setdefault(f"wrong holds, a cell of {named}", []).extend(p[size] <= LEVEL for size in bad)
            add(found, f"any wrong holds of {named}", any(p[size] <= LEVEL for size in bad))
            add(found, f"wrong recommendation of {named}", chosen in bad)
        add(found, f"a recommendation of {named}", chosen >= 0)
        if max(losses) == 0:
            loses = min(rounds * test.opposite.p_above(0.0) for own in tests for test in own)
            add(found, f"any cell loses of {named}", 20 * loses <= LEVEL)
    # The cells of a grid share a full cache, so the grids are counted and not the cells.
    return {name: (float(np.mean(values)), simulations) for name, values in found.items()}


def as_planned(simulations: int, problems: int, draws: int, differ: float) -> dict[str, tuple[float, int]]:
    """Cells that lose nothing, with flips on all problems alike: how often they hold, beside `power`."""
    chances = np.full(problems, differ / 2), np.full(problems, differ / 2)
    held = [paired_test(*outcomes(chances, draws)).p_above(-MARGIN) <= LEVEL for _ in range(simulations)]
    return {"holds": rate(np.array(held)), "holds as power() says": (power(problems, draws, differ), simulations)}


def margin_jobs(count: int) -> Iterator[tuple[str, Callable[[], dict[str, tuple[float, int]]]]]:
    at_margin = ["beta 0.6 0.9", "beta 0.98 0.9", "beta 0.6 0.9 unequal", "lost_wholly 1 0 unequal"]
    at_margin += ["lost_wholly 1 0", "lost_wholly 2 0", "lost_wholly 4 0", "lost_wholly 1 0.02", "lost_wholly 0 0.1"]
    at_margin += ["won_and_lost 3", "half_lost 0.5", "half_lost 0.9", "coins 3"]
    lossless = ["beta 0.45 0.9", "beta 0.6 1.0", "beta 0.6 0.6", "beta 0.87 0.9", "beta 0.98 0.9", "lost_wholly 0 0"]
    for loss, names in ((MARGIN, at_margin), (0.0, lossless)):
        for name, problems, draws in itertools.product(names, (30, 60, 100), (1, 2, 5, 8)):
            title = f"loses {100 * loss:g} points: {name}, {problems} problems, {draws} draws"
            yield title, functools.partial(one_cell, count, name, problems, draws, loss)
    # Twenty structures at random, each at its own size; margins of 1 and 2 points, where few lost answers decide.
    for seed, margin in itertools.product(range(20), (MARGIN, 0.02, 0.01)):
        rng = np.random.default_rng([seed, round(100 * margin)])
        problems, draws = int(rng.choice([30, 60, 100])), int(rng.choice([2, 3, 5, 8]))
        name = f"groups {seed}"
        title = f"loses {100 * margin:g} points: {name}, {problems} problems, {draws} draws"
        yield title, functools.partial(one_cell, count, name, problems, draws, margin, margin)
    for name, margin, problems, draws in itertools.product(
        ("coins 3", "lost_wholly 0 0.1"), (0.02, 0.01), (60, 100), (2, 8)
    ):
        title = f"loses {100 * margin:g} points: {name}, {problems} problems, {draws} draws"
        yield title, functools.partial(one_cell, count, name, problems, draws, margin, margin)
    for problems, draws, flips in itertools.product((30, 60, 100), (1, 8), (0.002, 0.1)):
        title = f"5% of problems fail wholly, flips {flips}: {problems} problems, {draws} draws"
        yield title, functools.partial(elsewhere, count // 2, problems, draws, flips)
    for problems, draws, losses in itertools.product((30, 60, 100), (2, 8), ((MARGIN,) * 2, (0.0, MARGIN), (0.0, 0.0))):
        title = f"grid loses {100 * losses[0]:g} and {100 * losses[1]:g} points: {problems} problems, {draws} draws"
        yield title, functools.partial(grid_of_20, count // 4, problems, draws, losses)
    for problems, draws, differ in itertools.product((30, 100, 198), (1, 5, 8), (0.1, 0.25)):
        title = f"plan: {problems} problems, {draws} draws, {100 * differ:g}% of pairs differ"
        yield title, functools.partial(as_planned, count // 2, problems, draws, differ)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=1000)
    parser.add_argument("--only", default="", help="run only the settings whose name contains this text")
    parser.add_argument("--output", type=Path, help="the CSV; rows are added if it exists")
    options = parser.parse_args()
    count = options.simulations
    jobs: list[tuple[str, Callable[[], dict[str, tuple[float, int]]]]] = []
    for problems, draws, mean, between in (
        *((30, draws, mean, 0.5) for draws in (1, 5, 64) for mean in (0.45, 0.87)),
        *((10, draws, 0.45, 0.5) for draws in (1, 5)),
        *((100, 1, mean, 0.5) for mean in (0.45, 0.87)),
        (198, 5, 0.47, 0.5),
    ):
        name = f"interval: {problems} problems, {draws} draws, mean {mean}"
        jobs.append((name, lambda a=(problems, draws, mean, between): coverage(2 * count, *a)))  # type: ignore[misc]
    for draws, planted in ((5, 0.0), (1, 0.0), (64, 0.0), (5, 0.08), (64, 0.08)):
        name = f"grid: 20 cells, 30 problems, {draws} draws, planted {100 * planted:g} points"
        jobs.append((name, lambda a=(draws, planted): grids(count, 20, 30, a[0], 0.45, 0.5, a[1])))  # type: ignore[misc]
    for between, assumed in ((0.5, 0.5), (0.5, 0.35), (0.5, 0.65)):
        name = f"summary grid: between {between}, assumed {assumed}"
        jobs.append((name, lambda a=(between, assumed): summary_grids(count, 0.45, *a)))  # type: ignore[misc]
    jobs += margin_jobs(count)
    rows = []
    for name, job in ((name, job) for name, job in jobs if options.only in name):
        new = []
        for quantity, (value, n) in job().items():
            low, high = stats.binomtest(round(value * n), n).proportion_ci(method="wilson")
            row = {"setting": name, "quantity": quantity, "rate": value}
            new.append(row | {"low": low, "high": high, "simulations": n})
            print(f"{name:64} {quantity:35} {100 * value:6.1f}%  [{100 * low:.1f}, {100 * high:.1f}]", flush=True)
        rows += new
        if options.output:
            is_new = not options.output.exists()
            pd.DataFrame(new).round(4).to_csv(options.output, index=False, mode="a", header=is_new)
    print(json.dumps({f"{row['setting']}: {row['quantity']}": round(row["rate"], 4) for row in rows}))


if __name__ == "__main__":
    main()
