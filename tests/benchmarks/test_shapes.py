"""The named shapes: those that figures elsewhere refer to, and what is counted of them."""

import collections
import itertools

import numpy as np
import pytest

from benchmarks import shapes
from benchmarks.shapes import SETS, AttentionShape, GroupedShape

ATTENTION = [s for s in SETS["tiny"] if s.op == "attention"]
GROUPED = [s for s in SETS["tiny"] if s.op == "grouped_matmul"]
by_case = dict(ids=lambda shape: shape.case)


def fields(name):
    return [tuple(s.fields().values()) for s in SETS[name]]


def test_sets_that_were_asked_for():
    grid = itertools.product((64, 128, 256), (False, True), (512, 1024, 2048, 4096, 8192, 16384))
    assert fields("fa3") == [
        (16384 // t, t, t, 2048 // h, 2048 // h, h, h, "bfloat16", causal, None, None, False)
        for h, causal, t in grid
    ]
    causal = ("bfloat16", True, None, None, False)
    assert fields("gqa") == [
        (16384 // t, t, t, n, k, 128, 128, *causal)
        for n, k in ((32, 8), (64, 8), (32, 4))
        for t in (4096, 16384)
    ]
    assert fields("mla") == [(16384 // t, t, t, 16, 16, 192, 128, *causal) for t in (4096, 16384)]
    assert fields("packed") == [
        (1, t, t, 32, 8, 128, 128, "bfloat16", True, None, 12, False)
        for t in (8192, 16384, 32768, 65536)
    ]
    assert [(s.q_len, s.window) for s in SETS["window"]] == [
        (16384, window) for window in ((1023, 0), (4095, 0), (511, 511))
    ]
    unaligned = [(s.q_len, s.kv_len, s.head_dim) for s in SETS["unaligned"]]
    assert unaligned[:2] == [(4001, 4001, 128), (1000, 3333, 128)]
    assert [h for _, _, h in unaligned[2:]] == [72, 80, 128]
    assert SETS["unaligned"][-1].lengths
    assert all(max(s.q_len, s.kv_len) <= 64 for s in ATTENTION)


@pytest.mark.parametrize(
    ("name", "m", "k", "n", "g"),
    [
        ("mixtral_up", 32768, 4096, 14336, 8),
        ("mixtral_down", 32768, 14336, 4096, 8),
        ("qwen3_30b_up", 65536, 2048, 1536, 128),
        ("qwen3_30b_down", 65536, 768, 2048, 128),
        ("olmoe_up", 65536, 2048, 2048, 64),
        ("mixtral_up", 128, 4096, 14336, 8),
        ("qwen3_30b_up", 512, 2048, 1536, 128),
    ],
)
def test_cases_of_the_anchors_on_an_h200(name, m, k, n, g):
    (shape,) = (s for s in SETS["grouped"] if s == GroupedShape(m, k, n, g, model=name))
    r = np.random.default_rng(0)
    np.testing.assert_array_equal(shape.group_sizes(), r.multinomial(m, r.dirichlet(np.ones(g))))


def test_cases_are_unique_and_mean_one_shape():
    seen = {}
    for name, cases in SETS.items():
        assert len({s.case for s in cases}) == len(cases), name
        for shape in cases:
            assert seen.setdefault(shape.case, shape) == shape
            assert shape.case.endswith(shape.dtype)
    assert len(SETS["attention"]) == 56
    assert len(SETS["grouped"]) == 29
    for name in ("cpu", "tiny"):
        assert {s.op for s in SETS[name]} == {"attention", "grouped_matmul"}
    assert GroupedShape(4096, 512, 512, 64, "float32", "uniform") in SETS["cpu"]


def attended(shape: AttentionShape) -> np.ndarray:
    """The mask [b, t, s] by its definition, an element at a time."""
    arrays = shape.arrays()
    mask = np.zeros((shape.batch, shape.q_len, shape.kv_len), bool)
    for b, t, s in np.ndindex(mask.shape):
        seen = not shape.causal or s <= t
        if shape.window is not None:
            seen &= t - shape.window[0] <= s <= t + shape.window[1]
        if shape.documents:
            seen &= arrays["q_segment_ids"][b, t] == arrays["kv_segment_ids"][b, s]
        if shape.lengths:
            seen &= t < arrays["query_seq_lengths"][b] and s < arrays["key_value_seq_lengths"][b]
        mask[b, t, s] = seen
    return mask


@pytest.mark.parametrize("shape", ATTENTION, **by_case)
def test_attention_counts(shape):
    first, end = shape.visible()
    s = np.arange(shape.kv_len)
    mask = attended(shape)
    np.testing.assert_array_equal((s >= first[..., None]) & (s < end[..., None]), mask)

    pairs = mask.sum()
    if shape.causal and not (shape.window or shape.documents or shape.lengths):
        pairs = mask.size / 2
    forward = 2 * shape.heads * pairs * (shape.head_dim + shape.v_head_dim)
    counted = [shape.flops(d) for d in ("fwd", "bwd", "fwdbwd")]
    np.testing.assert_allclose(counted, [forward, 2.5 * forward, 3.5 * forward], atol=1)

    item = {"float32": 4, "bfloat16": 2}[shape.dtype]
    queries, keys = shape.batch * shape.q_len, shape.batch * shape.kv_len
    q = queries * shape.heads * shape.head_dim * item
    out = queries * shape.heads * shape.v_head_dim * item
    k = keys * shape.kv_heads * shape.head_dim * item
    v = keys * shape.kv_heads * shape.v_head_dim * item
    lse = queries * shape.heads * 4
    integers = sum(x.size * 4 for x in shape.arrays().values())
    forward = q + k + v + out + integers
    backward = q + k + v + out + lse + integers + out + q + k + v
    assert [shape.bytes(d) for d in ("fwd", "bwd", "fwdbwd")] == [
        forward,
        backward,
        forward + backward,
    ]


def test_documents_are_uneven_and_fill_the_row():
    for shape in SETS["packed"]:
        ids = shape.arrays()["q_segment_ids"]
        sizes = np.bincount(ids[0])[1:]
        assert ids.dtype == np.int32 and ids.shape == (1, shape.q_len)
        assert len(sizes) == 12 and 0 < sizes.min() < sizes.max() / 2
        np.testing.assert_array_equal(ids, shape.arrays()["q_segment_ids"])
        assert (ids != shape.arrays(seed=1)["q_segment_ids"]).any()


@pytest.mark.parametrize("shape", GROUPED, **by_case)
def test_grouped_counts(shape):
    sizes = shape.group_sizes()
    item = {"float32": 4, "bfloat16": 2}[shape.dtype]
    operations, moved = 0, collections.Counter()
    for size in sizes:
        operations += 2 * int(size) * shape.k * shape.n
        rows, matrix = int(size), shape.k * shape.n
        moved["out"] += rows * shape.k + (matrix if size else 0)
        moved["dlhs"] += rows * shape.n + (matrix if size else 0)
        moved["drhs"] += rows * (shape.k + shape.n) + matrix
    moved["out"] += shape.m * shape.n
    moved["dlhs"] += shape.m * shape.k
    total = {name: item * count + 4 * shape.g for name, count in moved.items()}
    for direction, products in shapes.PRODUCTS.items():
        assert shape.flops(direction) == len(products) * operations
        assert shape.bytes(direction) == sum(total[p] for p in products)


@pytest.mark.parametrize("distribution", shapes.DISTRIBUTIONS)
@pytest.mark.parametrize(("m", "g"), [(65536, 128), (1000, 7), (60, 4)])
def test_sizes_of_groups(m, g, distribution):
    shape = GroupedShape(m, 16, 16, g, distribution=distribution)
    sizes = shape.group_sizes()
    assert sizes.dtype == np.int32 and sizes.shape == (g,) and (sizes >= 0).all()
    np.testing.assert_array_equal(sizes, shape.group_sizes())
    total = {"tail": 7 * m // 10, "ragged": g + (m - g) // 128 * 128}.get(distribution, m)
    assert sizes.sum() == total == shape.rows
    if distribution == "one_hot":
        assert np.count_nonzero(sizes) == 1
    if distribution == "half_empty":
        assert np.count_nonzero(sizes) <= g // 2
    if distribution == "ragged":
        assert (sizes % 128 == 1).all()
    if distribution == "zipf" and m > 60:
        harmonic = (1 / np.arange(1, g + 1)).sum()
        np.testing.assert_allclose(sizes.max() / m, 1 / harmonic, rtol=0.1)


def test_ragged_and_half_empty_fill_the_benchmark():
    for shape in SETS["distributions"]:
        assert shape.rows == (45875 if shape.distribution == "tail" else 65536)
    half = next(s for s in SETS["distributions"] if s.distribution == "half_empty")
    assert np.count_nonzero(half.group_sizes()) == 64
