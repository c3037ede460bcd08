"""Stored completions decoded a second time, as a sweep decodes, and what may have made a difference."""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvsweep.analysis.notation import setting_of
from kvsweep.compression.source import is_same_code
from kvsweep.harness.decode.request import Branch
from kvsweep.harness.replay.references import Text
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.cell_store import OpenCells
from kvsweep.harness.sweep.execute import work_through
from kvsweep.harness.sweep.fill import engine_of, fill, loaded
from kvsweep.harness.sweep.job import UNTRACKED, Job
from kvsweep.harness.sweep.share import Share
from kvsweep.harness.verify.stored import CheckedCell, Row, State
from kvsweep.messages.errors import UserError
from kvsweep.run_files import row_types
from kvsweep.run_files.row_types import Completion, Pair
from kvsweep.run_files.run_reader import read_provenance

# What bits can depend on beside the cell, by the beginnings of its names in a decoding pass.
_CIRCUMSTANCES = (
    "policy_code",
    "arithmetic.",
    "hardware.processor",
    "hardware.gpus",
    "code.packages.",
    "code.python",
    "code.git_",
)


def drawn(stored: Mapping[str, Sequence[Pair]], count: int, seed: int) -> list[tuple[str, Pair]]:
    """Draw (cell_id, pair) of stored completions: cells in turn, and in each a problem and draw that came least yet."""
    generator = random.Random(seed)
    remaining: dict[str, list[Pair]] = {}  # the pairs of each cell that are not drawn yet, in a drawn order
    for cell_id, pairs in sorted(stored.items()):
        if pairs:
            remaining[cell_id] = generator.sample(sorted(pairs), len(pairs))
    order = generator.sample(list(remaining), len(remaining))
    number = min(count, sum(map(len, stored.values())))
    problems = Counter[str]()  # how often each was drawn
    draws = Counter[int]()
    chosen = list[tuple[str, Pair]]()
    for cell_id in itertools.cycle(order):
        if len(chosen) == number:
            break
        if remaining[cell_id]:
            pair = min(remaining[cell_id], key=lambda pair: (problems[pair[0]], draws[pair[1]]))
            remaining[cell_id].remove(pair)
            problem_id, draw = pair
            problems[problem_id] += 1
            draws[draw] += 1
            chosen.append((cell_id, pair))
    return chosen


def decoded_again(cells: Mapping[str, CheckedCell], count: int, seed: int) -> Iterator[Row]:
    """Decode drawn completions again, at most `count`, job by job, each model loaded once."""
    stored: dict[str, list[Pair]] = {}
    job_of: dict[str, Job] = {}  # by cell_id
    for cell_id, cell in cells.items():
        if cell.today is not None:
            job, _ = cell.today
            job_of[cell_id] = job
            problem_ids = set(job.problem_ids)
            stored[cell_id] = [pair for pair in cell.stored.pairs() if pair[0] in problem_ids]
    chosen = defaultdict[str, set[Pair]](set)
    for cell_id, pair in drawn(stored, count, seed):
        chosen[cell_id].add(pair)
    jobs = {id(job): job for job in job_of.values()}  # each once; a job has no hash
    by_model = sorted(jobs.values(), key=lambda job: str(job.model))  # `loaded` keeps only the last model
    for job in by_model:
        # Of a cell that several configurations began only today's job decodes.
        cells_today = tuple(cell for cell in job.cells if cell.cell_id in chosen and job_of[cell.cell_id] is job)
        if cells_today:
            with tempfile.TemporaryDirectory() as folder:
                again = replace(job, cells=cells_today, run_directory=Path(folder, "verify"), tracker=UNTRACKED)
                yield from _compared(again, cells, chosen)


def _compared(job: Job, cells: Mapping[str, CheckedCell], chosen: Mapping[str, Collection[Pair]]) -> Iterator[Row]:
    """Decode chosen completions of a job's cells into its empty folder, and compare them with the stored ones."""
    error = _decode(job, chosen)
    for cell in job.cells:
        checked = cells[cell.cell_id]
        again = job.stored(cell)
        made = {row.key: row for row in again.rows(Completion)}
        today: Mapping[str, Any] = {}  # the pass that has just decoded; none if an error came first
        if made:
            origin = read_provenance(again.folder / row_types.PROVENANCE_FILE)
            today = origin["decoding_passes"][-1]
        # Used only beside a completion of today, so not without its pass.
        circumstances = "; ".join(differing(checked.passes, today))
        setting = setting_of(cell.policy.identity())
        for then in checked.stored.rows(Completion, on_bad=row_types.ignore):
            if then.key not in chosen[cell.cell_id]:
                continue
            now = made.get(then.key)
            difference: dict[str, Any] = {}
            if now is None:  # an error ended the decoding before
                state: State = "cannot"
                text = cause = str(error)
            elif now == then:
                state = "same"
                text = f"{then.num_tokens} tokens"
                cause = circumstances
            else:
                state = "other"
                difference = _difference(job, cell, then, now)
                cause = circumstances or _unexplained(today)
                text = f"{_where(difference)}; {cause}"
            facts = {
                "cell_id": cell.cell_id,
                "setting": setting,
                "cause": cause,
                "problem_id": then.problem_id,
                "draw": then.draw,
                "tokens": then.num_tokens,
                **difference,
            }
            title = f"{setting}, {then.problem_id} draw {then.draw} ({cell.cell_id})"
            yield Row(name="completion", state=state, text=f"{title}: {text}", facts=facts)


def _decode(job: Job, chosen: Mapping[str, Collection[Pair]]) -> Exception | None:
    """Decode the chosen completions of a job's cells, as a sweep does; return the error that ended it.

    `chosen` are the pairs of each cell, by cell_id.
    """
    pairs = set[Pair]()
    for cell in job.cells:
        pairs.update(chosen[cell.cell_id])

    def fill_chosen(share: Share, work: OpenCells) -> None:
        for cell_id, store in work.stores.items():
            store.finished_pairs |= pairs.difference(chosen[cell_id])  # as if these were decoded
        fill(work)

    with redirect_stdout(sys.stderr):
        errors = work_through([Share(job=job, dealt=sorted(pairs))], fill_chosen)
    for error in errors:
        if not isinstance(error, UserError):  # a fault of kvsweep, not of what is verified
            raise error
    return errors[0] if errors else None


def differing(passes: Sequence[Mapping[str, Any]], today: Mapping[str, Any]) -> list[str]:
    """The circumstances in which today's decoding pass differs from at least one of a cell's passes, in words."""
    values_now = dict(row_types.leaves(today))
    notes = dict[str, None]()
    for earlier in passes:
        for name, then in row_types.leaves(earlier):
            now = values_now.get(name)
            # None: an earlier version did not record it.
            if not name.startswith(_CIRCUMSTANCES) or then in (None, now):
                continue
            if name == "policy_code" and is_same_code(then, str(now)):
                continue
            notes[f"another {name} ({then}, now {now})"] = None
    return list(notes)


def _unexplained(today: Mapping[str, Any]) -> str:
    if not today["arithmetic"]["invariant"]:
        return "with invariant=false the bits depend on what is decoded together"
    return "no code, version or machine that is recorded differs, so the row may have been changed"


def _where(facts: Mapping[str, Any]) -> str:
    """Say where two completions differ, by the facts of `_difference`."""
    if "first_other" not in facts:
        return f"the same tokens, other {', '.join(facts['fields'])}"
    where = f"first differs at token {facts['first_other']}: stored {facts['stored_token']!r}, now {facts['token']!r}"
    return where if facts["gap"] is None else f"{where}, whose logits differ by {facts['gap']:+.2g}"


def _difference(job: Job, cell: Cell, then: Completion, now: Completion) -> dict[str, Any]:
    """The fields that differ, and the first token that does: its index, both tokens, and the gap of their logits.

    A token is None behind the end of its text, and the gap is None if a token is or cannot be replayed; if all tokens
    are equal, the fields alone.
    """
    fields = [name for name in then.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    pairs = itertools.zip_longest(then.token_ids, now.token_ids)  # a text may be the start of the other
    first = next((index for index, (stored, other) in enumerate(pairs) if stored != other), None)
    if first is None:
        return {"fields": fields}
    model = loaded(job.model)
    # A list of one token, or of none behind the end of a text.
    ids = then.token_ids[first : first + 1]
    other_ids = now.token_ids[first : first + 1]
    gap = None
    # A changed row may name any number as a token.
    if ids and other_ids and ids[0] < model.network.config.vocab_size:
        gap = _gap(job, cell, then, first, other_ids[0])
    stored_token = model.dialogue.decode(ids) if ids else None
    token = model.dialogue.decode(other_ids) if other_ids else None
    return {"fields": fields, "first_other": first, "stored_token": stored_token, "token": token, "gap": gap}


def _gap(job: Job, cell: Cell, then: Completion, first: int, other: int) -> float | None:
    """The logit of the stored token at `first` minus that of another one, by today's model behind the tokens before.

    None if the replay ends before it.
    """
    [prompt] = [problem.prompt for problem in job.benchmark.problems if problem.id == then.problem_id]
    model = loaded(job.model)
    text = Text(pair=then.key, prompt=prompt, token_ids=tuple(then.token_ids))
    request = text.request(model, first + 1, [Branch(cell_id=cell.cell_id, policy=cell.policy)])
    for fed in itertools.chain.from_iterable(engine_of(job, [request], model, 1).replay([request])):
        if fed.start <= first < fed.start + len(fed.hidden):  # the part with the state that predicts this token
            logits = model.logits(fed.hidden[first - fed.start][None]).float()[0]
            return float(logits[then.token_ids[first]] - logits[other])
    return None
