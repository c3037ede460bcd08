"""Completions that end in endless repetition: what counts as a loop, and where it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A loop is a block of tokens, repeated at least this often at the end of a completion, ...
LEAST_REPEATS = 4
# ... with at least this many tokens in total. Rows of dots, table borders and the zeros of a number are shorter.
LEAST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The repeating end of a completion: tokens of the shortest block, and tokens from its first copy to the end."""

    period: int
    tokens: int

    @property
    def count(self) -> int:
        """Whole copies of the block; an incomplete last copy does not count."""
        return self.tokens // self.period


def find_loop(token_ids: Sequence[int]) -> Loop | None:
    """Return the loop with the shortest period at the end of a completion, or None.

    A loop with period p: each of its tokens but the first p equals the token p places before.
    """
    tokens = np.asarray(token_ids)
    for period in range(1, len(tokens) // LEAST_REPEATS + 1):
        if token_ids[-1] != token_ids[-1 - period]:  # most periods end here, without a search of the whole text
            continue
        differing = np.flatnonzero(tokens[period:] != tokens[:-period])
        start = int(differing[-1]) + 1 if differing.size else 0
        repeated = len(tokens) - start
        if repeated >= max(LEAST_REPEATS * period, LEAST_TOKENS):
            return Loop(period=period, tokens=repeated)
    return None
