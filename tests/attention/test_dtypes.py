"""Each dtype against float64, held to what a plain implementation of the same dtype achieves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention import cases
from tests.attention.cases import BLOCKED, each_implementation

CASE = {"T": 24, "S": 40, "H": 16, "Hv": 16, "bias": "1NTS", "mask": "B1TS"}


@jax.jit
def _plain(floats, mask, dout, dlse):
    """What one writes in a few lines: statistics in float32, weights in the dtype of the values."""

    def attention(floats):
        q, k, v = (floats[n] for n in ("query", "key", "value"))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        z = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=jnp.float32)
        z = z / np.float32(np.sqrt(q.shape[3])) + floats["bias"].astype(jnp.float32)
        z = jnp.where(mask, z, -jnp.inf)
        lse = jax.nn.logsumexp(z, axis=-1)
        p = jnp.exp(z - lse[..., None]).astype(v.dtype)
        return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.swapaxes(lse, 1, 2)

    (out, lse), pull = jax.vjp(attention, floats)
    return {"out": out, "lse": lse} | pull((dout, dlse))[0]


def _compare(implementation, inputs, dtype, **dtypes):
    exact = cases.truth(inputs)
    actual = cases.run(implementation, inputs, dtype, **dtypes)
    floats = {n: jnp.asarray(x, dtypes.get(n, dtype)) for n, x in inputs.floats.items()}
    dlse = jnp.asarray(inputs.dlse, jnp.float32)
    plain = _plain(floats, inputs.arrays["mask"], jnp.asarray(inputs.dout, dtype), dlse)
    for name, x in actual.items():
        assert x.dtype == (jnp.float32 if name == "lse" else dtypes.get(name, dtype)), name
        # By root mean square: the largest of a few thousand roundings is a matter of luck.
        rms = lambda y: np.sqrt(np.mean(np.square(y)))
        error = lambda y: rms(np.asarray(y, np.float64) - exact[name])  # noqa: B023
        atol = float(jnp.finfo(x.dtype).eps) / 4 * rms(exact[name])
        assert error(x) <= 2 * error(plain[name]) + atol, name
    return actual


@pytest.mark.usefixtures("fully_optimised")
@each_implementation
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_error_against_float64(dtype, implementation):
    _compare(implementation, cases.inputs("dtypes", CASE, dtype), dtype)


@each_implementation
def test_float64_is_computed_in_float64(implementation):
    inputs = cases.inputs("float64", CASE | {"sinks": True, "logits_soft_cap": 2.0}, np.float32)
    with jax.enable_x64(True):
        exact = cases.truth(inputs)
        actual = cases.run(implementation, inputs, jnp.float64)
        for name, x in actual.items():
            assert x.dtype == jnp.float64
            cases.assert_near(x, exact[name], 1e-12, name)


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [
        (jnp.bfloat16, jnp.float32),
        (jnp.float16, jnp.bfloat16),
        (jnp.float32, jnp.float16),
        (jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_a11_bias_of_another_dtype(dtype, bias):
    """jax#32242: its gradient has its dtype, and its rows sum to 0 without a cotangent of lse."""
    inputs = cases.inputs("a11", CASE | {"mask": "TS"}, jnp.bfloat16)
    inputs = inputs.replace(dlse=np.zeros_like(inputs.dlse))
    gradient = _compare(BLOCKED, inputs, dtype, bias=bias)["bias"]
    rows = gradient.astype(np.float32).sum(axis=-1)
    assert np.abs(rows).max() < 0.1
    assert np.abs(gradient.astype(np.float32)).max() > 0.3


@each_implementation
def test_every_operand_has_its_own_dtype(implementation):
    """The output has the dtype of query, each gradient that of its input."""
    dtypes = {"key": jnp.float32, "value": jnp.float16, "bias": jnp.float16, "sinks": jnp.bfloat16}
    inputs = cases.inputs("mixed", CASE | {"sinks": True}, jnp.bfloat16)
    actual = cases.run(implementation, inputs, jnp.bfloat16, **dtypes)
    exact = cases.truth(inputs)
    for name, x in actual.items():
        expected = jnp.float32 if name == "lse" else dtypes.get(name, jnp.bfloat16)
        assert x.dtype == expected, name
        cases.assert_near(x, exact[name], 1e-2, name)


def _precisions(dtype=jnp.float32, **kwargs):
    x = jnp.zeros((1, 3, 1, 4), dtype)
    loss = lambda x: jnp.sum(BLOCKED(x, x, x, **kwargs), dtype=jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(x).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 7
    return {p for line in products for p in ("HIGHEST", "HIGH,", "DEFAULT") if p in line}


def test_precision():
    """float32 at HIGHEST unless the argument or JAX's own setting says otherwise."""
    assert _precisions() == {"HIGHEST"}
    assert "HIGHEST" not in _precisions(jnp.bfloat16)
    assert "HIGHEST" not in _precisions(precision="default")
    assert "HIGHEST" not in _precisions(precision=jax.lax.Precision.DEFAULT)
    assert _precisions(jnp.bfloat16, precision="highest") == {"HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert "HIGHEST" not in _precisions()
        assert _precisions(precision="highest") == {"HIGHEST"}
