"""TOVA (arXiv 2401.06104): the rows that the last query attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView
from kvsweep.compression.signals import RecentQueries, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TOVA(VariantPolicy):
    """Attention of the last query alone, averaged over all heads of a layer; each layer keeps rows of its own.

    Section 3.2 and the released code (src/tova_cache.py). There a row goes at every step; here many at the budget.

    Attributes:
        variant: "original": no row stays for certain, not even the last. "kvpress": the last one does.
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original", "kvpress")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The last query."""
        return (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        """None, or the last row in kvpress's form."""
        return int(self.variant == "kvpress")

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] attention, the same for all heads of a layer."""
        attention = newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=1)
        return attention[:, None].expand(-1, view.keys[0].shape[0], -1)
