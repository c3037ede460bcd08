"""Decode the missing completions of a job's cells, and store each one as it ends."""

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvsweep.compression.cache import SlotCache
from kvsweep.harness.decode.engine import Engine, is_invariant
from kvsweep.harness.decode.memory import auto_slots, release_memory
from kvsweep.harness.decode.request import Branch, Request, grows, is_untouched, needed_capacity
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import device_of, load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.provenance import describe_arithmetic, describe_process
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.cell_store import CellStore, OpenCells
from kvsweep.harness.sweep.job import Job
from kvsweep.kernels.implementation import check_available
from kvsweep.messages.command_line import FAILED, counted
from kvsweep.messages.errors import UserError, plain_disk_errors
from kvsweep.run_files.row_types import Completion, DecodeStats, Pair, content_hash
from kvsweep.run_files.safe_files import make_folder, replace_text

# The most completions that may end in NaN or infinite logits: more are no accident of a few problems.
_MOST_NOT_FINITE = 5


class NotFiniteError(UserError):
    """The network computes NaN or infinity."""

    exit_code = FAILED


def fill(work: OpenCells) -> None:
    """Decode what the open cells are missing, and store it."""
    job = work.share.job
    cells = [store.cell for store in work.stores.values() if not store.finished_pairs.issuperset(work.share.pairs)]
    if not cells:
        return
    check_available(job.impl)
    invariant = is_invariant(job.invariant, job.spec, device_of(job.model), job.impl)
    # A broken artifact is refused here, before the model is loaded, which takes minutes.
    for cell in cells:
        cell.policy.load_artifacts()
    job.cache.largest_rows(job.spec.layers)
    decoding_pass = describe_process()
    model = loaded(job.model)
    # Loading sets the number of threads, which the arithmetic names.
    decoding_pass["arithmetic"] = describe_arithmetic(invariant=invariant, impl=job.impl, dtype=job.model.dtype)
    _begin_passes(work, cells, model, decoding_pass)
    limit = job.decoding.max_new_tokens
    lengths = {problem.id: len(model.dialogue.prompt_ids(problem.prompt)) for problem in job.benchmark.problems}
    longest = max(lengths.values())
    _check_lengths(model, lengths, limit)

    # All slots have the capacity of the cell that needs the most, so cells that grow with the text are decoded apart.
    # They come first, so that a killed sweep has its baseline. The other cells share every completion that ends before
    # their first eviction, and get the tokens of all other completions up to that eviction.
    for growing in (True, False):
        group = [cell for cell in cells if grows(cell.policy, longest, limit) == growing]
        _decode_group(work, model, group)


_models: dict[ModelConfig, LoadedModel] = {}  # one at most


def loaded(config: ModelConfig) -> LoadedModel:
    """Return this configuration's model. It stays loaded until another is needed, which needs the memory."""
    if config not in _models:
        unload()
        _models[config] = load_model(config)
        if _models[config].device.type == "cuda":
            release_memory()  # memory of loading and its checks
    return _models[config]


def unload() -> None:
    """Release the loaded model."""
    if _models:
        _models.clear()
        release_memory()


def _begin_passes(work: OpenCells, cells: Sequence[Cell], model: LoadedModel, decoding_pass: Mapping[str, Any]) -> None:
    """Record in each cell's provenance what its rows will come from; `decoding_pass` describes this process."""
    job = work.share.job
    sizes = _sizes(job, model)
    tokenizer = _store_tokenizer(job.run_directory, model)
    for cell in cells:
        provenance = {
            **job.provenance(cell),
            "thinking_opened_by": model.dialogue.thinking_opened_by,
            "tokenizer": tokenizer,
            "bytes": sizes,
            "hardware": decoding_pass["hardware"],
        }
        work.stores[cell.cell_id].begin_pass(provenance, decoding_pass)


def _sizes(job: Job, model: LoadedModel) -> dict[str, float]:
    """Return the bytes of a row, of what a slot has beside its rows, and of the weights.

    `fixed_rows` is the number of unquantized rows that take as many bytes as the fixed part.
    """
    group = job.cache.group  # tokens that may be packed together: a row's bytes are those of a group, divided
    without_packed_rows = SlotCache.bytes_per_slot(model.shape, 0, job.cache)  # all but the packed rows
    row = (SlotCache.bytes_per_slot(model.shape, group, job.cache) - without_packed_rows) / group
    fixed_part = SlotCache.bytes_per_slot(model.shape, 0)  # of an unpacked cache: the layers of fixed size alone
    # Without kinds the shape has no layer of fixed size.
    unquantized_row = SlotCache.bytes_per_slot(replace(model.shape, kinds=()), 1)
    return {
        "row": row,
        "newest": without_packed_rows - fixed_part,  # the newest rows, which are not packed yet
        "fixed": fixed_part,
        "weights": sum(parameter.nbytes for parameter in model.network.parameters()),
        "fixed_rows": fixed_part / unquantized_row if unquantized_row else 0,
    }


def _store_tokenizer(run: Path, model: LoadedModel) -> str:
    """Write the model's tokenizer beside the cells, so that a report on any machine knows the token boundaries.

    Return the file's name in the run directory.
    """
    text = model.tokenizer.backend_tokenizer.to_str()
    name = f"tokenizers/{content_hash(text)}.json"
    path = run / name
    if not path.exists():
        with plain_disk_errors(run):
            make_folder(path.parent)
            replace_text(path, text)
    return name


def _furthest_texts(stores: Iterable[CellStore], pairs: Collection[Pair]) -> dict[Pair, Completion]:
    """Return, for each pair, the stored completion that shares the most tokens with the rest of the grid."""
    texts: dict[Pair, Completion] = {}
    for store in stores:
        for row in store.read_completions(pairs):
            furthest = texts.get(row.key)
            if furthest is None or len(row.shared_ids) > len(furthest.shared_ids):
                texts[row.key] = row
    return texts


def _requests(work: OpenCells, model: LoadedModel, cells: Sequence[Cell]) -> Iterator[Request]:
    """Yield a request for each pair that some of the cells lack, with the tokens that they share, if any cell has them.

    First a stored completion of any cell is stored for these cells too, where they would write the same.
    """
    prompts = {problem.id: problem.prompt for problem in work.share.job.benchmark.problems}
    missing: dict[Pair, list[Cell]] = {}
    for pair in work.share.pairs:
        cells_without = [cell for cell in cells if work.lacks(cell.cell_id, pair)]
        if cells_without:
            missing[pair] = cells_without
    texts = _furthest_texts(work.stores.values(), missing)
    for pair, cells_without in missing.items():
        forced: Sequence[int] = ()
        if pair in texts:
            text = texts[pair]
            forced = text.shared_ids
            work.left.know(pair, text.num_tokens)  # the length, also for the cells that lack the pair
            for cell in cells_without:
                # Neither cell evicts, so both would write the same completion.
                if is_untouched(text, cell.policy):
                    work.append(cell.cell_id, text)
        left = [cell for cell in cells_without if work.lacks(cell.cell_id, pair)]
        if left:
            problem_id, draw = pair
            yield Request(
                problem_id=problem_id,
                draw=draw,
                prompt_ids=model.dialogue.prompt_ids(prompts[problem_id]),
                branches=tuple(Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in left),
                forced=tuple(forced),
            )


def _decode_group(work: OpenCells, model: LoadedModel, cells: Sequence[Cell]) -> None:
    """Decode the cells' missing completions; if memory runs out, decode the rest with half the slots."""
    job = work.share.job
    slots = job.slots
    reason = "slots= asks for them"  # replaced if they are counted from the free memory
    while True:
        requests = list(_requests(work, model, cells))
        if not requests:
            return
        completions = Counter[str]()  # to decode, by cell_id
        for request in requests:
            completions.update(branch.cell_id for branch in request.branches)
        capacity = needed_capacity(requests, job.decoding)
        if slots is None:
            slots, reason = auto_slots(model, requests, job.decoding, job.cache)
        what = f"{counted(completions.total(), 'completion')} of {counted(len(completions), 'cell')}"
        print(f"{job.name}: {what}, {counted(slots, 'slot')} x {capacity} tokens ({reason})", flush=True)
        try:
            _write(work, model, requests, slots)
            return
        except (RuntimeError, MemoryError) as error:
            # The CPU's allocator raises a plain RuntimeError; any other one is no lack of memory.
            out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
            if not out_of_memory and "DefaultCPUAllocator" not in str(error):
                raise
            if slots == 1:
                too_small = f"the memory does not hold one sequence of {capacity} tokens"
                hint = "lower policy.budget or decoding.max_new_tokens, or take a larger device"
                raise UserError(f"{job.name}: {too_small} beside the model: {hint}.") from error
        # Outside the handler: the error's traceback keeps the old cache alive. Completions that have ended are stored,
        # so the next turn decodes the rest.
        release_memory()
        reason = f"out of memory with {slots}"
        slots //= 2


def engine_of(job: Job, requests: Sequence[Request], model: LoadedModel, slots: int) -> Engine:
    """Return an engine with a job's settings, and slots that are long enough for the requests."""
    return Engine.sized_for(
        requests,
        model,
        slots=slots,
        decoding=job.decoding,
        seed=job.seed,
        impl=job.impl,
        invariant=job.invariant,
        cache=job.cache,
    )


def _write(work: OpenCells, model: LoadedModel, requests: Sequence[Request], slots: int) -> None:
    """Decode the requests, store every completion as it ends, and at the end the cost of the decoding."""
    job = work.share.job
    engine = engine_of(job, requests, model, slots)
    job.check_inputs()  # all weights are in memory from here on
    clock = engine.clock
    cache = engine.cache
    work.reporter.counters.append(lambda: clock.tokens)
    written = defaultdict[str, list[int]](list)  # the tokens of each completion, by cell_id
    start = time.perf_counter()
    for cell_id, completion in engine.generate(requests):
        written[cell_id].append(completion.num_tokens)
        work.append(cell_id, completion)
        if len(work.not_finite) > _MOST_NOT_FINITE:
            ended = f"{counted(len(work.not_finite), 'text')} ended because logits were NaN or infinite"
            hint = "take model.dtype=bfloat16 or float32, or look at the weights"
            raise NotFiniteError(f"{job.name}: {ended}, the last for problem {completion.problem_id!r:.80}: {hint}.")
    wall = time.perf_counter() - start
    analytic = slots * SlotCache.bytes_per_slot(model.shape, cache.capacity, job.cache)
    # The cells were decoded together, so each row has the times of all; only `tokens` and `completions` are the cell's.
    for cell_id, lengths in written.items():
        row = DecodeStats(
            wall_seconds=wall,
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
            kv_bytes_allocated=cache.kv_bytes,
            kv_bytes_analytic=analytic,
        )
        work.stores[cell_id].append_row(row)


def _check_lengths(model: LoadedModel, lengths: Mapping[str, int], limit: int) -> None:
    """Refuse a prompt longer than the model's context; print a note if completions may exceed it.

    `lengths` are the prompts' tokens, by problem_id; `limit` is the most tokens of a completion.
    """
    context = model.spec.positions
    longest = max(lengths.values()) + limit
    name = model.config.name
    for problem_id, length in lengths.items():
        if context is not None and length >= context:
            too_long = f"problem {problem_id!r:.80} asks {length:,} tokens, and {name} was made for {context:,}"
            raise UserError(f"{too_long}: leave the problem out, or choose a model with a longer context.")
    model.check_length(longest)  # refuses where the model cannot compute beyond its context
    if context is not None and longest > context:
        note = f"note: a prompt and its completion may take {longest} tokens; {name} was made for {context}."
        print(note, file=sys.stderr)
