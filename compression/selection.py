"""A user's policy selects rows: whatever its code does wrong is named in one sentence."""

import inspect
import traceback
from collections.abc import Mapping

import torch
from torch import Tensor

from kvsweep.compression.policy import CacheView, Policy, Selection, SelectionError, check_selection

UNLIKE = "two evictions of equal caches keep different rows: take all numbers from the view"
_TENSORS = ("text_ids", "positions", "token_ids", "keys", "values", "signals")


def selected(policy: Policy, view: CacheView, *, twice: bool = False) -> Selection:
    """Let a user's policy select, whose code may do anything.

    Raises SelectionError for each error in it, for a selection that names no rows, and for a view that it changes; with
    `twice` also if the rows do not depend on the view alone.
    """
    before = {name: list(map(torch.clone, _tensors(view, name))) for name in _TENSORS}
    try:
        selection = policy.select(view)
        if not isinstance(selection, Selection):
            raise SelectionError(f"select returned a {type(selection).__name__}: return a Selection.")
        check_selection(selection, view)
    except SelectionError:
        raise
    except Exception as error:
        raise SelectionError(f"{_place(error, policy)} raises {type(error).__name__}: {error}"[:400]) from error
    for name, copies in before.items():
        tensors = _tensors(view, name)
        if len(tensors) != len(copies) or not all(map(_equal, tensors, copies)):
            raise SelectionError(f"it changes view.{name} in place: work on a copy (clone)")
    if twice and not torch.equal(selection.keep, selected(policy, view).keep):
        raise SelectionError(UNLIKE)
    return selection


def _place(error: Exception, policy: Policy) -> str:
    """Return the last line of the policy's own files in the traceback, or the traceback's last line."""
    frames = traceback.extract_tb(error.__traceback__)
    files = {inspect.getsourcefile(cls) for cls in type(policy).__mro__ if issubclass(cls, Policy)}
    files.remove(inspect.getsourcefile(Policy))  # kvsweep's base classes only pass on what the user's code does
    frames_of_policy = [frame for frame in frames if frame.filename in files]
    frame = (frames_of_policy or frames)[-1]
    return f"{frame.filename.rpartition('/')[2]}, line {frame.lineno}"


def _tensors(view: CacheView, name: str) -> list[Tensor]:
    """Return the tensor of a view's field, or all tensors of its list or mapping."""
    value = getattr(view, name)
    if torch.is_tensor(value):
        return [value]
    return list(value.values() if isinstance(value, Mapping) else value)


def _equal(first: Tensor, second: Tensor) -> bool:
    """True if two tensors are equal; NaN equals NaN (both become -1e9)."""
    return torch.equal(first.nan_to_num(-1e9), second.nan_to_num(-1e9))
