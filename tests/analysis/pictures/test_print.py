"""All figures of a report at print size: no wider than a page, nothing outside it, and every text has contrast."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from kvsweep.analysis.format import PAGE_WIDTH, Look
from kvsweep.analysis.load import load_run
from kvsweep.analysis.numbers.findings import analyse
from kvsweep.analysis.pictures.attribution import attribution_figure
from kvsweep.analysis.pictures.importance import Layout, importance_figure
from kvsweep.analysis.report import gallery

MakeCell = Callable[..., Path]

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


@pytest.fixture
def figures(tmp_path: Path, make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Those of a small run with the demo's shape, whose scores are 0 to 100%: grid, policies, budgets, published."""
    for b, benchmark in enumerate(("aime24", "amc23")):
        place = {"benchmark": benchmark, "benchmark_title": benchmark.upper(), "model": "r1_qwen_7b"}
        place |= {"model_title": "R1-Qwen"}
        make_cell([[1]] * 11, **place)
        for i, ratio in enumerate((0.1, 0.2, 0.3, 0.4, 0.5)):
            for j, window in enumerate((500, 1000, 2000, 3000)):
                if (b, i, j) != (1, 0, 0):
                    right = (3 * i + 5 * j * b + j) % 12
                    size = {"keep_ratio": ratio, "local_window": window, "budget": 5000}
                    make_cell([[int(k < right)] for k in range(11)], policy="dynts", **size, **place)
        for policy in ("window", "random"):
            size = {"keep_ratio": 0.3, "local_window": 2000, "budget": 5000}
            make_cell([[0]] * 11, policy=policy, **size, **place)
        make_cell([[1]] * 11, policy="dynts", keep_ratio=0.3, local_window=2000, budget=6000, **place)
    drawn: list[Figure] = []

    def keep(figure: Figure, *_: object) -> dict[str, Path]:
        drawn.append(figure)
        return {"svg": Path(__file__)}

    monkeypatch.setattr(gallery, "save_figure", keep)
    pictures = gallery.draw_all(analyse(load_run(tmp_path / "run")), tmp_path, Look())
    names = [picture.name.split("_")[0] for picture in pictures]
    assert names == ["heatmap", "published", "difference", "mean", "budget", "policies", "memory", "cost", "noise"]
    values = np.linspace(-1.5, 1.5, 60).reshape(6, 10)
    drawn.append(attribution_figure(values, list("abcdef"), list("0123456789"), title="t"))
    layout = Layout(question=3, thinking=50, answer=5, steps=[0] * 50, pieces=["a"] * 50)
    drawn.append(importance_figure(layout, {"true: answer": np.linspace(0, 1, 50)}, title="t"))
    return drawn


@pytest.mark.slow
def test_every_text_has_contrast_and_every_figure_fits_the_page(figures: list[Figure]) -> None:
    faint = [(text, value) for figure in figures for text, value in contrasts(figure) if value < LEAST]
    assert faint == []
    assert all(figure.get_figwidth() <= PAGE_WIDTH + 1e-9 for figure in figures)
    # Of each figure every panel shows something.
    assert all(axes.has_data() or axes.images for figure in figures for axes in figure.axes)
    # No percent axis ends above 100, and no tick says so.
    shown = [axes for figure in figures for axes in figure.axes if "Pass@1 (%)" in axes.get_ylabel()]
    assert shown
    assert all(max(axes.get_yticks()) <= 100 for axes in shown)


def test_the_contrast_is_that_of_the_norm() -> None:
    figure = Figure(figsize=(2, 1))
    figure.text(0.5, 0.5, "x", color="#777777")
    # Black on white has 21, and #777 is the well-known grey just below 4.5.
    assert dict(contrasts(figure))["x"] == pytest.approx(4.48, abs=0.01)
