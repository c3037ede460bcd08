r"""Where a text states its answer: the first of the three stages in which an answer is read.

A statement beats a mention: `_ranked` has the places in the order of their rank. Of statements of one rank the last
counts; what cannot be an answer of the kind asked for is no statement. What stands around a value is peeled off in
`spelling`, and `expressions` decides what equals.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from kvsweep.harness.grading.languages import COPULA, answer_words, declarations, number_of_words, plain_characters
from kvsweep.harness.grading.spelling import TEXT_COMMAND, peeled

AnswerKind = Literal["integer", "expression", "letter"]


class Statement(NamedTuple):
    """A stated answer: where the text states it, and the value as written (a letter as one of A to D)."""

    place: str
    value: str


# --- Boxes ----------------------------------------------------------------------------------------------------

_BOX = re.compile(
    r"(?<!\\)\\(?:boxed|fbox|framebox)\s*+(?:(?P<open>\{)|(?P<bare>-?\d[\d.,]*\d|-?\d|\\(?:pi|infty|emptyset)\b|[A-D](?![A-Za-z]|\s+[a-z])))|"
    r"<\|begin_of_box\|>(?P<tagged>.{0,2000}?)<\|end_of_box\|>",
    re.DOTALL,
)
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)  # A backslash takes its next character along, as in \{1,2\}.
_NAMED = r"[A-Za-z](?:_\{?\w\}?)?\s*&?=\s*"
# What joins two boxes to one list: signs, "and", "or", a bullet, and a name before "=".
_JOINT_WORDS = (
    r"(?:and|as well as)(?:\s+(?:also|both|even|possibly|perhaps|maybe))*|or(?:\s+[a-z]+){0,3}|oder|und|ou|et|或者?|和"
)
_JOINT = re.compile(
    r"[\s$&,;./()\[\]\\*-]*+(?:\\?(?:quad|qquad)[\s\\,]*)?"
    rf"(?:\\?(?:text)?\{{?\s*(?:{_JOINT_WORDS})(?![A-Za-z])\s*\}}?)?"
    rf"[\s$,*\\()\[\]]*+(?:(?:quad|qquad)[\s\\,$]*)?(?P<name>(?:{_NAMED})?)"
)
_NAME_BEFORE = re.compile(rf"{_NAMED}$")

_CALLED_WRONG = re.compile(r"[\s$\\)*]*(?:,\s+which\b[^.!?\n]*)?\s(?:is|was|are)\s+(?:\w+\s+)?(?:wrong|incorrect)\b")


class _Box(NamedTuple):
    start: int
    end: int
    content: str | None  # None if the box is never closed


def boxes(text: str) -> Iterator[_Box]:
    """The boxes of a text that are not empty, the last first."""
    for match in reversed(list(_BOX.finditer(text))):
        end = match.end()
        content = match["bare"] or match["tagged"]
        if match["open"]:
            closing = _closing_brace(text, end)
            if closing:
                content = text[end : closing.start()]
                end = closing.end()
        if content is not None:
            content = content.strip()
        if content != "":  # also None, of a box that is never closed: the text breaks off in it
            yield _Box(match.start(), end, content)


def _closing_brace(text: str, start: int) -> re.Match[str] | None:
    """The brace that closes the one before `start`."""
    depth = 1
    for brace in _BRACES.finditer(text, start):
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
        if depth == 0:
            return brace
    return None


def _boxed(text: str, kind: AnswerKind) -> str | None:
    """The last box that holds an answer of the kind; boxes that signs, "and" or "or" join are one list."""
    values = list[str]()  # of the joined boxes, the last first
    start = 0  # of the box that was read last
    for box in boxes(text):
        if _CALLED_WRONG.match(text, box.end):
            continue
        if values:
            joint = _JOINT.fullmatch(text, box.end, start)  # what stands between this box and the one behind it
            if not joint or not box.content:
                break
            values[-1] = joint["name"] + values[-1]  # the name before the box that follows
        value = _fitting(box.content, kind, in_box=True) if box.content else None
        if value:
            values.append(value)
            start = box.start
    if not values:
        return None
    # A name before a single box says nothing; of several boxes each keeps its own, and this is the first one's.
    name = _NAME_BEFORE.search(text, max(0, start - 20), start)
    if name and len(values) > 1:
        values[-1] = name[0] + values[-1]
    in_order = dict.fromkeys(reversed(values))  # each once
    return ", ".join(in_order).replace("&=", "=")


# --- JSON objects ---------------------------------------------------------------------------------------------

_ANSWER_KEY = re.compile(r"(?:final[_ ])?answer", re.IGNORECASE)
_OBJECT = re.compile(rf'\{{(?=[^{{}}]*"{_ANSWER_KEY.pattern}"\s*:)', re.IGNORECASE)


def _keyed(text: str, kind: AnswerKind) -> str | None:
    """The answer in the last JSON object that has one."""
    for match in reversed(list(_OBJECT.finditer(text))):
        with suppress(json.JSONDecodeError):
            item, _ = json.JSONDecoder().raw_decode(text, match.start())
            values = [value for key, value in item.items() if _ANSWER_KEY.fullmatch(key)]
            if values and isinstance(values[0], str | int | float):
                fitting = _fitting(str(values[0]), kind)
                if fitting:
                    return fitting
    return None


# --- What says that an answer follows --------------------------------------------------------------------------

_CHOICE = r"(?:answers?|choice|option)"
_BE = r"(?:is|are|(?:would|must|should|will|has\s+to)(?:\s+(?:then|therefore|thus))?\s+be)\b"
_SURE = (
    r"(?:\s+(?:therefore|thus|then|hence|indeed|definitely|(?:un)?doubtedly|certainly|surely|clearly|simply|exactly|"
    r"(?:most\s+)?(?:likely|probably)))*+"
)
_SAYS = rf"[*_\"']*+(?:\s*+(?:[:=是为は]|은)|\s+[-–—](?=\s)|\s+{_BE}{_SURE}\s*+:?+)[*_]*+"
_OF = r"(?:\s+(?:choice|option))?(?:\s+(?:to|for|of|among|from)\b(?:(?!answer is)[^.:?\n]){0,60}?)?"
_HEADING = rf"^[#*_\s]*+(?:(?:the|my|final|correct)\s+)*(?:answers?|{answer_words()})[*_]*+\s*?:?[*_]*+[ \t]*\n"
# The value follows a pattern, or is its group: kind ("" for all), pattern and an example.
DECLARATIONS: tuple[tuple[str, str, str], ...] = (
    ("", r"<answer>(?P<value>[^<]{1,500})</answer>", "<answer>72</answer>"),
    ("", r"(?<!\S)####[ \t]*+(?=[^\s#])", "#### 72"),
    ("", _HEADING, "**Final answer**\n\n72"),
    ("", rf"(?<![A-Za-z])answers?{_OF}{_SAYS}", "the answer is 72"),
    ("number", r"^[#*_\s]*+(?:[a-z]+\s+){0,3}(?:result|solution)[*_]*+:[*_]*+(?![^\n]*[a-z]{2}[ \t])",
     "**Result**: 72"),
    ("number", r"^A: ", "A: 72"),
    ("letter", rf"\b(?:choice|option){_OF}{_SAYS}", "the best option would be B"),
    ("letter", r"\bI(?:'d|'ll|\s+would|\s+will|\s+therefore)*+\s+"
     r"(?:choose|pick|select|(?:go|stay|stick)\s+with)\b", "I choose C"),
    ("letter", r"\bit(?:'s|\s+is)\b", "It's C."),
    ("letter", r"\b(?:leav(?:es|ing)|left\s+with)\s+(?:us\s+with\s+)?(?:only\s+)?(?:(?:the\s+)?(?:option|choice)\s+)?"
     r"(?=[*(]*[A-D][*)]*\s*(?:[.!]|$))",
     "This leaves only C."),
    ("letter", rf"(?:^[^\w\n]{{0,6}}|(?<=[.!?;])\s+|[,:]\s+|\b(?:so|thus|therefore|hence|that)\s+|\b{_CHOICE}\s+)[*(]*+"
     rf"(?P<value>(?-i:[A-D]))[*).]*+\s+(?-i:{_BE}){_SURE}\s+(?:the\s+)?"
     r"(?:only\s+)?(?:answer|(?:correct|right|best)(?:\s+(?:answer|option|choice|one))?)(?:\s+here)?"
     r"(?=\s*+(?:[.!,;*]|$|because|since))", "Option B is correct."),
)  # fmt: skip


# Kind, pattern, and the pattern of what denies it.
_DECLARED = list[tuple[str, re.Pattern[str], re.Pattern[str]]]()
for _kind, _pattern, _wrong in (*((kind, pattern, r"\bnot\b") for kind, pattern, _ in DECLARATIONS), *declarations()):
    _DECLARED.append((_kind, re.compile(_pattern, re.I | re.M), re.compile(_wrong, re.I)))
_OTHER = r"\b(?:wrong|incorrect|mistaken|false|previous|earlier|prior)\s+"  # answer, which then is not the stated one
_OTHER_ANSWER = rf"{_OTHER}answers?(?:\s+(?:is|are|was|were|would)\b|:)"
_DOUBTED = re.compile(
    r"\b(?:if|whether|suppose|assum\w+|unless|(?<!no )doubt|never|not|cannot|wrong|incorrect|might|could|"
    r"someone|object\w*|claim\w*|argu\w*|tempt\w*|thought|guess\w*|recall)\b|n't|^\s*is\b"
    rf"|{_OTHER}$",
    re.I,
)
_IMAGINED = re.compile(r"\b(?:if|had|were)\b(?=.*\bwould\b)", re.I | re.S)
_TAKES_BACK = re.compile(r"\b(?:wait|hmm|actually)\b", re.I)
_CHECKS = re.compile(r"\b(?:but|alternatively|let(?:'s| me (?!know)))\b", re.I)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\\$*<(]|[^\x00-\x7f])|(?<=。)|\n\s*\n|\n(?=[A-Z*#<-])")
_CLAUSE_START = re.compile(r"[.!?;:,\n](?:\s|$)|[。、]|,(?=[^\x00-\x7f])")
_GOES_ON = re.compile(r",?\s+(?:which|because|since|where|so|not|as|but)\b|\s+[(—–]\s*[a-z]{3}")
_ENDS = (*".!)]}*$>",)  # what a text ends with that does not break off
_MARKS = " \t\n*-✅✓✔"


def _declared(text: str, kind: AnswerKind) -> str | None:
    """The value of the last declaration, such as "the answer is 72", unless the text goes on to doubt it."""
    # Numbers are calculated all along a text; a letter is declared only as an answer.
    start = 0 if kind == "letter" else max(0, len(text) - _TAIL_CHARS)
    kinds = ("", "letter" if kind == "letter" else "number")  # "": a declaration of any kind of answer
    end, value = -1, ""  # of the last declaration
    for declared_kind, pattern, wrong in _DECLARED:
        if declared_kind not in kinds:
            continue
        for match in pattern.finditer(text, start):
            declared = _declared_value(text, match, wrong, kind)
            if declared:
                end, value = max((end, value), (match.end(), declared))  # of two pairs the one that ends later
    if not value:
        return None
    after = text[end:].strip(_MARKS)
    if _TAKES_BACK.search(after):
        return None
    breaks_off = "\n" in after and not after.endswith(_ENDS)
    # Behind a number, a further calculation may correct it; behind a letter, an explanation often follows.
    if kind != "letter" and (breaks_off or _CHECKS.search(after)):
        return None
    return value


def _declared_value(text: str, match: re.Match[str], wrong: re.Pattern[str], kind: AnswerKind) -> str | None:
    """The value that follows a declaration in its sentence or, after a heading, in the next line; None if denied.

    `wrong` is what denies it in the declaration's own language: a word of another one may be a name, as `\\ne` is.
    """
    before = text[max(0, match.start() - 200) : match.start()]
    sentence_before = re.split(r"[.!?\n](?:\s|$)", before)[-1]
    clause_before = _CLAUSE_START.split(before)[-1]
    if _IMAGINED.search(sentence_before + match[0]) or _DOUBTED.search(clause_before) or wrong.search(clause_before):
        return None
    if "value" in match.re.groupindex:
        return _fitting(match["value"], kind)
    behind = text[match.end() : match.end() + 2000]
    if match[0].endswith("\n"):  # a heading
        behind = behind.lstrip()
    value = _SENTENCE_END.split(behind)[0].split("\n")[0].strip()
    if value.endswith("?") or wrong.match(value):
        return None
    value = re.sub(rf"\s*{COPULA}(?=[.。]?$)", "", value)
    if kind == "letter":
        return letter_of(value)
    value = _value_in(value)
    if kind == "integer":
        value = re.split(r",\s+[a-z]{2,}", value)[0]
    ends_in_sign = re.search(r"[:=]\W*$", match[0])
    # Behind a colon or = any value may come; behind "is" also plain words, which state nothing.
    if not ends_in_sign and not _FORMULA.search(value) and not _names_number(value):
        return None
    return _fitting(value, kind)


def _value_in(sentence: str) -> str:
    """The value in the rest of a sentence: in bold type, behind the sentence's own "is" or "=", or up to a clause."""
    # **72**, unless a formula or a sentence goes on behind it.
    bold = re.match(r"\*\*([^*]+)\*\*(?!\s*(?:\w|[-+*/=^]))", sentence)
    if bold:
        sentence = bold[1]
    # Three words: a sentence, in which the value comes after its own "is" or "=".
    elif re.match(r"[A-Za-z]+ [A-Za-z]+ [A-Za-z]+ ", sentence) and not _names_number(sentence):
        states = _STATES.fullmatch(sentence.rstrip(".! "))
        sentence = _stated(states) if states else ""
    return _GOES_ON.split(sentence)[0]


def _names_number(value: str) -> bool:
    """Whether a value is a number in English words."""
    return number_of_words(_bare(value)) is not None


# --- What the end of the text concludes ------------------------------------------------------------------------

_TAIL_CHARS = 1500
_HEDGE = re.compile(r"\?|^\\\[|\b(?:wait|maybe|perhaps|may|might|could|alternatively|let me (?!know)|assume)\b", re.I)
_DENIES = re.compile(rf"\b(?:is|are|be|equals)\s+not\b|\b(?:cannot|never|doubt)\b|n't|{_OTHER_ANSWER}", re.I)
_LAST_CLAUSE = re.compile(r",\s+(?:so|thus|therefore|hence|and|but)\b")
_FORMULA = re.compile(r"\d|\\[A-Za-z]|\([A-F]\)")
_CONCLUDES = re.compile(r"(?:so|thus|hence|therefore|then)\b|.*\b(?:answer|correct|right|confident)\b", re.I | re.S)
_STATES = re.compile(
    r"(?:.*\b(?:that|think|so|thus|therefore),?\s)?\s*(\S.{0,200}?)\sis\s+(?:the\s)?(?:correct|right|final)\b.*|"
    rf".*\b(?:is|are|was|equals|be|by){_SURE}\s*:?\s+((?![^=]*\b[a-z]{{4}}.*=).+)|.*[=≈](?P<result>.+)",
    re.IGNORECASE | re.DOTALL,
)
_BOLD = re.compile(r"\*\*([^*\n]*[^*\n:])\*\*")
_DISPLAY = re.compile(r"(?:\\\[|\$\$)\s*[A-Za-z](?:_\w)?\s*=\s*([^=]+?)\s*[.]?\s*(?:\\\]|\$\$)$")
_CLEAN = re.compile(r"[-\s$\\(*]*\d[\d,.]*[\s$\\)*%]*")


def last_conclusion(text: str) -> str | None:
    """The number or formula that a text states at its end, or None: no hedge, no question and no break follows.

    The last sentence with a number or a formula states it in bold, after "is", or as what a calculation comes to.
    """
    # Without a line of --- or ***, and without check marks and emoji at the end.
    tail = re.sub(r"\n\s*(?:-{3,}|\*{3,})\s*$", "", text[-_TAIL_CHARS:].rstrip())
    tail = re.sub(r"[\s✅✓✔\ufe0f\U0001f000-\U0001faff]+$", "", tail)
    shown = _DISPLAY.search(tail)
    if shown:
        return shown[1]
    last_sentences = _SENTENCE_END.split(tail)[-8:]
    for sentence in map(str.strip, reversed(last_sentences)):
        last_clause = _LAST_CLAUSE.split(sentence)[-1]
        is_denied = _HEDGE.search(sentence) or _DENIES.search(last_clause)
        # More closing braces: the sentence began within a formula, and its start is missing.
        if is_denied or sentence.count("}") > sentence.count("{"):
            return None
        if _FORMULA.search(sentence):
            return _conclusion_of(sentence, tail)
    return None


def _conclusion_of(sentence: str, tail: str) -> str | None:
    """The value that `sentence` states, the last one with a formula in `tail`, the end of the text; or None."""
    main_clause = re.split(r", (?:which|because|since|where|not)\b", sentence)[0]
    statement = _STATES.fullmatch(main_clause.rstrip(".! "))
    concludes = bool(_CONCLUDES.match(tail, tail.rindex(sentence)))  # in the sentence or what follows it
    value = None
    # What merely stands behind = (`result`) may be a step on the way, unless the sentence concludes.
    if statement and (concludes or not statement["result"]):
        value = _stated(statement)
    bold = _BOLD.findall(sentence if value is None else value)
    if len(bold) == 1:  # of several none is the value for sure
        value = bold[0]
    if value is None:
        return None
    is_complete = tail.endswith(_ENDS) or (concludes and _CLEAN.fullmatch(value))  # else the text breaks off
    if not is_complete:
        return None
    without_label = re.sub(r"^[A-Za-z][A-Za-z ]{0,30}:\s+", "", value)
    return _bare(without_label) or None


def _stated(states: re.Match[str]) -> str:
    """The value that `_STATES` matched: it has a group for each way to state one, of which a single one matches."""
    return states[states.lastindex or 0]


def _bare(value: str) -> str:
    """The value without dollar signs, brackets of formulas, bold type, and marks at its ends."""
    return re.sub(r"\\[()\[\]]|(?<!\\)\$+|\*\*|`", "", value).strip(" .。\n\t_✅✓✔")


# --- Letters ---------------------------------------------------------------------------------------------------

_HEAD = r"(?:(?:option|choice|answer|letter)\s*:?\s*)?[(\[{\"'`<“‘\s]*"
_SHUT = r"[)\]}\"'`>”’]*"
_AND = r"\s*(?:[,;/&]|\bor\b|\band\b|,\s*(?:and|or)\b)\s*(?:(?:possibly|perhaps|maybe)\s+)?"
_SEVERAL = re.compile(rf"{_HEAD}[A-D]{_SHUT}{_AND}{_HEAD}[A-D]\b(?!['’]).*", re.DOTALL)
# What may follow a letter: a mark and the option's text, a reason, or what is set apart.
_APART = (
    r"[.:)\]]\s+(?!(?:is|are|was|would|has|can|cannot)\b)|[,;]\s+|\s*(?:[—–]\s+|です)|\s+-\s+|\s+\((?!no\b|or\b|not\b|actually\b)|\s{2,}|"
    r"\s+(?:because|since|as|for|where|which|due|with|while|so|not|but|and\s+not|rather)\b"
)
_LETTER = re.compile(rf"(?i:{_HEAD})([A-D])(?:{_SHUT}[.,:;!\s]*|{_SHUT}(?:{_APART}).*)", re.DOTALL)
_SMALL_LETTER = re.compile(rf"(?:(?i:option|choice)\s+)?[(\[\s\"'`]*([a-d]){_SHUT}[.:]?\s*")
_SMALL_OPTION = re.compile(r"\(?([a-d])[).:]+\s+\S.*")


def letter_of(value: str, *, option: bool = False) -> str | None:
    """The letter that a value states, A to D; several letters as written; None for anything else.

    A symbol that begins with a letter, such as C2v or D-glucose, is no letter. A small letter counts without any other
    word, or, as an `option`, before a mark and a text.
    """
    value = re.sub(r"\\q?quad|\\[ ,;]|~", "  ", value.strip())  # two blanks set a letter apart (`_APART`)
    value = TEXT_COMMAND.sub(r"\1", peeled(value))
    value = re.sub(r"\\[()\[\]]|\$+", "", value).strip(" .。\n\t*_\\")
    if _SEVERAL.fullmatch(value):
        return value
    match = _LETTER.fullmatch(value) or _SMALL_LETTER.fullmatch(value)
    if not match and option:
        match = _SMALL_OPTION.fullmatch(value)
    return match[1].upper() if match else None


_WRONG = re.compile(
    r"\b(?:not|rul\w+ out|wrong|incorrect|eliminat\w+|except|doubt|exclud\w+|false|never|cannot)\b|n't|\?"
    rf"|{_OTHER_ANSWER}",
    re.I,
)
_LINKS = re.compile(r"\b(?:is|be|so|thus|therefore|hence|option|choice|answer)\b|:", re.I)


def _bold_letter(tail: str) -> str | None:
    """The letter that alone is bold, or the bold letter at the end."""
    letters = list[str]()
    last_line = last_bold = ""  # of the last letter
    for line in tail.split("\n"):
        for bold in re.findall(r"\*\*([^*]{1,200})\*\*", line):
            letter = letter_of(bold)
            if letter:
                letters.append(letter)
                last_line, last_bold = line, bold
    if not letters:
        return None
    is_only_letter = len({*letters}) == 1
    is_at_end = tail.rstrip(" .!\n").endswith(f"**{last_bold}**")
    if _WRONG.search(last_line) or not (is_only_letter or is_at_end):
        return None
    return letters[-1]


def _whole(text: str) -> str | None:
    """The whole text if it is a number or a formula."""
    # Two words, letters of another script, or a question.
    has_words = re.search(r"[A-Za-z]{2}\W+[A-Za-z]{2}|[^\W\d_A-Za-z]{2}|\?", text)
    is_value = len(text) <= 100 and "\n" not in text and not has_words
    return text if is_value and _FORMULA.search(text) else None


def _last_letter(lines: list[str]) -> str | None:
    """The letter that the last line is, if no line shortly before is another one."""
    letters = [letter_of(line, option=True) for line in lines[-6:]]
    different = {*letters} - {None}
    return letters[-1] if len(different) == 1 and not _WRONG.search(lines[-1]) else None


def _named_letter(line: str) -> str | None:
    """The letter that the last sentence of a line names without doubt."""
    sentence = _SENTENCE_END.split(line)[-1]
    if not _LINKS.search(sentence) or _WRONG.search(sentence) or _HEDGE.search(sentence):
        return None
    # (B), or "option B".
    named = {*re.findall(r"(?<=\()[A-D](?=\))", sentence), *re.findall(r"\b(?:option|choice) ([A-D])\b", sentence)}
    return named.pop() if len(named) == 1 else None


def _fitting(value: str, kind: AnswerKind, *, in_box: bool = False) -> str | None:
    """The value if it can be an answer of the kind: a letter, a number with a digit, or any expression.

    Around a value that is not `in_box`, signs of formulas and of bold type are left out.
    """
    if kind == "letter":
        return letter_of(value)
    if not in_box:
        value = _bare(value)
    if not value:
        return None
    if kind == "expression" or re.search(r"\d", value):
        return value
    is_number_word = number_of_words(TEXT_COMMAND.sub(r"\1", value)) is not None
    return value if is_number_word else None


_NOT_BUT = re.compile(
    r"\bnot (?!only\b)[^.,;\n]{1,40}? but (?!also\b)(?:rather )?|\bnicht (?!nur\b)[^.;\n]{1,40}?, sondern |"
    r"(?<=は)[^は。、\n]{1,40}?ではなく、?|不是[^。\n]{1,40}?[,，]?而(?=是)"
)


def _ranked(text: str, kind: AnswerKind) -> Iterator[tuple[str, str | None]]:
    """Yield the places of a text, from statements to mentions, with the value that each states, or none."""
    yield "a box", _boxed(text, kind)
    yield "a JSON object", _keyed(text, kind)
    yield "a declaration", _declared(text, kind)
    whole = text.strip(_MARKS)
    if kind != "letter":
        yield "the last sentence", last_conclusion(text)
        yield "the whole text", _whole(whole)
        return
    yield "bold type", _bold_letter(text[-_TAIL_CHARS:])
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    if lines:
        yield "the last line", _last_letter(lines)
        yield "the last sentence", _named_letter(lines[-1])


def find_statement(text: str, kind: AnswerKind) -> Statement | None:
    """The answer that a text states, or None; a last box that is never closed breaks the text off."""
    text = _NOT_BUT.sub("", plain_characters(text))
    last_box = next(boxes(text), None)
    if last_box and last_box.content is None:
        return None
    for place, value in _ranked(text, kind):
        if value:
            return Statement(place, value)
    if last_box and last_box.content:
        return Statement(f"a box that holds no {kind}", last_box.content)
    return None
