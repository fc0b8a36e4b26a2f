"""Checks that the operations' arguments share, each raising by the argument's name."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec as P

Precision = Any  # what jax.lax.dot_general takes as `precision`, hashable

_LARGEST = float(np.finfo(np.float32).max)
FLOATS = ("bfloat16", "float16", "float32", "float64")


def array(name: str, x) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be an array, got {_describe(x)}") from None


def floating(name: str, x) -> jax.Array:
    x = array(name, x)
    if x.dtype.name not in FLOATS:
        raise ValueError(f"{name} must be of dtype {', '.join(FLOATS)}, got {x.dtype.name}")
    return x


def integers(name: str, x) -> jax.Array:
    """Any integer dtype, as int32; what lies outside int32 saturates."""
    x = array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be of an integer dtype, got {x.dtype.name}")
    if x.dtype != jnp.int32:
        limits = jnp.iinfo(x.dtype)
        low, high = max(-(2**31), limits.min), min(2**31 - 1, limits.max)
        x = jnp.clip(x, np.asarray(low, x.dtype), np.asarray(high, x.dtype)).astype(jnp.int32)
    return x


def number(name: str, x) -> float:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise TypeError(f"{name} must be a Python number known at trace time, got {_describe(x)}")
    x = float(x)
    if not abs(x) <= _LARGEST:
        raise ValueError(f"{name} must be finite, in float32 too, got {x}")
    return x


def integer(name: str, x) -> int:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be a Python int known at trace time, got {_describe(x)}")
    return int(x)


def flag(name: str, x) -> bool:
    if not isinstance(x, (bool, np.bool_)):
        raise TypeError(f"{name} must be a Python bool known at trace time, got {_describe(x)}")
    return bool(x)


def _describe(x) -> str:
    if isinstance(x, Tracer):
        return f"a traced value of type {jax.typeof(x)}"
    return f"{x!r} of type {type(x).__name__}"


def precision(given, dtype) -> Precision:
    """`precision=`, else JAX's default, else HIGHEST for float32 and wider."""
    if given is None:
        given = jax.config.jax_default_matmul_precision
    if given is None:
        wide = jnp.finfo(dtype).bits >= 32
        return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT
    if isinstance(given, (jax.lax.Precision, jax.lax.DotAlgorithmPreset, jax.lax.DotAlgorithm)):
        return given
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return tuple(precision(p, dtype) for p in given)
    for kind in (jax.lax.Precision, jax.lax.DotAlgorithmPreset):
        try:
            return kind(given) if kind is jax.lax.Precision else kind[str(given)]
        except (ValueError, KeyError, TypeError):
            pass
    raise ValueError(
        "precision must be None, a jax.lax.Precision or its name, a pair of them, or a"
        f" jax.lax.DotAlgorithmPreset or its name, got {given!r}"
    )


def common_dtype(*arrays: jax.Array) -> jnp.dtype:
    """The narrowest float dtype that holds all of them, whatever the promotion mode."""
    names = {x.dtype.name for x in arrays}
    if len(names) == 1:
        return arrays[0].dtype
    return jnp.dtype("float64" if "float64" in names else "float32")


def accumulator_dtype(dtype) -> jnp.dtype:
    return jnp.dtype("float64" if dtype == jnp.float64 else "float32")


def dtype(name: str, given) -> jnp.dtype:
    try:
        given = jnp.dtype(given)
    except TypeError:
        raise ValueError(f"{name} must be a dtype, got {given!r}") from None
    if given.name not in FLOATS:
        raise ValueError(f"{name} must be one of {', '.join(FLOATS)}, got {given.name}")
    return given


def random_key(name: str, x) -> jax.Array:
    """One key of jax.random, typed or raw."""
    x = array(name, x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        shape = ()
    elif x.dtype == jnp.uint32:
        shape = jax.random.key_data(jax.random.key(0)).shape
    else:
        raise TypeError(f"{name} must be a jax.random key, got an array of dtype {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must be a single jax.random key, got an array of shape {x.shape}")
    return x


def reshape_leading(x: jax.Array, ndim: int, shape: tuple[int, ...]) -> jax.Array:
    """Reshapes the first `ndim` dimensions to `shape`; an explicit sharding of the first stays."""
    if x.shape[:ndim] == shape:
        return x
    new_shape = (*shape, *x.shape[ndim:])
    spec = tuple(jax.typeof(x).sharding.spec)
    if all(entry is None for entry in spec):
        return jnp.reshape(x, new_shape)
    # Merged or split dimensions keep the sharding of the leading one; that of the others is given
    # up.
    keep = spec[:1] if ndim and shape and _cuts(x, spec[0], shape[0]) else (None,) * min(ndim, 1)
    inner = (*keep, *(None,) * (ndim - len(keep)))
    if inner != spec[:ndim]:
        x = jax.sharding.reshard(x, P(*inner, *spec[ndim:]))
    lead = (*keep[: len(shape)], *(None,) * (len(shape) - len(keep)))
    return jax.lax.reshape(x, new_shape, out_sharding=P(*lead, *spec[ndim:]))


def _cuts(x: jax.Array, entry, size: int) -> bool:
    axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    mesh = jax.typeof(x).sharding.mesh
    return size % math.prod(mesh.shape[a] for a in axes) == 0
