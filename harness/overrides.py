"""The KEY=VALUE words of a command line, as Hydra has to get them for the configuration to hold what was typed.

Hydra reads `run_name=1e5` as a number, and takes `benchmark.path=a b(1).jsonl` for a mistake. A word whose setting is a
text by the type of its field is quoted here; so only numbers, lists and mappings have Hydra's grammar.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.types import Quote, QuotedString

from kvsweep.messages.errors import UserError

# Where Hydra's own words stand for several values; a text of such a form has to be quoted by the user.
_FUNCTION = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag|extend_list|int|float|bool|str|json_str)\(.*\)")
_WORD = re.compile(r"(\+{0,2})([^=]*)=(.*)", re.DOTALL)  # ++cache.bits=4 -> "++", "cache.bits", "4"
_KEY = re.compile(r"[\w./@:-]+")
# The types of the fields of each class that a section may be.
Hints = Callable[[str], Sequence[Mapping[str, Any]]]
_OUTSIDE: dict[str, set[Any]] = {"run_name": {str}, "results_dir": {str}, "texts": {str, NoneType}}
_CLASSES = {
    "model": "kvsweep.harness.models.config.ModelConfig",
    "benchmark": "kvsweep.harness.benchmarks.config.BenchmarkConfig",
    "decoding": "kvsweep.harness.decode.request.DecodingConfig",
    "tracker": "kvsweep.harness.sweep.job.TrackerConfig",
    "recipe": "kvsweep.harness.predictor.recipe.Recipe",
}


def hydra_overrides(words: Sequence[str], targets: Callable[[str], Sequence[type]], *, multirun: bool) -> list[str]:
    """The words for Hydra; `targets` gives the classes that a choice of a section, such as launcher, may name.

    With `multirun` a comma separates values of a text too. A word that Hydra would misread raises a UserError.
    """
    hints = cache(lambda section: list(_hints(section, targets)))  # imports classes, so once for each section
    return [_hydra_override(word, hints, multirun) for word in words]


def _hydra_override(word: str, hints: Hints, multirun: bool) -> str:
    """A word for Hydra; raises UserError for one that Hydra would misread."""
    if word.endswith("\r"):  # of a script that Windows wrote
        raise UserError(f"{word[:-1]}\\r ends in a carriage return: save the script with the line ends of Unix.")
    if word.startswith("-"):
        return word
    if word.startswith("~"):
        raise UserError(f"{word} would remove a setting, and a sweep needs each of them: leave the word out.")
    match = _WORD.fullmatch(word)
    if match is None:  # the value of an option, such as that of --config-dir, or what Hydra refuses
        return word
    # Pluses before a key say that it is new.
    plus, key, value = match.groups()
    _check_key(word, plus, key, value)
    if key.startswith("hydra"):
        return word
    types = _types(key, hints)
    if types & {dict, Mapping}:  # ++ sets a key whether the mapping has it or not
        return f"++{key}={value}"
    if plus and "." not in key:
        raise UserError(f"{word} begins with {plus}, which no choice of kvsweep needs: write {key}={value}.")
    # `rows` and `every` are another spelling of keep_ratio and budget, and no field of a class.
    is_of_a_policy = key.startswith("policy.") and (types or key in ("policy.rows", "policy.every"))
    if multirun and not plus and is_of_a_policy:
        plus = "++"  # a policy of the list may lack it, whose job then goes without it
    # Hydra reads an empty value as an empty text, and ??? as a value that is missing.
    is_null = value in ("", "???") or (value == "null" and NoneType in types)
    is_hydras = value[:1] in ("'", '"') or _FUNCTION.fullmatch(value)  # Hydra's own quotes, or a function
    is_text = types and types <= {str, Path, NoneType}
    if not is_text or is_null or is_hydras:
        return f"{plus}{key}={value}"
    texts = value.split(",") if multirun else [value]
    # run_name=1e5 -> run_name="1e5", and of a multirun run_name=a,b -> run_name="a","b"
    return f"{plus}{key}={','.join(map(quoted, texts))}"


def _check_key(word: str, plus: str, key: str, value: str) -> None:
    """Refuse a word whose key is no name of a setting, or one of Hydra's that no sweep can have."""
    if key != key.strip():
        raise UserError(f"{word} has spaces around the equals sign: write {key.strip()}={value.strip()}.")
    if not _KEY.fullmatch(key):
        raise UserError(f"{word} begins with no setting's name: write KEY=VALUE, such as benchmark.limit=3.")
    if key == "hydra/launcher":
        raise UserError(
            f"{word} is a launcher of Hydra's: give launcher=local or launcher=slurm, which start the tasks."
        )
    # The whole section, or a new key of it; a single key without a plus replaces an experiment's list.
    if key == "hydra.sweeper.params" or (plus and key.startswith("hydra.sweeper.params")):
        raise UserError(f"{word} is the form of a file: write -m KEY=A,B on the command line.")


def quoted(text: str) -> str:
    """The text in Hydra's quotes."""
    return QuotedString(text=text, quote=Quote.double).with_quotes()


def _types(key: str, hints: Hints) -> set[Any]:
    """The types of a key's setting in all classes of its section: dict and NoneType of `dict[str, str] | None`."""
    types = set(_OUTSIDE.get(key, ()))
    section, _, below = key.partition(".")
    name = below.partition(".")[0]  # benchmark.columns.group -> "columns"
    for fields in hints(section):
        hint = fields.get(name)
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]
        types.update(get_origin(member) or member for member in members)
    return types - {None}  # of a class without the field


_fields = cache(get_type_hints)


def _hints(section: str, targets: Callable[[str], Sequence[type]]) -> Iterator[Mapping[str, Any]]:
    """Yield the types of the fields, by name, of each class that a section may be."""
    if section in _CLASSES:
        module, _, name = _CLASSES[section].rpartition(".")
        yield _fields(getattr(import_module(module), name))
    elif section in ("policy", "launcher", "engine"):
        yield from map(_fields, targets(section))
