"""Policies that keep what was used lately: RaaS (arXiv 2502.11147) and LazyEviction (arXiv 2506.15969)."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvsweep.compression.policy import CacheView, HeadPolicy, Question
from kvsweep.compression.signals import LastUse, Signal
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RaaS(HeadPolicy):
    """The rows that were used last stay, per layer and head (Algorithm 1): a cache of least recently used rows.

    A step uses a row if it pays the row at least `threshold`. Attention is summed over each group of query heads here,
    so that the threshold is passed more easily than by one query head. Rows stay alone here, in pages of 16 there; many
    rows go at the budget here, one page there. Since a step uses many rows, the local window stays here. How sure: the
    rule of the paper's first version, from summaries; in the final one a step uses half of the rows.
    """

    QUESTION: ClassVar[Question] = "pinned"

    threshold: Annotated[float, Field(gt=0)] = 1e-4

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (LastUse(self.threshold),)

    def scores(self, view: CacheView) -> Tensor:
        """The position of the query that used the row last."""
        last, _ = view.signals[LastUse(self.threshold)]
        return last.double()


@dataclass(frozen=True, kw_only=True)
class LazyEviction(RaaS):
    """The rows that are likely to be used again, from their last use and the longest interval between two uses.

    2 / (1 + exp(1 + age / (interval + 1e-5))), where age is the time since the last use, and 2 / (1 + exp(interval -
    1)) more if the row was ever used. The local window stays. Held to a copy of the released code
    (LazyEviction/model/kv_utils.py and temp_cacheobs.py), which holds a row per query head and so compares each head's
    own attention with the threshold; here it is summed over each group.
    """

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        last, interval = view.signals[LastUse(self.threshold)].double()
        age = view.positions[..., -1:] - last
        again = 2 / (1 + (interval - 1).exp())
        return 2 / (1 + (1 + age / (interval + 1e-5)).exp()) + again.masked_fill(interval == 0, 0)
