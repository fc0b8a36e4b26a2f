"""The grouped products' arguments, checked and brought into one canonical form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir, xla
from jax.sharding import PartitionSpec as P

from pallas_ops import _jax_internals, arguments, dispatch
from pallas_ops.grouped_matmul import epilogue

# Row indices are int32, and a tile's start may lie up to one tile past the last row.
MAX_ROWS = 2**31 - 2**16


@dataclasses.dataclass(frozen=True)
class RaggedDotSpec:
    """What the primitive `ragged_dot` computes, beside its operands."""

    out_dtype: jnp.dtype
    precision: arguments.Precision
    transpose_rhs: bool = False
    activation: str | None = None
    has_bias: bool = False
    save_preactivation: bool = False

    @property
    def plain(self) -> bool:
        """Just the product: linear in each operand."""
        return self.activation is None and not self.has_bias and not self.save_preactivation


@dataclasses.dataclass(frozen=True)
class ContractingSpec:
    """What the primitive `ragged_dot_contracting` computes, beside its operands."""

    out_dtype: jnp.dtype
    precision: arguments.Precision
    has_accumulate: bool = False


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    *,
    precision,
    preferred_element_type,
    group_offset,
    transpose_rhs,
    bias,
    activation,
) -> tuple[RaggedDotSpec, tuple[jax.Array, ...]]:
    """The spec and the operands (lhs, rhs, bounds, and bias if there is one)."""
    lhs, rhs = _matrix("lhs", lhs, "[M, K]"), arguments.floating("rhs", rhs)
    transpose_rhs = arguments.flag("transpose_rhs", transpose_rhs)
    layout = "[G, N, K]" if transpose_rhs else "[G, K, N]"
    if rhs.ndim != 3:
        raise ValueError(f"rhs must have shape {layout}, got {rhs.shape}")
    groups = rhs.shape[0]
    k, n = rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]
    if k != lhs.shape[1]:
        raise ValueError(
            f"rhs must have shape {layout} with K={lhs.shape[1]}, the columns of lhs {lhs.shape},"
            f" got {rhs.shape}"
        )
    if activation is not None and not isinstance(activation, str):
        raise TypeError(
            f"activation must be None or a string known at trace time, got {activation!r}"
        )
    if activation is not None and activation not in epilogue.ACTIVATIONS:
        raise ValueError(
            f"activation must be None or one of {', '.join(map(repr, epilogue.ACTIVATIONS))},"
            f" got {activation!r}"
        )
    if activation in epilogue.GATED and n % 2:
        raise ValueError(
            f"activation {activation!r} needs an even number of columns, [gate | up], but rhs"
            f" {rhs.shape} has N={n}"
        )
    bounds = _bounds(group_sizes, lhs.shape[0], groups, group_offset, "rhs holds")
    operands = (lhs, rhs, bounds)
    if bias is not None:
        bias = arguments.floating("bias", bias)
        if bias.shape != (groups, n):
            raise ValueError(f"bias must have shape [G, N] = {(groups, n)}, got {bias.shape}")
        operands = (*operands, bias)
    dtype = arguments.common_dtype(lhs, rhs)
    spec = RaggedDotSpec(
        out_dtype=_out_dtype(preferred_element_type, dtype),
        precision=arguments.precision(precision, dtype),
        transpose_rhs=transpose_rhs,
        activation=activation,
        has_bias=bias is not None,
    )
    return spec, operands


def ragged_dot_contracting(
    lhs,
    rhs,
    group_sizes,
    *,
    precision,
    preferred_element_type,
    group_offset,
    num_groups,
    accumulate,
) -> tuple[ContractingSpec, tuple[jax.Array, ...]]:
    """The spec and the operands (lhs, rhs, bounds, and accumulate if there is one)."""
    lhs, rhs = _matrix("lhs", lhs, "[M, K]"), _matrix("rhs", rhs, "[M, N]")
    if lhs.shape[0] != rhs.shape[0]:
        raise ValueError(
            f"rhs must have shape [M, N] with M={lhs.shape[0]}, the rows of lhs {lhs.shape},"
            f" got {rhs.shape}"
        )
    if num_groups is not None:
        num_groups = arguments.integer("num_groups", num_groups)
        if num_groups < 0:
            raise ValueError(f"num_groups must not be negative, got {num_groups}")
    elif group_offset is not None:
        raise ValueError(
            "num_groups must be given with group_offset: the number of groups of the result"
        )
    else:
        num_groups = np.shape(group_sizes)[0] if np.ndim(group_sizes) == 1 else 0
    bounds = _bounds(group_sizes, lhs.shape[0], num_groups, group_offset, "num_groups is")
    operands = (lhs, rhs, bounds)
    dtype = arguments.common_dtype(lhs, rhs)
    if accumulate is not None:
        accumulate = arguments.floating("accumulate", accumulate)
        shape = (num_groups, lhs.shape[1], rhs.shape[1])
        if accumulate.shape != shape:
            raise ValueError(
                f"accumulate must have shape [G, K, N] = {shape}, got {accumulate.shape}"
            )
        operands = (*operands, accumulate)
    spec = ContractingSpec(
        out_dtype=_out_dtype(
            preferred_element_type, dtype if accumulate is None else accumulate.dtype
        ),
        precision=arguments.precision(precision, dtype),
        has_accumulate=accumulate is not None,
    )
    return spec, operands


def _matrix(name: str, x, layout: str) -> jax.Array:
    x = arguments.floating(name, x)
    if not all(isinstance(d, int) for d in x.shape):
        raise NotImplementedError(f"{name} must have a static shape, got the symbolic {x.shape}")
    if x.ndim != 2:
        raise ValueError(f"{name} must have shape {layout}, got {x.shape}")
    if x.shape[0] > MAX_ROWS:
        raise ValueError(f"{name} must have at most {MAX_ROWS} rows, got {x.shape}")
    return x


def _out_dtype(preferred, default) -> jnp.dtype:
    if preferred is None:
        return jnp.dtype(default)
    dtype = arguments.dtype("preferred_element_type", preferred)
    if dtype == np.float64 and not jax.config.jax_enable_x64:
        raise ValueError("preferred_element_type float64 needs jax_enable_x64")
    return dtype


def _bounds(group_sizes, rows: int, groups: int, group_offset, holder: str) -> jax.Array:
    """Each held group's first row and end: int32[groups, 2], ascending, disjoint, in [0, rows]."""
    sizes = arguments.integers("group_sizes", group_sizes)
    if sizes.ndim != 1:
        raise ValueError(f"group_sizes must have shape [G], got {sizes.shape}")
    if group_offset is None and sizes.shape[0] != groups:
        raise ValueError(
            f"group_sizes must have one entry for each group, and {holder} {groups}, got"
            f" {sizes.shape[0]} (with group_offset it may cover more groups)"
        )
    if dispatch.explicit_axes(sizes):  # a few numbers, which every shard wants whole
        sizes = jax.sharding.reshard(sizes, P(None))
    sizes = check_group_sizes_p.bind(sizes, rows=rows)
    ends = _running_total(sizes, rows)
    edges = jnp.concatenate([jnp.zeros_like(ends, shape=(1,)), ends])  # [G' + 1]
    if group_offset is not None:
        first = _offset(group_offset, groups, sizes.shape[0])
        # Groups before the first and past the last hold no rows: both their edges are the same.
        held = jnp.clip(first + np.arange(groups + 1, dtype=np.int32), 0, sizes.shape[0])
        edges = jnp.take(edges, held, mode="clip")
    return jnp.stack([edges[:-1], edges[1:]], axis=1)


def _offset(group_offset, groups: int, total: int) -> jax.Array:
    # As far outside as an offset can matter, so that adding to it can't overflow.
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        group_offset = min(max(group_offset, -groups), total)
    offset = arguments.integers("group_offset", group_offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a scalar or have shape [1], got {offset.shape}")
    return jnp.clip(jnp.reshape(offset, ()), -groups, total)


def _running_total(sizes: jax.Array, cap: int) -> jax.Array:
    """Running sum of max(sizes, 0) on the last axis, cut at `cap`; uncut it may pass 2**32."""
    limit = np.uint32(cap)
    clipped = jnp.clip(sizes, 0, cap).astype(jnp.uint32)
    total = lax.associative_scan(lambda a, b: jnp.minimum(a + b, limit), clipped, axis=-1)
    return total.astype(jnp.int32)


# An identity that only checkify sees: it carries the check on values, with no cost and no effect
# elsewhere (checkify.debug_check is an effect, which jax.export refuses).
check_group_sizes_p = Primitive("check_group_sizes")
check_group_sizes_p.def_impl(functools.partial(xla.apply_primitive, check_group_sizes_p))
check_group_sizes_p.def_abstract_eval(lambda sizes, *, rows: sizes)
mlir.register_lowering(check_group_sizes_p, lambda ctx, sizes, *, rows: [sizes])


def _check_batch(args, dims, *, rows):
    # The groups stay on the last axis, where the check sums.
    return check_group_sizes_p.bind(jnp.moveaxis(args[0], dims[0], 0), rows=rows), 0


def _check_error(ctx, error, enabled_errors, sizes, *, rows):
    out = check_group_sizes_p.bind(sizes, rows=rows)
    if not _jax_internals.user_checks_enabled(enabled_errors) or sizes.shape[-1] == 0:
        return error, out
    error = _jax_internals.checkify_assert(
        ctx,
        error,
        jnp.any(sizes < 0),
        "group_sizes must not be negative, but the smallest is {smallest}",
        smallest=jnp.min(sizes),
    )
    total = jnp.max(_running_total(sizes, rows + 1))
    error = _jax_internals.checkify_assert(
        ctx,
        error,
        total > rows,
        f"group_sizes must sum to at most the number of rows, {rows}, but the sum is at least"
        " {total}",
        total=total,
    )
    return error, out


batching.primitive_batchers[check_group_sizes_p] = _check_batch
_jax_internals.error_checks[check_group_sizes_p] = _check_error
