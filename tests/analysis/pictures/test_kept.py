"""The tokens held, the evictions that took the others, and their importance, computed by hand."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from kvsweep.analysis.pictures.kept import (
    correlation_text,
    kept_table,
    rank_correlation,
    read_kept,
    retention,
    retention_figure,
)
from kvsweep.analysis.report.kept_page import kept_html
from kvsweep.base.errors import UserError
from kvsweep.base.records import Eviction

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
    np.testing.assert_allclose(retention(kept, importance, 1), [(0.5 * 2 + 3) / 6, 3 / 6])


def test_what_cannot_be_shown_is_one_sentence():
    with pytest.raises(UserError, match="never evicted"):
        read_kept(PIECES, 1, [])


def test_policies_that_hold_more_importance_and_score_higher_correlate():
    table = pd.DataFrame({"policy": list("abcd"), "retained": [0.9, 0.8, 0.4, 0.2], "pass1": [0.8, 0.9, 0.3, 0.1]})
    rho, p, n = rank_correlation(table)
    assert rho == pytest.approx(0.8)
    # Of the 24 orders of four, one has rho 1 and three have 0.8; as many lie as far below.
    assert p == pytest.approx(8 / 24)
    assert n == 4
    assert correlation_text(table) == "Spearman rho 0.80, p = 0.333, n = 4"
    assert np.isnan(rank_correlation(table[:2])[0])
    assert correlation_text(table.assign(pass1=0.5)) == "no correlation over n = 4"
    curves = pd.DataFrame({"policy": ["a", "a", "b"], "eviction": [1, 2, 1], "retained": [0.9, 0.8, 0.4], "texts": 3})
    figure = retention_figure(curves, table, {"answer": (np.array([0, 1.0]), np.array([0, 1.0]))}, title="t")
    assert [line.get_ydata().tolist() for line in figure.axes[0].lines] == [[0.9, 0.8], [0.4]]
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
