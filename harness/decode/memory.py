"""The number of slots that fit into the free memory."""

import gc
import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.cache_rows import CacheShape
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.harness.decode.request import DecodingConfig, Request, needed_capacity
from kvsweep.harness.decode.slots import SlotTable
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.spec import ModelSpec
from kvsweep.processes.granted import cgroup_rooms, slurm_rooms

# Beyond this number, more slots gain little (CPU: results/published/benchmarks.md; CUDA: a guess, not measured).
MOST_SLOTS = 256
MEMORY_SHARE = 0.8
# Bytes for each logit: the network's own, its float32 copy, probabilities, and sums in float64 while a token is drawn
# (a test counts the memory that drawing takes at once).
BYTES_PER_LOGIT = 28


class AutoSlots(NamedTuple):
    """A number of slots to decode with, and a sentence that shows its arithmetic."""

    slots: int
    reason: str


def auto_slots(
    model: LoadedModel,
    requests: Sequence[Request],
    decoding: DecodingConfig,
    config: CacheConfig = UNPACKED,
    *,
    wanted: int | None = None,
) -> AutoSlots:
    """Return the number of slots that fit into free memory: at most `MOST_SLOTS`, and at most `wanted`.

    `wanted` None: one per completion. On a GPU, first release memory that Python has not collected yet.
    """
    if model.device.type == "cuda":
        release_memory()
    in_slot = slot_bytes(model.shape, requests, decoding, config)
    in_step = step_bytes(model.spec)
    free = free_memory(model.device)
    if wanted is None:
        wanted = sum(len(request.branches) for request in requests)
    fitting = fitting_slots(free, in_slot + in_step)
    sizes = f"{in_slot / 2**20:.3g} MiB, and {in_step / 2**20:.3g} MiB more in a step"
    reason = (
        f"{fitting:,} of {sizes}, fit into {MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB free, "
        f"{wanted:,} completions are wanted, more than {MOST_SLOTS} hardly help on {model.device.type}"
    )
    return AutoSlots(slots=max(1, min(fitting, wanted, MOST_SLOTS)), reason=reason)


def slot_bytes(shape: CacheShape, requests: Sequence[Request], decoding: DecodingConfig, config: CacheConfig) -> int:
    """Bytes that a slot of `Engine.sized_for` takes on the device: rows, positions, signals, and the text.

    They are counted on a cache and a table of one slot that have shapes but no memory (torch's meta device).
    """
    device = torch.device("meta")
    policies = policies_of(requests)
    capacity = needed_capacity(requests, decoding)
    cache = slot_cache(shape, policies, slots=1, capacity=capacity, device=device, config=config)
    table = SlotTable(cache, max_new_tokens=decoding.max_new_tokens, find_loops=decoding.stop_on_loop)
    return sum(tensor.nbytes for tensor in (*cache.tensors, *table.tensors))


def fitting_slots(free: float, each: int) -> int:
    """Return how many slots of `each` bytes fit into the share of `free` bytes that slots may take."""
    return int(max(0, free) * MEMORY_SHARE) // each


def step_bytes(spec: ModelSpec) -> int:
    """Bytes beside the cache that a step needs per slot: its logits, until a token is drawn."""
    return BYTES_PER_LOGIT * spec.vocab_size


def policies_of(requests: Iterable[Request]) -> list[Policy]:
    """Return each policy of the requests once, in order."""
    branches = chain.from_iterable(request.branches for request in requests)
    return list(dict.fromkeys(branch.policy for branch in branches))


def slot_cache(shape: CacheShape, policies: Sequence[Policy], **options: Any) -> SlotCache:
    """Return a cache that records the signals of these policies; the options are `SlotCache`'s."""
    signals = dict.fromkeys(chain.from_iterable(policy.signals for policy in policies))
    return SlotCache(shape, signals=signals, per_head=any(policy.per_head for policy in policies), **options)


def release_memory() -> None:
    """Release unused memory: Python's reference cycles, and the GPU blocks that torch keeps."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device; on a CPU within the limits of control groups and SLURM."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *cgroup_rooms(), *slurm_rooms()]))
