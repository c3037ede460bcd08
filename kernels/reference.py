"""The cache operations in plain torch: the specification that the Triton kernels are tested against.

A slot's rows at or beyond its length are dead. Dead rows must be finite: attention gives them a weight of zero, and
zero times NaN is NaN. `compression.cache.SlotCache` keeps them finite.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import avg_pool1d, max_pool1d, pad, scaled_dot_product_attention

from kvsweep.kernels.fp8 import widened
from kvsweep.kernels.packed import PackedProduct
from kvsweep.kernels.packing import unpack_rows
from kvsweep.kernels.pointwise import add_norm as add_norm
from kvsweep.kernels.pointwise import gated as gated
from kvsweep.kernels.pointwise import rotate_and_write as rotate_and_write
from kvsweep.kernels.row_format import (
    HEAD_BLOCK,
    ROW_BLOCK,
    TOKEN_BLOCK,
    RowFormat,
    RowFormats,
    filled_tokens,
    whole_blocks,
)
from kvsweep.kernels.sampling import draw_tokens as draw_tokens

# True if `decode_attention` itself stops at each slot's length. A step of a given number of slots then always launches
# the same work, so that a CUDA graph can replay it.
RAGGED = False

Attended = tuple[Tensor, Tensor | None]  # output, and the attention mass if it is wanted

# Rows per product of weights and values, by the bytes of a number. torch splits the sum of a larger product at places
# that depend on the number of rows.
_VALUES_BLOCK = {8: 128, 4: 128, 2: 1024}
# 16-bit numbers to widen together, which gives the number of slots at a time: they stay in the processor's cache.
_WIDENED_NUMBERS = 1 << 20
# With at most this many query heads per key head the product's bits do not depend on HEAD_BLOCK, so none are added.
_FEW_HEADS = 2

# Other rounding shows in one of so many outputs, and in one of so many tokens. It shows seldom in sums of few numbers:
# at least in .15 of the tokens and .019 of the outputs (MKL's AVX2 kernels; widths 2 to 128, 1 to 64 outputs).
_TELLING, _MOST_TRIED = 1024, 64

# Queries, and keys, of a tile of a prompt's attention.
_TILE = 512

# Numbers to unpack together, which gives the number of slots at a time: they stay in the processor's cache.
_UNPACKED_NUMBERS = 1 << 20


def _wide(tensor: Tensor) -> Tensor:
    """Convert to float32. float64 stays float64, exact enough to test the Triton kernels."""
    return tensor if tensor.itemsize >= 4 else tensor.float()


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply inputs [tokens, width] by weight [outputs, width] and add bias [outputs]: [tokens, outputs].

    On any CPU a token's outputs have the same bits in every batch and at every place in it: see `_product`. Zeros fill
    the tokens up to `kernels.row_format.filled_tokens`.
    """
    if inputs.device.type != "cpu":
        return functional.linear(inputs, weight, bias)
    inputs = inputs.contiguous()  # another memory layout would be added in another order
    tokens = len(inputs)
    filled = filled_tokens(tokens)
    product = _product(filled, weight, bias)
    if filled == tokens:
        return product(inputs, weight, bias)
    return product(pad(inputs, (0, 0, 0, filled - tokens)), weight, bias)[:tokens]


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _across(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with the tokens as columns: a BLAS library uses other loops for it."""
    columns = inputs.t()
    products = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
    return products.t().contiguous()


def _packed(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product with the weight's packed copy (`kernels.packed`)."""
    product: PackedProduct = weight.packed_product  # type: ignore[attr-defined]
    return product(inputs, bias)


def _in_blocks(product: Product, block: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of `block` tokens at a time; zeros fill the last block."""
    outputs = []
    for tokens in inputs.split(block):
        filled = pad(tokens, (0, 0, 0, block - len(tokens)))
        outputs.append(product(filled, weight, bias)[: len(tokens)])
    return torch.cat(outputs)


# The product for each shape: shape and processor decide which routine of torch multiplies.
_products: dict[tuple[object, ...], Product] = {}


def _product(tokens: int, weight: Tensor, bias: Tensor | None) -> Product:
    """Return the fastest product of `tokens` tokens that gives a token the same outputs at every place, in every batch.

    If the tokens do not fill the blocks in which a BLAS kernel computes, it may round a token by its place: MKL's AVX2
    kernels and OpenBLAS's kernels do, AVX-512 kernels seldom. So each shape is tried once: with equal rows as inputs,
    all rows of the result must be equal, and equal to the rows of one block of tokens. One token at a time always
    passes.
    """
    has_packed_copy = hasattr(weight, "packed_product")  # of the weight (`kernels.packed`), not of quantized rows
    numbers = (weight.shape, weight.stride(), weight.dtype)
    shape = (tokens, *numbers, bias is None, torch.get_num_threads(), has_packed_copy)
    if shape not in _products:
        _products[shape] = _fastest_product(tokens, weight, bias, has_packed_copy)
    return _products[shape]


def _fastest_product(tokens: int, weight: Tensor, bias: Tensor | None, has_packed_copy: bool) -> Product:
    """Try the products in the order of their speed: first for a block of tokens, then for so many tokens."""
    products: list[Product] = [functional.linear, _across]
    packed: list[Product] = [_packed] if has_packed_copy else []
    if weight.dtype == torch.float32:  # in 16 bits packed products are taken where they have the bits of plain ones
        products = packed + products
    in_a_block: Product = partial(_in_blocks, functional.linear, 1)  # one by one
    for product in products:
        if _alike(product, product, TOKEN_BLOCK, weight, bias):
            in_a_block = product
            break
    # `in_a_block` decides a token's bits; any product with the same bits may compute more tokens at once.
    for product in dict.fromkeys([*packed, in_a_block, *products]):
        if _alike(product, in_a_block, tokens, weight, bias):
            return product
    return partial(_in_blocks, in_a_block, TOKEN_BLOCK)


def _alike(product: Product, in_a_block: Product, tokens: int, weight: Tensor, bias: Tensor | None) -> bool:
    """True if equal tokens all get the outputs of the first token of a block; tried on a few random tokens."""
    generator = torch.Generator().manual_seed(0)
    tries = min(_MOST_TRIED, max(1, _TELLING // len(weight)))  # fewer outputs need more tokens to show a difference
    for _ in range(tries):
        token = torch.randn(1, weight.shape[1], generator=generator).to(weight.dtype)
        expected = in_a_block(token.repeat(TOKEN_BLOCK, 1), weight, bias)[0]
        outputs = product(token.repeat(tokens, 1), weight, bias)
        if not bool((outputs == expected).all()):
            return False
    return True


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Squeeze the logits between minus and plus `softcap` (Gemma 2); None leaves them unchanged."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


def attention_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return each query's probabilities [..., rows], float32 or wider; `sinks` [..., 1] is a logit beside the rows."""
    logits = _wide(logits)
    if sinks is None:
        return logits.softmax(dim=-1)
    beside = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, beside], dim=-1).softmax(dim=-1)[..., :-1]


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    *,
    scaling: float,
    return_mass: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    unseen: Tensor | None = None,
    scales: Sequence[Tensor] = (),
) -> Attended:
    """Attention of one new token per slot over that slot's live rows.

    query [slots, q_heads, head_dim], where q_heads is a multiple of kv_heads (grouped queries share a key head); keys
    and values [slots, kv_heads, capacity, head_dim]; lengths [slots], each from 1 to capacity.
    `scaling`, usually head_dim ** -0.5, multiplies the logits; `sinks` [q_heads] are logits beside each query head's
    rows; `softcap` as in `capped`; `unseen` is `unseen_rows` of the lengths, where the caller has it for all layers.
    Rows may be fp8 (`kernels.fp8`): `scales` of keys and of values are then [slots, kv_heads, capacity, 1], or none.
    Returns output [slots, q_heads, head_dim], and with `return_mass` the probabilities summed over each group of query
    heads, [slots, kv_heads, capacity].

    Logits are float32 or wider, also for 16-bit rows: biases of queries and keys (Qwen2) lift all logits of a query far
    above their differences, which 8 or 11 bits would round away.
    """
    if keys.itemsize == 1 or (keys.itemsize == 2 and keys.device.type == "cpu"):
        # `unseen` is not passed on: it is made again for the few slots that are widened together.
        attend = partial(decode_attention, scaling=scaling, return_mass=return_mass, sinks=sinks, softcap=softcap)
        return _attend_widened(attend, query, keys, values, lengths, scales)
    slots, kv_heads, capacity, head_dim = keys.shape
    grouped = query.reshape(slots, kv_heads, -1, head_dim)  # [slots, kv_heads, group, head_dim]
    group = grouped.shape[2]
    if sinks is not None:
        sinks = sinks.view(kv_heads, group, 1)
    if group > _FEW_HEADS:  # zeros fill the query heads up to whole blocks
        more = whole_blocks(group, HEAD_BLOCK) - group
        grouped = pad(grouped, (0, 0, 0, more))
        sinks = None if sinks is None else pad(sinks, (0, 0, 0, more))
    logits = capped(_logits(grouped, keys, scaling), softcap)
    logits += unseen_rows(lengths, capacity) if unseen is None else unseen
    weights = attention_weights(logits, sinks)  # [slots, kv_heads, group or more, capacity]
    output = _mix(weights.to(values.dtype), values, group).reshape(slots, -1, head_dim)
    if not return_mass:
        return output, None
    # sum(dim=2) would add the heads in an order that depends on the number of rows.
    return output, reduce(torch.add, weights.unbind(dim=2)[:group])


def unseen_rows(lengths: Tensor, rows: int) -> Tensor:
    """Minus infinity for each row at or beyond a slot's length, else 0, [slots, 1, 1, rows]."""
    dead = torch.arange(rows, device=lengths.device) >= lengths[:, None, None, None]
    return torch.where(dead, float("-inf"), 0.0)


def _attend_widened(
    attend: Callable[..., Attended],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scales: Sequence[Tensor],
) -> Attended:
    """Attend in float32 over 16-bit or fp8 rows, a few slots at a time; 16-bit products on a CPU would round logits."""
    few = max(1, _WIDENED_NUMBERS // keys[0].numel())  # slots
    columns = [tensor.split(few) for tensor in (query, keys, values, lengths, *scales)]
    parts = []
    for few_queries, few_keys, few_values, few_lengths, *few_scales in zip(*columns, strict=True):
        wide = _wide(few_queries)
        key_scale, value_scale = few_scales or (None, None)
        wide_keys = widened(few_keys, key_scale, wide.dtype)
        wide_values = widened(few_values, value_scale, wide.dtype)
        parts.append(attend(wide, wide_keys, wide_values, few_lengths))
    output, mass = joined(parts)
    return output.to(query.dtype), mass


def joined(parts: Sequence[Attended]) -> Attended:
    """Join the attention of consecutive parts; either all have a mass or none has."""
    outputs, masses = zip(*parts, strict=True)
    return torch.cat(outputs), None if masses[0] is None else torch.cat(masses)


def _logits(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Return scaled products [..., queries, rows] of query [..., queries, head_dim] and keys [..., rows, head_dim].

    Keys may be broadcast. float32 or wider: on a GPU the product of 16-bit numbers is written in float32, so that no
    row is copied.
    """
    columns = keys.transpose(-1, -2)
    batch = query.shape[:-2]
    if keys.is_cuda and keys.itemsize == 2:
        columns = columns.expand(*batch, -1, -1).flatten(0, -3)
        return (torch.bmm(query.flatten(0, -3), columns, torch.float32) * scaling).unflatten(0, batch)
    query, columns = _wide(query) * scaling, _wide(columns)
    copies = 1
    if keys.device.type == "cpu":
        # If there are fewer matrices than threads, threads share a product and split the rows at a place that depends
        # on their number. With one matrix per thread they do not split.
        copies = -(-torch.get_num_threads() // batch.numel())
    if copies == 1:
        return torch.matmul(query, columns)
    return torch.matmul(query.expand(copies, *query.shape), columns.expand(copies, *columns.shape))[0]


def chunk_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scaling: float,
    return_mass: bool = False,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
) -> Attended:
    """Attention of the newest tokens of one slot, each over the rows up to its own: `decode_attention` for a chunk.

    query [tokens, q_heads, head_dim]; keys and values [kv_heads, rows, head_dim], the tokens' own rows last; `window`:
    the number of newest rows that a token sees, None: all. Returns output [tokens, q_heads, head_dim] and attention
    mass [tokens, kv_heads, rows] or None.
    """
    tokens = len(query)
    kv_heads, rows, _ = keys.shape
    earlier = rows - tokens
    unseen = _mask(tokens, earlier, query.dtype, query.device)
    if window is not None and window < rows:
        # Token i lies in row `earlier` + i, and sees no row at or before `earlier` + i - `window`. Not added in place,
        # because other layers share the mask.
        unseen = unseen + torch.full_like(unseen, float("-inf")).tril(earlier - window)
    if not return_mass and sinks is None and softcap is None:  # torch's attention has none of these
        output = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=unseen, scale=scaling, enable_gqa=True
        )
        return output[0].transpose(0, 1), None
    grouped = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, tokens, head_dim]
    logits = capped(_logits(grouped, keys[:, None], scaling), softcap) + unseen
    weights = attention_weights(logits, None if sinks is None else sinks.view(kv_heads, -1, 1, 1))
    output = torch.matmul(weights.to(values.dtype), values[:, None]).permute(2, 0, 1, 3).flatten(1, 2)
    return output, weights.sum(dim=1).transpose(0, 1) if return_mass else None


@lru_cache(maxsize=4)  # one for all layers
def _mask(tokens: int, earlier: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((tokens, earlier + tokens), float("-inf"), dtype=dtype, device=device).triu(earlier + 1)


def _mix(weights: Tensor, values: Tensor, group: int) -> Tensor:
    """The first `group` rows of weights [..., group or more, rows] times values [..., rows, head_dim]."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return _row_sums(weights[:, :, :group], values)
    block = _VALUES_BLOCK[values.itemsize]
    blocks = zip(weights.split(block, dim=-1), values.split(block, dim=-2), strict=True)
    products = [torch.matmul(block_weights, block_values) for block_weights, block_values in blocks]
    # Block after block, so that the order does not depend on the number of rows.
    return reduce(torch.add, products)[:, :, :group]


def _row_sums(weights: Tensor, values: Tensor) -> Tensor:
    """The product of weights [slots, kv_heads, group, rows] and values [slots, kv_heads, rows, head_dim].

    torch's embedding bag adds row after row (FBGEMM), so that no sum depends on the other slots or on rows of weight 0.
    It reads the rows where they lie, and takes two thirds of the time of a product of matrices this small.
    """
    width = values.shape[-1]
    in_whole_lines = values.stride(-1) == 1 and not any(stride % width for stride in values.stride()[:-1])
    if not in_whole_lines:
        values = values.contiguous()
    # The memory as a table of lines of `width` numbers, and the lines from one slot, head and row to the next.
    per_slot, per_head, per_row = [stride // width for stride in values.stride()[:3]]
    lines, line_numbers, begins = _bags(weights.shape, (per_slot, per_head, 0, per_row))
    table = values.as_strided((lines, width), (width, 1))
    sums, *_ = torch.embedding_bag(table, line_numbers, begins, mode=0, per_sample_weights=weights.reshape(-1))
    return sums.view(*weights.shape[:3], width)


@lru_cache(maxsize=8)
def _bags(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, Tensor, Tensor]:
    """The lines of a table, those that each query head of each slot adds up, and where those of each head begin.

    `shape` is [slots, kv_heads, group, rows], `strides` the lines from one of each to the next. In 32 bits, because the
    bags read as many line numbers as weights.
    """
    lines = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    line_numbers = torch.arange(lines, dtype=torch.int32).as_strided(shape, strides).flatten()
    return lines, line_numbers, torch.arange(0, len(line_numbers), shape[-1], dtype=torch.int32)


def packed_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    newest: Tensor,
    positions: Tensor,
    counts: Tensor,
    lengths: Tensor,
    *,
    formats: RowFormats,
    **how: Any,
) -> Attended:
    """`decode_attention` with the oldest rows quantized. Query, rows and output are all rotated, or none is.

    query [slots, q_heads, head_dim]; keys, values: the bytes of the first `counts` keys and values, [slots, kv_heads,
    capacity, bytes]; newest: keys and values of the other rows, [slots, 2, kv_heads, residual, head_dim], where the row
    of the token at position p lies at p % residual; positions in the text, [slots, kv_heads, capacity]; counts: packed
    rows, [slots, kv_heads]; lengths [slots], each from 1 to capacity; `how` are the keywords of `decode_attention`. The
    bytes of dead rows, and all of `newest`, must encode finite numbers, as zeros do.
    """

    def unpack(slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        packed = _of_slots(keys, slots, rows), _of_slots(values, slots, rows)
        few_positions = positions[:, :, :rows].index_select(0, slots)
        few_newest = newest.index_select(0, slots)
        return whole_rows(*packed, few_newest, few_positions, counts.index_select(0, slots), formats=formats)

    return _attend_unpacked(unpack, query, lengths, keys.shape[2], keys.shape[1], how)


def kivi_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    newest: Tensor,
    counts: Tensor,
    lengths: Tensor,
    *,
    formats: RowFormats,
    scales: Sequence[Tensor] = (),
    **how: Any,
) -> Attended:
    """`decode_attention` over rows stored as in `whole_kivi_rows`; other arguments as in `packed_attention`."""
    group = formats[0].head_dim  # tokens: a packed key is a channel of a group

    def unpack(slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        groups = -(-rows // group)  # rounded up
        packed = _of_slots(keys, slots, groups), _of_slots(values, slots, groups * group)
        few_newest = newest.index_select(0, slots)
        few_scales = [scale[:, :, :groups].index_select(0, slots) for scale in scales]
        return whole_kivi_rows(*packed, few_newest, counts[slots], formats=formats, scales=few_scales)

    return _attend_unpacked(unpack, query, lengths, values.shape[2] + newest.shape[3], values.shape[1], how)


def _of_slots(packed: Tensor, slots: Tensor, rows: int) -> Tensor:
    """Return the bytes of the first `rows` rows of some slots."""
    # Copying words is several times as fast as copying bytes, and index_select is twice as fast as brackets.
    return packed[:, :, :rows].view(torch.int32).index_select(0, slots).view(torch.uint8)


def _attend_unpacked(
    unpack: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    query: Tensor,
    lengths: Tensor,
    rows: int,
    kv_heads: int,
    how: dict[str, Any],
) -> Attended:
    """Attend over a few slots at a time; `unpack` returns the first rows of some slots, at most `rows`."""
    few = max(1, _UNPACKED_NUMBERS // (kv_heads * rows * query.shape[-1]))  # slots
    output = torch.empty_like(query)
    masses = _wide(query[:0]).new_zeros(len(query), kv_heads, rows)  # float32 or wider
    # Slots of similar length go together: each is unpacked up to the length of the longest of them, which comes last.
    for slots in lengths.argsort(stable=True).split(few):
        longest = min(rows, whole_blocks(int(lengths[slots[-1]]), ROW_BLOCK))
        keys, values = unpack(slots, longest)
        output[slots], mass = decode_attention(query[slots], keys, values, lengths[slots], **how)
        if mass is not None:
            masses[slots, :, :longest] = mass[..., :longest]
    return output, masses if how.get("return_mass") else None


def whole_rows(
    keys: Tensor, values: Tensor, newest: Tensor, positions: Tensor, counts: Tensor, *, formats: RowFormats
) -> tuple[Tensor, Tensor]:
    """Return keys and values of `packed_attention` in `newest`'s precision, [slots, kv_heads, capacity, head_dim]."""
    capacity, residual = keys.shape[2], newest.shape[3]
    key_format, value_format = formats
    whole_keys = _unpacked(keys, key_format, residual, newest)
    whole_values = _unpacked(values, value_format, residual, newest)
    # The rows behind the packed ones, always `residual` of them. A slot may have fewer: what lies beyond its length is
    # dead, and what lies beyond the capacity is cut off below.
    rows = counts[..., None] + torch.arange(residual, device=counts.device)  # [slots, kv_heads, residual]
    places = positions.gather(-1, rows.clamp(max=capacity - 1)) % residual
    _fill((whole_keys, whole_values), newest, rows, places)
    return whole_keys[..., :capacity, :], whole_values[..., :capacity, :]


def whole_kivi_rows(
    keys: Tensor, values: Tensor, newest: Tensor, counts: Tensor, *, formats: RowFormats, scales: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return the rows of a cache with keys quantized per channel, [slots, kv_heads, capacity, head_dim] each.

    `keys` is the bytes of a channel of each group, [slots, kv_heads, groups, head_dim, bytes]; `values` the bytes of
    the values, [slots, kv_heads, rows, bytes]. The rows from `counts` on (whole groups, [slots]) lie in `newest`,
    [slots, 2, kv_heads, room, head_dim], row i at i % room; all its numbers are finite. KVarN's `scales` multiply the
    keys of a group, [slots, kv_heads, groups, 1, group], and its values, [slots, kv_heads, groups, 1, head_dim].
    """
    room = newest.shape[3]
    key_format, value_format = formats
    # A packed key is a channel of a group, so that key_format.head_dim is the tokens of a group.
    channels = unpack_rows(keys, key_format)  # [slots, kv_heads, groups, head_dim, group]
    if scales:
        key_scales, value_scales = scales
        channels = channels * key_scales
        wide = unpack_rows(values, value_format).unflatten(2, (-1, key_format.head_dim)) * value_scales
        whole_values = pad(wide.flatten(2, 3).to(newest.dtype), (0, 0, 0, room))
    else:
        whole_values = _unpacked(values, value_format, room, newest)
    whole_keys = pad(channels.to(newest.dtype).transpose(-1, -2).flatten(2, 3), (0, 0, 0, room))
    # All of `newest` is copied behind the packed rows; what lies beyond a slot's length is dead.
    rows = (counts[:, None, None] + torch.arange(room, device=counts.device)).expand(-1, values.shape[1], -1)
    _fill((whole_keys, whole_values), newest, rows, rows % room)
    return whole_keys, whole_values


def _unpacked(packed: Tensor, row_format: RowFormat, room: int, like: Tensor) -> Tensor:
    """Quantized rows [slots, kv_heads, rows, bytes] in `like`'s dtype, then `room` rows of zeros for the newest."""
    words = pad(packed.view(torch.int32), (0, 0, 0, room))  # copying words is several times as fast as copying bytes
    return unpack_rows(words.view(torch.uint8), row_format).to(like.dtype)


def _fill(whole: Sequence[Tensor], newest: Tensor, rows: Tensor, places: Tensor) -> None:
    """Copy the newest keys and values from `places` to the rows `rows` of the whole ones, in place.

    whole: keys and values, [slots, kv_heads, capacity, head_dim] each. newest: [slots, 2, kv_heads, room, head_dim],
    keys first. rows, places: [slots, kv_heads, copied].
    """
    # Copying row by row in flat memory is several times as fast as an index for each dimension. Heads are counted over
    # all slots; each has its rows of `whole`, and its places of `newest`, one behind another.
    heads = torch.arange(rows.shape[0] * rows.shape[1], device=rows.device).view(*rows.shape[:2], 1)
    flat_rows = (heads * whole[0].shape[2] + rows).flatten()
    flat_places = (heads * newest.shape[3] + places).flatten()
    for target, new in zip(whole, newest.unbind(1), strict=True):  # keys, then values
        copied = new.reshape(-1, new.shape[-1]).index_select(0, flat_places)
        target.view(-1, target.shape[-1]).index_copy_(0, flat_rows, copied)


def compact_layers(rows: Sequence[Tensor], keep: Tensor) -> None:
    """Move the kept rows of one slot to the front in all layers, in place and in order.

    `rows` has the same number of tensors for each layer in turn, [kv_heads, capacity, width]; `keep` has sorted row
    indices, [kept] or [layers, kv_heads, kept].
    """
    kept = keep.shape[-1]
    for index, tensor in enumerate(rows):
        if keep.dim() == 1:
            tensor[:, :kept] = tensor.index_select(1, keep)
        else:
            of_layer = keep[index * len(keep) // len(rows)]  # a layer has len(rows) / len(keep) tensors
            tensor[:, :kept] = tensor.gather(1, of_layer[..., None].expand(-1, -1, tensor.shape[-1]))


def observation_scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float,
    past_only: bool = False,
    pool_logits: bool = False,
    pooling: int = 1,
    pool: Literal["mean", "max"] = "mean",
) -> Tensor:
    """Mean attention of the newest tokens' queries to the rows before them, pooled over neighbouring rows.

    queries [q_heads, window, head_dim] of the newest `window` rows, oldest first; keys [kv_heads, length, head_dim],
    one slot's live rows, the window's own at the end. Returns [kv_heads, group, length - window], float32 or wider.

    `past_only`: softmax over only the rows before the window (R-KV), not over all rows that a query may see (SnapKV).
    `pool_logits`: take the largest logit of each group of query heads before the softmax (R-KV); group is then 1. A
    pooled score is the mean (SnapKV) or maximum (R-KV) of `pooling` rows, an odd number; zeros pad both ends.
    """
    kv_heads, length, head_dim = keys.shape
    window = queries.shape[1]
    grouped = queries.reshape(kv_heads, -1, window, head_dim)
    logits = torch.matmul(_wide(grouped), _wide(keys)[:, None].transpose(-1, -2)) * scaling
    if pool_logits:
        logits = logits.amax(dim=1, keepdim=True)
    if past_only:
        logits = logits[..., : length - window]
    else:  # within the window, a query sees the rows up to its own
        later = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(diagonal=1)
        logits[..., length - window :] = logits[..., length - window :].masked_fill(later, float("-inf"))
    scores = logits.softmax(dim=-1)[..., : length - window].mean(dim=-2)
    if pooling == 1 or length == window:
        return scores
    pooled = avg_pool1d if pool == "mean" else max_pool1d
    return pooled(scores, pooling, stride=1, padding=pooling // 2)


def redundancy(keys: Tensor, *, threshold: float) -> Tensor:
    """How much each key repeats other keys (R-KV, 2505.24133, released code): softmax of its mean cosine similarity.

    Two entries in each row of the cosine matrix count as zero: the diagonal, and the last column above the threshold
    (else column 0), because the newest of several similar tokens is no repetition. keys [kv_heads, length, head_dim];
    returns [kv_heads, length], float32 or wider, summing to 1 per head.
    """
    unit = functional.normalize(_wide(keys), dim=-1, eps=1e-8)
    cosine = torch.matmul(unit, unit.transpose(-1, -2))
    cosine.diagonal(dim1=-2, dim2=-1).zero_()  # before the comparison: no key is similar to itself
    columns = torch.arange(keys.shape[1], device=keys.device)
    last_similar = torch.where(cosine > threshold, columns, 0).amax(dim=-1, keepdim=True)
    repeated = cosine.scatter(-1, last_similar, 0.0).mean(dim=-2)
    return repeated.softmax(dim=-1)


def _reduce_columns(
    query: Tensor, key: Tensor, *, scaling: float, first_query: int, min_distance: int, largest: bool
) -> Tensor:
    """Sum or maximum of each column of causal attention, over the queries from `first_query` on and over each group.

    A query counts for keys at least `min_distance` positions before it. A column without such a query is 0.
    """
    kv_heads, length, head_dim = key.shape
    grouped = query.reshape(kv_heads, -1, length, head_dim)
    positions = torch.arange(length, device=key.device)
    columns = torch.zeros(kv_heads, length, dtype=_wide(key[:0]).dtype, device=key.device)

    def tile(rows: Tensor, cols: Tensor) -> Tensor:  # [kv_heads, group, rows, cols]
        logits = torch.matmul(_wide(grouped[:, :, rows]), _wide(key[:, None, cols]).transpose(-1, -2)) * scaling
        return logits.masked_fill(cols > rows[:, None], float("-inf"))

    for start in range(first_query, length, _TILE):
        rows = positions[start : start + _TILE]
        visible = positions[: int(rows[-1]) + 1].split(_TILE)
        # Each tile is computed twice, first for its rows' softmax, so that no tile is kept.
        norm = torch.stack([tile(rows, cols).logsumexp(dim=-1) for cols in visible]).logsumexp(dim=0)
        for cols in visible:
            weights = (tile(rows, cols) - norm[..., None]).exp()
            weights = weights.masked_fill(rows[:, None] - cols < min_distance, 0.0)
            if largest:
                columns[:, cols] = torch.maximum(columns[:, cols], weights.amax(dim=(1, 2)))
            else:
                columns[:, cols] += weights.sum(dim=(1, 2))
    return columns


def causal_mass(
    query: Tensor, key: Tensor, *, scaling: float, reduce_columns: Callable[..., Tensor] = _reduce_columns
) -> Tensor:
    """Attention probability that each key of a prompt receives, summed over queries and over each group of query heads.

    query [q_heads, length, head_dim], key [kv_heads, length, head_dim]; returns [kv_heads, length], float32 or wider.
    `reduce_columns` sums the columns, and the Triton kernel passes its own.
    """
    return reduce_columns(query, key, scaling=scaling, first_query=0, min_distance=0, largest=False)


def importance_labels(
    query: Tensor,
    key: Tensor,
    *,
    kind: Literal["answer", "far_max", "later"],
    scaling: float,
    answer_start: int,
    min_distance: int = 32,
    reduce_columns: Callable[..., Tensor] = _reduce_columns,
) -> Tensor:
    """Attention that one layer of a finished completion pays to each earlier token, per key head.

    `answer`: mean probability over the queries of the answer; a query's own token counts zero (DynTS, 2601.18383,
    section 3). `far_max`: the largest probability from any query at least `min_distance` positions later. `later`: the
    mean over those queries. Mean and maximum also run over the query heads of a group, not over key heads or layers.

    query [q_heads, length, head_dim] and key [kv_heads, length, head_dim] are rotated; `answer_start` is the position
    of the answer's first token; `reduce_columns` as in `causal_mass`. Returns [kv_heads, length], float32 or wider; for
    `far_max` and `later` NaN if no query is far enough away. Extra memory: a few times q_heads * (_TILE * _TILE +
    length) floats.
    """
    length = query.shape[1]
    group = query.shape[0] // key.shape[0]
    options = {"scaling": scaling, "largest": kind == "far_max"}
    if kind == "answer":
        sums = reduce_columns(query, key, first_query=answer_start, min_distance=1, **options)
        return sums / (group * (length - answer_start))
    columns = reduce_columns(query, key, first_query=0, min_distance=min_distance, **options)
    queries = length - min_distance - torch.arange(length, device=key.device)  # that count for each key
    columns = columns.masked_fill(queries <= 0, torch.nan)
    return columns if kind == "far_max" else columns / (group * queries)
