"""TOVA (arXiv 2401.06104): the rows that the last query attends to."""

from dataclasses import dataclass

from torch import Tensor

from compression.policies.observation import ObservationPolicy
from compression.policy import CacheView


@dataclass(frozen=True, kw_only=True)
class TOVA(ObservationPolicy):
    """Attention of the last query alone, averaged over all heads of a layer; each layer keeps rows of its own.

    Section 3.2; there is no window, only the last token is certain to stay. Evicted at the budget here, one row a step
    there.
    """

    observation_window: int = 1
    pooling: int = 1

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length - 1] attention, the same for all heads of a layer."""
        return self.attention(view).mean(dim=(1, 2))[:, None].expand(-1, view.keys[0].shape[0], -1)
