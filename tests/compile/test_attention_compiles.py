"""Attention's kernels as an H200 would get them, by what users of the newest JAX have."""

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import compile_report, toolchain
from pallas_ops.attention.mosaic_config import Config

CAUSAL = {"is_causal": True}


def arrays(h: int, hv: int | None = None) -> list[jax.ShapeDtypeStruct]:
    sizes = ((16, h), (4, h), (4, hv or h))
    return [jax.ShapeDtypeStruct((2, 4096, n, size), jnp.bfloat16) for n, size in sizes]


def attend(config=None, **options):
    return lambda *operands: pallas_ops.flash_attention(
        *operands, implementation="mosaic_gpu", config=config, **options
    )


def gradients(config=None, **options):
    def run(dout, *operands):
        return jax.vjp(attend(config, **options), *operands)[1](dout)

    return run


@pytest.mark.parametrize(
    ("h", "hv", "options"),
    [
        (64, 64, {}),
        (64, 64, CAUSAL),
        (128, 128, {}),
        (128, 128, CAUSAL),
        (192, 128, CAUSAL),
        (256, 256, {}),
    ],
    ids=["64", "64_causal", "128", "128_causal", "192_128_causal", "256"],
)
def test_what_is_chosen_compiles_well(h, hv, options):
    (kernel,) = compile_report.report(attend(**options), arrays(h, hv), "h200")
    assert kernel.problems() == []
    # The assembler's own word on what the choice goes by is in the next test.
    assert bool(kernel.setmaxnreg) != toolchain.ignores_setmaxnreg()
    warpgroups = 2 if toolchain.ignores_setmaxnreg() else 4 if h == 64 else 3
    assert kernel.threads == 128 * warpgroups


def test_producer_asks_for_registers():
    (kernel,) = compile_report.report(attend(Config(), **CAUSAL), arrays(128), "h200")
    assert kernel.threads == 384 and kernel.setmaxnreg == 2
    assert (kernel.setmaxnreg_ignored is not None) == toolchain.ignores_setmaxnreg()


@pytest.mark.parametrize(("h", "hv"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_gradients_compile(h, hv):
    dout, *_ = arrays(hv)
    report = compile_report.report(gradients(**CAUSAL), [dout, *arrays(h, hv)], "h200")
    forward, backward = report
    assert backward.setmaxnreg == forward.setmaxnreg
    assert backward.serialized == ()
    assert backward.spill_stores <= 16
    assert all(k.instructions["UTMALDG"] >= 4 for k in report if k.instructions)
