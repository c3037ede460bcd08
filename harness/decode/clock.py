"""Measure the seconds of each part of decoding, and count steps and tokens."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds and counts of one engine's work so far. On a GPU the device measures the seconds of a part.

    `scoring`: the predictor at every step (part of `forward` if the step was captured), and the policies' selection.
    `eviction`: moving rows. `first_token`: wall seconds until the first step has drawn its tokens. A trunk's tokens
    count once for all its branches.
    """

    def __init__(self, device: torch.device) -> None:
        self.prefill = self.forward = self.sampling = self.scoring = self.eviction = 0.0
        self.wall = self.first_token = 0.0  # without the caller's work between two completions
        self.steps = self.tokens = 0
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def decode(self) -> float:  # wall seconds
        return self.wall - self.prefill

    @property
    def host(self) -> float:
        """Seconds outside all parts: the host's own work, and a GPU's wait for the host."""
        return self.wall - self.prefill - self.forward - self.sampling - self.scoring - self.eviction

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the field `name`."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            yield  # a capture computes nothing; its replays are timed as a whole
        elif self._on_gpu and name != "wall":  # wall seconds are the host's
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
        else:
            start = time.perf_counter()
            yield
            vars(self)[name] += time.perf_counter() - start

    def settle(self) -> None:
        """Add the times that the device has measured by now, without waiting for the device."""
        done = [event for event in self._events if event[2].query()]
        for name, begin, end in done:
            vars(self)[name] += begin.elapsed_time(end) / 1000  # milliseconds
        # The device ends its parts in the order in which they were given, so those that are done come first.
        del self._events[: len(done)]
