"""Texts that end in endless repetition: what counts as a loop, and where the loop of a text begins."""

from collections.abc import Sequence
from dataclasses import dataclass

# A loop is a block of tokens, written at least this often at the end of a text, ...
LEAST_REPEATS = 4
# ... with at least this many tokens in all. A row of dots, a table's border or the zeros of a number are shorter.
LEAST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A text's repeating end: tokens of the shortest block that repeats, and tokens from its first copy to the end."""

    period: int
    tokens: int

    @property
    def count(self) -> int:
        """Whole copies of the block; the last one may be cut off and then does not count."""
        return self.tokens // self.period


def find_loop(token_ids: Sequence[int]) -> Loop | None:
    """The loop with the shortest period at the end of a text, None if the text ends in none; takes linear time.

    The end of a text loops with period p if each of its tokens equals the token p places before. Z-algorithm (Gusfield
    1997, Algorithms on Strings, section 1.4) on the reversed text: `same[p]` tokens at the end agree with those p
    places before them, so the last `same[p]` + p tokens repeat with period p.
    """
    text = token_ids[::-1]
    longest = len(text) // LEAST_REPEATS
    same = [0] * (longest + 1)
    start = end = 0  # the part text[start:end] that agrees with text[: end - start] and reaches furthest
    for period in range(1, longest + 1):
        length = min(same[period - start], end - period) if period < end else 0
        while period + length < len(text) and text[length] == text[period + length]:
            length += 1
        if length + period >= max(LEAST_REPEATS * period, LEAST_TOKENS):
            return Loop(period=period, tokens=length + period)
        same[period] = length
        if period + length > end:
            start, end = period, period + length
    return None
