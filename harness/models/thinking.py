"""The tags around a model's thinking, and the parts of a text that they divide."""

from dataclasses import dataclass

from kvsweep.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ThinkTags:
    """The tags around a model's thinking. The opening tag may stand in the prompt, in the completion, or nowhere.

    A model that thinks nothing aloud has no closing tag, and its whole text is the answer.
    """

    start: str | None = "<think>"
    end: str | None = "</think>"

    def closing(self, text: str) -> int | None:
        """Character of the first closing tag behind the last opening one, where the thinking ends; None without it."""
        if self.end is None:
            return None
        found = text.find(self.end, 0 if self.start is None else max(0, text.rfind(self.start)))
        return None if found < 0 else found


def segment_text(text: str, tags: ThinkTags, *, name: str = "the text") -> tuple[slice, slice]:
    """The thinking and the answer of a text, as slices of its characters. An opening tag at its start is in neither.

    A thinking that is never closed or empty, and an empty answer, raise a UserError, which calls the text `name`.
    """
    if tags.end is None:
        raise UserError(f"{name} is of a model that does not think (model.think_end=null): choose a model that does.")
    end = tags.closing(text)
    if end is None:
        unclosed = f"{name} never closes its thinking with {tags.end}, so it has no answer to label by"
        raise UserError(f"{unclosed}: drop the text, or name the closing tag that it uses.")
    stripped = text.lstrip()
    opening = tags.start if tags.start and stripped.startswith(tags.start) else ""
    start = len(text) - len(stripped) + len(opening) if opening else 0
    if not text[end + len(tags.end) :].strip() or not text[start:end].strip():
        raise UserError(f"{name} has no thinking or no answer around {tags.end}: drop the text.")
    return slice(start, end), slice(end + len(tags.end), len(text))
