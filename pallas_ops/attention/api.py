"""`flash_attention`: the public function and its gradient."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name as name_for_remat
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from pallas_ops import arguments, dispatch, tuning
from pallas_ops.attention import validate
from pallas_ops.attention.primitive import (
    Layout,
    flash_attention_bwd,
    flash_attention_fwd,
    gradients_of,
)
from pallas_ops.attention.validate import Operands, Spec


def _attention(
    spec: Spec, implementation, config, operands: Operands
) -> tuple[jax.Array, jax.Array]:
    arrays = [getattr(operands, f) for f in operands.present]
    out, lse = flash_attention_fwd.bind(
        *arrays, implementation=implementation, config=config, fields=operands.present, spec=spec
    )
    return out, lse


def _attention_fwd(spec, implementation, config, operands):
    bias_gradient = operands.bias is not None
    if isinstance(operands.query, CustomVJPPrimal):
        bias_gradient = bias_gradient and operands.bias.perturbed
        operands = Operands(**{f: getattr(operands, f).value for f in operands.present})
    out, lse = _attention(spec, implementation, config, operands)
    # Named here, so that a remat policy that saves both never runs the forward again.
    out = name_for_remat(out, spec.checkpoint_name)
    lse = name_for_remat(lse, spec.checkpoint_name)
    # Whether bias wants a gradient is static: the residuals' structure, () or None, carries it.
    return (out, lse), (operands, out, lse, () if bias_gradient else None)


def _attention_bwd(spec, implementation, config, residuals, cotangents):
    operands, out, lse, bias_gradient = residuals
    bias_gradient = bias_gradient is not None
    dout, dlse = (
        jnp.zeros(x.shape, x.dtype) if isinstance(d, SymbolicZero) else d
        for d, x in zip(cotangents, (out, lse), strict=True)
    )
    fields = operands.present
    arrays = dispatch.varying(*(getattr(operands, f) for f in fields), out, lse, dout, dlse)
    results = flash_attention_bwd.bind(
        *arrays,
        implementation=implementation,
        config=config,
        fields=fields,
        spec=spec,
        bias_gradient=bias_gradient,
    )
    gradients = dict(zip(gradients_of(fields, bias_gradient), results, strict=True))
    return (Operands(**{f: g.astype(getattr(operands, f).dtype) for f, g in gradients.items()}),)


def _with_gradient(*, symbolic_zeros: bool):
    op = jax.custom_vjp(_attention, nondiff_argnums=(0, 1, 2))
    op.defvjp(_attention_fwd, _attention_bwd, symbolic_zeros=symbolic_zeros)
    return op


# By symbolic zeros JAX says which operands are differentiated; an eager shard_map refuses them.
_differentiable = _with_gradient(symbolic_zeros=False)
_differentiable_by_need = _with_gradient(symbolic_zeros=True)


def _run(spec: Spec, implementation, config, arrays: dict[str, jax.Array]):
    """The operation on arrays that know of no explicit sharding."""
    arrays = dict(zip(arrays, dispatch.varying(*arrays.values()), strict=True))
    by_need = "bias" in arrays and not jax.sharding.get_abstract_mesh().manual_axes
    op = _differentiable_by_need if by_need else _differentiable
    return op(spec, implementation, config, Operands(**arrays))


def _sharded(spec: Spec, implementation, config, operands: Operands):
    """The operation; under an explicit sharding a shard_map of it over batch and heads."""
    arrays = {f: getattr(operands, f) for f in operands.present}
    explicit = dispatch.explicit_axes(operands.query)
    if not explicit:
        return _run(spec, implementation, config, arrays)
    b, _, n, _ = operands.query.shape
    sharding = jax.typeof(operands.query).sharding
    layout = Layout.of(
        sharding.mesh, sharding.spec[0], sharding.spec[2], b, n, operands.key.shape[2]
    )
    specs = {f: layout.spec(f, x.shape) for f, x in arrays.items()}
    arrays = {f: jax.sharding.reshard(x, specs[f]) for f, x in arrays.items()}

    def local(arrays):
        arrays = dict(zip(arrays, dispatch.varying(*arrays.values()), strict=True))
        return _run(spec, implementation, config, layout.own_kv_heads(arrays))

    out_specs = (P(*specs["query"][:3], None), P(*specs["query"][:3]))
    return jax.shard_map(
        local, mesh=sharding.mesh, in_specs=(specs,), out_specs=out_specs, axis_names=explicit
    )(arrays)


@overload
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int | Int[Array, ""] | Int[Array, "*B"] | None = None,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    return_residual: Literal[False] = False,
    deterministic: bool = False,
    checkpoint_name: str = "context",
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> Float[Array, "*B T N Hv"]: ...
@overload
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int | Int[Array, ""] | Int[Array, "*B"] | None = None,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    return_residual: Literal[True],
    deterministic: bool = False,
    checkpoint_name: str = "context",
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...
def flash_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    q_offset: int | Int[Array, ""] | Int[Array, "*B"] | None = None,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    broadcast_dropout: bool = False,
    precision: Any = None,
    return_residual: bool = False,
    deterministic: bool = False,
    checkpoint_name: str = "context",
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    """Attention, `softmax(scale * q k^T + bias) v`, in memory linear in the sequence lengths.

    A call of `jax.nn.dot_product_attention` works here as it stands, but for a `scale` that is an
    array and `implementation="cudnn"`. Differentiable in reverse mode, once, in `query`, `key`,
    `value`, `bias`, `sinks` and through the returned lse.

    Args:
      query: [*B, T, N, H], bfloat16, float16, float32 or float64.
      key: [*B, S, K, H]. K divides N; query head n uses kv head n // (N // K) (GQA, MQA).
      value: [*B, S, K, Hv].
      bias: added to the scaled logits; any float dtype, broadcasts to [*B, N, T, S]. -inf masks.
      mask: True = attend; broadcasts to [*B, N, T, S]. An array of T*S elements is read as such:
        prefer `is_causal`, lengths, segments and windows, which also skip blocks.
      scale: a Python number, default 1/sqrt(H).
      is_causal: query t sees key s when `s <= t + q_offset`.
      q_offset: position of query 0 on the key axis, an int or int[*B]; may be negative and traced.
        The default 0 aligns the first query with the first key, as jax.nn does; `S - T` aligns the
        last ones.
      query_seq_lengths: int[*B], clamped to [0, T]; queries at and past it see nothing.
      key_value_seq_lengths: int[*B], clamped to [0, S]; keys at and past it are not seen.
      local_window_size: tokens seen on each side beside the query's own position `t + q_offset`: an
        int, or (left, right) with None for an open side. A window of W tokens that counts the query
        itself, as elsewhere, is `(W - 1, 0)`.
      q_segment_ids, kv_segment_ids: int[*B, T] and int[*B, S], both or neither: only equal ids
        attend to each other. No id is special; give padding an id of its own (say 0) and mask the
        loss.
      logits_soft_cap: c in `c * tanh(logits / c)`, after bias, before masks.
      sinks: float[N], one more logit per head that takes weight and gives no value; as it is: not
        scaled, capped, masked or dropped.
      dropout_rate: in [0, 1), of attention weights.
      dropout_key: a `jax.random` key, needed when dropout_rate > 0.
      broadcast_dropout: all batches and heads share one mask.
      precision: of the products, as in `jax.lax.dot_general`. Default: JAX's
        `jax_default_matmul_precision`, else HIGHEST for float32.
      return_residual: also return lse.
      deterministic: gradients have the same bits on each run, at a small cost. The forward always
        does.
      checkpoint_name: the name of output and lse for `jax.checkpoint` policies.
      implementation: None picks the fastest that can serve the call; "mosaic_gpu", "triton" and
        "xla" name one, "reference" the plain O(T*S) one; a sequence is tried in order.
      config: a tuning config of the implementation, or a sequence of them (a kernel and its
        gradient may have configs of their own). None looks it up: `pallas_ops.tuning`.

    Returns:
      [*B, T, N, Hv] of query's dtype; with return_residual also lse, float32 [*B, T, N], the
      natural log of the softmax's denominator. A query that sees nothing gives output 0 and lse
      -inf (with a sink: the sink) and no gradient; jax.nn gives the mean of all values there. What
      is masked reaches nothing, NaN included.

    Raises:
      ValueError, TypeError: an argument is wrong; the message names it.
      NotImplementedError: no requested implementation can serve the call; the message says why.

    Sources: Dao et al., "FlashAttention", arXiv:2205.14135, and "FlashAttention-2",
    arXiv:2307.08691; sinks: Xiao et al., arXiv:2309.17453, as in gpt-oss; soft cap: Gemma 2,
    arXiv:2408.00118.
    """
    return_residual = arguments.flag("return_residual", return_residual)
    implementation = dispatch.normalize(implementation)
    config = tuning.requested(config)
    operands, spec = validate.canonicalize(
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
        dropout_key=dropout_key,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        deterministic=deterministic,
        checkpoint_name=checkpoint_name,
    )
    out, lse = _sharded(spec, implementation, config, operands)
    batch = jnp.shape(query)[:-3]
    out = validate.unflatten(out, batch)
    return (out, validate.unflatten(lse, batch)) if return_residual else out
