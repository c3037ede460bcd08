"""Decode what the cells of one job lack, and store every completion as it ends."""

import gc
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from tqdm import tqdm

from analysis.records import Completion, DecodeStats, UserError
from compression.cache import SlotCache
from compression.policy import BudgetPolicy
from harness.decode.engine import Engine
from harness.decode.request import Branch, Request, auto_slots, needed_capacity, serves
from harness.models.config import ModelConfig
from harness.models.load import LoadedModel, load_model
from harness.provenance import describe_stretch
from harness.sweep.cell import Cell
from harness.sweep.heartbeat import Reporter
from harness.sweep.job import Job
from harness.sweep.store import CellStore, Pair
from kernels.implementation import check_available


def _check_device(job: Job) -> None:
    try:
        check_available(job.impl)
    except ValueError as error:
        raise UserError(str(error)) from error


def decode(
    job: Job, cells: Sequence[Cell], stores: Mapping[str, CellStore], progress: tqdm, reporter: Reporter
) -> None:
    """Decode what the cells lack, all cells side by side in one batch."""
    _check_device(job)
    stretch, model = describe_stretch(), loaded(job.model)
    for cell in cells:
        stores[cell.cell_id].unmark_done()
        stores[cell.cell_id].write_provenance(
            {
                "dataset_hash": cell.dataset_hash,
                "dataset_origin": job.benchmark.origin,
                "expected": len(job.pairs),
                "draws": job.draws,
                "random_weights": job.model.random_weights,
                "thinking_opened_by": model.thinking_opened_by,
                "git": {k: stretch["code"][f"git_{k}"] for k in ("revision", "dirty")},
                "packages": stretch["code"]["packages"],
                "hardware": stretch["hardware"],
                "config": dict(job.resolved),
                "stretch": {k: stretch[k] for k in ("started", "command", "code", "hardware")},
            }
        )
    limit = job.decoding.max_new_tokens
    longest = max(len(model.prompt_ids(problem.prompt)) for problem in job.benchmark.problems)
    _warn_beyond_context(model, longest + limit)
    _warn_of_lost_questions(cells, longest)

    # A cell that may need every row gets a cache of its own, which would make all the others' as large. It goes last:
    # the texts that no eviction touched are its own, and of the others it knows the beginning.
    unpruned = [c for c in cells if c.policy.capacity(longest, limit) == longest + limit]
    for group in ([c for c in cells if c not in unpruned], unpruned):
        known = _furthest_texts(stores.values(), _lacking_somewhere(job, group, stores))
        for cell, completion in _untouched(group, stores, known):
            stores[cell.cell_id].append(completion)
            reporter.stored(cell.cell_id)
            progress.update()
        requests = list(_requests(job, model, group, stores, known))
        if requests:
            _decode_group(job, model, requests, stores, progress, reporter)


@lru_cache(maxsize=1)
def loaded(config: ModelConfig) -> LoadedModel:
    """The model of this configuration, kept until another is asked for."""
    return load_model(config)


def _lacking_somewhere(job: Job, cells: Iterable[Cell], stores: Mapping[str, CellStore]) -> set[Pair]:
    own = set(job.own_pairs)
    return {pair for cell in cells for pair in own - stores[cell.cell_id].finished_pairs}


def _furthest_texts(stores: Iterable[CellStore], pairs: Collection[Pair]) -> dict[Pair, Completion]:
    """For each of the pairs, the stored completion whose text agrees with the rest of the grid for longest."""
    known: dict[Pair, Completion] = {}
    for store in stores:
        for completion in store.read_completions(pairs):
            other = known.get(completion.key)
            if other is None or len(completion.shared_ids) > len(other.shared_ids):
                known[completion.key] = completion
    return known


def _untouched(
    cells: Iterable[Cell], stores: Mapping[str, CellStore], known: Mapping[Pair, Completion]
) -> Iterator[tuple[Cell, Completion]]:
    """The completions that cells lack and need not write: another cell's, which neither would have evicted."""
    for cell in cells:
        finished = stores[cell.cell_id].finished_pairs
        yield from ((cell, row) for pair, row in known.items() if pair not in finished and serves(row, cell.policy))


def _requests(
    job: Job,
    model: LoadedModel,
    cells: Sequence[Cell],
    stores: Mapping[str, CellStore],
    known: Mapping[Pair, Completion],
) -> Iterator[Request]:
    """One request per problem and draw that any cell lacks, with those cells as its branches."""
    own = set(job.own_pairs)
    for problem in job.benchmark.problems:
        prompt_ids = model.prompt_ids(problem.prompt)
        for draw in (draw for draw in range(job.draws) if (problem.id, draw) in own):
            pair = problem.id, draw
            lacking = [c for c in cells if pair not in stores[c.cell_id].finished_pairs]
            if lacking:
                yield Request(
                    problem_id=problem.id,
                    draw=draw,
                    prompt_ids=prompt_ids,
                    branches=tuple(Branch(cell_id=c.cell_id, policy=c.policy) for c in lacking),
                    forced=tuple(known[pair].shared_ids) if pair in known else (),
                )


def _decode_group(
    job: Job,
    model: LoadedModel,
    requests: Sequence[Request],
    stores: Mapping[str, CellStore],
    progress: tqdm,
    reporter: Reporter,
) -> None:
    """Decode the requests; where the memory gives out, what is left of them with half of the slots.

    Raises:
        UserError: it gives out with a single slot.
    """
    capacity, slots, reason = needed_capacity(requests, job.decoding), job.slots, "slots= asks for them"
    if slots is None:
        found = auto_slots(model, capacity=capacity, requests=sum(len(r.branches) for r in requests))
        slots, reason = found.slots, found.reason
    name = f"{job.model.name} {job.benchmark.name}"
    progress.set_description(name)
    while requests:
        one = SlotCache.bytes_per_slot(model.shape, capacity)
        wanted = [branch.cell_id for request in requests for branch in request.branches]
        progress.write(
            f"{name}: {len(wanted)} completions of {len(set(wanted))} cells, {slots} slots x {capacity} tokens x "
            f"{one // capacity:,} bytes = {slots * one / 2**20:.1f} MiB of keys and values ({reason})"
        )
        try:
            _write(job, model, requests, slots, stores, progress, reporter)
            return
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            if slots == 1:
                raise UserError(
                    f"{name}: the memory does not hold one sequence of {capacity} tokens ({one / 2**20:.0f} MiB) "
                    "beside the model: lower policy.budget or decoding.max_new_tokens, or take a larger device."
                ) from error
        # Outside the handler, whose traceback would keep the old cache alive.
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        slots, reason = slots // 2, f"out of memory with {slots}"
        requests = _unfinished(requests, stores)


def _is_out_of_memory(error: BaseException) -> bool:
    # The CPU's allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _unfinished(requests: Iterable[Request], stores: Mapping[str, CellStore]) -> list[Request]:
    left = (
        replace(r, branches=tuple(b for b in r.branches if r.key not in stores[b.cell_id].finished_pairs))
        for r in requests
    )
    return [request for request in left if request.branches]


def _write(
    job: Job,
    model: LoadedModel,
    requests: Sequence[Request],
    slots: int,
    stores: Mapping[str, CellStore],
    progress: tqdm,
    reporter: Reporter,
) -> None:
    """Decode the requests with so many slots and store every completion as it ends; then what that cost."""
    engine = Engine.sized_for(requests, model, decoding=job.decoding, seed=job.seed, slots=slots, impl=job.impl)
    clock = engine.clock
    reporter.counters.append(lambda: clock.tokens)
    written: dict[str, list[int]] = {branch.cell_id: [] for request in requests for branch in request.branches}
    start = time.perf_counter()
    for cell_id, completion in engine.generate(requests):
        stores[cell_id].append(completion)
        reporter.stored(cell_id)
        written[cell_id].append(completion.num_tokens)
        progress.set_postfix_str(f"{clock.tokens / (time.perf_counter() - start):.0f} tokens/s", refresh=False)
        progress.update()
    seconds = time.perf_counter() - start
    for cell_id, lengths in written.items():
        stores[cell_id].append_stats(
            DecodeStats(
                wall_seconds=seconds,
                prefill_seconds=clock.prefill,
                decode_seconds=clock.decode,
                forward_seconds=clock.forward,
                sampling_seconds=clock.sampling,
                scoring_seconds=clock.scoring,
                eviction_seconds=clock.eviction,
                host_seconds=clock.host,
                first_token_seconds=clock.first_token,
                tokens=sum(lengths),
                tokens_total=clock.tokens,
                cells=len(written),
                completions=len(lengths),
                slots=slots,
                steps=clock.steps,
                kv_bytes_allocated=engine.cache.kv_bytes,
                kv_bytes_analytic=slots * SlotCache.bytes_per_slot(model.shape, engine.cache.capacity),
            )
        )


def _warn_beyond_context(model: LoadedModel, longest: int) -> None:
    context = getattr(model.network.config, "max_position_embeddings", longest)
    if longest > context:
        tqdm.write(
            f"note: a prompt and its completion may take {longest} tokens; {model.config.name} was made for {context}.",
            file=sys.stderr,
        )


def _warn_of_lost_questions(cells: Sequence[Cell], longest: int) -> None:
    pinned = [c.policy for c in cells if isinstance(c.policy, BudgetPolicy) and c.policy.question_rule == "pinned"]
    rooms = [room for policy in pinned if (room := policy.size - policy.newest_kept) < longest]
    if rooms:
        tqdm.write(
            f"note: {len(rooms)} of {len(cells)} cells pin the question and keep fewer tokens beside the newest (from "
            f"{min(rooms)}) than the longest question has ({longest}), so question tokens are evicted too, as the "
            "published rule has it; policy.question=on_top keeps them.",
            file=sys.stderr,
        )
