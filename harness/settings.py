"""The configuration: the folders of its YAML files, and checked dataclasses from their sections.

`${embedded:NAME}` is a folder of the embedded weights, `${below:RESULTS_DIR,RUN_NAME}` a run's folder, and
`${with_options:A,B}` is B for a benchmark with options, else A. `${by_benchmark:{NAME: A, other: B}}` is A for the
benchmark NAME, and B for a benchmark that is not named.
"""

import codecs
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvsweep.harness.overrides import hydra_overrides, quoted
from kvsweep.messages.checked import checked
from kvsweep.messages.command_line import did_you_mean
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import each_text, folder_below
from kvsweep.run_files.safe_files import at_home

WEIGHTS = Path(__file__).resolve().parent / "toy" / "weights"


# Beside this package's folder, both in the repository and in an installed wheel.
CONF = Path(__file__).resolve().parents[1] / "conf"


def own_folder() -> Path | None:
    """Return ./conf if `kvsweep init` made it, which its kvsweep.yaml shows; its choices come beside the package's."""
    folder = Path.cwd() / "conf"
    return folder if (folder / "kvsweep.yaml").is_file() else None


def conf_files(group: str) -> dict[str, Path]:
    """Return a configuration group's YAML files by name, with those in the user's folder."""
    files = {path.stem: path for path in _yaml_files(CONF / group)} | own_conf_files(group)
    return dict(sorted(files.items()))


def own_conf_files(group: str) -> dict[str, Path]:
    """Return the YAML files of a group in the user's folder, by name; raises UserError for a shipped file's name."""
    folder = own_folder()
    files = _yaml_files(folder / group) if folder else []
    for path in files:
        if (CONF / group / path.name).exists():
            raise UserError(f"{path} has the name of a shipped file, which would be taken in its place: rename it.")
    return {path.stem: path for path in files}


def _yaml_files(folder: Path, *, below: bool = False) -> list[Path]:
    """Return a folder's YAML files, with `below` those in its folders too; hidden files do not count."""
    files = []
    for path in folder.rglob("*.yaml") if below else folder.glob("*.yaml"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden:
            files.append(path)
    return sorted(files)


def choices(group: str) -> list[str]:
    return list(conf_files(group))


def own_overrides() -> list[str]:
    """Return Hydra's search-path override for ./conf; also put its parent on sys.path, for child processes too."""
    folder = own_folder()
    if folder is None:
        return []
    for path in _yaml_files(folder, below=True):
        _check_yaml(path)
    import_from(str(folder.parent))
    return [f"hydra.searchpath=[{quoted(f'file://{folder}')}]"]


def import_from(folder: str | None) -> None:
    """Let this process import a folder's modules, which never hide Python's or a package's modules."""
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def _check_yaml(path: Path) -> None:
    """Refuse a user's file that Hydra would misread or end in a traceback for."""
    data = path.read_bytes()
    if data.startswith(codecs.BOM_UTF8):
        raise UserError(f"{path} begins with a byte order mark: save it as UTF-8 without one.")
    try:
        node = yaml.compose(data, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(_yaml_fault(error, path)) from error
    if not isinstance(node, yaml.MappingNode | None):  # None: an empty file
        raise UserError(f"{path}:{node.start_mark.line + 1} is no setting: write NAME: VALUE lines.")


def _yaml_fault(error: yaml.YAMLError, path: Path | None = None) -> str:
    """Return the sentence for text that is no YAML, with the file and line where that is known."""
    mark = getattr(error, "problem_mark", None)
    place = str(path or getattr(mark, "name", None) or "a file")
    if mark:
        place += f":{mark.line + 1}"
    problem = getattr(error, "problem", None) or str(error)
    return f"{place} is no YAML ({problem}): correct that line; spaces alone indent."


def compose_config(*overrides: str, name: str = "config") -> DictConfig:
    """Compose `conf/<name>.yaml` with KEY=VALUE overrides, as the command line does."""
    from hydra import compose, initialize_config_dir  # hydra takes as long as the rest of this module

    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(name, [*own_overrides(), *hydra_overrides(overrides, target_classes, multirun=False)])


def target_classes(section: str) -> list[type]:
    """Return the classes named in a group's files; a class that cannot be imported, or is not there, is left out."""
    targets = set[str]()
    for path in conf_files(section).values():
        targets.update(re.findall(r"^_target_: *(\S+)", path.read_text(), re.MULTILINE))
    classes = []
    for target in sorted(targets):
        with suppress(ImportError):
            cls = _imported(target)
            if cls is not None:
                classes.append(cls)
    return classes


def _imported(target: str) -> Any:
    """Return the class that a `_target_` names, MODULE.CLASS; None if its module has nothing of that name.

    Raises ImportError that says what is wrong, with file and line (its `path`) of a mistake in the user's code.
    """
    name, _, class_name = target.rpartition(".")
    folder = own_folder()
    import_from(str(folder.parent) if folder else None)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        place = _place_of(error)
        if place is None:  # there is no such module
            raise ImportError(str(error)) from error
        what = error.msg if isinstance(error, SyntaxError) else f"{type(error).__name__}: {error}"
        raise ImportError(f"{place}: {what}", path=place) from error
    # Modules of Python and of packages come before the user's, so the file that was imported may be another.
    if folder:
        file = folder.parent / f"{name.replace('.', '/')}.py"
        taken = getattr(module, "__file__", None) or "Python's own"  # a module such as sys has no file
        if file.is_file() and not taken.startswith(str(folder.parent)):
            raise ImportError(f"{taken} is taken in place of {file}, so rename that file")
    return getattr(module, class_name, None)


def _place_of(error: BaseException) -> str | None:
    """Return file and line of a mistake that ended the import of a module; None if the module was not there."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = []
    # Without the frames of this file and of Python's import system (importlib, and "<frozen ...>").
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(("<", __file__, importlib.__file__)):
            places.append(f"{frame.filename}:{frame.lineno}")
    return places[-1] if places else None  # the innermost is where the code failed


def wrapped_choices(group: str) -> str:
    """Return the names in a configuration group, as `kvsweep --help` shows them."""
    indent = " " * 13
    text = textwrap.fill(", ".join(choices(group)), width=105, initial_indent=indent, subsequent_indent=indent)
    return text.lstrip()


def completions(groups: Iterable[str], begun: str) -> list[str]:
    """Return Tab's completions of the text begun: GROUP=NAME, and keys up to their equals sign."""
    words = []
    if "=" in begun:
        for group in groups:
            words += [f"{group}={name}" for name in choices(group)]
    else:
        words += [f"{name}=" for name in (*groups, *config_keys(compose_config()))]
    return [word for word in words if word.startswith(begun)]


OmegaConf.register_new_resolver("embedded", lambda name: str(WEIGHTS / name), replace=True)
OmegaConf.register_new_resolver("below", lambda parent, name: str(folder_below(str(parent), str(name))), replace=True)
OmegaConf.register_new_resolver(
    "with_options",
    lambda without, given, *, _root_: given if "wrong_1" in _root_.benchmark.columns else without,
    replace=True,
)
OmegaConf.register_new_resolver(
    "by_benchmark", lambda values, *, _root_: values.get(_root_.benchmark.name, values["other"]), replace=True
)
_T = TypeVar("_T")


def build(cls: type[_T], section: str, node: Mapping[str, Any]) -> _T:
    """Make a checked dataclass of a configuration section; `section` is its name on the command line before the dot."""
    return checked(cls, plain(node), f"{section}.")


def build_target(section: str, node: Mapping[str, Any], base: type) -> Any:
    """Make the dataclass that a section's `_target_` names, a `base`, from the other settings, as `build` does."""
    cls = target_class(section, node, base)
    settings = plain(node)
    settings.pop("_target_")
    return build(cls, section, settings)


def target_class(section: str, node: Mapping[str, Any], base: type) -> type[Any]:
    """Return the dataclass that a section's `_target_` names; raises UserError if it is not a `base`."""
    path = str(node.get("_target_"))
    rule = f"name a dataclass that extends {base.__module__}.{base.__qualname__}"
    try:
        cls = _imported(path)
    except ImportError as error:
        hint = "correct that line" if error.path else rule  # `_imported` gives the place of a mistake in the code
        raise UserError(f"{section}._target_={path} cannot be imported ({error}): {hint}.") from error
    if not (inspect.isclass(cls) and issubclass(cls, base) and dataclasses.is_dataclass(cls)):
        raise UserError(f"{section}._target_={path} is no {section}: {rule}.")
    return cls


def plain(node: Any) -> dict[str, Any]:
    """Return a section of the configuration as a dictionary of plain values; UserError if it is no section.

    In every text the home folder stands in place of a leading `~`.
    """
    if not isinstance(node, Mapping):  # a section of OmegaConf is one, too
        hint = "name the setting with its value, such as cache.bits=4, or leave that word out"
        raise UserError(f"{node or 'null'} stands where a group of settings is needed (grid, cache, report): {hint}.")
    values: Any = node
    if OmegaConf.is_config(node):
        values = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    return each_text(at_home, values)


@contextmanager
def plain_config_errors() -> Iterator[None]:
    """Turn an error of Hydra or OmegaConf, such as an unknown key, into a UserError of one sentence."""
    try:
        yield
    except yaml.YAMLError as error:
        raise UserError(_yaml_fault(error)) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_sentence_of(error)) from error
    except ValueError as error:  # of Hydra, which has no class of its own for this one
        if not str(error).startswith("Config group override"):
            raise
        groups = "model, benchmark, policy and the other groups are chosen by name"
        raise UserError(f"{groups}, and not by a number or null: write model=toy_qwen.") from error


def _sentence_of(error: HydraException | OmegaConfBaseException) -> str:
    """Return what is wrong on the command line, from the text of an error of Hydra or OmegaConf."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        word = error.override
        name = word.partition("=")[0] if "=" in word else "KEY"
        form = f"""'{name}="TEXT"' for a text, '{name}=[A,B]' for a list"""
        return f"{word} cannot be read: write {form}, within the shell's quotes."
    # From here on by the wording of Hydra and OmegaConf, whose errors have no fields for the key. Their texts hold, in
    # this order: "Ambiguous value for argument 'draws=1,2'", "Environment variable 'DATA' not found", "UserError raised
    # while resolving interpolation: ...", "Could not override 'policy.bugdet'.", "Could not find 'policy/nope'".
    several = re.match("Ambiguous value for argument '(.+?)=(.*)'\n", text)
    if several:
        key, values = several.groups()
        is_list = key.startswith(("grid.", "recipe."))
        hint = f"write '{key}=[{values}]'" if is_list else "add -m for a job of each"
        return f"{key}={values} has several values: {hint}."
    unset = re.search("Environment variable '(.+?)' not found", text)
    if unset:
        return f"the environment variable {unset[1]} is not set: set it, or write the value."
    # A resolver of this file, such as `below`, has refused a value; OmegaConf adds lines of its own.
    text, _, mistake = text.partition("UserError raised while resolving interpolation: ")
    if mistake:
        return mistake.split("\n")[0]
    mistyped = re.search("Could not override '(.+?)'", text)
    if mistyped:
        key = mistyped[1]
        if "@" in key:  # GROUP@PACKAGE: the file overrides GROUP below its folder's name, its package
            return f"{key} is no setting: begin the experiment's file with the line `# @package _global_`."
        return _unknown_key(key)
    choice = re.search("Could not find '([^/']+)/(.*?)'", text)
    if choice:
        return unknown_choice(choice[1], choice[2])
    return text.split("\nConfig search path:")[0]  # folders, which say nothing of the mistake


def unknown_choice(group: str, name: str, key: str | None = None) -> str:
    """Return the message for a name that a configuration group lacks; `key` is what named it, if not the group."""
    # A file of conf/experiment with the default `model: X` has Hydra look for experiment/model/X, and the word
    # hydra/sweeper=X for hydra/sweeper/X.
    inner, _, rest = name.rpartition("/")
    if group == "hydra":
        return f"hydra/{inner}={rest} is unknown: Hydra's own parts are there, and no plugin of that name is installed."
    if inner in ("model", "benchmark", "policy", "launcher", "tracker", "decoding", "prompt", "engine"):
        return f"conf/{group} names {inner}: {rest} in its defaults: write `- override /{inner}: {rest}` there."
    folder = own_folder()
    if folder and (folder / group / f"{name}.yml").is_file():  # Hydra reads .yaml alone
        return f"{key or group}={name} is unknown: name {folder / group / name}.yml {name}.yaml."
    names = choices(group)
    return f"{key or group}={name} is unknown: {did_you_mean(name, names)}Choose from {', '.join(names)}."


def _unknown_key(key: str) -> str:
    """The sentence for a key that the configuration lacks, with the nearest one of the choices on the command line."""
    if key.startswith("hydra."):
        shown = "`kvsweep --cfg hydra` shows Hydra's settings"
        return f"{key} cannot be set so: {shown}, and a key that is new there begins with a plus (+{key}.NAME=VALUE)."
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    # The keys depend on the choices, such as policy=NAME; of a list of choices none is taken.
    chosen = [argument for argument in sys.argv[1:] if argument.split("=")[0] in groups and "," not in argument]
    keys: list[str] = []
    with suppress(HydraException, OmegaConfBaseException):  # a second mistake, among the choices
        keys = list(config_keys(compose_config(*chosen)))
    same_name = [other for other in keys if other.rpartition(".")[2] == key]
    if same_name:
        return f"{key} is not a setting: did you mean {' or '.join(same_name)}?"
    return f"{key} is not a setting: {did_you_mean(key, keys)}The command's --help names settings."


def config_keys(node: DictConfig, above: str = "") -> Iterator[str]:
    """Yield a configuration's keys; keys of sections have the section's name and a dot in front."""
    for name in map(str, node):
        if name == "_target_":
            continue
        yield f"{above}{name}"
        if OmegaConf.is_missing(node, name):  # a section that still has to be chosen
            continue
        section = node._get_node(name)  # not resolved: an interpolation is no section
        if isinstance(section, DictConfig):
            yield from config_keys(section, f"{above}{name}.")
