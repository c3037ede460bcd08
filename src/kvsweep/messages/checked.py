"""Check values from outside, settings and rows of files alike: a dataclass with pydantic's types, or one sentence."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kvsweep.messages.command_line import did_you_mean
from kvsweep.messages.errors import UserError

_T = TypeVar("_T")


def checked(cls: type[_T], values: Mapping[str, Any], place: str = "", *, extra: bool = False) -> _T:
    """Make a dataclass of values; `place` stands before a field's name in a message: "policy.", "scores.csv:4 ".

    Raises UserError for a value that is unknown (unless `extra` is true), missing, of another type or out of range. For
    a field of type `Annotated[int, Field(ge=1)]` it says "<place><field>=0 cannot be used: input should be greater than
    or equal to 1." The text of a ValueError from `__post_init__` becomes the UserError's.
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
        raise UserError(_sentence(place, values, error)) from error
    for name, value in field_values.items():
        if isinstance(value, bool) and type(getattr(instance, name)) in (int, float):  # pydantic takes true for 1
            raise UserError(f"{place}{name}={value} cannot be used: input should be a number.")
    return instance


@cache
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _sentence(place: str, values: Mapping[str, Any], error: ValidationError) -> str:
    """Return the sentence of a UserError: all missing values, else the first value that does not fit."""
    faults = error.errors()
    first = faults[0]
    kind = first["type"]
    value = first["input"]
    context = first.get("ctx", {})
    if isinstance(value, str):
        value = value[:200]
    if isinstance(context.get("error"), ValueError):  # of `__post_init__`
        return str(context["error"])
    missing = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    if missing:
        return f"{place}{', '.join(missing)} is missing: give a value."
    where = place + ".".join(_keys(values, first["loc"]))
    if kind == "literal_error":
        return f"{where}={value} is unknown: choose {context['expected']}."
    if kind == "string_type" and type(value) in (int, float):
        return f"""{where}={value} is read as a number: write it in quotes, "{value}"."""
    if kind == "sequence_str" or context.get("class") == "Sequence":
        return f"{where}={value!r} is no list: write '{where}=[{value}]'."
    # Of a union, what each of its types says.
    reasons = [fault["msg"] for fault in faults if fault["loc"][0] == first["loc"][0]]
    reason = ", or ".join(reasons)
    return f"{where}={value!r} cannot be used: {reason[0].lower()}{reason[1:]}."


def _keys(values: Any, loc: Iterable[int | str]) -> Iterator[str]:
    """Yield the keys and numbers of an error's place, without pydantic's names for the members of a union."""
    for part in loc:
        with suppress(LookupError, TypeError):
            values = values[part]
            yield str(part)
