"""The numbered attention rules of the design, against float64."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention import cases, numpy_reference
from tests.attention.cases import BLOCKED, REFERENCE, each_call, each_implementation

MASKING = (
    "mask",
    "is_causal",
    "local_window_size",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "segments",
)


@each_call()
def test_case(name, implementation):
    inputs = cases.inputs(name)
    actual = cases.run(implementation, inputs)
    cases.assert_all_near(actual, cases.truth(inputs), implementation.tolerance)
    for operand, x in inputs.floats.items():
        assert actual[operand].dtype == jnp.float32
        assert actual[operand].shape == x.shape


def _poisoned(inputs, poison):
    """Every place that no pair of the call may look at, filled with `poison`."""
    q, k, _ = (inputs.floats[n] for n in ("query", "key", "value"))
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    statics = {"is_causal", "local_window_size", "q_offset"}
    masks = {n: x for n, x in inputs.arrays.items() if n != "dropout_key"}
    masks |= {n: x for n, x in inputs.statics.items() if n in statics}
    bias = inputs.floats.get("bias")
    visible = numpy_reference.visible_pairs((B, N, T, S), bias=bias, **masks)
    dead = ~visible.any(axis=3).transpose(0, 2, 1)[..., None]  # [B, T, N, 1]
    unseen = ~visible.reshape(B, K, N // K, T, S).any(axis=(2, 3)).transpose(0, 2, 1)[..., None]
    floats = dict(inputs.floats)
    floats["query"] = np.where(dead, poison, q)
    floats["key"] = np.where(unseen, poison, k)
    floats["value"] = np.where(unseen, poison, inputs.floats["value"])
    if bias is not None:
        used = visible
        for axis in range(4):
            if axis < 4 - bias.ndim or bias.shape[axis - 4] == 1:
                used = used.any(axis=axis, keepdims=True)
        used = used.reshape(bias.shape)
        floats["bias"] = np.where(used | (bias == -np.inf), bias, poison)
    dlse = inputs.dlse if "sinks" in floats else np.where(dead[..., 0], poison, inputs.dlse)
    changed = dead.any() or unseen.any() or (bias is not None and not used.all())
    return inputs.replace(
        floats=floats, dout=np.where(dead, poison, inputs.dout), dlse=dlse
    ), changed


# In these every row, key and bias takes part in some pair: there is no place to poison.
WHOLE = ("mask_full", "mask_rank2", "causal_past_the_end")


@each_call(*MASKING, but=WHOLE)
def test_what_is_masked_out_reaches_nothing(name, implementation):
    """Rules 4 and 5, bit by bit: rows, keys, biases and cotangents that take no part."""
    inputs = cases.inputs(name)
    zeroed, _ = _poisoned(inputs, 0.0)
    clean = cases.run(implementation, zeroed)
    for poison in (np.nan, np.inf, -np.inf):
        poisoned, changed = _poisoned(inputs, poison)
        assert changed
        for operand, x in cases.run(implementation, poisoned).items():
            np.testing.assert_array_equal(x, clean[operand], err_msg=f"{operand}, {poison}")


def _packed(poison):
    """One row of 20 tokens: segment 3, padding, segment 4, padding; the padding holds `poison`."""
    rng = np.random.default_rng(0)
    ids = np.array([[3] * 6 + [0] * 3 + [4] * 7 + [0] * 4], np.int32)
    floats = {
        n: np.where(ids[..., None, None] == 0, poison, rng.normal(size=(1, 20, heads, 5)))
        for n, heads in (("query", 4), ("key", 2), ("value", 2))
    }
    floats = {n: cases.rounded(x, jnp.float32) for n, x in floats.items()}
    dout = np.where(ids[..., None, None] == 0, poison, rng.normal(size=(1, 20, 4, 5)))
    dlse = np.where(ids[..., None] == 0, poison, rng.normal(size=(1, 20, 4)))
    arrays = {"q_segment_ids": ids, "kv_segment_ids": ids}
    return cases.Inputs(floats, arrays, {}, dout, dlse), ids[0] != 0


@each_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_padding_that_sees_itself_does_not_reach_the_rest(poison, implementation):
    """Rule 5 within a block: NaN rows of a padding segment beside the rows of real ones."""
    inputs, real = _packed(poison)
    clean, _ = _packed(0.0)
    actual, expected = cases.run(implementation, inputs), cases.run(implementation, clean)
    for operand, x in actual.items():
        np.testing.assert_array_equal(x[:, real], expected[operand][:, real], err_msg=operand)
    cases.assert_all_near(expected, cases.truth(clean), implementation.tolerance)
    assert not np.isfinite(actual["out"][:, ~real]).any()


@each_implementation
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["key", "value"])
def test_keys_of_the_future_do_not_reach_the_past(where, poison, implementation):
    """Rule 5 within a block: a causal query before a NaN key, and that it shows after it."""
    inputs = cases.inputs("causal_cut", {"is_causal": True, "T": 12, "S": 12})
    clean = cases.run(implementation, inputs)
    x = inputs.floats[where].copy()
    x[:, 5, :, 1] = poison
    actual = cases.run(implementation, inputs.replace(floats=inputs.floats | {where: x}))
    for operand in ("out", "lse", "query"):
        np.testing.assert_array_equal(actual[operand][:, :5], clean[operand][:, :5])
    assert not np.isfinite(actual["out"][:, 5:]).all(axis=(0, 2, 3)).any()
    # With no cotangent from where the poison may be seen, no gradient sees it.
    dout, dlse = inputs.dout.copy(), inputs.dlse.copy()
    dout[:, 5:], dlse[:, 5:] = 0, 0
    half = inputs.replace(dout=dout, dlse=dlse)
    past = cases.run(implementation, half)
    np.testing.assert_array_equal(past["key"][:, 5:], 0)


@each_implementation
def test_order_of_bias_cap_and_mask(implementation):
    """Rule 1: scale * q.k + bias, then the cap, then masks; a sink is none of these."""
    q, k = (jnp.full((1, 1, 1, 1), x, jnp.float32) for x in (2, 3))
    v = jnp.ones((1, 1, 1, 1), jnp.float32)
    bias, sinks = jnp.full((1,), 4, jnp.float32), jnp.full((1,), 9, jnp.float32)
    options = {"scale": 0.5, "logits_soft_cap": 5.0, "return_residual": True}
    _, lse = implementation(q, k, v, bias, **options)
    np.testing.assert_allclose(lse[0, 0, 0], 5 * np.tanh(7 / 5), rtol=1e-6)
    out, lse = implementation(q, k, v, bias, sinks=sinks, **options)
    np.testing.assert_allclose(lse[0, 0, 0], np.logaddexp(5 * np.tanh(7 / 5), 9), rtol=1e-6)
    np.testing.assert_allclose(
        out[0, 0, 0, 0], np.exp(5 * np.tanh(7 / 5) - lse[0, 0, 0]), rtol=1e-5
    )
    out, lse = implementation(q, k, v, bias, jnp.zeros((1, 1), bool), sinks=sinks, **options)
    assert (out.item(), lse.item()) == (0, 9)


@each_implementation
def test_row_with_nothing_to_attend_to(implementation):
    """Rule 4: zero, -inf or the sink, no gradient; a dlse reaches the sink only."""
    inputs = cases.inputs("dead", {"mask": "B1TS", "density": 0.0, "sinks": True, "bias": "TS"})
    for sinks in (inputs.floats["sinks"], np.full(4, -np.inf)):
        result = cases.run(implementation, inputs.replace(floats=inputs.floats | {"sinks": sinks}))
        np.testing.assert_array_equal(result["out"], 0)
        expected = np.broadcast_to(sinks.astype(np.float32), inputs.dlse.shape)
        np.testing.assert_array_equal(result["lse"], expected)
        for operand in ("query", "key", "value", "bias"):
            np.testing.assert_array_equal(result[operand], 0)
        dlse = inputs.dlse.sum(axis=(0, 1)) * np.isfinite(sinks)
        np.testing.assert_allclose(result["sinks"], dlse, rtol=1e-5, atol=1e-5)


@each_implementation
def test_segment_ids_have_no_meaning(implementation):
    """Rule 2: only equality counts; zero and negative ids are ids like any other."""
    inputs = cases.inputs("segments")
    first = cases.run(implementation, inputs)
    rename = lambda x: np.select([x == 7, x == -1, x == 0], [-(2**31), 2**31 - 1, 1])
    renamed = {n: rename(x).astype(np.int32) for n, x in inputs.arrays.items()}
    second = cases.run(implementation, inputs.replace(arrays=renamed))
    for operand, x in first.items():
        np.testing.assert_array_equal(x, second[operand])


def test_extreme_offsets_and_windows_do_not_wrap():
    inputs = cases.inputs("causal_offsets")
    plain = cases.truth(inputs.replace(arrays={}, statics={}))["out"]
    for big, expected in ((2**31 - 1, plain), (-(2**31), np.zeros_like(plain))):
        offset = {"q_offset": np.full(2, big, np.int32)}
        cases.assert_near(cases.run(BLOCKED, inputs.replace(arrays=offset))["out"], expected)
    floats = {n: x.astype(np.float32) for n, x in inputs.floats.items()}
    cases.assert_near(BLOCKED(**floats, local_window_size=2**31 - 1, q_offset=2**40), plain)


@pytest.mark.parametrize("batch", [(), (2, 1, 3)])
def test_any_batch_rank(batch):
    case = {
        "B": int(np.prod(batch)),
        "segments": 2,
        "mask": "B1TS",
        "bias": "1NTS",
        "is_causal": True,
    }
    case |= {"key_value_seq_lengths": [20, 9], "q_offset": [5, 9, 12]}
    inputs = cases.inputs("ranks", case)
    expected = cases.truth(inputs)
    ranked = lambda x: np.reshape(x, (*batch, *np.shape(x)[1:]))
    floats = {n: ranked(x) if n != "bias" else x[0] for n, x in inputs.floats.items()}
    actual = cases.run(
        REFERENCE,
        cases.Inputs(
            floats,
            {n: ranked(x) for n, x in inputs.arrays.items()},
            inputs.statics,
            ranked(inputs.dout),
            ranked(inputs.dlse),
        ),
    )
    for operand, x in actual.items():
        shape = (floats | {"out": ranked(inputs.dout), "lse": ranked(inputs.dlse)})[operand].shape
        assert x.shape == shape
        cases.assert_near(x.reshape(expected[operand].shape), expected[operand], name=operand)


@each_implementation
def test_repeated_calls_give_the_same_bits(implementation):
    """Rule 10."""
    deterministic = cases.inputs("bits", {"deterministic": True})
    for call in (cases.inputs(next(iter(cases.PAIRS))), deterministic):
        first = jax.tree.map(np.asarray, cases.run(implementation, call))
        for _ in range(3):
            jax.tree.map(np.testing.assert_array_equal, first, cases.run(implementation, call))


def test_return_residual_does_not_change_the_output():
    floats = {n: x.astype(np.float32) for n, x in cases.inputs("plain").floats.items()}
    out, lse = BLOCKED(**floats, return_residual=True)
    assert lse.dtype == jnp.float32
    np.testing.assert_array_equal(BLOCKED(**floats), out)


def test_integer_arguments_of_any_dtype():
    """Both, rule 6."""
    case = {"segments": 2, "is_causal": True, "q_offset": [5, 9]}
    case |= {"query_seq_lengths": [7, 9], "key_value_seq_lengths": [20, 9]}
    inputs = cases.inputs("integers", case)
    expected = cases.truth(inputs)
    dtypes = (np.int8, np.uint8, np.int16, np.uint16, np.uint32)
    assert len(inputs.arrays) == len(dtypes)
    arrays = {n: x.astype(d) for (n, x), d in zip(inputs.arrays.items(), dtypes)}
    ids = [n for n in arrays if "segment" in n]
    arrays |= {n: (inputs.arrays[n] == 7).astype(d) for n, d in zip(ids, (np.uint16, np.int8))}
    cases.assert_all_near(cases.run(BLOCKED, inputs.replace(arrays=arrays)), expected)


def test_numpy_and_python_arguments():
    """What is an array may come from numpy, what is a Python value from a numpy scalar."""
    inputs = cases.inputs("plain", {"scale": 0.25, "local_window_size": 3, "q_offset": 2})
    floats = {n: x.astype(np.float32) for n, x in inputs.floats.items()}
    out = BLOCKED(
        **floats, scale=np.float32(0.25), local_window_size=[np.int64(3), 3], q_offset=np.int32(2)
    )
    cases.assert_near(out, cases.truth(inputs)["out"])


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scale_is_taken_as_given(scale):
    inputs = cases.inputs("plain", {"scale": scale})
    floats = {n: x.astype(np.float32) for n, x in inputs.floats.items()}
    cases.assert_near(BLOCKED(**floats, scale=scale), cases.truth(inputs)["out"])


def test_tiling_changes_nothing():
    """One block against several: the same call within rounding, dropout mask and all."""
    inputs = cases.inputs(next(iter(cases.PAIRS)))
    whole = dataclasses.replace(BLOCKED, config=None)
    cases.assert_all_near(cases.run(whole, inputs), cases.run(BLOCKED, inputs))


def test_pairs_meet():
    """The covering of cases.PAIRS, counted apart from how it is made."""
    names = {n: {a for a in cases.ARRAY_FEATURES if a in n} for n in cases.PAIRS}
    for a, b in itertools.permutations(cases.ARRAY_FEATURES, 2):
        assert any({a, b} <= on for on in names.values()), (a, b)
        assert any(a in on and b not in on for on in names.values()), (a, b)
