"""The Hopper kernels on a card: each feature, alone and in pairs, at small and at real shapes.

Results may be off by little more than those of `xla` in the same dtype, from a truth in float64 or,
where that is too large, of `xla` in float32. No call falls back on another implementation: where
`mosaic_gpu` refuses a gradient only the forward is looked at, and `test_gradients_refused` says so.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.attention import mosaic_config
from pallas_ops.attention.validate import Spec
from tests.attention import cases, numpy_reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fully_optimised")]

OURS = cases.Implementation("mosaic_gpu")
XLA = cases.Implementation("xla")
LARGEST_IN_FLOAT64 = 2**26  # scores
FEW = 64  # independent errors, of which a mean square says little

# Neither length is a multiple of 8.
SIZES: dict[str, Any] = {"B": 2, "T": 203, "S": 331, "N": 4, "K": 2, "H": 64, "Hv": 64}


def shaped(b, t, s, n, k, h, hv=None, **case) -> dict[str, Any]:
    return dict(B=b, T=t, S=s, N=n, K=k, H=h, Hv=hv or h, **case)


# The longest first, so that no worker is left alone with one.
LONG = 2**17
BERT = dict(key_value_seq_lengths=[512, 3, 100, 0, 77, 448, 511, 65], dropout_rate=0.1)
CACHES = dict(key_value_seq_lengths=[4096, 1, 77, 3000, 0, 64, 65, 2048])
GEMMA = dict(local_window_size=(1023, 0), logits_soft_cap=50.0)
PACKED = dict(documents=40, local_window_size=(4095, 0), sinks=True)
REAL = {
    "long": shaped(1, LONG, LONG, 2, 1, 128, is_causal=True),
    "long_packed": shaped(1, LONG, LONG, 2, 2, 64, **PACKED),
    "long_past": shaped(1, 1000, LONG, 2, 1, 128, is_causal=True, q_offset=[LONG - 1000]),
    "llama": shaped(1, 4096, 4096, 32, 8, 128, is_causal=True),
    "gpt_oss": shaped(1, 4096, 4096, 64, 8, 64, local_window_size=(127, 0), sinks=True),
    "gemma": shaped(1, 4096, 4096, 8, 4, 256, **GEMMA),
    "packed": shaped(1, 8192, 8192, 8, 8, 128, is_causal=True, documents=12),
    "chunk": shaped(1, 512, 16384, 16, 4, 128, is_causal=True, q_offset=[15872]),
    "mla": shaped(1, 2048, 2048, 16, 16, 192, 128, is_causal=True),
    "odd": shaped(1, 4099, 5003, 4, 1, 80, 96, is_causal=True, q_offset=[904]),
    "bert": shaped(8, 512, 512, 12, 12, 64, **BERT),
    "t5": shaped(1, 2048, 2048, 12, 12, 64, bias="1NTS"),
    "prefix": shaped(1, 2048, 2048, 8, 2, 128, mask="11TS"),
    "vit": shaped(8, 577, 577, 16, 16, 72),
    "decode": shaped(8, 1, 4096, 32, 8, 128, **CACHES),
    "decode_causal": shaped(3, 1, 4096, 32, 8, 128, is_causal=True, q_offset=[4095, 0, 2999]),
    "many_heads": shaped(4096, 9, 17, 32, 8, 16),
    "many_batches": shaped(65537, 1, 1, 1, 1, 16),
    "many_rows": shaped(8300, 1, 1, 16, 16, 128),
}

# Head dimensions, groups and lengths about the edges of a tile; whether it is causal.
_EDGES = [
    (1, 1, 4, 2, 64, 64, False),
    (7, 5, 1, 1, 8, 8, True),
    (63, 65, 7, 7, 24, 40, False),
    (64, 64, 8, 1, 40, 8, True),
    (65, 63, 6, 2, 80, 80, True),
    (127, 129, 12, 4, 96, 120, False),
    (129, 127, 4, 1, 128, 64, False),
    (192, 192, 2, 2, 136, 136, True),
    (255, 1, 4, 2, 64, 128, False),
    (257, 385, 4, 2, 192, 128, True),
    (33, 70, 4, 2, 8, 256, False),
    (200, 300, 2, 1, 248, 200, False),
    (321, 128, 2, 1, 256, 256, True),
]
SHAPES = {
    "t{}_s{}_n{}_k{}_h{}_hv{}".format(*edge): shaped(2, *edge[:6], is_causal=edge[6])
    for edge in _EDGES
}

# What differs in values only is next to each other: one worker compiles it once.
ALONE = {
    "plain": {},
    "float16": {"dtype": jnp.float16, "scale": 0.3},
    "float16_causal": shaped(2, 203, 331, 8, 2, 128, dtype=jnp.float16, is_causal=True),
    "deterministic": {"deterministic": True, "is_causal": True},
    "causal": {"is_causal": True},
    "causal_offsets": {"B": 6, "is_causal": True, "q_offset": [128, 70, -40, 331, -203, -140]},
    "window": {"B": 4, "local_window_size": 50, "q_offset": [64, -70, 300, 500]},
    "window_left_open": {"local_window_size": (None, 9)},
    "window_right_open": {"local_window_size": (9, None), "q_offset": [100, -300]},
    "window_of_one": {"local_window_size": (0, 0)},
    "kv_lengths": {"B": 4, "key_value_seq_lengths": [130, 0, -3, 999]},
    "q_lengths": {"B": 4, "query_seq_lengths": [99, 0, -1, 999]},
    "segments": {"segments": 3},
    "segments_shuffled": {"segments": 3, "shuffled": True},
    "soft_cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "sinks_and_dead_rows": {"sinks": True, "key_value_seq_lengths": [200, 0]},
    "mask": {"mask": "BNTS"},
    "mask_nothing": {"mask": "BNTS", "density": 0.0},
    "bias": {"bias": "BNTS", "bias_dtype": jnp.float32},
    "dropout": {"dropout_rate": 0.4},
}

_PATTERNS = ["".join(x) for x in itertools.product("1B", "1N", "1T", "1S")]
# Each for a mask and for a bias.
BROADCAST = {
    f"mask_{mask}_bias_{bias}": {"mask": mask, "bias": bias, "bias_inf": 0.1 * (i % 2)}
    | {"density": 1.0 if mask == "1111" else 0.75}
    | ({"bias_dtype": jnp.float32} if i % 3 == 0 else {})
    for i, mask in enumerate(_PATTERNS)
    for bias in [_PATTERNS[(5 * i + 7) % 16]]
}

_LIGHT = {
    "causal": {"is_causal": True},
    "offset": {"q_offset": [90, -30]},
    "window": {"local_window_size": (150, 20)},
    "qlen": {"query_seq_lengths": [150, 203]},
    "kvlen": {"key_value_seq_lengths": [300, 170]},
    "segments": {"segments": 2},
    "cap": {"logits_soft_cap": 1.5},
    "sinks": {"sinks": True},
    "wide": {"K": 1, "H": 128, "Hv": 128},
}
_HEAVY = {
    "mask": {"mask": "B1TS"},
    "bias": {"bias": "1NTS", "bias_inf": 0.15},
    "dropout": {"dropout_rate": 0.3},
}


def _pairs(features, among):
    """Calls in which each of `among` meets any other feature, and is there where that is not."""
    rng = np.random.default_rng(0)
    drawn = [{n for n in features if rng.integers(2)} for _ in range(300)]
    wanted = {(a, b, on) for a in among for b in features if a != b for on in (True, False)}
    covers = lambda call: {(a, b, b in call) for a in among & call for b in features if a != b}
    while wanted:
        best = max(drawn, key=lambda call: len(wanted & covers(call)))
        wanted -= covers(best)
        names = [n for n in features if n in best]
        yield "with_" + "_".join(names), functools.reduce(lambda a, n: a | features[n], names, {})


PAIRS = dict(_pairs(_LIGHT, _LIGHT.keys())) | dict(_pairs(_LIGHT | _HEAVY, _HEAVY.keys()))
PAIRS["with_everything"] = functools.reduce(dict.__or__, (_LIGHT | _HEAVY).values())

CASES: dict[str, dict[str, Any]] = REAL | PAIRS | BROADCAST | ALONE | SHAPES


def made(name):
    """A case's inputs, and the dtypes to run it in."""
    case = SIZES | CASES[name]
    dtypes = {"dtype": case.pop("dtype", jnp.bfloat16)}
    if "bias_dtype" in case:
        dtypes["bias"] = case.pop("bias_dtype")
    documents = case.pop("documents", 0)
    inputs = cases.inputs(name, case, dtypes["dtype"])
    if documents:
        draw = np.random.default_rng(0).integers(-2, documents - 2, (case["B"], case["T"]))
        ids = np.sort(draw, axis=1).astype(np.int32)
        inputs.arrays.update(q_segment_ids=ids, kv_segment_ids=ids)
    return inputs, dtypes


def poison():
    """Leaves NaN in the memory that the next call gets."""
    held = [jnp.full((2**26,), jnp.nan, jnp.float32) for _ in range(4)]
    for x in jax.block_until_ready(held):
        x.delete()


def operands(inputs, dtype=jnp.bfloat16, **dtypes):
    floats = {n: jnp.asarray(x, dtypes.get(n, dtype)) for n, x in inputs.floats.items()}
    arrays = {n: x if n == "dropout_key" else jnp.asarray(x) for n, x in inputs.arrays.items()}
    return floats, arrays


@functools.cache
def forward(implementation, statics):
    def run(floats, arrays):
        return implementation(**floats, **arrays, **dict(statics), return_residual=True)

    return jax.jit(run)


def results(implementation, inputs, *, gradients, dtype=jnp.bfloat16, **dtypes):
    """Output, lse and, if asked for, all gradients."""
    poison()
    if gradients:
        found = cases.run(implementation, inputs, dtype, **dtypes)
    else:
        call = forward(implementation, tuple(sorted(inputs.statics.items())))
        found = dict(zip(("out", "lse"), call(*operands(inputs, dtype, **dtypes))))
    return {n: np.asarray(x).astype(np.float64) for n, x in found.items()}


def backward_refused(inputs, implementation=None, **dtypes):
    """Why the package says that the kernel can't give a call's gradients; None: it can."""
    floats, arrays = operands(inputs, **dtypes)
    call = implementation or OURS

    def attend(floats):
        return call(**floats, **arrays, **inputs.statics, return_residual=True)

    out = jax.eval_shape(attend, floats)  # no forward may be refused
    cotangents = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out)
    try:
        jax.eval_shape(lambda floats: jax.vjp(attend, floats)[1](cotangents), floats)
    except NotImplementedError as error:
        if "can't serve this call: " not in str(error):
            raise
        return str(error).partition("can't serve this call: ")[2]
    return None


def scores(inputs):
    b, t, n, _ = inputs.floats["query"].shape
    return b, n, t, inputs.floats["key"].shape[1]


def live(inputs):
    """Queries [B, T, N] that see something, and keys [B, S, K] that something sees."""
    masks = {n: x for n, x in inputs.arrays.items() if n != "dropout_key"}
    masks |= {n: x for n, x in inputs.statics.items() if n in ("is_causal", "local_window_size")}
    bias = inputs.floats.get("bias")
    visible = numpy_reference.visible_pairs(scores(inputs), bias=bias, **masks)
    b, s, k, _ = inputs.floats["key"].shape
    columns = visible.any(axis=2).reshape(b, k, -1, s).any(axis=2)
    return visible.any(axis=3).transpose(0, 2, 1), columns.transpose(0, 2, 1)


def assert_right(inputs, found, expected, plain, dtype=jnp.bfloat16):
    """`found` is as near to `expected` as `plain` is, and exact for what sees nothing."""
    soft = "logits_soft_cap" in inputs.statics  # tanh is the card's own, good to 2^-11
    cases.assert_near(found["lse"], expected["lse"], 1e-3 if soft else 2e-5, "lse")
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    most = lambda x: float(np.abs(x).max())
    eps = float(jnp.finfo(dtype).eps)
    for name in (n for n in found if n != "lse"):
        right = expected[name]
        ours, theirs = (x[name] - right for x in (found, plain))
        by_row = name in ("out", "query", "key", "value")
        few = ours.size < FEW * (ours.shape[-1] if by_row else 1)
        error, allowed = most(ours), 3 * most(theirs) + most(right) * (eps if few else eps / 8)
        assert error <= allowed + 1e-5, name
        error, allowed = rms(ours), 1.5 * rms(theirs) + rms(right) * eps / 32
        assert few or error <= allowed + 1e-6, name
    if np.prod(scores(inputs)) > LARGEST_IN_FLOAT64:
        return
    rows, columns = live(inputs)
    for names, alive in ((("out", "query"), rows), (("key", "value"), columns)):
        for name in found.keys() & set(names):
            assert not found[name][~alive].any(), name


def held_to(inputs, transform, *, gradients, **dtypes):
    """The truth, and what `xla` makes of the same call."""
    small = bool(np.prod(scores(inputs)) <= LARGEST_IN_FLOAT64)
    exact, dtype = (cases.REFERENCE, jnp.float64) if small else (XLA, jnp.float32)
    with jax.enable_x64(small), jax.default_matmul_precision("highest"):
        expected = results(transform(exact), inputs, gradients=gradients, dtype=dtype)
    return expected, results(transform(XLA), inputs, gradients=gradients, **dtypes)


def judge(inputs, record_property, transform=lambda implementation: implementation, **dtypes):
    if refused := backward_refused(inputs, transform(OURS), **dtypes):
        record_property("backward_refused", refused)
    gradients = refused is None
    found = results(transform(OURS), inputs, gradients=gradients, **dtypes)
    expected, plain = held_to(inputs, transform, gradients=gradients, **dtypes)
    assert_right(inputs, found, expected, plain, dtypes.get("dtype", jnp.bfloat16))


@pytest.mark.parametrize("name", CASES)
def test_right(name, record_property):
    inputs, dtypes = made(name)
    judge(inputs, record_property, **dtypes)


def test_gradients_refused(record_property):
    """Not a fault; read the list by `-rx`, or in the report of `--junitxml`."""
    refused = {}
    for name in PAIRS | ALONE | SHAPES:
        inputs, dtypes = made(name)
        if reason := backward_refused(inputs, **dtypes):
            refused.setdefault(reason, []).append(name)
    record_property("backward_refused", refused)
    if refused:
        pytest.xfail("\n".join(f"{reason}: {', '.join(on)}" for reason, on in refused.items()))


_FULL = {"B": 3, "is_causal": True, "q_offset": [90, -30, 128], "segments": 2, "sinks": True}
_FULL |= {"key_value_seq_lengths": [300, 170, 331], "query_seq_lengths": [150, 203, 1]}


def _vmap(implementation, **call):
    """Over the batch; sinks, and what is no array, are not mapped."""
    mapped = {n: x for n, x in call.items() if n in (*cases.FLOATS, *cases.ARRAYS) and n != "sinks"}
    rest = {n: x for n, x in call.items() if n not in mapped}
    return jax.vmap(lambda mapped: implementation(**mapped, **rest))(mapped)


def _vmap_of_queries(implementation, *, query, key, value, **call):
    """Two mapped axes, one of them not the first; the keys of all are those of batch 0."""
    query = jnp.stack([query, -query], axis=2)  # [B, T, 2, N, H]
    attend = lambda q: implementation(q[None], key[:1], value[:1], **call)
    out, lse = jax.vmap(jax.vmap(attend, in_axes=1), in_axes=0)(query)
    return out[:, 0, 0] + out[:, 1, 0], lse[:, 0, 0] - lse[:, 1, 0]


def _checkpoint(implementation, policy=None, **call):
    floats = {n: call.pop(n) for n in cases.FLOATS if n in call}
    return jax.checkpoint(lambda floats: implementation(**floats, **call), policy=policy)(floats)


def _layers(implementation, *, query, **call):
    """Two, by scan and checkpoint."""
    layer = jax.checkpoint(lambda query, _: implementation(query, **call))
    out, lse = jax.lax.scan(layer, query, None, length=2)
    return out, lse[1]


_saved = jax.checkpoint_policies.save_only_these_names("context")


@pytest.mark.parametrize(
    ("transform", "case"),
    [
        (_vmap, _FULL),
        (_vmap, _FULL | {"bias": "BNTS", "mask": "B1TS"}),
        (_vmap_of_queries, {"B": 2, "is_causal": True}),
        (_checkpoint, _FULL),
        (functools.partial(_checkpoint, policy=_saved), {"is_causal": True, "dropout_rate": 0.2}),
        (_layers, {"is_causal": True, "q_offset": [128], "sinks": True}),
    ],
    ids=["vmap", "vmap_masks", "vmap_of_queries", "checkpoint", "checkpoint_saved", "layers"],
)
def test_transforms(transform, case, record_property):
    inputs = cases.inputs("transformed", SIZES | case, jnp.bfloat16)
    wrap = functools.cache(lambda implementation: functools.partial(transform, implementation))
    judge(inputs, record_property, wrap)


CASES["busy"] = shaped(2, 1111, 1111, 16, 4, 128, is_causal=True, documents=4, sinks=True)
CASES["busy"] |= dict(key_value_seq_lengths=[1000, 1111], logits_soft_cap=5.0)


@pytest.mark.parametrize(("gradients", "times"), [(False, 100), (True, 30)])
def test_repeats_to_the_bit(gradients, times):
    inputs, _ = made("busy")
    inputs.statics["deterministic"] = gradients
    if gradients and (refused := backward_refused(inputs)):
        pytest.skip(refused)
    statics = tuple(sorted(inputs.statics.items()))
    arrays = operands(inputs)
    if gradients:
        arrays += (jnp.asarray(inputs.dout, jnp.bfloat16), jnp.asarray(inputs.dlse, jnp.float32))
    run = (cases._compiled if gradients else forward)(OURS, statics)
    first = run(*arrays)
    same = jax.jit(
        lambda found: jnp.stack(jax.tree.leaves(jax.tree.map(jnp.array_equal, found, first))).all()
    )
    for i in range(times):
        if i % 10 == 0:
            poison()
        assert same(run(*arrays)), i


def test_outputs_that_are_consumed():
    """A donated query is read before its memory takes the output."""
    inputs = cases.inputs("donated", SIZES | {"is_causal": True}, jnp.bfloat16)
    floats, _ = operands(inputs)
    key, value = floats["key"], floats["value"]
    step = lambda query: OURS(query, key, value, is_causal=True)
    kept, given = floats["query"], jnp.copy(floats["query"])
    plain, donating = jax.jit(step), jax.jit(step, donate_argnums=0)
    for _ in range(5):
        kept, last = plain(kept), given
        given = donating(given)
        assert last.is_deleted()
        assert jnp.array_equal(kept, given)


POISONED = {
    "causal": {"is_causal": True, "q_offset": [-20]},
    "float16": {"is_causal": True, "q_offset": [-20], "dtype": jnp.float16},
    "wide": {"is_causal": True, "q_offset": [-20], "H": 256, "Hv": 256},
    "segments": {"segments": 3, "Hv": 128},
    "window": {"local_window_size": (30, 30)},
    "lengths": {"key_value_seq_lengths": [100], "query_seq_lengths": [50]},
    "mask": {"mask": "1NTS", "density": 0.1},
    "bias": {"bias": "1N1S", "bias_inf": 0.9},
}


@pytest.mark.parametrize("name", POISONED)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_masked_reaches_nothing(name, record_property):
    case = SIZES | {"B": 1, "T": 130, "S": 200} | POISONED[name]
    dtype = case.pop("dtype", jnp.bfloat16)
    # In what nothing sees, cotangents too: all is as if it were not there.
    inputs = cases.inputs("poisoned", case, dtype)
    rows, columns = live(inputs)
    inputs.floats["query"][~rows] = inputs.dout[~rows] = inputs.dlse[~rows] = np.nan
    inputs.floats["key"][~columns], inputs.floats["value"][~columns] = np.nan, np.inf
    judge(inputs, record_property, dtype=dtype)

    # In what some see and others do not; the sum of a weight times Inf is NaN here.
    inputs = cases.inputs("poisoned", case, dtype)
    inputs.floats["query"][:, 5] = np.nan
    inputs.floats["key"][:, 90:95, :, 3] = np.nan
    inputs.floats["value"][:, 70, :, 2] = np.nan
    inputs.floats["value"][:, 120, :, 1] = np.inf
    inputs.floats["value"][:, -1] = np.nan
    out = results(OURS, inputs, gradients=False, dtype=dtype)["out"]
    expected = cases.truth(inputs)["out"]
    expected[~np.isfinite(expected)] = np.nan
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.03)
    assert 0 < np.isnan(out).sum() < out.size

    # In one row of each, seen by some: gradients are NaN where those of `xla` are.
    if backward_refused(inputs, dtype=dtype) is None:
        inputs = cases.inputs("poisoned", case, dtype)
        for operand in ("query", "key", "value"):
            inputs.floats[operand][:, 45, :, 3] = np.nan
        found, plain = (results(i, inputs, gradients=True, dtype=dtype) for i in (OURS, XLA))
        for operand, x in plain.items():
            np.testing.assert_allclose(found[operand], x, rtol=0, atol=0.1, err_msg=operand)


@pytest.mark.parametrize("length", [64, 192, 320])
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_a9_logits_far_from_zero(length, masked):
    """pytorch#196678: also with a tail of keys, and with a row's lse under -ln FLT_MAX."""
    kind = {"mask": "TS"} if masked else {"is_causal": True}
    case = shaped(1, length, length, 1, 1, 64, **kind)
    inputs = cases.inputs("far", case, jnp.bfloat16)
    gradients = backward_refused(inputs) is None
    for offset in (-1e4, -120, 0, 120, 1e4):
        for mask in (np.tri(length, dtype=bool), np.ones((length,) * 2, bool))[: 1 + masked]:
            floats = dict(inputs.floats)
            for name, first in (("query", 1), ("key", offset * 8)):
                floats[name] = 0.1 * floats[name] / np.abs(floats[name]).max()
                floats[name][..., 0] = first
            floats = {n: cases.rounded(x, jnp.bfloat16) for n, x in floats.items()}
            call = inputs.replace(floats=floats, arrays={"mask": mask} if masked else {})
            found = results(OURS, call, gradients=gradients)
            expected = {n: x for n, x in cases.truth(call).items() if n in found}
            cases.assert_all_near(found, expected, 2e-2 + abs(offset) * 2e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("rise", [20, 60, 400])
def test_scores_that_rise(rise, dtype, record_property):
    """From the last keys to the first, within and beyond what float32 has room for."""
    case = shaped(2, 300, 1000, 4, 2, 128, is_causal=True, q_offset=[690, 0])
    inputs = cases.inputs("rising", case, dtype)
    query, key = inputs.floats["query"], inputs.floats["key"]
    query[:] = np.abs(query) + 0.5
    key += rise * np.linspace(1, 0, key.shape[1])[:, None, None] / 11
    for x in (query, key):
        x[:] = cases.rounded(x, dtype)
    judge(inputs, record_property, dtype=dtype)


def test_dropout_drops_the_same():
    """Equal scores and one-hot values: the output says which weights were kept."""
    b, t, n, s = 2, 300, 4, 256
    zeros = lambda length: jnp.zeros((b, length, n, 8), jnp.bfloat16)
    value = jnp.broadcast_to(jnp.eye(s, dtype=jnp.bfloat16)[:, None], (b, s, n, s))
    options = {"dropout_rate": 0.3, "dropout_key": jax.random.key(7)}
    found, plain = (np.asarray(i(zeros(t), zeros(s), value, **options)) > 0 for i in (OURS, XLA))
    np.testing.assert_array_equal(found, plain)
    assert abs(found.mean() - 0.7) < 0.01


def test_keys_past_int32():
    """2^31 elements of keys: the heads repeat, so that a short call tells what is right."""
    keys = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(keys[0], (1, 1, 128, 128), jnp.bfloat16)
    few = [jax.random.normal(k, (1, 2**17, 8, 128), jnp.bfloat16) for k in keys[1:]]
    out = OURS(query, *(jnp.tile(x, (1, 1, 16, 1)) for x in few))
    expected = XLA(query.reshape(1, 16, 8, 128), *few).reshape(out.shape)
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(out, expected, atol=np.abs(expected).max() / 64)


@pytest.mark.parametrize("part", [0, 3])
@pytest.mark.parametrize("head", [64, 128])
def test_configs(head, part):
    """Some of those that tuning may choose for the forward, all for the gradient."""
    inputs = cases.inputs("configs", shaped(2, 203, 331, 4, 2, head, is_causal=True), jnp.bfloat16)
    call = [jnp.asarray(inputs.floats[n], jnp.bfloat16) for n in ("query", "key", "value")]
    spec = Spec(1.0, None, 0, None, 0.0, None, False, "context")
    fields = ("query", "key", "value")
    chosen = mosaic_config.candidates(*call, fields=fields, spec=spec)[part::7]
    chosen += mosaic_config.backward_candidates(*call, spec=spec)[part // 3 :: 2]
    expected, plain = held_to(inputs, lambda implementation: implementation, gradients=True)
    for config in chosen:
        implementation = cases.Implementation("mosaic_gpu", (config,))
        gradients = isinstance(config, mosaic_config.BackwardConfig)
        found = results(implementation, inputs, gradients=gradients)
        assert_right(inputs, found, expected, plain)
