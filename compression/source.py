"""A policy's code as part of a cell's identity: the Python files that decide, and a hash of their code."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Self

from kvsweep.run_files.row_types import content_hash

_PACKAGE = __name__.partition(".")[0]
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_INSTALLED = {"site-packages", "dist-packages"}
# Files that were split or written in other words, with no change to what they decide: the earlier hash, and the hashes
# of the same code.
_SAME = {
    "51e013485bbff8fd": "09c8cd9aa89ce74f f828c59c70e61850 44d2eba5b7a97b03 2993f3293bcb2583 452f378643dc5ddc",
    "44d2eba5b7a97b03": "09c8cd9aa89ce74f f828c59c70e61850",
    "09c8cd9aa89ce74f": "f828c59c70e61850",
    "d27f22bd378465eb": "456a7ecc2e035784 53bf084413eccf99 c2b51fa733339c00 ce6e1a6c7fe98bb7 d2b83b105bfb24a9",
    "cdd0d552a6d2afd8": "2a771c5e726fe683 507b3454a1180959 78890b0ee6709594 9ef7e94a7bce02ee "
    "f717b8de402a864c fb74280df4ec4cb8 fe176eed77e4358d",
    "e61dc31edcc66a29": "9d5864bb71a5ead0 c73a44824ef98ef1 f662ace8fa978a85",
    "4e10a0ecf601f16f": "01d6fcfe4e419868 1056165c199a4ebc 49bf8cff90cefffb b6a205ba1d83b7a2",
    "1f2ad6dfda92dd89": "68e9bbb5d927208b",
}


class _Module(NamedTuple):
    """A module that was imported, or that a function will import."""

    name: str
    file: Path
    is_package: bool

    @classmethod
    def of(cls, module: ModuleType) -> Self:
        file = getattr(module, "__file__", None) or "/"  # built-in modules have no file
        return cls(module.__name__, Path(file).resolve(), hasattr(module, "__path__"))

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The module of this name, which is not imported for it; None if there is none."""
        if name in sys.modules:
            return cls.of(sys.modules[name])
        folders, spec = None, None
        for package in accumulate(name.split("."), "{}.{}".format):  # a, a.b, a.b.c
            spec = PathFinder.find_spec(package, folders)
            if spec is None:
                return None
            folders = spec.submodule_search_locations or []  # where the next name is looked for; [] of a plain module
        if spec is None or spec.origin is None:  # a folder without __init__.py has no file
            return None
        return cls(name, Path(spec.origin), bool(folders))


def is_own(policy_class: type) -> bool:
    """True if a policy's class is the user's and not kvsweep's."""
    return policy_class.__module__.partition(".")[0] != _PACKAGE


def source_files(policy_class: type) -> dict[Path, str]:
    """Return the Python files that define a policy's class, each with a hash of its code.

    These are the modules of the class and its base classes, except `compression.policy`; for a user's class also the
    modules that these import from its own package or from a place where nothing is installed. The hash ignores
    comments, docstrings and layout.
    """
    modules = {_Module.of(sys.modules[cls.__module__]) for cls in policy_class.__mro__}
    waiting = [module for module in modules if _belongs(module, policy_class)]
    hashes: dict[Path, str] = {}
    while waiting:
        module = waiting.pop()
        if module.file in hashes:
            continue
        text = importlib.util.decode_source(module.file.read_bytes())
        hashes[module.file] = _hash_of_code(text)
        if is_own(policy_class):
            waiting += [other for other in _imported(text, module) if _belongs(other, policy_class)]
    return hashes


def code_hash(policy_class: type) -> str:
    return content_hash(sorted(source_files(policy_class).values()))


def is_same_code(earlier: str, now: str) -> bool:
    """True if two hashes of one policy's code stand for the same code."""
    return now == earlier or now in _SAME.get(earlier, "").split()


def _belongs(module: _Module, policy_class: type) -> bool:
    """True if a module's code is part of the policy's identity: for our policies, one in compression.policies.

    For a user's: a Python file of the class's own package, or of no package that is kvsweep's, Python's or installed.
    """
    if not is_own(policy_class):
        return module.name.startswith(f"{_PACKAGE}.compression.policies")
    if module.file.suffix != ".py":  # compiled code cannot be read
        return False
    package, _, _ = module.name.partition(".")
    own_package, _, _ = policy_class.__module__.partition(".")
    is_ours_or_pythons = package in (_PACKAGE, *sys.stdlib_module_names)
    is_installed = not _INSTALLED.isdisjoint(module.file.parts)
    # A user's package counts also where it is installed.
    return package == own_package or not (is_ours_or_pythons or is_installed)


def _imported(text: str, module: _Module) -> Iterator[_Module]:
    """Yield the modules that a module imports, anywhere in the file, also in functions that have not run."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    return filter(None, map(_Module.named, _imported_names(text, package)))


@lru_cache(maxsize=256)  # a sweep asks for every cell
def _imported_names(text: str, package: str) -> list[str]:
    """The absolute names of all that a file imports, `package` for relative ones; of `from a import b` a and a.b."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            absolute = importlib.util.resolve_name(base, package) if node.level else base
            names += [absolute, *(f"{absolute}.{alias.name}" for alias in node.names)]
    return names


@lru_cache(maxsize=256)
def _hash_of_code(text: str) -> str:
    """Hash a file's syntax tree, in which each docstring is empty."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Expr(ast.Constant(""))
    return content_hash(ast.unparse(tree))
