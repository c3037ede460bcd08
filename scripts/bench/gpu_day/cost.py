"""Milliseconds of a decode step by arithmetic: an estimate of ±30% that no GPU has confirmed."""

from kvsweep.harness.decode.request import SamplingConfig
from kvsweep.kernels.row_format import TOKEN_BLOCK

# Bytes per second by the vendors' data sheets. A card's name holds one of these; the first that it holds counts.
SPECIFIED = {"H100 PCIe": 2.04e12, "H100 NVL": 3.94e12, "H100": 3.35e12, "H200": 4.8e12}
# The share of a bandwidth at which products read weights, and at which attention reads rows.
_WEIGHTS, _ROWS = 0.78, 0.85


def step_ms(
    *, weights: float, rows: float, slots: int, sampling: SamplingConfig, bandwidth: float, invariant: bool
) -> float:
    """The milliseconds of a step that reads so many bytes of weights and of live rows."""
    reads = -(-slots // TOKEN_BLOCK) if invariant else 1  # the invariant product reads the weights once a block
    reading = weights * reads / (_WEIGHTS * bandwidth) + rows / (_ROWS * bandwidth)
    drawing = 0.3 + 0.0063 * slots if sampling.top_k else 0.7 + 0.031 * slots
    pointwise = 1.1 * max(1.0, 0.5 + slots / 128)
    return 1000 * reading + drawing + pointwise + 0.3  # and what the host adds
