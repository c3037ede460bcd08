"""CUDA graphs of the decode step, one per number of slots; replaying them spares a GPU the wait for kernel launches.

A graph reads and writes the memory of its capture, for a fixed number of slots. So the number of slots of a step is
rounded up to a bucket. The step then also computes on some free slots, whose results are never read.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kvsweep.compression.cache import SlotCache
from kvsweep.harness.models.loaded import LoadedModel

Step = Callable[[int], Tensor]


class StepGraphs:
    """Runs a step eagerly or by replaying its graph.

    The first step of a bucket runs eagerly, which also compiles its kernels; the second is captured. `timer` times a
    replay.
    """

    def __init__(self, *, slots: int, timer: Callable[[], AbstractContextManager[object]]) -> None:
        self.slots, self.timer = slots, timer
        self._met: set[int] = set()
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @staticmethod
    def can_capture(model: LoadedModel, cache: SlotCache) -> bool:
        # A graph can hold a step that never waits for the device, as the fused one.
        return model.device.type == "cuda" and cache.ragged and model.spec.fusable

    def __call__(self, step: Step, live: int, room: int) -> Tensor:
        """Run a step; return logits of `live` slots or more. If the bucket exceeds `room`, run `live` eagerly.

        `step`, the same in all calls, feeds one token to each of a number of slots, never waits for the device, and
        returns logits [slots, vocabulary].
        """
        rows = bucket(live, self.slots)
        if rows > room:
            return step(live)
        if rows not in self._met:
            self._met.add(rows)
            return step(rows)
        if rows not in self._captured:
            self._captured[rows] = self._capture(step, rows)
        graph, logits = self._captured[rows]
        with self.timer():
            graph.replay()
        return logits

    def _capture(self, step: Step, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another, so they can share the memory of intermediate results.
        pool = next((other.pool() for other, _ in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = step(rows)
        return graph, logits


def bucket(live: int, slots: int) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16 and so on that is at least `live`, and at most `slots`."""
    power = 1 << (live - 1).bit_length()
    between = power * 3 // 4
    return min(between if live <= between else power, slots)
