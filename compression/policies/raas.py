"""RaaS (arXiv 2502.11147): keep the tokens that were used last."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvsweep.compression.policy import CacheView, HeadPolicy, LastUse, Question, Signal
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class RaaS(HeadPolicy):
    """The rows that were used last stay, per layer and head (Algorithm 1): a cache of least recently used rows.

    A step uses a row if it pays the row at least `threshold`, here summed over each group of query heads. Here rows
    stay one by one, the local window stays, and many rows go at the budget; there rows stay in pages of 16, and one
    goes. How sure: the rule of the paper's first version, from summaries; in the final one a step uses half the rows.
    """

    QUESTION: ClassVar[Question] = "pinned"

    threshold: Annotated[float, Field(gt=0)] = 1e-4

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (LastUse(self.threshold),)

    def scores(self, view: CacheView) -> Tensor:
        """The position of the query that used the row last."""
        last, _ = view.signals[LastUse(self.threshold)]
        return last.double()
