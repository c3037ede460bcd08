"""Imports run one way between the packages and between the rooms of harness; no folder name collides with another."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "compression", "harness", "analysis")
# Each room and the rooms that it may import from. `analysis` owns the row types, because files are all it reads.
BELOW = {
    "analysis": (),
    "kernels": (),
    "compression": ("kernels",),
    "harness.console": ("analysis",),
    "harness.provenance": ("analysis",),
    "harness.toy": ("analysis",),
    "harness.models": ("compression", "kernels", "analysis"),
    "harness.settings": ("harness.toy", "analysis"),
    "harness.grading": ("harness.models", "harness.settings", "harness.provenance", "analysis"),
    "harness.benchmarks": ("harness.grading", "harness.settings", "harness.toy", "harness.models", "analysis"),
    "harness.decode": ("harness.settings", "harness.models", "compression", "kernels", "analysis"),
}
BELOW["harness.sweep"] = (*BELOW,)
BELOW["harness.predictor"] = (*BELOW,)
BELOW["harness.inspect"] = (*BELOW,)
# The files of `kvsweep init`, which are copied and belong to no package.
TEMPLATE = ROOT / "harness/template"
FILES = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = sorted(path for path in FILES if not path.is_relative_to(TEMPLATE))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    return {name for name in names if name.split(".")[0] in PACKAGES}


def is_within(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def room_of(module: str) -> str:
    return next(room for room in sorted(BELOW, key=len, reverse=True) if is_within(module, (room,)))


@pytest.mark.parametrize("path", [p for p in MODULES if p != ROOT / "harness/__init__.py"], ids=name_of)
def test_imports_run_one_way(path: Path) -> None:
    room = room_of(name_of(path).removesuffix(".py").replace("/", "."))
    wrong = {module for module in of_project(imported(path.read_text())) if not is_within(module, (room, *BELOW[room]))}
    assert not wrong


def test_no_room_lies_below_itself() -> None:
    rooms = list(BELOW)
    assert all(rooms.index(below) < rooms.index(room) for room, rest in BELOW.items() for below in rest)


def test_no_two_files_import_each_other() -> None:
    names = {name_of(path).removesuffix(".py").replace("/", "."): path for path in MODULES}
    wanted = {name: imported(path.read_text()) for name, path in names.items()}
    edges = {name: {other for other in names if other != name and is_imported(other, wanted[name])} for name in names}
    assert list(TopologicalSorter(edges).static_order())  # raises CycleError


def is_imported(module: str, names: set[str]) -> bool:
    return any(name == module or name.rpartition(".")[0] == module for name in names)


def test_the_import_reader_sees_every_form_of_import() -> None:
    source = "import torch, a.b as r\ndef f():\n    from harness import models\n    from a.b import c as d\n"
    assert imported(source) == {"torch", "a.b", "harness.models", "a.b.c"}
    assert not is_within("harness.modelsuite", ("harness.models",))


@pytest.mark.parametrize("path", [p for p in MODULES if p.name == "__init__.py"], ids=name_of)
def test_init_files_hold_a_docstring_at_most(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert len(tree.body) == (0 if ast.get_docstring(tree) is None else 1)


def test_every_package_folder_has_an_init_file() -> None:
    folders = {path.parent for path in MODULES}
    assert not {name_of(folder) for folder in folders if not (folder / "__init__.py").exists()}


def test_kernels_can_be_imported_where_triton_cannot() -> None:
    run_python("import sys; sys.modules['triton'] = None; import kernels; assert not hasattr(kernels, '__version__')")
    run_python("import sys, kernels; assert not {'triton', 'torch'} & sys.modules.keys()")


def test_transformers_does_not_take_our_kernels_for_the_hubs() -> None:
    run_python(
        "import sys, kernels; assert kernels.__file__.startswith(sys.path[0])\n"
        "from transformers import LlamaForCausalLM, Qwen2ForCausalLM\n"
        "from transformers.integrations import hub_kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
    )


def test_the_analysis_needs_no_torch() -> None:
    modules = ", ".join(name_of(p)[:-3].replace("/", ".") for p in sorted((ROOT / "analysis").rglob("[!_]*.py")))
    run_python(
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'triton'}: raise ImportError(name)\n"
        f"sys.meta_path.insert(0, Blocked())\nimport {modules}"
    )


def test_python_ends_before_the_standard_librarys_compression() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "compression" not in sys.stdlib_module_names


def test_the_wheel_holds_every_package() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(build["packages"]) == set(PACKAGES)


def run_python(program: str) -> None:
    """Run a program in a fresh interpreter, the repository first on its path."""
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", start + program], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
