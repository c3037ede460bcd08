"""KeyDiff (arXiv 2504.15364): the rows whose keys differ most from the mean key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KeyDiff(VariantPolicy):
    """Minus the cosine to the mean of the normalised keys, per layer and head (section 4); no attention needed.

    No row stays for certain, as in kvpress, to which the authors contributed it.
    """

    @property
    def newest_kept(self) -> int:
        """None."""
        return 0

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] distinctness."""
        import torch
        from torch.nn.functional import cosine_similarity, normalize

        keys = torch.stack(list(view.keys)).float()
        return -cosine_similarity(keys, normalize(keys, dim=-1).mean(dim=-2, keepdim=True), dim=-1)
