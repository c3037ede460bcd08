"""What a sweep is going to take, before it is started: `kvsweep --dry-run`, and the arithmetic of the forked grid.

Nothing is loaded and nothing written. Where cells of the run have finished, their lengths and speed are the measure;
where none has, the bound is `max_new_tokens`, and it says so.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.records import COMPLETIONS_FILE, STATS_FILE, DecodeStats, read_rows, shard_files
from compression.cache import SlotCache
from compression.policy import Policy
from compression.rows import CacheShape
from harness.models.load import read_architecture, shape_of
from harness.sweep.job import Job
from harness.sweep.store import is_done

# Of English and mathematics; only the size of a question among thousands of tokens hangs on it.
_CHARACTERS_PER_TOKEN = 3
_ENDLESS = 1 << 40


def first_eviction(policy: Policy, question_length: int) -> int | None:
    """The generated tokens fed when the policy first evicts; None if it never does."""
    capacity = policy.capacity(question_length, _ENDLESS)
    return None if capacity >= _ENDLESS else capacity - 1 - question_length


def forked_tokens(lengths: Sequence[int], forks: Sequence[int | None]) -> int:
    """Tokens to decode for a grid in one batch: a text once up to the last fork it reaches, each branch from its own.

    A cell whose texts keep the lengths that they have with the full cache is assumed; compression may lengthen them.

    Args:
        lengths: generated tokens of each (problem, draw).
        forks: each cell's step of its first eviction; None for a cell that never evicts.
    """
    total = 0
    for length in lengths:
        steps = [length if fork is None else min(fork, length) for fork in forks]
        total += max(steps) + sum(length - step for step in steps)
    return total


def saving(lengths: Sequence[int], forks: Sequence[int | None]) -> float:
    """How many times fewer tokens the grid in one batch decodes than its cells one by one."""
    return len(forks) * sum(lengths) / forked_tokens(lengths, forks)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the finished stretches of a run's cells tell.

    Attributes:
        lengths: generated tokens of stored completions.
        tokens_per_second: live tokens of all cells together, prefill included.
        bytes_per_completion: of the completions' files.
    """

    lengths: list[int]
    tokens_per_second: float
    bytes_per_completion: float


def measure(job: Job) -> Measured | None:
    """Read what the job's cells have stored so far; None where they have stored nothing."""
    lengths: list[int] = []
    size = seconds = tokens = 0.0
    for cell in job.cells:
        folder = job.run_directory / cell.cell_id
        for path in shard_files(folder, COMPLETIONS_FILE).values():
            size += path.stat().st_size
            lengths += [int(row["num_tokens"]) for row in read_rows(path, on_bad=lambda *_: None)]
        for path in shard_files(folder, STATS_FILE).values():
            for row in map(DecodeStats.from_dict, read_rows(path, on_bad=lambda *_: None)):
                # Each of a stretch's cells has its row: its share of the stretch.
                seconds += row.wall_seconds / row.cells
                tokens += row.tokens_total / row.cells
    if not lengths or not seconds:
        return None
    return Measured(lengths=lengths, tokens_per_second=tokens / seconds, bytes_per_completion=size / len(lengths))


def describe(jobs: Sequence[Job]) -> str:
    """What the jobs will take, one paragraph each, and all together."""
    parts = [_describe_job(job) for job in jobs]
    cells = sum(len(job.cells) for job in jobs)
    return "\n".join([*parts, f"{len(jobs)} jobs, {cells} cells; nothing was run (--dry-run)."])


def _describe_job(job: Job) -> str:
    done = sum(is_done(job.run_directory, cell, job.problem_ids, job.draws) for cell in job.cells)
    limit, pairs = job.decoding.max_new_tokens, len(job.own_pairs)
    question = max(len(p.prompt) for p in job.benchmark.problems) // _CHARACTERS_PER_TOKEN + 1
    shape = shape_of(read_architecture(job.model), job.model.dtype)
    found = measure(job)
    lengths = found.lengths if found else [limit]
    forks = [first_eviction(cell.policy, question) for cell in job.cells]
    scale = pairs / len(lengths)
    tokens = forked_tokens(lengths, forks) * scale * (1 - done / len(job.cells))
    source = f"mean length {sum(lengths) / len(lengths):.0f} measured" if found else f"every text {limit} long at most"
    name = f"{job.model.name} {job.benchmark.name}, shard {job.shard}"
    lines = [
        f"{name}: {len(job.cells)} cells ({done} done) of {pairs} completions",
        f"  memory: {_memory(job, shape, question)}",
        f"  left to decode: {tokens:.3g} tokens ({source}), {saving(lengths, forks):.2f} times fewer than cell by cell",
    ]
    if found:
        hours = tokens / found.tokens_per_second / 3600
        disk = found.bytes_per_completion * pairs * len(job.cells) / 2**20
        lines.append(
            f"  time: {hours:.2f} hours at {found.tokens_per_second:.0f} tokens/s; disk: {disk:.1f} MiB in all"
        )
    else:
        lines.append("  time and disk: not known until a cell has stored something")
    return "\n".join(lines)


def _memory(job: Job, shape: CacheShape, question: int) -> str:
    capacities = [cell.policy.capacity(question, job.decoding.max_new_tokens) for cell in job.cells]
    parts = [
        f"{SlotCache.bytes_per_slot(shape, rows) / 2**20:.1f} MiB a slot of {rows} tokens ({count} cells)"
        for rows, count in sorted(Counter(capacities).items())
    ]
    heads = f"2 x {shape.layers} layers x {shape.kv_heads} heads x {shape.head_dim} x {shape.dtype.itemsize} bytes"
    slots = "as many slots as fit" if job.slots is None else f"{job.slots} slots"
    return f"{', '.join(parts)} ({heads} a token; a question of about {question}); {slots}"
