"""VaSE: keep large values, and draw the other tokens at random by their attention."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count, Fraction
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class VaSE(ObservationPolicy):
    """Large values protected, the rest drawn without replacement in proportion to the newest queries' attention.

    Released code, mode range_sink_sample_attn: a value's size is its range (largest less smallest component); the sinks
    count as largest; attention is the softmax over the rows before the window, averaged over queries, smoothed,
    averaged over each group of heads. Of all rows that stay, the share `large` goes to large values. The draw is by
    exponential races on counter-based numbers, which have the same probabilities.
    """

    SINKS = 4

    observation_window: Count = 64
    pooling: Pooling = 5
    large: Fraction = 0.25

    def scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window]: infinite where protected, else the draw's order."""
        weights = self.weights(view)
        # The largest of weight-scaled exponentials draws without replacement in proportion to the weights.
        uniform = view.uniform()[..., : weights.shape[-1]].clamp(min=1e-12)
        race = weights.double().log() - (-uniform.double().log()).log()
        return race.masked_fill(self.protected(view), float("inf"))

    def weights(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] what a row's chance of being drawn is proportional to."""
        return self.attention(view, past_only=True).mean(dim=2)

    def protected(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window] true at the rows of the largest values."""
        outside = view.length - self.observation_window
        values = torch.stack(list(view.values))[:, :, :outside].float()
        spread = values.amax(dim=-1) - values.amin(dim=-1)
        spread = spread.masked_fill(view.positions[..., :outside] < self.sinks_kept, float("inf"))
        largest = spread.sort(dim=-1, descending=True, stable=True).indices[..., : round(self.large * self.size)]
        return torch.zeros_like(spread, dtype=torch.bool).scatter(-1, largest, True)
