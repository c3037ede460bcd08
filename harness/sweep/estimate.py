"""The number of tokens that a forked grid decodes, of all its texts or of those that it lacks."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsweep import records
from kvsweep.compression.policy import Policy
from kvsweep.harness.decode.request import grows
from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.server import Server
from kvsweep.harness.sweep.share import Share

# An average for English and mathematics. Only the length of the question, a small part of a text, is reckoned with it.
_CHARACTERS_PER_TOKEN = 3


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
        job, pairs, question = share.job, share.pairs, question_tokens(share.job)
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


def question_tokens(job: Job) -> int:
    """Tokens of the longest question: counted where the tokenizer is at hand, else reckoned from its characters."""
    longest = max((problem.prompt for problem in job.benchmark.problems), key=len)
    file = Path(job.model.path or "", "tokenizer.json")  # a GGUF file would have to be converted first
    return len(_tokenizer(file).encode(longest).ids) if file.is_file() else len(longest) // _CHARACTERS_PER_TOKEN + 1


@cache
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
