"""VaSE: keep large values, and sample the other tokens by their attention."""

from dataclasses import dataclass

from kvsweep.compression.policies.observation import ObservationPolicy, Pooling
from kvsweep.compression.policy import CacheView, Count, Fraction
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class VaSE(ObservationPolicy):
    """Protect large values; sample the other rows without replacement, in proportion to the newest queries' attention.

    Released code, mode range_sink_sample_attn. A value's size is its range (largest minus smallest component); sinks
    count as largest. Attention is the softmax over the rows before the window, averaged over queries, pooled, averaged
    over each group of heads. Large values take the share `large` of all kept rows. Exponential races on counter-based
    random numbers draw the sample, with the same probabilities.
    """

    SINKS = 4

    observation_window: Count = 64
    pooling: Pooling = 5
    large: Fraction = 0.25

    def scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, rows outside the window]: infinite at protected rows, else the order of the draw."""
        weights = self.weights(view)
        # E = -log(uniform) of each row is exponentially distributed. The rows with the largest weight / E are a draw
        # without replacement, in proportion to the weights. `race` is the logarithm of weight / E.
        uniform = view.uniform()[..., : weights.shape[-1]].clamp(min=1e-12)
        race = weights.double().log() - (-uniform.double().log()).log()
        return race.masked_fill(self.protected(view), float("inf"))

    def weights(self, view: CacheView) -> Tensor:
        """Weights of the draw, [layers, kv_heads, rows outside the window]: proportional to a row's chance."""
        return self.attention(view, past_only=True).mean(dim=2)

    def protected(self, view: CacheView) -> Tensor:
        """True at the rows with the largest values, [layers, kv_heads, rows outside the window]."""
        outside = view.length - self.observation_window
        values = torch.stack(list(view.values))[:, :, :outside].float()
        spread = values.amax(dim=-1) - values.amin(dim=-1)
        # Sinks count as the largest.
        spread = spread.masked_fill(view.positions[..., :outside] < self.sinks_kept, float("inf"))
        largest = spread.sort(dim=-1, descending=True, stable=True).indices[..., : round(self.large * self.size)]
        return torch.zeros_like(spread, dtype=torch.bool).scatter(-1, largest, True)
