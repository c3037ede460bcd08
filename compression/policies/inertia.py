"""InertiaKV (arXiv 2609.03515): keep the tokens that received most attention lately."""

from dataclasses import dataclass

from kvsweep.compression.policy import AttentionMass, CacheView, Fraction, HeadPolicy, Signal
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class Inertia(HeadPolicy):
    """Attention accumulated over all queries so far, each step's weighing `decay` times the next one's.

    With decay 1 these are H2O's scores, with decay 0 those of the newest query. Query heads of a group are summed. How
    sure: m = decay * m + (1 - decay) * attention is known from a summary; neither paper nor code was read. The factor
    1 - decay changes no order and is left out; decay is the paper's alpha. That the local window stays is our choice.
    """

    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (AttentionMass(self.decay),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass(self.decay)]
