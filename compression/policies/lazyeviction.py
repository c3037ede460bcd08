"""LazyEviction (arXiv 2506.15969): keep the tokens that are likely to be used again."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policies.raas import RaaS
from kvsweep.compression.policy import CacheView, LastUse, Question
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class LazyEviction(RaaS):
    """Score how likely each row is to be used again: from its last use and its longest interval between two uses.

    2 / (1 + exp(1 + age / (interval + 1e-5))), plus 2 / (1 + exp(interval - 1)) if the row was ever used; age is the
    time since the last use. The local window stays. Tested against a copy of the released code (kv_utils.py,
    temp_cacheobs.py), which compares each query head's attention with the threshold; here a group's heads are summed.
    """

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        last, interval = view.signals[LastUse(self.threshold)].double()
        age = view.positions[..., -1:] - last
        again = 2 / (1 + (interval - 1).exp())
        return 2 / (1 + (1 + age / (interval + 1e-5)).exp()) + again.masked_fill(interval == 0, 0)
