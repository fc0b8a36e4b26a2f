"""Compile a jitted function for a GPU that this machine may not have, and say what came out.

    JAX_PLATFORMS=cpu python -m pallas_ops.compile_report module:function --chip h200

`function` takes nothing and returns `(f, args)`: what to compile and its `jax.ShapeDtypeStruct`s.
Without it a small Hopper kernel of this file is compiled, to see that the tools work. For every
Mosaic GPU kernel in the program the report gives registers, spills, shared memory, counts of the
instructions that matter, and what is wrong. Numbers on the card are another matter.

XLA compiles ahead of time from a description of the card (`jax.experimental.topologies`), with
JAX's CUDA plugin, ptxas or libnvJitLink, and libdevice; nvdisasm is for the instructions. One
compute capability per process: Mosaic GPU registers its passes once, for the first.
"""

import argparse
import contextlib
import hashlib
import itertools
import os
import pathlib
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.mlir import ir

from pallas_ops import programs, toolchain
from pallas_ops.chips import CHIPS, Chip, chip_of
from pallas_ops.compiled import Kernel, read_dumps
from pallas_ops.toolchain import available

__all__ = [
    "CHIPS",
    "CompileError",
    "Kernel",
    "available",
    "card",
    "chip_of",
    "compile_for",
    "devices",
    "lower_for",
    "report",
]

_ADVICE = {
    "exceeds available shared memory": "take smaller tiles or fewer stages",
    "not supported on .target": "the kernel is for another generation of GPUs",
}
_capability: tuple[int, int] | None = None
_compilations = itertools.count()


class CompileError(RuntimeError):
    """A program can't be compiled for a chip; the first line of the message says why."""


def report(f: Callable[..., Any], args: Sequence[Any], chip: str) -> list[Kernel]:
    """The Mosaic GPU kernels of `jax.jit(f)(*args)`; see `compile_for`."""
    return compile_for(f, *args, chip=chip)[1]


def compile_for(
    f: Callable[..., Any], *args: Any, chip: str = "h200", **jit_options: Any
) -> tuple[jax.stages.Compiled, list[Kernel]]:
    """Compiles `jax.jit(f)` for one device of `chip`, in a process that has no other platform.

    Args:
      f: what to compile.
      *args: its arguments, pytrees of `jax.ShapeDtypeStruct`.
      chip: a name in `CHIPS`.
      **jit_options: passed to `jax.jit`.

    Returns:
      The compiled program (`as_text()`, `memory_analysis()`) and its Mosaic GPU kernels.

    Raises:
      ValueError: there is no such chip.
      CompileError: the program can't be compiled, on this machine, in this process or at all.
    """
    # Some of a kernel's files are written when it is lowered.
    with (
        tempfile.TemporaryDirectory() as dump,
        environment(**toolchain.LOG, MOSAIC_GPU_DUMP_TO=dump),
    ):
        lowered = lower_for(f, *args, chip=chip, **jit_options)
        _compile_anew(lowered)
        with _native_stderr() as log:
            try:
                compiled = lowered.compile()
            except Exception as error:
                raise CompileError(_reason(error, log())) from error
            said = log()
        kernels = read_dumps(pathlib.Path(dump))
    if kernels:
        toolchain.note(said, kernels[0].assembler)
    for kernel in kernels:
        _check_shared_memory(kernel, chip)
    return compiled, kernels


def lower_for(
    f: Callable[..., Any], *args: Any, chip: str = "h200", **jit_options: Any
) -> jax.stages.Lowered:
    """`jax.jit(f)` lowered for `compile_for`: by then each call's implementation is chosen."""
    _check_process(chip)
    with environment(**toolchain.LOG), _native_stderr():
        device = devices(chip)[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("_",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda a: (
            a
            if isinstance(a, jax.ShapeDtypeStruct) and a.sharding
            else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)
        ),
        args,
    )
    if not jax.tree.leaves(args):
        jit_options.setdefault("out_shardings", here)
    # Mosaic GPU takes the compute capability from the default device. A function of its own keeps
    # JAX from finding the program in a cache.
    with jax.default_device(device):
        traced = jax.jit(lambda *args: f(*args), **jit_options).trace(*args)
        try:
            return traced.lower()
        except Exception as error:
            raise CompileError(_reason(error)) from error


def card(chip: str) -> Chip:
    """A card by its name in `CHIPS`; a ValueError says which there are."""
    if chip not in CHIPS:
        raise ValueError(f"chip must be one of {', '.join(CHIPS)}, got {chip!r}")
    return CHIPS[chip]


def devices(chip: str = "h200", count: int = 1):
    """`count` devices of the named chip, to compile for; nothing can run on them."""
    return topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=card(chip).target_config()
    ).devices


def _check_process(chip: str) -> None:
    global _capability
    capability = card(chip).major, card(chip).minor
    reason = available()
    if reason is None and jax.config.jax_platforms != "cpu":
        reason = "the process must be started with JAX_PLATFORMS=cpu"
    if reason is not None:
        raise CompileError(f"nothing can be compiled for {chip}: {reason}")
    if _capability not in (None, capability):
        raise CompileError(
            f"this process has compiled for compute capability {_capability}; Mosaic GPU takes no"
            f" second, so compile for {chip}, of {capability}, in another process"
        )
    _capability = capability


def _check_shared_memory(kernel: Kernel, chip: str) -> None:
    # Mosaic GPU goes by Hopper's limit where there is no device to ask.
    limit = CHIPS[chip].shared_memory
    if (kernel.shared_memory or 0) > limit:
        text = "exceeds available shared memory"
        raise CompileError(
            f"{kernel.name} {text}: it needs {kernel.shared_memory} bytes, a block on {chip} has"
            f" {limit} ({_ADVICE[text]})"
        )


def _reason(error: Exception, log: str = "") -> str:
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    if "ptxas" not in str(error):  # JAX 0.11 leaves its message in the log
        first += "".join(f": {line.strip()}" for line in re.findall(r".*error *:.*", log)[:1])
    first += "".join(f" ({advice})" for text, advice in _ADVICE.items() if text in first)
    return "\n".join([first, *rest])


def _compile_anew(lowered: jax.stages.Lowered) -> None:
    """Gives each kernel a hash of its own; one that the process has compiled leaves no files."""
    salt = str(next(_compilations)).encode()
    module: Any = lowered.compiler_ir("stablehlo")

    def visit(op):
        attributes = op.operation.attributes
        if "mosaic_gpu" in str(attributes["call_target_name"]):
            config = {entry.name: entry.attr for entry in attributes["mhlo.backend_config"]}
            digest = hashlib.sha256(config["kernel_hash"].value_bytes + salt).digest()
            config["kernel_hash"] = ir.StringAttr.get(digest)
            attributes["mhlo.backend_config"] = ir.DictAttr.get(config)

    def visit_calls(op):
        if op.name == "stablehlo.custom_call":
            visit(op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit_calls)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """A context with these environment variables, for what starts or is loaded in it."""
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _native_stderr() -> Iterator[Callable[[], str]]:
    """Keeps what native code writes to standard error; the function gives it so far.

    Where that is a file it is left there too: the last words of a compiler that ends the process.
    """
    sys.stderr.flush()
    if stat.S_ISREG(os.fstat(2).st_mode):
        start = os.fstat(2).st_size
        with open("/proc/self/fd/2", "rb") as file:
            yield lambda: _read_from(file, start)
        return
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: _read_from(file, 0)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _read_from(file: BinaryIO, start: int) -> str:
    file.seek(start)
    return file.read().decode(errors="replace")


def example():
    """One 128 x 128 tile of a product on Hopper's tensor cores, operands brought by TMA."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def kernel(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, barrier):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, barrier)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, barrier)
        plgpu.barrier_wait(barrier)

        def product(acc_ref):
            plgpu.wgmma(acc_ref, a_smem, b_smem)
            return acc_ref[...]

        out_smem[...] = pl.run_scoped(product, plgpu.ACC((128, 128))).astype(jnp.float16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    f = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128, 128), jnp.float16),
        scratch_types=[
            *[plgpu.SMEM((128, 128), jnp.float16, transforms=tiled) for _ in range(3)],
            plgpu.Barrier(num_arrivals=2),
        ],
        kernel_name="example",
    )
    return f, (jax.ShapeDtypeStruct((128, 128), jnp.float16),) * 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit codes: 1 where the program can't be compiled or something is wrong with a"
        " kernel; 2 where no program is named.",
    )
    parser.add_argument(
        "what",
        nargs="?",
        help="module:function that returns (f, args); default: a small kernel for Hopper",
    )
    parser.add_argument(
        "--chip", choices=CHIPS, default="h200", help="the card to compile for (default: h200)"
    )
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")
    try:
        f, args = example() if options.what is None else programs.named(options.what)
    except ValueError as error:
        parser.error(str(error))
    start = time.perf_counter()
    try:
        kernels = report(f, args, options.chip)
    except CompileError as error:
        # An assembler says the same of each instruction.
        print(f"can't be compiled for {options.chip}: {str(error).partition(chr(10))[0]}")
        return 1
    print(f"JAX {jax.__version__}, {options.chip}: {time.perf_counter() - start:.1f} s")
    print(f"assembler: {toolchain.assembler() or 'none used'}")
    print(*kernels or ["no Mosaic GPU kernel in this program"], sep="\n")
    return 1 if any(kernel.problems() for kernel in kernels) else 0


if __name__ == "__main__":
    sys.exit(main())
