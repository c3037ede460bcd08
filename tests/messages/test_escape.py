"""Hostile text where it comes out: a terminal, a page, a CSV, Markdown, a file name, a folder."""

import json
import sys
import unicodedata

import pytest

from kvsweep.analysis.report.rendering import script_json
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import csv_cell, file_name, folder_below, in_one_line, markdown_text, visible


def test_no_character_of_the_control_or_surrogate_category_is_left():
    """Against Unicode's own categories; of Cf, which holds the joiners of some scripts, only the bidi marks go."""
    left = visible("".join(map(chr, range(sys.maxunicode + 1))))
    assert [c for c in left if unicodedata.category(c) in {"Cc", "Cs", "Zl", "Zp"}] == ["\t", "\n"]
    bidi = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not [c for c in left if unicodedata.bidirectional(c) in bidi]
    assert visible("é 漢字 שלום नमस्ते 👩\u200d🔬 \u200c") == "é 漢字 שלום नमस्ते 👩\u200d🔬 \u200c"


def test_json_in_a_page_closes_no_script():
    hostile = {"a": "</script><!--<script>\u2028\u2029&\ud83d"}
    text = script_json(hostile)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == hostile


@pytest.mark.parametrize("text", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "-1+cmd"])
def test_no_csv_cell_is_a_formula(text):
    assert csv_cell(text) == f"'{text}"


@pytest.mark.parametrize("value", ["-1.5", "+3", "-", "=", "a=b", "", 3, -1.5, None])
def test_other_csv_cells_are_left_alone(value):
    assert csv_cell(value) is value


def test_markdown_has_no_tag_no_link_and_no_column_of_its_own():
    assert markdown_text("a|b\nc <img src=x> [d](e)") == "a\\|b c \\<img src=x> \\[d\\](e)"


@pytest.mark.parametrize(
    "name",
    ["../up", "a/../../up", "/etc", "..", "", "a\x00b", "a\nb", "50%", "a%A/b", "a\\b"],
)
def test_a_name_that_leads_astray_is_refused(name):
    with pytest.raises(UserError, match="run_name="):
        folder_below("results", name)


@pytest.mark.parametrize("name", ["a b", "漢字 שלום", "a/b", "...", "~", "-x", "a'b\"c$(d)", "é" * 127, "b" * 255])
def test_any_other_name_is_a_folder_below(name, tmp_path):
    folder = folder_below(str(tmp_path), name)
    folder.mkdir(parents=True)
    assert tmp_path in folder.resolve().parents


def test_file_names_are_short_plain_and_different():
    assert (file_name("a.b", "", "c-D", "9"), file_name("a" * 80)) == ("a.b_c-D_9", "a" * 80)
    odd = ["../a b", "../a_b", "a" * 81, "a" * 5000, "a" * 5001, "\x00", "漢", "字", "..", "a/b"]
    names = [file_name(name) for name in odd]
    assert len(set(names)) == len(odd)
    assert all(name.isascii() and "/" not in name and 0 < len(name) <= 87 for name in names)
    assert not any(name.startswith(".") for name in names)


def test_settings_become_single_lines():
    found = in_one_line({"a": ["x\ny", 1], "b\x1b": {"c": "\u202e"}})
    assert found == {"a": ["x y", 1], "b\\x1b": {"c": "\\u202e"}}
    assert in_one_line("x" * 500) == "x" * 500
    assert in_one_line("x" * 501) == "x" * 500 + "…"
