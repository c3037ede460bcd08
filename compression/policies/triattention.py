"""TriAttention (arXiv 2604.04921): the rows that the mean queries of the future attend to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvsweep.base.files import digests
from kvsweep.compression.policies.variant import VariantPolicy
from kvsweep.compression.policy import CacheView, Question

if TYPE_CHECKING:
    from torch import Tensor

# Distances of the future queries, in tokens from the next one (released code, build_geometric_offsets).
_DELAYS = tuple(2**power for power in range(17))


@dataclass(frozen=True, kw_only=True)
class TriAttention(VariantPolicy):
    """The mean logit of a query 1, 2, 4, ... 65,536 tokens later, and how far single queries may stray from it.

    Section 4, released code (triattention/methods/pruning_utils.py, triattention.py), mode per_head. Two channels
    of a head make a complex number that the position turns. E[q] is the mean query before it is turned, w the
    inverse frequency, P the next position, p the row's own, and a the angle from the key to E[q], neither turned. The
    score is the sum over pairs, averaged over delays d, of |E[q]| |k| cos(w (P - p + d) + a) + (E|q| - |E[q]|) |k|.
    Each query head's scores get mean 0 and deviation 1 over the rows that compete; the largest of a group counts.

    How sure: read in the released code. Its statistics leave out Qwen3's norm of the queries; here they have it.

    Attributes:
        statistics: file of `kvsweep-predictor statistics`: means of this model's queries.
        share_layers: whether scores are averaged over layers, so that a key head keeps the same rows in all of them, as
            in the paper. False is the code's mode per_layer_perhead.

    Raises:
        ValueError: no statistics given, or none there.
    """

    QUESTION: ClassVar[Question] = "pinned"

    statistics: str | None
    share_layers: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.statistics is None:
            raise ValueError(
                "policy.statistics is not set and this model comes with none: make them with `kvsweep-predictor "
                "statistics`, or choose a policy that needs none."
            )
        read_statistics_card(Path(self.statistics))

    @property
    def newest_kept(self) -> int:
        """None."""
        return 0

    def head_scores(self, view: CacheView) -> Tensor:
        """[layers, kv_heads, length] expected attention."""
        import torch

        stats = {name: tensor.to(view.positions.device) for name, tensor in _read(Path(str(self.statistics))).items()}
        delays = view.positions.flatten()[-1] + 1 + torch.tensor(_DELAYS, device=view.positions.device)
        angles = delays[:, None] * stats["inverse_frequencies"].double()
        # A key's own rotation cancels with that of its distance, so rotated keys meet a query rotated to the future.
        future = torch.polar(torch.ones_like(angles), angles).mean(dim=0) * stats["mean"]  # [layers, q_heads, pairs]
        query = torch.cat([future.real, future.imag], dim=-1).float()
        stray = (stats["mean_size"] - stats["mean"].abs()).float()
        layers = []
        for layer, keys in enumerate(view.keys):
            wide = keys.float()
            size = torch.stack(wide.chunk(2, dim=-1)).norm(dim=0)  # [kv_heads, length, pairs]
            logits = [
                torch.matmul(of.unflatten(0, (len(keys), -1)), rows.transpose(-1, -2))
                for of, rows in ((query[layer], wide), (stray[layer], size))
            ]
            layers.append(stats["attention_scaling"] * sum(logits))
        scores = self._standardised(torch.stack(layers), view).amax(dim=2)
        return scores.mean(dim=0, keepdim=True).expand_as(scores) if self.share_layers else scores

    def _standardised(self, scores: Tensor, view: CacheView) -> Tensor:
        """Scores [layers, kv_heads, group, length] with mean 0 and deviation 1 over the rows that compete."""
        competes = (view.question.logical_not() | (self.question_rule == "free"))[:, :, None]
        count = competes.sum(dim=-1, keepdim=True)
        shifted = scores - (scores * competes).sum(dim=-1, keepdim=True) / count
        deviation = ((shifted**2 * competes).sum(dim=-1, keepdim=True) / count).sqrt()
        return shifted / deviation.clamp(min=1e-6)

    def files(self) -> dict[Path, str]:
        """The statistics."""
        path = Path(str(self.statistics))
        return {path: digests([path])[0]}

    def identity(self) -> dict[str, Any]:
        """The fields, with the statistics' content in place of their path."""
        return {**super().identity(), "statistics": next(iter(self.files().values()))}


def save_statistics(path: Path, tensors: dict[str, Tensor], card: dict[str, Any]) -> None:
    """Write the statistics of a model's queries before rotation, and what they were made of.

    Args:
        path: the file.
        tensors: mean (complex) and mean_size [layers, q_heads, head_dim / 2], inverse_frequencies [head_dim / 2] and
            attention_scaling [] of the model's rotation.
        card: hidden_size, and what else tells where the statistics come from.
    """
    from safetensors.torch import save_file

    mean = tensors.pop("mean")
    parts = {"mean_real": mean.real, "mean_imaginary": mean.imag, **tensors}
    temporary = path.with_suffix(".tmp")
    floats = {name: tensor.float().contiguous().cpu() for name, tensor in parts.items()}
    save_file(floats, temporary, metadata={name: str(value) for name, value in card.items()})
    temporary.replace(path)


def read_statistics_card(path: Path) -> dict[str, Any]:
    """What the file's maker recorded, hidden_size among it; this does not import torch.

    Raises:
        ValueError: no such file, or one of another kind.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            card = dict(file.metadata() or {})
        return {**card, "hidden_size": int(card["hidden_size"])}
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(
            f"policy.statistics={path} holds no statistics of a model's queries: make them with `kvsweep-predictor "
            "statistics` and name their file."
        ) from error


@cache
def _read(path: Path) -> dict[str, Tensor]:
    import torch
    from safetensors.torch import load_file

    tensors = {name: tensor.double() for name, tensor in load_file(path).items()}
    mean = torch.complex(tensors.pop("mean_real"), tensors.pop("mean_imaginary"))
    return {**tensors, "mean": mean, "attention_scaling": tensors["attention_scaling"].float()}
