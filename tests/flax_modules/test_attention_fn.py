"""`attention_fn` against Flax's own attention, in nnx and in linen."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from flax_modules import apply_rope, attention_fn

FEATURES, HEADS = 16, 4
STATIC = ("is_causal", "decode", "deterministic")


def normal(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


def nnx_pair(fn=attention_fn, **options):
    """The same nnx layer twice: with Flax's attention, and with `fn`."""
    options = dict(num_heads=HEADS, in_features=FEATURES, decode=False) | options
    return [
        nnx.MultiHeadAttention(**options, **extra, rngs=nnx.Rngs(0))
        for extra in ({}, {"attention_fn": fn})
    ]


# Whole layers in one compilation each: op by op, every test would compile dozens.
call = nnx.jit(lambda layer, x, **options: layer(x, **options), static_argnames=STATIC)


def close(actual, expected, tolerance=2e-6):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), atol=tolerance, rtol=1e-5
    )


def padding_mask(batch, length):
    valid = jnp.arange(length) < length - 1 - jnp.arange(batch)[:, None] % 3
    return nnx.make_attention_mask(valid, valid), valid


@pytest.mark.parametrize(
    ("batch", "kv_heads"), [((), 4), ((2,), 4), ((2,), 1), ((2, 3), 2)], ids=str
)
def test_nnx_causal(rng, batch, kv_heads):
    theirs, ours = nnx_pair(num_kv_heads=kv_heads)
    x = normal(rng, *batch, 7, FEATURES)
    mask = nnx.make_causal_mask(jnp.ones((*batch, 7)))
    assert mask.dtype == jnp.float32
    expected = call(theirs, x, mask=mask)
    close(call(ours, x, mask=mask), expected)
    close(call(ours, x, is_causal=True), expected)


def test_nnx_padding_mask_with_is_causal(rng):
    theirs, ours = nnx_pair()
    x = normal(rng, 3, 7, FEATURES)
    mask, valid = padding_mask(3, 7)
    expected = call(theirs, x, mask=mask, is_causal=True)
    actual = call(ours, x, mask=mask, is_causal=True)
    assert jnp.isfinite(actual).all()
    close(actual[valid], expected[valid])
    # Nothing to attend to gives 0, of which the output projection leaves its bias (0 at the start).
    close(actual[~valid], jnp.zeros_like(actual[~valid]))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((7, 7), bool),
        ((1, 7, 7), jnp.bfloat16),
        ((4, 7, 7), np.int32),
        ((1, 4, 7, 7), np.float32),
        ((3, 1, 1, 7), np.float32),
    ],
    ids=str,
)
def test_mask_shapes_and_dtypes(rng, shape, dtype):
    query, key, value = normal(rng, 3, 3, 7, 4, 8)
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    expected = jax.jit(nnx.dot_product_attention)(
        query, key, value, mask=jnp.broadcast_to(mask, (3, 4, 7, 7))
    )
    # Any value but 0 keeps, as where() reads it in Flax.
    mask = jnp.asarray(mask * 2).astype(dtype)
    close(jax.jit(attention_fn)(query, key, value, mask=mask), expected)


def test_nnx_gradients(rng):
    x, cotangent = normal(rng, 2, 2, 7, FEATURES)
    mask = nnx.make_causal_mask(jnp.ones((2, 7)))

    def loss(model, x):
        return jnp.sum(model(x, mask=mask) * cotangent)

    grad = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    theirs, ours = (grad(model, x) for model in nnx_pair(num_kv_heads=2))
    jax.tree.map(functools.partial(close, tolerance=2e-5), ours, theirs)


def test_linen(rng):
    x = normal(rng, 2, 3, 7, FEATURES)
    mask = linen.make_causal_mask(jnp.ones((2, 3, 7)))
    theirs = linen.MultiHeadDotProductAttention(num_heads=HEADS)
    ours = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, attention_fn=attention_fn, force_fp32_for_softmax=True
    )
    variables = jax.jit(theirs.init)(jax.random.key(0), x)
    expected = jax.jit(theirs.apply)(variables, x, mask=mask)
    apply = jax.jit(ours.apply)
    close(apply(variables, x, mask=mask), expected)
    assert jnp.abs(apply(variables, x) - expected).max() > 1e-2

    def loss(layer):
        return lambda v: jnp.sum(layer.apply(v, x, mask=mask) * jnp.sin(x))

    close_ = functools.partial(close, tolerance=2e-5)
    grads = [jax.jit(jax.grad(loss(layer)))(variables) for layer in (ours, theirs)]
    jax.tree.map(close_, *grads)


def test_linen_reads_every_option_from_the_signature():
    """Linen passes only what the signature names: an option missing there is dropped in silence."""
    named = set(inspect.signature(attention_fn).parameters)
    for original in (nnx.dot_product_attention, linen.dot_product_attention):
        assert set(inspect.signature(original).parameters) <= named
    bound = functools.partial(attention_fn, local_window_size=(3, 0))
    assert named == set(inspect.signature(bound).parameters)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_decode_equals_full_forward(rng, is_causal, kv_heads):
    """google/flax#5591: with the flag, a step of decoding must not see key 0 only."""
    _, model = nnx_pair(num_heads=2, in_features=4, num_kv_heads=kv_heads)
    x = normal(rng, 3, 5, 4)
    full = call(model, x, is_causal=True)
    model.init_cache((3, 5, 4))
    for i in range(5):
        step = call(model, x[:, i : i + 1], is_causal=is_causal, decode=True)
        close(step, full[:, i : i + 1])


def test_decode_with_the_flag_of_older_flax(rng):
    """Older releases of nnx pass is_causal=True with the single query of a decoding step."""
    query, key, value = normal(rng, 3, 2, 5, 4, 8)
    attend = jax.jit(functools.partial(attention_fn, is_causal=True))
    full = attend(query, key, value)
    for i in range(5):
        occupied = jnp.broadcast_to(jnp.arange(5) <= i, (2, 1, 1, 5)).astype(jnp.float32)
        step = attend(query[:, i : i + 1], key, value, mask=occupied)
        close(step, full[:, i : i + 1])
        explicit = attend(query[:, i : i + 1], key, value, q_offset=i)
        close(explicit, full[:, i : i + 1])


def test_decode_in_linen(rng):
    x = normal(rng, 2, 5, FEATURES)
    layer = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
    variables = jax.jit(layer.init)(jax.random.key(0), x)
    full = jax.jit(layer.apply)(variables, x, mask=linen.make_causal_mask(jnp.ones((2, 5))))
    decoder = layer.clone(decode=True)
    cache = jax.jit(decoder.init)(jax.random.key(0), x)["cache"]
    step = jax.jit(functools.partial(decoder.apply, mutable=["cache"]))
    for i in range(5):
        out, updated = step({**variables, "cache": cache}, x[:, i : i + 1])
        cache = updated["cache"]
        close(out, full[:, i : i + 1])


def dropped(rate, *, broadcast, key, batch=2, length=64, heads=4):
    """Uniform attention weights after dropout, times the number of keys."""
    query = jnp.zeros((batch, length, heads, length))
    value = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))
    attend = functools.partial(attention_fn, dropout_rate=rate, broadcast_dropout=broadcast)
    weights = jax.jit(attend)(query, query, value, dropout_rng=key)
    return np.asarray(weights.swapaxes(1, 2)) * length  # [B, N, T, S]


@pytest.mark.parametrize(("rate", "broadcast"), [(0.1, False), (0.5, True)])
def test_dropout_statistics(rate, broadcast):
    weights = dropped(rate, broadcast=broadcast, key=jax.random.key(1))
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], 1 / (1 - rate), rtol=1e-5)
    masks = kept.reshape(8, -1)[: 1 if broadcast else 8]
    assert abs(masks.mean() - (1 - rate)) < 4 * np.sqrt(rate * (1 - rate) / masks.size)
    same = [np.array_equal(kept[0, 0], kept[b, n]) for b, n in np.ndindex(2, 4)]
    assert same == [True] + [broadcast] * 7


def test_dropout_is_a_function_of_the_key():
    key, other = jax.random.key(1), jax.random.key(2)
    first = dropped(0.3, broadcast=False, key=key)
    np.testing.assert_array_equal(first, dropped(0.3, broadcast=False, key=key))
    assert (first != dropped(0.3, broadcast=False, key=other)).mean() > 0.2


def test_dropout_in_both_layers(rng):
    x = normal(rng, 2, 9, FEATURES)
    layer = nnx_pair(dropout_rate=0.5)[1]
    samples = np.stack([call(layer, x, deterministic=False) for _ in range(200)])
    error = samples.mean(axis=0) - call(layer, x, deterministic=True)
    assert (np.abs(error) < 5 * samples.std(axis=0) / np.sqrt(200) + 1e-6).all()
    assert not np.array_equal(samples[0], samples[1])

    layer = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, dropout_rate=0.5, attention_fn=attention_fn
    )
    variables = layer.init(jax.random.key(0), x, deterministic=True)
    apply = jax.jit(
        lambda key: layer.apply(variables, x, deterministic=False, rngs={"dropout": key})
    )
    first = apply(jax.random.key(1))
    np.testing.assert_array_equal(first, apply(jax.random.key(1)))
    assert not jnp.array_equal(first, apply(jax.random.key(2)))


def test_dropout_gradient_uses_the_mask_of_the_forward():
    key = jax.random.key(3)
    query = jnp.zeros((1, 8, 2, 8))

    def loss(value):
        return jnp.sum(
            attention_fn(query, query, value, dropout_rng=key, dropout_rate=0.5)
            * jnp.arange(1.0, 9.0)[:, None, None]
        )

    value = jnp.broadcast_to(jnp.eye(8)[:, None], (1, 8, 2, 8))
    weights = attention_fn(query, query, value, dropout_rng=key, dropout_rate=0.5)  # [1, T, N, S]
    expected = jnp.einsum("btns,t->bsn", weights, jnp.arange(1.0, 9.0))
    close(jax.jit(jax.grad(loss))(value), jnp.broadcast_to(expected[..., None], value.shape))


def test_promotes_like_flax(rng):
    query, key, value = (
        normal(rng, 2, 5, 2, 8, dtype=d) for d in (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    )
    assert jax.eval_shape(attention_fn, query, key, value).dtype == jnp.float32
    out = attention_fn(query, key, value, dtype=jnp.bfloat16)
    close(out, nnx.dot_product_attention(query, key, value, dtype=jnp.bfloat16), tolerance=2e-2)
    promote = lambda arrays, dtype: tuple(a.astype(jnp.float16) for a in arrays)
    assert attention_fn(query, key, value, promote_dtype=promote).dtype == jnp.float16
    theirs, ours = nnx_pair(dtype=jnp.bfloat16)
    x = normal(rng, 2, 5, FEATURES)
    close(call(ours, x), call(theirs, x), tolerance=3e-2)


def test_bias(rng):
    query, key, value = normal(rng, 3, 2, 5, 2, 8)
    bias = normal(rng, 1, 2, 5, 5)
    close(
        attention_fn(query, key, value, bias),
        nnx.dot_product_attention(query, key, value, bias),
    )
    five = [x.reshape(2, 1, *x.shape[1:]) for x in (query, key, value)]
    out = attention_fn(*five, bias[None])
    close(out[:, 0], attention_fn(query, key, value, bias))


def test_jit_compiles_once(rng):
    query, key, value = normal(rng, 3, 2, 7, 4, 8)
    traces = []

    @jax.jit
    def attend(mask, lengths, segments):
        traces.append(mask)
        return attention_fn(
            query, key, value, mask=mask, key_value_seq_lengths=lengths,
            q_segment_ids=segments, kv_segment_ids=segments,
        )  # fmt: skip

    for n in (3, 5, 7):
        valid = jnp.broadcast_to(jnp.arange(7) < n, (2, 1, 1, 7))
        everything = jnp.ones((2, 1, 1, 7), bool)
        full, one = jnp.full(2, 7), jnp.zeros((2, 7), jnp.int32)
        by_mask = attend(valid, full, one)
        close(attend(everything, jnp.full(2, n), one), by_mask)
        by_segment = attend(everything, full, one.at[:, n:].set(1))
        close(by_segment[:, :n], by_mask[:, :n])
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((128, 64), dict()),
        ((128, 80), dict()),
        ((1, 64), dict()),
        ((128, 64), dict(num_kv_heads=1)),
        ((128, 64), dict(dropout_rate=0.1)),
    ],
    ids=str,
)
def test_no_setting_takes_another_path(shape, options):
    """NVIDIA/TransformerEngine#2485: a layer's default dtype chose the slow path in silence."""
    length, head_dim = shape
    options = dict(num_heads=2, in_features=2 * head_dim, deterministic=False) | options
    layer = nnx_pair(**options)[1]
    x = jnp.ones((2, length, 2 * head_dim), jnp.bfloat16)
    for mask in (None, jnp.ones((2, 1, length, length))):
        forward = lambda x, mask: layer(x, mask=mask, rngs=nnx.Rngs(0))
        program = str(jax.make_jaxpr(forward)(x, mask))
        assert program.count("flash_attention_fwd") == 1
        assert f"[2,2,{length},{length}]" not in program


def test_partial_options(rng):
    query, key, value = normal(rng, 3, 2, 9, 2, 8)
    t, s = jnp.arange(9)[:, None], jnp.arange(9)
    segments = jnp.asarray([[1] * 4 + [2] * 5, [1] * 9])
    same = (segments[:, :, None] == segments[:, None, :])[:, None]
    reference = functools.partial(jax.jit(nnx.dot_product_attention), query, key, value)

    def ours(**options):
        return jax.jit(functools.partial(attention_fn, **options))(query, key, value)

    close(
        ours(is_causal=True, local_window_size=(2, 0)),
        reference(mask=jnp.broadcast_to((s <= t) & (s >= t - 2), (2, 2, 9, 9))),
    )
    close(
        ours(q_segment_ids=segments, kv_segment_ids=segments),
        reference(mask=jnp.broadcast_to(same, (2, 2, 9, 9))),
    )
    close(
        ours(key_value_seq_lengths=jnp.asarray([4, 6])),
        reference(
            mask=jnp.broadcast_to(s < jnp.asarray([4, 6])[:, None, None, None], (2, 2, 9, 9))
        ),
    )
    close(
        ours(is_causal=True, q_offset=2), reference(mask=jnp.broadcast_to(s <= t + 2, (2, 2, 9, 9)))
    )
    assert not jnp.allclose(ours(scale=1.0), ours())
    assert not jnp.allclose(ours(logits_soft_cap=0.5), ours())
    assert not jnp.allclose(ours(sinks=jnp.ones(2)), ours())
    close(ours(implementation="reference", deterministic_gradients=True), ours())
    close(ours(implementation="xla", precision=jax.lax.Precision.HIGHEST), ours())
    lengths = ours(query_seq_lengths=jnp.asarray([4, 9]))
    close(lengths[0, 4:], jnp.zeros_like(lengths[0, 4:]))

    _, layer = nnx_pair(functools.partial(attention_fn, local_window_size=(2, 0)))
    plain, _ = nnx_pair()
    x = normal(rng, 2, 9, FEATURES)
    window = jnp.broadcast_to(((s <= t) & (s >= t - 2)), (2, 1, 9, 9))
    close(call(layer, x, is_causal=True), call(plain, x, mask=window))


def rotated(x, positions, theta=10000.0):
    """Rotary embedding in float64 numpy, pairs (i, i + H/2)."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half)  # [.., T, H/2]
    cos, sin = np.cos(angle)[..., None, :], np.sin(angle)[..., None, :]
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_apply_rope(rng, batch):
    x = normal(rng, *batch, 5, 2, 8)
    rope = nnx.RoPE()
    positions = rng.integers(0, 50, (*batch, 5))
    close(apply_rope(rope, x, jnp.asarray(positions)), jnp.asarray(rotated(x, positions), x.dtype))
    close(apply_rope(rope, x), jnp.asarray(rotated(x, np.arange(5)), x.dtype))
    close(apply_rope(rope, x, jnp.arange(5)), apply_rope(rope, x))
    assert apply_rope(rope, x.astype(jnp.bfloat16), positions).dtype == jnp.bfloat16


def test_rope_and_input_positions_in_nnx(rng):
    rope = nnx.RoPE()
    _, ours = nnx_pair(functools.partial(attention_fn, rope=rope))
    _, theirs = nnx_pair(functools.partial(nnx.dot_product_attention_with_rope, rope=rope))
    x = normal(rng, 2, 7, FEATURES)
    close(call(ours, x, is_causal=True), call(theirs, x, is_causal=True))
    # Rotary attention is relative: a common shift changes nothing, other positions do.
    shifted = call(ours, x, is_causal=True, input_positions=jnp.arange(7) + 20)
    close(shifted, call(ours, x, is_causal=True), tolerance=2e-5)
    packed = jnp.asarray([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6]])
    out = call(ours, x, is_causal=True, input_positions=packed)
    close(out[1], call(ours, x, is_causal=True)[1])
    assert not jnp.allclose(out[0], call(ours, x, is_causal=True)[0], atol=1e-3)


def test_errors_name_the_argument(rng):
    query, key, value = normal(rng, 3, 2, 5, 2, 8)
    call = functools.partial(attention_fn, query, key, value)
    for hook in ("einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        with pytest.raises(NotImplementedError, match=hook):
            call(**{hook: jnp.einsum})
    with pytest.raises(NotImplementedError, match=r"module .*sow_weights"):
        nnx_pair()[1](normal(rng, 2, 5, FEATURES), sow_weights=True)
    layer = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn)
    with pytest.raises(NotImplementedError, match=r"module .*sow_weights"):
        layer.init(jax.random.key(0), normal(rng, 2, 5, FEATURES), sow_weights=True)
    with pytest.raises(ValueError, match="dropout_rng"):
        call(dropout_rate=0.1)
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="dropout_rate"):
            call(dropout_rate=rate, deterministic=True)
    with pytest.raises(TypeError, match="dropout_rate"):
        jax.jit(lambda rate: call(dropout_rate=rate, dropout_rng=jax.random.key(0)))(0.1)
    with pytest.raises(ValueError, match="input_positions"):
        call(input_positions=jnp.arange(5))
    with pytest.raises(ValueError, match=r"positions .*\(2, 5\).*\(4,\)"):
        call(rope=nnx.RoPE(), input_positions=jnp.arange(4))
    with pytest.raises(ValueError, match="rope"):
        attention_fn(query[:, :1], key, value, rope=nnx.RoPE())
    with pytest.raises(ValueError, match=r"local_window_size.*q_offset"):
        attention_fn(query[:, :1], key, value, local_window_size=2)
    with pytest.raises(ValueError, match="kv_segment_ids"):
        call(q_segment_ids=jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="mask"):
        call(mask=jnp.ones((2, 1, 4, 4)))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        call(implementation="mosaic_gpu")
