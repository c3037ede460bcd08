"""Completions that end in endless repetition: what counts as a loop, and where it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Return the loop with the shortest period at the end of a completion, or None; takes linear time.

    A loop with period p: each of its tokens equals the token p places before. Z-algorithm (Gusfield 1997, Algorithms on
    Strings, section 1.4) on the reversed tokens: `same[p]` last tokens equal those p places before them, so the last
    `same[p]` + p tokens repeat with period p.
    """
    text = token_ids[::-1]
    longest = len(text) // LEAST_REPEATS
    same = [0] * (longest + 1)
    start = end = 0  # of the parts text[start:end] equal to text[: end - start], the one that ends last
    for period in range(1, longest + 1):
        length = 0
        if period < end:  # within that part, equal tokens have been counted at text[period - start]
            length = min(same[period - start], end - period)
        while period + length < len(text) and text[length] == text[period + length]:
            length += 1
        repeated = length + period
        if repeated >= max(LEAST_REPEATS * period, LEAST_TOKENS):
            return Loop(period=period, tokens=repeated)
        same[period] = length
        if period + length > end:
            start, end = period, period + length
    return None
