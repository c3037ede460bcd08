"""Sequential sweeps: every cell gets the draws that decide it and no more, however the work is divided or stopped."""

import json
import pickle
import signal
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import submitit
import yaml

from kvsweep.analysis.load import load_run
from kvsweep.analysis.statistics.metrics import cell_metrics
from kvsweep.analysis.statistics.noninferiority import decide_grid, decide_rounds
from kvsweep.compression.config import UNPACKED
from kvsweep.harness.grading.grader import Grader
from kvsweep.harness.rounds import decided_cells, decode_stage, run, staged
from kvsweep.harness.screen import ReplayPlan
from kvsweep.harness.sweep import execute as executing
from kvsweep.harness.sweep import slurm
from kvsweep.harness.sweep.checks import rounds_until
from kvsweep.harness.sweep.job import make_job
from kvsweep.harness.sweep.launch import Inline
from kvsweep.harness.sweep.share import share_of
from kvsweep.harness.sweep.status import read_sweep
from kvsweep.run_files.row_types import COMPLETIONS_FILE, Grade, Shard, read_rows, shard_files
from kvsweep.run_files.run_reader import read_provenance
from kvsweep.run_files.task_status import TaskStatus, read_tasks
from tests.harness.sweep import rounds_grades
from tests.program import beside

GRID = ["benchmark=toy_add", "grid.policy=[full,random]", "grid.keep_ratio=[0.2,0.6]", "grid.budget=[40,58,64]"]
MARGIN = 42
GRID += ["draws=8", f"report.margin={MARGIN}", "benchmark.limit=10"]
DECIDED = "until=decided"


@pytest.fixture(autouse=True)
def grades(monkeypatch):
    monkeypatch.setattr(Grader, "grade", rounds_grades.grade)


@pytest.fixture
def settings(tiny, tiny_policy, tmp_path):
    return [*tiny, *beside(tiny_policy, GRID), f"results_dir={tmp_path}", *GRID]


@pytest.fixture
def command(kvsweep, settings):
    def run_command(*overrides, run="default", code=0):
        ended = kvsweep(*settings, f"run_name={run}", *overrides)
        assert ended.code == code, ended.err
        return ended

    return run_command


def rows(run):
    """Every cell's lines, from whichever shards, sorted."""
    return {
        path.parent.name: sorted(
            line
            for file in shard_files(path.parent, COMPLETIONS_FILE).values()
            for line in file.read_text().splitlines()
        )
        for path in run.glob("*/cell.yaml")
    }


def scores(run, draws):
    """The grades of each cell, [problems, draws], and the cell_id of the full cache."""
    found, full = {}, None
    for path in run.glob("*/cell.yaml"):
        table = sorted((*g.key, g.correct) for g in read_rows(path.parent / "grades.jsonl", Grade))
        found[path.parent.name] = np.array([correct for *_, correct in table], dtype=float).reshape(-1, draws)
        if yaml.safe_load(path.read_text())["policy"]["name"] == "full":
            full = path.parent.name
    return found, full


@pytest.fixture(scope="module")
def cache():
    """What the fixtures below have made; kvsweep runs in one test at a time."""
    return {}


@pytest.fixture
def whole(cache, command, tmp_path):
    """The rows of the grid with all draws; `expected` are those of the draws that decide each cell."""
    if not cache:
        command(run="whole")
        cache.update(rows=rows(tmp_path / "whole"), decided=deciding(tmp_path / "whole"))
    return cache["rows"]


@pytest.fixture
def expected(whole, cache):
    """The rows of the whole grid that a sequential run must have."""
    return cache["decided"]


def deciding(run):
    """The rows of a run with all draws whose draws decide each cell, by the decisions on all rows."""
    found, full = scores(run, 8)
    others = {cell_id: score for cell_id, score in found.items() if cell_id != full}
    decisions = decide_rounds(others, found[full], rounds=(2, 4, 8), margin=MARGIN / 100)
    draws = {cell_id: 8 if d.label == "unclear" else d.draws for cell_id, d in decisions.items()} | {full: 8}
    assert {d.label for d in decisions.values()} >= {"safe", "worse"}
    assert set(draws.values()) == {2, 4, 8}
    return {c: [line for line in lines if json.loads(line)["draw"] < draws[c]] for c, lines in rows(run).items()}


@pytest.mark.core
def test_a_cell_gets_the_draws_that_decide_it(command, tmp_path):
    assert "at most" in command(DECIDED, "--dry-run").out
    run = tmp_path / "default"
    command(DECIDED)
    expected = rows(run)
    sweep = read_sweep(run)
    assert {cell.cell_id: (cell.state, cell.expected) for cell in sweep.cells} == {
        cell_id: ("done", len(lines)) for cell_id, lines in expected.items()
    }
    assert (sweep.finished, sweep.seconds_left) == (sweep.expected, 0.0)
    for cell_id, lines in expected.items():
        provenance = read_provenance(run / cell_id / "provenance.json")
        assert (provenance["expected"], provenance["rounds"], provenance["margin"]) == (len(lines), [2, 4, 8], MARGIN)
    assert "nothing to do" in command(DECIDED).out
    # Without the rounds each cell gets all draws.
    command()
    assert deciding(run) == expected
    assert {len(lines) for lines in rows(run).values()} == {80}
    assert "nothing to do" in command(DECIDED).out


@pytest.mark.slow  # two more whole sweeps
def test_finish_completes_the_draws_of_decided_cells_and_keeps_the_rounds(whole, expected, command, tmp_path):
    run = tmp_path / "default"
    command(DECIDED)
    assert rows(run) == expected
    command(DECIDED, "finish=true", "+launcher.shards=2")
    assert rows(run) == whole
    for path in run.glob("*/provenance*.json"):
        assert json.loads(path.read_text())["rounds"] == [2, 4, 8]
    assert "nothing to do" in command(DECIDED, "finish=true").out
    sweep = read_sweep(run)
    assert (sweep.finished, {cell.state for cell in sweep.cells}) == (sweep.expected, {"done"})
    # In one command, the rounds come first, and the cells have one score for all draws.
    command(DECIDED, "finish=true", run="once")
    assert rows(tmp_path / "once") == whole
    found = cell_metrics(load_run(tmp_path / "once")).set_index("cell_id")
    assert not found["stopped_early"].any()
    tables, name = scores(tmp_path / "once", 8)
    others = {cell_id: table for cell_id, table in tables.items() if cell_id != name}
    decisions = decide_grid(others, tables[name], margin=MARGIN / 100, looks=3)
    for cell_id, decision in decisions.items():
        assert found.loc[cell_id, "decision"] == decision.label
        assert found.loc[cell_id, ["these_low", "diff_to_full"]].tolist() == pytest.approx(
            [decision.low, decision.difference]
        )


@pytest.mark.slow  # whole sweeps in shards
@pytest.mark.release
def test_shards_in_any_order_and_way_write_the_same_rows(expected, command, tmp_path):
    command(DECIDED, "+launcher.shards=3", run="inline")
    assert rows(tmp_path / "inline") == expected
    run = tmp_path / "by_hand"
    for shard, code in (("1/2", 3), ("2/2", 3), ("1/2", 0)):
        ended = command(DECIDED, f"shard={shard}", run="by_hand", code=code)
        if code:
            assert "wait until all shards have stored" in ended.err
            sweep = read_sweep(run)
            assert (sweep.state, sweep.failed) == ("stopped", [])
            assert any(DECIDED in command for command in sweep.retry)
    command(DECIDED, "shard=2/2", run="by_hand")
    assert rows(run) == expected
    assert Counter(cell.state for cell in read_sweep(run).cells) == {"done": 7}


@pytest.mark.slow  # test_cell_store.py kills a process too
def test_a_killed_run_ends_alike_with_other_shards(expected, settings, start_kvsweep, command, tmp_path):
    run = tmp_path / "default"
    mark = tmp_path / "waits"
    waits_in_the_second_round = (
        "import pathlib, time; from kvsweep.harness.sweep.cell_store import CellStore\n"
        "append, late = CellStore.append, []\n"
        "def append_and_wait(self, row):\n"
        "    append(self, row)\n"
        "    late.extend([row] if row.draw in (2, 3) else [])\n"
        f"    if len(late) > 1: pathlib.Path({str(mark)!r}).touch(); time.sleep(600)\n"
        "CellStore.append = append_and_wait\n"
        "from tests.harness.sweep import rounds_grades\nrounds_grades.install()"
    )
    settings = [*settings, DECIDED, "+launcher.shards=2", "slots=8"]
    process = start_kvsweep(*settings, setup=waits_in_the_second_round)
    end = time.monotonic() + 240
    while not mark.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = rows(run)
    assert killed != expected
    # A process that ends between the last row and its grade loses the grade.
    for path in run.glob("*/grades-1of2.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    command(DECIDED, "+launcher.shards=3")
    assert rows(run) == expected


@pytest.mark.slow
@pytest.mark.release
def test_slurm_gets_an_array_for_each_round_that_waits_for_the_one_before(
    whole, settings, compose, monkeypatch, capsys
):
    monkeypatch.setattr(slurm.shutil, "which", lambda name: name)
    submitted = []

    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls):
            return 2

        def map_array(self, function, tasks):
            submitted.append((self._make_submission_file_text("run", "uid"), function, tasks))
            return [submitit.SlurmJob("logs", f"{len(submitted)}00_{i}") for i, _ in enumerate(tasks)]

    monkeypatch.setattr(slurm.submitit, "SlurmExecutor", Executor)
    job = make_job(compose(*settings, DECIDED))
    launcher = slurm.Slurm(shards=2, additional={"dependency": "singleton", "exclude": "node7"})
    run([job], launcher, ReplayPlan())
    asked = [[line for line in text.splitlines() if "dependency" in line] for text, *_ in submitted]
    assert asked == [
        [f"#SBATCH --dependency={after}"] for after in ("singleton", "singleton,afterany:100", "singleton,afterany:200")
    ]
    assert all("exclude=node7" in text for text, *_ in submitted)
    assert "submitted 2 tasks as job 300" in capsys.readouterr().out
    monkeypatch.setattr(
        slurm.slurm_queue, "waiting_jobs", lambda *_: {"200_0": "", "200_1": "", "300_0": "", "300_1": ""}
    )
    for number, (_, function, tasks) in enumerate(submitted):  # SLURM would run them
        if number == 1:
            assert {task.state for task in read_tasks(job.run_directory)} == {"queued"}
        for task in pickle.loads(pickle.dumps(tasks)):
            assert not pickle.loads(pickle.dumps(function))(task)
    assert rows(job.run_directory) == {
        c: [line for line in lines if json.loads(line)["draw"] < decided_draws(job)[c]] for c, lines in whole.items()
    }
    run([job], launcher, ReplayPlan())
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_in_one_task_a_job_that_cannot_go_on_leaves_the_others_status_alone(settings, compose):
    waits = replace(make_job(compose(*settings, DECIDED)), shard=Shard(index=1, count=2))
    other = replace(waits, shard=Shard(index=1, count=1), run_directory=waits.run_directory.parent / "other")
    first, second, _ = zip(*map(staged, (waits, other)), strict=True)
    assert not decode_stage(first)
    [error] = decode_stage(second)
    assert "wait until all shards have stored those" in str(error)
    assert [(task.state, task.error) for task in read_tasks(waits.run_directory)] == [("stopped", str(error))]
    status = TaskStatus.read(TaskStatus.path(other.run_directory, share_of(other).task))
    assert (status.state, status.error) == ("queued", None)


def decided_draws(job):
    return {**{cell.cell_id: job.draws for cell in job.cells}, **decided_cells(job)}


@pytest.mark.slow
def test_a_job_that_fails_has_no_later_round_and_the_others_go_on(settings, compose, monkeypatch):
    job = make_job(compose(*settings, DECIDED))
    other = replace(job, model=replace(job.model, name="another"), run_directory=job.run_directory.parent / "other")
    begun = []

    def execute(grader, share, work):
        begun.append((share.job.model.name, share.job.draws))
        if share.job.model.name == "another":
            raise OSError("the disk is gone")
        return execute_whole(grader, share, work)

    execute_whole = executing.execute
    monkeypatch.setattr(executing, "execute", execute)
    with pytest.raises(OSError, match="the disk is gone"):
        run([other, job], Inline(), ReplayPlan())
    assert [draws for name, draws in begun if name == "another"] == [2]
    assert [draws for name, draws in begun if name != "another"] == [2, 4, 8]


# The words, and what the sentence names.
REFUSED = {
    "until=bored": "until=bored is unknown: choose 'decided'",
    f"{DECIDED} draws=1": "draws=1",
    "finish=true": "finish=True goes with until=decided",
    f"{DECIDED} finish=1": "finish=1 cannot be used: input should be a valid boolean.",
    "seed=9007199254740992": "seed=9007199254740992 cannot be used",
    "draws=99999999999": "completions a cell: at most 10,000,000 are possible",
    "model=null": "not by a number or null: write",
    "model=3": "not by a number or null: write",
    "cache=int4": "int4 stands where a group of settings is needed",
    "cache=null": "null stands where a group of settings is needed",
    "grid=null": "null stands where a group of settings is needed",
    "screen=true": "screen=True cannot be used",
    "screen=loss:x": "screen='loss:x' cannot be used",
    f"{DECIDED} grid.policy=[random]": "random alone",
    f"{DECIDED} grid.policy=[full]": "full alone",
    "report.margin=0": "report.margin=0",
    "report.margin=100": "report.margin=100",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_decided_is_one_sentence(words, command, no_model):
    ended = command(*words.split(), code=2)
    assert REFUSED[words] in ended.err
    assert len(ended.err.splitlines()) == 1


def test_every_shard_has_its_part_of_every_round(settings, compose):
    whole = make_job(compose(*settings, DECIDED))
    assert whole.rounds == (2, 4, 8)
    assert [rounds_until(n, UNPACKED, [cell.policy for cell in whole.cells]) for n in (2, 3, 4, 12)] == [
        (2,), (2, 3), (2, 4), (2, 4, 8, 12),
    ]  # fmt: skip
    shards = [replace(whole, shard=Shard(index=i, count=4)) for i in (1, 2, 3, 4)]
    for draws, new in ((2, {0, 1}), (4, {2, 3}), (8, {4, 5, 6, 7})):
        parts = [share_of(replace(shard, draws=draws)).pairs for shard in shards]
        assert sorted(pair for part in parts for pair in part) == sorted(share_of(replace(whole, draws=draws)).pairs)
        assert {sum(draw in new for _, draw in part) for part in parts} == {10 * len(new) // 4}
        # A pair stays with its shard when there are more draws.
        assert all(set(part) <= set(share_of(shard).pairs) for part, shard in zip(parts, shards, strict=True))
