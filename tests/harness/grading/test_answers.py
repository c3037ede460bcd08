"""Answers of every kind: what counts, what does not, and that hostile text cannot stop the pass."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from kvsweep.harness.grading.answers import INTEGER_FORMS, Rule, Ungraded, canonical_gold, judge, stated_answer
from kvsweep.harness.grading.grader import Grader, read_standard
from kvsweep.harness.grading.statements import DECLARATIONS, find_statement, last_conclusion
from kvsweep.run_files.thinking import ThinkTags, answer_part
from scripts.study.grade_audit import audit, hostile_texts
from tests.harness.grading.pairs import PAIRS

ROOT = Path(__file__).resolve().parents[3]


def extract_answer(text: str, kind: Any, **rule: Any) -> str | None:
    stated = stated_answer(text, kind, Rule(**rule))
    return stated and stated.value


@pytest.mark.parametrize("every", [6, pytest.param(2, marks=pytest.mark.slow)])
def test_wide_characters_are_plain_ones(every):
    """A box of full-width characters, U+FF01 to U+FF5E, has the verdict of the plain box."""
    wide = {code: code + 0xFEE0 for code in range(0x21, 0x7F)}
    found = [
        (group.kind, gold, re.fullmatch(r"(.*\\boxed\{)([^{}]+)(\}.*)", text, re.DOTALL))
        for group in PAIRS
        for gold, text in (*group.accepted, *group.rejected)
    ]
    boxed = [(kind, gold, box.groups()) for kind, gold, box in found if box]
    assert len(boxed) > 100
    for kind, gold, (before, value, after) in boxed[::every]:
        sides = [judge(f"</think>{before}{part}{after}", "stop", gold, kind) for part in (value, value.translate(wide))]
        assert sides[0].outcome == sides[1].outcome, (gold, value)


def test_a_gold_must_say_something():
    assert canonical_gold(" $x$ ", "expression") == "$x$"
    assert canonical_gold("$ $", "expression") is None


class TestLetters:
    @pytest.mark.parametrize(
        ("text", "letter"),
        [
            (r"\boxed{C}", "C"),
            (r"\boxed{\text{(C)}}", "C"),
            (r"\boxed{\textbf{C}}", "C"),
            (r"\boxed{C) 12 legs}", "C"),
            (r"\boxed{\text{(C)}\ 12}", "C"),
            (r"\boxed{(C) or (D)}", "(C) or (D)"),
            ("Answer: C", "C"),
            ("**Answer: C**", "C"),
            ("**Answer:** C.", "C"),
            ("The correct answer is (C).", "C"),
            ("the answer is **C**", "C"),
            ("Thus **C**", "C"),
            ("I rule out A and D.\n\n(C)", "C"),
            ("(C)", "C"),
            ("Answer: $C$", "C"),
            ("Answer: A\nNo. Answer: C", "C"),
            ("Option B looks good, but the answer is C", "C"),
            (r"\boxed{A} no, \boxed{C}", "C"),
            ("A proton is a particle.", None),
            ("The answer is a proton.", None),
            ("The answer is A proton.", None),
            ("It is a matter of taste", None),
            ("either (A) or (C)", None),
            (r"\boxed{C", None),
            ("", None),
            ("answer: c", "C"),
            (r"\boxed{B, A}", "B, A"),
            ("C and D are wrong. B is the correct answer.", "B"),
            ("C and D are wrong; B is the correct answer.", "B"),
            ("A is incorrect because it ignores friction. B is correct.", "B"),
            ("A is incorrect.\n\nB is correct.", "B"),
            ("I doubt A. B is the answer.", "B"),
            ("The previous answer is B.", None),
            ("The previous answer is (B).", None),
            ("I doubt that B is the answer.", None),
            ("If the mass is not zero, B is correct.", None),
            ("It is not clear if B is correct.", None),
        ],
    )
    def test_what_is_read(self, text, letter):
        assert extract_answer("</think>" + text, "letter") == letter

    def test_a_box_with_something_else_is_wrong(self):
        assert judge(r"</think>\boxed{12}", "stop", "C", "letter")[:2] == ("12", "wrong")

    @pytest.mark.parametrize(("gold", "letter"), [("C", "C"), (" (D) ", "D"), ("E", None), ("a", None), ("12", None)])
    def test_golds(self, gold, letter):
        assert canonical_gold(gold, "letter") == letter


def reported(which: str) -> pytest.MarkDecorator:
    """The pairs that are `accepted`, or those that are `rejected`, as text, gold and kind."""
    return pytest.mark.parametrize(
        ("text", "gold", "kind"),
        [
            pytest.param(text, gold, part.kind, id=f"{part.mistake}: {gold} <- {text}")
            for part in PAIRS
            for gold, text in getattr(part, which)
        ],
    )


class TestReports:
    """Kinds of mistakes that users of other graders reported (`pairs.SOURCES`)."""

    @reported("accepted")
    def test_the_same(self, text, gold, kind):
        assert judge(text, "stop", gold, kind, Rule(answer_from="whole_text")).outcome == "correct"

    @reported("rejected")
    def test_something_else(self, text, gold, kind):
        assert judge(text, "stop", gold, kind, Rule(answer_from="whole_text")).outcome != "correct"

    @pytest.mark.parametrize(("kind", "pattern", "example"), DECLARATIONS, ids=[row[2] for row in DECLARATIONS])
    def test_every_declaration_declares_its_example(self, kind, pattern, example):
        assert re.search(pattern, example, re.IGNORECASE | re.MULTILINE)
        found = find_statement(example, "letter" if kind == "letter" else "integer")
        assert found is not None
        assert found.place == "a declaration"
        assert found.value in ("B", "C") if kind == "letter" else found.value == "72"

    @pytest.mark.parametrize(("pattern", "new", "example"), INTEGER_FORMS)
    def test_every_form_of_an_integer_is_what_its_example_says(self, pattern, new, example):
        before, after = example.split(" -> ")
        assert re.sub(pattern, new, before) == after


class TestStated:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("Some steps.\n\nSo, the mean of her scores is 7.", "7"),
            ("So, m = 25 and n = 169, and m + n = 194.\n\nI think that's the answer.", "194"),
            ("The answer is definitely \\(8000\\).", "8000"),
            ("Thus, 196 has **9** divisors.", "9"),
            ("So I'm confident that y = -4 is the correct solution.", "y = -4"),
            ("So the equation of the plane is 5x - 7y + 4 = 0.", "5x - 7y + 4 = 0"),
            ("So the function is continuous for all n, and a = 5.", "5"),
            ("Adding up:\n\nm + n = 25 + 169 = **194**", "194"),
            ("So, the mean might be 7.", None),
            ("So, is the mean 7?", None),
            ("So, the mean is 7. Wait, that is wrong.", None),
            ("We add 3 and 4 and get 7.", None),
            ("So, the mean is 7 and", None),
            ("Then the rest: 720 - 240 = 480.", "480"),
            ("The rest: 720 - 240 = 480.", None),
            ("The rest: 720 - 240 = 480.\n\nI think that's the right answer.", "480"),
            ("The area decreases by 10%.", "10%"),
            ("So, the rest is 480.\n\nThis kind of problem helps students count.", "480"),
            ("Therefore, 57/160 is 0.35625, which is a terminating decimal.", "0.35625"),
            ("So it is right.\n\nI think $1250 is the right answer.", "1250"),
            ("Therefore, the only correct option is (C) Plane.", "(C) Plane"),
            ("So, it is 5.\n\nWe check 12 cases.", None),
            ("Then we add:\n\n\\[ 2 + 3 = 5 \\]", None),
            ("x is 3, y is 4", None),
            ("Then x is 34}", None),
            ("**Therefore, the value is:**", None),
            ("7", None),  # a mention
            ("", None),
        ],
    )
    def test_a_conclusion_at_the_end(self, text, answer):
        assert last_conclusion(text) == answer

    @pytest.mark.parametrize("kind", ["integer", "expression"])
    def test_the_last_box_counts(self, kind):
        assert extract_answer("</think>\\boxed{1} is wrong, so \\boxed{3}.", kind) == "3"
        assert extract_answer("</think>\\boxed{3}\n\\boxed{3}", kind) == "3"

    def test_boxes_that_and_parts_are_one_list(self):
        text = "</think>So $\\boxed{\\frac{1}{2}}$ and $\\boxed{3}$."
        assert extract_answer(text, "expression") == "\\frac{1}{2}, 3"
        assert extract_answer(text, "integer") == "\\frac{1}{2}, 3"

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("The wrong answer is 12.", None),
            ("A common wrong answer is 12.", None),
            ("The previous answer is 12. We add one to get 13.", None),
            ("My earlier answer: 12", None),
            ("My previous answer of 11 was wrong, and the answer is 12. Done.", "12"),
            ("Adding to the previous answer, the answer is 12.", "12"),
        ],
    )
    def test_a_wrong_or_earlier_answer_is_not_the_stated_one(self, text, answer):
        assert extract_answer("</think>" + text, "integer") == answer

    def test_a_box_comes_before_words(self):
        assert extract_answer("</think>\\boxed{5}. So, the answer is 7.", "integer") == "5"
        assert extract_answer("</think>\\boxed{5. So, the answer is 7.", "integer") is None


class TestRule:
    @pytest.mark.parametrize("kind", ["integer", "expression", "letter"])
    def test_a_truncated_text_is_truncated_whatever_it_holds(self, kind):
        gold = "C" if kind == "letter" else "5"
        assert judge(f"</think>\\boxed{{{gold}}}", "length", gold, kind)[:2] == (None, "truncated")

    def test_other_tags(self):
        tags = ThinkTags(start="<|begin_of_thought|>", end="<|end_of_thought|>")
        text = "<|begin_of_thought|>\\boxed{4}</think><|end_of_thought|>\\boxed{5}"
        assert answer_part(text, tags) == "\\boxed{5}"
        assert judge(text, "stop", "5", "integer", Rule(tags=tags))[1] == "correct"

    @pytest.mark.parametrize(
        ("text", "stop_reason", "gold", "kind"),
        [
            ("never closed \\boxed{5}", "stop", "5", "integer"),
            ("</think>\\boxed{5} and so on", "length", "5", "integer"),
            ("</think>we get 5 in the end\n", "stop", "5", "integer"),
        ],
    )
    def test_an_answer_anywhere_counts_where_the_authors_grader_reads_it(self, text, stop_reason, gold, kind):
        assert judge(text, stop_reason, gold, kind)[1] != "correct"
        assert judge(text, stop_reason, gold, kind, Rule(answer_from="anywhere"))[1] == "correct"

    def test_a_cell_says_how_it_is_read(self, tmp_path):
        (tmp_path / "cell.yaml").write_text(
            "schema: 1\nbenchmark: {answer_kind: integer, answer_from: whole_text}\n"
            "model: {think_start: <a>, think_end: </a>}\n"
        )
        (tmp_path / "problems.jsonl").touch()
        assert read_standard(tmp_path).rule == Rule(answer_from="whole_text", tags=ThinkTags(start="<a>", end="</a>"))


class TestWorkers:
    @pytest.mark.slow
    def test_hostile_texts_neither_hang_nor_crash(self):
        """The long form: scripts/study/grade_audit.py --hostile 10000."""
        texts = hostile_texts(40, seed=1)
        rule = Rule(answer_from="whole_text")
        jobs = [
            Ungraded(text=text, stop_reason="stop", gold=gold, kind=kind, rule=rule)  # type: ignore[arg-type]
            for text in texts
            for kind, gold in (("integer", "5"), ("expression", "1/2"), ("letter", "C"))
        ]
        with Grader(workers=2, timeout_s=5) as grader:
            replies = grader.judge(jobs)
        assert sum(reply.outcome == "grader_timeout" for reply in replies) < 20

    def test_a_text_that_eats_memory_or_time_costs_its_row_alone(self):
        texts = [r"\boxed{5}", r"\boxed{9^{9^{9^{9}}}}", r"\boxed{5}"]
        rule = Rule(answer_from="whole_text")
        jobs = [Ungraded(text=text, stop_reason="stop", gold="5", kind="expression", rule=rule) for text in texts]
        with Grader(workers=1, timeout_s=10) as grader:
            outcomes = [reply.outcome for reply in grader.judge(jobs)]
        assert outcomes[0] == outcomes[2] == "correct"
        assert outcomes[1] in ("wrong", "grader_timeout")


@pytest.mark.slow
@pytest.mark.shared
def test_recorded_outputs_of_real_models(shared_data):
    """Not one false accept where the truth was audited: by those who recorded it, or here (grading_audit.csv).

    What math-verify says alone stands in grading.md, which the script writes in some minutes.
    """
    rows = csv.DictReader((ROOT / "results/published/grading_audit.csv").read_text().splitlines())
    more = {int(row["id"]): row["audit"] == "true" for row in rows}
    path = shared_data / "graded_outputs.jsonl"
    with Grader(workers=2, timeout_s=20) as grader:
        result = audit(path, grader, more, show=False, library=False)
    assert result["rows"] == 1996
    assert result["integer_false_accepts"] == 0
    assert result["integer_agreement"] >= 0.995
    assert result["agreement"] >= 0.98
    table = (ROOT / "results/published/grading.md").read_text().split("\n|---")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[1:]]
    *parts, (_, rows_in_all, *_, their_accepts, _, _) = cells
    assert rows_in_all == f"{result['rows']:,}"
    assert result["false_accepts"] <= int(their_accepts) / 2
    assert len(parts) == len(result["benchmarks"])
    for name, count, _, _, their_share, *_ in parts:
        ours = result["benchmarks"]["minerva_math" if name == "Minerva" else name.lower()]["ours"]
        assert 100 * ours / int(count) >= float(their_share.rstrip("%")) - 0.005
    assert not [name for name in result["classes"] if name.endswith("False, graded correct")]
    assert result["grader_timeouts"] <= 10
