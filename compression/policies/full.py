"""The full cache, the baseline of every comparison."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, Policy, Selection


@dataclass(frozen=True, kw_only=True)
class FullCache(Policy):
    """Keep every token."""

    def trigger(self, question_length: int, evictions: int = 0) -> int | None:
        return None

    def capacity(self, question_length: int, max_new_tokens: int) -> int:
        return question_length + max_new_tokens

    def select(self, view: CacheView) -> Selection:
        raise AssertionError("the full cache never evicts")
