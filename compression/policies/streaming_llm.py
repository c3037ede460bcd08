"""StreamingLLM (arXiv 2309.17453): keep the first tokens and the newest."""

from dataclasses import dataclass

from kvsweep.compression.policies.window import Window


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Window):
    """Sinks and a sliding window (streaming_llm/kv_cache.py), together as large as the other policies' caches.

    The authors' code renumbers positions inside the cache; here tokens keep their positions, as in the DynTS code.
    """

    SINKS = 4


@dataclass(frozen=True, kw_only=True)
class StreamingLLMDynTSCode(StreamingLLM):
    """StreamingLLM as in the DynTS code: the window without the sinks is as large as the other policies' caches."""

    SINKS = 10

    def length_after(self, length: int, question_length: int, evictions: int = 0) -> int:
        return min(length, super().length_after(length, question_length, evictions) + self.sinks_kept)
