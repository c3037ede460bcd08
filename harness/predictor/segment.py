"""Where the thinking of a text ends and its answer begins. Standard library only: the grading workers import it."""

from dataclasses import dataclass

from harness.records import UserError


@dataclass(frozen=True, kw_only=True)
class Tags:
    """What a model writes around its thinking; its first opening tag may be missing, as some chat templates hold it."""

    open: str = "<think>"
    close: str = "</think>"


@dataclass(frozen=True, kw_only=True)
class Segments:
    """Character offsets: the thinking is text[thinking_start:thinking_end], the answer text[answer_start:]."""

    thinking_start: int
    thinking_end: int
    answer_start: int


def find_segments(text: str, tags: Tags | None = None) -> Segments | None:
    """The thinking ends at the first closing tag, or, if it was opened again after that, at the next one.

    None if the thinking is never closed. An opening tag at the very start is not part of the thinking.
    """
    tags = tags or Tags()
    end = text.find(tags.close)
    if end < 0:
        return None
    reopened = text.rfind(tags.open, end)
    if reopened >= 0:
        end = text.find(tags.close, reopened)
        if end < 0:
            return None
    stripped = text.lstrip()
    start = len(text) - len(stripped) + len(tags.open) if stripped.startswith(tags.open) else 0
    return Segments(thinking_start=start, thinking_end=end, answer_start=end + len(tags.close))


def segment(text: str, tags: Tags | None = None, *, name: str = "the text") -> Segments:
    """As `find_segments`, for a text that must have been closed and answered.

    Raises:
        UserError: the thinking is never closed, is empty, or nothing follows it.
    """
    tags = tags or Tags()
    found = find_segments(text, tags)
    if found is None:
        raise UserError(
            f"{name} never closes its thinking with {tags.close}: it has no answer to label by; drop it, or name the "
            "tag that it uses."
        )
    if not text[found.answer_start :].strip() or not text[found.thinking_start : found.thinking_end].strip():
        raise UserError(f"{name} has no thinking or no answer around {tags.close}: drop it.")
    return found
