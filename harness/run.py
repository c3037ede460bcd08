"""The command `kvsweep`: compose, check everything, skip what is finished, decode, grade, sum up."""

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from analysis.report import summary_table
from compression.cache import SlotCache
from compression.policy import BudgetPolicy
from harness.cell import Cell
from harness.config import CONF, Job, plan
from harness.engine import Branch, Engine, Request
from harness.grading import Grader
from harness.models import LoadedModel, ModelConfig, load_model
from harness.provenance import describe_stretch
from harness.records import COMPLETIONS_FILE, Completion, DecodeStats, UserError, read_rows
from harness.store import CellLockedError, CellStore

BAD_INPUT, LOCKED, INTERRUPTED = 2, 3, 130


def main() -> None:
    """Console script: exit code 0 done, 2 bad input, 3 a cell is locked by another process, 130 interrupted."""
    # Hydra would print its own errors and exit 1; ours are one sentence and exit 2.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    jobs: list[Job] = []
    mistakes: list[Exception] = []

    def collect(config: DictConfig) -> None:
        try:
            jobs.append(plan(config))
        except (UserError, OmegaConfBaseException) as mistake:
            mistakes.append(mistake)

    try:
        _compose(collect)
        if mistakes:
            raise mistakes[0]
        run(jobs)
    except CellLockedError as error:
        sys.exit(_say(str(error), LOCKED))
    except (UserError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_say(str(error), BAD_INPUT))
    except KeyboardInterrupt:
        sys.exit(_say("interrupted; the same command goes on where this one stopped.", INTERRUPTED))


def _compose(collect: Callable[[DictConfig], None]) -> None:
    """Let Hydra hand over every job's configuration."""
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)()
    except HydraException:  # some are an OSError as well
        raise
    except OSError as error:
        raise UserError(f"results_dir cannot be written to ({error.strerror}): set results_dir= elsewhere.") from error


def run(jobs: Sequence[Job]) -> None:
    """Work through all jobs, each model loaded once, and print what came out."""
    total = sum(len(job.cells) * len(job.pairs) for job in jobs)
    with Grader() as grader, tqdm(total=total, unit="completion", smoothing=0.02, mininterval=1) as progress:
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            execute(job, grader, progress)
    for directory in dict.fromkeys(job.run_directory for job in jobs):
        print(summary_table(directory))
        print(f"results: {directory}\nreport:  kvsweep-report {directory}")


def execute(job: Job, grader: Grader, progress: tqdm) -> None:
    """Write the completions that the job's cells lack, grade them, mark the cells that are complete."""
    pairs = job.pairs
    with ExitStack() as stack:
        stores = {
            cell.cell_id: stack.enter_context(CellStore(job.run_directory, cell, job.benchmark.problems))
            for cell in job.cells
        }
        progress.update(sum(len(store.finished_pairs.intersection(pairs)) for store in stores.values()))
        missing = [cell for cell in job.cells if not stores[cell.cell_id].finished_pairs.issuperset(pairs)]
        if missing:
            decode(job, missing, stores, progress)
        for store in stores.values():
            grader.grade_cell(store.directory)
            store.mark_done(pairs)


def decode(job: Job, cells: Sequence[Cell], stores: Mapping[str, CellStore], progress: tqdm) -> None:
    """Decode what the cells lack, all cells side by side in one batch."""
    stretch, pairs = describe_stretch(), job.pairs
    for cell in cells:
        stores[cell.cell_id].mark_done(pairs)  # takes away the DONE of fewer pairs
        stores[cell.cell_id].write_provenance(
            {
                "dataset_hash": cell.dataset_hash,
                "dataset_origin": job.benchmark.origin,
                "expected": len(pairs),
                "draws": job.draws,
                "git": {k: stretch["code"][f"git_{k}"] for k in ("revision", "dirty")},
                "packages": stretch["code"]["packages"],
                "hardware": stretch["hardware"],
                "config": dict(job.resolved),
                "stretch": {k: stretch[k] for k in ("started", "command", "code", "hardware")},
            }
        )
    model = loaded(job.model)
    requests = list(_requests(job, model, cells, stores))
    limit = job.decoding.max_new_tokens
    longest = max(len(request.prompt_ids) for request in requests)
    _warn_beyond_context(model, longest + limit)
    _warn_of_lost_questions(cells, longest)

    # A cell that may need every row gets a cache of its own: it would make all the others' as large.
    unpruned = {c.cell_id for c in cells if c.policy.capacity(longest, limit) == longest + limit}
    for ids in (stores.keys() - unpruned, unpruned):
        group = [r for r in (_only(request, ids) for request in requests) if r.branches]
        if group:
            _decode_group(job, model, group, stores, progress)


@lru_cache(maxsize=1)
def loaded(config: ModelConfig) -> LoadedModel:
    """The model of this configuration, kept until another is asked for."""
    return load_model(config)


def _requests(
    job: Job, model: LoadedModel, cells: Sequence[Cell], stores: Mapping[str, CellStore]
) -> Iterator[Request]:
    """One request per problem and draw that any cell lacks, with those cells as its branches."""
    known = _shared_texts(stores.values())
    for problem in job.benchmark.problems:
        prompt_ids = model.prompt_ids(problem.prompt)
        for draw in range(job.draws):
            lacking = [c for c in cells if (problem.id, draw) not in stores[c.cell_id].finished_pairs]
            if lacking:
                yield Request(
                    problem_id=problem.id,
                    draw=draw,
                    prompt_ids=prompt_ids,
                    branches=tuple(Branch(cell_id=c.cell_id, policy=c.policy) for c in lacking),
                    forced=known.get((problem.id, draw), ()),
                )


def _shared_texts(stores: Iterable[CellStore]) -> dict[tuple[str, int], tuple[int, ...]]:
    """By problem and draw, the longest text that a stored completion shares with all cells of the grid."""
    known: dict[tuple[str, int], tuple[int, ...]] = {}
    for store in stores:
        for row in read_rows(store.directory / COMPLETIONS_FILE):
            completion = Completion.from_dict(row)
            known[completion.key] = max(known.get(completion.key, ()), tuple(completion.shared_ids), key=len)
    return known


def _only(request: Request, cell_ids: Collection[str]) -> Request:
    return replace(request, branches=tuple(b for b in request.branches if b.cell_id in cell_ids))


def _decode_group(
    job: Job, model: LoadedModel, requests: Sequence[Request], stores: Mapping[str, CellStore], progress: tqdm
) -> None:
    engine = Engine.sized_for(requests, model, decoding=job.decoding, seed=job.seed, slots=job.slots)
    slots, capacity = engine.slots, engine.cache.capacity
    analytic = slots * SlotCache.bytes_per_slot(model.shape, capacity)
    wanted = [branch.cell_id for request in requests for branch in request.branches]
    written: dict[str, list[int]] = {cell_id: [] for cell_id in wanted}
    progress.set_description(f"{job.model.name} {job.benchmark.name}")
    progress.write(
        f"{job.model.name} {job.benchmark.name}: {len(wanted)} completions of {len(written)} cells, "
        f"{slots} slots x {capacity} tokens = {analytic / 2**20:.1f} MiB of keys and values"
    )
    start = time.perf_counter()
    for cell_id, completion in engine.generate(requests):
        stores[cell_id].append(completion)
        written[cell_id].append(completion.num_tokens)
        rate = engine.clock.tokens / (time.perf_counter() - start)
        progress.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        progress.update()
    seconds = time.perf_counter() - start
    for cell_id, lengths in written.items():
        stores[cell_id].append_stats(
            DecodeStats(
                wall_seconds=seconds,
                prefill_seconds=engine.clock.prefill,
                decode_seconds=engine.clock.decode + engine.clock.eviction,
                eviction_seconds=engine.clock.eviction,
                tokens=sum(lengths),
                tokens_total=engine.clock.tokens,
                cells=len(written),
                completions=len(lengths),
                slots=slots,
                steps=engine.clock.steps,
                kv_bytes_allocated=engine.cache.kv_bytes,
                kv_bytes_analytic=analytic,
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
    inside = [c.policy for c in cells if isinstance(c.policy, BudgetPolicy) and not c.policy.question_on_top]
    short = [policy for policy in inside if policy.kept_outside < longest]
    if short:
        least = min(policy.kept_outside for policy in short)
        tqdm.write(
            f"note: {len(short)} of {len(cells)} cells keep fewer tokens outside the window (from {least}) than the "
            f"longest question has ({longest}), so question tokens are evicted too, as the published rule has it; "
            "policy.question_on_top=true keeps them.",
            file=sys.stderr,
        )


def _say(message: str, code: int) -> int:
    sentence = re.sub(r"\s+", " ", message.split("\nConfig search path:")[0]).strip()
    print(f"kvsweep: error: {sentence}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
