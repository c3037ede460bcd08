"""The number of slots that fit into the free memory."""

import gc
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policy import Policy
from kvsweep.compression.rows import CacheShape
from kvsweep.granted import cgroup_rooms, slurm_rooms
from kvsweep.harness.decode.request import DecodingConfig, Request, needed_capacity
from kvsweep.harness.decode.slots import SlotTable
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.models.spec import ModelSpec

# More slots gain little (CPU: results/published/benchmarks.md; CUDA: a guess until it is measured).
MOST_SLOTS = {"cpu": 64, "cuda": 256}
MEMORY_SHARE = 0.8
# A logit as the network gives it, as float32 and as drawing changes it: probabilities, and sums in float64 (a test
# counts what drawing holds at once).
BYTES_PER_LOGIT = 28


class AutoSlots(NamedTuple):
    """A number of slots to decode with, and its arithmetic as a sentence."""

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
    """As many slots as fit into the free memory, at most `MOST_SLOTS` and one per completion, or `wanted`.

    On a GPU memory that Python has not collected yet is released first.
    """
    if model.device.type == "cuda":
        release_memory()
    one, step = slot_bytes(model.shape, requests, decoding, config), step_bytes(model.spec)
    free, most = free_memory(model.device), MOST_SLOTS[model.device.type]
    wanted = sum(len(request.branches) for request in requests) if wanted is None else wanted
    fitting = fitting_slots(free, one + step)
    sizes = f"{one / 2**20:.3g} MiB, and {step / 2**20:.3g} MiB more in a step"
    reason = (
        f"{fitting:,} of {sizes}, fit into {MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB free, "
        f"{wanted:,} completions are wanted, more than {most} hardly help on {model.device.type}"
    )
    return AutoSlots(slots=max(1, min(fitting, wanted, most)), reason=reason)


def slot_bytes(shape: CacheShape, requests: Sequence[Request], decoding: DecodingConfig, config: CacheConfig) -> int:
    """Bytes that a slot of `Engine.sized_for` takes on the device: rows, positions, recorded signals and the text.

    They are counted on a cache and a table of one slot that have shapes and no memory (torch's meta device).
    """
    device, policies = torch.device("meta"), policies_of(requests)
    capacity = needed_capacity(requests, decoding)
    cache = slot_cache(shape, policies, slots=1, capacity=capacity, device=device, config=config)
    table = SlotTable(cache, max_new_tokens=decoding.max_new_tokens, find_loops=decoding.stop_on_loop)
    return sum(tensor.nbytes for tensor in (*cache.tensors, *table.tensors))


def fitting_slots(free: float, each: int) -> int:
    """Slots of so many bytes each that fit into the share of free memory that is given to them."""
    return int(max(0, free) * MEMORY_SHARE) // each


def step_bytes(spec: ModelSpec) -> int:
    """Bytes that a step needs for each slot beside the cache: those of its logits, until a token is drawn."""
    return BYTES_PER_LOGIT * spec.vocab_size


def policies_of(requests: Iterable[Request]) -> list[Policy]:
    return list(dict.fromkeys(branch.policy for request in requests for branch in request.branches))


def slot_cache(shape: CacheShape, policies: Sequence[Policy], **options: Any) -> SlotCache:
    """A cache that records what these policies need; the options are `SlotCache`'s."""
    signals = dict.fromkeys(signal for policy in policies for signal in policy.signals)
    return SlotCache(shape, signals=signals, per_head=any(policy.per_head for policy in policies), **options)


def release_memory() -> None:
    """Give back what nothing refers to: Python's cycles, and the blocks that torch keeps of a GPU."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on the device; for a CPU at most what control groups and SLURM leave."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([free, *cgroup_rooms(), *slurm_rooms(os.environ)]))
