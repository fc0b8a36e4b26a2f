"""Eight virtual devices: automatic and explicit meshes, shard_map, and what is communicated."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_ops
from tests.attention import cases

# Sizes of which no two are equal, so that an array in compiled code is known by its shape.
B, T, S, N, K, H, Hv = 8, 5, 12, 16, 4, 3, 7
# The rules are the same for each implementation: most tests are of the one that compiles fastest.
attention = functools.partial(pallas_ops.flash_attention, implementation="reference")
OPTIONS = {"is_causal": True, "local_window_size": (9, 2), "dropout_rate": 0.2}


def _operands(n=N, k=K, b=B):
    case = {"B": b, "T": T, "S": S, "N": n, "K": k, "H": H, "Hv": Hv, "bias": "1N1S", "sinks": True,
            "mask": "B11S", "segments": 2, "q_offset": [7, 3, 4], "key_value_seq_lengths": [12, 9],
            "query_seq_lengths": [5, 4], "dropout_rate": 0.2}  # fmt: skip
    inputs = cases.inputs("sharding", case)
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.floats.items()}
    cotangents = {n: jnp.asarray(getattr(inputs, n), jnp.float32) for n in ("dout", "dlse")}
    return floats | {n: jnp.asarray(x) for n, x in inputs.arrays.items()} | cotangents


def _few(operands, extra=()):
    return {n: operands[n] for n in ("query", "key", "value", "dout", "dlse", *extra)}


def _call(operands, options=OPTIONS):
    """dict of out, lse and gradients."""
    operands = dict(operands)
    cotangents = operands.pop("dout"), operands.pop("dlse")
    floats = {n: operands.pop(n) for n in cases.FLOATS if n in operands}
    if "dropout_key" not in operands:
        options = {n: x for n, x in options.items() if n != "dropout_rate"}
    f = lambda floats: attention(**floats, **operands, **options, return_residual=True)
    (out, lse), pull = jax.vjp(f, floats)
    return {"out": out, "lse": lse} | pull(cotangents)[0]


@functools.cache
def _expected(everything, n, k):
    operands = _operands(n, k)
    return jax.jit(_call)(operands if everything else _few(operands))


DIMENSIONS = {
    "query": "btnh", "key": "bskh", "value": "bskd", "bias": "1n1s", "sinks": "n", "mask": "b11s",
    "q_offset": "b", "query_seq_lengths": "b", "key_value_seq_lengths": "b", "q_segment_ids": "bt",
    "kv_segment_ids": "bs", "dout": "btnd", "dlse": "btn", "dropout_key": "", "out": "btnd",
    "lse": "btn",
}  # fmt: skip


def _spec(name, axes):
    """A PartitionSpec from a mesh axis for each letter."""
    return P(*(axes.get(letter) for letter in DIMENSIONS[name]))


def _place(operands, mesh, axes):
    return {n: jax.device_put(x, NamedSharding(mesh, _spec(n, axes))) for n, x in operands.items()}


def _near(actual, expected):
    jax.tree.map(lambda a, b: cases.assert_near(a, b, 1e-5), dict(actual), dict(expected))


def _gathered(text):
    """Shapes that an all-gather or all-to-all makes, in compiled code."""
    lines = [
        x for x in text.splitlines() if re.search(r"= .*\b(all-gather|all-to-all)(-start)?\(", x)
    ]
    return [s for line in lines for s in re.findall(r"(?:f32|s32|u32|pred)\[([\d,]*)\]", line)]


def _moved(text):
    """The sets of sizes of what is gathered."""
    return [set(map(int, s.split(","))) if s else set() for s in _gathered(text)]


# Mesh, the axis each dimension is cut by, number of heads, number of kv heads.
AUTO = {
    "batch": ((8,), ("x",), {"b": "x"}, N, K),
    "heads": ((4,), ("x",), {"n": "x", "k": "x"}, N, K),
    "batch_and_heads": ((2, 4), ("x", "y"), {"b": "x", "n": "y", "k": "y"}, N, K),
    "heads_finer_than_kv_heads": ((8,), ("x",), {"n": "x"}, 8, 2),
    "heads_between": ((4,), ("x",), {"n": "x"}, 8, 2),
    "xla": ((2, 4), ("x", "y"), {"b": "x", "n": "y"}, 8, 2),
}


@pytest.mark.parametrize("name", AUTO)
def test_automatic_mesh(name, make_mesh):
    """Every operand sharded as it can be; dropout mask and broadcast gradients included."""
    shape, names, axes, n, k = AUTO[name]
    mesh = make_mesh(shape, names)
    operands = _place(_operands(n, k), mesh, axes)
    options = OPTIONS | ({"implementation": "xla"} if name == "xla" else {})
    compiled = jax.jit(lambda x: _call(x, options)).lower(operands).compile()
    actual = compiled(operands)
    _near(actual, _expected(True, n, k))
    for result in ("out", "lse", "query"):
        wanted = NamedSharding(mesh, _spec(result, axes))
        assert actual[result].sharding.is_equivalent_to(wanted, actual[result].ndim), result
    for x in actual.values():
        if x.sharding.is_fully_replicated:  # bias, sinks, shared keys: sums over all shards on each
            assert all((np.asarray(shard.data) == x).all() for shard in x.addressable_shards)
    if n == N:  # the kv heads are cut as well: nothing but small seeds may be gathered
        assert all(H not in sizes and Hv not in sizes for sizes in _moved(compiled.as_text()))


@pytest.mark.parametrize(
    "axes", [{"t": "x"}, {"s": "x"}, {"h": "x"}, {"k": "x"}, {"n": "x", "s": "x"}]
)
def test_a_sharding_that_is_not_served_is_still_right(axes, make_mesh):
    """Sequence and feature dimensions are gathered; heads of one side only, too."""
    mesh = make_mesh((4,), ("x",))
    n, k, t, s, h = 4, 4, 8, 12, 4
    inputs = cases.inputs("unserved", {"B": 1, "T": t, "S": s, "N": n, "K": k, "H": h, "Hv": h})
    operands = {m: jnp.asarray(x, jnp.float32) for m, x in inputs.floats.items()}
    cotangents = {m: jnp.asarray(getattr(inputs, m), jnp.float32) for m in ("dout", "dlse")}
    placed = _place(operands | cotangents, mesh, axes)
    _near(jax.jit(lambda x: _call(x, {}))(placed), cases.truth(inputs))


@pytest.mark.parametrize(
    ("cut", "cotangent", "manual"),
    [
        ({"b": "x"}, P(None, "x"), False),
        ({"b": "x"}, P(), False),
        ({"n": "x", "k": "x"}, P(None, "x"), False),
        ({"b": "x"}, P(None, "x"), True),
        ({"n": "x", "k": "x"}, P(), True),
    ],
)
def test_a16_cotangent_sharded_otherwise(cut, cotangent, manual, make_mesh):
    """jax#25986: the cotangent is moved to where q is, not q, k or v to where it is."""
    mesh = make_mesh((2,), ("x",))
    case = {"B": 2, "T": 8, "S": 12, "N": 4, "K": 2, "H": 3, "Hv": 7}
    inputs = cases.inputs("a16", case)
    qkv = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.floats.items()}
    qkv = _place(qkv, mesh, cut)
    dout = jax.device_put(jnp.asarray(inputs.dout, jnp.float32), NamedSharding(mesh, cotangent))
    f = lambda query, key, value: attention(query, key, value)
    if manual:
        specs = tuple(_spec(n, cut) for n in ("query", "key", "value", "out"))
        f = jax.shard_map(f, mesh=mesh, in_specs=specs[:3], out_specs=specs[3])

    def gradients(qkv, dout):
        out, pull = jax.vjp(lambda qkv: f(*(qkv[n] for n in ("query", "key", "value"))), qkv)
        return {"out": out} | pull(dout)[0]

    compiled = jax.jit(gradients).lower(qkv, dout).compile()
    actual = compiled(qkv, dout)
    expected = cases.truth(inputs.replace(dlse=None))
    _near(actual, {n: expected[n] for n in actual})
    for n in ("out", "query", "key", "value"):
        wanted = NamedSharding(mesh, _spec(n, cut))
        assert actual[n].sharding.is_equivalent_to(wanted, 4), n
    assert all(3 not in sizes and 12 not in sizes for sizes in _moved(compiled.as_text()))


EXPLICIT = {
    "batch_and_heads": ({"b": "data", "n": "model", "k": "model"}, N, K),
    "heads_finer_than_kv_heads": ({"n": ("data", "model")}, 8, 2),
    "xla": ({"b": "data", "n": "model"}, 8, 2),
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_explicit_mesh(name, make_mesh):
    """Types carry shardings: the op, its gradients and their types."""
    axes, n, k = EXPLICIT[name]
    options = OPTIONS | ({"implementation": "xla"} if name == "xla" else {})
    mesh = make_mesh((2, 4), ("data", "model"), explicit=True)
    with jax.set_mesh(mesh):
        operands = _place(_operands(n, k), mesh, axes)
        types = jax.eval_shape(lambda x: _call(x, options), operands)
        for result in ("out", "lse", "query", "key", "value"):
            assert types[result].sharding.spec == _spec(result, axes), result
        _near(jax.jit(lambda x: _call(x, options))(operands), _expected(True, n, k))


def test_explicit_mesh_eager(make_mesh):
    mesh = make_mesh((8,), ("x",), explicit=True)
    with jax.set_mesh(mesh):
        operands = _place(_few(_operands()), mesh, {"b": "x"})
        out = attention(*(operands[n] for n in ("query", "key", "value")))
        assert jax.typeof(out).sharding.spec[0] == "x"


def test_auto_axes_inside_an_explicit_mesh(make_mesh):
    mesh = make_mesh((8,), ("x",), explicit=True)
    with jax.set_mesh(mesh):
        operands = _place(_few(_operands()), mesh, {"b": "x"})
        specs = {n: _spec(n, {"b": "x"}) for n in ("out", "lse", "query", "key", "value")}
        f = jax.sharding.auto_axes(lambda x: _call(x), out_sharding=specs)
        _near(jax.jit(f)(operands), _expected(False, N, K))


def test_mesh_of_explicit_and_automatic_axes(make_mesh):
    kinds = jax.sharding.AxisType
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kinds.Explicit, kinds.Auto))
    with jax.set_mesh(mesh):
        operands = _few(_operands(), ("bias", "sinks", "kv_segment_ids", "q_segment_ids"))
        expected = jax.jit(_call)(operands)
        placed = _place(operands, mesh, {"b": "x"})
        _near(jax.jit(_call)(placed), expected)


SHARD_MAPS = {
    "batch_and_heads": {"b": "x", "n": "y", "k": "y"},
    "replicated_keys": {"n": "y"},
    "xla": {"b": "x", "n": "y"},
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", SHARD_MAPS)
def test_shard_map(name, check_vma, make_mesh):
    """Op and gradient, taken outside of the map, of sharded and of replicated operands."""
    axes = SHARD_MAPS[name]
    n, k = (8, 1) if "k" not in axes and "n" in axes else (N, K)
    mesh = make_mesh((2, 4), ("x", "y"))
    operands = _few(_operands(n, k), ("bias", "sinks", "key_value_seq_lengths", "mask"))
    floats = {m: operands[m] for m in cases.FLOATS}
    rest = {m: operands[m] for m in ("key_value_seq_lengths", "mask")}

    def local(floats, rest):
        options = {"implementation": "xla"} if name == "xla" else {}
        return attention(**floats, **rest, **options, is_causal=True, return_residual=True)

    specs = (
        jax.tree.map(lambda m: _spec(m, axes), {m: m for m in floats}),
        {m: _spec(m, axes) for m in rest},
    )
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=(_spec("out", axes), _spec("lse", axes)),
        check_vma=check_vma,
    )

    def both(f):
        out, pull = jax.vjp(lambda floats: f(floats, rest), floats)
        return out, pull((operands["dout"], operands["dlse"]))[0]

    actual, expected = jax.jit(lambda: both(mapped))(), jax.jit(lambda: both(local))()
    jax.tree.map(cases.assert_near, actual, expected)


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradient_taken_inside_shard_map(check_vma, make_mesh):
    mesh = make_mesh((4,), ("x",))
    operands = _few(_operands(), ("sinks",))
    f = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks)
    args = [operands[n] for n in ("query", "key", "value", "sinks")]
    gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), argnums=(0, 1))
    specs = (P("x"), P("x"), P("x"), P())
    mapped = jax.shard_map(
        gradient, mesh=mesh, in_specs=specs, out_specs=(P("x"), P("x")), check_vma=check_vma
    )
    jax.tree.map(cases.assert_near, jax.jit(mapped)(*args), jax.jit(gradient)(*args))


def test_shard_map_over_one_of_two_axes(make_mesh):
    """Manual over batch, automatic over heads."""
    mesh = make_mesh((2, 4), ("x", "y"))
    operands = _place(_few(_operands()), mesh, {"b": "x", "n": "y", "k": "y"})
    qkv = [operands[n] for n in ("query", "key", "value")]
    f = jax.shard_map(
        lambda *x: attention(*x, is_causal=True, local_window_size=(9, 2)),
        mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"), axis_names={"x"},
    )  # fmt: skip
    cases.assert_near(jax.jit(f)(*qkv), _expected(False, N, K)["out"])


def test_vmap_of_sharded_operands(make_mesh):
    """spmd_axis_name and plain vmap under a mesh."""
    mesh = make_mesh((2, 4), ("x", "y"))
    operands = _operands()
    qkv = [operands[n].reshape(2, 4, *operands[n].shape[1:]) for n in ("query", "key", "value")]
    placed = [jax.device_put(x, NamedSharding(mesh, P("x"))) for x in qkv]
    f = lambda *x: attention(*x)
    expected = jax.jit(f)(*qkv)
    for vmap in (jax.vmap, functools.partial(jax.vmap, spmd_axis_name="x")):
        cases.assert_near(jax.jit(vmap(f))(*placed), expected)


def test_sharding_does_not_change_a_dropout_mask(make_mesh):
    key, mesh = jax.random.key(5), make_mesh((2, 4), ("x", "y"))
    value = jnp.broadcast_to(jnp.eye(S, dtype=jnp.float32)[:, None], (B, S, K, S))
    q, k = jnp.zeros((B, T, N, 2), jnp.float32), jnp.zeros((B, S, K, 2), jnp.float32)
    run = jax.jit(lambda *x: attention(*x[:3], dropout_rate=0.5, dropout_key=x[3]))
    whole = run(q, k, value, key)
    placed = [jax.device_put(x, NamedSharding(mesh, P("x", None, "y"))) for x in (q, k, value)]
    np.testing.assert_array_equal(run(*placed, key), whole)
