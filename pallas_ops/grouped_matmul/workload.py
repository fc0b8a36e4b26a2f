"""Which grouped products are alike for tuning, and operands with which to time them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_ops import arguments
from pallas_ops.tuning import rounded


def key(lhs, rhs, bounds, *rest, spec) -> dict[str, Any]:
    """Calls of one matrix size and form, groups and rows of a mean one up to a power of two."""
    del rest
    groups, rows = bounds.shape[0], lhs.shape[0]
    form = {
        name: getattr(spec, name)
        for name in ("transpose_rhs", "activation", "has_bias", "save_preactivation")
        if hasattr(spec, name)
    }
    return dict(
        dtype=str(arguments.common_dtype(lhs, rhs)),
        out_dtype=str(np.dtype(spec.out_dtype)),
        k=lhs.shape[1],
        n=rhs.shape[-2 if form.get("transpose_rhs") else -1],
        groups=rounded(groups),
        rows_per_group=rounded(-(-rows // max(groups, 1))),
        **form,
        accumulate=getattr(spec, "has_accumulate", False),
    )


def inputs(seed: int, *avals, spec) -> list[jax.Array]:
    """Random operands; groups as a uniform router would fill them."""
    del spec
    keys = jax.random.split(jax.random.key(seed), len(avals))
    groups, rows = avals[2].shape[0], avals[0].shape[0]
    sizes = np.random.default_rng(seed).multinomial(rows, np.full(groups, 1 / max(groups, 1)))
    ends = np.cumsum(sizes)
    bounds = jnp.asarray(np.stack([ends - sizes, ends], axis=1), jnp.int32)
    return [
        bounds if i == 2 else jax.random.normal(k, a.shape, a.dtype)
        for i, (k, a) in enumerate(zip(keys, avals))
    ]
