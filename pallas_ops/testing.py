"""Running the GPU kernels where there is no GPU."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def interpret(races: bool = True) -> Iterator[None]:
    """A context in which the Mosaic GPU kernels run on a CPU, in Pallas' interpreter.

    The interpreter simulates shared memory, barriers, TMA and wgmma. Memory that was never written
    reads as NaN. Within the context `implementation="mosaic_gpu"` runs on a CPU, and None prefers
    it; it is slow, so use tiny shapes. Compiled functions are not shared with the outside. On a
    machine of few cores give XLA more threads, or large kernels may wait for each other for ever:
    `XLA_FLAGS=--xla_force_host_platform_device_count=8`.

    Args:
      races: also detect races between warpgroups, blocks and asynchronous copies; one found is
        raised as a RuntimeError, by way of JAX's callbacks.

    Source: https://docs.jax.dev/en/latest/pallas/
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races)):
        yield
