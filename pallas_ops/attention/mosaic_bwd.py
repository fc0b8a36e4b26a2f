"""Flash attention's backward on Hopper: one Pallas kernel with five products.

A block of the grid holds 128 keys and values, 64 for each of two consumer warpgroups, and streams
queries and cotangents past them. Scores and their gradients are computed transposed, [keys,
queries], so that both stay in registers as left operands of the products for values and keys; the
gradients of queries are added into global memory by TMA (Shah et al., "FlashAttention-3",
arXiv:2407.08608).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention import tiles
from pallas_ops.attention.mosaic_config import ROWS, BackwardConfig, Sizes
from pallas_ops.attention.mosaic_consumer import LOG2E
from pallas_ops.attention.mosaic_visibility import WGMMA, columns_of, pad, rows_of
from pallas_ops.attention.validate import Operands, Spec

_CONSUMERS = 2
_KEYS = _CONSUMERS * ROWS
_REGISTERS = (240, 24)
_L2 = 16 * 1024 * 1024
_SWIZZLE = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
_SWIZZLE_32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def backward(
    operands: Operands,
    out,
    lse,
    dout,
    dlse,
    spec: Spec,
    config: BackwardConfig,
    bias_gradient: bool,
):
    """Gradients of query, key, value, bias (None) and sinks (or None), the last unrounded."""
    del bias_gradient
    query, key, value = operands.query, operands.key, operands.value
    sizes = Sizes.of(query, key, value)
    delta = tiles.row_sums(query.dtype, out, dout, lse, dlse)
    dsinks = tiles.sink_gradient(operands, lse, delta)
    # Weights of a row that sees nothing are exp2(-inf). One whose cotangent is NaN passes it on.
    dead = lse == -jnp.inf
    if operands.query_lengths is not None:
        dead |= jnp.arange(sizes.t)[None, :, None] >= operands.query_lengths[:, None, None]
    tainted = jnp.any(jnp.isnan(dout), axis=3)
    rows = jnp.where(dead, jnp.inf, jnp.where(tainted, jnp.nan, lse * LOG2E))
    kernel = _Backward(operands, dout, rows, jnp.where(dead, 0, delta), spec, config, sizes)
    dq, dk, dv = kernel()
    dq = (dq[:, : sizes.t, :, : sizes.h] * spec.scale).astype(query.dtype)
    return dq, dk[:, : sizes.s, :, : sizes.h], dv[:, : sizes.s, :, : sizes.hv], None, dsinks


class _Tile(NamedTuple):
    batch: jax.Array
    head: jax.Array  # of keys and values
    place: jax.Array  # among the tiles of a head
    lengths: visibility.Lengths
    met: visibility.Range  # blocks of queries


class _Backward:
    """The kernel: what is static of it, and under `refs` the references that its body was given."""

    def __init__(
        self, operands: Operands, dout, lse, delta, spec: Spec, config: BackwardConfig, sizes: Sizes
    ):
        self.spec, self.config, self.sizes = spec, config, sizes
        self.dtype = operands.query.dtype
        self.blocks = -(-sizes.t // config.block_q)
        self.tiles = -(-sizes.s // _KEYS)
        lines = {1: 8, 3: 64}
        rows = {2: config.block_q}
        self.inputs: dict[str, jax.Array] = {
            "query": pad(operands.query, lines),
            "key": pad(operands.key, lines),
            "value": pad(operands.value, lines),
            "dout": pad(dout.astype(self.dtype), lines),
            "lse": pad(lse.transpose(0, 2, 1), rows, constant_values=jnp.inf),
            "delta": pad(delta.transpose(0, 2, 1), rows),
        }
        for name in ("q_offset", "query_lengths", "kv_lengths"):
            if getattr(operands, name) is not None:
                self.inputs[name] = getattr(operands, name)
        if operands.q_segments is not None and operands.kv_segments is not None:
            q = pad(operands.q_segments, {1: config.block_q}, mode="edge")
            kv = pad(operands.kv_segments, {1: _KEYS}, mode="edge")
            self.inputs |= {"q_segments": q, "kv_segments": kv}
            self.inputs |= visibility.segment_tables(kv, q, _KEYS, config.block_q)
        self.segmented = "span" in self.inputs
        # Each consumer computes 64 queries' gradient, or a half of its columns.
        self.by_rows = config.block_q == _CONSUMERS * ROWS
        self.bounded = "kv_lengths" in self.inputs or sizes.s % _KEYS != 0
        banded = spec.left is not None or spec.right is not None
        self.masked = banded or self.bounded or self.segmented or "query_lengths" in self.inputs
        kv_heads = sizes.n // sizes.group
        head_bytes = 2 * sizes.t * sizes.group * (sizes.h + sizes.hv)
        section = visibility.section_of(sizes.b * kv_heads, 1, head_bytes, _L2)
        self.order = visibility.Order(
            sizes.b, kv_heads, self.tiles, section if banded else 1, descending=False
        )
        self.refs: dict[str, Any] = {}

    def __call__(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Gradients of queries, float32 and unscaled, keys and values, in whole lines."""
        inputs, scratch = self.inputs, self._scratch()
        dq = jax.new_ref(jnp.zeros(inputs["query"].shape, jnp.float32))

        def body(*refs):
            self.refs = dict(zip((*inputs, "dq", "dk", "dv", *scratch), refs, strict=True))
            self._body()

        run = plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct(inputs[name].shape, self.dtype) for name in ("key", "value")
            ],
            grid=(self.order.all,),
            grid_names=("cta",),
            num_threads=_CONSUMERS + 1,
            thread_name="warpgroup",
            scratch_types=list(scratch.values()),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        dk, dv = run(*inputs.values(), dq)
        return jax.freeze(dq), dk, dv

    def _scratch(self) -> dict[str, Any]:
        sizes, bq, stages = self.sizes, self.config.block_q, self.config.stages
        tile = lambda *shape: plgpu.SMEM(shape, self.dtype, transforms=_SWIZZLE)
        part = (_CONSUMERS, ROWS, sizes.hp if self.by_rows else sizes.hp // _CONSUMERS)
        return dict(
            q_smem=tile(stages, bq, sizes.hp),
            do_smem=tile(stages, bq, sizes.hvp),
            k_smem=tile(_CONSUMERS, ROWS, sizes.hp),
            v_smem=tile(_CONSUMERS, ROWS, sizes.hvp),
            ds_smem=tile(2, _CONSUMERS, ROWS, bq),
            dq_smem=plgpu.SMEM(part, jnp.float32, transforms=_SWIZZLE_32),
            lse_smem=plgpu.SMEM((stages, bq), jnp.float32),
            delta_smem=plgpu.SMEM((stages, bq), jnp.float32),
            kv_full=plgpu.Barrier(num_arrivals=2 * _CONSUMERS),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            do_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
            together=plgpu.Barrier(num_arrivals=_CONSUMERS),
        )

    def _body(self):
        warpgroup = lax.axis_index("warpgroup")
        batch, head, place = self.order.place(lax.axis_index("cta"))
        lengths = visibility.Lengths.read(self.refs, batch, self.sizes.t, self.sizes.s)
        column, bq = place * jnp.int32(_KEYS), self.config.block_q
        met = visibility.q_blocks(self.spec, lengths, column, _KEYS, bq, self.blocks)
        if self.segmented:
            met = met.meeting(*(self.refs["span"][batch, place, e] for e in (0, 1)))
        tile = _Tile(batch, head, place, lengths, met)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self._produce(tile)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self._consume(tile, warpgroup)

    def _slot(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    def _each_step(self, tile: _Tile, run, carry):
        """`run(head, block, step, carry)` for all query heads and blocks of queries."""
        group = self.sizes.group

        def one_head(g, carry):
            head = tile.head * jnp.int32(group) + g

            def one_block(i, carry):
                step = g * tile.met.blocks + i - tile.met.first
                return run(head, i, step, carry)

            return lax.fori_loop(tile.met.first, tile.met.end, one_block, carry)

        if group == 1:
            return one_head(jnp.int32(0), carry)
        return lax.fori_loop(jnp.int32(0), jnp.int32(group), one_head, carry)

    def _produce(self, tile: _Tile):
        refs = self.refs
        for w in range(_CONSUMERS):
            start = tile.place * jnp.int32(_KEYS) + jnp.int32(w * ROWS)
            at = tile.batch, pl.ds(start, ROWS), tile.head
            plgpu.copy_gmem_to_smem(refs["key"].at[at], refs["k_smem"].at[w], refs["kv_full"])
            plgpu.copy_gmem_to_smem(refs["value"].at[at], refs["v_smem"].at[w], refs["kv_full"])

        def load(head, i, step, _):
            slot = self._slot(step)
            rows = pl.ds(i * jnp.int32(self.config.block_q), self.config.block_q)
            pl.when(step >= self.config.stages)(lambda: plgpu.barrier_wait(refs["empty"].at[slot]))
            for array, vector, prefix in (("query", "lse", "q"), ("dout", "delta", "do")):
                full = refs[f"{prefix}_full"].at[slot]
                tile_rows = refs[array].at[tile.batch, rows, head]
                plgpu.copy_gmem_to_smem(tile_rows, refs[f"{prefix}_smem"].at[slot], full)
                vector_rows = refs[vector].at[tile.batch, head, rows]
                plgpu.copy_gmem_to_smem(vector_rows, refs[f"{vector}_smem"].at[slot], full)

        self._each_step(tile, load, None)

    def _together(self):
        plgpu.barrier_arrive(self.refs["together"])
        plgpu.barrier_wait(self.refs["together"])

    def _consume(self, tile: _Tile, warpgroup):
        refs, sizes = self.refs, self.sizes
        k_smem, v_smem = refs["k_smem"].at[warpgroup], refs["v_smem"].at[warpgroup]
        plgpu.barrier_wait(refs["kv_full"])
        if self.masked:  # a row that sees such a key has a NaN for lse, or for delta
            for ref in (k_smem, v_smem):
                self._make_finite(ref)
            plgpu.commit_smem()
            self._together()

        def sums(dk_ref, dv_ref):
            self._each_step(
                tile,
                lambda head, i, step, _: self._step(tile, warpgroup, head, i, step, dk_ref, dv_ref),
                None,
            )
            return dk_ref[...], dv_ref[...]

        dk, dv = pl.run_scoped(
            sums,
            plgpu.ACC((ROWS, sizes.hp), jnp.float32),
            plgpu.ACC((ROWS, sizes.hvp), jnp.float32),
        )
        self._together()  # the other one reads these keys, too
        k_smem[...] = (dk * self.spec.scale).astype(self.dtype)
        v_smem[...] = dv.astype(self.dtype)
        plgpu.commit_smem()
        start = tile.place * jnp.int32(_KEYS) + warpgroup * jnp.int32(ROWS)
        at = tile.batch, pl.ds(start, ROWS), tile.head
        plgpu.copy_smem_to_gmem(k_smem, refs["dk"].at[at])
        plgpu.copy_smem_to_gmem(v_smem, refs["dv"].at[at])
        plgpu.wait_smem_to_gmem(0)

    def _step(self, tile: _Tile, warpgroup, head, i, step, dk_ref, dv_ref):
        refs, spec, bq = self.refs, self.spec, self.config.block_q
        shape = (ROWS, bq)  # of scores: keys by queries
        slot = self._slot(step)
        q_smem, do_smem = refs["q_smem"].at[slot], refs["do_smem"].at[slot]
        k_smem, v_smem = refs["k_smem"].at[warpgroup], refs["v_smem"].at[warpgroup]
        row = i * jnp.int32(bq)
        partial = (i < tile.met.full_first) | (i >= tile.met.full_end)
        if "query_lengths" in refs:
            partial |= row + jnp.int32(bq) > tile.lengths.query
        if self.segmented:
            partial |= visibility.mixed(refs, tile.batch, tile.place, i)
        plgpu.barrier_wait(refs["q_full"].at[slot])
        if self.masked:
            plgpu.barrier_wait(refs["do_full"].at[slot])
            self._keep_from_masked(partial, warpgroup, (q_smem, do_smem))

        def weights_and_gradients(scores_ref, dweights_ref):
            plgpu.wgmma(scores_ref, k_smem, q_smem.transpose((1, 0)))
            if not self.masked:
                plgpu.barrier_wait(refs["do_full"].at[slot])
            plgpu.wgmma(dweights_ref, v_smem, do_smem.transpose((1, 0)))
            vector = lambda name: rows_of(
                plgpu.load(refs[name].at[slot], layout=WGMMA.reduce(0)), shape
            )
            lse, delta = vector("lse_smem"), vector("delta_smem")
            scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
            slope = None
            if spec.soft_cap is None:
                weights = jnp.exp2(scores * (spec.scale * LOG2E) - lse)
            else:
                tanh = jnp.tanh(scores * (spec.scale / spec.soft_cap))
                weights = jnp.exp2(tanh * (spec.soft_cap * LOG2E) - lse)
                slope = 1.0 - tanh * tanh
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)
            ds = weights * (dweights - delta)
            if slope is not None:
                ds = ds * slope
            if self.masked:
                mask = lambda *xs: self._mask(tile, warpgroup, row, shape, *xs)
                weights, ds = lax.cond(partial, mask, lambda *xs: xs, weights, ds)
            return weights.astype(self.dtype), ds.astype(self.dtype)

        acc = plgpu.ACC(shape, jnp.float32)
        weights, ds = pl.run_scoped(weights_and_gradients, acc, acc)
        ds_smem = refs["ds_smem"].at[lax.rem(step, jnp.int32(2))]
        ds_smem.at[warpgroup][...] = ds
        plgpu.commit_smem()
        plgpu.wgmma(dv_ref, weights, do_smem)
        self._together()
        # This consumer's part of the gradient of queries, [64, width].
        width = refs["dq_smem"].shape[2]
        part = warpgroup * jnp.int32(ROWS if self.by_rows else width)
        rows = pl.ds(part, ROWS) if self.by_rows else pl.ds(0, ROWS)
        columns = pl.ds(0, width) if self.by_rows else pl.ds(part, width)

        def query_gradient(dq_ref):
            for w in range(_CONSUMERS):
                keys = refs["k_smem"].at[w, :, columns]
                plgpu.wgmma(dq_ref, ds_smem.at[w, :, rows].transpose((1, 0)), keys)
            plgpu.wgmma(dk_ref, ds, q_smem)
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)

        dq = pl.run_scoped(query_gradient, plgpu.ACC((ROWS, width), jnp.float32))
        dq_smem = refs["dq_smem"].at[warpgroup]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        dq_smem[...] = dq
        plgpu.commit_smem()
        target_rows = pl.ds(row + (part if self.by_rows else jnp.int32(0)), ROWS)
        target = refs["dq"].at[tile.batch, target_rows, head, columns]
        plgpu.copy_smem_to_gmem(dq_smem, target, reduction_op="add")
        plgpu.wgmma_wait(0)
        plgpu.commit_smem()  # lse and delta were read past TMA
        plgpu.barrier_arrive(refs["empty"].at[slot])

    def _mask(self, tile: _Tile, warpgroup, row, shape, weights, ds):
        """Selects what a pair that is not visible has: nothing."""
        column = tile.place * jnp.int32(_KEYS) + warpgroup * jnp.int32(ROWS)
        parts = visibility.visible(
            self.spec, tile.lengths, row, column, shape, bounded=self.bounded, transposed=True
        )
        if self.segmented:
            load = lambda name, start, size, axis: plgpu.load(
                self.refs[name].at[tile.batch, pl.ds(start, size)],
                layout=WGMMA.reduce(axis),
                optimized=False,
            )
            kv_ids = load("kv_segments", column, ROWS, 1)
            q_ids = load("q_segments", row, shape[1], 0)
            parts.append(columns_of(kv_ids, shape) == rows_of(q_ids, shape))
        if not parts:
            return weights, ds
        seen = visibility.conjunction(parts)
        return jnp.where(seen, weights, 0.0), jnp.where(seen, ds, 0.0)

    def _parts(self, ref):
        """Squares of 64 by 64 of a tile, few enough registers at a time."""
        for row in range(0, ref.shape[0], 64):
            for column in range(0, ref.shape[1], 64):
                yield ref.at[pl.ds(row, 64), pl.ds(column, 64)]

    def _make_finite(self, ref):
        for part in self._parts(ref):
            x = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
            part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(self.dtype)

    def _keep_from_masked(self, partial, warpgroup, refs):
        """Puts 0 for what is not finite of queries and cotangents: 0 times NaN is NaN.

        A row of them that some key sees has a NaN for lse or delta. Where all is visible nothing
        need be done.
        """

        @pl.when(partial)
        def _():
            worst = jnp.float32(0)
            for ref in refs:
                for part in self._parts(ref):
                    x = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
                    bad = jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0)
                    worst = jnp.maximum(worst, jnp.max(bad.max(axis=1)))

            @pl.when(worst > 0)
            def _():
                self._together()  # both have looked

                @pl.when(warpgroup == 0)
                def _():
                    for ref in refs:
                        self._make_finite(ref)
                    plgpu.commit_smem()

                self._together()
