"""What the words behind a number say: pint's units, currencies and multiplying words of CLDR, counted things.

A word that is none of these, and that is not known to say nothing, may change the number: then all words are left.
"""

import re
import unicodedata
from functools import cache
from importlib.resources import files
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
_ENGLISH, _OTHER_LOCALES = LOCALES[:1], LOCALES[1:]
_TOKEN = re.compile(r"[^\W\d_]+|-?\d+|/")


DEGREE = "0.0174532925 radian"  # as `Words.unit` has it


class Words(NamedTuple):
    """By what the words multiply a number, and its unit in one spelling, "" for none."""

    factor: int
    unit: str


def read_words(text: str, *, single: bool) -> Words | None:
    """What the words behind a number say, or None if one of them is not known; `single` if the number is 1."""
    text = re.sub(r"[{}^]|\\cdot|\\[,;: ]|[()]", " ", text).replace(".", "")  # "sq." is "sq"
    text = re.sub(r"\bdeg(?:ree)?s?\s+(C|F)[a-z]*(?![a-z])", r"deg\1", text)  # degrees Celsius -> degC
    text = re.sub(r"\bdeg(?:ree)?s?\s+K[a-z]*(?![a-z])", "K", text)  # deg Kelvin -> K
    tokens = _TOKEN.findall(text)
    factor = 1
    while tokens and (scale := _scale(tokens[0])):  # such as "thousand"
        factor *= scale
        del tokens[0]
    unit = _unit(tokens, single)
    return None if unit is None else Words(factor, unit)


def _unit(tokens: list[str], single: bool) -> str | None:
    """The unit that words spell, each with its power; None if one may change the number.

    An unknown word may stand before a counted thing, as an adjective, and in "of rice" behind one.
    """
    parts = list[tuple[str, int]]()  # names with their powers
    sign = 1  # -1 behind "per"
    power = 1  # of the next unit: 2 behind "square"
    needs_noun = False  # True behind an unknown word, until a counted thing or a unit follows
    is_counted = False  # the last noun is a counted thing or a unit, not a word such as "total"
    says_of_what = False  # behind "bags of"
    for token, following in zip(tokens, [*tokens[1:], ""], strict=False):
        word = token.lower()
        if _PREPOSITIONS.fullmatch(word) and following.isalpha():  # at the end, "in" are inches
            says_of_what = is_counted
            continue
        # "squared" is of the unit before it, if there is one, and else of the next.
        is_exponent = re.fullmatch(r"-?\d+", token) or (word in ("squared", "cubed") and parts)
        if is_exponent and not parts:
            return None
        if is_exponent:
            name, old = parts.pop()
            exponent = int(_POWERS.get(word, token))
            parts.append((name, exponent if old > 0 else -exponent))  # a unit behind "per" stays there
        elif word in ("/", "per"):
            sign = -1
        elif word in _POWERS and following:
            power = int(_POWERS[word])
        elif _changes_number(token):  # a word such as half
            return None
        elif unit := _name(token):
            parts.append((unit, sign * power))
            power = 1
            needs_noun = False
            is_counted = True
        elif _HARMLESS.fullmatch(word):
            is_counted = False
        elif not says_of_what:
            if single:  # 1 apple: a counted thing in the singular, which no plural's ending shows
                parts.append((word, 1))
            needs_noun = not single
        says_of_what = False
    return None if needs_noun else _spelled(parts)


def _spelled(parts: list[tuple[str, int]]) -> str:
    """The unit in base units, "9.8 meter / second ** 2"; counted things and currencies by their names.

    `parts` are names, as `_name` gives them, with their powers.
    """
    registry = _registry()
    units, others = [], []
    for name, power in parts:
        if name.startswith(" "):  # so `_name` marks pint's units
            units.append(registry.Unit(name[1:]) ** power)
        else:
            others.append(f"{name}{power}")
    others.sort()
    if not units:
        return " ".join(others)
    unit = prod(units, start=registry.dimensionless)
    try:
        spelled = f"{registry.Quantity(1, unit).to_base_units():.9g}"
    except (TypeError, ArithmeticError):  # degrees Celsius with a power, or a unit with a huge one
        spelled = f"{unit}"
    return " ".join([spelled, *others])


def _name(token: str) -> str | None:
    """A unit's name behind a space, a currency's or a counted thing's; None for other words."""
    word = token.lower()
    if _NOUNS.fullmatch(word):
        return word
    unit = _unit_name(token) or _unit_name(word)
    if unit:
        return unit
    is_code = token.isupper() and len(token) == 3  # such as USD
    currency = _currencies().get(token if is_code else word)
    if currency:
        return currency
    # Any English plural is a counted thing; "glass", "bonus" and "this" are none.
    is_plural = word.isascii() and len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else None


@cache
def _unit_name(word: str) -> str | None:
    """A unit that a word names, behind a space; physical constants are no units, nor is `units` a micronit."""
    for prefix, unit, _ in _registry().parse_unit_name(word):
        # A long word in the plural has no prefix that is a mere sign, as the u of `units` would be; pint gives that
        # prefix by its name, micro, with which the word does not begin.
        is_allowed = len(word) < 5 or word.startswith(prefix) or not word.endswith("s")
        if is_allowed and unit not in _constants():
            return f" {word}"
    return None


@cache
def _registry() -> Any:
    from pint import UnitRegistry

    return UnitRegistry(autoconvert_offset_to_baseunit=True)


@cache
def _constants() -> frozenset[str]:
    text = (files("pint") / "constants_en.txt").read_text(encoding="utf-8")
    names = re.findall(r"^([^#=\n]+)=", text, re.MULTILINE)
    return frozenset(map(str.strip, names)) - {"standard_atmosphere"}


@cache
def _currencies() -> dict[str, str]:
    """The last word of each currency's name, "dollar", by its ISO code and by that word, singular and plural."""
    from babel.numbers import get_currency_name, list_currencies

    words = dict[str, str]()
    for code in list_currencies("en"):
        singular = get_currency_name(code, 1, "en").split()[-1].lower()
        plural = get_currency_name(code, 2, "en").split()[-1].lower()
        words |= {code: singular, singular: singular, plural: singular}
    return words


def _changes_number(word: str) -> bool:
    """Whether a word is a number, a part of one, or joins numbers: "two", "tenths", "Millionen", "plus"."""
    if _COUNTS.fullmatch(word.lower()):
        return True
    with_y = re.sub("ie(ths?)$", r"y\1", word)  # twentieth as twentyth
    stem = re.sub("ths?$", "", with_y)
    return number_of_words(stem.removesuffix("s")) is not None or _scale(stem) is not None


def _scale(word: str) -> int | None:
    """The number by which a word multiplies the one before it, "Millionen", "万"; None for other words."""
    if len(word) == 1 and word.isascii() and word != "k":
        return None  # a short form, such as M, is a unit too
    small = word.casefold()
    english = _scales(_ENGLISH, "long")  # its short forms are letters
    others = _scales(_OTHER_LOCALES, "long")
    for scale in (english.get(small), english.get(small.removesuffix("s")), others.get(small)):
        if scale:
            return scale
    values = [int(unicodedata.numeric(char, 0)) for char in small]
    if small and all(values):  # of signs that are numbers, such as 万
        return prod(values)
    if _unit_name(word):  # rather than a short form of another language
        return None
    return _scales(_OTHER_LOCALES, "short").get(small)


@cache
def _scales(locales: tuple[str, ...], length: str) -> dict[str, int]:
    """The multiplying words of CLDR's compact numbers, such as 1000 for "0 thousand", and ours for English.

    `length` is "long" or, for shorter forms, "short".
    """
    from babel import Locale

    scales = dict(_OTHER_SCALES) if locales == _ENGLISH else {}
    for locale in locales:
        for patterns in Locale.parse(locale).compact_decimal_formats[length].values():
            for size, pattern in patterns.items():
                # The pattern of 10,000 may be "00 thousand": two digits stand before the word, which then means 1,000.
                word = re.sub(r"[0'.\s\u200f\u200e]", "", pattern.pattern).casefold()
                digits = pattern.pattern.count("0")
                if len(word) > 1 or (word and not word.isascii()):  # a single letter may be a unit
                    scales.setdefault(word, int(size) // 10 ** (digits - 1))
    return scales
