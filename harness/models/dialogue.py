"""A model's prompt and tokens in text: chat template, tokenizer, and thinking tags."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from transformers.utils.chat_template_utils import _compile_jinja_template

from kvsweep.harness.models.chat import ControlTokens, any_of
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.hub import first_line
from kvsweep.messages.errors import UserError
from kvsweep.messages.escape import as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Placeholders for a question and an answer, to see the template's own text; no template contains them.
OTHER_QUESTION = "what kvsweep asks in place of a question"
_OTHER_ANSWER = "what kvsweep answers in place of a model"


@dataclass(frozen=True)
class Dialogue:
    """A model's tokenizer and chat template. `embedded` is how many token ids the model embeds."""

    config: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    embedded: int

    @property
    def thinks(self) -> bool:
        return self.config.think_end is not None

    def closing_tag(self, ids: list[int]) -> range | None:
        """Return the tokens of the tag that closes the thinking, as grading reads the text; None if none does.

        The tag may begin and end inside a token, and other tokens than its own may write it.
        """
        text = self.decode(ids)
        start = self.config.tags.closing(text)
        if start is None:
            return None
        end = start + len(str(self.config.think_end))

        def whole_characters(count: int) -> tuple[int, int]:
            """Return the fewest tokens, `count` or more, that end between characters of the text, and their characters.

            A character may take several tokens; some of these tokens decode to other text than the character.
            """
            decoded = self.decode(ids[:count])
            while not text.startswith(decoded):
                count += 1
                decoded = self.decode(ids[:count])
            return count, len(decoded)

        def characters(count: int) -> int:
            return whole_characters(count)[1]

        counts = range(len(ids) + 1)
        # The most tokens that cover no character of the tag, and the fewest that cover all of it.
        first = bisect_right(counts, start, key=characters) - 1
        stop, _ = whole_characters(bisect_left(counts, end, key=characters))
        return range(first, stop)

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Return token ids of one user message in the chat template, up to where the model starts to think.

        No part of the message becomes a control token.
        """
        # A stored question may hold half a character, which a tokenizer refuses.
        prompt = as_text(prompt)
        text = self.asked(prompt)
        # A template writes its special tokens in `text`; without one the tokenizer adds some that `text` has not.
        adds = self.config.chat_template == "none"
        # One call wherever that is right, since a tokenizer may merge characters across the question's edges.
        control_token = self._control_tokens.found_in(prompt)
        if control_token is None:
            ids = self.encode(text, add_special_tokens=adds)
        else:
            try:
                edges, question = self._edges(prompt, text)
                pieces = self._control_tokens.encode_between(edges, question, add_special_tokens=adds)
            except Exception as error:  # each kind of tokenizer fails in its own way
                place = self.config.place
                holds = f"the question {prompt!r:.60} holds {control_token!r:.40}, a control token of {place}"
                raise UserError(
                    f"{holds}, which its tokenizer or chat template cannot take as plain text: "
                    "correct the problem, or leave the problem out."
                ) from error
            ids = self._embedded(pieces)
        added = self.encode("", add_special_tokens=adds)
        self._check_said(text, [token for token in ids if token not in added])
        return ids

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Return token ids of a completion's text, as behind its prompt; raises UserError unless they say the text."""
        ids = self._embedded(self._control_tokens.encode_behind(text))
        self._check_said(text, list(ids))
        return ids

    def _check_said(self, text: str, ids: list[int]) -> None:
        """Refuse tokens that do not say the text: a tokenizer may drop a character for which it has no token.

        A token for unknown characters stands for any.
        """
        decoded = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        expected, actual = self._normal(text), self._normal(str(decoded))
        if actual == expected:
            return
        unknown = self.tokenizer.unk_token
        if unknown is not None and unknown in actual:
            pieces = [glob.escape("".join(piece.split())) for piece in actual.split(unknown)]
            # fnmatch takes each piece at its first place: trying all places could take forever.
            if re.fullmatch(fnmatch.translate("*".join(pieces)), "".join(expected.split())):
                return
        lost = ", ".join(sorted({*expected} - {*actual})) or "characters"
        raise UserError(
            f"the tokenizer of {self.config.place} drops or changes {lost} of the text {text!r:.60}: "
            "take the tokenizer of the model's own folder, or leave the text out."
        )

    def _normal(self, text: str) -> str:
        """Return a text as the tokenizer normalises it, without the blanks that may stand beside added tokens."""
        return self._beside_added.sub(r"\1", self._normalised(text))

    def _normalised(self, text: str) -> str:
        normalizer = self.tokenizer.backend_tokenizer.normalizer
        normalised = text if normalizer is None else normalizer.normalize_str(text)
        # SentencePiece writes a space as ▁, and some tokenizers add or drop one.
        return re.sub("[ ▁]+", " ", normalised).strip()

    @cached_property
    def _beside_added(self) -> re.Pattern[str]:
        """Match an added token with the blanks around it, which a tokenizer may take, or write by itself."""
        texts = {self._normalised(token.content) for token in self.tokenizer.added_tokens_decoder.values()}
        return re.compile(rf"\s*({any_of(texts - {'', self.tokenizer.unk_token})})\s*")

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, (self.config.think_start, self.config.think_end))

    def _edges(self, prompt: str, text: str) -> tuple[list[str], str]:
        """Return the template's texts around a question, and the question as the template writes it.

        The template may contain the question's own words, so another question shows where the edges are.
        """
        edges = self.asked(OTHER_QUESTION).split(OTHER_QUESTION)
        for question in (prompt, prompt.strip()):  # many templates strip a message
            if question.join(edges) == text:
                return edges, question
        raise ValueError("the chat template writes other text around this question")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Return token ids of a text; raises UserError for an id beyond the model's embedding (added tokens)."""
        return self._embedded(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _embedded(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the ids as a tuple; raises UserError for one beyond the model's embedding."""
        rows = self.embedded
        if ids and max(ids) >= rows:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            raise UserError(
                f"the tokenizer of {self.config.place} has the token {token!r:.40} ({max(ids)}) in a text, "
                f"and the model embeds {rows:,} tokens: take the tokenizer of the model's own folder."
            )
        return tuple(ids)

    @cached_property
    def thinking_opened_by(self) -> Literal["template", "forced", "model"]:
        """Who writes the opening thinking tag: the chat template, `force_think`, or the model itself."""
        if self.thinking_behind(OTHER_QUESTION, self._templated(OTHER_QUESTION)) == "open":
            return "template"
        return "forced" if self.config.force_think else "model"

    def thinking_behind(self, question: str, prompt: str) -> Literal["open", "closed", "unopened"]:
        """Return whether a templated prompt leaves the thinking open behind its question, closes it, or neither."""
        if not self.thinks:
            return "unopened"
        tail = self._behind_question  # a question may contain a tag; the template's tag comes last
        if not prompt.endswith(tail):  # what the template writes here depends on the question
            words = question.strip()
            # Behind an empty question nothing is looked at: every text contains it everywhere.
            tail = prompt.rpartition(words)[2] if words else ""
        start = self.config.think_start
        opened = tail.rfind(start) if start else -1
        closed = tail.rfind(str(self.config.think_end))
        if opened == -1 and closed == -1:
            return "unopened"
        return "closed" if closed > opened else "open"

    @cached_property
    def _behind_question(self) -> str:
        return self._templated(OTHER_QUESTION).rpartition(OTHER_QUESTION)[2]

    @cached_property
    def turn_end(self) -> int | None:
        """The control token that the chat template writes behind an answer; None if it writes none."""
        if self.config.chat_template == "none":
            return None
        turn = [OTHER_QUESTION, _OTHER_ANSWER]
        try:
            always_asks = self._templated(OTHER_QUESTION, asks=False) == self._templated(OTHER_QUESTION)
            if always_asks:  # then the text ends with what opens an answer: a second question follows the turn
                turn.append(OTHER_QUESTION)
            text = self._templated(*turn, asks=False)
        except UserError:  # the template takes no answer
            return None
        # Such as <user>QUESTION<assistant>ANSWER<end>, or with <user>QUESTION<assistant> once more.
        before, _, behind = text.partition(_OTHER_ANSWER)
        if always_asks:  # look between the two turns
            behind = behind.partition(OTHER_QUESTION)[0]
            if before.partition(OTHER_QUESTION)[0].endswith(behind):
                return None  # the same text stands before the first question, so it opens a turn and ends none
        return self._control_tokens.first_in(self.encode(behind))

    def asked(self, prompt: str) -> str:
        """Return the prompt text, with the opening thinking tag if the template does not write it.

        Raises UserError for a template that leaves out or changes the question: all problems would be one prompt.
        """
        text = self._templated(prompt)
        name = self.config.name
        if prompt.strip() not in text:
            left_out = f"model={name} has a chat template that leaves the question out or changes it"
            hint = "correct the template, name another model, or give model.chat_template=none for a base model"
            raise UserError(f"{left_out}, and the question must stand in the text as it is: {hint}.")
        thinking = self.thinking_behind(prompt, text)
        if thinking == "closed":
            closes = f"the chat template of model={name} closes the thinking ({self.config.think_end}) itself"
            hint = "give model.think_end=null, or a variable as model.template={enable_thinking: true} to leave it open"
            raise UserError(f"{closes}, so that a text is an answer alone: {hint}.")
        must_open = self.config.force_think and thinking == "unopened"
        return f"{text}{self.config.think_start}\n" if must_open else text

    def _templated(self, *texts: str, asks: bool = True) -> str:
        """Return texts of user and assistant in turn in the chat template; at its end it `asks` for more."""
        if self.config.chat_template == "none":
            return texts[0]
        roles = itertools.cycle(("user", "assistant"))  # the template writes a system prompt itself
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        variables = self.config.template or {}
        values = {**self.tokenizer.special_tokens_map, **variables}
        # In place of transformers' function of this name, which writes the day's date.
        strftime_now = datetime.fromisoformat(self.config.today).strftime
        try:
            template = self.tokenizer.get_chat_template()
            for name in variables:
                if not re.search(rf"\b{re.escape(name)}\b", template):
                    raise ValueError(f"it reads no variable {name}, which model.template sets")
            compiled: Any = _compile_jinja_template(template)
            chat = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": asks}
            return str(compiled.render(**chat, strftime_now=strftime_now, **values))
        except Exception as error:  # a template may raise anything
            raise UserError(
                f"model={self.config.name} has no chat template that takes a question ({first_line(error)}): "
                "give model.chat_template=none for a base model."
            ) from error

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))
