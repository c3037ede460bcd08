from collections.abc import Callable
from pathlib import Path

import matplotlib.font_manager
import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kvsweep.analysis.format import Look
from kvsweep.analysis.load import load_run
from kvsweep.analysis.numbers.findings import analyse_scores
from kvsweep.analysis.numbers.grids import find_grids, missing_cells
from kvsweep.analysis.numbers.metrics import cell_metrics
from kvsweep.analysis.numbers.reference import published_grid
from kvsweep.analysis.pictures.heatmap import grid_figure, mean_figure, published_figure
from kvsweep.analysis.pictures.style import save_figure
from kvsweep.analysis.pictures.tradeoffs import budget_figure
from kvsweep.analysis.report.board import cell_data
from kvsweep.base.escape import file_name

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
    note = figure.get_supxlabel().replace("\n", " ")
    assert all(words in note for words in ("– no result", "? not graded", "* not finished"))
    assert missing_cells(find_grids(metrics)[0]).to_numpy().tolist() == [["toy_qwen", "toy_add", 0.1, 16.0]]


def test_titles_and_the_full_cache_score(metrics: pd.DataFrame) -> None:
    first, second = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    assert first.get_title() == "Toy-Qwen | Chain\nfull cache 75.0 ± 25.0"
    assert second.get_title().startswith("Toy-Qwen | Add\n")


def test_each_panel_has_its_own_colour_scale(metrics: pd.DataFrame) -> None:
    first, second = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    # The scale reaches to the full cache's score, 75.
    assert first.collections[0].get_clim() == pytest.approx((100 / 7, 75))
    assert second.collections[0].get_clim() == pytest.approx((200 / 7, 75))


def test_the_mean_lacks_what_one_benchmark_lacks(metrics: pd.DataFrame) -> None:
    (axes,) = panels(mean_figure(find_grids(metrics)[0], "toy_qwen", metrics))
    printed = texts_by_place(axes)
    assert axes.get_title().startswith("Toy-Qwen | mean of 2 benchmarks\nfull cache 75.0")
    assert [printed[(x, 1.5)] for x in (0.5, 1.5, 2.5)] == ["–", "28.6*", "–"]
    assert printed[(0.5, 0.5)] == "28.6"


def test_the_published_grids_have_the_papers_form() -> None:
    found = analyse_scores(Path(__file__).parents[3] / "results" / "reference" / "dynts_heatmaps.csv")
    (grid,) = found.grids
    drawn = {}
    for model in found.models:
        figure = grid_figure(grid, model, found.metrics)
        axes = [one for one in figure.axes if " | " in one.get_title()]
        drawn[model] = [one.get_title() for one in axes]
        assert len(figure.axes) == 8, "each panel has its own colour bar"
        assert len({one.get_subplotspec().rowspan for one in axes}) == 1, "one row"
        assert figure.get_figwidth() == pytest.approx(18 / 2.54)
        assert axes[0].get_ylabel() == "Local Window Size"
        assert {one.get_xlabel() for one in axes} == {"Ratio"}
        # Of Llama's figure the windows 500 and 3000 are doubted: one reading of AIME24 swaps them, and that reading is
        # the only one of the other panels. Of Qwen's a second reading has other windows.
        windows = [label.get_text() for label in axes[0].get_yticklabels()]
        assert windows == (
            ["3000‡", "2000", "1000", "500‡"] if "llama" in model else ["3000‡", "2000‡", "1000‡", "500‡"]
        )
        assert "‡ a reading of the published figure is doubted" in figure.get_supxlabel()
        assert "full cache" not in figure.get_supxlabel()
        assert [label.get_text() for label in axes[3].get_xticklabels()] == ["0.1", "0.2", "0.3", "0.4", "0.5"]
        # The rows of window 2000 as the paper's figure prints them.
        printed = [[texts_by_place(one)[x + 0.5, 1.5] for x in range(5)] for one in axes]
        assert printed == PUBLISHED_2000[str(model)]
    assert drawn["r1_qwen_7b"] == [f"R1-Qwen | {name}" for name in ("AIME24", "AIME25", "AMC23", "GPQA_D")]
    shown = {(cell["benchmark_title"], cell["local_window"]): cell["marks"] for cell in cell_data(found.metrics)[80:]}
    doubted = {"": (1000, 2000), "‡": (500, 3000)}
    assert shown == {(name, w): mark for mark in doubted for w in doubted[mark] for name, _ in shown}


PUBLISHED_2000 = {
    "r1_qwen_7b": [
        ["42.7", "44.0", "47.3", "52.0", "43.3"],
        ["32.7", "30.7", "34.0", "36.7", "36.0"],
        ["87.5", "85.0", "87.5", "88.5", "87.5"],
        ["46.7", "48.1", "49.7", "48.2", "48.0"],
    ],
    "r1_llama_8b": [
        ["44.7", "47.3", "49.3", "46.0", "43.3"],
        ["28.7", "27.3", "28.0", "26.7", "26.7"],
        ["87.5", "88.0", "86.0", "88.5", "86.5"],
        ["45.5", "46.6", "46.5", "46.8", "45.5"],
    ],
}


def test_a_run_of_the_papers_axes_stands_beside_the_published_scores(tmp_path: Path, make_cell: MakeCell) -> None:
    place = {"model": "r1_qwen_7b", "model_title": "R1-Qwen", "benchmark": "aime24", "benchmark_title": "AIME'24"}
    for ratio in (0.3, 0.4):
        for window in (1000, 2000, 2500):
            make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, local_window=window, budget=5000, **place)
    table = cell_metrics(load_run(tmp_path / "run"))
    (grid,) = find_grids(table)
    published = published_grid(grid, "r1_qwen_7b")
    assert published is not None
    theirs, ours, gap = published_figure(grid, "r1_qwen_7b", table, published).axes[:3]
    assert [one.get_title().split("\n")[0] for one in (theirs, ours, gap)] == [
        "R1-Qwen | AIME'24, published",
        "R1-Qwen | AIME'24, ours",
        "ours minus published",
    ]
    # Windows 2500 (which the paper lacks), 2000 and 1000 from the top; 45.3 and 42.0, 47.3 and 52.0 are the paper's.
    places = [(x, y) for y in (0.5, 1.5, 2.5) for x in (0.5, 1.5)]
    printed = [[texts_by_place(one)[place] for place in places] for one in (theirs, ours, gap)]
    assert printed[0] == ["–", "–", "47.3", "52.0", "45.3", "42.0"]
    assert printed[1] == ["50.0"] * 6
    assert printed[2] == ["–", "–", "+2.7", "-2.0", "+4.7", "+8.0"]
    assert theirs.collections[0].get_clim() == ours.collections[0].get_clim() == (42.0, 52.0)
    toy = find_grids(table.assign(model="toy_qwen"))[0]
    assert published_grid(toy, "toy_qwen") is None


def test_the_flags_of_the_heatmaps(metrics: pd.DataFrame) -> None:
    (grid,) = find_grids(metrics)
    plain = grid_figure(grid, "toy_qwen", metrics)
    assert "each panel has its own colour scale" in plain.get_supxlabel().replace("\n", " ")
    assert "95%" not in plain.get_supxlabel()
    look = Look(width=5, columns=1, scale="shared", interval=True, map="RdYlGn")
    figure = grid_figure(grid, "toy_qwen", metrics, look)
    first, second = panels(figure)
    assert figure.get_figwidth() == 3.55  # no panel is wider
    assert first.get_subplotspec().colspan == second.get_subplotspec().colspan
    assert first.collections[0].get_clim() == second.collections[0].get_clim()
    assert first.collections[0].get_cmap().name == "RdYlGn"
    assert "one colour scale for all panels" in figure.get_supxlabel().replace("\n", " ")
    assert "below each value its 95% interval" in figure.get_supxlabel().replace("\n", " ")
    sizes = {text.get_fontsize() for one in (*panels(plain), first) for text in one.texts}
    assert len(sizes) == 1, "text stays at its size"


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
