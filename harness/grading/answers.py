"""Reading an answer: from a completion's text to a verdict, by the kind of answer that a problem asks for.

One function judges every kind. Strict by default: only what follows the thinking counts, a text that hit the token
limit is truncated, numbers must be equal digit by digit, and nothing is searched for in running text but a conclusion.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, Literal, get_args

from analysis.records import Outcome
from harness.models.thinking import ThinkTags

AnswerKind = Literal["integer", "expression", "letter"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
AnswerFrom = Literal["after_think", "whole_text"]
_MAX_ANSWER_CHARS = 500
_DEFAULT_TAGS = ThinkTags()

# Beyond it nothing is calculated: an expression this long is equal only if it is written the same.
_MAX_CALCULATED_CHARS = 300
_MAX_GOLD_CHARS = 2000


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


_STRICT = Rule()


def judge(
    text: str, stop_reason: str, gold: str, kind: AnswerKind, rule: dict[str, Any] | None = None
) -> tuple[str | None, Outcome]:
    """The answer and the outcome of one completion; at the token limit it is truncated, whatever it holds.

    Args:
        text: the completion, thinking included.
        stop_reason: "length" if it hit the token limit.
        gold: the reference answer.
        kind: what kind of answer that is.
        rule: the fields of `Rule` as a worker receives them, `tags` as a mapping; None for the defaults.
    """
    rule = dict(rule or {})
    reading = Rule(**{**rule, "tags": ThinkTags(**rule.get("tags", {}))})
    if stop_reason == "length" and not reading.lenient:
        return None, "truncated"
    answer = extract_answer(text, kind, reading)
    if answer is None:
        return None, "no_answer"
    equal = _KINDS[kind].lenient_equal if reading.lenient else _KINDS[kind].equal
    return answer, "correct" if equal(answer, gold) else "wrong"


def extract_answer(text: str, kind: AnswerKind, rule: Rule = _STRICT) -> str | None:
    r"""The answer that a completion gives, or None if it gives none.

    It is the content of the last `\boxed{}`. A text without any box may state its answer in words instead: as "the
    answer is ...", or in a concluding last sentence. A box that is empty or never closed is no answer. An integer comes
    as canonical decimal text, a letter as one of A to D; what is neither stands as it is written, at most 500
    characters of it. Time grows linearly with the text.
    """
    if rule.lenient:
        return _KINDS[kind].lenient_extract(text.rsplit(rule.tags.end, 1)[-1])
    answer_text = text if rule.answer_from == "whole_text" else answer_part(text, rule.tags)
    return None if answer_text is None else _KINDS[kind].extract(answer_text)


def canonical_gold(gold: str, kind: AnswerKind) -> str | None:
    """A reference answer in the form its kind compares ("027" is "27"), or None if it is not of the kind."""
    return _KINDS[kind].gold(gold)


def answer_part(text: str, tags: ThinkTags = _DEFAULT_TAGS) -> str | None:
    """What follows the thinking (`ThinkTags.closing`); None if the thinking was never closed."""
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


_SPACE = r"\s|~|\\[ ,;:!]|\\q?quad(?![A-Za-z])|\\?\$"
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm)|mbox)\s*+"
_UNIT = rf"{_TEXT}\{{[^{{}}]*+\}}"

# An option label, or what the value is the value of: "(B) 5", "x = 5", "m+n = 5".
_LABEL = rf"{_TEXT}\{{\s*+\(?[A-E]\)\s*+\}}|\([A-E]\)|[A-Za-z]\s*+(?:\+\s*+[A-Za-z]\s*+)*+="
_DIGITS = r"[1-9][0-9]{0,2}(?:(?:,(?:\\[!,])?|\{,\}(?:\\!)?|\\,)[0-9]{3})++(?![0-9])|[0-9]++"
_DEGREES = r"°|\\degrees?(?![A-Za-z])|\^\s*+(?:\\circ|\{\s*+\\circ\s*+\})"
_POWER = r"\^(?:[23]|\{[23]\})"
_INTEGER = re.compile(
    rf"(?:{_SPACE})*+(?:{_LABEL})?(?:{_SPACE})*+"
    rf"(?P<sign>[-+\u2212]?)\s*+(?P<digits>{_DIGITS})(?:\.0*+)?"
    rf"(?P<units>(?:{_SPACE}|\\?%|{_DEGREES}|{_UNIT}(?:{_POWER})?)*+)"
)
_UNIT_WORDS = re.compile(rf"{_TEXT}\{{([^{{}}]*+)\}}")
_WRAPPED = re.compile(rf"(?:{_TEXT}|\\boxed\s*+)?\{{(?P<inside>.*)\}}", re.DOTALL)
_WORDS = re.compile(r"(?:[^\W\d_]|[ .,/()°²³-])*+")

# Words that make another number, or no number, of the integer before them.
# fmt: off
_NOT_UNITS = frozenset({
    "i", "e", "j", "pi", "hundred", "hundreds", "thousand", "thousands", "million", "millions",
    "billion", "billions", "trillion", "trillions", "dozen", "dozens", "half", "halves", "third",
    "thirds", "quarter", "quarters", "tenth", "tenths", "hundredth", "hundredths", "squared",
    "cubed", "factorial", "times", "mod", "modulo", "base", "or", "and", "not", "to", "plus",
    "minus", "over", "per",
})


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
    if not all(_is_unit(words) for words in _UNIT_WORDS.findall(match["units"])):
        return None
    digits = re.sub(r"[^0-9]", "", match["digits"]).lstrip("0") or "0"
    return f"-{digits}" if match["sign"] in ("-", "\u2212") and digits != "0" else digits


def _is_unit(words: str) -> bool:
    return bool(_WORDS.fullmatch(words)) and _NOT_UNITS.isdisjoint(re.findall("[a-z]+", words.lower()))


_TAIL_CHARS = 1500
_ANSWER_IS = re.compile(
    r"(?:answer(?:\s+is(?:\s+(?:indeed|definitely|therefore|thus))?|\s*:)\**\s*:?)\s*\**\s*(?P<value>[^\n]+?)\s*\**$",
    re.IGNORECASE,
)
_IS_ANSWER = re.compile(
    r"(?:confident that|sure that|^so,?|^thus,?|^therefore,?)\s+(?P<value>\S.{0,200}?)\s+is\s+(?:indeed\s+)?(?:the\s+)?"
    r"(?:correct|right|final)(?:\s+(?:answer|solution|number|value|result))?\b",
    re.IGNORECASE,
)
_CONCLUDES = re.compile(r"^(?:so|thus|hence|therefore|in conclusion|finally|the)\b|confident that", re.IGNORECASE)
_ENDS_IN = re.compile(
    r".*(?:\b(?:is|are|was|equals|be|by)(?:\s+(?:indeed|definitely|exactly|just|simply|therefore|thus))*\s*:?|=|≈)"
    r"\s*(?P<value>\S.*)$",
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
    """What a text without a box states as its answer at its end, or None.

    "The answer is X", or a last sentence that concludes (So, Thus, Therefore, The ...) and ends "is X" or "= X", or
    holds one thing in bold; remarks such as "I think that's the answer." may follow it. A sentence that hedges or asks
    states nothing, and neither does a text that breaks off.
    """
    tail = re.sub(r"(?:\s*<\|[^<>|]*\|>)+\s*$", "", text[-_TAIL_CHARS:]).rstrip()
    if not tail or _BREAKS_OFF.search(tail):
        return None
    for sentence in [s.strip() for s in _SENTENCE_END.split(tail) if s.strip()][:-6:-1]:
        if _HEDGE.search(sentence):
            return None
        if stated := _IS_ANSWER.search(sentence) or _ANSWER_IS.search(sentence.rstrip(".! ")):
            return _value(stated["value"])
        if _CONCLUDES.search(sentence):
            bold = _BOLD.findall(sentence)
            ending = _ENDS_IN.match(sentence.rstrip(".! \n"))
            return _value(bold[0] if len(bold) == 1 else ending["value"] if ending else "")
        if not _REMARK.match(sentence):
            return None
    return None


def _value(text: str) -> str | None:
    value = _DELIMITERS.sub("", text).strip(" .\n")
    return value or None


def _extract_integer(answer_text: str) -> str | None:
    answer = _given(answer_text)
    if answer is None:
        return None
    return parse_integer(answer) or answer[:_MAX_ANSWER_CHARS]


def _given(answer_text: str) -> str | None:
    return last_box(answer_text) if "\\boxed" in answer_text else stated_answer(answer_text)


def _integer_equal(answer: str, gold: str) -> bool:
    return answer == parse_integer(gold)


_TEXT_COMMANDS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it)|mbox)\s*+\{([^{}]*+)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.])([0-9]++(?:\.[0-9]++)?)[eE]([+-]?[0-9]{1,3})(?!\w)")
_THOUSANDS = re.compile(r"(?<![0-9.])[0-9]{1,3}(?:(?:,(?:\\[,!])?|\{,\}(?:\\!)?|\\[,!])\s*+[0-9]{3})++(?![0-9])")
_FINAL_UNIT = re.compile(rf"(?<=[0-9}}])(?:\s|\\[ ,])*+(?:{_UNIT}(?:\^\{{?-?[0-9]\}}?)?)++\s*+$")
_AND = re.compile(r"\\(?:text|mbox)\s*+\{\s*+(?:and|or)\s*+\}|(?<=[\s,])(?:and|or)(?=\s)")
_RELATION = re.compile(r"[<>]|\\(?:geq?|leq?|gt|lt|neq?|in|subset)(?![A-Za-z])")
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_SUBSCRIPT = re.compile(r"_([A-Za-z0-9])(?![A-Za-z0-9])")
_WORDS_AFTER = re.compile(
    r"(?P<number>-?[0-9]++(?:\.[0-9]++)?)\s*+(?P<words>(?![eE][0-9+-])[^\W\d_][^\d_\\=<>,;(){}^*+]*+)"
)
_POWER_OF_TEN = re.compile(
    r"(?P<factor>[+-]?[0-9]++(?:\.[0-9]++)?)(?:(?:\\(?:cdot|times)|x|×|\*)10\^\{?(?P<power>[+-]?[0-9]{1,4})\}?)?"
)
_TRAILING_WORDS = re.compile(r"(?<=[0-9}])\s+(?P<words>[A-Za-z][A-Za-z ]*+)$")
_ROUNDED_AWAY = Decimal("1e-3")
_SUPERSCRIPTS = str.maketrans({"²": "^2", "³": "^3", "\u2212": "-", "√": r"\sqrt ", "π": r"\pi "})


def normal_form(answer: str) -> str:
    r"""An expression without what only changes its looks: spacing, `\left`, `\dfrac`, `$`, thousands, a final unit."""
    text = answer.translate(_SUPERSCRIPTS).replace(r"\$", "").replace("$", "")
    text = re.sub(r"\\(?:left|right|displaystyle|big[lr]?|Big[lr]?)(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(ge|le)qslant", r"\\\1q", text)
    text = _THOUSANDS.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    text = re.sub(rf"\\?%|{_DEGREES}", "", text)
    text = _AND.sub(",", re.sub(r"\\q?quad(?![A-Za-z])|\\[,;:! ]|~", " ", text))
    text = re.sub(r",(?:\s*+,)++", ",", text)
    text = _TEXT_COMMANDS.sub(r"\1", _FINAL_UNIT.sub("", text))
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    words = _WORDS_AFTER.fullmatch(text.strip(" ."))
    if words and len(words["words"].strip()) > 1 and _is_unit(words["words"].strip(" .")):
        text = words["number"]
    text = _SUBSCRIPT.sub(r"_{\1}", text)
    return re.sub(r"\s++", " ", text).strip(" .")


def _extract_expression(answer_text: str) -> str | None:
    answer = _given(answer_text)
    return answer and answer[:_MAX_ANSWER_CHARS]


def _expression_equal(answer: str, gold: str) -> bool:
    """Equal as written, in `normal_form`, or by calculation; where no relation is asked for, `x = 5` gives 5."""
    answer, gold = normal_form(answer), normal_form(gold)
    if _same(answer, gold):
        return True
    if _RELATION.search(answer + gold):
        return False
    value, wanted = _without_names(answer), _without_names(gold)
    return (value, wanted) != (answer, gold) and _same(value, wanted)


def _without_names(text: str) -> str:
    """Of every item of a list the last side of its equation, if all are equations of the same left side."""
    items = _items(text)
    sides = [_EQUALS.split(item) for item in items]
    if len({len(side) > 1 for side in sides}) != 1 or (
        len({side[0].strip() for side in sides}) > 1 and len(sides[0]) > 1
    ):
        return text
    return ", ".join(side[-1].strip() for side in sides)


def _items(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    depth, items = 0, [""]
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _same(answer: str, gold: str) -> bool:
    if re.sub(r"\s", "", answer) == re.sub(r"\s", "", gold):
        return True
    if not answer or not gold or max(len(answer), len(gold)) > _MAX_CALCULATED_CHARS:
        return False
    number, wanted = _number(answer), _number(gold)
    if number is not None and wanted is not None:
        return number == wanted
    if wanted and abs(wanted) < _ROUNDED_AWAY:
        # math-verify rounds to six decimals: both sides are brought to where they matter.
        power = -wanted.adjusted()
        return _verified(rf"({answer}) \cdot 10^{{{power}}}", str(wanted.scaleb(power)))
    if len(_items(answer)) != len(_items(gold)) and "\\pm" not in answer + gold:
        # A list for a tuple or set, where the reference has no brackets to say which it is.
        inside = re.fullmatch(r"\((.*)\)|\\\{(.*)\\\}", answer)
        return inside is not None and gold[0] not in "([\\" and _same(inside[1] or inside[2] or "", gold)
    return _verified(answer, gold)


def _number(text: str) -> Decimal | None:
    """A decimal number, also times a power of ten and with a unit; math-verify would round 2.88e-19 to 2.89e-19."""
    ending = _TRAILING_WORDS.search(text)
    if ending and _is_unit(ending["words"]):
        text = text[: ending.start()]
    match = _POWER_OF_TEN.fullmatch(re.sub(r"\s", "", text if text[:1] != "." else f"0{text}"))
    return Decimal(f"{match['factor']}e{match['power'] or 0}") if match and len(text) < 100 else None


def _verified(answer: str, gold: str) -> bool:
    # Without time limits of its own, which need the main thread's signals: the worker as a whole is killed.
    math_verify, targets = _math_verify()
    parsed = [math_verify.parse(f"${text}$", targets, parsing_timeout=None) for text in (gold, answer)]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))


@cache
def _math_verify() -> tuple[Any, list[Any]]:
    """The library and what it looks for; imported by the workers that need it alone, as sympy takes half a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify, [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]


def _expression_gold(gold: str) -> str | None:
    text = gold.strip()
    return text if normal_form(text) and len(text) <= _MAX_GOLD_CHARS else None


_LETTER_WRAPPED = re.compile(
    r"(?:(?i:option|choice|answer)\s*+:?\s*+)?[\s$(\[{*]*+(?P<letter>[A-D])(?:[\s$)\]}*.]*|[)\]}.:,]+\s.*)", re.DOTALL
)
_LETTER_STATED = re.compile(
    r"\b(?i:answer|choice|option)(?:\s++(?i:is|would\s+be|must\s+be))?[\s:*]*+(?:(?i:option|choice)\s++)?"
    r"[\s*$({\[]*+(?:\\(?:text|mathbf|textbf|mathrm)\{)?[({]?(?P<letter>[A-D])(?![A-Za-z'’])(?!\s++[a-z])"
)
_LETTER_BOLD = re.compile(r"\*\*\s*+\(?(?P<letter>[A-D])\)?[.:]?\s*+\*\*|\*\*\s*+\(?(?P<item>[A-D])[).:]\s[^*\n]*+\*\*")
_LETTER_BRACKETS = re.compile(r"\((?P<letter>[A-D])\)")


def _extract_letter(answer_text: str) -> str | None:
    """The letter of the last box; without a box the last "Answer: C" or bold C, else the one "(C)" of the last line."""
    if "\\boxed" in answer_text:
        box = last_box(answer_text)
        if box is None:
            return None
        plain = _TEXT_COMMANDS.sub(r"\1", box)
        match = _LETTER_WRAPPED.fullmatch(plain.strip())
        return match["letter"] if match else box[:_MAX_ANSWER_CHARS]
    tail = answer_text[-_TAIL_CHARS:]
    stated = [*_LETTER_STATED.finditer(tail), *_LETTER_BOLD.finditer(tail)]
    if stated:
        last = max(stated, key=lambda match: match.end())
        return last["letter"] or last["item"]
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    last_line = lines[-1] if lines else ""
    letters = set(_LETTER_BRACKETS.findall(last_line)) or set(re.findall(r"^([A-D])\.?$", last_line))
    return letters.pop() if len(letters) == 1 else None


def _letter_gold(gold: str) -> str | None:
    match = re.fullmatch(r"\(?([A-D])\)?", gold.strip())
    return match[1] if match else None


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


def _lenient_equal(answer: str, gold: str) -> bool:
    left, right = (_lenient_number(text) for text in (answer, gold))
    if left is not None and right is not None:
        wanted = (right / 100, right, right * 100)
        return any(abs(left - value) <= _RELATIVE_ERROR * max(abs(left), abs(value)) for value in wanted)
    return _expression_equal(answer, gold)


def _lenient_number(text: str) -> float | None:
    try:
        return float(normal_form(text).replace(",", "").replace(" ", ""))
    except ValueError:
        return None


def _lenient_letter(text: str) -> str | None:
    """The last stand-alone letter of the upper-cased answer; the word "a" is option A to it."""
    found = re.findall(r"\b([A-E])\b", (_lenient_extract(text) or text[-_TAIL_CHARS:]).upper())
    return found[-1] if found else None


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of answer: how to read it, how to write its gold, and when both are equal; strictly and leniently.

    `extract` returns None where no answer is given, and the text as it stands where one is given that is not
    of this kind.
    """

    extract: Callable[[str], str | None]
    gold: Callable[[str], str | None]
    equal: Callable[[str, str], bool]
    lenient_extract: Callable[[str], str | None] = _lenient_extract
    lenient_equal: Callable[[str, str], bool] = _lenient_equal


_KINDS: dict[AnswerKind, _Kind] = {
    "integer": _Kind(extract=_extract_integer, gold=parse_integer, equal=_integer_equal),
    "expression": _Kind(extract=_extract_expression, gold=_expression_gold, equal=_expression_equal),
    "letter": _Kind(
        extract=_extract_letter,
        gold=_letter_gold,
        equal=lambda answer, gold: answer == _letter_gold(gold),
        lenient_extract=_lenient_letter,
        lenient_equal=lambda answer, gold: answer == _letter_gold(gold),
    ),
}
