"""The grouped products on eight devices: automatic and explicit meshes, shard_map."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from tests.grouped_matmul import reference
from tests.grouped_matmul.test_values import assert_close, normal

M, K, N, G = 32, 4, 8, 8
SIZES = np.array([3, 0, 5, 2, 9, 1, 0, 7], np.int32)  # the last five rows belong to no group


def specs(lhs, rhs, bias, ct):
    return dict(lhs=lhs, rhs=rhs, bias=bias, ct=ct)


LAYOUTS = {
    "rows": specs(P(("data", "model")), P(), P(), P(("data", "model"))),
    "columns": specs(P(), P(None, None, "model"), P(None, "model"), P(None, "model")),
    "groups": specs(P(), P("model"), P("model"), P()),
    "rows and columns": specs(
        P("data"), P(None, None, "model"), P(None, "model"), P("data", "model")
    ),
    "rows and groups": specs(P("data"), P("model"), P("model"), P("data")),
    "contracted": specs(P(None, "model"), P(None, "model"), P(), P()),
    "rows and groups on one axis": specs(P("data"), P("data"), P("data"), P("data")),
    "cotangent elsewhere": specs(P("data"), P("model"), P(), P("model", "data")),
}


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def problem(rng, mesh, layout, *, transpose_rhs=False, gated=False):
    arrays = dict(
        lhs=normal(rng, (M, K)),
        rhs=normal(rng, (G, N, K) if transpose_rhs else (G, K, N)),
        bias=normal(rng, (G, N)),
        ct=normal(rng, (M, N // 2 if gated else N)),
    )
    layout = dict(layout)
    if transpose_rhs:
        g, k, n = (*layout["rhs"], None, None, None)[:3]
        layout["rhs"] = P(g, n, k)
    return arrays, [put(mesh, x, layout[name]) for name, x in arrays.items()]


@pytest.mark.parametrize(
    ("layout", "activation"),
    [(name, a) for name, a in zip(LAYOUTS, itertools.cycle([None, "swiglu"]))]
    + [("columns", None), ("groups", "relu")],
)
def test_ragged_dot(mesh, layout, activation, rng):
    transpose_rhs = layout in ("columns", "rows and groups")
    arrays, operands = problem(
        rng, mesh, LAYOUTS[layout], transpose_rhs=transpose_rhs, gated=activation == "swiglu"
    )

    @jax.jit
    def run(lhs, rhs, bias, ct):
        f = lambda *x: ragged_dot(
            *x[:2], SIZES, bias=x[2], activation=activation, transpose_rhs=transpose_rhs
        )
        out, pull = jax.vjp(f, lhs, rhs, bias)
        if jax.typeof(out).sharding.spec != jax.typeof(ct).sharding.spec:
            ct = jax.sharding.reshard(ct, jax.typeof(out).sharding.spec)
        return out, *pull(ct)

    with jax.set_mesh(mesh):
        ours = run(*operands)
    right = reference.ragged_dot(
        arrays["lhs"], arrays["rhs"], SIZES, bias=arrays["bias"], activation=activation,
        transpose_rhs=transpose_rhs, ct=arrays["ct"],
    )  # fmt: skip
    for a, b in zip(ours, right):
        assert_close(a, b, factor=16)


CONTRACTING = {
    "rows": (P(("data", "model")), P(("data", "model")), P()),
    "columns": (P(None, "data"), P(None, "model"), P(None, "data", "model")),
    "groups": (P(), P(), P("model")),
    "all": (P("data"), P("data", "model"), P(None, None, "model")),
    "one axis": (P("data"), P("data"), P("data")),
}


@pytest.mark.parametrize(
    ("layout", "accumulate"),
    [("rows", False), ("rows", True), ("columns", False), ("groups", False), ("groups", True)]
    + [("all", True), ("one axis", True)],
)
def test_contracting(mesh, layout, accumulate, rng):
    shapes = ((M, K), (M, N), (G, K, N))
    arrays = [normal(rng, s) for s in shapes]
    operands = [put(mesh, x, s) for x, s in zip(arrays, CONTRACTING[layout])]

    @jax.jit
    def run(lhs, rhs, acc):
        f = lambda lhs, rhs, acc: ragged_dot_contracting(
            lhs, rhs, SIZES, accumulate=acc if accumulate else None
        )
        out, pull = jax.vjp(f, lhs, rhs, acc)
        ct = acc
        if jax.typeof(out).sharding.spec != jax.typeof(ct).sharding.spec:
            ct = jax.sharding.reshard(ct, jax.typeof(out).sharding.spec)
        return out, *pull(ct)[:2]

    with jax.set_mesh(mesh):
        ours = run(*operands)
    right = reference.contracting(
        *arrays[:2], SIZES, accumulate=arrays[2] if accumulate else None, ct=arrays[2]
    )
    for a, b in zip(ours, right):
        assert_close(a, b, factor=16)


def collectives(text):
    names = re.findall(
        r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", text
    )
    return {n: names.count(n) for n in set(names)}


def test_collectives(make_mesh, rng):
    """Rows and columns need none, groups one sum of the results, the gradients what they must."""
    mesh = make_mesh((2, 4), ("data", "model"))

    def compiled(f, *operands):
        return collectives(jax.jit(f).lower(*operands).compile().as_text())

    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    f = lambda x, w: ragged_dot(x, w, SIZES, activation="silu")
    both = compiled(f, put(mesh, lhs, P("data")), put(mesh, rhs, P(None, None, "model")))
    assert both == {}
    groups = compiled(f, put(mesh, lhs, P("data")), put(mesh, rhs, P("model")))
    assert groups == {"all-reduce": 1}
    grad = jax.grad(lambda w, x: jnp.sum(f(x, w)))
    rows = compiled(grad, put(mesh, rhs, P()), put(mesh, lhs, P("data")))
    assert rows == {"all-reduce": 1}


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map(make_mesh, check_vma, rng):
    """Rows over one axis, groups over the other by group_offset: expert parallelism by hand."""
    mesh = make_mesh((2, 4), ("data", "model"))
    lhs, rhs, bias, ct = (normal(rng, s) for s in ((M, K), (G, K, N), (G, N), (M, N // 2)))
    halves = np.stack([[3, 0, 5, 2, 1, 1, 0, 0], [0, 0, 0, 16, 0, 0, 0, 0]]).astype(np.int32)

    def local(lhs, rhs, bias, sizes):
        first = lax.axis_index("model") * 2
        y = ragged_dot(lhs, rhs, sizes[0], group_offset=first, bias=bias, activation="geglu")
        return lax.psum(y, "model")

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("model"), P("model"), P("data")),
        out_specs=P("data"), check_vma=check_vma,
    )  # fmt: skip

    @jax.jit
    def run(lhs, rhs, bias, ct):
        out, pull = jax.vjp(lambda *x: f(*x, halves), lhs, rhs, bias)
        return out, *pull(ct)

    ours = run(lhs, rhs, bias, ct)
    parts = [
        reference.ragged_dot(lhs[r], rhs, halves[i], bias=bias, activation="geglu", ct=ct[r])
        for i, r in enumerate((slice(0, M // 2), slice(M // 2, M)))
    ]
    right = (
        *(np.concatenate([p[i] for p in parts]) for i in (0, 1)),
        *(sum(p[i] for p in parts) for i in (2, 3)),
    )
    for a, b in zip(ours, right):
        assert_close(a, b, factor=16)


@pytest.mark.parametrize("check_vma", [False, True])
def test_shard_map_of_vmap_and_contracting(make_mesh, check_vma, rng):
    mesh = make_mesh((4,), ("data",))
    lhs, rhs, shared = (normal(rng, s) for s in ((8, M, K), (8, M, N), (G, K, N)))

    def local(lhs, rhs, shared):
        y = jax.vmap(ragged_dot, (0, None, None))(lhs, shared, SIZES)
        z = jax.vmap(lambda a, b: ragged_dot_contracting(a, b, SIZES))(lhs, rhs)
        return y, z

    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"),
        check_vma=check_vma,
    )  # fmt: skip
    y, z = jax.jit(f)(lhs, rhs, shared)
    for i in range(8):
        assert_close(y[i], reference.ragged_dot(lhs[i], shared, SIZES))
        assert_close(z[i], reference.contracting(lhs[i], rhs[i], SIZES))


def test_vmap_under_a_mesh(mesh, rng):
    lhs, rhs = normal(rng, (4, M, K)), normal(rng, (G, K, N))
    with jax.set_mesh(mesh):
        operands = put(mesh, lhs, P(None, "data")), put(mesh, rhs, P(None, None, "model"))
        out = jax.jit(jax.vmap(ragged_dot, (0, None, None)))(*operands, SIZES)
    for i in range(4):
        assert_close(out[i], reference.ragged_dot(lhs[i], rhs, SIZES))


def test_vmap_over_an_axis_of_an_explicit_mesh(make_mesh, rng):
    mesh = make_mesh((2, 4), ("data", "model"), explicit=True)
    lhs, other, rhs = (normal(rng, s) for s in ((4, M, K), (4, M, N), (4, G, K, N)))

    @jax.jit
    def run(lhs, other, rhs, shared):
        loss = lambda x, w: jnp.sum(jnp.sin(ragged_dot(x, w, SIZES)))
        return (
            jax.vmap(lambda x: ragged_dot(x, shared, SIZES))(lhs),
            jax.vmap(lambda x, w: ragged_dot(x, w, SIZES))(lhs, rhs),
            jax.vmap(lambda x, y: ragged_dot_contracting(x, y, SIZES))(lhs, other),
            jax.vmap(jax.grad(loss, (0, 1)), (0, None))(lhs, shared)[1],
        )

    with jax.set_mesh(mesh):
        spec = P("data", "model")
        many = put(mesh, lhs, spec), put(mesh, other, spec), put(mesh, rhs, P("data"))
        ours = run(*many, put(mesh, rhs[0], P(None, None, "model")))
    ours = [np.asarray(x) for x in ours]
    for i in range(4):
        assert_close(ours[0][i], reference.ragged_dot(lhs[i], rhs[0], SIZES))
        assert_close(ours[1][i], reference.ragged_dot(lhs[i], rhs[i], SIZES))
        assert_close(ours[2][i], reference.contracting(lhs[i], other[i], SIZES))
        ct = np.cos(reference.ragged_dot(lhs[i], rhs[0], SIZES))
        assert_close(ours[3][i], reference.contracting(lhs[i], ct, SIZES), factor=16)


def test_inside_auto_axes(make_mesh, rng):
    mesh = make_mesh((8,), ("x",), explicit=True)
    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    with jax.set_mesh(mesh):
        f = jax.sharding.auto_axes(lambda x, w: ragged_dot(x, w, SIZES), out_sharding=P("x"))
        out = jax.jit(f)(put(mesh, lhs, P("x")), put(mesh, rhs, P()))
    assert_close(out, reference.ragged_dot(lhs, rhs, SIZES))


def test_out_sharding(mesh, rng):
    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    with jax.set_mesh(mesh):
        operands = put(mesh, lhs, P("data")), put(mesh, rhs, P())
        for wanted in (P(None, "model"), NamedSharding(mesh, P(None, "model"))):
            out = jax.jit(lambda x, w, s=wanted: ragged_dot(x, w, SIZES, out_sharding=s))(*operands)
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "model")), 2)
            assert_close(out, reference.ragged_dot(lhs, rhs, SIZES))
