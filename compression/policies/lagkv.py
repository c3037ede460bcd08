"""LagKV (arXiv 2504.04704): keep the tokens with keys and values that differ most from the rows behind them."""

from dataclasses import dataclass

from kvsweep.compression.policy import CacheView, Count, HeadPolicy
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class LagKV(HeadPolicy):
    """Rank each part of `lag` rows by its spread, after scaling to the range of the next part; no attention is needed.

    Equations 5 to 8, tested against kvpress's lagkv_press.py. Keys are scaled per channel so that the next part's keys
    lie in [0, 1]; the standard deviation over channels goes through a softmax over the part. Values are treated alike,
    and both are averaged. A row's score is its rank within the part, from 0 to below 1. Sinks, the last whole part and
    the rows behind it score 1. A cache too short for two parts keeps its newest rows.
    """

    SINKS = 4

    lag: Count = 128

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        scores = torch.ones(len(view.keys), view.keys[0].shape[0], view.length, device=view.keys[0].device)
        first = self.sinks_kept
        parts = (view.length - first) // self.lag  # whole parts behind the sinks
        if parts < 2:  # newer rows score higher
            scores[..., first:] = torch.arange(view.length - first) / (view.length - first)
            return scores
        ranked = slice(first, first + (parts - 1) * self.lag)  # rows of all parts but the last
        for layer, (keys, values) in enumerate(zip(view.keys, view.values, strict=True)):
            spread = (self._spread(keys, parts) + self._spread(values, parts)) / 2
            # The inverse of the order is each row's place in it: 0 for the largest spread, which gets the highest rank.
            best_first = spread.sort(dim=-1, descending=True, stable=True).indices
            rank = self.lag - 1 - best_first.argsort(dim=-1)
            scores[layer, :, ranked] = rank.flatten(1) / self.lag
        return scores

    def _spread(self, rows: Tensor, parts: int) -> Tensor:
        """Return the spread [kv_heads, parts - 1, lag] of rows [kv_heads, length, head_dim]."""
        first = self.sinks_kept
        split = rows[:, first : first + parts * self.lag].double().unflatten(1, (parts, self.lag))
        low, high = split[:, 1:].aminmax(dim=-2, keepdim=True)  # of each next part, by channel
        # Without the clamp, a channel that is constant in the next part would divide by zero.
        return ((split[:, :-1] - low) / (high - low).clamp(min=1e-12)).std(dim=-1).softmax(dim=-1)
