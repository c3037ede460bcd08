"""Check values from outside, settings and rows of files alike: a dataclass with pydantic's types, or one sentence."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kvsweep.messages.command_line import did_you_mean
from kvsweep.messages.errors import UserError

_BOUNDS = {"exclusiveMinimum": "above", "minimum": "at least", "exclusiveMaximum": "below", "maximum": "at most"}
_NOUNS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "null": "null",
}
_OF_NUMBERS = ("greater_than", "less_than", "int_", "float_", "bool_", "finite_")  # kinds of pydantic's errors
_T = TypeVar("_T")


def checked(cls: type[_T], values: Mapping[str, Any], place: str = "", *, extra: bool = False) -> _T:
    """Make a dataclass of values; `place` stands before a field's name in a message: "policy.", "scores.csv:4 ".

    Raises UserError for a value that is unknown (unless `extra` is true), missing, of another type or out of range. For
    a field of type `Annotated[int, Field(ge=1, description="a number of tokens")]` it says "<place><field>=0 is out of
    range: it is a number of tokens, at least 1." The text of a ValueError from `__post_init__` becomes the UserError's.
    """
    fields = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(map(str, values)).difference(fields))
    if unknown and not extra:
        has = f"{place.rstrip('.')} has {', '.join(fields)}"
        raise UserError(f"{place}{unknown[0]} is not a setting: {did_you_mean(unknown[0], fields)}{has}.")
    adapter: TypeAdapter[_T] = _adapter(cls)  # type: ignore[arg-type]
    field_values = {name: value for name, value in values.items() if name in fields}
    try:
        instance = adapter.validate_python(field_values)
    except ValidationError as error:
        raise UserError(_sentence(place, adapter, values, error)) from error
    for name, value in field_values.items():
        if isinstance(value, bool) and type(getattr(instance, name)) in (int, float):  # pydantic takes true for 1
            raise UserError(f"{place}{name}={value} is out of range: {_range(adapter, name)}.")
    return instance


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _sentence(place: str, adapter: TypeAdapter[Any], values: Mapping[str, Any], error: ValidationError) -> str:
    """Return the sentence of a UserError: all missing values, else the first value that does not fit."""
    first = error.errors()[0]
    kind = first["type"]
    value = first["input"]
    context = first.get("ctx", {})
    if isinstance(value, str):
        value = value[:200]
    if isinstance(context.get("error"), ValueError):  # of `__post_init__`
        return str(context["error"])
    missing = []
    for fault in error.errors():
        if fault["type"] == "missing":
            missing.append(".".join(map(str, fault["loc"])))
    if missing:
        verb = "is missing: give it" if len(missing) == 1 else "are missing: give each"
        return f"{place}{', '.join(missing)} {verb} a value."
    where = place + ".".join(_keys(values, first["loc"]))
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ")
        return f"{where}={value} is unknown: choose one of {choices}."
    if kind == "string_type" and type(value) in (int, float):
        return f"""{where}={value} is read as a number: write it in quotes, "{value}"."""
    if kind == "sequence_str" or context.get("class") == "Sequence":
        return f"{where}={value!r} is no list: write '{where}=[{value}]'."
    if kind == "too_short":
        return f"{where}={value} has too few values: name at least {context['min_length']}."
    allowed = _range(adapter, str(first["loc"][0])) if kind.startswith(_OF_NUMBERS) else ""
    if allowed:
        return f"{where}={value!r} is out of range: {allowed}."
    reason = first["msg"]
    return f"{where}={value!r} cannot be used: {reason[0].lower()}{reason[1:]}."


def _keys(values: Any, loc: Iterable[int | str]) -> Iterator[str]:
    """Yield the keys and numbers of an error's place, without pydantic's names for the members of a union."""
    for part in loc:
        with suppress(LookupError, TypeError):
            values = values[part]
            yield str(part)


def _range(adapter: TypeAdapter[Any], field: str) -> str:
    """Return the values that a field of numbers allows, as half a sentence; "" for a field of other types too."""
    class_schema = adapter.json_schema()
    if "$ref" in class_schema:  # a class with fields of its own kind
        _, _, name = class_schema["$ref"].rpartition("/")
        class_schema = class_schema["$defs"][name]
    schema = class_schema["properties"][field]
    first, *others = schema.get("anyOf", [schema])  # of `int | None`: whole numbers, then null
    number = first.get("items", first)  # of a list: each of its numbers
    description = schema.get("description", number.get("description"))
    noun = _noun(number)
    alternatives = [_noun(other) for other in others]
    if not all(alternatives) or not (description or noun):  # a type without a noun
        return ""
    allowed = f"it is {description}" if description else f"it must be {noun}"
    bounds = [f"{words} {number[key]:,.16g}" for key, words in _BOUNDS.items() if key in number]
    if bounds:
        allowed += f", {' and '.join(bounds)}"
    return ", or ".join([allowed, *alternatives])


def _noun(schema: Mapping[str, Any]) -> str:
    """Name a value of a JSON schema's type, or the only value that it allows; "" for another type."""
    return str(schema.get("const") or _NOUNS.get(schema.get("type", ""), ""))
