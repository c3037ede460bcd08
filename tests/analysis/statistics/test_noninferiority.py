"""The test of non-inferiority: Clopper and Pearson, exact Poisson tails, Holm by statsmodels, monotony, errors."""

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.statistics.noninferiority import (
    PairedTest,
    Population,
    decide,
    decide_grid,
    decide_rounds,
    hold_in_search,
    paired_test,
    power,
)

POPULATIONS: tuple[Population, ...] = ("these", "like_these")


def paired(won: int, lost: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """One draw of `size` problems: the cell alone solves `won`, the full cache alone `lost`, and both the rest."""
    cell, full = np.ones((2, size, 1))
    full[:won] = cell[won : won + lost] = 0
    return cell, full


@pytest.mark.parametrize(("lost", "size"), [(0, 30), (1, 30), (3, 60), (0, 100), (2, 198)])
def test_about_problems_like_these_without_gains_the_interval_is_clopper_and_pearsons(lost, size):
    found = decide(*paired(0, lost, size), population="like_these")
    assert found.low == pytest.approx(-stats.beta.ppf(0.975, lost + 1, size - lost), abs=1e-5)
    assert found.p_holds == pytest.approx(stats.beta.sf(0.05, lost + 1, size - lost), abs=1e-5)
    if lost == 0:
        assert found.high == pytest.approx(-found.low)


SOME, OTHERS = (np.random.default_rng(0).random((2, 40, 4)) < 0.5).astype(float)
FEW_OF_MANY = np.repeat([[1.0], [0.0]], [29, 1290], 0)


@pytest.mark.parametrize("pairs", [SOME - OTHERS, FEW_OF_MANY])
def test_about_problems_like_these_the_p_is_that_of_dirichlet_weights(pairs):
    means, counts = np.unique(pairs.mean(1), return_counts=True)
    drawn = np.random.default_rng(0).dirichlet([*counts, 1], 100_000) @ [*means, -1]
    test = PairedTest(pairs, "like_these")
    for p in (0.005, 0.025, 0.3, 0.9):
        assert test.p_above(np.quantile(drawn, p)) == pytest.approx(p, rel=0.1)
    assert test.lower_end(0.025) == pytest.approx(np.quantile(drawn, 0.025), rel=0.02)


@pytest.mark.parametrize("size", [1, 5, 200, 1319, 25_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_about_problems_like_these_the_p_is_exact_however_many_they_are(size):
    for lost in {0, 1, 2, size // 20, size // 2} & set(range(size)):
        losses = PairedTest(np.repeat([[-1.0], [0.0]], [lost, size - lost], 0), "like_these")
        gains = PairedTest(-losses.pairs, "like_these")
        for p in (0.99, 0.6, 0.3, 0.025, 1e-3, 1e-6):
            share = stats.beta.isf(p, lost + 1, size - lost)
            assert losses.p_above(-share) == pytest.approx(p, rel=1e-8)
            assert gains.opposite.p_above(-share) == pytest.approx(p, rel=1e-8)
            if p < 0.5:
                assert losses.lower_end(p) == pytest.approx(-share, abs=1e-8)


@pytest.mark.parametrize("lost", range(6))
def test_scattered_losses_alone_are_held_against_the_poisson_distribution(lost):
    full = np.ones((400, 5))
    cell = full.copy()
    cell[:lost, 0] = 0
    exact = stats.gamma.ppf(0.975, lost + 1) / 2000
    assert -decide(cell, full).low == pytest.approx(exact, rel=1e-6)


def test_losses_in_few_problems_are_no_proof_that_little_is_lost():
    # One problem lost wholly, and one more answer: the second table is worse and may not look better.
    full = np.ones((30, 8))
    wholly = full.copy()
    wholly[0] = 0
    more = wholly.copy()
    more[1, 0] = 0
    for population in POPULATIONS:
        first, second = (decide(cell, full, population=population) for cell in (wholly, more))
        assert second.low < first.low < -0.05
        assert second.high <= first.high
    assert decide(wholly, full).label == decide(more, full).label == "worse"


def test_one_lucky_problem_is_no_proof_of_a_loss():
    # A problem whose two draws are coin flips is lost in both with the chance 1/4.
    full = np.ones((100, 2))
    cell = full.copy()
    cell[0] = 0
    found = decide(cell, full)
    assert found.label == "safe"
    assert found.p_loses > 0.125


RANK = {"worse": 0, "unclear": 1, "small loss": 2, "safe": 3}


@st.composite
def worsened(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Two cells, the full cache, and the first cell with one more wrong answer; answers may be missing."""
    problems, draws = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    answers = st.lists(st.sampled_from([1.0, 1.0, 0.0, np.nan]), min_size=problems * draws, max_size=problems * draws)
    cell, other, full = (np.array(draw(answers)).reshape(problems, draws) for _ in range(3))
    place = draw(st.integers(0, problems * draws - 1))
    cell.flat[place], worse = 1.0, cell.copy()
    worse.flat[place] = 0.0
    return cell, worse, other, full


@pytest.mark.parametrize("examples", [50, pytest.param(150, marks=pytest.mark.slow)])
def test_one_more_wrong_answer_never_looks_better(examples):
    drawn = given(worsened(), st.sampled_from([1, 4, 32]), st.sampled_from(POPULATIONS))
    settings(max_examples=examples)(drawn(never_better))()


def never_better(tables: tuple[np.ndarray, ...], looks: int, population: Population):
    cell, worse, other, full = tables
    if np.isnan(cell - full).all() or np.isnan(other - full).all():
        return
    found = [decide_grid({0: first, 1: other}, full, looks=looks, population=population) for first in (cell, worse)]
    before, after = (one[0] for one in found)
    assert RANK[after.label] <= RANK[before.label]
    assert after.low <= before.low + 1e-7
    assert after.high <= before.high + 1e-7
    assert after.p_holds >= before.p_holds - 1e-6
    assert hold_in_search({k: v.p_holds for k, v in found[1].items()}, [[0, 1]]) <= hold_in_search(
        {k: v.p_holds for k, v in found[0].items()}, [[0, 1]]
    )


@pytest.mark.parametrize("shape", [(200, 1), (30, 8), (100, 8)])
def test_the_first_win_never_looks_worse_than_no_difference(shape):
    # The first win is the first sign of a variance, which makes few losses less surprising.
    right = np.ones(shape)
    full = right.copy()
    full[0, 0] = 0
    none, won = decide(right, right), decide(right, full)
    assert won.p_holds <= none.p_holds + 1e-9
    assert won.low >= none.low


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 2), (30, 1), (60, 8)])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_answers_that_never_differ_have_an_interval(value, shape, population):
    same = np.full(shape, value)
    found = decide(same, same, population=population)
    assert -1 <= found.low < 0 < found.high <= 1
    # The rule of three: n pairs that do not differ leave room for a share of 3 / n that does.
    assert found.low < -3 / (same.size + 3)
    assert (found.label == "safe") == (shape == (60, 8) and population == "these" and value == 1)
    assert decide(same, 1 - same, population=population).difference == 2 * value - 1


@pytest.mark.parametrize("population", POPULATIONS)
def test_nothing_is_safe_beside_a_full_cache_that_has_less_than_the_margin_to_lose(population):
    full = np.zeros((200, 8))
    full[:10] = 1  # 5% of the answers, all of which the cell loses
    for margin in (0.05, 0.06, 0.049, 0.2):
        assert decide(np.zeros_like(full), full, margin=margin, population=population).label == "worse"
    for margin, label in ((0.04, "safe"), (0.05, "unclear"), (0.06, "unclear"), (0.5, "unclear")):
        found = decide(full, full, margin=margin, population=population)
        assert (found.label, found.p_holds <= 0.025) == (label, label == "safe")
    lost = full.copy()
    lost[0, 0] = 0
    found = decide_grid({0: full, 1: lost}, full, margin=0.3, population=population)
    assert not hold_in_search({name: one.p_holds for name, one in found.items()}, [[0, 1]])
    if population == "these":
        rounds = decide_rounds({0: full}, full, rounds=(2, 8), margin=0.3)
        assert (rounds[0].label, rounds[0].settled, rounds[0].draws) == ("unclear", False, 8)


def test_no_pair_is_no_decision():
    for population in POPULATIONS:
        found = decide(np.full((4, 2), np.nan), np.ones((4, 2)), population=population)
        assert found.label == "unclear"
        assert np.isnan([found.difference, found.low, found.high, found.p_holds, found.p_loses]).all()


def test_labels_intervals_and_p_of_a_grid_are_one_test_with_holms_correction():
    counts = [(0, 9), (2, 13), (1, 9), (4, 14), (3, 9), (5, 5), (9, 2)]
    full = paired(0, 0, 80)[1]
    full[:40] = 1
    cells = {}
    for name, (won, lost) in enumerate(counts):
        cells[name] = full.copy()
        cells[name][:lost] = 0
        cells[name][40 : 40 + won] = 1
    alone = [decide(cell, full).p_loses for cell in cells.values()]
    rejected, adjusted = multipletests(alone, alpha=0.025, method="holm")[:2]
    assert 0 < rejected.sum() < (np.array(alone) < 0.025).sum()
    found = decide_grid(cells, full, margin=0.3)
    assert [found[name].p_loses for name in cells] == pytest.approx(adjusted)
    assert [found[name].high < 0 for name in cells] == rejected.tolist()
    assert [found[name].label == "small loss" for name in cells] == rejected.tolist()
    assert [found[name].label for name in cells if rejected[name]] == ["small loss"] * rejected.sum()
    # The p of no loss is that of wins and losses at equal Poisson rates.
    assert alone[0] == pytest.approx(stats.skellam.sf(8, 4.5, 4.5), rel=1e-6)


@pytest.mark.parametrize(("won", "lost"), [(3, 5), (0, 4), (9, 2), (7, 7), (1, 0), (20, 31)])
@pytest.mark.parametrize("margin", [0.01, 0.05, 0.2])
def test_the_p_is_skellams_tail_at_the_likeliest_rates(won, lost, margin):
    """The rates are found by maximizing the Poisson likelihood of wins and losses, and not by Tango's equation."""
    losses = margin * 200
    cell, full = paired(won, lost, 200)

    def unlikely(rate):
        return float(-stats.poisson.logpmf(won, rate) - stats.poisson.logpmf(lost, rate + losses))

    rate = optimize.minimize_scalar(unlikely, bounds=(1e-12, 200), method="bounded", options={"xatol": 1e-10}).x
    expected = stats.skellam.sf(won - lost - 1, rate, rate + losses) if won - lost + losses > 0 else 1.0
    assert decide(cell, full, margin=margin).p_holds == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("population", POPULATIONS)
def test_answers_that_lack_are_lost_below_and_won_above(population):
    tested = partial(decide, population=population)
    full = np.ones((30, 8))
    cell, worst = full.copy(), full.copy()
    cell[0, 1:], worst[0, 1:] = np.nan, 0
    found = tested(cell, full)
    assert (found.draws, found.difference) == (8, 0)
    assert found.low == pytest.approx(tested(worst, full).low, abs=1e-8)
    assert found.high == pytest.approx(tested(full, worst).high, abs=1e-8)
    assert found.p_holds == tested(worst, full).p_holds
    # A draw that few problems have was not asked; a problem that lacks wholly was.
    cell = full.copy()
    cell[:16, 7] = np.nan
    assert tested(cell, full) == tested(full[:, :7], full[:, :7])
    cell[15] = full[15]
    assert tested(cell, full).draws == 8
    cell, worst[0] = full.copy(), 0
    cell[0] = np.nan
    assert tested(cell, full).low == pytest.approx(tested(worst, full).low, abs=1e-8)
    nothing = tested(np.full((30, 8), np.nan), full)
    assert (nothing.label, math.isnan(nothing.difference)) == ("unclear", True)


@pytest.mark.parametrize("population", POPULATIONS)
@pytest.mark.parametrize("seed", range(20))
def test_no_gap_makes_a_setting_look_better_or_worse(seed, population):
    """Whatever the reason why answers lack, the interval holds that of all answers, and so errs no more often."""
    rng = np.random.default_rng(seed)
    cell, full = (rng.random((2, 30, 8)) < rng.random((30, 1))).astype(float)
    found = decide(cell, full, population=population)
    for lacking in (cell < full, cell > full, cell == 0, full == 1):
        some = decide(np.where(lacking & (rng.random(cell.shape) < 0.5), np.nan, cell), full, population=population)
        assert some.draws == 8
        assert some.low <= found.low + 1e-8
        assert some.high >= found.high - 1e-8
        assert some.p_holds >= found.p_holds - 1e-8


def test_the_four_labels():
    full = np.ones((100, 8))
    changed = {"safe": (0, 0), "small loss": (20, 0), "unclear": (110, 90), "worse": (60, 0)}
    for label, (lost, won) in changed.items():
        cell, base = full.copy(), full.copy()
        cell.flat[np.arange(lost) * 7 % 800] = 0
        base.flat[np.arange(lost, lost + won) * 7 % 800] = 0
        found = decide(cell, base)
        assert found.label == label
        assert (found.low > -0.05) == (found.p_holds < 0.025) == (label in ("safe", "small loss"))
        assert (found.high < 0) == (found.p_loses < 0.025) == (label in ("small loss", "worse"))


def test_a_search_goes_from_the_largest_cache_down_or_by_holm():
    p = {"large": 0.02, "middle": 0.2, "small": 0.012, "tiny": 0.001}
    assert hold_in_search(p, []) == {"tiny"}
    assert hold_in_search(p, [["large", "middle", "small"]]) == {"tiny", "large"}
    assert hold_in_search(p, [["large"], ["small", "tiny"]]) == {"tiny", "small"}


def answers(rng: np.random.Generator, problems: int, draws: int, cells: int, loss: float) -> np.ndarray:
    """The full cache and `cells` cells that lose `loss` on average over the problems, [1 + cells, problems, draws]."""
    chance = rng.beta(0.6, 0.4, (1, problems)) * np.ones((1 + cells, 1))
    chance[1:] *= 1 - loss / chance[0].mean()
    luck = rng.random((problems, draws))
    own = rng.random((1 + cells, problems, draws))
    shared = rng.random((1 + cells, problems, draws)) < 0.5  # eviction has not acted yet
    return (np.where(shared, luck, own) < chance[..., None]).astype(float)


def lost_wholly(rng: np.random.Generator, draws: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One problem of 30 is lost for certain, and the rest of a loss of 5% is spread over the other problems."""
    full = np.ones((30, draws))
    while True:
        cell = (rng.random((30, draws)) > 0.5 / 29).astype(float)
        cell[0] = 0
        yield cell, full


@pytest.mark.slow  # hundreds of simulated grids
def test_a_cell_at_the_margin_seldom_holds_and_the_intervals_cover():
    rng = np.random.default_rng(1)
    holds, holds_early, covered = [], [], []
    for _ in range(120):
        full, *cells = answers(rng, 60, 8, 4, 0.05)
        grid = dict(enumerate(cells))
        holds += [one.label in ("safe", "small loss") for one in decide_grid(grid, full).values()]
        alone = [decide(cell, full) for cell in cells]
        covered += [one.low <= -0.05 <= one.high for one in alone]
        holds_early += [one.low > -0.05 for one in decide_rounds(grid, full, rounds=(2, 4, 8)).values()]
    assert np.mean(holds) <= 0.04  # 2.5% and two standard errors
    assert np.mean(holds_early) <= 0.04
    assert np.mean(covered) >= 0.93
    assert sum(holds)
    for draws in (2, 8):
        tables = lost_wholly(rng, draws)
        wrong = [decide(*next(tables)).low > -0.05 for _ in range(250)]
        assert np.mean(wrong) <= 0.04


@pytest.mark.slow  # hundreds of simulated cells
def test_the_power_is_that_of_simulated_cells():
    rng = np.random.default_rng(2)
    for problems, draws in ((30, 5), (60, 8), (100, 4)):
        held = []
        for _ in range(600):
            won = rng.random((problems, draws))
            held.append(decide((won < 0.95) * 1.0, ((won > 0.05) * 1.0)).low > -0.05)
        assert np.mean(held) == pytest.approx(power(problems, draws, 0.1), abs=0.06)
    assert power(30, 5, 0.2) < power(30, 5, 0.1) < power(198, 5, 0.1)


@pytest.mark.slow
def test_as_many_draws_or_problems_as_planned_show_that_equal_cells_hold():
    rng = np.random.default_rng(2)
    planned, by_draws, by_problems = [], [], []
    for _ in range(120):
        full, cell = answers(rng, 60, 4, 1, 0.0)
        test = paired_test(cell, full)
        planned.append(test.draws_to_hold(0.05))
        full, cell = answers(rng, 60, planned[-1], 1, 0.0)
        by_draws.append(decide(cell, full).label)
        full, cell = answers(rng, test.problems_to_hold(0.05), 4, 1, 0.0)
        by_problems.append(decide(cell, full, population="like_these").label)
    assert by_draws.count("safe") >= 0.88 * 120
    assert by_problems.count("safe") >= 0.88 * 120
    # Half as many would not do, so the plan is no waste.
    draws = int(np.median(planned)) // 2
    labels = [decide(*answers(rng, 60, draws, 1, 0.0)[::-1]).label for _ in range(120)]
    assert labels.count("safe") < 0.88 * 120


def test_fewer_equal_problems_promise_less():
    """Without a difference 1 of n^2 is taken to differ, so that a single problem is the most careful plan."""
    plans = [paired_test(*np.ones((2, problems, 4))).problems_to_hold(0.05) for problems in (1, 2, 10)]
    assert plans == sorted({*plans}, reverse=True)


def test_rounds_depend_on_the_rows_of_the_rounds_alone():
    rng = np.random.default_rng(3)
    full, *cells = answers(rng, 100, 8, 8, 0.04)
    cells[0][:] = 0
    cells[1] = full.copy()
    grid = dict(enumerate(cells))
    whole = decide_rounds(grid, full, rounds=(2, 4, 8))
    assert (whole[0].label, whole[0].draws, whole[0].settled) == ("worse", 2, True)
    assert (whole[1].label, whole[1].settled) == ("safe", True)
    # A cell that stopped has no later draws, and rows of another order give the same.
    stopped = {name: cell[:, : whole[name].draws] for name, cell in reversed(grid.items())}
    assert decide_rounds(stopped, full, rounds=(2, 4, 8)) == whole
    first = decide_rounds({name: cell[:, :4] for name, cell in grid.items()}, full[:, :4], rounds=(2, 4, 8))
    assert all(whole[name] == one for name, one in first.items() if one.settled)
    assert all(whole[name].draws == 8 for name, one in first.items() if not one.settled)
    # One round is no sequential run.
    assert decide_rounds(grid, full, rounds=(8,)) == decide_grid(grid, full)
    # A cell that lacks one answer of the first round is decided by no round.
    cells[1][5, 1] = np.nan
    assert decide_rounds(grid, full, rounds=(2, 4, 8))[1].label == "unclear"


def test_a_loss_within_the_margin_is_not_the_end():
    # After two draws a loss is shown and neither more nor less than the margin; more draws show that it holds.
    full = np.ones((100, 16))
    cell = full.copy()
    cell[np.arange(20), np.arange(20) % 14 + 2] = 0
    cell[np.arange(9), 0] = 0
    found = [decide_rounds({0: cell}, full, rounds=rounds)[0] for rounds in ((2,), (2, 16))]
    assert [(one.label, one.draws) for one in found] == [("worse", 2), ("small loss", 16)]


def test_the_levels_of_all_rounds_add_up():
    full, cell = answers(np.random.default_rng(4), 60, 8, 1, 0.0)
    looks = decide_grid({0: cell}, full, looks=4)[0]
    test = paired_test(cell, full)
    assert (looks.low, -looks.high) == (test.lower_end(0.025 / 4), test.opposite.lower_end(0.025 / 4))
    assert looks.p_holds == pytest.approx(4 * test.p_above(-0.05))


def test_a_cell_that_lacks_the_first_rounds_draws_is_not_settled():
    full, cell = np.ones((60, 8)), np.ones((60, 8))
    cell[0, 1] = np.nan
    found = decide_rounds({"cell": cell}, full, rounds=(2, 4, 8))["cell"]
    assert (found.label, found.settled) == ("unclear", False)
