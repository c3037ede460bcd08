"""What a decode step computes between its products and attention, in plain torch.

`kernels.fused_pointwise` has the Triton kernel of each operation that the step calls. A number of the result depends on
its own token alone.
"""

from typing import Any

from torch import Tensor, cat
from torch.nn.functional import rms_norm, silu

HeadNorms = tuple[Tensor, Tensor, float]  # weights [head_dim] of the queries' and of the keys' RMS norm, and epsilon


def add_norm(states: Tensor, update: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add `update` to `states`; return the sum and its RMS norm, all [tokens, width]; `weight` [width] scales the norm.

    Without an update the sum is `states` itself.
    """
    states = states if update is None else states + update
    return states, rms_norm(states, weight.shape, weight, epsilon)


def gated(gate_up: Tensor) -> Tensor:
    """Multiply the SiLU of the first half of gate_up [tokens, 2 * width] by the second half: [tokens, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def rotated(
    heads: Tensor, cos: Tensor, sin: Tensor, *, q_heads: int, norms: HeadNorms | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of heads [tokens, q_heads + 2 * kv_heads, head_dim]; the first two are rotated.

    cos and sin [tokens, 1, head_dim]: the rotation (RoPE) swaps the halves of a head and negates one half, so the first
    half of `sin` must be negated. `norms` (Qwen3) come before the rotation.
    """
    kv_heads = (heads.shape[1] - q_heads) // 2
    turning, value = heads.split_with_sizes([q_heads + kv_heads, kv_heads], dim=1)
    if norms is not None:
        q_weight, k_weight, epsilon = norms
        query, key = turning.split_with_sizes([q_heads, kv_heads], dim=1)
        query = rms_norm(query, q_weight.shape, q_weight, epsilon)
        key = rms_norm(key, k_weight.shape, k_weight, epsilon)
        turning = cat([query, key], dim=1)
    turning = turning * cos + turning.roll(heads.shape[-1] // 2, dims=-1) * sin  # the roll swaps the halves
    query, key = turning.split_with_sizes([q_heads, kv_heads], dim=1)
    return query, key, value


def rotate_and_write(
    heads: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, lines: Tensor, **how: Any
) -> Tensor:
    """Do `rotated`, write keys and values into the cache (`write_rows`); return the queries."""
    query, key, value = rotated(heads, cos, sin, **how)
    write_rows(keys, key, lines)
    write_rows(values, value, lines)
    return query


def write_rows(rows: Tensor, new: Tensor, lines: Tensor) -> None:
    """Write rows [tokens or more, kv_heads, head_dim] to `lines` [tokens * kv_heads] of a memory [..., head_dim]."""
    written = new[: lines.shape[0] // new.shape[1]]  # without the tokens that only fill a block
    rows.view(-1, rows.shape[-1]).index_copy_(0, lines, written.flatten(0, 1))
