"""Key norm (arXiv 2406.11430): the rows whose keys are short, since those receive attention."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.lazy_torch import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class KNorm(HeadPolicy):
    """Minus the Euclidean norm of the key, per layer and head (section 3; l2compress cache.py).

    No row stays for certain.

    Rotation leaves a norm as it is, so the first layer gives a token the same norm wherever it stands. Such equal norms
    differ by rounding alone, and rounding decides between them, as it does in the authors' code.
    """

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        return -torch.stack(list(view.keys)).float().norm(dim=-1)
