"""The key norm (arXiv 2406.11430): keep the tokens whose keys have the smallest norm."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class KNorm(HeadPolicy):
    """Minus the Euclidean norm of the key, per layer and head (section 3; l2compress cache.py). Any row may be evicted.

    In the first layer a token has the same norm at every position; rounding then decides, as in the authors' code.
    """

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        return -torch.stack(list(view.keys)).float().norm(dim=-1)
