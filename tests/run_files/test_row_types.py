"""The rows of a run, their reader and their writer."""

import json
import re
from contextlib import suppress

import numpy as np
import pytest

from kvsweep.messages.errors import OtherSchemaError, UserError
from kvsweep.run_files.row_types import (
    MOST,
    MOST_TOKENS,
    BadLine,
    Completion,
    Eviction,
    Grade,
    PairRow,
    Row,
    append_row,
    held_percents,
    ignore,
    latest_rows,
    leaves,
    read_rows,
    view,
)
from kvsweep.run_files.run_reader import StoredCell, read_cells, read_provenance, read_screen
from kvsweep.run_files.safe_files import replace_text, replacing


def completion(problem_id="p", draw=0, text="", **fields):
    usual = {"token_ids": [5, 6, 7, 8], "num_tokens": 4, "prompt_tokens": 3, "thinking_tokens": 4, "seed": 0}
    usual |= {"stop_reason": "stop", "peak_length": 6, "evictions": [], "fork_step": None}
    return Completion(problem_id=problem_id, draw=draw, text=text, **{**usual, **fields})


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_held_runs_spread_out():
    assert held_percents([100, 2, 0, 3, 30, 1]) == [100, 100, 0, 0, 0, 30]
    assert held_percents([]) == []


def test_a_held_run_without_its_count_is_refused():
    with pytest.raises(ValueError, match="zip"):
        held_percents([100, 2, 0])


@pytest.mark.parametrize("field", ["fork_step", "evictions", "num_tokens"])
def test_a_row_lacks_no_field(field, tmp_path):
    row = completion().to_dict()
    del row[field]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=f"missing required field `{field}`"):
        list(read_rows(tmp_path / "rows.jsonl", Completion))


@pytest.mark.parametrize("kind", sorted(subclasses(Row), key=lambda kind: kind.__name__))
def test_a_row_does_not_change(kind):
    assert kind.__struct_config__.frozen


def test_the_largest_count_is_the_last_whole_number_that_every_reader_of_json_tells_apart():
    assert int(float(MOST)) == MOST
    assert float(MOST + 1) + 1 == float(MOST + 1)  # RFC 8259, section 6
    assert np.iinfo(np.int32).max == MOST_TOKENS


def test_shared_tokens_end_with_the_step_that_evicted_first():
    evictions = [Eviction(step=s, length_before=5, length_after=3, held=[]) for s in (1, 3)]
    assert completion(evictions=evictions).shared_ids == [5, 6]
    assert completion().shared_ids == [5, 6, 7, 8]


def test_a_mistake_is_told_on_one_line_whatever_the_value():
    assert str(UserError("x=a\nb\u2028c is unknown.")) == "x=a b c is unknown."
    assert str(UserError("\n")) == ""


# --- Lines --------------------------------------------------------------------------------------------------


def test_the_bytes_of_a_row():
    row = completion(text="é \ud800 😀", evictions=[Eviction(step=2, length_before=5, length_after=3, held=[100, 3])])
    assert row.to_line() == (
        '{"schema":1,"problem_id":"p","draw":0,"text":"\\u00e9 \\ud800 \\ud83d\\ude00","token_ids":[5,6,7,8],'
        '"num_tokens":4,"prompt_tokens":3,"thinking_tokens":4,"stop_reason":"stop",'
        '"evictions":[{"step":2,"length_before":5,"length_after":3,"held":[100,3]}],"fork_step":null,"peak_length":6,'
        '"seed":0}\n'
    )
    grade = Grade(problem_id="p", draw=1, answer=None, gold="4", outcome="no_answer", correct=0)
    assert grade.to_line() == (
        '{"schema":1,"problem_id":"p","draw":1,"answer":null,"gold":"4","outcome":"no_answer","correct":0,"rule":null}\n'
    )


@pytest.mark.parametrize("text", ["half \ud800 a pair", "\u2028", "\x00", "é"], ids=ascii)
def test_any_text_comes_back_in_every_view(text, tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, completion(text=text))
    assert [row.text for row in read_rows(path, Completion)] == [text]
    assert json.loads(path.read_bytes())["text"] == text
    assert [row.key for row in read_rows(path, PairRow)] == [("p", 0)]


def test_a_broken_line_is_reported_with_its_place_and_a_torn_one_is_passed_over(tmp_path):
    path, bad = tmp_path / "rows.jsonl", list[BadLine]()
    lines = [
        completion().to_line(),
        "\n",
        "{broken\n",
        '{"schema": 1, "problem_id": "q", "draw": 1}\n',
        "[1]\n",
        '{"problem_id',
    ]
    path.write_text("".join(lines))
    assert [row.key for row in read_rows(path, Completion, on_bad=bad.append)] == [("p", 0)]
    assert [(line.number, line.text.decode()) for line in bad] == [(n, lines[n - 1]) for n in (3, 4, 5)]
    assert [str(line).removeprefix(f"{path}") for line in bad] == [
        ":3 is broken (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
        ":4 is broken (Object missing required field `text`)",
        ":5 is broken (Expected `object`, got `array`)",
    ]
    with pytest.raises(UserError, match=r"rows\.jsonl:3 is broken .*: delete that line"):
        list(read_rows(path, Completion))
    assert list(read_rows(tmp_path / "missing", Completion)) == []


SCHEMAS = {
    '"schema":2,': "has schema 2 and this kvsweep reads schema 1: install the kvsweep that wrote it, or a newer one.",
    "": "has no schema and this kvsweep reads schema 1: an older kvsweep wrote it; run the sweep again under another",
    '"schema":0,': "has schema 0 and this kvsweep reads schema 1: an older kvsweep wrote it",
    '"schema":true,': "has schema True and",
    '"schema":"1",': "has schema 1 and",
}


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("kind", [Completion, PairRow, view(Completion, "num_tokens")])
def test_a_row_of_another_schema_is_refused_by_every_reader(schema, kind, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(completion().to_line() + completion(draw=1).to_line().replace('"schema":1,', schema))
    for read in (read_rows, lambda path, kind, on_bad: latest_rows([path], kind, on_bad=on_bad)):
        with pytest.raises(OtherSchemaError, match=re.escape(f"{path}:2 {SCHEMAS[schema]}")):
            list(read(path, kind, on_bad=ignore))


def test_a_schema_may_stand_anywhere_in_its_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = completion().to_dict()
    path.write_text(json.dumps({**{k: v for k, v in row.items() if k != "schema"}, "schema": 1}, indent=None) + "\n")
    assert list(read_rows(path, Completion)) == [completion()]


@pytest.mark.parametrize(("schema", "sentence"), [("schema: 2\n", "has schema 2 and"), ("", "has no schema and")])
def test_a_cell_of_another_schema_is_refused(schema, sentence, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "cell.yaml").write_text("[broken")
    assert list(read_cells(tmp_path)) == []
    (tmp_path / "b" / "cell.yaml").write_text(f"{schema}cell_id: b\n")
    for read in (lambda run: list(read_cells(run)), lambda run: StoredCell(run / "b").settings):
        with pytest.raises(OtherSchemaError, match=f"b/cell.yaml {sentence}"):
            read(tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps({"schema": 2} if schema else {}))
    with pytest.raises(OtherSchemaError, match=f"provenance.json {sentence}"):
        read_provenance(tmp_path / "provenance.json")


@pytest.mark.parametrize("content", ["{torn", '["a"]', '{"a": {"rule": "screen=2"}}', "[" * 200_000])
def test_a_broken_screen_is_refused(content, tmp_path):
    assert read_screen(tmp_path) == {}
    (tmp_path / "screen.json").write_text(content)
    with pytest.raises(UserError, match=r"screen\.json names no screened cells .*: delete the file, and run"):
        read_screen(tmp_path)


def test_nesting_without_end_is_a_broken_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem_id":' + "[" * 200_000 + "\n" + completion().to_line())
    assert [row.key for row in read_rows(path, PairRow, on_bad=ignore)] == [("p", 0)]


def test_a_view_reads_its_fields_and_passes_over_the_others(tmp_path):
    lengths = view(Completion, "num_tokens", "fork_step", evictions=list[view(Eviction, "step")])
    assert lengths.__struct_fields__ == ("problem_id", "draw", "num_tokens", "evictions", "fork_step")
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"schema":1,"problem_id":"p","draw":3,"text":0,"token_ids":"no","num_tokens":7,"fork_step":null,'
        '"evictions":[{"step":1}]}\n'
    )
    [row] = read_rows(path, lengths)
    assert (row.key, row.num_tokens, row.fork_step, row.evictions[0].step) == (("p", 3), 7, None, 1)


def test_of_repeated_pairs_the_last_row_comes_at_its_own_place(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, draws in zip(paths, ([0, 1, 0, 2], [1, 3]), strict=True):
        for number, draw in enumerate(draws):
            append_row(path, completion(draw=draw, text=f"{path.stem}{number}"))
    assert [row.text for row in latest_rows(paths, Completion)] == ["a2", "a3", "b0", "b1"]
    # A dictionary made of the rows by hand holds the same ones.
    by_hand = {row["draw"]: row["text"] for path in paths for row in map(json.loads, path.open())}
    assert {row.draw: row.text for row in latest_rows(paths, Completion)} == by_hand


# --- Files --------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    replace_text(path, "old")
    with suppress(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    stamp = path.stat().st_mtime_ns
    replace_text(path, "old")
    assert path.stat().st_mtime_ns == stamp, "a file that says the same is left alone"
    replace_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_leaves_are_named_by_their_path():
    assert dict(leaves({"a": {"b": 1, "c": {}}, "d": [2]})) == {"a.b": 1, "d": [2]}


def test_line_ends_that_git_changed_are_no_part_of_a_row(tmp_path):
    path = tmp_path / "grades.jsonl"
    row = Grade(problem_id="p", draw=0, answer="1", gold="1", outcome="correct", correct=1)
    append_row(path, row)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert [*read_rows(path, Grade)] == [row]
    path.write_bytes(path.read_bytes().replace(b'"1"', b'"2"'))
    with pytest.raises(UserError, match="was edited"):
        [*read_rows(path, Grade)]
