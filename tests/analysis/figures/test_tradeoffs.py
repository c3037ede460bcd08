from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvsweep.analysis.figures.tradeoffs import series, tradeoff
from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics, pareto_front
from tests.analysis.figures.conftest import read


def points(*pairs: tuple[float, float]) -> pd.DataFrame:
    return pd.DataFrame(pairs, columns=["mean_cache_length", "pass_at_1"])


def test_pareto_front_by_hand():
    table = points((100, 0.5), (90, 0.4), (90, 0.3), (95, 0.4), (110, 0.5), (120, 0.9), (80, 0.1))
    assert pareto_front(table, "mean_cache_length").index.tolist() == [6, 1, 0, 5]


def settings_of(*rows: tuple[float, float, float, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["budget", "keep_ratio", "local_window", "mean_cache_length"])


def test_a_chain_of_settings_is_one_line_and_a_grid_several():
    chain = settings_of((128, 0.4, 48, 90), (128, 0.2, 16, 70), (128, 0.3, 16, 80))
    assert [part["mean_cache_length"].tolist() for part in series(chain)] == [[70, 80, 90]]
    grid = settings_of(*[(128, r / 10, w, w + r) for w in (16, 48) for r in (3, 2, 1)], (96, 0.3, 48, 40))
    assert [part["mean_cache_length"].tolist() for part in series(grid)] == [[17, 18, 19], [40], [49, 50, 51]]
    nan = float("nan")
    assert len(series(settings_of((nan, nan, nan, 90)))) == 1


def curves(figure: Figure) -> dict[Any, tuple[list[float], list[float]]]:
    containers = figure.axes[0].containers
    data = {c.get_label(): c.lines[0] for c in containers if isinstance(c, ErrorbarContainer)}
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in data.items()}


@pytest.mark.slow
def test_accuracy_against_memory(tmp_path, metrics):
    figure = tradeoff("memory", metrics, "toy_qwen")
    drawn = curves(figure)
    # The best first, and with each its best score.
    scores = [
        "DynTS, best 100.0",
        "window, best 100.0",
        "SnapKV (variant=original), best 50.0",
        "unheard_of, best 25.0",
        "SnapKV (variant=dynts_code), best 0.0",
    ]
    assert list(drawn) == scores
    lengths = metrics[(metrics["policy"] == "dynts") & (metrics["benchmark"] == "toy_chain")]["mean_cache_length"]
    assert sorted(drawn["DynTS, best 100.0"][0]) == pytest.approx(sorted(lengths))
    assert sorted(drawn["DynTS, best 100.0"][1]) == pytest.approx([75, 100])
    assert drawn["unheard_of, best 25.0"][1] == pytest.approx([25])
    (axes,) = figure.axes
    assert axes.get_xlim()[1] > 140
    stars = [line for line in axes.get_lines() if line.get_marker() == "*"]
    assert [(list(star.get_xdata()), list(star.get_ydata())) for star in stars] == [([140], [75])]
    (front,) = (line for line in axes.get_lines() if line.get_label() == "Pareto front")
    assert front.get_drawstyle() == "steps-post"
    # All compressed cells hold the same here, so the best of them is the whole front.
    assert list(np.asarray(front.get_ydata(), dtype=float)) == pytest.approx([100])
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["full cache: 75.0 ± 17.7 at 140 tokens", "Pareto front", *scores]
    assert [text.get_text() for text in axes.texts] == ["DynTS"]  # the front has one point
    looks = [(c.lines[0].get_color(), c.lines[0].get_marker()) for c in axes.containers]
    assert len(set(looks)) == len(looks)


def test_a_grid_of_one_policy_names_its_lines(tmp_path, make_cell):
    for window in (16, 48):
        for ratio in (0.1, 0.2, 0.3):
            make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, local_window=window, done=window == 16, expected=2)
        for ratio in (0.1, 0.2):
            make_cell([[1], [1]], policy="h2o", keep_ratio=ratio, local_window=window)
    figure = tradeoff("memory", read(tmp_path), "toy_qwen")
    drawn = {one.get_label(): one.lines[0] for one in figure.axes[0].containers}
    names = ["H2O, window 16, best 100.0", "H2O, window 48, best 100.0"]
    names += ["DynTS*, window 16, best 50.0", "DynTS*, window 48, best 50.0"]
    assert list(drawn) == names
    # A colour for each policy, a shape for each window.
    colours, shapes = ([get(drawn[name]) for name in names] for get in (Line2D.get_color, Line2D.get_marker))
    assert (colours[0], colours[2]) == (colours[1], colours[3])
    assert (shapes[0], shapes[1]) == (shapes[2], shapes[3])
    assert (len(set(colours)), len(set(shapes))) == (2, 2)
    assert str(figure.get_label()).startswith(
        "Toy-Qwen: Pass@1 ± standard error against memory (* not finished), Chain"
    )


def test_the_best_point_of_a_policy_on_the_front_has_its_name(tmp_path, make_cell):
    for ratio, right in ((0.2, 1), (0.4, 2)):
        tokens = {"prompt_tokens": round(100 * ratio), "peak_length": 129}
        make_cell([[int(k < right)] for k in range(2)], policy="dynts", keep_ratio=ratio, completion=tokens)
    figure = tradeoff("memory", read(tmp_path), "toy_qwen")
    (name,) = figure.axes[0].texts
    assert (name.get_text(), name.xy[1]) == ("DynTS", 100)


def boxes_of_names(figure: Figure) -> list[Any]:
    figure.draw_without_rendering()
    return [text.get_window_extent() for text in figure.axes[0].texts]


@pytest.mark.slow
def test_no_name_lies_over_a_line(tmp_path, make_cell):
    make_cell([[1]] * 10)
    for place, policy in enumerate(("dynts", "window", "random", "h2o")):
        for ratio in (0.1, 0.2, 0.3):
            right = [[int(k < 9 - 2 * place + 10 * ratio)] for k in range(10)]
            tokens = {"prompt_tokens": round(20 - 3 * place + 100 * ratio), "peak_length": 129}
            make_cell(right, policy=policy, keep_ratio=ratio, completion=tokens)
    figure = tradeoff("memory", read(tmp_path), "toy_qwen")
    names, (axes,) = boxes_of_names(figure), figure.axes
    assert names
    for line in axes.get_lines():
        xs, ys = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
        if line.get_drawstyle() == "steps-post":
            xs, ys = np.repeat(xs, 2)[1:], np.repeat(ys, 2)[:-1]
        along = np.linspace(0, len(xs) - 1, 2000)
        places = np.arange(len(xs))
        points = line.get_transform().transform(
            np.column_stack([np.interp(along, places, xs), np.interp(along, places, ys)])
        )
        assert not any(box.contains(*point) for box in names for point in points)


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
    assert {text.get_text() for text in axes.texts} == {"DynTS 0.1 / 48", "DynTS 0.2 / 48", "DynTS 0.4 / 48"}
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
