"""What a model is asked, and what its tokens say: the chat template, the tokenizer, and the tags of the thinking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from kvsweep.errors import UserError
from kvsweep.harness.models.chat import ControlTokens, TemplateFault, templated
from kvsweep.harness.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Stand in for a question and an answer where only the template's own text is wanted; no template has them.
OTHER_QUESTION = "what kvsweep asks in place of a question"
_OTHER_ANSWER = "what kvsweep answers in place of a model"


@dataclass(frozen=True)
class Dialogue:
    """A model's tokenizer and chat template. `embedded` is the number of token ids that the model embeds."""

    config: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    embedded: int

    @cached_property
    def think_end_ids(self) -> tuple[int, ...]:
        """Token ids of the tag that closes the thinking, if any; a UserError where the tokenizer cannot write it."""
        tag = self.config.think_end
        if tag is None:
            return ()
        ids = self.tokenizer.encode(tag, add_special_tokens=False)
        if not ids or self.tokenizer.unk_token_id in ids:
            unknown = f"model.think_end={tag} cannot be written by the tokenizer of {self.config.place}"
            mend = "name the tag that this model closes its thinking with, or null if it thinks nothing aloud"
            raise UserError(f"{unknown}: {mend}.")
        return tuple(ids)

    @property
    def think_end_id(self) -> int | None:
        return self.think_end_ids[0] if len(self.think_end_ids) == 1 else None

    @property
    def thinks(self) -> bool:
        return self.config.think_end is not None

    def thinking_tokens(self, ids: list[int]) -> int | None:
        """Tokens before the tag that closes the thinking; None where the text has no such tag."""
        if self.think_end_id is not None:
            return ids.index(self.think_end_id) if self.think_end_id in ids else None
        # A tag of several tokens may begin and end within one: the number of whole tokens in the text before it.
        text = self.decode(ids)
        found = text.find(self.config.think_end) if self.config.think_end else -1
        return None if found < 0 else self._tokens_within(ids, text, found)

    def tag_tokens(self, ids: list[int], thinking: int) -> int:
        """Tokens of the tag behind a thinking of so many tokens, up to its end; 1 where there is no such tag."""
        if self.think_end_id is not None or self.config.think_end is None or thinking == len(ids):
            return 1
        text = self.decode(ids)
        end = text.find(self.config.think_end) + len(self.config.think_end)
        return self._whole(ids, text, self._tokens_within(ids, text, end - 1) + 1)[0] - thinking

    def _tokens_within(self, ids: list[int], text: str, chars: int) -> int:
        """The most tokens from the start of a text that are so many of its first characters, or fewer."""
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            count, length = self._whole(ids, text, middle)
            low, high = (count, high) if length <= chars else (low, middle - 1)
        return low

    def _whole(self, ids: list[int], text: str, count: int) -> tuple[int, int]:
        """Tokens, as few as `count` or more, whose characters the text begins with, and how many characters these are.

        A character may be several tokens, and what a part of these decodes to is nothing of the text.
        """
        parts = ((size, self.decode(ids[:size])) for size in range(count, len(ids) + 1))
        return next((size, len(part)) for size, part in parts if text.startswith(part))

    def prompt_ids(self, prompt: str) -> tuple[int, ...]:
        """Token ids of one user message in the chat template, up to where the model begins to think.

        Nothing in the message is a control token, whatever it holds.
        """
        # A stored question may hold half a character, which a tokenizer refuses.
        prompt = prompt.encode(errors="replace").decode()
        text = self.asked(prompt)
        add_special_tokens = self.config.chat_template == "none"
        # One call wherever it is right, since a tokenizer may merge characters across the question's edges.
        if (found := self._control_tokens.found_in(prompt)) is None:
            return self.encode(text, add_special_tokens=add_special_tokens)
        try:
            edges, question = self._edges(prompt, text)
            ids = self._control_tokens.encode_between(edges, question, add_special_tokens=add_special_tokens)
        except Exception as error:  # each kind of tokenizer fails in its own way
            held = f"the question {prompt!r:.60} holds {found!r:.40}, a control token of {self.config.place}"
            cannot = "which its tokenizer or chat template cannot take as plain text"
            raise UserError(f"{held}, {cannot}: correct the problem, or leave the problem out.") from error
        return self._embedded(ids)

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.tokenizer, (self.config.think_start, self.config.think_end))

    def _edges(self, prompt: str, text: str) -> tuple[list[str], str]:
        """What the template writes around a question, and the question as it stands in the text.

        The question itself may occur in the template, so the edges are those of another question.
        """
        edges = self.asked(OTHER_QUESTION).split(OTHER_QUESTION)
        for question in (prompt, prompt.strip()):
            if question.join(edges) == text:
                return edges, question
        raise ValueError("the chat template writes other text around this question")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Token ids of a text; a UserError for an id beyond the model's embedding, as added tokens may have."""
        return self._embedded(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)

    def _embedded(self, ids: Sequence[int]) -> tuple[int, ...]:
        rows = self.embedded
        if ids and max(ids) >= rows:
            token = self.tokenizer.convert_ids_to_tokens(max(ids))
            beyond = f"the tokenizer of {self.config.place} has the token {token!r:.40} ({max(ids)}) in a text"
            raise UserError(
                f"{beyond}, and the model embeds {rows:,} tokens: take the tokenizer of the model's own folder."
            )
        return tuple(ids)

    @cached_property
    def thinking_opened_by(self) -> Literal["template", "forced", "model"]:
        """The writer of the tag that opens the thinking: the chat template, `force_think`, or the model itself."""
        if self.thinking_behind(OTHER_QUESTION, self._templated(OTHER_QUESTION)) == "open":
            return "template"
        return "forced" if self.config.force_think else "model"

    def thinking_behind(self, prompt: str, text: str) -> Literal["open", "closed", "unopened"]:
        """Whether a text that asks a question, behind the question, leaves the thinking open, closes it, or neither."""
        if not self.thinks:
            return "unopened"
        behind = self._behind_question  # since a question may be a tag, and the template has the last one
        if not text.endswith(behind):  # it depends on the question
            behind = text.rpartition(prompt.strip() or text)[2]
        opened, closed = (behind.rfind(tag) if tag else -1 for tag in (self.config.think_start, self.config.think_end))
        return "unopened" if opened == closed == -1 else "closed" if closed > opened else "open"

    @cached_property
    def _behind_question(self) -> str:
        return self._templated(OTHER_QUESTION).rpartition(OTHER_QUESTION)[2]

    @cached_property
    def turn_end(self) -> int | None:
        """The control token that the chat template writes behind an answer; None where none is seen."""
        if self.config.chat_template == "none":
            return None
        turn = (OTHER_QUESTION, _OTHER_ANSWER)
        try:
            always_asks = self._templated(OTHER_QUESTION, asks=False) == self._templated(OTHER_QUESTION)
            text = self._templated(*turn, *turn[:always_asks], asks=False)
        except UserError:  # it takes no answer
            return None
        before, _, behind = text.partition(_OTHER_ANSWER)
        if always_asks:  # so that the text ends with what opens an answer: look between two turns instead
            behind = behind.partition(OTHER_QUESTION)[0]
            if before.partition(OTHER_QUESTION)[0].endswith(behind):
                return None  # it opens a turn
        return self._control_tokens.first_in(list(self.encode(behind)))

    def asked(self, prompt: str) -> str:
        """The text that asks a question, with the tag that opens the thinking where the template writes none.

        A template that leaves the question out or changes it raises a UserError: all problems would be one prompt.
        """
        text = self._templated(prompt)
        if prompt.strip() not in text:
            left_out = f"model={self.config.name} has a chat template that leaves the question out or changes it"
            mend = "correct the template, name another model, or give model.chat_template=none for a base model"
            raise UserError(f"{left_out}, and the question must stand in the text as it is: {mend}.")
        if (thinking := self.thinking_behind(prompt, text)) == "closed":
            name, tag = self.config.name, self.config.think_end
            closes = f"the chat template of model={name} closes the thinking ({tag}) itself"
            mend = "give model.think_end=null, or a variable as model.template={enable_thinking: true} to leave it open"
            raise UserError(f"{closes}, so that a text is an answer alone: {mend}.")
        forced = self.config.force_think and thinking == "unopened"
        return f"{text}{self.config.think_start}\n" if forced else text

    def _templated(self, prompt: str, *texts: str, asks: bool = True) -> str:
        if self.config.chat_template == "none":
            return prompt
        how: dict[str, Any] = {"today": self.config.today, "variables": self.config.template or {}, "asks": asks}
        try:
            return templated(self.tokenizer, prompt, *texts, **how)
        except TemplateFault as fault:
            lacks = f"model={self.config.name} has no chat template that takes a question ({str(fault).rstrip('.')})"
            raise UserError(f"{lacks}: give model.chat_template=none for a base model.") from fault

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))
