"""The dropout mask: a hash of seed, row and column that every implementation uses."""

import jax
import jax.numpy as jnp
import numpy as np

# Multipliers and shifts of the integer hash "lowbias32", C. Wellons, "Prospecting for hash
# functions", 2018.
_MULTIPLIERS = (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
_SHIFTS = (np.uint32(16), np.uint32(15))
_COLUMN_SALT = np.uint32(0x9E3779B9)


def row_hash(seed: jax.Array, row: jax.Array) -> jax.Array:
    """uint32 hash of a head's seed and a query's position, once per row."""
    return _mix(_mix(row.astype(jnp.uint32)) ^ seed)


def column_hash(column: jax.Array) -> jax.Array:
    """uint32 hash of a key's position, once per column."""
    return _mix(column.astype(jnp.uint32) + _COLUMN_SALT)


def keep(rows: jax.Array, columns: jax.Array, rate: float) -> jax.Array:
    """True where the weight of a row and a column, given by their hashes, is kept.

    Eight operations an element. The last shift of the hash is left out: only the high bits decide
    the comparison.
    """
    x = rows ^ columns
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS, strict=True):
        x = (x ^ (x >> shift)) * multiplier
    return x >= threshold(rate)


def threshold(rate: float) -> np.uint32:
    """The hash below which a weight is dropped."""
    return np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mix(x: jax.Array) -> jax.Array:
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS, strict=True):
        x = (x ^ (x >> shift)) * multiplier
    return x ^ (x >> np.uint32(16))
