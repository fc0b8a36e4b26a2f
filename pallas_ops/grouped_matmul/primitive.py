"""The primitives `ragged_dot` and `ragged_dot_contracting`: types, derivatives, batching.

Each derivative is made of the two primitives again, so that any order and mode of differentiation
works.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad

from pallas_ops import arguments, dispatch, tuning
from pallas_ops.dispatch import Implementation, Operation
from pallas_ops.grouped_matmul import epilogue, partition, workload, xla
from pallas_ops.grouped_matmul.validate import MAX_ROWS, ContractingSpec, RaggedDotSpec


def call(op: Operation, operands, *, spec, implementation, config) -> list[jax.Array]:
    """The operation's results, under whatever sharding the operands' types show."""
    params = dict(spec=spec, implementation=implementation, config=config)
    if any(map(dispatch.explicit_axes, operands)):
        return partition.explicit(op, operands, **params)
    return op.bind(*dispatch.varying(*operands), **params)


# Types: of expressions that have the right shapes, so that JAX works out the rest.


def _ragged_dot_type(lhs, rhs, bounds, *bias, spec: RaggedDotSpec):
    k = 2 if spec.transpose_rhs else 1
    y = lax.dot_general(lhs, rhs.astype(lhs.dtype), (((1,), (k,)), ((), ())))  # [M, G, N]
    y = _varying_like(jnp.sum(y, axis=1), bounds, *bias)
    results = [epilogue.activate(y, spec.activation)] + [y] * spec.save_preactivation
    return tuple(x.astype(spec.out_dtype) for x in results)


def _contracting_type(lhs, rhs, bounds, *accumulate, spec: ContractingSpec):
    y = lax.dot_general(lhs, rhs.astype(lhs.dtype), (((0,), (0,)), ((), ())))  # [K, N]
    y = _varying_like(y, bounds, *accumulate)
    return (jnp.broadcast_to(y[None], (bounds.shape[0], *y.shape)).astype(spec.out_dtype),)


def _varying_like(x, *others):
    for other in others:
        x = x + jnp.sum(other).astype(x.dtype)
    return x


# Derivatives of `ragged_dot`.


def _ragged_dot_jvp(primals, tangents, *, spec: RaggedDotSpec, implementation, config):
    params = dict(implementation=implementation, config=config)
    lhs, rhs, bounds, *bias = primals
    dlhs, drhs, _, *dbias = tangents
    save = spec.save_preactivation or spec.activation is not None
    results = ragged_dot_op.bind(
        *primals, spec=dataclasses.replace(spec, save_preactivation=save), **params
    )
    plain = RaggedDotSpec(spec.out_dtype, spec.precision, spec.transpose_rhs)
    terms = [
        ragged_dot_op.bind(x, y, bounds, spec=plain, **params)[0]
        for x, y in ((dlhs, rhs), (lhs, drhs))
        if not (isinstance(x, ad.Zero) or isinstance(y, ad.Zero))
    ]
    terms += [
        _bias_rows(b, bounds, lhs.shape[0], spec.out_dtype, implementation)
        for b in dbias
        if not isinstance(b, ad.Zero)
    ]
    if not terms:
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    tangent = functools.reduce(jnp.add, terms)
    out_tangent = tangent
    if spec.activation is not None:
        out_tangent = _activation_tangent(results[1], tangent, spec.activation)
    count = 1 + spec.save_preactivation
    return results[:count], [out_tangent, tangent][:count]


def _activation_tangent(x, dx, activation: str):
    """The activation's derivative at `x` times `dx`; rows of no group, 0 in both, stay 0."""

    # The checkpoint makes the pre-activation the only residual, in its own dtype.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangent(x, dx):
        dtype = arguments.accumulator_dtype(x.dtype)
        activate = functools.partial(epilogue.activate, activation=activation)
        return jax.jvp(activate, (x.astype(dtype),), (dx.astype(dtype),))[1].astype(x.dtype)

    return tangent(x, dx)


def _bias_rows(bias, bounds, rows: int, dtype, implementation):
    """bias[g] in each row of group g, zero in the rows of no group: [rows, N]."""
    # As a product with a column of ones, so that its transpose sums in float32. It is no product
    # that a kernel must serve, whichever was asked for.
    names = tuple(dict.fromkeys((*implementation, "xla")))
    ones = jnp.ones((rows, 1), bias.dtype)
    spec = RaggedDotSpec(dtype, lax.Precision.HIGHEST)
    return ragged_dot_op.bind(
        ones, bias[:, None, :], bounds, spec=spec, implementation=names, config=None
    )[0]


def _ragged_dot_transpose(cotangents, lhs, rhs, bounds, *bias, spec: RaggedDotSpec, **params):
    if not spec.plain:
        raise NotImplementedError("ragged_dot with a bias or an activation is not linear")
    (ct,) = cotangents
    if ad.is_undefined_primal(lhs):
        if isinstance(ct, ad.Zero):
            return [ad.Zero(lhs.aval), None, None]
        grad = RaggedDotSpec(lhs.aval.dtype, spec.precision, not spec.transpose_rhs)
        return [ragged_dot_op.bind(ct, rhs, bounds, spec=grad, **params)[0], None, None]
    if isinstance(ct, ad.Zero):
        return [None, ad.Zero(rhs.aval), None]
    grad = ContractingSpec(rhs.aval.dtype, spec.precision)
    pair = (ct, lhs) if spec.transpose_rhs else (lhs, ct)
    return [None, contracting_op.bind(*pair, bounds, spec=grad, **params)[0], None]


# Derivatives of `ragged_dot_contracting`.


def _contracting_jvp(primals, tangents, *, spec: ContractingSpec, **params):
    lhs, rhs, bounds, *_ = primals
    dlhs, drhs, _, *daccumulate = tangents
    results = contracting_op.bind(*primals, spec=spec, **params)
    plain = ContractingSpec(spec.out_dtype, spec.precision)
    terms = [
        contracting_op.bind(x, y, bounds, spec=plain, **params)[0]
        for x, y in ((dlhs, rhs), (lhs, drhs))
        if not (isinstance(x, ad.Zero) or isinstance(y, ad.Zero))
    ]
    terms += [x.astype(spec.out_dtype) for x in daccumulate if not isinstance(x, ad.Zero)]
    if not terms:
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
    return results, [functools.reduce(jnp.add, terms)]


def _contracting_transpose(
    cotangents, lhs, rhs, bounds, *accumulate, spec: ContractingSpec, **params
):
    if accumulate:
        raise NotImplementedError("ragged_dot_contracting with accumulate is not linear")
    (ct,) = cotangents
    x, other = (lhs, rhs) if ad.is_undefined_primal(lhs) else (rhs, lhs)
    if isinstance(ct, ad.Zero):
        grad = ad.Zero(x.aval)
    else:
        # Row r of group g: dlhs[r] = ct[g] rhs[r] and drhs[r] = ct[g]^T lhs[r].
        form = RaggedDotSpec(x.aval.dtype, spec.precision, transpose_rhs=x is lhs)
        (grad,) = ragged_dot_op.bind(other, ct, bounds, spec=form, **params)
    return [grad, None, None] if x is lhs else [None, grad, None]


# Batching. `V` is the size of the batch.


def _ragged_dot_batch(args, dims, *, spec: RaggedDotSpec, implementation, config):
    params = dict(implementation=implementation, config=config)
    results = partition.explicit_batch(ragged_dot_op, args, dims, spec=spec, **params)
    if results is not None:
        return results, [0] * len(results)
    size = _batch_size(args, dims)
    if dims[1] is not None:
        args = [_batch_first(x, d, size) for x, d in zip(args, dims)]
        results = ragged_dot_op.bind(*_merge_groups(args), spec=spec, **params)
    elif any(d is not None for d in dims[3:]):
        split = functools.partial(_shared_rhs_own_bias, spec=spec, **params)
        return jax.vmap(split, in_axes=tuple(dims))(*args), (0,) * (1 + spec.save_preactivation)
    else:
        lhs = args[0] if dims[0] is None else _batch_first(args[0], dims[0], size)
        bounds = _batch_first(args[2], dims[2], size)
        results = _sorted_by_group(lhs, args[1], bounds, *args[3:], spec=spec, **params)
    rows = results[0].shape[0] // size
    return [jnp.reshape(x, (size, rows, x.shape[1])) for x in results], [0] * len(results)


def _contracting_batch(args, dims, *, spec: ContractingSpec, **params):
    results = partition.explicit_batch(contracting_op, args, dims, spec=spec, **params)
    if results is not None:
        return results, [0]
    size = _batch_size(args, dims)
    args = [_batch_first(x, d, size) for x, d in zip(args, dims)]
    groups = args[2].shape[1]
    (y,) = contracting_op.bind(*_merge_groups(args), spec=spec, **params)
    return [jnp.reshape(y, (size, groups, *y.shape[1:]))], [0]


def _batch_size(args, dims) -> int:
    return next(x.shape[d] for x, d in zip(args, dims) if d is not None)


def _batch_first(x, dim, size: int):
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _merge_groups(args):
    """Operands of V products, the third of them bounds, as those of one of V * G groups."""
    size, rows = args[0].shape[:2]
    _check_rows(size, rows)
    first = np.arange(size, dtype=np.int32) * np.int32(rows)
    args = list(args)
    args[2] = args[2] + first[:, None, None]
    return [jnp.reshape(x, (size * x.shape[1], *x.shape[2:])) for x in args]


def _check_rows(size: int, rows: int) -> None:
    if size * rows > MAX_ROWS:
        raise ValueError(
            f"vmap over {size} makes {size * rows} rows of {rows}; at most {MAX_ROWS} can be"
        )


def _sorted_by_group(lhs, rhs, bounds, *bias, spec: RaggedDotSpec, **params):
    """Rows [V, M, K], or [M, K] for all, with bounds [V, G, 2] but one rhs: [V * M, N] each."""
    size, (m, k), groups = bounds.shape[0], lhs.shape[-2:], rhs.shape[0]
    _check_rows(size, m)
    if m == 0 or groups == 0:
        no_bounds = jnp.zeros_like(bounds, shape=(groups, 2))
        rows = jnp.broadcast_to(lhs, (size, m, k))
        return ragged_dot_op.bind(
            jnp.reshape(rows, (size * m, k)), rhs, no_bounds, *bias, spec=spec, **params
        )
    starts, ends = bounds[:, :, 0], bounds[:, :, 1]  # [V, G]
    # The batch's rows of group 0, then those of group 1, ...: where those of (v, g) begin.
    counts = jnp.transpose(ends - starts)  # [G, V]
    totals = jnp.reshape(jnp.cumsum(jnp.reshape(counts, (-1,))), counts.shape)
    begins = jnp.transpose(totals - counts)  # [V, G]
    edges = jnp.concatenate([jnp.zeros_like(totals, shape=(1,)), totals[:, -1]])  # [G + 1]

    # A row's group is the number of groups that end at or before it.
    batch = np.arange(size, dtype=np.int32)[:, None]
    row = np.arange(m, dtype=np.int32)[None, :]
    ended = jnp.zeros_like(ends, shape=(size, m + 1)).at[batch, ends].add(1)
    group = jnp.cumsum(ended[:, :m], axis=1)  # [V, M]
    known = jnp.minimum(group, groups - 1)
    offset = row - jnp.take_along_axis(starts, known, axis=1)
    inside = (group < groups) & (offset >= 0)
    place = jnp.where(inside, jnp.take_along_axis(begins, known, axis=1) + offset, size * m)
    place = jnp.reshape(place, (-1,))  # [V * M], past the end for a row of no group

    every = np.arange(size * m, dtype=np.int32)
    source = jnp.zeros_like(place).at[place].set(every, mode="drop", unique_indices=True)
    source = source % np.int32(m) if lhs.ndim == 2 else source
    rows = jnp.take(jnp.reshape(lhs, (-1, k)), source, axis=0, mode="clip")
    sorted_bounds = jnp.stack([edges[:-1], edges[1:]], axis=1)
    results = ragged_dot_op.bind(rows, rhs, sorted_bounds, *bias, spec=spec, **params)
    return [jnp.take(x, place, axis=0, mode="fill", fill_value=0) for x in results]


def _shared_rhs_own_bias(lhs, rhs, bounds, bias, *, spec: RaggedDotSpec, **params):
    """The primitive with its epilogue apart, so that a batch of biases needs no copy of rhs."""
    dtype = arguments.accumulator_dtype(arguments.common_dtype(lhs, rhs))
    if np.dtype(spec.out_dtype) == np.float64:
        dtype = spec.out_dtype
    plain = RaggedDotSpec(dtype, spec.precision, spec.transpose_rhs)
    (y,) = ragged_dot_op.bind(lhs, rhs, bounds, spec=plain, **params)
    y = y + _bias_rows(bias, bounds, lhs.shape[0], dtype, params["implementation"])
    results = [epilogue.activate(y, spec.activation)] + [y] * spec.save_preactivation
    return [x.astype(spec.out_dtype) for x in results]


# The operations. Kernels register themselves beside the implementation in plain JAX.

ragged_dot_op = Operation(
    "ragged_dot",
    abstract=_ragged_dot_type,
    batch=_ragged_dot_batch,
    partition=partition.ragged_dot,
    public_name="ragged_dot",
    family="grouped_matmul",
    inputs=workload.inputs,
)
contracting_op = Operation(
    "ragged_dot_contracting",
    abstract=_contracting_type,
    batch=_contracting_batch,
    partition=partition.ragged_dot_contracting,
    public_name="ragged_dot_contracting",
    family="grouped_matmul",
    inputs=workload.inputs,
)
ad.primitive_jvps[ragged_dot_op.primitive] = _ragged_dot_jvp
ad.primitive_transposes[ragged_dot_op.primitive] = _ragged_dot_transpose
ad.primitive_jvps[contracting_op.primitive] = _contracting_jvp
ad.primitive_transposes[contracting_op.primitive] = _contracting_transpose
_LOOP = tuning.Tunable(xla.Config, workload.key, candidates=xla.candidates, heuristic=xla.heuristic)
ragged_dot_op.register("xla", Implementation(run=xla.ragged_dot, tunable=_LOOP))
contracting_op.register("xla", Implementation(run=xla.ragged_dot_contracting, tunable=_LOOP))
