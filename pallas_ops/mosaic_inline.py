"""What Pallas has no words for, as functions to call in the body of a Mosaic GPU kernel."""

import functools
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

# checked on 0.11.2, 0.12.0.1: jax.extend.mlir has neither.
from jaxlib.mlir.dialects import llvm, nvvm


def hold_back(x: jax.Array, layout: Any) -> None:
    """Keeps what comes after it, such as a wait for wgmma, after the computation of `x`.

    ptxas orders a wait against other instructions with effects, not against arithmetic, and moves
    it up where nothing keeps it: what should run beside a product then runs after it. This is such
    an instruction, one that is skipped unless `x`, which must not be negative, is below -1.

    Args:
      x: float32 array in registers.
      layout: the layout of `x`.
    """

    @plgpu.inline_mgpu(arg_types=(layout,))
    def hold(ctx, fragment: mgpu.FragmentedArray):
        del ctx
        for register in fragment.registers.flat:
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"),
                [functools.reduce(arith.addf, _elements(register))],
                "{ .reg .pred p; setp.lt.f32 p, $0, 0fBF800000; @p nanosleep.u32 1; }",
                "f",
                asm_dialect=0,
                has_side_effects=True,
            )

    _call(hold, x)


def scale_rows(x: jax.Array, factor: jax.Array) -> jax.Array:
    """`x` with each row times its factor; a warp whose factors are all 1 skips the products.

    Args:
      x: float32 [rows, columns], in registers laid out for wgmma.
      factor: float32 [rows], laid out as a sum over the columns of `x` is.
    """
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, layout.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
    )
    def scale(ctx, x: mgpu.FragmentedArray, factor: mgpu.FragmentedArray):
        del ctx
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
        other = arith.constant(ir.IntegerType.get_signless(1), ir.BoolAttr.get(False))
        for register in factor.registers.flat:
            for element in _elements(register):  # unordered: a NaN is no 1 either
                is_other = arith.cmpf(arith.CmpFPredicate.UNE, element, one)
                other = arith.ori(other, is_other)
        warp = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
        anywhere = nvvm.vote_sync(warp, other, "any")
        old = list(x.registers.flat)
        branch = scf.IfOp(anywhere, [r.type for r in old], has_else=True)
        then, otherwise = branch.then_block, branch.else_block
        assert then is not None and otherwise is not None
        with ir.InsertionPoint(then):
            rows = factor.broadcast_in_dim(x.shape, (0,), x.layout)
            scf.yield_(list((x * rows).registers.flat))
        with ir.InsertionPoint(otherwise):
            scf.yield_(old)
        registers = np.array(branch.results, dtype=object).reshape(x.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return _call(scale, x, factor)


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
