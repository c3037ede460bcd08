from collections.abc import Callable
from pathlib import Path

import matplotlib.font_manager
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from analysis.load import load_run
from analysis.numbers.grids import find_grids, missing_cells
from analysis.numbers.metrics import cell_metrics
from analysis.pictures.budget import budget_figure
from analysis.pictures.heatmap import grid_figure, mean_figure
from analysis.pictures.style import save_figure
from analysis.safe import file_name

MakeCell = Callable[..., Path]

RATIOS, WINDOWS = (0.1, 0.3, 0.5), (16, 48)


@pytest.fixture
def metrics(tmp_path: Path, make_cell: MakeCell) -> pd.DataFrame:
    """Two benchmarks of 3 x 2 cells; of `toy_add`, with window 16: 0.1 missing, 0.3 partial, 0.5 ungraded."""
    for benchmark, title in (("toy_chain", "Chain"), ("toy_add", "Add")):
        place = {"benchmark": benchmark, "benchmark_title": title}
        make_cell([[1], [1], [1], [0]], **place)
        for i, ratio in enumerate(RATIOS):
            for j, window in enumerate(WINDOWS):
                special = benchmark == "toy_add" and window == 16
                if special and ratio == 0.1:
                    continue
                right = 1 + i + j
                rows = [[int(k < right)] for k in range(7)]
                if special and ratio == 0.5:
                    rows = [[None]] * 7
                done = not (special and ratio == 0.3)
                make_cell(rows, policy="dynts", keep_ratio=ratio, local_window=window, done=done, **place)
    for window in WINDOWS:
        make_cell([[0], [1]], policy="random", local_window=window)
    return cell_metrics(load_run(tmp_path / "run"))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_title().startswith("Toy")]


def texts_by_place(axes: Axes) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in axes.texts}


def test_only_a_grid_is_drawn(metrics: pd.DataFrame) -> None:
    (grid,) = find_grids(metrics)
    assert (grid.policy, grid.budget) == ("dynts", 128)
    assert grid.ratios == [0.1, 0.3, 0.5]
    assert grid.windows == [48, 16]
    assert grid.benchmarks == ["toy_chain", "toy_add"]


def test_largest_window_on_top_and_ratio_ascending(metrics: pd.DataFrame) -> None:
    axes = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))[0]
    rows = dict(zip([tick.get_text() for tick in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    columns = dict(zip([tick.get_text() for tick in axes.get_xticklabels()], axes.get_xticks(), strict=True))
    height = {window: axes.transData.transform((0, y))[1] for window, y in rows.items()}
    assert height["48"] > height["16"]
    assert list(columns) == sorted(columns, key=lambda ratio: axes.transData.transform((columns[ratio], 0))[0])
    printed = texts_by_place(axes)
    assert printed[(columns["0.1"], rows["16"])] == "14.3"
    assert printed[(columns["0.5"], rows["48"])] == "57.1"


def test_printed_values_are_the_metrics(metrics: pd.DataFrame) -> None:
    grid = find_grids(metrics)[0]
    cells = grid.cells[(grid.cells["benchmark"] == "toy_chain")]
    axes = panels(grid_figure(grid, "toy_qwen", metrics))[0]
    printed = texts_by_place(axes)
    for row in cells.itertuples():
        place = (grid.ratios.index(row.keep_ratio) + 0.5, grid.windows.index(row.local_window) + 0.5)
        assert printed[place] == f"{100 * row.pass_at_1:.1f}"
    assert len(printed) == len(cells)


def test_missing_partial_and_ungraded_cells_are_marked(metrics: pd.DataFrame) -> None:
    figure = grid_figure(find_grids(metrics)[0], "toy_qwen", metrics)
    axes = panels(figure)[1]
    printed = texts_by_place(axes)
    assert (printed[(0.5, 1.5)], printed[(1.5, 1.5)], printed[(2.5, 1.5)]) == ("–", "28.6*", "?")
    hatched = [p for p in axes.patches if isinstance(p, Rectangle) and p.get_hatch()]
    assert sorted(patch.get_xy() for patch in hatched) == [(0, 1), (2, 1)]
    note = figure.get_supxlabel()
    assert all(words in note for words in ("– no result", "? not graded", "* not finished"))
    assert missing_cells(find_grids(metrics)[0]).to_numpy().tolist() == [["toy_qwen", "toy_add", 0.1, 16.0]]


def test_titles_and_the_full_cache_score(metrics: pd.DataFrame) -> None:
    first, second = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    assert first.get_title() == "Toy-Qwen | Chain\nfull cache 75.0 ± 25.0"
    assert second.get_title().startswith("Toy-Qwen | Add\n")


def test_each_panel_has_its_own_colour_scale(metrics: pd.DataFrame) -> None:
    first, second = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    assert first.collections[0].get_clim() == pytest.approx((100 / 7, 400 / 7))
    assert second.collections[0].get_clim() == pytest.approx((200 / 7, 400 / 7))


def test_the_mean_lacks_what_one_benchmark_lacks(metrics: pd.DataFrame) -> None:
    (axes,) = panels(mean_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    printed = texts_by_place(axes)
    assert axes.get_title().startswith("Toy-Qwen | mean of 2 benchmarks\nfull cache 75.0")
    assert [printed[(x, 1.5)] for x in (0.5, 1.5, 2.5)] == ["–", "28.6*", "–"]
    assert printed[(0.5, 0.5)] == "28.6"


def test_a_grid_without_any_grade_or_spread_renders(tmp_path: Path, make_cell: MakeCell) -> None:
    for ratio in RATIOS:
        make_cell([[1]], policy="dynts", keep_ratio=ratio)
        make_cell([[None]], policy="dynts", keep_ratio=ratio, benchmark="toy_add", benchmark_title="$A_d$ ^")
    table = cell_metrics(load_run(tmp_path / "run"))
    grid = find_grids(table)[0]
    for figure in (grid_figure(grid, "toy_qwen", table), mean_figure(grid, "toy_qwen", table)):
        assert save_figure(figure, tmp_path, "figure")["png"].stat().st_size > 1000


def test_budgets(tmp_path: Path, make_cell: MakeCell) -> None:
    for benchmark in ("toy_chain", "toy_add"):
        make_cell([[1], [1], [0]], benchmark=benchmark, benchmark_title=benchmark)
        for budget, right in ((96, 0), (160, 2)):
            rows = [[int(k < right)] for k in range(3)]
            make_cell(rows, policy="dynts", budget=budget, benchmark=benchmark, benchmark_title=benchmark)
    table = cell_metrics(load_run(tmp_path / "run"))
    assert find_grids(table) == []
    figure = budget_figure(table, "toy_qwen")
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["mean of 2 benchmarks", "toy_chain", "toy_add"]
    drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
    full = np.asarray(drawn["full cache"].get_ydata(), dtype=float)
    assert full == pytest.approx([200 / 3] * 2)
    curve = figure.axes[1].containers[0].lines[0]  # type: ignore[attr-defined]
    assert list(curve.get_xdata()) == [96, 160]
    assert list(curve.get_ydata()) == pytest.approx([0, 200 / 3])
    assert budget_figure(table[table["budget"] != 96], "toy_qwen") is None
    make_cell([[1]], policy="dynts", budget=128, benchmark="toy_add", benchmark_title="toy_add")
    lacking = cell_metrics(load_run(tmp_path / "run"))
    lacking = lacking[(lacking["budget"] != 160) | (lacking["benchmark"] != "toy_add")]
    figure = budget_figure(lacking, "toy_qwen")
    assert figure is not None
    assert all(list(axes.get_xticks()) == [96, 128, 160] for axes in figure.axes)


def test_saving_gives_three_formats_the_same_each_time(tmp_path: Path, metrics: pd.DataFrame) -> None:
    written = []
    for name in ("once", "twice"):
        (tmp_path / name).mkdir()
        figure = grid_figure(find_grids(metrics)[0], "toy_qwen", metrics)
        paths = save_figure(figure, tmp_path / name, "grid")
        written.append([paths[suffix].read_bytes() for suffix in ("png", "svg", "pdf")])
    assert written[0] == written[1]
    png, svg, pdf = written[0]
    assert (png[1:4], pdf[:4]) == (b"PNG", b"%PDF")
    assert b"<svg" in svg


def test_the_font_is_there() -> None:
    path = matplotlib.font_manager.findfont("DejaVu Sans", fallback_to_default=False)
    glyphs = matplotlib.font_manager.get_font(path).get_charmap()
    assert all(ord(character) in glyphs for character in "–±|'*?%")


def test_file_names_are_safe_and_distinct() -> None:
    assert file_name("heatmap", "toy_qwen", "dynts", "128", "") == "heatmap_toy_qwen_dynts_128"
    odd = [file_name("../a b"), file_name("../a_b"), file_name("<a>")]
    assert len(set(odd)) == 3
    assert not any(character in name for name in odd for character in "/<> ")
