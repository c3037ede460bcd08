"""Files of a run directory: opened as plain files of a bounded size, never through a link, and by one function."""

import ast
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from kvsweep.messages.errors import UnusableFileError, UserError
from kvsweep.run_files import safe_files
from kvsweep.run_files.row_types import (
    Completion,
    Grade,
    append_row,
    content_hash,
    ignore,
    read_rows,
)
from kvsweep.run_files.run_reader import StoredCell
from kvsweep.run_files.safe_files import make_folder, open_file, read_file, read_lines, replace_text, replacing
from tests.run_files.test_row_types import completion

ROOT = Path(__file__).resolve().parents[2]

STRANGE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "folder": lambda path: path.mkdir(),
    "link to a file": lambda path: path.symlink_to(_victim(path)),
    "link to nothing": lambda path: path.symlink_to(path.parent / "nothing"),
    "link to itself": lambda path: path.symlink_to(path),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
}


def _victim(path: Path) -> Path:
    victim = path.parent / "victim"
    victim.write_text("mine")
    return victim


@pytest.mark.parametrize("mode", ["rb", "ab", "rb+"])
@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_no_plain_file_is_refused_at_once(make, mode, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 108 characters
    path = Path("file")
    make(path)
    started = time.monotonic()
    with pytest.raises(OSError, match="file"):
        open_file(path, mode)  # type: ignore[arg-type]
    assert time.monotonic() - started < 30  # none waits for a writer
    assert not Path("victim").exists() or Path("victim").read_text() == "mine"


def test_a_second_name_is_not_written_through(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    path.hardlink_to(victim)
    with pytest.raises(UnusableFileError):
        open_file(path, "ab")
    replace_text(path, "other")
    assert (victim.read_text(), path.read_text()) == ("mine", "other")


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_text("mine")
    path.symlink_to(victim)
    replace_text(path, "other")
    assert (victim.read_text(), path.read_text(), path.is_symlink()) == ("mine", "other", False)
    (tmp_path / "report").symlink_to(tmp_path)
    for target in (tmp_path, victim, tmp_path / "nothing"):
        (tmp_path / "report").unlink()
        (tmp_path / "report").symlink_to(target)
        with pytest.raises(UserError, match="is a link"):
            make_folder(tmp_path / "report")


@pytest.mark.parametrize("name", ["check", "cell_id", "seed"])
def test_a_cell_whose_field_has_another_name_is_refused(name, tmp_path):
    """One flipped bit makes another name of `check`, and a cell without a check is believed."""
    cell = {"schema": 1, "cell_id": "a", "seed": 0}
    cell["check"] = content_hash([tmp_path.name, cell])
    (tmp_path / "cell.yaml").write_text(yaml.safe_dump(cell))
    assert StoredCell(tmp_path).settings == {"schema": 1, "cell_id": "a", "seed": 0}
    (tmp_path / "cell.yaml").write_text(yaml.safe_dump({key + "i" * (key == name): cell[key] for key in cell}))
    with pytest.raises(UserError, match="was edited"):
        _ = StoredCell(tmp_path).settings


def test_sizes_are_bounded(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole of a terabyte
    with pytest.raises(UserError, match="has more than"):
        read_file(path)
    with pytest.raises(UserError, match="has a line of more than"):
        list(read_lines(path))
    path.rename(tmp_path / "cell.yaml")
    with pytest.raises(UserError, match="has more than 1,048,576 bytes"):
        _ = StoredCell(tmp_path).settings


def test_temporary_names_differ_between_processes_of_one_number(tmp_path):
    names = set()
    for _ in range(50):
        with replacing(tmp_path / "file") as temporary:
            names.add(temporary)
            temporary.write_text("")
    assert len(names) == 50


# --- Rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_tokens", -1), ("draw", 1 << 62), ("token_ids", [1 << 40]), ("token_ids", [-1]),
        ("peak_length", 1e300), ("seed", 1 << 70), ("num_tokens", "3"), ("num_tokens", True),
        ("evictions", [{"step": 1 << 62, "length_before": 1, "length_after": 1, "held": []}]),
        ("evictions", [{"step": 1, "length_before": 1, "length_after": 1, "held": [100, 1 << 30]}]),
    ],
)  # fmt: skip
def test_a_number_out_of_its_bounds_is_no_row(field, value, tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"schema": 1, **completion().to_dict(), field: value}
    path.write_text(json.dumps(row, separators=(",", ":")) + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl:1 is broken \("):
        list(read_rows(path, Completion))


EDITS: dict[str, Callable[[str], str]] = {
    "another number": lambda line: line.replace('"num_tokens":4', '"num_tokens":9'),
    "another text": lambda line: line.replace('"text":""', '"text":"u"'),
    "another draw": lambda line: line.replace('"draw":0', '"draw":1'),
    "written anew": lambda line: line.replace(":", ": ").replace(",", ", "),
    "another check": lambda line: line[:-4] + ("0" if line[-4] != "0" else "1") + line[-3:],
    "more behind": lambda line: line.replace("}\n", ',"more":1}\n'),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_row_is_no_row(edit, tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, completion())
    line = path.read_text()
    assert edit(line) != line
    path.write_text(edit(line))
    with pytest.raises(UserError, match="was edited, or belongs to another cell"):
        list(read_rows(path, Completion))


def test_a_row_of_another_cell_is_no_row(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    append_row(tmp_path / "a/rows.jsonl", completion())
    (tmp_path / "a/rows.jsonl").rename(tmp_path / "b/rows.jsonl")
    assert list(read_rows(tmp_path / "b/rows.jsonl", Completion, on_bad=ignore)) == []
    (tmp_path / "a").rmdir()
    (tmp_path / "b").rename(tmp_path / "a")
    monkeypatch.chdir(tmp_path / "a")  # wherever the cell's folder is named from
    assert list(read_rows(Path("rows.jsonl"), Completion)) == [completion()]


def test_grades_by_another_rule_are_said(tmp_path):
    (tmp_path / "cell.yaml").write_text("schema: 1\nbenchmark: {answer_kind: integer}\n")
    path = tmp_path / "grades.jsonl"
    for draw, rule in enumerate(["0" * 16, None, "0" * 16]):
        append_row(
            path, Grade(problem_id="p", draw=draw, answer="1", gold="1", outcome="correct", correct=1, rule=rule)
        )
    assert [draw for _, draw in StoredCell(tmp_path).grades(on_bad=ignore)] == [1]
    with pytest.raises(UserError, match=r"2 of its grades are by another rule than cell\.yaml names: grade the cell"):
        StoredCell(tmp_path).grades()


# --- The one way --------------------------------------------------------------------------------------------

OPENS = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "savefig", "fdopen", "to_csv"}
# Files that belong to no run directory: what the command line and conf/ name, what a process or a package tells, and
# temporary files of `replacing`.
ELSEWHERE = {
    "src/kvsweep/messages/command_line.py", "src/kvsweep/run_files/safe_files.py",
    "harness/settings.py", "harness/provenance.py",
    "harness/toy", "harness/benchmarks", "harness/decode/memory.py", "harness/models",
    "harness/predictor", "harness/command.py",
    "harness/template", "harness/grading/units.py", "src/kvsweep/processes", "src/kvsweep/run_files/other_rows.py",
    "harness/sweep/progress_board.py",
    "harness/sweep/tracker.py", "kernels", "compression",
}  # fmt: skip
TEMPORARY = {
    ("analysis/figures/style.py", "savefig"),
    ("harness/sweep/cell_store.py", "open"),
}
READ_BACK = {("analysis/report/gallery.py", "read_bytes")}
OF_THE_PACKAGE = {("src/kvsweep/cli.py", "read_text")}
PROC = {("src/kvsweep/run_files/task_status.py", "read_text")}


def test_no_file_of_a_run_directory_is_opened_in_another_way():
    found = set()
    for path in (path for name in ("src", "harness", "analysis") for path in (ROOT / name).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if any(place == known or place.startswith(f"{known}/") for known in ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in OPENS and not (name == "to_csv" and not node.args):
                    found.add((place, name))
    assert found == TEMPORARY | READ_BACK | OF_THE_PACKAGE | PROC, "use kvsweep.run_files.safe_files"
    assert safe_files.open_file.__module__ == "kvsweep.run_files.safe_files"
