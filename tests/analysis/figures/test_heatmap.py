from pathlib import Path

import matplotlib.font_manager
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kvsweep.analysis.figures.heatmap import (
    attribution_figure,
    attribution_table,
    grid_figure,
    limits,
    mean_figure,
    published_figure,
    shortened,
    strongest,
    visible,
)
from kvsweep.analysis.figures.style import save_figure, shade
from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import Look
from kvsweep.analysis.report.page import cell_data, heatmaps
from kvsweep.analysis.statistics.grids import find_grids, missing_cells, published_grid
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.analysis.statistics.sentences import analyse, analyse_scores

RATIOS, WINDOWS = (0.1, 0.3, 0.5), (16, 48)
MARKED = Look(marks=True)


@pytest.fixture
def metrics(run, make_cell):
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
    return cell_metrics(load_run(run))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_title().startswith("Toy")]


def texts_by_place(axes: Axes) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in axes.texts}


def test_largest_window_on_top_and_ratio_ascending(metrics):
    axes = panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))[0]
    rows = dict(zip([tick.get_text() for tick in axes.get_yticklabels()], axes.get_yticks(), strict=True))
    columns = dict(zip([tick.get_text() for tick in axes.get_xticklabels()], axes.get_xticks(), strict=True))
    height = {window: axes.transData.transform((0, y))[1] for window, y in rows.items()}
    assert height["48"] > height["16"]
    assert list(columns) == sorted(columns, key=lambda ratio: axes.transData.transform((columns[ratio], 0))[0])
    printed = texts_by_place(axes)
    assert printed[(columns["0.1"], rows["16"])] == "14.3"
    assert printed[(columns["0.5"], rows["48"])] == "57.1"


@pytest.mark.slow
def test_missing_partial_and_ungraded_cells_are_marked(metrics):
    plain = texts_by_place(panels(grid_figure(find_grids(metrics)[0], "toy_qwen", metrics))[1])
    assert (plain[(0.5, 1.5)], plain[(1.5, 1.5)], plain[(2.5, 1.5)]) == ("–", "28.6", "?")
    figure = grid_figure(find_grids(metrics)[0], "toy_qwen", metrics, MARKED)
    first, axes = panels(figure)
    assert first.get_title() == "Toy-Qwen | Chain\nfull cache 75.0 ± 25.0"
    assert axes.get_title().startswith("Toy-Qwen | Add\n")
    printed = texts_by_place(axes)
    assert (printed[(0.5, 1.5)], printed[(1.5, 1.5)], printed[(2.5, 1.5)]) == ("–", "28.6*", "?")
    # The hatched background is seen through the cells without a value.
    assert axes.patch.get_hatch()
    assert np.argwhere(np.ma.getmaskarray(axes.collections[0].get_array())).tolist() == [[1, 0], [1, 2]]
    note = figure.get_supxlabel().replace("\n", " ").replace("\xa0", " ")
    assert all(words in note for words in ("– no result", "? not graded", "* not finished"))
    assert missing_cells(find_grids(metrics)[0]).to_numpy().tolist() == [["toy_qwen", "toy_add", 0.1, 16.0]]


def test_by_default_an_image_has_only_titles_numbers_axes_and_bars(metrics):
    figure = grid_figure(find_grids(metrics)[0], "toy_qwen", metrics)
    assert [axes.get_title() for axes in panels(figure)] == ["Toy-Qwen | Chain", "Toy-Qwen | Add"]
    assert len(figure.axes) == 4, "a colour bar each"
    assert figure.get_supxlabel() == figure.get_suptitle() == ""
    assert [axes.get_ylabel() for axes in figure.axes if axes not in panels(figure)] == ["", "Pass@1 (%)"]
    assert len({axes.get_subplotspec().rowspan for axes in panels(figure)}) == 1, "one row"
    first = panels(figure)[0]
    # The colours reach to the cells' scores, 14.3 to 57.1, and not to the full cache's, which nothing shows.
    assert first.collections[0].get_clim() == (pytest.approx(100 / 7), pytest.approx(400 / 7))
    assert not any(axes.lines for axes in figure.axes)
    caption = str(figure.get_label())
    assert caption.startswith(
        "Toy-Qwen, DynTS, trigger 128, question on top: Pass@1 in %; each panel has its own colour scale"
    )
    assert "Chain: full cache 75.0 ± 25.0." in caption
    assert caption.endswith("1 of 12 cells: no result. 1 of 12 cells: not graded yet. 1 of 12 cells: not finished.")


@pytest.mark.slow
def test_the_page_and_the_figure_draw_the_same_cells(run, metrics):
    """Texts, ids and inks of the page's buttons beside the figure's, in every scale; settings outside the grid too."""
    found = analyse(load_run(run))
    (grid,) = found.grids
    for scale in ("own", "shared", "diff_from_full"):
        board, others = heatmaps(found, scale)
        for panel, axes in zip(
            board["panels"],
            panels(grid_figure(grid, "toy_qwen", metrics, Look(scale=scale, marks=True), found.verdicts)),
            strict=True,
        ):
            buttons = [cell for _, row in panel["rows"] for cell in row]
            texts = sorted(axes.texts, key=lambda text: text.get_position()[::-1])  # row by row
            assert [text.get_text() for text in texts] == [b[1] + b[2] for b in buttons]
            assert "\n".join(axes.get_title().split("\n")[2:]) == panel["chance"].replace(", by", "\nby")
            inks = [text.get_color() for text in texts]
            assert inks == [button[5] or "0.2" for button in buttons]
            mesh = axes.collections[0]
            colours = [to_hex(colour) for colour in mesh.to_rgba(mesh.get_array()).reshape(-1, 4)]
            assert [b[4] for b in buttons if b[4]] == [c for b, c in zip(buttons, colours, strict=True) if b[4]]
            assert [name for name, _ in panel["rows"]] == ["48", "16"]
            assert panel["columns"] == ["0.1", "0.3", "0.5"]
            (full,) = panel["full"]
            assert (full[1], full[3], full[4]) == ("75.0", "±25.0", ""), "beyond the range of the compressed ones"
        first, second = (
            [cell[0].split("-")[4:6] for _, row in panel["rows"] for cell in row] for panel in board["panels"]
        )
        assert first == [["0.1", "48"], ["0.3", "48"], ["0.5", "48"], ["0.1", "16"], ["0.3", "16"], ["0.5", "16"]]
        assert second[3] == []
        ends = [panel["ends"] for panel in board["panels"]]
        if scale == "own":
            assert ends == [["14.3", "57.1"], ["28.6", "57.1"]]
            assert board["panels"][1]["rows"][1][1][1][3] == "±18.4 (7)"
            (table,) = others["panels"]
            assert [(name, [cell[1] for cell in row]) for name, row in table["rows"]] == [
                ("full cache", ["75.0", "75.0"]),
                ("random 0.3 / 16, trigger 128", ["50.0", "–"]),
                ("random 0.3 / 48, trigger 128", ["50.0", "–"]),
            ]
            # Each column has a scale of its own, and a value alone the middle of it.
            assert table["rows"][1][1][0][4] == shade(0.5, (0, 1), "YlGnBu")[0]
            # The full cache stretches no scale: beyond the best score it has no colour.
            assert table["rows"][0][1][0][4] == ""
        else:
            assert ends[0] == ends[1] == (["14.3", "57.1"] if scale == "shared" else ["-50.0", "+50.0"])


def test_a_scale_reaches_to_all_its_numbers_and_has_a_width():
    nan = float("nan")
    assert limits([3.0, nan, 1.0], difference=False) == (1.0, 3.0)
    assert limits([2.0, 2.0], difference=False) == (1.0, 3.0)
    assert (limits([0.0], difference=False), limits([100.0], difference=False)) == ((0.0, 1.0), (99.0, 100.0))
    assert limits([nan], difference=False) == (0.0, 100.0)
    assert limits([-3.0, 2.0, nan], difference=True) == (-3.0, 3.0)
    assert limits([0.25], difference=True) == (-1.0, 1.0)
    assert shade(0.0, (0.0, 1.0), "Greys") == ("#ffffff", "#000000")
    assert shade(1.0, (0.0, 1.0), "Greys") == ("#000000", "#ffffff")


@pytest.mark.slow
def test_the_mean_lacks_what_one_benchmark_lacks(metrics):
    (axes,) = panels(mean_figure(find_grids(metrics)[0], "toy_qwen", metrics, MARKED))
    printed = texts_by_place(axes)
    assert axes.get_title().startswith("Toy-Qwen | mean of 2 benchmarks\nfull cache 75.0")
    assert [printed[(x, 1.5)] for x in (0.5, 1.5, 2.5)] == ["–", "28.6*", "–"]
    assert printed[(0.5, 0.5)] == "28.6"


@pytest.mark.slow
def test_the_published_grids_have_the_papers_form():
    found = analyse_scores(Path(__file__).parents[3] / "results" / "reference" / "dynts_heatmaps.csv")
    (grid,) = found.grids
    drawn = {}
    for model in found.models:
        figure = grid_figure(grid, model, found.metrics, verdicts=found.verdicts)
        axes = [one for one in figure.axes if " | " in one.get_title()]
        drawn[model] = [one.get_title() for one in axes]
        assert figure.get_figwidth() == pytest.approx(18 / 2.54)
        assert axes[0].get_ylabel() == "Local Window Size"
        assert {one.get_xlabel() for one in axes} == {"Ratio"}
        # Of Llama's figure the windows 500 and 3000 are doubted: one reading of AIME24 swaps them, and that reading is
        # the only one of the other panels. Of Qwen's a second reading has other windows.
        assert [label.get_text() for label in axes[0].get_yticklabels()] == ["3000", "2000", "1000", "500"]
        many = 40 if "llama" in model else 80
        assert f" {many} of 80 cells: a reading of the published figure is doubted." in str(figure.get_label())
        assert "AIME24: span 1" in str(figure.get_label())
        marked = grid_figure(grid, model, found.metrics, MARKED)
        doubted = {y for (_, y), text in texts_by_place(marked.axes[0]).items() if text.endswith("‡")}
        assert doubted == ({0.5, 3.5} if "llama" in model else {0.5, 1.5, 2.5, 3.5})
        assert "‡\xa0a reading of the published figure is doubted" in marked.get_supxlabel()
        assert "full cache" not in marked.get_supxlabel()
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


def test_a_run_of_the_papers_axes_stands_beside_the_published_scores(run, make_cell):
    place = {"model": "r1_qwen_7b", "model_title": "R1-Qwen", "benchmark": "aime24", "benchmark_title": "AIME24"}
    for ratio in (0.3, 0.4):
        for window in (1000, 2000, 2500):
            make_cell([[1], [0]], policy="dynts", keep_ratio=ratio, local_window=window, budget=5000, **place)
    table = cell_metrics(load_run(run))
    (grid,) = find_grids(table)
    published = published_grid(grid, "r1_qwen_7b")
    theirs, ours, gap = published_figure(grid, "r1_qwen_7b", table, published).axes[:3]
    assert [one.get_title().split("\n")[0] for one in (theirs, ours, gap)] == [
        "R1-Qwen | AIME24, published",
        "R1-Qwen | AIME24, ours",
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


@pytest.mark.slow
def test_the_flags_of_the_heatmaps(metrics):
    (grid,) = find_grids(metrics)
    plain = grid_figure(grid, "toy_qwen", metrics, MARKED)
    assert "each panel has its own colour scale" in plain.get_supxlabel().replace("\n", " ")
    assert "95%" not in plain.get_supxlabel()
    look = Look(row=5, columns=1, scale="shared", interval=True, map="RdYlGn", marks=True)
    figure = grid_figure(grid, "toy_qwen", metrics, look)
    first, second = panels(figure)
    assert figure.get_figwidth() == 3.3  # no panel is wider
    assert first.get_subplotspec().colspan == second.get_subplotspec().colspan
    assert first.collections[0].get_clim() == second.collections[0].get_clim()
    assert first.collections[0].get_cmap().name == "RdYlGn"
    assert "one colour scale for all panels" in figure.get_supxlabel().replace("\n", " ")
    assert "below each value its 95% interval" in figure.get_supxlabel().replace("\n", " ")
    sizes = {text.get_fontsize() for one in (*panels(plain), first) for text in one.texts}
    assert len(sizes) == 1, "text stays at its size"


@pytest.mark.slow  # a whole report
def test_several_policies_a_title_and_an_order(run, make_cell, kvsweep, monkeypatch):
    drawn = {}

    def keep(figure, _, name, **kinds):
        drawn[name] = figure
        return {"svg": Path(__file__)}

    monkeypatch.setattr("kvsweep.analysis.report.gallery.save_figure", keep)
    for benchmark, title in (("toy_add", "Add"), ("toy_chain", "Chain")):
        place = {"benchmark": benchmark, "benchmark_title": title}
        make_cell([[0]], **place)
        for policy in ("dynts", "h2o"):
            for ratio in RATIOS:
                make_cell([[0]], policy=policy, keep_ratio=ratio, **place)
    assert kvsweep("report", str(run), "--title", "Mine", "--order", "Chain,toy_add").code == 0
    figure = drawn["heatmap_toy_qwen_h2o_128"]
    assert figure.get_suptitle() == "Mine"
    assert [axes.get_title() for axes in panels(figure)] == ["Toy-Qwen | Chain, H2O", "Toy-Qwen | Add, H2O"]
    figure = drawn["difference_toy_qwen_h2o_128"]
    assert figure.axes[-1].get_ylabel() == "points"
    ended = kvsweep("report", str(run), "--order", "aime24")
    assert (ended.code, "choose among Chain, Add" in ended.err) == (2, True)


@pytest.mark.slow
def test_a_panel_within_chance_is_pale_and_says_so(run, make_cell):
    for benchmark, title in (("toy_chain", "Chain"), ("toy_groups", "Groups")):
        for place, ratio in enumerate((0.1, 0.2, 0.3, 0.4)):
            # On Chain a quarter of the problems more with each ratio; on Groups always all but one of forty.
            right = [[int(k < 10 * (place + 1) if title == "Chain" else k != place)] for k in range(40)]
            make_cell(right, policy="dynts", keep_ratio=ratio, benchmark=benchmark, benchmark_title=title)
            right = [[int(k != 2 * place)] for k in range(40)]
            make_cell(right, policy="dynts", keep_ratio=ratio, local_window=16, benchmark=benchmark)
    found = analyse(load_run(run))
    (grid,) = found.grids
    figure = grid_figure(grid, "toy_qwen", found.metrics, MARKED, found.verdicts)
    chain, groups = panels(figure)
    assert "\nspan 75.0, p < 0.001\nby chance " in chain.get_title()
    assert "\nspan 0.0, p = 1.000\nby chance " in groups.get_title()
    # Of a pale colour at least two thirds are white; the darkest of a panel that has no verdict is far from that.
    assert chain.collections[0].get_facecolors()[:, :3].min() < 0.2
    assert groups.collections[0].cmap([0.0, 0.5, 1.0])[:, :3].min() >= 2 / 3
    assert "a pale panel" in figure.get_supxlabel()
    assert "a pale panel" not in grid_figure(grid, "toy_qwen", found.metrics, MARKED).get_supxlabel()
    _, plain = panels(grid_figure(grid, "toy_qwen", found.metrics, verdicts=found.verdicts))
    assert plain.collections[0].cmap([0.0, 0.5, 1.0])[:, :3].min() < 0.2, "full colours"


@pytest.mark.slow
def test_the_scale_of_differences_is_even(metrics):
    (grid,) = find_grids(metrics)
    drawn = grid_figure(grid, "toy_qwen", metrics, Look(scale="diff_from_full"))
    values = 100 * grid.cells["diff_to_full"].dropna()
    # One lost point has the same colour as one gained has on its side: the scale itself is even.
    for axes in panels(drawn):
        low, high = axes.collections[0].get_clim()
        assert low == -high == pytest.approx(-values.abs().max())


@pytest.mark.slow
def test_a_grid_without_any_grade_or_spread_renders(tmp_path, make_cell):
    for ratio in RATIOS:
        make_cell([[1]], policy="dynts", keep_ratio=ratio)
        make_cell([[None]], policy="dynts", keep_ratio=ratio, benchmark="toy_add", benchmark_title="$A_d$ ^")
    table = cell_metrics(load_run(tmp_path / "run"))
    grid = find_grids(table)[0]
    for figure in (grid_figure(grid, "toy_qwen", table), mean_figure(grid, "toy_qwen", table)):
        assert save_figure(figure, tmp_path, "figure")["png"].stat().st_size > 1000


def test_the_font_comes_with_matplotlib():
    path = Path(matplotlib.font_manager.findfont("STIXGeneral", fallback_to_default=False))
    assert path.is_relative_to(matplotlib.get_data_path())
    glyphs = matplotlib.font_manager.get_font(path).get_charmap()
    assert all(ord(character) in glyphs for character in "–±|'*?%=§‡°✓†↵␣")


VALUES = np.array([[0.12345, -3.5], [-1e-7, 12.3456]])


def test_values_are_printed_in_full_and_clipped_in_colour():
    figure = attribution_figure(VALUES, ["1 ", "\n"], ["3 x 4 = 12", "b"], title="t")
    axes, bar = figure.axes
    assert [t.get_text() for t in axes.texts] == ["0.1235", "-3.5000", "0.0000", "12.3456"]
    mesh = axes.collections[0]
    assert mesh.get_clim() == (-1.0, 1.0)
    red, blue = mesh.to_rgba(-3.5), mesh.to_rgba(12.3)
    assert red == mesh.to_rgba(-1.0)
    assert red[0] > 0.3 > red[2]
    assert blue[2] > 0.3 > blue[0]
    green = attribution_figure(VALUES, ["1 ", "\n"], ["3 x 4 = 12", "b"], title="t", cmap="RdYlGn")
    assert green.axes[0].collections[0].to_rgba(1.0)[1] > 0.3 > green.axes[0].collections[0].to_rgba(1.0)[0]
    assert bar.get_ylabel() == "Token Attribution"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3 x 4 = 12", "b"]


def test_of_very_many_the_strongest_are_shown():
    values = np.zeros((500, 60))
    values[::5, 3] = 0.01
    values[499, 59] = -2.0
    values[0, 7:20] = 0.0001
    figure = attribution_figure(values, [str(n) for n in range(500)], [str(n) for n in range(60)], title="t")
    axes = figure.axes[0]
    assert axes.collections[0].get_array().shape == (36, 10)
    shown = [int(t.get_text()) for t in axes.get_yticklabels()]
    assert shown == [*range(0, 175, 5), 499]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3", *map(str, range(7, 15)), "59"]
    assert axes.xaxis.get_label_position() == "top"
    note = figure.get_supxlabel()
    assert "the colours end at -1 and 1" in note
    assert "36 of 500 tokens and 10 of 60 steps" in note.replace("\n", " ")


def test_tokens_and_steps_can_be_told_apart():
    assert visible(" a\n") == "␣a↵"
    assert shortened("a\n b") == "a b"
    assert len(shortened("x" * 99)) == 32
    assert shortened("x" * 32) == "x" * 32
    assert strongest(np.array([[0.1, 0.001, -1.0]]), axis=0, most=2) == [0, 2]
    assert shortened("So the total of all is 3 x 4 = 12, and this is even.") == "So the total of all i…3 x 4 = 12"
    assert attribution_table(VALUES, ["1", "2"], ["a", "b"])["b"].tolist() == [-3.5, 12.3456]
