"""What a sweep takes, told before it is paid (`kvsweep --dry-run`): sizes, tokens, hours, a price, bytes, the tasks.

No model is loaded and nothing is decoded. Lengths and speed are those of the completions that the run's cells have
stored, or what `assume.*` and `card=` say; without them every text counts as `max_new_tokens` long and hours are open.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, pairs_to_hold, power
from kvsweep.compression.config import fixed_bytes
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.decode.request import Branch, Request
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
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.estimate import forked_tokens, question_tokens, saving
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import Launcher, Task
from kvsweep.harness.sweep.share import Share, lacking
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.run_reader import StoredCell

_Length = row_types.view(row_types.Completion, "num_tokens")
# Bytes of completions.jsonl a token: 8.7 in 192 texts of Qwen2.5-Coder-1.5B on GSM8K.
_TOKEN_BYTES = 9
_NOT_KNOWN = "not known until a cell has stored something; card=h100 or assume.tokens_per_second=N give an estimate"
# Lines that a block leaves out where an earlier one has the same.
_SAID_ONCE = ("  lacking", "  KV budget", "  note")
# Share of paired answers that differ between a lossless setting and the full cache: a high and a low value.
DIFFER = (0.25, 0.1)


class Group(NamedTuple):
    """Cells of a job that decode together, in slots of one capacity; `forks` are their first evictions."""

    cells: list[Cell]
    forks: list[int | None]

    @property
    def title(self) -> str:
        names = {cell.policy.name for cell in self.cells}
        return "full cache" if names == {"full"} else counted(len(self.cells), "cell")


class Part(NamedTuple):
    """What a group of a task's cells has still to do; None where nothing says the expected tokens or the hours."""

    job: str
    title: str
    completions: int
    most: float
    expected: float | None
    hours: float | None
    disk: float  # bytes


class Speed(NamedTuple):
    """Tokens per second of a group, None where nothing says it, and how it is known."""

    pace: float | None
    how: str


@dataclass(frozen=True)
class Plan:
    """What the tasks of a job have in common: its groups, the lengths of its texts in tokens, its speed.

    `lengths` are those of stored texts, or the assumed one, or none; `head` says what the speeds rest on.
    """

    job: Job
    question: int
    groups: list[Group]
    lengths: list[int]
    source: str
    text_bytes: float | None
    head: str
    speeds: list[Speed]


def describe(tasks: Sequence[Task], launcher: Launcher) -> str:
    """The jobs and their sizes, a table of what their tasks take, and how the launcher would start them."""
    shares = [share for task in tasks for share in task]
    here = card_here() if any(share.job.source.local and not share.job.card for share in shares) else None
    of_job = {_key(share.job): share for share in shares}
    plans = {key: _plan(share.job, here) for key, share in of_job.items()}
    parts = [[part for share in task for part in _parts(plans[_key(share.job)], share)] for task in tasks]
    hours = [_sum([part.hours for part in task]) for task in parts]
    said, blocks = set[str](), list[str]()
    for key, plan in plans.items():
        lines = _describe(plan, of_job[key])
        blocks += [line for line in lines if line not in said]
        said |= {line for line in lines if line.startswith(_SAID_ONCE)}
    cells = {(plan.job.run_directory, cell.cell_id) for plan in plans.values() for cell in plan.job.cells}
    counts = f"{counted(len(plans), 'job')} in {counted(len(tasks), 'task')}, {counted(len(cells), 'cell')}"
    at_once = min(launcher.at_once(tasks), len(tasks))
    table = _table([part for task in parts for part in task], hours, at_once, launcher.gpus_of_a_task, shares[0].job)
    return "\n".join(
        [*blocks, "", table, "", *launcher.preview(tasks, hours), f"{counts}; nothing was run (--dry-run)."]
    )


def _key(job: Job) -> tuple[Any, ...]:
    """The same for the shards of a job."""
    return job.run_directory, *(cell.cell_id for cell in job.cells)


def _sum(values: Sequence[float | None]) -> float | None:
    """The sum; None if one of the values is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _plan(job: Job, here: Card | None) -> Plan:
    question, (known, size) = question_tokens(job), stored_texts(job)
    groups, limit, assumed = groups_of(job, question), job.decoding.max_new_tokens, job.assume.tokens
    if assumed is not None and assumed > limit:
        most = f"decoding.max_new_tokens={limit} lets a text have"
        raise UserError(f"assume.tokens={assumed} is more than {most}: assume fewer, or raise the limit.")
    lengths = [assumed] if assumed else known
    source = f"every text {limit} long at most"
    if lengths:
        source = f"mean length {sum(lengths) / len(lengths):.0f} {'assumed' if assumed else 'measured'}"
    mean = sum(lengths) / len(lengths) if lengths else limit
    head, speeds = _speeds(job, groups, question, mean, job.card or (here if job.source.local else None))
    return Plan(job, question, groups, lengths, source, size if known else None, head, speeds)


def _speeds(
    job: Job, groups: Sequence[Group], question: int, length: float, card: Card | None
) -> tuple[str, list[Speed]]:
    """What the speeds rest on, and the speed of each group: assumed, of a card, or measured on this machine."""
    if pace := job.assume.tokens_per_second:
        return f"{pace:,.0f} tokens/s assumed", [Speed(pace, "")] * len(groups)
    if card is not None:
        return _on_card(job, card, groups, question, length)
    pace = measured_pace(job, job.cells)
    return (f"{pace:,.0f} tokens/s measured" if pace else _NOT_KNOWN), [Speed(pace, "")] * len(groups)


def _on_card(job: Job, card: Card, groups: Sequence[Group], question: int, length: float) -> tuple[str, list[Speed]]:
    """Slots, a step and speed of each group on a card; a UserError where it does not fit."""
    if (sizes := weights_bytes(job.spec, job.model.dtype)) is None:
        why = f"on one {card.title}: not known, because no arithmetic here fits model type {job.spec.family}"
        return why, [Speed(None, "")] * len(groups)
    (weights, read), found = sizes, list[Speed]()
    for group in groups:
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
        measured = measured_pace(job, group.cells, card)
        how = "measured" if measured else f"{counted(slots, 'slot')}, {1000 * step:.1f} ms a step"
        found.append(Speed(measured or slots / step, how))
    head = f"on one {card.title}, by arithmetic fitted to steps measured on an H100, ±{OFF}%"
    return f"{head}: {weights / GIB:.1f} GiB of weights", found


def _parts(plan: Plan, share: Share) -> list[Part]:
    """What each group of a share has still to do."""
    job, pairs = plan.job, set(share.pairs)
    missing = {cell.cell_id: len(pairs - job.stored(cell).pairs()) for cell in lacking(share)}
    limit = job.decoding.max_new_tokens
    most = _tokens_of(plan.groups, [limit], missing)
    expected = _tokens_of(plan.groups, plan.lengths, missing) if plan.lengths else [None] * len(most)
    mean = sum(plan.lengths) / len(plan.lengths) if plan.lengths else limit
    size = plan.text_bytes or mean * _TOKEN_BYTES
    parts = []
    for group, speed, longest, tokens in zip(plan.groups, plan.speeds, most, expected, strict=True):
        texts = sum(missing.get(cell.cell_id, 0) for cell in group.cells)
        hours = None if speed.pace is None else (longest if tokens is None else tokens) / speed.pace / 3600
        parts.append(Part(job.name, group.title, texts, longest, tokens, hours, texts * size))
    return parts


def _describe(plan: Plan, share: Share) -> list[str]:
    """A job's cells, policies, what they lack, memory, sizes, speed and chances."""
    job, question = plan.job, plan.question
    done = len(job.cells) - len(lacking(share))
    names = Counter(cell.policy.name for cell in job.cells)
    policies = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in names.items())
    lacks = {(kind, maker) for cell in job.cells for kind, maker in cell.policy.lacking.items()}
    forks = [fork for group in plan.groups for fork in group.forks]
    fewer = f"{saving(plan.lengths or [job.decoding.max_new_tokens], forks):.2f} times fewer than cell by cell"
    return [
        f"{job.name}: {counted(len(job.cells), 'cell')} ({done} done) of {counted(len(share.dealt), 'completion')}",
        *_borrowed(job),
        f"  policies: {policies}",
        *sorted(f"  lacking: policy.{kind}, which `{by}` makes; without it the sweep is refused" for kind, by in lacks),
        f"  memory: {_memory(job, question)}",
        *_sizes(job),
        *_notes(plan),
        f"  tokens: {plan.source}, {fewer}",
        f"  speed: {plan.head}",
        *(
            f"    {group.title}: {speed.how}, {speed.pace:,.0f} tokens/s"
            for group, speed in zip(plan.groups, plan.speeds, strict=True)
            if speed.pace and speed.how
        ),
        *_power(job),
    ]


def _table(parts: Sequence[Part], hours: Sequence[float | None], at_once: int, gpus: int, job: Job) -> str:
    """A row for each group of a job, its tasks together, and one for all, whose hours are those until the last ends."""
    import pandas as pd

    def row(name: str, parts: Sequence[Part], hours: float | None) -> dict[str, str]:
        whole, expected = _sum([part.hours for part in parts]), _sum([part.expected for part in parts])
        price = None if whole is None else whole * (gpus or 1) * (job.cost.per_hour or 0)
        return {
            "": name,
            "completions": f"{sum(part.completions for part in parts):,}",
            "tokens at most": _rounded(sum(part.most for part in parts)),
            "expected": _rounded(expected),
            "hours": _hundredths(hours),
            **({"GPU-hours": _hundredths(None if whole is None else whole * gpus)} if gpus else {}),
            **({"price": _hundredths(price)} if job.cost.per_hour else {}),
            "disk, MiB": f"{sum(part.disk for part in parts) / 2**20:,.1f}",
        }

    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(f"{part.job}, {part.title}", []).append(part)
    rows = [row(name, own, _sum([part.hours for part in own])) for name, own in groups.items()]
    together = _sum(hours)
    ends = None if together is None else max(together / at_once, *(one or 0 for one in hours))
    rows.append(row(f"in all, {counted(at_once, 'task')} at once", parts, ends))
    return pd.DataFrame(rows).set_index("").rename_axis(None).to_string()


def _rounded(value: float | None) -> str:
    """A number with three digits that count: 37,500,000."""
    return "?" if value is None else f"{float(f'{value:.3g}'):,.0f}"


def _hundredths(value: float | None) -> str:
    return "?" if value is None else f"{value:,.2f}"


def groups_of(job: Job, question: int) -> list[Group]:
    """Return the cells with slots as long as their completions, and the others, in the order that `decode` takes."""

    source, limit = job.source, job.decoding.max_new_tokens
    grows = [source.grows(cell.policy, question, limit) for cell in job.cells]
    parts = [[cell for cell, one in zip(job.cells, grows, strict=True) if one == growing] for growing in (True, False)]
    return [Group(cells, [source.first_eviction(cell.policy, question) for cell in cells]) for cells in parts if cells]


def stored_texts(job: Job) -> tuple[list[int], float]:
    """Return the lengths in tokens of the cells' stored completions, and the bytes of one completion."""
    lengths: list[int] = []
    size = 0
    for stored in map(job.stored, job.cells):
        size += sum(path.stat().st_size for path in stored.files(_Length.file).values())
        lengths += [row.num_tokens for row in stored.rows(_Length, on_bad=row_types.ignore)]
    return lengths, size / max(1, len(lengths))


def measured_pace(job: Job, cells: Sequence[Cell], card: Card | None = None) -> float | None:
    """Return live tokens per second, with prefill, of these cells' stored rows; with `card`, only rows from it."""
    seconds = tokens = 0.0
    for stored in map(job.stored, cells):
        if card is not None and not _decoded_on(card, stored):
            continue
        for row in stored.rows(row_types.DecodeStats, on_bad=row_types.ignore):
            # Each cell of a decoding pass has its own row, which counts as its share of the pass.
            seconds += row.wall_seconds / row.cells
            tokens += row.tokens_total / row.cells
    return tokens / seconds if seconds else None


def _decoded_on(card: Card, stored: StoredCell) -> bool:
    unread = list[Path]()
    with suppress(KeyError, TypeError):
        origins = stored.provenances(lambda path, _: unread.append(path))
        named = [(origin["hardware"]["gpus"] or [""])[0] for _, origin in origins]
        return bool(named) and not unread and all(card_of(name) == card for name in named)
    return False


def _tokens_of(groups: Sequence[Group], lengths: Sequence[int], missing: Mapping[str, int]) -> list[float]:
    """Return the tokens that each group decodes: a later group gets what an earlier one wrote before its forks.

    `missing`: each cell's missing completions, by cell_id.
    """
    found, forks, before = list[float](), list[int | None](), 0
    for group in groups:
        forks += group.forks
        whole = forked_tokens(lengths, forks)
        each = sum(missing.get(cell.cell_id, 0) for cell in group.cells) / len(group.cells)
        found.append((whole - before) / len(lengths) * each)
        before = whole
    return found


def _slots_on(job: Job, card: Card, weights: int, group: Group, question: int) -> int:
    from kvsweep.harness.decode.memory import slot_bytes, step_bytes  # with torch

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
    """Bytes of a cached token over all layers."""
    sizes = {"layers": job.spec.layers, "kv_heads": job.spec.kv_heads, "head_dim": job.spec.head_dim}
    newest, many = (
        job.cache.bytes_per_slot(**sizes, itemsize=BYTES[job.model.dtype], capacity=rows)
        for rows in (0, job.cache.group)
    )
    return (many - newest) / job.cache.group


def _borrowed(job: Job) -> list[str]:
    """What a folder of weights takes over from an embedded model; none for any other model."""
    model, own = job.model, WEIGHTS / job.model.name
    if not job.source.local or not own.is_dir() or str(own) in (model.place, model.adapter):
        return []
    taken = f"with name, precision, tags and sizes (trigger, window, longest text) of {model.name}"
    return [f"  model: {model.place}, {taken}: choose the nearest with model=, and set model.name and model.title"]


def _power(job: Job) -> list[str]:
    """What the sweep can show about a setting that loses nothing; nothing without a full cache beside other cells."""
    if len(job.cells) < 2 or all(cell.policy.name != "full" for cell in job.cells):
        return []
    problems, draws = len(job.benchmark.problems), max([job.draws, *job.rounds])
    terms = {"margin": MARGIN if job.margin is None else job.margin / 100, "level": LEVEL / max(1, len(job.rounds))}
    chances = dict.fromkeys(f"{power(problems, draws, differ, **terms):.0%}" for differ in DIFFER)
    needed = [math.ceil(pairs_to_hold(differ, **terms) / problems) for differ in DIFFER]
    return [
        f"  to expect: a setting that loses nothing is safe (margin {100 * terms['margin']:g} points) with a chance "
        f"of {' to '.join(chances)} on {counted(problems, 'problem')} with {counted(draws, 'draw')}, where "
        f"{DIFFER[0]:.0%} to {DIFFER[1]:.0%} of the paired answers differ; {needed[1]} to {needed[0]} draws "
        "would make the chance 95%"
    ]


def _sizes(job: Job) -> list[str]:
    """The KV budgets among the cells, a line for each trigger and window."""
    policies = [cell.policy for cell in job.cells if isinstance(cell.policy, BudgetPolicy)]
    found: dict[tuple[int, int, str], set[int]] = {}
    for policy in policies:
        beside = " beside the question" if policy.question == "on_top" else ""
        found.setdefault((policy.budget, policy.local_window, beside), set()).add(policy.size)
    return [
        f"  KV budget: {', '.join(map(str, sorted(kept)))} tokens{beside}, trigger {trigger}{beside}, window {window}"
        for (trigger, window, beside), kept in sorted(found.items())
    ]


def _notes(plan: Plan) -> list[str]:
    """Warn of KV budgets that are smaller than the question, and of cells in which nothing would be evicted."""
    if not plan.job.source.local:
        return []
    notes, question = list[str](), plan.question
    policies = [cell.policy for cell in plan.job.cells]
    compressed = [policy for policy in policies if policy.trigger(question) is not None]
    inside = [one for one in compressed if isinstance(one, BudgetPolicy) and one.question_rule != "on_top"]
    if smaller := [policy.size for policy in inside if policy.size < question]:
        few = f"in {len(smaller)} of {counted(len(compressed), 'compressed cell')} the KV budget is smaller than the"
        kept = "policy.question=on_top keeps the question beside the KV budget"
        notes.append(f"  note: {few} longest question ({min(smaller)} and {question} tokens), which is evicted: {kept}")
    longest = max(plan.lengths, default=plan.job.decoding.max_new_tokens)
    first = [plan.job.source.first_eviction(policy, question) for policy in compressed]
    idle = [step for step in first if step is None or step >= longest]
    if idle:
        few = f"in {len(idle)} of {counted(len(compressed), 'compressed cell')} nothing would be evicted"
        notes.append(f"  note: {few}, since texts have at most {longest} tokens: choose a smaller policy.budget")
    return notes


def _memory(job: Job, question: int) -> str:
    if not job.source.local:
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
        if job.cache.whole_rows:
            newest_rows = f", and {job.cache.whole_rows} rows of 2 x {head_dim} x {itemsize} a slot"
    slots = "as many slots as fit" if job.slots is None else f"{job.slots} slots"
    if fixed:
        kinds = Counter(spec.layer_kinds)
        layers_of = [f"{counted(kinds[kind], f'{kind} layer')}" for kind in ("window", "linear") if kinds[kind]]
        newest_rows += f", and a fixed {fixed / 2**20:.1f} MiB a slot in {' and '.join(layers_of)}"
    return f"{', '.join(parts)}; {formula} a token{newest_rows}, a question of about {question} tokens; {slots}"
