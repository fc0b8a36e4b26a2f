"""What is refused, by name; which implementation runs, and what is logged of it."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from tests.attention.cases import each_implementation

B, T, S, N, K, H, Hv = 2, 4, 6, 4, 2, 8, 5


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def call(**changes):
    qkv = {"query": zeros(B, T, N, H), "key": zeros(B, S, K, H), "value": zeros(B, S, K, Hv)}
    return pallas_ops.flash_attention(**(qkv | changes))


def ints(*shape):
    return zeros(*shape, dtype=jnp.int32)


# Arguments, then what the message must hold: the name, what was given, what was expected.
WRONG = {
    "query_rank": ({"query": zeros(T, H)}, "query", "(4, 8)", "T, N, H"),
    "query_dtype": ({"query": ints(B, T, N, H)}, "query", "int32", "float32"),
    "key_rank": ({"key": zeros(S, K, H)}, "key", "(6, 2, 8)", "S, K, H"),
    "key_batch": ({"key": zeros(3, S, K, H)}, "key", "(3, 6, 2, 8)", "2"),
    "key_width": ({"key": zeros(B, S, K, 7)}, "key", "(2, 6, 2, 7)", "8"),
    "key_heads": ({"key": zeros(B, S, 3, H), "value": zeros(B, S, 3, Hv)}, "key", "3", "4"),
    "value_heads": ({"value": zeros(B, S, 4, Hv)}, "value", "(2, 6, 4, 5)", "2"),
    "value_length": ({"value": zeros(B, 7, K, Hv)}, "value", "(2, 7, 2, 5)", "6"),
    "bias_shape": ({"bias": zeros(B, N, T, 5)}, "bias", "(2, 4, 4, 5)", "(2, 4, 4, 6)"),
    "bias_kv_heads": ({"bias": zeros(B, K, T, S)}, "bias", "(2, 2, 4, 6)", "(2, 4, 4, 6)"),
    "bias_rank": ({"bias": zeros(1, 1, 1, 1, 1)}, "bias", "(1, 1, 1, 1, 1)", "(2, 4, 4, 6)"),
    "bias_dtype": ({"bias": ints(T, S)}, "bias", "int32", "float32"),
    "mask_shape": ({"mask": zeros(3, 1, T, S, dtype=bool)}, "mask", "(3, 1, 4, 6)", "(2, 4, 4, 6)"),
    "mask_dtype": ({"mask": zeros(T, S)}, "mask", "float32", "bool"),
    "mask_int": ({"mask": ints(T, S)}, "mask", "int32", "bool"),
    "q_offset_shape": ({"q_offset": ints(3)}, "q_offset", "(3,)", "(2,)"),
    "q_offset_dtype": ({"q_offset": zeros(B)}, "q_offset", "float32", "integer"),
    "q_lengths_shape": ({"query_seq_lengths": ints(B, 1)}, "query_seq_lengths", "(2, 1)", "(2,)"),
    "q_lengths_dtype": ({"query_seq_lengths": zeros(B)}, "query_seq_lengths", "float32", "integer"),
    "kv_lengths_shape": (
        {"key_value_seq_lengths": ints(3)}, "key_value_seq_lengths", "(3,)", "(2,)"
    ),
    "window_negative": ({"local_window_size": -1}, "local_window_size", "-1", "negative"),
    "window_right": ({"local_window_size": (2, -3)}, "local_window_size", "-3", "negative"),
    "window_triple": ({"local_window_size": (1, 2, 3)}, "local_window_size", "(1, 2, 3)", "pair"),
    "segments_q_only": ({"q_segment_ids": ints(B, T)}, "q_segment_ids", "kv_segment_ids", "both"),
    "segments_kv_only": ({"kv_segment_ids": ints(B, S)}, "kv_segment_ids", "q_segment_ids", "both"),
    "segments_shape": (
        {"q_segment_ids": ints(B, T), "kv_segment_ids": ints(B, T)},
        "kv_segment_ids", "(2, 4)", "(2, 6)",
    ),
    "segments_dtype": (
        {"q_segment_ids": zeros(B, T), "kv_segment_ids": ints(B, S)},
        "q_segment_ids", "float32", "integer",
    ),
    "soft_cap_zero": ({"logits_soft_cap": 0.0}, "logits_soft_cap", "0.0", "positive"),
    "soft_cap_negative": ({"logits_soft_cap": -2.0}, "logits_soft_cap", "-2.0", "positive"),
    "soft_cap_nan": ({"logits_soft_cap": float("nan")}, "logits_soft_cap", "nan", "finite"),
    "soft_cap_inf": ({"logits_soft_cap": float("inf")}, "logits_soft_cap", "inf", "finite"),
    "soft_cap_past_float32": ({"logits_soft_cap": 1e39}, "logits_soft_cap", "1e+39", "finite"),
    "scale_nan": ({"scale": float("nan")}, "scale", "nan", "finite"),
    "sinks_shape": ({"sinks": zeros(K)}, "sinks", "(2,)", "(4,)"),
    "sinks_dtype": ({"sinks": ints(N)}, "sinks", "int32", "float32"),
    "rate_one": ({"dropout_rate": 1.0}, "dropout_rate", "1.0", "[0, 1)"),
    "rate_negative": ({"dropout_rate": -0.1}, "dropout_rate", "-0.1", "[0, 1)"),
    "rate_nan": ({"dropout_rate": float("nan")}, "dropout_rate", "nan", "finite"),
    "many_keys": (
        {"dropout_key": jax.random.split(jax.random.key(0), 6), "dropout_rate": 0.1},
        "dropout_key", "(6,)", "single",
    ),
    "q_offset_bool": ({"q_offset": True}, "q_offset", "bool", "integer"),
    "rate_without_key": ({"dropout_rate": 0.5}, "dropout_key", "None", "0.5"),
    "precision": ({"precision": "best"}, "precision", "'best'", "Precision"),
    "unknown": ({"implementation": "cudnn"}, "implementation", "'cudnn'", "'xla'"),
    "unknown_of_two": ({"implementation": ("xla", "x")}, "implementation", "('xla', 'x')", "'xla'"),
    "no_name": ({"implementation": ()}, "implementation", "()", "non-empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_argument(name):
    arguments, *words = WRONG[name]
    with pytest.raises(ValueError) as error:
        call(**arguments)
    for word in words:
        assert word in str(error.value)
    assert str(error.value).startswith((words[0], "q_segment_ids and kv_segment_ids"))


NO_ARRAY = {
    "query": (None, "None"),
    "value": ("a", "'a'"),
    "mask": ("a", "'a'"),
    "key_value_seq_lengths": ("a", "'a'"),
    "dropout_key": ("a", "'a'"),
}


@pytest.mark.parametrize("name", NO_ARRAY)
def test_what_is_no_array(name):
    given, word = NO_ARRAY[name]
    with pytest.raises(TypeError, match=f"^{name} must be an array, got {word}"):
        call(**{name: given})


def test_what_is_no_key():
    with pytest.raises(TypeError, match=r"^dropout_key must be a jax.random key, got .* int32"):
        call(dropout_key=jnp.int32(7), dropout_rate=0.1)
    assert call(dropout_key=jax.random.PRNGKey(0), dropout_rate=0.1).shape == (B, T, N, Hv)


def test_lengths_without_a_batch():
    """jax.nn takes a length for each of the one batch that it adds; a scalar says the same."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((T, N, H), (S, K, H), (S, K, H))
    )
    ours = [
        pallas_ops.flash_attention(q, k, v, key_value_seq_lengths=length)
        for length in (jnp.array([3]), jnp.int32(3))
    ]
    theirs = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=jnp.array([3]))
    np.testing.assert_array_equal(*ours)
    np.testing.assert_allclose(ours[0], theirs, rtol=1e-5, atol=1e-6)


def test_right_arguments_are_taken():
    out = call(bias=zeros(T, S), mask=zeros(1, S, dtype=bool), q_offset=3, sinks=zeros(N))
    assert out.shape == (B, T, N, Hv)


STATIC = {
    "scale": 0.5,
    "logits_soft_cap": 2.0,
    "local_window_size": 3,
    "dropout_rate": 0.1,
    "is_causal": True,
    "return_residual": True,
    "deterministic": True,
    "broadcast_dropout": True,
}


@pytest.mark.parametrize("name", STATIC)
def test_traced_static_argument(name):
    """Both, rule 6."""
    key = jax.random.key(0)
    with pytest.raises(TypeError, match=name):
        jax.jit(lambda x: call(dropout_key=key, **{name: x}))(STATIC[name])
    if name == "local_window_size":
        with pytest.raises(TypeError, match=name):
            jax.jit(lambda x: call(local_window_size=(1, x)))(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", "0.5"),
        ("scale", True),
        ("logits_soft_cap", "2"),
        ("local_window_size", 1.5),
        ("local_window_size", (1, 2.0)),
        ("is_causal", 1),
        ("is_causal", None),
        ("dropout_rate", None),
        ("checkpoint_name", 3),
    ],
)
def test_static_argument_of_another_type(name, value):
    with pytest.raises((TypeError, ValueError), match=name):
        call(**{name: value})


@pytest.mark.parametrize("implementation", ["xla", "reference", None])
def test_config_of_another_kind(implementation):
    """Both, rule 2: a config has an effect or raises."""
    for config in ({"block_q": 4}, 128):
        with pytest.raises((NotImplementedError, TypeError, ValueError), match="config"):
            call(implementation=implementation, config=config)


@pytest.mark.parametrize("block", [0, -1])
def test_config_of_no_size(block):
    from pallas_ops.attention import chunked

    with pytest.raises(ValueError, match="block_q"):
        chunked.Config(block_q=block, block_kv=8)


@pytest.mark.parametrize("name", ["mosaic_gpu", "triton"])
def test_a17_explicit_implementation_never_falls_back(name):
    """Asked for by name, it runs or says why it does not; in a sequence the next is tried."""
    for f in (call, jax.jit(call, static_argnames="implementation")):
        with pytest.raises(NotImplementedError, match=rf"flash_attention.*{name}"):
            f(implementation=name)
        with pytest.raises(NotImplementedError, match="mosaic_gpu"):
            f(implementation=("triton", "mosaic_gpu"))
    expected = call(implementation="xla")
    np.testing.assert_array_equal(call(implementation=(name, "xla")), expected)
    np.testing.assert_array_equal(call(implementation=[name, "reference"]), expected)


def test_a17_implementation_is_in_the_jaxpr():
    text = lambda **kwargs: str(jax.make_jaxpr(lambda: call(**kwargs))())
    assert "reference" in text(implementation="reference")
    assert "reference" not in text(implementation="xla")
    assert "reference" not in text()


def test_a17_choice_is_logged_once_for_each_call_site(caplog):
    """Which implementation runs, and why a faster one could not."""
    shape = (1, 3, 1, 6)  # of no other test: a compiled call is not logged again
    x = zeros(*shape)
    with caplog.at_level(logging.INFO, logger="pallas_ops"):
        for i in range(3):
            pallas_ops.flash_attention(x, x, x)
            jax.jit(lambda x: pallas_ops.flash_attention(x, x, x, scale=2.0))(x + i)
        pallas_ops.flash_attention(x, x, x, implementation="reference")
    records = [r for r in caplog.records if r.name == "pallas_ops"]
    assert [r.levelno for r in records] == [logging.INFO] * 3
    messages = [r.getMessage() for r in records]
    assert len(set(messages)) == 3
    for message in messages:
        assert "test_arguments.py:" in message
        assert "mosaic_gpu" in message
        assert "flash_attention_fwd" in message
    assert [("xla" in m, "reference" in m) for m in messages] == [(True, False)] * 2 + [
        (True, True)
    ]


@each_implementation
def test_pytrees_and_lists_are_not_needed(implementation):
    """Plain numpy arrays are taken as they are."""
    x = np.ones((1, 2, 1, 3), np.float32)
    out = implementation(
        x, x, x, mask=np.ones((2, 2), bool), q_offset=np.array([1]), is_causal=True
    )
    assert isinstance(out, jax.Array)


def test_arguments_follow_jax_nn():
    """The one-line switch: the same positions and names as jax.nn.dot_product_attention."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (2, 5, 4, 8), jnp.float32) for key in keys[:3])
    bias = jax.random.normal(keys[3], (1, 4, 5, 5), jnp.float32)
    mask = jnp.tril(jnp.ones((1, 1, 5, 5), bool))
    for args, kwargs in (
        ((q, k[:, :, :2], v[:, :, :2], bias, mask), {"scale": 0.3, "local_window_size": (2, 0)}),
        ((q, k, v), {"bias": bias, "key_value_seq_lengths": jnp.array([5, 2])}),
    ):
        expected = jax.nn.dot_product_attention(*args, **kwargs)
        actual = pallas_ops.flash_attention(*args, **kwargs)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
