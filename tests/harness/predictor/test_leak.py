"""A head is refused on a benchmark whose questions its traces answer."""

import pytest

from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.benchmarks.load import question_hash
from kvsweep.harness.predictor.traces import add_questions, read_questions
from kvsweep.harness.sweep.job import make_job
from kvsweep.messages.errors import UserError

QUESTIONS = ["What is 1 + 1?", "What is 2 + 2?"]


def test_a_head_trained_on_a_problem_of_the_benchmark_is_refused(compose, tiny, write_problems, tmp_path):
    path = write_problems([{"id": text, "problem": text, "answer": 4} for text in QUESTIONS])

    def job(*questions: str):
        card = {"questions": [question_hash(question) for question in questions]}
        save_predictor(ImportancePredictor(32, (16, 8)), tmp_path / "head", card)
        # The benchmark's prompt is another than that of the traces.
        words = [
            "policy=dynts",
            f"policy.predictor={tmp_path}/head",
            f"benchmark.path={path}",
            "benchmark.prompt=boxed",
        ]
        return make_job(compose(*tiny, *words))

    assert job("What is 3 + 3?").cells
    with pytest.raises(UserError, match=r"trained on texts of 1 of the 2 problems"):
        job("What is 3 + 3?", "What  is 2 + 2?")


def test_questions_of_several_runs_are_kept_together(tmp_path):
    assert read_questions(tmp_path) == []
    add_questions(tmp_path, QUESTIONS[:1])
    add_questions(tmp_path, QUESTIONS)
    assert read_questions(tmp_path) == sorted(question_hash(question) for question in QUESTIONS)
