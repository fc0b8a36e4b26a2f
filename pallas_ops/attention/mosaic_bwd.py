"""Flash attention's backward on Hopper: one Pallas kernel with five products.

A block of the grid holds keys and values and streams queries and cotangents past them. Scores and
their gradients are computed transposed, [keys, queries], so that both stay in registers as left
operands of the products for values and keys; the gradients of queries are added into global memory
by TMA (Shah et al., "FlashAttention-3", arXiv:2407.08608).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention import mosaic_config, tiles
from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_bwd_consumer import PART, Step, Tile
from pallas_ops.attention.mosaic_bwd_schedule import ByKeys, ByRole
from pallas_ops.attention.mosaic_bwd_turns import Turns
from pallas_ops.attention.mosaic_config import READ_BY_TILE, ROWS, BackwardConfig, Sizes
from pallas_ops.attention.mosaic_scores import LOG2E
from pallas_ops.attention.mosaic_visibility import pad
from pallas_ops.attention.validate import Operands, Spec

_CONSUMERS = 2
# Of a head, in the size of sections where order matters: 16 heads make a section's 200 tiles.
_FEW_TILES = 13
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
    """Gradients of query, key, value, bias and sinks (or None), the last two unrounded."""
    sizes = Sizes.of(operands.query, operands.key, operands.value)
    # NaN where any is, else infinite where any is. With the sums in one pass over cotangents, which
    # XLA would take again for whatever becomes of either.
    largest = jnp.max(jnp.abs(dout), axis=3).astype(jnp.float32)
    delta = tiles.row_sums(operands.query.dtype, out, dout, lse, dlse)
    delta, largest = lax.optimization_barrier((delta, largest))
    dsinks = tiles.sink_gradient(operands, lse, delta)
    # Weights of a row that sees nothing are exp2(-inf). One whose cotangent is NaN passes it on.
    dead = lse == -jnp.inf
    if operands.query_lengths is not None:
        dead |= jnp.arange(sizes.t)[None, :, None] >= operands.query_lengths[:, None, None]
    rows = jnp.where(dead, jnp.inf, jnp.where(jnp.isnan(largest), jnp.nan, lse * LOG2E))
    delta = jnp.where(dead, 0, delta)
    suspects = _suspects(operands, lse, largest, delta, dead)
    kernel = _Backward(operands, dout, rows, delta, suspects, spec, config, sizes, bias_gradient)
    dq, dk, dv, *dbias = kernel()
    dq = (dq[:, : sizes.t, :, : sizes.h] * spec.scale).astype(operands.query.dtype)
    dk, dv = dk[:, : sizes.s, :, : sizes.h], dv[:, : sizes.s, :, : sizes.hv]
    return dq, dk, dv, kernel.bias_gradient(*dbias) if dbias else None, dsinks


def _suspects(operands: Operands, lse, largest, delta, dead) -> jax.Array:
    """Rows [B, T, N] of which query, cotangent or delta may not be finite.

    Where lse is finite the query is, too, if the row sees any key. One that sees none has -inf
    there, or the sink.
    """
    finite = jnp.isfinite(lse) & jnp.isfinite(delta) & jnp.isfinite(largest)
    if operands.sinks is not None:
        sinks = operands.sinks[:, None, :]
        finite &= jnp.abs(lse - sinks) > 1e-3 * (1 + jnp.abs(sinks))
    return jnp.logical_not(finite) | dead


class _Backward:
    """The kernel: what is static of it, and under `refs` the references that its body was given."""

    def __init__(
        self,
        operands: Operands,
        dout,
        lse,
        delta,
        suspects,
        spec: Spec,
        config: BackwardConfig,
        sizes: Sizes,
        bias_gradient: bool,
    ):
        self.spec, self.config, self.sizes = spec, config, sizes
        self.dtype = operands.query.dtype
        # Keys lie in one part for each consumer, or in one part for both.
        self.parts = 1 if sizes.by_role else _CONSUMERS
        self.keys = self.parts * ROWS
        self.blocks = -(-sizes.t // config.block_q)
        self.tiles = -(-sizes.s // self.keys)
        # Each consumer computes 64 queries' gradient, or a part of its columns.
        self.by_rows = config.block_q == _CONSUMERS * ROWS
        # Additions come a step late, so that neither consumer waits for the other. Not where the
        # first of them loads what both are done with, nor where the order of additions to two
        # gradients is that of steps.
        ordered = spec.deterministic and bias_gradient
        self.lag = int(config.producer and not sizes.by_role and not ordered)
        self.producer_takes_turns = spec.deterministic and config.producer and not bias_gradient
        self.stages = min(config.stages, config.do_stages)  # between loads and their use
        # Towards the diagonal where order matters: tiles that start together then meet a block at
        # the same time or later than those that add to it before.
        self.descending = spec.deterministic and spec.right is not None
        # Whether consumers' keys may differ in which of the tile's first steps they see.
        narrow = config.block_q < self.keys
        self.uneven = bool(self.lag) and narrow and spec.right is not None and not self.descending
        self.kept_scale = 1.0 if operands.seeds is None else 1.0 / (1.0 - spec.dropout_rate)
        self.inputs = self._inputs(operands, dout, lse, delta)
        self.segmented = "span" in self.inputs
        self.by_tile = any(name in self.inputs for name in READ_BY_TILE)
        self.bounded = "kv_lengths" in self.inputs or sizes.s % self.keys != 0
        banded = mosaic_config.banded(spec)
        self.masked = (
            banded
            or self.bounded
            or self.segmented
            or self.by_tile
            or "query_lengths" in self.inputs
        )
        if self.masked:
            suspects = pad(suspects.astype(jnp.int32).transpose(0, 2, 1), {2: config.block_q})
            suspects = suspects.reshape(sizes.b, sizes.n, self.blocks, config.block_q)
            self.inputs["suspects"] = suspects.max(axis=3)
        kv_heads = sizes.n // sizes.group
        head_bytes = 2 * sizes.t * sizes.group * (sizes.h + sizes.hv)
        # Where order matters tiles of a head that run together start one after the other: more
        # heads share the card, as if they had few tiles.
        tiles = min(self.tiles, _FEW_TILES) if spec.deterministic else self.tiles
        section = visibility.section_of(sizes.b * kv_heads, 1, head_bytes, tiles)
        section = section if banded or spec.deterministic else 1
        order = visibility.Order(sizes.b, kv_heads, self.tiles, section, descending=False)
        self.shares = visibility.Shares.of(order, config.blocks, banded=banded)
        self.bias = operands.bias if bias_gradient else None
        self.refs: dict[str, Any] = {}

    def _inputs(self, operands: Operands, dout, lse, delta) -> dict[str, jax.Array]:
        """By name, padded to what is read in one go."""
        lines, rows = {1: 8, 3: 64}, {2: self.config.block_q}
        inputs = {
            "query": pad(operands.query, lines),
            "key": pad(operands.key, lines),
            "value": pad(operands.value, lines),
            "dout": pad(dout.astype(self.dtype), lines),
            "lse": pad(lse.transpose(0, 2, 1), rows, constant_values=jnp.inf),
            "delta": pad(delta.transpose(0, 2, 1), rows),
        }
        for name in ("q_offset", "query_lengths", "kv_lengths", "seeds"):
            if getattr(operands, name) is not None:
                inputs[name] = getattr(operands, name)
        whole = {2: self.config.block_q, 3: self.keys}
        for name in READ_BY_TILE:
            x = getattr(operands, name)
            if x is not None:
                x = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
                x = pad(x, {axis: n for axis, n in whole.items() if x.shape[axis] > 1})
                # Tiles are read in the order of scores' registers, which are transposed.
                inputs[name] = x.swapaxes(2, 3) if 1 not in x.shape[2:] else x
        if operands.q_segments is not None and operands.kv_segments is not None:
            q = pad(operands.q_segments, {1: self.config.block_q}, mode="edge")
            kv = pad(operands.kv_segments, {1: self.keys}, mode="edge")
            inputs |= {"q_segments": q, "kv_segments": kv}
            inputs |= visibility.segment_tables(kv, q, self.keys, self.config.block_q)
        if self.spec.deterministic:
            inputs["turns"] = self._turns(inputs)
        return inputs

    def _met(self, refs, batch, place) -> tuple[visibility.Lengths, visibility.Range]:
        """Lengths of a batch row and the blocks of queries that a tile of keys meets."""
        sizes, bq = self.sizes, self.config.block_q
        lengths = visibility.Lengths.read(refs, batch, sizes.t, sizes.s)
        column = place * jnp.int32(self.keys)
        met = visibility.q_blocks(self.spec, lengths, column, self.keys, bq, self.blocks)
        if "span" in refs:
            met = met.meeting(*(refs["span"][batch, place, e] for e in (0, 1)))
        return lengths, met

    def _turns(self, inputs) -> jax.Array:
        """How many tiles of keys before one meet a block of queries, int32 [B, tiles, blocks]."""
        block = jnp.arange(self.blocks, dtype=jnp.int32)

        def meets(batch, place):
            _, met = self._met(inputs, batch, place)
            return ((met.first <= block) & (block < met.end)).astype(jnp.int32)

        over_tiles = jax.vmap(meets, in_axes=(None, 0))
        batches, places = (jnp.arange(n, dtype=jnp.int32) for n in (self.sizes.b, self.tiles))
        met = jax.vmap(over_tiles, in_axes=(0, None))(batches, places)
        return lax.associative_scan(jnp.add, met, axis=1) - met

    @property
    def dbias_of(self) -> str | None:
        """What the gradient of bias is summed for in the kernel: pairs, or only keys or queries."""
        if self.bias is None:
            return None
        t, s = self.bias.shape[2:]
        return "keys" if t == 1 else "queries" if s == 1 else "pairs"

    def _dbias_shape(self) -> tuple[int, ...]:
        assert self.bias is not None
        sizes, lengths = self.sizes, (self.tiles * self.keys, self.blocks * self.config.block_q)
        match self.dbias_of:
            case "keys":
                return sizes.b, sizes.n, lengths[0]
            case "queries":
                return self.parts, sizes.b, sizes.n, lengths[1]
            case _:
                return *self.bias.shape[:2], *lengths

    def bias_gradient(self, sums: jax.Array) -> jax.Array:
        """What the kernel has summed, brought into the shape of bias."""
        assert self.bias is not None
        match self.dbias_of:
            case "keys":
                sums = sums[:, :, None, : self.sizes.s]
            case "queries":
                sums = sums.sum(axis=0)[:, :, : self.sizes.t, None]
            case _:
                sums = sums[:, :, : self.sizes.s, : self.sizes.t].swapaxes(2, 3)
        axes = tuple(i for i, d in enumerate(self.bias.shape) if d == 1 != sums.shape[i])
        return sums.sum(axis=axes, keepdims=True)

    def __call__(self) -> list[jax.Array]:
        """Gradients of queries, float32 and unscaled, keys, values, in whole lines, and bias."""
        inputs, scratch = self.inputs, self._scratch()
        sums = {"dq": jax.new_ref(jnp.zeros(inputs["query"].shape, jnp.float32))}
        if self.bias is not None:
            sums["dbias"] = jax.new_ref(jnp.zeros(self._dbias_shape(), jnp.float32))

        def body(*refs):
            self.refs = dict(zip((*inputs, *sums, "dk", "dv", *scratch), refs, strict=True))
            self._body()

        run = plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct(inputs[name].shape, self.dtype) for name in ("key", "value")
            ],
            grid=(self.shares.ctas,),
            grid_names=("cta",),
            num_threads=_CONSUMERS + self.config.producer,
            thread_name="warpgroup",
            scratch_types=list(scratch.values()),
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        dk, dv = run(*inputs.values(), *sums.values())
        dq, *dbias = (jax.freeze(ref) for ref in sums.values())
        return [dq, dk, dv, *dbias]

    def _scratch(self) -> dict[str, Any]:
        sizes, config, parts = self.sizes, self.config, self.parts
        bq, stages, do_stages = config.block_q, config.stages, config.do_stages
        tile = lambda *shape: plgpu.SMEM(shape, self.dtype, transforms=_SWIZZLE)
        scratch = dict(
            q_smem=tile(stages, bq, sizes.hp),
            do_smem=tile(do_stages, bq, sizes.hvp),
            k_smem=tile(parts, ROWS, sizes.hp),
            v_smem=tile(parts, ROWS, sizes.hvp),
            dq_smem=plgpu.SMEM((_CONSUMERS, ROWS, PART), jnp.float32, transforms=_SWIZZLE_32),
            lse_smem=plgpu.SMEM((stages, bq), jnp.float32),
            delta_smem=plgpu.SMEM((do_stages, bq), jnp.float32),
            kv_full=plgpu.Barrier(num_arrivals=2 * parts),
            q_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            do_full=plgpu.Barrier(num_arrivals=2, num_barriers=do_stages),
            together=plgpu.Barrier(num_arrivals=_CONSUMERS),
        )
        if config.producer:
            barriers = lambda count: plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=count)
            scratch |= dict(q_empty=barriers(stages), do_empty=barriers(do_stages))
        if config.blocks:
            scratch["kv_empty"] = plgpu.Barrier(num_arrivals=_CONSUMERS)
        if self.producer_takes_turns:
            scratch["turn"] = plgpu.Barrier(num_barriers=2)
            scratch["added"] = plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2)
        if sizes.by_role:
            scratch |= dict(p_smem=tile(ROWS, bq), ds_smem=tile(1, ROWS, bq))
            scratch |= dict(p_full=plgpu.Barrier(), ds_full=plgpu.Barrier())
        else:
            barriers = plgpu.Barrier(num_barriers=2 * parts)
            scratch |= dict(ds_smem=tile(2 * parts, ROWS, bq), ds_full=barriers, ds_empty=barriers)
            scratch["products"] = plgpu.Barrier(num_barriers=parts)
        if self.dbias_of in ("keys", "queries"):
            size = ROWS if self.dbias_of == "keys" else bq
            scratch["vector_smem"] = plgpu.SMEM((_CONSUMERS, size), jnp.float32)
        if self.masked or self.dbias_of == "queries":
            size = 512 if self.dbias_of == "queries" else 128
            scratch["reduction_smem"] = plgpu.SMEM((_CONSUMERS, size), jnp.float32)
        return scratch

    def _body(self):
        warpgroup = lax.axis_index("warpgroup")
        if self.spec.deterministic:
            counts = self.sizes.b * self.sizes.n * self.blocks * _CONSUMERS
            self.refs["done"] = pl.get_global(plgpu.SemaphoreType.REGULAR((counts,)))

        def consume(tile: Tile):
            if self.sizes.by_role:
                consumer = ByRole(self, warpgroup, tile)
                pl.when(warpgroup == 0)(consumer.run_values)
                pl.when(warpgroup == 1)(consumer.run_keys)
            else:
                ByKeys(self, warpgroup, tile).run()

        if not self.config.producer:
            self._each_tile(consume)
            return

        registers = mosaic_config.registers(_CONSUMERS)

        @pl.when(warpgroup == _CONSUMERS)
        def _():
            plgpu.set_max_registers(registers[1], action="decrease")
            self._each_tile(self._produce)

        @pl.when(warpgroup < _CONSUMERS)
        def _():
            plgpu.set_max_registers(registers[0], action="increase")
            self._each_tile(consume)

    def _each_tile(self, run: Callable[[Tile], None]):
        """Of those that this block takes."""
        cta = lax.axis_index("cta")

        def one_tile(index, start):
            batch, head, place = self.shares.place(cta, index)
            tile = Tile(batch, head, place, *self._met(self.refs, batch, place), start, index)
            run(tile)
            return start + self.steps(tile)

        if self.config.blocks:
            lax.fori_loop(jnp.int32(0), self.shares.count(cta), one_tile, jnp.int32(0))
        else:
            one_tile(jnp.int32(0), jnp.int32(0))

    def slot(self, name: str, tile: Tile, number):
        """Where in a buffer or barrier, "q_..." or "do_...", a step of a tile lies."""
        by_q = name.startswith(("q_", "lse"))
        stages = self.config.stages if by_q else self.config.do_stages
        return lax.rem(tile.start + number, jnp.int32(stages))

    def steps(self, tile: Tile):
        """Of all query heads and blocks of queries."""
        return jnp.int32(self.sizes.group) * tile.met.blocks

    def step(self, tile: Tile, number) -> Step:
        group, met, bq = self.sizes.group, tile.met, jnp.int32(self.config.block_q)
        head, block = tile.head, number
        if group > 1:
            # Integers divided by what is not constant are a call where kernels are assembled
            # relocatably, and calls make products wait for each other. Exact below 2^20 steps.
            member = (number.astype(jnp.float32) + 0.5) * (1.0 / met.blocks.astype(jnp.float32))
            member = member.astype(jnp.int32)
            head = head * jnp.int32(group) + member
            block = number - member * met.blocks
        block = met.end - jnp.int32(1) - block if self.descending else met.first + block
        partial = (block < met.full_first) | (block >= met.full_end)
        if "query_lengths" in self.refs:
            partial |= (block + jnp.int32(1)) * bq > tile.lengths.query
        if self.segmented:
            partial |= visibility.mixed(self.refs, tile.batch, tile.place, block)
        if self.by_tile:
            partial = jnp.bool_(True)
        return Step(head, block, block * bq, number, partial)

    # Loads: of the producer, or of the first consumer.

    def load_keys(self, tile: Tile):
        refs = self.refs
        for w in range(self.parts):
            start = tile.place * jnp.int32(self.keys) + jnp.int32(w * ROWS)
            at = tile.batch, pl.ds(start, ROWS), tile.head
            plgpu.copy_gmem_to_smem(refs["key"].at[at], refs["k_smem"].at[w], refs["kv_full"])
            plgpu.copy_gmem_to_smem(refs["value"].at[at], refs["v_smem"].at[w], refs["kv_full"])

    def load(self, which: str, tile: Tile, number):
        """Queries and lse ("q"), or cotangents and delta ("do"), of a step."""
        refs, step = self.refs, self.step(tile, number)
        array, vector = {"q": ("query", "lse"), "do": ("dout", "delta")}[which]
        slot, rows = self.slot(f"{which}_", tile, number), pl.ds(step.row, self.config.block_q)
        full = refs[f"{which}_full"].at[slot]
        source = refs[array].at[tile.batch, rows, step.head]
        plgpu.copy_gmem_to_smem(source, refs[f"{which}_smem"].at[slot], full)
        source = refs[vector].at[tile.batch, step.head, rows]
        plgpu.copy_gmem_to_smem(source, refs[f"{vector}_smem"].at[slot], full)

    def _produce(self, tile: Tile):
        steps, turns = self.steps(tile), Turns(self, None, tile)
        # Where blocks stay the first steps of a tile come before its keys, which wait for the end
        # of the tile before.
        ahead = jnp.minimum(steps, self.stages)

        def load_keys():
            plgpu.barrier_wait(self.refs["kv_empty"])
            self.load_keys(tile)

        if self.config.blocks:
            pl.when(steps == 0)(load_keys)
        else:
            self.load_keys(tile)

        def load(number):
            for which, stages in (("q", self.config.stages), ("do", self.config.do_stages)):
                empty = self.refs[f"{which}_empty"].at[self.slot(f"{which}_", tile, number)]
                again = tile.start + number >= stages
                pl.when(again)(lambda empty=empty: plgpu.barrier_wait(empty))
                self.load(which, tile, number)
            if self.config.blocks:
                pl.when(number == ahead - 1)(load_keys)

        def one_step(number, _):
            if not self.producer_takes_turns:
                load(number)
            else:
                pl.when(number < steps)(lambda: load(number))
                turns.serve(number)

        lax.fori_loop(jnp.int32(0), steps + jnp.int32(turns.after_loads), one_step, None)

    def together(self):
        """A barrier of the consumers."""
        plgpu.barrier_arrive(self.refs["together"])
        plgpu.barrier_wait(self.refs["together"])
