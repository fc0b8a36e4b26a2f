"""The public grouped products."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from pallas_ops import dispatch, tuning
from pallas_ops.grouped_matmul import validate
from pallas_ops.grouped_matmul.primitive import call, contracting_op, ragged_dot_op


def ragged_dot(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "G K N"] | Float[Array, "G N K"],
    group_sizes: Int[Array, "groups"],
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: int | Int[Array, ""] | Int[Array, "1"] | None = None,
    *,
    transpose_rhs: bool = False,
    bias: Float[Array, "G N"] | None = None,
    activation: str | None = None,
    out_sharding: NamedSharding | P | None = None,
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> Float[Array, "M N_out"]:
    """Multiplies the rows of each group by that group's matrix.

    Rows `0 .. group_sizes[0]` of `lhs` are multiplied by `rhs[0]`, the next `group_sizes[1]` by
    `rhs[1]`, and so on: `jax.lax.ragged_dot` in O(M N + M K + G K N) memory. Groups may be empty,
    of any size and in any number; nothing has to be aligned or padded. It may be differentiated in
    any mode and to any order, batched over any operands, and run on shards of M, N and G.

    Args:
      lhs: `[M, K]`, rows sorted by group. bfloat16, float16, float32 or float64, as are `rhs` and
        `bias`; they may differ.
      rhs: `[G, K, N]`, or `[G, N, K]` with `transpose_rhs`.
      group_sizes: Rows of each group, of any integer dtype. Rows at or past their sum are exactly 0
        in the result and in the gradient of `lhs`, and what they hold, NaN too, reaches nothing.
        Groups are cut at M rows and negative sizes count as 0; `jax.experimental.checkify` finds
        both.
      precision: As in `jax.lax.dot_general`. None: `jax.default_matmul_precision`, and without it
        HIGHEST for float32 and float64.
      preferred_element_type: Dtype of the result. None: that of `lhs` and `rhs` together. Sums are
        float32 (float64 where float64 takes part) and are rounded once, to this dtype.
      group_offset: The first group that `rhs` holds. `group_sizes` then covers all groups, and the
        rows of those that `rhs` does not hold are 0. It may be traced, and lie outside.
      transpose_rhs: `rhs` holds the transposed matrices. Nothing is copied.
      bias: `[G, N]`, added to the rows of its group before the activation.
      activation: None, "relu", "gelu" (`jax.nn.gelu(approximate=True)`), "silu", or gated: "swiglu"
        and "geglu" take columns `[gate | up]` and give `silu(gate) * up` and `gelu(gate) * up`,
        `[M, N/2]`. It is computed in float32; the derivative keeps the pre-activation, in the dtype
        of the result.
      out_sharding: Sharding of the result: axes of explicit meshes by `jax.sharding.reshard`, of
        automatic ones by `jax.lax.with_sharding_constraint`.
      implementation: "mosaic_gpu", "triton", "xla", or a sequence to try in order. None: the
        fastest that can run the call.
      config: A tuning config of the implementation, such as `grouped_matmul.xla.Config`, or a
        sequence of them (a product and its gradients may have configs of their own). None: looked
        up, see `pallas_ops.tuning`.

    Returns:
      `[M, N]`, or `[M, N/2]` with a gated activation.

    Raises:
      ValueError: An argument is wrong everywhere; the message names it.
      TypeError: An argument that must be a Python value is traced.
      NotImplementedError: The implementation asked for can't serve the call; the message says why.

    The operation is `jax.lax.ragged_dot`'s, with the group offset of MegaBlocks' `gmm` (Gale et
    al., 2022, arXiv:2211.15841).
    """
    spec, operands = validate.ragged_dot(
        lhs,
        rhs,
        group_sizes,
        precision=precision,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
        transpose_rhs=transpose_rhs,
        bias=bias,
        activation=activation,
    )
    params = dict(spec=spec, implementation=implementation, config=tuning.requested(config))
    out = call(ragged_dot_op, operands, **params)[0]
    return out if out_sharding is None else _shard(out, out_sharding)


def ragged_dot_contracting(
    lhs: Float[Array, "M K"],
    rhs: Float[Array, "M N"],
    group_sizes: Int[Array, "groups"],
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: int | Int[Array, ""] | Int[Array, "1"] | None = None,
    *,
    num_groups: int | None = None,
    accumulate: Float[Array, "G K N"] | None = None,
    implementation: str | Sequence[str] | None = None,
    config: Any = None,
) -> Float[Array, "G K N"]:
    """Multiplies the transpose of each group's rows of `lhs` by its rows of `rhs`.

    The gradient of `ragged_dot` with respect to its matrices, as an operation of its own:
    differentiable in any mode and to any order, batched over any operands, and run on shards of M,
    K, N and G. The result of an empty group is exactly 0, and rows of no group, NaN too, reach
    nothing.

    Args:
      lhs: `[M, K]`, rows sorted by group. bfloat16, float16, float32 or float64, as is `rhs`.
      rhs: `[M, N]`.
      group_sizes: As in `ragged_dot`.
      precision: As in `ragged_dot`.
      preferred_element_type: Dtype of the result. None: that of `accumulate`, and without it that
        of `lhs` and `rhs` together. Sums are as in `ragged_dot`.
      group_offset: The first group of the result; `group_sizes` covers all groups.
      num_groups: G, the number of groups of the result. None: the length of `group_sizes`. Must be
        given with `group_offset`.
      accumulate: `[G, K, N]`, added to the result without being rounded to the dtype of `lhs`.
        Empty groups keep it. Donated under `jax.jit`, it is updated in place.
      implementation: As in `ragged_dot`.
      config: As in `ragged_dot`.

    Returns:
      `[G, K, N]`.

    Raises:
      ValueError: An argument is wrong everywhere; the message names it.
      TypeError: An argument that must be a Python value is traced.
      NotImplementedError: The implementation asked for can't serve the call; the message says why.

    The operation is `jax.lax.ragged_dot_general`'s with a ragged contracting dimension, and `tgmm`
    of MegaBlocks (Gale et al., 2022, arXiv:2211.15841).
    """
    spec, operands = validate.ragged_dot_contracting(
        lhs,
        rhs,
        group_sizes,
        precision=precision,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
        num_groups=num_groups,
        accumulate=accumulate,
    )
    params = dict(spec=spec, implementation=implementation, config=tuning.requested(config))
    return call(contracting_op, operands, **params)[0]


def _shard(x: jax.Array, sharding: NamedSharding | P) -> jax.Array:
    if not isinstance(sharding, NamedSharding | P):
        raise TypeError(
            "out_sharding must be a NamedSharding or a PartitionSpec, got"
            f" {type(sharding).__name__}"
        )
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    mesh = jax.sharding.get_abstract_mesh() if isinstance(sharding, P) else sharding.mesh
    if len(spec) > x.ndim:
        raise ValueError(f"out_sharding must have at most {x.ndim} entries, got {spec}")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    axes = {a for entry in spec for a in dispatch.axes_of(entry)}
    if not axes <= set(kinds):
        raise ValueError(
            f"out_sharding names axes {sorted(axes)}, but the mesh has {mesh.axis_names}"
        )
    used = {kinds[a] for a in axes} or set(kinds.values())
    if used == {AxisType.Explicit}:
        return jax.sharding.reshard(x, sharding)
    if used == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(x, sharding)
    raise ValueError(
        "out_sharding must name axes of a mesh that are all explicit or all automatic, got"
        f" {spec} on a mesh of { {n: k.name for n, k in kinds.items()} }"
    )
