"""Compare each cell's next-token distributions with the full cache's, token by token; no distribution is stored."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
class Reading:
    """What the full cache computes for some completions, whose tokens lie side by side, each one's at its `place`.

    Last hidden states [tokens, width] that predict the `next_tokens` [tokens], their log-likelihoods, and the entropies
    of their distributions.
    """

    place: dict[Pair, slice]
    hidden: Tensor
    next_tokens: Tensor
    loglik: np.ndarray
    entropy: np.ndarray


# By cell_id the numbers [5, tokens] of a reading's tokens in a cell: KL(full cache, cell), the log-likelihood of the
# token that the text has, 1 where the most likely token is the full cache's, tokens since the cell's last eviction, and
# evictions so far.
Tallies = Mapping[str, np.ndarray]


def replay(
    model: LoadedModel, job: Job, cells_of_texts: Mapping[Text, Sequence[Cell]], tokens: int | None
) -> Iterator[tuple[str, Replay]]:
    """Yield (cell_id, row) for every completion and each of its cells; the rows of a completion come together.

    At most the first `tokens` tokens of a completion are replayed; None: all.
    Products are torch's own, because equal bits are not needed here; the same completions and cells give equal numbers.
    """
    requests = []
    for completion, cells in cells_of_texts.items():
        branches = [Branch(cell_id=cell.cell_id, policy=cell.policy) for cell in cells]
        requests.append(completion.request(model, tokens, branches))
    longest = max(len(request.prompt_ids) for request in requests)
    limit = max(len(request.forced) for request in requests)
    decoding = replace(job.decoding, max_new_tokens=limit, stop_on_loop=False)

    def make_engine(requests: Sequence[Request], cache: CacheConfig) -> Engine:
        """Make an engine with slots for `_TEXTS` of the requests at a time, as far as memory has room."""
        slots = _TEXTS * max(len(request.branches) + 1 for request in requests)  # one more for a trunk that still forks
        slots = auto_slots(model, requests, decoding, cache, wanted=slots).slots
        return engine_of(replace(job, decoding=decoding, invariant=False, cache=cache), requests, model, slots)

    full_cache_requests = [replace(request, branches=(_FULL,)) for request in requests]
    full_cache_engine = make_engine(full_cache_requests, UNPACKED)
    # Cells that need a row for every token have an engine of their own: its long slots would be wasted on the others.
    cell_engines = []
    for growing in (False, True):
        cell_requests = {}
        for request in requests:
            branches = []
            for branch in request.branches:
                # Without quantized rows the full cache's numbers are the reading's.
                is_fed = branch.policy.name != "full" or job.cache.is_packed
                if is_fed and grows(branch.policy, longest, limit) == growing:
                    branches.append(branch)
            if branches:
                cell_requests[request.key] = replace(request, branches=tuple(branches))
        if cell_requests:
            cell_engines.append((make_engine([*cell_requests.values()], job.cache), cell_requests))
    for start in range(0, len(requests), _TEXTS):
        texts = slice(start, start + _TEXTS)
        full = _read_full_cache(model, full_cache_engine, full_cache_requests[texts])
        zeros = np.zeros_like(full.loglik)
        # Until a cell evicts, the full cache's numbers.
        tallies = defaultdict[str, np.ndarray](np.stack([zeros, full.loglik, zeros + 1, zeros, zeros]).copy)
        for engine, cell_requests in cell_engines:
            for step in engine.replay([cell_requests[pair] for pair in full.place if pair in cell_requests]):
                # Until its first eviction, a cell that is not quantized reads the same rows as the full cache: its
                # tally has these numbers already.
                _compare(model, full, [fed for fed in step if fed.since or job.cache.is_packed], tallies)
        for request in requests[texts]:
            place = full.place[request.key]
            closing_tag = model.dialogue.closing_tag(list(request.forced))
            answer_start = len(request.forced) if closing_tag is None else closing_tag.stop
            for branch in request.branches:
                tally = tallies[branch.cell_id][:, place]
                yield branch.cell_id, _row(request, answer_start, tally, full.loglik[place], full.entropy[place])


def _read_full_cache(model: LoadedModel, engine: Engine, requests: Sequence[Request]) -> Reading:
    """Return what the full cache computes for the requests' completions."""
    states: dict[Pair, list[Tensor]] = defaultdict(list)
    for step in engine.replay(requests):
        for fed in step:
            states[fed.request.key].append(fed.hidden)
    size = _tokens_at_once(model)
    place = {}
    hidden_states = []
    next_tokens = []
    numbers = []
    end = 0
    for request in requests:
        hidden = torch.cat(states.pop(request.key))
        model.check_finite(hidden, f"the full cache's replay of text {request.problem_id!r:.80}, draw {request.draw}")
        forced = torch.tensor(request.forced, device=hidden.device)
        for few_states, few_tokens in zip(hidden.split(size), forced.split(size), strict=True):
            log_probabilities = model.logits(few_states).float().log_softmax(dim=-1)  # [tokens, vocabulary]
            loglik = log_probabilities.gather(-1, few_tokens[:, None])[:, 0]
            entropy = -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
            numbers.append(torch.stack([loglik, entropy]))
        place[request.key] = slice(end, end + len(forced))
        end += len(forced)
        hidden_states.append(hidden)
        next_tokens.append(forced)
    logliks, entropies = torch.cat(numbers, dim=1).double().numpy(force=True)
    return Reading(place, torch.cat(hidden_states), torch.cat(next_tokens), logliks, entropies)


@torch.inference_mode()
def _compare(model: LoadedModel, full: Reading, step: Sequence[Fed], tallies: Tallies) -> None:
    """Add these parts of a step to the tallies of all cells that share them."""
    if not step:
        return
    places = []  # of each part's tokens in the reading
    cell_states = []
    for fed in step:
        request = fed.request
        tokens = np.arange(fed.start, fed.start + len(fed.hidden))
        text = f"cell {fed.cell_ids[0]}'s replay of text {request.problem_id!r:.80}, draw {request.draw}"
        model.check_finite(fed.hidden, text)
        places.append(full.place[request.key].start + tokens)
        cell_states.append(fed.hidden)
    numbers = _compare_states(model, full, torch.cat(cell_states), np.concatenate(places))
    ends = np.cumsum([*map(len, places)])
    numbers_of_parts = np.split(numbers, ends[:-1], axis=1)
    for fed, place, numbers_of_part in zip(step, places, numbers_of_parts, strict=True):
        for cell_id in fed.cell_ids:
            tally = tallies[cell_id]
            tally[:3, place] = numbers_of_part
            tally[3, place] = fed.since or 0  # a range has a number for each token; 0 before the first eviction
            tally[4, place] = fed.evictions


def _compare_states(model: LoadedModel, full: Reading, cell_states: Tensor, places: np.ndarray) -> np.ndarray:
    """Return each row's first numbers as in `Tallies`, [3, rows], of last hidden states [rows, width].

    Many rows, of different cells, are of the same token of the reading (`places` [rows]): the full cache's distribution
    is computed once for all of them.
    """
    # `tokens` are the different ones, `token_of` [rows] the index in `tokens` of each row's token: of the places
    # 7, 5, 7 they are [5, 7] and [1, 0, 1], and `order` is [1, 0, 2].
    tokens, token_of = np.unique(places, return_inverse=True)
    order = np.argsort(token_of, kind="stable")  # the rows, those of the same token side by side
    size = _tokens_at_once(model)
    numbers = np.empty((3, len(order)))
    # `size` different tokens at a time, and of all rows of these tokens `size` at a time: memory stays bounded.
    for begin in range(0, len(tokens), size):
        references = model.logits(full.hidden[tokens[begin : begin + size]]).float().log_softmax(dim=-1)
        # From `low` to `high`, `order` has the rows of these tokens; `references` begins with the token `begin`.
        low, high = np.searchsorted(token_of, [begin, begin + size], sorter=order)
        for rows in np.split(order[low:high], range(size, high - low, size)):
            reference = references[token_of[rows] - begin]
            cell = model.logits(cell_states[rows]).float().log_softmax(dim=-1)
            kl = (reference.exp() * (reference - cell)).sum(dim=-1).clamp(min=0)  # rounding may make a zero negative
            same = reference.argmax(dim=-1) == cell.argmax(dim=-1)
            loglik = cell.gather(-1, full.next_tokens[places[rows], None])[:, 0]
            numbers[:, rows] = torch.stack([kl, loglik, same.float()]).double().numpy(force=True)
    return numbers


def _tokens_at_once(model: LoadedModel) -> int:
    return max(1, _LOGITS // model.network.config.vocab_size)


def _row(
    request: Request, answer_start: int, tally: np.ndarray, full_loglik: np.ndarray, entropy: np.ndarray
) -> Replay:
    """Return the stored row of a completion's numbers in a cell, beside the full cache's.

    `tally` is as in `Tallies`, and `answer_start` the answer's first token in the completion.
    """
    kl, loglik, same, since, evictions = tally
    change = loglik - full_loglik
    answer = slice(answer_start, None)
    disagreeing = np.flatnonzero(same == 0)  # tokens where the cell and the full cache find another most likely

    def bins(values: np.ndarray, bounds: Sequence[float]) -> list[ReplayBin]:
        """Return one bin from each bound to the next: how many tokens have values there, and sums over these tokens."""
        bin_of = np.searchsorted(bounds, values, side="right") - 1  # of each token: the last bound that is not above it
        sums = [np.bincount(bin_of, weights, len(bounds)).tolist() for weights in (np.ones_like(kl), kl, change, same)]
        rows = []
        for tokens, divergence, difference, agreeing in zip(*sums, strict=True):
            rows.append(ReplayBin(tokens=int(tokens), kl=divergence, change=difference, top1=int(agreeing)))
        return rows

    has_answer = answer_start < len(change)
    median, p99 = np.quantile(kl, [0.5, 0.99])
    return Replay(
        problem_id=request.problem_id,
        draw=request.draw,
        tokens=len(change),
        prompt_tokens=len(request.prompt_ids),
        evictions=int(evictions[-1]),
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
        by_distance=bins(since, REPLAY_DISTANCES),
        by_entropy=bins(entropy.clip(min=0), REPLAY_ENTROPIES),  # rounding may make a zero negative
    )
