"""A consumer warpgroup of flash attention's backward on Hopper: scores, what is masked, results.

Tiles of scores are transposed, [keys, queries], and in units of log2.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops import mosaic_inline
from pallas_ops.attention import dropout
from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_bwd_turns import Turns
from pallas_ops.attention.mosaic_config import ROWS
from pallas_ops.attention.mosaic_scores import LOG2E
from pallas_ops.attention.mosaic_visibility import WGMMA, columns_of, rows_of

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_bwd import _Backward

# Columns of a part of the gradient of queries that one TMA copy adds.
PART = 64


class Tile(NamedTuple):
    batch: jax.Array
    head: jax.Array  # of keys and values
    place: jax.Array  # among the tiles of a head
    lengths: visibility.Lengths
    met: visibility.Range  # blocks of queries
    start: jax.Array  # steps of tiles that this block has done before
    number: jax.Array  # how many tiles those are


class Step(NamedTuple):
    """One block of queries of one query head."""

    head: jax.Array
    block: jax.Array
    row: jax.Array  # its first query
    number: jax.Array  # steps before this one
    partial: jax.Array  # whether anything in it may be masked


class Consumer:
    """What consumers have in common: 64 keys, the scores of a step, adding to gradients."""

    def __init__(self, kernel: "_Backward", warpgroup, tile: Tile, part):
        self.kernel, self.refs, self.spec = kernel, kernel.refs, kernel.spec
        self.warpgroup, self.tile, self.part = warpgroup, tile, part
        self.shape = (ROWS, kernel.config.block_q)
        self.acc = plgpu.ACC(self.shape, jnp.float32)
        self.turns = Turns(kernel, warpgroup, tile)
        # Scores start from lse, not from 0, if they are only scaled, by this.
        plain = self.spec.soft_cap is None and "bias" not in self.refs and self.spec.scale > 0
        self.unit = self.spec.scale * LOG2E if plain else None
        self.column = tile.place * jnp.int32(kernel.keys) + part * jnp.int32(ROWS)

    # Scores and their gradients.

    def scores_of(self, number, ref, *, ready: bool = False):
        """Issues K Q^T of a step, less lse; of the one after the last it is of no use."""

        def at(name: str):
            return self.refs[name].at[self.kernel.slot(name, self.tile, number)]

        if not ready:
            steps = self.kernel.steps(self.tile)
            exists = number < steps
            pl.when(exists)(lambda: plgpu.barrier_wait(at("q_full")))
            if self.kernel.config.blocks:  # what follows belongs to the next tile
                number = jnp.minimum(number, steps - 1)
        if self.unit is not None:
            lse = plgpu.load(at("lse_smem"), layout=WGMMA.reduce(0))
            ref[...] = rows_of(lse * (-1.0 / self.unit), self.shape)
        plgpu.wgmma(ref, self.fixed("k_smem", self.part), at("q_smem").transpose((1, 0)))
        return ref

    def weight_gradient(self, step: Step, ref):
        """Issues V dO^T of a step, less delta where no weight is dropped."""
        if "seeds" not in self.refs:
            ref[...] = rows_of(-self.row_vector("delta_smem", step), self.shape)
        do_smem = self.at("do_smem", step)
        plgpu.wgmma(ref, self.fixed("v_smem", self.part), do_smem.transpose((1, 0)))

    def first_scores(self, number: jax.Array | int = 0) -> jax.Array:
        return pl.run_scoped(lambda ref: self.scores_of(jnp.int32(number), ref)[...], self.acc)

    def weights(self, scores, step: Step) -> tuple[jax.Array, jax.Array]:
        """Weights of raw products [64, bq], as the left operand for values, and `slopes`.

        Both are 0 where masked. Slopes are weights times the soft cap's derivative, before dropout
        and in float32; they are negative where a weight is dropped.
        """
        spec, seen, slope = self.spec, [], None
        unit = spec.scale
        if "bias" in self.refs:
            bias = self.read_tile("bias", step).astype(jnp.float32)
            seen.append(bias != -jnp.inf)
            scores, unit = scores * unit + bias, 1.0
        if spec.soft_cap is not None:
            scores = jnp.tanh(scores * (unit / spec.soft_cap))
            slope, unit = 1.0 - scores * scores, spec.soft_cap
        scores = scores * (unit * LOG2E)
        if self.unit is None:
            scores = scores - rows_of(self.row_vector("lse_smem", step), self.shape)
        weights = slopes = jnp.exp2(self.masked(scores, seen, step))
        if slope is not None:
            slopes = slopes * slope
            if "bias" in self.refs:  # which may be NaN where masked
                slopes = jnp.where(weights == 0.0, 0.0, slopes)
        if "seeds" in self.refs:
            kept = self.kept(step)
            weights = jnp.where(kept, weights, 0.0)
            slopes = jnp.where(kept, slopes, -slopes)
        return self.operand(weights), slopes

    def row_vector(self, name: str, step: Step) -> jax.Array:
        """What of lse or delta belongs to the step's queries, [bq]."""
        return plgpu.load(self.at(name, step), layout=WGMMA.reduce(0))

    def at(self, name: str, step: Step):
        """The slot of a buffer or barrier that holds the step."""
        slot = self.kernel.slot(name, self.tile, step.number)
        return self.refs[name].at[slot]

    def fixed(self, name: str, part):
        """Keys, values or ds, by an index that the compiler takes to change.

        It would keep the addresses of all their tiles across steps, more than there are registers.
        """
        return self.refs[name].at[lax.optimization_barrier(jnp.int32(part))]

    def masked(self, scores, seen, step: Step) -> jax.Array:
        """-inf for what is not visible."""
        kernel, tile = self.kernel, self.tile
        if not kernel.masked:
            return scores
        if "mask" in self.refs:
            seen = [*seen, self.read_tile("mask", step).astype(jnp.int32) != 0]

        def mask(scores):
            parts = seen + visibility.visible(
                self.spec,
                tile.lengths,
                step.row,
                self.column,
                self.shape,
                bounded=kernel.bounded,
                transposed=True,
            )
            if kernel.segmented:
                parts.append(self.same_segment(step))
            if "query_lengths" in self.refs:
                rows = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=WGMMA) + step.row
                parts.append(rows < tile.lengths.query)
            return jnp.where(visibility.conjunction(parts), scores, -jnp.inf) if parts else scores

        if kernel.by_tile:
            return mask(scores)
        return lax.cond(step.partial, mask, lambda scores: scores, scores)

    def same_segment(self, step: Step) -> jax.Array:
        load = lambda name, start, size, axis: plgpu.load(
            self.refs[name].at[self.tile.batch, pl.ds(start, size)],
            layout=WGMMA.reduce(axis),
            optimized=False,
        )
        kv_ids = load("kv_segments", self.column, ROWS, 1)
        q_ids = load("q_segments", step.row, self.shape[1], 0)
        return columns_of(kv_ids, self.shape) == rows_of(q_ids, self.shape)

    def read_tile(self, name: str, step: Step) -> jax.Array:
        """The tile [64, bq] of an array [1|B, 1|N, 1|T, 1|S], or [1|B, 1|N, S, T]."""
        ref, shape = self.refs[name], self.shape
        batch, head = (
            0 if size == 1 else i for size, i in zip(ref.shape, (self.tile.batch, step.head))
        )
        ref = ref.at[batch, head]
        rows, columns = pl.ds(step.row, shape[1]), pl.ds(self.column, ROWS)
        load = lambda ref, layout: plgpu.load(ref, layout=layout, optimized=False)
        match self.refs[name].shape[2:]:
            case (1, 1):
                return jnp.full(shape, ref[0, 0])
            case (1, _):
                return columns_of(load(ref.at[0, columns], WGMMA.reduce(1)), shape)
            case (_, 1):
                return rows_of(load(ref.at[rows, 0], WGMMA.reduce(0)), shape)
            case _:
                return load(ref.at[columns, rows], WGMMA)

    def kept(self, step: Step) -> jax.Array:
        """Which weights dropout keeps."""
        iota = lambda size, axis: plgpu.broadcasted_iota(
            jnp.int32, (size,), 0, layout=WGMMA.reduce(axis)
        )
        seed = self.refs["seeds"][self.tile.batch, step.head]
        queries = dropout.row_hash(seed, iota(self.shape[1], 0) + step.row)
        keys = dropout.column_hash(iota(ROWS, 1) + self.column)
        return dropout.keep(
            rows_of(queries, self.shape), columns_of(keys, self.shape), self.spec.dropout_rate
        )

    def operand(self, x) -> jax.Array:
        """x as a product's left operand."""
        x = x.astype(self.kernel.dtype)
        return lax.optimization_barrier(x) if "seeds" in self.refs else x

    def score_gradient(self, slopes, dweights, tainted, step: Step) -> jax.Array:
        """Of scores after scale and bias [64, bq]."""
        ds = dweights
        if "seeds" in self.refs:
            ds = jnp.where(slopes < 0.0, 0.0, ds * self.kernel.kept_scale)
            ds = ds - rows_of(self.row_vector("delta_smem", step), self.shape)
            slopes = jnp.abs(slopes)
        if self.kernel.masked:
            # Before the product, which takes the registers of `slopes`.
            select = lambda ds: jnp.where(slopes == 0.0, 0.0, ds)
            ds = select(ds) if self.kernel.by_tile else lax.cond(tainted, select, lambda x: x, ds)
        return slopes * ds

    # What is not finite.

    def make_finite(self, *names: str):
        """Of keys or values: a row that sees one that is not has a NaN for lse or delta already."""
        if self.kernel.masked:
            refs = [self.fixed(name, self.part) for name in names]
            pl.when(self._any_not_finite(*refs))(lambda: self._make_finite(*refs))
            plgpu.commit_smem()
            self.kernel.together()

    def _any_not_finite(self, *refs) -> jax.Array:
        nothing = jnp.zeros((64, 64), refs[0].dtype)
        total = plgpu.layout_cast(nothing, WGMMA)
        for part in _squares(*refs):
            total += plgpu.load(part, layout=WGMMA) * jnp.asarray(0, refs[0].dtype)
        rows = total.astype(jnp.float32).sum(axis=1)
        scratch = self.refs["reduction_smem"].at[self.warpgroup]
        return mosaic_inline.reduce_rows("max", jnp.where(rows != rows, 1.0, 0.0), scratch) > 0

    def keep_from_masked(self, step: Step) -> jax.Array:
        """Puts 0 for what is not finite of queries and cotangents: 0 times NaN is NaN.

        A row of them that some key sees has a NaN for lse or delta. Where all is visible, or no row
        is suspect, nothing need be done. True if it was.
        """

        def check():
            suspect = self.refs["suspects"][self.tile.batch, step.head, step.block] > 0

            @pl.when(suspect)
            def _():
                self.kernel.together()  # both are done with what is read before

                @pl.when(self.warpgroup == 0)
                def _():
                    self._make_finite(self.at("q_smem", step), self.at("do_smem", step))
                    plgpu.commit_smem()

                self.kernel.together()

            return suspect

        return lax.cond(step.partial, check, lambda: jnp.bool_(False))

    def _make_finite(self, *refs):
        for part in _squares(*refs):
            x = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
            part[...] = jnp.where(jnp.abs(x) < jnp.inf, x, 0.0).astype(part.dtype)

    # Results.

    def add(self, x, staging, target):
        """Adds x to global memory, by way of `staging`."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, target, reduction_op="add")

    def add_query_gradient(self, dq, step: Step, first_row, first_column):
        """Adds dq [64, columns] at a place in the step's block."""
        rows, refs = pl.ds(step.row + first_row, ROWS), self.refs
        self.turns.wait(step)
        for part in range(0, dq.shape[1], PART):
            columns = pl.ds(first_column + jnp.int32(part), PART)
            target = refs["dq"].at[self.tile.batch, rows, step.head, columns]
            self.add(_columns(dq, part), refs["dq_smem"].at[self.warpgroup], target)

    def add_bias_gradient(self, ds, step: Step):
        """Adds ds [64, bq], summed over what bias broadcasts of rows or columns."""
        refs, (_, bq) = self.refs, self.shape
        if "dbias" not in refs:
            return
        self.turns.wait(step)
        keys, batch, head = pl.ds(self.column, ROWS), self.tile.batch, step.head
        match self.kernel.dbias_of:
            case "pairs":  # [1|B, 1|N, S, T]
                own = lambda i, size: 0 if size == 1 else i
                at = own(batch, refs["dbias"].shape[0]), own(head, refs["dbias"].shape[1])
                for part in range(0, bq, PART):
                    queries = pl.ds(step.row + jnp.int32(part), PART)
                    target = refs["dbias"].at[(*at, keys, queries)]
                    self.add(_columns(ds, part), refs["dq_smem"].at[self.warpgroup], target)
            case "keys":  # [B, N, S]
                staging = refs["vector_smem"].at[self.warpgroup]
                self.add(ds.sum(axis=1), staging, refs["dbias"].at[batch, head, keys])
            case "queries":  # [parts, B, N, T]
                staging = refs["vector_smem"].at[self.warpgroup]
                at = self.part, batch, head, pl.ds(step.row, bq)
                sums = mosaic_inline.reduce_rows(
                    "add", ds, refs["reduction_smem"].at[self.warpgroup]
                )
                self.add(sums, staging, refs["dbias"].at[at])

    def store_nothing(self):
        """Zeros, where no query meets these keys."""
        for name, width in (("dk", self.kernel.sizes.hp), ("dv", self.kernel.sizes.hvp)):
            self.store(jnp.zeros((ROWS, width), jnp.float32), name)

    def store(self, gradient, name: str):
        """Stores the gradient of keys ("dk") or values ("dv") by way of their place."""
        smem = self.fixed({"dk": "k_smem", "dv": "v_smem"}[name], self.part)
        smem[...] = gradient.astype(self.kernel.dtype)
        plgpu.commit_smem()
        # Computed once more: kept across the steps it would take registers.
        index = lax.optimization_barrier(self.tile.number)
        batch, head, place = self.kernel.shares.place(lax.axis_index("cta"), index)
        column = place * jnp.int32(self.kernel.keys) + self.part * jnp.int32(ROWS)
        plgpu.copy_smem_to_gmem(smem, self.refs[name].at[batch, pl.ds(column, ROWS), head])

    # Steps.

    def start(self):
        """Waits for keys and values; without a producer loads them and the first steps."""
        kernel, config = self.kernel, self.kernel.config
        if not config.producer:

            @pl.when(self.warpgroup == 0)
            def _():
                kernel.load_keys(self.tile)
                for which, stages in (("q", config.stages), ("do", config.do_stages)):
                    for number in range(stages):
                        load = functools.partial(kernel.load, which, self.tile, jnp.int32(number))
                        pl.when(number < kernel.steps(self.tile))(load)

        plgpu.barrier_wait(self.refs["kv_full"])

    def load(self, which: str, number):
        """Without a producer: a step, beyond those of the start, into a slot that is free."""
        config = self.kernel.config
        if not config.producer:
            stages = {"q": config.stages, "do": config.do_stages}[which]
            wanted = (number >= stages) & (number < self.kernel.steps(self.tile))
            load = lambda: self.kernel.load(which, self.tile, number)
            pl.when((self.warpgroup == 0) & wanted)(load)

    def release(self, step: Step, *names: str):
        """Gives slots back; what was read of them past TMA lies before a `commit_smem`."""
        if self.kernel.config.producer:
            for name in names:
                plgpu.barrier_arrive(self.at(name, step))

    def each_step(self, run, carry, first: jax.Array | int = 0):
        kernel, tile = self.kernel, self.tile
        one_step = lambda number, carry: run(kernel.step(tile, number), carry)
        lax.fori_loop(jnp.int32(first), kernel.steps(tile), one_step, carry)


def _squares(*refs) -> Iterator:
    """Parts of tiles by [64, 64], so that few registers are taken at a time."""
    for ref in refs:
        for row, column in itertools.product(*(range(0, size, 64) for size in ref.shape)):
            yield ref.at[pl.ds(row, 64), pl.ds(column, 64)]


def _columns(x, first: int) -> jax.Array:
    """One part of the columns of a tile."""
    return x if x.shape[1] == PART else x[:, first : first + PART]
