"""Which query sees which key: the one place for the algebra of masks.

Positions are int32. A tile is a run of `rows` (queries) times a run of `columns` (keys).
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops.attention.validate import Operands, Spec


def grouped_heads(x: jax.Array, kv_heads: int) -> jax.Array:
    """[b, 1|N, t, s] -> [b, 1|K, 1|N/K, t, s]: query head n belongs to kv head n // (N/K)."""
    b, n, t, s = x.shape
    return x.reshape(b, 1, 1, t, s) if n == 1 else x.reshape(b, kv_heads, n // kv_heads, t, s)


def slice_tile(x: jax.Array, axis: int, start, size: int) -> jax.Array:
    """A tile's part of a dimension; a broadcast dimension stays whole."""
    return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def visible(
    operands: Operands, spec: Spec, row, rows: int, column, columns: int
) -> jax.Array | None:
    """bool [1|B, 1|K, 1|N/K, rows, columns] of the tile at (row, column); None: all is visible."""
    kv_heads = operands.key.shape[2]
    t = jnp.int32(row) + jnp.arange(rows, dtype=jnp.int32)[:, None]  # [rows, 1]
    s = jnp.int32(column) + jnp.arange(columns, dtype=jnp.int32)[None, :]  # [1, columns]
    parts = []
    if spec.left is not None or spec.right is not None:
        position = t[None] + _offsets(operands)[:, None, None]  # [1|B, rows, 1]
        if spec.left is not None:
            parts.append(position - np.int32(spec.left) <= s[None])
        if spec.right is not None:
            parts.append(s[None] <= position + np.int32(spec.right))
    if operands.query_lengths is not None:
        parts.append(t[None] < operands.query_lengths[:, None, None])
    if operands.kv_lengths is not None:
        parts.append(s[None] < operands.kv_lengths[:, None, None])
    if operands.q_segments is not None and operands.kv_segments is not None:
        q_segments = slice_tile(operands.q_segments, 1, row, rows)
        kv_segments = slice_tile(operands.kv_segments, 1, column, columns)
        parts.append(q_segments[:, :, None] == kv_segments[:, None, :])
    parts = [p[:, None, None] for p in parts]  # [1|B, 1, 1, rows|1, columns|1]
    for array in (operands.mask, operands.bias):
        if array is not None:
            tile = slice_tile(slice_tile(array, 2, row, rows), 3, column, columns)
            tile = grouped_heads(tile, kv_heads)
            parts.append(tile if tile.dtype == jnp.bool_ else tile != -jnp.inf)
    if not parts:
        return None
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    return jnp.broadcast_to(seen, (*seen.shape[:3], rows, columns))


def _offsets(operands: Operands) -> jax.Array:
    return jnp.zeros((1,), jnp.int32) if operands.q_offset is None else operands.q_offset


def visible_blocks(operands: Operands, spec: Spec, start, size: int, others: int, *, of_rows: bool):
    """Which blocks of the other side does a block of rows (of columns: of_rows=False) meet?

    The block is [start, start + size); those of the other side lie at multiples of `others`. The
    answer, bool [number of other blocks], is never False where `visible` has a True; it follows
    from the blocks' first and last positions and segment ids and, if a mask was passed, from its
    tiles. None: all.
    """
    t, s = operands.query.shape[1], operands.key.shape[1]
    other_length = s if of_rows else t
    first, last = start, start + jnp.int32(size - 1)
    count = -(-other_length // others)
    other_first = jnp.arange(count, dtype=jnp.int32) * jnp.int32(others)
    other_last = jnp.minimum(other_first + jnp.int32(others), jnp.int32(other_length)) - jnp.int32(
        1
    )
    rows, columns = ((first, last), (other_first, other_last))[:: 1 if of_rows else -1]
    (t_first, t_last), (s_first, s_last) = (tuple(map(_row, pair)) for pair in (rows, columns))

    parts = []  # bool [1|B, 1|blocks]
    offset = _offsets(operands)[:, None]
    if spec.right is not None:
        parts.append(s_first <= t_last + offset + np.int32(spec.right))
    if spec.left is not None:
        parts.append(s_last >= t_first + offset - np.int32(spec.left))
    if operands.query_lengths is not None:
        parts.append(t_first < operands.query_lengths[:, None])
    if operands.kv_lengths is not None:
        parts.append(s_first < operands.kv_lengths[:, None])
    if operands.q_segments is not None and operands.kv_segments is not None:
        mine, theirs = (operands.q_segments, operands.kv_segments)[:: 1 if of_rows else -1]
        mine = jax.lax.dynamic_slice_in_dim(mine, start, size, 1)
        low, high = _extrema(mine, size)  # [B, 1]
        other_low, other_high = _extrema(theirs, others)  # [B, blocks]
        parts.append((low <= other_high) & (other_low <= high))
    if operands.mask is not None:
        mask = slice_tile(operands.mask, 2 if of_rows else 3, start, size)
        seen = jnp.any(mask, axis=(0, 1, 2 if of_rows else 3))  # [1 | other_length]
        if seen.shape[0] > 1:
            seen = jnp.any(jnp.pad(seen, (0, -other_length % others)).reshape(-1, others), axis=1)
        parts.append(seen[None])
    if not parts:
        return None
    seen = parts[0]
    for part in parts[1:]:
        seen = seen & part
    return jnp.broadcast_to(jnp.any(seen, axis=0), (count,))


def _row(x: jax.Array) -> jax.Array:
    return x.reshape(1, -1)


def _extrema(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Least and greatest segment id of each block: int32 [B, length] -> two of [B, blocks]."""
    padding = -segments.shape[1] % size
    blocks = jnp.pad(segments, ((0, 0), (0, padding)), mode="edge") if padding else segments
    blocks = blocks.reshape(segments.shape[0], -1, size)
    return jnp.min(blocks, axis=2), jnp.max(blocks, axis=2)
