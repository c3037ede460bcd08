"""VaSE (arXiv 2606.03928): rows whose values are large always stay; chance, led by attention, picks the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor

from compression.policies.observation import ObservationPolicy
from compression.policy import CacheView


@dataclass(frozen=True, kw_only=True)
class VaSE(ObservationPolicy):
    """Large values protected, the rest drawn without replacement in proportion to the newest queries' attention.

    Taken from the paper and its released code: a value's size is its range (largest less smallest component); the first
    tokens count as largest; attention is the softmax over the rows before the window, averaged over queries, smoothed,
    averaged over each group of heads. Ours: the draw by exponential races on counter-based numbers, and the number of
    protected rows as a share of the kept ones (the paper fixes 200).

    Attributes:
        protected: share of the rows chosen by score that go to large values, in [0, 1].
        sinks: first tokens of the text that always stay.

    Raises:
        ValueError: a field out of its range.
    """

    observation_window: int = 32
    pooling: int = 5
    protected: float = 0.2
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.protected <= 1:
            raise ValueError(f"policy.protected={self.protected} is out of range: a share from 0 to 1.")
        if self.sinks < 0:
            raise ValueError(f"policy.sinks={self.sinks} is out of range: at least 0.")

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window]: infinite where protected, else the draw's order."""
        outside = view.length - self.observation_window
        attention = self.attention(view, past_only=True).mean(dim=2)
        # The largest of weight-scaled exponentials draws without replacement in proportion to the weights.
        uniform = view.uniform()[..., :outside].clamp(min=1e-12)
        race = attention.double().log() - (-uniform.double().log()).log()
        return race.masked_fill(self._large(view, outside), float("inf"))

    def _large(self, view: CacheView, outside: int) -> Tensor:
        values = torch.stack(list(view.values))[:, :, :outside].float()
        # In half precision: the first layer gives a token the same value wherever it stands, up to rounding noise.
        size = (values.amax(dim=-1) - values.amin(dim=-1)).half().float()
        size = size.masked_fill(view.positions[..., :outside] < self.sinks, float("inf"))
        count = int(self.protected * (self.local_window + self.kept_outside - self.observation_window))
        largest = size.sort(dim=-1, descending=True, stable=True).indices[..., :count]
        return torch.zeros_like(size, dtype=torch.bool).scatter(-1, largest, True)
