"""Grading: what counts as an answer, which outcome it gets, and workers that cannot hang the pass."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.harness.grading.answers import judge, parse_integer
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.grading.statements import boxes
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Completion, Grade, Problem, append_row
from kvsweep.run_files.thinking import answer_part
from tests.harness.grading import sleeping_judge
from tests.program import grade as grade_command
from tests.run_files.test_row_types import completion as any_completion


def completion(text: str, problem_id: str = "p", **fields: Any) -> Completion:
    return any_completion(problem_id, text=text, **fields)


def boxed(answer: object) -> str:
    return f"Thinking, maybe \\boxed{{999}}.</think>\n\nSo the answer is $\\boxed{{{answer}}}$."


def write_cell(directory: Path, completions: list[Completion], golds: dict[str, str], kind: str = "integer") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cell.yaml").write_text(f"schema: 1\nbenchmark:\n  name: mine\n  answer_kind: {kind}\nseed: 0\n")
    problems = [Problem(id=problem_id, prompt="?", gold=gold) for problem_id, gold in golds.items()]
    for name, rows in (("problems", problems), ("completions", completions)):
        lines = [json.dumps(row.to_dict()) + "\n" for row in rows]
        (directory / f"{name}.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture
def two_draws(tmp_path) -> Path:
    """A cell of one problem with the gold 5, which both of its draws answer."""
    return write_cell(tmp_path / "cell", [completion(boxed(5)), completion(boxed(5), draw=1)], {"p": "5"})


def read_grades(directory: Path) -> list[Grade]:
    lines = (directory / "grades.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Grade) for line in lines]


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout_s=120) as pool:
        yield pool


class TestAnswerPart:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("thinking</think>answer", "answer"),
            ("<think>\nthinking</think>\n\nanswer", "\n\nanswer"),
            ("thinking </think>", ""),
            ("</think>answer", "answer"),
            ("a, as <think> is a tag</think>b", "b"),
            ("never closed, \\boxed{5}", None),
            ("<think>never closed \\boxed{5}", None),
            ("a</think>b<think>c</think>d", "d"),
            ("a</think>\\boxed{5}<think>more, never closed", None),
            ("a</think>b</think>c", "b</think>c"),
            ("<think>a</think>\nI closed <think> before \\boxed{5}", "\nI closed <think> before \\boxed{5}"),
            ("a</think>\\boxed{5}\n <think>more", None),
            ("<|user|> 5? <think>a</think>5", "5"),
            ("", None),
        ],
    )
    def test_only_what_follows_the_thinking(self, text, answer):
        assert answer_part(text) == answer


def last_box(text: str) -> str | None:
    """The content of the last box that is not empty; None if that is never closed, or if there is none."""
    return next((box.content for box in boxes(text)), None)


class TestLastBox:
    @pytest.mark.parametrize(
        ("text", "content"),
        [
            (r"\boxed{27}", "27"),
            (r"\boxed {27}", "27"),
            (r"first \boxed{1}, then \boxed{2}.", "2"),
            (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
            (r"\boxed{x = \boxed{5}}", "5"),
            (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
            (r"\boxed{5} written as \boxed{}", "5"),
            (r"\boxed{5} and so \boxed{7", None),
            (r"\boxed{5 oops \boxed{7}", "7"),
            (r"a stray } and { then \boxed{3}", "3"),
            (r"\\boxed{4}", None),
            (r"\boxed{}", None),
            (r"\boxed 5", "5"),
            ("27", None),
        ],
    )
    def test_balanced_and_last(self, text, content):
        assert last_box(text) == content


class TestParseInteger:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("27", "27"),
            ("027", "27"),
            ("000", "0"),
            ("-0", "0"),
            ("-1", "-1"),
            ("\u22121", "-1"),
            ("+5", "5"),
            ("3159", "3159"),
            ("27.0", "27"),
            ("27.", "27"),
            ("1,625", "1625"),
            ("1{,}625", "1625"),
            (r"10,\!080", "10080"),
            (r"10\,080", "10080"),
            ("$45$", "45"),
            (r"\$45", "45"),
            (r"45^\circ", "45"),
            (r"45^{\circ}", "45"),
            ("45°", "45"),
            (r"20\%", "20"),
            (r"27 \text{ miles}", "27"),
            (r"27\ \mathrm{cm}^2", "27"),
            (r"27\text{ cm}^{3}", "27"),
            (r"\text{27}", "27"),
            (r"\textbf{(B) } 27", "27"),
            (r"\textbf{(B)}\ 27 \text{ miles}", "27"),
            ("(B) 27", "27"),
            ("n=3", "3"),
            ("m + n = 25", "25"),
            ("{27}", "27"),
            ("27_{10}", "27"),
            ("9" * 400, "9" * 400),
        ],
    )
    def test_integers(self, text, value):
        assert parse_integer(text) == value

    @pytest.mark.parametrize(
        "text",
        [
            "", "-", "27.5", ".5", "1 2", "1, 2", "(1, 2)", "1,2", "1,23", "0,123", "1,2345", "27 or 28",
            "2^3", r"\frac{4}{2}", "4/2", "5!", "5i", r"5\mathrm{i}", r"5\text{ million}",
            r"5 \text{ or } 6", r"5\text{0}", r"5\pi", r"\sqrt{4}", "1e3", "²", "--1", r"\pm 5",
            "x=y=5", "x", "5x", "{5}{6}", "answer 27", "A", "9" * 501, r"10\,0800",
            r"\text{not }5", r"5\text{ dozen}", "5 6",
        ],
    )  # fmt: skip
    def test_everything_else_is_not(self, text):
        assert parse_integer(text) is None

    @given(st.integers(-(10**12), 10**12), st.sampled_from(["%s", "$%s$", "%s.0", r"%s\text{ units}", "x=%s"]))
    def test_any_integer_is_read_back(self, value: int, form: str):
        assert parse_integer(form % value) == str(value)
        assert parse_integer(form % f"{value:,}") == str(value)

    @given(st.text(alphabet=r"0123456789-,.{}\ $%^textboxdcirc=+()A", max_size=60))
    @settings(max_examples=500)
    def test_whatever_is_accepted_holds_those_digits(self, text: str):
        value = parse_integer(text)
        if value is not None:
            assert str(int(value)) == value
            assert value.lstrip("-") in re.sub("[^0-9]", "", text)


class TestGrade:
    @pytest.mark.parametrize(
        ("text", "stop_reason", "gold", "answer", "outcome"),
        [
            (boxed("027"), "stop", "27", "27", "correct"),
            (boxed(27), "stop", "027", "27", "correct"),
            (boxed("-1"), "stop", "-1", "-1", "correct"),
            (boxed(1), "stop", "-1", "1", "wrong"),
            (boxed("127"), "stop", "27", "127", "wrong"),
            (boxed(r"27\%"), "stop", "27", "27", "correct"),
            (boxed(r"1.5\times 10^3"), "stop", "1500", r"1.5\times 10^3", "correct"),
            (boxed("-1.25e2"), "stop", "-125", "-1.25e2", "correct"),
            (boxed("1.234567×10^6"), "stop", "1234567", "1.234567×10^6", "correct"),
            (boxed(r"2.70000001\times 10^1"), "stop", "27", r"2.70000001\times 10^1", "wrong"),
            (boxed(r"1.55\times 10^1"), "stop", "15", r"1.55\times 10^1", "wrong"),
            (boxed(r"1.5\times 10^3"), "stop", "150", r"1.5\times 10^3", "wrong"),
            (boxed("27.0000001"), "stop", "27", "27.0000001", "wrong"),
            (boxed("1\u202f000"), "stop", "1000", "1000", "correct"),
            (boxed("27\u200b"), "stop", "27", "27", "correct"),
            (boxed(r"\frac{54}{2}"), "stop", "27", r"\frac{54}{2}", "correct"),
            (boxed(r"\sqrt{324^2 + (-432)^2}"), "stop", "540", r"\sqrt{324^2 + (-432)^2}", "correct"),
            (boxed(r"\frac{55}{2}"), "stop", "27", r"\frac{55}{2}", "wrong"),
            (boxed("27 or 28"), "stop", "27", "27 or 28", "wrong"),
            (boxed(27), "length", "27", None, "truncated"),
            ("no end \\boxed{27}", "length", "27", None, "truncated"),
            ("never closed \\boxed{27}", "stop", "27", None, "no_answer"),
            ("\\boxed{27}</think>It may be 27.", "stop", "27", None, "no_answer"),
            ("</think>\\boxed{26} or \\boxed{27", "stop", "27", None, "no_answer"),
            ("", "stop", "27", None, "no_answer"),
        ],
    )
    def test_outcomes(self, text, stop_reason, gold, answer, outcome):
        assert judge(text, stop_reason, gold, "integer")[:2] == (answer, outcome)

    HOSTILE = (
        "{" * 1_000_000,
        "\\boxed{" * 100_000,
        "\\boxed{" * 100_000 + "5" + "}" * 100_000,
        "\\boxed{" + "{" * 10_000 + "5" + "}" * 10_000 + "}",
        "\\boxed{}" * 100_000,
        "\\boxed" + " " * 1_000_000,
        "<think></think>" * 60_000 + "\\boxed{5}",
        "</think>" * 120_000,
        "\\boxed{" + "9" * 1_000_000 + "}",
        "\\boxed{" + "\\text{" * 80 + "}" * 80 + "}",
        "\\boxed{" + " ~" * 240 + "}",
        "\\boxed{" + "a+" * 240 + "}",
        "\\boxed{1" + ",111" * 120 + "x}",
        "\\boxed{1" + "\\text{a}" * 60 + "x}",
        "\\" * 1_000_000,
        "\x00\u202e\ufeff\ud800\\boxed{\x00}",
        "<think>" * 100_000,
    )

    @pytest.mark.parametrize("text", HOSTILE, ids=[repr(text[:12]) for text in HOSTILE])
    def test_hostile_text_is_graded_in_bounded_time(self, text):
        started = time.process_time()  # a busy machine takes many times longer by the clock
        answer, outcome = judge("</think>" + text, "stop", "5", "integer")[:2]
        assert time.process_time() - started < 10
        assert outcome in ("no_answer", "wrong", "correct")
        assert len(answer or "") <= 500

    @given(st.lists(st.sampled_from([*"{}\\5 ", "\\boxed{", "</think>", "<think>", "\\text{"])))
    @settings(max_examples=500)
    def test_no_text_makes_it_raise(self, pieces: list[str]):
        assert judge("".join(pieces), "stop", "5", "integer")[1] in ("no_answer", "wrong", "correct")


class TestCell:
    def cell(self, directory: Path, count: int = 40) -> Path:
        golds = {f"q{i}": str(i) for i in range(count)}
        rows = [completion(boxed(i if i % 4 else i + 1), f"q{i}") for i in range(count)]
        rows[1] = completion(boxed(1), "q1", stop_reason="length")
        rows[2] = completion("lost", "q2")
        return write_cell(directory, rows, golds)

    def test_every_row_is_graded_once_in_order(self, tmp_path, grader):
        cell = self.cell(tmp_path / "cell")
        summary = grader.grade_cell(cell)
        rows = read_grades(cell)
        assert [row.problem_id for row in rows] == [f"q{i}" for i in range(40)]
        assert [row.outcome for row in rows[:5]] == ["wrong", "truncated", "no_answer", "correct", "wrong"]
        assert summary == {"correct": 28, "wrong": 10, "truncated": 1, "no_answer": 1, "graded": 40}
        assert sorted(p.name for p in cell.iterdir()) == [
            ".grades.jsonl.lock", "cell.yaml", "completions.jsonl", "grades.jsonl", "problems.jsonl",
        ]  # fmt: skip

    def test_only_missing_rows_are_graded_again(self, tmp_path, grader):
        cell = self.cell(tmp_path / "cell")
        grader.grade_cell(cell)
        whole = (cell / "grades.jsonl").read_bytes()
        stamp = (cell / "grades.jsonl").stat().st_mtime_ns
        assert grader.grade_cell(cell)["graded"] == 0
        assert (cell / "grades.jsonl").stat().st_mtime_ns == stamp
        lines = whole.splitlines(keepends=True)
        (cell / "grades.jsonl").write_bytes(b"".join(lines[10:]) + b'{"torn')
        assert grader.grade_cell(cell)["graded"] == 10
        assert (cell / "grades.jsonl").read_bytes() == whole
        assert grader.grade_cell(cell, regrade=True)["graded"] == 40
        assert (cell / "grades.jsonl").read_bytes() == whole

    def test_a_changed_gold_is_graded_again(self, two_draws, grader):
        assert grader.grade_cell(two_draws)["correct"] == 2
        write_cell(two_draws, [completion(boxed(5)), completion(boxed(5), draw=1)], {"p": "4"})
        assert grader.grade_cell(two_draws) == {"graded": 2, "wrong": 2}

    def test_a_grade_without_its_completion_is_dropped(self, two_draws, grader):
        grader.grade_cell(two_draws)
        write_cell(two_draws, [completion(boxed(5), draw=1)], {"p": "5"})
        assert grader.grade_cell(two_draws)["graded"] == 0
        assert [row.draw for row in read_grades(two_draws)] == [1]

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data.replace(b"\n", b"\r\n"),
            lambda data: data + b"{broken}\n",
            lambda data: b'{"schema": 1}\n' + data,
            lambda data: b"{}\n" + data,
            lambda data: data.replace(b'"schema":1', b'"schema":2'),
            lambda data: data.replace(b'"correct":1', b'"correct":0'),
            lambda data: b"\x00" * len(data),
        ],
    )
    def test_damaged_grades_stop_nothing(self, two_draws, grader, damage):
        grader.grade_cell(two_draws)
        path = two_draws / "grades.jsonl"
        whole = path.read_bytes()
        path.write_bytes(damage(whole))
        grader.grade_cell(two_draws)
        assert path.read_bytes().replace(b"\r", b"") == whole

    def test_a_cell_without_completions_has_no_grades(self, tmp_path, grader):
        cell = write_cell(tmp_path / "cell", [], {})
        assert not grader.grade_cell(cell)
        assert not (cell / "grades.jsonl").exists()

    @pytest.mark.parametrize(
        ("file", "content", "part"),
        [
            ("problems.jsonl", None, "problems.jsonl is missing"),
            ("problems.jsonl", '{"schema": 1, "id": "other", "prompt": "", "gold": "1"}\n', "'p'"),
            ("problems.jsonl", '{"schema": 1, "id": "p", "prompt": "", "gold": "1/2"}\n', "'1/2'"),
            ("problems.jsonl", '{"schema": 1, "id": "p"}\n', "problems.jsonl:1"),
            ("completions.jsonl", '{broken}\n{"schema": 1}\n', "completions.jsonl:1"),
            ("completions.jsonl", '{"schema": 1, "problem_id": "p"}\n', "completions.jsonl:1"),
            ("cell.yaml", "schema: 1\nbenchmark: {name: x}\n", "answer_kind"),
            ("cell.yaml", "]\n", "describes no cell"),
            ("cell.yaml", "schema: 1\nbenchmark: {answer_kind: poem}\n", "'poem'"),
        ],
    )
    def test_a_faulty_file_is_one_sentence(self, tmp_path, grader, file, content, part):
        cell = write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
        if content is None:
            (cell / file).unlink()
        else:
            (cell / file).write_text(content)
        with pytest.raises(UserError, match=part):
            grader.grade_cell(cell)


class TestWorkers:
    @pytest.mark.slow
    def test_a_row_that_overran_has_no_grade_and_is_tried_in_every_later_grading(self, tmp_path, monkeypatch):
        cell = write_cell(tmp_path / "cell", [completion("sleep"), completion("ok", draw=1)], {"p": "1"})
        with monkeypatch.context() as patch, Grader(workers=1, timeout_s=3) as grader:
            patch.setattr("kvsweep.harness.grading.grader.judge", sleeping_judge.judge)
            assert grader.grade_cell(cell) == {"correct": 1, "grader_timeout": 1, "graded": 2}
            [found] = read_grades(cell)
            assert (found.answer, found.outcome, found.correct) == ("5", "correct", 1)
            assert "the worker was killed" in next(grader.explain_problem(cell, "p"))
        with Grader(workers=1, timeout_s=120) as grader:
            assert grader.grade_cell(cell) == {"correct": 1, "no_answer": 1, "graded": 1}


class TestCommand:
    @pytest.mark.slow
    def test_every_cell_below_the_folder_is_graded(self, tmp_path, capsys):
        for name in ("demo/a", "demo/b"):
            write_cell(tmp_path / name, [completion(boxed(5)), completion(boxed(6), draw=1)], {"p": "5"})
        assert not grade_command([str(tmp_path), "--workers", "1", "--timeout", "3"])
        *cells, total = capsys.readouterr().out.splitlines()
        counts = "2 graded now: correct 1, wrong 1, no_answer 0, truncated 0, grader_timeout 0"
        assert cells == [f"{tmp_path}/demo/{name}: 2 rows, {counts}" for name in "ab"]
        assert "4 rows, 4 graded now: correct 2, wrong 2" in total
        assert not grade_command([str(tmp_path / "demo" / "a")])
        assert "2 rows, 0 graded now" in capsys.readouterr().out
        assert not grade_command([str(tmp_path), "--all"])
        assert "4 rows, 4 graded now" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", ["{}/none", "{}", "{} --workers 0", "{} --timeout 0", "{} --why no"])
    def test_a_mistake_is_one_sentence_and_exit_code_2(self, tmp_path, arguments, kvsweep):
        if " " in arguments:
            write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
        ended = kvsweep("grade", *arguments.format(tmp_path).split())
        assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert ended.err.startswith("kvsweep grade: error: ")

    def test_why_shows_what_was_read_and_which_rule_decided(self, tmp_path, capsys):
        rows = [completion(boxed("x = 5")), completion(boxed("2x = 5"), draw=1), completion("no end", draw=2)]
        write_cell(tmp_path / "cell", rows, {"p": "5", "q": "6"}, kind="expression")
        assert not grade_command([str(tmp_path), "--why", "p", "--workers", "1"])
        first, second, third = re.split(rf"^{tmp_path}/cell: ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
        assert first.splitlines() == [
            "p draw 0: correct",
            "  stated in  a box",
            "  extracted  x = 5",
            "  gold       5",
            "  compared   x = 5",
            "  with       5",
            "  decided by the value of a name: an equation is a value only if its left side is a single name",
        ]
        assert "draw 1: wrong" in second
        assert "left side is a single name" in second
        assert "draw 2: no_answer" in third
        assert not (tmp_path / "cell" / "grades.jsonl").exists()


def test_grades_that_a_sweep_adds_meanwhile_stay(tmp_path, monkeypatch):
    """kvsweep grade beside a sweep: a completion and its grade come while the earlier ones are judged."""
    cell = write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
    judged = Grader.judge

    def slow(self, jobs):
        append_row(cell / "completions.jsonl", completion(boxed(5), draw=1))
        verdict: Any = {"answer": "5", "gold": "5", "outcome": "correct", "correct": 1}
        append_row(cell / "grades.jsonl", Grade(problem_id="p", draw=1, **verdict))
        return judged(self, jobs)

    monkeypatch.setattr(Grader, "judge", slow)
    with Grader(workers=1) as grader:
        grader.grade_cell(cell)
    assert [row.draw for row in read_grades(cell)] == [0, 1]


@pytest.mark.parametrize("field", ["answer_kind", "answer_from", "think_start", "think_end"])
def test_a_cell_whose_rule_changes_is_graded_again(tmp_path, grader, field):
    cell = write_cell(tmp_path / "cell", [completion(boxed(5)), completion("no box", draw=1)], {"p": "5"})
    assert grader.grade_cell(cell)["graded"] == 2
    assert grader.grade_cell(cell)["graded"] == 0
    described = yaml.safe_load((cell / "cell.yaml").read_text())
    values = {"answer_kind": "expression", "answer_from": "whole_text", "think_start": "<a>", "think_end": "</a>"}
    described.setdefault("model" if field.startswith("think") else "benchmark", {})[field] = values[field]
    (cell / "cell.yaml").write_text(yaml.safe_dump(described))
    summary = grader.grade_cell(cell)
    assert summary["graded"] == 2
    assert (summary["correct"] == 0) == (field == "think_end")  # the text closes its thinking with </think>
