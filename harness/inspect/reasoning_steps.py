"""Steps as token ranges of a thinking, given by pieces, each token's text; a broken pattern raises a UserError."""

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from kvsweep.analysis.format import EQUATION
from kvsweep.base.errors import UserError

PARAGRAPHS = r"\n\s*\n"
SENTENCES = r"(?<=[.!?])\s+|\n+"


def paragraphs(pieces: Sequence[str], split: str = PARAGRAPHS) -> list[range]:
    """Tokens of each step. A step begins with the first token that lies wholly behind a match of `split`."""
    return _parts(pieces, [match.end() for match in _pattern("--split", split).finditer("".join(pieces))])


def derivations(pieces: Sequence[str], split: str = PARAGRAPHS) -> list[range]:
    """Tokens of each step that derives a number: a sentence with an equation, and those behind it that go on with it.

    A sentence goes on with an equation if it has a number, and neither an equation nor a paragraph begins there, as in
    `1+8=9. So c is 9.` A text without any equation is cut into its paragraphs, and if it has only one, its sentences.
    """
    text = "".join(pieces)
    cuts = [0, *(match.end() for match in re.finditer(SENTENCES, text)), len(text)]
    paragraph_ends = [match.end() for match in _pattern("--split", split).finditer(text)]
    steps: list[list[int]] = []
    goes_on = False
    for begin, end in pairwise(cuts):
        sentence = text[begin:end]
        if re.search(EQUATION, sentence):
            steps.append([begin, end])
            goes_on = True
        elif goes_on := goes_on and begin not in paragraph_ends and re.search(r"\d", sentence) is not None:
            steps[-1][1] = end
    return [token_range(pieces, *step) for step in steps] if steps else _parts(pieces, paragraph_ends or cuts)


def _parts(pieces: Sequence[str], ends: Sequence[int]) -> list[range]:
    """Cut the tokens at characters of the text; a part begins with the first token wholly behind its cut."""
    begins = [0, *accumulate(map(len, pieces))][:-1]
    numbers = np.searchsorted(ends, begins, side="right")
    bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(pieces)]
    return [range(*bound) for bound in pairwise(bounds)]


def matches(pieces: Sequence[str], pattern: str = EQUATION) -> list[range]:
    found = _pattern("--find", pattern).finditer("".join(pieces))
    return [token_range(pieces, *match.span()) for match in found if match.group()]


def given(text: str) -> list[range]:
    """Read `0-31,40-80`, first and last tokens of steps in the thinking; disorder and overlap raise a UserError."""
    words = [re.fullmatch(r"\s*(\d+)-(\d+)\s*", word) for word in text.split(",")]
    steps = [range(int(word[1]), int(word[2]) + 1) for word in words if word]
    if len(steps) < len(words) or not all(steps) or any(a.stop > b.start for a, b in pairwise(steps)):
        raise UserError(f"--steps {text} cannot be used: write first and last tokens in order, as in 0-31,40-80.")
    return steps


def numbers(steps: Sequence[range], tokens: int) -> list[int]:
    """The number of each token's step, ascending from 0. Tokens between two steps count as a step as well."""
    bounds = [bound for step in steps for bound in (step.start, step.stop)]
    found = np.searchsorted(np.unique(bounds), np.arange(tokens), side="right")
    return np.unique(found, return_inverse=True)[1].tolist()


def token_range(pieces: Sequence[str], begin: int, end: int) -> range:
    """The tokens that hold any of the characters from `begin` up to `end` of the joined pieces."""
    ends = list(accumulate(map(len, pieces)))
    return range(int(np.searchsorted(ends, begin, side="right")), int(np.searchsorted(ends, end, side="left")) + 1)


def _pattern(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{option} {pattern} is no regular expression ({error}): correct it.") from error
