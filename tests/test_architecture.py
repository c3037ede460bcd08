"""docs/architecture.md names what the code has."""

import importlib
import re
from pathlib import Path

import pytest

from tests.test_imports import MODULES, imported, name_of, of_project

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGES = {"kernels", "compression", "harness", "analysis"}
NAMES = sorted({name for name in re.findall(r"`([A-Za-z_.]+)`", PAGE) if "." in name})


def find(dotted):
    """The module, or what it has, under a dotted name."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["kvsweep", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise AttributeError(dotted)


def whole(name):
    """`Engine._fill` as the page means it: of the class that was named in full before."""
    name = name.removeprefix("kvsweep.")  # of the ground floor
    owner = name.split(".", 1)[0]
    if owner in PACKAGES or (ROOT / f"src/kvsweep/{owner}.py").exists() or (ROOT / "src/kvsweep" / owner).is_dir():
        return name
    (package,) = {n.split(f".{owner}")[0] for n in NAMES if re.search(rf"\.{owner}(\.|$)", n)}
    return f"{package}.{name}"


@pytest.mark.parametrize("name", NAMES)
def test_every_name_exists(name):
    find(whole(name))


def test_the_arrows_of_the_page_run_as_the_imports_of_harness():
    chain = PAGE.partition("from user to used:")[2].partition(". ")[0]
    rank = {room: step for step, rooms in enumerate(chain.split("->")) for room in re.findall(r"`(\w+)`", rooms)}
    edges, rooms = set(), set()
    for path in MODULES:
        package, _, rest = name_of(path).removesuffix(".py").partition("/")
        if package == "harness" and rest != "__init__":
            rooms.add(room := rest.split("/")[0])
            used = [name.split(".") for name in of_project(imported(path.read_text()))]
            edges |= {(room, name[1]) for name in used if name[0] == "harness" and name[1] != room}
    assert rank.keys() == rooms
    assert len(edges) > 30
    assert [(user, used) for user, used in sorted(edges) if rank[user] >= rank[used]] == []


def test_the_page_is_one_page_and_names_what_it_tells():
    assert len(PAGE.splitlines()) <= 104
    assert len(NAMES) > 40
    with pytest.raises(AttributeError):
        find("harness.decode.engine.Engine._no_such_step")
