"""Warnings of servers: prompts that differ, texts that a server cut off below the limit."""

import re
from html import unescape
from itertools import chain
from typing import Any

import pytest

from kvsweep.analysis.load import load_run
from kvsweep.analysis.report.tables import summary_table, warnings
from tests.analysis.conftest import MakeCell
from tests.program import report

SERVED = {"kind": "declared", "keep_ratio": None, "local_window": None, "budget": None}


def told(make_cell: MakeCell, full: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The warnings of two servers of four texts each, with these fields; the page and the summary have all of them."""
    for policy, fields in (("full", full), ("small", other)):
        run = make_cell([[1]] * 4, policy=policy, extra=SERVED, completion=fields).parent
    found = [*chain(*warnings(load_run(run)).values())]
    summary = summary_table(run)
    assert [line.removeprefix("note: ") for line in summary.splitlines() if line.startswith("note: ")] == found
    report([str(run)])
    page = unescape((run / "report/report.html").read_text())
    assert all(sentence.partition("(")[0] in page for sentence in found)
    return found


@pytest.mark.slow
def test_servers_that_saw_other_prompts_are_named(make_cell):
    [said] = told(make_cell, {"prompt_tokens": 30}, {"prompt_tokens": 11})
    assert ": the prompts of 4 of 4 problems have other numbers of tokens than with full cache" in said
    assert "p0: 11 and 30)" in said


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["full", "other"])
def test_a_server_that_cuts_below_the_limit_is_named(whose, make_cell):
    cut, whole = {"stop_reason": "length", "num_tokens": 44}, {"stop_reason": "stop"}
    [said] = told(make_cell, *((cut, whole) if whose == "full" else (whole, cut)))
    assert "the server cut off 4 of 4 texts at 44 tokens, before decoding.max_new_tokens=400. They count" in said
    assert "Raise decoding.max_new_tokens" not in said


@pytest.mark.parametrize(
    ("full", "small", "extra", "counts"),
    [
        (0, 2, SERVED, "2 of 20 texts .* and 0 with full cache"),
        (2, 0, SERVED, "0 of 20 texts .* and 2 with full cache"),
        (0, 1, SERVED, None),
        (9, 8, SERVED, None),
        (0, 9, {}, None),
    ],
)
def test_a_server_whose_texts_lack_answers_beside_the_baseline_s_is_named(full, small, extra, counts, make_cell):
    """From 5 points on, in both directions; the baseline's further problem does not count."""
    for policy, silent, further in (("full", full, [["no_answer"]]), ("small", small, [])):
        grades = [["no_answer"]] * silent + [[1]] * (20 - silent) + further
        run = make_cell(grades, policy=policy, extra=extra).parent
    said = list(warnings(load_run(run), margin=0.05)["Without answers"])
    assert len(said) == (counts is not None)
    assert all(re.search(f"small, declared: {counts}.* See `kvsweep grade {run}` with --why p0", one) for one in said)


def test_texts_at_the_limit_are_the_limits(make_cell):
    at_limit = {"stop_reason": "length", "num_tokens": 400}
    run = make_cell([[1]] * 4, extra=SERVED, completion=at_limit).parent
    [said] = chain(*warnings(load_run(run)).values())
    assert said.endswith("Raise decoding.max_new_tokens.")
