"""DynTS on the labels that a head is taught to predict: the best that a head could do, as far as labels are known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvsweep.base.files import digests
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policy import CacheView

if TYPE_CHECKING:
    from torch import Tensor

    Trace: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Oracle(DynTS):
    """DynTS with the true importance of the full cache's text for the same problem and draw in place of predictions.

    An eviction changes the text that follows, and labels are known of the full cache's text alone. Tokens from the
    first difference on, and texts without labels (wrong, cut off, never closed), have the head's score.

    Attributes:
        labels: file of `kvsweep-predictor oracle`: texts and labels, 0 to 1 as the head's targets.

    Raises:
        ValueError: no such file.
    """

    labels: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is None or not Path(self.labels).is_file():
            raise ValueError(
                f"policy.labels={self.labels} is no file: write the labels of the full cache's texts with "
                "`kvsweep-predictor oracle` and name their file."
            )

    def importance(self, view: CacheView) -> Tensor:
        """[length] true importance where the text is the labelled one and labelled, predicted importance elsewhere."""
        import torch

        predicted = super().importance(view)
        trace = _read(Path(str(self.labels))).get(f"{view.problem_id}/{view.draw}")
        if trace is None:
            return predicted
        ids, label = (part.to(predicted.device) for part in trace)
        common = min(len(ids), len(view.text_ids))
        same = int((ids[:common] == view.text_ids[:common]).long().cumprod(dim=0).sum())
        true = label[view.positions.clamp(max=len(label) - 1)].to(predicted.dtype)
        known = (view.positions < same) & ~true.isnan()
        return torch.where(known, true, predicted)

    def files(self) -> dict[Path, str]:
        """The predictor's weights and the labels."""
        path = Path(str(self.labels))
        return {**super().files(), path: digests([path])[0]}

    def identity(self) -> dict[str, Any]:
        """The fields, with contents hashed in place of paths."""
        return {**super().identity(), "labels": [*self.files().values()][1]}


def save_labels(path: Path, traces: dict[str, Trace]) -> None:
    """Write `{problem_id/draw: (token ids [length], labels [length], NaN where there is none)}`."""
    from safetensors.torch import save_file

    tensors = {}
    for key, (ids, label) in traces.items():
        tensors[f"ids/{key}"], tensors[f"labels/{key}"] = ids.contiguous(), label.float().contiguous()
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


@cache
def _read(path: Path) -> dict[str, Trace]:
    from safetensors.torch import load_file

    tensors = load_file(path)
    keys = [name.removeprefix("ids/") for name in tensors if name.startswith("ids/")]
    return {key: (tensors[f"ids/{key}"], tensors[f"labels/{key}"]) for key in keys}
