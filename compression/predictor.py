"""The importance predictor: from a token's last hidden state to how much attention the answer will pay to the token."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from kvsweep.compression.predictor_card import CARD_FILE, WEIGHTS_FILE, read_card


class ImportancePredictor(nn.Module):
    """Bias-free multilayer perceptron with Softplus after each layer (DynTS section 4; released widths 8192, 2048, 1).

    Args:
        hidden_size: width of the model's last hidden state (after the final norm).
        widths: hidden widths of the perceptron; a final layer of width 1 follows.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int] = (8192, 2048)) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.widths = tuple(widths)
        sizes = [hidden_size, *self.widths, 1]
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes))

    def forward(self, hidden: Tensor, linear: Callable[..., Tensor] = functional.linear) -> Tensor:
        """Map hidden states [..., hidden_size] to importance scores [...], all positive; `linear` multiplies."""
        for weight in self.parameters():
            # A product with a single column rounds otherwise for other numbers of tokens, one with 16 does not.
            columns = weight if len(weight) > 1 else weight.expand(16, -1)
            # Softplus; torch's own rounds otherwise at the end of a tensor.
            hidden = -functional.logsigmoid(-linear(hidden, columns))
        return hidden[..., 0]


def save_predictor(predictor: ImportancePredictor, directory: Path, metadata: Mapping[str, Any]) -> None:
    """Write the weights (in their own dtype) and a JSON card of shapes and `metadata` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in predictor.state_dict().items()}, directory / WEIGHTS_FILE)
    card = {"hidden_size": predictor.hidden_size, "widths": list(predictor.widths), **metadata}
    (directory / CARD_FILE).write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")


def load_predictor(directory: Path, *, dtype: torch.dtype = torch.float32) -> ImportancePredictor:
    """Load a predictor that `save_predictor` wrote, for inference.

    Raises:
        ValueError: the directory holds no predictor's card.
    """
    card = read_card(directory)
    predictor = ImportancePredictor(card["hidden_size"], card["widths"])
    predictor.load_state_dict(load_file(directory / WEIGHTS_FILE))
    return predictor.to(dtype).eval().requires_grad_(False)
