"""Every figure at one and at two columns of a paper: no text outside, none over another, each with contrast."""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvsweep.analysis.figures.completion import Layout, importance_figure
from kvsweep.analysis.figures.heatmap import attribution_figure, grid_figure
from kvsweep.analysis.figures.rankings import fidelity_figure, noise_figure, policy_bars_figure
from kvsweep.analysis.figures.style import STYLE
from kvsweep.analysis.figures.tradeoffs import tradeoff
from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import COLUMN_WIDTH, Look, policy_title
from kvsweep.analysis.report import gallery
from kvsweep.analysis.statistics.grids import GRID_FILE, REFERENCE, shared_settings
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.analysis.statistics.sentences import analyse, analyse_scores
from scripts.study import paper_grids

MakeCell = Callable[..., Path]
WIDTHS = (COLUMN_WIDTH, 7.09)
# The height of a page between its margins, in inches.
PAGE_HEIGHT = 9.7
PLACES = [{"benchmark": name, "benchmark_title": name.upper()} for name in ("aime24", "aime25", "amc23", "gpqa_d")]
# The longest names of policies are among them.
POLICIES = ["dynts", "sepllm_dynts_code", "streaming_llm_dynts_code", "rkv", "snapkv", "h2o", "tova", "vase", "gkv"]
POLICIES += ["rpc", "caote", "longflow", "inertia", "raas", "keydiff", "knorm", "lagkv", "window", "random", "bottom"]
POLICIES += [f"a policy of mine {i}" for i in range(12)]


# WCAG 2.2, success criterion 1.4.3: the least contrast of a text to its background.
LEAST = 4.5


def linear(channel: np.ndarray) -> np.ndarray:
    return np.where(channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4)


def contrasts(figure: Figure) -> Iterator[tuple[str, float]]:
    """The contrast of each text of a figure to the most frequent colour among the pixels that lie behind it."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    boxes = [text.get_window_extent() for text in texts]
    inks = [to_rgb(text.get_color()) for text in texts]
    for text in texts:
        text.set_alpha(0)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3] / 255
    for text, box, ink in zip(texts, boxes, inks, strict=True):
        rows, columns = (slice(max(int(a), 0), int(b) + 1) for a, b in ((box.y0, box.y1), (box.x0, box.x1)))
        behind = pixels[rows, columns].reshape(-1, 3)
        if len(behind) == 0:  # an axis keeps texts of ticks that lie outside it
            continue
        colours, counts = np.unique(behind, axis=0, return_counts=True)
        lights = linear(np.array([ink, colours[counts.argmax()]])) @ [0.2126, 0.7152, 0.0722]
        yield text.get_text(), (lights.max() + 0.05) / (lights.min() + 0.05)


def faint(figure: Figure) -> list[str]:
    return [text for text, contrast in contrasts(figure) if contrast < LEAST]


def faults(figure: Figure) -> list[str]:
    """What the renderer's boxes show: texts outside the figure, texts over each other, and formulas as their source."""
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    # An axis keeps the texts of ticks beyond its limits, and does not draw them.
    beyond = [
        label
        for axes in figure.axes
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not min(limits) - 1e-9 <= tick.get_loc() <= max(limits) + 1e-9
    ]
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown if text not in beyond]
    width, height = figure.get_size_inches() * figure.dpi
    found = [f"outside: {text}" for text, b in boxes if b.x0 < -1 or b.y0 < -1 or b.x1 > width + 1 or b.y1 > height + 1]
    found += [f"a formula: {text}" for text, _ in boxes if "\\math" in text]
    for (one, a), (other, b) in combinations(boxes, 2):
        # A line of text has room above and below its letters, so that two lines may touch.
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 2.5:
            found.append(f"over each other: {one!r} and {other!r}")
    return found


def bar_lengths(figure: Figure) -> list[float]:
    """The length of the bar of 100%, in millimetres, and the height of a bar, in each panel of bars."""
    found = []
    for axes in figure.axes:
        if any(isinstance(one, BarContainer) for one in axes.containers):
            (x0, y0), (x1, y1) = axes.transData.transform([(0, 0), (100, 0.8)])
            found += [25.4 * abs(x1 - x0) / figure.dpi, 25.4 * abs(y1 - y0) / figure.dpi]
    return found


def test_the_boxes_show_what_is_wrong():
    figure = Figure(figsize=(2, 1))
    for text, x in (("one", 0.5), ("two", 0.55), ("three", 0.98)):
        figure.text(x, 0.5, text)
    assert faults(figure) == ["outside: three", "over each other: 'one' and 'two'"]


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 9, 32])
@pytest.mark.slow_covers(1)
def test_figures_of_policies_fit(tmp_path, make_cell, width, count):
    for b, place in enumerate(PLACES):
        make_cell([[1]] * 10, **place)
        for i, policy in enumerate(POLICIES[:count]):
            # Of few policies each has three settings, so that the memory figure has lines.
            for ratio in (0.3, 0.2, 0.4)[: 3 if count < 9 else 1]:
                right = [[int((7 * k + i + b) % 10 < 1 + (5 * i) % 10)] for k in range(10)]
                length = {"peak_length": 129 + i, "prompt_tokens": 40 + 3 * i}
                make_cell(right, policy=policy, keep_ratio=ratio, completion=length, **place)
    metrics = cell_metrics(load_run(tmp_path / "run"))
    look = Look(width=width)
    figures = [policy_bars_figure(setting, "toy_qwen", metrics, look) for setting in shared_settings(metrics)[:1]]
    for bars in figures:
        assert min(bar_lengths(bars)) >= 1
        assert max(bar_lengths(bars)) >= 5
    memory = tradeoff("memory", metrics, "toy_qwen", look)
    speeds = [3000 + 997 * i % 5000 for i in range(len(metrics))]
    slots = [1024 + i for i in range(len(metrics))]
    timed = pd.DataFrame({"cell_id": metrics["cell_id"], "slots": slots, "tokens_per_second": speeds, "why": "given"})
    timed["peak_bytes"] = None
    speed = tradeoff("speed", metrics, "toy_qwen", look, timed)
    assert memory is not None
    assert speed is not None
    span = timed["slots"].groupby(metrics["benchmark_title"]).agg(["min", "max"]).itertuples()
    assert {axes.get_title() for axes in speed.axes} == {
        f"{n}, {low:,} to {high:,} texts side by side" for n, low, high in span
    }
    for figure in (*figures, memory, speed):
        assert faults(figure) == []
        assert figure.get_figwidth() == pytest.approx(width)
        assert figure.get_figheight() <= PAGE_HEIGHT
        assert faint(figure) == []
        assert all(axes.get_ylim()[1] <= 102 for axes in figure.axes if "Pass@1 (%)" in axes.get_ylabel())
    box = memory.axes[0].get_window_extent()
    assert min(box.width, box.height) / memory.dpi > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("marks", "interval"), [(False, False), (True, False), (True, True)])
@pytest.mark.slow_covers(1)
def test_figures_of_a_grid_fit(tmp_path, make_cell, monkeypatch, width, marks, interval):
    for b, place in enumerate({**place, "model": "r1_qwen_7b", "model_title": "R1-Qwen"} for place in PLACES):
        make_cell([[1]] * 30, **place)
        for i, ratio in enumerate((0.1, 0.2, 0.3, 0.4, 0.5)):
            for j, window in enumerate((500, 1000, 2000, 3000)):
                right = [[int((k + b) % 30 < 30 - 2 * abs(i - 2) * j)] for k in range(30)]
                size = {"keep_ratio": ratio, "local_window": window, "budget": 5000}
                make_cell(right, policy="dynts", done=(i, j) != (4, 3), **size, **place)
        for budget in (4000, 6000):
            make_cell([[1]] * 30, policy="dynts", keep_ratio=0.3, local_window=2000, budget=budget, **place)
    drawn: dict[str, Figure] = {}

    def keep(figure, _, name, **kinds):
        drawn[name.split("_")[0]] = figure
        return {"svg": Path(__file__)}

    monkeypatch.setattr(gallery, "save_figure", keep)
    look = Look(width=width, row=width, marks=marks, interval=interval)
    gallery.draw_all(analyse(load_run(tmp_path / "run")), tmp_path, look)
    assert list(drawn) == ["heatmap", "published", "difference", "mean", "cost", "budget", "memory", "noise"]
    assert {name: wrong for name, figure in drawn.items() if (wrong := faults(figure))} == {}
    assert all(figure.get_figwidth() <= width + 1e-9 for figure in drawn.values())
    # In one column the published grids stand below ours, and panels with intervals one below the other.
    tall = {"published", "heatmap"} if interval and width < 5 else {"published"}
    assert {name for name, figure in drawn.items() if figure.get_figheight() > PAGE_HEIGHT} <= tall
    assert [text for figure in drawn.values() for text in faint(figure)] == []
    # Of each figure every panel shows something, and no percent axis ends above 100.
    every = [axes for figure in drawn.values() for axes in figure.axes]
    assert all(axes.has_data() or axes.images for axes in every)
    assert all(axes.get_ylim()[1] <= 102 for axes in every if "Pass@1 (%)" in axes.get_ylabel())
    if width > 7:
        # With intervals two panels of a column's width stand in a row.
        assert drawn["heatmap"].get_figwidth() == pytest.approx(2 * COLUMN_WIDTH if interval else width)


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_figures_of_replayed_texts_fit(width):
    """As many settings as a large run has, of which a page names those nearest to the full cache."""
    settings = [(policy, ratio) for policy in POLICIES[:20] for ratio in (0.1, 0.2, 0.3, 0.4, 0.5)]
    rows = [
        {"cell_id": f"{policy} {ratio} {name}", "benchmark_title": name, "policy": policy, "variant": ""}
        | {"keep_ratio": ratio, "local_window": 2000, "budget": 5000, "kl": 0.01 * place, "kl_se": 0.002}
        for place, (policy, ratio) in enumerate(settings)
        for name in ("AIME24", "AIME25", "AMC23", "GPQA_D")
    ]
    bins = [
        {"cell_id": row["cell_id"], "by": kind, "from": bound, "kl": 0.001 + row["kl"]}
        for row in rows
        for kind, bounds in (("distance", (1, 9, 33, 129)), ("entropy", (0, 0.01, 0.1, 1)))
        for bound in bounds
    ]
    figure = fidelity_figure(pd.DataFrame(rows), pd.DataFrame(bins), "Toy-Qwen", Look(width=width))
    assert faults(figure) == []
    assert (figure.get_figwidth(), figure.get_figheight() <= PAGE_HEIGHT) == (pytest.approx(width), True)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == [f"{policy_title(policy)} {ratio} / 2000" for policy, ratio in settings[: len(names)]]
    assert len(names) == 40
    title = str(figure.get_label())
    assert title.startswith("Toy-Qwen, trigger 5000: KL of replayed texts")
    assert f"the {len(names)} nearest settings" in title


def test_numbers_of_less_than_a_decade_are_plain():
    one = {"benchmark_title": "GSM8K", "policy": "rkv", "variant": "", "local_window": 48, "budget": 128, "kl_se": 0.01}
    rows = [one | {"cell_id": f"{i}", "keep_ratio": i / 10, "kl": 0.02 * i} for i in (1, 2, 4)]
    bins = [
        {"cell_id": row["cell_id"], "by": kind, "from": bound, "kl": (1.2 + bound) * row["kl"]}
        for row in rows
        for kind, bounds in (("distance", (1, 2)), ("entropy", (0, 1)))
        for bound in bounds
    ]
    figure = fidelity_figure(pd.DataFrame(rows), pd.DataFrame(bins), "Qwen", Look(width=COLUMN_WIDTH))
    assert faults(figure) == []
    assert {"0.04", "0.1"} < {text.get_text() for axes in figure.axes for text in axes.get_yticklabels(which="both")}


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_the_papers_eight_grids_fit_on_a_page(width):
    verdicts = analyse_scores(REFERENCE / GRID_FILE).verdicts
    figure = noise_figure([(verdict.title, verdict.floor) for verdict in verdicts], Look(width=width))
    assert faults(figure) == []
    assert figure.get_figheight() <= PAGE_HEIGHT
    (axes,) = figure.axes
    assert axes.get_window_extent().height / figure.dpi > 8 * 0.4
    strips = axes.get_lines()
    assert len(strips) == 8
    for line in strips:
        dots = np.asarray(line.get_xdata(), dtype=float)
        assert (len(dots), axes.get_xlim()[0] < dots.min(), dots.max() < axes.get_xlim()[1]) == (20, True, True)


@pytest.mark.slow
def test_a_heatmap_of_many_ratios_is_as_wide_as_its_numbers_need(tmp_path):
    one = {"model": "m", "benchmark": "b", "policy": "dynts", "budget": 5000, "problems": 30, "draws": 5}
    places = [(ratio, window) for ratio in range(1, 251) for window in (64, 128)]
    many = pd.DataFrame([one | {"keep_ratio": r / 250, "local_window": w, "pass_at_1": 1 + r / 8} for r, w in places])
    many[many.index // 2 % 5 == 4].to_csv(tmp_path / "scores.csv", index=False)
    found = analyse_scores(tmp_path / "scores.csv")
    figure = grid_figure(found.grids[0], "m", found.metrics, Look(width=COLUMN_WIDTH, row=COLUMN_WIDTH))
    assert (len(figure.axes[0].get_xticks()), faults(figure)) == (50, [])


def test_the_legend_of_the_published_grids_fits():
    grids = pd.read_csv(REFERENCE.parent / "published/paper_grids/grids.csv")
    with matplotlib.rc_context(STYLE):
        figure = paper_grids.figure(grids)
        assert faults(figure) == []
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "20 equal settings, a + b = 1: 50% of the variance between problems" in labels


@pytest.mark.slow
def test_every_text_of_a_trace_has_contrast():
    values = np.linspace(-1.5, 1.5, 60).reshape(6, 10)
    assert faint(attribution_figure(values, list("abcdef"), list("0123456789"), title="t")) == []
    layout = Layout(question=3, thinking=50, answer=5, steps=[0] * 50, pieces=["a"] * 50)
    assert faint(importance_figure(layout, {"true: answer": np.linspace(0, 1, 50)}, title="t")) == []


def test_the_contrast_is_that_of_the_norm():
    figure = Figure(figsize=(2, 1))
    figure.text(0.5, 0.5, "x", color="#777777")
    # Black on white has 21, and #777 is the well-known grey just below 4.5.
    assert dict(contrasts(figure))["x"] == pytest.approx(4.48, abs=0.01)
