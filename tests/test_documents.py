"""What CONTRIBUTING shows a newcomer must work as it stands."""

import re
import sys
import types
from pathlib import Path

import torch
import yaml

from compression.policy import CacheView
from harness.config import build_policy

ROOT = Path(__file__).parents[1]


def code_block(document, language):
    """The first fenced block of a language, its list indentation taken off."""
    lines = (ROOT / document).read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == f"```{language}")
    indent = lines[start].index("`")
    end = next(i for i in range(start + 1, len(lines)) if lines[i].strip() == "```")
    return "\n".join(line[indent:] for line in lines[start + 1 : end])


def test_the_policy_of_contributing_works_as_printed(monkeypatch):
    settings = yaml.safe_load(code_block("CONTRIBUTING.md", "yaml"))
    module_name, class_name = settings["_target_"].rsplit(".", 1)
    assert f"`{module_name.replace('.', '/')}.py`" in (ROOT / "CONTRIBUTING.md").read_text()
    module = types.ModuleType(module_name)
    monkeypatch.setitem(sys.modules, module_name, module)
    exec(code_block("CONTRIBUTING.md", "python"), module.__dict__)
    policy = build_policy({**settings, "keep_ratio": 0.5, "local_window": 2, "budget": 10})
    assert type(policy).__name__ == class_name
    view = CacheView(
        problem_id="p0",
        draw=0,
        text_ids=torch.zeros(9, dtype=torch.int64),
        positions=torch.arange(9),
        token_ids=torch.zeros(9, dtype=torch.int64),
        separators=torch.zeros(9, dtype=torch.bool),
        question_length=1,
        answer_start=None,
        keys=[],
        values=[],
        scaling=1.0,
        signals={},
        uniform=lambda: torch.zeros(9),
    )
    # Of the 7 rows outside the window the first 3 stay.
    assert policy.select(view).keep.tolist() == [0, 1, 2, 7, 8]


def test_every_make_target_named_in_a_document_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"`make ([a-z]+)`", (ROOT / document).read_text()))
        assert named <= targets
