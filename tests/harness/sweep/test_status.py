"""kvsweep status tells every state of a task apart without reading a row."""

import json
import os
import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from kvsweep.analysis.statistics import metrics
from kvsweep.harness.sweep import status
from kvsweep.harness.sweep.status import read_sweep
from kvsweep.messages.errors import UserError
from kvsweep.run_files import task_status
from kvsweep.run_files.row_types import Grade
from kvsweep.run_files.task_status import CellProgress, Reporter, TaskStatus, policy_label, process_mark, task_name
from tests.program import status as main


def task(
    run: Path, state: status.State, cells: dict[str, tuple[int, int]], *, shard: str = "1/1", **more: Any
) -> TaskStatus:
    progress = {
        cell_id: CellProgress(model="m", benchmark="b", policy=cell_id, finished=done, expected=expected)
        for cell_id, (done, expected) in cells.items()
    }
    row = TaskStatus(
        task=task_name("m", "b", cells, shard),
        state=state,
        shard=shard,
        cells=progress,
        **{"command": "kvsweep x=1", **more},
    )
    row.write(run)
    return row


def live(run: Path, state: status.State, cells: dict[str, tuple[int, int]], **more: Any) -> TaskStatus:
    """The task of this process, which lives."""
    now, pid = time.time(), os.getpid()
    alive = {"host": platform.node(), "pid": pid, "process": process_mark(pid), "started": now - 10, "heartbeat": now}
    return task(run, state, cells, **{**alive, **more})


def mark_done(run: Path, cell_id: str, completions: int = 5):
    (run / cell_id).mkdir(exist_ok=True)
    (run / cell_id / "DONE").write_text(json.dumps({"completions": completions, "files": {}}))


def ended(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def states(run: Path) -> dict[str, str]:
    return {cell.cell_id: cell.state for cell in read_sweep(run).cells}


def test_every_state_is_told_apart(tmp_path):
    live(tmp_path, "running", {"a": (2, 5)}, tokens=1000, pace=100.0, tokens_left=1500, made=2)
    task(tmp_path, "queued", {"b": (0, 5)}, tokens_left=500)
    live(tmp_path, "failed", {"c": (1, 5)}, error="boom", pace=7.0, tokens_left=300)
    live(tmp_path, "running", {"d": (1, 5)}, pid=2**22 + 1, pace=7.0, tokens_left=300)
    lost = live(tmp_path, "running", {"e": (1, 5)}, process="elsewhere", heartbeat=time.time() - 1000)
    os.utime(TaskStatus.path(tmp_path, lost.task), (1, 1))
    live(tmp_path, "done", {"f": (5, 5)})
    mark_done(tmp_path, "f")
    sweep = read_sweep(tmp_path)
    assert states(tmp_path) == dict(
        zip("abcdef", ["running", "queued", "failed", "stopped", "stopped", "done"], strict=True)
    )
    assert (sweep.finished, sweep.expected) == (10, 30)
    assert sweep.tokens_per_second == 100
    assert sweep.seconds_left == 20, "of the tasks that run or wait; the stopped ones do not go on"
    assert sorted(next(iter(t.cells)) for t in sweep.failed) == ["c", "d", "e"]


def test_of_a_stopped_sweep_no_time_is_left_to_tell(tmp_path, kvsweep):
    live(tmp_path, "failed", {"c": (1, 5)}, error="boom", pace=7.0, tokens_left=300)
    ended = kvsweep("status", str(tmp_path))
    assert "nothing runs" in ended.out
    assert "left " not in ended.out


def test_a_done_that_never_came_is_not_done(tmp_path):
    """The scheduler's COMPLETED, or our own word: without DONE the cell is not there."""
    live(tmp_path, "done", {"a": (5, 5)})
    assert states(tmp_path) == {"a": "stopped"}


def test_a_failed_shard_goes_on_by_its_own_command_and_an_ended_one_by_those_of_shards_without_a_task(tmp_path):
    command = "kvsweep x=1 shard={}/3"
    for state, finished, others in (("failed", 1, [1]), ("done", 3, [2, 3])):
        live(tmp_path, state, {"a": (finished, 3)}, shard="1/3", command=command.format(1))
        assert read_sweep(tmp_path).retry == [command.format(other) for other in others]


def test_shards_add_up(tmp_path):
    live(tmp_path, "done", {"a": (3, 3)}, shard="1/2")
    live(tmp_path, "running", {"a": (1, 2)}, shard="2/2")
    [cell] = read_sweep(tmp_path).cells
    assert (cell.state, cell.finished, cell.expected) == ("running", 4, 5)
    live(tmp_path, "running", {"a": (4, 5)}, shard="1/1", heartbeat=time.time() + 1)
    [cell] = read_sweep(tmp_path).cells
    assert (cell.finished, cell.expected) == (4, 5), "split anew: the newest way counts"


def test_a_cell_of_several_experiments_is_counted_once(tmp_path):
    live(tmp_path, "done", {"a": (4, 4), "b": (4, 4)})
    live(tmp_path, "running", {"a": (0, 4), "c": (1, 4)})
    task(tmp_path, "queued", {"a": (0, 8), "d": (0, 4)})
    sweep = read_sweep(tmp_path)
    counts = {cell.cell_id: (cell.finished, cell.expected) for cell in sweep.cells}
    assert counts == {"a": (4, 8), "b": (4, 4), "c": (1, 4), "d": (0, 4)}
    assert (sweep.finished, sweep.expected) == (9, 20)


def write_grades(folder: Path, grades: Sequence[tuple[str, int, int]], name: str = "grades.jsonl"):
    folder.mkdir(exist_ok=True)
    rows = [
        Grade(problem_id=p, draw=d, answer=None, gold="1", outcome="correct" if right else "wrong", correct=right)
        for p, d, right in grades
    ]
    (folder / name).write_text("".join(row.to_line() for row in rows) + '{"problem_id": "torn')


def test_pass_at_1_so_far_is_that_of_the_report(tmp_path):
    live(tmp_path, "running", {"a": (7, 12), "b": (1, 12), "c": (0, 12)}, shard="1/2")
    live(tmp_path, "running", {"a": (2, 12)}, shard="2/2")
    first = [("p", 0, 1), ("p", 1, 0), ("q", 0, 1), ("q", 1, 1), ("r", 0, 0), ("r", 1, 0), ("r", 1, 1)]
    second = [("s", 0, 1), ("s", 1, 0), ("s", 2, 0)]
    write_grades(tmp_path / "a", first, "grades-1of2.jsonl")
    write_grades(tmp_path / "a", second, "grades-2of2.jsonl")
    write_grades(tmp_path / "b", first[:1])
    rows = pd.DataFrame([*first[:5], *first[6:], *second], columns=["problem_id", "draw", "correct"])
    expected = metrics.pass_at_1(rows.assign(cell_id="a")).loc["a"]
    found = {cell.cell_id: cell for cell in read_sweep(tmp_path).cells}
    assert found["a"].graded == expected["graded"] == 9
    assert found["a"].pass_at_1 == pytest.approx(expected["pass_at_1"], abs=1e-12)
    assert found["a"].error == pytest.approx(expected["se"], abs=1e-12)
    assert (found["b"].pass_at_1, found["b"].error) == (1, None)
    assert (found["c"].pass_at_1, found["c"].error) == (None, None)


def test_replayed_rows_have_a_pace_of_their_own(tmp_path):
    live(tmp_path, "running", {"a": (2, 6), "b": (0, 4)}, replays=True, made=4)
    assert read_sweep(tmp_path).seconds_left == pytest.approx(8 / 0.4, rel=0.05)
    task(tmp_path, "queued", {"c": (0, 4)}, tokens_left=100)
    assert read_sweep(tmp_path).seconds_left is None, "no task decodes yet"


def test_a_task_that_has_just_begun_has_the_pace_of_the_others(tmp_path):
    live(tmp_path, "running", {"a": (0, 5)}, tokens_left=600)
    assert read_sweep(tmp_path).seconds_left is None, "nothing was measured yet"
    live(tmp_path, "done", {"b": (5, 5)}, pace=100.0)
    live(tmp_path, "done", {"c": (5, 5)}, pace=300.0)
    sweep = read_sweep(tmp_path)
    assert (sweep.seconds_left, sweep.tokens_per_second) == (3, 0)
    live(tmp_path, "running", {"d": (0, 5)}, pace=400.0, tokens_left=600)
    assert read_sweep(tmp_path).seconds_left == pytest.approx(1200 / (400 + 800 / 3))


def test_some_cells_of_a_run(tmp_path):
    live(tmp_path, "running", {"a": (2, 5), "b": (1, 5)})
    task(tmp_path, "failed", {"c": (0, 5)}, error="boom")
    sweep = read_sweep(tmp_path, {"b"})
    assert [cell.cell_id for cell in sweep.cells] == ["b"]
    assert (sweep.finished, sweep.expected, sweep.failed) == (1, 5, [])


def test_a_killed_sweep(tmp_path, capsys):
    live(tmp_path, "running", {"full": (3, 5), "a": (2, 5), "b": (4, 5)}, pid=2**22 + 1)
    write_grades(tmp_path / "full", [("p", 0, 1), ("q", 0, 0), ("r", 0, 1), ("s", 0, 1)])
    sweep = read_sweep(tmp_path)
    assert (sweep.state, sweep.finished) == ("stopped", 10), "the status file was written before the fourth grade"
    assert ended(str(tmp_path), "--cells") == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}: stopped" in out
    [line] = [line for line in out.splitlines() if "75.0 ± 25.0" in line]
    assert line.split() == ["full", "stopped", "4/5", "75.0", "±", "25.0", "full"], "policy first, the cell's id last"
    assert out.count("no grade") == 2
    assert f"Not graded yet: 6 completions. This command grades the rest:\n    kvsweep grade {tmp_path}\n" in out
    live(tmp_path, "running", {"full": (3, 5), "a": (2, 5), "b": (4, 5)})
    ended(str(tmp_path))
    out = capsys.readouterr().out
    assert f"{tmp_path}: running" in out
    assert "kvsweep grade" not in out


def test_random_weights_have_no_score(tmp_path):
    row = live(tmp_path, "done", {"a": (1, 1)})
    row.cells["a"].random_weights = True
    row.write(tmp_path)
    write_grades(tmp_path / "a", [("p", 0, 0)])
    [cell] = read_sweep(tmp_path).cells
    assert (cell.graded, cell.pass_at_1, cell.ungraded) == (1, None, 0)


@pytest.mark.parametrize("options", [[], ["--cells"]])
def test_long_names_fit_80_columns_and_are_not_cut(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = ["a_model_" + "m" * 40, "a_benchmark_" + "b" * 40, "a_policy_" + "p" * 70 + " 0.3 w64 b5000"]
    for number in (1, 2):
        row = live(tmp_path, "running", {str(number): (12345, 67890)})
        row.cells[str(number)].model, row.cells[str(number)].benchmark, row.cells[str(number)].policy = names
        row.write(tmp_path)
        write_grades(tmp_path / str(number), [(str(i), 0, i % 2) for i in range(50)])
    ended(str(tmp_path), *options)
    _, *lines = capsys.readouterr().out.splitlines()  # the first line has the folder's path, which stays whole
    assert max(map(len, lines)) <= 80
    said = "".join("".join(lines).split())
    for part in ("12345/67890", "50.0±7.1") if options else ("24690/135780", "50.0to50.0"):
        assert part in said
    for letter, count in {"m": 40, "b": 40, "p": 70}.items() if options else {"m": 40, "b": 40}.items():
        assert sum(line.count(letter) for line in lines) >= count
    assert "…" not in said


def test_a_failure_that_a_later_run_mended_is_not_told(tmp_path):
    live(tmp_path, "failed", {"a": (1, 5)}, error="boom")
    mark_done(tmp_path, "a")
    assert read_sweep(tmp_path).failed == []


def test_a_cell_whose_file_was_deleted_is_shown(tmp_path):
    live(tmp_path, "done", {"a": (1, 1)})
    mark_done(tmp_path, "a")
    grade = {"schema": 1, "problem_id": "p", "draw": 0, "answer": "1", "gold": "1", "outcome": "correct", "correct": 1}
    (tmp_path / "a/grades.jsonl").write_text(json.dumps(grade | {"rule": "x"}) + "\n")
    assert states(tmp_path) == {"a": "done"}


def test_a_cell_that_lost_rows_since_is_not_done(tmp_path):
    live(tmp_path, "done", {"a": (2, 2)})
    mark_done(tmp_path, "a")
    (tmp_path / "a/completions.jsonl").write_text("{}\n")
    assert states(tmp_path) == {"a": "stopped"}


def test_cells_without_a_task_are_counted_by_their_done(tmp_path):
    for cell_id in ("a", "b"):
        (tmp_path / cell_id).mkdir()
        described = {"schema": 1, "model": {"name": "m"}, "benchmark": {"name": "b"}}
        described["policy"] = {"name": "dynts", "keep_ratio": 0.3}
        (tmp_path / cell_id / "cell.yaml").write_text(yaml.safe_dump(described))
    mark_done(tmp_path, "a", 7)
    first, second = read_sweep(tmp_path).cells
    assert (first.policy, first.state, first.finished, first.expected) == ("dynts 0.3", "done", 7, 7)
    assert (second.state, second.finished) == ("stopped", 0)


def test_a_reporter_tells_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(task_status, "HEARTBEAT_S", 0.01)
    row = task(tmp_path, "queued", {"a": (0, 2)})
    path = tmp_path / "status" / f"{row.task}.json"
    with Reporter(tmp_path, row) as reporter:
        reporter.counters.append(lambda: 42)
        reporter.tokens_left = lambda: 7
        reporter.stored("a")
        begun, end = TaskStatus.read(path).heartbeat, time.monotonic() + 120
        while TaskStatus.read(path).tokens != 42 or TaskStatus.read(path).heartbeat == begun:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert TaskStatus.read(path).seen(path) == "running"
        assert TaskStatus.read(path).cells["a"].finished == 1
        assert (TaskStatus.read(path).tokens_left, TaskStatus.read(path).pace) == (7, 0)
    ended = time.monotonic()
    with Reporter(tmp_path, row) as reporter:
        reporter.counters.append(lambda: round(1e6 * (time.monotonic() - ended)))
        while not 0.9e6 < TaskStatus.read(path).pace < 1.1e6:
            assert time.monotonic() < ended + 120
            time.sleep(0.005)
    assert TaskStatus.read(path).state == "done"
    for error, state, said in (
        (ZeroDivisionError("1/0"), "failed", "ZeroDivisionError: 1/0"),
        (UserError("too much."), "failed", "too much."),
        (KeyboardInterrupt(), "stopped", None),
    ):
        with pytest.raises(type(error)), Reporter(tmp_path, row):
            raise error
        assert TaskStatus.read(path).state == state
        assert (said is None) or str(TaskStatus.read(path).error).endswith(said)


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path):
    row = task(tmp_path, "queued", {"a": (0, 2)})
    blocked = tmp_path / "file"
    blocked.write_text("")
    with Reporter(blocked, row):
        pass


@pytest.mark.parametrize("damage", ["{", '{"task": 1}'])
def test_a_damaged_status_file_is_passed_over(damage, tmp_path):
    task(tmp_path, "queued", {"a": (0, 5)})
    (tmp_path / "status" / "broken.json").write_text(damage)
    assert states(tmp_path) == {"a": "queued"}


def test_labels_name_what_tells_cells_apart():
    settings = {"name": "dynts", "keep_ratio": 0.3, "local_window": 64, "budget": 5000}
    assert policy_label(settings) == "dynts 0.3 w64 b5000"
    assert policy_label({"name": "full"}) == "full"


def test_a_long_path_is_told_in_one_piece(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    run = tmp_path / "a folder of a long name, in words" / ("with a name [bold] that goes on" * 4)
    run.mkdir(parents=True)
    live(run, "done", {"a": (5, 5)})
    mark_done(run, "a")
    for options in ([], ["--cells"]):
        assert ended(str(run), *options) == 0
        assert f"{run}: done\n" in capsys.readouterr().out


def test_the_command(tmp_path, capsys):
    live(tmp_path, "failed", {"a": (1, 5)}, error="line one\nboom", scheduler_job="7_3")
    mark_done(tmp_path, "b")
    live(tmp_path, "done", {"b": (5, 5)})
    assert ended(str(tmp_path)) == 1
    out = capsys.readouterr().out
    for part in ("1 of 2 cells done", "6 of 10 completions", "boom", "job 7_3", "kvsweep x=1"):
        assert part in out
    assert ended(str(tmp_path), "--cells") == 1
    assert "failed" in capsys.readouterr().out
    assert ended(str(tmp_path), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["states"] == {"failed": 1, "done": 1}
    assert told["retry"] == ["kvsweep x=1"]
    mark_done(tmp_path, "a")
    assert ended(str(tmp_path), "--watch", "--interval", "0.1") == 0


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_show_is_one_sentence(name, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert ended(str(tmp_path / name)) == 2
    assert capsys.readouterr().err.startswith("kvsweep status: error: ")


def test_a_run_leaves_its_status(kvsweep, tiny, tmp_path):
    arguments = [*tiny, "policy=full", "decoding.max_new_tokens=4", "benchmark.limit=3", f"results_dir={tmp_path}"]
    assert kvsweep(*arguments, "shard=1/2").code == 0
    run = tmp_path / "default"
    sweep = read_sweep(run)
    assert [(c.state, c.finished, c.expected) for c in sweep.cells] == [("stopped", 2, 2)]
    [command] = sweep.retry
    assert kvsweep(*shlex.split(command)[1:]).code == 0, "this is the other shard"
    sweep = read_sweep(run)
    assert [(c.state, c.finished, c.expected) for c in sweep.cells] == [("done", 3, 3)]
    assert sweep.failed == []
    assert all(t.command.startswith("kvsweep ") and "shard=" in t.command for t in sweep.tasks)
