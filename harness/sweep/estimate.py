"""The number of tokens that a forked grid decodes, of all its texts or of those that it lacks."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvsweep.harness.sweep.job import Job
from kvsweep.harness.sweep.share import Share
from kvsweep.run_files import row_types

# An average for English and mathematics, used only for the length of the prompt, a small part of a sequence.
_CHARACTERS_PER_TOKEN = 3


def forked_tokens(lengths: npt.ArrayLike, forks: Sequence[int | None], missing: npt.ArrayLike = True) -> int:
    """Count the tokens of a grid in one batch: each completion once up to its last fork, each branch from its fork.

    A text of 100 tokens in two cells that leave the others at tokens 30 and 60 takes 60, and then 70 and 40: 170. All
    cells' completions count as long as the full cache's, although compression may make them longer. `lengths`: the
    generated tokens of each (problem, draw); `forks`: each cell's `Job.first_eviction`; `missing` [lengths, forks]:
    whether a completion is still to decode, by default all are.
    """
    length = np.asarray(lengths, float)[:, None]  # [lengths, 1], beside the forks in a row
    first_steps_apart = [math.inf if fork is None else fork for fork in forks]
    shared = np.minimum(length, first_steps_apart)  # tokens of each completion before its fork, [lengths, forks]
    branches = np.where(missing, length - shared, 0)  # tokens behind the forks, [lengths, forks]
    # Of the parts before the forks only the longest is decoded, once for all cells: [lengths].
    trunks = np.where(missing, shared, 0).max(axis=1, initial=0)
    return round(branches.sum() + trunks.sum())


class TokensLeft:
    """The tokens that a share still has to decode: the estimate of `--dry-run`, corrected by each stored completion.

    An unknown length counts as the mean of the known ones, or as `max_new_tokens` if none is known. `stored` has the
    pairs of each cell, by cell_id.
    """

    def __init__(self, share: Share, stored: Mapping[str, Collection[row_types.Pair]]) -> None:
        job = share.job
        pairs = share.pairs
        question = question_tokens(job)
        policies = {cell.cell_id: cell.policy for cell in job.cells}
        # A table of completions: a row for each pair, a column for each cell of `stored`.
        self._rows = {pair: row for row, pair in enumerate(pairs)}
        self._columns = {cell_id: column for column, cell_id in enumerate(stored)}
        self._forks = [job.first_eviction(policies[cell_id], question) for cell_id in stored]
        self._missing = np.ones((len(pairs), len(stored)), bool)  # whether a completion is, [pairs, cells]
        for column, stored_pairs in enumerate(stored.values()):
            self._missing[:, column] = [pair not in stored_pairs for pair in pairs]
        self._lengths = np.full(len(pairs), np.nan)  # NaN until a completion of the pair is stored
        self._limit = job.decoding.max_new_tokens

    def know(self, pair: row_types.Pair, tokens: int) -> None:
        """Record the length of a completion."""
        self._lengths[self._rows[pair]] = tokens

    def store(self, cell_id: str, pair: row_types.Pair, tokens: int) -> None:
        """Record that a cell has stored a completion of this many tokens; the first length of a pair counts for all."""
        self._missing[self._rows[pair], self._columns[cell_id]] = False
        if np.isnan(self._lengths[self._rows[pair]]):
            self.know(pair, tokens)

    def __int__(self) -> int:
        is_unknown = np.isnan(self._lengths)
        mean_length = self._limit if is_unknown.all() else self._lengths[~is_unknown].mean()
        lengths = np.where(is_unknown, mean_length, self._lengths)
        return forked_tokens(lengths, self._forks, self._missing)


def saving(lengths: Sequence[int], forks: Sequence[int | None]) -> float:
    """Return the tokens of cells decoded one by one, divided by the tokens of the grid in one batch."""
    return len(forks) * sum(lengths) / max(1, forked_tokens(lengths, forks))  # all texts may be empty


def question_tokens(job: Job) -> int:
    """Return the tokens of the longest prompt: counted with the tokenizer if it is here, else from characters."""
    longest = max((problem.prompt for problem in job.benchmark.problems), key=len)
    if job.model.path is not None:  # else a GGUF file, whose tokenizer would have to be converted first
        file = Path(job.model.path, "tokenizer.json")
        if file.is_file():
            return len(_tokenizer(file).encode(longest).ids)
    return len(longest) // _CHARACTERS_PER_TOKEN + 1


@cache
def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(file))
