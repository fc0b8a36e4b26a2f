"""Who computes what in flash attention's backward on Hopper: a step's five products in order."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops.attention.mosaic_bwd_consumer import PART, Consumer, Step, Tile
from pallas_ops.attention.mosaic_config import ROWS
from pallas_ops.attention.mosaic_visibility import WGMMA

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_bwd import _Backward


class ByKeys(Consumer):
    """One of two that own 64 keys each, and a half of the gradient of the step's queries each."""

    def __init__(self, kernel: "_Backward", warpgroup, tile: Tile):
        super().__init__(kernel, warpgroup, tile, part=warpgroup)

    def run(self):
        self.start()
        some = self.tile.met.blocks > 0
        pl.when(some)(self.run_steps)
        pl.when(jnp.logical_not(some))(self.store_nothing)

    def run_steps(self):
        self.make_finite(self.k_smem, self.v_smem)
        sizes = self.kernel.sizes

        def sums(dk_ref, dv_ref):
            first = self.first_scores()
            self.each_step(lambda step, raw: self.step(step, raw, dk_ref, dv_ref), first)
            return dk_ref[...], dv_ref[...]

        accumulator = lambda width: plgpu.ACC((ROWS, width), jnp.float32)
        dk, dv = pl.run_scoped(sums, accumulator(sizes.hp), accumulator(sizes.hvp))
        self.kernel.together()  # the other one reads these keys, too
        self.store(dk * self.spec.scale, self.k_smem, "dk")
        self.store(dv * self.kernel.kept_scale, self.v_smem, "dv")
        self.finish_turns()

    def step(self, step: Step, scores, dk_ref, dv_ref) -> jax.Array:
        """Given its raw scores, which are those of the next one in the end."""
        kernel, refs = self.kernel, self.refs
        q_smem, do_smem = self.at("q_smem", step), self.at("do_smem", step)
        tainted: Any = False
        if kernel.masked:
            plgpu.barrier_wait(self.at("do_full", step))
            tainted = self.keep_from_masked(step)

        def weights_and_gradients(dweights_ref):
            if not kernel.masked:
                plgpu.barrier_wait(self.at("do_full", step))
            plgpu.wgmma(dweights_ref, self.fixed("v_smem", self.part), do_smem.transpose((1, 0)))
            weights, slopes = self.weights(scores, step)
            # Issued here it makes the compiler take the exponentials while V dO^T is under way (it
            # would put them off until that is waited for), and goes on beside what follows.
            plgpu.wgmma(dv_ref, weights, do_smem)
            dweights = plgpu.wgmma_accumulator_load(dweights_ref, wait_n=1)
            return self.score_gradient(slopes, dweights, tainted, step)

        ds = pl.run_scoped(weights_and_gradients, self.acc)
        self.add_bias_gradient(ds, step)
        ds = self.operand(ds)
        ds_smem = refs["ds_smem"].at[lax.rem(step.number, jnp.int32(2))]
        ds_smem.at[self.warpgroup][...] = ds
        plgpu.commit_smem()
        kernel.together()
        # Both are done with the step before.
        self.load("q", step.number + jnp.int32(kernel.config.stages - 1))
        self.load("do", step.number + jnp.int32(kernel.config.do_stages - 1))
        # This consumer's part of the gradient of queries, [64, width].
        width = kernel.sizes.hp if kernel.by_rows else kernel.sizes.hp // 2
        part = self.warpgroup * jnp.int32(ROWS if kernel.by_rows else width)
        rows = pl.ds(part, ROWS) if kernel.by_rows else pl.ds(0, ROWS)
        columns = pl.ds(0, width) if kernel.by_rows else pl.ds(part, width)

        def query_gradient(dq_ref):
            for w in range(kernel.parts):
                keys = self.fixed("k_smem", w).at[:, columns]
                plgpu.wgmma(dq_ref, ds_smem.at[w, :, rows].transpose((1, 0)), keys)
            plgpu.wgmma(dk_ref, ds, q_smem)
            return plgpu.wgmma_accumulator_load(dq_ref, wait_n=1)

        def next_scores(ref):
            # These keep the tensor cores busy while the gradient of queries leaves.
            self.scores_of(step.number + jnp.int32(1), ref)
            at = (part, jnp.int32(0)) if kernel.by_rows else (jnp.int32(0), part)
            self.add_query_gradient(dq, step, *at)
            return plgpu.wgmma_accumulator_load(ref, wait_n=0)

        dq = pl.run_scoped(query_gradient, plgpu.ACC((ROWS, width), jnp.float32))
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

    def finish(self, gradient, smem, name: str):
        self.kernel.together()  # both read keys and values
        self.store(gradient, smem, name)
        self.finish_turns()

    def run_values(self):
        self.start()
        self.make_finite(self.v_smem)
        first = self.first_scores if self.early else lambda: None
        dv = self.sum_steps(self.step_of_values, self.kernel.sizes.hvp, first)
        self.finish(dv * self.kernel.kept_scale, self.v_smem, "dv")

    def run_keys(self):
        self.start()
        self.make_finite(self.k_smem)
        dk = self.sum_steps(self.step_of_keys, self.kernel.sizes.hp)
        self.finish(dk * self.spec.scale, self.k_smem, "dk")

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
        q_smem, do_smem = self.at("q_smem", step), self.at("do_smem", step)
        tainted: Any = False
        plgpu.barrier_wait(self.at("do_full", step))
        if kernel.masked:
            plgpu.barrier_wait(self.at("q_full", step))
            tainted = self.keep_from_masked(step)

        def product(dweights_ref):
            plgpu.wgmma(dweights_ref, self.fixed("v_smem", self.part), do_smem.transpose((1, 0)))
            plgpu.barrier_wait(refs["p_full"])
            return plgpu.wgmma_accumulator_load(dweights_ref, wait_n=0)

        dweights = pl.run_scoped(product, self.acc)
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
