"""Sizes of blocks. On the CPU, rows and tokens in whole blocks have results that do not depend on the batch."""

# Rows of attention. If their number is a multiple of this, a slot's rows are added in the same order, whatever the
# number of dead rows behind them.
ROW_BLOCK = 32
# Tokens of a matrix product (`kernels.reference.linear`). Products of fewer than 16 tokens use other routines of MKL on
# processors with AVX-512, which round differently.
TOKEN_BLOCK = 16
# Query heads per key head; zeros fill them up.
HEAD_BLOCK = 4


def whole_blocks(count: int, block: int) -> int:
    """The smallest multiple of `block` that is at least `count`."""
    return -(-count // block) * block
