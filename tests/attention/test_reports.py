"""Faults that users of comparable libraries reported, each as the smallest input that shows it.

A14 is in test_transforms.py, A15 in test_remat.py, A16 in test_sharding.py, A17 in
test_arguments.py and A18 in test_resources.py, beside their like.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.attention import chunked
from tests.attention import cases
from tests.attention.cases import BLOCKED, REFERENCE, each_implementation


def _case(**case):
    return cases.inputs(repr(sorted(case)), case)


@each_implementation
def test_a1_fully_masked_rows(implementation):
    """pytorch#103749: a row that may see nothing gives 0 and -inf, by mask or by a bias of -inf."""
    allowed = np.tril(np.ones((6, 10), bool))
    allowed[5] = False
    inputs = _case(B=1, T=6, S=10, N=2, K=2, Hv=8, bias="TS")
    fill = lambda low: inputs.floats | {"bias": np.where(allowed, 0.0, low)}
    with_bias = inputs.replace(floats=fill(-np.inf))
    floats = {n: x for n, x in inputs.floats.items() if n != "bias"}
    with_mask = inputs.replace(floats=floats, arrays={"mask": allowed})
    for call in (with_mask, with_bias):
        result = cases.run(implementation, call)
        cases.assert_all_near(result, cases.truth(call), implementation.tolerance)
        for x, expected in ((result["out"], 0), (result["lse"], -np.inf), (result["query"], 0)):
            np.testing.assert_array_equal(x[:, 5], expected)

    # A finite fill value masks nothing: every key gets the same weight, and that is right too.
    lowest = inputs.replace(floats=fill(np.finfo(np.float32).min))
    result = cases.run(implementation, lowest)
    mean = inputs.floats["value"].mean(axis=1)
    np.testing.assert_allclose(result["out"][:, 5], mean, rtol=1e-5, atol=1e-6)
    assert all(np.isfinite(result[n]).all() for n in ("query", "key", "value"))


@each_implementation
@pytest.mark.parametrize(("b", "t", "s"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
def test_a2_empty(b, t, s, implementation):
    """flash-attention#2776: nothing to do is no error, forward and backward."""
    for kv_heads, causal in ((2, False), (1, True)):
        inputs = _case(B=b, T=t, S=s, N=2, K=kv_heads, is_causal=causal, sinks=causal)
        result = cases.run(implementation, inputs, jnp.bfloat16)
        for operand, x in inputs.floats.items():
            assert result[operand].shape == x.shape
            if operand != "sinks":
                np.testing.assert_array_equal(result[operand].astype(np.float32), 0)
        assert result["out"].shape == inputs.dout.shape
        np.testing.assert_array_equal(result["out"].astype(np.float32), 0)
        sink = np.asarray(jnp.asarray(inputs.floats["sinks"], jnp.bfloat16)) if causal else -np.inf
        np.testing.assert_array_equal(result["lse"], np.broadcast_to(sink, inputs.dlse.shape))


@pytest.mark.parametrize(("t", "s"), [(64, 16), (1, 64), (33, 70)])
def test_a3_lengths_differ(t, s):
    """jax#24491: uniform weights name the keys that were read."""
    inputs = _case(B=1, T=t, S=s, N=2, K=2, H=16, Hv=16)
    value = np.broadcast_to(np.arange(s)[:, None, None], inputs.floats["value"].shape)
    zero = np.zeros_like(inputs.floats["query"])
    inputs = inputs.replace(floats=inputs.floats | {"query": zero, "value": value})
    blocked = dataclasses.replace(BLOCKED, config=chunked.Config(32, 32))
    result = cases.run(blocked, inputs)
    np.testing.assert_allclose(result["out"], (s - 1) / 2, rtol=1e-6)
    each = np.broadcast_to(inputs.dout.sum(axis=1, keepdims=True) / s, value.shape)
    np.testing.assert_allclose(result["value"], each, rtol=1e-4, atol=1e-5)
    cases.assert_all_near(result, cases.truth(inputs))


@each_implementation
def test_a4_window_without_a_mask(implementation):
    """jax#32300: an option works when it is the only one."""
    zero = jnp.zeros((1, 8, 1, 4), jnp.float32)
    value = 2.0 ** jnp.arange(8, dtype=jnp.float32).reshape(1, 8, 1, 1)
    run = lambda window, mask=None: np.ravel(
        implementation(zero, zero, value, mask=mask, local_window_size=window)
    )
    np.testing.assert_array_equal(run((0, 0)), np.ravel(value))
    np.testing.assert_allclose(run((1, 0)), [1, 1.5, 3, 6, 12, 24, 48, 96], rtol=1e-6)
    np.testing.assert_allclose(run((0, 1)), [1.5, 3, 6, 12, 24, 48, 96, 128], rtol=1e-6)
    np.testing.assert_array_equal(run((1, 0)), run((1, 0), jnp.ones((1, 1, 8, 8), bool)))
    np.testing.assert_array_equal(run(1), run((1, 1)))
    np.testing.assert_allclose(run(1)[:3], [1.5, 7 / 3, 14 / 3], rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a5_length_is_no_multiple_of_the_block(dtype):
    """jax#27224: the tail is right, also on the next calls and on memory that held NaN."""
    inputs = _case(B=2, T=192, S=192, N=4, K=4, H=16, Hv=16)
    blocked = dataclasses.replace(BLOCKED, config=chunked.Config(128, 128))
    expected = cases.truth(inputs)
    for _ in range(3):
        poison = [jnp.full(inputs.dout.shape, jnp.nan, dtype) for _ in range(8)]
        jax.block_until_ready(poison)
        del poison
        result = cases.run(blocked, inputs, dtype)
        cases.assert_all_near(result, expected, 1e-5 if dtype == jnp.float32 else 1e-2)


def _one_key(implementation, batch, heads, width):
    shape = (batch, 1, heads, width)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    out, pull = jax.vjp(lambda *x: implementation(*x), q, k, v)
    dq, dk, dv = pull(dout)
    for b in (0, batch // 2, batch - 1):
        np.testing.assert_array_equal(out[b], v[b])
        np.testing.assert_array_equal(dv[b], dout[b])
    assert not np.any(dq.astype(jnp.float32)) and not np.any(dk.astype(jnp.float32))


def test_a6_many_batches():
    """flash-attention#2260: one key gives its value; more batches than a grid dimension holds."""
    _one_key(pallas_ops.flash_attention, 65536 + 1, 1, 16)


@pytest.mark.gpu
def test_a6_offsets_past_int32():
    _one_key(pallas_ops.flash_attention, 8300, 16, 128)


@each_implementation
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a9_logits_far_from_zero(dtype, implementation):
    """pytorch#196678: logits of -120 and the like, with a tail of keys and a mask."""
    if implementation.name == "xla":
        implementation = dataclasses.replace(implementation, config=chunked.Config(32, 48))
    inputs = _case(B=1, T=64, S=64, N=1, K=1, H=64, Hv=64, mask="TS")
    q, k, v = (inputs.floats[n] for n in ("query", "key", "value"))
    for mask in (np.tril(np.ones((64, 64), bool)), np.ones((64, 64), bool)):
        for offset in (-1e4, -120, 0, 120, 1e4):
            q, k = 0.1 * q / np.abs(q).max(), 0.1 * k / np.abs(k).max()
            q[..., 0], k[..., 0] = 1, offset * 8
            floats = {
                n: cases.rounded(x, dtype) for n, x in (("query", q), ("key", k), ("value", v))
            }
            call = inputs.replace(
                floats=floats, arrays={"mask": mask}, dout=cases.rounded(inputs.dout, dtype)
            )
            # Logits themselves are only as good as float32 at their size.
            tolerance = (2e-2 if dtype == jnp.bfloat16 else 1e-5) + np.abs(offset) * 2e-7
            cases.assert_all_near(
                cases.run(implementation, call, dtype), cases.truth(call), tolerance
            )


@each_implementation
def test_a10_float64(implementation):
    """jax#37422: float64 in, float64 out, and no infinity made on the way."""
    with jax.enable_x64(True), jax.debug_infs(True):
        q, kv = jnp.zeros((5, 6, 11), jnp.float64), jnp.zeros((7, 3, 11), jnp.float64)
        out, lse = implementation(q, kv, kv, mask=jnp.arange(7) <= 3, return_residual=True)
        assert out.dtype == jnp.float64
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_allclose(lse, np.log(4), rtol=1e-6)


def test_a12_lse_is_a_natural_logarithm():
    """pytorch#181645: its value, and that parts of the keys merge to the whole, gradients too."""
    zero = jnp.zeros((1, 1, 1, 8), jnp.float32)
    key = jax.random.normal(jax.random.key(0), (1, 128, 1, 8), jnp.float32)
    _, lse = REFERENCE(zero, key, key, return_residual=True)
    np.testing.assert_allclose(lse, np.log(128), rtol=1e-6)

    inputs = _case(B=2, T=5, S=24)
    q, k, v = (jnp.asarray(inputs.floats[n], jnp.float32) for n in ("query", "key", "value"))
    dout = jnp.asarray(inputs.dout, jnp.float32)

    def merged(q, k, v):
        parts = [slice(0, 16), slice(16, 24)]
        outs, lses = zip(*(REFERENCE(q, k[:, p], v[:, p], return_residual=True) for p in parts))
        lse = jnp.logaddexp(*lses)
        return sum(jnp.exp(l - lse)[..., None] * o for l, o in zip(lses, outs)), lse

    whole = lambda q, k, v: REFERENCE(q, k, v, return_residual=True)

    def both(f):
        (out, lse), pull = jax.vjp(f, q, k, v)
        return out, lse, *pull((dout, jnp.cos(lse)))

    for a, b in zip(
        jax.jit(both, static_argnums=0)(merged), jax.jit(both, static_argnums=0)(whole)
    ):
        cases.assert_near(a, b)


@each_implementation
def test_a13_query_heads_of_a_group_are_neighbours(implementation):
    """jax-js#180, levanter#449: head n reads kv head n // (N / K), and gets its group's sum."""
    inputs = _case(B=1, T=2, S=3, N=4, K=2, Hv=8)
    value = np.broadcast_to(np.array([1.0, -1.0])[:, None], inputs.floats["value"].shape)
    inputs = inputs.replace(floats=inputs.floats | {"value": value})
    result = cases.run(implementation, inputs, jnp.bfloat16)
    expected = np.broadcast_to(np.array([1, 1, -1, -1])[:, None], result["out"].shape)
    np.testing.assert_allclose(result["out"].astype(np.float32), expected, atol=8e-3)

    # The sum over a group is made before rounding: 1 + 1/256 + ... is lost in bfloat16 one by one.
    zero = jnp.zeros((1, 1, 16, 4), jnp.bfloat16)
    kv = jnp.zeros((1, 1, 1, 4), jnp.bfloat16)
    dout = jnp.full(zero.shape, 1 / 256, jnp.bfloat16).at[0, 0, 0].set(1)
    (dv,) = jax.vjp(lambda v: implementation(zero, kv, v), kv)[1](dout)
    np.testing.assert_array_equal(dv.astype(np.float32), np.float32(jnp.bfloat16(1 + 15 / 256)))


def test_a19_decoding_sees_the_whole_past():
    """flax#5591: step i, one query and a cache that is stale past it, gives row i of the whole."""
    inputs = _case(B=2, T=5, S=5, is_causal=True)
    whole = cases.run(BLOCKED, inputs)["out"]
    q, k, v = (jnp.asarray(inputs.floats[n], jnp.float32) for n in ("query", "key", "value"))

    @jax.jit
    def step(i):
        stale = (jnp.arange(5) > i).reshape(1, 5, 1, 1)
        cache = [jnp.where(stale, jnp.nan, x) for x in (k, v)]
        row = jax.lax.dynamic_slice_in_dim(q, i, 1, 1)
        lengths = jnp.full((2,), i + 1)
        causal = BLOCKED(row, *cache, is_causal=True, q_offset=i)
        return causal, BLOCKED(row, *cache, key_value_seq_lengths=lengths)

    for i in range(5):
        for out in step(i):
            np.testing.assert_allclose(out[:, 0], whole[:, i], rtol=1e-5, atol=1e-6)
