"""Attention's arguments, checked and brought into one canonical form."""

import dataclasses
import math
import numbers
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops import arguments

# Windows this wide are open and offsets this far saturate, so that positions never overflow int32.
_WIDEST_WINDOW = 2**29
_FARTHEST_OFFSET = 2**30


class Operands(NamedTuple):
    """Canonical operands; a dimension of 1 in bias, mask and sinks is broadcast, None is absent."""

    query: jax.Array  # [B, T, N, H]
    key: jax.Array  # [B, S, K, H]
    value: jax.Array  # [B, S, K, Hv]
    bias: jax.Array | None = None  # [1|B, 1|N, 1|T, 1|S], float
    mask: jax.Array | None = None  # [1|B, 1|N, 1|T, 1|S], bool
    q_offset: jax.Array | None = None  # int32[B]
    query_lengths: jax.Array | None = None  # int32[B], in [0, T]
    kv_lengths: jax.Array | None = None  # int32[B], in [0, S]
    q_segments: jax.Array | None = None  # int32[B, T]
    kv_segments: jax.Array | None = None  # int32[B, S]
    sinks: jax.Array | None = None  # float32[1|B, N]
    seeds: jax.Array | None = None  # uint32[B, N]

    @property
    def present(self) -> tuple[str, ...]:
        return tuple(f for f in self._fields if getattr(self, f) is not None)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What of a call is known when it is compiled.

    Query t attends to key s when `t + q_offset - left <= s <= t + q_offset + right`; None leaves a
    side open. Causal attention is `right = 0`.
    """

    scale: float
    left: int | None
    right: int | None
    soft_cap: float | None
    dropout_rate: float
    precision: arguments.Precision
    deterministic: bool
    checkpoint_name: str


def canonicalize(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale,
    is_causal,
    q_offset,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    q_segment_ids,
    kv_segment_ids,
    logits_soft_cap,
    sinks,
    dropout_rate,
    dropout_key,
    broadcast_dropout,
    precision,
    deterministic,
    checkpoint_name,
) -> tuple[Operands, Spec]:
    """Checks every argument of `flash_attention`; ValueError and TypeError name the argument."""
    query, key, value = (
        arguments.floating(n, x) for n, x in (("query", query), ("key", key), ("value", value))
    )
    batch = _check_shapes(query, key, value)
    *_, t, n, h = query.shape
    s = key.shape[-3]
    full = (*batch, n, t, s)

    left, right = _window(local_window_size)
    if arguments.flag("is_causal", is_causal):
        right = 0 if right is None else min(right, 0)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        missing = "q_segment_ids" if q_segment_ids is None else "kv_segment_ids"
        raise ValueError(f"q_segment_ids and kv_segment_ids come both or neither, got no {missing}")
    rate = arguments.number("dropout_rate", dropout_rate)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {dropout_rate}")
    if dropout_key is not None:
        dropout_key = arguments.random_key("dropout_key", dropout_key)
    elif rate > 0.0:
        raise ValueError(f"dropout_key is needed with dropout_rate={dropout_rate}, got None")
    broadcast_dropout = arguments.flag("broadcast_dropout", broadcast_dropout)
    if not isinstance(checkpoint_name, str):
        raise TypeError(f"checkpoint_name must be a str, got {checkpoint_name!r}")

    operands = Operands(
        query=_flatten(query, batch),
        key=_flatten(key, batch),
        value=_flatten(value, batch),
        bias=None
        if bias is None
        else _broadcastable("bias", arguments.floating("bias", bias), full),
        mask=None if mask is None else _broadcastable("mask", _boolean("mask", mask), full),
        q_offset=_offset(q_offset, batch),
        query_lengths=_lengths("query_seq_lengths", query_seq_lengths, batch, t),
        kv_lengths=_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, s),
        q_segments=_integers("q_segment_ids", q_segment_ids, (*batch, t), batch),
        kv_segments=_integers("kv_segment_ids", kv_segment_ids, (*batch, s), batch),
        sinks=_sinks(
            sinks, n, arguments.accumulator_dtype(arguments.common_dtype(query, key, value))
        ),
        seeds=_seeds(dropout_key, batch, n, broadcast_dropout) if rate > 0.0 else None,
    )
    spec = Spec(
        scale=(1.0 / math.sqrt(h) if h else 1.0)
        if scale is None
        else arguments.number("scale", scale),
        left=left,
        right=right,
        soft_cap=_soft_cap(logits_soft_cap),
        dropout_rate=rate,
        precision=arguments.precision(precision, arguments.common_dtype(query, key, value)),
        deterministic=arguments.flag("deterministic", deterministic),
        checkpoint_name=checkpoint_name,
    )
    return operands, spec


def unflatten(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """[B, ...] -> [*batch, ...]."""
    return arguments.reshape_leading(x, 1, batch)


def _flatten(x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    return arguments.reshape_leading(x, len(batch), (math.prod(batch),))


def _check_shapes(query, key, value) -> tuple[int, ...]:
    if query.ndim < 3:
        raise ValueError(f"query must have shape [*B, T, N, H], got {query.shape}")
    *batch, _, n, h = query.shape
    if key.ndim != query.ndim or key.shape[:-3] != tuple(batch) or key.shape[-1] != h:
        raise ValueError(
            f"key must have shape [*B, S, K, H] with query's *B={tuple(batch)} and H={h}, got"
            f" {key.shape}"
        )
    if value.ndim != query.ndim or value.shape[:-1] != key.shape[:-1]:
        raise ValueError(
            f"value must have shape [*B, S, K, Hv] with key's [*B, S, K]={key.shape[:-1]}, got"
            f" {value.shape}"
        )
    k = key.shape[-2]
    if (n % k if k else n) != 0:
        raise ValueError(f"key must have a number of heads that divides query's N={n}, got K={k}")
    return tuple(batch)


def _window(window) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise ValueError(
                f"local_window_size must be an int or a pair (left, right), got {window!r}"
            )
        pair = tuple(window)
    else:
        pair = (window, window)
    bounds = []
    for bound in pair:
        if bound is not None:
            bound = arguments.integer("local_window_size", bound)
            if bound < 0:
                raise ValueError(f"local_window_size must not be negative, got {window!r}")
            if bound >= _WIDEST_WINDOW:
                bound = None
        bounds.append(bound)
    return bounds[0], bounds[1]


def _soft_cap(cap) -> float | None:
    if cap is None:
        return None
    cap = arguments.number("logits_soft_cap", cap)
    if not cap > 0.0:
        raise ValueError(f"logits_soft_cap must be positive, got {cap}")
    return cap


def _boolean(name: str, x) -> jax.Array:
    x = arguments.array(name, x)
    if x.dtype != jnp.bool_:
        raise ValueError(f"{name} must be of dtype bool (True = attend), got {x.dtype}")
    return x


def _broadcastable(name: str, x: jax.Array, full: tuple[int, ...]) -> jax.Array:
    """Broadcastable to [*B, N, T, S] -> [1|B, 1|N, 1|T, 1|S]."""
    fits = x.ndim <= len(full) and all(
        a in (1, b) for a, b in zip(x.shape[::-1], full[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to [*B, N, T, S]={full}, got {x.shape}")
    x = jnp.expand_dims(x, tuple(range(len(full) - x.ndim)))
    batch, rest = full[:-3], x.shape[-3:]
    if math.prod(x.shape[:-3]) == 1 and math.prod(batch) != 0:
        return jnp.reshape(x, (1, *rest))
    return _flatten(jnp.broadcast_to(x, (*batch, *rest)), batch)


def _integers(name: str, x, shape: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array | None:
    if x is None:
        return None
    x = arguments.integers(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {x.shape}")
    return _flatten(x, batch)


def _lengths(name: str, x, batch: tuple[int, ...], longest: int) -> jax.Array | None:
    if batch == () and np.shape(x) == (1,):  # as jax.nn takes it beside operands with no batch
        x = jnp.reshape(x, ())
    x = _integers(name, x, batch, batch)
    return None if x is None else jnp.clip(x, 0, longest)


def _offset(offset, batch: tuple[int, ...]) -> jax.Array | None:
    if offset is None:
        return None
    if isinstance(offset, numbers.Integral) and not isinstance(offset, bool):
        offset = operator.index(offset)
        if offset == 0:
            return None
        offset = np.int32(np.clip(offset, -_FARTHEST_OFFSET, _FARTHEST_OFFSET))
    offset = arguments.integers("q_offset", offset)
    if offset.ndim == 0:
        offset = jnp.broadcast_to(offset, batch)
    offset = _integers("q_offset", offset, batch, batch)
    return jnp.clip(offset, -_FARTHEST_OFFSET, _FARTHEST_OFFSET)


def _sinks(sinks, n: int, dtype) -> jax.Array | None:
    if sinks is None:
        return None
    sinks = arguments.floating("sinks", sinks)
    if sinks.shape != (n,):
        raise ValueError(f"sinks must have shape [N]={(n,)}, got {sinks.shape}")
    return jnp.expand_dims(sinks.astype(dtype), 0)


def _seeds(key, batch: tuple[int, ...], n: int, broadcast: bool) -> jax.Array:
    """uint32[B, N], drawn over the global batch and heads: no sharding changes a mask."""
    if broadcast:
        return jnp.broadcast_to(jax.random.bits(key, (1, 1), jnp.uint32), (math.prod(batch), n))
    return jnp.reshape(jax.random.bits(key, (*batch, n), jnp.uint32), (math.prod(batch), n))
