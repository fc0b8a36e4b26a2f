"""The grouped products and their gradients in float64 numpy, apart from the library."""

import math

import numpy as np

_ERF_FREE = math.sqrt(2 / math.pi)


def rows_of(group_sizes, rows, groups, offset=0):
    """For each of the held groups the slice of its rows."""
    result, start = {}, 0
    for g, size in enumerate(np.asarray(group_sizes).tolist()):
        end = min(rows, start + max(0, size))
        result[g] = slice(start, end)
        start = end
    return [result.get(offset + g, slice(0, 0)) for g in range(groups)]


def inside(group_sizes, rows, groups, offset=0):
    """Which rows belong to a held group."""
    mask = np.zeros(rows, bool)
    for where in rows_of(group_sizes, rows, groups, offset):
        mask[where] = True
    return mask


def act(x, activation):
    """The activation and the function that pulls a cotangent back through it."""
    if activation is None:
        return x, lambda ct: ct
    if activation == "relu":
        return np.maximum(x, 0), lambda ct: ct * (x > 0)
    if activation == "silu":
        s = 1 / (1 + np.exp(-x))
        return x * s, lambda ct: ct * (s + x * s * (1 - s))
    if activation == "gelu":
        u = _ERF_FREE * (x + 0.044715 * x**3)
        t = np.tanh(u)
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * _ERF_FREE * (1 + 3 * 0.044715 * x**2)
        return 0.5 * x * (1 + t), lambda ct: ct * slope
    half = x.shape[1] // 2
    gate, up = x[:, :half], x[:, half:]
    y, pull = act(gate, {"swiglu": "silu", "geglu": "gelu"}[activation])
    return y * up, lambda ct: np.concatenate([pull(ct * up), ct * y], axis=1)


def ragged_dot(
    lhs, rhs, group_sizes, *, offset=0, transpose_rhs=False, bias=None, activation=None, ct=None
):
    """The result, or (result, dlhs, drhs, dbias) for a cotangent."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    w = rhs.transpose(0, 2, 1) if transpose_rhs else rhs
    groups, _, n = w.shape
    width = n // 2 if activation in ("swiglu", "geglu") else n
    out = np.zeros((lhs.shape[0], width))
    dlhs, dw, dbias = np.zeros_like(lhs), np.zeros_like(w), np.zeros((groups, n))
    for g, where in enumerate(rows_of(group_sizes, lhs.shape[0], groups, offset)):
        pre = lhs[where] @ w[g]
        if bias is not None:
            pre = pre + np.asarray(bias, np.float64)[g]
        out[where], pull = act(pre, activation)
        if ct is not None:
            dpre = pull(np.asarray(ct, np.float64)[where])
            dlhs[where], dw[g], dbias[g] = dpre @ w[g].T, lhs[where].T @ dpre, dpre.sum(0)
    if ct is None:
        return out
    return out, dlhs, dw.transpose(0, 2, 1) if transpose_rhs else dw, dbias


def contracting(lhs, rhs, group_sizes, *, groups=None, offset=0, accumulate=None, ct=None):
    """The result, or (result, dlhs, drhs) for a cotangent."""
    lhs, rhs = np.asarray(lhs, np.float64), np.asarray(rhs, np.float64)
    groups = len(group_sizes) if groups is None else groups
    out = np.zeros((groups, lhs.shape[1], rhs.shape[1]))
    dlhs, drhs = np.zeros_like(lhs), np.zeros_like(rhs)
    for g, where in enumerate(rows_of(group_sizes, lhs.shape[0], groups, offset)):
        out[g] = lhs[where].T @ rhs[where]
        if ct is not None:
            dlhs[where] = rhs[where] @ np.asarray(ct, np.float64)[g].T
            drhs[where] = lhs[where] @ np.asarray(ct, np.float64)[g]
    if accumulate is not None:
        out = out + np.asarray(accumulate, np.float64)
    return out if ct is None else (out, dlhs, drhs)
