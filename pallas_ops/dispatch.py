"""From a primitive to the code that runs it: implementations chosen, refused and logged.

An operation has a table of implementations, the fastest first. Which of them can serve a call is
decided twice: when the call is traced, from its arguments; when it is lowered, from the platform.
"""

import dataclasses
import functools
import logging
import os
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import DebugInfo, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir, xla
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_ops import _jax_internals, tuning
from pallas_ops.tuning import Configs, Tunable

logger = logging.getLogger("pallas_ops")

NAMES = ("mosaic_gpu", "triton", "xla", "reference")
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def _never(*avals, **params) -> str | None:
    del avals, params
    return None


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run a primitive.

    `run(*operands, config=..., **params)` returns the primitive's results as a sequence. `refuse`
    takes the same arguments with types in place of arrays and gives the reason, if any, for which
    it can't serve them; `refuse_device(ctx)` that for which it can't be lowered in a
    `mlir.LoweringRuleContext`, say for a card too old. `platforms` None means all of them.
    `automatic` says whether None may choose it, `interpretable` whether the Mosaic GPU interpreter
    runs it on a CPU.
    """

    run: Callable[..., Sequence[jax.Array]]
    refuse: Callable[..., str | None] = _never
    refuse_device: Callable[[mlir.LoweringRuleContext], str | None] = _never
    platforms: tuple[str, ...] | None = None
    tunable: Tunable | None = None
    automatic: bool = True
    interpretable: bool = False


class Partition(NamedTuple):
    """How a primitive runs on shards under automatic sharding.

    `rule` is Shardy's, in its einsum-like notation, with the factors that must not be sharded.
    `plan` takes the mesh, the specs of the operands and of the results, and the function to run on
    a shard, and returns the function of the local operands with its collectives, the specs wanted
    for the operands, and those of the results.
    """

    rule: str
    plan: Callable[..., tuple[Callable, Sequence[P], Sequence[P]]]
    need_replication: tuple[str, ...] = ()
    reduction: tuple[str, ...] = ()


class Operation:
    """A JAX primitive whose lowering picks from a table of implementations.

    The operations of a `family` are made of each other's derivatives, and a call's configs go to
    all of them. `inputs(seed, *avals, **params)` makes operands with values as they are in use, for
    timing.
    """

    by_name: ClassVar[dict[str, "Operation"]] = {}

    def __init__(
        self,
        name: str,
        *,
        abstract: Callable,
        batch: Callable,
        partition: Callable[..., Partition],
        public_name: str,
        family: str,
        inputs: Callable[..., Sequence[jax.Array]],
    ):
        self.name = name
        self.public_name = public_name
        self.family = family
        self.inputs = inputs
        self.implementations: dict[str, Implementation] = {}
        self._abstract = abstract
        self._partition = partition
        # Call sites not logged yet, by parameters and then by shapes. Lowering is cached and knows
        # of none.
        self._sites: dict[Hashable, dict[Hashable, set[str]]] = {}
        self.primitive = Primitive(name)
        self.primitive.multiple_results = True
        self.primitive.def_impl(functools.partial(xla.apply_primitive, self.primitive))
        self.primitive.def_abstract_eval(self._abstract_eval)
        _jax_internals.prim_requires_devices_during_lowering.add(self.primitive)
        for platform in PLATFORMS:
            rule = functools.partial(self._lower, platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)
        batching.primitive_batchers[self.primitive] = batch
        self.by_name[name] = self

    def bind(
        self, *operands: jax.Array, implementation, config: Configs | None, **params
    ) -> list[jax.Array]:
        """Runs the primitive by the first of `implementation` that can serve the call."""
        avals = [jax.typeof(x) for x in operands]
        names = self._candidates(implementation, avals, config, params)
        sites = self._sites.setdefault(_call_key(names, config, params), {})
        sites.setdefault(_shapes(avals), set()).add(call_site())
        return self.primitive.bind(*operands, implementation=names, config=config, **params)

    def register(self, name: str, implementation: Implementation) -> None:
        """Puts an implementation in the table, in the order of `NAMES`."""
        table = {**self.implementations, name: implementation}
        self.implementations = {n: table[n] for n in NAMES if n in table}
        if implementation.tunable is not None:
            tuning.register(self.name, name, implementation.tunable.config_type)

    def _refusal(self, name: str, avals, configs: Configs | None, params) -> str | None:
        entry = self.implementations.get(name)
        if entry is None:
            return f"no {name} kernel exists for {self.public_name} yet"
        if configs is None:
            return entry.refuse(*avals, config=None, **params)
        if configs.exclusive:
            # A config of another operation of the family is for derivatives.
            taken = {t.config_type for t in self._tunables(name)}
            wrong = next((c for c in configs.items if type(c) not in taken), None)
            if wrong is not None:
                return f"it takes no config of type {tuning.name_of(type(wrong))}"
        config = entry.tunable and configs.of_type(entry.tunable.config_type)
        reason = entry.refuse(*avals, config=None, **params)
        if reason is None and config is not None:
            reason = entry.refuse(*avals, config=config, **params)
            if reason is not None and not configs.exclusive:
                raise ValueError(
                    f"{self.public_name}: {config}, set by pallas_ops.tuning.use, does not fit this"
                    f" call: {reason}"
                )
        return reason

    def _tunables(self, name: str) -> list[Tunable]:
        entries = (
            op.implementations.get(name) for op in self.by_name.values() if op.family == self.family
        )
        return [e.tunable for e in entries if e is not None and e.tunable is not None]

    def run(
        self, name: str, device_kind: str | None, *operands, config: Configs | None, **params
    ) -> Sequence[jax.Array]:
        """Runs an implementation on operands of one device, with its config looked up."""
        entry = self.implementations[name]
        tunable = entry.tunable
        chosen = tunable and config and config.of_type(tunable.config_type)
        avals = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        call = tuning.Call(self.name, name, avals, tuple(sorted(params.items())))
        if tunable is None:
            tuning.collected(call, "this implementation has no config")
        elif chosen is not None:
            tuning.collected(call, "a config is given")
        else:
            chosen = tuning.lookup(call, tunable, entry.refuse, device_kind)
        return entry.run(*operands, config=chosen, **params)

    def _candidates(self, implementation, avals, config, params) -> tuple[str, ...]:
        requested = normalize(implementation)
        if requested is None:
            names = [n for n, entry in self.implementations.items() if entry.automatic]
        else:
            names = list(requested)
        reasons = {n: self._refusal(n, avals, config, params) for n in names}
        able = tuple(n for n in names if reasons[n] is None)
        if not able:
            raise NotImplementedError(
                f"{self.public_name}: "
                + "; ".join(
                    f"implementation {n!r} can't serve this call: {reasons[n]}" for n in names
                )
            )
        return able

    def _abstract_eval(self, *avals, implementation, config, **params):
        del implementation, config
        # Types from a traced expression, so that dtypes, varying manual axes and explicit shardings
        # are JAX's own.
        info = DebugInfo("pallas_ops", self.name, None, None)
        return pe.abstract_eval_fun(
            functools.partial(self._abstract, **params), *avals, debug_info=info
        )

    def _lower(self, platform, ctx, *operands, implementation, config, **params):
        reasons = {
            n: self._platform_refusal(self.implementations[n], platform, ctx)
            for n in implementation
        }
        name = next((n for n in implementation if reasons[n] is None), None)
        if name is None:
            why = "; ".join(f"implementation {n!r} {reasons[n]}" for n in implementation)
            raise NotImplementedError(f"{self.public_name}: {why}")
        entry = self.implementations[name]
        self._log(platform, ctx, name, implementation, reasons, config, params)
        device = _jax_internals.device(ctx, platform)
        kind = device and device.device_kind
        run = functools.partial(self.run, name, kind, config=config, **params)
        if not _runs_on(entry, platform):
            run = _interpreted(run, self._abstract, params)
        partition = self._partition(*ctx.avals_in, **params)
        lower = mlir.lower_fun(_partitioned(run, partition), multiple_results=True)
        # What runs on a shard is single-device code, to be traced without the mesh around it: loops
        # in it need not know what varies over which manual axis.
        local = ctx.replace(avals_in=[ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return lower(local, *operands)

    def _platform_refusal(self, entry: Implementation, platform: str, ctx) -> str | None:
        if _runs_on(entry, platform):
            return entry.refuse_device(ctx)
        if platform == "cpu" and entry.interpretable and _jax_internals.gpu_interpreter_params():
            return None
        return f"runs on {'/'.join(entry.platforms or ())} only, not on {platform}"

    def _log(self, platform, ctx, chosen: str, names, reasons, config, params) -> None:
        message = f"{chosen} on {platform}"
        for name in NAMES[: NAMES.index(chosen)]:
            reason = self._refusal(name, ctx.avals_in, config, params) or reasons.get(name)
            message += f"; not {name}: {reason or 'not asked for'}"
        by_shape = self._sites.get(_call_key(names, config, params), {})
        # vmap changes the shapes after the call: then all sites with these parameters are meant.
        sites = by_shape.pop(_shapes(ctx.avals_in), None) or set().union(*by_shape.values())
        for site in sorted(sites):
            log_once(f"{self.name} at {site}: {message}")


def _call_key(names: tuple[str, ...], config, params: dict[str, Any]) -> Hashable:
    return names, config, tuple(sorted(params.items()))


def _shapes(avals) -> Hashable:
    return tuple((a.shape, a.dtype) for a in avals)


def _runs_on(entry: Implementation, platform: str) -> bool:
    return entry.platforms is None or platform in entry.platforms


def normalize(implementation: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """`implementation=` as a tuple of known names, or None."""
    if implementation is None:
        return None
    names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not names or any(n not in NAMES for n in names):
        raise ValueError(
            f"implementation must be None, one of {', '.join(map(repr, NAMES))}, or a non-empty"
            f" sequence of them, got {implementation!r}"
        )
    return tuple(names)


_LOGGED: set[str] = set()
# What lies between a user's line and this library: itself, its siblings, JAX, Flax; and the
# standard library.
_SITE_PACKAGES = pathlib.Path(jax.__file__).parents[1]
_NOT_USERS = (
    *(
        str(pathlib.Path(__file__).parents[1] / name) + os.sep
        for name in ("pallas_ops", "flax_modules")
    ),
    *(str(_SITE_PACKAGES / name) + os.sep for name in ("jax", "flax", "jaxtyping", "beartype")),
    "<",
)
_STDLIB = sysconfig.get_path("stdlib") + os.sep


def log_once(message: str) -> None:
    """Logs at INFO level what was not logged before."""
    if message not in _LOGGED:
        _LOGGED.add(message)
        logger.info(message)


def call_site() -> str:
    """`file:line` of the innermost Python frame that is a user's."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        standard = path.startswith(_STDLIB) and "site-packages" not in path
        if not standard and not path.startswith(_NOT_USERS):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


_NO_MESH = AbstractMesh((), ())


def _partitioned(run: Callable, partition: Partition) -> Callable:
    @custom_partitioning
    def call(*operands):
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            return tuple(run(*operands))

    def partition_call(mesh, arg_shapes, result_shapes):
        shardings = [a.sharding for a in (*arg_shapes, *result_shapes)]
        if not all(isinstance(s, NamedSharding) for s in shardings):  # no mesh in sight: replicate
            whole = [s.__class__.get_replicated(s._device_assignment) for s in shardings]
            specs = tuple(whole[len(arg_shapes) :]), tuple(whole[: len(arg_shapes)])
            return mesh, functools.partial(_shard_module, run), *specs
        mesh = shardings[0].mesh
        specs = [_full_spec(a.sharding.spec, len(a.shape)) for a in (*arg_shapes, *result_shapes)]
        shard, arg_specs, result_specs = partition.plan(mesh, specs, run)

        named = functools.partial(NamedSharding, mesh)
        lower = functools.partial(_shard_module, shard)
        return mesh, lower, tuple(map(named, result_specs)), tuple(map(named, arg_specs))

    call.def_partition(
        partition=partition_call,
        sharding_rule=partition.rule,
        need_replication_factors=partition.need_replication,
        reduction_factors=partition.reduction,
    )
    return call


# A shard's code is a module of its own, whose stack frames XLA takes for those of the program
# around it, and frames mixed up so may have no end: compiling `jax.jit(flash_attention)` under a
# mesh never returned. So that module gets none. JAX traces `_shard_module` and then lowers it, in
# one go: what is entered in the one is left in the lowering of the only operation that it has.
_without_frames = Primitive("pallas_ops_shard")
_without_frames.multiple_results = True
_without_frames.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
_frames = threading.local()


def _shard_module(f: Callable, *operands: jax.Array) -> tuple[jax.Array, ...]:
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        jaxpr = jax.make_jaxpr(lambda *xs: tuple(f(*xs)))(*operands)
    if not hasattr(_frames, "limit"):
        _frames.limit = _jax_internals.traceback_in_locations_limit(0)
        _frames.limit.__enter__()
    return tuple(_without_frames.bind(*operands, jaxpr=jaxpr))


def _lower_without_frames(ctx, *operands, jaxpr):
    try:
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)
    finally:
        _frames.__dict__.pop("limit").__exit__(None, None, None)


mlir.register_lowering(_without_frames, _lower_without_frames)


def _full_spec(spec: P, ndim: int) -> P:
    return P(*spec, *(None,) * (ndim - len(spec)))


_INTERPRETER_LOCK = threading.Lock()  # the interpreter's state is global to the process


def _interpreted(run: Callable, abstract: Callable, params: dict[str, Any]) -> Callable:
    """A GPU kernel as a callback into the Mosaic GPU interpreter, on a CPU."""
    interpreter = _jax_internals.gpu_interpreter_params()

    def on_host(*operands, **overrides):
        from jax.experimental.pallas import mosaic_gpu as plgpu

        state = _jax_internals.gpu_interpreter_state()
        with _INTERPRETER_LOCK, plgpu.force_gpu_interpret_mode(interpreter):
            try:
                results = tuple(
                    np.asarray(r) for r in run(*map(jax.numpy.asarray, operands), **overrides)
                )
                if interpreter.detect_races and state.get_races().races_found:
                    raise RuntimeError(
                        "the interpreter found a race; see its report on standard output"
                    )
            except Exception:
                state.reset_gpu_interpret_mode_state()
                raise
        return results

    def call(*operands, **overrides):
        types = jax.eval_shape(functools.partial(abstract, **{**params, **overrides}), *operands)
        return jax.pure_callback(functools.partial(on_host, **overrides), tuple(types), *operands)

    return call


def axes_of(entry) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    if entry is None or entry is P.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def dividing_axes(mesh, entry, size: int) -> tuple[str, ...]:
    """The axes of a spec's entry, or none where they don't cut a dimension of `size` evenly."""
    axes = axes_of(entry)
    shards = int(np.prod([mesh.shape[a] for a in axes], dtype=np.int64))
    return axes if shards and size % shards == 0 else ()


def explicit_axes(x: jax.Array) -> frozenset[str]:
    """Axes of explicit type in the mesh of an array's type."""
    mesh = jax.typeof(x).sharding.mesh
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit)


def varying(*operands: jax.Array) -> tuple[jax.Array, ...]:
    """Casts all operands to the union of their varying manual axes.

    The transpose of the cast is what sums a replicated operand's gradient over the shards.
    """
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*axes)
    return tuple(
        jax.lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    )
