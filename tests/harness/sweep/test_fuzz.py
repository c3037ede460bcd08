"""Whatever stands in a configuration or a benchmark file: a job, or one sentence and exit code 2; never a traceback."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.benchmarks.load import load_problems
from kvsweep.harness.settings import build
from kvsweep.messages.errors import UserError

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
names = st.sampled_from(["id", "problem", "answer", "question", "Record ID", ""])
rows = st.lists(st.dictionaries(names, values | st.sampled_from(["27", "-1", "C", "x+1"]), max_size=4), max_size=4)
kinds = st.sampled_from(["integer", "expression", "letter"])
EACH: dict[str, Any] = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def examples(few: int, many: int) -> Callable[[Any], Any]:
    """Run a property on few examples, and in `make slow` on many: `examples` sets them for the drawn part, `check`."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def load(**fields: Any):
    try:
        benchmark = load_problems(
            build(BenchmarkConfig, "benchmark", {"name": "mine", "title": "Mine", "source": "file", **fields})
        )
    except UserError as error:
        message = str(error)
        assert "\n" not in message
        assert message.endswith(".")
    else:
        assert benchmark.problems
        assert all(problem.gold for problem in benchmark.problems)


@pytest.mark.slow
@examples(40, 150)
def test_files_of_rows(examples, tmp_path):
    @settings(max_examples=examples, **EACH)
    @given(rows=rows, kind=kinds, suffix=st.sampled_from([".jsonl", ".json"]))
    def check(rows, kind, suffix):
        path = tmp_path / f"p{suffix}"
        text = json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        load(path=str(path), answer_kind=kind)

    check()


@examples(40, 150)
def test_files_of_anything(examples, tmp_path):
    @settings(max_examples=examples, **EACH)
    @given(
        content=st.binary(max_size=200) | st.text(alphabet='id,"\n{}[]:\x00é1', max_size=80).map(str.encode),
        suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]),
    )
    def check(content, suffix):
        path = tmp_path / f"p{suffix}"
        path.write_bytes(content)
        load(path=str(path))

    check()


FIELDS = st.sampled_from(
    sorted(set(BenchmarkConfig.__dataclass_fields__) - {"name", "title", "source", "path", "task"})
)


@examples(40, 150)
def test_benchmark_settings(examples, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": 1, "problem": "1+1?", "answer": 2}\n')

    @settings(max_examples=examples, **EACH)
    @given(changed=st.dictionaries(FIELDS, values, min_size=1, max_size=3))
    def check(changed):
        load(path=str(path), **changed)

    check()


NAMES = [
    "benchmark.limit benchmark.prompt benchmark.columns benchmark.answer_kind benchmark.fallback benchmark.option_seed",
    "model.dtype model.think_end model.config model.force_think model.template model.random_weights",
    "model.config.num_hidden_layers model.config.num_key_value_heads model.special_tokens decoding.max_new_tokens",
    "decoding.temperature decoding.top_p policy.budget policy.keep_ratio policy.local_window grid.policy",
    "grid.keep_ratio draws seed slots",
]
KEYS = st.sampled_from(" ".join(NAMES).split())
VALUES = st.sampled_from(
    ["null", "-1", "0", "1.5", "nan", "inf", "true", "[]", "[1,x]", "{a: 1}", "''", "word", "1e99", "${nope}", "'a b'"]
)


@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
@examples(8, 25)
def test_the_command_says_one_sentence(examples, kvsweep, tmp_path, monkeypatch):
    from kvsweep.harness import rounds

    monkeypatch.setattr(rounds, "decode_all", lambda jobs: [])

    @settings(max_examples=examples, **EACH)
    @given(overrides=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=2))
    def check(overrides):
        ended = kvsweep(
            "model=r1_qwen_7b",
            "model.random_weights=true",
            "policy=random",
            f"results_dir={tmp_path}",
            *(f"{key}={value}" for key, value in overrides),
        )
        assert ended.code in (0, 2), ended.err
        assert "Traceback" not in ended.err
        if ended.code == 2:
            assert ended.err.startswith("kvsweep: error: ")
            assert ended.err.count("\n") == 1

    check()
