"""DynTS with the true importance of each token in place of the predicted importance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvsweep.compression import artifacts
from kvsweep.compression.policies.dynts import DynTS
from kvsweep.compression.policy import CacheView
from kvsweep.kernels.implementation import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class Oracle(DynTS):
    """DynTS with true importance: labels from the full cache's completion of the same problem and draw.

    Tokens from the first difference to that completion on keep the predictor's score; so do completions without labels
    (wrong, truncated, thinking not closed). `labels` is a file of `kvsweep predictor oracle`.
    """

    ARTIFACTS: ClassVar[Mapping[str, str]] = {**DynTS.ARTIFACTS, "labels": "kvsweep predictor oracle"}

    labels: str | None

    def importance(self, view: CacheView) -> Tensor:
        """Return importance [length]: the label where the text equals the labelled completion, else the prediction."""
        predicted = super().importance(view)
        tensors = artifacts.load_once(str(self.labels))
        pair = f"{view.problem_id}/{view.draw}"
        if f"ids/{pair}" not in tensors:
            return predicted
        ids = tensors[f"ids/{pair}"].to(predicted.device)
        labels = tensors[f"labels/{pair}"].to(predicted.device)
        shorter = min(len(ids), len(view.text_ids))
        agrees = ids[:shorter] == view.text_ids[:shorter]
        # The product is 1 before the first difference and 0 from there on.
        same_tokens = int(agrees.long().cumprod(dim=0).sum())
        # The clamped positions, beyond the labels, lie beyond the same tokens too.
        true = labels[view.positions.clamp(max=len(labels) - 1)].to(predicted.dtype)
        is_labelled = (view.positions < same_tokens) & ~true.isnan()
        return torch.where(is_labelled, true, predicted)


def save_labels(place: str, traces: Mapping[str, tuple[Tensor, Tensor]], card: Mapping[str, Any]) -> None:
    """Write `{problem_id/draw: (token ids [length], labels [length])}`; a label is NaN where none exists."""
    tensors = {f"ids/{pair}": ids for pair, (ids, _) in traces.items()}
    tensors |= {f"labels/{pair}": labels.float() for pair, (_, labels) in traces.items()}
    artifacts.save("labels", place, tensors, card)
