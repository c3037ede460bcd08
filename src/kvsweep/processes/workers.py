"""Worker processes for calls that may hang, crash or fill the memory. Each call has a time and a memory limit."""

import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.synchronize import RLock
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

from pebble import ProcessExpired, ProcessPool

from kvsweep.messages.command_line import guard_streams
from kvsweep.messages.errors import UserError

_CALL_BYTES = 4 << 30  # memory of a call, beside what its worker has imported
_START_LIMIT_S = 60.0
Result = TypeVar("Result")


class _Process(SpawnProcess):
    """A process that does not run the caller's main module again: a script may lack a guard, or come from a pipe."""

    _one_at_a_time = threading.Lock()

    def start(self) -> None:
        """Start with an empty main module in place of the caller's."""
        with self._one_at_a_time:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = main


class _Spawn(SpawnContext):
    """How worker processes start: a fork would copy torch's threads and locks.

    pebble lets go of its locks before it stops its workers, and a worker that is still starting would not find them.
    The locks live as long as this object instead.
    """

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        self._locks: list[RLock] = []

    def RLock(self) -> RLock:
        self._locks.append(super().RLock())
        return self._locks[-1]


class Workers:
    """At most `workers` processes, started by the first call, used for every later call; a context manager.

    A worker imports the module of the function that it calls. A call has `timeout_s` seconds; then it is killed.
    `prepare` is a function without arguments that a prepared worker calls before any clock runs. Numbers are not
    checked here: `kvsweep grade` refuses those out of range.
    """

    def __init__(
        self, *, workers: int = 2, timeout_s: float = 5.0, prepare: Callable[[], object] | None = None
    ) -> None:
        _check_semaphores()
        self._workers, self._timeout_s, self._prepare = workers, timeout_s, prepare
        self._pools = dict[bool, ProcessPool]()  # by whether its workers are prepared
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for pool in self._pools.values():
            _end(pool)

    def map(
        self, function: Callable[..., Result], calls: Sequence[Sequence[Any]], *, prepared: bool = False
    ) -> list[Result | None]:
        """Return the calls' results in order; None for a call that exceeded its limits or killed its worker.

        Such a call is tried again after the others by a prepared worker, because calls also exceed limits while a
        machine stands still or a worker imports; with `prepared` the first try is such, too. Several threads may map at
        once. Raises the function's own errors, and UserError if no worker starts.
        """
        results: list[Result | None] = [None] * len(calls)
        for is_prepared in (prepared, True):  # the first try of all calls, and the second of those without a result
            missing = [number for number, result in enumerate(results) if result is None]
            if not missing:
                break
            pool = self._running_pool(is_prepared and self._prepare is not None)
            futures = [pool.schedule(function, args=calls[number], timeout=self._timeout_s) for number in missing]
            try:
                for number, future in zip(missing, futures, strict=True):
                    with suppress(TimeoutError, ProcessExpired, BrokenProcessPool, MemoryError):
                        results[number] = future.result()
            except BaseException:
                for future in futures:
                    future.cancel()  # kills the worker of a running call
                raise
        return results

    def _running_pool(self, is_prepared: bool) -> ProcessPool:
        """Return a pool; replaces a pool that broke because an idle worker was killed."""
        with self._lock:
            pool = self._pools.get(is_prepared)
            if pool is not None:
                if pool.active:
                    return pool
                self._pools.pop(is_prepared).join()
            prepare = self._prepare if is_prepared else None
            pool = ProcessPool(max_workers=self._workers, initializer=_begin, initargs=(prepare,), context=_Spawn())
            try:
                pool.schedule(os.getpid).result(_START_LIMIT_S)
            except (RuntimeError, TimeoutError) as error:  # a BrokenProcessPool is a RuntimeError
                _end(pool)
                raise UserError(
                    f"no worker process can start ({error!r}): allow more memory or threads (ulimit), "
                    "and run the same command again."
                ) from error
            self._pools[is_prepared] = pool
            return pool


def _check_semaphores() -> None:
    """Refuse a machine on which processes cannot share a lock, before hours of work that would fail there."""
    try:
        multiprocessing.get_context("fork").Lock()  # starts no process
    except OSError as error:
        raise UserError(
            f"/dev/shm, where worker processes share locks, cannot be used ({error.strerror}): "
            "mount it writable and with room (docker's --shm-size)."
        ) from error


def _end(pool: ProcessPool) -> None:
    """Stop the workers and wait for their end."""
    pool.stop()
    pool.join()


def _begin(prepare: Callable[[], object] | None) -> None:
    """Prepare a worker, limit its memory, send libraries' output to stderr, and end the worker with its parent."""
    guard_streams()  # before the next line: Python asks a stdout that was a file for its position
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()
    # The first number is the address space in pages, which RLIMIT_AS limits.
    imported = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = imported + _CALL_BYTES
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    if hard_limit != resource.RLIM_INFINITY:
        most = min(most, hard_limit)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    # pebble's handler would wait for a long calculation to end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
