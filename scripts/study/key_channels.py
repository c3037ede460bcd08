"""A model's weights with a scale for each channel of its keys, which its queries take back.

    python scripts/study/key_channels.py TEXT OUT model=qwen25_coder_1_5b model.gguf=FILE

Keys are divided, and queries multiplied, by a channel's largest key in the text over 448, e4m3's largest number. So
their products stay (but for rounding), and an fp8 cache without a scale stores each channel over all of e4m3's range.
The rotation mixes the channels i and i + head_dim / 2, which share a scale. SmoothAttention of QServe (2405.04532) does
so with the square root of the largest keys. OUT is a folder for model.path. It needs a model with the modules of Qwen2.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvsweep.compression.cache_rows import Prefill
from kvsweep.harness.gguf.conversion import converted
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.models.loaded import LoadedModel
from kvsweep.harness.predictor.labels import read_whole
from kvsweep.harness.predictor.query_means import MOST_TOKENS
from kvsweep.harness.settings import build, compose_config
from kvsweep.kernels.fp8 import scale_of


class LargestChannels(Prefill):
    """Receives each layer's keys during a forward, and keeps the largest size in each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[Tensor] = []  # of each layer, [kv_heads, head_dim]

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> None:
        """Take one layer of one text, keys [1, kv_heads, length, head_dim]."""
        self.sizes.append(key[0].abs().amax(dim=1).float())


@torch.inference_mode()
def channel_scales(model: LoadedModel, text: str) -> list[Tensor]:
    """Return each layer's scales of its keys, [kv_heads, head_dim] each."""
    ids = list(model.dialogue.encode(text)[:MOST_TOKENS])
    largest = LargestChannels()
    read_whole(model, ids, largest)
    return [shared_scales(sizes) for sizes in largest.sizes]


def shared_scales(sizes: Tensor) -> Tensor:
    """Return the scales [..., head_dim] of channels with these largest keys, alike where a rotation mixes two."""
    first, second = sizes.chunk(2, dim=-1)
    shared = scale_of(torch.maximum(first, second), torch.float8_e4m3fn)
    return torch.cat([shared, shared], dim=-1)


def fold(weights: dict[str, Tensor], scales: list[Tensor]) -> None:
    """Divide the key projections by the scales and multiply the query projections, in place."""
    for layer, scale in enumerate(scales):
        keys = scale.flatten()
        for kind in ("weight", "bias"):
            prefix = f"model.layers.{layer}.self_attn"
            key, query = weights[f"{prefix}.k_proj.{kind}"], weights[f"{prefix}.q_proj.{kind}"]
            # Each head of the keys meets as many heads of the queries, side by side.
            group = len(query) // len(key)
            queries = scale.repeat_interleave(group, dim=0).flatten()
            columns = [-1] + [1] * (key.ndim - 1)
            key.div_(keys.view(columns))
            query.mul_(queries.view(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="+", help="of the model, as for kvsweep; it must be a GGUF file")
    args = parser.parse_args()
    config = build(ModelConfig, "model", compose_config(*args.settings).model)
    scales = channel_scales(load_model(config), args.text.read_text())
    folder = converted(Path(config.gguf))
    shutil.copytree(folder, args.out, ignore=shutil.ignore_patterns("*.safetensors"))
    weights = load_file(folder / "model.safetensors")
    fold(weights, scales)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    everywhere = torch.stack(scales)
    print(f"{len(scales)} layers, scales from {everywhere.min():.4f} to {everywhere.max():.4f}")


if __name__ == "__main__":
    main()
