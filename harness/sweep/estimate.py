"""An estimate of a sweep's memory and time (`kvsweep --dry-run`), and the number of tokens that a forked grid decodes.

No model is loaded and no file written. The estimate uses the lengths and the speed of the completions that the run's
cells have stored; where they have stored none, it takes every text to be `max_new_tokens` long and says so.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvsweep import records
from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, pairs_to_hold, power
from kvsweep.command_line import counted
from kvsweep.compression.config import fixed_bytes
from kvsweep.compression.policy import BudgetPolicy, Policy
from kvsweep.errors import UserError
from kvsweep.harness.decode.request import Branch, Request, grows
from kvsweep.harness.models.spec import BYTES
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.sweep.card import (
    GIB,
    OFF,
    Card,
    card_here,
    card_of,
    mean_rows,
    slots_on,
    step_seconds,
    weights_bytes,
)
from kvsweep.harness.sweep.cell import Cell, stored_pairs
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.server import Server
from kvsweep.harness.sweep.share import Share, lacking

# An average for English and mathematics. Only the length of the question, a small part of a text, is reckoned with it.
_CHARACTERS_PER_TOKEN = 3
_Length = records.view(records.Completion, "num_tokens")


def first_eviction(policy: Policy, question_length: int) -> int | None:
    """The step, in generated tokens fed, at which the policy first evicts; None if it never does."""
    if isinstance(policy, Server):
        return 0  # it shares no token with another
    trigger = policy.trigger(question_length)
    if trigger is None:
        return None
    step = max(trigger, question_length) - question_length
    # A policy that frees nothing needs a row for every token of a text that goes on behind its first eviction.
    return None if grows(policy, question_length, step + 2) else step


def forked_tokens(
    lengths: npt.ArrayLike, forks: Sequence[int | None], lacking: npt.NDArray[np.bool_] | None = None
) -> int:
    """Tokens to decode for a grid in one batch: each text once up to the last fork, and each branch from its own fork.

    Every cell's texts count as long as those with the full cache, although compression may make texts longer. `lengths`
    are the generated tokens of each (problem, draw), `forks` each cell's `first_eviction`, and `lacking`
    [lengths, forks] the texts that are to be decoded, all by default.
    """
    length = np.asarray(lengths, float)[:, None]
    shared = np.minimum(length, [math.inf if fork is None else fork for fork in forks])
    wanted = np.ones(shared.shape, bool) if lacking is None else lacking
    alone = np.where(wanted, length - shared, 0).sum()
    return round(alone + np.where(wanted, shared, 0).max(axis=1, initial=0).sum())


class TokensLeft:
    """The tokens that a share's cells have still to decode: the estimate of `--dry-run`, corrected by each stored text.

    A text of unknown length counts as long as the mean of the known ones, and without any as `max_new_tokens`.
    `stored` are the pairs that each cell has, by cell_id.
    """

    def __init__(self, share: Share, stored: Mapping[str, Collection[records.Pair]]) -> None:
        job, pairs, question = share.job, share.pairs, _question_tokens(share.job)
        policies = {cell.cell_id: cell.policy for cell in job.cells}
        self._rows = {pair: row for row, pair in enumerate(pairs)}
        self._columns = {cell_id: column for column, cell_id in enumerate(stored)}
        self._forks = [first_eviction(policies[cell_id], question) for cell_id in stored]
        self._lacking = np.array([[pair not in found for found in stored.values()] for pair in pairs], bool)
        self._lacking = self._lacking.reshape(len(pairs), len(stored))
        self._lengths, self._limit = np.full(len(pairs), np.nan), job.decoding.max_new_tokens

    def know(self, pair: records.Pair, tokens: int) -> None:
        """Note the length of a text."""
        self._lengths[self._rows[pair]] = tokens

    def store(self, cell_id: str, pair: records.Pair, tokens: int) -> None:
        """Note that a cell has stored a text of so many tokens."""
        self._lacking[self._rows[pair], self._columns[cell_id]] = False
        if np.isnan(self._lengths[self._rows[pair]]):
            self.know(pair, tokens)

    def __int__(self) -> int:
        known = self._lengths[~np.isnan(self._lengths)]
        lengths = np.where(np.isnan(self._lengths), known.mean() if len(known) else self._limit, self._lengths)
        return forked_tokens(lengths, self._forks, self._lacking)


def saving(lengths: Sequence[int], forks: Sequence[int | None]) -> float:
    """Tokens of the cells decoded one by one, over the tokens of the grid decoded in one batch."""
    return len(forks) * sum(lengths) / forked_tokens(lengths, forks)


# The share of paired answers that differ between a lossless setting and the full cache, many and few.
DIFFER = (0.25, 0.1)


class Group(NamedTuple):
    """Cells of a job that decode together, in slots of one capacity; `forks` are their first evictions."""

    cells: list[Cell]
    forks: list[int | None]

    @property
    def title(self) -> str:
        names = {cell.policy.name for cell in self.cells}
        return "full cache" if names == {"full"} else counted(len(self.cells), "cell")


def groups_of(job: Job, question: int) -> list[Group]:
    """The cells whose slots are as long as their texts, and the others, in the order in which `decode` takes them."""

    def growing(cell: Cell) -> bool:
        return isinstance(cell.policy, Server) or grows(cell.policy, question, job.decoding.max_new_tokens)

    parts = [cell for cell in job.cells if growing(cell)], [cell for cell in job.cells if not growing(cell)]
    return [Group(cells, [first_eviction(cell.policy, question) for cell in cells]) for cells in parts if cells]


def stored_texts(job: Job) -> tuple[list[int], float]:
    """Lengths in tokens of the completions that the job's cells have stored, and the bytes of one."""
    lengths: list[int] = []
    size = 0
    for folder in (job.run_directory / cell.cell_id for cell in job.cells):
        for path in records.shard_files(folder, records.COMPLETIONS_FILE).values():
            size += path.stat().st_size
            lengths += [row.num_tokens for row in records.read_rows(path, _Length, on_bad=records.ignore)]
    return lengths, size / max(1, len(lengths))


def measured_pace(job: Job, cells: Sequence[Cell], card: Card | None = None) -> float | None:
    """Live tokens per second, with prefill, of what these cells have stored, of a `card` on that card alone."""
    seconds = tokens = 0.0
    for folder in (job.run_directory / cell.cell_id for cell in cells):
        if card is not None and not _decoded_on(card, folder):
            continue
        for path in records.shard_files(folder, records.STATS_FILE).values():
            for row in records.read_rows(path, records.DecodeStats, on_bad=records.ignore):
                # Each cell of a decoding pass has a row of its own, which counts as its share of the pass.
                seconds += row.wall_seconds / row.cells
                tokens += row.tokens_total / row.cells
    return tokens / seconds if seconds else None


def _decoded_on(card: Card, folder: Path) -> bool:
    files = records.shard_files(folder, records.PROVENANCE_FILE).values()
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        named = [(records.read_provenance(path)["hardware"]["gpus"] or [""])[0] for path in files]
        return bool(named) and all(card_of(name) == card for name in named)
    return False


def describe(shares: Sequence[Share]) -> str:
    # The shards of a job have the same cells.
    jobs = {(share.job.run_directory, share.job.name) for share in shares}
    cells = {(share.job.run_directory, cell.cell_id) for share in shares for cell in share.job.cells}
    parts = f" in {len(shares)} parts" if len(shares) > len(jobs) else ""
    total = f"{counted(len(jobs), 'job')}{parts}, {counted(len(cells), 'cell')}"
    here = card_here() if any(share.job.spec and not share.job.card for share in shares) else None
    seen, told = set[tuple[str, ...]](), []
    for share in shares:
        own = (str(share.job.run_directory), *(cell.cell_id for cell in share.job.cells))
        told.append(_describe_share(share, here, whole=own not in seen))
        seen.add(own)
    texts, hours, tokens = zip(*told, strict=True)
    known = [one for one in hours if one is not None]
    together = f", {_priced(sum(known), shares[0].job)} in all" if len(known) == len(shares) > 1 else ""
    completions = sum(len(share.pairs) * len(share.job.cells) for share in shares)
    left = f"{counted(completions, 'completion')}, {sum(tokens):.3g} tokens left to decode"
    return "\n".join([*texts, f"{total}, {left}{together}; nothing was run (--dry-run)."])


def _describe_share(share: Share, here: Card | None, *, whole: bool) -> tuple[str, float | None, float]:
    """What there is to say of a share, its hours on the job's card, or else on that of this machine, and its tokens.

    `whole`: with what all shards of a job have in common.
    """
    job, pairs, unfinished, cells = share.job, set(share.pairs), lacking(share), len(share.job.cells)
    missing = {cell.cell_id: len(pairs - stored_pairs(job.run_directory / cell.cell_id)) for cell in unfinished}
    question, (known, size) = _question_tokens(job), stored_texts(job)
    lengths, groups = known or [job.decoding.max_new_tokens], groups_of(job, question)
    left, mean = _tokens_of(groups, lengths, missing), sum(lengths) / len(lengths)
    source = f"mean length {mean:.0f} measured" if known else f"every text {lengths[0]} long at most"
    disk = f"; disk: {size * len(pairs) * cells / 2**20:.1f} MiB in all" if known else ""
    time, hours = "time and disk: not known until a cell has stored something", None
    if card := job.card or (here if job.spec else None):
        time, hours = _on_card(job, card, groups, left, question, mean)
    elif pace := measured_pace(job, job.cells):
        time = f"time: {sum(left) / pace / 3600:.2f} hours at {pace:.0f} tokens/s"
    fewer = f"{saving(lengths, [fork for group in groups for fork in group.forks]):.2f} times fewer than cell by cell"
    head = f"{job.name}, shard {job.shard}: {counted(cells, 'cell')} ({cells - len(unfinished)} done) of "
    common, chances = (_common(job, question), _power(job)) if whole else ("", "")
    tokens = f"left to decode: {sum(left):.3g} tokens ({source}), {fewer}"
    text = f"{head}{counted(len(pairs), 'completion')}\n{common}  {tokens}\n  {time}{disk}{chances}"
    return text, hours, sum(left)


def _common(job: Job, question: int) -> str:
    """Lines on what all shards of a job have in common: policies, what they lack, memory, sizes."""
    names = Counter(cell.policy.name for cell in job.cells)
    policies = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())
    lacks = {(kind, maker) for cell in job.cells for kind, maker in cell.policy.lacking.items()}
    lines = [
        f"  lacking: policy.{kind}, which `{maker}` makes; without it the sweep is refused" for kind, maker in lacks
    ]
    lines = [f"  policies: {policies}", *sorted(lines), f"  memory: {_memory(job, question)}"]
    return _borrowed(job) + "".join(f"{line}\n" for line in lines) + _sizes(job)


def _tokens_of(groups: Sequence[Group], lengths: Sequence[int], missing: Mapping[str, int]) -> list[float]:
    """The tokens that each group has to decode: a later one is given what an earlier one wrote before it forks.

    `missing` are the completions that a cell lacks, by cell_id.
    """
    found, forks, before = list[float](), list[int | None](), 0
    for group in groups:
        forks += group.forks
        whole = forked_tokens(lengths, forks)
        each = sum(missing.get(cell.cell_id, 0) for cell in group.cells) / len(group.cells)
        found.append((whole - before) / len(lengths) * each)
        before = whole
    return found


def _on_card(
    job: Job, card: Card, groups: Sequence[Group], left: Sequence[float], question: int, length: float
) -> tuple[str, float | None]:
    """Slots, a step, speed and hours of each group and of the job on a card; a UserError where it does not fit."""
    assert job.spec is not None
    if (sizes := weights_bytes(job.spec, job.model.dtype)) is None:
        return f"on one {card.title}: not known, because no arithmetic here fits model type {job.spec.family}", None
    (weights, read), lines, hours = sizes, list[str](), 0.0
    for group, tokens in zip(groups, left, strict=True):
        slots = _slots_on(job, card, weights, group, question)
        rows = mean_rows([cell.policy for cell in group.cells], question, length)
        step = step_seconds(
            card.bandwidth,
            weights=read,
            rows=slots * rows * _row_bytes(job),
            slots=slots,
            layers=len(job.spec.layer_kinds),
            vocabulary=job.spec.vocab_size,
        )
        found = measured_pace(job, group.cells, card)
        pace, how = found or slots / step, f"{counted(slots, 'slot')}, {1000 * step:.1f} ms a step"
        hours += tokens / pace / 3600
        how = "measured" if found else how
        lines.append(f"    {group.title}: {how}, {pace:,.0f} tokens/s, {tokens / pace / 3600:.2f} hours")
    head = f"on one {card.title}, by arithmetic fitted to steps measured on an H100, ±{OFF}%"
    head = f"{head}: {weights / GIB:.1f} GiB of weights"
    return "\n".join([head, *lines, f"    {_priced(hours, job)} in all"]), hours


def _priced(hours: float, job: Job) -> str:
    price = f" and {hours * job.cost.per_hour:,.2f} at cost.per_hour={job.cost.per_hour:g}" if job.cost.per_hour else ""
    return f"{hours:.2f} hours{price}"


def _slots_on(job: Job, card: Card, weights: int, group: Group, question: int) -> int:
    from kvsweep.harness.decode.memory import slot_bytes, step_bytes  # with torch

    assert job.spec is not None
    branches = tuple(Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in group.cells)
    request = Request(problem_id="", draw=0, prompt_ids=(0,) * question, branches=branches)
    slot = slot_bytes(job.spec.cache_shape(job.model.dtype), [request], job.decoding, job.cache)
    slot += step_bytes(job.spec)
    fitting = slots_on(card, weights, slot, len(job.problem_ids) * job.draws * len(group.cells))
    if not fitting or weights + (job.slots or 0) * slot > card.memory:
        sizes = f"weights of {weights / GIB:.1f} GiB and {counted(job.slots or 1, 'slot')} of {slot / GIB:.2f} GiB each"
        mend = "choose a larger card, fewer slots, or a lower policy.budget or decoding.max_new_tokens"
        raise UserError(f"{job.name}: {sizes} do not fit into one {card.title} ({card.memory / GIB:.0f} GiB): {mend}.")
    return job.slots or fitting


def _row_bytes(job: Job) -> float:
    """Bytes of a cached token in all layers."""
    assert job.spec is not None
    sizes = {"layers": job.spec.layers, "kv_heads": job.spec.kv_heads, "head_dim": job.spec.head_dim}
    newest, many = (
        job.cache.bytes_per_slot(**sizes, itemsize=BYTES[job.model.dtype], capacity=rows)
        for rows in (0, job.cache.group)
    )
    return (many - newest) / job.cache.group


def _borrowed(job: Job) -> str:
    """What a folder of weights takes over from an embedded model; empty for any other model."""
    model, own = job.model, WEIGHTS / job.model.name
    if job.spec is None or not own.is_dir() or str(own) in (model.place, model.adapter):
        return ""
    taken = f"with name, precision, tags and sizes (budget, window, longest text) of {model.name}"
    return f"  model: {model.place}, {taken}: choose the nearest with model=, and set model.name and model.title\n"


def _power(job: Job) -> str:
    """What the sweep can show about a setting that loses nothing; empty without a full cache beside other cells."""
    if len(job.cells) < 2 or all(cell.policy.name != "full" for cell in job.cells):
        return ""
    problems, draws = len(job.benchmark.problems), max([job.draws, *job.rounds])
    terms = {"margin": MARGIN if job.margin is None else job.margin / 100, "level": LEVEL / max(1, len(job.rounds))}
    least, most = (power(problems, draws, differ, **terms) for differ in DIFFER)
    needed = [math.ceil(pairs_to_hold(differ, **terms) / problems) for differ in DIFFER]
    return (
        f"\n  to expect: a setting that loses nothing is safe (margin {100 * terms['margin']:g} points) with a chance "
        f"of {least:.0%} to {most:.0%} on {counted(problems, 'problem')} with {counted(draws, 'draw')}, where "
        f"{DIFFER[0]:.0%} to {DIFFER[1]:.0%} of the paired answers differ; {needed[1]} to {needed[0]} draws "
        "would make the chance 95%"
    )


def _question_tokens(job: Job) -> int:
    """Tokens of the longest question: counted where the tokenizer is at hand, else reckoned from its characters."""
    longest = max((problem.prompt for problem in job.benchmark.problems), key=len)
    file = Path(job.model.path or "", "tokenizer.json")  # a GGUF file would have to be converted first
    return len(_tokenizer(file).encode(longest).ids) if file.is_file() else len(longest) // _CHARACTERS_PER_TOKEN + 1


@cache
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))


def _sizes(job: Job) -> str:
    """The rows after an eviction and the tokens until the next one, a line for each size among the cells."""
    policies = [cell.policy for cell in job.cells if isinstance(cell.policy, BudgetPolicy)]
    counts = Counter((p.size, p.budget + 1 - p.size, p.local_window) for p in policies)
    return "".join(
        f"  size: {size} rows after an eviction, {next_in} tokens to the next, window {window} ({counted(n, 'cell')})\n"
        for (size, next_in, window), n in sorted(counts.items())
    )


def _memory(job: Job, question: int) -> str:
    if job.spec is None:
        return "that of the servers"
    spec, itemsize = job.spec, BYTES[job.model.dtype]
    layers, heads, head_dim = spec.layers, spec.kv_heads, spec.head_dim
    slot = partial(job.cache.bytes_per_slot, layers=layers, kv_heads=heads, head_dim=head_dim, itemsize=itemsize)
    fixed = fixed_bytes(spec, itemsize)
    capacities = Counter(cell.policy.capacity(question, job.decoding.max_new_tokens) for cell in job.cells)
    parts = [
        f"{(slot(capacity=rows) + fixed) / 2**20:.1f} MiB a slot of {rows} tokens ({counted(count, 'cell')})"
        for rows, count in sorted(capacities.items())
    ]
    formula, newest_rows = f"2 x {layers} layers x {heads} heads x {head_dim} x {itemsize} bytes", ""
    if job.cache.is_packed:
        formula = f"{layers} layers x {heads} heads x {_row_bytes(job) / (layers * heads):g} bytes"
        newest_rows = f", and {job.cache.whole_rows} rows of 2 x {head_dim} x {itemsize} a slot"
    slots = "as many slots as fit" if job.slots is None else f"{job.slots} slots"
    if fixed:
        kinds = Counter(spec.layer_kinds)
        layers_of = [f"{counted(kinds[kind], f'{kind} layer')}" for kind in ("window", "linear") if kinds[kind]]
        newest_rows += f", and a fixed {fixed / 2**20:.1f} MiB a slot in {' and '.join(layers_of)}"
    return f"{', '.join(parts)}; {formula} a token{newest_rows}, a question of about {question} tokens; {slots}"
