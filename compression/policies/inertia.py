"""InertiaKV (arXiv 2609.03515): the rows that have received the most attention lately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView, check_fraction
from kvsweep.compression.signals import AttentionMass, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inertia(VariantPolicy):
    """Attention accumulated over all queries so far, each step's weighing `decay` times the next one's.

    With decay 1 these are H2O's scores, with decay 0 those of the newest query (TOVA's, per head). Query heads of a
    group are summed. How sure: the recursion m = decay * m + (1 - decay) * attention is known from a summary; neither
    paper nor code was read. Its factor 1 - decay changes no order and is left out. That the local window stays is our
    choice.

    Attributes:
        decay: weight of what came before, in [0, 1]; the paper's alpha is 0.8.

    Raises:
        ValueError: decay outside [0, 1].
    """

    decay: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("decay", self.decay)

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The decayed mass."""
        return (AttentionMass(self.decay),)

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] decayed attention."""
        return view.signals[AttentionMass(self.decay)]
