"""Every private JAX import of the package, each with the JAX versions it was checked on."""

import types

# checked on 0.11.2, 0.12.0.1: rules (ctx, error, enabled_errors, *operands, **params) -> (error,
# results) by which checkify looks at the values of a primitive's operands.
from jax._src.checkify import FailedCheckError, assert_func, error_checks, get_traceback

# checked on 0.11.2, 0.12.0.1: `traceback_in_locations_limit(0)` is a context in which lowering
# gives operations no stack frames.
from jax._src.config import traceback_in_locations_limit

# checked on 0.11.2, 0.12.0.1: a primitive whose lowering holds custom_partitioning must be listed
# here, or lowering it under a mesh fails for want of the devices.
from jax._src.dispatch import prim_requires_devices_during_lowering

__all__ = [
    "checkify_assert",
    "device",
    "error_checks",
    "gpu_interpreter_params",
    "gpu_interpreter_state",
    "prim_requires_devices_during_lowering",
    "traceback_in_locations_limit",
    "user_checks_enabled",
]


def user_checks_enabled(enabled_errors) -> bool:
    """Whether checkify was asked for `user_checks`."""
    return FailedCheckError in enabled_errors


def checkify_assert(ctx, error, wrong, message: str, **values):
    """Adds to checkify's `error` what `checkify.check(~wrong, message, **values)` would."""
    return assert_func(ctx, error, wrong, FailedCheckError(get_traceback(), message, **values))


def device(ctx, platform: str):
    """A device that a `mlir.LoweringRuleContext` lowers for; None where none is known."""
    # checked on 0.11.2, 0.12.0.1: the axis context holds the devices, the backend all of them.
    devices = getattr(ctx.module_context.axis_context, "device_assignment", None)
    if not devices:
        backend = ctx.module_context.backend
        devices = backend.devices() if backend is not None else ()
    names = {platform, "gpu"} if platform in ("cuda", "rocm") else {platform}
    return next((d for d in devices if d.platform in names), None)


def gpu_interpreter_params():
    """The active `plgpu.InterpretGPUParams`, or None outside `force_gpu_interpret_mode`."""
    # checked on 0.11.2, 0.12.0.1: part of the key of JAX's compilation caches.
    from jax._src import config

    return config.pallas_tpu_interpret_mode_context_manager.value


def gpu_interpreter_state() -> types.ModuleType:
    """The interpreter's module: `get_races()`, `reset_gpu_interpret_mode_state()`."""
    # checked on 0.11.2, 0.12.0.1; imported late, since it imports Pallas.
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    return interpret_pallas_call
