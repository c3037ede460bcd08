"""Chance, which any scoring must beat: once for all heads, or for each alone (Random Attention, arXiv 2609.03430)."""

from dataclasses import dataclass

from kvsweep.compression.policy import BudgetPolicy, CacheView, HeadPolicy, Policy, Selection
from kvsweep.kernels.implementation import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class Random(BudgetPolicy):
    """DynTS's rule with chance in place of the predicted importance, drawn anew at each eviction (paper, ablations).

    With `question="free"`, as the authors have it, any token outside the window may go; else the answer stays as well.
    """

    def scores(self, view: CacheView) -> Tensor:
        numbers = view.uniform()
        return numbers if self.question_rule == "free" else numbers.masked_fill(view.answer, float("inf"))


@dataclass(frozen=True, kw_only=True)
class RandomHead(HeadPolicy):
    """Uniform numbers, drawn anew at every eviction for each layer and key head (released code, mode random_pp)."""

    QUESTION = "pinned"

    def scores(self, view: CacheView) -> Tensor:
        return view.uniform()


@dataclass(frozen=True, kw_only=True)
class FullCache(Policy):
    """Keeps everything: the baseline of every comparison."""

    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        return None

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        return question_length + max_new_tokens

    def select(self, view: CacheView) -> Selection:
        raise AssertionError("the full cache never evicts")


@dataclass(frozen=True, kw_only=True)
class Window(BudgetPolicy):
    """Sliding window over all rows that stay: the DynTS paper's "window", .4 * (5000 - 2000) + 2000 of 5000."""

    def scores(self, view: CacheView) -> Tensor:
        return view.positions.double()


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Sinks and a sliding window (streaming_llm/kv_cache.py), which together have the size of the other policies.

    The authors' code renumbers positions inside the cache; here tokens keep theirs, as in the DynTS code.
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

    Separators are punctuation, line breaks and spaces. Room that they do not fill stays empty, as in the authors' code.
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


@dataclass(frozen=True, kw_only=True)
class KeyDiff(HeadPolicy):
    """Minus the cosine to the mean of the normalised keys, per layer and head (section 4); no row stays for certain."""

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        keys = torch.stack(list(view.keys)).float()
        mean = functional.normalize(keys, dim=-1).mean(dim=-2, keepdim=True)
        return -functional.cosine_similarity(keys, mean, dim=-1)


@dataclass(frozen=True, kw_only=True)
class KNorm(HeadPolicy):
    """Minus the Euclidean norm of the key, per layer and head (section 3; l2compress cache.py). Any row may go.

    The first layer gives a token the same norm wherever it stands; rounding then decides, as in the authors' code.
    """

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        return -torch.stack(list(view.keys)).float().norm(dim=-1)
