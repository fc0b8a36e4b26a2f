"""A consumer warpgroup of flash attention's forward on Hopper: its products, and in what order."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops import mosaic_inline
from pallas_ops.attention.mosaic_config import ROWS
from pallas_ops.attention.mosaic_scores import LOG2E, LOW, MOST, UNSEEN, Scores, Tile, row_vector
from pallas_ops.attention.mosaic_visibility import WGMMA, columns_of

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_fwd import _Forward

# Two numbers whose product no sum of weights, each at most 1, times values comes near.
_MARKS = {jnp.dtype(jnp.bfloat16): (1.0, 2.0**127), jnp.dtype(jnp.float16): (65504.0, 65504.0)}


class Steps(NamedTuple):
    """How many blocks of keys and of values went through shared memory before."""

    k: jax.Array
    v: jax.Array

    @classmethod
    def of(cls, step, start, repeats: int) -> "Steps":
        """After `step` blocks of keys; each of values comes so often in the pass since `start`."""
        return cls(step, start + (step - start) * jnp.int32(repeats) if repeats > 1 else step)


class Consumer(Scores):
    """One warpgroup's 64 queries of a tile."""

    def __init__(self, kernel: "_Forward", warpgroup, tile: Tile, steps: Steps, repeats: int):
        super().__init__(kernel, warpgroup, tile)
        self.warpgroup, self.steps = warpgroup, steps
        self.repeats = {"k": 1, "v": repeats}
        self.acc_shape = (ROWS, kernel.sizes.hvp)

    def at(self, name: str, i):
        """The slot of a buffer or barrier, "k_..." or "v_...", that holds the tile's i-th load."""
        return self.refs[name].at[self.kernel.slot(getattr(self.steps, name[0]) + i)]

    def multiply_keys(self, scores_ref, k):
        for (first, width), name in zip(self.kernel.q_parts, ("q_smem", "q_rest_smem")):
            keys = self.at("k_smem", k).at[:, pl.ds(first, width)]
            plgpu.wgmma(scores_ref, self.refs[name].at[self.warpgroup], keys.transpose((1, 0)))

    def start(self, k):
        """Scores of a block with nothing else in flight."""

        def product(scores_ref):
            plgpu.barrier_wait(self.at("k_full", k))
            self.multiply_keys(scores_ref, k)
            return scores_ref[...]

        scores = self.scores(pl.run_scoped(product, plgpu.ACC(self.shape, jnp.float32)), k)
        plgpu.barrier_arrive(self.at("k_empty", k))
        return scores

    def product_with_values(self, acc, weights, k):
        def product(acc_ref):
            acc_ref[...] = acc
            plgpu.wgmma(acc_ref, weights, self.at("v_smem", k))
            return plgpu.wgmma_accumulator_load(acc_ref)

        return pl.run_scoped(product, plgpu.ACC(self.acc_shape, jnp.float32))

    def load_first(self):
        """Without a producer: queries and the first steps of keys and values."""
        config = self.kernel.config
        if config.producer:
            return

        @pl.when(self.warpgroup == 0)
        def _():
            for w in range(config.consumers):
                pl.when(self.steps.k > 0)(
                    lambda w=w: plgpu.barrier_wait(self.refs["q_empty"].at[w])
                )
                self.kernel.load_queries(self.tile, w)
            for k in range(config.stages):
                self.load_later("k", jnp.int32(k))
                self.load_later("v", jnp.int32(k))

    def load_later(self, which: str, i):
        """Without a producer: one more block into the slot of one that all are done with."""
        if not self.kernel.config.producer:
            repeats = self.repeats[which]
            wanted = (self.warpgroup == 0) & (i < self.tile.met.blocks * jnp.int32(repeats))
            load = lambda: self.kernel.load(which, self.tile, i, self.steps, repeats)
            pl.when(wanted)(load)

    def attend(self):
        """Sums over all blocks: weights times values [64, hvp], maxima and sums of weights [64].

        They are NaN where scores rise by more than float32 has room for.
        """
        self.load_first()
        first, last = (
            self.tile.met.end - end for end in (self.met.end, self.met.first + jnp.int32(1))
        )
        self.pass_over(jnp.int32(0), first)
        sums = self.follow(first + jnp.int32(1), last + jnp.int32(1), self.open(first))
        self.release_queries(early=True)
        acc, top, total = self.close(sums, last)
        self.pass_over(last + jnp.int32(1), self.tile.met.blocks)
        return acc, top, total

    def open(self, k) -> tuple:
        """The sums of nothing, and maxima, sums and weights of a block with nothing in flight."""
        plgpu.barrier_wait(self.refs["q_full"].at[self.warpgroup])
        scores = self.start(k)
        top = self.first_top(scores, self.nothing()[0])
        weights, total = self.weights(scores, top)
        return self.no_sums(), top, total, self.dropped(weights, k)

    def no_sums(self):
        return plgpu.layout_cast(jnp.zeros(self.acc_shape, jnp.float32), WGMMA)

    def close(self, sums, k):
        """Adds the product of the last block, with nothing else in flight."""
        acc, top, total, weights = sums
        plgpu.barrier_wait(self.at("v_full", k))
        acc = self.product_with_values(acc, weights, k)
        plgpu.barrier_arrive(self.at("v_empty", k))
        return acc, top, total

    def follow(self, start, end, sums, store: Callable | None = None, suspect=None):
        """Blocks [start, end): the scores of each beside the product of the one before it.

        With `store` block 0 follows the last one of the tile before, which `sums` are of. When they
        are whole `store` takes them, and `suspect`, of which it returns what is known then.
        """
        stages, chained = jnp.int32(self.kernel.config.stages), store is not None

        def one_block(k, carry):
            acc, top, total, weights, *suspect = carry
            opens = k == 0
            if "seeds" in self.refs:
                weights = lax.optimization_barrier(weights)

            def products(scores_ref, acc_ref):
                acc_ref[...] = acc
                if chained:
                    q_full = self.refs["q_full"].at[self.warpgroup]
                    pl.when(opens)(lambda: plgpu.barrier_wait(q_full))
                plgpu.barrier_wait(self.at("k_full", k))
                self.multiply_keys(scores_ref, k)
                plgpu.barrier_wait(self.at("v_full", k - 1))
                plgpu.wgmma(acc_ref, weights, self.at("v_smem", k - 1))
                self.load_later("k", k - 1 + stages)
                pl.when(k > 1)(lambda: self.load_later("v", k - 2 + stages))
                scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1)
                plgpu.barrier_arrive(self.at("k_empty", k))
                if chained:
                    pl.when(k == end - 1)(lambda: self.release_queries(early=True))
                scores = self.scores(scores, k)
                old_top = new_top = top
                if chained:
                    unseen = functools.partial(row_vector, UNSEEN)
                    old_top = lax.cond(opens, unseen, lambda: top)
                low = opens if chained else False
                if self.kernel.masked:
                    low = mosaic_inline.any_above(-old_top, -LOW, WGMMA.reduce(1))
                if self.kernel.masked or chained:
                    first_top = functools.partial(self.first_top, scores, old_top)
                    new_top = lax.cond(low, first_top, lambda: old_top)
                new_weights, sums = self.weights(scores, new_top)
                risen = mosaic_inline.any_above(sums, MOST[self.kernel.dtype], WGMMA)
                new_acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                plgpu.barrier_arrive(self.at("v_empty", k - 1))
                go_on = lambda: lax.cond(
                    risen | low,
                    lambda: self.raised(new_acc, top, total, new_top, new_weights, sums),
                    lambda: (new_acc, top, total + sums, new_weights),
                )
                if store is None:
                    return go_on()
                found = functools.partial(store, new_acc, top, total, *suspect)
                go_over = lambda: (self.no_sums(), new_top, sums, new_weights, found())
                return lax.cond(opens, go_over, lambda: (*go_on(), *suspect))

            acc_type = plgpu.ACC(self.acc_shape, jnp.float32)
            acc, top, total, weights, *suspect = pl.run_scoped(
                products, plgpu.ACC(self.shape, jnp.float32), acc_type
            )
            return acc, top, total, self.dropped(weights, k), *suspect

        carry = (*sums, suspect) if chained else sums
        return lax.fori_loop(start, end, one_block, carry)

    def pass_over(self, start, end):
        """Gives back blocks [start, end) of the tile's, which only other consumers' rows see."""
        if not self.kernel.uneven:
            return

        def one_block(k, _):
            for which in ("k", "v"):
                plgpu.barrier_wait(self.at(f"{which}_full", k))
                plgpu.barrier_arrive(self.at(f"{which}_empty", k))

        lax.fori_loop(start, end, one_block, None)

    def attend_guarded(self):
        """As `attend`, by the maximum of each step.

        Values that are not finite are kept from what gives them no weight.
        """
        self.load_first()
        stages = jnp.int32(self.kernel.config.stages)
        plgpu.barrier_wait(self.refs["q_full"].at[self.warpgroup])

        def one_block(k, carry):
            acc, top, total = carry
            scores = self.start(k)
            self.load_later("k", k + stages)
            new_top = jnp.maximum(top, (scores * self.unit).max(axis=1))
            rescale, top = jnp.exp2(top - new_top), new_top
            weights, sums = self.weights(scores, top)
            total = total * columns_of(rescale, total.shape) + sums
            weights = self.dropped(weights, k)
            acc = acc * columns_of(rescale, self.acc_shape)
            if not self.kernel.hiding:
                return self.product_with_changed(acc, weights, k), top, total
            # The values come twice: with 0 for what is not finite, and with a huge number for that
            # and 0 for the rest, where whatever has weight is marked by it and becomes NaN.
            first, second = k * jnp.int32(2), k * jnp.int32(2) + jnp.int32(1)
            acc = self.product_with_changed(acc, weights, first, lambda x: (x, 0.0))
            weight, huge = _MARKS[self.kernel.dtype]
            marked = jnp.where(weights.astype(jnp.float32) != 0.0, weight, 0.0)
            marked = marked.astype(weights.dtype)
            acc = self.product_with_changed(acc, marked, second, lambda x: (0.0, huge))
            return jnp.where(acc > weight * huge / 2, jnp.nan, acc), top, total

        carry = self.no_sums(), *self.nothing()
        sums = lax.fori_loop(jnp.int32(0), self.tile.met.blocks, one_block, carry)
        self.release_queries(early=True)
        return sums

    def product_with_changed(
        self, acc, weights, k, change: Callable[[jax.Array], tuple] | None = None
    ):
        """Adds the product with values, changed to the one where finite, to the other where not."""
        values = self.at("v_smem", k)
        plgpu.barrier_wait(self.at("v_full", k))

        def change_rows(i, _):
            assert change is not None
            for column in range(0, values.shape[1], 64):
                part = values.at[pl.ds(i * jnp.int32(64), 64), pl.ds(column, 64)]
                old = plgpu.load(part, layout=WGMMA).astype(jnp.float32)
                finite, other = change(old)
                part[...] = jnp.where(jnp.abs(old) < jnp.inf, finite, other).astype(part.dtype)

        def change_all():
            lax.fori_loop(jnp.int32(0), jnp.int32(values.shape[0] // 64), change_rows, None)
            plgpu.commit_smem()

        if change is not None:
            pl.when(self.warpgroup == 0)(change_all)
            self.together()
        acc = self.product_with_values(acc, weights, k)
        plgpu.barrier_arrive(self.at("v_empty", k))
        self.load_later("v", k + jnp.int32(self.kernel.config.stages))
        return acc

    def together(self):
        plgpu.barrier_arrive(self.refs["together"])
        plgpu.barrier_wait(self.refs["together"])

    def release_queries(self, *, early: bool):
        """Where results take their place, queries are held until those are stored."""
        if early != self.kernel.shares_output:
            plgpu.barrier_arrive(self.refs["q_empty"].at[self.warpgroup])

    def finish(self, acc, top, total) -> jax.Array:
        """Stores output and lse; returns the output [64, hvp], float32."""
        total = total.sum(axis=1)
        if "query_lengths" in self.refs:
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=WGMMA.reduce(1))
            outside = rows >= self.tile.lengths.query - self.row
            top, total = jnp.where(outside, UNSEEN, top), jnp.where(outside, 0.0, total)
        empty = total == 0.0
        if "sinks" in self.refs:  # one more key, whose value is 0
            sink = self.refs["sinks"][0, self.tile.head] * LOG2E
            new_top = jnp.maximum(top, sink)
            rescale = jnp.exp2(top - new_top)
            total = total * rescale + jnp.exp2(sink - new_top)
            acc, top = acc * columns_of(rescale, acc.shape), new_top
        kept = 1.0 - self.spec.dropout_rate if "seeds" in self.refs else 1.0
        inverse = 1.0 / (jnp.where(empty, 1.0, total) * kept)
        lse = jnp.where(total == 0.0, -jnp.inf, top * (1 / LOG2E) + jnp.log(total))
        out = acc * columns_of(inverse, acc.shape)
        if self.kernel.masked or "query_lengths" in self.refs:  # whatever its products with 0 are
            out = jnp.where(columns_of(empty, acc.shape), 0.0, out)
        # By an index that the compiler takes to change: it would keep addresses across the loop.
        o_smem = self.refs["o_smem"].at[lax.optimization_barrier(self.warpgroup)]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        o_smem[...] = out.astype(self.kernel.dtype)
        plgpu.commit_smem()
        batch, head, rows = self.tile.batch, self.tile.head, pl.ds(self.row, ROWS)
        target = self.refs["out"].at[batch, rows, head]
        plgpu.copy_smem_to_gmem(o_smem, target)
        self.refs["lse"].at[batch, head, rows][...] = lse
        if self.kernel.shares_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.release_queries(early=False)
        return out
