"""Time each cell: known completions token by token with the cell's own evictions, in rounds beside the full cache."""

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from tqdm import tqdm

from kvsweep.compression.cache import SlotCache
from kvsweep.harness.decode.engine import Engine
from kvsweep.harness.decode.request import Branch, Request, needed_capacity
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.replay.references import TimeConfig
from kvsweep.harness.replay.replay_share import ReplayShare, replay_share
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.cell_store import CellStore
from kvsweep.harness.sweep.fill import engine_of, loaded
from kvsweep.harness.sweep.job import Job
from kvsweep.messages.errors import UserError
from kvsweep.run_files.row_types import Timing, Why

# Step times are collected together per this many rows of the longest slot.
_ROWS = 64


def measure_seconds(jobs: Sequence[Job], config: TimeConfig) -> None:
    """Append rows to the cells' seconds.jsonl, round by round, so that a slow minute affects all cells."""
    with tqdm(total=len(jobs) * config.rounds, unit="round") as progress:
        for job in jobs:
            if not any(cell.policy.name == "full" for cell in job.cells):
                raise UserError(
                    f"{job.name}: --time needs the full cache beside it, which is no cell here: run it first."
                )
            progress.set_description(f"{job.name}, seconds")
            share = replay_share(job, config)
            for number in range(config.rounds):
                for cell in job.cells:
                    with CellStore(job.run_directory, cell, job.benchmark.problems) as store:
                        for row in _turn(loaded(job.model), share, cell, config, number):
                            store.append_row(row)
                progress.update()


def _turn(model: LoadedModel, share: ReplayShare, cell: Cell, config: TimeConfig, number: int) -> Iterator[Timing]:
    """Yield the timings of one cell in round `number`: a text alone, `slots` texts, and as many as the memory holds."""
    job = share.job
    branches = [Branch(cell_id=cell.cell_id, policy=cell.policy)]
    requests = [text.request(model, share.tokens, branches) for text in share.texts]
    limit = max(len(request.forced) for request in requests)
    decoding = replace(job.decoding, max_new_tokens=limit, stop_on_loop=False)
    capacity = needed_capacity(requests, decoding)
    slots_of: dict[Why, int] = {"one": 1, "given": config.slots}
    if config.memory_gb is not None:
        fitting = int(config.memory_gb * 1e9) // SlotCache.bytes_per_slot(model.shape, capacity, job.cache)
        if not fitting:
            raise UserError(
                f"memory_gb={config.memory_gb:g} does not hold one text of {capacity} rows "
                f"of {job.name}: give more memory."
            )
        slots_of["memory"] = fitting
    for why, slots in slots_of.items():
        batch = list(itertools.islice(itertools.cycle(requests), slots))  # the texts again if they are too few
        # No name keeps the engine, so that its memory is free before the next engine takes its own.
        yield _time(engine_of(replace(job, decoding=decoding), requests, model, slots), batch, why, number)


def _time(engine: Engine, requests: Sequence[Request], why: Why, number: int) -> Timing:
    """Decode the requests side by side, from first to last token; return the timing. `number` counts the rounds."""
    device, clock = engine.model.device, engine.clock
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    steps_at = Counter[int]()  # by rows of the longest slot, a multiple of `_ROWS`
    seconds_at = defaultdict[int, float](float)
    steps_before = 0
    seconds_before = 0.0
    cpu_before = time.process_time()

    def rows_now(_: object) -> int:
        return engine.cache.longest // _ROWS * _ROWS  # 0 behind the last step, which leaves no slot

    for rows, steps in itertools.groupby(engine.steps(requests), rows_now):
        # The step that makes the longest slot longer begins the next group. It began with these rows, and counts here.
        for _ in steps:
            pass
        if on_gpu:
            torch.cuda.synchronize(device)
        clock.settle()
        steps_at[rows] += clock.steps - steps_before
        seconds_at[rows] += clock.decode - seconds_before
        steps_before = clock.steps
        seconds_before = clock.decode
    return Timing(
        why=why,
        round=number,
        slots=len(requests),
        tokens=clock.tokens,
        seconds=clock.decode,
        cpu_seconds=time.process_time() - cpu_before,
        eviction_seconds=clock.eviction + clock.scoring,  # to move rows, and to choose them
        kv_bytes=engine.cache.kv_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        by_length=[(rows, steps, seconds_at[rows]) for rows, steps in sorted(steps_at.items()) if steps],
    )
