"""The base of policies that score rows by the attention of the newest queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView
from kvsweep.compression.signals import RecentQueries, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ObservationPolicy(VariantPolicy):
    """Scores from the queries of an observation window.

    In the original form the observation window's own rows stay for certain, in the DynTS code's the local window.

    Attributes:
        observation_window: newest tokens whose queries score the others. The DynTS code starts to sum one query early:
            it takes one more at the first eviction and two more at later ones.
        pooling: width over which neighbouring scores are pooled, odd.

    Raises:
        ValueError: an observation window below 1 or larger than the size, an even pooling width.
    """

    observation_window: int
    pooling: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.observation_window <= self.size:
            raise ValueError(
                f"policy.observation_window={self.observation_window} is out of range: from 1 to the {self.size} "
                "tokens that stay at an eviction."
            )
        if self.pooling < 1 or self.pooling % 2 == 0:
            raise ValueError(f"policy.pooling={self.pooling} is out of range: an odd width of at least 1.")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The observation window's queries."""
        return (self._queries,)

    @property
    def newest_kept(self) -> int:
        """The observation window, or the local window in the DynTS code's form."""
        return self.observation_window if self.per_head else self.local_window

    def attention(
        self,
        view: CacheView,
        *,
        past_only: bool = False,
        pool_logits: bool = False,
        pool: Literal["mean", "max"] = "mean",
    ) -> Tensor:
        """[layers, kv_heads, group, rows outside the window] pooled mean attention (`kernels.reference`)."""
        import torch

        layers = [
            view.operations.observation_scores(
                queries,
                keys,
                scaling=view.scaling,
                past_only=past_only,
                pool_logits=pool_logits,
                pooling=self.pooling,
                pool=pool,
            )
            for queries, keys in zip(view.signals[self._queries], view.keys, strict=True)
        ]
        return torch.stack(layers)

    def summed_attention(self, view: CacheView) -> Tensor:
        """[length] attention of the newest queries, averaged over layers and query heads, summed over the queries."""
        newest = self.observation_window + (2 if view.evicted_before else 1)
        return newest_attention(view, self._queries, newest).sum(dim=2).mean(dim=(0, 1))

    @property
    def _queries(self) -> RecentQueries:
        return RecentQueries(self.observation_window + (0 if self.per_head else 2))


def newest_attention(view: CacheView, recorded: RecentQueries, newest: int) -> Tensor:
    """[layers, q_heads, newest, length] causal attention of the newest queries over all rows, float32 at least."""
    import torch

    layers = []
    for queries, keys in zip(view.signals[recorded], view.keys, strict=True):
        kv_heads, length, head_dim = keys.shape
        grouped = queries[:, -newest:].reshape(kv_heads, -1, head_dim)
        wide = torch.promote_types(keys.dtype, torch.float32)
        logits = torch.matmul(grouped.to(wide), keys.to(wide).transpose(-1, -2)) * view.scaling
        logits = logits.reshape(-1, newest, length)
        later = torch.ones(newest, length, dtype=torch.bool, device=keys.device).triu(diagonal=length - newest + 1)
        layers.append(logits.masked_fill(later, float("-inf")).softmax(dim=-1))
    return torch.stack(layers)
