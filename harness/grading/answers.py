"""Reading an answer: from a completion's text to a verdict, by the kind of answer that a problem asks for.

One function judges every kind. Strict by default: only what follows the thinking counts, a text that hit the token
limit is truncated, integers and letters are compared as they stand, and of running text only a conclusion is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from analysis.records import Outcome
from harness.grading.expressions import TEXT, compare, is_unit, readable
from harness.models.thinking import ThinkTags

AnswerKind = Literal["integer", "expression", "letter"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
AnswerFrom = Literal["after_think", "whole_text"]
_MAX_ANSWER_CHARS = 500
_MAX_GOLD_CHARS = 2000
_DEFAULT_TAGS = ThinkTags()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How completions are read.

    Attributes:
        answer_from: "after_think" reads what follows the thinking; "whole_text" is for models that do not think.
        tags: the model's thinking tags.
        lenient: the looser rule of the DynTS code, for comparison with its numbers: truncated texts are graded, an
            unclosed thinking is no obstacle, the last number stands in for an answer, numbers within a relative 1e-4
            and percentages for fractions count as equal, and letters are read from upper-cased text.
    """

    answer_from: AnswerFrom = "after_think"
    tags: ThinkTags = _DEFAULT_TAGS
    lenient: bool = False


class Verdict(NamedTuple):
    """How one completion was judged: the answer, the outcome, the rule that decided, both sides as compared."""

    answer: str | None
    outcome: Outcome
    rule: str
    forms: tuple[str, str] = ("", "")


def judge(
    text: str, stop_reason: str, gold: str, kind: AnswerKind, rule: dict[str, Any] | None = None
) -> tuple[str | None, Outcome]:
    """The answer and the outcome of one completion; one that was cut off is truncated, whatever it holds.

    Args:
        text: the completion, thinking included.
        stop_reason: "stop" if the model ended the text.
        gold: the reference answer.
        kind: what kind of answer that is.
        rule: the fields of `Rule` as a worker receives them, `tags` as a mapping; None for the defaults.
    """
    return explain(text, stop_reason, gold, kind, rule)[:2]


def explain(text: str, stop_reason: str, gold: str, kind: AnswerKind, rule: dict[str, Any] | None = None) -> Verdict:
    """Judge as `judge` does, and say which rule decided."""
    rule = dict(rule or {})
    reading = Rule(**{**rule, "tags": ThinkTags(**rule.get("tags", {}))})
    if stop_reason != "stop" and not reading.lenient:
        return Verdict(None, "truncated", "the completion was cut off")
    answer = extract_answer(text, kind, reading)
    if answer is None:
        return Verdict(None, "no_answer", "no thinking that ends, no last box that closes, and no stated conclusion")
    equal, why, *forms = (_KINDS[kind].lenient_compare if reading.lenient else _KINDS[kind].compare)(answer, gold)
    return Verdict(answer, "correct" if equal else "wrong", why, (forms[0], forms[1]))


def extract_answer(text: str, kind: AnswerKind, rule: Rule = Rule()) -> str | None:
    r"""The answer that a completion gives, or None if it gives none.

    It is the content of the last `\boxed{}`. A text without any box may state its answer in words instead: as "the
    answer is ...", or in a concluding last sentence. A box that is empty or never closed is no answer. An integer comes
    as canonical decimal text, a letter as one of A to D; what is neither stands as it is written, at most 500
    characters of it. Time grows linearly with the text.
    """
    if rule.lenient:
        return _KINDS[kind].lenient_extract(text.rsplit(rule.tags.end, 1)[-1])
    answer_text = text if rule.answer_from == "whole_text" else answer_part(text, rule.tags)
    answer = None if answer_text is None else _KINDS[kind].extract(answer_text)
    return answer and answer[:_MAX_ANSWER_CHARS]


def canonical_gold(gold: str, kind: AnswerKind) -> str | None:
    """A reference answer in the form its kind compares ("027" is "27"), or None if it is not of the kind."""
    return _KINDS[kind].gold(gold)


def answer_part(text: str, tags: ThinkTags = _DEFAULT_TAGS) -> str | None:
    """The text after the thinking (`ThinkTags.closing`); None if the thinking was never closed."""
    start = tags.closing(text)
    return None if start is None else text[start + len(tags.end) :]


# A backslash takes its next character along, so that the escaped braces of \{1,2\} do not count.
_BRACES = re.compile(r"\\boxed\s*+\{|\\.|[{}]", re.DOTALL)
_NOT_BLANK = re.compile(r"\S")


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is neither empty nor inside another; braces must balance.

    None if there is no box, or if the last one is never closed: an earlier box does not stand in for it. One
    pass over the text, without recursion.
    """
    open_braces: list[tuple[int, bool]] = []
    last = (0, 0)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{" or token.startswith("\\boxed"):
            open_braces.append((match.end(), token != "{"))
        elif token == "}" and open_braces:
            start, is_box = open_braces.pop()
            # A box that encloses the last one closes after it, and so takes its place.
            if is_box and _NOT_BLANK.search(text, start, match.start()):
                last = (start, match.start())
    unclosed = any(is_box and start > last[1] for start, is_box in open_braces)
    return None if unclosed else text[slice(*last)].strip() or None


_TAIL_CHARS = 1500
_ANSWER_IS = re.compile(
    r"(?:answer(?:\s+is(?:\s+(?:indeed|definitely|therefore|thus))?|\s*:)\**\s*:?)\s*\**\s*(?P<value>[^\n]+?)\s*\**$",
    re.IGNORECASE,
)
_IS_ANSWER = re.compile(
    r"^(?:.*\b(?:confident|sure) that|so,?|thus,?|therefore,?)\s+(?P<value>\S.{0,200}?)\s+is\s+"
    r"(?:indeed\s+)?(?:the\s+)?(?:correct|right|final)(?:\s+(?:answer|solution|number|value|result))?\b",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(r"^(?:so|thus|hence|therefore|in conclusion|finally|the)\b|confident that", re.IGNORECASE)
_ENDS_IN = re.compile(
    r".*\b(?:is|are|was|equals|be|by)(?:\s+(?:indeed|definitely|exactly|just|simply|therefore|thus))*\s*:?"
    r"\s*(?P<value>\S.*)$|.*[=≈]\s*(?P<result>\S.*)$",
    re.DOTALL,
)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_HEDGE = re.compile(
    r"\?|\b(?:wait|but|maybe|perhaps|might|alternatively|however|let me (?!know)|suppose|assume|if)\b", re.IGNORECASE
)
_REMARK = re.compile(
    r"^(?:I think|I'm |I am |I've |I don't |That|Let me know|This |Yes|Everything|It |No matter)|^<\|", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*<])|\n\s*\n|\n(?=[A-Z*#<-])")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$+|\*\*")
_BREAKS_OFF = re.compile(r"[\w,+=(^:{\\-]$")


def stated_answer(text: str) -> str | None:
    """The answer that a text without a box states at its end, or None.

    "The answer is X", or a last sentence that concludes (So, Thus, Therefore, The ...) and ends "is X" or "= X", or
    holds one thing in bold; remarks such as "I think that's the answer." may follow it. A sentence that hedges or asks
    states nothing, and neither does a text that breaks off.
    """
    tail = re.sub(r"(?:\s*<\|[^<>|]*\|>)+\s*$", "", text[-_TAIL_CHARS:]).rstrip()
    if not tail or _BREAKS_OFF.search(tail):
        return None
    for sentence in [s.strip() for s in _SENTENCE_END.split(tail) if s.strip()][:-6:-1]:
        bold, ending = _BOLD.findall(sentence), _ENDS_IN.match(sentence.rstrip(".! \n"))
        if _HEDGE.search(sentence):
            return None
        if stated := _IS_ANSWER.search(sentence) or _ANSWER_IS.search(sentence.rstrip(".! ")):
            return _value(stated["value"])
        if _CONCLUDES.search(sentence) or (len(bold) == 1 and re.search(r"[=≈]\s*\*\*[^*]+\*\*$", sentence)):
            value = (ending["value"] or ending["result"]) if ending else ""
            # "is continuous, and a = 5": after words the last side counts, "is y = 2x" states an equation.
            value = value.rpartition("=")[2] if re.match(r"[^=]*(?<!\\)\b[A-Za-z]{4}", value) else value
            return _value(bold[0] if len(bold) == 1 else value)
        if not _REMARK.match(sentence):
            return None
    return None


def _value(text: str) -> str | None:
    return _DELIMITERS.sub("", text).strip(" .\n") or None


def _given(answer_text: str) -> str | None:
    return last_box(answer_text) if "\\boxed" in answer_text else stated_answer(answer_text)


_JOINED_BOXES = re.compile(
    r"\\boxed\s*\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}[\s$)\\]*,?[\s$(\\]*(?:and|or)?[\s$(\\]*(?=\\boxed)"
)


def _extract_expression(answer_text: str) -> str | None:
    r"""As `_given`; boxes that only "and", "or" or a comma parts (`\boxed{2} and \boxed{3}`) are one list."""
    answer, start = _given(answer_text), answer_text.rfind("\\boxed")
    joined = list(_JOINED_BOXES.finditer(answer_text, max(0, start - _MAX_ANSWER_CHARS)))
    while answer and joined and joined[-1].end() == start:
        match = joined.pop()
        answer, start = f"{last_box(match.group())}, {answer}", match.start()
    return answer


_SPACE = r"\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z])|\\?\$"
_UNIT = rf"{TEXT}\{{[^{{}}]*+\}}"
# An option label, or what the value is the value of: "(B) 5", "x = 5", "m+n = 5".
_LABEL = rf"{TEXT}\{{\s*+\(?[A-E]\)\s*+\}}|\([A-E]\)|[A-Za-z]\s*+(?:\+\s*+[A-Za-z]\s*+)*+="
_DIGITS = r"[1-9][0-9]{0,2}(?:(?:,(?:\\[!,])?|\{,\}(?:\\!)?|\\,)[0-9]{3})++(?![0-9])|[0-9]++"
_DEGREES = r"°|\\degrees?(?![A-Za-z])|\^\s*+(?:\\circ|\{\s*+\\circ\s*+\})"
_INTEGER = re.compile(
    rf"(?:{_SPACE})*+(?:{_LABEL})?(?:{_SPACE})*+"
    rf"(?P<sign>[-+\u2212]?)\s*+(?P<digits>{_DIGITS})(?:\.0*+)?"
    rf"(?P<units>(?:{_SPACE}|\\?%|{_DEGREES}|{_UNIT}(?:\^(?:[23]|\{{[23]\}}))?)*+)"
)
_UNIT_WORDS = re.compile(rf"{TEXT}\{{([^{{}}]*+)\}}")
_WRAPPED = re.compile(rf"(?:{TEXT}|\\boxed\s*+)?\{{(?P<inside>.*)\}}", re.DOTALL)


def parse_integer(text: str) -> str | None:
    r"""The canonical decimal text of an integer as answers write it, or None if it is not one.

    Read through: leading zeros, `27.0`, thousands separators (`1,625`, `1{,}625`, `10,\!080`), `$`, `\%`,
    degrees, units in `\text{}` after the number, a leading option label or `x =`, and `\text{27}` or braces
    around the whole. Nothing is calculated and no number is searched for: `\frac{4}{2}`, `2^3`, `27 or 28`
    and `3 \text{ million}` are not integers, and neither is a text of more than 500 characters.
    """
    text = text.strip()
    if len(text) > _MAX_ANSWER_CHARS:
        return None
    while (match := _INTEGER.fullmatch(text)) is None:
        wrapped = _WRAPPED.fullmatch(text)
        if wrapped is None:
            return None
        text = wrapped["inside"].strip()
    if not all(is_unit(words) for words in _UNIT_WORDS.findall(match["units"])):
        return None
    digits = re.sub(r"[^0-9]", "", match["digits"]).lstrip("0") or "0"
    return f"-{digits}" if match["sign"] in ("-", "\u2212") and digits != "0" else digits


def _extract_integer(answer_text: str) -> str | None:
    answer = _given(answer_text)
    if answer and "\\boxed" not in answer_text and (result := parse_integer(answer.rpartition("=")[2])):
        return result  # "so the sum is 2 + 3 = 5"
    return answer and (parse_integer(answer) or answer)


def _compare_integers(answer: str, gold: str) -> tuple[bool, str, str, str]:
    wanted = parse_integer(gold) or ""
    return answer == wanted, "integers are equal digit by digit", answer, wanted


def _expression_gold(gold: str) -> str | None:
    text = gold.strip()
    return text if readable(text).text and len(text) <= _MAX_GOLD_CHARS else None


_LETTER_WRAPPED = re.compile(
    r"(?:(?i:option|choice|answer)\s*+:?\s*+)?[\s$(\[{*]*+(?P<letter>[A-D])(?:[\s$)\]}*.]*|[)\]}.:]+\s.*)", re.DOTALL
)
_LETTER_STATED = re.compile(
    r"\b(?i:answer|choice|option)(?:\s++(?i:is|would\s+be|must\s+be))?[\s:*]*+(?:(?i:option|choice)\s++)?"
    r"[\s*$({\[]*+(?:\\(?:text|mathbf|textbf|mathrm)\{)?[({]?(?P<letter>[A-D])(?![A-Za-z'’])(?!\s++[a-z])"
)
_LETTER_BOLD = re.compile(r"\*\*\s*+\(?(?P<letter>[A-D])\)?[.:]?\s*+\*\*|\*\*\s*+\(?(?P<item>[A-D])[).:]\s[^*\n]*+\*\*")


def _extract_letter(answer_text: str) -> str | None:
    """The letter of the last box; without a box the last "Answer: C" or bold C, else the one "(C)" of the last line."""
    if "\\boxed" in answer_text:
        box = last_box(answer_text)
        match = _LETTER_WRAPPED.fullmatch(_UNIT_WORDS.sub(r"\1", box).strip()) if box else None
        return match["letter"] if match else box
    tail = answer_text[-_TAIL_CHARS:]
    stated = [*_LETTER_STATED.finditer(tail), *_LETTER_BOLD.finditer(tail)]
    if stated:
        last = max(stated, key=lambda match: match.end())
        return last["letter"] or last["item"]
    last_line = tail.rstrip().rpartition("\n")[2].strip()
    letters = set(re.findall(r"\(([A-D])\)", last_line)) or set(re.findall(r"^([A-D])\.?$", last_line))
    return letters.pop() if len(letters) == 1 else None


def _letter_gold(gold: str) -> str | None:
    match = re.fullmatch(r"\(?([A-D])\)?", gold.strip())
    return match[1] if match else None


def _compare_letters(answer: str, gold: str) -> tuple[bool, str, str, str]:
    wanted = _letter_gold(gold) or ""
    return answer == wanted, "letters are equal", answer, wanted


_ANY_NUMBER = re.compile(r"-?[0-9][0-9,]*+(?:\.[0-9]++)?")
_RELATIVE_ERROR = 1e-4


def _lenient_extract(text: str) -> str | None:
    """The last box, closed or not; else what follows the last "answer is"; else the last number."""
    start = text.rfind("\\boxed")
    if start >= 0:
        found = last_box(text[start:]) or text[start + len("\\boxed") :].strip().lstrip("{").split("$")[0]
    elif (start := text.rfind("answer is")) >= 0:
        found = text[start + len("answer is") :].strip(" :*").split(".\n")[0].split("\n")[0].rstrip(".")
    else:
        numbers = _ANY_NUMBER.findall(text)
        found = numbers[-1].replace(",", "") if numbers else ""
    return found.strip()[:_MAX_ANSWER_CHARS] or None


def _lenient_compare(answer: str, gold: str) -> tuple[bool, str, str, str]:
    try:
        left, right = (float(re.sub("[, ]", "", readable(text).text)) for text in (answer, gold))
    except ValueError:
        return compare(answer, gold)
    wanted = (right / 100, right, right * 100)
    close = any(abs(left - value) <= _RELATIVE_ERROR * max(abs(left), abs(value)) for value in wanted)
    return close, "lenient: within a relative 1e-4, percentages for fractions too", str(left), str(right)


def _lenient_letter(text: str) -> str | None:
    """The last stand-alone letter of the upper-cased answer; the word "a" is option A to it."""
    found = re.findall(r"\b([A-E])\b", (_lenient_extract(text) or text[-_TAIL_CHARS:]).upper())
    return found[-1] if found else None


_Compare = Callable[[str, str], tuple[bool, str, str, str]]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of answer: how to read it, how to write its gold, and when both are equal; strictly and leniently.

    `extract` returns None where no answer is given, and the text as it stands where one is given that is not
    of this kind. `compare` returns the verdict, the rule that decided, and both sides as compared.
    """

    extract: Callable[[str], str | None]
    gold: Callable[[str], str | None]
    compare: _Compare
    lenient_extract: Callable[[str], str | None] = _lenient_extract
    lenient_compare: _Compare = _lenient_compare


_KINDS: dict[AnswerKind, _Kind] = {
    "integer": _Kind(extract=_extract_integer, gold=parse_integer, compare=_compare_integers),
    "expression": _Kind(extract=_extract_expression, gold=_expression_gold, compare=compare),
    "letter": _Kind(
        extract=_extract_letter,
        gold=_letter_gold,
        compare=_compare_letters,
        lenient_extract=_lenient_letter,
        lenient_compare=_compare_letters,
    ),
}
