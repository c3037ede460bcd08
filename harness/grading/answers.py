"""Reading an answer: from a completion's text to a verdict, by the kind of answer that a problem asks for.

One function judges every kind. Strict by default: only what follows the thinking counts, a text that hit the token
limit is truncated, integers and letters are compared as they stand, and of running text only a conclusion is read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from analysis.records import Outcome
from harness.grading.expressions import TEXT, compare, readable
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
    compared = _lenient_compare if reading.lenient and kind != "letter" else _KINDS[kind].compare
    equal, why, *forms = compared(answer, gold)
    return Verdict(answer, "correct" if equal else "wrong", why, (forms[0], forms[1]))


def extract_answer(text: str, kind: AnswerKind, rule: Rule = Rule()) -> str | None:
    r"""The answer that a completion gives, or None if it gives none.

    It is the content of the last `\boxed{}`. A text without any box may state its answer in words instead: as "the
    answer is ...", or in a concluding last sentence. A box that is empty or never closed is no answer. An integer comes
    as canonical decimal text, a letter as one of A to D; what is neither stands as it is written, at most 500
    characters of it. Time grows linearly with the text.
    """
    if rule.lenient:
        text = text.rsplit(rule.tags.end, 1)[-1]
        return _lenient_letter(text) if kind == "letter" else _lenient_extract(text)
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
_JOINED = re.compile(r"\}[\s$)\\]*,?[\s$(\\]*(?:and|or)?[\s$(\\]*\\boxed\s*\{")


def _boxes(text: str) -> list[slice]:
    r"""What stands in every `\boxed{...}` that is neither empty nor inside another.

    Nothing if the last box is never closed: an earlier one does not stand in for it. One pass, without recursion.
    """
    open_braces: list[tuple[int, bool]] = []
    boxes: list[slice] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{" or token.startswith("\\boxed"):
            open_braces.append((match.end(), token != "{"))
        elif token == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and _NOT_BLANK.search(text, start, match.start()):
                while boxes and boxes[-1].start > start:
                    boxes.pop()
                boxes.append(slice(start, match.start()))
    last = boxes[-1].stop if boxes else 0
    return [] if any(is_box and start > last for start, is_box in open_braces) else boxes


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` (`_boxes`), or None."""
    boxes = _boxes(text)
    return text[boxes[-1]].strip() if boxes else None


_TAIL_CHARS, _TAIL_SENTENCES = 1500, 8
_HEDGE = re.compile(
    r"\?|\b(?:wait|maybe|perhaps|may|might|could|alternatively|let me (?!know)|suppose|assume)\b", re.IGNORECASE
)
_REMARK, _CONCLUDES = re.compile("That |Yes"), re.compile(r"(?:so|thus|hence|therefore|the)\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*<])|\n\s*\n|\n(?=[A-Z*#<-])")
_BREAKS_OFF = re.compile(r"(?:[\w,+=(^{\\-]|:\**)$")
_DISPLAYED, _FORMULA = re.compile(r"\\\[|\$\$"), re.compile(r"\d|\\[A-Za-z]|\([A-F]\)")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$+|\*\*")
_BOLD = re.compile(r"\*\*([^*\n]*[^*\n:])\*\*(?!:)")
_STATES = re.compile(
    r"(?:.*\b(?:that|think|so|thus|therefore),?\s+)?(?P<subject>\S.{0,200}?)\s+is\s+(?:indeed\s+)?(?:the\s+)?"
    r"(?:correct|right|final)\b.*|.*\banswer\s*:\**(?P<answer>.+)|"
    r".*\b(?:is|are|was|equals|be|by)(?:\s+(?:indeed|definitely|exactly|just|simply|therefore|thus))*\s*:?\s*\**"
    r"(?P<value>[^\s*].*)|.*[=≈](?P<result>.+)",
    re.IGNORECASE | re.DOTALL,
)


def stated_answer(text: str) -> str | None:
    """The answer that a text without a box states at its end, or None.

    It is the last thing in bold, after "is", or after "=" that holds a number or a formula, or that is called the
    answer. A text that hedges or asks after it states nothing, and neither does one that breaks off.
    """
    tail = re.sub(r"(?:\s*<\|[^<>|]*\|>)+\s*$", "", text[-_TAIL_CHARS:]).rstrip()
    sentences = [sentence.strip() for sentence in _SENTENCE_END.split(tail) if sentence.strip()]
    if _BREAKS_OFF.search(tail):
        return None
    for sentence in sentences[: -_TAIL_SENTENCES - 1 : -1]:
        if _HEDGE.search(sentence) or _DISPLAYED.match(sentence):
            return None
        if _REMARK.match(sentence):
            continue
        clause = re.split(r", (?:which|because|since|where)\b", sentence)[0].rstrip(".! \n")
        bold, states = _BOLD.findall(sentence), _STATES.fullmatch(clause)
        broken = (sentence[0].islower() and not bold) or sentence.count("}") > sentence.count("{")
        if broken and not _CONCLUDES.match(sentence):
            return None
        value = bold[0] if len(bold) == 1 else next(filter(None, states.groups())) if states else ""
        if re.match(r"[^=]*(?<!\\)\b[A-Za-z]{4}", value):
            value = value.rpartition("=")[2]  # "is continuous, and a = 5"
        value = _DELIMITERS.sub("", value).strip(" .\n")
        if value and (_FORMULA.search(value) or re.search("answer (?:is|:)", sentence)):
            return value
        if _FORMULA.search(sentence):
            return None
    return None


def _given(answer_text: str) -> str | None:
    return last_box(answer_text) if "\\boxed" in answer_text else stated_answer(answer_text)


def _extract_expression(answer_text: str) -> str | None:
    r"""As `_given`; boxes that only "and", "or" or a comma parts (`\boxed{2} and \boxed{3}`) are one list."""
    boxes = _boxes(answer_text)
    if not boxes:
        return _given(answer_text)
    first = len(boxes) - 1
    while first and _JOINED.fullmatch(answer_text[boxes[first - 1].stop : boxes[first].start][:60]):
        first -= 1
    return ", ".join(dict.fromkeys(answer_text[box].strip() for box in boxes[first:]))


_INTEGER = re.compile(
    r"(?:\\boxed ?)?\{*\s*(?:\([A-E]\)|[A-Za-z](?: ?\+ ?[A-Za-z])* ?=)?\s*(?P<integer>-? ?[0-9]+)(?:\.0*)?\s*\}*"
)


def parse_integer(text: str) -> str | None:
    r"""The canonical decimal text of an integer as answers write it, or None if it is not one.

    Read through: leading zeros, `27.0`, `\text{27}`, braces around the whole, a leading option label or `x =`, and
    what `readable` drops, such as thousands separators and units. Nothing is calculated and no number is searched for:
    `\frac{4}{2}`, `27 or 28` and `3 \text{ million}` are no integers, nor is a text of more than 500 characters.
    """
    match = _INTEGER.fullmatch(readable(text).text) if len(text) <= _MAX_ANSWER_CHARS else None
    return str(int(match["integer"].replace(" ", ""))) if match else None


def _extract_integer(answer_text: str) -> str | None:
    answer = _given(answer_text)
    return answer and (parse_integer(answer) or answer)


def _compare_integers(answer: str, gold: str) -> tuple[bool, str, str, str]:
    """Integers as they stand; what is none, such as a root, is calculated."""
    wanted = parse_integer(gold) or ""
    if parse_integer(answer):
        return answer == wanted, "integers are equal digit by digit", answer, wanted
    return compare(answer, wanted)


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
        match = _LETTER_WRAPPED.fullmatch(re.sub(rf"{TEXT}\{{([^{{}}]*+)\}}", r"\1", box).strip()) if box else None
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
    _, boxed, box = text.rpartition("\\boxed")
    _, stated, answer = text.rpartition("answer is")
    if boxed:
        found = last_box(boxed + box) or box.strip().lstrip("{").split("$")[0]
    elif stated:
        found = answer.strip(" :*").split(".\n")[0].split("\n")[0].rstrip(".")
    else:
        found = (_ANY_NUMBER.findall(text) or [""])[-1].replace(",", "")
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


class _Kind(NamedTuple):
    """One kind of answer.

    `extract` returns None where no answer is given, and the text as it stands where one is given that is not of this
    kind; `gold` writes a reference answer; `compare` returns the verdict, the rule that decided, and both sides.
    """

    extract: Callable[[str], str | None]
    gold: Callable[[str], str | None]
    compare: Callable[[str, str], tuple[bool, str, str, str]]


_KINDS: dict[AnswerKind, _Kind] = {
    "integer": _Kind(_extract_integer, parse_integer, _compare_integers),
    "expression": _Kind(_extract_expression, _expression_gold, compare),
    "letter": _Kind(_extract_letter, _letter_gold, _compare_letters),
}
