"""The operations of `kernels.reference` as Triton kernels, under the same names."""

from kvsweep.kernels.compact import compact_layers as compact_layers
from kvsweep.kernels.decode_attention import chunk_attention as chunk_attention
from kvsweep.kernels.decode_attention import decode_attention as decode_attention
from kvsweep.kernels.draw_tokens import draw_tokens as draw_tokens
from kvsweep.kernels.fused_pointwise import add_norm as add_norm
from kvsweep.kernels.fused_pointwise import gated as gated
from kvsweep.kernels.fused_pointwise import rotate_and_write as rotate_and_write
from kvsweep.kernels.importance_labels import causal_mass as causal_mass
from kvsweep.kernels.importance_labels import importance_labels as importance_labels
from kvsweep.kernels.linear import linear as linear
from kvsweep.kernels.packed_attention import packed_attention as packed_attention
from kvsweep.kernels.scores import observation_scores as observation_scores
from kvsweep.kernels.scores import redundancy as redundancy

# Unlike the reference, attention itself stops at each slot's length.
RAGGED = True
