"""InertiaKV (arXiv 2609.03515): keep the tokens that received the most attention lately."""

from dataclasses import dataclass

from kvsweep.compression.policy import AttentionMass, CacheView, Fraction, HeadPolicy, Signal
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class Inertia(HeadPolicy):
    """Score: attention summed over all queries so far; each step weighs `decay` times as much as the next step.

    Decay 1 gives H2O's scores, decay 0 the newest query's. Query heads of a group are summed. Source: a summary gives
    the rule m = decay * m + (1 - decay) * attention; we read neither paper nor code. The factor 1 - decay is left out:
    it does not change the order. `decay` is the paper's alpha. Keeping the local window is our choice.
    """

    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (AttentionMass(self.decay),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass(self.decay)]
