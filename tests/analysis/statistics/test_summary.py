"""A table of scores is read as it stands, or refused with the line, the column and the value."""

from pathlib import Path

import pytest

from kvsweep.analysis.statistics.grids import GRID_FILE, REFERENCE
from kvsweep.analysis.statistics.sentences import analyse_scores
from kvsweep.analysis.statistics.summary import read_summary
from kvsweep.messages.errors import UserError

HEAD = "model,benchmark,policy,keep_ratio,local_window,budget,problems,draws,pass_at_1"
GOOD = ["m,aime,dynts,0.1,500,5000,30,5,47.3", "m,aime,dynts,0.2,500,5000,30,5,46.0"]


def read(folder: Path, *lines: str, head: str = HEAD):
    (folder / "x.csv").write_text("\n".join([head, *lines]))
    read_summary(folder / "x.csv")


def test_the_published_grids_are_read_whole():
    table = read_summary(REFERENCE / GRID_FILE)
    assert len(table) == len((REFERENCE / GRID_FILE).read_text().splitlines()) - 1
    assert table["pass_at_1"].dtype == "float64"
    assert table["draws"].unique().tolist() == [5]


@pytest.mark.parametrize("scores", [("0.473", ".46", "0.501"), ("1", "0.9", "0"), ("47.3", "0.3", "46")])
def test_fractions_are_no_percents(tmp_path, scores):
    rows = [f"m,aime,dynts,0.{number},500,5000,30,5,{score}" for number, score in enumerate(scores)]
    with pytest.raises(UserError, match=r"pass_at_1 is in percent; multiply by 100\.$"):
        read(tmp_path, *rows)


def test_counts_near_none_and_rounded_are_percents(tmp_path):
    """One answer of 990 is 0.101%, which a table of one decimal rounds to 0.1; all wrong and all right are whole."""
    read(tmp_path, "m,gpqa,dynts,0.1,500,5000,198,5,0.1", "m,gpqa,dynts,0.2,500,5000,198,5,46.0")
    read(tmp_path, "m,gpqa,dynts,0.1,500,5000,198,5,0", "m,gpqa,dynts,0.2,500,5000,198,5,1")


@pytest.mark.parametrize("again", ["m,aime,dynts,0.10,500,5000,30,5,42.7", "m,aime,dynts,.1,500.0,5000,30,5,47.3"])
def test_a_setting_stands_once(tmp_path, again):
    with pytest.raises(UserError, match=r"x\.csv:4 has the setting of .*x\.csv:2; delete one of the two\."):
        read(tmp_path, *GOOD, again)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("m,aime,dynts,10,500,5000,30,5,46", "keep_ratio='10' "),
        ("m,aime,dynts,-0.1,500,5000,30,5,46", "keep_ratio='-0.1' "),
        ("m,aime,dynts,nan,500,5000,30,5,46", "keep_ratio='nan'"),
        ("m,aime,dynts,,500,5000,30,5,46", "keep_ratio is missing"),
        ("m,aime,dynts,0.3,0.5,5000,30,5,46", "local_window='0.5' "),
        ('m,aime,dynts,0.3,500,"5,000",30,5,46', "budget='5,000' "),
        ("m,aime,dynts,0.3,500,5000,0,5,46", "problems='0' "),
        ("m,aime,dynts,0.3,500,5000,30,2.5,46", "draws='2.5' "),
        ("m,aime,dynts,0.3,500,5000,30,5,47.3%", "pass_at_1='47.3%' "),
        ("m,aime,dynts,0.3,500,5000,30,5,101", "pass_at_1='101' "),
        (",aime,dynts,0.3,500,5000,30,5,46", "model is missing"),
        ("m, ,dynts,0.3,500,5000,30,5,46", "benchmark is missing"),
        ("m,aime,full,,,,30,5,50", "is the full cache"),
        ("m,aime,dynts,0.3,500,5000,30,5,46,2", "has not the header's count of cells"),
    ],
)
def test_a_row_that_is_no_setting_is_named_with_its_line(tmp_path, row, said):
    with pytest.raises(UserError, match=rf"x\.csv:4 {said}"):
        read(tmp_path, *GOOD, row)


def test_decimal_commas_in_every_row_are_one_sentence(tmp_path, refused):
    (tmp_path / "x.csv").write_text("\n".join([HEAD, "m,aime,dynts,0.1,500,5000,30,5,47,3"]))
    assert "x.csv:2 has not the header's count of cells; quote its commas." in refused("report", tmp_path / "x.csv")


def test_a_table_without_a_row_has_no_score(tmp_path):
    with pytest.raises(UserError, match="holds no score; give a row for each setting"):
        read(tmp_path)


@pytest.mark.parametrize(("size", "name"), [("29,5", "problems 29"), ("30,4", "draws 4")])
def test_a_model_and_benchmark_have_one_count_of_answers(tmp_path, size, name):
    with pytest.raises(UserError, match=rf"x\.csv:4 has {name}, and .*x\.csv:2 has \d+; give one count"):
        read(tmp_path, *GOOD, f"m,aime,dynts,0.3,500,5000,{size},46")
    read(tmp_path, *GOOD, f"m,other,dynts,0.3,500,5000,{size},46")


def test_a_model_may_be_named_na_and_a_policy_have_no_budget(tmp_path):
    rows = [row.replace("m,", "NA,").replace("5000", "") for row in GOOD]
    (tmp_path / "x.csv").write_text("\n".join([HEAD, *rows]))
    (verdict,) = analyse_scores(tmp_path / "x.csv").verdicts
    assert verdict.title == "NA | aime"
    assert verdict.floor.range == pytest.approx(0.013)
