"""Reading an answer: from a completion's text to a verdict, by the kind of answer that a problem asks for."""

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from kvsweep.harness.grading.expressions import TEXT_COMMAND, compare, readable
from kvsweep.harness.models.config import ThinkTags
from kvsweep.records import Outcome

AnswerKind = Literal["integer", "expression", "letter"]
ANSWER_KINDS: tuple[AnswerKind, ...] = get_args(AnswerKind)
AnswerFrom = Literal["after_think", "whole_text"]
_MAX_ANSWER_CHARS, _MAX_GOLD_CHARS = 500, 2000
_DEFAULT_TAGS = ThinkTags()


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How completions are read; `tags` are the model's thinking tags."""

    answer_from: AnswerFrom = "after_think"  # "whole_text" is for models that do not think
    tags: ThinkTags = _DEFAULT_TAGS
    lenient: bool = False  # grade truncated texts and unclosed thinking, and take the last number where no answer is


class Job(NamedTuple):
    """One completion to judge: the arguments of `judge`."""

    text: str
    stop_reason: str
    gold: str
    kind: AnswerKind
    rule: dict[str, Any] | None = None


class Verdict(NamedTuple):
    """How one completion was judged: the answer, the outcome, the rule that decided, both sides as compared."""

    answer: str | None
    outcome: Outcome
    rule: str
    forms: tuple[str, str] = ("", "")


def judge(text: str, stop_reason: str, gold: str, kind: AnswerKind, rule: dict[str, Any] | None = None) -> Verdict:
    """Judge one completion; one that was cut off (`stop_reason`) is truncated, whatever it holds.

    `rule` has the fields of `Rule` as a worker receives them, `tags` as a mapping; None for the defaults.
    """
    reading = msgspec.convert(rule or {}, Rule)
    if stop_reason != "stop" and not reading.lenient:
        return Verdict(None, "truncated", "the completion was cut off")
    answer = extract_answer(text, kind, reading)
    if answer is None:
        return Verdict(None, "no_answer", "no thinking that ends, no last box that closes, and no stated conclusion")
    wanted = canonical_gold(gold, kind) or ""
    if kind == "letter" or (kind == "integer" and parse_integer(answer)):
        equal, why, left, right = answer == wanted, f"{kind}s must be the same", answer, wanted
    else:
        equal, why, left, right = compare(answer, wanted)
    return Verdict(answer, "correct" if equal else "wrong", why, (left, right))


def extract_answer(text: str, kind: AnswerKind, rule: Rule = Rule()) -> str | None:
    r"""The answer that a completion gives, or None if it gives none.

    It is the content of the last `\boxed{}`, or without any box what the end of the text states. An integer comes as
    canonical decimal text, a letter as one of A to D; what is neither stands as written, at most 500 characters of it.
    """
    part = text if rule.answer_from == "whole_text" or rule.lenient else answer_part(text, rule.tags)
    if part is None:
        return None
    find = _extract_letter if kind == "letter" else last_box if "\\boxed" in part else stated_answer
    answer = find(_NEXT_BOX.sub(", ", part) if kind == "expression" else part)
    if answer is None and rule.lenient and kind != "letter":
        answer = re.findall(r"-?[0-9][0-9,.]*+|$", part)[-2:][0]
    if answer and kind == "integer":
        answer = parse_integer(answer) or answer
    return answer[:_MAX_ANSWER_CHARS] if answer else None


def canonical_gold(gold: str, kind: AnswerKind) -> str | None:
    """A reference answer in the form its kind compares ("027" is "27"), or None if it is not of the kind."""
    if kind == "integer":
        return parse_integer(gold)
    if kind == "letter":
        letter = re.fullmatch(r"\s*\(?([A-D])\)?\s*", gold)
        return letter and letter[1]
    return gold.strip() if readable(gold)[0] and len(gold.strip()) <= _MAX_GOLD_CHARS else None


def answer_part(text: str, tags: ThinkTags = _DEFAULT_TAGS) -> str | None:
    """The text after the thinking (`ThinkTags.closing`), None if that was never closed; all of it without thinking."""
    if tags.end is None:
        return text
    start = tags.closing(text)
    return None if start is None else text[start + len(tags.end) :]


_NEXT_BOX = re.compile(r"\}[\s$)\\]{0,9}(?:,|(?:, ?)?(?:and|or))[\s$(\\]{0,9}\\boxed\s*+\{")  # \boxed{2} and \boxed{3}
_BOX = re.compile(r"(?<!\\)\\boxed\s*+\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # A backslash takes its next character along, as in \{1,2\}.


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` that is not empty; None if that is never closed, or if there is none."""
    for box in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACES.finditer(text, box.end()):
            depth += (brace[0] == "{") - (brace[0] == "}")
            if depth == 0:
                break
        content = text[box.end() : brace.start()].strip() if depth == 0 else None
        if content != "":
            return content
    return None


_TAIL_CHARS = 1500
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*<])|\n\s*\n|\n(?=[A-Z*#<-])")
_HEDGE = re.compile(r"\?|^\\\[|\b(?:wait|maybe|perhaps|may|might|could|alternatively|let me (?!know)|assume)\b", re.I)
_FORMULA = re.compile(r"\d|\\[A-Za-z]|\([A-F]\)")
_CONCLUDES = re.compile(r"(?:so|thus|hence|therefore|then)\b|.*\b(?:answer|correct|right|confident)\b", re.I | re.S)
_STATES = re.compile(
    r"(?:.*\b(?:that|think|so|thus|therefore),?\s)?\s*(\S.{0,200}?)\sis\s+(?:the\s)?(?:correct|right|final)\b.*|"
    r".*\banswer\s*:\**(.+)|.*\b(?:is|are|was|equals|be|by)(?:\s+(?:indeed|definitely))?\s*:?\s+((?![^=]*\b[a-z]{4}.*=).+)|.*[=≈](?P<result>.+)",
    re.IGNORECASE | re.DOTALL,
)


def stated_answer(text: str) -> str | None:
    """The answer that a text without a box states at its end, or None: no hedge, no question and no break follows.

    The last sentence with a number or a formula states it in bold, after "is", or as what a calculation comes to.
    """
    tail = text[-_TAIL_CHARS:].rstrip()
    if not tail.endswith((*".!)]}*$>",)):  # the text breaks off
        return None
    for sentence in map(str.strip, reversed(_SENTENCE_END.split(tail)[-8:])):
        if _HEDGE.search(sentence) or sentence.count("}") > sentence.count("{"):
            return None
        if _FORMULA.search(sentence):
            bold = re.findall(r"\*\*([^*\n]*[^*\n:])\*\*", sentence)
            states = _STATES.fullmatch(re.split(r", (?:which|because|since|where)\b", sentence)[0].rstrip(".! "))
            if len(bold) != 1 and not (
                states and (not states["result"] or _CONCLUDES.match(tail, tail.rindex(sentence)))
            ):
                return None
            value = bold[0] if len(bold) == 1 or not states else next(filter(None, states.groups()))
            return re.sub(r"\\[()\[\]]|\$+|\*\*", "", value).strip(" .\n") or None
    return None


_INTEGER = re.compile(r"(?:\([A-F]\))?[\s{]*(?:[A-Za-z](?: ?\+ ?[A-Za-z])* ?=)?\s*(-? ?[0-9]+)(?:\.0*)?\s*\}*")


def parse_integer(text: str) -> str | None:
    r"""The canonical decimal text of an integer as answers write it ("027", `x = 27.0`, `\text{27} cm`), or None.

    Nothing is calculated, and no number is searched for: `\frac{4}{2}` and `27 or 28` are no integers.
    """
    match = _INTEGER.fullmatch(readable(text)[0]) if len(text) <= _MAX_ANSWER_CHARS else None
    return str(int(match[1].replace(" ", ""))) if match else None


_LETTER_BOXED = re.compile(
    r"(?:(?i:option|choice|answer)[\s:]*)?[\s$([{*]*([A-D])(?:[\s$)\]}*.]*|[)\]}.:]+[\s\\~](?!\s*(?:and|or)\b).*)", re.S
)
_LETTER_STATED = re.compile(
    r"\b(?i:answer|choice|option)(?:\s++(?i:is|would\s+be|must\s+be))?[\s:*]*+(?:(?i:option|choice)\s++)?"
    r"[\s*$({\[]*+(?:\\(?:text|math)[a-z]*\{)?[({]?([A-D])(?![A-Za-z'’])(?!\s++[a-z])|"
    r"\*\*\s*+\(?([A-D])(?:\)?[.:]?\s*+\*\*|[).:]\s[^*\n]*+\*\*)"
)


def _extract_letter(text: str) -> str | None:
    """The letter of the last box; without a box the last "Answer: C" or bold C, else the one "(C)" of the last line."""
    if "\\boxed" in text:
        box = last_box(text)
        match = _LETTER_BOXED.fullmatch(TEXT_COMMAND.sub(r"\1", box or "").strip())
        return match[1] if match else box
    tail = text[-_TAIL_CHARS:].rstrip()
    letters = [match[match.lastindex or 0] for match in _LETTER_STATED.finditer(tail)][-1:]
    letters = letters or list(set(re.findall(r"(?<=\()[A-D](?=\))|^[A-D](?=\.?$)", tail.rpartition("\n")[2].strip())))
    return letters[0] if len(letters) == 1 else None
