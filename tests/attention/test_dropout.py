"""The dropout mask: its statistics, and what must not change it (rule 9)."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.attention import chunked
from tests.attention import cases
from tests.attention.cases import BLOCKED, each_implementation

B, T, S, N = 4, 48, 64, 4


@pytest.fixture(scope="module")
def masks():
    """bool[rate, B, N, T, S]"""
    return {rate: cases.kept(jax.random.key(1), rate, B, T, S, N) for rate in (0.1, 0.5)}


def _sigmas(sample, probability):
    """How far a sample's mean is from a probability, in standard deviations."""
    return abs(sample.mean() - probability) / np.sqrt(probability * (1 - probability) / sample.size)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_rate(masks, rate):
    keep = masks[rate]
    assert _sigmas(keep, 1 - rate) < 4
    for axes in ((2, 3), (0, 1, 3), (0, 1, 2)):  # each head, row, column
        means = keep.mean(axis=axes)
        count = keep.size / means.size
        spread = means.var() / (rate * (1 - rate) / count)
        assert abs(spread - 1) < 4 * np.sqrt(2 / means.size), axes


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("axis", range(4))
def test_neighbours_are_independent(masks, rate, axis):
    keep = masks[rate]
    size = keep.shape[axis]
    for step in (1, 2, 3):
        first, second = (np.take(keep, range(a, a + size - step), axis) for a in (0, step))
        assert _sigmas(first == second, rate**2 + (1 - rate) ** 2) < 4.5


def test_rows_and_columns_are_not_combined_linearly(masks):
    """Of the four corners of a rectangle, an even number is kept half of the time."""
    keep = masks[0.5]
    for dt, ds in itertools.product((1, 2, 4, 16), (1, 2, 8, 32)):
        a, b = keep[:, :, : T - dt], keep[:, :, dt:]
        parity = a[..., : S - ds] ^ a[..., ds:] ^ b[..., : S - ds] ^ b[..., ds:]
        # Rectangles overlap, so their parities vary more than independent draws.
        assert abs(parity.mean() - 0.5) < 0.03


def test_no_two_heads_or_rows_share_a_mask(masks):
    rows = masks[0.5].reshape(-1, S)
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("block", [(16, 16), (5, 64), (48, 24)])
def test_tiling_does_not_change_it(masks, block):
    implementation = dataclasses.replace(BLOCKED, config=chunked.Config(*block))
    mask = cases.kept(jax.random.key(1), 0.1, B, T, S, N, implementation=implementation)
    np.testing.assert_array_equal(mask, masks[0.1])


def test_other_arguments_do_not_change_it(masks):
    """Neither grouping nor what else masks; the mask of fewer keys is a part of that of more."""
    grouped = cases.kept(jax.random.key(1), 0.1, B, T, S, N, K=2)
    np.testing.assert_array_equal(grouped, masks[0.1])
    lengths = np.array([64, 30, 1, 0], np.int32)
    cut = cases.kept(jax.random.key(1), 0.1, B, T, S, N, key_value_seq_lengths=lengths, q_offset=3)
    inside = np.arange(S) < lengths[:, None, None, None]
    np.testing.assert_array_equal(cut, masks[0.1] & inside)


def test_key_decides_it(masks):
    other = cases.kept(jax.random.key(2), 0.1, B, T, S, N)
    assert _sigmas(other == masks[0.1], 0.1**2 + 0.9**2) < 4
    raw = cases.kept(jax.random.PRNGKey(1), 0.1, B, T, S, N)
    np.testing.assert_array_equal(raw, masks[0.1])


@each_implementation
def test_broadcast_dropout_shares_one_mask(implementation):
    run = lambda shared: cases.kept(
        jax.random.key(3), 0.5, B, T, S, N, implementation=implementation, broadcast_dropout=shared
    )
    mask = run(True)
    np.testing.assert_array_equal(mask, np.broadcast_to(mask[:1, :1], mask.shape))
    assert _sigmas(mask[0, 0], 0.5) < 4
    assert (mask == run(False)).all(axis=(2, 3)).sum() <= 1


def test_lse_and_zero_rate_are_untouched():
    inputs = cases.inputs("plain", {})
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.floats.items()}
    run = lambda **dropout: BLOCKED(**floats, return_residual=True, **dropout)
    (out, lse), key = run(), jax.random.key(0)
    np.testing.assert_array_equal(run(dropout_rate=0.4, dropout_key=key)[1], lse)
    np.testing.assert_array_equal(run(dropout_rate=0.0, dropout_key=key)[0], out)
    tiny, _ = run(dropout_rate=1e-9, dropout_key=key)
    np.testing.assert_allclose(tiny, out, rtol=1e-6, atol=1e-6)
    most, _ = run(dropout_rate=0.9999, dropout_key=key)
    assert (most == 0).mean() > 0.9
    assert np.isfinite(most).all()
