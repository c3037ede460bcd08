import pytest
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from scipy import stats

from kvsweep.analysis.figures.rankings import policy_bars_figure
from kvsweep.analysis.figures.style import save_figure
from kvsweep.analysis.notation import COLUMN_WIDTH, PAGE_WIDTH, Look
from kvsweep.analysis.statistics.grids import shared_settings
from tests.analysis.conftest import bare
from tests.analysis.figures.conftest import PLACES, read


def bar_panels(figure: Figure) -> list[Axes]:
    """The panels of scores, without that of lengths."""
    return figure.axes[:-1]


def heights(axes: Axes) -> list[float]:
    (bars,) = (c for c in axes.containers if isinstance(c, BarContainer))
    return [bar.get_width() for bar in bars]


def names(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


@pytest.mark.slow
def test_settings_of_two_or_more_policies_are_shared(metrics):
    setting, of_two = shared_settings(metrics)
    assert (of_two.keep_ratio, of_two.policies) == (0.5, 2)
    assert len(shared_settings(metrics[metrics["policy"] != "window"])) == 1
    assert (setting.budget, setting.keep_ratio, setting.local_window) == (128, 0.3, 48)
    assert setting.title == "keep ratio 0.3, window 48, trigger 128, question on top"
    assert setting.file_part == "ratio0.3_window48_budget128"
    assert setting.policies == 4
    assert set(setting.cells["policy"]) == {"full", "dynts", "window", "unheard_of", "snapkv"}


def test_policies_are_ranked_beside_the_same_place_of_the_question(tmp_path, make_cell):
    for policy in ("h2o", "tova", "knorm"):
        for place in ("free", "pinned"):
            make_cell([[1]], policy=policy, extra={"question": place})
    make_cell([[1]], policy="full")
    settings = shared_settings(read(tmp_path))
    assert [set(setting.cells["question"]) for setting in settings] == [{"free", ""}, {"pinned", ""}]
    assert [setting.title.split(", ")[-1] for setting in settings] == ["question free", "question pinned"]
    assert len({setting.file_part for setting in settings}) == 2


def test_a_figure_of_several_places_of_the_question_says_so(tmp_path, make_cell):
    make_cell([[1]], policy="dynts", extra={"question": "pinned"})
    make_cell([[1]], policy="no_window", extra={"question": "pinned"})
    for policy in ("h2o", "tova", "knorm"):
        make_cell([[1]], policy=policy, extra={"question": "free"})
    (setting,) = shared_settings(read(tmp_path))
    assert setting.title.endswith(", question pinned for DynTS, DynTS (no window), free for the others")


def test_a_policy_without_a_field_belongs_to_every_value_of_it(tmp_path, make_cell):
    for window in (48, 64):
        make_cell([[1]], policy="dynts", local_window=window)
        make_cell([[1]], policy="random", local_window=window)
    bare(make_cell, "h2o", "local_window")
    bare(make_cell, "tova", "local_window", "keep_ratio")
    settings = shared_settings(read(tmp_path))
    assert [(s.local_window, s.policies) for s in settings] == [(48, 4), (64, 4)]


def test_policies_without_any_of_the_fields_share_a_setting(tmp_path, make_cell):
    fields = ("keep_ratio", "local_window", "budget")
    for policy in ("sepllm", "tova", "knorm"):
        bare(make_cell, policy, *fields)
    table = read(tmp_path)
    (setting,) = shared_settings(table)
    assert setting.title == "the policies' own settings, question on top"
    figure = policy_bars_figure(setting, "toy_qwen", table)
    assert names(figure) == ["TOVA", "K-norm", "SepLLM"]
    assert "own settings" in str(figure.get_label())


def test_bars_are_in_order_and_show_the_metrics(tmp_path, metrics):
    column = policy_bars_figure(shared_settings(metrics)[0], "toy_qwen", metrics)
    assert column.get_size_inches()[0] == pytest.approx(COLUMN_WIDTH)
    assert [axes.get_title() for axes in column.axes] == ["mean of 2\nbenchmarks", "cache\nlength"]
    figure = policy_bars_figure(shared_settings(metrics)[0], "toy_qwen", metrics, Look(width=PAGE_WIDTH))
    panels = bar_panels(figure)
    assert [axes.get_title() for axes in figure.axes] == ["mean of 2\nbenchmarks", "Chain", "Add", "cache\nlength"]
    assert names(figure) == [
        "full cache",
        "DynTS",
        "SnapKV (variant=original)",
        "window",
        "unheard_of",
        "SnapKV (variant=dynts_code)",
    ]
    for axes in panels:
        assert heights(axes) == pytest.approx([75, 75, 50, 50, 25, 0])
        assert max(axes.get_xticks()) <= 100
    (whiskers,) = (c for c in panels[1].containers if isinstance(c, ErrorbarContainer))
    ends = [segment[:, 0] for segment in whiskers.lines[2][0].get_segments()]
    error = 100 * stats.sem([1, 1, 1, 0])
    assert ends[0] == pytest.approx([75 - error, 75 + error])
    mean = 100 * stats.sem([1, 1, 1, 0]) / 2**0.5
    assert panels[0].texts[0].get_text() == f"75.0 ± {mean:.1f}"
    # The verdict stands beside a benchmark's number; two problems show nothing.
    assert [text.get_text() for text in panels[1].texts] == ["75.0", "75.0", "50.0", "50.0", "25.0", "0.0"]


@pytest.mark.slow
def test_the_last_panel_is_the_mean_cache_length(metrics):
    figure = policy_bars_figure(shared_settings(metrics)[0], "toy_qwen", metrics)
    chosen = metrics[metrics["keep_ratio"] != 0.5].drop_duplicates(["policy", "variant", "benchmark"])
    lengths = chosen.groupby("policy")["mean_cache_length"].mean()
    held = heights(figure.axes[-1])
    assert [held[0], held[1], held[3]] == pytest.approx(list(lengths[["full", "dynts", "window"]]))
    assert held[0] == 140


def test_missing_and_unfinished_bars_are_marked(tmp_path, make_cell):
    for place in PLACES:
        make_cell([[1]], **place)
        make_cell([[1]], policy="dynts", done=place is PLACES[0], expected=2, **place)
        make_cell([[1 if place is PLACES[0] else None]], policy="window", **place)
    make_cell([[1]], policy="tova", **PLACES[0])
    # The full cache alone: no panel, and no reason for the means to be missing.
    make_cell([[1]], benchmark="toy_regs")
    table = read(tmp_path)
    figure = policy_bars_figure(shared_settings(table)[0], "toy_qwen", table, Look(width=PAGE_WIDTH))
    panels = bar_panels(figure)
    assert [axes.get_title() for axes in panels] == ["mean of 2\nbenchmarks", "Chain", "Add"]
    assert names(figure) == ["full cache", "DynTS*", "TOVA", "window"]
    assert [text.get_text() for text in panels[0].texts] == ["100.0", "100.0", "–", "–"]
    assert [text.get_text() for text in panels[2].texts] == ["100.0", "100.0", "–", "–"]
    note = figure.get_supxlabel().replace("\n", " ")
    assert note == "cache length: mean over the decoding steps   –\xa0no result   *\xa0not finished"


@pytest.mark.slow
def test_a_sweep_without_grades_or_rows_has_bars_to_come(tmp_path, make_cell):
    for place in PLACES:
        for policy in ("dynts", "window", "random"):
            make_cell([[None]], policy=policy, done=False, **place)
    table = read(tmp_path)
    for rows in (table, table.assign(mean_cache_length=float("nan"))):
        (setting,) = shared_settings(rows)
        figure = policy_bars_figure(setting, "toy_qwen", rows)
        assert [text.get_text() for text in bar_panels(figure)[0].texts] == ["–"] * 3
        save_figure(figure, tmp_path, "figure")
