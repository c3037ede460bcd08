"""The importance of tokens, and those that evictions left, computed by hand; what the figures draw."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from kvsweep.analysis.figures.completion import (
    Layout,
    by_step,
    caption,
    correlation_text,
    importance_figure,
    importance_table,
    kept_html,
    kept_table,
    lorenz,
    mean_and_ratio,
    pooled,
    rank_correlation,
    read_kept,
    retention,
    retention_figure,
)
from kvsweep.run_files.row_types import Eviction

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


PIECES = ["<q>", "a", "b", "c", "d", "e"]
EVICTIONS = [
    Eviction(step=3, length_before=4, length_after=3, held=[100, 1, 0, 1, 50, 1, 100, 1]),
    Eviction(step=4, length_before=5, length_after=3, held=[100, 1, 0, 2, 100, 2]),
]


@pytest.fixture
def kept():
    return read_kept(PIECES, 1, EVICTIONS)


def test_when_each_token_went(kept):
    assert kept.gone_at.tolist() == [-1, 0, 1, -1, -1, -1]
    table = kept_table(kept)
    assert table["gone_at"].tolist() == [0, 1, 2, 0, 0, 0]
    assert table["held_1"].tolist()[:4] == [100, 0, 50, 100]
    assert np.isnan(table["held_1"][4])


def test_the_two_lines_of_a_title_stay_apart_on_the_page(kept):
    html = kept_html(kept, title="Toy: p0, draw 0\nwindow 0.3 / 48")
    assert "<title>Toy: p0, draw 0 | window 0.3 / 48</title>" in html
    assert "<h1>Toy: p0, draw 0 | window 0.3 / 48</h1>" in html


def test_retention_by_hand(kept):
    importance = np.array([1.0, 2.0, 3.0, np.nan, 9.0])
    np.testing.assert_allclose(retention(kept, importance), [(0.5 * 2 + 3) / 6, 3 / 6])
    with np.errstate(invalid="raise"):
        assert np.isnan(retention(kept, np.zeros(5))).all()


def test_policies_that_hold_more_importance_and_score_higher_correlate():
    table = pd.DataFrame({"policy": list("abcd"), "retained": [0.9, 0.8, 0.4, 0.2], "pass1": [0.8, 0.9, 0.3, 0.1]})
    rho, p, n = rank_correlation(table)
    assert rho == pytest.approx(0.8)
    # Of the 24 orders of four, one has rho 1 and three have 0.8; as many lie as far below.
    assert p == pytest.approx(8 / 24)
    assert n == 4
    assert correlation_text(table) == "Spearman rho 0.80, p = 0.333, n = 4"
    assert np.isnan(rank_correlation(table[:2])[0])
    assert rank_correlation(table[:3])[0] == pytest.approx(0.5)
    assert correlation_text(table.assign(pass1=0.5)) == "no correlation over n = 4"
    curves = pd.DataFrame({"policy": ["a", "a", "b"], "eviction": [1, 2, 1], "retained": [0.9, 0.8, 0.4], "texts": 3})
    carried = pd.DataFrame({"tokens": [0, 1.0], "importance": [0, 1.0]})
    figure = retention_figure(curves, table, carried, "answer", title="t")
    # b, the best, and a; c and d evicted nothing.
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0.4], [0.9, 0.8], [], []]
    assert figure.axes[1].get_title() == correlation_text(table)


def test_many_policies_have_the_approximations_p():
    generator = np.random.default_rng(7)
    retained = generator.random(34)
    table = pd.DataFrame({"retained": retained, "pass1": np.round(retained + generator.random(34), 1)})
    expected = spearmanr(table["retained"], table["pass1"])
    rho, p, _ = rank_correlation(table)
    assert rho == pytest.approx(expected.statistic)
    assert p < 0.001
    weak = table.assign(pass1=table["pass1"].sample(frac=1, random_state=3).to_numpy())
    assert rank_correlation(weak)[1] == pytest.approx(spearmanr(weak["retained"], weak["pass1"]).pvalue, abs=0.02)
