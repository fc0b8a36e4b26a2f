"""jit, grad, vmap, jacobian, scan, donation, x64: the operation behaves as lax.dot_general does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.attention import cases
from tests.attention.cases import BLOCKED, REFERENCE

OPTIONS = {"is_causal": True, "local_window_size": (4, 3), "dropout_rate": 0.2}
V = 3  # size of the mapped axis


@functools.cache
def _operands(v):
    """Operand by name -> [v, ...] values of a small call with everything in it."""
    B, T, S, N, K, H, Hv = 2, 5, 9, 4, 2, 4, 3
    keys = iter(jax.random.split(jax.random.key(0), 20))
    normal = lambda *shape: jax.random.normal(next(keys), (v, *shape), jnp.float32)
    integers = lambda low, high, *shape: jax.random.randint(next(keys), (v, *shape), low, high)
    return {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, Hv),
        "bias": normal(1, N, 1, S),
        "sinks": normal(N),
        "mask": jax.random.bernoulli(next(keys), 0.8, (v, B, 1, 1, S)),
        "q_offset": integers(0, 4, B),
        "query_seq_lengths": integers(3, T + 1, B),
        "key_value_seq_lengths": integers(5, S + 1, B),
        "q_segment_ids": integers(0, 2, B, T),
        "kv_segment_ids": integers(0, 2, B, S),
        "dropout_key": jax.random.split(next(keys), v),
        "dout": normal(B, T, N, Hv),
        "dlse": normal(B, T, N),
    }


@functools.cache
def _jitted(implementation):
    """out, lse and all gradients, as a function of a dict of operands."""

    def call(operands):
        operands = dict(operands)
        dout, dlse = operands.pop("dout"), operands.pop("dlse")
        floats = {n: operands.pop(n) for n in cases.FLOATS if n in operands}
        f = lambda floats: implementation(**floats, **operands, **OPTIONS, return_residual=True)
        (out, lse), pull = jax.vjp(f, floats)
        return out, lse, pull((dout, dlse))[0]

    return jax.jit(call)


def _stack(rows):
    return jax.tree.map(lambda *x: np.stack(x), *rows)


SUBSETS = [
    {"query": 2},
    {"key": 1, "value": 4},
    {"bias": 1},
    {"mask": 3, "q_offset": 1},
    {"q_segment_ids": 2, "query_seq_lengths": 0, "key_value_seq_lengths": 1},
    {"dropout_key": 0},
    {"dout": 4},
    {"dlse": 1, "sinks": 0},
    dict.fromkeys(_operands(1), 0),
]


# The rule is the same for each implementation, so the one that compiles fastest runs every subset.
@pytest.mark.parametrize(
    ("implementation", "axes"),
    [(REFERENCE, axes) for axes in SUBSETS] + [(BLOCKED, SUBSETS[-1])],
    ids=lambda x: getattr(x, "name", None) or "_".join(x)[:40],
)
def test_a14_vmap_over_a_subset(implementation, axes):
    """jax#38495: any operands may be mapped, along any axis, forward and backward."""
    stacked, f = _operands(V), _jitted(implementation)
    first = {n: x[0] for n, x in stacked.items()}
    given = {n: jnp.moveaxis(stacked[n], 0, axes[n]) if n in axes else x for n, x in first.items()}
    in_axes = {n: axes.get(n) for n in given}
    actual = jax.jit(jax.vmap(f, in_axes=(in_axes,)))(given)
    rows = [f(first | {n: stacked[n][i] for n in axes}) for i in range(V)]
    jax.tree.map(cases.assert_near, actual, _stack(rows))
    assert np.abs(rows[0][0] - rows[1][0]).max() > 1e-3 or not axes.keys() - {"dout", "dlse"}


def test_a14_vmap_of_vmap():
    x, f = _operands(2 * V), _jitted(REFERENCE)
    nest = lambda n: x[n].reshape(2, V, *x[n].shape[1:])
    first = {n: y[0] for n, y in x.items()}
    given = first | {n: nest(n) for n in ("query", "dout")} | {"bias": nest("bias")[:, 0]}
    outer = {n: 0 if n in ("query", "bias", "dout") else None for n in first}
    inner = outer | {"bias": None}
    actual = jax.jit(jax.vmap(jax.vmap(f, in_axes=(inner,)), in_axes=(outer,)))(given)
    row = lambda i, j: (
        first
        | {
            "query": given["query"][i, j],
            "dout": given["dout"][i, j],
            "bias": given["bias"][i],
        }
    )
    rows = [_stack([f(row(i, j)) for j in range(V)]) for i in range(2)]
    jax.tree.map(cases.assert_near, actual, _stack(rows))


def test_a14_vmap_of_a_call_without_batch():
    """in_axes of one example, as users write it, equals the batched call."""
    inputs = cases.inputs("plain")
    q, k, v = (jnp.asarray(inputs.floats[n], jnp.float32) for n in ("query", "key", "value"))
    batched = BLOCKED(q, k, v)
    np.testing.assert_allclose(jax.vmap(BLOCKED)(q, k, v), batched, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_a14_jacobian(dtype):
    """jax#38495: only the cotangent carries the mapped axis."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2, 2, 8), dtype) for i in range(3))
    jacobians = jax.jit(jax.jacobian(REFERENCE, argnums=(0, 1, 2)))(q, k, v)
    f = jax.jit(lambda dout: jax.vjp(REFERENCE, q, k, v)[1](dout))
    for index in [(0, 0, 0, 0), (0, 1, 1, 5), (0, 0, 1, 7)]:
        expected = f(jnp.zeros((1, 2, 2, 8), dtype).at[index].set(1))
        for jacobian, x in zip(jacobians, expected):
            atol = 2e-3 if dtype == jnp.float16 else 1e-6
            np.testing.assert_allclose(jacobian[index], x, atol=atol)


@pytest.fixture(scope="module")
def qkv():
    inputs = cases.inputs("plain", {"N": 2, "K": 1, "Hv": 8})
    return tuple(jnp.asarray(inputs.floats[n], jnp.float32) for n in ("query", "key", "value"))


def test_eager_and_jit_agree(qkv):
    np.testing.assert_allclose(BLOCKED(*qkv), jax.jit(BLOCKED)(*qkv), rtol=1e-6, atol=1e-6)


def test_gradient_of_each_operand_alone(qkv):
    """A gradient does not depend on which others are asked for; integers have none."""
    lengths = jnp.array([20, 9])
    bias = jax.random.normal(jax.random.key(0), (2, 1, 21), jnp.float32)
    loss = lambda q, k, v, bias, lengths: jnp.sum(
        jnp.sin(REFERENCE(q, k, v, bias, key_value_seq_lengths=lengths))
    )
    together = jax.grad(loss, argnums=(0, 1, 2, 3))(*qkv, bias, lengths)
    for i in range(4):
        alone = jax.grad(loss, argnums=i)(*qkv, bias, lengths)
        np.testing.assert_allclose(alone, together[i], rtol=1e-5, atol=1e-6)
    integer = jax.grad(loss, argnums=4, allow_int=True)(*qkv, bias, lengths)
    assert integer.dtype == jax.dtypes.float0


def test_cotangent_of_one_result_only(qkv):
    """lse alone, and lse unused."""
    with_lse = lambda *x: REFERENCE(*x, return_residual=True)
    out_only = jax.grad(lambda *x: with_lse(*x)[0].sum())(*qkv)
    np.testing.assert_array_equal(out_only, jax.grad(lambda *x: REFERENCE(*x).sum())(*qkv))
    dq = jax.grad(lambda *x: with_lse(*x)[1].sum())(*qkv)
    zero = jax.vjp(with_lse, *qkv)[1]
    expected = zero((jnp.zeros_like(qkv[0]), jnp.ones(qkv[0].shape[:3], jnp.float32)))[0]
    np.testing.assert_allclose(dq, expected, rtol=1e-6, atol=1e-6)


def test_second_order_is_refused_by_name(qkv):
    loss = lambda q: jnp.sum(jnp.sin(BLOCKED(q, *qkv[1:])))
    for f in (
        jax.grad(lambda q: jnp.sum(jax.grad(loss)(q))),
        lambda q: jax.jvp(jax.grad(loss), (q,), (q,)),
    ):
        with pytest.raises(NotImplementedError, match=r"flash_attention.*[Ss]econd"):
            f(qkv[0])


def test_forward_mode_is_refused(qkv):
    for f in (jax.jvp, lambda f, x, t: jax.jit(lambda x: jax.jvp(f, x, t))(x)):
        with pytest.raises(TypeError, match="custom_vjp"):
            f(lambda q: BLOCKED(q, *qkv[1:]), (qkv[0],), (qkv[0],))


def _step(carry, _):
    params, lr = carry
    loss = lambda p: jnp.mean((BLOCKED(p["q"], p["k"], p["v"], is_causal=True) - 1) ** 2)
    value, gradients = jax.value_and_grad(loss)(params)
    return (jax.tree.map(lambda p, g: p - lr * g, params, gradients), lr), value


def test_many_steps_inside_one_scan(qkv):
    params, lr = dict(zip("qkv", qkv)), jnp.float32(3.0)
    (_, losses) = jax.jit(lambda p: lax.scan(_step, (p, lr), None, length=200))(params)
    carry, one = (params, lr), jax.jit(_step)
    for i in range(3):
        carry, loss = one(carry, None)
        np.testing.assert_allclose(losses[i], loss, rtol=1e-6)
    assert losses[-1] < losses[0] / 2


def test_eval_shape_and_jaxpr(qkv):
    f = lambda *x: BLOCKED(*x, return_residual=True)
    half = [x.astype(jnp.bfloat16) for x in qkv]
    out, lse = jax.eval_shape(f, *half)
    assert (out.shape, out.dtype) == ((2, 9, 2, 8), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 9, 2), jnp.float32)
    gradients = jax.eval_shape(jax.grad(lambda x: f(*x)[0].sum(dtype=jnp.float32)), half)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3
    assert " flash_attention_fwd[" in str(jax.make_jaxpr(f)(*qkv))


def test_donation(qkv):
    q, k, v = map(jnp.copy, qkv)
    expected = BLOCKED(q, k, v)
    out = jax.jit(BLOCKED, donate_argnums=0)(q, k, v)
    assert q.is_deleted()
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-6)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def decode(k, v, q, i):
        k, v = (lax.dynamic_update_slice_in_dim(x, q[:, :1, :1], i, 1) for x in (k, v))
        return BLOCKED(q, k, v, is_causal=True, q_offset=i), k, v

    before = k, v
    for i in range(3):
        _, k, v = decode(k, v, qkv[0], jnp.int32(i))
    assert all(x.is_deleted() for x in before)


def test_x64_mode():
    """Wide integers and Python scalars of x64 mode do not reach a float32 call."""
    inputs = cases.inputs(next(iter(cases.PAIRS)))
    expected = cases.truth(inputs)
    with jax.enable_x64(True):
        wide = {n: x.astype(np.int64) for n, x in inputs.arrays.items() if x.dtype == np.int32}
        actual = cases.run(BLOCKED, inputs.replace(arrays=inputs.arrays | wide))
        cases.assert_all_near(actual, expected)
        assert all(x.dtype == jnp.float32 for x in actual.values())
