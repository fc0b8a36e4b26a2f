"""The cards that programs can be compiled for ahead of time, as XLA wants them described."""

import re
from typing import NamedTuple

from pallas_ops import _jax_internals

# Memory, clock and caches are an H200's: XLA's cost model reads them, no kernel here does.
_TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory_per_core}
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
  shared_memory_per_block_optin: {shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{device_kind}"
"""


class Chip(NamedTuple):
    """A card: compute capability, processors, bytes of shared memory that a block may have."""

    major: int
    minor: int
    processors: int
    shared_memory: int
    device_kind: str

    def target_config(self) -> str:
        """XLA's description of the card, a text proto."""
        # The driver keeps 1 KiB of a processor's shared memory for each block.
        return _TARGET.format(shared_memory_per_core=self.shared_memory + 1024, **self._asdict())


CHIPS = {
    "a100": Chip(8, 0, 108, 163 * 1024, "NVIDIA A100-SXM4-80GB"),
    "a10": Chip(8, 6, 72, 99 * 1024, "NVIDIA A10"),
    "l4": Chip(8, 9, 58, 99 * 1024, "NVIDIA L4"),
    "l40s": Chip(8, 9, 142, 99 * 1024, "NVIDIA L40S"),
    "rtx-4090": Chip(8, 9, 128, 99 * 1024, "NVIDIA GeForce RTX 4090"),
    "h100": Chip(9, 0, 132, 227 * 1024, "NVIDIA H100 80GB HBM3"),
    "h100-pcie": Chip(9, 0, 114, 227 * 1024, "NVIDIA H100 PCIe"),
    "gh200": Chip(9, 0, 132, 227 * 1024, "NVIDIA GH200 480GB"),
    "h20": Chip(9, 0, 78, 227 * 1024, "NVIDIA H20"),
    "h200": Chip(9, 0, 132, 227 * 1024, "NVIDIA H200"),
    "b200": Chip(10, 0, 148, 227 * 1024, "NVIDIA B200"),
}


def chip_of(device_kind: str) -> str | None:
    """The name in `CHIPS` of a kind of device, `jax.Device.device_kind`; None for others."""
    words = set(re.split(r"[\s-]+", device_kind.lower()))
    names = sorted(CHIPS, key=len, reverse=True)
    return next((name for name in names if words.issuperset(name.split("-"))), None)


def processors(device_kind: str | None) -> int:
    """How many streaming multiprocessors a kind of device has; an H200's, 132, if unknown."""
    return CHIPS[chip_of(device_kind or "") or "h200"].processors


def not_hopper(ctx) -> str | None:
    """Why a kernel for sm_90 can't run on the card that a `mlir.LoweringRuleContext` lowers for.

    None where it can, or where no card is known.
    """
    device = _jax_internals.device(ctx, "cuda")
    if device is None:
        return None
    chip = CHIPS.get(chip_of(device.device_kind) or "")
    # A device that is only described, to compile for it, does not know its capability.
    capability = getattr(device, "compute_capability", chip and f"{chip.major}.{chip.minor}")
    if capability in (None, "9.0"):
        return None
    return f"needs sm_90 (Hopper), not {device.device_kind}"
