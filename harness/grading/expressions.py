r"""Equality of two answers written as LaTeX, where math-verify alone accepts too much.

Both sides are brought into one spelling and taken apart into lists, relations and brackets. What is left are
expressions: they are equal if the library says so and their values where numbers are put for the names agree.
"""

import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import permutations, product
from typing import Any

_MAX_CHARS = 300  # Nothing longer is calculated: it is equal only if it is written the same.
_MOST_DIGITS = 200_000
_MOST_DIGITS_OF_EXPONENT = 300.0  # of e, whose power is a rounded number that takes 24 ms then
_GROWING = {"factorial", "factorial2", "subfactorial", "binomial", "gamma", "RisingFactorial", "FallingFactorial"}

# A word that makes another number, or no number, of the number before it.
_NOT_UNIT = re.compile("(?:i|e|pi|hundred|thousand|[mbtr]+illion|dozen|hal[fv]e?|third|squared|cubed|time|base|not)s?")
_TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it|sf)|mbox|operatorname)\s*+"
_POWER = r"\^\s*(?:\{\s*-?\d\s*\}|-?\d)"
TEXT_COMMAND = re.compile(rf"{_TEXT}\{{((?:{_POWER}|[^{{}}])*+)\}}")
_UNIT = rf"{_TEXT}\{{(?:{_POWER}|\\cdot|[^\W\d_]|[ .,/()⁻-])*+\}}(?:\s*{_POWER})?"
_FINAL_UNITS = re.compile(rf"(?<=[\w)}}])\s*({_UNIT}(?:(?:\s|\\cdot|/)*{_UNIT})*)[\s.]*$")
# Other words of two or three letters may be products of names, unless a longer word follows.
_SHORT = r"[kcdmn]m|kg|[mn]s|[kMG][WJN]|m[lL]|[kMG]?(?:Pa|Hz|eV)|(?:k?cal|mol|in|ft|yd|mi|min|hr|sec|yr|lb|day)s?"
_WORD = r"[^\W\d_A-Za-z]|[^\W\d_]{4,}|[a-z]{2,3}(?= [a-z]{4})|[apAP]\.?[mM]"
_BARE_WORD = rf"(?:{_WORD}|(?:k?m/[sh]|{_SHORT}|oz|mph|rad|per|sq|men)(?:\^\{{?[23]\}}?)?)"
_BARE_UNITS = re.compile(rf"((?:\\[a-z]+|[^A-Za-z\\])*[\d}}])\s+({_BARE_WORD}(?:[ ./-]+{_BARE_WORD})*)[\s.]*$")
_LEAD = re.compile(r"^(?:(?:the|final|answer)\s+)*(?:(?:is|are|equals?|equal to)\b|answer:)\s*(?=[-\d.\\(])", re.I)
_SPELLED_AS = {
    "": r"\left \right \displaystyle \big \Big \bigl \bigr \Bigl \Bigr", "<": r"\lt", ">": r"\gt", "odot": r"\odot",
    r"\{": r"\lbrace", r"\}": r"\rbrace", "(": r"\langle", ")": r"\rangle", " ": r"\quad \qquad ~", "-": "\u2212 –",
    r"\leq ": r"\le \leqslant ≤", r"\geq ": r"\ge \geqslant ≥", r"\neq ": r"\ne ≠", r"\emptyset ": r"\varnothing",
    r"\ldots ": r"\dots \cdots", r"\frac": r"\dfrac \tfrac", r"\cup ": r"\bigcup ∪", r"\in ": "∈", r"\sqrt ": "√",
    "μ": "µ", "^1": "¹", "^2": "²", "^3": "³", r"\pi ": "π", r"\cdot ": "·", r"\infty ": "∞", r"^\circ ": "°",
    r"\mathbb{R}": r"\R \reals ℝ",
}  # fmt: skip
_SPELLED = {old: new for new, spelled in _SPELLED_AS.items() for old in spelled.split()}


def _repeating(decimal: re.Match[str]) -> str:
    r"""`0.1\overline{6}` as a fraction, (16 - 1) / 90."""
    once, again = decimal[1] + decimal[2], decimal[3]
    return rf"\frac{{{int(once + again) - int(once)}}}{{{'9' * len(again)}{'0' * len(decimal[2])}}}"


_SINE = r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log)"
_INEQUALITIES = re.compile(r"[^,;]*(?:[<>]|\\[lg]eq)[^,;]*")  # a list of them says "and" or "or" with its commas
# One spelling of what can be spelled in several ways: pattern, replacement and an example, in the order of use.
# `(?<!\\)` spares the `\\` between matrix rows.
SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str], str], ...] = (
    (rf"^{_TEXT}\{{(-?[\d.,]+ [^{{}}]*)\}}$", r"\1", r"\text{5 cm} -> 5 cm"),
    (r"^\$?\\\$\s*(\d(?:\d|\.\d|\{?,\}?|\\!)*)\.?\$?$", r"\1\\text{dollars}", r"\$18.90 -> 18.90\text{dollars}"),
    (r"√\s*(\d+)", r"\\sqrt{\1}", r"√15 -> \sqrt{15}"),
    (r"\\[A-Za-z]+\s*|[^\x00-}]", lambda match: _SPELLED.get(match[0].strip(), match[0]),
     r"\dfrac 12 ≤ 3 -> \frac12 \leq  3"),
    (r"(?<=\d)(?:,?\\[,!]|\{,\}(?:\\!)?)\s*(?=\d{3}(?!\d))", "", r"10,\!080 + 10{,}080 -> 10080 + 10080"),
    (r"\\?\$|(?<!\\)\\[()\[\]]|(?<!\\)\\!\s*|(?<!\\)\\?%", "", r"\(5\!:\!2\) \% -> 5:2 "),
    (r"\{([:,])\}", r"\1", "1{:}2 -> 1:2"),
    (r"(?<![\d.,(\[])(?<!\\\{)[1-9]\d{0,2}(?:,\d{3})+(?![\d,])", lambda match: match[0].replace(",", ""),
     "1,625,000 -> 1625000"),
    (r"(?<!\\)\\[,;: ]", " ", r"(1,\;2) -> (1, 2)"),
    (r"\\\{\s*\\\}", r"\\emptyset ", r"\{ \} -> \emptyset "),
    (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})(?:\s*([CF])(?![A-Za-z]))?", r"\\text{degrees \1}",
     r"25^{\circ}C -> 25\text{degrees C}"),
    (rf"\\frac\s*\{{\s*({_UNIT})\s*\}}\s*\{{\s*({_UNIT})\s*\}}", r"\1/\2",
     r"\frac{\text{m}}{\text{s}^2} -> \text{m}/\text{s}^2"),
    (rf"(?<=\d)\s*\\mu\s*({_TEXT}\{{)\s*", r"\1μ", r"5 \mu\text{m} -> 5\text{μm}"),
    (rf"(?<=\d)\s*\^?\{{?(?:{_TEXT}\{{)?\s*(?:st|nd|rd|th)(?![A-Za-z])\s*\}}{{0,2}}", "", r"12^{\text{th}} -> 12"),
    (rf",?\s*(?:{_TEXT}\{{[\s,]*(?:and|or)\s*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))(?:\s*,)?",
     lambda match: (r" \land ", r" \lor ")["or" in match[0]] if _INEQUALITIES.fullmatch(match.string) else ", ",
     "x<1 or x>2 -> x<1 \\lor  x>2"),
    (r"(?<![\w.])(\d+(?:\.\d*)?)\s*[eE]([+-]?\d{1,3})(?!\w)", r"\1 \\cdot 10^{\2}", r"4.5e33 -> 4.5 \cdot 10^{33}"),
    (r"(?<=\d)\s*(?:[x*]|\\times|\\cdot)\s*10\s*\^\s*(\{)?([+-]?\d+)(?(1)\})", r" \\cdot 10^{\2}",
     r"4.6 x 10^-24 -> 4.6 \cdot 10^{-24}"),
    (r"(?<!\d)\.(?=\d)", "0.", "-.5 -> -0.5"),
    (r"(\d+)\.(\d*)\\(?:overline|bar)\s*\{?(\d++)\}?+(?!\s*_)", _repeating, r"0.1\overline{6} -> \frac{15}{90}"),
    (r"(?<=\d)\.(?![\d\\])", "", "3./4 -> 3/4"),
    (r"(?<![\d.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)", r"\1\\frac{\2}{\3}", r"1 1/2 -> 1\frac{1}{2}"),
    (r"\((\d[\dA-F]*)\)\s*_", r"\1_", "(2A5)_{16} -> 2A5_{16}"),
    (r"([^,;]*)\\pm(?!od)([^,;]*?)\.?(?=[,;]|$)", r"\1+\2, \1-\2", r"2 \pm 1 -> 2 + 1, 2 - 1"),
    (r"(^|[=,(\[])\s*(?:\+|\\approx(?![a-z]))", r"\1", r"x =\approx 3 -> x = 3"),
    # The argument of a function ends with the next product sign; the library reads `\sin^{2}(x)` and not `\sin^2(x)`.
    (rf"({_SINE}(?:\s*[\^_]\s*(?:\{{-?\d+\}}|\d))?)\s*(?![\^_(])"
     r"((?:[\w\s^]|\\(?!cdot|times|sin|cos|tan|ln|log|exp)[a-z]+|\{[^{}]*\})+?)\s*(?=\\cdot|\\times)", r"\1(\2)",
     r"\sin x \cdot 2 -> \sin(x)\cdot 2"),
    (rf"({_SINE}\s*[\^_])\s*(\d)\s*(?=\()", r"\1{\2}", r"\sin^2(x) -> \sin^{2}(x)"),
    (r"(^|\\in\s*)\(\s*-\s*\\infty\s*,\s*\+?\s*\\infty\s*\)$", r"\1\\mathbb{R}",
     r"x \in (-\infty, \infty) -> x \in \mathbb{R}"),
)  # fmt: skip


def readable(answer: str) -> tuple[str, str]:
    r"""The answer in one spelling, without `\left`, `\dfrac`, `$`, marks of thousands or final units; and its units."""
    for pattern, new, _ in SPELLINGS:
        answer = re.sub(pattern, new, answer)
    items, units = zip(*map(_without_unit, split(answer, ",;")[0]), strict=True)
    text = _LEAD.sub("", re.sub(r"\s+", " ", TEXT_COMMAND.sub(r" \1 ", ", ".join(items))).strip(" ."))
    return text, ";".join(units if len({*units, ""}) > 2 else {max(units)})  # one unit may stand for all items


# Units in one spelling: M stays for mega, and M, S, G and H alone are no meter, second, gram and hour.
_SYMBOLS_OF = {name: symbol for symbol, *names in map(str.split, (
    "m meter metre", "g gram", "s second sec", "min minute", "h hour hr", "d day", "yr year yr", "in inche inch",
    "ft foot feet", "yd yard yd", "mi mile", "lb pound lb", "oz ounce", "l liter litre", "n newton", "j joule",
    "w watt", "v volt", "a ampere amp", "t tesla", "pa pascal", "hz hertz", "mol mole", "ev electronvolt",
    "cal calorie", "k kelvin", "c coulomb celsius", "f fahrenheit", "degree deg degree", "rad radian",
)) for name in names}  # fmt: skip
UNIT_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str], str], ...] = (
    (r"⁻\^?", " -", "s⁻^2 -> s -2"),
    (r"[{}^]|\\cdot", " ", r"m^{2} -> m  2 "),
    (r"\.", "", "p.m. -> pm"),
    (r"\b([kM]?[NJWV])([msh])\b", r"\1 \2", "kWh -> kW h"),
    (r"(?i)\bmph\b", "mi/h", "MPH -> mi/h"),
    (r"\b(?!(?:[MSGH]|pA)\b)(M(?=(?:Pa|Hz|eV|pc|[A-Zmgs])\b)|)(\w+)", lambda match: match[1] + match[2].lower(),
     "MPa Meter M -> Mpa meter M"),
    (rf"\b(kilo|centi|milli|mega|micro|nano|giga|deci|)({'|'.join(_SYMBOLS_OF)})s?\b",
     lambda match: {"mega": "M", "micro": "μ"}.get(match[1], match[1][:1]) + _SYMBOLS_OF[match[2]],
     "micrometers kilograms -> μm kg"),
    (r"\b(\w{3,})s\b", r"\1", "apples -> apple"),
    (r"\bsq(?:uare)? (\w+)", r"\1 2", "sq ft -> ft 2"),
    (r"\bcu(?:bic)? (\w+)", r"\1 3", "cubic cm -> cm 3"),
)  # fmt: skip


def _without_unit(item: str) -> tuple[str, str]:
    """A single item without its final unit, and the unit, each symbol with its power: "m1 s-2" for m/s^2."""
    item = _BARE_UNITS.sub(r"\1\\text{\2}", item)
    found = _FINAL_UNITS.search(item)
    unit = TEXT_COMMAND.sub(r" \1", found[1]) if found else ""
    if not found or any(map(_NOT_UNIT.fullmatch, re.findall("[a-z]+", unit.lower()))):
        return item, ""
    for pattern, new, _ in UNIT_SPELLINGS:
        unit = re.sub(pattern, new, unit)
    factors = [
        word + ("-" if under and "-" not in power else "") + (power or "1")
        for under, part in enumerate(re.split(r"/|\bper\b", unit))
        for word, power in re.findall(r"([^\W\d_]+)\s*((?:-?\d)?)", part)
    ]
    return item[: found.start()], " ".join(sorted(factors))


_TURNED = {">": "<", r"\geq": r"\leq"}
_RELATIONS = ("=", "<", r"\leq", r"\neq", r"\in", *_TURNED)


def split(text: str, separators: str | tuple[str, ...]) -> tuple[list[str], list[str]]:
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


def compare(answer: str, gold: str) -> tuple[bool, str, str, str]:
    """Equal or not, the rule that decided, and both sides as they were compared."""
    (left, unit), (right, wanted) = readable(answer), readable(gold)
    # Degrees beside a plain number may be its unit; a multiple of pi without a unit is in radians.
    if unit != wanted and ((unit and wanted) or ("degree1" in (unit, wanted) and r"\pi" in left + right)):
        return False, "other units", left, right
    left = left if _OPTION.fullmatch(right) else re.sub(r"^\([A-F]\) ?(?=[-\d.\\(])", "", left)
    return (*_same(left, right), left, right)


def _squeezed(text: str) -> str:
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", text))


def _same(answer: str, gold: str) -> tuple[bool, str]:
    """Take both sides apart as long as they have the same structure."""
    if _squeezed(answer) == _squeezed(gold):
        return True, "written the same"
    if max(len(answer), len(gold)) > _MAX_CHARS:
        return False, f"more than {_MAX_CHARS} characters, and not written the same"
    (kind, parts), (wanted, gold_parts) = _structure(answer), _structure(gold)
    if kind != wanted:
        other = _same_otherwise(answer, gold) or _same_otherwise(gold, answer)
        return other or (False, f"another structure: {kind} for {wanted}")
    if kind == "expression":
        return _same_expression(answer, gold)
    if kind.split()[0] in _RELATIONS:
        return _same_relation(kind, parts, gold_parts)
    return _same_parts(parts, gold_parts, ordered=not kind.startswith(("list", r"\{")))


_BRACKETS = ("()", "(]", "[]", "[)", r"\{\}")


def _structure(text: str) -> tuple[str, list[str]]:
    r"""What a text is made of, and its parts: "list", the relation signs, the brackets, or "expression"."""
    for separators in (",;", (r"\land", r"\lor")):
        items, found = split(text, separators)
        if found:
            return " ".join(("list", *sorted({*found} - {*",;"}))), items
    sides, signs = split(text, _RELATIONS)
    if signs:
        turn = -1 if signs[0] in _TURNED else 1
        return " ".join(_TURNED.get(sign, sign) for sign in signs[::turn]), sides[::turn]
    opening = text[: 1 + text.startswith("\\")]
    (inside, *after), closers = split(text, (")", "]", r"\}"))
    items, commas = split(inside[len(opening) :], ",;")
    if after == [""] and opening + closers[0] in _BRACKETS and (commas or opening == r"\{"):
        return opening + closers[0], items
    return "expression", [text]


def _same_parts(answer: list[str], gold: list[str], *, ordered: bool) -> tuple[bool, str]:
    """Find for every part of the answer one of the gold's, in order or in any order; no part serves twice."""
    left = list(gold)
    for part in answer:
        found = next((other for other in left[: 1 if ordered else None] if _same(part, other)[0]), None)
        if found is None:
            return False, f"nothing equals the part {part}"
        left.remove(found)
    return not left, f"parts equal in {'order' if ordered else 'any order'}, {len(left)} left over"


_INDICES = re.compile(r"_\w|_\{[^{}]*\}|\([A-Za-z0-9](?:, ?[A-Za-z])*\)|'|\^[a-z]$|\^\{-1\}(?=\()")
# A single name: `x`, `f(x)`, `a_1`, `\frac{dy}{dx}`, `(x, y)`, `Area`.
_NAME = re.compile(r"[A-Za-z]|[A-Z]{2,4}|[A-Za-z][A-Za-z ]{3,}|\\(?!sqrt|sin|cos|tan|log|ln|exp)[A-Za-z]+[A-Z {}a-z]*|")


def _same_otherwise(answer: str, gold: str) -> tuple[bool, str] | None:
    r"""Two structures that may say the same: `x = 5` and 5, `x > 2` and (2, \infty), a list with and without braces."""
    (kind, parts), (wanted, gold_parts) = _structure(answer), _structure(gold)
    signs, named = set(kind.split()), bool(_NAME.fullmatch(_INDICES.sub("", parts[0]).strip()))
    if signs == {"="} == set(wanted.split()) and named:
        parts = [f"{parts[0]} = {part}" for part in parts]
    if signs in ({"="}, {r"\in"}):
        values = all(_same(value, gold)[0] for value in parts[named:])
        return values, "the value of a name: an equation is a value only if its left side is a single name"
    if kind == r"list \land":
        for (sign, low), (other, high) in permutations(map(_structure, parts), 2):
            if len(parts) == len(low) == len(high) == 2 and low[1] == high[0]:  # x > 1 and x < 2 is 1 < x < 2
                return _same(f"{low[0]} {sign} {low[1]} {other} {high[1]}", gold)
    if (kind == "list" and wanted.startswith("list")) or (kind in ("list", r"list \lor") and r"\cup" in gold):
        return _same_parts(parts, split(gold, (r"\cup", r"\land", r"\lor"))[0], ordered=False)
    if kind == "()" and (column := re.fullmatch(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}", gold)):
        return _same_parts(parts, split(column[1], (r"\\",))[0], ordered=True)
    if (kind == r"\{\}" and gold != r"\emptyset") or (kind == "()" and wanted == "list"):
        return _same_parts(parts, gold_parts if wanted == "list" else [gold], ordered=kind == "()")
    if signs <= {"<", r"\leq"} and wanted in _BRACKETS:
        return _same_expression(answer, gold)
    return None


def _same_relation(kind: str, parts: list[str], gold: list[str]) -> tuple[bool, str]:
    """Equal side by side, or a constant multiple once all stands on one side."""
    symmetric = kind in ("=", r"\neq")
    for sides in (parts, parts[::-1])[: 1 + symmetric]:
        if all(_same(side, other)[0] for side, other in zip(sides, gold, strict=True)):
            return True, "relations with equal sides"
    if len(parts) == 2 and kind != r"\in" and not _AS_WRITTEN.search("".join((*parts, *gold))):
        with suppress(Exception):  # sympy raises many things
            left, right = _parsed([f"({left}) - ({right})" for left, right in (parts, gold)], _RELATION_BASES)
            ratio, *others = [_value_at(left / right, *at) for at in (_SMALL, *((base, 1) for base in _RELATION_BASES))]
            constant = all(abs(other - ratio) < 1e-15 * abs(ratio) for other in others)
            # 4x = 8 for x = 2 is not in lowest terms.
            lowest = abs(ratio) < 1.000001 or any(re.search(r"\\frac|/|\.", side) for side in gold)
            if constant and lowest and (ratio.is_positive or symmetric):
                return True, "the same relation with all on one side"
    return False, "another relation"


_OPTION = re.compile(r"\(?([A-F])\)?")
_PLAIN_WORDS = re.compile(r"(?=.*[^\W\d_]{3}|no$)(?:an? |the )?([^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*)", re.IGNORECASE)
_AS_WRITTEN = re.compile(
    r"\d\s*_|(?<!\\log_)\d\s+\d|(?<![A-Za-z\\])[A-Za-z]{3,}\s+\d|'|\\(?:ldots|angle|triangle)(?![A-Za-z])|:|!\s*!|"
    # Products of vectors, and what the library takes for a transpose.
    r"\\nabla|\\times\s*\\(?:vec|hat|overrightarrow)|\^\s*(?:T|\{\s*T\s*\})(?![A-Za-z])"
)


def _same_expression(answer: str, gold: str) -> tuple[bool, str]:
    """Compare what is no list, relation, bracket or matrix: an option, words, or an expression for the library."""
    option, chosen = _OPTION.fullmatch(gold), re.match(r"\(?([A-F])(?:[).:]|$)", answer)
    if option and chosen:
        return option[1] == chosen[1], "the letter of an option"
    words, wanted = (_PLAIN_WORDS.fullmatch(side) for side in (answer, gold))
    if wanted or (words and len(answer) > 3):
        same = words and wanted and _squeezed(words[1]).lower() == _squeezed(wanted[1]).lower()
        return bool(same), "words are compared letter by letter"
    if _AS_WRITTEN.search(f"{answer};{gold}"):
        return False, "bases, primes, angles, dots, ratios, !! and numbers side by side must be written the same"
    from math_verify import verify
    from sympy import Expr

    # A decimal beside none may be rounded to six places, as the library has it.
    limit = 1.001e-6 if ("." in answer) != ("." in gold) and re.search(r"\.\d{6}", f"{answer};{gold}") else 1e-18
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    with suppress(Exception):
        left, right = _parsed([answer, gold], (1, *_EXPRESSION_BASES))
        if not isinstance(left, Expr) or not isinstance(right, Expr) or left.is_Matrix or right.is_Matrix:
            # Without time limits of its own, which need the main thread's signals: the worker as a whole is killed.
            return verify(right, left, allow_set_relation_comp=True, timeout_seconds=None), "math-verify"
        rest = left - right  # and 2 \cdot 2^{999} is calculated before it is rounded
        rest = rest.replace(lambda part: part.is_Add or part.is_Mul or part.is_Pow, lambda part: part.func(*part.args))
        if abs(_value_at(rest, 1)) > limit * min(1, abs(_value_at(right, 1))):
            return False, "the values where numbers are put for the names"
        if rest.free_symbols and any(part.func.__name__ in _GROWING for part in rest.find(Expr)):
            # sympy would put in numbers of its own choice, and calculate for hours.
            return _equal_at_points(left, right), "values at several points"
        return not rest.free_symbols or bool(rest.equals(0)), "values, and sympy where there are names"
    return False, f"the library cannot read it, or its value has more than {_MOST_DIGITS:,} digits"


def _value_at(form: Any, base: int, parts: int = 1, names: list[Any] | None = None) -> Any:
    """The form's value with numbers, divided by `parts`, for its names, or for these names in this order."""
    from sympy import Rational

    names = sorted(form.free_symbols, key=str) if names is None else names
    return form.subs({name: Rational(_number(n, base), parts) for n, name in enumerate(names)}).evalf(30)


def _equal_at_points(left: Any, right: Any) -> bool:
    """Whether two forms agree wherever the left one is finite and not zero, with the names' numbers in either order."""
    names = sorted(left.free_symbols | right.free_symbols, key=str)
    points = product((_SMALL, *((base, 1) for base in _EXPRESSION_BASES)), (names, names[::-1]))
    pairs = [[_value_at(form, base, parts, order) for form in (left, right)] for (base, parts), order in points]
    finite = [(one, other) for one, other in pairs if one.is_finite and not one.is_zero]
    return bool(finite) and all(other.is_finite and abs(one - other) <= 1e-12 * abs(one) for one, other in finite)


# Base and parts of small numbers for names, where no power of e is lost; bases for relations, and for expressions.
_SMALL, _RELATION_BASES, _EXPRESSION_BASES = (1, 11), (1, 5, -3, 97), (2, 3)


def _number(n: int, base: int) -> int:
    return base * (n * n + abs(base) * n + 5) + n


def _digits(form: Any, names: list[Any], base: int) -> float:
    """A bound on the digits of a form that nothing has calculated yet, numerator and denominator counted apart.

    The names have the numbers of `base`. More than `_MOST_DIGITS` in a part of the form raise an OverflowError, since
    calculating it could take hours.
    """
    from sympy import MatrixBase

    if isinstance(form, MatrixBase):
        return max((_digits(part, names, base) for part in form.flat()), default=0.0)
    inner = [_digits(part, names, base) for part in form.args]
    largest = max(inner, default=0.0)
    if form.is_Number and form.is_finite:
        found = math.log10(max(abs(form.p), form.q)) if form.is_Rational and form else 1.0
    elif form.is_Symbol:
        found = math.log10(_number(names.index(form) if form in names else len(names), base))
    elif form.func.__name__ == "exp" and largest < _MOST_DIGITS_OF_EXPONENT:
        return min(10**largest, _MOST_DIGITS_OF_EXPONENT)  # a rounded number, however large
    elif form.is_Pow or form.func.__name__ == "exp":
        found = (inner[0] if form.is_Pow else 1.0) * 10 ** min(inner[-1], 9)
    elif form.func.__name__ in _GROWING:
        found = largest * 10 ** min(largest, 9)
    else:
        found = sum(inner) if form.is_Mul else largest + math.log10(len(inner) + 1)
    if found > _MOST_DIGITS:
        raise OverflowError(f"more than {_MOST_DIGITS:,} digits")
    return found


def _parsed(texts: list[str], bases: Sequence[int]) -> list[Any]:
    """The texts as the library reads them: `x` and `X` are one name unless both occur, and decimals are fractions.

    An OverflowError refuses what is too large with the numbers of the `bases` for its names.
    """
    import sympy
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig

    is_complex = any(re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", text) for text in texts)
    letters = [set(re.findall("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text))) for text in texts]
    # Nor are `\theta` and `\Theta`, or `m_a` and `m_A`, in different texts.
    letters.append(set(re.findall(r"(?:(?<=_)|(?<=_\{)|\\)[A-Za-z]+", " ".join(texts))))
    one_case = all(len({letter.lower() for letter in found}) == len(found) for found in letters)
    spelling = NormalizationConfig(malformed_operators=True, boxed="none")
    forms = []
    for text in texts:
        text = re.sub(r"(?<![A-Za-z\\])[eE]_", r"\\varepsilon_", text)  # to the library E_1 is a mistake
        text = re.sub(r"(?<=[\d)])\s*\((?=[^,]*\))", r" \\cdot (", text)  # and 3(2) a sum
        text = re.sub(r"(?<![\d.])(\d+)\.(\d+)", lambda m: rf"(\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}})", text)
        names = ConversionConfig(lowercase_symbols=one_case)
        form = latex2sympy(text, is_real=not is_complex, normalization_config=spelling, conversion_config=names)
        _digits(form, sorted(form.free_symbols, key=str), max(bases))
        named = {part: sympy.Symbol(str(part)) for part in form.atoms(sympy.core.function.AppliedUndef)}
        forms.append(form.subs({sympy.Symbol("i", real=False): sympy.I, **named}))  # I(0) has no number of its own
    return forms
