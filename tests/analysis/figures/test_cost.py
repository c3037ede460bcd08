"""The lengths of caches step by step, by hand."""

import numpy as np
import pandas as pd
import pytest

from kvsweep.analysis.figures.cost import cost_figure, lengths_by_step
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics


def test_lengths_by_step_by_hand():
    """Texts of 4 and 2 tokens after 10 and 20; the first loses 3 tokens at its step 1 and 2 at its last one."""
    rows = pd.DataFrame({"num_tokens": [4, 2], "prompt_tokens": [10, 20]}, index=[7, 8])
    events = pd.DataFrame({"completion": [7, 7, 8], "step": [1, 3, 1], "freed": [3, 2, 5]})
    live, held, full = lengths_by_step(rows, events)
    assert live.tolist() == [2, 2, 1, 1]
    assert full.tolist() == [15, 16, 12, 13]
    assert held.tolist() == [15, 16, 9, 10]


def test_a_cell_is_drawn_while_ten_texts_write(run, make_cell):
    make_cell([[1]] * 10)
    make_cell([[1]] * 10, policy="dynts")
    make_cell([[1]] * 10, policy="dynts", keep_ratio=0.2)
    make_cell([[1]] * 9, policy="window")
    metrics = cell_metrics(load_run(run))
    figure = cost_figure(load_run(run), metrics, "toy_qwen")
    lengths, saved = figure.axes
    assert " ".join(saved.get_title().split()) == "the full cache's KV memory divided by the setting's"
    shown, left_out = str(figure.get_label()).split(". Left out: ")
    assert shown.endswith("; 2 of 2 settings, from the smallest cache to the largest")
    assert left_out.endswith("fewer than 10 texts")
    named = {line.get_label(): np.asarray(line.get_ydata()) for line in lengths.lines}
    # Nine texts are too few.
    assert list(named) == ["DynTS 0.2 / 48, trigger 128", "DynTS 0.3 / 48, trigger 128", "full cache"]
    held, _, full = named.values()
    assert full.tolist() == list(range(40, 241))
    assert held[[0, 89, 90, 200]].tolist() == [40, 129, 73, 126]
    assert np.asarray(saved.lines[0].get_ydata()) == pytest.approx(full / held)
    assert cost_figure(load_run(run), metrics[metrics["policy"] == "full"], "toy_qwen") is None
