"""Benchmarks load from every source, and every fault in their data is one sentence."""

import hashlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import jinja2
import pyarrow
import pyarrow.parquet
import pytest
from datasets.exceptions import DatasetNotFoundError as NotFound
from omegaconf import OmegaConf

from kvsweep.harness.benchmarks.config import WRONG_OPTIONS, BenchmarkConfig
from kvsweep.harness.benchmarks.load import PROMPTS, Benchmark, load_problems, read_prompt
from kvsweep.harness.benchmarks.options import option_orders
from kvsweep.harness.settings import CONF, build
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.toy.tasks import problems
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import content_hash

BOXED_INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
CONFIGS = sorted((CONF / "benchmark").glob("*.yaml"))
WRONG = dict.fromkeys(WRONG_OPTIONS, "x")
ROWS = [
    {"id": "a", "problem": "What is $13+14$?", "answer": 27},
    {"id": "b", "problem": "What is, in\nwords, 0-1?", "answer": "-1"},
    {"id": "c", "problem": "Größe of 3159, “exactly”?", "answer": "3159"},
]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read_yaml(path: Path) -> dict[str, Any]:
    """A benchmark's settings: those of the common base, changed by the benchmark's own file."""
    merged = OmegaConf.merge(OmegaConf.load(CONF / "benchmark/base/problems.yaml"), OmegaConf.load(path))
    fields = OmegaConf.to_container(merged, throw_on_missing=True)
    assert isinstance(fields, dict)
    assert fields.pop("defaults") == ["base/problems@_here_", "_self_"]
    return {str(name): value for name, value in fields.items()}


def config(**fields: Any) -> BenchmarkConfig:
    return build(BenchmarkConfig, "benchmark", {"name": "mine", "title": "Mine", "source": "file", **fields})


def load(path: Path, **fields: Any) -> Benchmark:
    return load_problems(config(path=str(path), **fields))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def mistake(*parts: str, path: Path | None = None, **fields: Any) -> str:
    """The message of loading a faulty benchmark: one plain sentence that holds the parts."""
    with pytest.raises(UserError) as caught:
        load_problems(config(path=None if path is None else str(path), **fields))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert not re.search(r"[.!?] +[A-Z]", message), message
    assert ";" in message or ":" in message, f"no way out: {message}"
    for part in parts:
        assert part in message, message
    assert message.encode()
    return message


class TestConfigs:
    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_a_hub_data_set_has_a_whole_commit_and_a_licence(self, path):
        fields = read_yaml(path)
        if fields["source"] == "hub":
            assert fields["licence"]
            # No commit of this one is known to us; loading it says that it is not pinned.
            assert path.stem == "gaokao2023en" or re.fullmatch(r"[0-9a-f]{40}", fields["revision"])
            assert fields["expected_count"] >= 30
            fallback = fields["fallback"]
            assert fallback is None or re.fullmatch(r"[0-9a-f]{40}", fallback["revision"])

    @pytest.mark.parametrize(
        ("fields", "word"),
        [
            ({"limit": 0}, "benchmark.limit=0"),
            ({"limit": "ten"}, "benchmark.limit='ten'"),
            ({"limit": True}, "benchmark.limit=True"),
            ({"source": "toy", "task": "chain", "count": -3}, "benchmark.count=-3"),
            ({"source": "toy", "task": "nope"}, "benchmark.task=nope"),
            ({"source": "web"}, "'file' or 'hub'"),
            ({"prompt": "loud"}, "bare, boxed"),
            ({"answer_kind": "poem"}, "benchmark.answer_kind=poem"),
            ({"answer_from": "dreams"}, "benchmark.answer_from=dreams"),
            ({"source": "hub"}, "benchmark.hub_id"),
            ({"source": "toy"}, "benchmark.task"),
            ({"source": "file"}, "benchmark.path"),
            ({"split": 3}, "benchmark.split=3"),
            ({"columns": {"answer": None}}, "benchmark.columns"),
            ({"columns": {"anwser": "x"}}, "benchmark.columns"),
            ({"columns": "problem"}, "benchmark.columns"),
            ({"columns": {"wrong_1": "x"}}, "wrong_2"),
            ({"columns": WRONG}, "benchmark.answer_kind=integer"),
            ({"columns": WRONG, "answer_kind": "letter", "answer_after": "#"}, "benchmark.answer_after='#'"),
            ({"prompt": None}, "benchmark.prompt"),
            ({"prompt": "boxed_letter"}, "problem alone"),
            ({"path": ""}, "benchmark.path=''"),
            ({"fallback": {"hub_id": "a/b", "revison": "x"}}, "benchmark.fallback.revison"),
            ({"keep_if": {"url": 3}}, "benchmark.keep_if"),
            ({"keep_if": {"id": "z"}}, "no row with 'z'"),
            ({"keep_if": {"knd": "y"}}, "no row with 'y' in column 'knd'"),
            ({"option_seed": 1.5}, "benchmark.option_seed"),
        ],
    )
    def test_a_setting_that_does_not_fit(self, tmp_path, fields, word):
        path = None if {"source", "path"} & fields.keys() else write_jsonl(tmp_path / "p.jsonl", ROWS)
        mistake(word, **{"path": path, **fields})


class TestToy:
    @pytest.mark.parametrize("path", [p for p in CONFIGS if read_yaml(p)["source"] == "toy"], ids=lambda p: p.stem)
    def test_toy_problems_come_from_their_task(self, path):
        benchmark = load_problems(BenchmarkConfig(**read_yaml(path)))
        task = path.stem.removeprefix("toy_")
        toys = problems(task)
        assert [(p.id, p.prompt, int(p.gold)) for p in benchmark.problems] == [
            (toy.id, toy.question, toy.answer) for toy in toys
        ]
        assert benchmark.count == 120


class TestFiles:
    def test_problems_keep_their_order_text_and_canonical_gold(self, tmp_path):
        benchmark = load(write_jsonl(tmp_path / "p.jsonl", ROWS), expected_count=99)
        assert [(p.id, p.gold) for p in benchmark.problems] == [("a", "27"), ("b", "-1"), ("c", "3159")]
        assert benchmark.problems[1].prompt == "What is, in\nwords, 0-1?"
        assert benchmark.count == 3
        assert benchmark.content_hash == content_hash([[p.id, p.prompt, p.gold] for p in benchmark.problems])

    def test_every_format_gives_the_same_benchmark(self, tmp_path):
        data = datasets.Dataset.from_list([{**row, "answer": str(row["answer"])} for row in ROWS])
        data.to_parquet(tmp_path / "p.parquet")
        data.save_to_disk(tmp_path / "saved")
        datasets.DatasetDict(test=data, train=data.select([0])).save_to_disk(tmp_path / "splits")
        (tmp_path / "folder").mkdir()
        data.to_json(tmp_path / "folder/train.jsonl")
        data.to_csv(tmp_path / "p.csv")
        (tmp_path / "p.json").write_text("\ufeff" + json.dumps(ROWS, indent=1), encoding="utf-8")
        expected = load(write_jsonl(tmp_path / "p.jsonl", ROWS))
        for name in ("p.json", "p.csv", "p.parquet", "saved", "splits", "folder"):
            got = load(tmp_path / name, split="test")
            assert got.problems == expected.problems, name
            assert got.content_hash == expected.content_hash, name

    @pytest.mark.parametrize("name", ["train.csv", "train.jsonl", "train.json"])
    def test_a_folder_is_read_as_its_file_is(self, tmp_path, name):
        """No reader makes a number of a text, or a date of an id."""
        rows = [
            {"id": "007", "problem": "One?", "answer": "1.10"},
            {"id": "7", "problem": "Two?", "answer": "1000000000000000000001"},
            {"id": "2026-01-01", "problem": "Three?", "answer": "01"},
        ]
        file = tmp_path / "set" / name
        file.parent.mkdir(parents=True)
        lines = [",".join(row.values()) for row in ({key: key for key in rows[0]}, *rows)]
        file.write_text("\n".join(lines) if file.suffix == ".csv" else json.dumps(rows))
        if file.suffix == ".jsonl":
            write_jsonl(file, rows)
        one, other = (load(path, answer_kind="expression") for path in (file, file.parent))
        assert [(problem.id, problem.gold) for problem in one.problems] == [(r["id"], r["answer"]) for r in rows]
        assert (other.problems, other.content_hash) == (one.problems, one.content_hash)

    def test_a_folder_of_parts_is_read_whole(self, tmp_path):
        for number, row in enumerate(ROWS):
            write_jsonl(tmp_path / f"test-{number}.jsonl", [row])
        assert [problem.id for problem in load(tmp_path).problems] == ["a", "b", "c"]
        write_jsonl(tmp_path / "train.jsonl", [ROWS[0]])
        assert [problem.id for problem in load(tmp_path, split="train").problems] == ["a"]

    def test_columns_are_mapped_and_fall_back_to_the_plain_names(self, tmp_path):
        columns = {"id": "ID", "problem": "question", "answer": "Final"}
        renamed = [{"ID": r["id"], "question": r["problem"], "Final": r["answer"]} for r in ROWS]
        mapped = load(write_jsonl(tmp_path / "m.jsonl", renamed), columns=columns)
        plain = load(write_jsonl(tmp_path / "p.jsonl", ROWS), columns=columns)
        assert mapped.problems == plain.problems
        grouped = load(tmp_path / "p.jsonl", columns=columns | {"group": "id"})
        assert [problem.group for problem in grouped.problems] == ["a", "b", "c"]
        assert grouped.content_hash == plain.content_hash

    def test_ids_made_of_the_text_do_not_depend_on_the_order(self, tmp_path):
        rows = [{"problem": row["problem"], "answer": row["answer"]} for row in ROWS]
        forward = load(write_jsonl(tmp_path / "f.jsonl", rows))
        backward = load(write_jsonl(tmp_path / "b.jsonl", rows[::-1]), columns={"id": None})
        assert set(forward.problems) == set(backward.problems)
        assert len({problem.id for problem in forward.problems}) == 3

    def test_limit_cuts_the_problems_but_not_the_hash(self, tmp_path):
        path = write_jsonl(tmp_path / "p.jsonl", ROWS)
        whole, part = load(path), load(path, limit=2)
        assert part.problems == whole.problems[:2]
        assert (part.content_hash, part.count) == (whole.content_hash, 3)
        assert load(path, limit=50).problems == whole.problems

    def test_the_boxed_prompt_adds_one_line(self, tmp_path):
        path = write_jsonl(tmp_path / "p.jsonl", ROWS)
        bare, boxed = load(path), load(path, prompt="boxed")
        assert boxed.problems[0].prompt == f"{bare.problems[0].prompt}\n{BOXED_INSTRUCTION}"
        assert boxed.content_hash != bare.content_hash

    @pytest.mark.parametrize(
        ("row", "word"),
        [
            ({"id": "x", "problem": "?"}, "no answer in column 'answer'"),
            ({"id": "x", "problem": "?", "answer": None}, "no answer"),
            ({"id": "x", "problem": "?", "answer": " "}, "no answer"),
            ({"id": "x", "problem": "?", "answer": float("nan")}, "no answer"),
            ({"id": "x", "problem": "?", "answer": 27.5}, "is no integer"),
            ({"id": "x", "problem": "\n ", "answer": 1}, "no problem text"),
            ({"id": "x", "problem": 12, "answer": 1}, "not text"),
            ({"id": "x", "problem": f"{ROWS[0]['problem']} ", "answer": 1}, "p.jsonl:1 again, under another id"),
            ({"problem": "?", "answer": 1}, "no id"),
            ({"id": "", "problem": "?", "answer": 1}, "no id"),
            ({"id": {}, "problem": "?", "answer": 1}, "the id {}"),
            ({"id": "a", "problem": "?", "answer": 1}, "the id 'a' of p.jsonl:1 again"),
        ],
    )
    def test_a_faulty_row_is_named_by_file_and_line(self, tmp_path, row, word):
        path = write_jsonl(tmp_path / "p.jsonl", [ROWS[0], row])
        message = mistake("p.jsonl:2", path=path).replace(f"{tmp_path}/", "")
        assert word in message

    def test_a_parquet_column_that_occurs_twice(self, tmp_path):
        arrays = [pyarrow.array([value]) for value in ("?", "7", "8")]
        table = pyarrow.Table.from_arrays(arrays, names=["problem", "answer", "answer"])
        pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
        mistake("'answer' twice", path=tmp_path / "p.parquet")

    @pytest.mark.parametrize(
        "text",
        [
            r"\fbox{2}?",
            r"3 \times 4?",
            r"6\text{ cm}?",
            r"\textbf{Two}?",
            r"\theta?",
            r"\beta?",
            r"\nabla f?",
            r"\rho?",
        ],
    )
    def test_unescaped_latex_in_json(self, tmp_path, text):
        path = tmp_path / "p.jsonl"
        path.write_text(f'{{"problem": "What is {text}", "answer": 5}}')
        mistake("p.jsonl:1 has the control character", r"a backslash of LaTeX as \\;", path=path)
        path.write_text(json.dumps({"problem": f"What\tis\r\n{text}", "answer": 5}))
        assert load(path).problems[0].prompt == f"What\tis\r\n{text}"

    @pytest.mark.parametrize("text", [r"\frac{1}{2}+0?", r"\triangle ABC?"])
    def test_latex_that_the_published_aime_2025_has_lost(self, tmp_path, text, capsys):
        path = tmp_path / "p.jsonl"
        path.write_text(f'{{"problem": "{text}", "answer": 5}}\n{{"problem": "Of {text}", "answer": 5}}')
        assert load(path).count == 2
        warning = capsys.readouterr().err
        assert re.fullmatch(r".*p.jsonl:1 has the control .*; the problem is asked as it is.\n", warning)

    @pytest.mark.parametrize(
        ("name", "content", "part"),
        [
            ("p.json", b'{"id": 1,\n"a": 2}', "list"),
            ("p.json", b"[\n1,", "line 2 column 3"),
            ("p.json", b"[1]", "list"),
            ("p.json", b"[" * 200_000, "p.json"),
            ("p.jsonl", b'\xff\xfe{"id"', "UTF-8"),
            ("p.jsonl", b"", "no problems"),
            ("p.json", b"[]", "no problems"),
            ("p.csv", b"id,problem,answer\n", "no problems"),
            ("p.csv", b"id,problem,answer\n1,two, three,3\n", "p.csv:2"),
            ("p.csv", b"id,problem,answer\n1,ok,1\n2,short\n", "p.csv:3"),
            ("p.csv", b'id,problem,answer\n1,ok,1\n2,"open,2\n', "p.csv:3"),
            ("p.csv", b'id,problem,answer\n1,"two\nlines",1\n2,none,\n', "p.csv:4"),
            ("p.parquet", b"PAR1 not really", "Parquet"),
            ("p.xlsx", b"PK\3\4\xff", "UTF-8"),
            ("p.csv", b"id,problem,answer,answer\n1,?,7,8\n", "'answer' twice"),
            ("p.jsonl", b'{"problem": "?", "answer": "\\text{\\ud83d}"}', "lone surrogate"),
            ("p.jsonl", b'{"problem": "?", "answer": 5, "id": "\\ud83d"}', "lone surrogate"),
            ("p.jsonl", b'{"problem": "2\\udc00?", "answer": 5}', "lone surrogate"),
            ("p.jsonl", b'{"problem": "same", "answer": 1}\n{"problem": "same ", "answer": 1}', "p.jsonl:1 again"),
            ("p.jsonl", b'{"id": 1, "text": "?", "an\\nswer": 2}', "'text'"),
            ("p.jsonl", b"{}\n\n{", "p.jsonl:3"),
            ("p.jsonl", b"{}\n\n[1]", "p.jsonl:3"),
            ("p.jsonl", b"{}\n\n\x00", "p.jsonl:3"),
            ("p.jsonl", b"{}\n\n" + b"[" * 200_000, "p.jsonl:3"),
        ],
        ids=lambda value: value[:60],
    )
    def test_a_file_that_cannot_be_read(self, tmp_path, name, content, part):
        (tmp_path / name).write_bytes(content)
        mistake(part, path=tmp_path / name)

    def test_a_missing_file(self, tmp_path):
        mistake("nope.jsonl", "No such file", path=tmp_path / "nope.jsonl")

    def test_a_folder_without_data_or_with_another_split(self, tmp_path):
        (tmp_path / "empty").mkdir()
        mistake("empty", path=tmp_path / "empty")
        data = datasets.Dataset.from_list(ROWS[1:])
        datasets.DatasetDict(dev=data, test=data).save_to_disk(tmp_path / "splits")
        mistake("benchmark.split=train", "dev, test", path=tmp_path / "splits", split="train")


class TestEndless:
    """A path that could be read for ever is refused before it is opened."""

    def test_a_pipe_or_a_device(self, tmp_path):
        for suffix in (".jsonl", ".json", ".csv", ".parquet"):
            os.mkfifo(tmp_path / f"pipe{suffix}")
            mistake("is no plain file", path=tmp_path / f"pipe{suffix}")
            (tmp_path / f"zero{suffix}").symlink_to("/dev/zero")
            mistake("is no plain file", path=tmp_path / f"zero{suffix}")

    @pytest.mark.parametrize("name", ["state.json", "dataset_dict.json", "train.jsonl"])
    def test_a_pipe_in_a_folder(self, name, tmp_path):
        (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[0]))
        os.mkfifo(tmp_path / name)
        mistake(name, "is a pipe, a device", path=tmp_path)

    @pytest.mark.slow
    def test_a_folder_without_end(self, tmp_path):
        for number in range(10_001):
            (tmp_path / str(number)).touch()
        mistake("more than 10,000", path=tmp_path)

    def test_links_of_a_folder_to_itself_are_not_followed(self, tmp_path):
        write_jsonl(tmp_path / "train.jsonl", ROWS)
        for name in "abc":
            (tmp_path / name).symlink_to(".")
        assert load(tmp_path).count == len(ROWS)


@pytest.fixture
def serve(monkeypatch) -> Callable[[object], None]:
    """`serve(data)` is a hub that has these data, or raises this error."""

    def start(data):
        def answer(*args: object, **kwargs: object):
            if isinstance(data, Exception):
                raise data
            return data

        monkeypatch.setattr(datasets, "load_dataset", answer)

    return start


def hub_rows(count: int = 40) -> datasets.Dataset:
    """The schema of math-ai/amc23: integer ids, `question`, and answers that look like floats."""
    rows = [{"id": i, "question": f"Problem {i}?", "answer": f"{i - 1}.0", "url": "u"} for i in range(count)]
    return datasets.Dataset.from_list(rows)


AMC23 = read_yaml(CONF / "benchmark/amc23.yaml")


class TestHub:
    @pytest.mark.parametrize("path", [p for p in CONFIGS if read_yaml(p)["source"] == "hub"], ids=lambda p: p.stem)
    def test_id_split_and_revision_are_passed_on(self, path, monkeypatch):
        fields, calls = read_yaml(path), []

        def fake(*args: Any, **kwargs: Any):
            calls.append((args, kwargs))
            count = fields["expected_count"]
            columns = [(name, column) for name, column in fields["columns"].items() if column is not None]
            answer = f"{fields['answer_after'] or ''}{{:03}}"
            rows = [
                {c: answer.format(i) if name == "answer" else f"{i} {name}?" for name, c in columns}
                for i in range(count)
            ]
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", fake)
        benchmark = load_problems(BenchmarkConfig(**fields))
        place = (fields["hub_id"], fields["hub_config"])
        assert calls == [(place, {"split": fields["split"], "revision": fields["revision"]})]
        if fields["answer_kind"] == "integer":
            assert [p.gold for p in benchmark.problems] == [str(i) for i in range(fields["expected_count"])]
        assert f"{fields['hub_id']}@{fields['revision'] or 'unpinned'}" in benchmark.origin

    def test_the_real_loader_reads_the_same_schema_from_disk(self, tmp_path):
        """`load_dataset` itself, its id pointing to a local folder laid out as a hub dataset is."""
        hub_rows().to_json(tmp_path / "test.jsonl")
        hub = load_problems(BenchmarkConfig(**{**AMC23, "hub_id": str(tmp_path), "revision": None}))
        local = load_problems(BenchmarkConfig(**{**AMC23, "path": str(tmp_path / "test.jsonl")}))
        assert hub.problems == local.problems
        assert hub.content_hash == local.content_hash
        assert (hub.problems[0].id, hub.problems[0].gold) == ("0", "-1")

    def test_an_unpinned_dataset_says_so(self, serve, capsys):
        serve(hub_rows())
        benchmark = load_problems(BenchmarkConfig(**{**AMC23, "revision": None}))
        assert "math-ai/amc23@unpinned" in benchmark.origin
        assert "not pinned" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("data", "fields", "word"),
        [
            (hub_rows(39), {}, "39 problems"),
            (datasets.DatasetDict(test=hub_rows()), {"split": None}, "benchmark.split"),
            (NotFound("Dataset 'x' is a gated dataset on the Hub."), {}, "terms"),
            (NotFound("Dataset 'x' doesn't exist on the Hub"), {}, "hf auth login"),
            (ConnectionError("Couldn't reach 'x' on the Hub (OfflineModeIsEnabled)"), {}, "network"),
            (ValueError('Unknown split "tset".\nShould be one of ["test"].'), {}, "benchmark.split"),
        ],
    )
    def test_what_the_hub_has_or_refuses(self, data, fields, word, serve):
        serve(data)
        mistake("math-ai/amc23", word, **{**AMC23, **fields})


class TestFallback:
    def test_the_second_source_is_taken_and_named(self, monkeypatch, capsys):
        asked: list[tuple[str, str | None]] = []

        def fake(hub_id, name, *, split, revision):
            asked.append((hub_id, revision))
            if hub_id == "math-ai/amc23":
                raise ConnectionError("Couldn't reach")
            rows = [{"problem": f"{i}?", "answer": float(i), "url": f"wiki/{2022 + i % 2}_AMC"} for i in range(80)]
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", fake)
        benchmark = load_problems(BenchmarkConfig(**AMC23))
        assert benchmark.count == 40
        assert all(int(problem.gold) % 2 == 1 for problem in benchmark.problems)
        assert benchmark.origin.startswith("AI-MO/aimo-validation-amc@69d78a4a")
        assert [hub_id for hub_id, _ in asked] == ["math-ai/amc23", "AI-MO/aimo-validation-amc"]
        assert "AI-MO/aimo-validation-amc is used" in capsys.readouterr().err

    def test_if_neither_can_be_had_the_first_is_named(self, serve):
        serve(ConnectionError("Couldn't reach"))
        assert "aimo-validation" not in mistake("math-ai/amc23", "network", **AMC23)

    def test_another_content_is_one_sentence(self, serve):
        serve(hub_rows())
        right = load_problems(BenchmarkConfig(**AMC23)).content_hash
        assert load_problems(BenchmarkConfig(**{**AMC23, "expected_hash": right})).count == 40
        mistake(right, "expected_hash", **{**AMC23, "expected_hash": "0" * 16})


def made_up(count: int) -> list[dict[str, Any]]:
    """Questions of GPQA's columns that nobody asked."""
    return [
        {
            "Record ID": f"rec{i * 7919 % 100003:05}",
            "Question": f"How many legs have {i} spiders?",
            "Correct Answer": f"{8 * i}",
            "Incorrect Answer 1": f"{8 * i + 1}",
            "Incorrect Answer 2": f"{8 * i + 2}\n",
            "Incorrect Answer 3": f"{8 * i + 3}",
        }
        for i in range(count)
    ]


def options(*texts: str) -> dict[str, str]:
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    return dict(zip(columns, texts, strict=True))


class TestOptions:
    FIELDS = read_yaml(CONF / "benchmark" / "gpqa_diamond.yaml")

    def load(self, tmp_path: Path, rows: list[dict[str, Any]], **fields: Any) -> Benchmark:
        path = write_jsonl(tmp_path / "gpqa.jsonl", rows)
        return load_problems(BenchmarkConfig(**{**self.FIELDS, "path": str(path), **fields}))

    @pytest.mark.parametrize("seed", range(5))
    def test_each_letter_is_right_equally_often(self, tmp_path, seed):
        golds = [p.gold for p in self.load(tmp_path, made_up(198), option_seed=seed).problems]
        assert sorted(golds.count(letter) for letter in "ABCD") == [49, 49, 50, 50]

    def test_a_second_implementation_gives_the_same_order(self):
        """Written from the documented rule alone, with numbers in place of sorted digests."""
        ids = [row["Record ID"] for row in made_up(198)]

        def number(text):
            return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest(), "big")

        for seed in (0, 12):
            place = {}
            for problem_id in ids:
                before = sum(number(f'[{seed}, "{i}"]') < number(f'[{seed}, "{problem_id}"]') for i in ids)
                place[problem_id] = before % 4
            expected = {}
            for problem_id in ids:
                others = sorted([1, 2, 3], key=lambda k, p=problem_id, s=seed: number(f'[{s}, "{p}", {k}]'))
                others.insert(place[problem_id], 0)
                expected[problem_id] = tuple(others)
            assert option_orders(ids, seed) == expected

    @pytest.mark.parametrize("prompt", ["simple_evals", "boxed_letter", "dynts"])
    def test_the_gold_letter_stands_before_the_right_option(self, tmp_path, prompt):
        for row, problem in zip(made_up(12), self.load(tmp_path, made_up(12), prompt=prompt).problems, strict=True):
            assert problem.prompt.count(row["Question"]) == 1
            line = next(line for line in problem.prompt.splitlines() if line.endswith(f") {row['Correct Answer']}"))
            assert line.lstrip("(").startswith(f"{problem.gold})")

    def test_the_seed_is_part_of_the_content(self, tmp_path):
        first, second = (self.load(tmp_path, made_up(8), option_seed=seed) for seed in (0, 1))
        assert first.content_hash != second.content_hash

    @pytest.mark.parametrize(
        ("change", "word"),
        [
            ({"Incorrect Answer 2": " "}, "no option in column 'Incorrect Answer 2'"),
            ({"Record ID": made_up(1)[0]["Record ID"]}, "ids must differ"),
            ({"Incorrect Answer 2": "8 \n"}, "'8' twice"),
            ({"Incorrect Answer 2": ["9", "10"]}, "the option ['9', '10'], which is not text"),
            ({"Correct Answer": True}, "the option True, which is not text"),
            (options("C) 3 J", "A) 4 J", "(B) 5 J", "D. 6 J"), "letters of their own"),
            (options("B", "4 J", "5 J", "6 J"), "the right option 'B', a letter"),
            ({**made_up(1)[0], "Record ID": "other"}, "again, under another id"),
        ],
    )
    def test_a_faulty_question(self, tmp_path, change, word):
        rows = made_up(2)
        rows[1].update(change)
        fields = {name: value for name, value in self.FIELDS.items() if name != "path"}
        mistake("gpqa.jsonl:2", word, path=write_jsonl(tmp_path / "gpqa.jsonl", rows), **fields)

    def test_options_that_begin_with_a_letter_of_a_name(self, tmp_path):
        """Two names of species are no labels; and the same question may have other options."""
        rows = made_up(2)
        rows[0].update(options("C. elegans", "D. rerio", "B. subtilis", "yeast"))
        rows[1]["Question"] = rows[0]["Question"]
        assert self.load(tmp_path, rows).count == 2

    @pytest.mark.parametrize(
        ("kind", "answer", "column", "listed"),
        [
            ("letter", "A", "choices", ["6 J", "7 J"]),
            ("letter", "A", "choices", {"label": ["A", "B"], "text": ["6 J", "7 J"]}),
            ("letter", "A", "choices", {"A": "6 J", "B": "7 J"}),
            ("integer", 1, "choices", ["6 J", "7 J"]),
            ("integer", 1, "Options", ["6 J", "7 J"]),
            ("expression", 1, "candidates", ["6 J", "7 J"]),
        ],
    )
    def test_a_list_of_options_that_no_prompt_asks(self, tmp_path, kind, answer, column, listed):
        row = {"id": "q", "problem": "Which energy?", "answer": answer, column: listed, "tags": []}
        path = write_jsonl(tmp_path / "p.jsonl", [row])
        mistake("p.jsonl:1", repr(column), path=path, answer_kind=kind)
        asked = {**row, "problem": "Which energy?\nA) 6 J\nB) 7 J", column: ["6 J", "7 J"]}
        assert load(write_jsonl(path, [asked]), answer_kind=kind).problems[0].gold == str(answer)
        named = {"tags": [] if kind == "letter" else ["history"], column: []}
        assert load(write_jsonl(path, [{**asked, **named}]), answer_kind=kind).count == 1

    @pytest.mark.parametrize(
        ("text", "gold", "lacking"),
        [
            ("What is the capital of Italy?", "B", "A"),
            ("Is A man ill with hepatitis B?", "A", "A"),
            ("Which? A) 6 J B) 7 J", "C", "C"),
        ],
    )
    def test_a_letter_without_options(self, tmp_path, text, gold, lacking):
        path = write_jsonl(tmp_path / "p.jsonl", [{"id": "q", "problem": text, "answer": gold}])
        mistake(f"the answer {gold}", f"an option {lacking};", path=path, answer_kind="letter")

    @pytest.mark.parametrize(
        "text",
        ["A) 6 J B) 7 J", "A. 6 J\nB. 7 J", "(A) 6 (B) 7", "A: 6, B: 7", r"$\textbf{(A)}~6\quad\text{B}~7$", "A 6\nB 7",
         "A  6  B  7", "Which is larger, A or B?", "**A** 6 **B** 7", "[A] 6 [B] 7"],
    )  # fmt: skip
    def test_a_letter_with_options_in_the_problem(self, tmp_path, text):
        path = write_jsonl(tmp_path / "p.jsonl", [{"id": "q", "problem": text, "answer": "B"}])
        assert load(path, answer_kind="letter").problems[0].gold == "B"


@pytest.mark.shared
@pytest.mark.parametrize(
    ("name", "count", "first", "last"),
    [
        ("aime24", 30, "204", "902"),
        ("aime25", 30, "70", "240"),
        ("amc23", 40, "27", "8"),
        pytest.param("gsm8k", 1319, "18", "14", marks=pytest.mark.slow),
    ],
)
def test_the_real_problems_load_whole(
    name,
    count,
    first,
    last,
    shared_data,
    tmp_path,
    compose,
    tiny,
):
    path = shared_data / f"{name}.jsonl"
    fields = read_yaml(CONF / "benchmark" / f"{name}.yaml")
    benchmark = load_problems(BenchmarkConfig(**{**fields, "path": str(path)}))
    assert benchmark.count == len(benchmark.problems) == fields["expected_count"] == count
    assert (benchmark.problems[0].gold, benchmark.problems[-1].gold) == (first, last)
    golds = [problem.gold for problem in benchmark.problems]
    assert golds == [str(json.loads(line)["answer"]) for line in path.read_text().splitlines()]
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path))
    rows.save_to_disk(tmp_path / "saved")
    rows.to_parquet(tmp_path / "rows.parquet")
    routes = [path, tmp_path / "saved", tmp_path / "rows.parquet"]
    loaded = [load_problems(BenchmarkConfig(**{**fields, "path": str(route)})) for route in routes]
    assert {one.content_hash for one in loaded} == {benchmark.content_hash}
    jobs = [make_job(compose(f"benchmark={name}", f"benchmark.path={route}", *tiny)) for route in routes]
    assert len({job.cells[0].cell_id for job in jobs}) == 1


TOO_MUCH = "cannot ask this benchmark"
OPTIONS = {"A": "one", "B": "two", "C": "three", "D": "four"}


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """End a test that hangs, by an error that no product code catches."""

    def end(number, frame):
        raise AssertionError("the test hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def prompts_mistake(path: Path, template: str | None = None) -> str:
    """The one sentence that refuses a template."""
    if template is not None:
        path.write_text(template)
    with pytest.raises(UserError) as caught:
        read_prompt(str(path)).ask("What is 1+1?", {})
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("benchmark.prompt=")
    assert message.endswith(".")
    return message


@pytest.mark.parametrize("name", sorted(path.stem for path in PROMPTS.glob("*.jinja")))
def test_the_sandbox_renders_as_jinja_does(name):
    options = {} if name in ("bare", "boxed") else OPTIONS
    text = (PROMPTS / f"{name}.jinja").read_text().rstrip("\n")
    for problem in ("What is 1+1?", "{{ x }} {% y %} <b>&amp;</b>\n\n  é"):
        plain = jinja2.Template(text, keep_trailing_newline=True).render(problem=problem, options=options)
        assert read_prompt(name).ask(problem, options) == plain


@pytest.mark.parametrize(
    "reach",
    [
        "cycler.__init__.__globals__.os.system('touch {file}')",
        "lipsum.__globals__['os'].system('touch {file}')",
        "self.__init__.__globals__.__builtins__.open('{file}', 'w')",
        "problem.__class__.__mro__[-1].__subclasses__()",
        "''['__class__']",
        "problem|attr('__class__')",
        "'{0.__class__}'.format(problem)",
    ],
)
def test_no_python_object_is_reached(reach, tmp_path):
    file = tmp_path / "made"
    message = prompts_mistake(tmp_path / "p.jinja", "{{ problem }}{{ " + reach.replace("{file}", str(file)) + " }}")
    assert "SecurityError" in message
    assert not file.exists()


def test_no_value_is_changed(tmp_path):
    path = tmp_path / "p.jinja"
    path.write_text("{{ problem }}{{ options.pop('A') }}")
    options = dict(OPTIONS)
    with pytest.raises(UserError, match="SecurityError"):
        read_prompt(str(path)).ask("What is 1+1?", options)
    assert options == OPTIONS


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("Solve.", "leaves the problem out"),
        ("{{ problem }", "is no template"),
        ("{% for %}", "is no template"),
        ("{% for i in '1' %}" * 30 + "{% endfor %}" * 30, "is no template"),
        ("{{ problem }}{% for i in range(1000000000) %}x{% endfor %}", TOO_MUCH),
    ],
    ids=lambda text: text[:20],
)
def test_a_template_that_cannot_be_used(template, word, tmp_path):
    assert word in prompts_mistake(tmp_path / "p.jinja", template)


def test_numbers_are_still_calculated(tmp_path):
    (tmp_path / "p.jinja").write_text("{{ problem }} {{ 6 * 7 }} {{ 7 % 4 }}")
    assert read_prompt(str(tmp_path / "p.jinja")).ask("Q?", {}) == "Q? 42 3"


def test_another_file_is_not_included(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    assert "secret!" not in prompts_mistake(
        tmp_path / "p.jinja", "{{ problem }}{% include '" + f"{tmp_path}/secret.txt" + "' %}"
    )


def test_a_pipe_or_a_device_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "p.jinja")
    (tmp_path / "zero.jinja").symlink_to("/dev/zero")
    for path in (tmp_path / "p.jinja", tmp_path / "zero.jinja", Path("/dev/zero"), tmp_path):
        assert "neither a name nor a readable file" in prompts_mistake(path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "folder/train.jsonl"])
def test_a_git_lfs_pointer_is_named(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(POINTER)
    place = tmp_path / name if "/" not in name else (tmp_path / name).parent
    mistake(f"{tmp_path / name} is a Git LFS pointer", path=place)


@pytest.mark.parametrize("name", ["set[v1]", "a*", "what?"])
def test_a_folder_whose_name_is_a_pattern(name, tmp_path):
    (tmp_path / name).mkdir()
    write_jsonl(tmp_path / name / "train.jsonl", ROWS)
    mistake("has *, ? or [ in its name", "rename the folder", path=tmp_path / name)
    datasets.Dataset.from_list([{"id": "saved", "problem": "1+1?", "answer": "2"}]).save_to_disk(tmp_path / f"{name}-")
    assert [problem.id for problem in load(tmp_path / f"{name}-").problems] == ["saved"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set/train.jsonl", [{"id": 1, "problem": "1+1?", "answer": "2"}])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file/datasets")
    mistake(f"the cache {tmp_path}/file/datasets cannot be written to (Not a directory)", path=tmp_path / "set")
