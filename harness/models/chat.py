"""Control tokens: which texts structure a chat, and how a question that holds one is encoded as plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Encoding, Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_STAND_IN = "\ue000"  # stands for a control token before a text
_BRACKETED = re.compile(r"<\S.*>|\[\S.*\]", re.DOTALL)  # such as <tool_call> and [INST]


def any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of the texts, the longest before its parts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) matches nothing


class ControlTokens:
    """The tokens that structure a chat: special tokens, thinking tags, and other added tokens within brackets.

    Other words that were added to a vocabulary are not control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tags: Collection[str | None] = ()) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # of the control tokens, by id
        self._strips = set[str]()  # the tokens that take the blanks behind them
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.special or token.content in tags or _BRACKETED.fullmatch(token.content):
                self._texts[token_id] = token.content
            if token.rstrip:
                self._strips.add(token.content)
        self._pattern = re.compile(any_of(self._texts.values()))

    def found_in(self, text: str) -> str | None:
        """Return a control token that the tokenizer reads in a text; None if there is none."""
        match = self._pattern.search(text)
        if match:
            return match.group()
        # A tokenizer may also read other spellings of a token.
        ids = self._control_ids(self._tokenizer(text, add_special_tokens=False).input_ids)
        return str(self._tokenizer.convert_ids_to_tokens(min(ids))) if ids else None  # the lowest, so always the same

    def first_in(self, ids: Sequence[int]) -> int | None:
        """Return the first control token among the ids; None if there is none."""
        for token_id in ids:
            if token_id in self._texts:
                return token_id
        return None

    def encode_between(self, edges: list[str], question: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a template's texts with a question between them; no part of the question is a control token.

        The plain part reaches to the template's control tokens around the question. A tokenizer cuts a text there
        anyway, so the ids at the question's edges equal those of the whole text. Raises ValueError if the tokenizer
        makes control tokens from plain text.
        """
        backend = self._tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        pieces = list[Encoding]()
        plain = ""  # text since the last control token
        before = ""  # the last control token
        for number, edge in enumerate(edges):
            if number:  # the question stands between two edges
                plain += question
            control_tokens = list(self._pattern.finditer(edge))
            if control_tokens:
                start, end = control_tokens[0].start(), control_tokens[-1].end()
                pieces.append(self._plain(plain + edge[:start], before))
                pieces.append(backend.encode(edge[start:end], add_special_tokens=False))
                before = control_tokens[-1].group()
                plain = edge[end:]
            else:
                plain += edge
        merged = Encoding.merge([*pieces, self._plain(plain, before)])
        return list(backend.post_process(merged, add_special_tokens=add_special_tokens).ids)

    def _plain(self, text: str, before: str) -> Encoding:
        """Encode a text without control tokens, as it is read behind the control token `before`, if any.

        A tokenizer may write a space only in front of a whole text, and a token may take the blanks behind it.
        """
        stand_in = _STAND_IN if before else ""
        if before in self._strips:
            text = text.lstrip()
        encoding = self._plain_tokenizer.encode(stand_in + text, add_special_tokens=False)
        # The stand-in is one character and one token: as many tokens as it has characters are cut off from the left.
        encoding.truncate(len(encoding) - len(stand_in), direction="left")
        if self._control_ids(encoding.ids):
            raise ValueError("the tokenizer makes control tokens of plain text")
        return encoding

    def _control_ids(self, ids: list[int]) -> set[int]:
        """Return the control tokens among the ids, except the token for unknown characters."""
        return self._texts.keys() & set(ids).difference([self._tokenizer.unk_token_id])

    def encode_behind(self, text: str) -> list[int]:
        """Token ids of a text with its control tokens, as it is read behind another control token."""
        # The first id is the stand-in's.
        return list(self._whole_tokenizer.encode(_STAND_IN + text, add_special_tokens=False).ids[1:])

    @cached_property
    def _whole_tokenizer(self) -> Tokenizer:
        return self._copy(())

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """Return the tokenizer without control tokens and with their stand-in.

        Its own option to read control tokens as text knows only special tokens.
        """
        return self._copy(self._texts.keys())

    def _copy(self, without: Collection[int]) -> Tokenizer:
        """Return the tokenizer without some added tokens, and with the character that stands for one before a text."""
        fields = json.loads(self._tokenizer.backend_tokenizer.to_str())
        fields["added_tokens"] = [token for token in fields["added_tokens"] if token["id"] not in without]
        fields |= {"truncation": None, "padding": None}
        copy = Tokenizer.from_str(json.dumps(fields))
        copy.add_special_tokens([AddedToken(_STAND_IN, normalized=False)])
        return copy
