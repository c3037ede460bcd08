"""Golds (reference answers): bring a value of the data into comparable form, or say why no answer can equal it."""

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from functools import cache

from kvsweep.harness.grading.answers import AnswerKind, canonical_gold
from kvsweep.harness.grading.expressions import compare
from kvsweep.harness.grading.spelling import TEXT_COMMAND, readable
from kvsweep.harness.grading.values import TooMuchWork
from kvsweep.messages.escape import is_text

# GSM8K's files end a worked solution with this, and the answer follows.
SOLUTION_END = "####"
_KINDS = {"letter": "letter from A to D"}  # how a message calls a kind; the others have their names
_MOST_WORDS = 8
_COMMANDS = re.compile(r"\\begin\{\w+\*?\}(?:\{\w*\})?|\\[A-Za-z]+|\$")
_WORD = re.compile(r"(?<!\S)[^\W\d_]{2,}(?=[\s,.;:!?]|$)")
# JSON reads the backslash of an unescaped LaTeX command, such as \frac or \times, as an escape.
_LOST_IN_GOLD = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|[\t\n\r](?=[a-z])")
# The published AIME 2025 itself has lost \frac and \triangle, so these two are asked as they are.
_LOST_IN_TEXT = re.compile(
    r"\x08|\x0c(?!rac)|\t(?=imes|ext[a-z]{0,2}\{|heta|frac)|\n(?=abla|eq\b|otin)|\r(?=ight|ho\b)"
)
_LOST_BY_OTHERS = re.compile(r"\x0c(?=rac)|\t(?=riangle)")
# What programs write for a missing value.
_MISSING = {"None", "N/A", "n/a", "NaN", "nan", "NULL", "null", "<NA>", "inf", "-inf"}
# Units that are seldom a name or a product of names.
_GLUED = r"(?:[kcm]m|[km]g|m[lL]|ft|min|hr|lb|oz|mph|k?Pa|kJ|Hz|k?m/[sh])"
_LETTERED = re.compile(
    r"^\(?[A-E][.)]\s+(?:[-\d$]|\\(?:frac|sqrt|pi|text))|^\([A-E]\)\s*\d|^(?i:option|choice)\s+\(?[A-E]\)?$"
)
# What a LaTeX answer never contains: pattern, what the pattern finds, and an example.
_UNFIT = (
    (r"^b?(['\"]).*\1$|[\"`#?]|[\[{]'", "quotes or marks of a program", '["7"]'),
    (r"[^\s$].*\\boxed", "a box behind other text", r"2+3 = \boxed{5}"),
    (r"</?[A-Za-z]+>", "a tag", "<answer>12</answer>"),
    (r"^\{[^{}]*,[^{}]*\}$", r"plain braces, where LaTeX writes a set as \{1, 2\}", "{1,2}"),
    (r"^-?[\d.,]+ [mgsLNJWVKA]\.?$", r"a unit of one letter, which LaTeX writes as \text{ m}", "5 m"),
    (rf"\d{_GLUED}(?:\^\{{?[23]\}}?)?$", r"a unit beside its number, which LaTeX writes as \text{ cm}", "5cm"),
    (r"[<>!]=|≈", r"a sign that LaTeX writes as \leq, \geq, \neq, or leaves out", "x <= 5"),
    (r"\d\s*\|\|", "two answers beside ||, so write one", "5 || five"),
    (r"^\d{4}-\d\d?-\d\d?$|^\d\d?/\d\d?/\d{4}$", "a date, which would be a difference or a fraction", "2024-01-01"),
    (r"\d\s*\([A-Za-z]{3,}[^()]*\)$", "a number twice, or a remark", "12 (twelve)"),
)  # fmt: skip


def read_gold(value: object, kind: AnswerKind) -> str:
    """Return the gold to compare answers of this kind with; raises ValueError with the reason if none can equal it.

    The reason completes a sentence about the value.
    """
    name = _KINDS.get(kind, kind)
    # To isinstance, True is an int.
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"is a {type(value).__name__} and no {name}")
    text = str(value)
    if not is_text(text):
        raise ValueError("has half a character (a lone surrogate) and is no text")
    lost = _LOST_IN_GOLD.search(text)
    if lost:
        raise ValueError(_lost_backslash(lost[0]))
    if kind != "letter" and _LETTERED.search(text.strip()):
        raise ValueError(f"has the letter of an option and is no {name} alone")
    if kind == "integer" and isinstance(value, str) and re.search(r"(?<![\d.])\d{1,3}\.000(?!\d)", value):
        raise ValueError("has a point that may separate thousands, so that it may be two integers")
    gold = canonical_gold(text, kind)
    if gold is None:
        raise ValueError(f"is no {name}")
    try:
        fault = _fault(text) if kind == "expression" else None
    except TooMuchWork:
        fault = "comparing it takes more work than a pair may"
    if fault:
        raise ValueError(f"is no {name} that an answer can equal: {fault}")
    return gold


def text_fault(text: str) -> str | None:
    """Return why a problem's text cannot be asked as it is, or None; completes a sentence about its row."""
    if not is_text(text):
        return "has half a character (a lone surrogate), which is no text"
    lost = _LOST_IN_TEXT.search(text)
    return _lost_backslash(lost[0]) if lost else None


def text_warning(text: str) -> str | None:
    """Return what is strange about a text that is still asked, or None; completes a sentence about its row."""
    lost = _LOST_BY_OTHERS.search(text)
    return _lost_backslash(lost[0]) if lost else None


def _lost_backslash(sign: str) -> str:
    return rf"has the control character {sign!r}, but JSON writes a backslash of LaTeX as \\"


def _fault(text: str) -> str | None:
    """Return why no answer can equal this expression; None if one can."""
    spelled, _ = readable(text)
    if text.strip() in _MISSING:
        return "it stands for a missing value"
    for pattern, fault, _ in _UNFIT:
        if re.search(pattern, spelled, re.DOTALL):
            return f"it has {fault}"
    if not re.search(r"[^\W_]|[^\x00-\x7f]", spelled):
        return "it has no number, name or word"
    for sign in spelled:
        if unicodedata.category(sign) in ("No", "Nl"):  # other numbers, such as a circled one, and Roman numerals
            return f"LaTeX has another form of {sign}"
    if any(unicodedata.category(sign) == "Cf" for sign in spelled):
        return "it has an invisible sign"
    for part, spelling in _in_latex(text):
        # An answer in proper LaTeX must equal this gold.
        is_equal, *_ = compare(text.replace(part, spelling), text)
        if not is_equal:
            hint = f"which LaTeX writes as {spelling}" if spelling else "so leave it out"
            return f"it has {part.strip()}, {hint}"
    first, *others = re.split(r"\s+or\s+", text.strip())
    for other in others:
        is_equal, *_ = compare(first, other)
        if is_equal:
            return "it has one answer twice beside or"
    if _is_sentence(text):
        return "it is a sentence"
    return None


@cache
def _names() -> re.Pattern[str]:
    """LaTeX's functions and Greek letters where they lack their backslash."""
    from sympy.printing.latex import accepted_latex_functions, greek_letters_set

    may_be_products = {"re", "im", "xi", "mu", "nu"}  # of names: x times i
    names = sorted({*accepted_latex_functions, *greek_letters_set} - may_be_products)
    return re.compile(rf"(?<![\\A-Za-z.])(?:{'|'.join(names)})(?![A-Za-z])")


def _in_latex(text: str) -> Iterator[tuple[str, str]]:
    r"""Each name of a function or letter without its backslash, unit and sign of money, and how LaTeX writes it."""
    bare = TEXT_COMMAND.sub(" ", text)
    for name in _names().findall(bare):
        yield name, rf"\{name}"
    for unit in re.findall(r"(?<=\d) [A-Z]{2,}$", bare.strip()):  # 5 USD
        yield unit, rf"\text{{{unit}}}"
    for sign in bare:
        if unicodedata.category(sign) == "Sc" and sign != "$":
            yield sign, ""


def _is_sentence(text: str) -> bool:
    r"""True for four words beside numbers or signs, or for many words. The contents of `\text{}` do not count."""
    bare = _COMMANDS.sub(" ", TEXT_COMMAND.sub(" ", text))
    has_numbers = re.search(r"[\d=+*/^<>]", bare)
    most_words = 3 if has_numbers else _MOST_WORDS
    return len(_WORD.findall(bare)) > most_words
