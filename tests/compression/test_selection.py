"""A policy whose scores or selection are wrong is refused at its first eviction, whatever is wrong with them."""

from collections.abc import Callable
from dataclasses import dataclass
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
from kvsweep.errors import UserError
from tests.harness.decode.fakes import FakeModel, fake_requests, run

LENGTH, LAYERS, HEADS = 51, 3, 2
SETTINGS: dict[str, Any] = {"keep_ratio": 0.5, "local_window": 10, "budget": 50}


def policy_of(
    make: Callable[[CacheView], Any], kind: type[BudgetPolicy] = BudgetPolicy, **settings: Any
) -> BudgetPolicy:
    """A policy of this kind, whose scores `make` returns."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(kind):  # type: ignore[misc, valid-type]
        def scores(self, view: CacheView) -> Any:
            return make(view)

    mine: BudgetPolicy = Mine(name="mine", **{**SETTINGS, **settings})
    return mine


def view_of(*heads: int) -> CacheView:
    positions = torch.arange(LENGTH).expand(*heads, LENGTH)
    return CacheView(
        problem_id="p",
        draw=0,
        text_ids=torch.zeros(LENGTH + 1, dtype=torch.int64),
        positions=positions,
        token_ids=torch.zeros_like(positions),
        separating=lambda: positions < 0,
        question_length=5,
        answer_start=None,
        keys=[torch.zeros(HEADS, LENGTH, 4)] * LAYERS,
        values=[torch.zeros(HEADS, LENGTH, 4)] * LAYERS,
        scaling=1.0,
        signals={},
        uniform=lambda: torch.zeros(positions.shape),
    )


def nan_at(row: int, *shape: int) -> torch.Tensor:
    scores = torch.rand(*shape)
    scores[..., row] = torch.nan
    return scores


OF_EACH_HEAD = r"scores must be a tensor \[3, 2, 51\], \[layers, kv_heads, cached tokens\]; the newest .*: they are "
WRONG: list[tuple[type[BudgetPolicy], Callable[[CacheView], Any], str]] = [
    (
        BudgetPolicy,
        lambda view: torch.rand(LAYERS, HEADS, LENGTH),
        r"\[51\], \[cached tokens\].*: they are \[3, 2, 51\]",
    ),
    (BudgetPolicy, lambda view: torch.rand(LENGTH, 1), r"they are \[51, 1\]"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH + 1), r"they are \[52\]"),
    (BudgetPolicy, lambda view: torch.rand(()), r"they are \[\]"),
    (BudgetPolicy, lambda view: torch.rand(30), "scores name 30 of the 51 cached tokens, of which "),
    (BudgetPolicy, lambda view: [0.0] * LENGTH, "they are a list"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH) > 0.5, r"of real numbers: they are of torch\.bool"),
    (BudgetPolicy, lambda view: torch.rand(LENGTH, dtype=torch.complex64), "of real numbers"),
    (BudgetPolicy, lambda view: nan_at(20, LENGTH), "1 of 41 scores are NaN"),
    (HeadPolicy, lambda view: torch.rand(LENGTH), OF_EACH_HEAD + r"\[51\]"),
    (HeadPolicy, lambda view: torch.rand(1, HEADS, LENGTH), OF_EACH_HEAD + r"\[1, 2, 51\]"),
    (HeadPolicy, lambda view: torch.rand(LAYERS, 1, LENGTH), OF_EACH_HEAD + r"\[3, 1, 51\]"),
    (HeadPolicy, lambda view: torch.rand(LAYERS, 4, LENGTH), OF_EACH_HEAD + r"\[3, 4, 51\]"),
    (HeadPolicy, lambda view: torch.rand(HEADS, LAYERS, LENGTH), OF_EACH_HEAD + r"\[2, 3, 51\]"),
    (HeadPolicy, lambda view: nan_at(40, LAYERS, HEADS, LENGTH), "6 of 246 scores are NaN"),
]


@pytest.mark.parametrize(("kind", "make", "said"), WRONG)
@pytest.mark.parametrize("question", ["free", "pinned", "on_top"])
def test_wrong_scores_are_refused(kind: Any, make: Callable[[CacheView], Any], said: str, question: str) -> None:
    policy = policy_of(make, kind, question=question)
    view = view_of(LAYERS, HEADS) if policy.per_head else view_of()
    with pytest.raises(SelectionError, match=said):
        policy.select(view)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("rows", [LENGTH, 41])
@pytest.mark.parametrize(("kind", "heads"), [(BudgetPolicy, ()), (HeadPolicy, (LAYERS, HEADS))])
def test_scores_of_any_number_type_with_or_without_the_newest_are_taken(
    kind: Any, heads: tuple[int, ...], rows: int, dtype: torch.dtype
) -> None:
    selection = policy_of(lambda view: (100 * torch.rand(*heads, rows)).to(dtype), kind).select(view_of(*heads))
    check_selection(selection, view_of(*heads))
    assert selection.keep.shape == (*heads, 30)


@pytest.mark.parametrize(("row", "question"), [(45, "free"), (2, "pinned")])
def test_not_a_number_among_the_newest_or_at_a_pinned_question_matters_to_nobody(row: int, question: str) -> None:
    assert row in policy_of(lambda view: nan_at(row, LENGTH), question=question).select(view_of()).keep


@pytest.mark.parametrize(
    "keep",
    [
        torch.tensor([3, 2, 1]),
        torch.tensor([1, 1, 2]),
        torch.tensor([0, LENGTH]),
        torch.tensor([-1, 4]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([True] * LENGTH),
        torch.tensor([], dtype=torch.int64),
        torch.zeros(2, 3, 4, dtype=torch.int64),
        torch.arange(4).expand(LAYERS, 4),
    ],
)
@pytest.mark.parametrize("heads", [(), (LAYERS, HEADS)])
def test_a_wrong_selection_is_refused(keep: torch.Tensor, heads: tuple[int, ...]) -> None:
    with pytest.raises(SelectionError, match="keep must be whole numbers of 0 to 50, ascending, each once"):
        check_selection(Selection(keep=keep), view_of(*heads))


def test_the_engine_names_policy_token_and_problem() -> None:
    policy = policy_of(lambda view: torch.rand(view.length - 4), budget=16, local_window=2)
    with pytest.raises(UserError, match=r"^policy=mine, token \d+ of problem \d, draw 0: scores name 13 of the 17 "):
        run(FakeModel(), fake_requests(1, 4, [policy]))
