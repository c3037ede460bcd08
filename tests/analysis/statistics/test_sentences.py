import itertools
import json
import re
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from kvsweep.analysis.compare import compare, in_words
from kvsweep.analysis.figures.cost import lengths_by_step
from kvsweep.analysis.figures.rankings import noise_figure
from kvsweep.analysis.load import load_run
from kvsweep.analysis.notation import POLICY_TITLES
from kvsweep.analysis.report.build import build_report
from kvsweep.analysis.report.drilldown import cells_data
from kvsweep.analysis.report.page import run_page
from kvsweep.analysis.report.tables import summary_table
from kvsweep.analysis.statistics.grids import REFERENCE, find_grids
from kvsweep.analysis.statistics.metrics import cell_metrics, graded_rows
from kvsweep.analysis.statistics.sentences import PanelVerdict, analyse, analyse_scores, panel_verdicts
from tests.analysis.conftest import MakeCell
from tests.program import compare as compare_main

PUBLISHED = REFERENCE / "dynts_heatmaps.csv"


@pytest.mark.slow  # a page of eight grids; test_layout.py and test_heatmap.py draw them
@pytest.mark.release
def test_the_published_llama_aime24_grid_is_within_the_noise(tmp_path, monkeypatch):
    monkeypatch.setattr("kvsweep.analysis.figures.style.FORMATS", ("svg",))  # of eight grids
    named = {verdict.title: verdict for verdict in analyse_scores(PUBLISHED).verdicts}
    verdict = named["R1-Llama | AIME24"]
    assert verdict.floor.range == pytest.approx(0.1)
    # 20 means of 150 answers, 65% of whose variance lies between problems, span 3.73 standard errors in the mean.
    assert verdict.floor.expected_range[1] == pytest.approx(3.73 * (0.44 * 0.56 * 0.35 / 150) ** 0.5, abs=0.006)
    html = build_report(PUBLISHED, folder=tmp_path / "out").read_text()
    assert re.search(r"R1-Llama \| AIME24</td><td>10\.0</td>", html)
    assert "one of four readings of the figure swaps the rows" in html


def test_a_grid_in_which_all_answers_are_alike_has_no_noise(tmp_path):
    head = "model,benchmark,keep_ratio,local_window,problems,draws,pass_at_1"
    lines = [f"m,{score},{ratio},{w},30,5,{score}" for score in (0, 100) for ratio in (0.1, 0.2) for w in (1, 2)]
    table = tmp_path / "alike.csv"
    table.write_text("\n".join([head, *lines, "m,alone,0.1,1,30,5,50"]))
    for verdict in analyse_scores(table).verdicts:
        assert verdict.floor.expected_range == (0, 0, 0)
        assert verdict.floor.p == 1


def verdicts(run: Path, margin: float | None = None) -> list[PanelVerdict]:
    loaded = load_run(run)
    (grid,) = find_grids(cell_metrics(loaded, margin))
    return panel_verdicts(grid, graded_rows(loaded))


def verdict_lines(run: Path, margin: float | None = None) -> str:
    (verdict,) = verdicts(run, margin)
    return "\n".join(verdict.lines)


def test_a_panel_where_eviction_hardly_fires_is_called_that(run, make_cell):
    right = [[i % 2] for i in range(12)]
    make_cell(right)
    for ratio in (0.1, 0.2, 0.3):
        make_cell(right, policy="dynts", keep_ratio=ratio, completion={"evictions": []})
    words = verdict_lines(run)
    assert "No setting is shown to matter: scores span 0.0, p = 1.000, by chance" in words
    assert "this panel mostly compares the full cache with itself" in words
    # That nothing differs in twelve answers shows nothing, and 42 draws of each of twelve problems are no plan.
    assert "No setting is shown to be safe, that is, to lose less than 5 points" in words
    assert "as the full cache, 140 problems like these" in words
    assert "Recommended" not in words


def panel(make_cell: MakeCell, losses: list[int], **settings: Any):
    """A full cache that solves 80 of 100 problems, four draws each, and cells that lose so many of the 80."""
    make_cell([[1] * 4] * 80 + [[0] * 4] * 20)
    for place, lost in enumerate(losses):
        correct = [[1] * 4] * (80 - lost) + [[0] * 4] * (20 + lost)
        make_cell(correct, policy="dynts", keep_ratio=0.1 * (place + 1), **settings)


@pytest.mark.slow
def test_the_smallest_cache_that_is_safe_is_recommended(run, make_cell):
    panel(make_cell, [60, 12, 1, 0])
    lines = verdict_lines(run).splitlines()
    assert lines[0].startswith("Recommended: keep ratio 0.3, window 48, the smallest cache that is safe in a search")
    assert "(difference -1.0 points, interval -" in lines[0]
    assert lines[1] == "4 settings on 100 problems, 4 draws each: 2 safe, 2 worse."
    assert "among the 4 settings on this benchmark (Holm)" in lines[2]
    assert "It is not shown for other problems like these" in lines[3]
    assert "It is shown for other problems like these" in verdict_lines(run, margin=0.3)
    # 400 answers that do not differ exclude a loss of 2%, not one of 0.5%.
    lines = verdict_lines(run, margin=0.02).splitlines()
    assert lines[0].startswith("Recommended: keep ratio 0.4")
    lines = verdict_lines(run, margin=0.005).splitlines()
    assert lines[0].startswith("No setting is shown to be safe, that is, to lose less than 0.5 points against the full")
    assert "The nearest is keep ratio 0.4, window 48 (unclear, difference +0.0 points" in lines[0]
    assert "draws per problem would show it, or" in lines[0]
    assert lines[1].endswith("0 safe, 2 unclear, 2 worse.")


@pytest.mark.slow
def test_nothing_is_recommended_beside_a_full_cache_that_solves_nothing(run, make_cell):
    for policy in ({}, *({"policy": "dynts", "keep_ratio": ratio} for ratio in (0.1, 0.2, 0.3))):
        make_cell([[0] * 4] * 100, **policy)
    lines = verdict_lines(run).splitlines()
    assert lines[0].startswith("No setting is shown to be safe, that is")
    why = "The full cache is right in no more than 5.0% of its answers, so nothing can be called safe beside it."
    assert lines[0].endswith(why)
    assert lines[1].endswith("0 safe, 3 unclear.")
    page = build_report(run).read_text()
    assert why in page


def test_where_every_setting_loses_none_is_recommended(run, make_cell):
    panel(make_cell, [60, 20, 12])
    lines = verdict_lines(run).splitlines()
    assert lines[0].startswith("Every setting is worse; the nearest loses 12.0 points (keep ratio 0.3, window 48, ")
    assert "safe" not in "".join(lines)


@pytest.mark.slow
def test_policies_are_compared_in_pairs_with_holms_correction(run, make_cell):
    rng = np.random.default_rng(0)
    truth = {"full": 0.95, "dynts": 0.9, "window": 0.3, "random": 0.2}
    right = {policy: (rng.random((10, 2)) < share).astype(int) for policy, share in truth.items()}
    for policy, answers in right.items():
        make_cell(answers.tolist(), policy=policy)
    (pairs,) = analyse(load_run(run)).pairs
    means = {POLICY_TITLES[policy]: answers.mean(1) for policy, answers in right.items() if policy != "full"}
    order = sorted(means, key=lambda name: -means[name].mean())
    assert list(pairs.table.index) == order
    expected = {}
    for first, second in itertools.combinations(order, 2):
        difference = means[first] - means[second]
        test = stats.permutation_test((difference,), np.mean, permutation_type="samples", n_resamples=np.inf)
        expected[first, second] = difference.mean(), test.pvalue
    holm = multipletests([p for _, p in expected.values()], method="holm")[1]
    for ((first, second), (difference, _)), p in zip(expected.items(), holm, strict=True):
        label = "better " if p < 0.05 else ""
        assert pairs.table.loc[first, second] == f"{label}{100 * difference:+.1f} ({p:.3f})"
    assert (holm < 0.05).tolist() == [False, True, False]
    assert pairs.line == "1 of 3 pairs differ. The best, DynTS, is not shown to be better than window."
    html = run_page(analyse(load_run(run)), [], {}, {})
    assert "DynTS is better than random (1 of 1). In brackets" in html
    assert f"<td>{pairs.table.iloc[0, -1]}</td>" in html


def test_the_first_of_a_ranking_may_be_worse_over_the_problems_that_both_have(run, make_cell):
    make_cell([[1]] * 100)
    make_cell([[0]] * 16 + [[1]] * 84, policy="dynts")
    make_cell([[1]] * 12 + [[0]] * 4, policy="h2o")
    make_cell([[0]] * 100, policy="random")
    (pairs,) = analyse(load_run(run)).pairs
    assert pairs.table.loc["DynTS", "H2O"].startswith("worse -75.0")
    assert "The best, DynTS, is not shown to be better than H2O" in pairs.line


def test_two_policies_are_compared_at_all_settings_that_they_share(run, make_cell):
    make_cell([[1]] * 40)
    differ = [(30, 2), (5, 5), (2, 20)]  # problems that only one of the two solves
    for size, (won, lost) in enumerate(differ, 1):
        both = [[1]] * (40 - won - lost)
        make_cell([[1]] * won + [[0]] * lost + both, policy="dynts", keep_ratio=size / 10)
        make_cell([[0]] * won + [[1]] * lost + both, policy="h2o", keep_ratio=size / 10)
    # Of answers with one draw the sign flips are the sign test of those that differ.
    expected = [stats.binomtest(won, won + lost).pvalue for won, lost in differ]
    found = analyse(load_run(run))
    (pairs,) = found.pairs
    assert not found.charted
    assert pairs.title == "Toy-Qwen | Chain, DynTS minus H2O"
    holm = multipletests(expected, method="holm")[1]
    assert pairs.table["p"].astype(str).str.removeprefix("<").astype(float).to_numpy() == pytest.approx(holm, abs=0.02)
    assert pairs.table["DynTS is"].tolist() == ["better", "no difference shown", "worse"]
    html = run_page(found, [], {}, {})
    top, _, rest = html.partition("<h2 id=")
    better = "DynTS is better than H2O (1 of 3); H2O is better than DynTS (1 of 3). In"
    assert f'<a href="#policies">Policy against policy</a>: {better}' in top
    assert "<td>better</td>" in rest


@pytest.mark.slow
def test_an_unfinished_panel_names_no_best(run, make_cell):
    panel(make_cell, [60, 12, 0], done=False, expected=800)
    lines = verdict_lines(run).splitlines()
    assert lines[0].startswith("Unfinished: 1,200 of 2,400 completions are stored.")
    assert "best" not in "".join(lines)
    assert "Recommended" not in "".join(lines)
    table = cell_metrics(load_run(run))
    assert set(table["decision"].dropna()) == {"unclear"}


def test_a_cell_whose_draws_were_completed_is_judged_by_all_of_them(run, make_cell):
    make_cell([[1] * 8] * 100)
    rounds = {"rounds": [2, 4, 8], "margin": 5}
    make_cell([[1] * 2 + [0] * 6] * 100, policy="dynts", keep_ratio=0.1, recorded=rounds)
    row = cell_metrics(load_run(run)).set_index("policy").loc["dynts"]
    assert (row["decision"], row["diff_to_full"], row["stopped_early"]) == ("worse", -0.75, False)
    assert row["these_low"] < -0.75 < row["these_high"] < -0.5


@pytest.mark.slow
def test_a_sequential_run_says_so_and_keeps_its_decisions(run, make_cell):
    make_cell([[1] * 8] * 50 + [[0] * 8] * 50)
    early, late, same = [[0] * 2] * 100, [[0, 1] * 4] * 97 + [[0] * 8] * 3, [[1] * 2] * 50 + [[0] * 2] * 50
    for ratio, right in ((0.1, early), (0.3, late), (0.5, same)):
        make_cell(right, policy="dynts", keep_ratio=ratio, recorded={"rounds": [2, 4, 8], "margin": 5})
    table = cell_metrics(load_run(run)).set_index("keep_ratio")
    assert table["decision"].dropna().to_dict() == {0.1: "worse", 0.3: "unclear", 0.5: "safe"}
    assert table["stopped_early"].dropna().to_dict() == {0.1: True, 0.3: False, 0.5: True}
    lines = verdict_lines(run).splitlines()
    assert lines[1].startswith("3 settings on 100 problems, 2 to 8 draws each (in rounds of 2, 4, 8; a decided setting")
    assert "on the 200 answers that every setting has" in "".join(lines)
    html = run_page(analyse(load_run(run)), [], {}, {})
    assert "sequential: in rounds of 2, 4, 8, until a cell was decided" in html
    # A cell that stopped early is marked.
    (marks,) = [re.findall(r'"marks":"([^"]*)"', html)]
    assert marks == ["", "°", "", "°"]
    assert "50.0 ± 5.0°" in html
    printed = summary_table(run)
    assert "50.0 ± 5.0° " in printed
    assert "; ° decided early" in printed


@pytest.mark.slow
def test_a_run_of_one_round_leaves_no_cell_fewer_draws(run, make_cell):
    """`until=decided draws=2` has one round, in which every cell gets all draws."""
    make_cell([[1] * 2] * 50 + [[0] * 2] * 50)
    for ratio in (0.1, 0.3, 0.5):
        right = [[1] * 2] * 50 + [[0] * 2] * 50
        make_cell(right, policy="dynts", keep_ratio=ratio, recorded={"rounds": [2], "margin": 5})
    lines = verdict_lines(run)
    assert "3 settings on 100 problems, 2 draws each:" in lines
    assert "round" not in lines
    assert "sequential" not in run_page(analyse(load_run(run)), [], {}, {})


def test_truncated_texts_that_loop_are_counted(run, make_cell):
    text = {"stop_reason": "length", "token_ids": [9, 8, *[1, 2, 3, 4] * 30], "num_tokens": 122}
    make_cell([[1], [1]])
    make_cell([[0], [0]], policy="dynts", keep_ratio=0.1, completion=text)
    make_cell([[0], [0]], policy="dynts", keep_ratio=0.2, completion=text | {"token_ids": list(range(122))})
    make_cell([[1], [0]], policy="dynts", keep_ratio=0.3)
    columns = ["truncated_texts", "looping_texts", "loop_period", "loop_count", "tokens_in_loops"]
    table = cell_metrics(load_run(run)).set_index("keep_ratio")[columns]
    assert table.loc[0.1].tolist() == [2, 2, 4, 30, 2 * (120 - 64)]
    assert table.loc[0.2].fillna(-1).tolist() == [2, 0, -1, -1, 0]
    assert table.loc[0.3].fillna(-1).tolist() == [0, 0, -1, -1, 0]
    said = verdict_lines(run)
    assert "At keep ratio 0.1, 2 of 2 truncated texts loop: they repeat their end until they are cut off." in said
    assert f"would save {100 * 56 / 122:.1f}% of the tokens there" in said
    shown = dict(cells_data(load_run(run), completions=100))
    loops = [json.loads(zlib.decompress(b64decode(data)))["draws"][0].get("loop") for _, data in sorted(shown.items())]
    assert loops == [[4, 30], None, None, None]


def test_a_page_of_few_completions_shows_those_that_its_cells_lose(tmp_path, make_cell):
    full = make_cell([[1], [1], [1], [0]])
    losing = {make_cell([[1], [1], [0], [1]], policy="dynts", keep_ratio=0.1).name: "2"}
    losing |= {make_cell([[1], [0], [1], [0]], policy="dynts", keep_ratio=ratio).name: "1" for ratio in (0.2, 0.3)}
    run = load_run(tmp_path / "run")
    problems = sorted(run.completions["problem_id"].unique())
    for shown, lost in ((1, {"1"}), (2, {"1", "2"}), (3, {"0", "1", "2"})):
        for cell_id, data in cells_data(run, completions=shown * len(run.cells)):
            found = {draw["problem"] for draw in json.loads(zlib.decompress(b64decode(data)))["draws"]}
            assert found == {problems[int(number)] for number in lost}
            assert cell_id == full.name or shown == 1 or problems[int(losing[cell_id])] in found


@pytest.mark.slow
def test_the_grey_band_holds_the_settings_tied_with_the_best(run, make_cell):
    panel(make_cell, [60, 12, 1, 0])
    (verdict,) = verdicts(run)
    axes = noise_figure([(verdict.title, verdict.floor)]).axes[0]
    (band,) = axes.patches
    low, high = band.get_extents().transformed(axes.transData.inverted()).intervalx
    assert (low, high) == (pytest.approx(80 - 100 * verdict.floor.critical), pytest.approx(80))
    (dots,) = axes.lines
    inside = int((np.asarray(dots.get_xdata()) >= low - 1e-9).sum())
    assert inside == 2
    assert "Statistically tied with it: 1 other setting," in "".join(verdict.lines)


def test_where_eviction_acted(run, make_cell):
    make_cell([[1], [1], [0], [1]])
    untouched = {"evictions": []}
    make_cell([[0], [1], [1], [0]], policy="dynts", texts=[{}, untouched, {}, untouched])
    row = cell_metrics(load_run(run)).set_index("policy").loc["dynts"]
    assert (row["regressions"], row["gains"]) == (2, 1)
    assert (row["diff_evicted"], row["diff_untouched"], row["untouched_differ"]) == (0, -0.5, 1)
    assert row["evicted"] == 0.5


@pytest.mark.slow
def test_random_weights_have_no_accuracy(run, make_cell):
    for ratio in (0.1, 0.2, 0.3):
        make_cell([[1], [1]], policy="dynts", keep_ratio=ratio, cell={"model": {"random_weights": True}})
    table = cell_metrics(load_run(run))
    assert table[["pass_at_1", "correct", "ci_low"]].isna().all(axis=None)
    html = build_report(run).read_text()
    assert "Toy-Qwen (random weights)" in html
    assert "100.0 ±" not in html
    assert '"outcome":"correct"' not in html


@pytest.mark.slow
def test_two_runs_are_paired(tmp_path, run, make_cell, capsys):
    make_cell([[1]] * 12)
    run.rename(tmp_path / "a")
    make_cell([[0]] * 10 + [[1]] * 2, seed=1)
    run.rename(tmp_path / "b")
    table = compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))
    assert table["difference"].tolist() == [pytest.approx(-10 / 12)]
    assert table["p"].tolist() == [pytest.approx(2 / 2**10)]
    assert "A and B differ in 1 of 1 cell (B minus A" in in_words(table)
    compare_main([str(tmp_path / "a"), str(tmp_path / "b"), "--csv", str(tmp_path / "all.csv")])
    said = capsys.readouterr().out
    assert "-83.3" in said
    assert "Toy-Qwen | Chain: 1 cell, B worse in 1, better in 0, mean -83.3 points" in said
    assert pd.read_csv(tmp_path / "all.csv")["difference"].tolist() == table["difference"].tolist()


def test_the_comparison_of_many_cells_fits_on_a_screen(tmp_path, make_cell):
    for run, right in (("a", 1), ("b", 0)):
        for benchmark in ("toy_chain", "toy_add"):
            for ratio in range(1, 13):
                same = [[1]] * (12 - ratio)  # the more alike, the smaller the difference
                place = {"benchmark": benchmark, "benchmark_title": benchmark}
                make_cell([[right]] * (10 + ratio) + same, policy="dynts", keep_ratio=ratio / 100, **place)
        (tmp_path / "run").rename(tmp_path / run)
    said = in_words(compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))).splitlines()
    assert len(said) <= 24
    assert [line[:5] for line in said[15:16]] == ["    -"]
    assert said[-3].startswith("Toy-Qwen | toy_chain: 12 cells, B worse in 12, better in 0")
    assert said[-1] == "A and B differ in 24 of 24 cells (B minus A, paired, Holm, 5%), the 8 largest above."
    differences = [float(line.split()[0]) for line in said if line.startswith("    ")]
    assert len(differences) == 8
    assert differences == sorted(differences, reverse=True)
    assert differences[-1] == -100.0


def test_lengths_by_step_add_up_to_the_cache_rows(tmp_path, make_cell):
    make_cell([[1], [1]], policy="dynts")
    run = load_run(tmp_path / "run")
    live, held, full = lengths_by_step(run.completions, run.events)
    assert live.tolist() == [2] * 201
    assert full[[0, 200]].tolist() == [40, 240]
    assert held[[89, 90]].tolist() == [129, 73]
    mean = cell_metrics(run)["mean_cache_length"].iloc[0]
    assert np.mean(held) == pytest.approx(mean)
