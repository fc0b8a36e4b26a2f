"""A kernel put in an operation's table is chosen, refused, logged, interpreted and exported."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from pallas_ops import dispatch, testing
from pallas_ops.attention.primitive import flash_attention_bwd, flash_attention_fwd

SHAPE = (1, 64, 1, 64)


def doubling_kernel(query, key, value, *, racy=False, **params):
    """Not attention: gives 2 * query, so that a test can tell that it ran."""
    del key, value, params

    def body(x_gmem, y_gmem, x_smem, y_smem, barrier):
        plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
        if not racy:
            plgpu.barrier_wait(barrier)
        y_smem[...] = x_smem[...] * 2
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem, y_gmem)
        plgpu.wait_smem_to_gmem(0)
        if racy:
            plgpu.barrier_wait(barrier)

    smem = plgpu.SMEM((64, 64), jnp.float32)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[smem, smem, plgpu.Barrier()],
    )
    return kernel(query.reshape(64, 64)).reshape(query.shape), jnp.zeros(
        query.shape[:3], jnp.float32
    )


def no_more_than_64(query, *operands, **params):
    del operands, params
    return None if query.shape[1] <= 64 else f"T={query.shape[1]} is over 64"


@pytest.fixture
def kernel(monkeypatch):
    def plug(run=doubling_kernel, **options):
        monkeypatch.setattr(
            flash_attention_fwd, "implementations", dict(flash_attention_fwd.implementations)
        )
        others = {n: x for n, x in flash_attention_bwd.implementations.items() if n != "mosaic_gpu"}
        monkeypatch.setattr(flash_attention_bwd, "implementations", others)
        options = {
            "platforms": ("cuda",),
            "interpretable": True,
            "refuse": no_more_than_64,
            **options,
        }
        flash_attention_fwd.register("mosaic_gpu", dispatch.Implementation(run, **options))
        jax.clear_caches()  # they are not told of a changed table

    yield plug
    jax.clear_caches()


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(3)]


def attend(*arrays, **options):
    return pallas_ops.flash_attention(*arrays, **options)


def test_fastest_first(kernel):
    kernel()
    assert list(flash_attention_fwd.implementations) == ["mosaic_gpu", "xla", "reference"]


def test_none_runs_what_the_platform_has(kernel, arrays):
    without = attend(*arrays)
    kernel()
    np.testing.assert_array_equal(attend(*arrays), without)
    text = jax.jit(attend).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert "mosaic_gpu" not in jax.jit(attend).lower(*arrays).as_text()


def test_explicit_kernel_traces_anywhere_and_refuses_to_lower_for_cpu(kernel, arrays):
    kernel()
    function = jax.jit(lambda *a: attend(*a, implementation="mosaic_gpu"))
    assert jax.eval_shape(function, *arrays).shape == SHAPE
    assert "mosaic_gpu" in function.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert export.export(function, platforms=["cuda"])(*arrays).platforms == ("cuda",)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' runs on cuda only, not on cpu"):
        function(*arrays)


def test_sequence_is_tried_in_order(kernel, arrays):
    kernel()
    np.testing.assert_array_equal(
        attend(*arrays, implementation=("mosaic_gpu", "xla")), attend(*arrays, implementation="xla")
    )


def test_reason_in_the_arguments_is_given_when_traced(kernel):
    kernel()
    long = [jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.float32)] * 3
    with pytest.raises(
        NotImplementedError, match="'mosaic_gpu' can't serve this call: T=128 is over 64"
    ):
        jax.eval_shape(lambda *a: attend(*a, implementation="mosaic_gpu"), *long)
    assert jax.eval_shape(attend, *long).shape == (1, 128, 1, 64)


def test_device_can_be_refused(kernel, arrays):
    kernel(refuse_device=lambda ctx: "needs sm_90")

    def lower(function):
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" not in lower(attend)
    with pytest.raises(NotImplementedError, match="'mosaic_gpu' needs sm_90"):
        lower(lambda *a: attend(*a, implementation="mosaic_gpu"))


def test_export_for_both_platforms(kernel, arrays):
    kernel()
    exported = export.export(jax.jit(attend), platforms=["cpu", "cuda"])(*arrays)
    assert "mosaic_gpu" in exported.mlir_module()
    np.testing.assert_allclose(
        exported.call(*arrays), attend(*arrays, implementation="xla"), rtol=1e-6
    )


def test_interpreter_runs_the_kernel(kernel, arrays):
    kernel()
    function = jax.jit(attend)
    plain = function(*arrays)
    with testing.interpret(races=True):
        np.testing.assert_array_equal(function(*arrays), 2 * arrays[0])
        np.testing.assert_array_equal(attend(*arrays, implementation="mosaic_gpu"), 2 * arrays[0])
    np.testing.assert_array_equal(function(*arrays), plain)


def test_interpreter_raises_on_a_race(kernel, arrays):
    kernel(run=lambda *operands, **params: doubling_kernel(*operands, racy=True, **params))
    with testing.interpret(races=True), pytest.raises(Exception, match=r"[Rr]ace"):
        jax.block_until_ready(attend(*arrays, implementation="mosaic_gpu"))
    kernel()
    with testing.interpret(races=True):
        np.testing.assert_array_equal(attend(*arrays, implementation="mosaic_gpu"), 2 * arrays[0])


def test_gradient_resolves_its_own_implementation(kernel, arrays):
    kernel()
    grad = jax.grad(lambda *a: jnp.sum(attend(*a)))
    text = jax.jit(grad).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "mosaic_gpu" not in flash_attention_bwd.implementations
    with pytest.raises(NotImplementedError, match="no mosaic_gpu kernel exists"):
        jax.eval_shape(
            jax.grad(lambda *a: jnp.sum(attend(*a, implementation="mosaic_gpu"))), *arrays
        )


def test_config_of_no_implementation_is_refused(kernel, arrays):
    kernel()
    with pytest.raises(NotImplementedError, match="takes no config of type str"):
        attend(*arrays, config="large")


def test_shards_bring_no_stack_frames_into_the_program(make_mesh):
    """XLA takes theirs for the program's own, and may then compile for ever."""
    mesh = make_mesh((8,), ("x",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    q = put(jnp.ones((2, 16, 8, 4)), None, None, "x")
    rows, sizes = put(jnp.ones((64, 16)), "x"), jnp.array([30, 34])
    limit = jax.config.jax_traceback_in_locations_limit
    for function, args in (
        (lambda q: pallas_ops.flash_attention(q, q, q), (q,)),
        (lambda x, w: pallas_ops.ragged_dot(x, w, sizes), (rows, jnp.ones((2, 16, 8)))),
    ):
        text = jax.jit(function).lower(*args).compile().as_text()
        assert len(set(re.findall(r"stack_frame_id=\d+", text))) in (1, 2)  # 6 and 18 with theirs
        assert jax.config.jax_traceback_in_locations_limit == limit


def test_logged_once_per_call_site(kernel, arrays, caplog):
    kernel()
    caplog.set_level(logging.INFO, "pallas_ops")
    dispatch._LOGGED.clear()
    for scale in (0.1, 0.2):
        first = jax.jit(lambda *a, s=scale: attend(*a, scale=s))
        first(*arrays)
    second = jax.jit(lambda *a: pallas_ops.flash_attention(*a, scale=0.3))
    second(*arrays)
    messages = [r.getMessage() for r in caplog.records]
    assert len(messages) == 2
    for message in messages:
        assert re.search(
            r"^flash_attention_fwd at .*test_dispatch\.py:\d+: xla on cpu; not mosaic_gpu: runs on"
            r" cuda only, not on cpu; not triton: no triton kernel exists for flash_attention yet$",
            message,
        )


@pytest.mark.parametrize("wrong", ["cudnn", (), ("xla", "cuda"), 3])
def test_unknown_names_are_value_errors(arrays, wrong):
    with pytest.raises(ValueError, match="implementation must be None, one of"):
        attend(*arrays, implementation=wrong)
