"""The command `kvsweep`: compose, check everything, skip what is finished, decode, grade, sum up."""

import gc
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import lru_cache

import hydra
import torch
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from analysis.report import summary_table
from compression.cache import SlotCache
from compression.policy import BudgetPolicy
from harness.cell import Cell
from harness.config import CONF, Job, build, plan
from harness.engine import Branch, Engine, Request, auto_slots, needed_capacity, serves
from harness.grading import Grader
from harness.launch import LauncherConfig, run_local, split, submit
from harness.models import LoadedModel, ModelConfig, load_model
from harness.plan import describe
from harness.provenance import describe_stretch
from harness.records import (
    STATUS_FOLDER,
    Completion,
    DecodeStats,
    UserError,
)
from harness.status import (
    CellProgress,
    Reporter,
    State,
    TaskStatus,
    last_lines,
    policy_label,
    task_name,
)
from harness.store import CellLockedError, CellStore, Pair, is_done, plain_disk_errors
from harness.tracker import Tracking
from kernels.implementation import check_available

FAILED, BAD_INPUT, LOCKED, INTERRUPTED = 1, 2, 3, 130


def main() -> None:
    """Console script: exit code 0 done, 1 a job failed, 2 bad input, 3 locked by another process, 130 interrupted."""
    # Hydra would print its own errors and exit 1; ours are one sentence and exit 2.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    # Ours and not Hydra's, which would refuse it.
    dry_run = "--dry-run" in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != "--dry-run"]
    try:
        jobs, launcher = collect_jobs()
        if not jobs:  # Hydra was only asked to show something, such as --cfg job
            return
        if dry_run:
            print(describe([job for task in split(jobs, launcher) for job in task]))
        else:
            launch(jobs, launcher)
    except CellLockedError as error:
        sys.exit(_say(str(error), LOCKED))
    except (UserError, HydraException, OmegaConfBaseException) as error:
        sys.exit(_say(str(error), BAD_INPUT))
    except KeyboardInterrupt:
        sys.exit(_say("interrupted; the same command goes on where this one stopped.", INTERRUPTED))


def collect_jobs() -> tuple[list[Job], LauncherConfig]:
    """Compose and check every job of the command line before anything is run.

    Raises:
        UserError, HydraException, OmegaConfBaseException: the first mistake in any job.
    """
    jobs: list[Job] = []
    launchers: list[LauncherConfig] = []
    mistakes: list[Exception] = []

    def collect(config: DictConfig) -> None:
        try:
            jobs.append(plan(config))
            launchers.append(build(LauncherConfig, "launcher", config.launcher))
        except (UserError, OmegaConfBaseException) as mistake:
            mistakes.append(mistake)

    _compose(collect)
    if mistakes:
        raise mistakes[0]
    if any(launcher != launchers[0] for launcher in launchers):
        raise UserError("launcher differs between the jobs of one command: give it one value, not a list.")
    return jobs, launchers[0] if launchers else LauncherConfig()


def _compose(collect: Callable[[DictConfig], None]) -> None:
    """Let Hydra hand over every job's configuration."""
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(collect)()
    except (HydraException, BrokenPipeError):  # some are an OSError as well
        raise
    except OSError as error:
        raise UserError(f"results_dir cannot be written to ({error.strerror}): set results_dir= elsewhere.") from error


def launch(jobs: Sequence[Job], launcher: LauncherConfig) -> None:
    """Run the jobs as the launcher says, and print what came out or where to look.

    Raises:
        Exception: the first job's that failed, once the others have ended.
    """
    tasks = split(jobs, launcher)
    parts = [job for task in tasks for job in task]
    directories = list(dict.fromkeys(job.run_directory for job in jobs))
    if all(map(_has_nothing_left, jobs)):
        cells = len({(job.run_directory, cell.cell_id) for job in jobs for cell in job.cells})
        print(f"nothing to do: all {cells} cells are done")
        for directory in directories:
            print(f"results: {directory}\nreport:  kvsweep-report {directory}")
        return
    if launcher.kind != "slurm":
        for job in jobs:
            _check_device(job)
    for job in parts:
        _queue(job)
    if launcher.kind == "slurm":
        submitted = submit(tasks, launcher)
        print(f"submitted {len(submitted)} tasks as job {submitted[0].job_id.partition('_')[0]}")
        for directory in directories:
            print(f"progress: kvsweep-status {directory} --watch\nreport:   kvsweep-report {directory}")
        return
    if launcher.kind == "local":
        failed = run_local(tasks, launcher)
        if failed:
            print(f"kvsweep: error: {failed} of {len(tasks)} tasks failed: kvsweep-status says which.", file=sys.stderr)
            sys.exit(FAILED)
    elif failures := run(parts):
        raise failures[0]
    for directory in directories:
        print(summary_table(directory))
        print(f"results: {directory}\nreport:  kvsweep-report {directory}")


def run(jobs: Sequence[Job]) -> list[Exception]:
    """Work through all jobs, each model loaded once; a job that fails does not keep the others from running."""
    failures: list[Exception] = []
    total = sum(len(job.cells) * len(job.own_pairs) for job in jobs)
    with Grader() as grader, tqdm(total=total, unit="completion", smoothing=0.02, mininterval=1) as progress:
        for job in sorted(jobs, key=lambda job: str(job.model)):  # each model is loaded once
            try:
                execute(job, grader, progress)
            except Exception as error:
                failures.append(error)
                if len(jobs) > 1:
                    progress.write(f"{job.model.name} {job.benchmark.name} failed: {error}", file=sys.stderr)
    return failures


def execute(job: Job, grader: Grader, progress: tqdm) -> None:
    """Write the completions that the job's cells lack, grade them, mark the cells that are complete."""
    pairs = job.own_pairs
    cells = [c for c in job.cells if not is_done(job.run_directory, c, job.problem_ids, job.draws)]
    progress.update(len(pairs) * (len(job.cells) - len(cells)))
    if not cells:
        return
    status = _status(job, "running")
    with ExitStack() as stack:
        try:
            stores = {
                cell.cell_id: stack.enter_context(
                    CellStore(job.run_directory, cell, job.benchmark.problems, shard=job.shard)
                )
                for cell in cells
            }
        except CellLockedError:
            raise  # the status is its holder's to write
        except Exception as error:
            status.state, status.error = "failed", last_lines(error)
            with suppress(OSError):
                status.write(job.run_directory)
            raise
        for cell_id, store in stores.items():
            status.cells[cell_id].finished = len(store.finished_pairs.intersection(pairs))
            progress.update(status.cells[cell_id].finished)
        reporter = stack.enter_context(Reporter(job.run_directory, status))
        by_id = {cell.cell_id: cell for cell in cells}
        tracking = stack.enter_context(Tracking(job.tracker, job.run_directory.name, by_id, reporter))
        missing = [cell for cell in cells if not stores[cell.cell_id].finished_pairs.issuperset(pairs)]
        if missing:
            decode(job, missing, stores, progress, reporter)
        for store in stores.values():
            tracking.graded[store.cell.cell_id] = grader.grade_cell(store.directory, shard=job.shard)
            store.mark_done(job.problem_ids, job.draws)


def _check_device(job: Job) -> None:
    try:
        check_available(job.impl)
    except ValueError as error:
        raise UserError(str(error)) from error


def _has_nothing_left(job: Job) -> bool:
    return all(is_done(job.run_directory, cell, job.problem_ids, job.draws) for cell in job.cells)


def _queue(job: Job) -> None:
    """Say that the job is to be run, unless it is running already or nothing of it is left to do."""
    if _has_nothing_left(job):
        return
    status = _status(job, "queued")
    path = job.run_directory / STATUS_FOLDER / f"{status.task}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path.exists() and TaskStatus.read(path).seen(time.time()) == "running":
            return
    with plain_disk_errors(job.run_directory):
        status.write(job.run_directory)


def _status(job: Job, state: State) -> TaskStatus:
    cells = {
        cell.cell_id: CellProgress(
            model=job.model.name,
            benchmark=job.benchmark.name,
            policy=policy_label(cell.policy.identity()),
            finished=0,
            expected=len(job.own_pairs),
        )
        for cell in job.cells
    }
    return TaskStatus(
        task=task_name(job.model.name, job.benchmark.name, cells, str(job.shard)),
        state=state,
        shard=str(job.shard),
        command=job.command,
        cells=cells,
    )


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
