"""Flash attention and ragged grouped matmul for JAX, as primitives."""

from pallas_ops.attention import flash_attention

__all__ = ["flash_attention"]
