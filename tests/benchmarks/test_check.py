"""The check of values passes what is right and names each fault that is planted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import operations
from benchmarks.shapes import AttentionShape, GroupedShape

# Larger than what the sample takes of a group, so that its ends are what is looked at.
LARGE = GroupedShape(5000, 300, 24, 3, "bfloat16", "dirichlet")
SMALL = GroupedShape(70, 12, 20, 5, "float32", "half_empty")
TAIL = dataclasses.replace(SMALL, distribution="tail")
CAUSAL = AttentionShape(2, 21, 21, 4, 2, 8, 8, "bfloat16", causal=True)
PADDED = AttentionShape(3, 20, 20, 2, 1, 8, 8, "float32", lengths=True)
DIRECTIONS = {"attention": "fwdbwd", "grouped_matmul": "fwdbwd"}


@functools.cache
def right(shape):
    """The check of a case, and right values from plain programs."""
    operation = operations.of(shape)
    operands = operation.operands(0)
    run = _attention if shape.op == "attention" else _grouped
    return operation.check(operands, shape.directions), run(shape, operands), operands


def _attention(shape, operands, scale=1.0, causal=None):
    causal = shape.causal if causal is None else causal
    lengths = {n: x for n, x in operands.items() if n.endswith("seq_lengths")}

    @jax.jit
    def run(query, key, value, ct):
        def attend(query, key, value):
            out = jax.nn.dot_product_attention(
                query * scale, key, value, is_causal=causal, **lengths
            )
            return jnp.nan_to_num(out)  # rows that see nothing

        out, pull = jax.vjp(attend, query, key, value)
        return {"out": out, **dict(zip(("query", "key", "value"), pull(ct)))}

    found = run(*(operands[n] for n in ("query", "key", "value", "cotangent")))
    if not shape.lengths:
        return found
    t = np.arange(shape.q_len)
    seen = t < shape.arrays()["query_seq_lengths"][:, None]
    return {n: jnp.where(seen[..., None, None], x, 0) for n, x in found.items()}


def _grouped(shape, operands):
    """By group and row in NumPy's float64."""
    lhs, rhs, ct = (np.asarray(operands[n], np.float64) for n in ("lhs", "rhs", "cotangent"))
    out, dlhs, drhs = (np.zeros_like(x) for x in (ct, lhs, rhs))
    start = 0
    for g, size in enumerate(shape.group_sizes()):
        rows = slice(start, start + size)
        out[rows], dlhs[rows] = lhs[rows] @ rhs[g], ct[rows] @ rhs[g].T
        drhs[g] = lhs[rows].T @ ct[rows]
        start += size
    found = {"out": out, "dlhs": dlhs, "drhs": drhs}
    return {name: jnp.asarray(x, shape.dtype) for name, x in found.items()}


@pytest.mark.parametrize(
    "shape", [CAUSAL, PADDED, LARGE, SMALL, TAIL], ids=lambda shape: shape.case
)
def test_right_values_pass(shape):
    check, values, _ = right(shape)
    assert check.fault(values, ours=True) is None
    assert set(values) == set(check.types)


@pytest.mark.parametrize("name", ["out", "query", "key", "value"])
def test_attention_with_a_wrong_scale_or_no_mask(name):
    check, _, operands = right(CAUSAL)
    for options in ({"scale": 1.1}, {"causal": False}):
        values = _attention(CAUSAL, operands, **options)
        fault = check.fault({name: values[name]}, ours=False)
        assert fault is not None and fault.startswith(f"{name} of row 0, kv head 0: largest error")


@pytest.mark.parametrize(
    ("shape", "name"),
    [(CAUSAL, n) for n in ("out", "query", "key", "value")]
    + [(SMALL, n) for n in ("out", "dlhs", "drhs")],
    ids=lambda x: x if isinstance(x, str) else x.op,
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_anywhere(shape, name, value):
    check, values, _ = right(shape)
    x = values[name]
    x = x.at[(x.shape[0] // 2, *(n - 1 for n in x.shape[1:]))].set(value)
    assert check.fault({name: x}, ours=False) == f"{name} is not finite"


def test_one_wrong_row_of_a_sampled_head():
    check, values, _ = right(CAUSAL)
    out = values["out"].at[1, 17, 3].set(values["out"][1, 16, 3])
    assert check.fault({"out": out}, ours=False).startswith("out of row 1, kv head 1: ")


@pytest.mark.parametrize("shape", [LARGE, SMALL], ids=lambda shape: shape.case)
def test_a_group_without_gradient(shape):
    check, values, _ = right(shape)
    largest = int(np.argmax(shape.group_sizes()))
    drhs = values["drhs"].at[largest].set(0)
    assert check.fault({"drhs": drhs}, ours=False).startswith(f"drhs of group {largest}, ")


@pytest.mark.parametrize("name", ["out", "dlhs"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_one_wrong_row_at_an_end_of_a_large_group(name, end):
    check, values, _ = right(LARGE)
    sizes = LARGE.group_sizes()
    largest = int(np.argmax(sizes))
    stop = int(np.cumsum(sizes)[largest])
    row = stop - 1 if end == "last" else stop - int(sizes[largest])
    fault = check.fault({name: values[name].at[row].multiply(0.9)}, ours=False)
    assert fault.startswith(f"{name} of group {largest}, {sizes[largest]} rows: ")


def test_an_empty_group_with_a_gradient():
    check, values, _ = right(SMALL)
    empty = int(np.argmin(SMALL.group_sizes()))
    drhs = values["drhs"].at[empty, 0, 0].set(1e-6)
    assert check.fault({"drhs": drhs}, ours=False).startswith(f"drhs of group {empty}, 0 rows: ")


@pytest.mark.parametrize(
    ("shape", "name", "at"),
    [
        (TAIL, "out", (-1, 0)),
        (TAIL, "dlhs", (-1, 0)),
        (PADDED, "out", (0, -1, 0, 0)),
        (PADDED, "query", (0, -1, 0, 0)),
        (PADDED, "key", (0, -1, 0, 0)),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "op", ""),
)
@pytest.mark.parametrize("value", [1e-3, np.nan])
def test_what_belongs_to_nobody_is_0_in_ours_only(shape, name, at, value):
    check, values, _ = right(shape)
    wrong = {name: values[name].at[at].set(value)}
    assert check.fault(wrong, ours=False) is None
    assert "belongs to nobody" in check.fault(wrong, ours=True)


def test_another_shape_or_dtype():
    check, values, _ = right(SMALL)
    assert check.fault({"out": values["out"][:-1]}, ours=False) == (
        "out is float32[69, 20], not float32[70, 20]"
    )
    assert check.fault({"out": values["out"].astype(jnp.bfloat16)}, ours=False) == (
        "out is bfloat16[70, 20], not float32[70, 20]"
    )


def test_fewer_heads_are_checked_of_what_is_long(monkeypatch):
    check, values, _ = right(CAUSAL)
    assert check.parts == ["row 0, kv head 0", "row 1, kv head 1"]
    monkeypatch.setattr("benchmarks.check._LOGITS", 1)
    monkeypatch.setattr("benchmarks.check._BLOCK_LOGITS", 100)  # blocks of two rows, the last of 1
    shape = dataclasses.replace(CAUSAL, batch=3)
    operands = operations.of(shape).operands(0)
    check = operations.of(shape).check(operands, ["fwd", "bwd"])
    assert check.parts == ["row 0, kv head 0"]
    assert check.fault(_attention(shape, operands), ours=True) is None
