"""What flash attention's forward on Hopper makes of a tile's scores: masks, weights and maxima.

Rows of scores are in units of log2: exp2 is one instruction.
"""

import functools
import math
import operator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention import dropout
from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_config import ROWS
from pallas_ops.attention.mosaic_visibility import WGMMA, columns_of, rows_of

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_fwd import _Forward

LOG2E = math.log2(math.e)
# What counts as the maximum of a row that has seen nothing: no score lies below, so that whatever
# comes has a weight of 1 or more, and -inf one of 0.
UNSEEN = float(jnp.finfo(jnp.float32).min)
# Scores as low as this are a mask by other means, such as a bias of -1e9: the maximum of a row that
# has seen nothing else follows the scores up.
LOW = -(2.0**16)
# How large a thread's sum of a block's weights may get before the maximum of its row is raised: any
# number near it does, and one that stays costs nothing. Sums and results are float32; weights are
# rounded to the products' dtype, and float16 ends at 65504.
MOST = {jnp.dtype(jnp.bfloat16): 2.0**24, jnp.dtype(jnp.float16): 2.0**14}


class Tile(NamedTuple):
    batch: jax.Array
    head: jax.Array
    place: jax.Array  # among the tiles of a head
    lengths: visibility.Lengths
    met: visibility.Range


def row_vector(x: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), WGMMA.reduce(1))


class Scores:
    """Of one warpgroup's 64 queries of a tile."""

    def __init__(self, kernel: "_Forward", warpgroup, tile: Tile):
        self.kernel, self.refs, self.spec = kernel, kernel.refs, kernel.spec
        self.tile = tile
        self.row = (tile.place * jnp.int32(kernel.config.consumers) + warpgroup) * jnp.int32(ROWS)
        self.met = kernel.met_by_rows(tile, self.row) if kernel.uneven else tile.met
        self.shape = (ROWS, kernel.config.block_kv)
        # Scores are in units of log2 once they have left `scores`, or are yet to be scaled by this.
        plain = self.spec.soft_cap is None and "bias" not in self.refs and self.spec.scale > 0
        self.unit = self.spec.scale * LOG2E if plain else 1.0

    def scores(self, raw, k):
        """Raw products of the k-th block with bias, soft cap and masks; -inf where masked."""
        kernel, tile, spec = self.kernel, self.tile, self.spec
        j = tile.met.end - jnp.int32(1) - k
        column = j * jnp.int32(kernel.config.block_kv)
        scores, parts = raw, []
        if self.unit == 1.0:
            scores = scores * spec.scale
        if "bias" in self.refs:
            bias = self.read_tile("bias", column).astype(jnp.float32)
            scores = scores + bias
            parts.append(bias != -jnp.inf)
        if spec.soft_cap is not None:
            scores = jnp.tanh(scores * (1 / spec.soft_cap)) * spec.soft_cap
        if self.unit == 1.0:
            scores = scores * LOG2E
        if not kernel.masked:
            return scores
        if "mask" in self.refs:
            parts.append(self.read_tile("mask", column).astype(jnp.int32) != 0)

        def mask(scores):
            seen = visibility.visible(
                spec, tile.lengths, self.row, column, self.shape, bounded=kernel.bounded
            )
            if kernel.segmented:
                seen.append(self.same_segment(column))
            return jnp.where(visibility.conjunction(parts + seen), scores, -jnp.inf)

        if kernel.by_tile:
            return mask(scores)
        partial = (j < self.met.full_first) | (j >= self.met.full_end)
        if kernel.segmented:
            partial |= visibility.mixed(self.refs, tile.batch, tile.place, j)
        return lax.cond(partial, mask, lambda scores: scores, scores)

    def same_segment(self, column):
        load = lambda name, start, size, axis: plgpu.load(
            self.refs[name].at[self.tile.batch, pl.ds(start, size)],
            layout=WGMMA.reduce(axis),
            optimized=False,
        )
        q_ids = load("q_segments", self.row, ROWS, 1)
        kv_ids = load("kv_segments", column, self.shape[1], 0)
        return columns_of(q_ids, self.shape) == rows_of(kv_ids, self.shape)

    def read_tile(self, name: str, column) -> jax.Array:
        """The tile [64, bkv] of an array [1|B, 1|N, 1|T, 1|S], read once where it broadcasts."""
        ref = self.refs[name]
        batch, head = (
            0 if size == 1 else i for size, i in zip(ref.shape, (self.tile.batch, self.tile.head))
        )
        rows, columns = pl.ds(self.row, ROWS), pl.ds(column, self.shape[1])
        load = lambda *at, layout: plgpu.load(
            ref.at[batch, head, *at], layout=layout, optimized=False
        )
        match ref.shape[2:]:
            case (1, 1):
                return jnp.full(self.shape, ref[batch, head, 0, 0])
            case (1, _):
                return rows_of(load(0, columns, layout=WGMMA.reduce(0)), self.shape)
            case (_, 1):
                return columns_of(load(rows, 0, layout=WGMMA.reduce(1)), self.shape)
            case _:
                return load(rows, columns, layout=WGMMA)

    def nothing(self) -> tuple[jax.Array, jax.Array]:
        """Maxima and sums of rows that have seen nothing."""
        return row_vector(UNSEEN), plgpu.layout_cast(jnp.zeros((ROWS, 8), jnp.float32), WGMMA)

    def first_top(self, scores, top):
        """The maxima of rows that had none, or none but low ones."""
        block_top = jnp.maximum((scores * self.unit).max(axis=1), top)
        return jnp.where(top < LOW, block_top, top)

    def weights(self, scores, top) -> tuple[jax.Array, jax.Array]:
        """Weights by what counts as the maximum of the rows, and their sums."""
        weights = jnp.exp2(scores * self.unit - columns_of(top, scores.shape))
        parts = [weights[:, i : i + 8] for i in range(0, self.shape[1], 8)]
        return weights, functools.reduce(operator.add, parts)

    def raised(self, acc, top, total, new_top, weights, sums):
        """Sums by `top` and a block's weights by `new_top`, brought to the maximum of all."""
        most = jnp.maximum(weights.max(axis=1), 1.0)
        times = lambda x, factor: x * columns_of(factor, x.shape)
        old, new = jnp.exp2(top - new_top) / most, 1.0 / most
        total = times(total, old) + times(sums, new)
        return times(acc, old), new_top + jnp.log2(most), total, times(weights, new)

    def dropped(self, weights, k):
        """Weights in the products' dtype; what is kept is scaled up at the end."""
        if "seeds" in self.refs:
            j = self.tile.met.end - jnp.int32(1) - k
            iota = lambda size, axis: plgpu.broadcasted_iota(
                jnp.int32, (size,), 0, layout=WGMMA.reduce(axis)
            )
            seed = self.refs["seeds"][self.tile.batch, self.tile.head]
            rows = dropout.row_hash(seed, iota(ROWS, 1) + self.row)
            columns = iota(self.shape[1], 0) + j * jnp.int32(self.shape[1])
            kept = dropout.keep(
                columns_of(rows, self.shape),
                rows_of(dropout.column_hash(columns), self.shape),
                self.spec.dropout_rate,
            )
            weights = jnp.where(kept, weights, 0.0)
        return weights.astype(self.kernel.dtype)
