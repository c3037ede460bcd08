r"""Equality of two answers written as LaTeX, where math-verify alone accepts too much.

Both sides are brought into one spelling and taken apart into lists, relations and brackets. What is left are
expressions, which the library reads: they are equal if their values at points agree. Sets, and what has no values, are
left to the library.
"""

import logging
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from kvsweep.harness.grading.spelling import number_of_base, readable, split
from kvsweep.harness.grading.units import DEGREE
from kvsweep.harness.grading.values import NoValue, Values

_MAX_CHARS = 300  # Nothing longer is calculated: it is equal only if it is written the same.

_TURNED = {">": "<", r"\geq": r"\leq"}
_RELATIONS = ("=", "<", r"\leq", r"\neq", r"\in", *_TURNED)


def compare(answer: str, gold: str) -> tuple[bool, str, str, str]:
    """Equal or not, the rule that decided, and both sides as they were compared."""
    # P = 3/8 = 37.5%: beside another form of the number, a percentage is its hundredth.
    if answer.count("=") > 1 and "%" not in gold:
        answer = re.sub(r"(\d+(?:\.\d+)?)\s*\\?%", r"\\frac{\1}{100}", answer)
    left, unit = readable(answer)
    right, gold_unit = readable(gold)
    if unit != gold_unit:
        # Degrees beside a plain number may be its unit; a multiple of pi without a unit is in radians.
        in_degrees = DEGREE in (unit, gold_unit) and r"\pi" in left + right
        if (unit and gold_unit) or in_degrees:
            return False, "other units", left, right
    if not _OPTION.fullmatch(right):  # the gold is no letter, so `(B) 5` is 5
        left = re.sub(r"^\([A-F]\) ?(?=[-\d.\\(])", "", left)
    verdict = None
    if "%" in answer and "%" not in gold:
        verdict = _same_percent(left, right, by_answer=True)
    elif "%" in gold and "%" not in answer:
        verdict = _same_percent(right, left, by_answer=False)
    is_equal, rule = verdict or _same(left, right)
    return is_equal, rule, left, right


_PLAIN_NUMBER = re.compile(r"(?:[A-Za-z] ?= ?)?(-?(?:\d+(?:\.\d+)?|\\frac\s*(?:\d\d|\{\d+\}\{\d+\})|\d+/\d+))")


def _same_percent(signed: str, bare: str, *, by_answer: bool) -> tuple[bool, str] | None:
    """What a percent sign on one side alone decides; None where the numbers without it decide.

    `signed` is the side with the sign, which `by_answer` calls the answer's. Many golds are percentages without their
    sign, but one below 1 is a share: 0.05% is not 0.05.
    """
    match = _PLAIN_NUMBER.fullmatch(signed)
    if match is None:
        return None
    number = match[1]
    size = abs(_form(number, has_i=False, one_case=True).evalf())  # a number has neither i nor letters
    # The answer 5 is right for the gold 500%, but 500% is wrong for the gold 5, which may be a percentage without sign.
    may_be_hundredth = size <= 100 or not by_answer
    if may_be_hundredth and _same(rf"\frac{{{number}}}{{100}}", bare)[0]:
        return True, "a percent is a hundredth"
    if by_answer and size < 1:
        return False, "a share is no percentage"
    return None


def _squeezed(text: str) -> str:
    """The text without spaces and without braces around one character."""
    spaced = re.sub(r"(?<=\d)\s+(?=\d)", "~", text)  # 1 2 is not 12
    return re.sub(r"\{(\w)\}", r"\1", re.sub(r"\s", "", spaced))


def _same(answer: str, gold: str) -> tuple[bool, str]:
    """Whether two texts are equal, and the rule that decided: texts of the same structure are taken apart."""
    if _squeezed(answer) == _squeezed(gold):
        return True, "written the same"
    if max(len(answer), len(gold)) > _MAX_CHARS:
        return False, f"more than {_MAX_CHARS} characters, and not written the same"
    kind, parts = _structure(answer)
    gold_kind, gold_parts = _structure(gold)
    if kind != gold_kind:
        # Either side may be the one that says more, as x = 5 for 5. An answer, but no gold, may also name the sum that
        # the problem asks for (`_SUM`), as m + n = 5 for 5.
        verdict = _same_otherwise(answer, gold, _SUM) or _same_otherwise(gold, answer)
        return verdict or (False, f"another structure: {kind} for {gold_kind}")
    if kind == "expression":
        return _same_expression(answer, gold)
    if kind.split()[0] in _RELATIONS:
        return _same_relation(kind, parts, gold_parts)
    is_unordered = kind.startswith(("list", r"\{"))  # tuples and intervals, which are left, have an order
    return _same_parts(parts, gold_parts, ordered=not is_unordered)


_BRACKETS = ("()", "(]", "[]", "[)", r"\{\}")


def _structure(text: str) -> tuple[str, list[str]]:
    r"""What a text is made of, and its parts: "list", the relation signs, the brackets, or "expression"."""
    items, commas = split(text, ",;")
    if commas:
        return "list", items
    items, words = split(text, (r"\land", r"\lor"))
    if words:
        return " ".join(("list", *sorted({*words}))), items
    sides, signs = split(text, _RELATIONS)
    if signs:
        if signs[0] in _TURNED:  # a > b as b < a
            sides.reverse()
            signs.reverse()
        return " ".join(_TURNED.get(sign, sign) for sign in signs), sides
    opening = text[:2] if text.startswith("\\") else text[:1]
    # At brackets that close the outermost ones: "(1, 2)" is "(1, 2" and "", divided by ")".
    pieces, closings = split(text, (")", "]", r"\}"))
    is_closed_at_end = pieces[1:] == [""]  # one such bracket, with nothing behind it
    items, commas = split(pieces[0][len(opening) :], ",;")
    # Without a comma, (x) and [x] are brackets of an expression, but \{x\} is a set.
    if is_closed_at_end and opening + closings[0] in _BRACKETS and (commas or opening == r"\{"):
        return opening + closings[0], items
    return "expression", [text]


def _same_parts(answer: list[str], gold: list[str], *, ordered: bool) -> tuple[bool, str]:
    """Find for every part of the answer one of the gold's, in order or in any order; no part serves twice."""
    remaining = list(gold)
    for part in answer:
        candidates = remaining[:1] if ordered else remaining
        equal_part = next((candidate for candidate in candidates if _same(part, candidate)[0]), None)
        if equal_part is None:
            return False, f"nothing equals the part {part}"
        remaining.remove(equal_part)
    order = "order" if ordered else "any order"
    return not remaining, f"parts equal in {order}, {len(remaining)} left over"


_INDICES = re.compile(r"_\w|_\{[^{}]*\}|\([A-Za-z0-9](?:, ?[A-Za-z])*\)|'|\^[a-z]$|\^\{-1\}(?=\()")
# A single name: `x`, `f(x)`, `a_1`, `\frac{dy}{dx}`, `(x, y)`, `Area`.
_NAME = re.compile(r"[A-Za-z]|[A-Z]{2,4}|[A-Za-z][A-Za-z ]{3,}|\\(?!sqrt|sin|cos|tan|log|ln|exp)[A-Za-z]+[A-Z {}a-z]*|")


# What an answer, but no gold, may have on the left: `m+n`, `a^2+b^2`, `|S|`, `[ABC]`, `AB^2`, `\lfloor 9x \rfloor`.
_TERM = r"\d*[a-z](?:\^\{?\d\}?)?"
_SUM = re.compile(
    rf"{_TERM}(?: ?[-+] ?{_TERM})+|\|[A-Z][^|]*\||\[[A-Z]{{3,}}\]|[A-Z]{{2}}\^\{{?2\}}?|\\l(floor|ceil)[^=]*\\r\1"
)


def _same_otherwise(answer: str, gold: str, also_named: re.Pattern[str] = _NAME) -> tuple[bool, str] | None:
    r"""Two structures that may say the same: `x = 5` and 5, `x > 2` and (2, \infty), a list with and without braces.

    `also_named` is what may stand on the left of an equation beside a single name. None: nothing here decides.
    """
    kind, parts = _structure(answer)
    gold_kind, gold_parts = _structure(gold)
    signs = set(kind.split())
    if signs in ({"="}, {r"\in"}):
        return _same_equation(kind, parts, gold, also_named)
    # x \neq 5 is all numbers without 5.
    if signs == {r"\neq"} and len(parts) == 2 and r"\cup" in gold:
        return _same(rf"(-\infty, {parts[1]}) \cup ({parts[1]}, \infty)", gold)
    if signs <= {"<", r"\leq"} and gold_kind in _BRACKETS:  # the library reads 1 < x < 2 as the interval (1, 2)
        return _same_expression(answer, gold)
    if kind == "()":  # beside a column or a list
        column = re.fullmatch(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}", gold)
        entries = gold_parts if gold_kind == "list" else []
        if column:
            entries, _ = split(column[1], (r"\\",))
        return _same_parts(parts, entries, ordered=True) if entries else None
    if kind == r"\{\}":
        if gold == r"\emptyset":  # what has a member is not empty
            return None
        members = gold_parts if gold_kind == "list" else [gold]
        return _same_parts(parts, members, ordered=False)
    if kind == "list" and gold_kind == "()":  # x = 1, y = 2 is (1, 2): each part has a name, in alphabetical order
        names = {part.split("=")[0] for part in parts if re.match("[a-z] ?=", part)}
        if len(names) == len(parts) and parts == sorted(parts):
            values = [part.split("=", 1)[1].strip() for part in parts]
            return _same_parts(values, gold_parts, ordered=True)
    if kind == r"list \land" and len(parts) == 2:  # x > 1 and x < 2
        chain = _chained(*parts) or _chained(*reversed(parts))
        if chain:
            return _same(chain, gold)
    is_union = kind in ("list", r"list \lor") and r"\cup" in gold  # x < 1 or x > 2 for two intervals
    # A list with commas alone also stands for one with "and" or "or".
    if is_union or (kind == "list" and gold_kind.startswith("list")):
        pieces, _ = split(gold, (r"\cup", r"\land", r"\lor"))
        return _same_parts(parts, pieces, ordered=False)
    return None


def _same_equation(kind: str, parts: list[str], gold: str, also_named: re.Pattern[str]) -> tuple[bool, str] | None:
    """Whether an equation, or a name in a set, as `kind` says, says the same as something that has another structure.

    None if an equation of tuples has more names than values, or fewer.
    """
    gold_kind, gold_parts = _structure(gold)
    left = parts[0].strip()
    is_named = bool(_NAME.fullmatch(_INDICES.sub("", left).strip()) or also_named.fullmatch(left))
    are_equations = "=" in kind and set(gold_kind.split()) == {"="}
    is_of_tuples = kind == "=" and parts[0].startswith("(")  # (n, k) = (2, 3)
    if is_of_tuples and gold_kind == "list":
        _, names = _structure(parts[0])
        _, numbers = _structure(parts[1])
        if len(names) != len(numbers):
            return None
        equations = [f"{name} = {number}" for name, number in zip(names, numbers, strict=True)]
        return _same_parts(equations, gold_parts, ordered=False)
    values = parts[1:] if is_named else parts
    # x = a = b beside another equation: each of its parts, as x = a, must say the same as the gold.
    if are_equations and is_named and len(parts) > 2:
        values = [f"{parts[0]} = {value}" for value in values]
    equal = all(_same(value, gold)[0] for value in values)
    return equal, "the value of a name: an equation is a value only if its left side is a single name"


def _chained(lower: str, upper: str) -> str | None:
    """One chain of two inequalities, x > 1 and x < 2 as 1 < x < 2; None of others."""
    sign, low = _structure(lower)
    other_sign, high = _structure(upper)
    if len(low) == len(high) == 2 and low[1] == high[0]:
        return f"{low[0]} {sign} {low[1]} {other_sign} {high[1]}"
    return None


def _same_relation(kind: str, parts: list[str], gold: list[str]) -> tuple[bool, str]:
    """Equal side by side, or a constant multiple once all stands on one side."""
    is_symmetric = kind in ("=", r"\neq")
    is_same, _ = _same_parts(parts, gold, ordered=True)
    if is_symmetric and not is_same:
        is_same, _ = _same_parts(parts[::-1], gold, ordered=True)
    if is_same:
        return True, "relations with equal sides"
    can_be_calculated = len(parts) == 2 and kind != r"\in" and not _AS_WRITTEN.search("".join((*parts, *gold)))
    if can_be_calculated:
        with suppress(Exception):  # what the library cannot read: then the last line decides
            difference = f"({parts[0]}) - ({parts[1]})"
            gold_difference = f"({gold[0]}) - ({gold[1]})"
            left, right, values = _parsed(difference, gold_difference)
            ratio = values.ratio(left, right) or 0.0  # 0: no constant multiple
            # 4x = 8 for x = 2 is not in lowest terms, but 2y = x is the gold y = x/2 without its fraction.
            is_lowest = abs(ratio) < 1.000001 or any(re.search(r"\\frac|/|\.", side) for side in gold)
            # A negative factor turns an inequality round.
            if is_lowest and (ratio > 0 or (ratio < 0 and is_symmetric)):
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
    option = _OPTION.fullmatch(gold)
    chosen = re.match(r"\(?([A-F])(?:[).:]|$)", answer)
    if option and chosen:
        return option[1] == chosen[1], "the letter of an option"
    words = _PLAIN_WORDS.fullmatch(answer)
    gold_words = _PLAIN_WORDS.fullmatch(gold)
    # A gold of words takes no calculation; an answer of three letters or fewer may be a product of names.
    if gold_words or (words and len(answer) > 3):
        same = words and gold_words and _squeezed(words[1]).lower() == _squeezed(gold_words[1]).lower()
        return bool(same), "words are compared letter by letter"
    number = number_of_base(answer)
    if number is not None and gold.isdecimal():
        return number == int(gold), "the value of a number with a base"
    both = f"{answer};{gold}"
    if _AS_WRITTEN.search(both):
        return False, "bases, primes, angles, dots, ratios, !! and numbers side by side must be written the same"
    # A decimal beside none may be rounded to six places, as the library has it.
    is_rounded = ("." in answer) != ("." in gold) and re.search(r"\.\d{6}", both)
    slack = 1.001e-6 if is_rounded else 1e-18
    with suppress(Exception):  # what the library cannot read: then the last line decides
        left, right, values = _parsed(answer, gold)
        return _same_form(left, right, values, slack)
    return False, "the library cannot read it, or a part of it is too large"


def _same_form(left: Any, right: Any, values: Values, slack: float) -> tuple[bool, str]:
    """Whether two forms of sympy are equal, and what decided; `slack` as in `Values.equal`."""
    from math_verify import verify
    from sympy import Expr, MatrixBase, MatrixExpr

    left = left.as_explicit() if isinstance(left, MatrixExpr) else left
    right = right.as_explicit() if isinstance(right, MatrixExpr) else right
    if isinstance(left, MatrixBase) and isinstance(right, MatrixBase):
        entries = zip(left.flat(), right.flat(), strict=False)
        same = left.shape == right.shape and all(_same_form(*pair, values, slack)[0] for pair in entries)
        return same, "matrices are compared entry by entry"
    if isinstance(left, Expr) and isinstance(right, Expr):
        with suppress(NoValue):  # without values, such as integrals: the library decides
            return values.equal(left, right, slack), "values at points"
    else:  # the library would calculate numbers of any size
        values.check(left)
        values.check(right)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    # Without time limits of its own, which need the main thread's signals: the worker as a whole is killed.
    return verify(right, left, allow_set_relation_comp=True, timeout_seconds=None), "math-verify"


def _parsed(answer: str, gold: str) -> tuple[Any, Any, Values]:
    """Two texts as the library reads them: `x` and `X` are one name unless both occur."""
    has_i = re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])", f"{answer};{gold}") is not None
    one_case = _has_one_case(answer, gold)
    return _form(answer, has_i, one_case), _form(gold, has_i, one_case), Values(has_i=has_i)


def _has_one_case(answer: str, gold: str) -> bool:
    """Whether no letter is both small and large in one text, nor a command (`\\theta`) or index in the two together."""
    spellings = []
    for text in (answer, gold):
        without_commands = re.sub(r"\\[A-Za-z]+", "", text)
        spellings.append(set(re.findall("[A-Za-z]", without_commands)))
    # Indices and commands of both texts together.
    spellings.append(set(re.findall(r"(?:(?<=_)|(?<=_\{)|\\)[A-Za-z]+", f"{answer} {gold}")))
    for names in spellings:
        small = {name.lower() for name in names}
        if len(small) < len(names):  # two names differ only in case
            return False
    return True


@lru_cache(maxsize=256)  # a gold is compared with each of its problem's draws, and many draws give one answer
def _form(text: str, has_i: bool, one_case: bool) -> Any:
    """A text as the library reads it; decimals are fractions."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Mod, Rational

    if re.fullmatch(r"-?\d+(?:\.\d+)?", text):  # which the library reads slowly
        return Rational(text)
    spelling = NormalizationConfig(malformed_operators=True, boxed="none")
    names = ConversionConfig(lowercase_symbols=one_case)
    text = re.sub(r"(?<![A-Za-z\\])[eE]_", r"\\varepsilon_", text)  # to the library E_1 is a mistake
    text = re.sub(r"(?<=[\d)])\s*\((?=[^,]*\))", r" \\cdot (", text)  # and 3(2) a sum
    text = re.sub(r"(?<![\d.])(\d+)\.(\d+)", _as_fraction, text)
    text = re.sub(r"(?<![A-Za-z\\])(diag|gcd|lcm|ar(?:sin|cos|tan)h)\s*(?=\()", r"\\operatorname{\1}", text)
    form: Any = None
    for part in text.split(r"\bmod"):  # an operator that the library does not read
        number = latex2sympy(part, is_real=not has_i, normalization_config=spelling, conversion_config=names)
        form = number if form is None else Mod(form, number, evaluate=False)
    return form


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, places = decimal.groups()
    return rf"(\frac{{{whole}{places}}}{{1{'0' * len(places)}}})"
