"""Two runs are compared where their settings and their problems agree."""

import shutil

import pandas as pd
import pytest

from kvsweep.analysis.compare import compare, compare_runs
from kvsweep.analysis.load import load_run
from kvsweep.messages.errors import UserError
from tests.analysis.conftest import write_cell


def test_cells_with_the_question_in_another_place_are_not_paired(tmp_path):
    for name, place in (("a", "free"), ("b", "pinned")):
        write_cell(tmp_path / name, [[1], [0]], policy="dynts", cell={"policy": {"question": place}})
    with pytest.raises(UserError, match="share no cell"):
        compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))


@pytest.mark.slow
def test_settings_that_differ_are_named(tmp_path, capsys):
    for name, dtype, tokens in (("a", "float32", 448), ("b", "bfloat16", 300)):
        for policy in ("full", "dynts"):
            settings = {"model": {"dtype": dtype}, "decoding": {"max_new_tokens": tokens}}
            write_cell(tmp_path / name, [[1], [0]], policy=policy, cell=settings)
    compare_runs(tmp_path / "a", tmp_path / "b", tmp_path / "all.csv")
    said = capsys.readouterr().out.splitlines()
    named = "decoding.max_new_tokens (448 and 300), model.dtype (float32 and bfloat16)"
    assert said[1] == f"settings differ in 2 cells: {named}"
    assert said[2].endswith("A and B differ in 0 of 2 cells (B minus A, paired, Holm, 5%).")
    assert pd.read_csv(tmp_path / "all.csv")["other_settings"].tolist() == [named] * 2


def test_cells_of_other_problems_are_not_paired(tmp_path):
    """The problems of both runs have the same ids, and other questions behind them."""
    for name, problems in (("a", "1" * 16), ("b", "1" * 16), ("c", "2" * 16)):
        write_cell(tmp_path / name, [[1], [0]], cell={"dataset_hash": problems})
    first, same, other = (load_run(tmp_path / name) for name in "abc")
    assert len(compare(first, same)) == 1
    with pytest.raises(UserError, match="share no cell"):
        compare(first, other)


def test_grades_by_other_golds_are_not_paired(tmp_path):
    for name, gold in (("a", "4"), ("b", "04"), ("c", "5")):
        folder = write_cell(tmp_path / name, [[1], [0]])
        rows = (folder / "grades.jsonl").read_text().replace('"gold": "4"', f'"gold": "{gold}"')
        (folder / "grades.jsonl").write_text(rows)
    first, same, other = (load_run(tmp_path / name) for name in "abc")
    assert len(compare(first, same)) == 1
    with pytest.raises(UserError, match="Problem 'p0' of toy_chain was graded by the golds 4 and 5"):
        compare(first, other)


@pytest.mark.parametrize("others", [[[None], [None]], [], [[None, 1], [None, 0]]])
def test_runs_without_a_common_graded_answer_are_refused(tmp_path, others):
    """The second run has no grade, no answer at all, or other draws."""
    write_cell(tmp_path / "a", [[1], [0]])
    write_cell(tmp_path / "b", others)
    with pytest.raises(UserError, match="share no graded answer"):
        compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))


def test_cells_without_a_common_answer_are_counted_apart(tmp_path, capsys):
    for name, grade in (("a", 1), ("b", None)):
        write_cell(tmp_path / name, [[1], [0]])
        write_cell(tmp_path / name, [[grade], [grade]], policy="dynts")
        write_cell(tmp_path / name, [[grade], [grade]], benchmark="toy_add", benchmark_title="Add")
    compare_runs(tmp_path / "a", tmp_path / "b")
    assert capsys.readouterr().out.splitlines() == [
        "Toy-Qwen | Chain: 1 cell, B worse in 0, better in 0, mean +0.0 points",
        "A and B differ in 0 of 1 cell (B minus A, paired, Holm, 5%); without a common graded answer: 2 cells.",
    ]


def test_what_only_one_run_has_is_counted(tmp_path, capsys):
    """B has two of A's three problems, and of them one of two draws."""
    write_cell(tmp_path / "a", [[1, 1], [0, 1], [1, 1]])
    write_cell(tmp_path / "b", [[1], [0]])
    for ratio in (0.1, 0.2):
        write_cell(tmp_path / "a", [[1]], policy="dynts", keep_ratio=ratio)
    write_cell(tmp_path / "b", [[1]], policy="window")
    compare_runs(tmp_path / "a", tmp_path / "b")
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "counts of answers differ in 1 cell: A has 6, B 2, both 2"
    assert said[-2:] == [
        f"not compared: 2 cells of {tmp_path / 'a'} alone",
        f"not compared: 1 cell of {tmp_path / 'b'} alone",
    ]


def test_one_cell_is_itself_in_a_run_that_varies_more(tmp_path):
    """In A alone the number of sinks varies, so that only A's names say it."""
    folders = []
    for sinks in (0, 4):
        folders.append(write_cell(tmp_path / "a", [[1], [0]], policy="dynts", extra={"sinks": sinks}))
    shutil.copytree(folders[1], tmp_path / "b" / folders[1].name)
    runs = load_run(tmp_path / "a"), load_run(tmp_path / "b")
    assert [list(run.cells["variant"]) for run in runs] == [["sinks=0", "sinks=4"], [""]]
    for found in (compare(*runs), compare(*reversed(runs))):
        assert (list(found["cell_id_a"]), list(found["cell_id_b"])) == ([folders[1].name], [folders[1].name])


def test_what_was_skipped_in_either_run_is_told(tmp_path, capsys):
    for name in "ab":
        grades = write_cell(tmp_path / name, [[1], [0]]) / "grades.jsonl"
        grades.write_text(grades.read_text() + "no grade\n")
    compare_runs(tmp_path / "a", tmp_path / "b")
    notes = capsys.readouterr().err.splitlines()
    for note, name in zip(notes, "ab", strict=True):
        assert note.startswith(f"note: {tmp_path / name}/")
        assert "the line was skipped" in note
