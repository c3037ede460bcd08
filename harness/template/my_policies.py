"""Policies of your own. A YAML in conf/policy names each class."""

from dataclasses import dataclass

from torch import Tensor

from kvsweep.compression.policy import BudgetPolicy, CacheView


@dataclass(frozen=True, kw_only=True)
class Spread(BudgetPolicy):
    """Of the tokens outside the local window those whose position the stride divides, the oldest first.

    Attributes:
        stride: tokens from one favoured position to the next.
    """

    stride: int

    def scores(self, view: CacheView) -> Tensor:
        """Positions [length] that the stride divides come first; of equal scores the lowest position stays."""
        return (view.positions % self.stride == 0).double()
