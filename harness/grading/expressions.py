r"""Equality of two answers written as LaTeX: both are taken apart alike, and math-verify reads the single expressions.

The library alone accepts too much: it drops number bases, reads lists as sets, rounds to six decimals, takes any two
equations without solutions for equal, and picks a number out of what it cannot parse. So both sides are brought into
one spelling and taken apart into lists, relations, brackets and matrices; what is left are expressions. Two of those
are equal if they agree where numbers are put for their names, or, where they have no value, if the library says so.
"""

import functools
import logging
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_MAX_CHARS = 300  # Nothing longer is calculated: it is equal only if it is written the same.

# Words that make another number, or no number, of the number before them.
# fmt: off
NOT_UNITS = frozenset({
    "i", "e", "j", "pi", "hundred", "hundreds", "thousand", "thousands", "million", "millions", "billion", "billions",
    "trillion", "trillions", "dozen", "dozens", "half", "halves", "third", "thirds", "quarter", "quarters", "tenth",
    "tenths", "hundredth", "hundredths", "squared", "cubed", "factorial", "times", "mod", "modulo", "base", "or", "and",
    "not", "to", "plus", "minus", "over", "if", "for", "where", "when",
})
# fmt: on
_UNIT_WORDS = re.compile(r"(?:[^\W\d_]|[ .,/()°²³¹⁻~-]|\^[23])*+")
TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it|sf)|mbox|operatorname)\s*+"
_TEXT_COMMAND = re.compile(rf"{TEXT}\{{([^{{}}]*+)\}}")
_UNIT = rf"{TEXT}\{{[^{{}}]*+\}}(?:\s*\^\s*(?:\{{\s*-?\d\s*\}}|\d))?"
_FINAL_UNITS = re.compile(rf"(?<=[\w)}}])\s*(?P<units>{_UNIT}(?:(?:\s|\\cdot|/)*{_UNIT})*)[\s.]*$")
_LEAD = re.compile(
    r"^(?:(?:the|final|answer|value|result)\s+)*(?:is|are|equals?|equal to|exactly|simply)\b\s*(?=[-\d.\\(])", re.I
)
_CHARACTERS = str.maketrans({
    "²": "^2", "³": "^3", "\u2212": "-", "–": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "≤": r"\leq ",
    "≥": r"\geq ", "≠": r"\neq ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "°": "", "′": "'",
    "~": " ", "\n": " ",
})  # fmt: skip
_SAME_COMMAND = {
    "": r"\left \right \displaystyle \big \Big \bigl \bigr \Bigl \Bigr \degree \degrees",
    " ": r"\quad \qquad", "<": r"\lt", ">": r"\gt", ":": r"\colon", r"\{": r"\lbrace", r"\}": r"\rbrace",
    r"\leq ": r"\le \leqslant", r"\geq ": r"\ge \geqslant", r"\neq ": r"\ne", r"\emptyset ": r"\varnothing",
    r"\ldots ": r"\dots \cdots", r"\frac": r"\dfrac \tfrac", r"\cup ": r"\bigcup", "(": r"\langle", ")": r"\rangle",
}  # fmt: skip
_COMMANDS = {command: new for new, commands in _SAME_COMMAND.items() for command in commands.split()}
_END = "(?![A-Za-z])"
_TH = rf"(?:{TEXT}\{{\s*(?:st|nd|rd|th)\s*\}}|(?:st|nd|rd|th){_END})"

# One spelling of what can be spelled in several ways, in this order; `(?<!\\)` spares the `\\` between matrix rows.
_SPELLINGS = [(re.compile(pattern), new) for pattern, new in (
    (r"\\\$|\$|(?<!\\)\\[()]|(?<!\\)\\[\[\]]", ""),
    (r"√\s*(\d+)", r"\\sqrt{\1}"),
    (r"√", r"\\sqrt "),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\[A-Za-z]+\s*", lambda match: _COMMANDS.get(match[0].strip(), match[0])),
    (r"(?<=\d)(?:,(?:\\[!,])|\{,\}(?:\\!)?|\\[,!])\s*(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\!|\{(?=[:,]\})(?<=\{)|(?<=\{[:,])\}", ""),
    (r"(?<!\\)\\[,;: ]", " "),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\^(?:\\prime|\{\\prime\})", "'"),
    (rf"\^\s*(?:\\circ{_END}|\{{[\s\\,]*\\circ\s*\}})(\s*$)?", lambda m: "" if m[1] is None else r"\text{degrees}"),
    (r"(?<!\\)\\?%", ""),
    (rf"(?<=\d)\s*(?:\^\{{{_TH}\}}|\^?{_TH})", ""),
    (r"(?<=\d)\s*([AaPp])\.?[Mm]\b\.?", r"\\text{\1m}"),
    (r"\\\\\[[^\]]*\]", r"\\\\"),
    (r"\\(?:text|mbox)\s*\{\s*(?:,\s*)?(?:and|or)\s*\}|(?<=[\s,}])(?:and|or)(?=\s)", ","),
    (r",(?:\s*,)+", ","),
    (r"(?<![\w.])(\d+(?:\.\d*)?)\s*[eE]([+-]?\d{1,3})(?!\w)", r"\1 \\cdot 10^{\2}"),
    (r"(?<=\d)\s*[x*]\s*(?=10\s*\^)", r" \\cdot "),
    (r"10\s*\^\s*([+-]?\d+)", r"10^{\1}"),
    (r"(?<!\d)\.(?=\d)", "0."),
    (r"(?<=\d)\.(?![\d\\])", ""),
    (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}"),
    (r"\((\d+)\)\s*_", r"\1_"),
    (r"_\s*([A-Za-z0-9])(?![A-Za-z0-9])", r"_{\1}"),
    (r"(^|[=,(\[])\s*\+", r"\1"),
)]  # fmt: skip
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")


def is_unit(words: str) -> bool:
    """Words that may follow a number and leave it the same number."""
    found = {word if len(word) == 1 else word.lower() for word in re.findall("[A-Za-z]+", words)}
    return bool(_UNIT_WORDS.fullmatch(words)) and NOT_UNITS.isdisjoint(found)


class Form(NamedTuple):
    """An answer in one spelling, and the letters and powers of the units that were taken off."""

    text: str
    unit: str = ""


def readable(answer: str) -> Form:
    r"""The answer in one spelling: no `\left`, `\dfrac`, `$`, thousands separators, percent signs or final units."""
    text = answer.translate(_CHARACTERS)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    if not re.search(r"[(\[]|\\\{", text) or ", " in text:  # "(1,234)" is a pair
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    items, unit = [], ""
    for item in split(text, _COMMAS)[0]:
        units = _FINAL_UNITS.search(item)
        if units and all(is_unit(words) for words in _TEXT_COMMAND.findall(units["units"])):
            item = item[: units.start()]
            unit += re.sub(r"[\W_]", "", _TEXT_COMMAND.sub(r"\1", units["units"])).lower()
        items.append(_TEXT_COMMAND.sub(r" \1 ", item).strip())
    text = re.sub(r"\s+", " ", ", ".join(items)).strip(" .")
    return Form(_LEAD.sub("", text), unit)


_COMMAS, _UNION = (",", ";"), (r"\cup",)
_TURNED = {">": "<", r"\geq": r"\leq"}
_RELATIONS = ("=", "<", r"\leq", r"\neq", r"\in", *_TURNED)


def split(text: str, separators: Iterable[str]) -> tuple[list[str], list[str]]:
    r"""The parts between separators that stand in no brackets and no matrix, and these separators."""
    depth, parts, found = 0, [""], []
    for token in re.findall(r"\\[A-Za-z]+|\\.|.", text, re.DOTALL):
        depth += (token in ("(", "[", "{", r"\{", r"\begin")) - (token in (")", "]", "}", r"\}", r"\end"))
        if token in separators and depth <= 0:
            found.append(token)
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts], found


Verdict = tuple[bool, str]


def compare(answer: str, gold: str) -> tuple[bool, str, str, str]:
    """Equal or not, the rule that decided, and both sides as they were compared."""
    (left, unit), (right, wanted) = readable(answer), readable(gold)
    if not left or not right:
        return False, "one side says nothing", left, right
    if unit and wanted and not _same_unit(unit, wanted):
        return False, "other units", left, right
    return (*_same(left, right), left, right)


def _same_unit(unit: str, wanted: str) -> bool:
    """One unit abbreviates the other ("cm" and "centimeters", not "cm" and "m"), and both have the same powers."""
    units = [re.sub("^(?:cubic|cu)(.+)", r"\g<1>3", re.sub("^(?:square|sq)(.+)", r"\g<1>2", u)) for u in (unit, wanted)]
    short, long = sorted((re.sub(r"\d", "", u) for u in units), key=len)
    powers = [re.findall(r"\d", u) for u in units]
    return powers[0] == powers[1] and bool(re.match(".*".join(short), long))


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _same(answer: str, gold: str) -> Verdict:
    """Take both sides apart as long as they have the same structure."""
    if _squeezed(answer) == _squeezed(gold):
        return True, "written the same"
    if max(len(answer), len(gold)) > _MAX_CHARS:
        return False, f"more than {_MAX_CHARS} characters, and not written the same"
    (kind, parts), (wanted, gold_parts) = _structure(answer), _structure(gold)
    if kind != wanted:
        return (
            _same_otherwise(answer, gold)
            or _same_otherwise(gold, answer)
            or (False, f"another structure: {kind} for {wanted}")
        )
    if kind == "expression":
        return _same_expression(answer, gold)
    if set(kind.split()) <= set(_RELATIONS):
        return _same_relation(kind, parts, gold_parts)
    names = {re.sub(r"_.*", "", name) for name in map(_name, parts) if name}
    # x = 1, y = 2 says which value is which.
    ordered = kind not in ("list", r"\{\}", r"\cup") or (len(names) > 1 and not any(map(_name, gold_parts)))
    return _same_parts(parts, gold_parts, ordered=ordered)


_BRACKETS = ("()", "(]", "[]", "[)", r"\{\}")
_MATRIX = re.compile(r"[(\[]?\s*\\begin\{(\w+)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s*[)\]]?", re.DOTALL)


def _structure(text: str) -> tuple[str, list[str]]:
    r"""What a text is made of, and its parts: "list", the relation signs, "\cup", brackets, "matrix", "expression"."""
    items, commas = split(text, _COMMAS)
    # 1 \pm 2 is two items.
    signed = ((item, "+-" if item.count(r"\pm") == 1 else "+") for item in items)
    items = [re.sub(r"(^|=)\s*\+", r"\1", item.replace(r"\pm", sign)) for item, both in signed for sign in both]
    if len(items) > 1:
        return "list", items
    sides, signs = split(text, _RELATIONS)
    if signs:
        turn = signs[0] in _TURNED
        return " ".join(_TURNED.get(sign, sign) for sign in signs[:: -1 if turn else 1]), sides[:: -1 if turn else 1]
    parts, unions = split(text, _UNION)
    if unions:
        return r"\cup", parts
    if (matrix := _MATRIX.fullmatch(text)) and r"\begin" not in matrix[2]:
        rows = [row.split("&") for row in matrix[2].split(r"\\") if row.strip()]
        name = matrix[1] if matrix[1] in ("vmatrix", "cases") else "matrix"
        return f"{name} {[len(row) for row in rows]}", [
            re.sub(r"^\s*(?:if|for|when)\s|^\s+|[\s,]+$", "", cell) for row in rows for cell in row
        ]
    opening, (inside, *after), closers = text[: 1 + text.startswith("\\")], *split(text, (")", "]", r"\}"))
    if after == [""] and opening + closers[0] in _BRACKETS:
        items, commas = split(inside[len(opening) :], _COMMAS)
        if commas or opening == r"\{":
            return opening + closers[0], items
    return "expression", [text]


def _same_parts(answer: list[str], gold: list[str], *, ordered: bool) -> Verdict:
    """Find for every part of the answer one of the gold's, in order or in any order; no part serves twice."""
    if len(answer) != len(gold):
        return False, f"{len(answer)} parts for {len(gold)}"
    left = list(gold)
    for part in answer:
        partners = left[:1] if ordered else sorted(left, key=lambda other: _squeezed(other) != _squeezed(part))
        found = next((other for other in partners if _same(part, other)[0]), None)
        if found is None:
            return False, f"nothing equals the part {part}"
        left.remove(found)
    return True, "parts equal in order" if ordered else "parts equal in any order"


_NAME = re.compile(
    r"(?:[A-Za-z]|[A-Z]{2,4}|[A-Za-z]{4,}(?: [A-Za-z]+)*|\\frac(?:\{(?:[^\d{}]|_\{\w\})*\}){2}|"
    r"\\(?!sqrt|frac|sin|cos|tan|log|ln|exp)[A-Za-z]+(?:\{[A-Za-z ]+\}| ?[A-Z ]+)?)"
    r"'*(?:_(?:\w|\{[^{}]*\})|\^[a-z])?'*(?:\([^()]*\))?|\([A-Za-z](?:, ?[A-Za-z])+\)"
)


def _name(text: str) -> str:
    """The name before a value (`x = 5`), or nothing."""
    sides, signs = split(text, _RELATIONS)
    return sides[0] if set(signs) in ({"="}, {r"\in"}) and _NAME.fullmatch(sides[0]) else ""


def _same_otherwise(answer: str, gold: str) -> Verdict | None:
    r"""Two structures that may say the same: `x = 5` and 5, `x > 2` and (2, \infty), a list with and without braces."""
    (kind, parts), (wanted, gold_parts) = _structure(answer), _structure(gold)
    signs = set(kind.split())
    if signs == {"="} == set(wanted.split()) and _name(answer):
        steps = [_same(f"{parts[0]} = {part}", gold) for part in parts[1:]]
        return min(steps, key=lambda step: step[0])
    if signs in ({"="}, {r"\in"}):
        same = all(_same(value, gold)[0] for value in parts[bool(_name(answer)) :])
        return same, "the value of a name, or a calculation that ends in the value" if same else (
            "an equation is no value unless its left side is a single name"
        )
    if signs <= {"<", r"\leq"} and wanted in _BRACKETS and (interval := _interval(kind, parts)):
        return _same(interval, gold)
    if kind in ("()", r"\{\}") and (wanted == "list" or kind != "()"):
        items = gold_parts if wanted == "list" else [gold]
        return _same_parts(parts, items, ordered=kind == "()")
    if kind == r"\cup" and wanted == "list" and split(gold_parts[0], _RELATIONS)[1]:
        return _same_parts(parts, gold_parts, ordered=False)
    return None


def _interval(kind: str, parts: list[str]) -> str:
    """The interval that `1 < x \leq 2` or `x > 1` stands for; nothing if no name is between its ends."""
    signs = kind.split()
    if len(signs) == 1:
        below = bool(_NAME.fullmatch(parts[0]))
        parts, signs = ([r"-\infty", *parts], ["<", *signs]) if below else ([*parts, r"\infty"], [*signs, "<"])
    if len(signs) != 2 or not _NAME.fullmatch(parts[1]):
        return ""
    return f"{'(['[signs[0] != '<']}{parts[0]}, {parts[2]}{')]'[signs[1] != '<']}"


def _same_relation(kind: str, parts: list[str], gold: list[str]) -> Verdict:
    """Equal side by side, or a constant multiple once all stands on one side."""
    for sides in (parts, parts[::-1])[: 2 if kind in ("=", r"\neq") else 1]:
        if all(_same(side, other)[0] for side, other in zip(sides, gold, strict=True)):
            return True, "relations with equal sides"
    if len(parts) == 2 and kind != r"\in" and not _AS_WRITTEN.search("".join((*parts, *gold))):
        forms = _parsed([f"({left}) - ({right})" for left, right in (parts, gold)])
        ratios = [value / other for value, other, _ in _values(forms, (*_POSITIVE, *_SIGNED)) if other]
        factor: Any = ratios[0] if len(ratios) > 1 else 0
        constant = all(abs(ratio - factor) < 1e-15 * abs(factor) for ratio in ratios)
        # 4x = 8 for x = 2 is not in lowest terms.
        lowest = abs(factor) < 1.000001 or any(re.search(r"\\frac|/|\.", side) for side in gold)
        if factor and constant and lowest and (kind in ("=", r"\neq") or factor.is_positive):
            return True, "the same relation with all on one side"
    return False, "another relation"


_PLAIN_WORDS = re.compile(r"(?=.*[^\W\d_]{3}|no$)[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*")
_AS_WRITTEN = re.compile(r"\d\s*_|\d\s+\d|(?<![A-Za-z\\])[A-Za-z]{3,}\s+\d|'|\\(?:ldots|angle|triangle)(?![A-Za-z])|:")
_WORDS_AFTER = re.compile(r"(.*[\d}])\s*(?<![A-Za-z])((?:[A-Za-z]{2}|[^\W\d_A-Za-z])[^\d_\\=<>,;(){}^*+]*)")


def _same_expression(answer: str, gold: str) -> Verdict:
    """Compare what is no list, relation, bracket or matrix: an option, words, or an expression for the library."""
    option = re.fullmatch(r"\(?([A-F])\)?", gold)
    if option and max(len(gold), len(answer)) > 1:
        given = re.match(r"\(([A-F])\)(?!\s*,)|([A-F])(?:[).:]|$)", answer)
        return given is not None and option[1] in given.groups(), "the letter of an option"
    if _PLAIN_WORDS.fullmatch(gold):
        words = [_squeezed(re.sub(r"^(?:an?|the)\s", "", side.casefold())) for side in (answer, gold)]
        return words[0] == words[1], "words are compared letter by letter"
    if _PLAIN_WORDS.fullmatch(answer) and len(answer) > 3:
        return False, "words for an expression"
    answer = re.sub(r"^\([A-F]\)\s*(?=[-\d\\])", "", answer)
    for side, other in ((gold, answer), (answer, gold)):
        after = _WORDS_AFTER.fullmatch(other)
        if after and is_unit(after[2]) and not re.search(r"(?<![A-Za-z\\])[A-Za-z]", side):
            return _same(side, after[1].strip())
    if _AS_WRITTEN.search(f"{answer};{gold}"):
        return False, "bases, primes, angles, dots, ratios and numbers side by side must be written the same"
    forms = _parsed([answer, gold])
    # A decimal beside none may be rounded to six places, as the library has it.
    limit = 1e-18 if ("." in answer) == ("." in gold) else 1.001e-6
    close = [
        [abs(difference) <= limit * min(1, abs(other)) for _, other, difference in _values(forms, points)]
        for points in (_POSITIVE, _SIGNED)
    ]
    if not all(close[0]) or (close[1] and all(close[1])):
        return all(close[0]), "the values where numbers are put for the names"
    # Without time limits of its own, which need the main thread's signals: the worker as a whole is killed.
    same = None not in forms and _library().verify(
        forms[1], forms[0], allow_set_relation_comp=True, timeout_seconds=None
    )
    return bool(same), "math-verify"


@functools.cache
def _library() -> Any:
    """The library, imported by the workers that need it alone, as sympy takes half a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


def _parsed(texts: list[str]) -> list[Any]:
    """The texts' sympy objects with decimals as fractions, None for one that the library cannot read as a whole.

    `x` and `X` are one name, as the library has it, unless a text uses both.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    is_complex = any(re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", text) for text in texts)
    letters = [set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))) for text in texts]
    one_case = not any(letter.upper() in found for found in letters for letter in found if letter.islower())
    parsed = []
    for text in texts:
        # To the library E_1 is a mistake, \gamma before a bracket the gamma function, and 3(2) a sum.
        text = re.sub(r"(?<![A-Za-z\\])[eE]_", r"\\varepsilon_", re.sub(rf"\\gamma{_END}", r"\\upsilon_{g}", text))
        text = re.sub(r"_\{\\([A-Za-z]+)\}", r"_{\1}", text)
        text = re.sub(r"(?<=[\d)])\s*\((?=[^,]*\))", r" \\cdot (", text)
        text = re.sub(r"(?<![\d.])(\d+)\.(\d+)", lambda m: rf"(\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}})", text)
        try:
            form = latex2sympy(
                text,
                is_real=not is_complex,
                normalization_config=NormalizationConfig(malformed_operators=True, boxed="none"),
                conversion_config=ConversionConfig(lowercase_symbols=one_case),
            )
            form = form.subs(sympy.Symbol("i", real=False), sympy.I) if is_complex else form
            parsed.append(None if form.has(sympy.zoo, sympy.nan) else form)
        except MemoryError:
            raise
        except Exception:
            parsed.append(None)
    return parsed


_POSITIVE, _SIGNED = (1, 5), (-3, 97)


def _values(forms: list[Any], points: tuple[int, ...]) -> list[tuple[Any, Any, Any]]:
    """For each way to put numbers for names: both values and their difference, 30 digits each; [] without values."""
    import sympy

    if not all(isinstance(form, sympy.Expr) and not form.is_Matrix for form in forms):
        return []
    functions = set().union(*(form.atoms(sympy.core.function.AppliedUndef) for form in forms))
    names = {function: sympy.Symbol(str(function)) for function in functions}
    forms = [form.xreplace(names) for form in forms]
    symbols = sorted(forms[0].free_symbols | forms[1].free_symbols, key=str)
    values = []
    for base in points:
        point = {symbol: sympy.Rational(base * (n * n + 3 * n + 5) + n, 7) for n, symbol in enumerate(symbols)}
        try:
            first, second = (form.xreplace(point) for form in forms)
            found = first.evalf(30), second.evalf(30), (first - second).evalf(30)
        except MemoryError:
            raise
        except Exception:  # what is no number raises many things
            continue
        if all(value.is_number and value.is_finite for value in found):
            values.append(found)
    return values
