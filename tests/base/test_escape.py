"""Hostile text where it comes out: a terminal, a page, a CSV, LaTeX, Markdown, a file name, a folder."""

import io
import json
import os
import pty
import subprocess
import sys
import termios
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from kvsweep.analysis.report.rendering import script_json
from kvsweep.base.command_line import VisibleStream, one_sentence
from kvsweep.base.errors import UserError
from kvsweep.base.escape import csv_cell, file_name, folder_below, in_one_line, markdown_text, visible

ROOT = Path(__file__).resolve().parents[2]
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b1m\x7f\u202egnp.exe\u2028\ud83d"


def test_a_stream_shows_what_would_act() -> None:
    under = io.StringIO()
    stream = VisibleStream(under)
    print(f"a\tb {ESCAPES}", file=stream)
    assert under.getvalue() == "a\tb \\x1b]0;owned\\x07\\x1b[2J\\x9b1m\\x7f\\u202egnp.exe\\u2028\\ud83d\n"


def test_no_character_of_the_control_or_surrogate_category_is_left() -> None:
    """Against Unicode's own categories; Cf holds the joiners of some scripts, of which only the bidi marks go."""
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    left = visible(every)
    assert [c for c in left if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}] == ["\t", "\n"]
    assert not [c for c in left if unicodedata.bidirectional(c) in {"LRE", "RLE", "LRO", "RLO", "PDF"}]
    assert not [c for c in left if unicodedata.bidirectional(c) in {"LRI", "RLI", "FSI", "PDI"}]
    assert visible("é 漢字 שלום नमस्ते 👩\u200d🔬 \u200c") == "é 漢字 שלום नमस्ते 👩\u200d🔬 \u200c"


def test_a_stream_in_ascii_writes_escapes_for_what_it_lacks() -> None:
    under = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    VisibleStream(under).write("47.3 ± 2.1\n")
    under.flush()
    assert under.buffer.getvalue() == b"47.3 \\xb1 2.1\n"  # type: ignore[attr-defined]


def test_a_progress_bar_moves_on_a_terminal_and_the_text_in_it_does_not() -> None:
    program = (
        "import sys, tqdm\n"
        "from kvsweep.base.command_line import one_sentence\n"
        "with one_sentence('x'):\n"
        f"    for _ in tqdm.tqdm(range(3), desc={ESCAPES!r}, mininterval=0): pass\n"
    )
    said = on_a_terminal([sys.executable, "-c", program])
    assert said.count(b"\r") >= 3
    assert b"3/3" in said
    assert not set(said) & {0x1B, 0x07, 0x9B, 0x7F}


def on_a_terminal(command: list[str]) -> bytes:
    """What the command writes to a pseudo-terminal."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 200))
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 1 << 16)
        except OSError:  # all of the other side are closed
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    process.wait(60)
    return said


def test_a_users_mistake_shows_the_value_in_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), one_sentence("kvsweep-x"):
        raise UserError(f"x={ESCAPES} is wrong.")
    assert capsys.readouterr().err.removesuffix("\n").isprintable()


def test_json_in_a_page_closes_no_script() -> None:
    hostile = "</script><!--<script>\u2028\u2029&\ud83d"
    text = script_json({"a": hostile})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"a": hostile}


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "-1+cmd"])
def test_no_csv_cell_is_a_formula(text: str) -> None:
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+3", "-", "=", "a=b", "", 3, -1.5, None])
def test_other_csv_cells_are_left_alone(value: Any) -> None:
    assert csv_cell(value) is value


def test_markdown_has_no_tag_no_link_and_no_column_of_its_own() -> None:
    assert markdown_text("a|b\nc <img src=x> [d](e)") == "a\\|b c \\<img src=x> \\[d\\](e)"


@pytest.mark.parametrize(
    "name",
    ["../up", "a/../../up", "/etc", "..", "", "a\x00b", "a\x1bb", "é" * 200, "a/" + "b" * 256, "50%", "a%A/b", "a\\b"],
)
def test_a_name_that_leads_astray_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="run_name="):
        folder_below("results", name, "run_name")


@pytest.mark.parametrize("name", ["a b", "漢字 שלום", "a/b", "...", "~", "-x", "a'b\"c$(d)", "é" * 127])
def test_any_other_name_is_a_folder_below(name: str, tmp_path: Path) -> None:
    folder = folder_below(str(tmp_path), name, "run_name")
    folder.mkdir(parents=True)
    assert folder.resolve().is_relative_to(tmp_path)
    assert folder != tmp_path


def test_file_names_are_short_plain_and_different() -> None:
    odd = ["../a b", "../a_b", "a" * 5000, "a" * 5001, "\x00", "漢", "字", "..", "a/b"]
    names = [file_name(name) for name in odd]
    assert len(set(names)) == len(odd)
    assert all(name.isascii() and "/" not in name and 0 < len(name) < 100 for name in names)
    assert not any(name.startswith(".") for name in names)


def test_settings_become_single_lines() -> None:
    found = in_one_line({"a": ["x\ny", 1], "b\x1b": {"c": "\u202e"}})
    assert found == {"a": ["x y", 1], "b\\x1b": {"c": "\\u202e"}}
    assert in_one_line("x" * 10**6) == "x" * 500 + "…"
