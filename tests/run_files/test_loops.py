"""Loops against the definition, tried out for every period."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsweep.run_files import loops
from kvsweep.run_files.loops import Loop, find_loop


def brute_force(text, repeats, tokens):
    """The definition: a suffix of enough tokens in which every token equals the one a period before it."""
    for period in range(1, len(text) // repeats + 1):
        length = len(text)
        while not all(text[i] == text[i + period] for i in range(len(text) - length, len(text) - period)):
            length -= 1
        if length >= max(repeats * period, tokens):
            return Loop(period=period, tokens=length)
    return None


# Short blocks over few tokens, so that texts loop, nearly loop, and loop with one period inside another.
BLOCKS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
TEXTS = st.builds(
    lambda head, block, inner, times, cut: (head + (block * inner + head[:1]) * times)[: 90 - cut],
    st.lists(st.integers(0, 2), max_size=12),
    BLOCKS,
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 8),
)


@given(text=TEXTS, repeats=st.integers(2, 5), tokens=st.integers(2, 40))
def test_every_text_has_the_loop_of_the_definition(text, repeats, tokens):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "LEAST_REPEATS", repeats)
        patch.setattr(loops, "LEAST_TOKENS", tokens)
        assert find_loop(text) == brute_force(text, repeats, tokens)


def test_a_loop_takes_four_copies_and_64_tokens():
    start = list(range(100, 130))
    assert find_loop([*start, *[7] * 63]) is None
    assert find_loop([*start, *[7] * 64]) == Loop(period=1, tokens=64)
    block = list(range(40))
    assert find_loop([*start, *block * 3, *block[:39]]) is None
    loop = find_loop([*start, *block * 6, *block[:5]])
    assert loop == Loop(period=40, tokens=245)
    assert loop.count == 6


def test_a_long_text_is_searched_in_linear_time():
    """The searches of a text of a hundred thousand like tokens but its last end before a quadratic one would begin."""
    assert find_loop([0] * 100_000 + [1]) is None
    assert find_loop(([0] * 99 + [1]) * 1000 + [2]) is None
