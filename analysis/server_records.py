"""What a cell's servers say of themselves: in answers the model and who made them, on their pages the cache."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

# Fields of an answer that a router may change: they are told, and no answer is refused for them.
ROUTED = ("provider", "system_fingerprint")
BYTES = "bytes a token"
# Servers count a few tokens more or less than they were asked for: an end token, or the last one of a cut text.
MISCOUNTED = 4
# The names of a cache's bytes and tokens, and the bytes of a unit. vLLM and SGLang speak of one GPU, and SGLang and
# llama.cpp round their sizes to two decimals. llama.cpp's cache has streams of as many cells each.
_SIZES = [
    ("kv_cache_memory_bytes", 1, ["kv_cache_size_tokens"]),
    ("kvcache", 2**30, ["token_capacity"]),
    ("kv_mib", 2**20, ["kv_cells", "kv_streams"]),
]
_ROUNDED = 0.02  # by which two such sizes of one cache may differ


def record_of(passes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what servers said in a cell's passes; later ones have precedence. A pass without answers has no model."""
    record = dict[str, Any]()
    for decoding_pass in passes:
        if "model" in decoding_pass:
            record |= {name: decoding_pass[name] for name in ("model", *ROUTED) if name in decoding_pass}
            record |= cache_of(decoding_pass.get("cache") or {})
    return record


def cache_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cache's types by the server's names, whether it rotates, and the bytes of a token if they are known."""
    cache = _kinds(fields)
    size = _bytes_per_token(fields)
    if size is not None:
        cache[BYTES] = size
    return cache


def same_cache(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """True if two records show one cache: as many bytes, rotated alike; without bytes, the same types."""
    if BYTES not in first or BYTES not in second:
        # Two servers that say nothing are not shown to have one cache.
        return bool(_kinds(first)) and _kinds(first) == _kinds(second)
    same_size = math.isclose(first[BYTES], second[BYTES], rel_tol=_ROUNDED)
    same_rotation = all(first.get(name) == second.get(name) for name in ("rotated_k", "rotated_v"))
    return same_size and same_rotation


def cache_words(record: Mapping[str, Any]) -> str:
    words = [f"{name} {value}" for name, value in _kinds(record).items()]
    if BYTES in record:
        words.append(f"{BYTES} {record[BYTES]:,.0f}")
    return ", ".join(words)


def _kinds(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name.endswith("dtype") or name.startswith("rotated")}


def _bytes_per_token(fields: Mapping[str, str]) -> float | None:
    """Return the bytes of a token as a server says its cache's bytes and tokens; None if it does not say both."""
    for name, unit, counts in _SIZES:
        try:
            # One count of tokens, or the cells of a stream times the streams.
            tokens = math.prod(float(fields[count]) for count in counts)
            return unit * float(fields[name]) / tokens
        except (KeyError, ValueError, ZeroDivisionError):
            continue
    return None
