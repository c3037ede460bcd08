"""Decode steps as they are in the middle of a sweep: every slot live, lengths staggered, texts evicted meanwhile."""

import json
import statistics
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policies.full import FullCache
from kvsweep.compression.policies.h2o import H2O
from kvsweep.compression.policies.window import Window
from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.compression.recorders import ImportancePredictor, save_predictor
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.memory import release_memory
from kvsweep.harness.decode.request import Request
from kvsweep.harness.decode.sampling import cuts
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.sweep.card import step_seconds
from scripts.bench.gpu_day.common import (
    SAMPLINGS,
    Bandwidth,
    bandwidth,
    decoding_of,
    free_gib,
    median_ms,
    on_gpu,
    random_ids,
    random_r1,
    wait,
    weight_bytes,
)
from scripts.bench.rounds import ask

CLOCKED = ("forward", "sampling", "scoring", "eviction")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of all groups' texts, caches and heads."""

    slots: int
    most: int  # texts that are wanted where the slots are auto
    question: int
    limit: int
    steps: int
    widths: tuple[int, int]  # of the importance head
    policy: dict[str, Any]


LARGE = Sizes(
    slots=64,
    most=256,
    question=64,
    limit=16384,
    steps=60,
    widths=(8192, 2048),
    policy={"keep_ratio": 0.4, "local_window": 2000, "budget": 5000},
)
SMALL = Sizes(
    slots=3,
    most=4,
    question=8,
    limit=200,
    steps=8,
    widths=(64, 32),
    policy={"keep_ratio": 0.4, "local_window": 16, "budget": 64},
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """What one row of the table decodes; `auto` slots, or those of the sizes; whether the memory was freed before."""

    policy: str
    sampling: str = "r1"
    auto: bool = False
    invariant: bool = False
    freed: bool = True


GROUPS = (
    Group(policy="window"),
    Group(policy="dynts", sampling="dynts"),
    Group(policy="h2o"),
    Group(policy="window", invariant=True),
    # As a sweep does: the full cache, then a group that evicts. Memory that the first one still holds costs slots.
    Group(policy="full", auto=True),
    Group(policy="window", auto=True, freed=False),
    Group(policy="window", auto=True),
    Group(policy="window", auto=True, invariant=True),
)


def step(small: bool) -> dict[str, Any]:
    """A row of milliseconds for each group, beside the time to read weights and rows once, and the estimate."""
    rates, start = bandwidth(small), time.perf_counter()
    model = random_r1(small)
    wait()
    found: dict[str, Any] = {
        **rates._asdict(),
        "load_seconds": time.perf_counter() - start,
        "weights": weight_bytes(model),
    }
    found["free_gib_loaded"] = free_gib()
    release_memory()
    found["free_gib_released"] = free_gib()
    found["rows"] = []
    for group in GROUPS:
        if group.freed:
            release_memory()
        free = free_gib()
        try:
            row = measured(model, group, SMALL if small else LARGE, rates)
        except Exception as error:  # the other rows are worth having
            row = {"failed": f"{type(error).__name__}: {error}"[:300]}
        found["rows"].append({**vars(group), "free_gib": free, **row})
        print(json.dumps(found["rows"][-1], default=str), file=sys.stderr, flush=True)
    return found


@torch.inference_mode()
def measured(model: LoadedModel, group: Group, sizes: Sizes, rates: Bandwidth) -> dict[str, Any]:
    """The figures of a group's steps."""
    if on_gpu():
        torch.cuda.reset_peak_memory_stats()
    engine, policy = engine_of(model, group, sizes)
    live_rows = stagger(engine, policy, sizes)
    found = clocked(engine, sizes.steps)
    slots, weights = engine.table.slots, weight_bytes(model)
    rows = live_rows * SlotCache.bytes_per_slot(model.shape, 1000) / 1000
    estimate = step_seconds(
        rates.specified or rates.copied,
        weights=weights,
        rows=rows,
        slots=slots,
        layers=len(model.spec.layer_kinds),
        vocabulary=model.spec.vocab_size,
    )
    found |= {"floor_ms": 1000 * (weights + rows) / rates.copied, "estimate_ms": 1000 * estimate}
    found |= {"sheet_ms": 1000 * (weights + rows) / rates.specified if rates.specified else None}
    found |= {"slots": slots, "capacity": engine.cache.capacity, "mean_rows": live_rows / slots}
    found |= {"tokens_per_second": 1000 * slots / found["step_ms"], "replayed": engine.graphs is not None}
    found |= {f"drawing_{name}_ms": ms for name, ms in drawing(engine).items()}
    return found | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu() else None}


def engine_of(model: LoadedModel, group: Group, sizes: Sizes) -> tuple[Engine, Policy]:
    """An engine whose slots all have begun a text."""
    with tempfile.TemporaryDirectory() as folder:
        policy = policy_of(group.policy, sizes, Path(folder), model.spec.hidden_size)
        prompt = tuple(random_ids(model, sizes.question, seed=1).tolist())
        wanted = ask([prompt] * (sizes.most if group.auto else sizes.slots), policy)
        engine = Engine.sized_for(
            wanted,
            model,
            decoding=decoding_of(group.sampling, sizes.limit),
            slots=None if group.auto else sizes.slots,
            seed=0,
            impl="triton",
            invariant=group.invariant,
        )
    engine.stop_ids = torch.tensor([-1], device=model.device)
    queue = deque[Request](wanted[: engine.table.slots])
    while queue or engine.cache.live < engine.table.slots:
        decode_step(engine, queue)
    for _ in range(3):  # run eagerly, captured and replayed
        decode_step(engine, queue)
    return engine, policy


def decode_step(engine: Engine, queue: deque[Request]) -> None:
    """Do what the engine does for each step of decoding."""
    engine._fill(queue)
    if engine.cache.live:
        engine._step()
    engine.clock.settle()


def policy_of(name: str, sizes: Sizes, folder: Path, width: int) -> Policy:
    if name == "full":
        return FullCache(name="full")
    if name == "dynts":
        torch.manual_seed(0)
        save_predictor(ImportancePredictor(width, sizes.widths).bfloat16(), folder, {})
        policy = DynTS(name="dynts", predictor=str(folder), question="free", **sizes.policy)
        policy.load_artifacts()
        return policy
    return {"window": Window, "h2o": H2O}[name](name=name, **sizes.policy)


def stagger(engine: Engine, policy: Policy, sizes: Sizes) -> int:
    """Give the slots random rows and lengths from just after an eviction to just before one; return all live rows.

    Of the full cache, the lengths lie between a question's and the limit.
    """
    cache, table, device = engine.cache, engine.table, engine.model.device
    random = torch.Generator(device).manual_seed(2)
    for memory in cache.storage.tensors:
        memory.normal_(generator=random)
    for memory in (numbers for recorder in cache.recorders.values() for numbers in recorder.tensors):
        if memory.is_floating_point():
            memory.uniform_(generator=random)
    question = sizes.question
    first, last = question + sizes.limit // 20, question + sizes.limit * 9 // 10
    if isinstance(policy, BudgetPolicy) and (trigger := policy.trigger(question)) is not None:
        first, last = policy.length_after(trigger + 1, question) + 1, trigger - 5
    lengths = torch.linspace(first, last, table.slots).round().long()
    lengths -= torch.arange(table.slots) % 2  # two texts seldom evict in one step
    cache.lengths[:] = lengths.numpy()
    cache.device_lengths.copy_(lengths)
    cache.positions[:] = torch.arange(cache.capacity, device=device)
    table.generated[:] = lengths.numpy() + 1 - question
    table.counts.copy_(lengths + 1 - question)
    table.positions.copy_(lengths)
    table.written.copy_(random_ids(engine.model, *table.written.shape, seed=3))
    return int(lengths.sum())


def clocked(engine: Engine, steps: int) -> dict[str, Any]:
    """Milliseconds of a step and of its parts, the host's for a call, and the evictions that fell into the steps."""
    queue, clock, calls, begun = deque[Request](), engine.clock, [], evictions(engine)
    for number in range(20):
        decode_step(engine, queue)
        # The first eviction compiles its kernels. The full cache never evicts.
        if number >= 2 and evictions(engine) > begun:
            break
    wait()
    clock.settle()
    before, evicted = {name: getattr(clock, name) for name in CLOCKED}, evictions(engine)
    start = time.perf_counter()
    for _ in range(steps):
        begin = time.perf_counter()
        decode_step(engine, queue)
        calls.append(1000 * (time.perf_counter() - begin))
    wait()
    found = {"step_ms": 1000 * (time.perf_counter() - start) / steps}
    clock.settle()
    found |= {f"{name}_ms": 1000 * (getattr(clock, name) - seconds) / steps for name, seconds in before.items()}
    found |= {"call_ms_median": statistics.median(calls), "call_ms_most": max(calls)}
    return found | {"steps": steps, "evictions": evictions(engine) - evicted, "evictions_before": evicted - begun}


def evictions(engine: Engine) -> int:
    return sum(len(engine.table[slot].evictions) for slot in range(engine.cache.live))


def drawing(engine: Engine) -> dict[str, float]:
    """Milliseconds in which all slots' tokens are drawn from random logits, by the sampling."""
    size, table = (engine.table.slots, engine.model.spec.vocab_size), engine.table
    logits = torch.randn(size, device=engine.model.device, dtype=engine.cache.shape.dtype)
    draw = partial(engine.cache.operations.draw_tokens, logits, table.streams, table.positions)
    return {name: median_ms(partial(draw, **cuts(how)), 10 if on_gpu() else 1) for name, how in SAMPLINGS.items()}
