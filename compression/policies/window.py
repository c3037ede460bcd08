"""The newest tokens; with sinks StreamingLLM (arXiv 2309.17453), with separators too SepLLM (arXiv 2412.12094)."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, Selection
from kvsweep.kernels.lazy_torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Window(BudgetPolicy):
    """Sliding window over all rows that stay: the DynTS paper's "window", .4 * (5000 - 2000) + 2000 of 5000."""

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


@dataclass(frozen=True, kw_only=True)
class SepLLM(BudgetPolicy):
    """First tokens, the local window, and of the separators between them the newest, as many as there is room for.

    Room that the separators do not fill stays empty, as in the authors' code: the cache is then smaller than that of
    the other policies. Separators are punctuation, line breaks and spaces; they carry the segment before them.
    """

    SINKS = 4

    def select(self, view: CacheView) -> Selection:
        """Of the rows that have room those that are pinned, a separator, or in the window."""
        keep = super().select(view).keep
        stays = self.ranking(view) > -float("inf")
        stays[view.length - self.local_window :] = True
        return Selection(keep=keep[stays[keep]])

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double().masked_fill(~view.separators, -float("inf"))


@dataclass(frozen=True, kw_only=True)
class SepLLMDynTSCode(SepLLM):
    """SepLLM as the DynTS code has it: no initial tokens."""

    SINKS = 0
