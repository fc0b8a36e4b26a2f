"""Attention by tiles in plain XLA: O(T+S) temporary memory, runs wherever no kernel does.

The forward keeps a running maximum and sum over key blocks (Milakov and Gimelshein,
arXiv:1805.02867; Rabe and Staats, arXiv:2112.05682); the backward recomputes the weights of a tile
from lse (Dao et al., arXiv:2205.14135). Blocks in which no query sees a key are not visited.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops import arguments
from pallas_ops.attention import masks, tiles
from pallas_ops.attention.validate import Operands, Spec
from pallas_ops.tuning import check_fields

# Scores held at once: 16 MiB in float32 are enough for a CPU's matrix products; a GPU, where each
# tile costs a dozen launches, gets 256 MiB (an H200, T=4096, 64 heads of 128, causal: 5.6 ms with
# them, 15 ms with 16 MiB).
_TILE_ELEMENTS, _GPU_TILE_ELEMENTS = 2**22, 2**26
_SMALLEST_BLOCK, _LARGEST_BLOCK, _GPU_LARGEST_BLOCK = 64, 512, 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows and columns of a tile of scores."""

    block_q: int
    block_kv: int

    def __post_init__(self):
        check_fields(self)
        if self.block_q < 1 or self.block_kv < 1:
            raise ValueError(f"block_q and block_kv must be positive, got {self}")


def heuristic(device_kind: str | None, query, *operands, **params) -> Config:
    """The largest square tile of which all heads' scores stay small."""
    del operands, params
    heads = query.shape[0] * query.shape[2]
    side = _SMALLEST_BLOCK
    if not isinstance(heads, int):  # a symbolic batch, of jax.export
        return Config(side, side)
    largest, elements = _LARGEST_BLOCK, _TILE_ELEMENTS
    if device_kind not in (None, "cpu"):
        largest, elements = _GPU_LARGEST_BLOCK, _GPU_TILE_ELEMENTS
    while side < largest and heads * (2 * side) ** 2 <= elements:
        side *= 2
    return Config(side, side)


def candidates(query, key, *operands, **params) -> list[Config]:
    """Tiles within the lengths and the scores that the heuristic allows on a GPU."""
    del operands, params
    heads, (t, s) = query.shape[0] * query.shape[2], (query.shape[1], key.shape[1])
    sides = [2**i for i in range(6, 12)]
    return [
        Config(q, kv)
        for q in sides
        for kv in (q // 2, q, 2 * q)
        if q < 2 * t and kv < 2 * s and heads * q * kv <= _GPU_TILE_ELEMENTS
    ]


def refuse(query, key, *operands, **params) -> str | None:
    """Why a call can't be cut into blocks."""
    del operands, params
    if isinstance(query.shape[1], int) and isinstance(key.shape[1], int):
        return None
    return (
        f"it cuts T={query.shape[1]} and S={key.shape[1]} into blocks, which needs their sizes;"
        " implementation 'reference' does not"
    )


class _Blocks:
    """How a length is cut: the last block starts early enough to end at the length."""

    def __init__(self, length: int, size: int):
        self.length, self.size = length, min(size, length)
        self.count = -(-length // self.size)
        self.overlap = length % self.size != 0

    def start(self, i: jax.Array) -> jax.Array:
        return jnp.minimum(i * jnp.int32(self.size), jnp.int32(self.length - self.size))

    def fresh(self, i: jax.Array) -> jax.Array | None:
        """bool [size]: the positions that the block before does not hold."""
        if not self.overlap:
            return None
        positions = self.start(i) + jnp.arange(self.size, dtype=jnp.int32)
        return positions >= i * jnp.int32(self.size)


def _visit(operands, spec, start, mine: _Blocks, others: _Blocks, *, of_rows: bool):
    """The other side's blocks that a block meets: their number, and the place of the n-th."""
    seen = masks.visible_blocks(operands, spec, start, mine.size, others.size, of_rows=of_rows)
    if seen is None:
        return jnp.int32(others.count), lambda n: n
    order = jnp.argsort(jnp.logical_not(seen), stable=True).astype(jnp.int32)
    return jnp.sum(seen, dtype=jnp.int32), lambda n: order[n]


def _fresh(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    if rows is None and columns is None:
        return None
    parts = [x for x in (None if rows is None else rows[:, None], columns) if x is not None]
    both = parts[0] if len(parts) == 1 else parts[0] & parts[1][None]
    return both.reshape((1,) * (5 - both.ndim) + both.shape)


def forward(operands: Operands, spec: Spec, config: Config) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, Hv] and lse [B, T, N]."""
    b, t, n, _ = operands.query.shape
    s, kv_heads, hv = operands.value.shape[1:]
    accumulator = arguments.accumulator_dtype(
        arguments.common_dtype(operands.query, operands.key, operands.value)
    )
    sinks = operands.sinks
    if 0 in (b, t, n, s):
        lse = jnp.full((b, t, n), -jnp.inf, accumulator)
        if sinks is not None:
            lse = jnp.broadcast_to(sinks[:, None].astype(accumulator), lse.shape)
        return jnp.zeros((b, t, n, hv), operands.query.dtype), lse

    q_blocks, kv_blocks = _Blocks(t, config.block_q), _Blocks(s, config.block_kv)
    heads = tiles.heads_first(operands)
    multiply = tiles.guarded_product("bkgts,bksd->bkgtd", heads.value, spec)
    rows, columns, group = q_blocks.size, kv_blocks.size, n // kv_heads
    stats = (b, kv_heads, group, rows)

    def q_block(i, results):
        row = q_blocks.start(i)
        query = jax.lax.dynamic_slice_in_dim(heads.query, row, rows, 3)

        def kv_block(step, state):
            acc, top, total = state  # [B, K, G, rows, Hv], [B, K, G, rows] twice
            j = index(step)
            column = kv_blocks.start(j)
            key = jax.lax.dynamic_slice_in_dim(heads.key, column, columns, 2)
            value = jax.lax.dynamic_slice_in_dim(heads.value, column, columns, 2)
            tile = tiles.Tile(row, rows, column, columns)
            fresh = _fresh(None, kv_blocks.fresh(j))
            z, _, _ = tiles.logits(operands, spec, query, key, tile, fresh)
            new_top = jnp.maximum(top, jnp.max(z, axis=-1))
            safe = jnp.where(new_top == -jnp.inf, 0, new_top)
            weights = jnp.exp(z - safe[..., None])
            rescale = jnp.exp(top - safe)
            total = total * rescale + jnp.sum(weights, axis=-1)
            weights = tiles.dropped(operands, spec, weights, tile)
            acc = acc * rescale[..., None] + multiply(weights, value)
            return acc, new_top, total

        if sinks is None:
            top, total = jnp.full(stats, -jnp.inf, accumulator), jnp.zeros(stats, accumulator)
        else:  # a sink is a key seen before all others, with a value of 0
            top = jnp.broadcast_to(sinks.astype(accumulator).reshape(-1, kv_heads, group, 1), stats)
            total = jnp.where(top == -jnp.inf, 0, jnp.ones(stats, accumulator))
        acc = jnp.zeros((*stats, hv), accumulator)
        count, index = _visit(operands, spec, row, q_blocks, kv_blocks, of_rows=True)
        acc, top, total = jax.lax.fori_loop(jnp.int32(0), count, kv_block, (acc, top, total))
        block = tiles.normalized(operands, acc, jnp.where(top == -jnp.inf, 0, top), total)
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(result, x, row, 1)
            for result, x in zip(results, block, strict=True)
        )

    out = jnp.zeros((b, t, n, hv), operands.query.dtype)
    lse = jnp.zeros((b, t, n), accumulator)
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(q_blocks.count), q_block, (out, lse))


def backward(
    operands: Operands, out, lse, dout, dlse, spec: Spec, config: Config, bias_gradient: bool
):
    """Gradients of query, key, value, bias and sinks (or None), the latter two unrounded."""
    b, t, n, h = operands.query.shape
    s, kv_heads, hv = operands.value.shape[1:]
    heads = tiles.heads_first(operands)
    accumulator = arguments.accumulator_dtype(heads.query.dtype)
    delta = tiles.row_sums(heads.query.dtype, out, dout, lse, dlse)
    dsinks = tiles.sink_gradient(operands, lse, delta)
    dbias = None
    if bias_gradient and operands.bias is not None:
        dbias = jnp.zeros(operands.bias.shape, accumulator)
    if 0 in (b, t, n, s):
        dq, dk, dv = (jnp.zeros_like(x) for x in (operands.query, operands.key, operands.value))
        return dq, dk, dv, dbias, dsinks

    q_blocks, kv_blocks = _Blocks(t, config.block_q), _Blocks(s, config.block_kv)
    rows, columns = q_blocks.size, kv_blocks.size
    lse, delta = tiles.split_rows(lse, kv_heads), tiles.split_rows(delta, kv_heads)  # [B, K, G, T]
    dout = tiles.split_heads(dout.astype(heads.value.dtype), kv_heads)  # [B, K, G, T, Hv]
    multiply = tiles.guarded_product("bkgts,bkgtd->bksd", dout, spec)
    scale = np.asarray(spec.scale, accumulator)

    def kv_block(j, results):
        column = kv_blocks.start(j)
        key = jax.lax.dynamic_slice_in_dim(heads.key, column, columns, 2)
        value = tiles.finite(jax.lax.dynamic_slice_in_dim(heads.value, column, columns, 2))

        def q_block(step, state):
            dq, dbias, dk, dv = state
            i = index(step)
            row = q_blocks.start(i)
            query, dout_rows, lse_rows, delta_rows = (
                jax.lax.dynamic_slice_in_dim(x, row, rows, 3)
                for x in (heads.query, dout, lse, delta)
            )
            tile = tiles.Tile(row, rows, column, columns)
            fresh = _fresh(q_blocks.fresh(i), kv_blocks.fresh(j))
            z, seen, slope = tiles.logits(operands, spec, query, key, tile, fresh)
            weights = tiles.softmax(z, lse_rows)
            dv = dv + multiply(tiles.dropped(operands, spec, weights, tile), dout_rows)
            ds = tiles.score_gradient(
                operands, spec, weights, seen, slope, dout_rows, value, delta_rows[..., None], tile
            )
            if dbias is not None:
                dbias = _add_tile(dbias, ds, tile)
            dk = dk + tiles.product("bkgts,bkgth->bksh", ds, tiles.finite(query), spec)
            dq_rows = tiles.product("bkgts,bksh->bkgth", ds, tiles.finite(key), spec)
            old = jax.lax.dynamic_slice_in_dim(dq, row, rows, 3)
            dq = jax.lax.dynamic_update_slice_in_dim(dq, old + dq_rows, row, 3)
            return dq, dbias, dk, dv

        dq, dbias, dk, dv = results
        dk_rows = jnp.zeros((b, kv_heads, columns, h), accumulator)
        dv_rows = jnp.zeros((b, kv_heads, columns, hv), accumulator)
        count, index = _visit(operands, spec, column, kv_blocks, q_blocks, of_rows=False)
        dq, dbias, dk_rows, dv_rows = jax.lax.fori_loop(
            jnp.int32(0), count, q_block, (dq, dbias, dk_rows, dv_rows)
        )
        dk = _store_fresh(dk, dk_rows * scale, column, kv_blocks.fresh(j))
        dv = _store_fresh(dv, dv_rows, column, kv_blocks.fresh(j))
        return dq, dbias, dk, dv

    dq = jnp.zeros(heads.query.shape, accumulator)
    dk = jnp.zeros(heads.key.shape, operands.key.dtype)
    dv = jnp.zeros(heads.value.shape, operands.value.dtype)
    dq, dbias, dk, dv = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(kv_blocks.count), kv_block, (dq, dbias, dk, dv)
    )
    dq = tiles.join_heads(dq * scale).astype(operands.query.dtype)
    return dq, dk.transpose(0, 2, 1, 3), dv.transpose(0, 2, 1, 3), dbias, dsinks


def _store_fresh(results: jax.Array, block: jax.Array, start, fresh: jax.Array | None) -> jax.Array:
    """Writes a block [B, K, columns, H] but for the columns that the block before holds."""
    block = block.astype(results.dtype)
    if fresh is not None:
        old = jax.lax.dynamic_slice_in_dim(results, start, block.shape[2], 2)
        block = jnp.where(fresh[None, None, :, None], block, old)
    return jax.lax.dynamic_update_slice_in_dim(results, block, start, 2)


def _add_tile(dbias: jax.Array, ds: jax.Array, tile: tiles.Tile) -> jax.Array:
    """Adds a tile's part of the gradient of bias, summed over what bias broadcasts."""
    starts = (
        0,
        0,
        0 if dbias.shape[2] == 1 else tile.row,
        0 if dbias.shape[3] == 1 else tile.column,
    )
    starts = tuple(jnp.int32(i) for i in starts)
    # A dimension of 1 in bias is summed; one of 1 in both needs no sum.
    target = tuple(
        1 if own == 1 else size for own, size in zip(dbias.shape, _flat(ds), strict=True)
    )
    part = tiles.reduce_to(ds, target)
    old = jax.lax.dynamic_slice(dbias, starts, part.shape)
    return jax.lax.dynamic_update_slice(dbias, old + part, starts)


def _flat(ds: jax.Array) -> tuple[int, ...]:
    b, k, g, rows, columns = ds.shape
    return b, k * g, rows, columns
