"""Random Attention (arXiv 2609.03430): chance for each layer and head beside the question, the baseline to beat."""

from dataclasses import dataclass
from typing import ClassVar

from kvsweep.compression.policy import CacheView, HeadPolicy, Question
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomHead(HeadPolicy):
    """Uniform numbers, drawn anew at every eviction for each layer and key head (released code, mode random_pp).

    The question and the newest rows stay. `compression.policies.random` draws once for all heads. How sure: read in
    the released code; the numbers come from a counter here.
    """

    QUESTION: ClassVar[Question] = "pinned"

    def scores(self, view: CacheView) -> Tensor:
        return view.uniform()
