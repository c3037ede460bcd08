"""What a sweep takes, estimated before it is paid (`kvsweep --dry-run`): sizes, tokens, hours, price, bytes, tasks.

No model is loaded and nothing is decoded. Lengths and speed are those of the completions that the run's cells have
stored, or what `assume.*` and `card=` say; without them every text counts as `max_new_tokens` long and hours are open.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd

from kvsweep.analysis.statistics.noninferiority import LEVEL, MARGIN, pairs_to_hold, power
from kvsweep.compression.artifacts import setting
from kvsweep.compression.config import fixed_bytes
from kvsweep.compression.policy import BudgetPolicy
from kvsweep.harness.decode.request import Branch, Request, grows
from kvsweep.harness.models.spec import BYTES
from kvsweep.harness.provenance import processor, visible_gpus
from kvsweep.harness.sweep.card import CONTEXT, GIB, OFF, Card, mean_rows, step_seconds, weights_bytes
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.estimate import forked_tokens, question_tokens, saving
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.launch import Launcher, Task
from kvsweep.harness.sweep.share import Share, lacking
from kvsweep.messages.command_line import counted
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types

_Length = row_types.view(row_types.Completion, "num_tokens")
# Bytes of completions.jsonl a token: 8.7 in 192 texts of Qwen2.5-Coder-1.5B on GSM8K.
_TOKEN_BYTES = 9
# Lines that a job's block leaves out where an earlier one has the same.
_SHOWN_ONCE = ("  lacking", "  KV budget", "  note")
_PACE_UNKNOWN = "not known until a cell has stored something; card=h100 or assume.tokens_per_second=N give an estimate"
# Instructions of a processor as Linux names them, and the parameters from which a model gains by them (docs/models.md).
_MULTIPLY_BFLOAT16 = {"avx512_bf16", "amx_bf16"}
_FASTER_IN_BFLOAT16 = 1e9
# Share of paired answers that differ between a lossless setting and the full cache: a high and a low value.
DIFFER = (0.25, 0.1)


class Group(NamedTuple):
    """Cells of a job that decode together, in slots of one capacity.

    `forks` are the first evictions of the cells of earlier groups and of these. `pace` is tokens per second, NaN where
    nothing says it, and `how` it is made up.
    """

    cells: list[Cell]
    forks: list[int | None]
    pace: float = math.nan
    how: str = ""

    @property
    def title(self) -> str:
        names = {cell.policy.name for cell in self.cells}
        return "full cache" if names == {"full"} else counted(len(self.cells), "cell")

    def tokens(self, lengths: Sequence[int]) -> float:
        """Return the tokens of a text that the group decodes: all but what earlier groups wrote before its forks.

        `lengths`: texts that stand for all.
        """
        earlier_forks = self.forks[: -len(self.cells)]
        return (forked_tokens(lengths, self.forks) - forked_tokens(lengths, earlier_forks)) / len(lengths)


@dataclass(frozen=True)
class Plan:
    """What the tasks of a job have in common: its groups, with their speeds, and the lengths of its texts in tokens.

    `share` is one of the job's shards. `lengths` are those of stored texts, or the assumed one; else the limit alone,
    and `is_at_most` is true. `head` says what the speeds rest on.
    """

    share: Share
    question: int
    groups: list[Group]
    lengths: list[int]
    is_at_most: bool
    lengths_basis: str  # whether the lengths are measured, assumed or the limit, in words
    text_bytes: float  # of one
    head: str


def describe(tasks: Sequence[Task], launcher: Launcher) -> str:
    """The jobs and their sizes, a table of what their tasks take, and how the launcher would start them."""
    plans: dict[tuple[Path, ...], Plan] = {}  # by the folders of a job's cells, which its shards have in common
    rows: list[dict[str, Any]] = []
    hours: list[float] = []  # of each task, NaN where nothing says them
    for task in tasks:
        rows_of_task: list[dict[str, Any]] = []
        for share in task:
            folders = tuple(share.job.run_directory / cell.cell_id for cell in share.job.cells)
            if folders not in plans:
                plans[folders] = _plan(share)
            rows_of_task += _rows(plans[folders], share)
        rows += rows_of_task
        hours.append(sum(row["hours"] for row in rows_of_task))
    lines: list[str] = []
    for plan in plans.values():
        block = _describe(plan)
        if launcher.gpus_of_a_task == 0:  # else the tasks run on other machines
            block += _precision(plan.share.job)
        for line in block:
            # What jobs have in common stands in the first block that has it.
            if not line.startswith(_SHOWN_ONCE) or line not in lines:
                lines.append(line)
    at_once = min(launcher.at_once(tasks), len(tasks))
    # The first job's price counts for all: in one folder, a list of prices would make jobs that share cells, which are
    # refused.
    price = tasks[0][0].job.cost.per_hour
    lines += ["", _table(pd.DataFrame(rows), hours, at_once, launcher.gpus_of_a_task, price), ""]
    lines += launcher.preview(tasks, hours)
    cells = set(chain.from_iterable(plans))
    counts = f"{counted(len(plans), 'job')} in {counted(len(tasks), 'task')}, {counted(len(cells), 'cell')}"
    return "\n".join([*lines, f"{counts}; nothing was run (--dry-run)."])


def _plan(share: Share) -> Plan:
    """The plan of a share's job, by what the run has stored or the settings assume."""
    job = share.job
    question = question_tokens(job)
    limit = job.decoding.max_new_tokens
    lengths, text_bytes, pace = _stored(job)
    assumed = job.assume.tokens
    if assumed is not None:
        if assumed > limit:
            most = f"decoding.max_new_tokens={limit} lets a text have"
            raise UserError(f"assume.tokens={assumed} is more than {most}: assume fewer, or raise the limit.")
        lengths = [assumed]
    is_at_most = not lengths
    lengths = lengths or [limit]
    mean_length = fmean(lengths)
    basis = f"mean length {mean_length:.0f} {'measured' if assumed is None else 'assumed'}"
    if is_at_most:
        basis = f"every text {limit} long at most"
    pace_basis = "measured"
    if job.assume.tokens_per_second is not None:
        pace = job.assume.tokens_per_second
        pace_basis = "assumed"
    elif job.card is not None:
        pace = math.nan  # each group has that of its slots
    groups = groups_of(job, question, pace)
    head = f"{pace:,.0f} tokens/s {pace_basis}"
    if math.isnan(pace):
        head = _PACE_UNKNOWN
        if job.card is not None:
            head, groups = _on_card(job, job.card, groups, question, mean_length)
    return Plan(share, question, groups, lengths, is_at_most, basis, text_bytes or mean_length * _TOKEN_BYTES, head)


def _on_card(job: Job, card: Card, groups: list[Group], question: int, length: float) -> tuple[str, list[Group]]:
    """What the speeds rest on, and the groups with their slots, a step and speed on a card.

    Raises UserError where one does not fit.
    """
    sizes = weights_bytes(job.spec, job.model.dtype)
    if sizes is None:
        why = f"on one {card.title}: not known, because no arithmetic here fits model type {job.spec.family}"
        return why, groups
    weights, weights_read = sizes
    timed_groups = []
    for group in groups:
        slots = _slots_on(job, card, weights, group, question)
        rows_of_slot = mean_rows([cell.policy for cell in group.cells], question, length)
        step = step_seconds(
            card.bandwidth,
            weights=weights_read,
            rows=slots * rows_of_slot * _row_bytes(job),  # in bytes
            slots=slots,
            layers=len(job.spec.layer_kinds),
            vocabulary=job.spec.vocab_size,
        )
        how = f"{counted(slots, 'slot')}, {1000 * step:.1f} ms a step"
        timed_groups.append(group._replace(pace=slots / step, how=how))
    head = f"on one {card.title}, by arithmetic fitted to steps measured on an H100, ±{OFF}%"
    return f"{head}: {weights / GIB:.1f} GiB of weights", timed_groups


def _rows(plan: Plan, share: Share) -> list[dict[str, Any]]:
    """What each group of a share has still to do, by the table's columns; NaN where nothing says it."""
    job = share.job
    pairs = set(share.pairs)
    missing = {cell.cell_id: len(pairs - job.stored(cell).pairs()) for cell in lacking(share)}  # completions
    rows = []
    for group in plan.groups:
        completions = sum(missing.get(cell.cell_id, 0) for cell in group.cells)  # a cell that is done misses none
        texts = completions / len(group.cells)  # as if the cells of a group lacked the same texts
        tokens = group.tokens(plan.lengths) * texts
        rows.append(
            {
                "": f"{job.name}, {group.title}",
                "completions": completions,
                "tokens at most": group.tokens([job.decoding.max_new_tokens]) * texts,
                "tokens expected": math.nan if plan.is_at_most else tokens,
                "hours": tokens / group.pace / 3600,
                "disk, MiB": completions * plan.text_bytes / 2**20,
            }
        )
    return rows


def _table(rows: pd.DataFrame, hours: Sequence[float], at_once: int, gpus: int, price: float | None) -> str:
    """A row for each group of a job, its tasks together, and one for all, whose hours are those until the last ends.

    `hours` are those of each task, `gpus` the GPUs of a task, `price` that of a GPU hour.
    """
    table = rows.groupby("", sort=False).agg(pd.Series.sum, skipna=False)
    total = f"in all, {counted(at_once, 'task')} at once"
    table.loc[total] = table.sum(skipna=False)
    disk = table.pop("disk, MiB")
    # GPUs are paid for all hours of all tasks, also where tasks run side by side.
    if gpus:
        table["GPU-hours"] = table["hours"] * gpus
    if price:  # without a scheduler a task has one GPU
        table["price"] = table["hours"] * (gpus or 1) * price
    table["disk, MiB"] = disk.map("{:,.1f}".format)
    table["completions"] = table["completions"].map("{:,.0f}".format)
    # Tasks side by side take their hours divided, but no less than the longest task. NaN, which comes first, stays.
    table.loc[total, "hours"] = max(sum(hours) / at_once, *hours)
    tokens = dict.fromkeys(("tokens at most", "tokens expected"), _rounded)
    return table.to_string(formatters=tokens, float_format="{:,.2f}".format, na_rep="?", index_names=False)


def _rounded(value: float) -> str:
    """A number with three digits that count: 37,500,000."""
    return f"{float(f'{value:.3g}'):,.0f}"


def groups_of(job: Job, question: int, pace: float) -> list[Group]:
    """Return the cells with slots as long as their completions, and the others, in the order that `decode` takes."""
    limit = job.decoding.max_new_tokens
    groups = []
    forks: list[int | None] = []
    for growing in (True, False):
        cells = [cell for cell in job.cells if grows(cell.policy, question, limit) == growing]
        if cells:
            forks = forks + [job.first_eviction(cell.policy, question) for cell in cells]
            groups.append(Group(cells, forks, pace))
    return groups


def _stored(job: Job) -> tuple[list[int], float, float]:
    """Return what the cells' rows say: lengths in tokens, bytes of one completion, and tokens per second with prefill.

    Without a completion there are no lengths and 0 bytes; without a pass the speed is NaN.
    """
    lengths: list[int] = []
    size = 0  # of the files of completions, in bytes
    seconds = tokens = 0.0
    for stored in map(job.stored, job.cells):
        size += sum(path.stat().st_size for path in stored.files(_Length.file).values())
        lengths += [row.num_tokens for row in stored.rows(_Length, on_bad=row_types.ignore)]
        for row in stored.rows(row_types.DecodeStats, on_bad=row_types.ignore):
            # Each cell of a decoding pass has its own row, which counts as its share of the pass.
            seconds += row.wall_seconds / row.cells
            tokens += row.tokens_total / row.cells
    return lengths, size / max(1, len(lengths)), tokens / seconds if seconds else math.nan


def _slots_on(job: Job, card: Card, weights: int, group: Group, question: int) -> int:
    """The slots of a group on a card: as many as fit, or as slots= says; a UserError where they do not fit.

    `weights` are the bytes of the weights, `question` the tokens of the longest question.
    """
    from kvsweep.harness.decode.memory import MOST_SLOTS, fitting_slots, slot_bytes, step_bytes  # with torch

    branches = tuple(Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in group.cells)
    request = Request(problem_id="", draw=0, prompt_ids=(0,) * question, branches=branches)  # only its sizes count
    slot = slot_bytes(job.spec.cache_shape(job.model.dtype), [request], job.decoding, job.cache)
    slot += step_bytes(job.spec)
    # As `auto_slots` counts them on a GPU that is there, but 0 if not even one fits.
    fitting = min(
        fitting_slots(card.memory - CONTEXT - weights, slot),
        len(job.problem_ids) * job.draws * len(group.cells),  # no more than the group has completions
        MOST_SLOTS,
    )
    # Not even one fits, or not as many as slots= says.
    if not fitting or weights + (job.slots or 0) * slot > card.memory:
        sizes = f"weights of {weights / GIB:.1f} GiB and {counted(job.slots or 1, 'slot')} of {slot / GIB:.2f} GiB each"
        hint = "choose a larger card, fewer slots, or a lower policy.budget or decoding.max_new_tokens"
        raise UserError(f"{job.name}: {sizes} do not fit into one {card.title} ({card.memory / GIB:.0f} GiB): {hint}.")
    return job.slots or fitting


def _row_bytes(job: Job) -> float:
    """Bytes of a cached token over all layers: those of a group that may be packed together, divided."""
    group = job.cache.group
    return (_cache_bytes(job, group) - _cache_bytes(job, 0)) / group


def _cache_bytes(job: Job, capacity: int) -> int:
    """Bytes of a slot's cache with room for this many tokens, over all layers."""
    return job.cache.bytes_per_slot(job.spec, BYTES[job.model.dtype], capacity)


def _describe(plan: Plan) -> list[str]:
    """A job's cells, policies, what they lack, memory, sizes, speed and chances."""
    job = plan.share.job
    done = len(job.cells) - len(lacking(plan.share))
    policies = Counter[str]()
    artifacts = set[tuple[str, str]]()
    for cell in job.cells:
        policies[cell.policy.name] += 1
        artifacts.update(cell.policy.lacking.items())
    names = [f"{name} ({count})" if count > 1 else name for name, count in policies.items()]
    cells = counted(len(job.cells), "cell")
    completions = counted(len(plan.share.dealt), "completion")
    lines = [f"{job.name}: {cells} ({done} done) of {completions}", f"  policies: {', '.join(names)}"]
    for kind, command in sorted(artifacts):
        lines.append(f"  lacking: {setting(kind)}, which `{command}` makes; without it the sweep is refused")
    lines += [f"  memory: {_memory(job, plan.question)}", *_sizes(job), *_notes(plan)]
    # The grid decodes shared tokens once; compare it with all cells decoded by themselves. The last group's forks are
    # all cells'.
    times_fewer = saving(plan.lengths, plan.groups[-1].forks)
    lines.append(f"  tokens: {plan.lengths_basis}, {times_fewer:.2f} times fewer than cell by cell")
    lines.append(f"  speed: {plan.head}")
    for group in plan.groups:
        if group.how:
            lines.append(f"    {group.title}: {group.how}, {group.pace:,.0f} tokens/s")
    return lines + _power(job)


def _power(job: Job) -> list[str]:
    """What the sweep can show about a setting that loses nothing; nothing without a full cache beside other cells."""
    if len(job.cells) < 2 or all(cell.policy.name != "full" for cell in job.cells):
        return []
    problems = len(job.benchmark.problems)
    draws = max([job.draws, *job.rounds])  # of the last round, if there are rounds
    margin = MARGIN if job.margin is None else job.margin / 100
    level = LEVEL / max(1, len(job.rounds))  # the rounds share it, as in `decide_rounds`
    # Of both the first value is where many answers differ, the second where few do.
    chances = []
    needed_draws = []
    for differ in DIFFER:
        chance = power(problems, draws, differ, margin=margin, level=level)
        chances.append(f"{chance:.0%}")
        pairs = pairs_to_hold(differ, margin=margin, level=level)
        needed_draws.append(math.ceil(pairs / problems))
    return [
        f"  to expect: a setting that loses nothing is safe (margin {100 * margin:g} points) with a chance "
        f"of {' to '.join(chances)} on {counted(problems, 'problem')} with {counted(draws, 'draw')}, where "
        f"{DIFFER[0]:.0%} to {DIFFER[1]:.0%} of the paired answers differ; {needed_draws[1]} to {needed_draws[0]} "
        "draws would make the chance 95%"
    ]


def _sizes(job: Job) -> list[str]:
    """The KV budgets among the cells, a line for each trigger and window."""
    sizes = defaultdict[tuple[int, int, str], set[int]](set)
    for cell in job.cells:
        policy = cell.policy
        if isinstance(policy, BudgetPolicy):
            beside = " beside the question" if policy.question == "on_top" else ""
            sizes[policy.budget, policy.local_window, beside].add(policy.size)
    lines = []
    for (trigger, window, beside), tokens in sorted(sizes.items()):
        budgets = ", ".join(map(str, sorted(tokens)))
        lines.append(f"  KV budget: {budgets} tokens{beside}, trigger {trigger}{beside}, window {window}")
    return lines


def _notes(plan: Plan) -> list[str]:
    """Warn of KV budgets that are smaller than the question, and of cells in which nothing would be evicted."""
    job = plan.share.job
    question = plan.question
    longest = max(plan.lengths)
    smaller: list[int] = []  # KV budgets
    compressed = idle = 0
    for cell in job.cells:
        policy = cell.policy
        if policy.trigger(question) is None:  # never evicts, like the full cache
            continue
        compressed += 1
        if isinstance(policy, BudgetPolicy) and policy.question_rule != "on_top" and policy.size < question:
            smaller.append(policy.size)
        first = job.first_eviction(policy, question)
        idle += first is None or first >= longest
    of_cells = f"of {counted(compressed, 'compressed cell')}"
    notes = []
    if smaller:
        few = f"in {len(smaller)} {of_cells} the KV budget is smaller than the"
        hint = "policy.question=on_top keeps the question beside the KV budget"
        notes.append(f"  note: {few} longest question ({min(smaller)} and {question} tokens), which is evicted: {hint}")
    if idle:
        few = f"in {idle} {of_cells} nothing would be evicted"
        notes.append(f"  note: {few}, since texts have at most {longest} tokens: choose a smaller policy.budget")
    return notes


def _precision(job: Job) -> list[str]:
    """Name the faster precision where steps run on this machine's processor."""
    if not job.source.local or job.card is not None:
        return []  # the steps run on a server, or on the GPU that card= names
    instructions = set(processor("flags").split())
    multiplies = not _MULTIPLY_BFLOAT16.isdisjoint(instructions)
    note = ""
    # Where the processor names no instructions, nothing is said.
    if job.model.dtype == "bfloat16" and instructions and not multiplies:
        note = "  note: this processor has no instructions for bfloat16: model.dtype=float32 is faster"
    if job.model.dtype == "float32" and multiplies and (job.spec.parameters or 0) >= _FASTER_IN_BFLOAT16:
        note = "  note: this processor multiplies bfloat16: model.dtype=bfloat16 is faster, in half of the memory"
    # GPUs are asked for last, since that runs a program.
    if not note or (job.model.device != "cpu" and visible_gpus()):
        return []
    return [note]


def _memory(job: Job, question: int) -> str:
    """What a slot of each capacity takes, how that is computed from the model's sizes, and the number of slots."""
    if not job.source.local:
        return "that of the servers"
    spec = job.spec
    itemsize = BYTES[job.model.dtype]
    bytes_of_fixed_layers = fixed_bytes(spec, itemsize)
    capacities = Counter(cell.policy.capacity(question, job.decoding.max_new_tokens) for cell in job.cells)
    parts = []
    for rows, count in sorted(capacities.items()):
        mebibytes = (_cache_bytes(job, rows) + bytes_of_fixed_layers) / 2**20
        parts.append(f"{mebibytes:.1f} MiB a slot of {rows} tokens ({counted(count, 'cell')})")
    heads = f"{spec.layers} layers x {spec.kv_heads} heads"
    # A row is a key and a value: hence the 2.
    formula = f"2 x {heads} x {spec.head_dim} x {itemsize} bytes"
    extra = ""
    if job.cache.is_packed:
        formula = f"{heads} x {_row_bytes(job) / (spec.layers * spec.kv_heads):g} bytes"
        if job.cache.whole_rows:
            extra = f", and {job.cache.whole_rows} rows of 2 x {spec.head_dim} x {itemsize} a slot"
    if bytes_of_fixed_layers:
        kinds = Counter(spec.layer_kinds)
        layers = [counted(kinds[kind], f"{kind} layer") for kind in ("window", "linear") if kinds[kind]]
        extra += f", and a fixed {bytes_of_fixed_layers / 2**20:.1f} MiB a slot in {' and '.join(layers)}"
    slots = "as many slots as fit" if job.slots is None else f"{job.slots} slots"
    return f"{', '.join(parts)}; {formula} a token{extra}, a question of about {question} tokens; {slots}"
