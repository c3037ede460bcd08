"""Imports run one way between the packages and between the rooms of harness; no folder name collides with another."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
# What everyone stands on, beside `kvsweep/__init__.py`.
GROUND = {"messages", "run_files", "processes", "annexes"}
PACKAGES = ("kernels", "compression", "harness", "analysis")
# Each room and the rooms that it may import from.
BELOW: dict[str, tuple[str, ...]] = {
    "ground": (),
    "analysis": ("ground",),
    "kernels": ("ground",),
    "compression": ("kernels", "ground"),
    "harness.provenance": ("ground",),
    "harness.toy": ("ground",),
    "harness.models": ("harness.provenance", "compression", "kernels", "ground"),
    "harness.gguf": ("harness.models", "ground"),
    "harness.overrides": ("ground",),
    "harness.settings": ("harness.overrides", "harness.toy", "ground"),
    "harness.grading": ("harness.models", "harness.settings", "harness.provenance", "ground"),
    "harness.benchmarks": ("harness.grading", "harness.settings", "harness.toy", "harness.models", "ground"),
    "harness.decode": ("harness.settings", "harness.models", "compression", "kernels", "ground"),
}
TOP = (
    "sweep",
    "judge",
    "notebook",
    "policy_check",
    "replay",
    "verify",
    "predictor",
    "trace",
    "screen",
    "rounds",
    "command",
)
for room in TOP:
    BELOW[f"harness.{room}"] = (*BELOW, "analysis")
# The files of `kvsweep init`, which are copied and belong to no package.
TEMPLATE = ROOT / "harness/template"
FILES = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SOURCE = ROOT / "src/kvsweep"
GROUND_FILES = [path for name in GROUND for path in (*SOURCE.glob(f"{name}.py"), *SOURCE.glob(f"{name}/*.py"))]
MODULES = sorted([*GROUND_FILES, *(path for path in FILES if not path.is_relative_to(TEMPLATE))])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix().replace("src/kvsweep/", "ground/")


@cache
def imported(source: str) -> set[str]:
    """Every module a source names in an import, wherever in it, and each name taken from one as if a module."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_project(names: Iterable[str]) -> set[str]:
    """The project's modules among the names, those of the ground floor as `ground.NAME`."""
    found = {name.removeprefix("kvsweep.") for name in names if name.split(".")[0] == "kvsweep"}
    return {f"ground.{name}" if name.split(".")[0] in GROUND else name for name in found}


def is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def room_of(module: str) -> str:
    return next(room for room in sorted(BELOW, key=len, reverse=True) if is_within(module, (room,)))


@pytest.mark.parametrize("path", [p for p in MODULES if p != ROOT / "harness/__init__.py"], ids=name_of)
def test_imports_run_one_way(path):
    room = room_of(name_of(path).removesuffix(".py").replace("/", "."))
    wrong = {module for module in of_project(imported(path.read_text())) if not is_within(module, (room, *BELOW[room]))}
    assert not wrong


def test_the_core_imports_no_annex():
    """`make size` says which files are an annex's; cli, which registers them, imports one when its command runs."""
    parts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["kvsweep"]["size"]
    places = [ROOT / place for part in parts.values() for place in part.get("places", ())]
    annexes = {path for path in MODULES if any(path.is_relative_to(place) for place in places)}
    names = {name_of(path).removesuffix(".py").replace("/", ".") for path in annexes}
    for path in set(MODULES) - annexes:
        wanted = of_project(imported(path.read_text()))
        reached = {name for name in names if is_imported(name, wanted)}
        assert not reached, path


def test_no_room_lies_below_itself():
    rooms = list(BELOW)
    assert all(rooms.index(below) < rooms.index(room) for room, rest in BELOW.items() for below in rest)


def test_no_two_files_import_each_other():
    names = {name_of(path).removesuffix(".py").replace("/", "."): path for path in MODULES}
    wanted = {name: of_project(imported(path.read_text())) for name, path in names.items()}
    edges = {name: {other for other in names if other != name and is_imported(other, wanted[name])} for name in names}
    assert list(TopologicalSorter(edges).static_order())  # raises CycleError


def is_imported(module: str, names: set[str]) -> bool:
    return any(name == module or name.rpartition(".")[0] == module for name in names)


def test_the_import_reader_sees_every_form_of_import():
    source = "import torch, a.b as r\ndef f():\n    from kvsweep.harness import models\n    from a.b import c as d\n"
    assert imported(source) == {"torch", "a.b", "kvsweep.harness.models", "a.b.c"}
    assert not is_within("harness.modelsuite", ("kvsweep.harness.models",))


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=name_of)
def test_init_files_hold_a_docstring_at_most(path):
    tree = ast.parse(path.read_text())
    assert len(tree.body) == (0 if ast.get_docstring(tree) is None else 1)


def test_every_package_folder_has_an_init_file():
    folders = {path.parent for path in MODULES}
    assert not {name_of(folder) for folder in folders if not (folder / "__init__.py").exists()}


@pytest.mark.slow  # parses all files
def test_no_file_imports_a_folder_by_its_bare_name():
    files = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert len(files) > 300
    bare = {path: {name for name in imported(path.read_text()) if name.split(".")[0] in PACKAGES} for path in files}
    assert not {name_of(path): names for path, names in bare.items() if names}


def test_kernels_can_be_imported_where_triton_cannot():
    run_python("import sys; sys.modules['triton'] = None; import kvsweep.kernels.implementation")
    run_python("import sys, kvsweep.kernels; assert not {'triton', 'torch'} & sys.modules.keys()")


@pytest.mark.slow
def test_the_analysis_needs_no_torch():
    paths = sorted((ROOT / "analysis").rglob("[!_]*.py"))
    modules = ", ".join(f"kvsweep.{name_of(path)[:-3].replace('/', '.')}" for path in paths)
    run_python(
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'triton'}: raise ImportError(name)\n"
        f"sys.meta_path.insert(0, Blocked())\nimport {modules}"
    )


def test_nothing_but_kvsweep_can_be_imported():
    bare = ", ".join(f"'{name}'" for name in PACKAGES)
    run_python(f"from importlib.util import find_spec\nassert not [n for n in ({bare}) if find_spec(n)]")


def test_every_package_has_its_link():
    links = {path.name: path.resolve() for path in (ROOT / "src" / "kvsweep").iterdir() if path.is_symlink()}
    assert links == {name: ROOT / name for name in PACKAGES}


def run_python(program: str):
    """Run a program in a fresh interpreter, away from the repository."""
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
    command = [sys.executable, "-P", "-c", start + program]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, capture_output=True, env=environment, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_packages_that_the_owner_names_are_required_and_imported():
    named = {"torch", "transformers", "datasets", "hydra", "pandas", "matplotlib", "seaborn", "math_verify", "triton"}
    used = {name.partition(".")[0] for path in MODULES for name in imported(path.read_text())}
    assert named <= used
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["engine"]]
    assert {name.replace("_", "-").replace("hydra", "hydra-core") for name in named} <= {
        Requirement(text).name for text in required
    }
