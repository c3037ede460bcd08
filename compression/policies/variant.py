"""The base of policies that score rows per layer and head, or once per token as the DynTS code does."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvsweep.compression.policy import BudgetPolicy, CacheView

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class VariantPolicy(BudgetPolicy):
    """A policy with scores per layer and key head in its authors' form.

    Attributes:
        variant: "original": as the authors' code has it, other rows in each layer and head. "dynts_code": as the DynTS
            code runs the method, the same rows everywhere and the local window forced.

    Raises:
        ValueError: a variant that the policy does not have.
    """

    VARIANTS: ClassVar[tuple[str, ...]] = ("original",)

    variant: str = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in self.VARIANTS:
            raise ValueError(f"policy.variant={self.variant} is unknown: choose {' or '.join(self.VARIANTS)}.")

    @property
    def per_head(self) -> bool:
        """True but for the DynTS code's form."""
        return self.variant != "dynts_code"

    def scores(self, view: CacheView) -> Tensor:
        """The head scores, or the token scores of the DynTS code's form."""
        return self.head_scores(view) if self.per_head else self.token_scores(view)

    @abstractmethod
    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length or the rows outside the newest kept] importance of each row."""

    def token_scores(self, view: CacheView) -> Tensor:
        """[length or the rows outside the local window] importance of each token in the DynTS code's form."""
        raise NotImplementedError
