"""`leave_out_faulty`: problems without a usable answer are left out and counted, or the data is refused."""

import pytest

from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.messages.errors import UserError
from tests.harness.benchmarks.test_load import write_jsonl

ROWS = [
    {"problem": "1 + 1?", "answer": "2"},
    {"problem": "Why?", "answer": ""},
    {"problem": "How large?", "answer": "12 (twelve)"},
]


def test_faulty_rows_are_left_out_or_refused(tmp_path, capsys):
    path = str(write_jsonl(tmp_path / "p.jsonl", ROWS))
    settings = {"name": "b", "title": "B", "source": "file", "path": path, "answer_kind": "expression"}
    benchmark = load_problems(BenchmarkConfig(**settings, leave_out_faulty=True))
    assert [problem.gold for problem in benchmark.problems] == ["2"]
    assert "2 of 3 problems are left out" in capsys.readouterr().err
    with pytest.raises(UserError, match="no answer in column"):
        load_problems(BenchmarkConfig(**settings))
