"""The order in which tiles of keys add to the same queries' gradient, where that is to be the same.

Each tile adds to a block of queries after all tiles before its own that meet the block. Tiles of
lower numbers start first: whoever waits does so for one that is under way.

To ask global memory for a turn, or to give one on, takes as long as a good part of a step. The
producer does both, and the consumers meet it at barriers. Without one, or where they add to the
gradient of a bias, too, they do so themselves.
"""

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax
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
            plgpu.barrier_wait(self._at("turn", step.number))
        else:
            plgpu.wait_smem_to_gmem(0)
            pl.when(step.number > 0)(lambda: self._give(step.number - jnp.int32(1)))
            self._take(step.number)

    def added(self, number):
        """When the additions of a step, if there is one of this number, have had time to arrive."""
        if self.by_producer:

            @pl.when(number >= 0)
            def _():
                plgpu.wait_smem_to_gmem(0)
                plgpu.barrier_arrive(self._at("added", number))

    def finish(self):
        """Waits for all that was added or stored, or, where order is free, until it was read."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=not self.matter)
        if self.matter and not self.by_producer:
            steps = self.kernel.steps(self.tile)
            pl.when(steps > 0)(lambda: self._give(steps - jnp.int32(1)))

    # The producer's, between loads.

    @property
    def after_loads(self) -> int:
        """How often to `serve` when the loads of all steps are issued."""
        return self.kernel.stages + self.kernel.lag if self.by_producer else 0

    def serve(self, number):
        """After the loads of a step: waits for one turn, and gives another one on.

        Loads go out as soon as the step `stages` before is done. The next one is then on its way,
        and what it adds at its end, or what it adds late, is asked for; by its middle additions of
        the step before have arrived.
        """
        steps, stages, lag = self.kernel.steps(self.tile), self.kernel.stages, self.kernel.lag
        wanted = number - jnp.int32(stages - 1 + lag)
        given = wanted - jnp.int32(1)

        @pl.when((wanted >= 0) & (wanted < steps))
        def _():
            self._take(wanted)
            plgpu.barrier_arrive(self._at("turn", wanted))

        @pl.when((given >= 0) & (given < steps))
        def _():
            plgpu.barrier_wait(self._at("added", given))
            self._give(given)

    def _at(self, name: str, number):
        # Of two barriers: that of the next step may be reached before this one's was looked at.
        return self.refs[name].at[lax.rem(number, jnp.int32(2))]

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
