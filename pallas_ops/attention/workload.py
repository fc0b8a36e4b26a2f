"""Which calls of attention are alike for tuning, and operands with which to time them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops import arguments
from pallas_ops.attention.validate import Spec
from pallas_ops.tuning import rounded


def key(query, key, value, *rest, fields: tuple[str, ...], spec: Spec, **params) -> dict[str, Any]:
    """Calls of one head size, window and set of operands; other sizes up to a power of two."""
    del rest
    b, t, n, h = query.shape
    s, kv_heads, hv = value.shape[1:]
    window = [None if side is None else rounded(side) for side in (spec.left, spec.right)]
    return dict(
        dtype=str(arguments.common_dtype(query, key, value)),
        batch_heads=rounded(b * n),
        group=n // kv_heads if kv_heads else 0,
        t=rounded(t),
        s=rounded(s),
        h=h,
        hv=hv,
        window=window,
        operands=list(fields[3:]),
        soft_cap=spec.soft_cap is not None,
        **{name: bool(value) for name, value in params.items()},
    )


def inputs(seed: int, *avals, fields: tuple[str, ...], spec: Spec, **params) -> list[jax.Array]:
    """Operands of the forward, or of the backward, where nothing is masked but by `spec`."""
    from pallas_ops.attention.primitive import flash_attention_fwd

    keys = jax.random.split(jax.random.key(seed), len(avals))
    shapes = dict(zip(fields, avals))
    made = [_input(f, a, k, shapes) for f, a, k in zip(fields, avals, keys)]
    if len(avals) == len(fields):
        return made
    out, lse = flash_attention_fwd.bind(
        *made, implementation=("xla",), config=None, fields=fields, spec=spec
    )
    dout, dlse = (jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys[-2:], avals[-2:]))
    return [*made, out, lse, dout, dlse]


def _input(field: str, aval, random_key, shapes) -> jax.Array:
    if field == "query_lengths":
        return jnp.full(aval.shape, shapes["query"].shape[1], aval.dtype)
    if field == "kv_lengths":
        return jnp.full(aval.shape, shapes["key"].shape[1], aval.dtype)
    if field == "seeds":
        return jax.random.bits(random_key, aval.shape, aval.dtype)
    if aval.dtype == np.bool_:
        return jnp.ones(aval.shape, aval.dtype)
    if not jnp.issubdtype(aval.dtype, jnp.floating):  # offsets, and segments of one document
        return jnp.zeros(aval.shape, aval.dtype)
    return jax.random.normal(random_key, aval.shape, aval.dtype)
