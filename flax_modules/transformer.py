"""A decoder-only language model: attention and experts (or a dense MLP) in pre-norm blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from flax_modules.attention import Attention
from flax_modules.moe import MoE, MoEStats

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape and options of a `DecoderLM`.

    Attributes:
      vocab_size: V.
      num_layers: number of blocks, L.
      features: D, width of the residual stream.
      num_heads: query heads.
      num_kv_heads: key/value heads, a divisor of `num_heads`; None: `num_heads`.
      head_dim: size of a head; None: `features / num_heads`.
      hidden_features: width of the MLP, or of each expert.
      num_experts: E; 0 makes every MLP dense.
      experts_per_token: k.
      softmax_order, renormalize: as in `MoE`.
      rope_theta: base of the rotary frequencies.
      norm_epsilon: added to the mean square in RMSNorm.
      remat: keep only the input of each block and what `remat_saves` names for the backward pass.
      remat_saves: checkpoint names. "context" is the output of attention, with which its forward
        never runs twice; others are "query_proj", "key_proj", "value_proj", "out_proj",
        "moe_mlpwi", "moe_mlpwo".
      dtype: computation dtype.
      param_dtype: dtype of the parameters.
      implementation: as in `pallas_ops.flash_attention` and `pallas_ops.ragged_dot`.
    """

    vocab_size: int
    num_layers: int
    features: int
    num_heads: int
    hidden_features: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    num_experts: int = 0
    experts_per_token: int = 2
    softmax_order: Literal["before", "after"] = "before"
    renormalize: bool = False
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6
    remat: bool = False
    remat_saves: tuple[str, ...] = ("context",)
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    implementation: str | Sequence[str] | None = None


class DecoderOutput(NamedTuple):
    """Result of `DecoderLM`.

    Attributes:
      logits: float32 `[*batch, T, V]`.
      load_balance_loss: float32 scalar, mean over the layers; 0 when the MLPs are dense.
      tokens_per_expert: int32 `[L, E]`.
    """

    logits: Array
    load_balance_loss: Array
    tokens_per_expert: Array


class MLP(nnx.Module):
    """Dense SwiGLU MLP; kernels `gate_up [D, 2F]` with columns [gate | up], and `down [F, D]`."""

    def __init__(self, in_features: int, hidden_features: int, *, rngs: nnx.Rngs, **options: Any):
        self.gate_up = nnx.Linear(
            in_features, 2 * hidden_features, use_bias=False, rngs=rngs, **options
        )
        self.down = nnx.Linear(hidden_features, in_features, use_bias=False, rngs=rngs, **options)

    def __call__(self, x: Array) -> Array:
        """Applies the MLP to `x [*batch, D]`."""
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class Block(nnx.Module):
    """Pre-norm residual block: attention, then experts or a dense MLP."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dtypes = dict(dtype=config.dtype, param_dtype=config.param_dtype)

        def norm():
            return nnx.RMSNorm(config.features, epsilon=config.norm_epsilon, rngs=rngs, **dtypes)

        self.attention_norm = norm()
        self.attention = Attention(
            config.features,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            implementation=config.implementation,
            rngs=rngs,
            **dtypes,
        )
        self.mlp_norm = norm()
        if config.num_experts:
            self.mlp = MoE(
                config.features,
                config.hidden_features,
                config.num_experts,
                config.experts_per_token,
                softmax_order=config.softmax_order,
                renormalize=config.renormalize,
                implementation=config.implementation,
                rngs=rngs,
                **dtypes,
            )
        else:
            self.mlp = MLP(config.features, config.hidden_features, rngs=rngs, **dtypes)

    def __call__(
        self, x: Array, positions: Array | None, segment_ids: Array | None
    ) -> tuple[Array, MoEStats]:
        """Maps `x [*batch, T, D]` to the same shape; positions and segments as in `Attention`."""
        x = x + self.attention(self.attention_norm(x), positions, segment_ids)
        y = self.mlp_norm(x)
        if isinstance(self.mlp, MoE):
            y, stats = self.mlp(y, None if segment_ids is None else segment_ids != 0)
        else:
            y = self.mlp(y)
            stats = MoEStats(jnp.zeros((), jnp.float32), jnp.zeros((0,), jnp.int32))
        return x + y, stats


class DecoderLM(nnx.Module):
    """Decoder-only language model with tied embeddings.

    Example:
      >>> config = DecoderConfig(
      ...     vocab_size=256, num_layers=2, features=64, num_heads=4, hidden_features=96,
      ...     num_experts=4,
      ... )
      >>> model = DecoderLM(config, rngs=nnx.Rngs(0))
      >>> model(jnp.zeros((2, 16), jnp.int32)).logits.shape
      (2, 16, 256)
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        dtypes = dict(dtype=config.dtype, param_dtype=config.param_dtype)
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.features, rngs=rngs, **dtypes)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.features, epsilon=config.norm_epsilon, rngs=rngs, **dtypes)

    def __call__(
        self, tokens: Array, positions: Array | None = None, segment_ids: Array | None = None
    ) -> DecoderOutput:
        """Predicts the token after each token.

        Args:
          tokens: int `[*batch, T]`.
          positions: int `[*batch, T]`, rotary positions; None: 0 .. T-1. Attention is relative, so
            that they need not restart at 0 in each segment, though packers make them so.
          segment_ids: int `[*batch, T]`; tokens see only their own segment. Segment 0 is padding
            (as grain packs it): it goes to no expert, and its loss must be masked. None: one
            segment.

        Returns:
          A `DecoderOutput`.
        """

        def apply(block, x, positions, segment_ids):
            return block(x, positions, segment_ids)

        if self.config.remat:
            policy = jax.checkpoint_policies.save_only_these_names(*self.config.remat_saves)
            apply = nnx.remat(apply, policy=policy)
        x = self.embed(tokens)  # [*B, T, D]
        stats = []
        for block in self.blocks:
            x, block_stats = apply(block, x, positions, segment_ids)
            stats.append(block_stats)
        logits = self.embed.attend(self.norm(x)).astype(jnp.float32)
        stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *stats)
        return DecoderOutput(logits, stats.load_balance_loss.mean(), stats.tokens_per_expert)
