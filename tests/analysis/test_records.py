"""The rows that a run writes: what is told from them."""

import pytest

from analysis.records import Completion, Eviction, UserError, held_percents


def completion(**fields):
    ids = [5, 6, 7, 8]
    usual = {"problem_id": "p", "draw": 0, "text": "", "token_ids": ids, "num_tokens": 4, "prompt_tokens": 3}
    return Completion(**usual, thinking_tokens=4, stop_reason="length", peak_length=6, seed=0, **fields)


def test_held_runs_spread_out():
    assert held_percents([100, 2, 0, 3, 30, 1]) == [100, 100, 0, 0, 0, 30]
    assert held_percents([]) == []


def test_a_held_run_without_its_count_is_refused():
    with pytest.raises(ValueError, match="zip"):
        held_percents([100, 2, 0])


def test_rows_from_before_held_and_fork_step_still_read():
    row = completion(evictions=[Eviction(step=2, length_before=5, length_after=3)]).to_dict()
    del row["fork_step"], row["evictions"][0]["held"]
    read = Completion.from_dict(row)
    assert read.evictions[0].held == []
    assert read.fork_step is None


def test_shared_tokens_end_with_the_step_that_evicted_first():
    evictions = [Eviction(step=s, length_before=5, length_after=3) for s in (1, 3)]
    assert completion(evictions=evictions).shared_ids == [5, 6]
    assert completion().shared_ids == [5, 6, 7, 8]


def test_a_mistake_is_told_on_one_line_whatever_the_value() -> None:
    assert str(UserError("x=a\nb\u2028c is unknown.")) == "x=a b c is unknown."
    assert str(UserError("\n")) == ""
