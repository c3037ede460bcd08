"""The settings `replay=`, `screen=` and `texts=` of a sweep; `harness.screen` follows them."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, StrictInt

from kvsweep.messages.errors import UserError

_LOSS = r"^loss:\d*\.?\d+(e-?\d+)?$"


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """What a sweep replays.

    Attributes:
        replay: true replays known texts through every cell before the cells decode; only decodes nothing but the full
            cache, whose texts these are.
        screen: decode beside the full cache only so many cells, those of the lowest KL, or ("loss:X") those whose texts
            lose at most X nats of log-likelihood per token; None decodes all.
        texts: a file of texts in place of the full cache's own.
    """

    replay: Literal[True, False, "only"] = False
    screen: Annotated[StrictInt, Field(ge=1)] | Annotated[str, Field(pattern=_LOSS)] | None = None
    texts: str | None = None

    def __post_init__(self) -> None:
        if self.texts is not None and not self.wanted:
            raise UserError(f"texts={self.texts} goes with replay=true, replay=only or screen=N: add one of them.")

    @property
    def most(self) -> int | None:
        """The most cells that are decoded beside the full cache."""
        return self.screen if isinstance(self.screen, int) else None

    @property
    def loss(self) -> float | None:
        """The most nats of log-likelihood per token that completions may lose in a cell that is decoded."""
        return float(self.screen.removeprefix("loss:")) if isinstance(self.screen, str) else None

    @property
    def wanted(self) -> bool:
        return bool(self.replay or self.screen)
