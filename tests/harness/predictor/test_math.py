"""MATH's answers are expressions: problems are read, and texts with gold alone are graded by the grader."""

import json
from pathlib import Path

import pytest

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.recipe import read_settings
from kvsweep.harness.predictor.traces import imported, trace_problems


def test_the_problems_of_math_are_read(tmp_path: Path) -> None:
    rows = [{"problem": "Half of 1?", "answer": r"\frac{1}{2}"}, {"problem": "1+1?", "answer": "2"}]
    (tmp_path / "MATH.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = read_settings(["recipe=r1", "model=r1_qwen_7b", f"benchmark.path={tmp_path / 'MATH.jsonl'}"])
    problems, kind = trace_problems(settings)
    assert ([problem.gold for problem in problems], kind) == ([r"\frac{1}{2}", "2"], "expression")


def test_texts_with_gold_alone_are_graded(tiny_model_dir: Path, tmp_path: Path) -> None:
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
    model = load_model(ModelConfig(name="tiny", title="", path=str(tiny_model_dir), threads=1))
    assert [trace.kept for trace in imported(settings, lambda: model)] == [True, False, True, False]


@pytest.mark.shared
def test_recorded_texts_get_their_recorded_labels(
    shared_data: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fourteen texts of R1 and Sky-T1: those with R1's tags that close their thinking are imported and graded."""
    path = shared_data / "traces.jsonl"
    recorded = {row["id"]: row for row in map(json.loads, path.open())}
    settings = read_settings(["model=toy_qwen", f"recipe.import_from={path}"])
    model = load_model(ModelConfig(name="tiny", title="", path=str(tiny_model_dir), threads=1))
    found = {trace.problem_id: trace.kept for trace in imported(settings, lambda: model)}
    wanted = {name: row["recorded_label"] for name, row in recorded.items() if row["close_tag"] == "</think>"}
    # The recorded label of this one is wrong: (3, \dfrac{\pi}{2}) is the gold point.
    assert found == wanted | {"pilot_math500_qwen7b/math500_0000": True}
