"""Fills gaps of Pallas' Mosaic GPU interpreter that attention's kernels meet. Private API of JAX.

Checked on 0.11.2 and 0.12.0.1. Added are accumulators with an initial value, stores to them, wgmma
with its left operand in registers and TMA that adds. `JaxprInterpreter.interpret` is wrapped: what
is known here is done here, every other equation by the original, one at a time.
"""

import collections
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import callback
from jax._src import core as jax_core
from jax._src.pallas import primitives as pallas_primitives
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge, types

_interpret_original = jaxpr_interpret.JaxprInterpreter.interpret
_ADDING = threading.Lock()
_TOKEN = gpu_callbacks.TOKEN_SHAPE_DTYPE


def _allocate(self, token, value, eqn):
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token,
        compute_unit=self.thread,
        memory_space_id=shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS),
        initial_ref_count=1,
    )
    return gpu_callbacks.call_allocate_buffer(
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_request_as_array=request,
        value=value,
        source_info=eqn.source_info,
    )


def _free(self, token, key, eqn):
    return gpu_callbacks.call_deallocate_buffer(
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        allocation_key_as_array=key,
        source_info=eqn.source_info,
    )


def _read(self, token, key, aval, eqn):
    deref = functools.partial(gpu_callbacks.wgmma_accumulator_deref, source_info=eqn.source_info)
    return callback.io_callback(
        deref,
        (_TOKEN, aval),
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        acc_allocation_key_as_array=key,
        wait_n=0,
    )


def _run_state(self, eqn, token, values):
    jaxpr, arguments, owned = eqn.params["jaxpr"], [], []
    for value, out in zip(values, eqn.outvars, strict=True):
        if isinstance(out.aval, types.AbstractRef):  # a reference passes through
            arguments.append(value)
            owned.append(None)
        else:
            token, key = _allocate(self, token, value, eqn)
            arguments.append(key)
            owned.append(key)
    token, _ = self.interpret(jaxpr, token, *arguments)
    outs = []
    for variable, value, key in zip(jaxpr.invars, arguments, owned, strict=True):
        if key is not None:
            token, value = _read(self, token, key, variable.aval, eqn)
            token = _free(self, token, key, eqn)
        outs.append(value)
    return token, outs


class _Equation:
    """An equation whose left operand is no RefUnion, so that it is not looked into."""

    def __init__(self, eqn):
        self.primitive, self.params, self.source_info = eqn.primitive, eqn.params, eqn.source_info
        self.invars, self.outvars = eqn.invars, eqn.outvars


def _wgmma(self, eqn, token, values):
    if isinstance(eqn.invars[1].aval, types.AbstractRef):
        return None
    token, key = _allocate(self, token, values[1], eqn)
    values = [values[0], key, *values[2:]]
    token, out = self._interpret_wgmma_ref_p(_Equation(eqn), token, lambda: values)
    return _free(self, token, key, eqn), out


def _store_accumulator(self, eqn, token, values):
    def store(token, key, value, location, thread):
        memory = gpu_callbacks._get_shared_memory()
        key = gpu_callbacks.HostAllocationKey.from_array(key)
        info = shared_memory.GPULoggingInfo(location, thread, eqn.source_info)
        access = memory.access(key, ())
        memory.store_buffer_content(key, access, np.array(value), thread, logging_info=info)
        return token

    token = callback.io_callback(store, _TOKEN, token, *values, self.mesh_location, self.thread)
    aval = eqn.outvars[0].aval
    return token, jnp.zeros(aval.shape, aval.dtype)


def _add_to_gmem(self, eqn, token, values):
    params = eqn.params
    if params["reduction_op"] != "add" or params["has_user_predicate"]:
        return None
    source, target, *flat = values
    trees = (params["src_transforms_treedef"], params["dst_transforms_treedef"])
    transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), flat)
    ends = [
        jaxpr_interpret.resolve_ref(variable.aval, ref, transform)
        for variable, ref, transform in zip(eqn.invars, (source, target), transforms, strict=False)
    ]

    def add(token, location, thread, ends):
        memory = gpu_callbacks._get_shared_memory()
        info = shared_memory.GPULoggingInfo(location, thread, eqn.source_info)
        (source, access), (target, other) = (
            _access(memory, key, transforms) for key, transforms in ends
        )
        value, _, _ = memory.get_buffer_content(source, access, thread, logging_info=info)
        with _ADDING:
            old, (shape, _), _ = memory.get_buffer_content(target, other, thread, logging_info=info)
            if old is None or value is None:  # all of it is out of bounds
                return token
            new = old + value[tuple(map(slice, old.shape))]
            inside = utils.Access(utils.clip_range_to_shape(other.range or (), tuple(shape)))
            memory.store_buffer_content(target, inside, new, thread, logging_info=info)
        return token

    add_all = callback.io_callback(add, _TOKEN, token, self.mesh_location, self.thread, ends)
    return add_all, []


def _access(memory, key, transforms):
    key = gpu_callbacks.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms))
    return key, memory.access(key, transforms)


# What the functions of pallas_ops/mosaic_inline.py compute, by name.
_INLINE = {
    "any_above": lambda x, most: (jnp.any(x > most).astype(jnp.int32),),
    "reduce_add": lambda x, scratch, *_: (x.sum(axis=0),),
    "reduce_max": lambda x, scratch, *_: (x.max(axis=0),),
}


def _inline(self, eqn, token, values):
    del self
    return token, _INLINE[eqn.params["mgpu_fn"].__name__](*values)


def _reduce(self, eqn, token, values):
    """Reductions across warps race on a card, where the interpreter sees nothing of it."""
    del self, token, values
    assert 0 not in eqn.params["axes"], "reduces over rows: take mosaic_inline.reduce_rows"


_RULES = {
    lax.reduce_max_p: _reduce,
    lax.reduce_sum_p: _reduce,
    primitives.inline_mgpu_p: _inline,
    primitives.copy_smem_to_gmem_p: _add_to_gmem,
    discharge.run_state_p: _run_state,
    primitives.wgmma_ref_p: _wgmma,
    primitives.wgmma_accumulator_store_p: _store_accumulator,
}


def _interpret(self, jaxpr, token, *args):
    if not any(eqn.primitive in _RULES for eqn in jaxpr.eqns):
        return _interpret_original(self, jaxpr, token, *args)
    skipping = self.interpret_params.skip_floating_point_ops
    env = utils.JaxprEnv(
        vars=[*jaxpr.constvars, *jaxpr.invars],
        values=args,
        sentinel_for_floating_point_values=jaxpr_interpret._SENTINEL if skipping else None,
    )
    for eqn in jaxpr.eqns:
        rule = _RULES.get(eqn.primitive)
        result = rule(self, eqn, token, env.read_many(eqn.invars)) if rule else None
        if result is not None:
            token, out = result
            env.write_many(eqn.outvars, out if eqn.primitive.multiple_results else [out])
            continue
        variables = [v for v in eqn.invars if not isinstance(v, jax_core.Literal)]
        variables = list(dict.fromkeys(variables))
        outs = [v for v in eqn.outvars if not isinstance(v, jax_core.DropVar)]
        info = jaxpr.debug_info.with_unknown_names()
        one = jaxpr.replace(
            constvars=[], invars=variables, outvars=outs, eqns=[eqn], debug_info=info
        )
        token, out = _interpret_original(self, one, token, *env.read_many(variables))
        env.write_many(outs, out)
    return token, env.read_many(jaxpr.outvars)


def _deallocate_barrier(self):
    # 0.11.2 demands of a thread that waited on a barrier that it has seen all of its phases when it
    # is freed; 0.12 does so no more.
    with self.cv:
        self.ref_count -= 1
        if self.ref_count <= 0 and self.arrivals_count != 0:
            raise ValueError(f"barrier freed with {self.arrivals_count} arrivals pending")


def install(monkeypatch) -> None:
    """Installs the additions for the time of a test."""
    monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "interpret", _interpret)
    if not hasattr(shared_memory, "BarrierReallocationChecker"):
        monkeypatch.setattr(shared_memory.Barrier, "deallocate", _deallocate_barrier)


class Semaphores:
    """Counts of one kernel's run, and what was waited for.

    Blocks of the grid run one after another: a count that is waited for must have been reached.
    """

    def __init__(self):
        self.counts, self.waits = collections.Counter(), []
        self._lock = threading.Lock()

    def signal(self, token, index):
        with self._lock:
            self.counts[int(index)] += 1
        return token

    def wait(self, token, index, value):
        with self._lock:
            self.waits.append(int(value))
            assert self.counts[int(index)] == int(value), "waits for what comes later"
        return token


def _semaphore(eqn, values):
    """The one index into the array of semaphores, and the operands after it."""
    _, transforms, *rest = jax.tree.unflatten(eqn.params["args_tree"], values)
    (index,) = jax.tree.leaves(transforms)
    return index, rest


def install_semaphores(monkeypatch) -> Semaphores:
    """Installs semaphores, which the interpreter has none of, for the time of a test."""
    semaphores = Semaphores()

    def get_global(self, eqn, token, values):
        del self, eqn, values
        return token, jnp.int32(0)

    def signal(self, eqn, token, values):
        del self
        index, _ = _semaphore(eqn, values)
        return callback.io_callback(semaphores.signal, _TOKEN, token, index), []

    def wait(self, eqn, token, values):
        del self
        index, (value, *_) = _semaphore(eqn, values)
        return callback.io_callback(semaphores.wait, _TOKEN, token, index, value), []

    monkeypatch.setitem(_RULES, pallas_primitives.get_global_p, get_global)
    for name, rule in (("semaphore_signal_p", signal), ("semaphore_wait_p", wait)):
        monkeypatch.setitem(_RULES, getattr(primitives, name), rule)
    return semaphores
