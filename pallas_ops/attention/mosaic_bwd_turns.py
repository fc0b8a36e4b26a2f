"""The order in which tiles of keys add to the same queries' gradient, where that is to be the same.

Each tile adds to a block of queries after all tiles before its own that meet the block. Tiles of
lower numbers start first: whoever waits does so for one that is under way.

To ask global memory for a turn, or to give one on, takes as long as a good part of a step. The
producer does both for consumers that are late with their additions, and they meet it at barriers.
Other consumers do so themselves.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

if TYPE_CHECKING:
    from pallas_ops.attention.mosaic_bwd import _Backward
    from pallas_ops.attention.mosaic_bwd_consumer import Step, Tile


class Turns:
    """Of one tile's consumer, or of its producer; nothing where order is free."""

    def __init__(self, kernel: "_Backward", warpgroup, tile: "Tile"):
        self.kernel, self.refs, self.tile = kernel, kernel.refs, tile
        self.matter = kernel.spec.deterministic
        self.by_producer = kernel.producer_takes_turns
        # Two consumers that take turns themselves count apart.
        self.who = jnp.int32(0) if self.by_producer else warpgroup
        self.last: Step | None = None  # that was waited for

    # A consumer's.

    def wait(self, step: "Step"):
        """Before the first addition of a step."""
        if not self.matter or self.last is step:
            return
        self.last = step
        if self.by_producer:
            plgpu.barrier_wait(self.refs["turn"])
        else:
            plgpu.wait_smem_to_gmem(0)
            pl.when(step.number > 0)(lambda: self._give(step.number - jnp.int32(1)))
            self._take(step.number)

    def added(self):
        """After the last addition of a step, which has had time to arrive."""
        if self.by_producer:
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(self.refs["added"])

    def finish(self):
        """Waits for all that was added or stored."""
        plgpu.wait_smem_to_gmem(0)
        if self.matter and not self.by_producer:
            steps = self.kernel.steps(self.tile)
            pl.when(steps > 0)(lambda: self._give(steps - jnp.int32(1)))

    # The producer's.

    # How many steps it is ahead of the additions after it has issued a step's loads: those go out
    # when a consumer is done with the step before the last, which adds for the one before that.
    AHEAD = 3

    def serve(self, number):
        """After the loads of a step: gives one turn on, and waits for the next one."""
        steps, late = self.kernel.steps(self.tile), number - jnp.int32(self.AHEAD)

        @pl.when(late >= 0)
        def _():
            plgpu.barrier_wait(self.refs["added"])
            self._give(late)

        wanted = late + jnp.int32(1)

        @pl.when((wanted >= 0) & (wanted < steps))
        def _():
            self._take(wanted)
            plgpu.barrier_arrive(self.refs["turn"])

    # In global memory.

    def _take(self, number):
        step = self.kernel.step(self.tile, number)
        turn = self.refs["turns"][self.tile.batch, self.tile.place, step.block]
        plgpu.semaphore_wait(self._done(step), turn, decrement=False, memory_scope="gpu")

    def _give(self, number):
        step = self.kernel.step(self.tile, number)
        plgpu.semaphore_signal(self._done(step), memory_scope="gpu")

    def _done(self, step: "Step"):
        """The count of additions to a block of queries."""
        sizes, blocks = self.kernel.sizes, self.kernel.blocks
        index = (self.tile.batch * jnp.int32(sizes.n) + step.head) * jnp.int32(blocks) + step.block
        return self.refs["done"].at[index * jnp.int32(2) + self.who]
