import json

import pandas as pd
import pytest

from kvsweep.analysis.load import load_problems, load_run, load_texts
from kvsweep.messages.errors import UserError


def test_a_cell_becomes_one_row_with_its_policy_flattened(run, make_cell):
    make_cell([[1, 0]], policy="dynts", keep_ratio=0.3, local_window=48, budget=128)
    make_cell([[1, 1]])
    cells = load_run(run).cells
    assert list(cells["policy"]) == ["full", "dynts"]
    dynts, full = cells.iloc[1], cells.iloc[0]
    assert (dynts["keep_ratio"], dynts["local_window"], dynts["budget"]) == (0.3, 48, 128)
    assert full[["keep_ratio", "local_window", "budget"]].isna().all()
    assert (dynts["model_title"], dynts["benchmark_title"], dynts["decoding"]) == ("Toy-Qwen", "Chain", "r1")
    assert (dynts["status"], dynts["completions"], dynts["expected"], dynts["draws"]) == ("done", 2, 2, 2)
    assert full["condition"] == dynts["condition"]


def test_an_ungraded_completion_is_missing_not_wrong(run, make_cell):
    make_cell([[1, None]], done=False, expected=10)
    rows = load_run(run).completions.set_index("draw")
    assert rows.loc[0, "outcome"] == "correct"
    assert rows.loc[0, "correct"] == 1
    assert rows.loc[1, ["outcome", "correct"]].isna().all()
    assert load_run(run).cells.iloc[0]["status"] == "partial"


def test_a_cell_that_has_only_begun_is_read(run, make_cell):
    folder = make_cell([], done=False, expected=10)
    for name in ("completions.jsonl", "grades.jsonl", "stats.jsonl"):
        (folder / name).unlink()
    cells = load_run(run).cells
    assert (cells.iloc[0]["completions"], cells.iloc[0]["expected"]) == (0, 10)
    assert load_run(run).completions.empty


def test_texts_and_problems_of_one_cell(run, make_cell):
    folder = make_cell([[1]], policy="dynts")
    assert "text" not in load_run(run).completions
    row = load_texts(folder)["p0", 0]
    assert row.text.startswith("a is 4")
    assert row.token_ids == [5, 6, 7, 2]
    assert (row.evictions[0].length_before, row.evictions[0].held) == (129, [])
    assert load_problems(folder) == {}
    (folder / "problems.jsonl").write_text('{"schema": 1, "id": "p0", "prompt": "What?", "gold": "4"}\n')
    assert load_problems(folder)["p0"].prompt == "What?"


def test_the_evictions_belong_to_the_row_that_counts(tmp_path, make_cell):
    folder = make_cell([[1], [0]], policy="dynts")
    first = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
    events = [{"step": 9, "length_before": 50, "length_after": 30}]
    (folder / "completions-1of2.jsonl").write_text(json.dumps(first | {"evictions": events}) + "\n")
    run = load_run(tmp_path / "run")
    problems = run.completions["problem_id"].to_numpy()[run.events["completion"]]
    seen = sorted(zip(problems, run.events["step"], run.events["freed"], strict=True))
    assert seen == [("p0", 9, 20), ("p1", 89, 57), ("p1", 146, 57)]


def test_grades_by_another_rule_are_not_taken_for_grades(run, make_cell):
    folder = make_cell([[1, 0]])
    before = load_run(run).completions
    others = (folder / "grades.jsonl").read_text().replace('"wrong"', '"correct"')
    for name in ("grades-old.jsonl", "grades-0of2.jsonl"):
        (folder / name).write_text(others)
    pd.testing.assert_frame_equal(load_run(run).completions, before)


def test_a_grade_that_contradicts_its_outcome_is_skipped(tmp_path, make_cell):
    folder = make_cell([[1, 0]])
    rows = (folder / "grades.jsonl").read_text().replace('"correct": 0', '"correct": 1')
    (folder / "grades.jsonl").write_text(rows)
    run = load_run(tmp_path / "run")
    assert run.completions["correct"].isna().tolist() == [False, True]
    assert any("correct=1 contradicts the outcome 'wrong'" in notice for notice in run.notices)


def test_provenance_of_shards_is_put_together(tmp_path, make_cell):
    folder = make_cell([[1, 0]])
    whole = json.loads((folder / "provenance.json").read_text())
    (folder / "provenance.json").unlink()
    for i in (1, 2):
        (folder / f"provenance-{i}of2.json").write_text(json.dumps({**whole, "decoding_passes": [{"started": str(i)}]}))
    run = load_run(tmp_path / "run")
    told = run.provenance[folder.name]
    assert told["decoding_passes"] == [{"started": "1"}, {"started": "2"}]
    assert told.get("expected") == whole.get("expected")


DEEP = json.loads("[" * 700 + "]" * 700)


@pytest.mark.parametrize(
    "passes", [[{"cache": 5}], [{"cache": {"kvcache": 1}}], [{"model": 5}], [{"other": DEEP}], DEEP]
)
def test_a_strangers_provenance_is_told_and_not_believed(passes, tmp_path, make_cell):
    make_cell([[1, 0]], recorded={"decoding_passes": passes})
    run = load_run(tmp_path / "run")
    assert len(run.cells) == 1
    assert any("provenance.json cannot be read" in notice for notice in run.notices)


def test_shards_are_read_together_and_a_repeated_pair_counts_once(run, make_cell):
    folder = make_cell([[1], [0]])
    first = json.loads((folder / "completions.jsonl").read_text().splitlines()[0])
    (folder / "completions-1of2.jsonl").write_text(json.dumps(first | {"problem_id": "p9"}) + "\n")
    (folder / "completions-2of2.jsonl").write_text(json.dumps(first | {"num_tokens": 7}) + "\n")
    rows = load_run(run).completions.set_index("problem_id")
    assert rows["num_tokens"].to_dict() == {"p0": 7, "p1": 201, "p9": 201}


def test_what_cannot_be_read_is_skipped_with_a_notice(tmp_path, make_cell):
    folder = make_cell([[1], [0]])
    with (folder / "completions.jsonl").open("a") as file:
        file.write('{"problem_id": \n{"schema": 1, "problem_id": "p7", "draw": 0}\n{"problem_id": "torn')
    with (folder / "grades.jsonl").open("a") as file:
        file.write('{"schema": 1, "problem_id": "p1", "draw": 0, "outcome": "splendid"}\n')
    broken = tmp_path / "run" / "broken"
    broken.mkdir()
    (broken / "cell.yaml").write_text("model: [")
    (broken.parent / "bare").mkdir()
    (broken.parent / "bare/completions.jsonl").touch()
    run = load_run(tmp_path / "run")
    assert len(run.cells) == 1
    assert len(run.completions) == 2
    text = "\n".join(run.notices)
    assert len(run.notices) == 5
    assert "completions.jsonl:3 is broken" in text
    assert "splendid" in text
    assert "broken/cell.yaml" in text
    assert "bare holds completions and no cell.yaml" in text


def test_a_setting_beyond_the_axes_that_differs_is_named(run, make_cell):
    make_cell([[1]], policy="dynts", extra={"question": "on_top"})
    make_cell([[1]], policy="dynts", extra={"question": "pinned"})
    make_cell([[1]], policy="random", extra={"question": "on_top"})
    variants = load_run(run).cells.groupby("policy")["variant"].apply(set)
    assert variants["dynts"] == {"question=on_top", "question=pinned"}
    assert variants["random"] == {""}


def test_a_limit_is_neither_a_variant_nor_another_condition(run, make_cell):
    make_cell([[1]])
    make_cell([[1]], policy="dynts", limit=1)
    make_cell([[1]], policy="dynts", local_window=64)
    cells = load_run(run).cells
    assert cells["condition"].nunique() == 1
    assert set(cells["variant"]) == {""}


@pytest.mark.parametrize("name", ["missing", "empty", "cell"])
def test_a_wrong_directory_is_one_sentence(tmp_path, make_cell, name):
    (tmp_path / "empty").mkdir()
    directory = make_cell([[1]]) if name == "cell" else tmp_path / name
    with pytest.raises(UserError, match="give") as error:
        load_run(directory)
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)
