"""MATH's answers are expressions: problems are read, and texts with gold alone are graded by the grader."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.predictor.traces import Trace, imported_traces, trace_problems
from kvsweep.harness.settings import WEIGHTS
from kvsweep.messages.errors import UserError
from kvsweep.run_files.other_rows import texts_of_file
from kvsweep.run_files.row_types import read_rows
from tests.program import predictor


def test_the_problems_of_math_are_read(tmp_path):
    rows = [{"problem": "Half of 1?", "answer": r"\frac{1}{2}"}, {"problem": "1+1?", "answer": "2"}]
    (tmp_path / "MATH.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = read_settings(["recipe=r1", "model=r1_qwen_7b", f"benchmark.path={tmp_path / 'MATH.jsonl'}"])
    problems, _, kind = trace_problems(settings)
    assert ([problem.gold for problem in problems], kind) == ([r"\frac{1}{2}", "2"], "expression")


@pytest.mark.slow
def test_texts_with_gold_alone_are_graded(tiny_model_dir, tmp_path):
    answers = [
        (r"\frac{1}{2}", r"\boxed{0.5}"),
        (r"\frac{1}{2}", r"\boxed{0.4}"),
        ("027", r"\boxed{27}"),
        ("27", "none"),
    ]
    rows = [
        {"problem": "p=4", "text": f"p=4+2</think>It is {answer}.", "gold": gold, "id": str(number)}
        for number, (gold, answer) in enumerate(answers)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = read_settings(["model=toy_qwen", f"recipe.import_from={tmp_path / 'texts.jsonl'}"])
    settings.__dict__["loaded"] = load_model(ModelConfig(name="tiny", title="", path=str(tiny_model_dir), threads=1))
    assert [trace.kept for trace in imported_traces(settings)] == [True, False, True, False]


@pytest.mark.shared
def test_recorded_texts_get_their_recorded_labels(shared_data, tiny_model_dir, capsys):
    """Fourteen texts of R1 and Sky-T1: those with R1's tags that close their thinking are imported and graded."""
    path = shared_data / "traces.jsonl"
    recorded = {row["id"]: row for row in map(json.loads, path.open())}
    settings = read_settings(["model=toy_qwen", f"recipe.import_from={path}"])
    settings.__dict__["loaded"] = load_model(ModelConfig(name="tiny", title="", path=str(tiny_model_dir), threads=1))
    found = [trace.kept for trace in imported_traces(settings)]
    wanted = {name: row["recorded_label"] for name, row in recorded.items() if row["close_tag"] == "</think>"}
    # The recorded label of this one is wrong: (3, \dfrac{\pi}{2}) is the gold point.
    assert found == [*(wanted | {"pilot_math500_qwen7b/math500_0000": True}).values()]


def import_rows(model_dir: Path, folder: Path, *rows: dict[str, Any]) -> list[Trace]:
    path = folder / "texts.jsonl"
    whole = [{"problem": "p=4", "text": "p=4+2</think>It is 4.", "correct": True} | row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in whole))
    settings = read_settings(["model=toy_qwen", f"recipe.import_from={path}"])
    settings.__dict__["loaded"] = load_model(ModelConfig(name="tiny", title="", path=str(model_dir), threads=1))
    return list(imported_traces(settings))


def test_the_texts_of_one_question_have_one_id(tiny_model_dir, tmp_path):
    rows = [{}, {"problem": "p=5"}, {}, {"id": "own"}, {"problem": "p=6", "id": 7}, {"problem": "p=6", "draw": "3"}]
    found = import_rows(tiny_model_dir, tmp_path, *rows)
    assert [trace.key for trace in found] == [("1", 0), ("2", 0), ("1", 1), ("1", 2), ("7", 0), ("7", 3)]
    with pytest.raises(UserError, match=r":2 is the second row of problem '1' and draw 0: give"):
        import_rows(tiny_model_dir, tmp_path, {}, {"draw": 0})


@pytest.mark.parametrize(
    "field",
    [{"text": None}, {"text": 5}, {"problem": None}, {"draw": "x"}, {"draw": -1}, {"correct": "false"}, {"correct": 2}],
)
def test_a_row_that_is_no_text_is_one_sentence(field, tiny_model_dir, tmp_path):
    with pytest.raises(UserError, match=rf":2 {next(iter(field))}=.* (cannot be|is read)"):
        import_rows(tiny_model_dir, tmp_path, {}, {"problem": "p=5"} | field)


def test_a_file_of_texts_that_ends_within_a_row_is_refused(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"problem": "p=4", "text": "It is 4."}\n{"problem": "p=5", "te')
    with pytest.raises(UserError, match=r"texts\.jsonl:2 is not a JSON object; correct or delete that line"):
        list(texts_of_file(path))


def test_texts_in_a_csv_are_those_of_json_lines(tmp_path):
    (tmp_path / "texts.csv").write_text("problem,text,draw,gold\np=4,It is 4.,3,4\np=5,It is 5.,,5\n")
    found = [(row.id, row.problem, row.text, row.draw, row.gold) for _, row in texts_of_file(tmp_path / "texts.csv")]
    assert found == [("1", "p=4", "It is 4.", 3, "4"), ("2", "p=5", "It is 5.", None, "5")]


def test_a_row_is_kept_if_it_is_called_correct(tiny_model_dir, tmp_path):
    rows = [{"correct": value, "draw": None} for value in (True, 1, False, 0)]
    assert [trace.kept for trace in import_rows(tiny_model_dir, tmp_path, *rows)] == [True, True, False, False]
    with pytest.raises(UserError, match="must name problem, text, and gold or correct"):
        import_rows(tiny_model_dir, tmp_path, {"correct": None})


@pytest.mark.slow
def test_traces_are_graded_by_the_models_own_tags(tmp_path):
    """A copy of the toy that closes its thinking with another tag."""
    shutil.copytree(WEIGHTS / "toy_qwen", tmp_path / "toy")
    for path in [*(tmp_path / "toy").glob("*.json"), *(tmp_path / "toy").glob("*.jinja")]:
        path.write_text(path.read_text().replace("</think>", "</done>"))
    place = [f"recipe.out={tmp_path / 'out'}", f"model.path={tmp_path / 'toy'}", "model.think_end=</done>"]
    few = ["recipe.toy_tasks=[add]", "recipe.toy_problems=4", "model.threads=1"]
    predictor(["traces", "model=toy_qwen", *place, *few])
    assert any(row["kept"] for row in read_rows(tmp_path / "out/traces.jsonl", dict))
