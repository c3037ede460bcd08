"""The device's part of a decode step, captured per number of slots and replayed: a GPU then never waits for launches.

What a graph reads and writes must lie where it lay at its capture, and how many rows it works on is fixed. So the slots
of a step are rounded up to a bucket, with free slots in which nothing is read afterwards.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from compression.cache import SlotCache
from harness.models.load import LoadedModel

Step = Callable[[int], Tensor]


class StepGraphs:
    """A step by number of slots, in place of the one it captures.

    The first step of a bucket runs as it is, which also compiles its kernels; the second is captured.

    Args:
        step: writes one token in each of the first so many slots and returns logits [slots, vocabulary]; it asks the
            device nothing and keeps its results in place.
        slots: all there are.
        timer: what times a replay; a step that runs as it is times itself.
    """

    def __init__(
        self, step: Step, *, slots: int, timer: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self.step, self.slots, self.timer = step, slots, timer
        self._met: set[int] = set()
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    @staticmethod
    def serve(model: LoadedModel, cache: SlotCache) -> bool:
        """Whether the steps of a model over a cache can be captured."""
        return model.device.type == "cuda" and cache.operations.ragged and model.capturable

    def __call__(self, live: int, room: int) -> Tensor:
        """Logits of the first slots, at least `live`; a bucket larger than `room` is not captured."""
        rows = bucket(live, self.slots)
        if rows > room:
            return self.step(live)
        if rows not in self._met:
            self._met.add(rows)
            return self.step(rows)
        if rows not in self._captured:
            self._captured[rows] = self._capture(rows)
        graph, logits = self._captured[rows]
        with self.timer():
            graph.replay()
        return logits

    def _capture(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another, so that they can share the memory of what lies between.
        pool = next((other.pool() for other, _ in self._captured.values()), None)
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = self.step(rows)
        return graph, logits


def bucket(live: int, slots: int) -> int:
    """The number of slots to step: 1, 2, 3, 4, 6, 8, 12, 16 and so on, at least `live` and at most all."""
    power = 1 << (live - 1).bit_length()
    between = power * 3 // 4
    return min(between if live <= between else power, slots)
