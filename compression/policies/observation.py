"""Base classes of policies that score tokens by the attention of the newest queries."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from kvsweep.compression.policy import BudgetPolicy, CacheView, Count, HeadPolicy, RecentQueries, Signal
from kvsweep.kernels.implementation import Tensor, torch


def _odd(width: int) -> int:
    if width % 2 == 0:
        raise ValueError(f"policy.pooling={width} is out of range: it must be odd.")
    return width


Pooling = Annotated[int, Field(ge=1), AfterValidator(_odd)]


@dataclass(frozen=True, kw_only=True)
class Observation(BudgetPolicy):
    """Scores from the queries of the newest `observation_window` tokens."""

    observation_window: Count

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.observation_window > self.size:
            allowed = f"at most the {self.size} tokens that stay at an eviction"
            raise ValueError(f"policy.observation_window={self.observation_window} is out of range: {allowed}.")

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (self._queries,)

    @property
    def _queries(self) -> RecentQueries:
        return RecentQueries(self.observation_window)


@dataclass(frozen=True, kw_only=True)
class ObservationPolicy(HeadPolicy, Observation):
    """Scores per layer and head, pooled over `pooling` neighbours; the window's own rows always stay."""

    pooling: Pooling

    @property
    def newest_kept(self) -> int:
        return self.observation_window

    def attention(self, view: CacheView, **how: Any) -> Tensor:
        """Pooled attention [layers, kv_heads, group, rows outside the window]; `how` as in `observation_scores`."""
        score = partial(view.operations.observation_scores, scaling=view.scaling, pooling=self.pooling, **how)
        return torch.stack([score(*rows) for rows in zip(view.signals[self._queries], view.keys, strict=True)])


@dataclass(frozen=True, kw_only=True)
class DynTSCodeObservation(Observation):
    """Scores as in the DynTS code: one per token; the local window always stays.

    That code sums one query too many: the window's queries and one more at the first eviction, two more later.
    """

    def summed_attention(self, view: CacheView) -> Tensor:
        """Attention [length] of the newest queries, averaged over layers and query heads, summed over the queries."""
        newest = self.observation_window + (2 if view.evicted_before else 1)
        return newest_attention(view, self._queries, newest).sum(dim=2).mean(dim=(0, 1))

    @property
    def _queries(self) -> RecentQueries:
        return RecentQueries(self.observation_window + 2)


def newest_attention(view: CacheView, recorded: RecentQueries, newest: int) -> Tensor:
    """Causal attention [layers, q_heads, newest, length] of the newest queries over all rows, float32 or wider."""
    layers = []
    for queries, keys in zip(view.signals[recorded], view.keys, strict=True):
        kv_heads, length, head_dim = keys.shape
        grouped = queries[:, -newest:].reshape(kv_heads, -1, head_dim)  # [kv_heads, group * newest, head_dim]
        wide = torch.promote_types(keys.dtype, torch.float32)
        logits = torch.matmul(grouped.to(wide), keys.to(wide).transpose(-1, -2)) * view.scaling
        logits = logits.reshape(-1, newest, length)  # [q_heads, newest, length]
        # Query i of the newest is that of row length - newest + i, and sees no row behind it.
        later = torch.ones(newest, length, dtype=torch.bool, device=keys.device).triu(diagonal=length - newest + 1)
        layers.append(logits.masked_fill(later, float("-inf")).softmax(dim=-1))
    return torch.stack(layers)
