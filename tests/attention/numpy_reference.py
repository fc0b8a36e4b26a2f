"""Attention and its gradients in float64 numpy, written apart from the library.

Every product is formed per (query, key) pair and selected by the mask before it is summed, so a NaN
or Inf stored in a place that is masked out cannot reach a sum. Tiny sizes only.
"""

from __future__ import annotations

import numpy as np


def visible_pairs(
    shape,
    *,
    bias=None,
    mask=None,
    is_causal=False,
    q_offset=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    q_segment_ids=None,
    kv_segment_ids=None,
):
    """bool[B, N, T, S] of the pairs that may attend; `shape` is (B, N, T, S)."""
    B, N, T, S = shape
    visible = np.ones(shape, bool)
    t = np.arange(T)[None, :, None]
    s = np.arange(S)[None, None, :]
    offset = np.broadcast_to(0 if q_offset is None else np.asarray(q_offset, np.int64), B)
    position = t + offset[:, None, None]

    def restrict(pairs):  # [B, T, S]
        nonlocal visible
        visible = visible & pairs[:, None]

    if mask is not None:
        visible = visible & np.broadcast_to(mask, shape)
    if bias is not None:
        visible = visible & np.broadcast_to(np.asarray(bias, np.float64) != -np.inf, shape)
    if is_causal:
        restrict(s <= position)
    if local_window_size is not None:
        pair = isinstance(local_window_size, tuple)
        left, right = local_window_size if pair else (local_window_size,) * 2
        if left is not None:
            restrict(s >= position - left)
        if right is not None:
            restrict(s <= position + right)
    if query_seq_lengths is not None:
        restrict(t < np.asarray(query_seq_lengths)[:, None, None])
    if key_value_seq_lengths is not None:
        restrict(s < np.asarray(key_value_seq_lengths)[:, None, None])
    if q_segment_ids is not None:
        restrict(np.asarray(q_segment_ids)[:, :, None] == np.asarray(kv_segment_ids)[:, None, :])
    return visible


def _sum_to(x, shape):
    """Sum the axes of x along which an operand of this shape was broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return x.sum(axis=axes, keepdims=True)


def attention(
    query,
    key,
    value,
    bias=None,
    sinks=None,
    *,
    scale=None,
    logits_soft_cap=None,
    dropout_rate=0.0,
    dropout_keep=None,
    dout=None,
    dlse=None,
    **masks,
):
    """dict of out, lse and, given cotangents, the gradient of each float operand.

    query [B, T, N, H], key [B, S, K, H], value [B, S, K, Hv], dropout_keep bool[B, N, T, S];
    `masks` are the arguments of `visible_pairs`.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    group = N // K
    kv_head = np.arange(N) // max(group, 1)
    visible = visible_pairs((B, N, T, S), bias=bias, **masks)
    scale = 1 / np.sqrt(H) if scale is None else scale
    q = q.transpose(0, 2, 1, 3)  # [B, N, T, H]
    k = k.transpose(0, 2, 1, 3)[:, kv_head]  # [B, N, S, H]
    v = v.transpose(0, 2, 1, 3)[:, kv_head]  # [B, N, S, Hv]

    def pairs(x, y):
        """sum_h x[t, h] y[s, h] of the visible pairs."""
        return np.where(visible, np.einsum("bnth,bnsh->bnts", x, y), 0)

    def over_keys(p, y):
        """sum_s p[t, s] y[s, h] over the visible keys of each query."""
        return np.where(visible[..., None], p[..., None] * y[:, :, None], 0).sum(axis=3)

    def over_queries(p, x):
        """sum_t p[t, s] x[t, h] over the queries that see each key."""
        return np.where(visible[..., None], p[..., None] * x[:, :, :, None], 0).sum(axis=2)

    with np.errstate(all="ignore"):
        raw = scale * pairs(q, k)
        if bias is not None:
            raw = raw + np.where(
                visible, np.broadcast_to(np.asarray(bias, np.float64), raw.shape), 0
            )
        capped = (
            raw if logits_soft_cap is None else logits_soft_cap * np.tanh(raw / logits_soft_cap)
        )
        z = np.where(visible, capped, -np.inf)
        sink = np.full(N, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
        top = np.maximum(z.max(axis=-1, initial=-np.inf), sink[None, :, None])  # [B, N, T]
        base = np.where(top == -np.inf, 0, top)
        total = np.exp(z - base[..., None]).sum(axis=-1) + np.exp(sink[None, :, None] - base)
        lse = np.where(top == -np.inf, -np.inf, base + np.log(total))
        finite_lse = np.where(lse == -np.inf, 0, lse)
        p = np.where(visible, np.exp(z - finite_lse[..., None]), 0)
        kept = np.ones_like(p) if dropout_keep is None else dropout_keep / (1 - dropout_rate)
        out = over_keys(p * kept, v)
        result = {"out": out.transpose(0, 2, 1, 3), "lse": lse.transpose(0, 2, 1)}
        if dout is None:
            return result

        live = visible.any(axis=-1)
        dout = np.asarray(dout, np.float64).transpose(0, 2, 1, 3)
        dout = np.where(live[..., None], dout, 0)
        dlse = (
            np.zeros_like(lse) if dlse is None else np.asarray(dlse, np.float64).transpose(0, 2, 1)
        )
        dlse = np.where(lse == -np.inf, 0, dlse)
        delta = (dout * out).sum(axis=-1)
        dz = np.where(visible, p * (kept * pairs(dout, v) + (dlse - delta)[..., None]), 0)
        draw = dz if logits_soft_cap is None else dz * (1 - np.tanh(raw / logits_soft_cap) ** 2)

        def per_kv_head(x):  # [B, N, S, H] -> [B, S, K, H]
            return x.reshape(B, K, group, S, x.shape[-1]).sum(axis=2).transpose(0, 2, 1, 3)

        result["query"] = scale * over_keys(draw, k).transpose(0, 2, 1, 3)
        result["key"] = scale * per_kv_head(over_queries(draw, q))
        result["value"] = per_kv_head(over_queries(p * kept, dout))
        if bias is not None:
            result["bias"] = _sum_to(draw, np.shape(bias))
        if sinks is not None:
            weight = np.exp(sink[None, :, None] - finite_lse)
            result["sinks"] = (weight * (dlse - delta)).sum(axis=(0, 2))
    return result
