"""Artifacts: files that a policy or a cache needs and a command makes with the model: predictors, statistics, scales.

An artifact is a file of tensors (safetensors) with a card beside it. A card is a JSON object: the kind of artifact, the
model's hidden_size, and what the maker recorded. Reading a card does not import torch.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvsweep.kernels.implementation import Tensor
from kvsweep.messages.errors import UserError
from kvsweep.run_files.safe_files import digests, read_file, replace_text, replacing

_PLANNING: ContextVar[bool] = ContextVar("planning", default=False)
# The section that names a kind's place, where it is not the policy's: policies take what was made for the model.
_SECTIONS = {"predictor": "model", "statistics": "model", "scales": "cache"}
_FLOATS, _IDS = ("F16", "BF16", "F32", "F64"), ("I64",)


def file_of(place: str | Path) -> Path:
    """Return the artifact's file: `place` itself, or predictor.safetensors in the folder `place`."""
    path = Path(place)
    return path if path.suffix == ".safetensors" else path / "predictor.safetensors"


@contextmanager
def planning() -> Iterator[None]:
    """Let policies leave their artifacts unset inside this context, where a sweep is only estimated."""
    token = _PLANNING.set(True)
    try:
        yield
    finally:
        _PLANNING.reset(token)


def is_planning() -> bool:
    """Return whether a sweep is only estimated, so that what it reads may be missing."""
    return _PLANNING.get()


def setting(kind: str) -> str:
    """Return the setting that names an artifact of a kind."""
    return f"{_SECTIONS.get(kind, 'policy')}.{kind}"


def check(kind: str, place: str | None, maker: str) -> None:
    """Raise UserError if the kind's setting names no artifact of this kind; `maker` is the command that makes it."""
    if place is None:
        if is_planning():
            return
        other = "cache.scale=none" if kind == "scales" else "a policy that needs none"
        raise UserError(
            f"{setting(kind)} is not set and this model comes with none: "
            f"make it with `{maker}` and name its place by {setting(kind)}=PLACE, or choose {other}."
        )
    if not file_of(place).is_file():
        raise UserError(f"{setting(kind)}={place} holds no {kind}: make it with `{maker}` and name its place.")
    _check_shapes(kind, place, read_card(kind, place))


def _check_shapes(kind: str, place: str, card: Mapping[str, Any]) -> None:
    """Raise UserError if tensor names, shapes or dtypes do not fit the kind. No tensor is read."""
    tensors = tensors_of(kind, place)
    shapes = {name: shape for name, (shape, _) in tensors.items()}
    expected = _shapes(kind, card, shapes)  # sizes that no card gives are the file's, in all of its tensors alike
    wrong = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
    for name, (_, dtype) in tensors.items():
        dtypes = _IDS if name.startswith("ids/") else _FLOATS
        if dtype not in dtypes:
            wrong.append(name)
    if wrong:
        shape, dtype = tensors.get(wrong[0], ("", "nothing"))  # the file may have no tensor of this name
        raise UserError(
            f"{setting(kind)}={place} has the tensor {wrong[0]!r:.80} as {dtype} {shape}, "
            "which does not fit its card and kind: make it again."
        )


def tensors_of(kind: str, place: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each tensor, without reading one; raises UserError if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file_of(place), framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(tensor.get_shape()), tensor.get_dtype()) for name, tensor in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{setting(kind)}={place} cannot be read ({error}): make it again.") from error


def _shapes(kind: str, card: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the required shape of each tensor of an artifact, by name; `shapes` are those of its file."""
    if kind == "predictor":
        widths = card.get("widths")
        if not isinstance(widths, list):
            widths = [None]  # no tensor has a size of None, so a card without widths fits no file
        sizes = [card["hidden_size"], *widths, 1]
        return {f"layers.{i}.weight": (rows, columns) for i, (columns, rows) in enumerate(pairwise(sizes))}
    if kind == "labels":
        expected = {}
        for name, shape in shapes.items():
            _, _, text = name.partition("/")
            expected[f"ids/{text}"] = expected[f"labels/{text}"] = shape[:1]  # a number per token
        return expected
    if kind == "scales":  # a number per layer
        return dict.fromkeys(("keys", "values"), shapes.get("keys", ())[:1])
    # Statistics: any [layers, heads, frequencies], alike in all means; zeros stand for sizes that the file lacks.
    shape = (*shapes.get("mean_real", ()), 0, 0, 0)[:3]
    means = dict.fromkeys(("mean_real", "mean_imaginary", "mean_size"), shape)
    return {**means, "inverse_frequencies": shape[2:], "attention_scaling": ()}


def read_card(kind: str, place: str | Path) -> dict[str, Any]:
    """Read the card of an artifact of this kind; UserError if there is none."""
    path = file_of(place).with_suffix(".json")
    try:
        card = json.loads(read_file(path, linked=True))
    except (OSError, ValueError, RecursionError):
        card = None
    is_card = isinstance(card, dict) and card.get("kind") == kind and isinstance(card.get("model_weights", ""), str)
    if not is_card or "hidden_size" not in card:
        raise UserError(f"{place} holds no {kind}: {path} is no card of that kind with a hidden_size; make it again.")
    return card


def save(kind: str, place: str | Path, tensors: Mapping[str, Tensor], card: Mapping[str, Any]) -> None:
    """Write the tensors, and beside them the card with its kind."""
    from safetensors.torch import save_file

    path = file_of(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
    replace_text(path.with_suffix(".json"), json.dumps({"kind": kind, **card}, indent=2, sort_keys=True) + "\n")


def load(place: str | Path) -> dict[str, Tensor]:
    """Read an artifact's tensors, by name; UserError for numbers that are none of its kind."""
    from safetensors.torch import load_file

    tensors = load_file(file_of(place))
    for name, tensor in tensors.items():
        wrong = tensor.isinf() if name.startswith("labels/") else ~tensor.isfinite()  # NaN: a token without a label
        if name.startswith("ids/"):
            wrong |= tensor < 0
        elif name in ("keys", "values"):  # a layer's largest number, from which its scale comes
            wrong |= tensor <= 0
        if wrong.any():
            raise UserError(f"{file_of(place)} holds numbers in {name!r:.80} that are none of its kind: make it again.")
    return tensors


def files(placed: Mapping[str, str]) -> dict[Path, str]:
    """Return the file of each artifact, given by kind and place, with a hash of its tensors."""
    return {file_of(place): digest(place) for place in placed.values()}


def load_once(place: str | Path) -> dict[str, Tensor]:
    """Return the tensors of an artifact. They stay in memory until the file changes."""
    return _load(place, digest(place))


@lru_cache(maxsize=4)
def _load(place: str | Path, digest: str) -> dict[str, Tensor]:
    return load(place)


def digest(place: str | Path) -> str:
    """Return a hash of an artifact's tensors, without the card."""
    return digests([file_of(place)])[0]
