"""TriAttention (arXiv 2604.04921): keep the tokens that the model's mean queries would attend to in the future."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsweep.compression import artifacts
from kvsweep.compression.policy import CacheView, HeadPolicy
from kvsweep.kernels.implementation import Tensor, torch

# Distances of the future queries, in tokens from the next one (released code, build_geometric_offsets).
_DELAYS = tuple(2**power for power in range(17))


@dataclass(frozen=True, kw_only=True)
class TriAttention(HeadPolicy):
    """Mean logit of a query 1, 2, 4, ... 65,536 tokens later, plus a bound on how far single queries deviate from it.

    Section 4, released code (pruning_utils.py, triattention.py), mode per_head. Two channels of a head are one complex
    number, which the rotary embedding turns. E[q] is the mean query before rotation, w the inverse frequency, P the
    next position, p the row's position, and a the angle from the unrotated key to E[q]. The score is the sum over
    channel pairs, averaged over delays d, of |E[q]| |k| cos(w (P - p + d) + a) + (E|q| - |E[q]|) |k|. Each query head's
    scores are standardised over the rows that compete; the largest score in a group counts. The released code computes
    angles in float32, which moves a score by up to 0.001, and its statistics leave out Qwen3's norm of the queries.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {"statistics": "kvsweep predictor statistics"}
    QUESTION = "pinned"

    statistics: str | None  # file of `kvsweep predictor statistics`: means of this model's queries
    share_layers: bool = True  # average scores over layers, as in the paper; False is the code's mode per_layer_perhead

    newest_kept = 0

    def scores(self, view: CacheView) -> Tensor:
        stats = read_statistics(str(self.statistics), view.positions.device)
        # Positions of the future queries, and how far the rotary embedding turns each pair of channels there.
        delays = view.positions.flatten()[-1] + 1 + torch.tensor(_DELAYS, device=view.positions.device)
        angles = delays[:, None] * stats["inverse_frequencies"]  # [delays, pairs]
        # A rotated key and a query rotated to its future position multiply as at their distance, so keys stay rotated.
        future = torch.polar(torch.ones_like(angles), angles).mean(dim=0) * stats["mean"]  # [layers, q_heads, pairs]
        query = torch.cat([future.real, future.imag], dim=-1).float()
        stray = (stats["mean_size"] - stats["mean"].abs()).float()  # E|q| - |E[q]|, [layers, q_heads, pairs]
        layers = []
        for layer, keys in enumerate(view.keys):
            wide = keys.float()
            size = torch.stack(wide.chunk(2, dim=-1)).norm(dim=0)  # |k|, [kv_heads, length, pairs]
            # The score's two terms: the mean query times the keys, and how far queries stray times the keys' sizes.
            pairs = (query[layer], wide), (stray[layer], size)
            logits = (torch.matmul(of.unflatten(0, (len(keys), -1)), rows.transpose(-1, -2)) for of, rows in pairs)
            layers.append(stats["attention_scaling"].float() * sum(logits))  # [kv_heads, group, length]
        scores = self._standardised(torch.stack(layers), view).amax(dim=2)
        return scores.mean(dim=0, keepdim=True).expand_as(scores) if self.share_layers else scores

    def _standardised(self, scores: Tensor, view: CacheView) -> Tensor:
        """Return scores [layers, kv_heads, group, length] with mean 0 and deviation 1 over the rows that compete."""
        competes = (view.question.logical_not() | (self.question_rule == "free"))[:, :, None]
        count = competes.sum(dim=-1, keepdim=True)
        shifted = scores - (scores * competes).sum(dim=-1, keepdim=True) / count
        deviation = ((shifted**2 * competes).sum(dim=-1, keepdim=True) / count).sqrt()
        return shifted / deviation.clamp(min=1e-6)


def save_statistics(place: str, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Write the statistics of a model's queries before rotation.

    `tensors`: mean (complex) and mean_size, [layers, q_heads, head_dim / 2]; the rotation's inverse_frequencies
    [head_dim / 2] and attention_scaling [].
    """
    mean = tensors["mean"]
    parts = {**tensors, "mean_real": mean.real, "mean_imaginary": mean.imag}
    artifacts.save("statistics", place, {name: parts[name].float() for name in parts if name != "mean"}, card)


def read_statistics(place: str, device: "torch.device") -> dict[str, Tensor]:
    """Return the tensors of `save_statistics`, in float64."""
    tensors = {name: tensor.to(device).double() for name, tensor in artifacts.load_once(place).items()}
    return {**tensors, "mean": torch.complex(tensors["mean_real"], tensors["mean_imaginary"])}
