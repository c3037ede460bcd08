"""A run that an older version has stored can be read and extended; tests/stored/REVISION is made by that commit.

The folder is the `results/runs/stored_REVISION` of these commands, without the report and the lock files:

    kvsweep ... 'grid.policy=[full,dynts]' 'grid.keep_ratio=[0.3]' 'grid.local_window=[16]'
    kvsweep ... policy=h2o policy.keep_ratio=0.3 policy.local_window=16 shard=1/2
    kvsweep replay results/runs/stored_REVISION

with `...` as in SETTINGS and BUDGET, and draws=2. The numbers below are those that REVISION itself reported.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

STORED = Path(__file__).parent / "stored"
FULL, DYNTS, H2O = "553cafc26b300795", "9d20523464c47f02", "7fe18a28abf102f0"
SETTINGS = ["model=toy_qwen", "benchmark=toy_add", "benchmark.limit=2", "decoding=r1", "decoding.max_new_tokens=256"]
SETTINGS += ["slots=4", "run_name=stored_8ed060b"]
BUDGET = ["policy.budget=64", "policy.question=on_top"]
REPORTED = {
    "status": ["done", "done", "partial"],
    "completions": [4, 4, 2],
    "pass_at_1": [0.5, 0.0, 0.0],
    "diff_to_full": [float("nan"), -0.5, -1.0],
    "decision": ["", "unclear", "unclear"],
    "truncated": [0.5, 0.75, 1.0],
    "mean_tokens": [247.0, 247.75, 256.0],
    "mean_evictions": [0.0, 5.75, 6.0],
    "mean_length_after": [float("nan"), 77.1304347826087, 74.0],
    "max_peak_length": [305, 115, 109],
    "kv_bytes_peak": [468480.0, 176640.0, 167424.0],
    "kept_memory": [1.0, 0.3822525597269625, 0.3879003558718861],
}


@pytest.fixture
def run(tmp_path, monkeypatch, kvsweep) -> Path:
    """A copy of the stored run where its commands expect the run, graded by the rules of today."""
    monkeypatch.chdir(tmp_path)
    copy = Path(shutil.copytree(STORED / "8ed060b", "results/runs/stored_8ed060b"))
    assert kvsweep("grade", str(copy)).code == 0
    return copy


def lines(run: Path, pattern: str = "*/completions*.jsonl") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(run.glob(pattern)):
        found.setdefault(path.parent.name, []).extend(path.read_text().splitlines())
    return {cell: sorted(rows) for cell, rows in found.items()}


@pytest.mark.core
def test_status_report_and_export_read_the_numbers_that_were_reported(run, kvsweep):
    status = kvsweep("status", str(run), "--json")
    assert status.code == 0, status.err
    assert [(cell["cell_id"], cell["pass_at_1"]) for cell in json.loads(status.out)["cells"]] == [
        *((FULL, 0.5), (DYNTS, 0.0), (H2O, 0.0))
    ]
    report = kvsweep("report", str(run))
    assert report.code == 0, report.err
    cells = pd.read_csv(run / "report/cells.csv").set_index("cell_id").loc[[FULL, DYNTS, H2O]]
    expected = pd.DataFrame(REPORTED, cells.index)
    pd.testing.assert_frame_equal(cells[list(REPORTED)].fillna({"decision": ""}), expected, check_dtype=False)
    assert "nats" in (run / "report/report.html").read_text(), "the stored replay is on the page"
    export = kvsweep("export", str(run))
    assert export.code == 0, export.err
    texts = [json.loads(row)["text"] for rows in lines(run).values() for row in rows]
    exported = pd.concat(map(pd.read_parquet, (run / "export").rglob("data/*.parquet")))
    assert sorted(exported["text"]) == sorted(texts)
    assert len(texts) == 10


def test_grades_made_again_are_the_stored_ones(run):
    names = ["problem_id", "draw", "outcome", "answer", "gold"]
    for stored in (STORED / "8ed060b").glob("*/grades*.jsonl"):
        now = run / stored.relative_to(STORED / "8ed060b")
        before, after = (pd.read_json(path, lines=True)[names] for path in (stored, now))
        pd.testing.assert_frame_equal(after, before)


def test_compared_with_itself_nothing_differs(run, kvsweep):
    compared = kvsweep("compare", str(run), str(run), "--csv", "compared.csv")
    assert compared.code == 0, compared.err
    assert (pd.read_csv("compared.csv")["difference"].dropna() == 0).all()


@pytest.mark.slow
def test_verify_takes_the_divided_files_for_the_same_code(run, kvsweep):
    """As the sweep does that goes on; see `compression.source.is_same_code`."""
    found = json.loads(kvsweep("verify", str(run), "--count", "3", "--json").out)
    assert [check["state"] for check in found["checks"] if check["name"] == "policy code"] == ["holds"]
    assert len(found["decoded"]) == 3
    assert not any("policy_code" in one["cause"] for one in found["decoded"])


@pytest.mark.slow
def test_trace_draws_a_run_whose_cells_have_shards_alone(run, kvsweep):
    assert kvsweep("trace", str(run), "--show", "retention", "--out", "pictures").code == 0


@pytest.mark.slow
def test_a_replay_repeats_no_row(run, kvsweep):
    before = lines(run, "*/replay.jsonl")
    assert sum(map(len, before.values())) == 6
    replay = kvsweep("replay", str(run))
    assert replay.code == 0 or "have changed" in replay.err, replay.err
    assert lines(run, "*/replay.jsonl") == before


@pytest.mark.core
def test_a_cell_goes_on(run, kvsweep):
    """The code of both lies in other files now, and is the same."""
    before = lines(run)
    more = kvsweep(*SETTINGS, "policy=full", "draws=3")
    assert more.code == 0, more.err
    h2o = ["policy=h2o", *BUDGET, "policy.keep_ratio=0.3", "policy.local_window=16", "draws=2"]
    rest = kvsweep(*SETTINGS, *h2o, "shard=2/2")
    assert rest.code == 0, rest.err
    after = lines(run)
    assert {cell: len(rows) for cell, rows in after.items()} == {FULL: 6, DYNTS: 4, H2O: 4}
    assert all(set(before[cell]) <= set(after[cell]) for cell in before), "a stored row was changed or lost"
