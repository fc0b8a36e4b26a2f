"""`MoE` against a plain loop over tokens and their experts, in float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_modules import MoE

TOKENS, FEATURES, HIDDEN, EXPERTS = 24, 8, 6, 5


def make(k=2, *, experts=EXPERTS, seed=0, **options):
    return MoE(FEATURES, HIDDEN, experts, k, rngs=nnx.Rngs(seed), **options)


def arrays(model):
    return [
        np.asarray(p, np.float64)
        for p in (model.router.kernel[...], model.gate_up[...], model.down[...])
    ]


def softmax(z):
    z = np.exp(z - z.max())
    return z / z.sum()


def silu(z):
    return z / (1 + np.exp(-z))


def plain(x, router, gate_up, down, k, order="before", renormalize=False):
    """One token after the other: (y, weights of the tokens' experts, experts, probabilities)."""
    y = np.zeros_like(x)
    chosen_weights, chosen, probabilities = [], [], []
    for i, token in enumerate(x):
        logits = token @ router
        p = softmax(logits)
        experts = np.argsort(-logits, kind="stable")[:k]
        weights = p[experts] if order == "before" else softmax(logits[experts])
        if renormalize:
            weights = weights / weights.sum()
        for e, w in zip(experts, weights, strict=True):
            gate, up = np.split(token @ gate_up[e], 2)
            y[i] += w * ((silu(gate) * up) @ down[e])
        chosen_weights.append(weights)
        chosen.append(experts)
        probabilities.append(p)
    return y, np.array(chosen_weights), np.array(chosen), np.array(probabilities)


def plain_grads(x, router, gate_up, down, k, dy, order="before", renormalize=False):
    """Gradients of sum(y * dy) for x, router, gate_up and down, written out by hand."""
    dx, drouter, dgate_up, ddown = (np.zeros_like(a) for a in (x, router, gate_up, down))
    _, all_weights, all_experts, probabilities = plain(x, router, gate_up, down, k)
    for i, token in enumerate(x):
        experts, p = all_experts[i], probabilities[i]
        if order == "after" or renormalize:
            weights = p[experts] / p[experts].sum()
        else:
            weights = all_weights[i]
        dweights = np.zeros(k)
        for j, e in enumerate(experts):
            gate, up = np.split(token @ gate_up[e], 2)
            s = 1 / (1 + np.exp(-gate))
            hidden = gate * s * up
            dweights[j] = dy[i] @ (hidden @ down[e])
            dout = weights[j] * dy[i]
            ddown[e] += np.outer(hidden, dout)
            dhidden = down[e] @ dout
            dpre = np.concatenate([dhidden * up * s * (1 + gate * (1 - s)), dhidden * gate * s])
            dgate_up[e] += np.outer(token, dpre)
            dx[i] += gate_up[e] @ dpre
        dlogits = np.zeros(router.shape[1])
        if order == "after" or renormalize:
            dlogits[experts] = weights * (dweights - weights @ dweights)
        else:
            dp = np.zeros(router.shape[1])
            dp[experts] = dweights
            dlogits = p * (dp - p @ dp)
        drouter += np.outer(token, dlogits)
        dx[i] += router @ dlogits
    return dx, drouter, dgate_up, ddown


def close(actual, expected, tolerance=2e-6):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, atol=tolerance * max(1, np.abs(expected).max()))


# Whole layers in one compilation each: op by op, every test would compile dozens.
call = nnx.jit(lambda model, *args: model(*args))


@nnx.jit
@functools.partial(nnx.grad, argnums=(0, 1), has_aux=True)
def grads_of(model, x, dy, mask=None, balance=0.0):
    y, stats = model(x, mask)
    return jnp.sum(y * dy) + balance * stats.load_balance_loss, (y, stats)


@pytest.mark.parametrize(
    ("k", "order", "renormalize"),
    [
        (1, "before", False),
        (2, "before", False),
        (EXPERTS, "before", False),
        (2, "before", True),
        (2, "after", False),
    ],
)
def test_matches_a_loop_over_tokens(rng, k, order, renormalize):
    model = make(k, softmax_order=order, renormalize=renormalize)
    x, dy = rng.normal(size=(2, TOKENS, FEATURES))
    single = functools.partial(jnp.asarray, dtype=jnp.float32)
    (grads, dx), (y, stats) = grads_of(model, single(x), single(dy))
    expected, _, experts, probabilities = plain(x, *arrays(model), k, order, renormalize)
    close(y, expected)
    counts = np.bincount(experts.ravel(), minlength=EXPERTS)
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    balance = EXPERTS * np.sum(counts / (TOKENS * k) * probabilities.mean(axis=0))
    close(stats.load_balance_loss, balance)

    expected = plain_grads(x, *arrays(model), k, dy, order, renormalize)
    actual = (dx, grads.router.kernel[...], grads.gate_up[...], grads.down[...])
    for a, e in zip(actual, expected, strict=True):
        close(a, e, tolerance=1e-5)


def router_of(logits, **options):
    """A MoE of D = 1 whose logits for the token 1 are the given ones."""
    model = MoE(1, 2, len(logits), 1, rngs=nnx.Rngs(0), **options)
    model.router.kernel[...] = jnp.asarray([logits], jnp.float32)
    return model


@pytest.mark.parametrize(
    "options, weight, gradient",
    [
        (dict(), 0.665241, [0.222695, -0.162803, -0.059892]),
        (dict(softmax_order="after"), 1.0, [0.0, 0.0, 0.0]),
        (dict(renormalize=True), 1.0, [0.0, 0.0, 0.0]),
    ],
    ids=["before", "after", "renormalize"],
)
def test_top_1_router(options, weight, gradient):
    """NVIDIA/Megatron-LM#894: which settings leave a top-1 router without a gradient."""
    if options:
        with pytest.warns(UserWarning, match="router gets no gradient"):
            model = router_of([1.0, 0.0, -1.0], **options)
    else:
        model = router_of([1.0, 0.0, -1.0])
    x = jnp.ones((1, 1))
    close(model.route(x)[0], [[weight]])
    grads = nnx.grad(lambda model: model.route(x)[0].sum())(model)
    close(grads.router.kernel[0], gradient)


def test_no_warning_when_the_router_learns():
    make(1)
    make(2, renormalize=True)
    make(2, softmax_order="after")


def test_empty_experts_get_no_gradient(rng):
    model = make(1)
    # Positive tokens and one positive column: all go to expert 3.
    kernel = np.zeros((FEATURES, EXPERTS), np.float32)
    kernel[:, 3] = 1
    model.router.kernel[...] = jnp.asarray(kernel)
    x = jnp.asarray(np.abs(rng.normal(size=(TOKENS, FEATURES))), jnp.float32)
    (grads, _), (y, stats) = grads_of(model, x, jnp.cos(x))
    np.testing.assert_array_equal(stats.tokens_per_expert, [0, 0, 0, TOKENS, 0])
    close(y, plain(np.asarray(x, np.float64), *arrays(model), 1)[0])
    for grad in (grads.gate_up[...], grads.down[...]):
        np.testing.assert_array_equal(np.delete(grad, 3, axis=0), 0)
        assert np.abs(grad[3]).max() > 0


def test_masked_tokens_reach_nothing(rng):
    model = make()
    x = rng.normal(size=(3, 8, FEATURES)).astype(np.float32)
    mask = rng.random((3, 8)) < 0.6
    x[~mask] = np.nan

    dy = rng.normal(size=x.shape).astype(np.float32)

    (grads, dx), (y, stats) = grads_of(model, x, dy, mask, 1.0)
    (expected_grads, expected_dx), (expected, expected_stats) = grads_of(
        model, x[mask], dy[mask], None, 1.0
    )
    np.testing.assert_array_equal(y[~mask], 0)
    close(y[mask], expected)
    np.testing.assert_array_equal(dx[~mask], 0)
    close(dx[mask], expected_dx)
    jax.tree.map(close, stats, expected_stats)
    jax.tree.map(close, grads, expected_grads)

    y, stats = call(model, x, np.zeros((3, 8), bool))
    np.testing.assert_array_equal(y, 0)
    np.testing.assert_array_equal(stats.tokens_per_expert, 0)
    assert stats.load_balance_loss == 0


def test_load_balance_loss_is_1_for_a_uniform_router(rng):
    for k in (1, 3):
        model = make(k)
        model.router.kernel[...] = jnp.zeros((FEATURES, EXPERTS))
        close(call(model, rng.normal(size=(7, FEATURES)).astype(np.float32))[1][0], 1.0)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3)], ids=str)
def test_batch_dimensions(rng, batch):
    model = make()
    x = jnp.asarray(rng.normal(size=(*batch, FEATURES)), jnp.float32)
    y, _ = call(model, x)
    assert y.shape == x.shape
    close(y.reshape(-1, FEATURES), call(model, x.reshape(-1, FEATURES))[0])


def test_no_tokens():
    y, stats = call(make(), jnp.zeros((0, FEATURES)))
    assert y.shape == (0, FEATURES)
    assert stats.load_balance_loss == 0


def test_bfloat16_routes_in_float32(rng):
    model, reference = make(dtype=jnp.bfloat16), make()
    x = jnp.asarray(rng.normal(size=(TOKENS, FEATURES)), jnp.bfloat16)
    y, stats = call(model, x)
    assert y.dtype == jnp.bfloat16
    expected, expected_stats = call(reference, x.astype(jnp.float32))
    np.testing.assert_array_equal(stats.tokens_per_expert, expected_stats.tokens_per_expert)
    close(y, expected, tolerance=3e-2)
    weights, _, probabilities = model.route(x)
    assert weights.dtype == probabilities.dtype == jnp.float32
    half = make(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    assert half.gate_up.dtype == jnp.bfloat16
    assert half.router.kernel.dtype == jnp.float32


def test_no_scatter_of_rows(rng):
    """Dispatch, combination and both of their transposes are gathers: no atomics on a GPU."""
    graphdef, state = nnx.split(make())
    x = jnp.ones((TOKENS, FEATURES))
    text = str(
        jax.make_jaxpr(jax.grad(lambda s, x: nnx.merge(graphdef, s)(x)[0].sum(), (0, 1)))(state, x)
    )
    rows = f"f32[{2 * TOKENS},{FEATURES}]"
    assert rows in text
    scatters = [line for line in text.splitlines() if "scatter" in line]
    assert not [line for line in scatters if rows in line or f"f32[{TOKENS},{FEATURES}]" in line]


def test_initialisation_counts_one_expert():
    model = MoE(256, 128, 16, 2, rngs=nnx.Rngs(0))
    assert abs(float(model.gate_up[...].std()) * 16 - 1) < 0.02
    assert abs(float(model.down[...].std()) * 128**0.5 - 1) < 0.02
    assert not jnp.array_equal(model.gate_up[0], model.gate_up[1])


def test_metadata_is_empty_by_default_and_kept_when_given():
    assert "out_sharding" not in make().gate_up.get_metadata()
    model = make(kernel_metadata=dict(note="experts"), router_metadata=dict(note="router"))
    assert model.gate_up.get_metadata()["note"] == "experts"
    assert model.down.get_metadata()["note"] == "experts"
    assert model.router.kernel.get_metadata()["note"] == "router"


def test_errors_name_the_argument():
    for k in (0, EXPERTS + 1):
        with pytest.raises(ValueError, match=rf"experts_per_token .*got {k}"):
            make(k)
    with pytest.raises(ValueError, match=r"softmax_order .*'middle'"):
        make(softmax_order="middle")
    with pytest.raises(ValueError, match=r"mask .*\(4,\).*\(5,\)"):
        make()(jnp.zeros((4, FEATURES)), jnp.ones(5, bool))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        make(implementation="mosaic_gpu")(jnp.zeros((4, FEATURES)))
