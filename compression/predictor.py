"""The importance predictor: from a token's last hidden state to how much attention the answer will pay to the token."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kvsweep.compression import artifacts


class ImportancePredictor(nn.Module):
    """Bias-free multilayer perceptron with Softplus after each layer (DynTS section 4; released widths 8192, 2048, 1).

    It reads the model's last hidden state after the final norm. A layer of width 1 follows the hidden `widths`.
    """

    def __init__(self, hidden_size: int, widths: Sequence[int] = (8192, 2048)) -> None:
        super().__init__()
        self.hidden_size, self.widths = hidden_size, tuple(widths)
        sizes = [hidden_size, *self.widths, 1]
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in itertools.pairwise(sizes))

    def forward(self, hidden: Tensor, linear: Callable[..., Tensor] = functional.linear) -> Tensor:
        """Map hidden states [..., hidden_size] to importance scores [...], all positive; `linear` multiplies."""
        for weight in self.parameters():
            # With one column the product's rounding depends on the number of tokens; with 16 columns it does not.
            columns = weight if len(weight) > 1 else weight.expand(16, -1)
            # Softplus. torch's own softplus rounds the last few numbers of a tensor differently from the others.
            hidden = -functional.logsigmoid(-linear(hidden, columns))
        return hidden[..., 0]


def save_predictor(predictor: ImportancePredictor, directory: Path, card: Mapping[str, Any]) -> None:
    """Write the weights (in their own dtype) and the card, with the predictor's widths, into `directory`."""
    widths = {"hidden_size": predictor.hidden_size, "widths": list(predictor.widths)}
    artifacts.save("predictor", directory, predictor.state_dict(), {**widths, **card})


def load_predictor(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> ImportancePredictor:
    """Load a predictor that `save_predictor` wrote, for inference."""
    card = artifacts.read_card("predictor", directory)
    predictor = ImportancePredictor(card["hidden_size"], card["widths"])
    predictor.load_state_dict(artifacts.load(directory))
    return predictor.to(dtype).eval().requires_grad_(False)
