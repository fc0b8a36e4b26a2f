"""The arithmetic of one tile of scores, forward and backward, shared by the XLA implementations.

Heads-first layouts: queries [B, K, G, T, H] with G = N / K query heads for each kv head, keys [B,
K, S, H].
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops import arguments
from pallas_ops.attention import dropout, masks
from pallas_ops.attention.validate import Operands, Spec


class Heads(NamedTuple):
    """q, k, v in one dtype and heads-first layout."""

    query: jax.Array  # [B, K, G, T, H]
    key: jax.Array  # [B, K, S, H]
    value: jax.Array  # [B, K, S, Hv]


def heads_first(operands: Operands) -> Heads:
    dtype = arguments.common_dtype(operands.query, operands.key, operands.value)
    kv_heads = operands.key.shape[2]
    query, key, value = (x.astype(dtype) for x in (operands.query, operands.key, operands.value))
    return Heads(
        split_heads(query, kv_heads), key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    )


def split_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N, H] -> [B, K, G, T, H]."""
    b, t, n, h = x.shape
    return x.reshape(b, t, kv_heads, n // kv_heads if kv_heads else 1, h).transpose(0, 2, 3, 1, 4)


def join_heads(x: jax.Array) -> jax.Array:
    """[B, K, G, T, H] -> [B, T, N, H]."""
    b, k, g, t, h = x.shape
    return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, h)


def split_rows(x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, N] -> [B, K, G, T]."""
    return split_heads(x[..., None], kv_heads)[..., 0]


class Tile(NamedTuple):
    """A tile's place: its first row and column, traced, and its static extent."""

    row: jax.Array
    rows: int
    column: jax.Array
    columns: int


def logits(
    operands: Operands, spec: Spec, query, key, tile: Tile, fresh=None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Masked logits [B, K, G, rows, columns], which are visible, and the soft cap's derivative.

    `fresh`, if given, is ANDed to the masks. Masked logits are -inf; visible is None where all are.
    """
    accumulator = arguments.accumulator_dtype(query.dtype)
    z = product("bkgth,bksh->bkgts", query, key, spec)
    z = jnp.multiply(z, np.asarray(spec.scale, accumulator))
    if operands.bias is not None:
        bias = masks.slice_tile(operands.bias, 2, tile.row, tile.rows)
        bias = masks.slice_tile(bias, 3, tile.column, tile.columns)
        z = z + masks.grouped_heads(bias, key.shape[1]).astype(accumulator)
    slope = None
    if spec.soft_cap is not None:
        cap = np.asarray(spec.soft_cap, accumulator)
        tanh = jnp.tanh(z / cap)
        z, slope = jnp.multiply(tanh, cap), 1 - tanh * tanh
    seen = masks.visible(operands, spec, tile.row, tile.rows, tile.column, tile.columns)
    if fresh is not None:
        seen = fresh if seen is None else seen & fresh
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    return z, seen, slope


def dropped(operands: Operands, spec: Spec, weights: jax.Array, tile: Tile) -> jax.Array:
    """Weights (or their gradients) [B, K, G, rows, columns] after dropout, scaled up where kept."""
    if operands.seeds is None:
        return weights
    b, k, g, rows, columns = weights.shape
    t = tile.row + jnp.arange(rows, dtype=jnp.int32)
    s = tile.column + jnp.arange(columns, dtype=jnp.int32)
    seeds = operands.seeds.reshape(b, k, g, 1, 1)
    row_hashes = dropout.row_hash(seeds, t.reshape(1, 1, 1, rows, 1))  # [B, K, G, rows, 1]
    kept = dropout.keep(
        row_hashes, dropout.column_hash(s).reshape(1, 1, 1, 1, columns), spec.dropout_rate
    )
    return jnp.where(kept, weights * np.asarray(1 / (1 - spec.dropout_rate), weights.dtype), 0)


def product(equation: str, a: jax.Array, b: jax.Array, spec: Spec) -> jax.Array:
    """einsum accumulated in float32, or in float64 if the operands are."""
    accumulator = arguments.accumulator_dtype(b.dtype)
    return jnp.einsum(
        equation, a.astype(b.dtype), b, precision=spec.precision, preferred_element_type=accumulator
    )


def finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def guarded_product(
    equation: str, x: jax.Array, spec: Spec
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of weights, 0 where masked, with rows of x, whose NaN reach what weighs them.

    A zero weight times NaN would be NaN, so what is not finite is taken out of the product, and a
    result that gives it weight is set to NaN afterwards; that costs a second product only if there
    is any.
    """
    tainted = jnp.logical_not(jnp.all(jnp.isfinite(x)))

    def multiply(weights: jax.Array, rows: jax.Array) -> jax.Array:
        result = product(equation, weights, finite(rows), spec)

        def taint(result):
            weighed = (weights != 0).astype(rows.dtype)
            reached = product(
                equation, weighed, jnp.logical_not(jnp.isfinite(rows)).astype(rows.dtype), spec
            )
            return jnp.where(reached > 0, jnp.nan, result)

        return jax.lax.cond(tainted, taint, lambda result: result, result)

    return multiply


def row_sums(
    operands_dtype, out: jax.Array, dout: jax.Array, lse: jax.Array, dlse: jax.Array
) -> jax.Array:
    """delta - dlse of every row: rowsum(dO * O) less the gradient of lse; [B, T, N].

    The output of a row that attends to nothing is 0 and takes no part, whatever its cotangents
    hold.
    """
    accumulator = arguments.accumulator_dtype(operands_dtype)
    terms = jnp.where(out != 0, dout.astype(accumulator) * out.astype(accumulator), 0)
    return jnp.sum(terms, axis=-1) - jnp.where(lse == -jnp.inf, 0, dlse.astype(accumulator))


def softmax(z: jax.Array, lse: jax.Array) -> jax.Array:
    """Weights of masked logits z [B, K, G, rows, columns] with lse [B, K, G, rows].

    A masked pair weighs 0 in a row whose lse is NaN, too.
    """
    safe = jnp.where(lse == -jnp.inf, 0, lse)
    return jnp.where(z == -jnp.inf, 0, jnp.exp(z - safe[..., None]))


def normalized(operands: Operands, total_value, top, total) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, Hv] and lse [B, T, N] from the running sums of a row, heads first."""
    empty = total == 0
    out = jnp.where(empty[..., None], 0, total_value / jnp.where(empty, 1, total)[..., None])
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1, total)))
    return join_heads(out).astype(operands.query.dtype), join_heads(lse[..., None])[..., 0]


def reduce_to(ds: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums [B, K, G, rows, columns] over what bias, of shape [1|B, 1|N, 1|T, 1|S], broadcasts."""
    b, k, g, rows, columns = ds.shape
    ds = ds.reshape(b, k * g, rows, columns)
    axes = tuple(
        i for i, (own, whole) in enumerate(zip(shape, ds.shape, strict=True)) if own == 1 != whole
    )
    return jnp.sum(ds, axis=axes, keepdims=True)


def score_gradient(
    operands: Operands, spec: Spec, weights, seen, slope, dout, value, delta, tile: Tile
):
    """Gradient of the logits before the soft cap, which is bias's: [B, K, G, rows, columns]."""
    dweights = product("bkgtd,bksd->bkgts", dout, value, spec)
    ds = weights * (dropped(operands, spec, dweights, tile) - delta)
    if slope is not None:
        ds = ds * slope
    return ds if seen is None else jnp.where(seen, ds, 0)


def sink_gradient(operands: Operands, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """Gradient of the sinks, with the shape of the canonical operand [1|B, N]."""
    if operands.sinks is None:
        return None
    sinks = operands.sinks[:, None, :]  # [1|B, 1, N]
    weights = jnp.where(sinks == -jnp.inf, 0, jnp.exp(sinks - lse))
    terms = jnp.where(weights == 0, 0, -weights * delta)  # [B, T, N]
    over_batch = operands.sinks.shape[0] == 1
    return jnp.sum(terms, axis=(0, 1) if over_batch else 1, keepdims=over_batch).reshape(
        operands.sinks.shape
    )
