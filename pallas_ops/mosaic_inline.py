"""What Pallas has no words for, as functions to call in the body of a Mosaic GPU kernel."""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

# checked on 0.11.2, 0.12.0.1: jax.extend.mlir has neither.
from jaxlib.mlir.dialects import llvm


def any_above(x: jax.Array, most: float, layout: Any) -> jax.Array:
    """Whether any element of a warp's part of `x` is above a number; NaN is not.

    What it decides must be right for each warp alone, and may be anything within reach of one, such
    as reductions along rows. Later waits for wgmma stay behind it: ptxas would otherwise move them
    up, before the computation of `x`.

    Args:
      x: float32 array in registers.
      most: the number.
      layout: the layout of `x`.
    """
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(layout, scalar),
        return_type=plgpu.ShapeDtypeStruct((), np.dtype(np.int32), layout=scalar),
    )
    def any_above(ctx, x: mgpu.FragmentedArray, most: mgpu.FragmentedArray):
        del ctx
        i32, limit = ir.IntegerType.get_signless(32), most.registers.item()
        above = [
            arith.cmpf(arith.CmpFPredicate.OGT, element, limit)
            for register in x.registers.flat
            for element in _elements(register)
        ]
        found = llvm.inline_asm(
            i32,
            [arith.extui(i32, functools.reduce(arith.ori, above))],
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff;"
            " @p nanosleep.u32 1; selp.u32 $0, 1, 0, p; }",
            "=r,r",
            asm_dialect=0,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    return _call(any_above, x, np.float32(most)) > 0


def reduce_rows(op: str, x: jax.Array, scratch) -> jax.Array:
    """`x` reduced over axis 0, which lies in four warps.

    Pallas' own reductions across warps exchange their parts in one place of shared memory, which
    warpgroups that reduce at the same time share.

    Args:
      op: "add" or "max".
      x: float32 [rows, columns], in registers laid out for wgmma, or [rows], laid out as a sum over
        its columns is.
      scratch: shared memory of this warpgroup's own, float32 [128 n]; a larger one takes fewer
        steps.

    Returns:
      float32 [columns], laid out as a sum over the rows of `x` is, or a scalar.
    """
    layout = plgpu.Layout.WGMMA
    of, result = (layout, layout.reduce(0))
    if x.ndim == 1:
        of, result = layout.reduce(1), plgpu.Layout.WG_SPLAT(())

    def reduce(ctx, x: mgpu.FragmentedArray, scratch: ir.Value):
        del ctx
        return x.reduce(op, 0, scratch=scratch)

    reduce.__name__ = f"reduce_{op}"
    returns = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=result)
    inlined = plgpu.inline_mgpu(arg_types=(of, plgpu.RefType()), return_type=returns)(reduce)
    return _call(inlined, x, scratch)


def _call(inlined: Any, *args):
    # The decorator takes the lowering's context off the arguments, which its types do not say.
    return inlined(*args)


def _elements(register: ir.Value) -> list[ir.Value]:
    """Those of a register that may be a vector."""
    if not isinstance(register.type, ir.VectorType):
        return [register]
    i32 = ir.IntegerType.get_signless(32)
    index = lambda i: llvm.ConstantOp(i32, ir.IntegerAttr.get(i32, i)).result
    return [llvm.extractelement(register, index(i)) for i in range(register.type.shape[0])]
