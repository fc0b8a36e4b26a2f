"""Whether PyTorch's values are right: `check` for tensors, in a process that touches no JAX device.

The same sample and the same tolerance: four times the error of a plain computation in the same
dtype, plus a rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.check import FACTOR, MOST_COLUMNS, MOST_ROWS, picked_groups, used_rows
from benchmarks.shapes import AttentionShape, GroupedShape

Tensors = dict[str, Any]

_BLOCK_LOGITS = 2**26  # of float64 in memory at a time


class Check(NamedTuple):
    """Exact values of a sample, and the largest error and root mean square that each may have."""

    types: dict[str, tuple[tuple[int, ...], Any]]
    defined: Callable[[str, Any], Any]  # those values of an output that mean anything
    sample: Callable[[str, Any], Tensors]
    exact: Tensors
    allowed: dict[str, tuple[float, float]]

    def fault(self, outputs: Tensors) -> str | None:
        """What is wrong with these outputs, if anything is."""
        for name, x in outputs.items():
            given, expected = (tuple(x.shape), x.dtype), self.types[name]
            if given != expected:
                return f"{name} is {given[1]}{list(given[0])}, not {expected[1]}{list(expected[0])}"
            if not bool(self.defined(name, x).isfinite().all()):
                return f"{name} is not finite everywhere"
            for part, values in self.sample(name, x).items():
                error, allowed = _error(values, self.exact[part]), self.allowed[part]
                if not all(e <= a for e, a in zip(error, allowed)):  # so that NaN is a fault
                    return (
                        f"{part}: largest error {error[0]:.2g}, root mean square {error[1]:.2g};"
                        f" allowed {allowed[0]:.2g} and {allowed[1]:.2g}"
                    )
        return None


def attention(torch: Any, shape: AttentionShape, operands: Tensors, gradients: bool) -> Check:
    """Checks out and, if asked for, the gradients query, key and value, [batch, length, ...]."""
    b, heads = shape.batch, shape.kv_heads
    device = operands["query"].device
    first, end = (torch.tensor(x, device=device) for x in shape.visible())  # [b, t] each
    pairs = list(dict.fromkeys([(0, 0), (b - 1, heads - 1)]))
    live, real = (torch.tensor(x, device=device) for x in used_rows(shape))  # [b, t], [b, s]

    def groups(x):  # [b, t, n, h] -> [b, t, kv head, group, h]
        return x.reshape(*x.shape[:2], heads, -1, x.shape[-1])

    def part(name, row, head):
        return f"{name} of row {row}, kv head {head}"

    def defined(name, x):
        return x[real] if name in ("key", "value") else x[live]

    def sample(name, x):
        x, rows = (x, real) if name in ("key", "value") else (groups(x), live)
        return {part(name, row, head): x[row, rows[row], head] for row, head in pairs}

    def values(rounded):
        found = {}
        for row, head in pairs:
            q, ct = (groups(operands[n])[row, :, head] for n in ("query", "cotangent"))
            k, v = (operands[n][row, :, head] for n in ("key", "value"))
            results = _attend(torch, q, k, v, ct, first[row], end[row], rounded, gradients)
            for name, x in results.items():
                rows = real if name in ("key", "value") else live
                found[part(name, row, head)] = x[rows[row]]
        return found

    like = {"out": operands["cotangent"]}
    like |= {n: operands[n] for n in ("query", "key", "value") if gradients}
    return _check(torch, shape.dtype, like, values, defined, sample)


def _attend(torch, q, k, v, ct, first, end, rounded, gradients) -> Tensors:
    """[t, g, h], [s, h], [s, hv], [t, g, hv]: out and gradients, operands of products rounded."""
    wide = torch.promote_types(rounded, torch.float32)

    def cast(x):
        return x.to(rounded).to(wide)

    q, k, v, ct = (cast(x) for x in (q, k, v, ct))
    t, g, h = q.shape
    scale = float(h) ** -0.5
    out, dq = torch.empty_like(ct), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    places = torch.arange(len(k), device=q.device)
    block = max(1, _BLOCK_LOGITS // len(k))
    for head in range(g):
        for at in range(0, t, block):
            rows = slice(at, at + block)
            keep = (places >= first[rows, None]) & (places < end[rows, None])
            logits = (q[rows, head] @ k.T) * scale
            logits = logits.masked_fill_(~keep, torch.finfo(wide).min)
            p = torch.softmax(logits, -1) * keep
            weights = cast(p)
            out[rows, head] = weights @ v
            if gradients:
                dp = ct[rows, head] @ v.T
                ds = cast(p * (dp - (p * dp).sum(-1, keepdim=True)))
                dq[rows, head] = ds @ k * scale
                dk += ds.T @ q[rows, head] * scale
                dv += weights.T @ ct[rows, head]
    results = {"out": out, "query": dq, "key": dk, "value": dv}
    return {n: x.to(rounded) for n, x in results.items() if gradients or n == "out"}


def grouped(torch: Any, shape: GroupedShape, operands: Tensors, names: Sequence[str]) -> Check:
    """Checks those of out, dlhs and drhs that are named."""
    sizes = shape.group_sizes()
    ends = np.cumsum(sizes)
    groups = {g: (int(ends[g] - sizes[g]), int(ends[g])) for g in picked_groups(sizes).tolist()}
    columns = _outer(0, shape.k, MOST_COLUMNS)

    def part(name, g):
        return f"{name} of group {g}, {sizes[g]} rows"

    def defined(name, x):
        return x if name == "drhs" else x[: int(ends[-1])]

    def sample(name, x):
        if name == "drhs":
            return {part(name, g): x[g][columns] for g in groups}
        return {part(name, g): x[_outer(*rows, MOST_ROWS)] for g, rows in groups.items()}

    def values(rounded):
        wide = torch.promote_types(rounded, torch.float32)
        lhs, rhs, ct = (operands[name] for name in ("lhs", "rhs", "cotangent"))

        def product(x, y):
            return (x.to(rounded).to(wide) @ y.to(rounded).to(wide)).to(rounded)

        found = {}
        for g, (start, end) in groups.items():
            rows = _outer(start, end, MOST_ROWS)
            if "out" in names:
                found[part("out", g)] = product(lhs[rows], rhs[g])
            if "dlhs" in names:
                found[part("dlhs", g)] = product(ct[rows], rhs[g].T)
            if "drhs" in names:
                found[part("drhs", g)] = product(lhs[start:end][:, columns].T, ct[start:end])
        return found

    like = {"out": operands["cotangent"], "dlhs": operands["lhs"], "drhs": operands["rhs"]}
    return _check(torch, shape.dtype, {n: like[n] for n in names}, values, defined, sample)


def _outer(start: int, end: int, most: int) -> np.ndarray:
    """All of the range, or half of `most` from each of its ends."""
    every = np.arange(start, end)
    return every if len(every) <= most else np.append(every[: most // 2], every[-most // 2 :])


def _error(x, exact) -> tuple[float, float]:
    error = (x.double() - exact).abs().flatten()
    if not len(error):
        return 0.0, 0.0
    return float(error.max()), float(error.square().mean().sqrt())


def _check(torch, dtype: str, like: Tensors, values, defined, sample) -> Check:
    rounded = getattr(torch, dtype)
    rounding = torch.finfo(rounded).eps
    exact, plain = values(torch.float64), values(rounded)
    allowed = {}
    for name, x in exact.items():
        pairs = zip(_error(plain[name], x), _error(x, 0.0))
        allowed[name] = tuple(FACTOR * error + rounding * size for error, size in pairs)
    types = {name: (tuple(x.shape), x.dtype) for name, x in like.items()}
    return Check(types, defined, sample, exact, allowed)
