"""The hash of a policy's code: what changes it, and what does not."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policy import Policy
from kvsweep.compression.source import code_hash, is_own, is_same_code, source_files
from kvsweep.harness.settings import choices, target_class
from kvsweep.harness.sweep.grid import policy_file

POLICY = '''"""A module."""
from kvsweep.compression.policies.window import Window
import helper_of_mine


class Mine(Window):
    """A policy."""

    def scores(self, view):
        return helper_of_mine.half(view.positions)  # a comment
'''
HELPER = "def half(positions):\n    return positions / 2\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "policy_of_mine.py").write_text(POLICY)
    (tmp_path / "helper_of_mine.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("policy_of_mine", "helper_of_mine"):
        sys.modules.pop(name, None)


@pytest.fixture
def mine(folder: Path) -> type:
    policy: type = importlib.import_module("policy_of_mine").Mine
    return policy


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))


def test_a_users_policy_is_its_module_and_what_that_imports_beside_it(folder: Path, mine: type) -> None:
    assert is_own(mine)
    assert {path.name for path in source_files(mine)} == {"policy_of_mine.py", "helper_of_mine.py"}


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("policy_of_mine.py", "# a comment", "# another comment", False),
        ("policy_of_mine.py", '"""A policy."""', '"""A policy of mine."""', False),
        ("policy_of_mine.py", "half(view.positions)", "half( view.positions )", False),
        ("policy_of_mine.py", "half(view.positions)", "half(-view.positions)", True),
        ("helper_of_mine.py", "positions / 2", "positions / 3", True),
    ],
)
def test_code_alone_changes_the_hash(folder: Path, mine: type, name: str, old: str, new: str, changes: bool) -> None:
    before = code_hash(mine)
    rewrite(folder / name, lambda text: text.replace(old, new))
    assert (code_hash(mine) != before) == changes


def test_a_module_of_another_folder_is_not_part_of_it(folder: Path, mine: type, tmp_path: Path) -> None:
    assert not any("kvsweep" in path.parts for path in source_files(mine))


def test_a_shipped_policy_is_its_own_module() -> None:
    assert not is_own(H2O)
    assert {path.name for path in source_files(H2O)} == {"h2o.py"}
    assert code_hash(H2O) != code_hash(FullCache)


STORED = json.loads((Path(__file__).parents[1] / "stored/policy_codes.json").read_text())


@pytest.mark.parametrize("name", choices("policy"))
def test_cells_that_an_earlier_version_began_go_on(name: str) -> None:
    """A wording in a policy's file would end every stored cell of it. A new rule is written into policy_codes.json."""
    now = code_hash(target_class("policy", policy_file(name), Policy))
    assert is_same_code(STORED.get(name, now), now)
