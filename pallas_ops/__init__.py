"""Flash attention and ragged grouped matmul for JAX, as primitives."""

from pallas_ops._version import __version__ as __version__
from pallas_ops.attention import flash_attention
from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting

gmm = ragged_dot
tgmm = ragged_dot_contracting

__all__ = ["flash_attention", "gmm", "ragged_dot", "ragged_dot_contracting", "tgmm"]
