"""Stored rows stay, once each: after a kill, a full disk, a torn line, and while a second writer tries to write."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from kvsweep.analysis.export import export
from kvsweep.analysis.load import load_run, load_texts
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.source import code_hash
from kvsweep.harness.benchmarks.config import BenchmarkConfig
from kvsweep.harness.decode.request import DecodingConfig
from kvsweep.harness.decode.sampling import SamplingConfig
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.cell_store import CellLockedError, CellStore, open_cells
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.share import share_of
from kvsweep.harness.sweep.status import read_sweep
from kvsweep.messages.errors import OtherSchemaError, UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import (
    Completion,
    DecodeStats,
    Grade,
    PairRow,
    Problem,
    Shard,
    drop_torn_line,
    read_rows,
)
from kvsweep.run_files.run_reader import StoredCell, read_provenance
from tests.run_files.test_row_types import completion

PROBLEMS = [Problem(id=name, prompt=f"{name}?", gold="1") for name in "abc"]
CELL = Cell(
    model=ModelConfig(name="m", title="M", path="owner/model", revision="a" * 40),
    benchmark=BenchmarkConfig(name="b", title="B", source="toy", task="add"),
    dataset_hash="0" * 16,
    policy=FullCache(name="full"),
    decoding=DecodingConfig(name="d", max_new_tokens=4, sampling=SamplingConfig(temperature=0.6)),
    seed=0,
)


def stats(**changes: Any) -> DecodeStats:
    numbers = dict.fromkeys(DecodeStats.__struct_fields__, 1)
    return DecodeStats(**{**numbers, **changes})


def pairs(path: Path) -> list[tuple[str, int]]:
    return [row.key for row in read_rows(path, PairRow)]


def store(run: Path, problems: list[Problem] = PROBLEMS) -> CellStore:
    return CellStore(run, CELL, problems)


# --- One cell's files ---------------------------------------------------------------------------------------


def covers(run: Path, problem_ids: list[str], draws: int) -> bool:
    rule = row_types.grading_rule(CELL.describe())
    return StoredCell(run / CELL.cell_id).covers(problem_ids, draws, rule)


def test_rows_are_found_again(tmp_path):
    with store(tmp_path) as first:
        assert first.finished_pairs == set()
        first.append(completion("a", 0))
        first.append(completion("b", 1))
    with store(tmp_path) as second:
        assert second.finished_pairs == {("a", 0), ("b", 1)}
        second.append(completion("a", 1))
    rows = read_rows(first.directory / "completions.jsonl", Completion)
    assert [*rows] == [completion("a"), completion("b", 1), completion("a", 1)]


def test_a_row_is_in_the_file_as_soon_as_it_is_appended(tmp_path):
    with store(tmp_path) as opened:
        for draw in range(5):
            opened.append(completion("a", draw))
            assert len((opened.directory / "completions.jsonl").read_bytes().splitlines()) == draw + 1


def test_a_pair_is_never_written_twice(tmp_path):
    with store(tmp_path) as opened:
        opened.append(completion("a"))
        with pytest.raises(AssertionError, match="twice"):
            opened.append(completion("a"))


@pytest.mark.parametrize(
    "text",
    ["two\nlines\r\n", "\u2028\u2029\x85\x0b\x0c\x1e", "half \ud800 a pair \udfff", "\x00", "\\\"'{}", "\U0001f600"],
    ids=ascii,
)
def test_any_text_is_one_row(text, tmp_path):
    with store(tmp_path) as opened:
        opened.append(completion("a", text=text))
        opened.append(completion("b"))
    path = opened.directory / "completions.jsonl"
    assert path.read_bytes().isascii()
    assert path.read_bytes().count(b"\n") == 2
    assert [row.text for row in read_rows(path, Completion)] == [text, ""]
    with store(tmp_path) as again:
        assert again.finished_pairs == {("a", 0), ("b", 0)}


@pytest.mark.parametrize("tail", [b"{", b'{"problem_id": "c", "draw"', b"\xff\xfe", b"x" * 200_000, b'{"a": 1}'])
def test_a_torn_last_line_is_cut(tail, tmp_path):
    with store(tmp_path) as opened:
        opened.append(completion("a"))
    path = opened.directory / "completions.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with store(tmp_path) as again:
        assert again.finished_pairs == {("a", 0)}
        assert path.read_bytes() == whole
        again.append(completion("b"))
    assert pairs(path) == [("a", 0), ("b", 0)]


def test_a_file_of_one_torn_line_is_emptied(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"problem')
    drop_torn_line(path)
    assert path.read_bytes() == b""
    drop_torn_line(path)
    drop_torn_line(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_torn_line_of_statistics_spoils_none_after_it(tmp_path):
    with store(tmp_path) as opened:
        opened.append_row(stats(tokens=1))
        path = opened.directory / "stats.jsonl"
        path.write_bytes(path.read_bytes() + b'{"wall_sec')
        opened.append_row(stats(tokens=2))
    assert [row.tokens for row in read_rows(path, DecodeStats)] == [1, 2]


@pytest.mark.parametrize("line", ["{", "[1]", '{"schema":1,"draw": 0}', '{"schema":1,"problem_id": 3}'])
def test_a_broken_line_in_the_middle_is_put_aside(line, tmp_path, capsys):
    with store(tmp_path) as opened:
        opened.append(completion("a"))
        opened.append(completion("b"))
    path = opened.directory / "completions.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{second}\n")
    with store(tmp_path) as again:
        assert again.finished_pairs == {("a", 0), ("b", 0)}
        again.append(completion("c"))
    assert path.read_text().splitlines()[:2] == [first, second]
    assert path.with_name("completions.jsonl.quarantine").read_text() == f"{line}\n"
    assert "1 broken line (first: line 2)" in capsys.readouterr().err
    with store(tmp_path) as once_more:
        assert len(once_more.finished_pairs) == 3
    assert capsys.readouterr().err == "", "said once"


def test_a_text_that_ended_in_nan_is_counted_again_when_its_run_goes_on(compose, tiny, tmp_path):
    job = make_job(compose(*tiny, "benchmark=toy_add", "policy=full", f"results_dir={tmp_path}"))
    share, [cell] = share_of(job), job.cells
    broken = share.pairs[:2]
    with open_cells(share, job.cells) as work:
        for pair in broken:
            work.append(cell.cell_id, msgspec.structs.replace(completion(*pair), stop_reason="not_finite"))
        assert (work.reporter.status.cells[cell.cell_id].not_finite, work.not_finite) == (2, {*broken})
    with open_cells(share, job.cells) as again:
        found = again.reporter.status.cells[cell.cell_id]
        assert (found.finished, found.not_finite, again.not_finite) == (2, 2, set())
        assert [again.lacks(cell.cell_id, pair) for pair in share.pairs] == [False, False, True]


def test_done_comes_with_the_last_pair(tmp_path):
    with store(tmp_path) as opened:
        done = opened.directory / "DONE"
        opened.append(completion("a"))
        assert not opened.mark_done(["a", "b"], 1)
        assert not done.exists()
        opened.append(completion("b"))
        assert opened.mark_done(["a", "b"], 1)
        assert done.exists()
        assert covers(tmp_path, ["a", "b"], 1)
        assert covers(tmp_path, ["b"], 1)
        assert not covers(tmp_path, ["a", "b", "c"], 1)
        assert not covers(tmp_path, ["a", "b"], 2)
        assert not opened.mark_done(["a", "b"], 2)
        assert not done.exists(), "more is wanted than there is"


def finished(run: Path) -> Path:
    """The folder of a cell that is done."""
    with store(run) as opened:
        opened.append(completion("a"))
        (opened.directory / "grades.jsonl").write_text("{}\n")
        opened.mark_done(["a"], 1)
    return opened.directory


@pytest.mark.parametrize("name", ["completions.jsonl", "grades.jsonl"])
def test_a_file_whose_end_was_lost_is_not_done(name, tmp_path):
    """A machine that dies may leave the size of a file and zeros in place of its end."""
    folder = finished(tmp_path)
    assert StoredCell(folder).is_done
    path = folder / name
    path.write_bytes(path.read_bytes()[:-2] + bytes(2))
    assert not covers(tmp_path, ["a"], 1)
    assert StoredCell(folder).is_done == (name == "grades.jsonl"), "grades can be made again without a sweep"


def test_rows_are_on_the_disk_before_done(tmp_path, monkeypatch):
    with store(tmp_path) as opened:
        opened.append(completion("a"))
        found: list[bool] = []
        monkeypatch.setattr(os, "fsync", lambda number: found.append((opened.directory / "DONE").exists()))
        opened.mark_done(["a"], 1)
        assert len(found) >= 2
        assert not any(found)


@pytest.mark.parametrize("name", ["completions.jsonl", "grades.jsonl", "problems.jsonl", "cell.yaml", "DONE"])
def test_done_vouches_for_the_files_it_saw(name, tmp_path):
    path = finished(tmp_path) / name
    assert covers(tmp_path, ["a"], 1)
    path.write_bytes(path.read_bytes()[:-1])
    assert covers(tmp_path, ["a"], 1) == (name == "DONE"), "a DONE without its newline says the same"
    path.unlink()
    assert not covers(tmp_path, ["a"], 1)


# --- Shards -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_share_everything_out_once(count):
    parts = [Shard(index=i, count=count).of(range(20)) for i in range(1, count + 1)]
    assert sorted(item for part in parts for item in part) == list(range(20))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "a/b", "1/2/3"])
def test_a_shard_that_is_none_is_one_sentence(text):
    with pytest.raises(UserError, match=r"shard=.*1/4"):
        Shard.parse(text)


def test_shards_write_side_by_side_and_are_read_together(tmp_path):
    halves = [CellStore(tmp_path, CELL, PROBLEMS, Shard(index=i, count=2)) for i in (1, 2)]
    with halves[0] as first, halves[1] as second:
        first.append(completion("a"))
        assert not first.mark_done(["a", "b"], 1)
        second.append(completion("b"))
        assert second.mark_done(["a", "b"], 1), "the last one sees what the others have stored"
    names = {path.name for path in first.directory.glob("completions*")}
    assert names == {"completions-1of2.jsonl", "completions-2of2.jsonl"}
    with store(tmp_path) as whole:
        assert whole.finished_pairs == {("a", 0), ("b", 0)}
        assert sorted(row.key for row in whole.read_completions({("b", 0)})) == [("b", 0)]
    with halves[0] as first:
        (first.directory / "completions-2of2.jsonl").write_text("")
        assert not first.mark_done(["a", "b"], 1), "the row was there when the cell was opened, and has gone"
        assert not (first.directory / "DONE").exists()


def test_cells_split_in_two_ways_at_once_are_refused(tmp_path):
    with CellStore(tmp_path, CELL, PROBLEMS, Shard(index=1, count=2)):
        for other in (Shard(), Shard(index=1, count=2), Shard(index=3, count=3)):
            with pytest.raises(CellLockedError, match=f"is being written by process {os.getpid()} on"):
                CellStore(tmp_path, CELL, PROBLEMS, other).__enter__()
        with CellStore(tmp_path, CELL, PROBLEMS, Shard(index=2, count=2)):
            pass
    with store(tmp_path):
        pass


def test_problems_of_a_larger_run_are_kept(tmp_path):
    """The grader needs the golds of all rows, whatever limit the last run had."""
    for problems in (PROBLEMS, PROBLEMS[:1]):
        with store(tmp_path, problems) as opened:
            pass
    assert [*read_rows(opened.directory / "problems.jsonl", Problem)] == PROBLEMS


def test_a_damaged_file_of_problems_is_made_anew(tmp_path):
    with store(tmp_path) as opened:
        pass
    path = opened.directory / "problems.jsonl"
    whole = path.read_text()
    for damaged in (whole[:-20], "", whole.replace('"1"', '"2"')):
        path.write_text(damaged)
        with store(tmp_path):
            assert path.read_text() == whole


def test_files_of_another_schema_are_refused_and_stay(tmp_path):
    with store(tmp_path) as opened:
        opened.begin_pass({}, {})
    for name, other in {"provenance.json": "{}", "cell.yaml": "schema: 2\n"}.items():
        (opened.directory / name).write_text(other)
        with pytest.raises(OtherSchemaError, match=f"{name} has"), store(tmp_path) as again:
            again.begin_pass({}, {})
        assert (opened.directory / name).read_text() == other


def test_decoding_passes_of_provenance_add_up(tmp_path):
    with store(tmp_path) as opened:
        opened.begin_pass({"draws": 1}, {"started": "then"})
        opened.begin_pass({"draws": 2}, {"started": "now"})
    provenance = json.loads((opened.directory / "provenance.json").read_text())
    code = code_hash(type(CELL.policy))
    passes = [{"started": "then", "policy_code": code}, {"started": "now", "policy_code": code}]
    assert provenance == {"schema": 1, "draws": 2, "decoding_passes": passes}


def test_what_a_pass_learns_is_noted_in_that_pass_alone(tmp_path):
    with store(tmp_path) as opened:
        for started in ("then", "now"):
            opened.begin_pass({}, {"started": started})
            opened.note(slots=len(started))
    passes = json.loads((opened.directory / "provenance.json").read_text())["decoding_passes"]
    assert [(one["started"], one["slots"]) for one in passes] == [("then", 4), ("now", 3)]


def test_rows_of_two_codes_of_a_shipped_policy_do_not_mix(tmp_path):
    with store(tmp_path) as opened:
        opened.begin_pass({}, {"started": "then"})
    path = opened.directory / "provenance.json"
    path.write_text(path.read_text().replace(code_hash(type(CELL.policy)), "0" * 16))
    begun = path.read_text()
    with store(tmp_path) as again, pytest.raises(UserError, match=r"was begun by other code of policy=.*run_name"):
        again.begin_pass({}, {"started": "now"})
    assert path.read_text() == begun


def test_every_reader_takes_the_last_row_of_a_repeated_pair(tmp_path):
    """Two shards of another count and a whole run may each have stored a pair; one rule says which row counts."""
    run, last = tmp_path / "run", "</think>\\boxed{1}"
    with store(run, PROBLEMS[:2]) as opened:
        opened.append(completion("a", text="</think>\\boxed{2}"))
        opened.append(completion("b", text="</think>\\boxed{1}"))
    folder = opened.directory
    with (folder / "completions.jsonl").open("a") as file:
        file.write(completion("a", text="</think>\\boxed{3}").to_line())
    longer = msgspec.structs.replace(completion("a", text=last), num_tokens=9)
    with Grader(workers=1) as grader:
        grader.grade_cell(folder)
        assert [(g.key, g.answer) for g in StoredCell(folder).rows(Grade)] == [(("b", 0), "1"), (("a", 0), "3")]
        (folder / "completions-1of2.jsonl").write_text(longer.to_line())
        grader.grade_cell(folder)
    answers = {grade.key: grade.answer for grade in StoredCell(folder).rows(Grade)}
    assert answers == {("a", 0): "1", ("b", 0): "1"}

    rows = load_run(run).completions.set_index("problem_id")
    assert (rows["num_tokens"]["a"], rows["correct"]["a"], len(rows)) == (9, 1, 2)
    assert load_texts(folder)["a", 0].text == last
    exported = pq.read_table(next(export(run)[0].glob("data/*"))).to_pylist()
    assert {row["problem_id"]: row["text"] for row in exported} == {"a": last, "b": last}
    assert len(exported) == 2

    with store(run, PROBLEMS[:2]) as again:
        assert again.finished_pairs == {("a", 0), ("b", 0)}
        assert [row.text for row in again.read_completions({("a", 0)})] == [last]
        assert again.mark_done(["a", "b"], 1)
    assert read_sweep(run).finished == 2


# --- One writer ---------------------------------------------------------------------------------------------


@contextmanager
def other_process_holds(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    program = "import sys, filelock\nwith filelock.FileLock(sys.argv[1]):\n    print(flush=True)\n    sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        yield
    finally:
        holder.communicate()


def test_a_cell_has_one_writer(tmp_path):
    with other_process_holds(tmp_path / CELL.cell_id / ".lock"):
        with pytest.raises(CellLockedError, match=CELL.cell_id):
            store(tmp_path).__enter__()
        assert [p.name for p in (tmp_path / CELL.cell_id).iterdir()] == [".lock"], "nothing was touched"
    with store(tmp_path):
        pass


def test_a_lock_is_let_go_of_where_opening_fails(tmp_path):
    with store(tmp_path) as opened:
        pass
    (opened.directory / "problems.jsonl").unlink()
    (opened.directory / "problems.jsonl").mkdir()
    held = store(tmp_path)
    with pytest.raises(UserError):
        held.__enter__()
    with other_process_holds(opened.directory / ".lock"):
        pass


def test_the_command_ends_with_3_where_a_cell_is_locked(kvsweep, short, tmp_path, no_model, compose):
    [cell] = make_job(compose(*short)).cells
    with other_process_holds(tmp_path / "runs/default" / cell.cell_id / ".lock"):
        ended = kvsweep(*short)
    assert ended.code == 3
    assert ended.err.splitlines()[-1].startswith(f"kvsweep: error: cell {cell.cell_id}, shard 1/1")


# --- A full disk --------------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_cannot_grow_is_one_sentence_and_loses_nothing(tmp_path):
    opened = store(tmp_path)
    path = opened.directory / "completions.jsonl"

    def run():
        with opened:
            opened.append(completion("a"))
            with files_of_at_most(path.stat().st_size + 40):
                opened.append(completion("b"))

    with pytest.raises(UserError, match="File too large"):
        run()
    assert ("b", 0) not in opened.finished_pairs
    assert not path.read_bytes().endswith(b"\n"), "a part of the row was written"
    with store(tmp_path) as again:
        assert again.finished_pairs == {("a", 0)}
        again.append(completion("b"))
    assert pairs(path) == [("a", 0), ("b", 0)]


def test_a_full_disk_is_one_sentence_and_the_next_row_is_stored(tmp_path, monkeypatch):
    with store(tmp_path) as opened:
        with monkeypatch.context() as patch:
            patch.setattr(row_types, "open_file", lambda path, mode: Path("/dev/full").open(mode))  # noqa: SIM115
            with pytest.raises(UserError, match="No space left on device"):
                opened.append(completion("a"))
        opened.append(completion("a"))
    assert pairs(opened._path) == [("a", 0)]


@pytest.fixture
def short(tiny, tiny_policy, tmp_path):
    return [*tiny, *tiny_policy, "benchmark=toy_add", "draws=6", "slots=2", f"results_dir={tmp_path / 'runs'}"]


@pytest.fixture
def whole(kvsweep, short, tmp_path, read_completions):
    """The sorted completions of the same command where nothing went wrong."""
    ended = kvsweep(*short, f"results_dir={tmp_path / 'whole'}")
    assert ended.code == 0, ended.err
    return read_completions(tmp_path / "whole/default")


@pytest.mark.slow
def test_a_write_that_the_system_refuses(kvsweep, short, whole, tmp_path, read_completions):
    [(cell_id, rows)] = whole.items()
    run = tmp_path / "runs/default"
    with files_of_at_most(len("\n".join(rows)) * 3 // 4):  # more than any other file has
        ended = kvsweep(*short)
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith(f"kvsweep: error: {run / cell_id} cannot be written to")
    assert not (run / cell_id / "DONE").exists()
    stored = (run / cell_id / "completions.jsonl").read_bytes()
    assert 0 < stored.count(b"\n") < len(rows)
    assert kvsweep(*short).code == 0
    assert (run / cell_id / "completions.jsonl").read_bytes().startswith(stored[: stored.rfind(b"\n") + 1])
    assert read_completions(run) == whole


# --- A killed process ---------------------------------------------------------------------------------------


@pytest.mark.core
def test_a_killed_run_goes_on_where_it_stopped(
    kvsweep, start_kvsweep, short, whole, tmp_path, read_completions, monkeypatch
):
    [(cell_id, rows)] = whole.items()
    run = tmp_path / "runs/default"
    path, done = (run / cell_id / name for name in ("completions.jsonl", "DONE"))
    waits_after_three_rows = (
        "import pathlib, time, kvsweep.harness.decode.engine as engine\n"
        f"forward, path = engine.Engine._forward, pathlib.Path({str(path)!r})\n"
        "def wait(self):\n"
        "    while path.exists() and path.read_bytes().count(b'\\n') >= 3: time.sleep(1)\n"
        "    return forward(self)\n"
        "engine.Engine._forward = wait"
    )
    process = start_kvsweep(*short, setup=waits_after_three_rows)
    deadline = time.monotonic() + 240
    while not path.exists() or path.read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = path.read_bytes()
    assert 3 <= before.count(b"\n") < len(rows)
    assert not done.exists()

    appended: list[tuple[str, int]] = []
    append = CellStore.append
    monkeypatch.setattr(CellStore, "append", lambda self, row: (appended.append(row.key), append(self, row))[1])
    ended = kvsweep(*short)
    assert ended.code == 0, ended.err
    assert len(appended) == len(rows) - before.count(b"\n"), "what was stored is not made anew"
    assert read_completions(run) == whole
    assert len(set(pairs(path))) == len(rows) == 18
    assert done.exists()
    passes = json.loads((run / cell_id / "provenance.json").read_text())["decoding_passes"]
    assert len(passes) == 2


@pytest.mark.parametrize("damage", [b"{", b"\xbd{}", None])
def test_a_damaged_provenance_of_another_shard_stops_no_shard(damage, tmp_path):
    with CellStore(tmp_path, CELL, PROBLEMS, shard=Shard(index=1, count=2)) as store:
        other = store.directory / "provenance-2of2.json"
        other.mkdir() if damage is None else other.write_bytes(damage)
        store.begin_pass({}, {"host": "a"})
        assert len(read_provenance(store.directory / "provenance-1of2.json")["decoding_passes"]) == 1
        assert other.is_dir() if damage is None else other.read_bytes() == damage


@pytest.mark.parametrize("damage", [b"{", b"\xbd{}", b"[1]", b'{"schema": 1}', b"[" * 100_000])
def test_a_damaged_provenance_is_moved_aside(damage, tmp_path, capsys):
    with CellStore(tmp_path, CELL, PROBLEMS) as store:
        (store.directory / "provenance.json").write_bytes(damage)
        store.begin_pass({}, {"host": "a"})
        assert len(read_provenance(store.directory / "provenance.json")["decoding_passes"]) == 1
        assert (store.directory / "provenance.json.quarantine").read_bytes() == damage
    assert capsys.readouterr().err.count("\n") == 1
