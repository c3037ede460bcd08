"""What a cache stores for each kind of layer, and in which precision. Importing this module does not import torch."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from kvsweep.compression import artifacts
from kvsweep.kernels.implementation import Tensor
from kvsweep.kernels.row_format import ROW_BLOCK, Fp8Format, RowFormat, RowFormats, whole_blocks
from kvsweep.messages.errors import UserError

Scheme = Literal["rotated", "plain", "kivi", "kvarn", "fp8"]
Width = Literal[8, 4, 2]

# full: rows that policies choose from; window: only the newest rows; linear: a state of fixed size.
LayerKind = Literal["full", "window", "linear"]
SCALES_MAKER = "kvsweep predictor scales"


def ring(window: int) -> int:
    """Return the rows that a window layer allocates per slot: whole blocks, of which the first `window` are used."""
    return whole_blocks(window, ROW_BLOCK)


def fixed_bytes(shape: Any, itemsize: int) -> int:
    """Bytes that a slot takes at any length: the windows' rows, and the linear layers' states.

    `shape` is a `CacheShape` or a `ModelSpec`. A linear layer's second state has 4 bytes per number, others `itemsize`.
    """
    rows = ring(shape.window) * 2 * shape.kv_heads * shape.head_dim * itemsize
    # A layer may have no second state.
    states = sum(math.prod(size) * width for size, width in zip(shape.states, (itemsize, 4), strict=False))
    return shape.layer_kinds.count("window") * rows + shape.layer_kinds.count("linear") * states


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """How a cache stores its rows: in the model's precision, or quantized ("packed").

    Raises UserError if only keys or only values are quantized, if "fp8" gets other bits than 8, or if `scales` holds no
    scales where `scale` is "tensor". `scheme`: which numbers share a scale. "plain": neighbours in a row. "rotated":
    the same after a Hadamard rotation, which spreads outliers (QuaRot, 2404.00456, section 3). "kivi": keys per channel
    over neighbouring tokens, values as "plain" (KIVI, 2402.02750, section 3). The `residual` newest tokens stay in the
    model's precision; "kivi" quantizes older rows `group` at a time. "kvarn": tiles of `group` rotated tokens, whose
    variances are made alike; keys per channel, values per token (KVarN, 2606.03458). "fp8": every row, also the newest,
    as 8-bit floating-point numbers (`kernels.fp8`).
    """

    bits: Literal[16, 8, 4, 2] | None = None  # per stored number; 16: the model's own precision; None: 16, with fp8 8
    key_bits: Width | None = None  # for keys, if they differ from `bits`
    value_bits: Width | None = None
    scheme: Scheme = "rotated"
    group: PositiveInt = 32  # neighbouring numbers that share a zero and a step
    residual: PositiveInt = 128
    format: Fp8Format = "e4m3"  # of fp8
    # Of fp8. tensor: a layer's keys are divided by one number and its values by another, from a calibration; token: a
    # row of a head is divided by a scale of its own.
    scale: Literal["none", "tensor", "token"] = "none"
    scales: str | None = None  # of scale=tensor: the file that `kvsweep predictor scales` wrote
    whole_layers: NonNegativeInt = 0  # of fp8: the first layers, which keep the model's precision

    def __post_init__(self) -> None:
        if self.is_fp8 and self.widths != (8, 8):
            given = f"cache.bits={self.bits}, cache.key_bits={self.key_bits} and cache.value_bits={self.value_bits}"
            raise UserError(f"cache.scheme=fp8 takes 8 bits for a number, not {given}: leave the three out.")
        if self.whole_layers and self.scale == "token":
            given = f"cache.whole_layers={self.whole_layers} goes with cache.scale=none or tensor, not token"
            raise UserError(f"{given}: leave one out.")
        if self.is_calibrated:
            artifacts.check("scales", self.scales, SCALES_MAKER)
        if 16 in self.widths and self.is_packed:
            given = f"cache.key_bits={self.key_bits} and cache.value_bits={self.value_bits}"
            raise UserError(f"{given} leave one of the two at 16 bits: give both, or cache.bits below 16.")

    @property
    def widths(self) -> tuple[int, int]:  # bits of keys, of values
        bits = self.bits or (8 if self.is_fp8 else 16)
        return self.key_bits or bits, self.value_bits or bits

    @property
    def is_fp8(self) -> bool:
        return self.scheme == "fp8"

    @property
    def is_calibrated(self) -> bool:
        return self.is_fp8 and self.scale == "tensor"

    @property
    def placed(self) -> dict[str, str]:
        """Return the path of the artifact that the cache reads, by setting."""
        return {"scales": self.scales} if self.is_calibrated and self.scales else {}

    def largest_rows(self, layers: int) -> dict[str, Tensor]:
        """Return the largest number of each layer's `keys` and `values`, [layers] each; nothing without a calibration.

        Raises UserError if the file holds invalid numbers, or those of another number of layers of full attention.
        """
        if not self.is_calibrated:
            return {}
        largest = artifacts.load_once(str(self.scales))
        if len(largest["keys"]) != layers:
            raise UserError(
                f"cache.scales={self.scales} is of {len(largest['keys'])} layers, "
                f"and the model has {layers} of full attention: make it again with `{SCALES_MAKER}`."
            )
        return largest

    @property
    def is_packed(self) -> bool:
        return self.widths != (16, 16)

    @property
    def title(self) -> str:
        """Return the text behind a policy's name: "", " 4 bits", " 4 and 2 bits, kivi", " fp8 e4m3"."""
        if not self.is_packed:
            return ""
        if self.is_fp8:
            scale = "" if self.scale == "none" else f", a scale per {self.scale}"
            whole = f", first {self.whole_layers} layers whole" if self.whole_layers else ""
            return f" fp8 {self.format}{scale}{whole}"
        key_bits, value_bits = self.widths
        bits = f"{key_bits}" if key_bits == value_bits else f"{key_bits} and {value_bits}"
        scheme = "" if self.scheme == "rotated" else f", {self.scheme}"
        return f" {bits} bits{scheme}"

    @property
    def whole_rows(self) -> int:
        """The most rows of a slot that stay in the model's precision, if older rows are quantized."""
        if self.is_fp8:
            return 0
        return self.residual + self.group if self.in_groups else self.residual

    @property
    def in_groups(self) -> bool:  # `group` neighbouring tokens are quantized together
        return self.scheme in ("kivi", "kvarn")

    def unused(self) -> dict[str, str]:
        """The settings that change nothing, each with the reason."""
        of_integers = ("group", "residual")
        of_fp8 = ("format", "scale", "scales", "whole_layers")
        if not self.is_packed:
            return dict.fromkeys(("scheme", *of_integers, *of_fp8), "no row is packed")
        names = of_integers if self.is_fp8 else of_fp8
        unused = dict.fromkeys(names, f"cache.scheme={self.scheme} does not take it")
        if self.key_bits and self.value_bits:
            unused["bits"] = "cache.key_bits and cache.value_bits are given"
        if self.is_calibrated:
            return unused
        # Another reason for `scales`, from above, goes before this one.
        return {"scales": f"cache.scale={self.scale} does not take it"} | unused

    def check_implementation(self, impl: str, capability: tuple[int, int] | None = None) -> None:
        """Raise UserError if Triton does not support the scheme, or not on a GPU of this compute capability."""
        if impl != "triton" or not self.is_packed:
            return
        if self.in_groups:
            raise UserError(f"cache.scheme={self.scheme} has no Triton kernel: give impl=torch, or another scheme.")
        if not self.is_fp8:
            return
        if self.whole_layers:
            raise UserError(f"cache.whole_layers={self.whole_layers} has no Triton kernel: give impl=torch.")
        if self.format == "e4m3" and capability and capability < (8, 9):
            raise UserError(
                "cache.format=e4m3 with impl=triton needs a GPU of compute capability 8.9, "
                f"and this one has {capability[0]}.{capability[1]}: give cache.format=e5m2, or impl=torch."
            )

    def row_formats(self, head_dim: int) -> RowFormats | None:
        """Row formats of integer keys (of `group` keys of a channel, if `in_groups`) and values; None without them."""
        if not self.is_packed or self.is_fp8:
            return None
        if self.scheme in ("rotated", "kvarn") and head_dim & (head_dim - 1):  # not 0: no power of two
            raise UserError(
                f"cache.scheme={self.scheme} needs heads of a power of two, and the model's have {head_dim} numbers: "
                "choose plain or kivi."
            )
        key_bits, value_bits = self.widths
        key = RowFormat(bits=key_bits, group=self.group, head_dim=self.group if self.in_groups else head_dim)
        share = head_dim if self.scheme == "kvarn" else self.group  # numbers of a value that share a zero and a step
        return key, RowFormat(bits=value_bits, group=share, head_dim=head_dim)

    def bytes_per_slot(self, shape: Any, itemsize: int, capacity: int) -> int:
        """Bytes of keys and values in one slot of `capacity` rows: layers * kv_heads times the bytes of one head.

        `shape` as in `fixed_bytes`; `itemsize` is the bytes of a number that is not quantized.

        Not quantized: 2 * capacity * head_dim * itemsize. Quantized: capacity * (bytes of a key + bytes of a value) + 2
        * whole_rows * head_dim * itemsize; a key or value takes head_dim * bits / 8 + 4 * head_dim / group bytes.
        "kivi" and "kvarn" count only the whole groups of the capacity, "kvarn" with 2 * (group + head_dim) bytes of
        scales for each. "fp8" takes head_dim bytes, and 4 for a scale of each token's row.
        """
        layers, head_dim = shape.layers, shape.head_dim
        heads = layers * shape.kv_heads
        whole_row = 2 * head_dim * itemsize  # of a key and a value
        if self.is_fp8:
            scale_bytes = 4 if self.scale == "token" else 0
            fp8_row = 2 * (head_dim + scale_bytes)
            if self.whole_layers >= layers:
                raise UserError(
                    f"cache.whole_layers={self.whole_layers} of {layers} layers leaves none for fp8: lower it."
                )
            whole_heads = self.whole_layers * shape.kv_heads
            return capacity * ((heads - whole_heads) * fp8_row + whole_heads * whole_row)
        formats = self.row_formats(head_dim)
        if not formats:
            return heads * capacity * whole_row
        key, value = formats
        # Tokens that are packed together, and their packed keys: in a group, a packed key is one of its channels.
        tokens, packed_keys = (self.group, head_dim) if self.in_groups else (1, 1)
        scales = 2 * (self.group + head_dim) if self.scheme == "kvarn" else 0
        packed = capacity // tokens * (packed_keys * key.row_bytes + tokens * value.row_bytes + scales)
        return heads * (packed + self.whole_rows * whole_row)

    def identity(self) -> dict[str, Any]:
        """The settings that change completions, for `cell_id`; empty if nothing is quantized."""
        if not self.is_packed:
            return {}
        key_bits, value_bits = self.widths
        if self.is_fp8:
            scales = {kind: artifacts.digest(place) for kind, place in self.placed.items()}
            stored = {"bits": key_bits, "scheme": self.scheme, "format": self.format, "scale": self.scale}
            whole = {"whole_layers": self.whole_layers} if self.whole_layers else {}
            return {"cache": stored | scales | whole}
        widths = {"bits": key_bits} if key_bits == value_bits else {"key_bits": key_bits, "value_bits": value_bits}
        scheme = {} if self.scheme == "rotated" else {"scheme": self.scheme}  # left out as in the first cells
        return {"cache": widths | {"group": self.group, "residual": self.residual} | scheme}


UNPACKED = CacheConfig()
