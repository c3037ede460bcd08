"""SepLLM (arXiv 2412.12094): keep the first tokens, the newest tokens and separators."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, Selection
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class SepLLM(BudgetPolicy):
    """First tokens, the local window, and the newest separators between them, as many as there is room for.

    Separators are punctuation, line breaks and spaces. Room without a separator stays empty, as in the authors' code.
    """

    SINKS = 4

    def select(self, view: CacheView) -> Selection:
        """Of the rows that have room, keep the pinned rows, the separators and the window."""
        keep = super().select(view).keep
        stays = self.ranking(view) > -float("inf")
        stays[view.length - self.local_window :] = True
        return Selection(keep=keep[stays[keep]])

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double().masked_fill(~view.separators, -float("inf"))


@dataclass(frozen=True, kw_only=True)
class SepLLMDynTSCode(SepLLM):
    """SepLLM as in the DynTS code: no initial tokens."""

    SINKS = 0
