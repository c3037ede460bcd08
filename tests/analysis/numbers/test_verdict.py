import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from analysis.compare import compare, in_words
from analysis.compare import main as compare_main
from analysis.load import load_run
from analysis.numbers.grids import find_grids
from analysis.numbers.metrics import cell_metrics, graded_rows
from analysis.numbers.reference import reference_folder
from analysis.numbers.verdict import panel_verdicts, read_summary, summary_verdicts
from analysis.pictures.cost import lengths_by_step
from analysis.records import UserError
from analysis.report.build import build_report, build_summary_report, main

MakeCell = Callable[..., Path]
PUBLISHED = reference_folder() / "dynts_heatmaps.csv"


def test_the_published_llama_aime24_grid_is_within_the_noise(tmp_path: Path) -> None:
    table = read_summary(PUBLISHED)
    grid = table[(table["model"] == "r1_llama_8b") & (table["benchmark"] == "aime24")]
    (verdict,) = summary_verdicts(grid)
    assert verdict.floor is not None
    assert verdict.floor.range == pytest.approx(0.1)
    assert 0.095 < verdict.floor.expected_range[1] < 0.125
    assert "its range of 10.0 points is within what identical cells give" in verdict.lines[0]
    html = build_summary_report(PUBLISHED, tmp_path / "out").read_text()
    assert "its range of 10.0 points is within" in html
    assert "may be swapped" in html


def test_a_table_that_is_none_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text("model,pass_at_1\na,4\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "x.csv")])
    assert "lacks the columns benchmark" in capsys.readouterr().err


def verdict_lines(run: Path) -> str:
    loaded = load_run(run)
    metrics = cell_metrics(loaded)
    (grid,) = find_grids(metrics)
    (verdict,) = panel_verdicts(grid, graded_rows(loaded))
    return "\n".join(verdict.lines)


def test_a_panel_where_eviction_hardly_fires_is_called_that(tmp_path: Path, make_cell: MakeCell) -> None:
    right = [[i % 2] for i in range(12)]
    make_cell(right)
    for ratio in (0.1, 0.2, 0.3):
        make_cell(right, policy="dynts", keep_ratio=ratio, completion={"evictions": []})
    words = verdict_lines(tmp_path / "run")
    assert "cannot be told from noise (p = 1.000)" in words
    assert "hardly fires" in words
    assert "The smallest that cannot be told from it is keep ratio 0.1, window 48" in words


def test_where_eviction_acted(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1], [1], [0], [1]])
    folder = make_cell([[0], [1], [1], [0]], policy="dynts")
    rows = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    rows[3]["evictions"] = rows[1]["evictions"] = []
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = cell_metrics(load_run(tmp_path / "run")).set_index("policy").loc["dynts"]
    assert (row["regressions"], row["gains"]) == (2, 1)
    assert (row["diff_evicted"], row["diff_untouched"], row["untouched_differ"]) == (0, -0.5, 1)
    assert row["evicted"] == 0.5


def test_random_weights_have_no_accuracy(tmp_path: Path, make_cell: MakeCell) -> None:
    for ratio in (0.1, 0.2, 0.3):
        folder = make_cell([[1], [1]], policy="dynts", keep_ratio=ratio)
        text = (folder / "cell.yaml").read_text()
        (folder / "cell.yaml").write_text(text.replace("model:\n", "model:\n  random_weights: true\n"))
    table = cell_metrics(load_run(tmp_path / "run"))
    assert table[["pass_at_1", "correct", "ci_low"]].isna().all(axis=None)
    html = build_report(tmp_path / "run").read_text()
    assert "Toy-Qwen (random weights)" in html
    assert "100.0 ±" not in html
    assert '"outcome":"correct"' not in html


def test_two_runs_are_paired(tmp_path: Path, make_cell: MakeCell, capsys: pytest.CaptureFixture[str]) -> None:
    make_cell([[1]] * 12)
    (tmp_path / "run").rename(tmp_path / "a")
    make_cell([[0]] * 10 + [[1]] * 2, seed=1)
    (tmp_path / "run").rename(tmp_path / "b")
    table = compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))
    assert table["difference"].tolist() == [pytest.approx(-10 / 12)]
    assert table["p"].tolist() == [pytest.approx(2 / 2**10)]
    assert "1 of 1 cells differ" in in_words(table)
    compare_main([str(tmp_path / "a"), str(tmp_path / "b")])
    assert "-83.3" in capsys.readouterr().out
    make_cell([[1]], policy="dynts")
    with pytest.raises(UserError, match="share no cell"):
        compare(load_run(tmp_path / "a"), load_run(tmp_path / "run"))


def test_lengths_by_step_add_up_to_the_cache_rows(tmp_path: Path, make_cell: MakeCell) -> None:
    make_cell([[1], [1]], policy="dynts")
    run = load_run(tmp_path / "run")
    live, held, full = lengths_by_step(run.completions, run.events)
    assert live.tolist() == [2] * 201
    assert full[[0, 200]].tolist() == [40, 240]
    assert held[[89, 90]].tolist() == [129, 73]
    mean = cell_metrics(run)["mean_cache_length"].iloc[0]
    assert np.mean(held) == pytest.approx(mean)
