"""Where the configuration lies, beside the repository's packages or inside an installed one, and what its YAML may ask.

`${embedded:NAME}` is a folder of the embedded weights, `${choices:GROUP}` the names in a group of the configuration.
"""

import dataclasses
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from analysis.records import UserError
from harness.toy.paths import WEIGHTS

_BESIDE_REPOSITORY = Path(__file__).resolve().parent.parent / "conf"
_INSIDE_WHEEL = Path(__file__).resolve().parent / "conf"
CONF = _INSIDE_WHEEL if _INSIDE_WHEEL.is_dir() else _BESIDE_REPOSITORY


def _choices(group: str) -> str:
    """The names as `kvsweep --help` shows them."""
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    return textwrap.fill(", ".join(names), width=92, subsequent_indent=" " * 13)


OmegaConf.register_new_resolver("embedded", lambda name: str(WEIGHTS / name), replace=True)
OmegaConf.register_new_resolver("choices", _choices, replace=True)
_T = TypeVar("_T")


def build(cls: type[_T], section: str, node: DictConfig | Mapping[str, Any]) -> _T:
    """Make a dataclass of a configuration section.

    Raises:
        UserError: a setting that is unknown, missing, of another type, or out of range.
    """
    values = _container(node)
    known = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise UserError(f"{section}.{unknown[0]} is not a setting: {section} has {', '.join(known)}.")
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise UserError(_sentence(section, error)) from error


def _container(node: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    if not OmegaConf.is_config(node):
        return dict(node)
    return OmegaConf.to_container(node, resolve=True, throw_on_missing=True)  # type: ignore[return-value]


def _whole(name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}={value} is out of range: it must be a whole number of at least {least}.")
    return value


def _sentence(section: str, error: ValidationError) -> str:
    first = error.errors()[0]
    own = first.get("ctx", {}).get("error")
    if isinstance(own, ValueError):
        return str(own)
    where = ".".join([section, *map(str, first["loc"])])
    if first["type"] == "missing":
        return f"{where} is missing: give it a value."
    return f"{where}={first['input']!r} cannot be used: {first['msg'][0].lower()}{first['msg'][1:]}."
