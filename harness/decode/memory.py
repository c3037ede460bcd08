"""The number of slots that fit into the free memory."""

import os
from dataclasses import dataclass

import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.harness.models.load import LoadedModel

# More slots gain little (CPU: results/published/benchmarks.md; CUDA: a guess until it is measured).
_MOST_SLOTS = {"cpu": 64, "cuda": 256}
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class AutoSlots:
    """A number of slots to decode with, and its arithmetic as a sentence."""

    slots: int
    reason: str


def auto_slots(model: LoadedModel, *, capacity: int, requests: int, config: CacheConfig = UNPACKED) -> AutoSlots:
    """As many slots as fit into the free memory, at most one per request and at most the number beyond which few gain.

    Args:
        model: gives the shape of the rows and the device.
        capacity: rows per slot.
        requests: completions that are wanted.
        config: the precision of the stored rows.
    """
    one, free = SlotCache.bytes_per_slot(model.shape, capacity, config), free_memory(model.device)
    fitting, most = int(free * _MEMORY_SHARE) // one, _MOST_SLOTS[model.device.type]
    reason = (
        f"{fitting:,} fit into {_MEMORY_SHARE:.0%} of {free / 2**30:.1f} GiB free, "
        f"{requests:,} completions are wanted, more than {most} hardly help on {model.device.type}"
    )
    return AutoSlots(slots=max(1, min(fitting, requests, most)), reason=reason)


def free_memory(device: torch.device) -> int:
    """Bytes that could still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
