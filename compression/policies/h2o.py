"""H2O (arXiv 2306.14048): the rows that have received the most attention so far, and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policies.observation import newest_attention
from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView, check_fraction
from kvsweep.compression.signals import AttentionMass, RecentQueries, Signal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class H2O(VariantPolicy):
    """Heavy hitters by attention accumulated over all queries so far, the prompt's among them (section 4).

    Query heads of a group are summed. The DynTS code's form accumulates nothing: it ranks by the attention of the
    newest query alone, averaged over layers and heads.

    Attributes:
        recent: share of the rows that go to the newest tokens in the original form, in [0, 1]; the authors' is half.

    Raises:
        ValueError: recent outside [0, 1].
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original", "dynts_code")

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction("recent", self.recent, "a share ")

    @property
    def signals(self) -> tuple[Signal, ...]:
        """The running mass, which comes out of the attention op, or the newest query."""
        return (AttentionMass(),) if self.per_head else (RecentQueries(1),)

    @property
    def newest_kept(self) -> int:
        """The recent share of the rows, rounded, or the local window in the DynTS code's form."""
        return round(self.recent * self.size) if self.per_head else self.local_window

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] accumulated attention."""
        return view.signals[AttentionMass()]

    def token_scores(self, view: CacheView) -> Tensor:
        """[length] attention of the newest query."""
        return newest_attention(view, RecentQueries(1), 1)[:, :, 0].mean(dim=(0, 1))
