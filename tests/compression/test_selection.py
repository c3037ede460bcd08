"""A policy whose scores or selection are wrong is refused at its first eviction, whatever is wrong with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvsweep.compression.policy import (
    BudgetPolicy,
    CacheView,
    HeadPolicy,
    Selection,
    SelectionError,
    check_selection,
)
from kvsweep.messages.errors import UserError
from tests.compression.views import policy_of, view_at
from tests.harness.decode.fakes import FakeModel, fake_requests, run

LENGTH, LAYERS, HEADS = 51, 3, 2
SETTINGS: dict[str, Any] = {"keep_ratio": 0.5, "local_window": 10, "budget": 50}


def view_of(*heads: int) -> CacheView:
    rows = [torch.zeros(HEADS, LENGTH, 4)] * LAYERS
    return view_at(torch.arange(LENGTH).expand(*heads, LENGTH), question_length=5, keys=rows, values=rows)


def nan_at(row: int, *shape: int) -> torch.Tensor:
    scores = torch.rand(*shape)
    scores[..., row] = torch.nan
    return scores


WRONG: list[tuple[type[BudgetPolicy], Callable[[CacheView], Any], str]] = [
    (BudgetPolicy, lambda view: torch.rand(LAYERS, HEADS, LENGTH), r"\[51\], \[cached tokens\].*are \[3, 2, 51\]"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH + 1), r"they are \[52\]"),
    (BudgetPolicy, lambda view: torch.rand(()), r"they are \[\]"),
    (BudgetPolicy, lambda view: torch.rand(30), "scores name 30 of the 51 cached tokens, of which "),
    (BudgetPolicy, lambda view: [0.0] * LENGTH, "they are a list"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH) > 0.5, r"torch\.bool"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH, dtype=torch.complex64), "of real numbers"),
    (BudgetPolicy, lambda view: nan_at(20, LENGTH), "1 of 41 scores are NaN"),
    (HeadPolicy, lambda view: torch.rand(HEADS, LAYERS, LENGTH), r"\[layers, kv_heads, cached.*are \[2, 3, 51\]"),
    (HeadPolicy, lambda view: nan_at(40, LAYERS, HEADS, LENGTH), "6 of 246 scores are NaN"),
]


@pytest.mark.parametrize(("kind", "make", "said"), WRONG)
@pytest.mark.parametrize("question", ["free", "pinned", "on_top"])
def test_wrong_scores_are_refused(kind, make, said, question):
    policy = policy_of(make, kind, **SETTINGS, question=question)
    view = view_of(LAYERS, HEADS) if policy.per_head else view_of()
    with pytest.raises(SelectionError, match=said):
        policy.select(view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("rows", [LENGTH, 41])
@pytest.mark.parametrize(("kind", "heads"), [(BudgetPolicy, ()), (HeadPolicy, (LAYERS, HEADS))])
def test_scores_of_any_number_type_with_or_without_the_newest_are_taken(kind, heads, rows, dtype):
    selection = policy_of(lambda view: (100 * torch.rand(*heads, rows)).to(dtype), kind, **SETTINGS).select(
        view_of(*heads)
    )
    check_selection(selection, view_of(*heads))
    assert selection.keep.shape == (*heads, 30)


@pytest.mark.parametrize(("row", "question"), [(45, "free"), (2, "pinned")])
def test_not_a_number_among_the_newest_or_at_a_pinned_question_matters_to_nobody(row, question):
    policy = policy_of(lambda view: nan_at(row, LENGTH), **SETTINGS, question=question)
    assert row in policy.select(view_of()).keep


@pytest.mark.parametrize(
    "keep",
    [
        torch.tensor([1, 1, 2]),
        torch.tensor([0, LENGTH]),
        torch.tensor([-1, 4]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([], dtype=torch.int64),
        torch.arange(4).expand(LAYERS, 4),
    ],
)
@pytest.mark.parametrize("heads", [(), (LAYERS, HEADS)])
def test_a_wrong_selection_is_refused(keep, heads):
    with pytest.raises(SelectionError, match="keep must be whole numbers of 0 to 50"):
        check_selection(Selection(keep=keep), view_of(*heads))


def test_the_engine_names_policy_token_and_problem():
    policy = policy_of(lambda view: torch.rand(view.length - 4), keep_ratio=0.5, local_window=2, budget=16)
    with pytest.raises(UserError, match=r"^policy=mine, token \d+ of problem \d, draw 0: scores name 13 of the 17 "):
        run(FakeModel(), fake_requests(1, 4, [policy]))
