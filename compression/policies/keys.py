"""Scores of the keys alone: KeyDiff (arXiv 2504.15364) and the key's norm (arXiv 2406.11430)."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.lazy_torch import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class KeyDiff(HeadPolicy):
    """Minus the cosine to the mean of the normalised keys, per layer and head (section 4); no row stays for certain."""

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        keys = torch.stack(list(view.keys)).float()
        mean = functional.normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
        return -functional.cosine_similarity(keys, mean, dim=-1)


@dataclass(frozen=True, kw_only=True)
class KNorm(HeadPolicy):
    """Minus the Euclidean norm of the key, per layer and head (section 3; l2compress cache.py). Any row may go.

    Rotation leaves a norm as it is, so the first layer gives a token the same norm wherever it stands. Such equal norms
    differ by rounding alone, and rounding decides between them, as it does in the authors' code.
    """

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        return -torch.stack(list(view.keys)).float().norm(dim=-1)
