"""Random Attention (arXiv 2609.03430): chance for each layer and head beside the question, the baseline to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView, Question

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RandomHead(VariantPolicy):
    """Uniform numbers, drawn anew at every eviction for each layer and key head (released code, mode random_pp).

    The question and the newest rows stay. `compression.policies.random` draws once for all heads. How sure: read in
    the released code; the numbers come from a counter here.
    """

    QUESTION: ClassVar[Question] = "pinned"

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] uniform numbers."""
        return view.uniform()
