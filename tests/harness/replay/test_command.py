"""`kvsweep-replay`, and a sweep's `replay=` and `screen=`: rows, resume, shards, seconds, refusals."""

import json

import pytest

from kvsweep.base.errors import UserError
from kvsweep.base.records import COMPLETIONS_FILE, SECONDS_FILE, Replay, Timing, read_rows
from kvsweep.harness.replay.command import _replay

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
    _replay(folder, [], timed=False)
    assert_same(rows(folder), whole)

    for path in folder.glob("*/replay.jsonl"):
        path.unlink()
    for shard in ("shard=2/2", "shard=1/2"):
        _replay(folder, [shard], timed=False)
    assert_same(rows(folder), whole)


def test_a_screen_decodes_the_cells_of_the_lowest_kl(sweep):
    folder = sweep("screened", "screen=1")
    kl = {name: sum(row.kl_mean for row in found.values()) for name, found in rows(folder).items()}
    full, nearest, farthest = sorted(kl, key=kl.__getitem__)
    assert decoded(folder) == {full, nearest}
    assert kl[full] == 0 < kl[farthest]


def test_texts_of_a_file_and_seconds(sweep, tmp_path):
    file = tmp_path / "texts.jsonl"
    lines = [{"id": f"t{i}", "problem": "a=1;b=2", "text": "a=1;" * (8 + i)} for i in range(2)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = sweep("file", "replay=only", f"texts={file}")
    assert all(set(found) == {("t0", 0), ("t1", 0)} for found in rows(folder).values())
    _replay(folder, [f"texts={file}", "slots=2", "rounds=2"], timed=True)
    batches = [(n, *batch) for n in range(2) for batch in (("one", 1), ("given", 2))]
    for path in folder.glob("*/cell.yaml"):
        found = list(read_rows(path.with_name(SECONDS_FILE), Timing))
        assert [(row.round, row.why, row.slots) for row in found] == batches
        assert all(row.seconds > 0 and sum(s for _, _, s in row.by_length) <= row.seconds * 1.001 for row in found)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["nonsense=1"], "unknown here"),
        (["slots=2"], "--time alone"),
        (["limit=0"], "limit"),
        (["texts=none"], "texts=none"),
    ],
)
def test_a_mistake_is_one_sentence(sweep, overrides, sentence):
    folder = sweep("bad", "grid.policy=[full]")
    with pytest.raises(UserError, match=sentence):
        _replay(folder, overrides, timed=False)
