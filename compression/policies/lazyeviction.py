"""LazyEviction (arXiv 2506.15969): keep the tokens that are likely to be used again."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policies.raas import RaaS
from kvsweep.compression.policy import CacheView, LastUse, Question
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class LazyEviction(RaaS):
    """The rows that are likely to be used again, from their last use and the longest interval between two uses.

    2 / (1 + exp(1 + age / (interval + 1e-5))), where age is the time since the last use, and 2 / (1 + exp(interval -
    1)) more if the row was ever used. The local window stays. Held to a copy of the released code (kv_utils.py,
    temp_cacheobs.py), which compares each query head's attention with the threshold; here a group's are summed.
    """

    QUESTION: ClassVar[Question] = "free"

    def scores(self, view: CacheView) -> Tensor:
        last, interval = view.signals[LastUse(self.threshold)].double()
        age = view.positions[..., -1:] - last
        again = 2 / (1 + (interval - 1).exp())
        return 2 / (1 + (1 + age / (interval + 1e-5)).exp()) + again.masked_fill(interval == 0, 0)
