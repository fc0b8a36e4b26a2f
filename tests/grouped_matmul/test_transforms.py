"""Derivatives of any mode and order, batching of any operands, remat, scan, x64, donation."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from tests.grouped_matmul import reference
from tests.grouped_matmul.test_values import assert_close, normal, poison

SIZES = np.array([3, 0, 5, 2], np.int32)  # of 13 rows: the last 3 belong to no group
GROUP = np.searchsorted(np.cumsum(SIZES), np.arange(13), side="right")  # of each row
M, K, N, G = 13, 3, 4, 4


@pytest.fixture
def operands(rng):
    return [normal(rng, s) for s in ((M, K), (G, K, N), (G, N))]


def dense(lhs, rhs, bias, activation):
    """The same function by a dense product and plain JAX, for derivatives of any order."""
    onehot = jnp.asarray(np.arange(G) == GROUP[:, None], lhs.dtype)  # [M, G]
    pre = jnp.einsum("mg,mk,gkn->mn", onehot, lhs, rhs, precision="highest") + onehot @ bias
    gate, up = (pre[:, : N // 2], pre[:, N // 2 :])
    match activation:
        case "silu":
            return jax.nn.silu(pre)
        case "swiglu":
            return jax.nn.silu(gate) * up
    return pre


@pytest.mark.parametrize("activation", [None, "swiglu"])
def test_every_mode_and_order(activation, operands, rng):
    tangents = [normal(rng, x.shape) for x in operands]
    ct = normal(rng, jax.eval_shape(lambda *x: dense(*x, activation), *operands).shape)

    def derivatives(f, operands, tangents):
        def loss(*x):
            return jnp.sum(ct * f(*x) ** 2)

        grad = jax.grad(loss, (0, 1, 2))
        along = lambda *x: sum(jnp.vdot(g, t) for g, t in zip(grad(*x), tangents))
        return (
            jax.jvp(f, operands, tangents),
            grad(*operands),
            jax.jvp(grad, operands, tangents),
            jax.grad(along, (0, 1, 2))(*operands),
            jax.hessian(loss, (0, 2))(*operands),
        )

    run = jax.jit(derivatives, static_argnums=0)
    ours = run(
        lambda *x: ragged_dot(*x[:2], SIZES, bias=x[2], activation=activation), operands, tangents
    )
    right = run(lambda *x: dense(*x, activation), operands, tangents)
    jax.tree.map(lambda a, b: assert_close(a, b, factor=64), ours, right)


def test_contracting_every_mode_and_order(operands, rng):
    lhs, accumulate, _ = operands
    operands = (lhs, normal(rng, (M, N)), accumulate)
    tangents = tuple(normal(rng, x.shape) for x in operands)
    onehot = jnp.asarray(np.arange(G) == GROUP[:, None], lhs.dtype)  # [M, G]

    def dense(lhs, rhs, accumulate):
        return accumulate + jnp.einsum("mg,mk,mn->gkn", onehot, lhs, rhs, precision="highest")

    def derivatives(f, operands, tangents):
        grad = jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))
        along = lambda *x: sum(jnp.vdot(g, t) for g, t in zip(grad(*x), tangents))
        return (
            jax.jvp(f, operands, tangents),
            grad(*operands),
            jax.jvp(grad, operands, tangents),
            jax.grad(along, (0, 1, 2))(*operands),
        )

    ours = lambda *x: ragged_dot_contracting(*x[:2], SIZES, accumulate=x[2])
    run = jax.jit(derivatives, static_argnums=0)
    jax.tree.map(
        functools.partial(assert_close, factor=32),
        run(ours, operands, tangents),
        run(dense, operands, tangents),
    )


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_nan_of_no_group_reaches_no_derivative(transpose_rhs, operands, rng):
    keep = reference.inside(SIZES, M, G)
    lhs, rhs, bias = operands
    rhs = rhs.transpose(0, 2, 1) if transpose_rhs else rhs
    clean = (lhs, rhs, bias)
    tangents = tuple(normal(rng, x.shape) for x in clean)
    ct = normal(rng, (M, N // 2))

    def run(x, t, ct):
        f = lambda *x: ragged_dot(
            *x[:2], SIZES, bias=x[2], activation="swiglu", transpose_rhs=transpose_rhs
        )
        pull = lambda x, ct: jax.vjp(f, *x)[1](ct)
        return jax.jvp(f, x, t), pull(x, ct), jax.jvp(pull, (x, ct), (t, jnp.ones_like(ct)))

    dirty = run(
        (poison(lhs, keep), *clean[1:]),
        (poison(tangents[0], keep), *tangents[1:]),
        poison(ct, keep),
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, run(clean, tangents, ct))


@pytest.mark.parametrize(
    "axes", [a for a in itertools.product((0, None), repeat=4) if any(x == 0 for x in a)]
)
def test_a14_vmap_of_each_subset(axes, rng):
    """jax-ml/jax#38495: batching when only some operands carry the axis."""
    shapes = ((M, K), (G, K, N), (G,), (G, N))
    sizes = np.array([[3, 0, 5, 2], [0, 13, 4, 1], [1, 1, -2, 1]], np.int32)
    args = [sizes if i == 2 else normal(rng, (3, *s)) for i, s in enumerate(shapes)]
    args = [x if a == 0 else x[0] for x, a in zip(args, axes)]
    activation = None if axes[2] is None else "swiglu"
    ct = normal(rng, (3, M, N if activation is None else N // 2))

    def f(lhs, rhs, sizes, bias, ct):
        run = lambda *x: ragged_dot(*x[:2], sizes, bias=x[2], activation=activation)
        out, pull = jax.vjp(run, lhs, rhs, bias)
        return out, pull(ct)

    ours = jax.jit(jax.vmap(f, in_axes=(*axes, 0)))(*args, ct)
    for i in range(3):
        x = [x if a is None else x[i] for x, a in zip(args, axes)]
        out, dlhs, drhs, dbias = reference.ragged_dot(
            x[0], x[1], x[2], bias=x[3], activation=activation, ct=ct[i]
        )
        jax.tree.map(
            functools.partial(assert_close, factor=16),
            jax.tree.map(lambda y, i=i: y[i], ours),
            (out, (dlhs, drhs, dbias)),
        )


@pytest.mark.parametrize(
    "axes",
    [(*a, a[0]) for a in itertools.product((0, None), repeat=3) if any(x == 0 for x in a)]
    + [(None, None, None, 0)],
)
def test_a14_vmap_contracting(axes, rng):
    sizes = np.array([[3, 0, 5, 2], [0, 13, 4, 1]], np.int32)
    shapes = ((M, K), (M, N), (G,), (G, K, N))
    args = [sizes if i == 2 else normal(rng, (2, *s)) for i, s in enumerate(shapes)]
    args = [x if a == 0 else x[0] for x, a in zip(args, axes)]
    f = lambda lhs, rhs, sizes, acc: ragged_dot_contracting(lhs, rhs, sizes, accumulate=acc)
    ours = jax.jit(jax.vmap(f, in_axes=axes))(*args)
    for i in range(2):
        x = [x if a is None else x[i] for x, a in zip(args, axes)]
        assert_close(ours[i], reference.contracting(*x[:3], accumulate=x[3]))


def test_a14_jacobian_and_vmap_of_any_axis(operands, rng):
    lhs, rhs, bias = operands
    f = lambda lhs, rhs: ragged_dot(lhs, rhs, SIZES, bias=bias, activation="silu")
    g = lambda lhs, rhs: dense(lhs, rhs, bias, "silu")
    both = lambda h: (jax.jacrev(h, (0, 1)), jax.jacfwd(h, (0, 1)))
    ours, right = (jax.jit(lambda *x, h=h: [j(*x) for j in both(h)])(lhs, rhs) for h in (f, g))
    jax.tree.map(assert_close, ours, right)
    many = normal(rng, (M, 2, K, 3))  # two batch axes, neither the first
    nested = [jax.jit(jax.vmap(jax.vmap(h, (2, None), 1), (1, None), 2))(many, rhs) for h in (f, g)]
    assert_close(*nested)
    own = normal(rng, (G, K, 2, N))
    assert_close(*(jax.jit(jax.vmap(h, (1, 2), 2))(many[..., 0], own) for h in (f, g)))


def test_vmap_with_shared_rhs_copies_no_rhs(operands, rng):
    lhs, rhs, _ = operands
    jaxpr = jax.make_jaxpr(jax.vmap(lambda x: ragged_dot(x, rhs, SIZES)))(normal(rng, (5, M, K)))
    text = str(jaxpr)
    assert len(re.findall(r"\bragged_dot\[", text)) == 1
    assert "while" not in text
    assert "scan" not in text
    assert f"f32[5,{G},{K},{N}]" not in text
    assert f"f32[{5 * G},{K},{N}]" not in text


def test_vmap_of_group_offset(rng):
    """Rows before, between and after the groups that rhs holds."""
    sizes, offsets = np.array([3, 0, 5, 2, 1], np.int32), np.array([-1, 0, 2, 4, 7])
    lhs, rhs, ct = normal(rng, (M, K)), normal(rng, (2, K, N)), normal(rng, (5, M, N))

    def f(offset, ct):
        out, pull = jax.vjp(lambda *x: ragged_dot(*x, sizes, group_offset=offset), lhs, rhs)
        return out, *pull(ct)

    ours = jax.jit(jax.vmap(f))(offsets, ct)
    for i, offset in enumerate(offsets):
        right = reference.ragged_dot(lhs, rhs, sizes, offset=int(offset), ct=ct[i])
        for a, b in zip(ours, right):
            assert_close(a[i], b)


def test_vmap_sizes_that_are_empty():
    assert jax.vmap(ragged_dot, (0, None, None))(
        jnp.ones((2, 0, 3)), jnp.ones((2, 3, 4)), jnp.zeros(2, int)
    ).shape == (2, 0, 4)
    assert jax.vmap(ragged_dot, (0, None, None))(
        jnp.ones((2, 5, 3)), jnp.ones((0, 3, 4)), jnp.zeros(0, int)
    ).shape == (2, 5, 4)


def test_residuals_are_the_preactivation_only(operands):
    lhs, rhs, bias = (x.astype(jnp.bfloat16) for x in operands)
    f = lambda *x: ragged_dot(*x[:2], SIZES, bias=x[2], activation="swiglu")
    _, pull = jax.vjp(f, lhs, rhs, bias)
    kept = sorted(str(x.aval) for x in jax.tree.leaves(pull) if x.size)
    assert kept.count(f"bfloat16[{M},{N}]") == 1
    assert not [x for x in kept if x.startswith("float32")]


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_remat(policy, operands):
    f = lambda *x: jnp.sum(jnp.sin(ragged_dot(*x[:2], SIZES, bias=x[2], activation="gelu")))
    saved = jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, policy))
    ours = jax.jit(jax.grad(saved, (0, 1, 2)))(*operands)
    jax.tree.map(assert_close, ours, jax.grad(f, (0, 1, 2))(*operands))


def test_many_steps_in_one_scan(operands, rng):
    lhs, rhs, _ = operands
    targets, sizes = normal(rng, (6, M, N)), rng.integers(0, 5, (6, G)).astype(np.int32)

    def step(w, batch):
        target, sizes = batch
        loss = lambda w: jnp.mean((ragged_dot(lhs, w, sizes) - target) ** 2)
        value, grad = jax.value_and_grad(loss)(w)
        return w - 0.1 * grad, value

    w, losses = jax.jit(lambda w: lax.scan(step, w, (targets, sizes)))(rhs)
    v = rhs
    for i, batch in enumerate(zip(targets, sizes)):
        v, value = jax.jit(step)(v, batch)
        assert_close(losses[i], value)
    assert_close(w, v)


def test_x64():
    with jax.enable_x64(True):
        rng = np.random.default_rng(1)
        lhs, rhs, bias, ct = (
            jnp.asarray(rng.normal(size=s)) for s in ((M, K), (G, K, N), (G, N), (M, N // 2))
        )

        @jax.jit
        def run(lhs, rhs, bias, ct, sizes):
            f = lambda x, w, b: ragged_dot(x, w, sizes, bias=b, activation="swiglu")
            out, pull = jax.vjp(f, lhs, rhs, bias)
            return out, *pull(ct)

        ours = run(lhs, rhs, bias, ct, SIZES.astype(np.int64))
        right = reference.ragged_dot(lhs, rhs, SIZES, bias=bias, activation="swiglu", ct=ct)
        for a, b in zip(ours, right):
            assert a.dtype == np.float64
            assert_close(a, b, factor=64)
        assert_close(
            ragged_dot_contracting(lhs, ct, SIZES, accumulate=rhs[..., :2]),
            reference.contracting(lhs, ct, SIZES, accumulate=rhs[..., :2]),
        )
        # Sums, too, are float64 where only the result is.
        small = lhs.astype(np.float32), rhs.astype(np.float32)
        wide = ragged_dot(*small, SIZES, preferred_element_type=np.float64)
        assert_close(wide, reference.ragged_dot(*small, SIZES))
        assert jax.vmap(ragged_dot, (0, None, None))(lhs[None], rhs, SIZES).dtype == np.float64
        assert ragged_dot(*small, SIZES).dtype == np.float32


def test_donated_accumulate_is_updated_in_place(rng):
    lhs, rhs, accumulate = (normal(rng, s) for s in ((M, K), (M, N), (G, K, N)))
    right = reference.contracting(lhs, rhs, SIZES, accumulate=accumulate)
    f = lambda acc, lhs, rhs: ragged_dot_contracting(lhs, rhs, SIZES, accumulate=acc)
    compiled = jax.jit(f, donate_argnums=0).lower(accumulate, lhs, rhs).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == accumulate.nbytes
    out = compiled(accumulate, lhs, rhs)
    assert accumulate.is_deleted()
    assert_close(out, right)


def test_a18_values_do_not_recompile(operands, rng):
    """vllm-project/vllm#27178: a compilation for each value."""
    lhs, rhs, _ = operands
    grad = jax.jit(jax.grad(lambda w, s, o: jnp.sum(ragged_dot(lhs, w, s, group_offset=o) ** 2)))
    for _ in range(50):
        grad(rhs, rng.integers(-1, 6, G + 2).astype(np.int32), np.int32(rng.integers(-1, 4)))
    assert grad._cache_size() == 1
    eager = [ragged_dot(lhs, rhs, rng.integers(0, 4, G).astype(np.int32)) for _ in range(3)]
    assert len(eager) == 3


def test_large_sizes_trace_and_lower():
    """M * N and G * K * N past 2**31; no index is a product of sizes."""
    lhs = jax.ShapeDtypeStruct((2**20, 4096), jnp.bfloat16)
    rhs = jax.ShapeDtypeStruct((256, 4096, 14336), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((256,), jnp.int32)
    loss = lambda x, w, s: jnp.sum(ragged_dot(x, w, s, activation="swiglu").astype(jnp.float32))
    grads = jax.jit(jax.grad(loss, (0, 1)))
    assert jax.eval_shape(grads, lhs, rhs, sizes)[1].shape == rhs.shape
    text = grads.lower(lhs, rhs, sizes).as_text()
    assert "1048576x28672" not in text  # N is 14336 columns of [gate | up]
    rows = jax.ShapeDtypeStruct((2**31 - 2**16, 1), jnp.bfloat16)
    one = jax.ShapeDtypeStruct((256, 1, 1), jnp.bfloat16)
    jax.jit(ragged_dot).lower(rows, one, sizes)


def test_index_arithmetic_at_the_largest_row():
    """The bounds of 2**31 - 2**16 rows, and a tile that starts at the last of them."""
    from pallas_ops.grouped_matmul import validate, xla

    rows = validate.MAX_ROWS
    bounds = validate._bounds(np.array([rows, 2**31 - 1, -5]), rows, 3, None, "")
    assert bounds.tolist() == [[0, rows], [rows, rows], [rows, rows]]
    start, end, block = np.int32(0), np.int32(rows), 2**15
    tiles = jax.jit(lambda s, e: xla._tiles(s, e, block))(start, end)
    assert int(tiles) == -(-rows // block)
    row, keep = jax.jit(lambda i: xla._tile_rows(i * np.int32(block), end, block, rows))(tiles - 1)
    assert int(row) == rows - block
    assert int(keep.sum()) == (rows % block or block)
