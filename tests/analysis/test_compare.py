"""Two runs are compared where their settings and their problems agree."""

from pathlib import Path

import pandas as pd
import pytest
import yaml

from kvsweep.analysis.compare import compare, compare_runs
from kvsweep.analysis.load import load_run
from kvsweep.errors import UserError
from tests.analysis.conftest import write_cell


def test_cells_with_the_question_in_another_place_are_not_paired(tmp_path: Path) -> None:
    for name, place in (("a", "free"), ("b", "pinned")):
        folder = write_cell(tmp_path / name, [[1], [0]], policy="dynts")
        cell = yaml.safe_load((folder / "cell.yaml").read_text())
        cell["policy"]["question"] = place
        (folder / "cell.yaml").write_text(yaml.safe_dump(cell))
    with pytest.raises(UserError, match="share no cell"):
        compare(load_run(tmp_path / "a"), load_run(tmp_path / "b"))


def test_settings_that_differ_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, dtype, tokens in (("a", "float32", 448), ("b", "bfloat16", 300)):
        for policy in ("full", "dynts"):
            folder = write_cell(tmp_path / name, [[1], [0]], policy=policy)
            cell = yaml.safe_load((folder / "cell.yaml").read_text())
            cell["model"]["dtype"], cell["decoding"]["max_new_tokens"] = dtype, tokens
            (folder / "cell.yaml").write_text(yaml.safe_dump(cell))
    compare_runs(tmp_path / "a", tmp_path / "b", tmp_path / "all.csv")
    said = capsys.readouterr().out.splitlines()
    named = "decoding.max_new_tokens (448 and 300), model.dtype (float32 and bfloat16)"
    assert said[1] == f"settings differ in 2 cells: {named}"
    assert said[2].endswith(
        "A and B differ in 0 of 2 cells (B minus A, paired, Holm, 5%). 2 cells are not shown to differ."
    )
    assert pd.read_csv(tmp_path / "all.csv")["other_settings"].tolist() == [named] * 2
    compare_runs(tmp_path / "a", tmp_path / "a")
    assert "settings differ" not in capsys.readouterr().out


def test_cells_of_other_problems_are_not_paired(tmp_path: Path) -> None:
    """The problems of both runs have the same ids, and other questions behind them."""
    for name, problems in (("a", "1" * 16), ("b", "1" * 16), ("c", "2" * 16)):
        folder = write_cell(tmp_path / name, [[1], [0]])
        cell = yaml.safe_load((folder / "cell.yaml").read_text())
        (folder / "cell.yaml").write_text(yaml.safe_dump({**cell, "dataset_hash": problems}))
    first, same, other = (load_run(tmp_path / name) for name in "abc")
    assert len(compare(first, same)) == 1
    with pytest.raises(UserError, match=r"share no cell .*: give runs of the same settings and problems"):
        compare(first, other)
