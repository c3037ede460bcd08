"""The Triton twins of the operations in `kernels.reference`, under the same names."""

from kernels.compact import compact_layers
from kernels.decode_attention import decode_attention
from kernels.importance_labels import causal_mass, importance_labels
from kernels.linear import linear
from kernels.observation import observation_scores
from kernels.packed_attention import packed_attention
from kernels.redundancy import redundancy

__all__ = [
    "RAGGED",
    "causal_mass",
    "compact_layers",
    "decode_attention",
    "importance_labels",
    "linear",
    "observation_scores",
    "packed_attention",
    "redundancy",
]

# As in the reference; here attention itself stops at each slot's length.
RAGGED = True
