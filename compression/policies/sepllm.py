"""SepLLM (arXiv 2412.12094): keep the first tokens, the newest tokens and separators."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, Selection
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class SepLLM(BudgetPolicy):
    """First tokens, the local window, and of the separators between them the newest, as many as there is room for.

    Separators are punctuation, line breaks and spaces. Room that they do not fill stays empty, as in the authors' code.
    """

    SINKS = 4

    def select(self, view: CacheView) -> Selection:
        """Of the rows that have room those that are pinned, a separator, or in the window."""
        keep = super().select(view).keep
        stays = self.ranking(view) > -float("inf")
        stays[view.length - self.local_window :] = True
        return Selection(keep=keep[stays[keep]])

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double().masked_fill(~view.separators, -float("inf"))


@dataclass(frozen=True, kw_only=True)
class SepLLMDynTSCode(SepLLM):
    """SepLLM as the DynTS code has it: no initial tokens."""

    SINKS = 0
