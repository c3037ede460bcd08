"""The Triton twins of the operations in `kernels.reference`, under the same names."""

from kvsweep.kernels.compact import compact_layers
from kvsweep.kernels.decode_attention import decode_attention
from kvsweep.kernels.importance_labels import causal_mass, importance_labels
from kvsweep.kernels.linear import linear
from kvsweep.kernels.observation import observation_scores
from kvsweep.kernels.packed_attention import packed_attention
from kvsweep.kernels.redundancy import redundancy

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
