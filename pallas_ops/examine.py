"""What becomes of typical calls on a card, as lines of JSON: the half of `doctor` that compiles.

It runs in a process of its own, without the GPU: `python -m pallas_ops.examine h200`.
"""

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_ops
from pallas_ops import compile_report, dispatch, toolchain
from pallas_ops.chips import CHIPS
from pallas_ops.programs import with_gradients

_HOPPER = (9, 0)


def print_lines(chip: str) -> None:
    """Prints what assembles, then what each primitive of the typical calls becomes.

    The keys of a line: `what` is "assembler" or "failure", with a `text`; "start", with the name of
    a call and a primitive in it; or "call", which has beside them the implementation chosen and why
    no faster one, its kernels, each with its problems, and what has kept them from being compiled.
    """

    def emit(**line):
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()  # the next may abort the process

    reason = compile_report.available()
    if reason is None:
        emit(**_assembler(chip))
    else:
        emit(what="failure", text=f"nothing can be compiled for {chip}: {reason}")
    for call, (f, args) in _calls().items():
        for operation, program, avals in _primitives(f, args):
            shapes = ", ".join("x".join(map(str, a.shape)) for a in avals[:2])
            primitive = f"{operation.name}({shapes})"
            emit(what="start", call=call, primitive=primitive)
            outcome = _examine(operation, program, avals, chip, compiles=reason is None)
            emit(what="call", call=call, primitive=primitive, **outcome)


def _calls() -> dict[str, tuple[Callable[..., Any], Sequence[Any]]]:
    bf16, f32 = jnp.bfloat16, jnp.float32
    array = jax.ShapeDtypeStruct
    attend = functools.partial(pallas_ops.flash_attention, is_causal=True)
    cases = [(64, bf16), (128, bf16), (256, bf16), (128, f32)]
    calls: dict[str, tuple[Callable[..., Any], Sequence[Any]]] = {
        f"causal attention, {jnp.dtype(dtype).name}, head dim {h}, with gradients": (
            with_gradients(attend),
            [array((4, 4096, 2048 // h, h), dtype)] * 3,
        )
        for h, dtype in cases
    }
    m, k, n, g = 16384, 2048, 1536, 64
    lhs, rhs = array((m, k), bf16), array((g, k, n), bf16)
    sizes = array((g,), jnp.int32)
    dot = lambda x, y, sizes, **options: pallas_ops.ragged_dot(x, y, sizes, **options)
    return calls | {
        "ragged_dot, bfloat16, with gradients": (with_gradients(dot), [lhs, rhs, sizes]),
        "ragged_dot, bfloat16, swiglu": (
            functools.partial(dot, activation="swiglu"),
            [lhs, rhs, sizes],
        ),
        "ragged_dot_contracting, bfloat16": (
            pallas_ops.ragged_dot_contracting,
            [lhs, array((m, n), bf16), sizes],
        ),
    }


def _primitives(f, args) -> Iterator[tuple[dispatch.Operation, Callable[..., Any], list[Any]]]:
    """The calls of this library's primitives in a program, each once, to be run on their own."""
    seen = set()
    for equation in _equations(jax.make_jaxpr(f)(*args).jaxpr):
        operation = dispatch.Operation.by_name.get(equation.primitive.name)
        if operation is not None:
            avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars]
            params = tuple(sorted(equation.params.items()))
            if (operation.name, tuple(avals), params) not in seen:
                seen.add((operation.name, tuple(avals), params))
                yield operation, functools.partial(operation.bind, **equation.params), avals


def _equations(jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _examine(operation, program, avals, chip: str, *, compiles: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"choice": "nothing", "kernels": [], "error": None}
    try:
        with _Log(operation.name) as log:
            if compiles:
                compile_report.lower_for(program, *avals, chip=chip)
            else:
                jax.jit(program).trace(*avals).lower(lowering_platforms=("cuda",))
        result["choice"] = log.choice
        if compiles and log.choice.startswith("mosaic_gpu"):
            kernels = compile_report.report(program, avals, chip)
            result["kernels"] = [_kernel(k) for k in kernels]
    except Exception as error:
        result["error"] = f"it can't be compiled: {str(error).partition(chr(10))[0]}"
    return result


def _kernel(kernel: compile_report.Kernel) -> dict[str, Any]:
    spilled = (kernel.spill_stores or 0) + (kernel.spill_loads or 0)
    text = (
        f"{kernel.name}: {kernel.registers} registers, {spilled} bytes spilled,"
        f" {kernel.shared_memory} bytes of shared memory"
    )
    return {"text": "; ".join([text, *kernel.remarks()]), "problems": kernel.problems()}


class _Log(logging.Handler):
    """Reads in the library's log which implementation a primitive takes, and why no faster one."""

    def __init__(self, name: str):
        super().__init__(logging.INFO)
        self.choice = "an unknown implementation"
        self._pattern = re.compile(rf"{name} at .*?: (\w+) on \w+(?=;|$)(.*)")

    def emit(self, record):
        if match := self._pattern.fullmatch(record.getMessage()):
            self.choice = match[1] + match[2]

    def __enter__(self):
        dispatch._LOGGED.clear()  # it logs nothing twice
        self._level = dispatch.logger.level
        dispatch.logger.setLevel(logging.INFO)
        dispatch.logger.addHandler(self)
        return self

    def __exit__(self, *exception):
        dispatch.logger.removeHandler(self)
        dispatch.logger.setLevel(self._level)


# What assembles.


def _assembler(chip: str) -> dict[str, str]:
    trades = (CHIPS[chip].major, CHIPS[chip].minor) >= _HOPPER
    f, args = _probe(trades)
    try:
        (kernel,) = compile_report.report(f, args, chip)
    except compile_report.CompileError as error:
        return {"what": "failure", "text": f"a trivial kernel can't be compiled: {error}"}
    text = toolchain.assembler() or "unknown"
    if trades:
        text += "; it "
        text += "heeds setmaxnreg" if kernel.setmaxnreg_ignored is None else "ignores setmaxnreg"
    return {"what": "assembler", "text": text}


def _probe(trades_registers: bool):
    """A kernel that copies, of three warpgroups that may trade registers."""
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(x_gmem, y_gmem):
        @pl.when(lax.axis_index("wg") == 0)
        def _():
            if trades_registers:
                plgpu.set_max_registers(232, action="increase")
            y_gmem[...] = x_gmem[...]

        @pl.when(lax.axis_index("wg") > 0)
        def _():
            if trades_registers:
                plgpu.set_max_registers(40, action="decrease")

    x = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    return plgpu.kernel(body, out_type=x, num_threads=3, thread_name="wg"), [x]


if __name__ == "__main__":
    print_lines(sys.argv[1])
