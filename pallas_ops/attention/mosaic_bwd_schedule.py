"""Who computes what in flash attention's backward on Hopper: a step's five products in order."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_bwd_consumer import PART, Consumer, Step, Tile
from pallas_ops.attention.mosaic_config import ROWS
from pallas_ops.attention.mosaic_visibility import WGMMA

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_bwd import _Backward


class ByKeys(Consumer):
    """One of two that own 64 keys each, and a half of the gradient of the step's queries each.

    The gradient of a step's queries, which needs both, comes a step later, so that neither waits
    for the other.
    """

    def __init__(self, kernel: "_Backward", warpgroup, tile: Tile):
        super().__init__(kernel, warpgroup, tile, part=warpgroup)
        self.other = jnp.int32(1) - warpgroup
        self.lag = kernel.lag
        # Whether they issue most products one after the other, so that one computes beside the
        # other's; together they would both issue, and then both compute. At 128 columns the card
        # draws all the power it may either way.
        self.in_turns = bool(self.lag) and kernel.by_rows
        # This consumer's part of the gradient of queries, [64, width].
        self.width = kernel.sizes.hp if kernel.by_rows else kernel.sizes.hp // 2
        start = warpgroup * jnp.int32(ROWS if kernel.by_rows else self.width)
        self.start_of_part = (start, 0) if kernel.by_rows else (0, start)

    def run(self):
        if self.kernel.config.blocks:  # what was stored of the tile before has been read
            plgpu.barrier_arrive(self.refs["kv_empty"])
        self.start()
        some = self.tile.met.blocks > 0
        pl.when(some)(self.run_steps)
        pl.when(jnp.logical_not(some))(self.store_nothing)
        self.turns.finish()

    def run_steps(self):
        self.make_finite("k_smem", "v_smem")
        sizes = self.kernel.sizes

        def sums(dk_ref, dv_ref):
            first = self.pass_over()
            scores = self.first_scores(first)
            if self.in_turns:
                pl.when(self.warpgroup == 1)(self.pass_products)
            self.each_step(lambda step, raw: self.step(step, raw, dk_ref, dv_ref), scores, first)
            if self.in_turns:
                pl.when(self.warpgroup == 0)(self.await_products)
            return dk_ref[...], dv_ref[...]

        accumulator = lambda width: plgpu.ACC((ROWS, width), jnp.float32)
        dk, dv = pl.run_scoped(sums, accumulator(sizes.hp), accumulator(sizes.hvp))
        if self.lag:
            last = self.kernel.step(self.tile, self.kernel.steps(self.tile) - jnp.int32(1))
            dq = pl.run_scoped(lambda ref: self.query_gradient(last, ref)[...], self.dq_type)
            self.turns.added(last.number - jnp.int32(1))
            self.add_part(dq, last)
            self.turns.added(last.number)
        self.kernel.together()  # the other one reads these keys, too
        self.store(dk * self.spec.scale, "dk")
        self.store(dv * self.kernel.kept_scale, "dv")

    def pass_over(self):
        """Does without products what the other consumer needs of the first step, and says 1.

        If all of it is masked for these keys, as it is beyond a diagonal; else says 0.
        """
        kernel, tile = self.kernel, self.tile
        if not kernel.uneven:
            return jnp.int32(0)
        own = visibility.q_blocks(
            self.spec, tile.lengths, self.column, ROWS, kernel.config.block_q, kernel.blocks
        )
        hidden = own.first > tile.met.first

        @pl.when(hidden)
        def _():
            step = kernel.step(tile, jnp.int32(0))
            plgpu.barrier_wait(self.at("q_full", step))
            plgpu.barrier_wait(self.at("do_full", step))
            self.keep_from_masked(step)
            self.hand_over(jnp.zeros(self.shape, kernel.dtype), step)
            self.release(step, "q_empty", "do_empty")

        return hidden.astype(jnp.int32)

    def await_products(self):
        plgpu.barrier_wait(self.refs["products"].at[self.warpgroup])

    def pass_products(self):
        plgpu.barrier_arrive(self.refs["products"].at[self.other])

    @property
    def dq_type(self):
        return plgpu.ACC((ROWS, self.width), jnp.float32)

    def ds_at(self, consumer, number):
        """Where a consumer's gradient of the scores of a step lies, and its barriers."""
        number += self.tile.start + jnp.int32(2)
        return jnp.int32(2) * consumer + lax.rem(number, jnp.int32(2))

    def hand_over(self, ds, step: Step):
        """This consumer's gradient of the scores of a step, for both."""
        mine = self.ds_at(self.warpgroup, step.number)
        empty = self.refs["ds_empty"].at[mine]
        again = self.tile.start + step.number > 1
        pl.when(again)(lambda: plgpu.barrier_wait(empty))
        self.refs["ds_smem"].at[mine][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.refs["ds_full"].at[mine])

    def query_gradient(self, step: Step, ref):
        """Issues this consumer's part for a step; before the first it is of no use."""
        number = step.number
        theirs = self.ds_at(self.other, number)
        full = self.refs["ds_full"].at[theirs]
        pl.when(number >= 0)(lambda: plgpu.barrier_wait(full))
        row, column = self.start_of_part
        rows = pl.ds(row, ROWS)
        for w in range(self.kernel.parts):
            at = self.ds_at(w, number)
            if self.kernel.config.blocks:  # what is there may be being replaced
                at = jnp.where(number >= 0, at, self.ds_at(self.warpgroup, number + jnp.int32(1)))
            ds = self.refs["ds_smem"].at[at, :, rows]
            keys = self.fixed("k_smem", w).at[:, pl.ds(column, self.width)]
            plgpu.wgmma(ref, ds.transpose((1, 0)), keys)
        return ref

    def add_part(self, dq, step: Step):
        plgpu.barrier_arrive(self.refs["ds_empty"].at[self.ds_at(self.other, step.number)])
        self.add_query_gradient(dq, step, *self.start_of_part)

    def step(self, step: Step, scores, dk_ref, dv_ref) -> jax.Array:
        """Given its raw scores, which are those of the next one in the end."""
        kernel = self.kernel
        q_smem, do_smem = self.at("q_smem", step), self.at("do_smem", step)
        tainted: Any = False
        if kernel.masked:
            plgpu.barrier_wait(self.at("do_full", step))
            tainted = self.keep_from_masked(step)

        def weights_and_gradients(dweights_ref):
            if not kernel.masked:
                plgpu.barrier_wait(self.at("do_full", step))
            self.weight_gradient(step, dweights_ref)
            weights, slopes = self.weights(scores, step)
            # Issued here it makes the compiler take the exponentials while V dO^T is under way (it
            # would put them off until that is waited for), and goes on beside what follows.
            plgpu.wgmma(dv_ref, weights, do_smem)
            self.turns.added(step.number - jnp.int32(2))
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1)
            return self.score_gradient(slopes, dweights, tainted, step)

        ds = pl.run_scoped(weights_and_gradients, self.acc)
        self.add_bias_gradient(ds, step)
        ds = self.operand(ds)
        self.hand_over(ds, step)
        late = kernel.step(self.tile, step.number - jnp.int32(1)) if self.lag else step

        def query_gradient(dq_ref):
            self.query_gradient(late, dq_ref)
            plgpu.wgmma(dk_ref, ds, q_smem)
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)

        if self.in_turns:
            self.await_products()

        def next_scores(ref):
            # These keep the tensor cores busy while the gradient of queries leaves.
            self.scores_of(step.number + jnp.int32(1), ref)
            if self.in_turns:
                self.pass_products()
            pl.when(late.number >= 0)(lambda: self.add_part(dq, late))
            return plgpu.wgmma_accumulator_load(ref, wait_n=0)

        dq = pl.run_scoped(query_gradient, self.dq_type)
        if not self.lag:
            # The other one has come as far: both are done with the step before.
            self.load("q", step.number + jnp.int32(kernel.config.stages - 1))
            self.load("do", step.number + jnp.int32(kernel.config.do_stages - 1))
        scores = pl.run_scoped(next_scores, self.acc)
        self.release(step, "q_empty", "do_empty")
        return scores


class ByRole(Consumer):
    """One of two that share 64 keys: the gradient of values, or of keys, fills its registers.

    The first computes weights and hands their slopes, in 16 bits, to the second, which makes the
    gradients of scores of them. They share the columns of the gradient of queries.
    """

    def __init__(self, kernel: "_Backward", warpgroup, tile: Tile):
        super().__init__(kernel, warpgroup, tile, part=0)
        parts = kernel.sizes.hp // PART
        middle = -(-parts // 2) * PART
        self.columns_beside_values = 0, middle
        self.columns_beside_keys = middle, kernel.sizes.hp
        # Scores of the next step come beside the gradient of values, where they fit in registers
        # and their queries are there.
        self.early = kernel.sizes.hvp <= 128 and kernel.config.producer

    def sum_steps(self, run, width: int, first: Callable[[], Any] = lambda: None) -> jax.Array:
        def sums(ref):
            self.each_step(lambda step, carry: run(step, carry, ref), first())
            return ref[...]

        return pl.run_scoped(sums, plgpu.ACC((ROWS, width), jnp.float32))

    def finish(self, gradient, name: str):
        self.kernel.together()  # both read keys and values
        self.store(gradient, name)
        self.turns.added(self.kernel.steps(self.tile) - jnp.int32(1))
        self.turns.finish()

    def run_values(self):
        self.start()
        self.make_finite("v_smem")
        first = self.first_scores if self.early else lambda: None
        dv = self.sum_steps(self.step_of_values, self.kernel.sizes.hvp, first)
        self.finish(dv * self.kernel.kept_scale, "dv")

    def run_keys(self):
        self.start()
        self.make_finite("k_smem")
        dk = self.sum_steps(self.step_of_keys, self.kernel.sizes.hp)
        self.finish(dk * self.spec.scale, "dk")

    def step_of_values(self, step: Step, scores, dv_ref):
        """Given its raw scores, if they came early; those of the next one are then the result."""
        kernel, refs = self.kernel, self.refs
        do_smem = self.at("do_smem", step)
        if kernel.masked:
            plgpu.barrier_wait(self.at("do_full", step))
            if not self.early:
                plgpu.barrier_wait(self.at("q_full", step))
            self.keep_from_masked(step)
        if not self.early:
            product = lambda ref: self.scores_of(step.number, ref, ready=kernel.masked)[...]
            scores = pl.run_scoped(product, self.acc)
        weights, slopes = self.weights(scores, step)
        refs["p_smem"][...] = slopes.astype(kernel.dtype)
        plgpu.commit_smem()
        self.release(step, "q_empty")
        plgpu.barrier_arrive(refs["p_full"])
        self.turns.added(step.number - jnp.int32(1))
        if not kernel.masked:
            plgpu.barrier_wait(self.at("do_full", step))
        first, end = self.columns_beside_values

        def query_gradient(dq_ref):
            plgpu.barrier_wait(refs["ds_full"])
            self.load("q", step.number + jnp.int32(kernel.config.stages - 1))
            keys = self.fixed("k_smem", 0).at[:, pl.ds(first, end - first)]
            plgpu.wgmma(dq_ref, self.fixed("ds_smem", 0).transpose((1, 0)), keys)
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=0)

        def value_and_query_gradient():
            plgpu.wgmma(dv_ref, weights, do_smem)
            return pl.run_scoped(query_gradient, plgpu.ACC((ROWS, end - first), jnp.float32))

        def with_next_scores(ref):
            self.scores_of(step.number + jnp.int32(1), ref)
            dq = value_and_query_gradient()
            return dq, plgpu.wgmma_accumulator_load(ref, wait_n=0)

        if self.early:
            dq, scores = pl.run_scoped(with_next_scores, self.acc)
        else:
            dq, scores = value_and_query_gradient(), None
        self.release(step, "do_empty")
        self.load("do", step.number + jnp.int32(kernel.config.do_stages))
        self.add_query_gradient(dq, step, jnp.int32(0), jnp.int32(first))
        return scores

    def step_of_keys(self, step: Step, _, dk_ref):
        kernel, refs = self.kernel, self.refs
        q_smem = self.at("q_smem", step)
        tainted: Any = False
        plgpu.barrier_wait(self.at("do_full", step))
        if kernel.masked:
            plgpu.barrier_wait(self.at("q_full", step))
            tainted = self.keep_from_masked(step)

        def product(dweights_ref):
            self.weight_gradient(step, dweights_ref)
            plgpu.barrier_wait(refs["p_full"])
            return plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)

        dweights = pl.run_scoped(product, self.acc)
        self.turns.added(step.number - jnp.int32(1))
        slopes = plgpu.load(refs["p_smem"], layout=WGMMA).astype(jnp.float32)
        ds = self.score_gradient(slopes, dweights, tainted, step)
        self.add_bias_gradient(ds, step)
        ds = self.operand(ds)
        # That the weights are there says that the other one is done with the last step's.
        refs["ds_smem"][0] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs["ds_full"])
        self.release(step, "do_empty")
        if not kernel.masked:
            plgpu.barrier_wait(self.at("q_full", step))
        first, end = self.columns_beside_keys
        if first == end:
            plgpu.wgmma(dk_ref, ds, q_smem)
            self.turns.wait(step)
        else:

            def query_gradient(dq_ref):
                keys = self.fixed("k_smem", 0).at[:, pl.ds(first, end - first)]
                plgpu.wgmma(dq_ref, self.fixed("ds_smem", 0).transpose((1, 0)), keys)
                plgpu.wgmma(dk_ref, ds, q_smem)
                return plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)

            dq = pl.run_scoped(query_gradient, plgpu.ACC((ROWS, end - first), jnp.float32))
            self.add_query_gradient(dq, step, jnp.int32(0), jnp.int32(first))
        plgpu.wgmma_wait(0)
        self.release(step, "q_empty")
