"""The grouped products on shards: one local form, for automatic and for explicit sharding.

Rows, columns and groups may be sharded. A shard clips `bounds` to its rows and has those of its
groups; what it computes is then its part of the whole product, and only a sharded sum needs a
collective.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ops import arguments, dispatch
from pallas_ops.dispatch import Operation, Partition
from pallas_ops.grouped_matmul import epilogue
from pallas_ops.grouped_matmul.validate import ContractingSpec, RaggedDotSpec

Axes = tuple[str, ...]
Plan = tuple[Callable, Sequence[P], Sequence[P]]


def ragged_dot(lhs, rhs, bounds, *bias, spec: RaggedDotSpec) -> Partition:
    """Sharded rows and columns need no collective, sharded groups one sum of the results."""
    gated = spec.activation in epilogue.GATED
    n = "p" if gated else "n"  # a shard of [gate | up] does not hold both halves of its product
    operands = ["m k", f"g {n} k" if spec.transpose_rhs else f"g k {n}", "t u"]
    operands += [f"g {n}"] * len(bias)
    results = ["m n"] + [f"m {n}"] * spec.save_preactivation
    return Partition(
        rule=f"{', '.join(operands)} -> {', '.join(results)}",
        plan=functools.partial(_ragged_dot_plan, lhs.shape, rhs.shape, spec),
        need_replication=("k", "p", "t", "u", "n") if gated else ("k", "t", "u"),
        reduction=("g",),
    )


def ragged_dot_contracting(lhs, rhs, bounds, *accumulate, spec: ContractingSpec) -> Partition:
    """Sharded columns and groups need no collective, sharded rows one sum of the result."""
    operands = ["m k", "m n", "t u"] + ["g k n"] * len(accumulate)
    return Partition(
        rule=f"{', '.join(operands)} -> g k n",
        plan=functools.partial(_contracting_plan, lhs.shape, rhs.shape, bounds.shape[0], spec),
        need_replication=("t", "u"),
        reduction=("m",),
    )


def explicit(op: Operation, operands: Sequence[jax.Array], *, spec, **params) -> list[jax.Array]:
    """Runs the operation where operands have explicit shardings, in a shard_map over their axes."""
    axes = frozenset().union(*map(dispatch.explicit_axes, operands))
    shardings = [jax.typeof(x).sharding for x in operands]
    mesh = next(s.mesh for s, x in zip(shardings, operands) if dispatch.explicit_axes(x))
    specs = [P(*s.spec, *(None,) * (x.ndim - len(s.spec))) for s, x in zip(shardings, operands)]

    def run(*operands, spec=spec):
        return tuple(op.bind(*dispatch.varying(*operands), spec=spec, **params))

    plan = _PARTITIONS[type(spec)](*operands, spec=spec).plan
    local, operand_specs, result_specs = plan(mesh, specs, run)
    if axes == set(mesh.axis_names):
        axes = frozenset()  # means all, but for those that a vmap around has taken
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(operand_specs),
        out_specs=tuple(result_specs),
        axis_names=axes,
    )(*(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(operands, operand_specs)))


def explicit_batch(op: Operation, args, dims, **params) -> list[jax.Array] | None:
    """A batch that lies on axes of an explicit mesh, by a shard_map over them; else None."""
    entries = [jax.typeof(x).sharding.spec[d] for x, d in zip(args, dims) if d is not None]
    entry = next((e for e in entries if e is not None), None)
    axes = frozenset(dispatch.axes_of(entry))
    if not axes:
        return None
    mesh = next(m for x in args if axes <= set((m := jax.typeof(x).sharding.mesh).axis_names))
    specs = [P(*(entry if i == d else None for i in range(x.ndim))) for x, d in zip(args, dims)]
    one = functools.partial(op.primitive.bind, **params)
    return jax.shard_map(
        lambda *xs: jax.vmap(one, in_axes=tuple(dims))(*dispatch.varying(*xs)),
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=P(entry),
        axis_names=axes,
    )(*(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(args, specs)))


def _ragged_dot_plan(lhs_shape, rhs_shape, spec: RaggedDotSpec, mesh, specs, run) -> Plan:
    lhs, rhs, *_ = specs
    column = 1 if spec.transpose_rhs else 2
    gated = spec.activation in epilogue.GATED
    m, n, g = _free_axes(
        mesh,
        (lhs[0], lhs_shape[0]),
        (None if gated else rhs[column], rhs_shape[column]),
        (rhs[0], rhs_shape[0]),
    )

    def local(lhs, rhs, bounds, *bias):
        bounds = _own_rows(_own_groups(bounds, g, rhs.shape[0]), m, lhs.shape[0])
        results = run(lhs, rhs, bounds, *bias)
        # Each row belongs to one group, so all but one of the summands are zero.
        return tuple(lax.psum(x, g) for x in results) if g else tuple(results)

    operands = [P(m, None), P(g, n, None) if spec.transpose_rhs else P(g, None, n), P(None, None)]
    return (
        local,
        operands + [P(g, n)] * spec.has_bias,
        [P(m, n)] * (1 + spec.save_preactivation),
    )


def _contracting_plan(
    lhs_shape, rhs_shape, groups, spec: ContractingSpec, mesh, specs, run
) -> Plan:
    lhs, rhs, _, *results = specs  # the last: of accumulate, and of the result where it is known
    m, k, n, g = _free_axes(
        mesh,
        (lhs[0], lhs_shape[0]),
        (lhs[1], lhs_shape[1]),
        (rhs[1], rhs_shape[1]),
        (results[-1][0] if results else None, groups),
    )
    own = groups // math.prod(mesh.shape[a] for a in g or ())

    def local(lhs, rhs, bounds, *accumulate):
        bounds = _own_groups(bounds, g, own)
        if not m:
            return run(lhs, rhs, bounds, *accumulate)
        dtype = arguments.common_dtype(lhs, rhs, *accumulate)
        if np.dtype(spec.out_dtype) == np.float64:
            dtype = spec.out_dtype
        dtype = arguments.accumulator_dtype(dtype)
        summand = ContractingSpec(dtype, spec.precision)
        (y,) = run(lhs, rhs, _own_rows(bounds, m, lhs.shape[0]), spec=summand)
        y = lax.psum(y, m)
        if accumulate:
            old = accumulate[0].astype(dtype)
            filled = bounds[:, 1] > bounds[:, 0]
            y = jnp.where(filled[:, None, None], old + y, old)
        return (y.astype(spec.out_dtype),)

    operands = [P(m, k), P(m, n), P(None, None)] + [P(g, k, n)] * spec.has_accumulate
    return local, operands, [P(g, k, n)]


_PARTITIONS = {RaggedDotSpec: ragged_dot, ContractingSpec: ragged_dot_contracting}


def _free_axes(mesh, *wanted) -> list[Axes | None]:
    """For each (spec entry, size) the mesh axes that cut it evenly and are not taken yet."""
    taken: set[str] = set()
    result = []
    for entry, size in wanted:
        free = tuple(a for a in dispatch.axes_of(entry) if a not in taken)
        axes = dispatch.dividing_axes(mesh, free, size)
        taken.update(axes)
        result.append(axes or None)
    return result


def _own_rows(bounds: jax.Array, axes: Axes | None, rows: int) -> jax.Array:
    """Bounds within the shard's rows, counted from its first row."""
    if not axes:
        return bounds
    first = lax.axis_index(axes) * np.int32(rows)
    return jnp.clip(bounds - first, 0, rows)


def _own_groups(bounds: jax.Array, axes: Axes | None, groups: int) -> jax.Array:
    """Bounds of the shard's groups."""
    if not axes:
        return bounds
    first = lax.axis_index(axes) * np.int32(groups)
    return lax.dynamic_slice_in_dim(bounds, first, groups)
