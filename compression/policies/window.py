"""The newest tokens, as many rows as the other policies hold; StreamingLLM (arXiv 2309.17453) keeps sinks as well."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window(BudgetPolicy):
    """Sliding window over all the rows that stay.

    The DynTS paper's "window" baseline: 0.4 * (5000 - 2000) + 2000 = 3200 of 5000 tokens.
    """

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double()


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Sinks and a sliding window (streaming_llm/kv_cache.py), which together have the size of the other policies.

    The authors' code renumbers positions inside the cache; here tokens keep theirs, as in the DynTS code, since a text
    never grows beyond the model's context.
    """

    SINKS = 4


@dataclass(frozen=True, kw_only=True)
class StreamingLLMDynTSCode(StreamingLLM):
    """StreamingLLM as the DynTS code has it: the window alone has the size of the other policies."""

    SINKS = 10

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        return min(length, super().length_after(length, question_length, evictions) + self.sinks_kept)
