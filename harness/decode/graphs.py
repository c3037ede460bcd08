"""CUDA graphs of the decode step, one per number of slots: a replay saves the GPU the wait for kernel launches.

A graph reads and writes the memory of its capture, for a fixed number of slots. So a step's number of slots is rounded
up to a bucket. The step then also computes some free slots; their results are never read.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kvsweep.harness.decode.clock import Clock

Step = Callable[[int], Tensor]


class StepGraphs:
    """Runs a step eagerly or replays its graph.

    A bucket's first step runs eagerly, which also compiles its kernels; the second step is captured.
    """

    def __init__(self, slots: int, clock: Clock) -> None:
        self.slots, self.clock = slots, clock
        self._met: set[int] = set()  # buckets whose first step has run
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, step: Step, live: int, room: int) -> Tensor:
        """Run a step; return logits of `live` slots or more. If the bucket exceeds `room`, run `live` slots eagerly.

        All calls pass the same `step`. It feeds one token to each of a number of slots, never waits for the device, and
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
        with self.clock.time("forward"):
            graph.replay()
        return logits

    def _capture(self, step: Step, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return the graph of a step of `rows` slots, and the logits that each replay writes."""
        graph = torch.cuda.CUDAGraph()
        # Graphs run one after another, so they can share the memory of intermediate results.
        pool = next((other.pool() for other, _ in self._captured.values()), None)
        # thread_local: calls of other threads do not break the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            logits = step(rows)
        return graph, logits


def bucket(live: int, slots: int) -> int:
    """Return the smallest of 1, 2, 3, 4, 6, 8, 12, 16 and so on that is at least `live`, and at most `slots`."""
    power = 1 << (live - 1).bit_length()  # the smallest power of two that is at least `live`
    between = power * 3 // 4  # 3, 6, 12 and so on lie between two powers
    return min(between if live <= between else power, slots)
