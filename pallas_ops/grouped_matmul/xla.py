"""Grouped products in plain JAX: a loop over groups, and in it over tiles of a group's rows.

Nothing is as large as [G, M, K]: beside the results there is one tile of rows, one group's matrix
and, in the contracting product, one accumulator [K, N].
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ops import arguments
from pallas_ops.grouped_matmul import epilogue
from pallas_ops.grouped_matmul.validate import ContractingSpec, RaggedDotSpec
from pallas_ops.tuning import check_fields, rounded


@dataclasses.dataclass(frozen=True)
class Config:
    """Rows of a tile."""

    block_m: int

    def __post_init__(self):
        check_fields(self)
        if not 1 <= self.block_m <= 2**15:
            raise ValueError(f"block_m must lie in [1, {2**15}], got {self.block_m}")


def heuristic(device_kind: str | None, lhs, rhs, bounds, *operands, **params) -> Config:
    """The rows of a mean group, within bounds."""
    del rhs, operands, params
    mean = rounded(max(-(-lhs.shape[0] // max(bounds.shape[0], 1)), 1))
    # On a CPU 64 to 128 rows amortise a group's matrix; beyond that masked rows only cost. On a GPU
    # a tile of any size costs some 40 us of launches: an H200 takes 10 ms for 128 groups of 512
    # rows by 1024 at a time, 26 ms by 128.
    if device_kind in (None, "cpu"):
        return Config(max(32, min(128, mean)))
    return Config(max(32, min(1024, 2 * mean)))


def candidates(lhs, *operands, **params) -> list[Config]:
    """Powers of two up to the rows that there are."""
    del operands, params
    return [Config(2**i) for i in range(5, 12) if 2**i < 2 * lhs.shape[0]]


def ragged_dot(
    lhs, rhs, bounds, *bias, spec: RaggedDotSpec, config: Config
) -> tuple[jax.Array, ...]:
    """Rows of group g times rhs[g], and the epilogue; also its input if `save_preactivation`."""
    m, k = lhs.shape
    groups, n = rhs.shape[0], rhs.shape[1 if spec.transpose_rhs else 2]
    widths = [epilogue.width(n, spec.activation)] + [n] * spec.save_preactivation
    outs = tuple(jnp.zeros((m, w), spec.out_dtype) for w in widths)
    if 0 in (m, n, groups):
        return outs
    block = min(config.block_m, m)

    def product(x, w):  # [bm, K], [K, N] or [N, K] -> [bm, N]
        return _dot(x, w, (1, 1 if spec.transpose_rhs else 0), spec)

    def group(g, outs):
        w = lax.dynamic_index_in_dim(rhs, g, keepdims=False)
        b = [lax.dynamic_index_in_dim(x, g) for x in bias]  # [1, N]
        start, end = bounds[g, 0], bounds[g, 1]

        def tile(i, outs):
            row, keep = _tile_rows(start + i * np.int32(block), end, block, m)
            y = product(lax.dynamic_slice_in_dim(lhs, row, block), w)  # [bm, N]
            for x in b:
                y = y + x.astype(y.dtype)
            tiles = (epilogue.activate(y, spec.activation), y)
            return tuple(_update_rows(out, t, row, keep) for out, t in zip(outs, tiles))

        return lax.fori_loop(np.int32(0), _tiles(start, end, block), tile, outs)

    return lax.fori_loop(np.int32(0), np.int32(groups), group, outs)


def ragged_dot_contracting(
    lhs, rhs, bounds, *accumulate, spec: ContractingSpec, config: Config
) -> tuple[jax.Array]:
    """For each group, the transpose of its rows of lhs times its rows of rhs, plus `accumulate`."""
    (m, k), n, groups = lhs.shape, rhs.shape[1], bounds.shape[0]
    dtype = arguments.accumulator_dtype(arguments.common_dtype(lhs, rhs, *accumulate))
    if np.dtype(spec.out_dtype) == np.float64:
        dtype = spec.out_dtype
    if accumulate:
        # Updated in place, so that a donated buffer of the same type is the result's.
        out = accumulate[0].astype(spec.out_dtype)
    else:
        out = jnp.zeros((groups, k, n), spec.out_dtype)
    if 0 in (m, k, n, groups):
        return (out,)
    block = min(config.block_m, m)

    def group(g, out):
        start, end = bounds[g, 0], bounds[g, 1]

        def tile(i, acc):
            row, keep = _tile_rows(start + i * np.int32(block), end, block, m)
            # Rows outside are selected out of both: 0 times a NaN in either would be NaN.
            x, y = (
                jnp.where(keep, t, jnp.zeros_like(t))
                for t in (lax.dynamic_slice_in_dim(a, row, block) for a in (lhs, rhs))
            )  # [bm, K], [bm, N]
            return acc + _dot(x, y, (0, 0), spec).astype(dtype)

        acc = lax.fori_loop(np.int32(0), _tiles(start, end, block), tile, jnp.zeros((k, n), dtype))
        if accumulate:
            old = lax.dynamic_index_in_dim(accumulate[0], g, keepdims=False)
            # An empty group keeps its very bits, those of a NaN or -0 too.
            acc = jnp.where(end > start, old.astype(dtype) + acc, old.astype(dtype))
        return lax.dynamic_update_index_in_dim(out, acc.astype(out.dtype), g, 0)

    return (lax.fori_loop(np.int32(0), np.int32(groups), group, out),)


def _dot(x, y, contract: tuple[int, int], spec) -> jax.Array:
    dtype = arguments.common_dtype(x, y)
    wide = np.float64 in (np.dtype(spec.out_dtype), dtype)
    return lax.dot_general(
        x.astype(dtype),
        y.astype(dtype),
        (((contract[0],), (contract[1],)), ((), ())),
        precision=spec.precision,
        preferred_element_type=jnp.float64 if wide else jnp.float32,
    )


def _tiles(start, end, block: int):
    return (end - start + np.int32(block - 1)) // np.int32(block)


def _tile_rows(first, end, block: int, m: int):
    """Where to slice a tile so that it lies in the array, and which of its rows to use: [bm, 1]."""
    row = jnp.minimum(first, np.int32(m - block))
    rows = row + lax.broadcasted_iota(jnp.int32, (block, 1), 0)
    return row, (rows >= first) & (rows < end)


def _update_rows(out, tile, row, keep):
    old = lax.dynamic_slice_in_dim(out, row, tile.shape[0])
    return lax.dynamic_update_slice_in_dim(
        out, jnp.where(keep, tile.astype(out.dtype), old), row, 0
    )
