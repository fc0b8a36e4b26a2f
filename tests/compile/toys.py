"""A kernel that stands in for attention's forward, healthy or with one thing the matter."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_ops import dispatch
from pallas_ops.attention.primitive import flash_attention_fwd

# Float32 columns of 128 rows, one value of each a thread, that stay in registers; three warpgroups
# have 168 registers a thread.
_COLUMNS = {"healthy": 64, "trading": 64, "starved": 104, "spilling": 256, "greedy": 512}
_TRADING = ("trading", "starved")


def kernel(kind: str):
    """A function of no arguments that runs one: float32 [128, columns]."""
    tile = (128, _COLUMNS[kind])

    def body(y_gmem, y_smem):
        wg = lax.axis_index("wg")

        @pl.when(wg == 0)
        def _():
            if kind in _TRADING:
                plgpu.set_max_registers(232, action="increase")
            y_smem[...] = jnp.zeros(tile, jnp.float32)
            step = lambda i, y: y * y_smem[...] + y  # reads what it may not remember
            y_smem[...] = lax.fori_loop(0, 4, step, y_smem[...])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_smem, y_gmem)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg > 0)
        def _():
            if kind in _TRADING:
                plgpu.set_max_registers(40, action="decrease")

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(tile, jnp.float32),
        scratch_types=[plgpu.SMEM(tile, jnp.float32)],
        num_threads=3,
        thread_name="wg",
        kernel_name=kind,
    )


def plug(kind: str) -> None:
    """Makes the kernel attention's forward on a GPU for head dims to 128."""

    def run(query, key, value, *rest, **params):
        del key, rest, params
        x = kernel(kind)()[0, 0]
        out = jnp.broadcast_to(x.astype(query.dtype), (*query.shape[:3], value.shape[3]))
        return out, jnp.broadcast_to(x, query.shape[:3])

    def refuse(query, *rest, **params):
        del rest, params
        return f"H={query.shape[3]} is over 128" if query.shape[3] > 128 else None

    entry = dispatch.Implementation(run, refuse=refuse, platforms=("cuda",))
    flash_attention_fwd.register("mosaic_gpu", entry)


def spilling():
    return kernel("spilling"), ()


def greedy():
    return kernel("greedy"), ()
