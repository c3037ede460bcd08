"""Non-inferiority: Tango's interval against a numerical likelihood, Holm against statsmodels, errors by simulation."""

import numpy as np
import pytest
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.numbers.decisions import (
    Population,
    decide,
    decide_grid,
    decide_rounds,
    draws_to_hold,
    level_of_round,
    problems_to_hold,
)


def paired(won: int, lost: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One draw of `size` problems, of which the cell alone solves `won` and the full cache alone `lost`."""
    cell, full = np.zeros((2, size, 1))
    cell[:won] = full[won : won + lost] = 1
    return cell, full


def score_by_hand(won: float, lost: float, size: float, difference: float) -> float:
    """Tango's statistic with the likelihood of the four-celled table maximised numerically under the difference."""

    def minus_log_likelihood(share_lost: float) -> float:
        shares = np.array([share_lost + difference, share_lost, 1 - 2 * share_lost - difference])
        return float(-np.sum(np.array([won, lost, size - won - lost]) * np.log(np.maximum(shares, 1e-300))))

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    share = optimize.minimize_scalar(minus_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = 2 * share + difference - difference**2
    return float((won - lost - size * difference) / np.sqrt(size * variance))


def interval_by_hand(won: float, lost: float, size: float, quantile: float) -> list[float]:
    def beyond(difference: float) -> float:
        return abs(score_by_hand(won, lost, size, difference)) - quantile

    estimate = (won - lost) / size
    return [optimize.brentq(beyond, -0.999, estimate), optimize.brentq(beyond, estimate, 0.999)]


def test_the_interval_by_hand_is_the_published_one() -> None:
    # Airway hyper-responsiveness (Bentur et al. 2009) as in Fagerland, Lydersen and Laake 2014, table IV.
    assert interval_by_hand(1, 7, 21, stats.norm.ppf(0.975)) == pytest.approx([-0.517, -0.026], abs=5e-4)


@pytest.mark.parametrize(("won", "lost", "size"), [(1, 7, 21), (6, 16, 161), (3, 3, 30), (0, 4, 60), (5, 0, 100)])
def test_with_one_draw_the_interval_is_tangos_with_students_quantile(won: int, lost: int, size: int) -> None:
    by_hand = interval_by_hand(won, lost, size, stats.t.ppf(0.975, size - 1))
    for population in ("these", "like_these"):
        found = decide(*paired(won, lost, size), population=population)
        assert [found.low, found.high] == pytest.approx(by_hand, abs=1e-6)
        assert found.difference == pytest.approx((won - lost) / size)


def test_with_several_draws_the_size_is_that_of_the_designs_variance() -> None:
    full, cell = np.ones((2, 12, 6))
    cell[:3] = [[1, 0, 0, 0, 1, 0], [0, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]]
    differences = cell - full
    won, lost = ((differences == sign).mean() for sign in (1, -1))
    variance = differences.var()
    within, between = differences.var(1, ddof=1), differences.mean(1).var(ddof=1)
    freedom = min(11, 5 * within.sum() ** 2 / (within**2).sum())
    assert freedom < 11
    sizes = {"these": 72 * variance / within.mean(), "like_these": 12 * variance / between}
    quantiles = {"these": stats.t.ppf(0.975, freedom), "like_these": stats.t.ppf(0.975, 11)}
    for population in ("these", "like_these"):
        found = decide(cell, full, population=population)
        size = sizes[population]
        by_hand = interval_by_hand(won * size, lost * size, size, quantiles[population])
        assert [found.low, found.high] == pytest.approx(by_hand, abs=1e-6)


def test_who_loses_is_holms_procedure() -> None:
    counts = [(0, 9), (2, 13), (1, 9), (4, 14), (3, 9), (5, 5), (9, 2)]
    full = paired(0, 0, 80)[1]
    full[:40] = 1
    cells = {}
    for name, (won, lost) in enumerate(counts):
        cells[name] = full.copy()
        cells[name][:lost] = 0
        cells[name][40 : 40 + won] = 1
    p = [stats.t.cdf((won - lost) / np.sqrt(won + lost), 79) for won, lost in counts]
    rejected = multipletests(p, alpha=0.025, method="holm")[0]
    assert 0 < rejected.sum() < len(counts)
    assert (np.array(p) < 0.025).sum() > rejected.sum()
    found = decide_grid(cells, full)
    assert [found[name].label == "loses" for name in cells] == rejected.tolist()


@pytest.mark.parametrize("population", ["these", "like_these"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 2), (30, 1), (60, 8)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_answers_that_never_differ_have_an_interval(
    value: float, shape: tuple[int, int], population: Population
) -> None:
    same = np.full(shape, value)
    found = decide(same, same, population=population)
    assert -1 <= found.low < 0 < found.high <= 1
    # The rule of three: n pairs that do not differ leave room for a share of 3 / n that does.
    assert found.low < -3 / (same.size + 3)
    assert (found.label == "holds") == (shape == (60, 8) and population == "these")
    assert decide(same, 1 - same, population=population).difference == 2 * value - 1


def test_no_pair_is_no_decision() -> None:
    found = decide(np.full((4, 2), np.nan), np.ones((4, 2)))
    assert found.label == "open"
    assert np.isnan([found.difference, found.low, found.high]).all()


def answers(rng: np.random.Generator, problems: int, draws: int, cells: int, loss: float) -> np.ndarray:
    """The full cache and `cells` cells that lose `loss` on average over the problems, [1 + cells, problems, draws]."""
    chance = rng.beta(0.6, 0.4, (1, problems)) * np.ones((1 + cells, 1))
    chance[1:] *= 1 - loss / chance[0].mean()
    luck = rng.random((problems, draws))
    own = rng.random((1 + cells, problems, draws))
    shared = rng.random((1 + cells, problems, draws)) < 0.5  # eviction has not acted yet
    return (np.where(shared, luck, own) < chance[..., None]).astype(float)


def test_a_cell_at_the_margin_seldom_holds_and_the_intervals_cover() -> None:
    rng = np.random.default_rng(1)
    holds, holds_early, covered = [], [], []
    for _ in range(150):
        full, *cells = answers(rng, 60, 8, 4, 0.05)
        grid = dict(enumerate(cells))
        found = decide_grid(grid, full).values()
        holds += [one.label == "holds" for one in found]
        covered += [one.low <= -0.05 <= one.high for one in found]
        holds_early += [one.label == "holds" for one in decide_rounds(grid, full, rounds=(2, 4, 8)).values()]
    assert np.mean(holds) <= 0.04  # 2.5% and two standard errors
    assert np.mean(holds_early) <= 0.04
    assert 0.93 <= np.mean(covered) <= 0.98
    assert sum(holds)


def test_as_many_draws_or_problems_as_planned_show_that_equal_cells_hold() -> None:
    rng = np.random.default_rng(2)
    planned, by_draws, by_problems = [], [], []
    for _ in range(200):
        full, cell = answers(rng, 60, 4, 1, 0.0)
        draws, problems = draws_to_hold(cell, full), problems_to_hold(cell, full)
        planned.append((draws, problems))
        full, cell = answers(rng, 60, draws, 1, 0.0)
        by_draws.append(decide(cell, full).label)
        full, cell = answers(rng, problems, 4, 1, 0.0)
        by_problems.append(decide(cell, full, population="like_these").label)
    assert by_draws.count("holds") >= 0.9 * 200
    assert by_problems.count("holds") >= 0.9 * 200
    # Half as many would not do, so the plan is no waste.
    draws = int(np.median(planned, axis=0)[0]) // 2
    labels = [decide(*answers(rng, 60, draws, 1, 0.0)[::-1]).label for _ in range(200)]
    assert labels.count("holds") < 0.9 * 200


def test_rounds_depend_on_the_rows_of_the_rounds_alone() -> None:
    rng = np.random.default_rng(3)
    full, *cells = answers(rng, 100, 8, 8, 0.04)
    cells[0][:] = 0
    cells[1] = full.copy()
    grid = dict(enumerate(cells))
    whole = decide_rounds(grid, full, rounds=(2, 4, 8))
    assert whole[0].label == "loses"
    assert whole[0].draws == 2
    assert whole[1].label == "holds"
    # A cell that stopped has no later draws, and rows of another order give the same.
    stopped = {name: cell[:, : whole[name].draws] for name, cell in reversed(grid.items())}
    assert decide_rounds(stopped, full, rounds=(2, 4, 8)) == whole
    first = decide_rounds({name: cell[:, :4] for name, cell in grid.items()}, full[:, :4], rounds=(2, 4, 8))
    assert all(whole[name] == one for name, one in first.items() if one.label != "open")
    assert all(whole[name].draws == 8 for name, one in first.items() if one.label == "open")
    # One round is no sequential run.
    assert decide_rounds(grid, full, rounds=(8,)) == decide_grid(grid, full)
    # A cell that lacks one answer of the first round is decided by no round.
    cells[1][5, 1] = np.nan
    assert decide_rounds(grid, full, rounds=(2, 4, 8))[1].label == "open"


def test_a_cell_that_lost_no_longer_counts_for_the_others_and_one_that_holds_does() -> None:
    full = np.repeat([[1.0, 1.0], [0.0, 0.0]], 50, axis=0)

    def losing(lost: int) -> np.ndarray:
        cell = full.copy()
        for draw in (0, 1):
            cell[10 * draw : 10 * draw + 14 + lost * draw, draw] = 0
            cell[60 + 10 * draw : 68 + 10 * draw, draw] = 1
        return cell

    # A loss that is shown to be one beside one cell that lost, and not beside one that may still lose.
    level = level_of_round(2)
    unclear = next(cell for cell in map(losing, range(40)) if decide(cell, full, level=level).label == "loses")
    labels = []
    for other in (0 * full, full):
        found = decide_rounds({0: unclear, 1: other}, full, rounds=(1, 2), margin=0.06)
        assert found[1].draws == 1
        labels.append((found[1].label, found[0].label))
    assert labels == [("loses", "loses"), ("holds", "open")]


def test_the_levels_of_all_rounds_add_up() -> None:
    assert level_of_round(4) * 4 == pytest.approx(0.025)
    assert level_of_round(1, 0.05) == 0.05
