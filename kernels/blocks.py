"""Blocks in which the CPU computes, so that a result does not depend on what is computed beside it."""

# Attention over a multiple of so many rows sums a slot's rows in the same order, however many rows lie behind them.
ROW_BLOCK = 32
# A product of a multiple of so many tokens gives each token the same bits, on the CPU (`kernels.reference.linear`).
# Below 16 tokens MKL has other routines on processors with AVX-512.
TOKEN_BLOCK = 16
# The query heads of a key head are filled up to a multiple of so many.
HEAD_BLOCK = 4


def whole_blocks(count: int, block: int) -> int:
    """The smallest multiple of `block` that is at least `count`."""
    return -(-count // block) * block
