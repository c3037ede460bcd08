"""Seconds and counts of the parts of decoding."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds and counts of one engine's work so far.

    On a GPU the seconds of a part are those that the device took for it, measured there; what it waited for the host
    is in `host`, with all that the host does alone.

    Attributes:
        prefill, forward, sampling, scoring, eviction: seconds of the parts; scoring is the predictor's at every step
            (a captured step's are in `forward`) and the policies' choice at an eviction, eviction the moving of rows.
        wall: seconds of all the engine's work, its caller's between two completions left out.
        first_token: wall seconds until the first step had drawn.
        steps: decode steps.
        tokens: those decoded, a trunk's once for all its branches.
    """

    def __init__(self, device: torch.device) -> None:
        self.prefill = self.forward = self.sampling = self.scoring = self.eviction = 0.0
        self.wall = self.first_token = 0.0
        self.steps = self.tokens = 0
        self._on_gpu = device.type == "cuda"
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def decode(self) -> float:
        """Seconds of everything but the prefill."""
        return self.wall - self.prefill

    @property
    def host(self) -> float:
        """Seconds of no part: bookkeeping, and a GPU's waiting for it."""
        return self.wall - self.prefill - self.forward - self.sampling - self.scoring - self.eviction

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to the field `name`."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            yield
            return
        if self._on_gpu and name != "wall":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((name, begin, end))
            return
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start)

    def settle(self) -> None:
        """Add up what the device has measured; to be called where the host has waited for it anyway."""
        done = [event for event in self._events if event[2].query()]
        for name, begin, end in done:
            self._add(name, begin.elapsed_time(end) / 1000)
        del self._events[: len(done)]

    def _add(self, name: str, seconds: float) -> None:
        setattr(self, name, getattr(self, name) + seconds)
