"""Reasoning Path Compression (RPC): SnapKV's scores, with a cache that grows with the text."""

from dataclasses import dataclass
from functools import partial

from kvsweep.compression.policies.observation import ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count
from kvsweep.kernels.implementation import Tensor, functional, torch


@dataclass(frozen=True, kw_only=True)
class RPC(ObservationPolicy):
    """RPC: each eviction lets the cache grow by int((budget + 1 - local_window) * keep_ratio) rows.

    Trigger and size grow together, so that about `keep_ratio` of the text stays. The published P, R and c (1024, 32, 4)
    are budget P + R - 1, local_window and observation_window R, keep_ratio 1 / c.

    Scores (rpc/rpc_utils.py): softmax of the window's queries over the rows between question and window, averaged over
    the queries and all heads of a layer, mean-pooled. All heads of a layer keep the same rows. Tested against the
    released code, which counts the newest query twice and leaves out the oldest query of the window.
    """

    QUESTION = "on_top"

    observation_window: Count = 32
    pooling: Pooling = 7

    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        return self.budget + self._on_top(question_length) + evictions * self._growth

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        grown = evictions * self._growth
        return super().length_after(length - grown, question_length) + grown

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        """Return the most rows of the longest text, by simulating its evictions."""
        unpruned = question_length + max_new_tokens  # rows of the longest text if nothing is evicted
        # `written`: tokens of the text so far; `length`: rows in the cache; `fullest`: the most rows so far.
        written = length = fullest = question_length
        for evictions in range(max_new_tokens):
            # Rows at the next eviction. The trigger is never None here: only its type says so.
            due = max(self.trigger(question_length, evictions) or 0, length) + 1
            written += due - length
            if written > unpruned:  # the text ends before this eviction
                break
            fullest, length = max(fullest, due), self.length_after(due, question_length, evictions)
            if length == due:  # an eviction that frees nothing: the cache grows with the text from here on
                return unpruned
        # At the text's end the cache has as many rows fewer than `due` as the text has tokens fewer than `written`.
        return max(fullest, unpruned - written + due)

    def scores(self, view: CacheView) -> Tensor:
        """Return pooled attention [layers, kv_heads, rows outside the window], equal for all heads of a layer."""
        how = {"scaling": view.scaling, "past_only": True, "pooling": self.pooling}
        score, layers = partial(view.operations.observation_scores, **how), []
        for layer, (queries, keys) in enumerate(zip(view.signals[self._queries], view.keys, strict=True)):
            # Rows of the question, which come first and do not compete: they get zeros in the place of scores.
            kept = 0 if self.question_rule == "free" else int(view.question[layer, 0].sum())
            apart = min(kept, view.length - self.observation_window)
            # The newest query twice and the oldest one not at all, as in the released code.
            scores = score(torch.cat([queries[:, 1:], queries[:, -1:]], dim=1), keys[:, apart:])
            layers.append(functional.pad(scores.mean(dim=(0, 1)), (apart, 0)).expand(len(keys), -1))
        return torch.stack(layers)

    @property
    def _growth(self) -> int:
        return self.size - self.local_window
