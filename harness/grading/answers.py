"""Reading an answer: from a completion's text to a verdict, by the kind of answer that a problem asks for."""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvsweep.harness.grading.expressions import compare
from kvsweep.harness.grading.languages import number_of_words
from kvsweep.harness.grading.spelling import TEXT_COMMAND, number_of_base, readable
from kvsweep.harness.grading.statements import AnswerKind, Statement, find_statement
from kvsweep.harness.grading.values import TooMuchWork
from kvsweep.run_files.row_types import Outcome
from kvsweep.run_files.thinking import DEFAULT_TAGS, ThinkTags, answer_part, without_end

AnswerFrom = Literal["after_think", "whole_text", "anywhere"]
_MAX_ANSWER_CHARS, _MAX_GOLD_CHARS = 500, 2000


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How completions are read; `tags` are the model's thinking tags."""

    # "whole_text" is for models that do not think. "anywhere" also reads a text that was cut off, and takes the last
    # number where no answer is stated: so the DynTS code grades (Robin930/DynTS utils/utils.py at a55dc37).
    answer_from: AnswerFrom = "after_think"
    tags: ThinkTags = DEFAULT_TAGS


_AFTER_THINK = Rule()


class Ungraded(NamedTuple):
    """One completion to judge: the arguments of `judge`."""

    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind
    rule: Rule = _AFTER_THINK


class Verdict(NamedTuple):
    """How one completion was judged: the answer, the outcome, the rule that decided, both sides, where it stands."""

    answer: str | None
    outcome: Outcome
    rule: str
    forms: tuple[str, str] = ("", "")
    place: str = "nowhere"


def judge(text: str, stop_reason: str, gold: str, kind: AnswerKind, rule: Rule = _AFTER_THINK) -> Verdict:
    """Judge one completion; one that was cut off (`stop_reason`) is truncated unless answers are read anywhere."""
    if stop_reason != "stop" and rule.answer_from != "anywhere":
        return Verdict(None, "truncated", "the completion was cut off")
    statement = stated_answer(text, kind, rule)
    if statement is None:
        return Verdict(None, "no_answer", "no thinking that ends, no last box that closes, and no statement")
    place, answer = statement
    try:
        # A gold of another kind was refused before (`grader._read_golds`); here it would equal nothing.
        is_equal, why, answer_form, gold_form = _compared(answer, canonical_gold(gold, kind) or "", kind)
    except TooMuchWork:
        return Verdict(answer, "grader_timeout", "no verdict: it takes more work than a pair may", place=place)
    outcome: Outcome = "correct" if is_equal else "wrong"
    return Verdict(answer[:_MAX_ANSWER_CHARS], outcome, why, (answer_form, gold_form), place)


def _compared(answer: str, gold: str, kind: AnswerKind) -> tuple[bool, str, str, str]:
    """Equal or not, the rule that decided, and both sides as they were compared."""
    # Both sides are in their canonical form; an answer without one is compared by its value below.
    if kind == "letter" or (kind == "integer" and parse_integer(answer)):
        return answer == gold, f"{kind}s must be the same", answer, gold
    if len(answer) > _MAX_ANSWER_CHARS:
        return answer == gold, "long answers must be written the same", answer, gold
    if kind == "expression":
        return compare(answer, gold)
    value = _without_decimal_point(answer)
    if re.search(r"\d\.\d", value):  # a decimal that no power of ten makes whole
        return False, "an integer has no decimals", answer, gold
    return compare(value, gold)


def prepare() -> None:
    """Import what the first comparison needs."""
    compare(r"x + 1\text{ m}", "1 + x")


_DECIMAL_POWER = re.compile(r"(\d)\.(\d+)\s*(?:\\cdot|×)\s*10\s*\^(\{)?(\d+)(?(3)\})")


def _without_decimal_point(answer: str) -> str:
    r"""The answer with a decimal's point moved into its power of ten: `1.5 \times 10^3` as `15 \cdot 10^{2}`."""
    if "." not in answer:
        return answer
    text, _ = readable(answer)
    return _DECIMAL_POWER.sub(_shift_point, text)


def _shift_point(decimal: re.Match[str]) -> str:
    whole, places, _, power = decimal.groups()
    return rf"{whole}{places} \cdot 10^{{{int(power) - len(places)}}}"


def stated_answer(text: str, kind: AnswerKind, rule: Rule) -> Statement | None:
    r"""The answer that a completion states, and where (`find_statement`), or None if it states none.

    An integer comes as canonical decimal text, a letter as one of A to D; what is neither stands as written.
    """
    part = answer_part(text, rule.tags) if rule.answer_from == "after_think" else without_end(text)
    if part is None:  # the thinking never ends
        return None
    statement = find_statement(part, kind)
    if statement is None and rule.answer_from == "anywhere" and kind != "letter":
        numbers = re.findall(r"-?[0-9][0-9,.]*+", part)
        if numbers:
            statement = Statement("the last number", numbers[-1])
    if statement is None or not statement.value:
        return None
    if kind == "integer":
        number = parse_integer(statement.value)
        if number is None:
            boxed = {parse_integer(value) for value in statement.value.split(", ")}  # so `statements` joins boxes
            if len(boxed) == 1:  # 70 and 070 in two boxes are one answer
                number = boxed.pop()
        if number is not None:
            return statement._replace(value=number)
    return statement


def canonical_gold(gold: str, kind: AnswerKind) -> str | None:
    """A reference answer in the form its kind compares ("027" is "27"), or None if it is not of the kind."""
    if kind == "integer":
        return parse_integer(gold)
    if kind == "letter":
        letter = re.fullmatch(r"\s*\(?([A-D])\)?\s*", gold)
        return letter[1] if letter else None
    text, _ = readable(gold)  # empty if the gold is a unit or style alone
    stripped = gold.strip()
    return stripped if text and len(stripped) <= _MAX_GOLD_CHARS else None


_INTEGER = re.compile(r"(?:\([A-F]\))?[\s{]*(?:[A-Za-z](?: ?\+ ?[A-Za-z])* ?=)?\s*(-? ?[0-9]+)(?:\.0*)?\s*\}*")


# What says only that an integer is one: pattern, replacement and an example.
INTEGER_FORMS: tuple[tuple[str, str, str], ...] = (
    (r"\\text\s*\{\s*,\s*\}", ",", r"2\text{,}024 -> 2,024"),
    (r"_\{?10\}?\s*\$?$", "", "33_{10} -> 33"),
    (r"^[^=]*\\equiv\s*(.*\\pmod)", r"\1", r"N \equiv 33 \pmod{100} -> 33 \pmod{100}"),
    (r"\s*(?:\\pmod\s*\{?|(?:\\text\s*\{\s*)?\(\s*\\?(?:b?mod|text\s*\{\s*mod\s*\})|\\mod)[^A-Za-z]*$", "",
     r"33 \pmod{100} -> 33"),
)  # fmt: skip


def parse_integer(text: str) -> str | None:
    r"""The canonical decimal text of an integer as answers write it ("027", `\text{27} cm`, `33_8`, "two"), or None.

    Nothing else is calculated, and no number is searched for: `\frac{4}{2}` and `27 or 28` are no integers.
    """
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    for pattern, new, _ in INTEGER_FORMS:
        text = re.sub(pattern, new, text)
    words = TEXT_COMMAND.sub(r"\1", text).strip(" .")
    number = number_of_words(words)  # "two", then 33_8, then digits
    if number is None:
        text, _ = readable(text)
        number = number_of_base(text)
    if number is None:
        digits = _INTEGER.fullmatch(text)
        if not digits:
            return None
        number = int(digits[1].replace(" ", ""))
    return str(number)
