"""A stored configuration is data: nothing in it is imported, resolved or taken for a setting that there is not."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvsweep.harness.trace.inspected import of_cell
from kvsweep.messages.errors import UserError


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Where the first test that asks for a cell puts it."""
    return tmp_path_factory.mktemp("stored")


@pytest.fixture
def cell(kvsweep, tiny, tiny_policy, stored, tmp_path) -> Path:
    """A cell that a test may change."""
    if not any(stored.iterdir()):
        ended = kvsweep("policy=window", *tiny, *tiny_policy, "benchmark=toy_add", f"results_dir={stored}")
        assert ended.code == 0, ended.err
    shutil.copytree(stored, tmp_path / "runs")
    return next(tmp_path.glob("runs/*/*/cell.yaml")).parent


def edit(cell: Path, change: Callable[[dict[str, Any]], object]):
    path = cell / "provenance.json"
    stored = json.loads(path.read_text())
    change(stored["config"])
    path.write_text(json.dumps(stored))


def test_a_stored_class_is_never_imported(cell, tmp_path, monkeypatch):
    (tmp_path / "ran_by_stored.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass X: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for section in ("policy", "model", "benchmark"):
        edit(cell, lambda config, section=section: config[section].update(_target_="ran_by_stored.X"))
    source = of_cell(cell, None, 0)
    assert [policy.name for policy in source.policies(["window"])] == ["window"]
    assert not (tmp_path / "mark").exists()
    assert "ran_by_stored" not in sys.modules


@pytest.mark.parametrize("text", ["${oc.env:KVSWEEP_SECRET}", "x${oc.env:KVSWEEP_SECRET}", "${seed}"])
@pytest.mark.parametrize("place", ["name", "title", "path"])
def test_a_stored_text_is_never_resolved(cell, monkeypatch, place, text):
    monkeypatch.setitem(os.environ, "KVSWEEP_SECRET", "of the user")
    edit(cell, lambda config: config["model"].update({place: text}))
    with pytest.raises(UserError, match=r"holds \$\{, which no stored setting has") as caught:
        of_cell(cell, None, 0)
    assert "of the user" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda config: config["policy"].update(name="../../evil"), "names the policy"),
        (lambda config: config.update(policy=3), "names no model and policy"),
        (lambda config: config.pop("model"), "names no model and policy"),
        (lambda config: config["model"].update(path=[1]), "model.path"),
    ],
)
def test_other_settings_are_refused(cell, change, sentence):
    edit(cell, change)
    with pytest.raises(UserError, match=sentence):
        of_cell(cell, None, 0)
