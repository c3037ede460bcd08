"""Grading: what counts as an answer, which outcome it gets, and workers that cannot hang the pass."""

import ast
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsweep.base.errors import UserError
from kvsweep.base.records import Completion, Grade, Problem, append_row
from kvsweep.harness.grading import command
from kvsweep.harness.grading.answers import answer_part, canonical_gold, extract_answer, judge, last_box, parse_integer
from kvsweep.harness.grading.grader import Grader

ROOT = Path(__file__).resolve().parents[3]


def completion(text: str, problem_id: str = "p", draw: int = 0, stop_reason: str = "stop") -> Completion:
    return Completion(
        problem_id=problem_id,
        draw=draw,
        text=text,
        token_ids=[1, 2],
        num_tokens=2,
        prompt_tokens=3,
        thinking_tokens=1,
        stop_reason=stop_reason,  # type: ignore[arg-type]
        evictions=[],
        fork_step=None,
        peak_length=5,
        seed=0,
    )


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


def worker_pids(grader: Grader) -> list[int]:
    return [worker._process.pid for worker in grader._workers]


def read_grades(directory: Path) -> list[Grade]:
    lines = (directory / "grades.jsonl").read_text().splitlines()
    return [msgspec.json.decode(line, type=Grade) for line in lines]


def is_one_sentence(message: str) -> bool:
    return "\n" not in message and message.endswith(".") and not re.search(r"[.!?] +[A-Z]", message)


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout_s=5) as pool:
        yield pool


class TestAnswerPart:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("thinking</think>answer", "answer"),
            ("<think>\nthinking</think>\n\nanswer", "\n\nanswer"),
            ("thinking </think>", ""),
            ("never closed, \\boxed{5}", None),
            ("<think>never closed \\boxed{5}", None),
            ("a</think>b<think>c</think>d", "d"),
            ("a</think>\\boxed{5}<think>more, never closed", None),
            ("a</think>b</think>c", "b</think>c"),
            ("", None),
        ],
    )
    def test_only_what_follows_the_thinking(self, text: str, answer: str | None) -> None:
        assert answer_part(text) == answer


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
            (r"\boxed 5", None),
            ("27", None),
        ],
    )
    def test_balanced_and_last(self, text: str, content: str | None) -> None:
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
            ("9" * 400, "9" * 400),
        ],
    )
    def test_integers(self, text: str, value: str) -> None:
        assert parse_integer(text) == value

    @pytest.mark.parametrize(
        "text",
        [
            "", "-", "27.5", ".5", "1 2", "1, 2", "(1, 2)", "1,2", "1,23", "0,123", "1,2345", "27 or 28",
            "2^3", r"\frac{4}{2}", "4/2", "5!", "5i", r"5\mathrm{i}", r"5\text{ million}",
            r"5 \text{ or } 6", r"5\text{0}", r"5\pi", r"\sqrt{4}", "1e3", "²", "٣", "--1", r"\pm 5",
            "x=y=5", "x", "5x", "{5}{6}", "27_{10}", "answer 27", "A", "9" * 501, r"10\,0800",
            r"\text{not }5", r"5\text{ dozen}", "0x1b", "5 6",
        ],
    )  # fmt: skip
    def test_everything_else_is_not(self, text: str) -> None:
        assert parse_integer(text) is None

    @given(st.integers(-(10**12), 10**12), st.sampled_from(["%s", "$%s$", "%s.0", r"%s\text{ units}", "x=%s"]))
    def test_any_integer_is_read_back(self, value: int, form: str) -> None:
        assert parse_integer(form % value) == str(value)
        assert parse_integer(form % f"{value:,}") == str(value)

    @given(st.text(alphabet=r"0123456789-,.{}\ $%^textboxdcirc=+()A", max_size=60))
    @settings(max_examples=500)
    def test_whatever_is_accepted_holds_those_digits(self, text: str) -> None:
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
            (boxed("27.01"), "stop", "27", "27.01", "wrong"),
            (boxed("2700"), "stop", "27", "2700", "wrong"),
            (boxed(r"27\%"), "stop", "27", "27", "correct"),
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
    def test_outcomes(self, text: str, stop_reason: str, gold: str, answer: str | None, outcome: str) -> None:
        assert judge(text, stop_reason, gold, "integer")[:2] == (answer, outcome)

    def test_gold_has_one_form(self) -> None:
        assert canonical_gold("027.0", "integer") == "27"
        assert canonical_gold("1/2", "integer") is None

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
    def test_hostile_text_is_graded_in_bounded_time(self, text: str) -> None:
        started = time.perf_counter()
        answer, outcome = judge("</think>" + text, "stop", "5", "integer")[:2]
        assert time.perf_counter() - started < 3
        assert outcome in ("no_answer", "wrong", "correct")
        assert len(answer or "") <= 500

    @given(st.lists(st.sampled_from([*"{}\\5 ", "\\boxed{", "</think>", "<think>", "\\text{"])))
    @settings(max_examples=500)
    def test_no_text_makes_it_raise(self, pieces: list[str]) -> None:
        assert judge("".join(pieces), "stop", "5", "integer")[1] in ("no_answer", "wrong", "correct")


class TestCell:
    def cell(self, directory: Path, count: int = 40) -> Path:
        golds = {f"q{i}": str(i) for i in range(count)}
        rows = [completion(boxed(i if i % 4 else i + 1), f"q{i}") for i in range(count)]
        rows[1] = completion(boxed(1), "q1", stop_reason="length")
        rows[2] = completion("lost", "q2")
        return write_cell(directory, rows, golds)

    def test_every_row_is_graded_once_in_order(self, tmp_path: Path, grader: Grader) -> None:
        cell = self.cell(tmp_path / "cell")
        summary = grader.grade_cell(cell)
        rows = read_grades(cell)
        assert [row.problem_id for row in rows] == [f"q{i}" for i in range(40)]
        assert [row.outcome for row in rows[:5]] == ["wrong", "truncated", "no_answer", "correct", "wrong"]
        assert summary.outcomes == {"correct": 28, "wrong": 10, "truncated": 1, "no_answer": 1}
        assert (summary.rows, summary.graded) == (40, 40)
        assert sorted(p.name for p in cell.iterdir()) == [
            ".grades.jsonl.lock", "cell.yaml", "completions.jsonl", "grades.jsonl", "problems.jsonl",
        ]  # fmt: skip

    def test_only_missing_rows_are_graded_again(self, tmp_path: Path, grader: Grader) -> None:
        cell = self.cell(tmp_path / "cell")
        grader.grade_cell(cell)
        whole = (cell / "grades.jsonl").read_bytes()
        stamp = (cell / "grades.jsonl").stat().st_mtime_ns
        assert grader.grade_cell(cell).graded == 0
        assert (cell / "grades.jsonl").stat().st_mtime_ns == stamp
        lines = whole.splitlines(keepends=True)
        (cell / "grades.jsonl").write_bytes(b"".join(lines[10:]) + b'{"torn')
        assert grader.grade_cell(cell).graded == 10
        assert (cell / "grades.jsonl").read_bytes() == whole
        assert grader.grade_cell(cell, regrade=True).graded == 40
        assert (cell / "grades.jsonl").read_bytes() == whole

    def test_a_changed_gold_is_graded_again(self, tmp_path: Path, grader: Grader) -> None:
        cell = write_cell(tmp_path / "cell", [completion(boxed(5)), completion(boxed(5), draw=1)], {"p": "4"})
        assert grader.grade_cell(cell).outcomes == {"wrong": 2}
        write_cell(cell, [completion(boxed(5)), completion(boxed(5), draw=1)], {"p": "5"})
        summary = grader.grade_cell(cell)
        assert (summary.graded, summary.outcomes) == (2, {"correct": 2})

    def test_a_grade_without_its_completion_is_dropped(self, tmp_path: Path, grader: Grader) -> None:
        cell = write_cell(tmp_path / "cell", [completion(boxed(5)), completion(boxed(5), draw=1)], {"p": "5"})
        grader.grade_cell(cell)
        write_cell(cell, [completion(boxed(5), draw=1)], {"p": "5"})
        assert grader.grade_cell(cell).graded == 0
        assert [row.draw for row in read_grades(cell)] == [1]

    def test_a_cell_without_completions_has_no_grades(self, tmp_path: Path, grader: Grader) -> None:
        cell = write_cell(tmp_path / "cell", [], {})
        assert grader.grade_cell(cell).rows == 0
        assert not (cell / "grades.jsonl").exists()

    @pytest.mark.parametrize(
        ("file", "content", "part"),
        [
            ("problems.jsonl", None, "problems.jsonl is missing"),
            ("problems.jsonl", '{"schema": 1, "id": "other", "prompt": "", "gold": "1"}\n', "'p'"),
            ("problems.jsonl", '{"schema": 1, "id": "p", "prompt": "", "gold": "1/2"}\n', "'1/2'"),
            ("problems.jsonl", '{"schema": 1, "id": "p"}\n', "problems.jsonl row 1"),
            ("completions.jsonl", '{broken}\n{"schema": 1}\n', "completions.jsonl:1"),
            ("completions.jsonl", '{"schema": 1, "problem_id": "p"}\n', "completions.jsonl row 1"),
            ("grades.jsonl", '{"schema": 1}\n', "grades.jsonl row 1"),
            ("grades.jsonl", "{}\n", "grades.jsonl:1 has no schema"),
            ("cell.yaml", None, "cell.yaml"),
            ("cell.yaml", "schema: 1\nbenchmark: {name: x}\n", "answer_kind"),
            ("cell.yaml", "]\n", "describes no cell"),
            ("cell.yaml", "schema: 1\nbenchmark: {answer_kind: poem}\n", "'poem'"),
        ],
    )
    def test_a_faulty_file_is_one_sentence(
        self, tmp_path: Path, grader: Grader, file: str, content: str | None, part: str
    ) -> None:
        cell = write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
        if content is None:
            (cell / file).unlink()
        else:
            (cell / file).write_text(content)
        with pytest.raises(UserError) as caught:
            grader.grade_cell(cell)
        assert part in str(caught.value)
        assert is_one_sentence(str(caught.value))


JUDGE = """
import os, time
from pathlib import Path

def judge(text, stop_reason, gold, kind, rule):
    print("a library that prints")
    Path(__file__).parents[1].joinpath(f"began-{os.getpid()}").touch()
    if "slow" in text:
        time.sleep(0.3)
    if "once" in text and not (mark := Path(text.split()[1])).exists():
        mark.touch()
        time.sleep(60)
    if "sleep" in text:
        time.sleep(60)
    if "die" in text:
        os._exit(3)
    if "raise" in text:
        raise ArithmeticError("no sense")
    return str(os.getpid()), "correct"
"""


@pytest.fixture
def injected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a judge that sleeps, dies, raises, or answers with its process id, as the text says."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "kvsweep_test_judge.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(folder)
    return "kvsweep_test_judge:judge"


def test_a_worker_whose_parent_has_ended_dies_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    program = "from kvsweep.harness.grading.pool import serve; serve('kvsweep.harness.grading.answers:judge')"
    ended = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert ended.returncode == -signal.SIGPIPE
    assert ended.stderr == b""


class TestWorkers:
    def test_a_hanging_row_is_killed_and_only_that_row_is_lost(self, tmp_path: Path, injected: str) -> None:
        texts = ["sleep" if i in (3, 4, 20) else "ok" for i in range(40)]
        rows = [completion(text, f"q{i}") for i, text in enumerate(texts)]
        cell = write_cell(tmp_path / "cell", rows, {f"q{i}": "1" for i in range(40)})
        with Grader(workers=2, timeout_s=0.5, function=injected) as grader:
            started = time.perf_counter()
            summary = grader.grade_cell(cell)
            assert time.perf_counter() - started < 10
        assert summary.outcomes == {"correct": 37, "grader_timeout": 3}
        grades = read_grades(cell)
        assert [i for i, row in enumerate(grades) if row.outcome == "grader_timeout"] == [3, 4, 20]
        assert all(row.answer is None and row.correct == 0 for row in grades if row.outcome == "grader_timeout")

    def test_few_rows_keep_every_worker_busy(self, tmp_path: Path, injected: str) -> None:
        rows = [completion("slow", draw=i) for i in range(4)]
        cell = write_cell(tmp_path / "cell", rows, {"p": "1"})
        with Grader(workers=2, function=injected) as grader:
            grader.grade_cell(cell)
            graded_by = [grade.answer for grade in read_grades(cell)]
            assert sorted(map(str, worker_pids(grader))) == sorted({str(pid) for pid in graded_by})

    def test_a_row_that_overran_once_is_tried_again(self, tmp_path: Path, injected: str) -> None:
        rows = [completion(text, draw=i) for i, text in enumerate(["ok", f"once {tmp_path}/mark", "ok"])]
        cell = write_cell(tmp_path / "cell", rows, {"p": "1"})
        with Grader(workers=1, timeout_s=0.5, function=injected) as grader:
            assert grader.grade_cell(cell).outcomes == {"correct": 3}

    def test_a_row_that_overran_is_tried_in_every_later_grading(self, tmp_path: Path, injected: str) -> None:
        cell = write_cell(tmp_path / "cell", [completion("sleep"), completion("ok", draw=1)], {"p": "1"})
        with Grader(workers=1, timeout_s=0.3, function=injected) as grader:
            assert grader.grade_cell(cell).outcomes == {"correct": 1, "grader_timeout": 1}
            assert grader.grade_cell(cell).graded == 1
        with Grader(workers=1, timeout_s=30, function="kvsweep.harness.grading.answers:judge") as grader:
            assert grader.grade_cell(cell).outcomes == {"correct": 1, "no_answer": 1}

    @pytest.mark.parametrize("whom", ["command", "workers", "both"])
    @pytest.mark.slow_unless(rule=lambda whom: whom == "both")
    def test_a_process_that_is_stopped_for_a_while_makes_no_wrong_grade(
        self, tmp_path: Path, injected: str, whom: str
    ) -> None:
        """A freeze of many times the time limit, while each row takes a part of that limit."""
        cell = write_cell(tmp_path / "cell", [completion("slow", draw=i) for i in range(10)], {"p": "1"})
        program = (
            "import sys; from pathlib import Path; from kvsweep.harness.grading.grader import Grader\n"
            f"with Grader(workers=2, timeout_s=1.5, function={injected!r}) as grader:\n"
            f"    print(dict(grader.grade_cell(Path({str(cell)!r})).outcomes))"
        )
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path / 'modules'}"}
        process = subprocess.Popen([sys.executable, "-c", program], env=env, stdout=subprocess.PIPE, text=True)
        workers: list[int] = []
        while len(workers) < 2:
            time.sleep(0.1)
            workers = [int(path.name.removeprefix("began-")) for path in tmp_path.glob("began-*")]
        frozen = {"command": [process.pid], "workers": workers, "both": [process.pid, *workers]}[whom]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.2 if whom == "workers" else 5)  # workers that stand still alone are taken to hang in the end
        for pid in reversed(frozen):
            os.kill(pid, signal.SIGCONT)
        assert process.communicate(timeout=60)[0].strip() == "{'correct': 10}"

    def test_the_killed_process_is_gone_and_a_fresh_one_serves(self, tmp_path: Path, injected: str) -> None:
        rows = [completion(text, draw=i) for i, text in enumerate(["ok", "sleep", "ok"])]
        cell = write_cell(tmp_path / "cell", rows, {"p": "1"})
        with Grader(workers=1, timeout_s=0.3, function=injected) as grader:
            grader.grade_cell(cell)
            before, after = (int(row.answer or 0) for row in read_grades(cell) if row.answer)
            assert before != after
            assert worker_pids(grader) == []  # the second try has killed the fresh one
        for pid in (before, after):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    def test_workers_start_when_needed_and_are_reused(self, tmp_path: Path, injected: str) -> None:
        with Grader(workers=2, timeout_s=5, function=injected) as grader:
            assert worker_pids(grader) == []
            grader.grade_cell(write_cell(tmp_path / "small", [completion("ok")], {"p": "1"}))
            assert len(worker_pids(grader)) == 1
            for name in ("one", "two", "three"):
                rows = [completion("ok", draw=i) for i in range(100)]
                grader.grade_cell(write_cell(tmp_path / name, rows, {"p": "1"}))
            used = {row.answer for name in ("one", "two", "three") for row in read_grades(tmp_path / name)}
            assert used <= {str(pid) for pid in worker_pids(grader)}
            assert len(worker_pids(grader)) == 2

    def test_a_worker_that_dies_costs_its_row_alone(self, tmp_path: Path, injected: str) -> None:
        rows = [completion(text, draw=i) for i, text in enumerate(["ok", "die", "ok", "ok"])]
        cell = write_cell(tmp_path / "cell", rows, {"p": "1"})
        with Grader(workers=1, timeout_s=5, function=injected) as grader:
            grader.grade_cell(cell)
            outcomes = [row.outcome for row in read_grades(cell)]
            assert outcomes == ["correct", "grader_timeout", "correct", "correct"]
            grader.grade_cell(write_cell(tmp_path / "other", [completion("ok")], {"p": "1"}))
            os.kill(worker_pids(grader)[0], signal.SIGKILL)
            time.sleep(0.1)
            assert grader.grade_cell(cell, regrade=True).outcomes == {"correct": 3, "grader_timeout": 1}

    def test_a_judge_that_raises_is_a_bug_and_leaves_no_grades(self, tmp_path: Path, injected: str) -> None:
        cell = write_cell(tmp_path / "cell", [completion("raise")], {"p": "1"})
        with Grader(workers=1, function=injected) as grader, pytest.raises(RuntimeError, match="no sense"):
            grader.grade_cell(cell)
        assert not (cell / "grades.jsonl").exists()

    def test_a_judge_that_cannot_be_imported_is_said_at_once(self, tmp_path: Path) -> None:
        cell = write_cell(tmp_path / "cell", [completion("ok")], {"p": "1"})
        with Grader(workers=1, function="no_such_module:judge") as grader:
            with pytest.raises(RuntimeError, match="did not start"):
                grader.grade_cell(cell)
            assert worker_pids(grader) == []

    def test_large_texts_pass_through_the_pipe(self, tmp_path: Path, grader: Grader) -> None:
        rows = [completion("é" * 1_000_000 + boxed(i), draw=i) for i in range(4)]
        rows.append(completion("\ud800" + boxed(3), draw=9))
        cell = write_cell(tmp_path / "cell", rows, {"p": "3"})
        assert grader.grade_cell(cell).outcomes == {"correct": 2, "wrong": 3}

    def test_a_worker_imports_neither_torch_nor_the_callers_main(self, tmp_path: Path) -> None:
        (tmp_path / "modules_judge.py").write_text(
            "import sys\n"
            "def judge(*row):\n"
            "    heavy = ('torch', 'transformers', 'datasets', '__mp_main__')\n"
            "    return str([name for name in sys.modules if name.startswith(heavy)]), 'correct'\n"
        )
        cell = write_cell(tmp_path / "cell", [completion("ok")], {"p": "1"})
        (tmp_path / "caller.py").write_text(
            "import torch\nfrom pathlib import Path\nfrom kvsweep.harness.grading.grader import Grader\n"
            "with Grader(function='modules_judge:judge') as grader:\n"
            f"    grader.grade_cell(Path({str(cell)!r}))\n"
        )
        env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{tmp_path}"}
        subprocess.run([sys.executable, str(tmp_path / "caller.py")], check=True, env=env, timeout=120)
        assert [ast.literal_eval(row.answer or "") for row in read_grades(cell)] == [[]]

    def test_a_row_costs_little(self, tmp_path: Path, grader: Grader) -> None:
        cells = [
            write_cell(tmp_path / str(i), [completion(boxed(5), draw=d) for d in range(120)], {"p": "5"})
            for i in range(10)
        ]
        grader.grade_cell(cells[0])
        seconds = []
        for cell in cells[1:]:
            started = time.perf_counter()
            grader.grade_cell(cell)
            seconds.append(time.perf_counter() - started)
        assert statistics.median(seconds) / 120 < 0.020

    @pytest.mark.parametrize(("workers", "timeout_s"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, float("nan"))])
    def test_numbers_out_of_range_are_one_sentence(self, workers: int, timeout_s: float) -> None:
        with pytest.raises(UserError) as caught:
            Grader(workers=workers, timeout_s=timeout_s)
        assert is_one_sentence(str(caught.value))


class TestCommand:
    def test_every_cell_below_the_folder_is_graded(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("demo/a", "demo/b"):
            write_cell(tmp_path / name, [completion(boxed(5)), completion(boxed(6), draw=1)], {"p": "5"})
        assert command.main([str(tmp_path), "--workers", "1", "--timeout", "3"]) == 0
        lines = capsys.readouterr().out.splitlines()
        counts = "correct {0}, wrong {0}, no_answer 0, truncated 0, grader_timeout 0"
        assert lines == [
            f"demo/a: 2 rows, 2 graded now: {counts.format(1)}",
            f"demo/b: 2 rows, 2 graded now: {counts.format(1)}",
            f"total of 2 cells: 4 rows, 4 graded now: {counts.format(2)}",
        ]
        assert command.main([str(tmp_path / "demo" / "a")]) == 0
        assert "2 rows, 0 graded now" in capsys.readouterr().out
        assert command.main([str(tmp_path), "--all"]) == 0
        assert "4 rows, 4 graded now" in capsys.readouterr().out

    @pytest.mark.parametrize("arguments", [["{}/none"], ["{}"], ["{}", "--workers", "0"], ["{}", "--timeout", "0"]])
    def test_a_mistake_is_one_sentence_and_exit_code_2(
        self, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        if len(arguments) > 1:
            write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
        with pytest.raises(SystemExit) as ended:
            command.main([argument.format(tmp_path) for argument in arguments])
        assert ended.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("kvsweep-grade: error: ")
        assert is_one_sentence(captured.err.rstrip("\n"))

    def test_why_shows_what_was_read_and_which_rule_decided(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = [completion(boxed("x = 5")), completion(boxed("2x = 5"), draw=1), completion("no end", draw=2)]
        write_cell(tmp_path / "cell", rows, {"p": "5", "q": "6"}, kind="expression")
        assert command.main([str(tmp_path), "--why", "p", "--workers", "1"]) == 0
        first, second, third = re.split(r"^cell: ", capsys.readouterr().out, flags=re.MULTILINE)[1:]
        assert first.splitlines() == [
            "p draw 0: correct",
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
        with pytest.raises(SystemExit) as ended:
            command.main([str(tmp_path), "--why", "nothing"])
        assert ended.value.code == 2
        assert is_one_sentence(capsys.readouterr().err.strip())

    def test_as_a_program(self, tmp_path: Path) -> None:
        write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
        run = subprocess.run(
            [sys.executable, "-m", "kvsweep.harness.grading.command", str(tmp_path)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert (run.returncode, run.stderr) == (0, "")
        assert "correct 1" in run.stdout


def recorded_outputs(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "graded_outputs.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["benchmark"] in ("aime24", "amc23")]


@pytest.mark.shared
def test_real_outputs_are_graded_as_recorded(shared_data: Path) -> None:
    """The texts have no thinking part, so the tail is the answer; an `audit` beats the label."""
    rows = recorded_outputs(shared_data)
    truth = [bool(row.get("audit", row["label"])) for row in rows]
    answers = [extract_answer("</think>" + row["tail"], "integer") for row in rows]
    accepted = [answer == canonical_gold(row["gold"], "integer") for row, answer in zip(rows, answers, strict=True)]
    assert len(rows) == 455
    assert sum(truth) > 200
    triples = zip(rows, accepted, truth, strict=True)
    assert [row["tail"][-200:] for row, ok, true in triples if ok and not true] == []
    boxes = [(ok, true) for ok, true, answer in zip(accepted, truth, answers, strict=True) if answer is not None]
    assert sum(ok == true for ok, true in boxes) / len(boxes) >= 0.995
    assert sum(ok == true for ok, true in zip(accepted, truth, strict=True)) / len(rows) >= 0.99


def test_grades_that_a_sweep_adds_meanwhile_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvsweep-grade beside a sweep: a completion and its grade come while the earlier ones are judged."""
    cell = write_cell(tmp_path / "cell", [completion(boxed(5))], {"p": "5"})
    judged = Grader.judge

    def slow(self: Grader, jobs: Any) -> Any:
        append_row(cell / "completions.jsonl", completion(boxed(5), draw=1))
        verdict: Any = {"answer": "5", "gold": "5", "outcome": "correct", "correct": 1}
        append_row(cell / "grades.jsonl", Grade(problem_id="p", draw=1, **verdict))
        return judged(self, jobs)

    monkeypatch.setattr(Grader, "judge", slow)
    with Grader(workers=1) as grader:
        grader.grade_cell(cell)
    assert [row.draw for row in read_grades(cell)] == [0, 1]


@pytest.mark.parametrize("field", ["answer_kind", "answer_from", "think_start", "think_end"])
def test_a_cell_whose_rule_changes_is_graded_again(tmp_path: Path, grader: Grader, field: str) -> None:
    cell = write_cell(tmp_path / "cell", [completion(boxed(5)), completion("no box", draw=1)], {"p": "5"})
    assert grader.grade_cell(cell).graded == 2
    assert grader.grade_cell(cell).graded == 0
    described = yaml.safe_load((cell / "cell.yaml").read_text())
    values = {"answer_kind": "expression", "answer_from": "whole_text", "think_start": "<a>", "think_end": "</a>"}
    described.setdefault("model" if field.startswith("think") else "benchmark", {})[field] = values[field]
    (cell / "cell.yaml").write_text(yaml.safe_dump(described))
    summary = grader.grade_cell(cell)
    assert summary.graded == 2
    assert (summary.outcomes["correct"] == 0) == (field == "think_end")  # the text closes its thinking with </think>
