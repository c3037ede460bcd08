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
    """Numbers per token of one completion in one cell; until the cell evicts, the full cache's.

    `numbers` [3, tokens] has KL(full cache, cell), the log-likelihood of the token that the text has, and 1 where the
    most likely token is the full cache's.
    """

    def __init__(self, full: Reference) -> None:
        tokens = len(full.loglik)
        self.full = full
        self.numbers = np.stack([np.zeros(tokens), full.loglik, np.ones(tokens)])
        self.since = np.zeros(tokens, dtype=int)  # tokens since the cell's last eviction
        self.evictions = 0


Tallies = Mapping[tuple[str, Pair], Tally]  # by cell_id and pair


def replay(
    model: LoadedModel, job: Job, cells_of_texts: Mapping[Text, Sequence[Cell]], tokens: int | None
) -> Iterator[tuple[str, Replay]]:
    """Yield (cell_id, row) for every completion and each of its cells; the rows of a completion come together.

    At most the first `tokens` tokens of a completion are replayed; None: all.
    Products are torch's own, because equal bits are not needed here; the same completions and cells give equal numbers.
    """
    request_of = {}  # by pair
    for completion, cells in cells_of_texts.items():
        branches = [Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in cells]
        request_of[completion.pair] = completion.request(model, tokens, branches)
    longest = max(len(request.prompt_ids) for request in request_of.values())
    limit = max(len(request.forced) for request in request_of.values())
    decoding = replace(job.decoding, max_new_tokens=limit, stop_on_loop=False)

    def make_engine(requests: Sequence[Request], cache: CacheConfig) -> Engine:
        """Make an engine with slots for `_TEXTS` of the requests at a time, as far as memory has room."""
        slots = _TEXTS * max(len(request.branches) + 1 for request in requests)  # one more for a trunk that still forks
        slots = auto_slots(model, requests, decoding, cache, wanted=slots).slots
        return engine_of(replace(job, decoding=decoding, invariant=False, cache=cache), requests, model, slots)

    def of_full_cache(pairs: Iterable[Pair]) -> list[Request]:
        return [replace(request_of[pair], branches=(_FULL,)) for pair in pairs]

    def of_cells(pairs: Iterable[Pair], growing: bool) -> list[Request]:
        """Return the requests with the cells that need a row for every token (`growing`), or with the other cells.

        The full cache's cell is left out unless its rows are quantized: its numbers are the reference's.
        """
        requests = []
        for pair in pairs:
            branches = []
            for branch in request_of[pair].branches:
                is_fed = branch.policy.name != "full" or job.cache.is_packed
                if is_fed and grows(branch.policy, longest, limit) == growing:
                    branches.append(branch)
            if branches:
                requests.append(replace(request_of[pair], branches=tuple(branches)))
        return requests

    full_cache_engine = make_engine(of_full_cache(request_of), UNPACKED)
    # Cells that need a row for every token have an engine of their own: its long slots would be wasted on the others.
    cell_engines: dict[bool, Engine] = {}  # by `growing`
    for growing in (False, True):
        requests = of_cells(request_of, growing)
        if requests:
            cell_engines[growing] = make_engine(requests, job.cache)
    for start in range(0, len(request_of), _TEXTS):
        pairs = list(request_of)[start : start + _TEXTS]
        references = _read_full_cache(model, full_cache_engine, of_full_cache(pairs))
        tallies: dict[tuple[str, Pair], Tally] = {}
        for pair in pairs:
            for branch in request_of[pair].branches:
                tallies[branch.cell_id, pair] = Tally(references[pair])
        for growing, engine in cell_engines.items():
            for step in engine.replay(of_cells(pairs, growing)):
                # Until its first eviction, a cell that is not quantized reads the same rows as the full cache: its
                # tally has these numbers already.
                _compare(model, references, [fed for fed in step if fed.since or job.cache.is_packed], tallies)
        for (cell_id, pair), tally in tallies.items():
            text = list(request_of[pair].forced)
            closing_tag = model.dialogue.closing_tag(text)
            answer_start = len(text) if closing_tag is None else closing_tag.stop
            yield cell_id, _row(request_of[pair], answer_start, tally)


def _read_full_cache(model: LoadedModel, engine: Engine, requests: Sequence[Request]) -> dict[Pair, Reference]:
    """Return what the full cache computes for each request's completion."""
    states: dict[Pair, list[Tensor]] = defaultdict(list)
    for step in engine.replay(requests):
        for fed in step:
            states[fed.request.key].append(fed.hidden)
    references = {}
    for request in requests:
        hidden = torch.cat(states[request.key])
        text = f"text {request.problem_id!r:.80}, draw {request.draw}"
        model.check_finite(hidden, f"the full cache's replay of {text}")
        logliks, entropies = [], []
        size = _tokens_at_once(model)
        next_tokens = torch.tensor(request.forced, device=hidden.device)
        for few_states, few_tokens in zip(hidden.split(size), next_tokens.split(size), strict=True):
            log_probabilities = model.logits(few_states).float().log_softmax(dim=-1)  # [tokens, vocabulary]
            logliks.append(log_probabilities.gather(-1, few_tokens[:, None])[:, 0])
            entropies.append(-(log_probabilities.exp() * log_probabilities).sum(dim=-1))
        loglik = torch.cat(logliks).double().numpy(force=True)
        entropy = torch.cat(entropies).double().numpy(force=True)
        references[request.key] = Reference(hidden, loglik, entropy)
    return references


@torch.inference_mode()
def _compare(model: LoadedModel, references: Mapping[Pair, Reference], step: Sequence[Fed], tallies: Tallies) -> None:
    """Add these parts of a step to the tallies of all cells that share them."""
    if not step:
        return
    places = []  # of each part's tokens in the completion
    full_states = []
    cell_states = []
    next_tokens: list[int] = []
    token_numbers = []  # the text's number in the upper 32 bits, the token's index in the lower ones
    text_numbers = {pair: number << 32 for number, pair in enumerate(references)}
    for fed in step:
        request = fed.request
        place = slice(fed.start, fed.start + len(fed.hidden))
        text = f"cell {fed.cell_ids[0]}'s replay of text {request.problem_id!r:.80}, draw {request.draw}"
        model.check_finite(fed.hidden, text)
        places.append(place)
        full_states.append(references[request.key].hidden[place])
        cell_states.append(fed.hidden)
        next_tokens += request.forced[place]
        token_numbers.append(text_numbers[request.key] + np.arange(place.start, place.stop))
    numbers = _compare_states(
        model,
        torch.cat(full_states),
        torch.cat(cell_states),
        torch.tensor(next_tokens),
        np.concatenate(token_numbers),
    )
    ends = np.cumsum([*map(len, cell_states)])
    numbers_of_parts = np.split(numbers, ends[:-1], axis=1)
    for fed, place, numbers_of_part in zip(step, places, numbers_of_parts, strict=True):
        for cell_id in fed.cell_ids:
            tally = tallies[cell_id, fed.request.key]
            tally.numbers[:, place] = numbers_of_part
            tally.since[place] = fed.since or 0  # a range has a number for each token; 0 before the first eviction
            tally.evictions = fed.evictions


def _compare_states(
    model: LoadedModel, full_states: Tensor, cell_states: Tensor, next_tokens: Tensor, token_numbers: np.ndarray
) -> np.ndarray:
    """Return each row's numbers as in `Tally`, [3, rows], of last hidden states [rows, width].

    Many rows, of different cells, are of the same token (`token_numbers` [rows]): the full cache's distribution is
    computed once for all of them.
    """
    # `first` [different tokens] is a row of each token, `token_of` [rows] the index in `first` of each row's token:
    # of the token numbers 7, 5, 7 they are [1, 0] and [1, 0, 1], and `order` is [1, 0, 2].
    _, first, token_of = np.unique(token_numbers, return_index=True, return_inverse=True)
    order = np.argsort(token_of, kind="stable")  # the rows, those of the same token side by side
    size = _tokens_at_once(model)
    numbers = np.empty((3, len(order)))
    # `size` different tokens at a time, and of all rows of these tokens `size` at a time: memory stays bounded.
    for begin in range(0, len(first), size):
        full = model.logits(full_states[first[begin : begin + size]]).float().log_softmax(dim=-1)
        # From `low` to `high`, `order` has the rows of these tokens; `full` begins with the token `begin`.
        low, high = np.searchsorted(token_of, [begin, begin + size], sorter=order)
        for rows in np.split(order[low:high], range(size, high - low, size)):
            reference = full[token_of[rows] - begin]
            cell = model.logits(cell_states[rows]).float().log_softmax(dim=-1)
            kl = (reference.exp() * (reference - cell)).sum(dim=-1).clamp(min=0)  # rounding may make a zero negative
            same = reference.argmax(dim=-1) == cell.argmax(dim=-1)
            loglik = cell.gather(-1, next_tokens[rows, None].to(cell.device))[:, 0]
            numbers[:, rows] = torch.stack([kl, loglik, same.float()]).double().numpy(force=True)
    return numbers


def _tokens_at_once(model: LoadedModel) -> int:
    return max(1, _LOGITS // model.network.config.vocab_size)


def _row(request: Request, answer_start: int, tally: Tally) -> Replay:
    """Return the stored row of a tally; `answer_start` is the answer's first token in the completion."""
    kl, loglik, same = tally.numbers
    change = loglik - tally.full.loglik
    answer = slice(answer_start, None)
    disagreeing = np.flatnonzero(same == 0)  # tokens where the cell and the full cache find another most likely

    def bins(values: np.ndarray, bounds: Sequence[float]) -> list[ReplayBin]:
        """Return one bin from each bound to the next: how many tokens have values there, and sums over these tokens."""
        bin_of = np.searchsorted(bounds, values, side="right") - 1  # of each token: the last bound that is not above it
        tokens = np.bincount(bin_of, minlength=len(bounds))
        sums = [np.bincount(bin_of, weights, len(bounds)) for weights in (kl, change, same)]
        rows = []
        for count, divergence, difference, agreeing in zip(tokens, *sums, strict=True):
            rows.append(
                ReplayBin(tokens=int(count), kl=float(divergence), change=float(difference), top1=int(agreeing))
            )
        return rows

    has_answer = answer_start < len(change)
    median, p99 = np.quantile(kl, [0.5, 0.99])
    return Replay(
        problem_id=request.problem_id,
        draw=request.draw,
        tokens=len(change),
        prompt_tokens=len(request.prompt_ids),
        evictions=tally.evictions,
        kl_mean=float(kl.mean()),
        kl_median=float(median),
        kl_p99=float(p99),
        loglik=float(loglik.sum()),
        change=float(change.sum()),
        top1=float(same.mean()),
        first_other=int(disagreeing[0]) if len(disagreeing) else None,
        answer_tokens=len(change) - answer_start,
        answer_loglik=float(loglik[answer].sum()) if has_answer else None,
        answer_change=float(change[answer].sum()) if has_answer else None,
        by_distance=bins(tally.since, REPLAY_DISTANCES),
        by_entropy=bins(tally.full.entropy.clip(min=0), REPLAY_ENTROPIES),  # rounding may make a zero negative
    )
