"""How far rounding a layer's keys moves its attention: the KL of each layer by scheme, on the texts of a stored cell.

    python scripts/study/key_rounding.py CELL OUT.csv model=qwen25_coder_1_5b model.gguf=FILE --texts 4

Each text is read once with exact keys. In each layer the same queries then meet the keys as a scheme stores them: fp8
(e4m3) without a scale, with the largest key of the layer or of each channel as its scale, rotated and plain levels of 4
and 8 bits in groups of 32 numbers of a key, and KIVI's 4 bits in groups of 32 tokens of a channel. OUT.csv has the mean
KL of attention's probabilities in nats over heads and queries, and the layer's largest key. One layer's errors do not
reach the next.
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvsweep.compression.cache_rows import Prefill
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.labels import read_whole
from kvsweep.harness.settings import build, compose_config
from kvsweep.kernels.fp8 import scale_of, to_fp8, widened
from kvsweep.kernels.packing import pack_rows, rotation, unpack_rows
from kvsweep.kernels.row_format import RowFormat
from kvsweep.run_files.row_types import Completion
from kvsweep.run_files.run_reader import StoredCell
from scripts.study.key_channels import shared_scales

E4M3 = torch.float8_e4m3fn


def packed(keys: Tensor, bits: int) -> Tensor:
    form = RowFormat(bits=bits, group=32, head_dim=keys.shape[-1])
    return unpack_rows(pack_rows(keys, form), form)


def rotated(keys: Tensor, bits: int) -> Tensor:
    turn, back = rotation(keys.shape[-1])
    return packed(keys @ turn, bits) @ back


def by_channel(keys: Tensor, bits: int) -> Tensor:
    """Return KIVI's keys: each channel has a step for 32 tokens; the newest, which fill no group, stay."""
    whole = keys.shape[-2] // 32 * 32
    older = packed(keys[..., :whole, :].transpose(-1, -2), bits) if whole else keys[..., :0, :].transpose(-1, -2)
    return torch.cat([older.transpose(-1, -2), keys[..., whole:, :]], dim=-2)


def fp8(keys: Tensor, scaled: bool) -> Tensor:
    scale = scale_of(keys.abs().amax(), E4M3) if scaled else None
    return widened(to_fp8(keys, E4M3, scale), scale, torch.float32)


def fp8_by_channel(keys: Tensor) -> Tensor:
    """Return keys in fp8 with a scale for each channel (`key_channels.py`)."""
    scales = shared_scales(keys.abs().amax(dim=-2, keepdim=True))
    return scales * fp8(keys / scales, scaled=False)


SCHEMES: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8": lambda keys: fp8(keys, scaled=False),
    "fp8, scaled": lambda keys: fp8(keys, scaled=True),
    "fp8, by channel": fp8_by_channel,
    "8 bits, rotated": lambda keys: rotated(keys, 8),
    "8 bits, plain": lambda keys: packed(keys, 8),
    "4 bits, rotated": lambda keys: rotated(keys, 4),
    "4 bits, plain": lambda keys: packed(keys, 4),
    "4 bits, KIVI": lambda keys: by_channel(keys, 4),
}


class Rounded(Prefill):
    """Receives each layer's queries and keys during a forward, and keeps the KL of each scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def observe(self, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> None:
        layer, self._layer = self._layer, self._layer + 1
        queries, keys = query[0].float(), key[0].float()
        exact = attention(queries, keys)
        for name, scheme in SCHEMES.items():
            moved = attention(queries, scheme(keys))
            kl = (exact.exp() * (exact - moved)).nan_to_num(0).sum(-1).mean()
            self.found.append({"layer": layer, "scheme": name, "kl": float(kl), "largest_key": float(keys.abs().max())})


def attention(queries: Tensor, keys: Tensor) -> Tensor:
    """Return causal log-probabilities [heads, length, length], minus infinity at later tokens."""
    logits = queries @ keys.repeat_interleave(len(queries) // len(keys), dim=0).transpose(-1, -2)
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return (logits / queries.shape[-1] ** 0.5).masked_fill(later, -torch.inf).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", type=Path, help="the folder of a stored cell, whose first texts are read")
    parser.add_argument("out", type=Path)
    parser.add_argument("settings", nargs="+", help="of the model, as for kvsweep")
    parser.add_argument("--texts", type=int, default=4)
    args = parser.parse_intermixed_args()
    model = load_model(build(ModelConfig, "model", compose_config(*args.settings).model))
    cell, rounded = StoredCell(args.cell), Rounded()
    asked = cell.problems()
    with torch.inference_mode():
        for row in itertools.islice(cell.rows(Completion), args.texts):
            rounded.begin_chunk()
            ids = [*model.dialogue.prompt_ids(asked[row.problem_id].prompt), *row.token_ids]
            read_whole(model, ids, rounded)
    table = pd.DataFrame(rounded.found)
    kl = table.pivot_table(index="layer", columns="scheme", values="kl")[[*SCHEMES]]
    kl.insert(0, "largest_key", table.groupby("layer")["largest_key"].max())
    kl.round(6).to_csv(args.out)
    print(kl.round(4).to_string(), "\nmean over layers:", kl[[*SCHEMES]].mean().round(4).to_dict(), sep="\n")


if __name__ == "__main__":
    main()
