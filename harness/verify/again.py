"""Stored completions decoded a second time, by the engine of a sweep, and what may have made a difference."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvsweep.analysis.notation import setting_of
from kvsweep.compression.source import code_hash, is_same_code
from kvsweep.errors import UserError
from kvsweep.harness.decode.engine import is_invariant
from kvsweep.harness.decode.memory import auto_slots
from kvsweep.harness.decode.request import Branch, Request, grows
from kvsweep.harness.models.load import device_of
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.provenance import describe_arithmetic, describe_machine
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.fill import engine_of, loaded
from kvsweep.harness.sweep.job import Job
from kvsweep.kernels.implementation import check_available
from kvsweep.records import Completion, Pair

Asked = tuple[Cell, Completion]


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A stored completion beside the one of today.

    Attributes:
        state: same: every field has the same value; other: some have not; cannot: it was not decoded, `cause` says why.
        first_other: index of the first token that differs, None where the tokens are the same.
        stored_token, token: the two tokens at that index, as texts.
        gap: the stored token's logit minus the other one's, by the model of today behind the tokens before both.
        fields: the names of the fields that differ.
    """

    cell_id: str
    setting: str
    problem_id: str
    draw: int
    tokens: int
    state: Literal["same", "other", "cannot"]
    first_other: int | None = None
    stored_token: str | None = None
    token: str | None = None
    gap: float | None = None
    fields: Sequence[str] = ()
    cause: str = ""


def drawn(stored: Mapping[str, Sequence[Pair]], count: int, seed: int) -> list[tuple[str, Pair]]:
    """Draw (cell_id, pair) of stored completions: cells in turn, and in each a problem and draw that came least yet."""
    numbers, problems, draws = random.Random(seed), Counter[str](), Counter[int]()
    left = {cell_id: numbers.sample(sorted(pairs), len(pairs)) for cell_id, pairs in sorted(stored.items()) if pairs}
    order, chosen = numbers.sample(list(left), len(left)), list[tuple[str, Pair]]()
    for cell_id in itertools.cycle(order):
        if len(chosen) == min(count, sum(map(len, stored.values()))):
            return chosen
        if left[cell_id]:
            pair = min(left[cell_id], key=lambda pair: (problems[pair[0]], draws[pair[1]]))
            left[cell_id].remove(pair)
            problems[pair[0]] += 1
            draws[pair[1]] += 1
            chosen.append((cell_id, pair))
    return chosen


def decoded_again(
    job: Job, asked: Sequence[Asked], passes: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Decoded]:
    """Decode completions of a job's cells again, from their first token; `passes` are those that made each cell."""
    try:
        check_available(job.impl)
        invariant = is_invariant(job.invariant, job.spec, device_of(job.model), job.impl)
        model = loaded(job.model)
        for cell in {cell.cell_id: cell for cell, _ in asked}.values():
            cell.policy.load_artifacts()
        job.cache.largest_rows(job.spec.layers)
    except UserError as error:
        yield from (_decoded(cell, row, state="cannot", cause=str(error)) for cell, row in asked)
        return
    today = describe_machine() | {
        "arithmetic": describe_arithmetic(invariant=invariant, impl=job.impl, dtype=job.model.dtype)
    }
    stored = {(cell.cell_id, row.key): (cell, row) for cell, row in asked}
    for cell_id, made in _generated(job, model, asked):
        cell, row = stored[cell_id, made.key]
        others = differing(passes.get(cell_id, ()), today, code_hash(type(cell.policy)))
        if made == row:
            yield _decoded(cell, row, state="same", cause="; ".join(others))
        else:
            yield _decoded(cell, row, state="other", **_difference(job, model, cell, row, made, others, invariant))


def _decoded(cell: Cell, row: Completion, **rest: Any) -> Decoded:
    named: dict[str, Any] = {"cell_id": cell.cell_id, "setting": setting_of(cell.policy.identity())}
    return Decoded(**named, problem_id=row.problem_id, draw=row.draw, tokens=row.num_tokens, **rest)


def _generated(job: Job, model: LoadedModel, asked: Sequence[Asked]) -> Iterator[tuple[str, Completion]]:
    """The completions of (cell_id, problem, draw), as a sweep decodes them: cells that grow with the text first."""
    prompts = {problem.id: model.dialogue.prompt_ids(problem.prompt) for problem in job.benchmark.problems}
    longest = max(map(len, prompts.values()))
    for growing in (True, False):
        branches: dict[Pair, list[Branch]] = {}
        for cell, row in asked:
            if grows(cell.policy, longest, job.decoding.max_new_tokens) == growing:
                branches.setdefault(row.key, []).append(Branch(cell_id=cell.cell_id, policy=cell.policy))
        requests = [_request(prompts, pair, wanted) for pair, wanted in branches.items()]
        if requests:
            slots = job.slots or auto_slots(model, requests, job.decoding, job.cache).slots
            yield from engine_of(job, requests, model, slots).generate(requests)


def _request(
    prompts: Mapping[str, tuple[int, ...]], pair: Pair, branches: Sequence[Branch], known: Sequence[int] = ()
) -> Request:
    return Request(
        problem_id=pair[0],
        draw=pair[1],
        prompt_ids=prompts[pair[0]],
        branches=tuple(branches),
        forced=tuple(known),
        replayed=bool(known),
    )


def circumstances(one: Mapping[str, Any]) -> dict[str, Any]:
    """What a decoding pass recorded of all that bits can depend on beside the cell; None for what it did not record."""
    code, arithmetic, hardware = (one.get(name) or {} for name in ("code", "arithmetic", "hardware"))
    revision = code.get("git_revision")
    return {
        "code of the policy": one.get("policy_code"),
        "kernel set": arithmetic.get("vector_instructions"),
        **{f"arithmetic, {name}": value for name, value in arithmetic.items() if name != "vector_instructions"},
        "processor": hardware.get("processor"),
        "GPUs": ", ".join(hardware.get("gpus") or ()) or None,
        **{f"version of {name}": value for name, value in (code.get("packages") or {}).items()},
        "version of Python": code.get("python"),
        "code of kvsweep": revision and f"{revision[:12]}{', changed' * bool(code.get('git_dirty'))}",
    }


def differing(passes: Sequence[Mapping[str, Any]], today: Mapping[str, Any], code: str) -> list[str]:
    """The circumstances of today, with the policy's `code`, that differ from any of a cell's passes, in words."""
    now = circumstances({**today, "policy_code": code})
    same = ({**one, "policy_code": code} if is_same_code(one.get("policy_code", code), code) else one for one in passes)
    found = ((name, then) for one in same for name, then in circumstances(one).items())
    others = (
        f"another {name} ({then}, now {now.get(name)})" for name, then in found if then not in (None, now.get(name))
    )
    return list(dict.fromkeys(others))


def _difference(
    job: Job, model: LoadedModel, cell: Cell, row: Completion, made: Completion, others: Sequence[str], invariant: bool
) -> dict[str, Any]:
    """The fields of a `Decoded` that say how a completion differs and why that may be."""
    names = [name for name in row.__struct_fields__ if getattr(row, name) != getattr(made, name)]
    cause = (
        "; ".join(others) or "no code, version or machine that is recorded differs, so the row may have been changed"
    )
    if not (others or invariant):
        cause = "with invariant=false the bits depend on what is decoded together"
    pairs = itertools.zip_longest(row.token_ids, made.token_ids)
    first = next((i for i, (then, now) in enumerate(pairs) if then != now), None)
    if first is None:
        return {"fields": names, "cause": cause}
    two = [completion.token_ids[first : first + 1] for completion in (row, made)]
    gap = None
    if all(two) and two[0][0] < model.network.config.vocab_size:
        prompts = {row.problem_id: model.dialogue.prompt_ids(_prompt(job, row.problem_id))}
        known = [*row.token_ids[:first], two[0][0]]
        asked = _request(prompts, row.key, [Branch(cell_id=cell.cell_id, policy=cell.policy)], known)
        for step in engine_of(job, [asked], model, 1).replay([asked]):
            for fed in step:
                if fed.start <= first < fed.start + len(fed.hidden):
                    logits = model.logits(fed.hidden[first - fed.start][None]).float()[0]
                    gap = float(logits[two[0][0]] - logits[two[1][0]])
    texts = [model.dialogue.decode(ids) if ids else None for ids in two]
    return {
        "first_other": first, "stored_token": texts[0], "token": texts[1], "gap": gap, "fields": names, "cause": cause,
    }  # fmt: skip


def _prompt(job: Job, problem_id: str) -> str:
    return next(problem.prompt for problem in job.benchmark.problems if problem.id == problem_id)
