"""InertiaKV (arXiv 2609.03515): the rows that have received the most attention lately."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, Fraction, HeadPolicy
from kvsweep.compression.signals import AttentionMass, Signal
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Inertia(HeadPolicy):
    """Attention accumulated over all queries so far, each step's weighing `decay` times the next one's.

    With decay 1 these are H2O's scores, with decay 0 those of the newest query (TOVA's, per head). Query heads of a
    group are summed. How sure: the recursion m = decay * m + (1 - decay) * attention is known from a summary; neither
    paper nor code was read. Its factor 1 - decay changes no order and is left out. That the local window stays is our
    choice.

    Attributes:
        decay: weight of what came before; the paper's alpha is 0.8.
    """

    decay: Fraction = 0.8

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (AttentionMass(self.decay),)

    def scores(self, view: CacheView) -> Tensor:
        return view.signals[AttentionMass(self.decay)]
