"""What the words behind a number say: pint's units, currencies and multiplying words of CLDR, counted things.

A word that is none of these, and that is not known to say nothing, may change the number: then all words are left.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import product
from math import prod
from typing import Any, NamedTuple

from kvsweep.harness.grading.languages import LOCALES, number_of_words

# Neither CLDR nor Unicode has these.
_OTHER_SCALES = {"dozen": 12, "score": 20, "gross": 144, "hundred": 100, "lakh": 10**5, "crore": 10**7, "k": 1000}
# What joins the number to another one, or makes another one of it.
_COUNTS = re.compile(
    "and|or|not|no|plus|minus|times|over|mod|modulo|base|factorial|than|less|more|fewer|"
    "(?:hal[fv]e?|third|quarter|fifth|eighth|ninth|twelfth|double|triple)s?|(?:doubl|tripl|halv)ed"
)
_HARMLESS = re.compile(
    "approximately|approx|about|exactly|total|altogether|overall|each|old|high|long|wide|tall|deep|left|remaining|away|"
    "the|an?|all|de"
)
_NOUNS = re.compile(
    "unit|[ap]m|people|(?:wo)?men|children|fish|sheep|deer|dice|mice|通り|[个個人元円本枚次种種天年月日分秒米岁歳개명원번件回台冊]"
)
_PREPOSITIONS = re.compile("of|for|from|in|to|on|at|by")
_POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3", "squared": "2", "cubed": "3"}
_TOKEN = re.compile(r"[^\W\d_]+|-?\d+|/")


DEGREE = "0.0174532925 radian"  # as `Words.unit` has it


class Words(NamedTuple):
    """By what the words multiply a number, and its unit in one spelling, "" for none."""

    factor: int
    unit: str


def read_words(text: str, *, single: bool = False) -> Words | None:
    """What the words behind a number say, or None if one of them is not known; `single` if the number is 1."""
    text = re.sub(r"[{}^]|\\cdot|\\[,;: ]|[()]", " ", text).replace(".", "")
    text = re.sub(r"\bdeg(?:ree)?s?\s+(?:(C|F)[a-z]*|K[a-z]*)(?![a-z])", lambda m: f"deg{m[1]}" if m[1] else "K", text)
    tokens, factor = _TOKEN.findall(text), 1
    while tokens and (scale := _scale(tokens[0])):
        factor, tokens = factor * scale, tokens[1:]
    unit = _unit(tokens, single)
    return None if unit is None else Words(factor, unit)


def _unit(tokens: list[str], single: bool) -> str | None:
    """The unit that words spell, each with its power; None if one may change the number.

    An unknown word may stand before a counted thing, as an adjective, and in "of rice" behind one.
    """
    parts, sign, power, waiting, after_noun = list[tuple[str, int]](), 1, 1, False, False
    for place, token in enumerate(tokens):
        word, follows = token.lower(), tokens[place + 1 :]
        if token == "/" or word == "per":
            sign = -1
        elif re.fullmatch(r"-?\d+", token) or (word in ("squared", "cubed") and parts):
            if not parts:
                return None
            last, old = parts.pop()
            parts.append((last, (1 if old > 0 else -1) * int(_POWERS.get(word, token))))
        elif word in _POWERS and follows:
            power = int(_POWERS[word])
        elif _PREPOSITIONS.fullmatch(word) and follows and follows[0].isalpha():
            continue
        elif _counts(token):
            return None
        elif (name := _name(token)) is not None:
            parts.append((name, sign * power))
            power, waiting, after_noun = 1, False, True
        elif _HARMLESS.fullmatch(word):
            after_noun = False
        elif not (after_noun and _PREPOSITIONS.fullmatch(tokens[place - 1].lower())):
            waiting = not single
            parts += [(word, 1)] * single
    return None if waiting else _spelled(parts)


def _spelled(parts: list[tuple[str, int]]) -> str:
    """The unit in base units, "9.8 meter / second ** 2"; counted things and currencies by their names."""
    registry = _registry()
    known = [registry.Unit(name[1:]) ** power for name, power in parts if name.startswith(" ")]
    others = sorted(f"{name}{power}" for name, power in parts if not name.startswith(" "))
    if not known:
        return " ".join(others)
    unit = prod(known, start=registry.dimensionless)
    try:
        return " ".join([f"{registry.Quantity(1, unit).to_base_units():.9g}", *others])
    except (TypeError, ArithmeticError):  # degrees Celsius with a power, or a unit with a huge one
        return " ".join([f"{unit}", *others])


def _name(token: str) -> str | None:
    """A unit's name behind a space, a currency's or a counted thing's; None for other words."""
    word = token.lower()
    if _NOUNS.fullmatch(word):
        return word
    for spelling in (token, word):
        if (unit := _unit_name(spelling)) is not None:
            return unit
    if (currency := _currencies().get(token if token.isupper() and len(token) == 3 else word)) is not None:
        return currency
    is_plural = word.isascii() and len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else None


@cache
def _unit_name(word: str) -> str | None:
    """A unit that a word names, behind a space; physical constants are no units, nor is `units` a micronit."""
    for prefix, unit, _ in _registry().parse_unit_name(word):
        is_symbol = len(word) < 5 or word.startswith(prefix) or not word.endswith("s")
        if is_symbol and unit not in _constants():
            return f" {word}"
    return None


@cache
def _registry() -> Any:
    from pint import UnitRegistry

    return UnitRegistry(autoconvert_offset_to_baseunit=True)


@cache
def _constants() -> frozenset[str]:
    lines = (files("pint") / "constants_en.txt").read_text(encoding="utf-8").splitlines()
    named = [line.split("#")[0].split("=") for line in lines if "=" in line and not line.startswith("#")]
    return frozenset(name.strip() for name, *_ in named) - {"standard_atmosphere"}


@cache
def _currencies() -> dict[str, str]:
    """The last word of each currency's name, "dollar", by its ISO code and by that word, singular and plural."""
    from babel.numbers import get_currency_name, list_currencies

    found = dict[str, str]()
    for code in list_currencies("en"):
        one, many = (get_currency_name(code, count, "en").split()[-1].lower() for count in (1, 2))
        found |= {code: one, one: one, many: one}
    return found


def _counts(word: str) -> bool:
    """Whether a word is a number, a part of one, or joins numbers: "two", "tenths", "Millionen", "plus"."""
    stem = re.sub("ths?$", "", re.sub("ie(ths?)$", r"y\1", word))
    is_number = number_of_words(stem.removesuffix("s")) is not None or _scale(stem) is not None
    return is_number or _COUNTS.fullmatch(word.lower()) is not None


def _scale(word: str) -> int | None:
    """The number by which a word multiplies the one before it, "Millionen", "万"; None for other words."""
    if len(word) == 1 and word.isascii() and word != "k":
        return None
    small = word.casefold()
    english, others = _scales("short", 0), _scales("long", 1)
    if scale := english.get(small) or english.get(small.removesuffix("s")) or others.get(small):
        return scale
    values = [int(unicodedata.numeric(char, 0)) for char in small]
    if small and all(values):
        return prod(values)
    return None if _unit_name(word) else _scales("short", 1).get(small)


@cache
def _scales(form: str, first: int) -> dict[str, int]:
    """The multiplying words of CLDR's compact numbers, long or also short, in English or in other languages."""
    found = {} if first else dict(_OTHER_SCALES)
    for size, pattern in _patterns(LOCALES[first : None if first else 1], form):
        word = re.sub(r"[0'.\s\u200f\u200e]", "", pattern).casefold()
        if len(word) > 1 or not word.isascii():
            found.setdefault(word, size // 10 ** (pattern.count("0") - 1))
    return {word: size for word, size in found.items() if word}


def _patterns(locales: tuple[str, ...], form: str) -> Iterator[tuple[int, str]]:
    from babel import Locale

    for locale, length in product(locales, ("long", "short") if form == "short" else ("long",)):
        for patterns in Locale.parse(locale).compact_decimal_formats[length].values():
            yield from ((int(size), pattern.pattern) for size, pattern in patterns.items())
