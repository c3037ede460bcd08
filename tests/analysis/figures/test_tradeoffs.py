from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from kvsweep.analysis.figures.tradeoffs import tradeoff
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics, pareto_front
from tests.analysis.figures.conftest import read


def points(*pairs: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(pairs, columns=["mean_cache_length", "pass_at_1"])


def test_pareto_front_by_hand():
    table = points((100, 0.5), (90, 0.4), (90, 0.3), (95, 0.4), (110, 0.5), (120, 0.9), (80, 0.1))
    assert pareto_front(table, "mean_cache_length").index.tolist() == [6, 1, 0, 5]


def curves(figure: Figure) -> dict[Any, tuple[list[float], list[float]]]:
    containers = figure.axes[0].containers
    data = {c.get_label(): c.lines[0] for c in containers if isinstance(c, ErrorbarContainer)}
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in data.items()}


@pytest.mark.slow
def test_accuracy_against_memory(tmp_path, metrics):
    figure = tradeoff("memory", metrics, "toy_qwen")
    drawn = curves(figure)
    best_first = ["DynTS", "window", "SnapKV (variant=original)", "unheard_of", "SnapKV (variant=dynts_code)"]
    assert list(drawn) == best_first
    lengths = metrics[(metrics["policy"] == "dynts") & (metrics["benchmark"] == "toy_chain")]["mean_cache_length"]
    assert sorted(drawn["DynTS"][0]) == pytest.approx(sorted(lengths))
    assert sorted(drawn["DynTS"][1]) == pytest.approx([75, 100])
    assert drawn["unheard_of"][1] == pytest.approx([25])
    (axes,) = figure.axes
    assert axes.get_xlim()[1] > 140
    stars = [line for line in axes.get_lines() if line.get_marker() == "*"]
    assert [(list(star.get_xdata()), list(star.get_ydata())) for star in stars] == [([140], [75])]
    (front,) = (line for line in axes.get_lines() if line.get_label() == "Pareto front")
    assert front.get_drawstyle() == "steps-post"
    # All compressed cells hold the same here, so the best of them is the whole front.
    assert list(np.asarray(front.get_ydata(), dtype=float)) == pytest.approx([100])
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["full cache", "Pareto front", *best_first]
    assert str(figure.get_label()).endswith("Pareto front, mean of 2 benchmarks: DynTS 0.5 / 48, trigger 128")
    looks = [(c.lines[0].get_color(), c.lines[0].get_marker()) for c in axes.containers]
    assert len(set(looks)) == len(looks)


def test_a_grid_of_one_policy_has_a_line_for_each_window(tmp_path, make_cell):
    for window in (16, 48):
        for ratio, length in ((0.3, 30), (0.1, 10), (0.2, 20)):
            size = {"prompt_tokens": length + window, "peak_length": 129}
            place = {"keep_ratio": ratio, "local_window": window}
            make_cell([[1], [0]], policy="dynts", done=window == 16, expected=2, completion=size, **place)
        make_cell([[1], [1]], policy="h2o", local_window=window)
    figure = tradeoff("memory", read(tmp_path), "toy_qwen")
    lines = [(one.get_label(), one.lines[0]) for one in figure.axes[0].containers]
    assert [name for name, _ in lines] == ["H2O", "H2O", "DynTS*", "DynTS*"]
    for _, line in lines[2:]:
        places = list(line.get_xdata())
        assert (len(places), places) == (3, sorted(places))
    looks = [(line.get_color(), line.get_marker()) for _, line in lines]
    assert looks[0] == looks[1] != looks[2] == looks[3]
    assert str(figure.get_label()).startswith(
        "Toy-Qwen: Pass@1 ± standard error against memory (* not finished), question on top. Pareto front, Chain: "
    )


def test_speed_names_the_settings_of_its_front(tmp_path, make_cell):
    make_cell([[1]] * 10)
    scores = {0.1: 2, 0.2: 5, 0.3: 0, 0.4: 8}
    for ratio, right in scores.items():
        make_cell([[int(k < right)] for k in range(10)], policy="dynts", keep_ratio=ratio)
    table = read(tmp_path)
    ratios = table["keep_ratio"].where(table["policy"] != "full", 0.9)
    timed = pd.DataFrame({"cell_id": table["cell_id"], "slots": 8, "why": "memory", "peak_bytes": None})
    figure = tradeoff("speed", table, "toy_qwen", timed=timed.assign(tokens_per_second=5000 - 4000 * ratios))
    (axes,) = figure.axes
    assert axes.get_title() == "Chain, 8 texts side by side"
    assert axes.get_xlim()[1] > 4600
    # 0.3 is slower than 0.2 and worse.
    front = [f"DynTS {ratio} / 48, trigger 128" for ratio in (0.1, 0.2, 0.4)]
    assert str(figure.get_label()).endswith(f"side by side: {'; '.join([*front, 'full cache'])}")
    low, high = axes.get_ylim()
    assert (low < 0, high > 80) == (True, True)


@pytest.mark.slow
def test_no_curve_without_a_score(tmp_path, make_cell):
    make_cell([[1]])
    assert tradeoff("memory", read(tmp_path), "toy_qwen") is None
    make_cell([[None]], policy="dynts")
    assert tradeoff("memory", read(tmp_path), "toy_qwen") is None


@pytest.mark.slow
def test_budgets(run, make_cell):
    for benchmark in ("toy_chain", "toy_add"):
        make_cell([[1], [1], [0]], benchmark=benchmark, benchmark_title=benchmark)
        for budget, right in ((96, 0), (160, 2)):
            rows = [[int(k < right)] for k in range(3)]
            make_cell(rows, policy="dynts", budget=budget, benchmark=benchmark, benchmark_title=benchmark)
    table = cell_metrics(load_run(run))
    figure = tradeoff("budget", table, "toy_qwen")
    assert [axes.get_title() for axes in figure.axes] == ["mean of 2 benchmarks", "toy_chain", "toy_add"]
    drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
    full = np.asarray(drawn["full cache"].get_ydata(), dtype=float)
    assert full == pytest.approx([200 / 3] * 2)
    curve = figure.axes[1].containers[0].lines[0]
    assert list(curve.get_xdata()) == [96, 160]
    assert list(curve.get_ydata()) == pytest.approx([0, 200 / 3])
    assert tradeoff("budget", table[table["budget"] != 96], "toy_qwen") is None
