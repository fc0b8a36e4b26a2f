"""What is accepted, what is refused and with which words; checkify; precision; dtypes; memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from pallas_ops.grouped_matmul.xla import Config
from tests.grouped_matmul import reference
from tests.grouped_matmul.test_values import assert_close, normal

M, K, N, G = 10, 3, 4, 2
SIZES = np.array([3, 4], np.int32)
LHS, RHS, WIDE = np.ones((M, K), "f"), np.ones((G, K, N), "f"), np.ones((M, N), "f")

WRONG = [
    (dict(lhs=LHS[0]), ValueError, r"lhs must have shape \[M, K\], got \(3,\)"),
    (dict(lhs=LHS.astype(int)), ValueError, "lhs must be of dtype .* got int32"),
    (dict(rhs=RHS[0]), ValueError, r"rhs must have shape \[G, K, N\], got \(3, 4\)"),
    (dict(rhs=RHS[:, :2]), ValueError, r"K=3, the columns of lhs .* got \(2, 2, 4\)"),
    (dict(transpose_rhs=True), ValueError, r"rhs must have shape \[G, N, K\] with K=3"),
    (dict(transpose_rhs=1), TypeError, "transpose_rhs must be a Python bool"),
    (dict(group_sizes=SIZES.astype("f")), ValueError, "group_sizes must be of an integer"),
    (dict(group_sizes=SIZES > 3), ValueError, "group_sizes must be of an integer"),
    (dict(group_sizes=SIZES[None]), ValueError, r"group_sizes must have shape \[G\], got"),
    (dict(group_sizes=SIZES[:1]), ValueError, "group_sizes must have one entry .* 2, got 1"),
    (dict(group_offset=0.5), ValueError, "group_offset must be of an integer"),
    (dict(group_offset=SIZES), ValueError, r"group_offset must be a scalar .* \(2,\)"),
    (dict(bias=WIDE), ValueError, r"bias must have shape \[G, N\] = \(2, 4\), got \(10, 4\)"),
    (dict(bias=np.ones((G, N), int)), ValueError, "bias must be of dtype"),
    (dict(activation="tanh"), ValueError, "activation must be None or one of .* 'tanh'"),
    (dict(rhs=RHS[..., :3], activation="swiglu"), ValueError, "'swiglu' needs an even"),
    (dict(preferred_element_type="foo"), ValueError, "preferred_element_type must be a dtype"),
    (dict(preferred_element_type=int), ValueError, "preferred_element_type must be one of"),
    (dict(preferred_element_type=np.float64), ValueError, "needs jax_enable_x64"),
    (dict(precision="exact"), ValueError, "precision must be .* got 'exact'"),
    (dict(implementation="cudnn"), ValueError, "implementation must be None, one of"),
    (dict(implementation=()), ValueError, "implementation must be None, one of"),
    (dict(implementation="mosaic_gpu"), NotImplementedError, "ragged_dot: .*'mosaic_gpu'"),
    (dict(implementation="triton"), NotImplementedError, "ragged_dot: .*'triton'"),
    (dict(implementation="reference"), NotImplementedError, "ragged_dot: .*'reference'"),
    (dict(config=3), NotImplementedError, "takes no config of type int"),
    (dict(out_sharding="x"), TypeError, "out_sharding must be a NamedSharding"),
    (dict(out_sharding=jax.P("x")), ValueError, "out_sharding names axes"),
    (dict(out_sharding=jax.P()), ValueError, "out_sharding must name axes of a mesh"),
]  # fmt: skip
WRONG_CONTRACTING = [
    (dict(lhs=LHS[:4]), ValueError, r"\[M, N\] with M=4, .* got \(10, 4\)"),
    (dict(num_groups=3), ValueError, "num_groups is 3, got 2"),
    (dict(num_groups=-1), ValueError, "num_groups must not be negative, got -1"),
    (dict(num_groups=2.0), TypeError, "num_groups must be a Python int"),
    (dict(group_offset=1), ValueError, "num_groups must be given with group_off"),
    (dict(accumulate=WIDE), ValueError, r"accumulate must have shape \[G, K, N\]"),
    (dict(group_sizes=np.int32(3)), ValueError, "group_sizes must have shape"),
    (dict(implementation="mosaic_gpu"), NotImplementedError, "_contracting: "),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), WRONG)
def test_refused_by_name(change, error, words):
    with pytest.raises(error, match=words):
        ragged_dot(**{"lhs": LHS, "rhs": RHS, "group_sizes": SIZES, **change})


@pytest.mark.parametrize(("change", "error", "words"), WRONG_CONTRACTING)
def test_contracting_refused_by_name(change, error, words):
    with pytest.raises(error, match=words):
        ragged_dot_contracting(**{"lhs": LHS, "rhs": WIDE, "group_sizes": SIZES, **change})


@pytest.mark.parametrize("name", ["transpose_rhs", "activation", "num_groups"])
def test_python_values_must_not_be_traced(name):
    op, rhs = (ragged_dot_contracting, WIDE) if name == "num_groups" else (ragged_dot, RHS)
    with pytest.raises(
        TypeError, match=f"{name} must be .*Python|{name} must be None or a string known"
    ):
        jax.jit(lambda x: op(LHS, rhs, SIZES, **{name: x}))(1)


def test_config_range():
    with pytest.raises(ValueError, match="block_m must lie in"):
        Config(0)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int4"])
def test_integer_dtypes(dtype, rng):
    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    out = ragged_dot(lhs, rhs, jnp.asarray(SIZES).astype(dtype), group_offset=jnp.zeros((), dtype))
    assert_close(out, reference.ragged_dot(lhs, rhs, SIZES))


def test_wide_integers_saturate(rng):
    lhs, rhs = normal(rng, (M, K)), normal(rng, (3, K, N))
    with jax.enable_x64(True):
        for sizes in ([2, 2**40, 5], [3, -(2**40), 2**33], [2**31 - 1] * 3, [2**63 - 1, 1, 1]):
            right = reference.ragged_dot(lhs, rhs, sizes)
            assert_close(ragged_dot(lhs, rhs, np.array(sizes, np.int64)), right)
        for offset in (2**40, -(2**40), 2**63 - 1):
            assert not ragged_dot(lhs, rhs, SIZES, group_offset=np.int64(offset)).any()
            assert not ragged_dot(lhs, rhs, SIZES, group_offset=offset).any()
    big = np.full(3, 2**31 - 1, np.int32)  # the sum passes 2**32
    assert_close(ragged_dot(lhs, rhs, big), reference.ragged_dot(lhs, rhs, big))


@pytest.mark.parametrize(
    ("offset", "form"), [(-1, "int"), (0, "scalar"), (1, "vector"), (3, "int"), (4, "scalar")]
)
def test_group_offset(offset, form, rng):
    sizes = np.array([2, 3, 0, 4], np.int32)
    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    given = {"int": offset, "scalar": np.int32(offset), "vector": np.array([offset])}[form]
    run = lambda o: ragged_dot(lhs, rhs, sizes, None, None, o)
    out = run(given) if form == "int" else jax.jit(run)(given)
    assert_close(out, reference.ragged_dot(lhs, rhs, sizes, offset=offset))


@pytest.mark.parametrize(
    ("transform", "sizes", "words"),
    [
        ("eager", [3, 8], "sum to at most the number of rows, 10, but the sum is at least 11"),
        ("jit", [2**31 - 1, 2**31 - 1], "the sum is at least 11"),
        ("vmap", [3, 8], "the sum is at least 11"),
        ("grad", [-2, 4], "must not be negative, but the smallest is -2"),
        ("jit", [3, 7], None),
        ("vmap", [0, 10], None),
    ],
)
def test_checkify(transform, sizes, words):
    sizes = np.array(sizes, np.int32)
    f = lambda s: ragged_dot(LHS, RHS, s)
    if transform == "vmap":
        f, sizes = jax.vmap(f), np.stack([SIZES, sizes])
    elif transform == "grad":
        f = lambda s: jax.grad(lambda w: jnp.sum(ragged_dot(LHS, w, s)))(RHS)
    checked = checkify.checkify(jax.jit(f) if transform == "jit" else f)
    error, out = jax.jit(checked)(sizes)
    right = f(sizes)
    np.testing.assert_array_equal(out, right)
    if words is None:
        assert error.get() is None
    else:
        assert words in error.get()


def test_checkify_contracting_and_disabled():
    f = lambda s: ragged_dot_contracting(LHS, WIDE, s)
    assert "sum to at most" in checkify.checkify(f)(SIZES * 2)[0].get()
    quiet = checkify.checkify(f, errors=checkify.nan_checks)(SIZES * 2)[0]
    assert quiet.get() is None


def precisions(f, *args):
    eqns = [
        f.trace(*args).jaxpr.jaxpr.eqns if hasattr(f, "trace") else jax.make_jaxpr(f)(*args).eqns
    ]
    return [
        e.params["spec"].precision for e in eqns[0] if e.primitive.name.startswith("ragged_dot")
    ]


def test_precision():
    highest, default = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
    half = LHS.astype(jnp.bfloat16), RHS.astype(jnp.bfloat16)
    run = lambda x, w, **kw: ragged_dot(x, w, SIZES, **kw)
    assert precisions(run, LHS, RHS) == [highest]
    assert precisions(run, *half) == [default]
    assert precisions(run, LHS, half[1]) == [highest]
    with jax.default_matmul_precision("tensorfloat32"):
        assert precisions(run, LHS, RHS) == [jax.lax.Precision.HIGH]
    preset = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
    for given, right in [
        ("default", default),
        (("default", "highest"), (default, highest)),
        (preset, preset),
        ("BF16_BF16_F32", preset),
    ]:
        assert precisions(lambda *a, g=given: run(*a, precision=g), LHS, RHS) == [right]
    grads = jax.grad(lambda x, w: jnp.sum(run(x, w, precision="default")), (0, 1))
    assert set(precisions(grads, LHS, RHS)) == {default}
    # It reaches the product.
    text = jax.jit(lambda x, w: run(x, w, precision=preset)).lower(LHS, RHS).as_text()
    assert "lhs_precision_type = bf16" in text


@pytest.mark.parametrize(
    ("lhs_dtype", "rhs_dtype", "preferred"),
    [
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "float32", None),
        ("float16", "bfloat16", "bfloat16"),
        ("float32", "float32", "bfloat16"),
    ],
)
def test_dtypes(lhs_dtype, rhs_dtype, preferred, rng):
    lhs, rhs = normal(rng, (M, K), lhs_dtype), normal(rng, (G, K, N), rhs_dtype)
    out, pull = jax.vjp(lambda x, w: ragged_dot(x, w, SIZES, None, preferred), lhs, rhs)
    common = jnp.dtype(lhs_dtype if lhs_dtype == rhs_dtype else "float32")
    assert out.dtype == (preferred or common)
    ct = normal(rng, (M, N), out.dtype)
    dlhs, drhs = pull(ct)
    assert (dlhs.dtype, drhs.dtype) == (lhs_dtype, rhs_dtype)
    right = reference.ragged_dot(lhs, rhs, SIZES, ct=ct)
    # One rounding, to the dtype of each result: operands and cotangent are exact.
    for actual, expected in zip((out, dlhs, drhs), right):
        assert_close(actual, expected, factor=0.51 if actual.dtype != np.float32 else 4)
    acc = ragged_dot_contracting(lhs, ct, SIZES, accumulate=jnp.ones((G, K, N), jnp.float32))
    assert acc.dtype == np.float32
    assert_close(acc, 1 + reference.contracting(lhs, ct, SIZES))


def test_float32_sums_are_not_rounded_to_bfloat16(rng):
    """2**8 + 1 ones: a bfloat16 accumulator stops at 2**8."""
    m = 2**9 + 2
    x, y = jnp.ones((m, 1), jnp.bfloat16), jnp.ones((m, 1), jnp.bfloat16)
    out = ragged_dot_contracting(x, y, np.array([m]), preferred_element_type=np.float32)
    assert out[0, 0, 0] == m
    wide = ragged_dot(x.reshape(1, m), y[None], np.array([1]), preferred_element_type=np.float32)
    assert wide[0, 0] == m
    bias = jnp.zeros((1, 1), jnp.bfloat16)
    grad = jax.grad(
        lambda b: jnp.sum(ragged_dot(x, y[None, :1], np.array([m]), bias=b).astype("f"))
    )
    assert grad(bias)[0, 0] == jnp.asarray(m, jnp.bfloat16)


def temporary(f, *args):
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_linear():
    """Temporaries are tiles, a matrix and an accumulator: no [G, M, K], no copy of an operand."""
    m, k, n, g = 2048, 64, 128, 64
    x, w = jax.ShapeDtypeStruct((m, k), "float32"), jax.ShapeDtypeStruct((g, k, n), "float32")
    y, s = jax.ShapeDtypeStruct((m, n), "float32"), jax.ShapeDtypeStruct((g,), "int32")
    small = 4 * (128 * (k + n) + 4 * k * n + 64 * g)
    assert temporary(ragged_dot, x, w, s) < small
    assert temporary(lambda *a: ragged_dot(*a, transpose_rhs=True), y, w, s) < small
    assert temporary(ragged_dot_contracting, x, y, s) < small
    grads = lambda x, w, y, s: jax.vjp(lambda x, w: ragged_dot(x, w, s), x, w)[1](y)
    assert temporary(grads, x, w, y, s) < 2 * small
    swiglu = lambda x, w, y, s: jax.vjp(
        lambda x, w: ragged_dot(x, w, s, activation="swiglu"), x, w
    )[1](y[:, : n // 2])
    assert temporary(swiglu, x, w, y, s) < 2 * small + 3 * 4 * m * n
    assert temporary(jax.lax.ragged_dot, x, w, s) > 10 * small  # so that the bound says something


def test_logged_once_per_call_site(caplog):
    with caplog.at_level("INFO", logger="pallas_ops"):
        for _ in range(2):
            jax.jit(lambda x: ragged_dot(x, RHS, SIZES))(LHS)
    lines = [r.message for r in caplog.records if "ragged_dot" in r.message]
    assert len(lines) == 1
    assert "xla on cpu; not mosaic_gpu: no mosaic_gpu kernel exists" in lines[0]
