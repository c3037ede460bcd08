from itertools import product
from math import comb

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.statistics.inference import (
    draws_to_separate,
    noise_floor,
    paired_tests,
    pass_at_k,
    sign_flip_p,
    summary_noise_floor,
)
from kvsweep.analysis.statistics.metrics import majority


def answers(seed: int, cells: int, problems: int, draws: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    chance = rng.beta(0.5, 0.5, (1, problems, 1))
    return (rng.random((cells, problems, draws)) < chance).astype(float)


def test_exact_sign_flips_are_scipys():
    differences = np.random.default_rng(0).normal(0.4, 1, (3, 10))
    for row, p in zip(differences, sign_flip_p(differences), strict=True):
        exact = stats.permutation_test((row,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert p == pytest.approx(exact.pvalue)


def test_random_sign_flips_are_close_to_scipys():
    differences = np.random.default_rng(1).normal(0.25, 1, (4, 40))
    for row, p in zip(differences, sign_flip_p(differences), strict=True):
        rng = np.random.default_rng(2)
        theirs = stats.permutation_test((row,), np.mean, permutation_type="samples", n_resamples=20000, rng=rng)
        assert p == pytest.approx(theirs.pvalue, abs=0.015)


def test_paired_tests_by_hand():
    scores = answers(0, 6, 25, 4)
    scores[:, 3, 2:] = np.nan
    table = paired_tests(scores[1:], scores[0])
    means = np.nanmean(scores[1:] - scores[0], axis=-1)
    assert table["difference"].to_numpy() == pytest.approx(means.mean(-1))
    assert table["se"].to_numpy() == pytest.approx(stats.sem(means, axis=-1))
    interval = stats.ttest_1samp(means, 0, axis=-1).confidence_interval()
    assert table["low"].to_numpy() == pytest.approx(interval.low)
    assert table["p_holm"].to_numpy() == pytest.approx(multipletests(table["p"], method="holm")[1])


def test_cells_without_a_pair_or_a_difference():
    scores = answers(1, 3, 10, 2)
    scores[1] = scores[0]
    scores[2] = np.nan
    table = paired_tests(scores[1:], scores[0])
    assert table.loc[0, ["difference", "se", "p", "p_holm"]].tolist() == [0, 0, 1, 1]
    assert table.loc[1, ["difference", "p", "p_holm"]].isna().all()


def test_the_floor_of_identical_and_of_different_cells():
    scores = answers(3, 20, 30, 5)
    null = noise_floor(scores)
    assert not null.signal
    assert null.expected_range[0] < null.range < null.critical * 1.3
    # Independent draws: 20 means of 150 answers with the binomial variance span 3.73 standard errors in the mean.
    assert null.expected_range[1] == pytest.approx(3.73 * np.sqrt(scores.var(-1, ddof=1).mean() / 150), rel=0.12)
    scores[0] = 1
    floor = noise_floor(scores)
    assert floor.signal
    assert floor.range > floor.critical


def test_the_p_of_a_small_grid_is_exact():
    means = np.array([[1.0, 1.0, 0.0], [0.0, 0.5, 0.0]])
    observed = means.mean(-1).std()
    spreads = [
        np.array([col[list(order)] for col, order in zip(means.T, orders, strict=True)]).mean(0).std()
        for orders in product([(0, 1), (1, 0)], repeat=3)
    ]
    floor = noise_floor(means[..., None])
    assert floor.p == pytest.approx(np.mean(np.array(spreads) >= observed - 1e-9), abs=0.03)


def test_a_summary_floor_matches_the_binomial_variance():
    floor = summary_noise_floor(np.linspace(0.4, 0.5, 20), 30, 5, between=0.5)
    assert floor.expected_range[1] == pytest.approx(3.73 * np.sqrt(0.45 * 0.55 * 0.5 / 150), rel=0.05)
    assert not floor.signal


def test_draws_to_separate_two_cells():
    rng = np.random.default_rng(5)
    first, second = (rng.random((400, 50)) < p for p in (0.6, 0.5))
    draws, bound = draws_to_separate(first.astype(float), second.astype(float))
    z = stats.norm.ppf(0.975) + stats.norm.ppf(0.8)
    exact = z**2 * (first.astype(float) - second).var(-1, ddof=1).mean() / (first.mean() - second.mean()) ** 2 / 400
    assert (draws, bound) == (np.ceil(exact), False)
    assert draws_to_separate(first[:, :1] * 1.0, second[:, :1] * 1.0)[1]
    assert draws_to_separate(np.ones((5, 2)), np.ones((5, 2)))[0] == np.inf


def test_pass_at_k():
    for n, c, k in product((4, 8), (0, 1, 3, 4), (1, 2, 4)):
        assert pass_at_k([c], [n], k)[0] == pytest.approx(1 - comb(n - c, k) / comb(n, k))
    assert np.isnan(pass_at_k([1], [1], 2)[0])


def test_the_majority():
    rows = [("a", "4", 1), ("a", "4", 1), ("a", "5", 0), ("b", "4", 1), ("b", "5", 0), ("c", None, 0), ("d", "7", 0)]
    table = pd.DataFrame(rows, columns=["problem_id", "answer", "correct"]).assign(cell_id="x")
    assert majority(table)["x"].to_dict() == {"a": 1, "b": 0.5, "c": 0, "d": 0}
