"""Importance held, over texts and over evictions, by hand."""

import numpy as np
import pandas as pd
import pytest

from kvsweep.analysis.numbers.retention import by_eviction, by_policy, mean_lorenz


@pytest.fixture
def held():
    rows = [("dynts", 0, 1, 0.9), ("dynts", 0, 2, 0.6), ("window", 1, 1, 0.2), ("dynts", 2, 1, 0.3)]
    return pd.DataFrame(rows, columns=["policy", "text", "eviction", "retained"])


def test_the_curve_of_a_policy_is_the_mean_over_its_texts(held):
    expected = [["dynts", 1, 0.6, 2], ["dynts", 2, 0.6, 1], ["window", 1, 0.2, 1]]
    assert by_eviction(held).to_numpy().tolist() == expected


def test_a_policys_row_is_the_mean_over_its_evictions_beside_its_grades(held):
    table = by_policy(held, {"dynts": [1, 0, 1, 1], "window": []})
    assert table["policy"].tolist() == ["dynts", "window"]
    np.testing.assert_allclose(table["retained"], [0.6, 0.2])
    assert table["texts"].tolist() == [2, 1]
    np.testing.assert_array_equal(table["pass1"], [0.75, np.nan])


def test_lorenz_curves_of_different_lengths_are_averaged_at_each_percent():
    straight = np.array([0, 1.0]), np.array([0, 1.0])
    bent = np.array([0, 0.5, 1.0]), np.array([0, 0.9, 1.0])
    table = mean_lorenz([straight, bent])
    assert len(table) == 101
    assert table.loc[[0, 25, 50, 100], "importance"].tolist() == pytest.approx([0, (0.25 + 0.45) / 2, 0.7, 1])
