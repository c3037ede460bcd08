"""The files of a saved importance predictor, and its card; reading the card does not import torch."""

import json
from pathlib import Path
from typing import Any

WEIGHTS_FILE = "predictor.safetensors"
CARD_FILE = "predictor.json"


def read_card(directory: Path) -> dict[str, Any]:
    """Return the JSON card of a saved predictor: hidden_size, widths and what its maker recorded.

    Raises:
        ValueError: the directory holds no card, or one without hidden_size and widths.
    """
    path = directory / CARD_FILE
    try:
        card = json.loads(path.read_text())
    except (OSError, ValueError):
        card = None
    if not isinstance(card, dict) or not {"hidden_size", "widths"} <= card.keys():
        raise ValueError(f"{path} does not say the predictor's hidden_size and widths: save the predictor again.")
    return card
