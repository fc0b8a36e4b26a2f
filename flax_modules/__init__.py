"""Flax layers and a language model on the operations of `pallas_ops`."""

from flax_modules.attention import Attention, apply_rope, attention_fn
from flax_modules.moe import MoE, MoEStats
from flax_modules.transformer import MLP, Block, DecoderConfig, DecoderLM, DecoderOutput

__all__ = [
    "MLP",
    "Attention",
    "Block",
    "DecoderConfig",
    "DecoderLM",
    "DecoderOutput",
    "MoE",
    "MoEStats",
    "apply_rope",
    "attention_fn",
]
