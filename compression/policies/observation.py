"""What the policies share that score rows by how the newest queries attend to them."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compression.policies.variant import VariantPolicy
from compression.policy import CacheView
from compression.signals import RecentQueries, Signal


@dataclass(frozen=True, kw_only=True)
class ObservationPolicy(VariantPolicy):
    """Scores from the queries of an observation window, whose own tokens always stay.

    The size after an eviction is `local_window` and the kept fraction together, as everywhere; of it the observation
    window stays for certain and the scores choose the rest.

    Attributes:
        observation_window: newest tokens whose queries score the others.
        pooling: width over which neighbouring scores are pooled, odd.

    Raises:
        ValueError: an observation window below 1 or larger than what stays, an even pooling width.
    """

    observation_window: int
    pooling: int

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.local_window + self.kept_outside
        if not 1 <= self.observation_window <= total:
            raise ValueError(
                f"policy.observation_window={self.observation_window} is out of range: from 1 to the {total} tokens "
                "that stay at an eviction."
            )
        if self.pooling < 1 or self.pooling % 2 == 0:
            raise ValueError(f"policy.pooling={self.pooling} is out of range: an odd width of at least 1.")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The observation window's queries."""
        return (RecentQueries(self.observation_window),)

    @property
    def newest_kept(self) -> int:
        """The observation window."""
        return self.observation_window

    def attention(
        self,
        view: CacheView,
        *,
        past_only: bool = False,
        pool_logits: bool = False,
        pool: Literal["mean", "max"] = "mean",
    ) -> Tensor:
        """[layers, kv_heads, group, rows outside the window] pooled mean attention (`kernels.reference`)."""
        queries = view.signals[RecentQueries(self.observation_window)]
        layers = [
            view.operations.observation_scores(
                its_queries,
                its_keys,
                scaling=view.scaling,
                past_only=past_only,
                pool_logits=pool_logits,
                pooling=self.pooling,
                pool=pool,
            )
            for its_queries, its_keys in zip(queries, view.keys, strict=True)
        ]
        return torch.stack(layers)
