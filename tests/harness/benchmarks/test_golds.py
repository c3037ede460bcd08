"""A gold that no answer can equal is refused when the file is read; golds of real benchmarks are not."""

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from kvsweep.harness.benchmarks import golds
from kvsweep.harness.benchmarks.golds import read_gold
from kvsweep.harness.grading.expressions import compare
from kvsweep.harness.sweep.job import make_job
from tests.harness.benchmarks.test_load import load as load_benchmark
from tests.harness.benchmarks.test_load import mistake

# Values of a column that are no answer, each with a word of the reason.
UNFIT: list[tuple[Any, str]] = [
    (["7"], "list"), ({"a": 1}, "dict"), (b"7", "bytes"), (True, "bool"), (date(2026, 1, 1), "date"),
    ("['7']", "program"), ("b'7'", "program"), ('"7"', "program"), ("{'a': 1}", "program"),
    ("`7`", "program"), ("?", "program"), ("#7", "program"),
    ("None", "missing"), ("N/A", "missing"), ("nan", "missing"), (" null ", "missing"), (float("inf"), "missing"),
    ("The answer is 5 because 2+3.", "sentence"),
    ("$f(x) = ax+b$, where $b$ is an arbitrary integer", "sentence"),
    ("so all of them are right but for the last one of them", "sentence"),
    (r"The sum is $\boxed{5}$.", "box"),
    ("Ⅳ", "Ⅳ"),
    ("-2.5 V", "one letter"), ("10m/s", "beside its number"), ("5cm^2", "beside its number"), 
    ("≈5", "LaTeX writes"), ("x != 5", "LaTeX writes"), ("1/2 or 0.5", "twice"),
    (r"\sum_{k=1}^{60000} 1/k or 5", "more work"),
    ("5\u200e", "invisible"), ("\u202e5", "invisible"), ("2\u200e+x", "invisible"),
    ("6 USD", r"\text{ USD}"), ("ln 2", r"LaTeX writes as \ln"), ("sqrt 2", r"as \sqrt"),
    ("-", "no number"), ("()", "no number"), ("...", "no expression"),
]  # fmt: skip
# Answers of unusual form that can be equalled.
FIT = (
    "7", "-7", 7, 7.5, Decimal("7.5"), "1,000", r"\$18.90", "17.5%", r"45^\circ", "45°", r"\boxed{5}", r"$\boxed{5}$",
    "[7]", "{7}", "2×3", "½", "2½", "x⁴", "**12**", "５", "2＋3",
    r"\{1,2\}", r"\{1\pm\sqrt{5},-2\}", "(-1,6)", "(3,4]", "]2,5[", r"(-\infty,2)\cup(3,\infty)", "x=5, y=6", "5 or 6",
    r"\text{(E)}", "B", r"\text{Evelyn}", "no solution", r"\text{none}", r"\text{June 20}", "July 4",
    r"\text{4:30 p.m.}", "5 apples and 3 pears", "4 cups of water", "The answer is 5.", "pi/3",
    "x**2+1", "sqrt(2)", "ln(2)", "2θ", "2 pi", "alpha + 1", "3 AB^2", "3+2xi", "f'(x)",
    r"\frac{def}{de+df+ef}", "np.arcsin(10/13)", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\emptyset", "∅",
    r"\left[\begin{array}{rr}3 & 7 \\ 5 & 12\end{array}\right]", "MR=SRMC", r"\text{all real numbers except } 2", "3!",
    r"\frac{dM}{dt}=\frac{10^{5} L_{\odot}}{0.007 c^{2}} M^{6}", r"(45^{\circ}, 60^{\circ})", "12:30", "1e-8", "€5",
    "5€", "7.6 Z", "2k", "5 cm", r"5\text{ m}", "10 m/s", "x < 5", "|x|", r"\|v\|", "1 or 2", "E. coli",
)  # fmt: skip


@pytest.mark.parametrize(("value", "reason"), UNFIT, ids=lambda part: repr(part)[:30])
def test_an_expression_that_no_answer_can_equal(value, reason):
    with pytest.raises(ValueError, match="no expression") as caught:
        read_gold(value, "expression")
    assert reason in str(caught.value)


@pytest.mark.parametrize("value", FIT, ids=repr)
def test_an_expression_that_an_answer_can_equal(value):
    gold = read_gold(value, "expression")
    assert compare(gold, gold)[0]


@pytest.mark.parametrize(("pattern", "found", "example"), golds._UNFIT, ids=lambda part: part[:20])
def test_each_rule_has_an_example(pattern, found, example):
    with pytest.raises(ValueError, match="no expression") as caught:
        read_gold(example, "expression")
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("value", "kind", "sentence"),
    [
        ("E", "letter", "is no letter from A to D"),
        (["A"], "letter", "is a list and no letter from A to D"),
        ("7.5", "integer", "is no integer"),
        (1e30, "integer", "is no integer"),
        (True, "integer", "is a bool and no integer"),
        ("-12.000", "integer", "has a point that may separate thousands, so that it may be two integers"),
        ("1.23.456", "integer", "is no integer"),
        *(
            (value, kind, f"has the letter of an option and is no {kind} alone")
            for value in ("C. 5", "(C) 5", "(C)5", "Option C", r"B) \frac12")
            for kind in ("integer", "expression")
        ),
    ],
)
def test_the_other_kinds(value, kind, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        read_gold(value, kind)


@pytest.mark.parametrize("kind", ["integer", "expression", "letter"])
@pytest.mark.parametrize(
    "value",
    ["\frac{1}{2}", "6\text{ cm}", "\text{A}", "\boxed{5}", "\neq 5", "\rho", "5\x00", "\x1b5", "5\x85"],
    ids=repr,
)
def test_a_gold_whose_backslash_json_took(value, kind):
    with pytest.raises(ValueError, match=r"the control character '\\.*JSON writes a backslash of LaTeX as \\\\$"):
        read_gold(value, kind)


@pytest.mark.parametrize("value", ["27.0", "27.00", "1,000", 1000.0, Decimal("1.000"), "1234.000"], ids=repr)
def test_an_integer_with_a_point_that_separates_no_thousands(value):
    assert read_gold(value, "integer") in {"27", "1000", "1", "1234"}


def test_spaces_around_a_gold_are_no_control_characters():
    assert read_gold("\t5 +\n2\r\n", "expression") == "5 +\n2"


def load(path: Path, **fields: Any) -> list[str]:
    """The golds of a file of problems."""
    return [problem.gold for problem in load_benchmark(path, **fields).problems]


def write(path: Path, *answers: object) -> Path:
    rows = ({"id": f"q{n}", "problem": f"Problem {n}?", "answer": answer} for n, answer in enumerate(answers))
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_the_sentence_names_place_answer_and_way_out(tmp_path):
    path = write(tmp_path / "p.jsonl", "5", "['7']")
    words = (f"{path}:2 has the answer \"['7']\"", "benchmark.answer_after")
    mistake(*words, path=path, answer_kind="expression")


class TestAnswerAfter:
    @pytest.mark.parametrize("kind", ["integer", "expression", "letter"])
    def test_a_worked_solution_names_the_setting(self, tmp_path, kind):
        path = write(tmp_path / "p.jsonl", "48+24 = 72\n#### 72")
        mistake("""set 'benchmark.answer_after="####"'""", path=path, answer_kind=kind)

    def test_the_answer_follows_the_last_such_text(self, tmp_path):
        path = write(tmp_path / "p.jsonl", "#### 1\n#### 1,072", "#### $-5$")
        assert load(path, answer_after="####") == ["1072", "-5"]
        assert load(
            write(path, r"The answer is: x. The answer is: \frac12 "), answer_after="is:", answer_kind="expression"
        ) == [r"\frac12"]

    def test_an_answer_without_the_text(self, tmp_path):
        path = write(tmp_path / "p.jsonl", "#### 1", "72")
        mistake(":2 has the answer '72', which lacks benchmark.answer_after='####'", path=path, answer_after="####")
        mistake("is no integer", path=write(path, "72 ####"), answer_after="####")

    def test_a_file_in_place_of_a_hub_dataset_may_have_the_answers_alone(self, tmp_path):
        hub = {"source": "hub", "hub_id": "a/b", "answer_after": "####"}
        worked, plain = write(tmp_path / "w.jsonl", "1\n#### 7", "#### 8"), write(tmp_path / "p.jsonl", "7", "8")
        assert load(worked, **hub) == load(plain, **hub) == ["7", "8"]
        mistake("lacks benchmark.answer_after='####'", path=write(plain, "7", "#### 8"), **hub)

    def test_a_cell_is_named_after_the_golds_alone(self, tmp_path, compose, tiny):
        """The setting changes an id where it changes a gold; a file of the same golds has the same cells."""
        worked, plain = write(tmp_path / "w.jsonl", "1\n#### 7"), write(tmp_path / "p.jsonl", "7")
        other = write(tmp_path / "o.jsonl", "1\n#### 8")
        quoted = "benchmark.answer_after='####'"
        jobs = [
            make_job(compose("benchmark=toy_add", f"benchmark.path={path}", *more, *tiny))
            for path, more in ((worked, [quoted]), (plain, []), (other, [quoted]))
        ]
        first, second, third = (job.cells[0].cell_id for job in jobs)
        assert first == second != third


@pytest.mark.shared
@pytest.mark.parametrize("name", ["aime24", "aime25", "amc23", "gsm8k"])
def test_no_gold_of_a_real_benchmark_is_refused(name, shared_data):
    lines = (shared_data / f"{name}.jsonl").read_text().splitlines()
    for answer in (json.loads(line)["answer"] for line in lines):
        assert read_gold(answer, "integer") == read_gold(int(str(answer).replace(",", "")), "expression")


@pytest.mark.shared
def test_of_the_golds_of_graded_outputs_a_sentence_alone_is_refused(shared_data):
    refused = set()
    for line in (shared_data / "graded_outputs.jsonl").read_text().splitlines():
        try:
            read_gold(json.loads(line)["gold"], "expression")
        except ValueError as error:
            refused.add((json.loads(line)["gold"][:30], str(error).rpartition(": ")[2]))
    assert refused == {("$f(x)=a x+b$, where $b$ is an ", "it is a sentence")}
