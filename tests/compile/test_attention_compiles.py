"""Attention's kernels as an H200 would get them, by what users of the newest JAX have."""

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import compile_report
from pallas_ops.attention.mosaic_config import Config


def report(h: int, config: Config | None, **options) -> compile_report.Kernel:
    attend = lambda q, k, v: pallas_ops.flash_attention(
        q, k, v, implementation="mosaic_gpu", config=config, **options
    )
    arrays = [jax.ShapeDtypeStruct((2, 4096, n, h), jnp.bfloat16) for n in (16, 4, 4)]
    (kernel,) = compile_report.report(attend, arrays, "h200")
    return kernel


@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
@pytest.mark.parametrize("h", [64, 128])
def test_needs_no_setmaxnreg_without_a_producer(h, options):
    kernel = report(h, Config(block_kv=128, blocks=0, producer=False), **options)
    assert kernel.problems() == []
    assert kernel.threads == 256 and kernel.setmaxnreg == 0


def test_producer_asks_for_registers():
    kernel = report(128, None, is_causal=True)
    assert kernel.threads == 384 and kernel.setmaxnreg == 2
    if not kernel.setmaxnreg_ignored:
        assert kernel.problems() == []


@pytest.mark.parametrize("h", [64, 128])
def test_backward_compiles(h):
    def gradients(q, k, v):
        attend = lambda *xs: pallas_ops.flash_attention(
            *xs, is_causal=True, implementation="mosaic_gpu"
        )
        return jax.grad(lambda *xs: attend(*xs).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    arrays = [jax.ShapeDtypeStruct((2, 4096, n, h), jnp.bfloat16) for n in (16, 4, 4)]
    kernels = compile_report.report(gradients, arrays, "h200")
    assert [k.setmaxnreg for k in kernels] == [2, 2]
    assert all(k.instructions["UTMALDG"] >= 4 for k in kernels if k.instructions)
