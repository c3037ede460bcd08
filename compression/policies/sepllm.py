"""SepLLM (arXiv 2412.12094): initial tokens, separators, and the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsweep.compression.policies.streaming_llm import SinkPolicy
from kvsweep.compression.policy import CacheView, Selection

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SepLLM(SinkPolicy):
    """First tokens, the local window, and of the separators between them the newest, as many as there is room for.

    Room that the separators do not fill stays empty, as in the authors' code: the cache is then smaller than that of
    the other policies. Separators are punctuation, line breaks and spaces; they carry the segment before them.

    Attributes:
        sinks: 4 in the authors' code, 0 in the DynTS code.
    """

    sinks: int = 4

    def select(self, view: CacheView) -> Selection:
        """Of the rows that have room those that are pinned, a separator, or in the window."""
        keep = super().select(view).keep
        stays = self.ranking(view) > -float("inf")
        stays[view.length - self.local_window :] = True
        return Selection(keep=keep[stays[keep]])

    def scores(self, view: CacheView) -> Tensor:
        """Initial tokens pinned, of the separators the newer is better, minus infinity for all other tokens."""
        scores = view.positions.double().masked_fill(~view.separators, -float("inf"))
        return scores.masked_fill(view.positions < self.sinks, float("inf"))
