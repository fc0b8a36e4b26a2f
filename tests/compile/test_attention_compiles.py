"""Attention's kernels as an H200 would get them, by what users of the newest JAX have."""

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import compile_report, toolchain
from pallas_ops.attention.mosaic_config import BackwardConfig, Config

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
    [(64, 64, {}), (64, 64, CAUSAL), (128, 128, {}), (128, 128, CAUSAL), (256, 256, {})],
    ids=["64", "64_causal", "128", "128_causal", "256"],
)
def test_what_is_chosen_compiles_well(h, hv, options):
    (kernel,) = compile_report.report(attend(**options), arrays(h, hv), "h200")
    assert kernel.problems() == []
    assert bool(kernel.setmaxnreg) != toolchain.ignores_setmaxnreg()
    assert (kernel.setmaxnreg_ignored is not None) <= toolchain.ignores_setmaxnreg()


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("h", [64, 128])
def test_needs_no_setmaxnreg_without_a_producer(h, options):
    config = Config(block_kv=128, blocks=0, producer=False)
    (kernel,) = compile_report.report(attend(config, **options), arrays(h), "h200")
    assert kernel.problems() == []
    assert kernel.threads == 256 and kernel.setmaxnreg == 0


def test_producer_asks_for_no_more_registers_than_there_are():
    (kernel,) = compile_report.report(attend(Config(), **CAUSAL), arrays(128), "h200")
    assert kernel.threads == 384 and kernel.setmaxnreg == 2
    for consumers in (1, 2, 3):
        consumer, producer = Config(consumers=consumers).registers
        launched = 65536 // (128 * (consumers + 1)) // 8 * 8
        assert consumers * consumer + producer <= (consumers + 1) * launched


@pytest.mark.parametrize("h", [64, 128, 256])
def test_gradients_compile(h):
    queries, *others = arrays(h)
    report = compile_report.report(gradients(**CAUSAL), [queries, queries, *others], "h200")
    forward, backward = report
    assert backward.setmaxnreg == forward.setmaxnreg
    assert backward.serialized == ()
    if h == 128:
        assert backward.problems() == []
    assert all(k.instructions["UTMALDG"] >= 4 for k in report if k.instructions)


def test_gradients_need_no_setmaxnreg_without_a_producer():
    queries, *others = arrays(128)
    configs = (Config(blocks=0, producer=False), BackwardConfig(stages=3, producer=False))
    _, kernel = compile_report.report(gradients(configs), [queries, queries, *others], "h200")
    assert kernel.problems() == []
    assert kernel.threads == 256 and kernel.setmaxnreg == 0
