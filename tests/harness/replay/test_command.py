"""`kvsweep replay`, and a sweep's `replay=` and `screen=`: rows, resume, shards, seconds, refusals."""

import json
from dataclasses import replace

import msgspec
import pandas as pd
import pyarrow.parquet as pq
import pytest

from kvsweep.analysis.export import export
from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.build import build_report
from kvsweep.analysis.statistics.fidelity import timings
from kvsweep.harness.replay.command import replay
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.sweep.status import read_sweep, sentence, to_json
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import COMPLETIONS_FILE, SECONDS_FILE, Replay, Timing, append_row, read_rows

SWEEP = [
    "benchmark=toy_chain",
    "benchmark.limit=4",
    "grid.policy=[full,window,streaming_llm]",
    "policy=window",
    "policy.budget=24",
    "policy.keep_ratio=0.5",
    "policy.local_window=6",
    "decoding.max_new_tokens=48",
]


@pytest.fixture
def sweep(kvsweep, tmp_path):
    def run(name, *more):
        ended = kvsweep(*SWEEP, f"results_dir={tmp_path}", f"run_name={name}", *more)
        assert ended.code == 0, ended.err
        return tmp_path / name

    return run


def rows(folder):
    found = {}
    for path in sorted(folder.glob("*/replay*.jsonl")):
        found.setdefault(path.parent.name, {}).update({row.key: row for row in read_rows(path, Replay)})
    return found


def assert_same(found, whole):
    """Equal but for rounding: products of other numbers of tokens may round otherwise."""
    assert found.keys() == whole.keys()
    for name, of_cell in whole.items():
        assert found[name].keys() == of_cell.keys()
        for key, row in of_cell.items():
            other = found[name][key]
            assert (other.tokens, other.evictions, other.top1) == (row.tokens, row.evictions, row.top1)
            assert other.kl_mean == pytest.approx(row.kl_mean, abs=1e-4)
            assert other.loglik == pytest.approx(row.loglik, abs=1e-3)


def decoded(folder):
    return {path.parent.name for path in folder.glob(f"*/{COMPLETIONS_FILE}") if path.stat().st_size}


@pytest.mark.slow
def test_rows_are_the_same_after_a_kill_and_in_shards(sweep):
    folder = sweep("whole", "replay=only")
    whole = rows(folder)
    assert len(whole) == 3
    assert all(len(of_cell) == 4 for of_cell in whole.values())
    assert len(decoded(folder)) == 1, "the full cache's texts alone"
    assert {sum(row.evictions for row in of_cell.values()) > 0 for of_cell in whole.values()} == {False, True}

    cell = next(folder / name for name, of_cell in whole.items() if any(row.evictions for row in of_cell.values()))
    path = cell / "replay.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]) + b'{"schema":1,"prob')  # torn
    # The run was made by another installation, whose embedded weights are not here.
    for provenance in folder.glob("*/provenance.json"):
        elsewhere = provenance.read_text().replace(str(WEIGHTS), "/gone/site-packages/kvsweep/harness/toy/weights")
        assert "/gone/" in elsewhere
        provenance.write_text(elsewhere)
    replay(folder, [], timed=False)
    assert_same(rows(folder), whole)

    for path in folder.glob("*/replay.jsonl"):
        path.unlink()
    for shard in ("shard=2/2", "shard=1/2"):
        replay(folder, [shard], timed=False)
    assert_same(rows(folder), whole)


@pytest.mark.slow
def test_a_screen_decodes_the_cells_of_the_lowest_kl(sweep):
    folder = sweep("screened", "screen=1")
    kl = {name: sum(row.kl_mean for row in found.values()) for name, found in rows(folder).items()}
    full, nearest, farthest = sorted(kl, key=kl.__getitem__)
    assert decoded(folder) == {full, nearest}
    assert kl[full] == 0 < kl[farthest]
    noted = json.loads((folder / "screen.json").read_text())
    assert noted.keys() == {farthest}
    assert noted[farthest]["kl"] == pytest.approx(kl[farthest] / 4)

    status = to_json(read_sweep(folder))
    assert (status["state"], status["finished"], status["expected"]) == ("done", 8, 8)
    assert (status["replayed"], status["to_replay"]) == (12, 12)
    half = replace(read_sweep(folder), replayed=2)
    assert sentence(half).startswith("50.0%, 8 of 8 completions, 2 of 12 texts replayed, left ")
    page = build_report(folder).read_text()
    assert "Screened out, not decoded: 1" in page
    assert "Unfinished cells" not in page
    assert page.count("Replayed texts") == 1
    replayed = pq.read_table(export(folder)[0] / "replayed.parquet").to_pylist()
    assert {row["cell_id"]: 4 for row in replayed} == dict.fromkeys(kl, 4)
    assert sum(row["kl_mean"] for row in replayed if row["cell_id"] == farthest) == pytest.approx(kl[farthest])

    # A bound on the loss, and then no screen, decode what the first screen left out.
    lost = {name: note["loss"] for name, note in noted.items()}
    sweep("screened", f"screen=loss:{lost[farthest] + 1e-6}")
    assert decoded(folder) == {full, nearest, farthest}
    assert json.loads((folder / "screen.json").read_text()) == {}


@pytest.mark.slow  # three sweeps and two replays
def test_cells_with_other_texts_are_ranked_by_the_texts_that_all_have(sweep):
    folder = sweep("later", "replay=only")
    sweep("later", "replay=false", "grid.policy=[full,random]", "policy=random")
    replay(folder, ["limit=2"], timed=False)
    assert sorted(len(of_cell) for of_cell in rows(folder).values()) == [2, 4, 4, 4]
    table = pd.read_csv(folder / "report" / "fidelity" / "fidelity.csv").set_index("cell_id")
    assert set(table["texts"]) == {2}
    bins = pd.read_csv(folder / "report" / "fidelity" / "bins.csv")
    tokens = bins[bins["by"] == "entropy"].groupby("cell_id")["tokens"].sum()
    for name, of_cell in rows(folder).items():
        first = [of_cell[key] for key in sorted(of_cell)[:2]]
        assert table.loc[name, "kl"] == pytest.approx(sum(row.kl_mean for row in first) / 2)
        assert tokens[name] == sum(row.tokens for row in first)
    status = to_json(read_sweep(folder))
    assert status["replayed"] == status["to_replay"]
    assert status["seconds_left"] == 0


@pytest.mark.slow  # two processes that import torch
@pytest.mark.release
def test_tasks_of_their_own_replay_like_one(sweep):
    folder = sweep("tasks", "replay=only")
    whole = rows(folder)
    for path in folder.glob("*/replay.jsonl"):
        path.unlink()
    replay(folder, ["launcher=local", "launcher.shards=2", "launcher.parallel=1"], timed=False)
    assert_same(rows(folder), whole)
    assert {path.name for path in folder.glob("*/replay*.jsonl")} == {"replay-1of2.jsonl", "replay-2of2.jsonl"}


@pytest.mark.core
def test_texts_of_a_file_and_seconds(sweep, tmp_path):
    file = tmp_path / "texts.jsonl"
    lines = [{"id": f"t{i}", "problem": "a=1;b=2", "text": "a=1;" * (8 + i)} for i in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = sweep("file", "replay=only", f"texts={file}")
    assert all(set(found) == {("t0", 0), ("t1", 0)} for found in rows(folder).values())
    replay(folder, [f"texts={file}", "slots=2", "rounds=2"], timed=True)
    batches = [(n, *batch) for n in range(2) for batch in (("one", 1), ("given", 2))]
    page = build_report(folder).read_text()
    assert page.count("Seconds of each setting alone</h2>") == 1
    assert page.count('<h2 id="fidelity">') == 1
    timed = timings(load_run(folder))
    assert set(timed["slots"]) == {1, 2}
    assert set(timed["rounds"]) == {2}
    full = timed[timed["times_full"] == 1]
    assert len(full) == 2
    for path in folder.glob("*/cell.yaml"):
        found = list(read_rows(path.with_name(SECONDS_FILE), Timing))
        assert [(row.round, row.why, row.slots) for row in found] == batches
        assert all(row.seconds > 0 and sum(s for _, _, s in row.by_length) <= row.seconds * 1.001 for row in found)
        # A later command with other slots and fewer rounds takes the place of the first one's rounds.
        append_row(path.with_name(SECONDS_FILE), msgspec.structs.replace(found[1], slots=4))
    given = timings(load_run(folder)).query("why == 'given'")
    assert set(given["slots"]) == {4}
    assert set(given["rounds"]) == {1}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Where the first mistake puts the run that none of them changes."""
    return tmp_path_factory.mktemp("finished")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["slots=2"], "slots is not a setting"),
        (["limit=0"], "^limit='0' cannot be used"),
        (["texts=none"], "texts=none"),
        (["launcher=none"], "launcher=none is unknown"),
    ],
)
def test_a_mistake_is_one_sentence(kvsweep, finished, overrides, sentence):
    folder = finished / "bad"
    if not folder.exists():
        ended = kvsweep(*SWEEP, f"results_dir={finished}", "run_name=bad", "grid.policy=[full,window]")
        assert ended.code == 0, ended.err
    with pytest.raises(UserError, match=sentence):
        replay(folder, overrides, timed=False)
