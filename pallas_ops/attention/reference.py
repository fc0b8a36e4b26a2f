"""Plain attention over the whole matrix of scores: exact, also in float64, O(T*S) memory.

The truth that other implementations are held to; itself held to float64 numpy by the tests.
"""

import jax
import jax.numpy as jnp

from pallas_ops.attention import tiles
from pallas_ops.attention.validate import Operands, Spec


def _whole(operands: Operands) -> tiles.Tile:
    zero = jnp.int32(0)
    return tiles.Tile(zero, operands.query.shape[1], zero, operands.key.shape[1])


def forward(operands: Operands, spec: Spec, config: None) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, Hv] and the natural log of the softmax's denominator, lse [B, T, N]."""
    del config
    heads = tiles.heads_first(operands)
    tile = _whole(operands)
    z, _, _ = tiles.logits(operands, spec, heads.query, heads.key, tile)
    _, kv_heads, group, *_ = z.shape
    top = jnp.max(z, axis=-1, initial=-jnp.inf)  # [B, K, G, T]
    sinks = None if operands.sinks is None else operands.sinks.reshape(-1, kv_heads, group, 1)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    safe = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(z - safe[..., None])
    total = jnp.sum(weights, axis=-1)
    if sinks is not None:
        total = total + jnp.exp(sinks - safe)
    dropped = tiles.dropped(operands, spec, weights, tile)
    out = tiles.guarded_product("bkgts,bksd->bkgtd", heads.value, spec)(dropped, heads.value)
    return tiles.normalized(operands, out, safe, total)


def backward(
    operands: Operands, out, lse, dout, dlse, spec: Spec, config: None, bias_gradient: bool
):
    """Gradients of query, key, value, bias and sinks (or None), the latter two unrounded."""
    del config
    heads = tiles.heads_first(operands)
    kv_heads = operands.key.shape[2]
    tile = _whole(operands)
    z, seen, slope = tiles.logits(operands, spec, heads.query, heads.key, tile)
    delta = tiles.row_sums(heads.query.dtype, out, dout, lse, dlse)
    dsinks = tiles.sink_gradient(operands, lse, delta)
    weights = tiles.softmax(z, tiles.split_rows(lse, kv_heads))
    dout = tiles.split_heads(dout.astype(heads.value.dtype), kv_heads)
    dropped = tiles.dropped(operands, spec, weights, tile)
    dv = tiles.guarded_product("bkgts,bkgtd->bksd", dout, spec)(dropped, dout)
    delta = tiles.split_rows(delta, kv_heads)[..., None]
    ds = tiles.score_gradient(
        operands, spec, weights, seen, slope, dout, tiles.finite(heads.value), delta, tile
    )
    dbias = None
    if bias_gradient and operands.bias is not None:
        dbias = tiles.reduce_to(ds, operands.bias.shape)
    dq = spec.scale * tiles.product("bkgts,bksh->bkgth", ds, tiles.finite(heads.key), spec)
    dk = spec.scale * tiles.product("bkgts,bkgth->bksh", ds, tiles.finite(heads.query), spec)
    return (
        tiles.join_heads(dq).astype(operands.query.dtype),
        dk.transpose(0, 2, 1, 3).astype(operands.key.dtype),
        dv.transpose(0, 2, 1, 3).astype(operands.value.dtype),
        dbias,
        dsinks,
    )
