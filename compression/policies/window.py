"""A sliding window: keep the newest tokens."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class Window(BudgetPolicy):
    """A sliding window: the DynTS paper's "window" keeps .4 * (5000 - 2000) + 2000 of 5000 rows."""

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double()
