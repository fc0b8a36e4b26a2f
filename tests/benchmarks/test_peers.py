"""Peers: names, values of those that run here, absent libraries and refusals."""

import dataclasses
import itertools
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import peers, torch_libraries
from benchmarks.shapes import SETS, AttentionShape, GroupedShape
from pallas_ops import dispatch

ATTENTION = [s for s in SETS["tiny"] if isinstance(s, AttentionShape) and s.dtype == "float32"]
GROUPED = [s for s in SETS["tiny"] if isinstance(s, GroupedShape) and s.dtype == "float32"]
PLAIN = AttentionShape(2, 256, 256, 4, 2, 128, 128)


def case(shape):
    return shape.case


def attention_arrays(shape, rng):
    sizes = {
        "query": (shape.batch, shape.q_len, shape.heads, shape.head_dim),
        "key": (shape.batch, shape.kv_len, shape.kv_heads, shape.head_dim),
        "value": (shape.batch, shape.kv_len, shape.kv_heads, shape.v_head_dim),
        "cotangent": (shape.batch, shape.q_len, shape.heads, shape.v_head_dim),
    }
    arrays = {n: rng.normal(size=size).astype(np.float32) for n, size in sizes.items()}
    first, end = shape.visible()
    arrays["cotangent"][end <= first] = 0  # what such a row gives is for each library to say
    return arrays


def exact_attention(shape, query, key, value, cotangent):
    """out [b, t, n, hv], the gradients of query, key and value, in float64."""
    group = shape.heads // shape.kv_heads
    q, ct = (x.astype(np.float64) for x in (query, cotangent))
    k, v = (np.repeat(x.astype(np.float64), group, axis=2) for x in (key, value))
    first, end = (x[:, None, :, None] for x in shape.visible())  # [b, 1, t, 1]
    keys = np.arange(shape.kv_len)
    scale = shape.head_dim**-0.5
    logits = np.where(
        (keys >= first) & (keys < end), scale * np.einsum("btnh,bsnh->bnts", q, k), -np.inf
    )
    top = logits.max(-1, keepdims=True)
    p = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = p.sum(-1, keepdims=True)
    p /= np.where(total > 0, total, 1)
    dp = np.einsum("btnh,bsnh->bnts", ct, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, ct)

    def fold(x):
        return x.reshape(*x.shape[:2], shape.kv_heads, group, -1).sum(3)

    out = np.einsum("bnts,bsnh->btnh", p, v)
    return out, scale * np.einsum("bnts,bsnh->btnh", ds, k), scale * fold(dk), fold(dv)


def value_and_gradients(attend, shape, arrays):
    extra = {n: jnp.asarray(x) for n, x in shape.arrays().items()}

    @jax.jit
    def run(cotangent, *qkv):
        names = ("query", "key", "value")
        out, pull = jax.vjp(lambda *qkv: attend({**dict(zip(names, qkv)), **extra}, shape), *qkv)
        return out, *pull(cotangent)

    return run(*(arrays[n] for n in ("cotangent", "query", "key", "value")))


def assert_attention(shape, found, arrays):
    first, end = shape.visible()
    live = end > first
    for x, exact in zip(found, exact_attention(shape, **arrays)):
        x = np.asarray(x)
        if x.shape[:2] == live.shape and x.shape[2] == shape.heads:
            x, exact = x[live], exact[live]
        np.testing.assert_allclose(x, exact, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", ATTENTION, ids=case)
def test_values_of_jax_nn(shape, rng):
    attend = peers.ATTENTION["jax.nn:xla"]()
    arrays = attention_arrays(shape, rng)
    if shape.v_head_dim != shape.head_dim:
        with pytest.raises(NotImplementedError, match="one head dim"):
            value_and_gradients(attend, shape, arrays)
        return
    assert_attention(shape, value_and_gradients(attend, shape, arrays), arrays)


@pytest.mark.parametrize("shape", GROUPED, ids=case)
def test_values_of_lax(shape, rng):
    library = peers.GROUPED["jax.lax:ragged_dot"]()
    x, w = rng.normal(size=(shape.m, shape.k)), rng.normal(size=(shape.g, shape.k, shape.n))
    ct = rng.normal(size=(shape.m, shape.n))
    sizes = shape.group_sizes()
    ends = np.cumsum(sizes)
    rows = [slice(e - size, e) for e, size in zip(ends, sizes)]
    exact = {
        "forward": np.zeros((shape.m, shape.n)),
        "dlhs": np.zeros((shape.m, shape.k)),
        "drhs": np.stack([x[r].T @ ct[r] for r in rows]),
    }
    for r, matrix in zip(rows, w):
        exact["forward"][r], exact["dlhs"][r] = x[r] @ matrix, ct[r] @ matrix.T
    x, w, ct = (a.astype(np.float32) for a in (x, w, ct))
    operands = {"forward": (x, w), "dlhs": (ct, w), "drhs": (x, ct)}
    for name, pair in operands.items():
        found = jax.jit(getattr(library, name))(*pair, sizes)
        np.testing.assert_allclose(found, exact[name], rtol=0, atol=5e-5, err_msg=name)


def test_names():
    here = {*peers.ATTENTION, *peers.GROUPED}
    there = {name for loaders in torch_libraries.LOADERS.values() for name in loaders}
    assert not here & there
    assert all(re.fullmatch(r"[a-z0-9.-]+:[a-z0-9_]+", name) for name in here | there)
    assert set(torch_libraries.LOADERS) == {"attention", "grouped_matmul"}

    assert set(peers.ALIASES["jax"]) == here and set(peers.ALIASES["torch"]) == there
    narrow = {n for a, names in peers.ALIASES.items() if a not in ("jax", "torch") for n in names}
    assert narrow == here | there
    assert not set(peers.ALIASES) & {*here, *there, *dispatch.NAMES, "ours", "dense"}
    assert {"cudnn", "tokamax", "lax", "mgpu", "fa3", "fa4", "quack"} <= set(peers.ALIASES)


ABSENT = {
    "tokamax": ("tokamax:mosaic", "tokamax is not installed"),
    "flash_attn3_jax": ("flash-attn3-jax:fa3", "flash-attn3-jax is not installed"),
}


@pytest.mark.parametrize("module", ABSENT)
def test_an_absent_library_is_named(module, monkeypatch):
    name, reason = ABSENT[module]
    monkeypatch.setitem(sys.modules, module, None)
    for loaders in (peers.ATTENTION, peers.GROUPED):
        if name in loaders:
            with pytest.raises(ImportError, match=reason):
                loaders[name]()


def test_an_absent_dependency_is_named(tmp_path, monkeypatch):
    (tmp_path / "flash_attn3_jax.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="flash-attn3-jax needs a_module_that_is_not_there"):
        peers.ATTENTION["flash-attn3-jax:fa3"]()


@pytest.mark.parametrize("name", ["jax.nn:cudnn", "jax:attention_mgpu", "jax:ragged_dot_mgpu"])
def test_without_a_gpu(name):
    loader = peers.ATTENTION.get(name) or peers.GROUPED[name]
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, this is cpu"):
        loader()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(peers, "_require_gpu", lambda: None)


def refused(attend, reason, **changes):
    shape = dataclasses.replace(PLAIN, **changes)
    arrays = {n: jnp.asarray(x) for n, x in shape.arrays().items()}
    with pytest.raises(NotImplementedError, match=reason):
        attend(arrays, shape)


REFUSED = {
    "jax.nn:cudnn": {
        "one head dim": dict(v_head_dim=64),
        "no segment ids": dict(documents=3),
        "no right side of a window": dict(window=(5, 5)),
    },
    "jax:attention_mgpu": {
        "float16 only": dict(dtype="bfloat16"),
        "no windows": dict(window=(5, 5)),
        "no segment ids": dict(documents=3),
        "no lengths": dict(lengths=True),
        "one head dim": dict(v_head_dim=64),
        "multiples of 64": dict(head_dim=80, v_head_dim=80),
        "query lengths": dict(q_len=100),
        "key lengths": dict(kv_len=100),
        "more queries than keys": dict(causal=True, kv_len=128),
    },
}


@pytest.mark.parametrize(
    ("name", "reason"), [(name, reason) for name, cases in REFUSED.items() for reason in cases]
)
def test_refusals(name, reason, gpu):
    refused(peers.ATTENTION[name](), reason, **{"dtype": "float16", **REFUSED[name][reason]})


def test_refusals_of_ragged_dot_mgpu(gpu):
    library = peers.GROUPED["jax:ragged_dot_mgpu"]()
    sizes = jnp.array([3, 5])

    def operands(k, n, dtype):
        return jnp.zeros((8, k), dtype), jnp.zeros((2, k, n), dtype), jnp.zeros((8, n), dtype)

    for k, n, dtype, reason in (
        (64, 64, jnp.float32, "bfloat16 and float16 only"),
        (72, 64, jnp.bfloat16, "multiples of 64"),
        (64, 72, jnp.bfloat16, "multiples of 64"),
        (64, 72, jnp.bfloat16, "multiples of"),
    ):
        lhs, rhs, ct = operands(k, n, dtype)
        with pytest.raises(NotImplementedError, match=reason):
            library.forward(lhs, rhs, sizes)
        with pytest.raises(NotImplementedError, match=reason):
            library.dlhs(ct, rhs, sizes)
        with pytest.raises(NotImplementedError, match=reason.replace("64", "128")):
            library.drhs(lhs, ct, sizes)


def plain_attention(query, key, value, is_causal, window_size):
    window = None if window_size == (-1, -1) else window_size
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, local_window_size=window
    )


def varlen_attention(query, key, value, starts, max_seqlen_q, max_seqlen_k, **options):
    starts = np.asarray(starts)
    assert max_seqlen_q == max_seqlen_k == np.diff(starts).max()
    parts = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return jnp.concatenate([plain_attention(query[p], key[p], value[p], **options) for p in parts])


def test_flash_attn3(gpu, monkeypatch, rng):
    """With a stand-in for the library: what reaches it, and what does not."""
    library = types.SimpleNamespace(flash_mha=plain_attention, flash_mha_varlen=varlen_attention)
    monkeypatch.setitem(sys.modules, "flash_attn3_jax", library)
    attend = peers.ATTENTION["flash-attn3-jax:fa3"]()
    refused(attend, "bfloat16 and float16 only", dtype="float32")
    refused(attend, "head dims to 128", head_dim=256, v_head_dim=256)
    refused(attend, "one head dim", v_head_dim=64)
    refused(attend, "no lengths", lengths=True)
    refused(attend, "last query with the last key", causal=True, q_len=100)

    small = AttentionShape(2, 48, 48, 4, 2, 16, 16, "bfloat16")
    options = (dict(), dict(causal=True), dict(window=(5, 3)), dict(causal=True, documents=3))
    for changes in options:
        shape = dataclasses.replace(small, **changes)
        arrays = attention_arrays(shape, rng)
        with jax.disable_jit():  # the stand-in looks at where documents start
            extra = {n: jnp.asarray(x) for n, x in shape.arrays().items()}
            out = attend({**{n: jnp.asarray(x) for n, x in arrays.items()}, **extra}, shape)
        exact = exact_attention(shape, **arrays)[0]
        np.testing.assert_allclose(out, exact, rtol=0, atol=2e-5, err_msg=str(changes))


def test_tokamax_is_held_to_its_kernel(gpu, monkeypatch):
    """With a stand-in for the library, whose tuning is there for one card alone."""
    asked = []

    class Op:
        def __init__(self, vjp=None):
            self.tuning = {"NVIDIA H100 80GB HBM3": {"a shape": "tuned"}}
            self.vjp = vjp

        def get_autotuning_cache(self, kind):
            return self.tuning.setdefault(kind, {})

        def replace(self, **changes):
            assert changes == dict(bypass_device_check=True)
            return self

    def record(*args, implementation, **options):
        asked.append(implementation)
        return options

    backward = Op()
    op = Op(backward)
    library = types.SimpleNamespace(
        dot_product_attention=record,
        ragged_dot_general=record,
        RaggedDotGroupSizes=lambda sizes, rows: (sizes, rows),
    )
    api = types.SimpleNamespace(IMPLEMENTATIONS={"mosaic_gpu": op})
    monkeypatch.setitem(sys.modules, "tokamax", library)
    for part in ("attention", "ragged_dot"):
        monkeypatch.setitem(sys.modules, f"tokamax._src.ops.{part}.api", api)
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):  # else left behind for other tests
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    card = types.SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [card])

    attend, library = peers.ATTENTION["tokamax:mosaic"](), peers.GROUPED["tokamax:mosaic"]()
    assert op.tuning["NVIDIA H200"] == backward.tuning["NVIDIA H200"] == {"a shape": "tuned"}
    refused(attend, "no segment ids", documents=3)
    x = jnp.ones((2, 2))
    options = attend(dict.fromkeys(("query", "key", "value"), x), PLAIN)
    assert not options["is_causal"] and options["local_window_size"] is None
    for product, dtype in (
        (library.forward, None),
        (library.dlhs, x.dtype),
        (library.drhs, x.dtype),
    ):
        assert product(x, x, x)["preferred_element_type"] == dtype
    assert asked == ["mosaic_gpu"] * 4


def test_document_starts():
    shape = AttentionShape(2, 64, 64, 2, 2, 16, 16, documents=5)
    starts = torch_libraries.document_starts(shape)
    ids = shape.arrays()["q_segment_ids"].reshape(-1)
    assert starts.dtype == np.int32 and len(starts) == 11 and starts[-1] == 128
    for a, b in itertools.pairwise(starts):
        assert a < b and (ids[a:b] == ids[a]).all()
