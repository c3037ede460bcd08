"""The presses of NVIDIA/kvpress that score rows from keys and values alone, under this cache, budget and clocks."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.lazy_torch import Tensor, torch


class NeedsMoreError(Exception):
    """A press has asked for something that a policy does not have."""


class _Absent:
    """Stands for an input of a press that a policy does not have; whatever is done with it says so."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise NeedsMoreError(self._what)

    def __getitem__(self, key: Any) -> Any:
        raise NeedsMoreError(self._what)


_MODULE, _HIDDEN = _Absent("the attention module"), _Absent("hidden states")
_ATTENTIONS, _ARGUMENTS = _Absent("attention weights"), _Absent("the arguments of the model's forward")


@dataclass(frozen=True, kw_only=True)
class KVPress(HeadPolicy):
    """A `ScorerPress` of kvpress, whose scores rank the rows per layer and head; no row stays for certain.

    kvpress itself prunes once, after the prefill, or by its own schedule; here a press scores at every eviction. This
    package cannot require kvpress, whose requirements exclude this package's transformers; `pip install --no-deps
    kvpress` installs it. How sure: the code that scores is kvpress's own.

    Attributes:
        press: the class's name, such as KeyDiffPress.
        press_args: its arguments. Its compression_ratio is set at each eviction to what goes.

    Raises:
        ValueError: kvpress is not installed, has no such press, or the press needs more than keys and values, or draws
            random numbers of its own.
    """

    press: str
    press_args: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a mapping has no hash

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec("kvpress") is None:
            raise ValueError(
                f"policy.press={self.press} needs the package kvpress, which is not installed: "
                "`pip install --no-deps kvpress` installs it, or choose another policy."
            )
        # A copy in another process brings the press along, and so imports kvpress before a model is loaded.
        object.__setattr__(self, "_scorer", self._make_press())
        self._try_press()

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        kept = self.length_after(view.length, view.question_length, view.evictions)
        layers = [self._score(k[None], v[None], kept)[0] for k, v in zip(view.keys, view.values, strict=True)]
        return torch.stack(layers).float()

    def identity(self) -> dict[str, Any]:
        """The fields, and kvpress's version."""
        return {**super().identity(), "kvpress": metadata.version("kvpress")}

    def _score(self, keys: Tensor, values: Tensor, kept: int) -> Tensor:
        scorer: Any = self.__dict__["_scorer"]
        # Half a row more, so that no rounding makes the press count a row less.
        scorer.compression_ratio = max(0.0, 1 - (kept + 0.5) / keys.shape[2])
        return scorer.score(_MODULE, _HIDDEN, keys, values, _ATTENTIONS, _ARGUMENTS)

    def _make_press(self) -> Any:
        kvpress = _import_kvpress()
        cls = getattr(kvpress, self.press, None)
        if not (isinstance(cls, type) and issubclass(cls, kvpress.ScorerPress)):
            raise ValueError(
                f"policy.press={self.press} is no ScorerPress of kvpress, so more than scores decides what it keeps: "
                "choose one that scores rows, such as KeyDiffPress."
            )
        if "compression_ratio" in self.press_args:
            raise ValueError("policy.press_args.compression_ratio contradicts policy.keep_ratio: leave the first out.")
        try:
            return cls(**self.press_args)
        except (TypeError, ValueError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(
                f"policy.press_args={dict(self.press_args)} do not fit {self.press} ({reason}): correct them."
            ) from error

    def _try_press(self) -> None:
        """Score random rows, to learn what the press needs before any model is loaded."""
        rows = torch.randn(2, 1, 2, self.budget + 1, 16, generator=torch.Generator().manual_seed(0))
        try:
            scores, again = (self._score(rows[0], rows[1], self.size) for _ in range(2))
        except NeedsMoreError as error:
            raise ValueError(
                f"policy.press={self.press} needs {error}, and at an eviction there are keys and values alone: "
                "choose a press that scores from these."
            ) from error
        except Exception as error:  # a press raises what it likes
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise ValueError(
                f"policy.press={self.press} cannot score {self.budget + 1} rows from keys and values ({reason}): "
                "choose another press or other policy.press_args."
            ) from error
        if not torch.equal(scores, again):
            raise ValueError(
                f"policy.press={self.press} draws random numbers that differ from call to call: give "
                "policy.press_args.seed if it has one, or choose policy=random_head."
            )


def _import_kvpress() -> Any:
    """Import kvpress, and undo what its first import does to this package's attention function.

    It wraps every attention function that transformers knows, and the wrapper passes an argument that ours refuses.
    """
    imported = "kvpress" in sys.modules
    try:
        import kvpress
    except ImportError as error:
        raise ValueError(f"kvpress cannot be imported ({error}): install what it names.") from error
    if not imported:
        from transformers import AttentionInterface

        from kvsweep.compression.attention import SLOT_ATTENTION, slot_attention

        AttentionInterface.register(SLOT_ATTENTION, slot_attention)
    return kvpress
