"""Files that a policy needs and that a model was needed to make: importance predictors, query statistics, labels.

An artifact is a file of tensors (safetensors). Beside the file lies its card, a JSON object under the same name: its
kind, the model's hidden_size, and what else its maker recorded. Reading a card does not import torch.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvsweep.base.files import digests, replace_text, replacing
from kvsweep.kernels.lazy_torch import Tensor


def file_of(place: str | Path) -> Path:
    """The artifact's file: `place` itself, or predictor.safetensors in the folder `place`."""
    path = Path(place)
    return path if path.suffix == ".safetensors" else path / "predictor.safetensors"


def check(kind: str, place: str | None, maker: str) -> None:
    """Refuse a setting `policy.KIND` that names no artifact of its kind; `maker` is the command that makes one.

    Raises:
        ValueError: no place is given, or no such artifact lies there.
    """
    if place is None:
        raise ValueError(
            f"policy.{kind} is not set and this model comes with none: make it with `{maker}` and name its place, or "
            "choose a policy that needs none."
        )
    if not file_of(place).is_file():
        raise ValueError(f"policy.{kind}={place} holds no {kind}: make it with `{maker}` and name its place.")
    read_card(kind, place)


def read_card(kind: str, place: str | Path) -> dict[str, Any]:
    """The card of an artifact of this kind.

    Raises:
        ValueError: there is no card, or the card names another kind or no hidden_size.
    """
    path = file_of(place).with_suffix(".json")
    try:
        card = json.loads(path.read_text())
    except (OSError, ValueError):
        card = None
    if not isinstance(card, dict) or card.get("kind") != kind or "hidden_size" not in card:
        raise ValueError(f"{place} holds no {kind}: {path} is no card of that kind with a hidden_size; make it again.")
    return card


def save(kind: str, place: str | Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Write the tensors, and the card with its kind beside them."""
    from safetensors.torch import save_file

    path = file_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
    replace_text(path.with_suffix(".json"), json.dumps({"kind": kind, **card}, indent=2, sort_keys=True) + "\n")


def load(place: str | Path) -> dict[str, Tensor]:
    """The tensors of an artifact."""
    from safetensors.torch import load_file

    return load_file(file_of(place))


def load_once(place: str | Path) -> dict[str, Tensor]:
    """The tensors of an artifact, kept in memory for as long as the file stays the same."""
    return _load(place, digest(place))


@lru_cache(maxsize=4)
def _load(place: str | Path, digest: str) -> dict[str, Tensor]:
    return load(place)


def digest(place: str | Path) -> str:
    """A hash of an artifact's tensors, in which the card has no part."""
    return digests([file_of(place)])[0]
