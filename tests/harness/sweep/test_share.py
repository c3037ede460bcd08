"""Which cells a share works at, and what its status counts, by stand-ins of a job and its stored cells."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvsweep.harness.sweep.share import Share, lacking, share_of, status_of
from kvsweep.run_files.row_types import Shard

IDS = ["p0", "p1"]


def job_of(done: str = "", ungraded: str = "", replayed: str = "", **more: Any) -> Any:
    """A job of the cells a and b; each word has the cells that are done, lack a grade, or are replayed."""
    pairs = {(problem, draw) for problem in IDS for draw in range(2)}
    cells = tuple(
        SimpleNamespace(cell_id=name, policy=SimpleNamespace(identity=lambda: {"name": "x"}), describe=dict)
        for name in "ab"
    )
    named = SimpleNamespace(name="m", random_weights=False)
    settings: dict[str, Any] = {"cells": cells, "problem_ids": IDS, "draws": 2, "rounds": (), "shard": Shard()}
    return SimpleNamespace(
        **settings | more,
        model=named,
        benchmark=named,
        command="kvsweep",
        scores=lambda cell: np.array([np.nan if cell.cell_id in ungraded else 1.0]),
        stored=lambda cell: SimpleNamespace(
            covers=lambda *asked: cell.cell_id in done,
            pairs=lambda file: pairs if cell.cell_id in replayed else set(),
        ),
    )


def names(share: Share) -> str:
    return "".join(cell.cell_id for cell in lacking(share))


@pytest.mark.parametrize(("rounds", "last"), [((), True), ((2,), True), ((2, 4), False)])
def test_the_last_round_has_all_draws(rounds, last):
    assert share_of(job_of(rounds=rounds)).is_last == last


def test_cells_without_done_lack_something_and_before_the_last_round_those_without_a_grade():
    job = job_of(done="a", ungraded="ab")
    assert names(share_of(job)) == "b"
    assert names(share_of(job_of(rounds=(2, 4), ungraded="b"))) == "b"
    assert names(share_of(job_of(rounds=(2, 4), ungraded="b", done="b"))) == ""
    assert names(Share(job=job_of(done="ab", replayed="b"), dealt=[("p0", 0)], rows="replay.jsonl")) == "a"


def test_a_replay_s_status_counts_whole_cells_and_a_decoding_s_none():
    job = job_of(done="ab", replayed="b")
    decoded, replayed = (Share(job=job, dealt=[("p0", 0), ("p1", 0)], rows=file) for file in ("completions.jsonl", "r"))
    counts = [[cell.finished for cell in status_of(share, "queued").cells.values()] for share in (decoded, replayed)]
    assert counts == [[0, 0], [0, 2]]
    assert [status_of(share, "queued").replays for share in (decoded, replayed)] == [False, True]
    assert replayed.task == f"replay-{decoded.task}"


def test_a_shard_s_pairs_are_problem_by_problem():
    whole, half = share_of(job_of()), share_of(job_of(shard=Shard(index=2, count=2)))
    assert whole.pairs == [("p0", 0), ("p0", 1), ("p1", 0), ("p1", 1)]
    assert half.pairs == [("p1", 0), ("p1", 1)]
