from pallas_ops.attention.api import flash_attention

__all__ = ["flash_attention"]
