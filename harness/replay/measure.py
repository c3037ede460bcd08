"""Compare each cell's next-token distributions with the full cache's, token by token; no distribution is stored."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvsweep.compression.config import UNPACKED, CacheConfig
from kvsweep.compression.policies.full import FullCache
from kvsweep.harness.decode.engine import Engine, Fed
from kvsweep.harness.decode.memory import auto_slots
from kvsweep.harness.decode.request import Branch, Request, grows
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.replay.references import Text
from kvsweep.harness.sweep.cell import Cell
from kvsweep.harness.sweep.fill import engine_of
from kvsweep.harness.sweep.job import Job
from kvsweep.run_files.row_types import REPLAY_DISTANCES, REPLAY_ENTROPIES, Pair, Replay, ReplayBin

_FULL = Branch(cell_id="full", policy=FullCache(name="full"))
# Completions that the full cache holds at once, and logits computed at once.
_TEXTS, _LOGITS = 4, 1 << 25


@dataclass(frozen=True)
class Reference:
    """What the full cache computes for a completion: last hidden states [tokens, width], and numbers per token."""

    hidden: Tensor
    loglik: np.ndarray
    entropy: np.ndarray


class Tally:
    """Numbers per token of one completion in one cell, [tokens] each; until the cell evicts, the full cache's."""

    def __init__(self, full: Reference) -> None:
        tokens = len(full.loglik)
        self.kl = np.zeros(tokens)  # KL(full cache, cell)
        self.loglik = full.loglik.copy()  # of the token that the text has
        self.same = np.ones(tokens, dtype=bool)  # the most likely token is the full cache's
        self.since = np.zeros(tokens, dtype=int)  # tokens since the cell's last eviction
        self.evictions = 0


Tallies = Mapping[tuple[str, Pair], Tally]  # by cell_id and pair


def replay(
    model: LoadedModel, job: Job, cells_of_texts: Mapping[Text, Sequence[Cell]], tokens: int | None
) -> Iterator[tuple[str, Replay]]:
    """Yield (cell_id, row) for every completion and each of its cells; the rows of a completion come together.

    Products are torch's own, because equal bits are not needed here; the same completions and cells give equal numbers.
    """
    requests = {}
    for completion, cells in cells_of_texts.items():
        branches = [Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in cells]
        requests[completion.pair] = completion.request(model, tokens, branches)
    longest = max(len(request.prompt_ids) for request in requests.values())
    limit = max(len(request.forced) for request in requests.values())
    decoding = replace(job.decoding, max_new_tokens=limit, stop_on_loop=False)

    def engine(fed: Sequence[Request], cache: CacheConfig) -> Engine:
        branches = _TEXTS * max(len(request.branches) + 1 for request in fed)  # one more for a trunk that still forks
        slots = auto_slots(model, fed, decoding, cache, wanted=branches).slots
        return engine_of(replace(job, decoding=decoding, invariant=False, cache=cache), fed, model, slots)

    def full(pairs: Iterable[Pair]) -> list[Request]:
        return [replace(requests[pair], branches=(_FULL,)) for pair in pairs]

    def part(pairs: Iterable[Pair], growing: bool) -> list[Request]:
        """Return the requests with the cells that need a row for every token (`growing`), or with the other cells.

        The full cache's cell is fed by `reading` already, unless its rows are quantized.
        """
        fed = []
        for pair in pairs:
            branches = []
            for branch in requests[pair].branches:
                is_fed = branch.policy.name != "full" or job.cache.is_packed
                if is_fed and grows(branch.policy, longest, limit) == growing:
                    branches.append(branch)
            if branches:
                fed.append(replace(requests[pair], branches=tuple(branches)))
        return fed

    reading = engine(full(requests), UNPACKED)
    # Cells that need a row for every token have an engine of their own: its long slots would be wasted on the others.
    engines: dict[bool, Engine] = {}
    for growing in (False, True):
        fed = part(requests, growing)
        if fed:
            engines[growing] = engine(fed, job.cache)
    for first in range(0, len(requests), _TEXTS):
        pairs = list(requests)[first : first + _TEXTS]
        references = _read(model, reading, full(pairs))
        tallies: dict[tuple[str, Pair], Tally] = {}
        for pair in pairs:
            for branch in requests[pair].branches:
                tallies[branch.cell_id, pair] = Tally(references[pair])
        for growing, feeding in engines.items():
            for step in feeding.replay(part(pairs, growing)):
                # Until its first eviction, a cell that is not quantized reads the same rows as the full cache.
                _compare(model, references, [fed for fed in step if fed.since or job.cache.is_packed], tallies)
        for (cell_id, pair), tally in tallies.items():
            question = requests[pair].prompt_ids
            text = list(requests[pair].forced)
            closing = model.dialogue.closing_tag(text)
            answer_start = len(text) if closing is None else closing.stop
            yield cell_id, _row(pair, len(question), answer_start, tally, references[pair])


def _read(model: LoadedModel, engine: Engine, requests: Sequence[Request]) -> dict[Pair, Reference]:
    """Return what the full cache computes for each request's completion."""
    states: dict[Pair, list[Tensor]] = defaultdict(list)
    for step in engine.replay(requests):
        for fed in step:
            states[fed.request.key].append(fed.hidden)
    references = {}
    for request in requests:
        hidden = torch.cat(states[request.key])
        text = f"text {request.problem_id!r:.80}, draw {request.draw}"
        model.check_finite(hidden, [*request.prompt_ids, *request.forced], f"the full cache's replay of {text}")
        logliks, entropies = [], []
        size = _tokens_at_once(model)
        next_tokens = torch.tensor(request.forced, device=hidden.device)
        for part, following in zip(hidden.split(size), next_tokens.split(size), strict=True):
            logs = model.logits(part).float().log_softmax(dim=-1)
            logliks.append(logs.gather(-1, following[:, None])[:, 0])
            entropies.append(-(logs.exp() * logs).sum(dim=-1))
        loglik = torch.cat(logliks).double().numpy(force=True)
        entropy = torch.cat(entropies).double().numpy(force=True)
        references[request.key] = Reference(hidden, loglik, entropy)
    return references


@torch.inference_mode()
def _compare(model: LoadedModel, references: Mapping[Pair, Reference], step: Sequence[Fed], tallies: Tallies) -> None:
    """Add these parts of a step to the tallies of all cells that share them."""
    if not step:
        return
    places = [slice(fed.start, fed.start + len(fed.hidden)) for fed in step]  # in each part's completion
    parts = list(zip(step, places, strict=True))
    following: list[int] = []
    for fed, place in parts:
        request = fed.request
        text = f"cell {fed.cell_ids[0]}'s replay of text {request.problem_id!r:.80}, draw {request.draw}"
        model.check_finite(fed.hidden, [*request.prompt_ids, *request.forced[: place.stop]], text)
        following += request.forced[place]
    cell_states = torch.cat([fed.hidden for fed in step])
    full_states = torch.cat([references[fed.request.key].hidden[place] for fed, place in parts])
    next_tokens = torch.tensor(following)
    # Many cells read the same token in a step; the full cache's distribution is computed once for all of them. A token
    # has the number of its text in the upper bits and its place in the text in the lower ones.
    texts = {pair: number << 32 for number, pair in enumerate(references)}
    tokens = [texts[fed.request.key] + np.arange(place.start, place.stop) for fed, place in parts]
    # `first` is a row of each different token, `token_of` the number of each row's token.
    _, first, token_of = np.unique(np.concatenate(tokens), return_index=True, return_inverse=True)
    order = np.argsort(token_of, kind="stable")
    size = _tokens_at_once(model)
    numbers = np.empty((3, len(order)))  # divergence, log-likelihood and agreement of each row
    # `size` different tokens at a time, and of all rows of these tokens `size` at a time: memory stays bounded.
    for begin in range(0, len(first), size):
        full = model.logits(full_states[first[begin : begin + size]]).float().log_softmax(dim=-1)
        # `order` lists the rows by their tokens: from `low` to `high` those of these tokens.
        low, high = np.searchsorted(token_of, [begin, begin + size], sorter=order)
        for rows in np.split(order[low:high], range(size, high - low, size)):
            reference = full[token_of[rows] - begin]
            cell = model.logits(cell_states[rows]).float().log_softmax(dim=-1)
            kl = (reference.exp() * (reference - cell)).sum(dim=-1).clamp(min=0)  # rounding may make a zero negative
            same = reference.argmax(dim=-1) == cell.argmax(dim=-1)
            loglik = cell.gather(-1, next_tokens[rows, None].to(cell.device))[:, 0]
            numbers[:, rows] = torch.stack([kl, loglik, same.float()]).double().numpy(force=True)
    ends = np.cumsum([len(fed.hidden) for fed in step])
    numbers_of_parts = np.split(numbers, ends[:-1], axis=1)
    for (fed, place), (divergence, logliks, agree) in zip(parts, numbers_of_parts, strict=True):
        for cell_id in fed.cell_ids:
            tally = tallies[cell_id, fed.request.key]
            tally.kl[place] = divergence
            tally.loglik[place] = logliks
            tally.same[place] = agree > 0
            tally.since[place] = fed.since or 0  # a range has a number for each token
            tally.evictions = fed.evictions


def _tokens_at_once(model: LoadedModel) -> int:
    return max(1, _LOGITS // model.network.config.vocab_size)


def _row(pair: Pair, prompt_tokens: int, answer_start: int, tally: Tally, full: Reference) -> Replay:
    """Return the stored row of a tally; `answer_start` is the answer's first token in the completion."""
    change = tally.loglik - full.loglik
    answer = slice(answer_start, None)
    tokens_of_other_top = np.flatnonzero(~tally.same)

    def bins(values: np.ndarray, bounds: Sequence[float]) -> list[ReplayBin]:
        """Return the bins between each two bounds: how many tokens have values there, and sums over these tokens."""
        place = np.searchsorted(bounds, values, side="right") - 1  # the last bound that is at most the value
        tokens = np.bincount(place, minlength=len(bounds))
        kl = np.bincount(place, tally.kl, len(bounds))
        changes = np.bincount(place, change, len(bounds))
        same = np.bincount(place, tally.same, len(bounds))
        return [
            ReplayBin(tokens=int(tokens[i]), kl=float(kl[i]), change=float(changes[i]), top1=int(same[i]))
            for i in range(len(bounds))
        ]

    has_answer = answer_start < len(change)
    median, p99 = np.quantile(tally.kl, [0.5, 0.99])
    problem_id, draw = pair
    return Replay(
        problem_id=problem_id,
        draw=draw,
        tokens=len(change),
        prompt_tokens=prompt_tokens,
        evictions=tally.evictions,
        kl_mean=float(tally.kl.mean()),
        kl_median=float(median),
        kl_p99=float(p99),
        loglik=float(tally.loglik.sum()),
        change=float(change.sum()),
        top1=float(tally.same.mean()),
        first_other=int(tokens_of_other_top[0]) if len(tokens_of_other_top) else None,
        answer_tokens=len(change) - answer_start,
        answer_loglik=float(tally.loglik[answer].sum()) if has_answer else None,
        answer_change=float(change[answer].sum()) if has_answer else None,
        by_distance=bins(tally.since, REPLAY_DISTANCES),
        by_entropy=bins(full.entropy.clip(min=0), REPLAY_ENTROPIES),  # rounding may make a zero negative
    )
