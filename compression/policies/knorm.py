"""Key norm (arXiv 2406.11430): the rows whose keys are short, since those receive attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class KNorm(VariantPolicy):
    """Minus the Euclidean norm of the key, per layer and head (section 3; l2compress cache.py).

    No row stays for certain.

    Rotation leaves a norm as it is, so the first layer gives a token the same norm wherever it stands. Such equal norms
    differ by rounding alone, and rounding decides between them, as it does in the authors' code.
    """

    @property
    def newest_kept(self) -> int:
        """None."""
        return 0

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] negated norms."""
        import torch

        return -torch.stack(list(view.keys)).float().norm(dim=-1)
