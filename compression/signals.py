"""Signals: the numbers that a policy wants recorded while a sequence is written.

A policy names its signals. For each distinct signal the slot cache holds one recorder (`compression.recorders`), which
serves all slots and all policies. Importing this module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Signal:
    """Names something to record. Signals are frozen and hashable; equal signals share a recorder."""

    def allocate(self, cache: Any) -> Any:
        """Make the recorder of a signal of your own; those of the signals below stand in `compression.recorders`."""
        raise NotImplementedError(f"{type(self).__name__} has no recorder: define allocate(cache).")


@dataclass(frozen=True)
class PredictedImportance(Signal):
    """The score that the importance predictor in a folder gives each token, [length].

    It comes from the hidden state of the step that wrote the token's row, so it is NaN at the prefilled prompt.
    """

    directory: str


@dataclass(frozen=True)
class AttentionMass(Signal):
    """Attention probability that each row has received, [layers, kv_heads, length], summed over queries and groups.

    The prefill of the prompt counts. What an evicted row received is discarded with it (H2O, 2306.14048, section 4).
    What came before a step weighs `decay`: 1 counts all queries alike, 0 only the newest (InertiaKV, 2609.03515).
    """

    decay: float = 1.0


@dataclass(frozen=True)
class RecentQueries(Signal):
    """The rotated queries of the newest `window` tokens, [layers, q_heads, window, head_dim], oldest first."""

    window: int


@dataclass(frozen=True)
class LastUse(Signal):
    """When each row was last used, and the longest interval between two uses, [2, layers, kv_heads, length] positions.

    A query uses a row if the query heads of a group together pay the row at least `threshold`. The prefill of the
    prompt counts as one use of its rows (LazyEviction, 2506.15969).
    """

    threshold: float


@dataclass(frozen=True)
class RowMemory(Signal):
    """A number per row that a policy writes at an eviction, [layers, kv_heads, length]; NaN where none was written.

    It goes with its row, to the front at an eviction and to another slot with the sequence. Each policy has its own.
    """

    policy: str
