"""What a cell's provenance has of the cache of its server: the types, and the bytes of a token where it says both."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# The names of a cache's bytes and tokens, and the bytes of a unit. vLLM and SGLang speak of one GPU, and SGLang and
# llama.cpp round their sizes to two decimals. llama.cpp's cache has streams of as many cells each.
_SIZES = [
    ("kv_cache_memory_bytes", 1, ["kv_cache_size_tokens"]),
    ("kvcache", 2**30, ["token_capacity"]),
    ("kv_mib", 2**20, ["kv_cells", "kv_streams"]),
]


def said_of_cache(provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return what the server of a cell's last pass said of its cache, by the server's names."""
    return {**([{}, *provenance.get("decoding_passes", [])][-1].get("cache") or {})}


def kinds_of_cache(said: Mapping[str, str]) -> dict[str, str]:
    """Return the types among what a server said, and whether it rotates."""
    return {name: value for name, value in said.items() if name.endswith("dtype") or name.startswith("rotated")}


def bytes_per_token(said: Mapping[str, str]) -> float | None:
    """Return the bytes of a token as a server says its cache's bytes and tokens; None if it does not say both."""
    for name, unit, factors in _SIZES:
        try:
            size, *counts = (float(said[one]) for one in (name, *factors))
            return unit * size / math.prod(counts)
        except (KeyError, ValueError, ZeroDivisionError):
            continue
    return None


def models_told(passes: Iterable[Mapping[str, Any]]) -> set[str | None]:
    """Return the models that servers named in some passes, None for answers that name none.

    A pass that stored no text says nothing, nor does a pass of an older version.
    """
    return {one["model"] for one in passes if isinstance(one.get("model", 0), str | None)}
