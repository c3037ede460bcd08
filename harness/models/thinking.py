"""Where a completion's question, thinking and answer lie: one rule for texts (grading) and for tokens (importance)."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from analysis.records import UserError


@dataclass(frozen=True, kw_only=True)
class ThinkTags:
    """The tags around a model's thinking. The opening one may be in the prompt, in the completion, or nowhere."""

    start: str = "<think>"
    end: str = "</think>"

    def closing(self, text: str) -> int | None:
        """Character at which the tag stands that ends the thinking of a completion; None if none does.

        It is the first closing tag; where thinking is opened again before it, the one that closes the latest opening,
        and a thinking that is opened again after it and never closed leaves no answer.
        """
        first = text.find(self.end)
        reopened = text.rfind(self.start)
        if first < 0 or reopened < first:
            return first if first >= 0 else None
        last = text.find(self.end, reopened)
        return last if last >= 0 else None


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Token ranges of prompt + completion, in order and without gaps; positions count from the prompt's first token.

    Attributes:
        question: the prompt, chat template and an opening tag that it gives included.
        opening: what the completion has up to the end of its own opening tag; empty if the prompt opens the thinking.
        thinking: from there to the closing tag, or to the end of a completion that never closes it.
        closing: the tokens of the closing tag; empty if it never comes.
        answer: all after it, a stop token included.
    """

    question: range
    opening: range
    thinking: range
    closing: range
    answer: range

    @property
    def closed(self) -> bool:
        """Whether the thinking ended."""
        return len(self.closing) > 0


@dataclass(frozen=True, kw_only=True)
class TextSegments:
    """Character offsets: the thinking is text[thinking_start:thinking_end], the answer text[answer_start:]."""

    thinking_start: int
    thinking_end: int
    answer_start: int


def segment_text(text: str, tags: ThinkTags, *, name: str = "the text") -> TextSegments:
    """Divide a text that thought, closed its thinking, and answered; an opening tag at its start is no thinking.

    Raises:
        UserError: the thinking is never closed, is empty, or nothing follows it.
    """
    end = tags.closing(text)
    if end is None:
        raise UserError(
            f"{name} never closes its thinking with {tags.end}: it has no answer to label by; drop it, or name the "
            "tag that it uses."
        )
    stripped = text.lstrip()
    start = len(text) - len(stripped) + len(tags.start) if stripped.startswith(tags.start) else 0
    if not text[end + len(tags.end) :].strip() or not text[start:end].strip():
        raise UserError(f"{name} has no thinking or no answer around {tags.end}: drop it.")
    return TextSegments(thinking_start=start, thinking_end=end, answer_start=end + len(tags.end))


def segment(
    question_length: int,
    completion_ids: Sequence[int],
    *,
    tags: ThinkTags,
    decode: Callable[[Sequence[int]], str],
) -> Segments:
    """Divide question_length prompt tokens and the completion's tokens by the thinking tags.

    Works on the decoded text, so a tag may be one token or several, also ones that share characters with what
    surrounds it: a token that holds any of a tag's characters counts to the tag.

    Args:
        question_length: tokens of the prompt.
        completion_ids: tokens after it.
        tags: the model's tags.
        decode: the text of token ids, tags included, of which each prefix's text begins the whole's.
    """
    text = decode(completion_ids)
    close = tags.closing(text)
    opened = 0
    if text.lstrip().startswith(tags.start) and (close is None or text.find(tags.start) < close):
        opened = _tokens_up_to(text.find(tags.start) + len(tags.start), text, completion_ids, decode)
    thought, answer = len(completion_ids), len(completion_ids)
    if close is not None:
        answer = _tokens_up_to(close + len(tags.end), text, completion_ids, decode)
        begun = _tokens_up_to(close + 1, text, completion_ids, decode)
        thought = max(opened, begun - 1)
    edges = [0, *(question_length + n for n in (0, opened, thought, answer, len(completion_ids)))]
    question, opening, thinking, closing, rest = (range(a, b) for a, b in itertools.pairwise(edges))
    return Segments(question=question, opening=opening, thinking=thinking, closing=closing, answer=rest)


def _tokens_up_to(end: int, text: str, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """The fewest first tokens whose text holds the first `end` characters."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if decode(ids[:middle])[:end] == text[:end]:
            high = middle
        else:
            low = middle + 1
    return low
