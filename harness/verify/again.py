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
from kvsweep.harness.sweep.cell_store import OpenCells
from kvsweep.harness.sweep.execute import work_through
from kvsweep.harness.sweep.fill import fill, loaded
from kvsweep.harness.sweep.job import UNTRACKED, Job
from kvsweep.harness.sweep.share import Share
from kvsweep.harness.verify.stored import CheckedCell, Row, State
from kvsweep.messages.command_line import counted
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


def drawn(stored: Mapping[str, Sequence[Pair]], seed: int) -> Iterator[tuple[str, Pair]]:
    """Yield (cell_id, pair) of all stored completions: cells in turn, of each the problem and draw that came least."""
    generator = random.Random(seed)
    remaining: dict[str, list[Pair]] = {}  # the pairs of each cell that are not drawn yet, in a drawn order
    for cell_id, pairs in sorted(stored.items()):
        if pairs:
            remaining[cell_id] = generator.sample(sorted(pairs), len(pairs))
    turn = generator.sample(list(remaining), len(remaining))
    times = Counter[str | int]()  # how often each problem and each draw was drawn
    while turn:
        for cell_id in turn:
            pair = min(remaining[cell_id], key=lambda pair: [times[part] for part in pair])
            remaining[cell_id].remove(pair)
            times.update(pair)
            yield cell_id, pair
        turn = [cell_id for cell_id in turn if remaining[cell_id]]


def decoded_again(cells: Mapping[str, CheckedCell], count: int, seed: int) -> Iterator[Row]:
    """Decode at most `count` drawn completions again, job by job; then say what differs and changed no bit."""
    stored: dict[str, list[Pair]] = {}
    jobs: dict[int, Job] = {}  # each once; a job has no hash
    for cell_id, cell in cells.items():
        if cell.today is not None:
            job, _ = cell.today
            jobs[id(job)] = job
            problem_ids = set(job.problem_ids)
            stored[cell_id] = [pair for pair in cell.stored.pairs() if pair[0] in problem_ids]
    chosen = defaultdict[str, set[Pair]](set)
    for cell_id, pair in itertools.islice(drawn(stored, seed), count):
        chosen[cell_id].add(pair)
    causes = Counter[str]()
    for job in sorted(jobs.values(), key=lambda job: str(job.model)):  # `loaded` keeps only the last model
        # Of a cell that several configurations began only today's job decodes.
        chosen_cells = [cell for cell in job.cells if cell.cell_id in chosen]
        cells_today = tuple(cell for cell in chosen_cells if cells[cell.cell_id].today == (job, cell))
        if cells_today:
            with tempfile.TemporaryDirectory() as folder:
                again = replace(job, cells=cells_today, run_directory=Path(folder, "verify"), tracker=UNTRACKED)
                for row in _compared(again, cells, chosen):
                    yield row
                    if row.state == "same":
                        causes[row.facts["cause"]] += 1
    for cause, number in causes.items():
        if cause:
            yield Row("machine", "differs", f"{counted(number, 'completion')} had the same bits with {cause}")


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
        cause = "; ".join(differing(checked.passes, today))
        setting = setting_of(cell.policy.identity())
        for then in checked.stored.rows(Completion, on_bad=row_types.ignore):
            if then.key not in chosen[cell.cell_id]:
                continue
            now = made.get(then.key)
            facts = {
                "cell_id": cell.cell_id,
                "setting": setting,
                "cause": cause,
                "problem_id": then.problem_id,
                "draw": then.draw,
                "tokens": then.num_tokens,
            }
            if now is None:  # an error ended the decoding before
                state: State = "cannot"
                text = facts["cause"] = str(error)
            elif now == then:
                state = "same"
                text = f"{then.num_tokens} tokens"
            else:
                state = "other"
                facts |= _difference(job, then, now)
                facts["cause"] = cause or _unexplained(today)
                text = f"{_where(facts)}; {facts['cause']}"
            title = f"{setting}, {then.problem_id} draw {then.draw} ({cell.cell_id})"
            yield Row("completion", state, f"{title}: {text}", facts=facts)


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
    return f"first differs at token {facts['first_other']}: stored {facts['stored_token']!r}, now {facts['token']!r}"


def _difference(job: Job, then: Completion, now: Completion) -> dict[str, Any]:
    """The fields that differ, and the first token that does: its index, and both tokens, "" behind the end of a text.

    If all tokens are equal, the fields alone.
    """
    fields = [name for name in then.__struct_fields__ if getattr(then, name) != getattr(now, name)]
    decode = loaded(job.model).dialogue.decode
    for first, (stored, other) in enumerate(itertools.zip_longest(then.token_ids, now.token_ids)):
        if stored != other:
            return {
                "fields": fields,
                "first_other": first,
                "stored_token": decode(then.token_ids[first : first + 1]),
                "token": decode(now.token_ids[first : first + 1]),
            }
    return {"fields": fields}
