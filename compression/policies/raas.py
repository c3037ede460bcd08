"""RaaS (arXiv 2502.11147): keep the tokens that were used last."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvsweep.compression.policy import CacheView, HeadPolicy, LastUse, Question, Signal
from kvsweep.kernels.implementation import Tensor


@dataclass(frozen=True, kw_only=True)
class RaaS(HeadPolicy):
    """Keep the most recently used rows, per layer and head (Algorithm 1): a cache of least recently used rows.

    A step uses a row if the row gets attention of at least `threshold`, here summed over each group of query heads.
    Here single rows and the local window stay, and many rows go at the budget; the paper keeps pages of 16 rows and
    drops one page. Source: summaries of the paper's first version; in the final version a step uses half the rows.
    """

    QUESTION: ClassVar[Question] = "pinned"

    threshold: Annotated[float, Field(gt=0)] = 1e-4

    @property
    def signals(self) -> tuple[Signal, ...]:
        return (LastUse(self.threshold),)

    def scores(self, view: CacheView) -> Tensor:
        """Return the position of the query that last used each row."""
        last, _ = view.signals[LastUse(self.threshold)]
        return last.double()
