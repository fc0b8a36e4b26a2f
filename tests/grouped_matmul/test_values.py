"""Values and gradients against float64 numpy; rows of no group poisoned with NaN everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from pallas_ops.grouped_matmul.xla import Config
from tests.grouped_matmul import reference

ACTIVATIONS = (None, "relu", "gelu", "silu", "swiglu", "geglu")
DTYPES = ("float32", "bfloat16", "float16")
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}


def assert_close(actual, expected, dtype=None, factor=4.0):
    """Within `factor` rounding errors of `dtype`, of the largest entry of the expected array."""
    eps = EPS[jnp.dtype(dtype or actual.dtype).name]
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    scale = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=factor * eps * scale)


def normal(rng, shape, dtype="float32"):
    return jnp.asarray(rng.normal(size=shape), dtype)


def poison(x, keep):
    """x with NaN in the rows that are not kept."""
    return jnp.where(jnp.asarray(keep)[:, None], x, jnp.full_like(x, jnp.nan))


@st.composite
def problems(draw):
    """Sizes of any kind: empty, negative, past M, short of M; an offset within or outside."""
    m, k, n = (draw(st.integers(0, 40)), draw(st.integers(0, 9)), 2 * draw(st.integers(0, 6)))
    total = draw(st.integers(0, 6))
    sizes = draw(st.lists(st.integers(-3, 20), min_size=total, max_size=total))
    offset = draw(st.none() | st.integers(-3, total + 2))
    groups = total if offset is None else draw(st.integers(0, 4))
    return dict(
        m=m, k=k, n=n, sizes=sizes, offset=offset, groups=groups,
        transpose_rhs=draw(st.booleans()), use_bias=draw(st.booleans()),
        activation=draw(st.sampled_from(ACTIVATIONS)), dtype=draw(st.sampled_from(DTYPES)),
        block_m=draw(st.sampled_from([None, 1, 3, 8])), seed=draw(st.integers(0, 2**16)),
    )  # fmt: skip


@settings(max_examples=12)
@given(problems())
@example(
    dict(m=37, k=5, n=8, sizes=[5, 0, 9, 11], offset=None, groups=4, transpose_rhs=True,
         use_bias=True, activation="swiglu", dtype="float32", block_m=4, seed=0)
)  # fmt: skip
def test_ragged_dot(p):
    rng = np.random.default_rng(p["seed"])
    m, k, n, groups, dtype = p["m"], p["k"], p["n"], p["groups"], p["dtype"]
    where = dict(offset=p["offset"] or 0)
    keep = reference.inside(p["sizes"], m, groups, **where)
    lhs, w = normal(rng, (m, k), dtype), normal(rng, (groups, k, n), dtype)
    rhs = w.transpose(0, 2, 1) if p["transpose_rhs"] else w
    bias = normal(rng, (groups, n), dtype) if p["use_bias"] else None
    width = n // 2 if p["activation"] in ("swiglu", "geglu") else n
    ct = normal(rng, (m, width), dtype)

    def f(lhs, rhs, bias):
        return ragged_dot(
            lhs, rhs, np.asarray(p["sizes"], np.int32), group_offset=p["offset"], bias=bias,
            transpose_rhs=p["transpose_rhs"], activation=p["activation"],
            config=p["block_m"] and Config(p["block_m"]),
        )  # fmt: skip

    @jax.jit
    def run(lhs, rhs, bias, ct):
        out, pull = jax.vjp(f, lhs, rhs, bias)
        return out, pull(ct)

    out, (dlhs, drhs, dbias) = run(poison(lhs, keep), rhs, bias, poison(ct, keep))
    expected = reference.ragged_dot(
        lhs, rhs, p["sizes"], transpose_rhs=p["transpose_rhs"], bias=bias,
        activation=p["activation"], ct=ct, **where,
    )  # fmt: skip
    assert out.dtype == dlhs.dtype == drhs.dtype == dtype
    assert_close(out, expected[0], factor=8)
    # A low-precision pre-activation is kept in the residuals, so its rounding enters the gradients.
    assert_close(dlhs, expected[1], factor=32)
    assert_close(drhs, expected[2], factor=32)
    if bias is not None:
        assert_close(dbias, expected[3], factor=32)
    assert not np.asarray(out)[~keep].any()
    assert not np.asarray(dlhs)[~keep].any()


@settings(max_examples=10)
@given(problems())
def test_contracting(p):
    rng = np.random.default_rng(p["seed"])
    m, k, n, groups, dtype = p["m"], p["k"], p["n"], p["groups"], p["dtype"]
    where = dict(offset=p["offset"] or 0)
    keep = reference.inside(p["sizes"], m, groups, **where)
    lhs, rhs, ct = (normal(rng, s, dtype) for s in ((m, k), (m, n), (groups, k, n)))
    accumulate = normal(rng, (groups, k, n), dtype) if p["use_bias"] else None

    def f(lhs, rhs, accumulate):
        return ragged_dot_contracting(
            lhs, rhs, np.asarray(p["sizes"], np.int32), group_offset=p["offset"], num_groups=groups,
            accumulate=accumulate, config=p["block_m"] and Config(p["block_m"]),
        )  # fmt: skip

    @jax.jit
    def run(lhs, rhs, accumulate, ct):
        out, pull = jax.vjp(f, lhs, rhs, accumulate)
        return out, pull(ct)

    out, (dlhs, drhs, daccumulate) = run(poison(lhs, keep), poison(rhs, keep), accumulate, ct)
    expected = reference.contracting(
        lhs, rhs, p["sizes"], groups=groups, accumulate=accumulate, ct=ct, **where
    )
    assert out.dtype == dlhs.dtype == drhs.dtype == dtype
    for actual, right in zip((out, dlhs, drhs), expected):
        assert_close(actual, right, factor=8)
    rows = reference.rows_of(p["sizes"], m, groups, **where)
    for g, r in enumerate(rows):
        if r.start == r.stop:
            np.testing.assert_array_equal(out[g], 0 if accumulate is None else accumulate[g])
    if accumulate is not None:
        np.testing.assert_array_equal(daccumulate, ct)
    assert not np.asarray(dlhs)[~keep].any()
    assert not np.asarray(drhs)[~keep].any()
