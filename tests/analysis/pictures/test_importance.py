"""Mean, ratio and steps by hand; what the strips draw."""

from dataclasses import replace

import numpy as np
import pytest

from kvsweep.analysis.pictures.importance import (
    Layout,
    by_step,
    caption,
    importance_figure,
    importance_table,
    lorenz,
    mean_and_ratio,
    pooled,
)

SCORES = np.array([0.2, 0.4, 0.9, np.nan, 0.1])
LAYOUT = Layout(question=3, thinking=5, answer=2, steps=[0, 0, 1, 1, 1], pieces=list("abcde"))


def test_mean_and_ratio_by_hand():
    assert mean_and_ratio(SCORES) == (pytest.approx(1.6 / 4), 0.25)  # 0.9 alone is above 0.4
    assert caption(SCORES) == "Mean Score: 0.400; Ratio: 0.250"
    assert caption(np.array([1e-4, 3e-4])) == "Mean Score: 0.0002; Ratio: 0.500"
    assert np.isnan(mean_and_ratio(np.array([np.nan]))).all()


def test_a_step_has_the_mean_of_its_known_tokens():
    np.testing.assert_allclose(by_step(SCORES, LAYOUT.steps), [0.3, 0.3, 0.5, 0.5, 0.5])


def test_no_lone_high_token_is_lost():
    scores = np.zeros(7001)
    scores[4321] = 1
    columns = pooled(scores, 1200)
    assert len(columns) == 1200
    assert columns.max() == 1
    assert pooled(np.full(5000, np.nan), 100).shape == (100,)


def test_the_figure_shows_the_scores_the_line_and_the_words():
    figure = importance_figure(LAYOUT, {"one": SCORES, "two": -SCORES}, title="t")
    one, two = figure.axes[:2]
    np.testing.assert_array_equal(np.ma.filled(one.images[0].get_array(), np.nan)[0], SCORES)
    (line,) = [line for line in one.lines if line.get_linestyle() == "--"]
    assert line.get_color() == "#c00000"
    assert line.get_ydata()[0] == pytest.approx(0.4)
    assert one.get_title(loc="right") == "Mean Score: 0.400; Ratio: 0.250"
    assert [t.get_text() for t in one.get_yticklabels()] == ["Low", "High"]
    assert two.get_title(loc="left") == "two"
    assert one.get_xlim()[0] < -0.5


def test_outliers_on_either_side_leave_the_others_their_colours():
    scores = np.concatenate([[-1000.0], np.linspace(0, 1, 998), [1000.0]])
    layout = replace(LAYOUT, thinking=1000, steps=[0] * 1000, pieces=["a"] * 1000)
    axes, _ = importance_figure(layout, {"one": scores}, title="t").axes
    low, high = axes.images[0].get_clim()
    assert 0 <= low < 0.05
    assert 0.95 < high <= 1
    assert max(axes.get_xticks()) < 1000


def test_the_table_has_every_token():
    table = importance_table(LAYOUT, {"one": SCORES})
    assert table["position"].tolist() == [3, 4, 5, 6, 7]
    np.testing.assert_array_equal(table["one"], SCORES)


def test_lorenz_by_hand():
    tokens, carried = lorenz(np.array([1.0, 6.0, 3.0, np.nan]))
    np.testing.assert_allclose(tokens, [0, 1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(carried, [0, 0.6, 0.9, 1])
