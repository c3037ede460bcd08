"""A user's policy selects rows: whatever its code does wrong is named in one sentence."""

import inspect
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from kvsweep.compression.policy import CacheView, Policy, Selection, SelectionError, check_selection

UNLIKE = "two evictions of equal caches keep different rows: take all numbers from the view"
_TENSORS = ("text_ids", "positions", "token_ids", "keys", "values", "signals")


def selected(policy: Policy, view: CacheView) -> Selection:
    """Let a user's policy select, whose code may do anything.

    Raises SelectionError for each error in it, for a selection that names no rows, and for a view that it changes.
    """
    before = {name: _copied(getattr(view, name)) for name in _TENSORS}
    try:
        selection = policy.select(view)
        if not isinstance(selection, Selection):
            raise SelectionError(f"select returned a {type(selection).__name__}: return a Selection.")
        check_selection(selection, view)
    except SelectionError:
        raise
    except Exception as error:
        raise SelectionError(f"{_place(error, policy)} raises {type(error).__name__}: {error}"[:400]) from error
    for name, copy in before.items():
        if not _equal(getattr(view, name), copy):
            raise SelectionError(f"it changes view.{name} in place: work on a copy (clone)")
    return selection


def selected_alike(policy: Policy, view: CacheView) -> Selection:
    """Let a user's policy select twice; raises SelectionError if the rows do not depend on the view alone."""
    selection = selected(policy, view)
    if not torch.equal(selection.keep, selected(policy, view).keep):
        raise SelectionError(UNLIKE)
    return selection


def check_room(selection: Selection, capacity: int) -> None:
    """Raise SelectionError if the next token has no row in the capacity that a policy promises."""
    rows = selection.keep.shape[-1]
    if rows >= capacity:
        raise SelectionError(
            f"it keeps {rows} rows, and capacity() returns {capacity}: keep fewer, so that the next token has a row."
        )


def _place(error: Exception, policy: Policy) -> str:
    """Return the last line of the policy's own files in the traceback, or the traceback's last line."""
    frames = traceback.extract_tb(error.__traceback__)
    files = {inspect.getsourcefile(cls) for cls in type(policy).__mro__ if issubclass(cls, Policy)}
    files.remove(inspect.getsourcefile(Policy))  # kvsweep's base classes only pass on what the user's code does
    frames_of_policy = [frame for frame in frames if frame.filename in files]
    frame = (frames_of_policy or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}"


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, or of all tensors of a list or a mapping."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, Mapping):
        return {name: _copied(tensor) for name, tensor in value.items()}
    return [_copied(tensor) for tensor in value]


def _equal(first: Any, second: Any) -> bool:
    """True if tensors, or all tensors of two lists or mappings, are equal; NaN equals NaN (both become -1e9)."""
    if torch.is_tensor(first):
        return first.shape == second.shape and torch.equal(first.nan_to_num(-1e9), second.nan_to_num(-1e9))
    if len(first) != len(second):
        return False
    if isinstance(first, Mapping):
        return all(_equal(tensor, second[name]) for name, tensor in first.items())
    return all(map(_equal, first, second))
