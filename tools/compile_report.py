"""Compile a jitted function for a GPU that this machine does not have, and say what came out.

    make compile-report ARGS="module:function"

`function` takes nothing and returns `(f, args)`: what to compile and its `jax.ShapeDtypeStruct`s.
Without an argument a small Hopper kernel of this file is compiled, to see that the tools work.
For every Mosaic GPU kernel in the program the report gives registers, spills, shared memory, counts
of the instructions that matter and ptxas's warnings. Numbers on the card are another matter.

XLA compiles ahead of time from a description of the card (`jax.experimental.topologies`); wheels
of the dependency group `compile` bring it, ptxas, libdevice and nvdisasm. One chip per process:
Mosaic GPU registers its passes once, for the first compute capability that it sees.
"""

import argparse
import collections
import contextlib
import dataclasses
import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu

CHIPS = {  # major, minor, processors, name
    "a100": (8, 0, 108, "NVIDIA A100-SXM4-80GB"),
    "l4": (8, 9, 58, "NVIDIA L4"),
    "h200": (9, 0, 132, "NVIDIA H200"),
    "b200": (10, 0, 148, "NVIDIA B200"),
}
# The limits are Hopper's; a smaller card's are not modelled.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {processors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled Mosaic GPU kernel; bytes for memory, counts by opcode for instructions."""

    name: str
    registers: int | None
    spill_stores: int | None
    spill_loads: int | None
    shared_memory: int | None
    instructions: collections.Counter[str]
    warnings: tuple[str, ...]

    def __str__(self):
        named = {"HGMMA": "wgmma", "HMMA": "mma", "UTMALDG": "TMA loads", "UTMASTG": "TMA stores"}
        counts = [f"{self.instructions[op]} {text}" for op, text in named.items()]
        return "\n  ".join(
            [
                self.name,
                f"{self.registers} registers, {self.spill_stores}/{self.spill_loads} bytes spilled"
                f" (stores/loads), {self.shared_memory} bytes of shared memory",
                f"{self.instructions.total()} instructions: {', '.join(counts)}",
                *self.warnings,
            ]
        )


def devices(chip: str = "h200", count: int = 1):
    """`count` devices of the named chip, to compile for; nothing can run on them."""
    major, minor, processors, name = CHIPS[chip]
    target = TARGET.format(major=major, minor=minor, processors=processors, name=name)
    return topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{count}", target_config=target
    ).devices


def compile_for(
    f: Callable[..., Any], *args: Any, chip: str = "h200", **jit_options: Any
) -> tuple[jax.stages.Compiled, list[Kernel]]:
    """Compiles `jax.jit(f)` for one device of `chip`.

    Args:
      f: what to compile.
      *args: its arguments, pytrees of `jax.ShapeDtypeStruct`.
      chip: a name in `CHIPS`.
      **jit_options: passed to `jax.jit`.

    Returns:
      The compiled program (`as_text()`, `memory_analysis()`) and its Mosaic GPU kernels.
    """
    device = devices(chip)[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("_",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    args = jax.tree.map(
        lambda a: a if a.sharding else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here), args
    )
    if not jax.tree.leaves(args):
        jit_options.setdefault("out_shardings", here)
    with tempfile.TemporaryDirectory() as dump, _environment(MOSAIC_GPU_DUMP_TO=dump):
        # Mosaic GPU takes the compute capability from the default device.
        with jax.default_device(device):
            lowered = jax.jit(f, **jit_options).trace(*args).lower()
        compiled = lowered.compile()
        return compiled, [_read_dump(path) for path in sorted(Path(dump).glob("*.ptxas"))]


@contextlib.contextmanager
def _environment(**values):
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


def _read_dump(path):
    log = path.read_text()
    base = path.with_suffix("")
    sass = "".join(p.read_text() for p in base.parent.glob(f"{base.name}.sass*"))
    resources = base.with_suffix(".resources.txt")

    def number(pattern, text=log):
        found = re.search(pattern, text)
        return int(found[1]) if found else None

    opcodes = re.findall(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]+)", sass)
    return Kernel(
        name=base.name,
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared_memory=number(
            r"smem_scratch_bytes=(\d+)", resources.read_text() if resources.exists() else ""
        ),
        instructions=collections.Counter(opcodes),
        warnings=tuple(line for line in log.splitlines() if re.search(r"C7\d\d\d|warn", line)),
    )


def example():
    """One 128 x 128 tile of a product on Hopper's tensor cores, operands brought by TMA."""

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


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", nargs="?", help="module:function that returns (f, args)")
    parser.add_argument("--chip", choices=CHIPS, default="h200")
    options = parser.parse_args()

    build = example
    if options.what:
        module, _, name = options.what.partition(":")
        sys.path.insert(0, os.getcwd())
        build = getattr(importlib.import_module(module), name)
    f, args = build()
    start = time.perf_counter()
    _, kernels = compile_for(f, *args, chip=options.chip)
    print(f"jax {jax.__version__}, {options.chip}: {time.perf_counter() - start:.1f} s")
    print(*kernels or ["no Mosaic GPU kernel in this program"], sep="\n")


if __name__ == "__main__":
    main()
