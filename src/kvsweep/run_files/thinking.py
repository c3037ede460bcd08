"""Parse a completion: where its thinking ends, which part is the answer, and how it ended.

Only this module does so, for the engine, for servers and for other programs' files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from kvsweep.messages.errors import UserError

# How models write thinking tags: a word inside the model's own signs, opening and closing.
_THINKING = r"(?:\w+[:_])?(?:think(?:ing)?|thoughts?|reasoning|reflection|scratchpad)"
_SHAPES = (
    ("<|begin_of_{}|>", "<|end_of_{}|>"),
    ("<|start_{}|>", "<|end_{}|>"),
    ("<|START_{}|>", "<|END_{}|>"),
    ("<|{}_start|>", "<|{}_end|>"),
    ("<|{}|>", "<|/{}|>"),
    ("<{}>", "</{}>"),
    ("◁{}▷", "◁/{}▷"),
    ("[{}]", "[/{}]"),
)
# Tags of gpt-oss (also without special tokens), Gemma 4, MedGemma, Granite 3.2 and Apriel.
_FIXED = (
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
    (None, "assistantfinal"),
    ("<|channel>thought", "<channel|>"),
    ("<unused94>", "<unused95>"),
    ("Here is my thought process:", "Here is my response:"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)


_WORDS = 5  # with the opening tag, from which on the words within a tag of any name may be thinking


# What stands before a tag that an answer speaks of: a word and a space, or a quote.
_BEFORE_MENTION = re.compile(r"""(?:[^>\s][ \t]+|[`'"“])\Z""")


@dataclass(frozen=True, kw_only=True)
class ThinkTags:
    """The tags around a model's thinking. Without a closing tag a model does not think: all text is the answer."""

    start: str | None = "<think>"
    end: str | None = "</think>"

    def closing(self, text: str) -> int | None:
        """Position of the first closing tag behind the last opening tag, where thinking ends; None without it.

        An opening tag in the midst of a sentence is a mention, as in an answer about tags.
        """
        if self.end is None:
            return None
        opening = -1 if self.start is None else text.rfind(self.start)
        # From the last opening tag back to one that is no mention, by the few characters before it.
        while opening > 0 and _BEFORE_MENTION.search(text[max(0, opening - 16) : opening]):
            opening = text.rfind(str(self.start), 0, opening)
        closing = text.find(self.end, max(0, opening))
        return None if closing < 0 else closing


DEFAULT_TAGS = ThinkTags()


class Thinking(NamedTuple):
    """A completion's thinking tags, which of the two it contains, and whether their name means thinking."""

    tags: ThinkTags
    opens: bool
    closes: bool
    named: bool


def _pattern(words: str, pairs: Sequence[tuple[str | None, str]]) -> re.Pattern[str]:
    """Any tag; the group's name has the number of its pair behind `o` for an opening and `c` for a closing tag.

    The opening tag of `("<{}>", "</{}>")`, which is pair 5: `(?P<o5><(?i:WORDS)>)`.
    """
    groups = []
    for number, pair in enumerate(pairs):
        for side, tag in zip("oc", pair, strict=True):
            if tag:
                pattern = re.escape(tag).replace(r"\{\}", f"(?i:{words})")
                groups.append(f"(?P<{side}{number}>{pattern})")
    return re.compile("|".join(groups))


_PAIRS = (*_SHAPES, *_FIXED)
_TAG = _pattern(_THINKING, _PAIRS)
_ANY_TAG = _pattern(r"(?!answer|box)\w{1,40}", _SHAPES)


@lru_cache
def _tags(group: str, written: str) -> ThinkTags:
    """The pair of tags of which this `group` of the pattern has matched one, as `written`.

    "c5" and "</seed:think>" -> "<seed:think>" and "</seed:think>".
    """
    start, end = _PAIRS[int(group[1:])]
    shape = end if group.startswith("c") else str(start)
    before, _, after = shape.partition("{}")
    word = written.removeprefix(before).removesuffix(after)
    return ThinkTags(start=start and start.format(word), end=end.format(word))


_thinking = lru_cache(Thinking)  # one object for all texts of a kind


def thinking_of(text: str, *, named: bool = True) -> Thinking | None:
    """The thinking that a text itself shows, by the tag it begins with, or else its first closing one; None without.

    With `named=False` the tag may have any name: other texts of the same model tell if it is one of thinking. Then it
    closes if there are words within and something behind, which headings and marks around a whole text have not.
    """
    tags = _shown_tags(text, named=named)
    if tags is None:
        return None
    opens = tags.start is not None and tags.start in text
    closing = tags.closing(text)
    closes = closing is not None
    if closing is not None and not named:
        answer = text[closing + len(tags.end or "") :].strip()
        closes = answer != "" and len(text[:closing].split()) >= _WORDS
    return _thinking(tags, opens, closes, named)


def _shown_tags(text: str, *, named: bool) -> ThinkTags | None:
    """The tags of `thinking_of`: those that open the text, else those of the first closing tag; None without any.

    A text without a closing tag shows the first opening one, wherever it stands, only if its tags are `named`.
    """
    first = None
    pattern = _TAG if named else _ANY_TAG
    for match in pattern.finditer(text):
        tags = _tags(str(match.lastgroup), match[0])
        opens = match[0] == tags.start
        if first is None:
            first = tags
            begins_text = not text[: match.start()].strip()
            if opens and begins_text:
                return tags
        # Within a text a pair of any name is a mark of the answer, such as <b> and </b>.
        if not opens and (named or str(tags.start) not in text):
            return tags
    return first if named else None


def answer_part(text: str, tags: ThinkTags = DEFAULT_TAGS) -> str | None:
    """Return the text after the thinking (`ThinkTags.closing`) without end tokens; None if thinking never closed.

    For a model without tags the whole text is the answer, unless the text itself shows another model's thinking.
    """
    text = without_end(text)
    if tags.end is None:
        thinking = thinking_of(text)
        if thinking is None:
            return text
        tags = thinking.tags
    closing = tags.closing(text)
    if closing is None:
        return None
    return text[closing + len(tags.end or "") :]


def segment_text(text: str, tags: ThinkTags, *, name: str = "the text") -> tuple[slice, slice]:
    """Return thinking and answer as slices of the text's characters. An opening tag at the start is in neither.

    Raises UserError, which calls the text `name`, for a thinking that is empty or never closed, and an empty answer.
    """
    if tags.end is None:
        raise UserError(f"{name} is of a model that does not think (model.think_end=null): choose a model that does.")
    end = tags.closing(text)
    if end is None:
        unclosed = f"{name} never closes its thinking with {tags.end}, so it has no answer to label by"
        raise UserError(f"{unclosed}: drop the text, or name the closing tag that it uses.")
    start = 0
    stripped = text.lstrip()
    if tags.start and stripped.startswith(tags.start):
        start = len(text) - len(stripped) + len(tags.start)
    thinking = slice(start, end)
    answer = slice(end + len(tags.end), len(text))
    if not text[thinking].strip() or not text[answer].strip():
        raise UserError(f"{name} has no thinking or no answer around {tags.end}: drop the text.")
    return thinking, answer


def joined(thinking: str, answer: str | None, tags: ThinkTags, *, ended: bool) -> str:
    """Join a thinking and an answer that a program has split; a truncated completion may leave the thinking open."""
    closed = f"{tags.end}{answer or ''}" if answer or ended else ""
    return f"{tags.start or ''}{thinking}{closed}"


# --- Ends ----------------------------------------------------------------------------------------------------

# Words of reasons: "max_new_tokens", "FinishReason.MAX_TOKENS", "end_turn", "eos_token" are made of these alone.
_CUT_OFF = {"length", "max", "limit", "truncated", "exceeded"}
_STOPPED = {"stop", "stopped", "end", "ended", "eos", "complete", "completed", "finished"}
_NEITHER = {"finish", "finishreason", "stopreason", "reason", "new", "output", "model", "context", "window", "token"}
_NEITHER |= {"tokens", "sequence", "str", "word", "turn", "of", "text", "type"}


def ending(reason: object) -> Literal["stop", "length"] | None:
    """Return what a program's reason for the end means; None without a reason, or with an unknown word."""
    text = reason.get("type") if isinstance(reason, dict) else reason
    if not isinstance(text, str):
        return None
    words = set(re.findall("[a-z]+", text.lower()))
    if not words <= _CUT_OFF | _STOPPED | _NEITHER:
        return None
    if words & _CUT_OFF:
        return "length"
    return "stop" if words & _STOPPED else None


# A token that ends a text or a turn, by its signs or its name. What closes a box belongs to the answer.
_NAMES = r"eo[a-z]|bos|pad|unk|s|im_end|turn|return|end_?of_?\w+"
_SIGNS = rf"<[|｜](?!end_of_box)[\w▁-]+[|｜]>|\[\|\w+\|\]|</?(?:{_NAMES})>|<turn\|>|\[(?:EOS|PAD|SEP)\]"
_END = re.compile(rf"(?:\s*(?:{_SIGNS}))+\s*\Z", re.IGNORECASE)
_LONGEST = 2000  # characters of such tokens that are looked at


def without_end(text: str) -> str:
    """Return the text without the special tokens that a server or program has left at its end."""
    tail = text[-_LONGEST:]
    if not tail.rstrip().endswith((">", "]")):
        return text
    return text[: -len(tail)] + _END.sub("", tail)
