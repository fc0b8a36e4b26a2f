"""Attention for Flax: a drop-in `attention_fn`, and a self-attention layer."""

import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jax.ad_checkpoint import checkpoint_name

import pallas_ops

Array = jax.Array


def attention_fn(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Array | None = None,
    *,
    rope: nnx.RoPE | None = None,
    scale: float | None = None,
    q_offset: int | Array | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    q_segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    deterministic_gradients: bool = False,
    checkpoint_name: str = "context",
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> Array:
    """Flash attention behind the interface of Flax's `dot_product_attention`.

    Pass it to `nnx.MultiHeadAttention(..., attention_fn=attention_fn)` or to
    `linen.MultiHeadDotProductAttention(..., attention_fn=attention_fn)`. What only flash attention
    knows is bound beforehand, for instance
    `functools.partial(attention_fn, local_window_size=(1023, 0))`.

    Args:
      query: `[*batch, T, N, H]`; any number of batch dimensions, none included.
      key: `[*batch, S, K, H]`, where K divides N (grouped-query attention).
      value: `[*batch, S, K, Hv]`.
      bias: float, broadcasts to `[*batch, N, T, S]`; added to the scaled logits.
      mask: bool or a number per position (what is not 0 is attended to, as the masks made by
        `nnx.make_attention_mask`), broadcasts to `[*batch, N, T, S]`. It costs the memory of its
        shape: prefer `is_causal`, `local_window_size`, lengths and segment ids.
      broadcast_dropout: one dropout mask `[T, S]` for all batches and heads. False: one for each.
      dropout_rng: the key of dropout, needed when `dropout_rate > 0` and not `deterministic`.
      dropout_rate: share of the attention weights that are dropped, in [0, 1).
      deterministic: True turns dropout off. (Bitwise repeatable gradients are
        `deterministic_gradients`.)
      dtype: computation dtype of query, key and value; None: their promoted dtype.
      precision: of the two products, as in `jax.lax.dot_general`.
      module: must be None. Flax passes a module for `sow_weights=True`, and flash attention never
        forms the weights.
      promote_dtype: called as `promote_dtype((query, key, value), dtype=dtype)`.
      is_causal: query t attends to keys s <= t + q_offset.
      force_fp32_for_softmax: has no further effect, since the softmax is always in float32.
      einsum_dot_general: must be None; the products are made inside the kernel.
      qk_attn_weights_einsum: must be None, likewise.
      attn_weights_value_einsum: must be None, likewise.
      input_positions: `[*batch, T]` or `[T]`, the positions by which `rope` rotates query and key;
        needs `rope`.
      rope: an `nnx.RoPE` applied to query and key, as `nnx.dot_product_attention_with_rope` does.
        Needs T == S: a cache does not know the positions of its keys.
      q_offset: position of query 0 on the key axis, an int or int32[*batch]. The default is 0, save
        for a single query before several keys (a step of decoding): it stands at the last key, so
        that `is_causal` hides nothing that `mask`, which carries the occupancy of the cache, shows.
      scale, query_seq_lengths, key_value_seq_lengths, local_window_size, q_segment_ids,
      kv_segment_ids, logits_soft_cap, sinks, checkpoint_name, implementation, config: as in
        `pallas_ops.flash_attention`.
      deterministic_gradients: `deterministic` of `pallas_ops.flash_attention`.

    Returns:
      `[*batch, T, N, Hv]` in the computation dtype. A row with nothing to attend to is 0 (Flax
      gives the mean of the values there).

    Raises:
      NotImplementedError: `module` or one of the einsum hooks was given.
      ValueError: arguments that contradict each other, or shapes that do not fit.
    """
    if module is not None:
        raise NotImplementedError(
            "module (sow_weights=True) asks for the attention weights, which flash attention never "
            "forms; use Flax's own attention_fn to look at weights"
        )
    hooks = dict(
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    for name, hook in hooks.items():
        if hook is not None:
            raise NotImplementedError(
                f"{name} replaces a product that flash attention makes inside its kernel; use "
                "Flax's own attention_fn with it"
            )
    if not isinstance(dropout_rate, numbers.Real):
        raise TypeError(f"dropout_rate must be a Python number, got {dropout_rate!r}")
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate}")
    if deterministic:
        dropout_rate, dropout_rng = 0.0, None
    elif dropout_rng is None and dropout_rate > 0.0:
        raise ValueError(
            f"dropout_rng must be a key when deterministic=False and {dropout_rate=}, got None"
        )

    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    query_length, key_length = query.shape[-3], key.shape[-3]
    if rope is not None:
        if query_length != key_length:
            raise ValueError(
                "rope needs as many queries as keys, whose positions are not known otherwise, got "
                f"query {query.shape} and key {key.shape}"
            )
        query = apply_rope(rope, query, input_positions)
        key = apply_rope(rope, key, input_positions)
    elif input_positions is not None:
        raise ValueError(
            "input_positions acts through rotary embedding only, and rope is None; bind one with "
            "functools.partial(attention_fn, rope=nnx.RoPE(...))"
        )
    if q_offset is None and query_length == 1 < key_length:
        if local_window_size is not None:
            raise ValueError(
                f"local_window_size={local_window_size!r} with a single query before {key_length} "
                "keys needs q_offset, the position of the query among the keys"
            )
        q_offset = key_length - 1 if is_causal else None
    if mask is not None and mask.dtype != jnp.bool_:
        mask = mask != 0

    return pallas_ops.flash_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        q_offset=q_offset,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng if dropout_rate else None,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=deterministic_gradients,
        checkpoint_name=checkpoint_name,
        implementation=implementation,
        config=config,
    )


def apply_rope(rope: nnx.RoPE, x: Array, positions: Array | None = None) -> Array:
    """Rotates `x` by its positions.

    Args:
      rope: the rotation.
      x: `[*batch, T, N, H]`.
      positions: `[*batch, T]` or `[T]`; None: 0 .. T-1.

    Returns:
      An array like `x`. The rotation itself is computed in float32.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if positions is None:
        return rope(wide.swapaxes(-3, -2)).swapaxes(-3, -2).astype(x.dtype)
    if positions.shape not in (x.shape[:-2], x.shape[-3:-2]):
        raise ValueError(
            f"positions must have shape {x.shape[:-2]} or {x.shape[-3:-2]}, got {positions.shape}"
        )

    def rotate(x, positions):  # [T, N, H], [T]
        return rope(x.swapaxes(0, 1), positions).swapaxes(0, 1)

    # nnx.RoPE knows one row of positions at a time.
    for _ in x.shape[:-3]:
        rotate = jax.vmap(rotate)
    positions = jnp.broadcast_to(positions, x.shape[:-2]).astype(wide.dtype)
    return rotate(wide, positions).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with rotary positions and grouped key/value heads.

    Args:
      in_features: D, size of the input and the output.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads, a divisor of N; None: N.
      head_dim: H, an even number; None: D / N.
      rope_theta: base of the rotary frequencies.
      dtype: computation dtype; None: promoted from input and parameters.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of the four projections.
      kernel_metadata: metadata of the projections' kernels (sharding, for instance).
      precision: of all products.
      implementation: as in `pallas_ops.flash_attention`.
      rngs: source of the parameters' keys.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope_theta: float = 10000.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = nnx.initializers.lecun_normal(),
        kernel_metadata: Mapping[str, Any] | None = None,
        precision: Any = None,
        implementation: str | Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        head_dim = in_features // num_heads if head_dim is None else head_dim
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_kv_heads=} must divide {num_heads=}")
        if head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {head_dim}")

        def linear(inputs, outputs, axis: int | tuple[int, ...] = -1):
            return nnx.LinearGeneral(
                inputs,
                outputs,
                axis=axis,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                kernel_metadata=dict(kernel_metadata or {}),
                precision=precision,
                rngs=rngs,
            )

        self.query = linear(in_features, (num_heads, head_dim))
        self.key = linear(in_features, (num_kv_heads, head_dim))
        self.value = linear(in_features, (num_kv_heads, head_dim))
        self.out = linear((num_heads, head_dim), in_features, axis=(-2, -1))
        self.rope = nnx.RoPE(rope_theta)
        self.precision = precision
        self.implementation = implementation

    def __call__(
        self, x: Array, positions: Array | None = None, segment_ids: Array | None = None
    ) -> Array:
        """Attends within `x`.

        Args:
          x: `[*batch, T, D]`.
          positions: int, `[*batch, T]` or `[T]`, rotary position of each token; None: 0 .. T-1.
          segment_ids: int, `[*batch, T]`; a token sees only its own segment. None: one segment.

        Returns:
          `[*batch, T, D]` in the computation dtype.
        """
        query = checkpoint_name(self.query(x), "query_proj")  # [*B, T, N, H]
        key = checkpoint_name(self.key(x), "key_proj")  # [*B, T, K, H]
        value = checkpoint_name(self.value(x), "value_proj")  # [*B, T, K, H]
        context = pallas_ops.flash_attention(
            apply_rope(self.rope, query, positions),
            apply_rope(self.rope, key, positions),
            value,
            is_causal=True,
            q_segment_ids=segment_ids,
            kv_segment_ids=segment_ids,
            precision=self.precision,
            implementation=self.implementation,
        )
        return checkpoint_name(self.out(context), "out_proj")
