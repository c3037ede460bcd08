"""The newest tokens: as many rows as the other policies hold."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window(BudgetPolicy):
    """Sliding window over all the rows that stay.

    The DynTS paper's "window" baseline: 0.4 * (5000 - 2000) + 2000 = 3200 of 5000 tokens.
    """

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double()
