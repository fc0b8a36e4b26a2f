"""Faults that users of comparable libraries reported, as the smallest inputs that show them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from tests.grouped_matmul import reference
from tests.grouped_matmul.test_values import assert_close, normal


@pytest.mark.parametrize(
    ("m", "k", "n", "sizes", "dtype"),
    [
        (32, 64, 43, [6, 6, 5, 5, 5, 5] + [0] * 12, "float32"),
        (16, 64, 32, [8, 0, 8, 0], "bfloat16"),
        (16, 8, 5, [0, 4, 0, 0, 12], "float32"),
        (16, 8, 5, [0, 16, 0], "float32"),
        (16, 8, 5, [0, 0, 0], "float32"),
    ],
)
def test_a7_weight_gradient_of_empty_groups(m, k, n, sizes, dtype, rng):
    """openxla/tokamax#887: empty groups had a gradient that was not zero."""
    x, w = normal(rng, (m, k), dtype), normal(rng, (len(sizes), k, n), dtype)
    sizes = np.array(sizes)
    dw = jax.grad(lambda w: jnp.sum(ragged_dot(x, w, sizes).astype(jnp.float32)))(w)
    assert dw.dtype == dtype
    ones = np.ones((m, n))
    assert_close(dw, reference.contracting(x, ones, sizes))
    assert not np.asarray(dw)[sizes == 0].any()
    assert_close(
        ragged_dot_contracting(x, jnp.ones((m, n), dtype), sizes),
        reference.contracting(x, ones, sizes),
    )


def test_a8_tail_of_padded_rows(rng):
    """pytorch/pytorch#154557: rows past the last group were never written, and their NaN spread."""
    m, k, n, sizes = 32, 16, 8, np.array([5, 0, 9, 2])
    keep = np.arange(m) < 16
    x = jnp.where(keep[:, None], normal(rng, (m, k)), jnp.nan)
    w, weight = normal(rng, (4, k, n)), jnp.where(keep, normal(rng, (m,)), 0.0)

    @jax.jit
    def run(x, w, weight):
        loss = lambda x, w, weight: jnp.sum(weight[:, None] * ragged_dot(x, w, sizes))
        return ragged_dot(x, w, sizes), jax.grad(loss, (0, 1, 2))(x, w, weight)

    clean = jnp.where(keep[:, None], x, 0.0)
    ct = np.broadcast_to(np.asarray(weight)[:, None], (m, n))
    right, dx, dw, _ = reference.ragged_dot(clean, w, sizes, ct=ct)
    for _ in range(3):
        poison = jnp.full((m, n), jnp.nan) + 0  # memory that the results may be given
        del poison
        y, (gx, gw, gweight) = run(x, w, weight)
        for actual, expected in zip((y, gx, gw, gweight), (right, dx, dw, right.sum(1))):
            assert_close(actual, expected, factor=16)
        assert not np.asarray(y)[16:].any()
        assert not np.asarray(gx)[16:].any()
        assert not np.asarray(gweight)[16:].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_error_at_most_twice_a_plain_product(dtype, rng):
    """Method note 1: against float64, and against a loop of plain products of the same dtype."""
    m, k, n, sizes = 96, 48, 40, np.array([40, 0, 33, 20])
    x, w, ct = normal(rng, (m, k), dtype), normal(rng, (4, k, n), dtype), normal(rng, (m, n), dtype)
    rows = reference.rows_of(sizes, m, 4)

    @jax.jit
    def ours(x, w, ct):
        y, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes), x, w)
        return y, *pull(ct)

    @jax.jit
    def plain(x, w, ct):
        return (
            jnp.concatenate([x[r] @ w[g] for g, r in enumerate(rows)] + [jnp.zeros_like(ct[93:])]),
            jnp.concatenate(
                [ct[r] @ w[g].T for g, r in enumerate(rows)] + [jnp.zeros_like(x[93:])]
            ),
            jnp.stack([x[r].T @ ct[r] for r in rows]),
        )

    right = reference.ragged_dot(x, w, sizes, ct=ct)
    with jax.default_matmul_precision("highest"):
        results = zip(ours(x, w, ct), plain(x, w, ct), right)
    for actual, simple, exact in results:
        errors = [np.abs(np.asarray(r, np.float64) - exact).max() for r in (actual, simple)]
        assert errors[0] <= 2 * errors[1] + 1e-6
