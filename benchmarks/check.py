"""Whether values are right: against float64, on a sample of what a large case has.

What is allowed is four times the error of a plain computation in the same dtype, plus a rounding:
twice is what the tests hold ours to, and here only faults are meant to be found. What depends on a
case but not on its shapes (masks, sizes of groups) is data, so that cases share compiled code.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.shapes import AttentionShape, GroupedShape

Arrays = dict[str, jax.Array]

FACTOR = 4
_LOGITS = 2**33  # fewer heads are checked where they have more logits than these
_BLOCK_LOGITS = 2**24  # of float64 in memory at a time
# Of a large group the first and last rows, of its gradient the first and last of K.
MOST_ROWS, MOST_COLUMNS = 2048, 256
# What runs once is not worth a search for the fastest way to run it.
_jit_once = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})


class Errors(NamedTuple):
    """Of one output; of its parts the largest error and the root mean square, [parts] each."""

    largest: jax.Array
    rms: jax.Array
    finite: jax.Array
    padding: jax.Array  # the largest value where there should be none


class Check(NamedTuple):
    """Exact values of named parts of each output, and the errors that these may have."""

    types: dict[str, jax.ShapeDtypeStruct]
    parts: list[str]
    exact: Arrays  # [parts, ...] each
    allowed: dict[str, np.ndarray]  # [2, parts]: largest, rms
    errors: Callable[[str, jax.Array, jax.Array], Errors]

    def fault(self, outputs: Arrays, *, ours: bool) -> str | None:
        """What is wrong with these outputs, if anything is.

        With `ours` what belongs to nobody must be 0, as only this library promises.
        """
        for name, x in outputs.items():
            given, expected = (f"{y.dtype}{list(y.shape)}" for y in (x, self.types[name]))
            if given != expected:
                return f"{name} is {given}, not {expected}"
            with jax.enable_x64(True):
                errors = jax.device_get(self.errors(name, x, self.exact[name]))
            if not errors.finite:
                return f"{name} is not finite"
            found = np.stack([errors.largest, errors.rms])
            wrong = ~(found <= self.allowed[name]).all(axis=0)  # so that NaN is wrong
            if wrong.any():
                i = int(np.argmax(wrong))
                (largest, rms), allowed = found[:, i], self.allowed[name][:, i]
                return (
                    f"{name} of {self.parts[i]}: largest error {largest:.2g}, root mean square"
                    f" {rms:.2g}; allowed {allowed[0]:.2g} and {allowed[1]:.2g}"
                )
            if ours and not errors.padding <= 0:
                return f"{name} is not 0 where it belongs to nobody, but up to {errors.padding:.2g}"
        return None


def _check(reference, parts: list[str], like: dict[str, Any], errors) -> Check:
    with jax.enable_x64(True):
        exact, allowed = reference(tuple(like))
        allowed = {name: np.stack(jax.device_get(pair)) for name, pair in allowed.items()}
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in like.items()}
    return Check(types, parts, exact, allowed, errors)


def _error(x: jax.Array, exact: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    error = jnp.abs(x.astype(jnp.float64) - exact)
    rest = tuple(range(1, x.ndim))
    return jnp.max(error, rest, initial=0), jnp.sqrt(jnp.mean(error**2, rest))


def _with_allowed(exact: Arrays, plain: Arrays, dtype: str) -> tuple[Arrays, dict[str, Any]]:
    rounding = float(jnp.finfo(dtype).eps)
    allowed = {}
    for name, x in exact.items():
        pairs = zip(_error(plain[name], x), _error(x, 0.0))
        allowed[name] = [FACTOR * error + rounding * size for error, size in pairs]
    return exact, allowed


def _errors(x: jax.Array, sample: jax.Array, exact: jax.Array, used: jax.Array | None) -> Errors:
    inside = x if used is None else jnp.where(used, x, 0)
    outside = 0.0 if used is None else jnp.max(jnp.abs(jnp.where(used, 0, x)), initial=0)
    finite = jnp.all(jnp.isfinite(inside))
    return Errors(*_error(sample, exact), finite, jnp.asarray(outside, jnp.float32))


def used_rows(shape: AttentionShape) -> tuple[np.ndarray, np.ndarray]:
    """Queries that see a key, [b, t], and keys that are no padding, [b, s]."""
    first, end = shape.visible()
    lengths = shape.arrays().get("key_value_seq_lengths", np.full(shape.batch, shape.kv_len))
    return end > first, np.arange(shape.kv_len) < lengths[:, None]


def attention(shape: AttentionShape, operands: Arrays, gradients: bool) -> Check:
    """Checks out and, if asked to, the gradients query, key and value.

    Exact values are those of a few pairs of a batch row and a kv head.
    """
    first, end = shape.visible()
    queries, keys = used_rows(shape)
    used = {"out": queries, "query": queries, "key": keys, "value": keys}
    used = {name: None if rows.all() else rows for name, rows in used.items()}

    logits = shape.q_len * shape.kv_len * (shape.heads // shape.kv_heads)
    b, k = shape.batch, shape.kv_heads
    pairs = dict.fromkeys([(0, 0), (b - 1, k - 1), (b // 2, k // 2)])
    pairs = tuple(pairs)[: max(1, _LOGITS // logits)]
    own = dict(pairs=pairs, kv_heads=k)

    def reference(names):
        rows = [row for row, _ in pairs]
        floats = [_heads(operands[n], **own) for n in ("query", "key", "value", "cotangent")]
        names = names if gradients else ("out",)
        return _attention_reference(*floats, first[rows], end[rows], dtype=shape.dtype, names=names)

    def errors(name, x, exact):
        return _attention_errors(x, exact, used[name], **own)

    like = {"out": operands["cotangent"]}
    if gradients:
        like |= {name: operands[name] for name in ("query", "key", "value")}
    return _check(reference, [f"row {r}, kv head {h}" for r, h in pairs], like, errors)


@functools.partial(jax.jit, static_argnames=("pairs", "kv_heads"))
def _heads(x, *, pairs, kv_heads: int):  # [b, length, n, h] -> [pairs, length, n // k, h]
    x = jnp.reshape(x, (*x.shape[:2], kv_heads, -1, x.shape[-1]))
    return jnp.stack([x[row, :, head] for row, head in pairs])


@functools.partial(jax.jit, static_argnames=("pairs", "kv_heads"))
def _attention_errors(x, exact, used, *, pairs, kv_heads: int) -> Errors:
    used = None if used is None else used[:, :, None, None]
    inside = x if used is None else jnp.where(used, x, 0)
    return _errors(x, _heads(inside, pairs=pairs, kv_heads=kv_heads), exact, used)


@functools.partial(_jit_once, static_argnames=("dtype", "names"))
def _attention_reference(q, k, v, ct, first, end, *, dtype: str, names: Sequence[str]):
    def values(computing):
        wide = jnp.promote_types(computing, jnp.float32)

        def one(arrays):
            q, k, v, ct, first, end = arrays
            attend = functools.partial(_attend, first=first, end=end, dtype=computing)
            if "query" not in names:
                return {"out": attend(q, k, v)}
            out, pull = jax.vjp(attend, q, k, v)
            return {"out": out, **dict(zip(("query", "key", "value"), pull(ct)))}

        found = jax.lax.map(one, (*(x.astype(wide) for x in (q, k, v, ct)), first, end))
        return {name: x.astype(computing) for name, x in found.items()}

    return _with_allowed(values(jnp.float64), values(jnp.dtype(dtype)), dtype)


def _attend(q, k, v, first, end, dtype):
    """[t, g, h], [s, 1, h], [s, 1, hv] -> [t, g, hv], by blocks of rows, products in `dtype`."""
    wide = q.dtype
    t, g, h = q.shape
    s = k.shape[0]
    block = min(t, max(1, _BLOCK_LOGITS // (g * s)))
    count = -(-t // block)
    keys = jnp.arange(s)
    k, v = k[:, 0], v[:, 0]

    @jax.checkpoint
    def rows(arrays):
        q, first, end = arrays
        keep = ((keys >= first[:, None]) & (keys < end[:, None]))[:, None, :]  # [block, 1, s]
        logits = jnp.einsum(
            "tgh,sh->tgs", q.astype(dtype), k.astype(dtype), preferred_element_type=wide
        )
        logits = jnp.where(keep, logits * float(h) ** -0.5, jnp.finfo(wide).min)
        logits -= jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        p = jnp.where(keep, jnp.exp(logits), 0)
        total = jnp.sum(p, axis=-1, keepdims=True)
        p = p / jnp.where(total > 0, total, 1)
        out = jnp.einsum(
            "tgs,sh->tgh", p.astype(dtype), v.astype(dtype), preferred_element_type=wide
        )
        return out.astype(dtype).astype(wide)

    def blocks(x):
        x = jnp.pad(x, [(0, count * block - t)] + [(0, 0)] * (x.ndim - 1))
        return jnp.reshape(x, (count, block, *x.shape[1:]))

    out = jax.lax.map(rows, (blocks(q), blocks(first), blocks(end)))
    return jnp.reshape(out, (count * block, g, -1))[:t]


class _Groups(NamedTuple):
    """Which groups are looked at, [parts] each, and how many rows belong to any."""

    group: np.ndarray
    start: np.ndarray
    end: np.ndarray
    total: np.ndarray


def picked_groups(sizes: np.ndarray) -> np.ndarray:
    """The largest group, the smallest in use, an empty one (or else the first), the last."""
    used, empty = np.flatnonzero(sizes), np.flatnonzero(sizes == 0)
    smallest = used[np.argmin(sizes[used])]
    return np.array([np.argmax(sizes), smallest, [*empty, 0][0], len(sizes) - 1])


def grouped(shape: GroupedShape, operands: Arrays, names: Sequence[str]) -> Check:
    """Checks `names` of out, dlhs and drhs, of the `picked_groups`."""
    sizes = shape.group_sizes()
    ends = np.minimum(np.cumsum(sizes), shape.m)
    picked = picked_groups(sizes)
    groups = _Groups(picked, ends[picked] - sizes[picked], ends[picked], ends[-1])

    def reference(names):
        floats = [operands[name] for name in ("lhs", "rhs", "cotangent")]
        return _grouped_reference(*floats, groups, dtype=shape.dtype, names=names)

    def errors(name, x, exact):
        return _grouped_errors(x, exact, groups, by_row=name != "drhs")

    like = {"out": operands["cotangent"], "dlhs": operands["lhs"], "drhs": operands["rhs"]}
    parts = [f"group {i}, {sizes[i]} rows" for i in picked]
    return _check(reference, parts, {name: like[name] for name in names}, errors)


def _columns(k: int) -> np.ndarray:
    half = min(k, MOST_COLUMNS) // 2
    return np.arange(k) if k <= MOST_COLUMNS else np.append(np.arange(half), np.arange(k)[-half:])


def _rows(x, start, end):
    """The first and last rows of a group, 0 in place of others' where it is small."""
    each = np.arange(min(MOST_ROWS // 2, x.shape[0]))
    rows = jnp.concatenate([start + each, end - 1 - each])
    keep = (rows >= start) & (rows < end)
    return jnp.where(keep[:, None], x[jnp.where(keep, rows, 0)], 0)


@functools.partial(jax.jit, static_argnames="by_row")
def _grouped_errors(x, exact, groups: _Groups, *, by_row: bool) -> Errors:
    if not by_row:
        columns = _columns(x.shape[1])
        sample = jnp.stack([x[i][columns] for i in groups.group])
        return _errors(x, sample, exact, None)
    sample = jax.vmap(_rows, in_axes=(None, 0, 0))(x, groups.start, groups.end)
    return _errors(x, sample, exact, (jnp.arange(x.shape[0]) < groups.total)[:, None])


@functools.partial(_jit_once, static_argnames=("dtype", "names"))
def _grouped_reference(lhs, rhs, ct, groups: _Groups, *, dtype: str, names: Sequence[str]):
    block = min(MOST_ROWS, lhs.shape[0])
    columns = _columns(lhs.shape[1])

    def values(computing):
        wide = jnp.promote_types(computing, jnp.float32)

        def product(x, y):
            return jnp.matmul(x.astype(computing), y.astype(computing), preferred_element_type=wide)

        def one(group):
            g, start, end = group

            def add(i, acc):
                rows = start + i * block + jnp.arange(block)
                keep = rows < end
                rows = jnp.where(keep, rows, 0)
                x = jnp.where(keep[:, None], lhs[rows][:, columns], 0)
                return acc + product(x.T, ct[rows])

            found = {}
            if "out" in names:
                found["out"] = product(_rows(lhs, start, end), rhs[g])
            if "dlhs" in names:
                found["dlhs"] = product(_rows(ct, start, end), rhs[g].T)
            if "drhs" in names:
                acc = jnp.zeros((len(columns), ct.shape[1]), wide)
                count = (end - start + block - 1) // block
                found["drhs"] = jax.lax.fori_loop(0, count, add, acc)
            return {name: x.astype(computing) for name, x in found.items()}

        return jax.lax.map(one, (groups.group, groups.start, groups.end))

    return _with_allowed(values(jnp.float64), values(jnp.dtype(dtype)), dtype)
