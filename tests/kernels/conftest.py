"""Fixtures of the kernels' tests."""

import pytest


@pytest.fixture
def plain_products(monkeypatch: pytest.MonkeyPatch):
    """Let Triton's interpreter add the products of a tile one after the other, at every place of the tile alike.

    Its own `tl.dot` is numpy's product, and a BLAS library rounds a row by the row's place on some processors. With
    this one only the kernel's tiles and their order decide.
    """
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(self, a, b, total, *_: object):
        tile = np.zeros_like(total.data)
        for column, row in zip(np.moveaxis(a.data, -1, 0), np.moveaxis(b.data, -2, 0), strict=True):
            tile = tile + column[..., None] * row[..., None, :]
        return TensorHandle(total.data + tile, total.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
