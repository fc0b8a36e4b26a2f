"""Which tiles and which of their elements a Mosaic GPU kernel computes: masks.py, inside a kernel.

All numbers are int32 scalars or tiles in registers. Rows and columns are positions of queries and
keys.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention.validate import Spec

WGMMA = plgpu.Layout.WGMMA


def cdiv(a, b: int):
    return lax.div(a + jnp.int32(b - 1), jnp.int32(b))


def columns_of(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """[bq] -> [bq, bkv]: one value a row."""
    return lax.broadcast_in_dim(vector, shape, [0])


def rows_of(vector: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """[bkv] -> [bq, bkv]: one value a column."""
    return lax.broadcast_in_dim(vector, shape, [1])


def pad(x: jax.Array, sizes: dict[int, int], **how) -> jax.Array:
    """`x` with dimensions, by axis, rounded up to multiples; as it is where they are."""
    widths = [(0, -d % sizes.get(axis, 1)) for axis, d in enumerate(x.shape)]
    return jnp.pad(x, widths, **how) if any(end for _, end in widths) else x


class Range(NamedTuple):
    """Blocks [first, end) that a tile meets, of which [full_first, full_end) need no mask."""

    first: jax.Array
    end: jax.Array
    full_first: jax.Array
    full_end: jax.Array

    @property
    def blocks(self) -> jax.Array:
        return self.end - self.first

    def within(self, first, end) -> "Range":
        """Those of [first, end), but one at least."""
        start = jnp.minimum(jnp.maximum(self.first, first), self.end - jnp.int32(1))
        end = jnp.maximum(jnp.minimum(self.end, end), start + jnp.int32(1))
        return self._replace(first=start, end=end)

    def meeting(self, first, end) -> "Range":
        """Those of [first, end), maybe none."""
        start = jnp.maximum(self.first, first)
        return self._replace(first=start, end=jnp.maximum(jnp.minimum(self.end, end), start))


class Lengths(NamedTuple):
    """A batch row's scalars, with what is absent filled in."""

    offset: jax.Array
    query: jax.Array
    kv: jax.Array

    @classmethod
    def read(cls, refs, batch, t: int, s: int) -> "Lengths":
        names = {"q_offset": 0, "query_lengths": t, "kv_lengths": s}
        return cls(*(refs[n][batch] if n in refs else jnp.int32(x) for n, x in names.items()))


def kv_blocks(spec: Spec, lengths: Lengths, row, rows: int, block: int, count: int) -> Range:
    """The blocks of keys, `count` in all, that the queries [row, row + rows) meet.

    There is always one, if only to find that nothing in it is visible.
    """
    last_row = row + jnp.int32(rows - 1)
    first, end = jnp.int32(0), lengths.kv
    full_first, full_end = first, end
    if spec.left is not None:
        reach = lengths.offset - np.int32(spec.left)
        first, full_first = row + reach, last_row + reach
    if spec.right is not None:
        reach = lengths.offset + np.int32(spec.right + 1)
        end = jnp.minimum(end, last_row + reach)
        full_end = jnp.minimum(full_end, row + reach)
    end = jnp.where(row < lengths.query, end, jnp.int32(0))
    full_end = jnp.minimum(full_end, end)
    first, full_first = (jnp.maximum(x, jnp.int32(0)) for x in (first, full_first))
    end, full_end = (jnp.maximum(x, jnp.int32(0)) for x in (end, full_end))
    first = jnp.minimum(lax.div(first, jnp.int32(block)), jnp.int32(count - 1))
    end = jnp.clip(cdiv(end, block), first + jnp.int32(1), jnp.int32(count))
    return Range(first, end, cdiv(full_first, block), lax.div(full_end, jnp.int32(block)))


def q_blocks(spec: Spec, lengths: Lengths, column, columns: int, block: int, count: int) -> Range:
    """The blocks of queries, `count` in all, that the keys [column, column + columns) meet.

    There may be none. Lengths of queries only end them: what their rows hold is cut off elsewhere.
    """
    last_column = column + jnp.int32(columns - 1)
    first, end = jnp.int32(0), lengths.query
    full_first, full_end = first, jnp.int32(count * block)
    if spec.right is not None:
        reach = lengths.offset + np.int32(spec.right)
        first, full_first = column - reach, last_column - reach
    if spec.left is not None:
        reach = np.int32(spec.left + 1) - lengths.offset
        end, full_end = jnp.minimum(end, last_column + reach), column + reach
    end = jnp.where(column < lengths.kv, end, jnp.int32(0))
    full_end = jnp.where(last_column < lengths.kv, full_end, jnp.int32(0))
    first, end, full_first, full_end = (
        jnp.maximum(x, jnp.int32(0)) for x in (first, end, full_first, full_end)
    )
    first = lax.div(first, jnp.int32(block))
    end = jnp.maximum(jnp.minimum(cdiv(end, block), jnp.int32(count)), first)
    return Range(first, end, cdiv(full_first, block), lax.div(full_end, jnp.int32(block)))


def visible(
    spec: Spec,
    lengths: Lengths,
    row,
    column,
    shape: tuple[int, int],
    *,
    bounded: bool,
    transposed: bool = False,
) -> list[jax.Array]:
    """Conditions on positions under which elements of the tile at (row, column) are visible.

    `shape` is [bq, bkv], or [bkv, bq] where transposed. `bounded` says whether keys may end before
    the tile does. Lengths of queries are not looked at: their rows are cut from the results.
    """
    # Positions, not distances from the diagonal: those are the same in each tile, so the compiler
    # keeps them in registers across the loop over tiles. Each side is a whole tile along its axis 1
    # and a vector along axis 0, which takes fewer registers.
    query = row + lengths.offset
    along, across = (query, column) if transposed else (column, query)
    iota = plgpu.broadcasted_iota
    tile = lambda: iota(jnp.int32, shape, 1, layout=WGMMA) + along
    vector = lambda: iota(jnp.int32, shape[:1], 0, layout=WGMMA.reduce(1)) + across
    parts: list[jax.Array] = []
    if spec.right is not None:
        right = np.int32(spec.right)
        if transposed:
            parts.append(tile() >= columns_of(vector() - right, shape))
        else:
            parts.append(tile() <= columns_of(vector() + right, shape))
    if spec.left is not None:
        left = np.int32(spec.left)
        if transposed:
            parts.append(tile() <= columns_of(vector() + left, shape))
        else:
            parts.append(tile() >= columns_of(vector() - left, shape))
    if bounded and transposed:
        parts.append(columns_of(vector(), shape) < lengths.kv)
    elif bounded:
        parts.append(tile() < lengths.kv)
    return parts


def conjunction(parts: list[jax.Array]) -> jax.Array:
    return functools.reduce(operator.and_, parts)


def segment_tables(q_ids, kv_ids, rows: int, columns: int) -> dict[str, jax.Array]:
    """What kernels know of segments: least and greatest id of each tile, and whom a tile meets.

    Ids int32 [B, tiles * rows] and [B, blocks * columns]. `q_extrema` and `kv_extrema` are
    int32[B, tiles | blocks, 2]; `span` int32[B, tiles, 2] has the first block of keys, and the end
    of the last, with ids in the range of the tile's.
    """
    extrema = {}
    for name, ids, size in (("q_extrema", q_ids, rows), ("kv_extrema", kv_ids, columns)):
        ids = ids.reshape(ids.shape[0], -1, size)
        extrema[name] = jnp.stack([ids.min(axis=2), ids.max(axis=2)], axis=2)
    q_low, q_high = (extrema["q_extrema"][:, :, None, e] for e in (0, 1))
    kv_low, kv_high = (extrema["kv_extrema"][:, None, :, e] for e in (0, 1))
    met = (q_low <= kv_high) & (kv_low <= q_high)  # [B, tiles, blocks]
    index = jnp.arange(met.shape[2], dtype=jnp.int32)
    first = jnp.min(jnp.where(met, index, np.int32(met.shape[2])), axis=2)
    end = jnp.max(jnp.where(met, index + jnp.int32(1), np.int32(0)), axis=2)
    return extrema | {"span": jnp.stack([first, end], axis=2)}


def mixed(refs, batch, tile, block) -> jax.Array:
    """Whether a tile and a block hold more than one segment between them."""
    ids = [refs["q_extrema"][batch, tile, e] for e in (0, 1)]
    ids += [refs["kv_extrema"][batch, block, e] for e in (0, 1)]
    return functools.reduce(operator.or_, [other != ids[0] for other in ids[1:]])


class Order(NamedTuple):
    """Tiles of rows of all heads as one sequence, long ones first and near ones together.

    Heads are taken in sections whose keys and values stay in the L2 cache; within a section the
    tiles that see most keys come first, so that none is left over at the end (LPT).
    """

    batch: int
    heads: int
    tiles: int
    section: int
    descending: bool

    @property
    def all(self) -> int:
        return self.batch * self.heads * self.tiles

    def place(self, index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Batch row, head and tile of the index-th."""
        # By constants: a division by anything else is a call where kernels are assembled
        # relocatably, and calls make products wait for each other.
        size, head_tiles = jnp.int32(self.section), jnp.int32(self.section * self.tiles)
        first, rest = lax.div(index, head_tiles) * size, lax.rem(index, head_tiles)
        tile, head = lax.div(rest, size), first + lax.rem(rest, size)
        if self.descending:
            tile = jnp.int32(self.tiles - 1) - tile
        return lax.div(head, jnp.int32(self.heads)), lax.rem(head, jnp.int32(self.heads)), tile

    def place_in_pair(self, share, second) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same of one of two tiles, of two heads, that are as long together as any other two.

        From the end of the one head and the start of the other, where a causal mask makes their
        lengths add up. There must be an even number of heads.
        """
        pair, tile = lax.div(share, jnp.int32(self.tiles)), lax.rem(share, jnp.int32(self.tiles))
        head = jnp.int32(2) * pair + second
        tile = jnp.where(second == 0, jnp.int32(self.tiles - 1) - tile, tile)
        return lax.div(head, jnp.int32(self.heads)), lax.rem(head, jnp.int32(self.heads)), tile


class Shares(NamedTuple):
    """Which tiles a block of the grid takes: one, or where some `blocks` stay its share of all.

    Where lengths differ by a band it takes a long and a short one in turn.
    """

    order: Order
    blocks: int
    paired: bool

    @classmethod
    def of(cls, order: Order, blocks: int, *, banded: bool) -> "Shares":
        even = order.batch * order.heads % 2 == 0
        return cls(order, blocks, bool(blocks) and banded and even)

    @property
    def all(self) -> int:
        return self.order.all // (1 + self.paired)

    @property
    def ctas(self) -> int:
        return min(self.blocks, self.all) if self.blocks else self.all

    def count(self, cta):
        """How many tiles a block takes."""
        rounds, rest = divmod(self.all, self.ctas)
        more = (cta < rest).astype(jnp.int32)
        return (jnp.int32(rounds) + more) * jnp.int32(1 + self.paired)

    def place(self, cta, index) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Batch row, head and tile of the index-th that a block takes."""
        ctas = jnp.int32(self.ctas)
        if not self.paired:
            return self.order.place(index * ctas + cta)
        share = lax.div(index, jnp.int32(2)) * ctas + cta
        return self.order.place_in_pair(share, lax.rem(index, jnp.int32(2)))


# Of heads that blocks which run together may share in the L2 cache: half of an H200's 50 MB is on
# the far side of the chip, and what is read from there may be held twice.
_CACHE_BYTES = 16 * 1024 * 1024
# A section with fewer tiles leaves multiprocessors idle at its end: a Hopper card has up to 132.
_FEWEST_TILES = 200


def section_of(batch_heads: int, group: int, head_bytes: int, tiles: int) -> int:
    """How many query heads share the cache: whole groups of those that share a kv head.

    Args:
      batch_heads: query heads of all batch rows.
      group: query heads of a kv head.
      head_bytes: what the tiles of a kv head read.
      tiles: of a query head.

    Returns:
      A number such that all sections are alike.
    """
    kv_heads = batch_heads // group
    most = min(kv_heads, max(1, _CACHE_BYTES // max(1, head_bytes)))
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    best = max(n for n in counts if n <= most)
    even = [n for n in counts if n * group * tiles >= _FEWEST_TILES]
    return group * max(best, min(even, default=kv_heads))
