"""A15 (jax#21303): what jax.checkpoint and its policies keep, counted in the jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.attention import cases
from tests.attention.cases import REFERENCE

policies = jax.checkpoint_policies


def _count(jaxpr, name):
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == name
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += _count(inner, name)
    return total


def _counts(f, *args):
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    return tuple(_count(jaxpr, f"flash_attention_{p}") for p in ("fwd", "bwd"))


@pytest.fixture(scope="module")
def qkv():
    inputs = cases.inputs("remat", {"T": 16, "S": 16, "N": 2, "K": 2, "Hv": 8})
    return tuple(jnp.asarray(inputs.floats[n], jnp.float32) for n in ("query", "key", "value"))


def _loss(policy=None, remat=True, **options):
    # Something nonlinear on either side: a layer whose inputs and outputs are both needed.
    def layer(q, k, v):
        out, lse = REFERENCE(
            jnp.sin(q), k, v, return_residual=True, dropout_rate=0.2,
            dropout_key=jax.random.key(1), **options,
        )  # fmt: skip
        return jnp.sin(out) + jnp.cos(lse)[..., None]

    layer = jax.checkpoint(layer, policy=policy) if remat else layer
    return jax.grad(lambda *x: jnp.sum(layer(*x)), argnums=(0, 1, 2))


SAVING = {
    "names": policies.save_only_these_names("context"),
    "offload": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["context"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "everything": policies.everything_saveable,
}


def test_counts_without_remat(qkv):
    assert _counts(_loss(remat=False), *qkv) == (1, 1)
    assert _counts(REFERENCE, *qkv) == (1, 0)


def test_a15_forward_runs_twice_without_a_policy(qkv):
    assert _counts(_loss(), *qkv) == (2, 1)
    assert _counts(_loss(policies.save_only_these_names("other")), *qkv) == (2, 1)


@pytest.mark.parametrize("policy", SAVING)
def test_a15_forward_runs_once_when_its_results_are_kept(policy, qkv):
    assert _counts(_loss(SAVING[policy]), *qkv) == (1, 1)


def test_a15_name_can_be_chosen(qkv):
    mine = policies.save_only_these_names("mine")
    assert _counts(_loss(mine, checkpoint_name="mine"), *qkv) == (1, 1)
    assert _counts(_loss(SAVING["names"], checkpoint_name="mine"), *qkv) == (2, 1)


def test_a15_gradients_are_the_same(qkv):
    """Dropout and all: recomputing draws the same mask."""
    expected = jax.jit(_loss(remat=False))(*qkv)
    for policy in (None, SAVING["names"]):
        for a, b in zip(jax.jit(_loss(policy))(*qkv), expected):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("policy", "forwards"), [(None, 2), (SAVING["names"], 1)])
def test_a15_layers_in_a_scan(policy, forwards, qkv):
    q, k, v = qkv
    layer = jax.checkpoint(lambda x: x + REFERENCE(x, k, v), policy=policy)
    plain = lambda x: x + REFERENCE(x, k, v)

    def loss(layer, x):
        return jnp.sum(jnp.sin(lax.scan(lambda x, _: (layer(x), None), x, None, length=3)[0]))

    gradient = jax.grad(lambda x: loss(layer, x))
    assert _counts(gradient, q) == (forwards, 1)
    if forwards == 1:
        expected = jax.jit(jax.grad(lambda x: loss(plain, x)))(q)
        np.testing.assert_allclose(jax.jit(gradient)(q), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(("arguments", "wanted"), [((0,), False), ((1,), True), ((0, 1), True)])
def test_gradient_of_bias_is_computed_by_need(arguments, wanted, remat):
    """A constant bias, as of ALiBi, costs no sum over its broadcast dimensions."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 5, 3, 4)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(3, 1, 5)), jnp.float32)

    def f(x, bias):
        return REFERENCE(x, x, x, bias)

    f = jax.checkpoint(f) if remat else f
    grad = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), arguments)
    jaxpr = str(jax.make_jaxpr(grad)(x, bias))
    assert ("bias_gradient=True" in jaxpr) is wanted
    assert ("bias_gradient=False" in jaxpr) is not wanted
