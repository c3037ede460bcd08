"""A view of rows of which a test gives what its policy reads, and a policy of a test's own scores."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvsweep.compression.policy import BudgetPolicy, CacheView


def view_at(positions: torch.Tensor, **given: Any) -> CacheView:
    """A view of the rows of these positions; what is not given is zero or empty."""
    nothing = torch.zeros_like(positions)
    usual = {
        "problem_id": "p0",
        "draw": 0,
        "text_ids": torch.zeros(int(positions.max()) + 1, dtype=torch.int64),
        "token_ids": nothing,
        "separating": nothing.bool,
        "question_length": 1,
        "answer_start": None,
        "keys": [],
        "values": [],
        "scaling": 1.0,
        "signals": {},
        "uniform": nothing.double,
    }
    return CacheView(positions=positions, **{**usual, **given})


def policy_of(
    make: Callable[[CacheView], Any],
    kind: type[BudgetPolicy] = BudgetPolicy,
    recorded: tuple[Any, ...] = (),
    **sizes: Any,
) -> BudgetPolicy:
    """A policy of this kind, whose scores `make` returns."""

    @dataclass(frozen=True, kw_only=True)
    class Mine(kind):  # type: ignore[misc, valid-type]
        signals = recorded

        def scores(self, view):
            return make(view)

    mine: BudgetPolicy = Mine(name="mine", **sizes)
    return mine
