"""Flash attention's forward on Hopper: a Pallas kernel on the Mosaic GPU backend.

Consumer warpgroups take 64 queries each; keys and values come tile by tile through TMA. A consumer
has the scores of block j and the product of weights and values of block j-1 in flight together, and
takes the softmax of the one while the other runs (Shah et al., "FlashAttention-3",
arXiv:2407.08608). docs/attention.md tells the rest.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops import mosaic_inline
from pallas_ops.attention import mosaic_config
from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_config import READ_BY_TILE, ROWS, Config, Sizes
from pallas_ops.attention.mosaic_consumer import Consumer, Steps
from pallas_ops.attention.mosaic_scores import Tile, row_vector
from pallas_ops.attention.validate import Operands, Spec

_SWIZZLE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def forward(operands: Operands, spec: Spec, config: Config) -> tuple[jax.Array, jax.Array]:
    """Output [B, T, N, Hv] and lse float32 [B, T, N]."""
    sizes = Sizes.of(operands.query, operands.key, operands.value)
    out, lse = _Forward(operands, spec, config, sizes)()
    return out[:, : sizes.t, :, : sizes.hv], lse[:, :, : sizes.t].transpose(0, 2, 1)


def _inputs(operands: Operands, config: Config) -> dict[str, jax.Array]:
    """The operands by name, padded to what is read in one go.

    TMA fills what is outside of an array with zeros, but an array must hold whole tiles of the
    swizzled layout, 8 rows by 64 columns.
    """
    inputs = {name: getattr(operands, name) for name in operands.present}
    for name in ("query", "key", "value"):
        inputs[name] = visibility.pad(inputs[name], {1: 8, 3: 64})
    whole = {2: config.rows, 3: config.block_kv}
    for name in READ_BY_TILE:
        if name in inputs:
            x = inputs[name]
            x = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
            inputs[name] = visibility.pad(
                x, {axis: n for axis, n in whole.items() if x.shape[axis] > 1}
            )
    if operands.q_segments is not None and operands.kv_segments is not None:
        q = visibility.pad(operands.q_segments, {1: config.rows}, mode="edge")
        kv = visibility.pad(operands.kv_segments, {1: config.block_kv}, mode="edge")
        inputs |= {"q_segments": q, "kv_segments": kv}
        inputs |= visibility.segment_tables(q, kv, config.rows, config.block_kv)
    return inputs


class _Forward:
    """The kernel: what is static of it, and under `refs` the references that its body was given."""

    def __init__(self, operands: Operands, spec: Spec, config: Config, sizes: Sizes):
        self.spec, self.config, self.sizes = spec, config, sizes
        self.dtype = operands.query.dtype
        self.inputs = _inputs(operands, config)
        self.tiles = -(-sizes.t // config.rows)
        self.blocks = -(-sizes.s // config.block_kv)
        # Tiles of one length need no order by length: those of one head follow each other.
        banded = mosaic_config.banded(spec)
        head_bytes = 2 * sizes.s * (sizes.h + sizes.hv)
        section = visibility.section_of(sizes.b * sizes.n, sizes.group, head_bytes, self.tiles)
        order = visibility.Order(
            sizes.b,
            sizes.n,
            self.tiles,
            section if banded else sizes.group,
            descending=spec.right is not None,
        )
        self.shares = visibility.Shares.of(order, config.blocks, banded=banded)
        self.segmented = "q_segments" in self.inputs
        self.by_tile = any(name in self.inputs for name in READ_BY_TILE)
        self.bounded = "kv_lengths" in self.inputs or sizes.s % config.block_kv != 0
        # What may hide values that are not finite; past the end of the keys TMA puts zeros.
        self.hiding = banded or not {"q_segments", "kv_lengths", *READ_BY_TILE}.isdisjoint(
            self.inputs
        )
        self.masked = self.hiding or self.bounded
        # Whether consumers' rows may differ in which of the tile's blocks they see. Not where one
        # of them loads what the others need.
        self.uneven = banded and config.producer and config.rows > config.block_kv
        self.shares_output = sizes.shares_output(config)
        # Whether a tile's first scores are computed beside the last product of the one before. Not
        # where its queries take the place of what that stores, or blocks lie between that others
        # must see given back first.
        self.chained = bool(config.blocks) and not self.shares_output and not self.uneven
        # First column and width: what results take the place of is as wide as they are.
        width = sizes.hvp if self.shares_output else sizes.hp
        self.q_parts = [(0, width)] + ([(width, sizes.hp - width)] if width < sizes.hp else [])
        self.refs: dict[str, Any] = {}

    def __call__(self) -> tuple[jax.Array, jax.Array]:
        """Output [B, T, N, Hv], in whole lines, and lse [B, N, T], in whole tiles."""
        sizes, config = self.sizes, self.config
        length = self.inputs["query"].shape[1]
        scratch = self._scratch()

        def body(*refs):
            self.refs = dict(zip((*self.inputs, "out", "lse", *scratch), refs, strict=True))
            if self.shares_output:
                self.refs["o_smem"] = self.refs["q_smem"]
            self._body()

        run = plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct((sizes.b, length, sizes.n, sizes.hvp), self.dtype),
                jax.ShapeDtypeStruct((sizes.b, sizes.n, self.tiles * config.rows), jnp.float32),
            ],
            grid=(self.shares.ctas,),
            grid_names=("cta",),
            num_threads=config.consumers + config.producer,
            thread_name="warpgroup",
            scratch_types=list(scratch.values()),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return run(*self.inputs.values())

    def _scratch(self) -> dict[str, Any]:
        sizes, (consumers, stages) = self.sizes, (self.config.consumers, self.config.stages)
        tile = lambda *shape: plgpu.SMEM(shape, self.dtype, transforms=_SWIZZLE)
        scratch = dict(
            q_smem=tile(consumers, ROWS, self.q_parts[0][1]),
            k_smem=tile(stages, self.config.block_kv, sizes.hp),
            v_smem=tile(stages, self.config.block_kv, sizes.hvp),
            q_full=plgpu.Barrier(num_arrivals=len(self.q_parts), num_barriers=consumers),
            q_empty=plgpu.Barrier(num_barriers=consumers),
            k_full=plgpu.Barrier(num_barriers=stages),
            k_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            v_full=plgpu.Barrier(num_barriers=stages),
            v_empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
            suspect_smem=plgpu.SMEM((consumers,), jnp.float32),
            reduction_smem=plgpu.SMEM((consumers, 128), jnp.float32),
            together=plgpu.Barrier(num_arrivals=consumers),
            done=plgpu.Barrier(num_arrivals=consumers),
        )
        if not self.shares_output:
            scratch["o_smem"] = tile(consumers, ROWS, sizes.hvp)
        for _, width in self.q_parts[1:]:
            scratch["q_rest_smem"] = tile(consumers, ROWS, width)
        return scratch

    def _body(self):
        consumers = self.config.consumers
        warpgroup = lax.axis_index("warpgroup")

        def all_tiles(run):
            step = run(jnp.int32(0), guarded=False)
            # 0 times NaN is NaN, and scores may rise beyond float32's room: where a masked value
            # is not finite, or a maximum, all is done again with care.
            plgpu.barrier_wait(self.refs["done"])
            suspects = [self.refs["suspect_smem"][w] for w in range(consumers)]

            @pl.when(sum(suspects[1:], suspects[0]) > 0)
            def _():
                run(step, guarded=True)

        if not self.config.producer:
            all_tiles(lambda start, guarded: self._consume(warpgroup, start, guarded))
            plgpu.wait_smem_to_gmem(0)
            return

        registers = mosaic_config.registers(consumers)

        @pl.when(warpgroup == consumers)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            all_tiles(self._produce)

        @pl.when(warpgroup < consumers)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            all_tiles(lambda start, guarded: self._consume(warpgroup, start, guarded))
            plgpu.wait_smem_to_gmem(0)

    def tile(self, index) -> Tile:
        """Where the index-th tile of this block lies, and which keys it meets."""
        rows, bkv = self.config.rows, self.config.block_kv
        batch, head, i = self.shares.place(lax.axis_index("cta"), index)
        lengths = visibility.Lengths.read(self.refs, batch, self.sizes.t, self.sizes.s)
        met = visibility.kv_blocks(self.spec, lengths, i * jnp.int32(rows), rows, bkv, self.blocks)
        if self.segmented:
            met = met.within(*(self.refs["span"][batch, i, e] for e in (0, 1)))
        return Tile(batch, head, i, lengths, met)

    def met_by_rows(self, tile: Tile, row) -> visibility.Range:
        """The blocks that a consumer's rows meet of the tile's; one at least."""
        bkv, (first, end, *_) = self.config.block_kv, tile.met
        own = visibility.kv_blocks(self.spec, tile.lengths, row, ROWS, bkv, self.blocks)
        first = jnp.clip(own.first, first, end - jnp.int32(1))
        return own._replace(first=first, end=jnp.clip(own.end, first + jnp.int32(1), end))

    def repeats(self, guarded: bool) -> int:
        """How often each block of values comes, `attend_guarded` needs them twice."""
        return 2 if guarded and self.hiding else 1

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    # Loads: of the producer, or of the first consumer.

    def load_queries(self, tile: Tile, w: int):
        rows = pl.ds(
            (tile.place * jnp.int32(self.config.consumers) + jnp.int32(w)) * jnp.int32(ROWS), ROWS
        )
        for (first, width), name in zip(self.q_parts, ("q_smem", "q_rest_smem")):
            source = self.refs["query"].at[tile.batch, rows, tile.head, pl.ds(first, width)]
            plgpu.copy_gmem_to_smem(source, self.refs[name].at[w], self.refs["q_full"].at[w])

    def load(self, which: str, tile: Tile, i, steps: Steps, repeats: int = 1):
        """Keys ("k") or values ("v") of the tile's i-th load; blocks come from the last on."""
        step = getattr(steps, which) + i
        slot = self.slot(step)
        source = self.refs[{"k": "key", "v": "value"}[which]]
        block = tile.met.end - jnp.int32(1) - lax.div(i, jnp.int32(repeats))
        columns = pl.ds(block * jnp.int32(self.config.block_kv), self.config.block_kv)
        kv_head = lax.div(tile.head, jnp.int32(self.sizes.group))
        empty, full = (self.refs[f"{which}_{state}"].at[slot] for state in ("empty", "full"))
        pl.when(step >= self.config.stages)(lambda: plgpu.barrier_wait(empty))
        source = source.at[tile.batch, columns, kv_head]
        plgpu.copy_gmem_to_smem(source, self.refs[f"{which}_smem"].at[slot], full)

    def _produce(self, start, guarded: bool):
        """Streams all tiles' queries, keys and values."""
        repeats = self.repeats(guarded)

        def one_tile(index, step):
            steps = Steps.of(step, start, repeats)
            tile = self.tile(index)
            for w in range(self.config.consumers):
                pl.when(steps.k > 0)(lambda w=w: plgpu.barrier_wait(self.refs["q_empty"].at[w]))
                self.load_queries(tile, w)

            def one_block(k, _):
                self.load("k", tile, k, steps)
                for r in range(repeats):
                    i = k * jnp.int32(repeats) + jnp.int32(r)
                    self.load("v", tile, i, steps, repeats)

            lax.fori_loop(jnp.int32(0), tile.met.blocks, one_block, None)
            return step + tile.met.blocks

        count = self.shares.count(lax.axis_index("cta"))
        return lax.fori_loop(jnp.int32(0), count, one_tile, start)

    # What a consumer computes.

    def _consume(self, warpgroup, start, guarded: bool):
        """All tiles of this block; returns how many blocks of keys came by then."""
        repeats = self.repeats(guarded)

        def consumer(index, step):
            steps = Steps.of(step, start, repeats)
            return Consumer(self, warpgroup, self.tile(index), steps, repeats)

        def store(one, index, acc, top, total, suspect):
            if self.config.producer and (self.chained or self.sizes.hvp > 128):
                # Its place is computed once more: kept across the loop it takes registers.
                one = consumer(lax.optimization_barrier(index), start)
            out = one.finish(acc, top, total)
            found = out.sum(axis=1) if self.hiding else top - top
            return jnp.maximum(suspect, jnp.where(found != found, 1.0, 0.0))

        def one_tile(index, carry):
            step, suspect = carry
            one = consumer(index, step)
            acc, top, total = one.attend_guarded() if guarded else one.attend()
            return step + one.tile.met.blocks, store(one, index, acc, top, total, suspect)

        def one_more(index, carry):
            step, *sums, suspect = carry
            one = consumer(index, step)
            ends = functools.partial(store, one, index - jnp.int32(1))
            first, blocks = (index == 0).astype(jnp.int32), one.tile.met.blocks
            return step + blocks, *one.follow(first, blocks, sums, ends, suspect)

        count, suspect = self.shares.count(lax.axis_index("cta")), row_vector(0.0)
        if self.chained and not guarded:
            one = consumer(jnp.int32(0), start)
            sums = one.open(jnp.int32(0))
            pl.when(one.tile.met.blocks == 1)(lambda: one.release_queries(early=True))
            carry = start, *sums, suspect
            step, *sums, suspect = lax.fori_loop(jnp.int32(0), count, one_more, carry)
            one = consumer(count - jnp.int32(1), step)
            acc, top, total = one.close(sums, jnp.int32(-1))
            suspect = store(one, count - jnp.int32(1), acc, top, total, suspect)
        else:
            carry = start, suspect
            step, suspect = lax.fori_loop(jnp.int32(0), count, one_tile, carry)
        if not guarded:
            scratch = self.refs["reduction_smem"].at[warpgroup]
            suspect = mosaic_inline.reduce_rows("max", suspect, scratch)
            self.refs["suspect_smem"][warpgroup] = suspect
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.refs["done"])
        return step
