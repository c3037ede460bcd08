"""StreamingLLM (arXiv 2309.17453): the first few tokens as attention sinks, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvsweep.compression.policy import BudgetPolicy, CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SinkPolicy(BudgetPolicy):
    """A policy whose first tokens always stay.

    Attributes:
        sinks: first tokens of the text that stay for certain.

    Raises:
        ValueError: sinks below 0, or no room for them beside the window.
    """

    sinks: int

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.size - self.local_window
        if not 0 <= self.sinks <= room:
            raise ValueError(
                f"policy.sinks={self.sinks} is out of range: {room} tokens stay outside the window, and sinks are "
                "among them."
            )


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(SinkPolicy):
    """Sinks and a sliding window (streaming_llm/kv_cache.py).

    The authors' code renumbers positions inside the cache; here tokens keep theirs, as in the DynTS code, since a text
    never grows beyond the model's context.

    Attributes:
        sinks: 4 in the authors' code, 10 in the DynTS code.
        variant: "original": sinks and window together have the size of the other policies. "dynts_code": the window
            alone has that size, and the sinks lie on top of it.
    """

    sinks: int = 4
    variant: Literal["original", "dynts_code"] = "original"

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        """The size of the other policies, and sinks on top of it in the DynTS code."""
        on_top = self.sinks if self.variant == "dynts_code" else 0
        return min(length, super().length_after(length, question_length, evictions) + on_top)

    def scores(self, view: CacheView) -> Tensor:
        """Sinks pinned, later is better."""
        return view.positions.double().masked_fill(view.positions < self.sinks, float("inf"))
