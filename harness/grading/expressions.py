r"""Equality of two answers written as LaTeX: math-verify decides on parts that it reads right.

The library alone accepts too much: it drops number bases, reads lists as sets, rounds to six decimals, takes any two
equations without solutions for equal, and picks a number out of what it cannot parse. So this module brings both sides
into one spelling, takes lists, brackets, matrices and relations apart, and asks the library about single expressions.
"""

import functools
import logging
import math
import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

_MAX_CHARS = 300  # Nothing longer is calculated: it is equal only if it is written the same.

# Words that make another number, or no number, of the number before them.
# fmt: off
NOT_UNITS = frozenset({
    "i", "e", "j", "pi", "hundred", "hundreds", "thousand", "thousands", "million", "millions",
    "billion", "billions", "trillion", "trillions", "dozen", "dozens", "half", "halves", "third",
    "thirds", "quarter", "quarters", "tenth", "tenths", "hundredth", "hundredths", "squared",
    "cubed", "factorial", "times", "mod", "modulo", "base", "or", "and", "not", "to", "plus",
    "minus", "over", "if", "for", "where", "when",
})
# fmt: on
_UNIT_WORDS = re.compile(r"(?:[^\W\d_]|[ .,/()°²³¹⁻~-]|\^[23])*+")


def is_unit(words: str) -> bool:
    """Words that may follow a number and leave it the same number."""
    return bool(_UNIT_WORDS.fullmatch(words)) and NOT_UNITS.isdisjoint(re.findall("[a-z]+", words.lower()))


TEXT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|rm|it|sf)|mbox|operatorname)\s*+"
_CHARACTERS = str.maketrans({
    "²": "^2", "³": "^3", "\u2212": "-", "–": "-", "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "≤": r"\leq ",
    "≥": r"\geq ", "≠": r"\neq ", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "°": "", "′": "'", "~": " ", "\n": " ",
})  # fmt: skip
_END = "(?![A-Za-z])"

# One spelling of what LaTeX can spell in several ways, in this order; `(?<!\\)` spares the `\\` between matrix rows.
_SPELLINGS = [(re.compile(pattern), new) for pattern, new in (
    (r"√(\d+)", r"\\sqrt{\1}"),
    ("√", r"\\sqrt "),
    (r"\\\$|\$|(?<!\\)\\[()]|(?<!\\)\\[\[\]]", ""),
    (rf"\\(?:left|right|displaystyle|[bB]igg?[lr]?|limits){_END}", ""),
    (r"(?<=\d)(?:,(?:\\[!,])|\{,\}(?:\\!)?|\\[,!])\s*(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\!|\{(?=[:,]\})(?<=\{)|(?<=\{[:,])\}", ""),
    (rf"(?<!\\)\\[,;: ]|\\q?quad{_END}", " "),
    (rf"\\[dtc]frac{_END}\s*", r"\\frac"),
    (rf"\\(frac|sqrt|overline|angle){_END}\s+(?=\{{)", r"\\\1"),
    (rf"\\(le|ge)(?:q|qslant)?{_END}", r"\\\1q "),
    (rf"\\neq?{_END}", r"\\neq "),
    (rf"\\lt{_END}", "<"),
    (rf"\\gt{_END}", ">"),
    (rf"\\([lr])brace{_END}", lambda match: r"\{" if match[1] == "l" else r"\}"),
    (rf"\\varnothing{_END}|\\\{{\s*\\\}}", r"\\emptyset "),
    (rf"\\(?:dots[bcm]?|cdots|ldots){_END}", r"\\ldots "),
    (rf"\\colon{_END}", ":"),
    (r"\^(?:\\prime|\{\\prime\})", "'"),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (rf"\^\s*(?:\\circ{_END}|\{{\s*\\circ\s*\}})|\\degrees?{_END}|(?<!\\)\\?%", ""),
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
    (r"\+\s*\\infty", r"\\infty"),
)]  # fmt: skip
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TEXT_COMMAND = re.compile(rf"{TEXT}\{{([^{{}}]*+)\}}")
_UNIT = rf"{TEXT}\{{[^{{}}]*+\}}(?:\s*\^\s*(?:\{{\s*-?\d\s*\}}|\d))?"
_FINAL_UNITS = re.compile(rf"(?<=[\w)}}])\s*(?P<units>{_UNIT}(?:(?:\s|\\cdot|/|\^\{{?|\d\}}?)*{_UNIT})*)[\s.]*$")
_LEAD = re.compile(
    r"^(?:(?:the|final|answer|value|result|is|are|equals?|equal to|exactly|simply)\b:?\s*)+(?=[-\d.\\(])", re.I
)


@dataclass(frozen=True)
class Form:
    """An answer in one spelling, with the powers of the unit that was taken off."""

    text: str
    unit_powers: tuple[str, ...] = ()


def readable(answer: str) -> Form:
    r"""The answer in one spelling: no `\left`, `\dfrac`, `$`, thousands separators, percent signs or final units."""
    text = answer.translate(_CHARACTERS)
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    if not re.search(r"[(\[]|\\\{", text) or ", " in text:  # "(1,234)" is a pair
        text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    items, powers = [], []
    for item in split(text, ",;"):
        units = _FINAL_UNITS.search(item)
        if units and all(is_unit(words) for words in _TEXT_COMMAND.findall(units["units"])):
            item = item[: units.start()]
            powers += re.findall(r"\^\D*(-?\d)", units["units"])
        items.append(_TEXT_COMMAND.sub(r"\1", item).strip())
    text = re.sub(r"\s+", " ", ", ".join(items)).strip(" .")
    return Form(_LEAD.sub("", text), tuple(powers))


def split(text: str, separators: str) -> list[str]:
    r"""The parts between separating characters that stand in no brackets and no matrix."""
    depth, parts = 0, [""]
    for token in re.findall(r"\\begin|\\end|\\[A-Za-z]+|\\.|.", text, re.DOTALL):
        depth += (token in ("(", "[", "{", r"\{", r"\begin")) - (token in (")", "]", "}", r"\}", r"\end"))
        if token in separators and depth <= 0:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


Verdict = tuple[bool, str]


def compare(answer: str, gold: str) -> tuple[bool, str, str, str]:
    """Equal or not, the rule that decided, and both sides as they were compared."""
    left, right = readable(answer), readable(gold)
    if not left.text or not right.text:
        return False, "one side says nothing", left.text, right.text
    if left.unit_powers and right.unit_powers and left.unit_powers != right.unit_powers:
        return False, "the units have other powers", left.text, right.text
    return (*_same(left.text, right.text), left.text, right.text)


def _squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def _same(answer: str, gold: str) -> Verdict:
    if _squeezed(answer) == _squeezed(gold):
        return True, "written the same"
    if max(len(answer), len(gold)) > _MAX_CHARS:
        return False, f"more than {_MAX_CHARS} characters, and not written the same"
    items, wanted = _items(answer), _items(gold)
    if len(items) == len(wanted) == 1:
        return _same_item(items[0], wanted[0])
    group, listed = _group(answer), wanted
    if len(items) > 1 and len(wanted) == 1:
        group, listed = _group(gold), items
    if min(len(items), len(wanted)) == 1 and group and group[0] + group[2] in ("()", r"\{\}"):
        # A list without brackets beside one with them, which say whether the order counts.
        inside = split(group[1], ",;")
        return _same_list(*((inside, wanted) if listed is wanted else (items, inside)), ordered=group[0] == "(")
    return _same_list(items, wanted, ordered=False)


def _items(text: str) -> list[str]:
    r"""The items of a list; `\pm` stands for two, and a name before the first item only is the name of all."""
    items = []
    for item in split(text, ",;"):
        signs = (item.replace(r"\pm", "+", 1), item.replace(r"\pm", "-", 1)) if item.count(r"\pm") == 1 else (item,)
        items += [re.sub(r"(^|=)\s*\+", r"\1", sign) for sign in signs]
    names = [_named(item) for item in items]
    if len(items) > 1 and (names[0][0] and not any(_RELATION.search(item) for item in items[1:])):
        return [names[0][1], *items[1:]]
    return items


def _same_list(answer: list[str], gold: list[str], *, ordered: bool) -> Verdict:
    """Find for every item of the answer one of the gold's, in order or in any order; no item serves twice."""
    if len(answer) != len(gold):
        return False, f"{len(answer)} items for {len(gold)}"
    names = {re.sub(r"_.*|\d", "", name) for name, _ in map(_named, answer) if name}
    if len(names) > 1 and not any(_RELATION.search(item) for item in gold):
        ordered = True  # x = 1, y = 2 says which value is which
    left = sorted(gold, key=_squeezed) if not ordered else list(gold)
    for item in answer if ordered else sorted(answer, key=_squeezed):
        partners = left[:1] if ordered else sorted(left, key=lambda other: _squeezed(other) != _squeezed(item))
        found = next((other for other in partners if _same(item, other)[0]), None)
        if found is None:
            return False, f"nothing equals the item {item}"
        left.remove(found)
    return True, "items equal in order" if ordered else "items equal in any order"


_RELATION = re.compile(rf"\\(?:leq|geq|neq|in){_END}|[<>=]")
_TURNED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq"}
_NAME = re.compile(
    r"(?:[A-Za-z]|[A-Z]{2,4}|[A-Za-z]{4,}(?: [A-Za-z]+)*|\\(?!sqrt|frac)[A-Za-z]+(?:\{[A-Za-z ]+\}| ?[A-Z ]+)?)"
    r"'*(?:_(?:\w|\{[^{}]*\}))?'*(?:\([^()=<>]*\))?|\([A-Za-z](?:, ?[A-Za-z])+\)"
)


def _sides(text: str) -> tuple[list[str], list[str]]:
    """The sides of a relation and the signs between them, outside brackets."""
    sides, signs, start = [], [], 0
    for match in _RELATION.finditer(text):
        before = text[: match.start()]
        if sum(map(before.count, "([{")) <= sum(map(before.count, ")]}")):
            sides.append(text[start : match.start()].strip())
            signs.append(match.group())
            start = match.end()
    return [*sides, text[start:].strip()], signs


def _named(text: str) -> tuple[str, str]:
    """The name before a value (`x = 5`) and the value; no name where the left side is none."""
    sides, signs = _sides(text)
    if signs and set(signs) <= {"=", r"\in"} and _NAME.fullmatch(sides[0]):
        return sides[0], text[text.index(signs[0], len(sides[0])) + len(signs[0]) :].strip()
    return "", text


def _same_item(answer: str, gold: str) -> Verdict:
    """Take an item apart as far as both sides have the same structure."""
    answer = re.split(rf"\\approx{_END}", answer)[0].strip() or answer
    (sides, signs), (gold_sides, gold_signs) = _sides(answer), _sides(gold)
    if signs and gold_signs:
        return _same_relation(sides, signs, gold_sides, gold_signs)
    if signs or gold_signs:
        return _same_value(answer, gold, sides if signs else gold_sides, {*signs, *gold_signs})
    group, wanted = _group(answer), _group(gold)
    if group and wanted:
        if (group[0], group[2]) != (wanted[0], wanted[2]):
            return False, "other brackets"
        return _same_list(split(group[1], ",;"), split(wanted[1], ",;"), ordered=group[0] != r"\{")
    matrix, wanted_matrix = _matrix(answer), _matrix(gold)
    if matrix and wanted_matrix:
        if [len(row) for row in matrix] != [len(row) for row in wanted_matrix]:
            return False, "matrices of other shapes"
        return _same_list([*chain(*matrix)], [*chain(*wanted_matrix)], ordered=True)
    parts, wanted_parts = (re.split(rf"\\cup{_END}", text) for text in (answer, gold))
    if len(parts) == len(wanted_parts) > 1:
        return _same_list(parts, wanted_parts, ordered=False)
    return _same_expression(answer, gold)


def _same_value(answer: str, gold: str, sides: list[str], signs: set[str]) -> Verdict:
    r"""A relation beside what is none: `x = 5` gives 5, `2^5 = 32` gives 32, `x > 2` is the interval (2, \infty)."""
    other = gold if answer != gold and sides == _sides(answer)[0] else answer
    if signs <= {"=", r"\in"}:
        values = sides[1:] if _NAME.fullmatch(sides[0]) else sides
        if all(_same(value, other)[0] for value in values):
            return True, "the value of a name, or a calculation that ends in the value"
        return False, "an equation is no value unless its left side is a single name"
    if _group(other) or r"\cup" in other:
        return _verified(answer, gold)
    return False, "a relation is no value"


def _same_relation(sides: list[str], signs: list[str], gold_sides: list[str], gold_signs: list[str]) -> Verdict:
    if set(signs) == {"="} == set(gold_signs) and len(sides) > 2 and _NAME.fullmatch(sides[0]):
        steps = [_same_relation([sides[0], side], ["="], gold_sides, gold_signs) for side in sides[1:]]
        return next((step for step in steps if not step[0]), steps[-1])
    turned = [_TURNED.get(sign, sign) for sign in reversed(signs)]
    for left, between in ((sides, signs), (sides[::-1], turned)):
        if between == gold_signs and all(_same(side, other)[0] for side, other in zip(left, gold_sides, strict=True)):
            return True, "relations with equal sides"
    if len(sides) == len(gold_sides) == 2 and signs[0] != r"\in" != gold_signs[0]:
        ratio = _ratio(sides, gold_sides)
        if ratio and signs[0] == gold_signs[0] and (ratio > 0 or signs[0] not in _TURNED):
            return True, "the same relation with all on one side"
        if ratio and ratio < 0 and _TURNED.get(signs[0]) == gold_signs[0]:
            return True, "the same relation turned around"
    return False, "another relation"


_BRACKETS = {"(": (")", "]"), "[": ("]", ")"), r"\{": (r"\}",)}


def _group(text: str) -> tuple[str, str, str] | None:
    """The brackets around the whole text and what they hold, if they hold a list."""
    opening = next((bracket for bracket in _BRACKETS if text.startswith(bracket)), "")
    closing = next((bracket for bracket in _BRACKETS.get(opening, ()) if text.endswith(bracket)), "")
    inside = text[len(opening) : len(text) - len(closing)]
    depth = 0
    for token in re.findall(r"\\.|.", inside, re.DOTALL):
        depth += (token in ("(", "[", "{", r"\{")) - (token in (")", "]", "}", r"\}"))
        if depth < 0:
            return None
    if not closing or depth or (opening != r"\{" and len(split(inside, ",;")) == 1):
        return None
    return opening, inside, closing


_MATRIX = re.compile(r"[(\[]?\s*\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}\s*[)\]]?", re.DOTALL)


def _matrix(text: str) -> list[list[str]] | None:
    match = _MATRIX.fullmatch(text)
    if not match or r"\begin" in match[2]:
        return None
    return [[cell.strip() for cell in row.split("&")] for row in match[2].split(r"\\") if row.strip()]


_PLAIN_WORDS = re.compile(r"(?=.*[^\W\d_]{3}|no$)[^\W\d_]+(?:[ ,'-]+[^\W\d_]+)*")
_OPTION = re.compile(r"\(?([A-F])\)?")
_BASE = re.compile(r"\d\s*_")
_AS_WRITTEN = re.compile(r"\\ldots|\\(?:angle|triangle)(?![A-Za-z])|:[^;]*:")
_WORDS_AFTER = re.compile(r"(.*[\d}])\s*(?<![A-Za-z])((?:[A-Za-z]{2}|[^\W\d_A-Za-z])[^\d_\\=<>,;(){}^*+]*)")


def _same_expression(answer: str, gold: str) -> Verdict:
    """Compare what is no list, relation, bracket or matrix: an option, words, or an expression for the library."""
    option = _OPTION.fullmatch(gold)
    if option and (len(gold) > 1 or len(answer) > 1):
        given = re.match(r"\(([A-F])\)(?!\s*,)|([A-F])(?:[).:]|$)", answer)
        return given is not None and option[1] in given.groups(), "the letter of an option"
    if _PLAIN_WORDS.fullmatch(gold):
        return _squeezed(answer).casefold() == _squeezed(gold).casefold(), "words are compared letter by letter"
    if _PLAIN_WORDS.fullmatch(answer) and len(answer) > 3:
        return False, "words for an expression"
    if gold[:1] != "(":
        answer = re.sub(r"^\([A-F]\)\s*(?=[-\d\\])", "", answer)
    if not re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", gold)) and (after := _WORDS_AFTER.fullmatch(answer)):
        answer = after[1].strip() if is_unit(after[2]) else answer
    elif not re.search("[A-Za-z]", answer) and (after := _WORDS_AFTER.fullmatch(gold)):
        gold = after[1].strip() if is_unit(after[2]) else gold
    if _squeezed(answer) == _squeezed(gold):
        return True, "the same value with a unit"
    if _BASE.search(answer + ";" + gold):
        return False, "numbers in a base must be written the same"
    if answer.count("'") != gold.count("'") or _AS_WRITTEN.search(answer + ";" + gold):
        return False, "primes, angles, dots and ratios of several parts must be written the same"
    if re.search(r"\d\s+\d", answer + ";" + gold):
        return False, "numbers side by side are no number"
    return _verified(answer, gold)


def _verified(answer: str, gold: str) -> Verdict:
    """The verdict of math-verify on decimals as exact fractions; where one side alone has any, on decimals too."""
    for exact in (True, False):
        if not exact and ("." in answer) == ("." in gold):
            break
        forms = _parsed([gold, answer], exact=exact)
        # The library takes seconds to simplify what differs, and rounds to six decimals.
        if None in forms or any(abs(ratio - 1) > 2e-6 for ratio in _ratios(forms[0], forms[1], points=(1.3, 4.7))):
            continue
        # Without time limits of its own, which need the main thread's signals: the worker as a whole is killed.
        if _library().verify(*forms, allow_set_relation_comp=True, timeout_seconds=None):
            return True, "math-verify"
    return False, "math-verify"


@functools.cache
def _library() -> Any:
    """The library, imported by the workers that need it alone, as sympy takes half a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return math_verify


def _parsed(texts: list[str], *, exact: bool) -> list[Any]:
    """The texts' sympy objects, None for one that the library cannot read as a whole.

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
        # To the library E_1 is a mistake, and \gamma before a bracket the gamma function.
        text = re.sub(r"(?<![A-Za-z\\])[eE]_", r"\\varepsilon_", re.sub(rf"\\gamma{_END}", r"\\upsilon_{g}", text))
        if exact:
            text = re.sub(
                r"(?<![\d.])(\d+)\.(\d+)", lambda m: rf"{{\frac{{{m[1]}{m[2]}}}{{1{'0' * len(m[2])}}}}}", text
            )
        try:
            form = latex2sympy(
                re.sub(r"(?<=[\d)])\s*\((?=[^,]*\))", r" \\cdot (", text),  # the library adds in 3(2)
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


def _ratios(first: Any, second: Any, points: tuple[float, ...]) -> list[complex]:
    """The first expression over the second, where numbers are put for their names."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.is_Matrix for side in (first, second)):
        return []
    functions = first.atoms(sympy.core.function.AppliedUndef) | second.atoms(sympy.core.function.AppliedUndef)
    names = {function: sympy.Symbol(str(function)) for function in functions}
    first, second = first.xreplace(names), second.xreplace(names)
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    ratios = []
    for base in points:
        point = {
            symbol: sympy.Float(base * (1 + (n + 1) ** 2 * 0.618 * base**2 % 1)) for n, symbol in enumerate(symbols)
        }
        try:
            sides = [complex(side.xreplace(point).evalf(30)) for side in (first, second)]
        except MemoryError:
            raise
        except Exception:  # what is no number raises many things
            continue
        if any(sides) and all(abs(side) < 1e300 for side in sides):
            ratios.append(sides[0] / sides[1] if sides[1] else math.inf)
    return ratios


def _ratio(sides: list[str], gold_sides: list[str]) -> float | None:
    """The factor between two relations with all on one side; None if it is no constant or makes lowest terms higher."""
    forms = _parsed([f"({left}) - ({right})" for left, right in (sides, gold_sides)], exact=True)
    if None in forms or "".join(sides).count("'") != "".join(gold_sides).count("'"):
        return None
    ratios = _ratios(forms[0], forms[1], points=(1.3, 4.7, -2.9, 97.3))
    if len(ratios) < 2 or any(abs(ratio - ratios[0]) > 1e-9 * abs(ratios[0]) for ratio in ratios):
        return None
    factor = ratios[0].real
    if abs(factor) > 1.000001 and not any(re.search(r"\\frac|/|\.", text) for text in gold_sides):
        return None
    return factor if abs(ratios[0].imag) < 1e-9 * abs(factor) else None
