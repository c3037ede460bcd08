"""What a policy is: it looks at one sequence's cache when the budget is reached and says which tokens stay."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from compression.signals import Signal
from kernels.implementation import Operations, operations


def keep_count(outside: int, keep_ratio: float) -> int:
    """Tokens kept of the `outside` many that lie outside the local window: int(outside * keep_ratio).

    DynTS's released rule, rounding included.
    """
    return int(outside * keep_ratio)


def length_after(length: int, *, local_window: int, keep_ratio: float, question_on_top: int = 0) -> int:
    """Cache length in tokens right after an eviction at `length`; `question_on_top` tokens stay outside the count."""
    window = min(local_window, length - question_on_top)
    return question_on_top + window + keep_count(length - question_on_top - window, keep_ratio)


@dataclass(frozen=True, kw_only=True)
class CacheView:
    """One sequence's cache at the moment of eviction.

    Positions and what follows from them are [length] for a policy that keeps the same rows in all layers and heads, and
    [layers, kv_heads, length] for one with `per_head`.

    Attributes:
        problem_id, draw: which sequence it is.
        text_ids: prompt and text so far, [text length].
        positions: original index of each row's token in the text, ascending.
        token_ids: the tokens themselves, shaped as positions.
        separators: true at punctuation and line breaks, shaped as positions.
        question_length: tokens of the prompt, at positions 0 .. question_length - 1.
        answer_start: position of the closing thinking tag, or None while the sequence is thinking.
        keys: each layer's keys, [kv_heads, length, head_dim], rotated.
        values: each layer's values, likewise.
        scaling: factor of the model's attention logits.
        signals: what the policy wanted recorded; each signal says its shape.
        uniform: returns numbers in [0, 1), shaped as positions, a pure function of (seed, problem, draw, eviction,
            position) and, with `per_head`, of layer and head.
        operations: what scores are computed with.
    """

    problem_id: str
    draw: int
    text_ids: Tensor
    positions: Tensor
    token_ids: Tensor
    separators: Tensor
    question_length: int
    answer_start: int | None
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    scaling: float
    signals: Mapping[Signal, Tensor]
    uniform: Callable[[], Tensor]
    operations: Operations = field(default_factory=operations)

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self.positions.shape[-1]

    @property
    def question(self) -> Tensor:
        """True at prompt tokens, shaped as positions."""
        return self.positions < self.question_length

    @property
    def answer(self) -> Tensor:
        """True at the closing thinking tag and all after it, shaped as positions."""
        if self.answer_start is None:
            return torch.zeros_like(self.positions, dtype=torch.bool)
        return self.positions >= self.answer_start


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Rows to keep: sorted slot indices, [kept] for all layers and heads or [layers, kv_heads, kept] for each."""

    keep: Tensor


@dataclass(frozen=True, kw_only=True)
class Policy(ABC):
    """Decides which tokens stay. Its fields are those of its YAML in conf/policy; it holds no sequence's state."""

    name: str

    @property
    def signals(self) -> tuple[Signal, ...]:
        """What must be recorded of every token for `select`."""
        return ()

    @property
    def per_head(self) -> bool:
        """Whether it keeps rows of their own in each layer and key head."""
        return False

    @abstractmethod
    def trigger(self, question_length: int) -> int | None:
        """Cache length in tokens that, once reached by a step, makes the next step evict; None never."""

    @abstractmethod
    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """Rows that one sequence needs at its longest."""

    @abstractmethod
    def select(self, view: CacheView) -> Selection:
        """Choose the rows to keep."""

    def identity(self) -> dict[str, Any]:
        """Everything about the policy that can change a completion, for `cell_id`; contents in place of paths."""
        return dataclasses.asdict(self)


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy(Policy):
    """A policy that keeps the newest tokens and the highest scores of the others (DynTS's eviction rule).

    Attributes:
        keep_ratio: fraction kept of the tokens outside the window, in (0, 1].
        local_window: newest tokens always kept.
        budget: cache length in tokens at which eviction fires. The published trigger looks at the length before the
            step, so the cache holds budget + 1 tokens when it is pruned.
        question_on_top: False is the published rule: question tokens count against the kept fraction. True keeps every
            question token and applies budget, ratio and window to the generated tokens alone.

    Raises:
        ValueError: a field out of its range.
    """

    SHARED: ClassVar[tuple[str, ...]] = ("keep_ratio", "local_window", "budget", "question_on_top")

    keep_ratio: float
    local_window: int
    budget: int
    question_on_top: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(
                f"policy.keep_ratio={self.keep_ratio} is out of range: it is the fraction kept, above 0 and at most 1."
            )
        if self.local_window < 1:
            raise ValueError(f"policy.local_window={self.local_window} is out of range: it must be at least 1 token.")
        if self.local_window > self.budget:
            raise ValueError(
                f"policy.local_window={self.local_window} is larger than policy.budget={self.budget}: "
                "choose a window of at most the budget."
            )

    def trigger(self, question_length: int) -> int | None:
        """Cache length at which eviction fires: the budget, over the question if that lies on top."""
        return self.budget + self._on_top(question_length)

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """One row over the trigger, or over a longer question; all rows when the ratio frees none."""
        unpruned = question_length + max_new_tokens
        fullest = max(self.budget + self._on_top(question_length), question_length) + 1
        return min(fullest, unpruned) if self._length_after(fullest, question_length) < fullest else unpruned

    def select(self, view: CacheView) -> Selection:
        """Keep the newest tokens and the highest `scores` of the rest; of equal scores the lowest position."""
        on_top = self._on_top(view.question_length)
        total = self._length_after(view.length, view.question_length)
        outside = max(on_top, view.length - self.newest_kept)
        scores = self.scores(view)[..., :outside]
        if on_top:
            # A question that is never evicted lies in the first rows.
            scores = scores.clone()
            scores[..., :on_top] = float("inf")
        count = total - (view.length - outside)
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(dim=-1).values
        newest = torch.arange(outside, view.length, device=best.device).expand(*best.shape[:-1], -1)
        return Selection(keep=torch.cat([best, newest], dim=-1))

    @property
    def newest_kept(self) -> int:
        """Newest tokens that stay whatever their score."""
        return self.local_window

    @property
    def kept_outside(self) -> int:
        """Tokens that stay outside the window when budget + 1 are evicted: what a question inside the budget shares."""
        return keep_count(self.budget + 1 - self.local_window, self.keep_ratio)

    @abstractmethod
    def scores(self, view: CacheView) -> Tensor:
        """Importance of each row, the higher the rather it stays, infinity to pin it.

        [length], or [layers, kv_heads, length] with `per_head`; rows among the newest kept may be left out.
        """

    def _on_top(self, question_length: int) -> int:
        return question_length if self.question_on_top else 0

    def _length_after(self, length: int, question_length: int) -> int:
        return length_after(
            length,
            local_window=self.local_window,
            keep_ratio=self.keep_ratio,
            question_on_top=self._on_top(question_length),
        )
