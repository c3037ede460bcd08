"""The hash of a policy's code: what changes it, and what does not."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import Policy
from kvsweep.compression.source import code_hash, is_own, is_same_code, source_files
from kvsweep.harness.settings import choices, target_class
from kvsweep.harness.sweep.grid import build_policies, policy_file
from kvsweep.messages.errors import UserError

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
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    (tmp_path / "policy_of_mine.py").write_text(POLICY)
    (tmp_path / "helper_of_mine.py").write_text(HELPER)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("policy_of_mine", "helper_of_mine", "lib_of_mine"):
        sys.modules.pop(name, None)


@pytest.fixture
def mine(folder) -> type:
    policy: type = importlib.import_module("policy_of_mine").Mine
    return policy


def rewrite(path: Path, change: Callable[[str], str]):
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))


def test_a_users_policy_is_its_module_and_what_that_imports_beside_it(folder, mine):
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
def test_code_alone_changes_the_hash(folder, mine, name, old, new, changes):
    before = code_hash(mine)
    rewrite(folder / name, lambda text: text.replace(old, new))
    assert (code_hash(mine) != before) == changes


def test_a_module_of_another_folder_where_nothing_is_installed_is_part_of_it(folder, monkeypatch, tmp_path):
    for place in ("lib", "site-packages"):
        (tmp_path / place).mkdir()
        monkeypatch.syspath_prepend(tmp_path / place)
    (folder / "helper_of_mine.py").rename(tmp_path / "lib/helper_of_mine.py")
    (tmp_path / "site-packages/package_of_theirs.py").touch()
    rewrite(folder / "policy_of_mine.py", lambda text: f"import json, package_of_theirs\n{text}")
    policy = importlib.import_module("policy_of_mine").Mine
    assert {path.name for path in source_files(policy)} == {"policy_of_mine.py", "helper_of_mine.py"}


@pytest.mark.parametrize(
    "line", ["import helper_of_mine", "from helper_of_mine import half", "import lib_of_mine.helper_of_mine"]
)
def test_a_module_that_only_a_function_imports_is_part_of_it_before_the_function_runs(folder, line):
    (folder / "lib_of_mine").mkdir()
    shutil.copy(folder / "helper_of_mine.py", folder / "lib_of_mine")
    rewrite(folder / "policy_of_mine.py", lambda text: text.replace("import helper_of_mine\n", ""))
    rewrite(folder / "policy_of_mine.py", lambda text: text.replace("return helper", f"{line}\n        return helper"))
    policy = importlib.import_module("policy_of_mine").Mine
    before, helper = code_hash(policy), folder / ("lib_of_mine" * line.count("lib")) / "helper_of_mine.py"
    assert "helper_of_mine" not in sys.modules
    assert {*source_files(policy)} == {folder / "policy_of_mine.py", helper}
    rewrite(helper, lambda text: text.replace("/ 2", "/ 3"))
    assert code_hash(policy) != before
    assert "helper_of_mine" not in sys.modules


@dataclass(frozen=True, kw_only=True)
class Table(Window):
    table: str


def test_data_that_a_users_setting_names_are_part_of_the_identity_and_not_their_place(tmp_path):
    def identity(table):
        return Table(name="table", keep_ratio=0.5, local_window=4, budget=16, table=str(table)).identity()

    for name, content in (("a.npy", "1"), ("b.npy", "2")):
        (tmp_path / name).write_text(content)
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "a.npy", tmp_path / "folder")
    before, in_folder = identity(tmp_path / "a.npy"), identity(tmp_path / "folder")
    assert identity(tmp_path / "b.npy") != before == identity(tmp_path / "folder/a.npy")
    (tmp_path / "folder/a.npy").write_text("2")
    assert identity(tmp_path / "folder") != in_folder
    assert identity(tmp_path / "no file")["table"] == str(tmp_path / "no file")
    made = Table(name="table", keep_ratio=0.5, local_window=4, budget=16, table=str(tmp_path / "a.npy"))
    assert tmp_path / "a.npy" in made.files()


@dataclass(frozen=True, kw_only=True)
class Listing(Window):
    files: list[str]


def test_a_setting_that_may_change_is_one_sentence(compose, tmp_path):
    values = {"_target_": f"{__name__}.Listing", "name": "listing", "files": ["a"]}
    policy = {"keep_ratio": 0.5, "local_window": 4, "budget": 16, "question": "free"} | values
    config = compose("policy=window")
    config.policy = policy
    with pytest.raises(UserError, match=r"policy\.files=\['a'\] is a list, .*: annotate the field of Listing as tuple"):
        build_policies(config)


def test_our_own_modules_are_no_part_of_it(mine):
    assert not any("kvsweep" in path.parts for path in source_files(mine))


def test_a_shipped_policy_is_its_own_module():
    assert not is_own(H2O)
    assert {path.name for path in source_files(H2O)} == {"h2o.py"}
    assert code_hash(H2O) != code_hash(FullCache)


STORED = json.loads((Path(__file__).parents[1] / "stored/policy_codes.json").read_text())


@pytest.mark.parametrize("name", choices("policy"))
def test_cells_that_an_earlier_version_began_go_on(name):
    """A wording in a policy's file would end every stored cell of it. A new rule is written into policy_codes.json."""
    now = code_hash(target_class("policy", policy_file(name), Policy))
    assert is_same_code(STORED.get(name, now), now)
