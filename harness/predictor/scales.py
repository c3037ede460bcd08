"""A separate stage: the largest keys and values of each layer, from which an fp8 cache has calibrated scales."""

from typing import Any

import torch
from torch import Tensor

from kvsweep.compression import artifacts
from kvsweep.compression.cache_rows import Prefill
from kvsweep.harness.predictor.query_means import read_texts, texts_of
from kvsweep.harness.predictor.recipe import PredictorSettings


class LargestRows(Prefill):
    """Receives each full layer's keys and values during a forward, and keeps the largest size of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Tensor] = []  # of keys and of values, [2] for each layer of each text

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> None:
        """Take one full layer of one text, [1, heads, length, head_dim] each."""
        self.sizes.append(torch.stack([key.abs().amax(), value.abs().amax()]).float())


@torch.inference_mode()
def make_scales(settings: PredictorSettings) -> dict[str, Any]:
    """Write the largest keys and values, [layers] each, of a text file or the traces to recipe.out/scales.safetensors.

    As llm-compressor's calibration by minima and maxima, which makes one scale of a layer's keys and one of its values.
    """
    texts = texts_of(settings)
    settings.loaded.check_rows("scales are of its rows")
    rows = LargestRows()
    card = read_texts(settings, texts, rows)
    path = settings.recipe.out / "scales.safetensors"
    keys, values = torch.stack(rows.sizes).view(-1, settings.loaded.shape.layers, 2).amax(dim=0).T
    artifacts.save("scales", path, {"keys": keys, "values": values}, card)
    return {"scales": str(path), "tokens": card["tokens"]}
