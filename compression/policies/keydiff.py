"""KeyDiff (arXiv 2504.15364): keep the tokens whose keys differ most from the mean key."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.implementation import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class KeyDiff(HeadPolicy):
    """Minus the cosine to the mean normalised key, per layer and head (section 4); any row may be evicted."""

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        keys = torch.stack(list(view.keys)).float()
        mean = functional.normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
        return -functional.cosine_similarity(keys, mean, dim=-1)
