"""The primitives flash_attention_fwd and flash_attention_bwd: types, batching, sharding, lowering.

Operands are the arrays that are present of `Operands`, in its order, named by the parameter
`fields`; the backward's are followed by out, lse, dout and dlse. Its results are the gradients of
query, key, value and, where they are operands, of bias and sinks; the latter two are float32, to be
cast by the caller.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.interpreters import ad
from jax.sharding import PartitionSpec as P

from pallas_ops import chips, dispatch, tuning
from pallas_ops.attention import chunked, mosaic_config, reference, workload
from pallas_ops.attention.validate import Operands, Spec

RESULTS = ("out", "lse")
BACKWARD_OPERANDS = ("out", "lse", "dout", "dlse")

# Names of each operand's dimensions; bias, mask and sinks may have 1 in place of any.
_DIMENSIONS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "mask": "bnts",
    "q_offset": "b",
    "query_lengths": "b",
    "kv_lengths": "b",
    "q_segments": "bt",
    "kv_segments": "bs",
    "sinks": "bn",
    "seeds": "bn",
    "out": "btnd",
    "lse": "btn",
    "dout": "btnd",
    "dlse": "btn",
}
_BROADCAST = ("bias", "mask", "sinks")


def gradients_of(fields: tuple[str, ...], bias_gradient: bool) -> tuple[str, ...]:
    """The operands whose gradients flash_attention_bwd returns, in order."""
    absent = () if bias_gradient else ("bias",)
    return tuple(
        f for f in ("query", "key", "value", "bias", "sinks") if f in fields and f not in absent
    )


def _forward_by(forward, *arrays, fields: tuple[str, ...], spec: Spec, config):
    operands = Operands(**dict(zip(fields, arrays, strict=True)))
    return forward(operands, spec, config)


def _backward_by(
    backward, *arrays, fields: tuple[str, ...], spec: Spec, bias_gradient: bool, config
):
    operands = Operands(**dict(zip(fields, arrays, strict=False)))
    out, lse, dout, dlse = arrays[len(fields) :]
    dq, dk, dv, dbias, dsinks = backward(
        operands, out, lse, dout, dlse, spec, config, bias_gradient
    )
    return [x for x in (dq, dk, dv, dbias, dsinks) if x is not None]


def _batch(operation: dispatch.Operation, arrays, dims, *, fields, **params):
    """Merges a mapped axis V into the batch: [V*B, ...]."""
    backward = operation is flash_attention_bwd
    names = (*fields, *BACKWARD_OPERANDS) if backward else fields
    size = next(x.shape[d] for x, d in zip(arrays, dims, strict=True) if d is not None)
    b = arrays[0].shape[0 if dims[0] != 0 else 1]
    gradients = gradients_of(fields, params["bias_gradient"]) if backward else ()
    merged, shared = [], set()
    for name, x, d in zip(names, arrays, dims, strict=True):
        x = x[None] if d is None else jnp.moveaxis(x, d, 0)  # [1|V, 1|B, ...]
        if name in _BROADCAST and x.shape[1] == 1 != b and name in gradients:
            shared.add(name)
        # What is broadcast over the whole batch stays so, unless each of V has its own values or
        # gradient.
        if not (name in _BROADCAST and x.shape[:2] == (1, 1) and name not in gradients):
            x = jnp.broadcast_to(x, (size, b, *x.shape[2:]))
            x = x.reshape(size * b, *x.shape[2:])
        else:
            x = x[0]
        merged.append(x)
    results = operation.primitive.bind(*merged, fields=fields, **params)
    results = [r.reshape(size, b, *r.shape[1:]) for r in results]
    for i, name in enumerate(gradients):
        if name in shared:
            results[i] = jnp.sum(results[i], axis=1, keepdims=True)
    return results, [0] * len(results)


def _partition(names, shapes, results, *, backward: bool) -> dispatch.Partition:
    """Batch and heads may be sharded, everything else is whole on each device."""
    sizes = {}
    for name, shape in zip(names, shapes, strict=True):
        if name not in _BROADCAST:
            sizes.update(zip(_DIMENSIONS[name], shape, strict=True))
    n, k = sizes["n"], sizes["k"]
    # Shardy's factors. A broadcast dimension of 1 has one of its own. Query heads are kv heads
    # where there are as many; a compound factor otherwise would let Shardy split a mesh axis, which
    # NamedSharding can't say.
    extra = iter(range(1000))

    def factors(name, shape) -> str:
        out = []
        for letter, size in zip(_DIMENSIONS[name], shape, strict=True):
            if size != sizes[letter]:
                out.append(f"x{next(extra)}")
            elif letter == "n" and n == k:
                out.append("k")
            else:
                out.append(letter)
        return " ".join(out)

    shape_of = dict(zip(names, shapes, strict=True))
    shape_of.update({r: tuple(sizes[c] for c in _DIMENSIONS[r]) for r in RESULTS})
    rule = ", ".join(factors(m, s) for m, s in zip(names, shapes, strict=True))
    rule += " -> " + ", ".join(factors(r, shape_of[r]) for r in results)
    used = {c for m in (*names, *results) for c in _DIMENSIONS[m]}

    def plan(mesh, arg_specs, run):
        query = arg_specs[0]
        layout = Layout.of(mesh, query[0], query[2], shape_of["query"][0], n, k)
        inputs = [layout.spec(name, shape) for name, shape in zip(names, shapes, strict=True)]
        outputs = [layout.spec(name, shape_of[name]) for name in results]

        def local(*arrays):
            arrays = layout.own_kv_heads(dict(zip(names, arrays, strict=True)))
            out = dict(zip(results, run(*arrays.values()), strict=True))
            if backward:
                out = layout.sum_gradients(out, shape_of)
            return tuple(out.values())

        return local, inputs, outputs

    return dispatch.Partition(rule, plan, need_replication=tuple(c for c in "thsd" if c in used))


class Layout:
    """Attention cut by mesh axes along batch and query heads.

    Where the axes don't divide the kv heads, each shard holds all of them and takes its own.
    """

    def __init__(self, mesh, batch: tuple[str, ...], heads: tuple[str, ...], n: int, k: int):
        self.batch, self.heads, self.n, self.k = batch, heads, n, k
        self.shards = math.prod(mesh.shape[a] for a in heads)
        self.whole_kv = bool(heads) and k % self.shards != 0

    @classmethod
    def of(cls, mesh, batch_entry, heads_entry, b: int, n: int, k: int) -> "Layout":
        batch = dispatch.dividing_axes(mesh, batch_entry, b)
        heads = dispatch.dividing_axes(mesh, heads_entry, n)
        return cls(mesh, batch, heads, n, k)

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        entries = []
        for letter, size in zip(_DIMENSIONS[name], shape, strict=True):
            axes = {"b": self.batch, "n": self.heads, "k": () if self.whole_kv else self.heads}.get(
                letter, ()
            )
            # A broadcast dimension is whole; so is one of size 1 that nothing can cut.
            entries.append(axes if axes and not (size == 1 and name in _BROADCAST) else None)
        return P(*entries)

    def own_kv_heads(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        if not self.whole_kv:
            return arrays
        index = self._kv_heads()
        return {
            m: jnp.take(x, index, axis=2) if m in ("key", "value") else x for m, x in arrays.items()
        }

    def sum_gradients(self, gradients: dict[str, jax.Array], shape_of) -> dict[str, jax.Array]:
        """Sums over the shards what they share: kv heads, and what bias and sinks broadcast."""
        out = {}
        for name, x in gradients.items():
            axes = ()
            if name in ("key", "value") and self.whole_kv:
                dtype = x.dtype
                whole = jnp.zeros(
                    (*x.shape[:2], self.k, x.shape[3]), jnp.promote_types(dtype, jnp.float32)
                )
                x = whole.at[:, :, self._kv_heads()].add(x.astype(whole.dtype))
                x = jax.lax.psum(x, self.heads).astype(dtype)
            if name in _BROADCAST:
                spec = self.spec(name, shape_of[name])
                entries = dict(zip(_DIMENSIONS[name], spec, strict=True))
                axes += self.batch if entries["b"] is None else ()
                axes += self.heads if entries["n"] is None else ()
            out[name] = jax.lax.psum(x, axes) if axes else x
        return out

    def _kv_heads(self) -> jax.Array:
        """The kv heads of this shard's query heads: one each, or the one that all share."""
        local, group = self.n // self.shards, self.n // self.k
        first = jax.lax.axis_index(self.heads) * jnp.int32(local)
        if group % local == 0:
            return (first // jnp.int32(group))[None]
        return (first + jnp.arange(local, dtype=jnp.int32)) // jnp.int32(group)


def _no_derivative(operation: dispatch.Operation, primals, tangents, **params):
    del primals, tangents, params
    raise NotImplementedError(
        f"flash_attention: {operation.name} has no derivative: second-order gradients are not"
        " implemented; use jax.nn.dot_product_attention where they are needed"
    )


def _define(name, abstract, backward: bool) -> dispatch.Operation:
    def partition(*avals, fields, spec, bias_gradient=False):
        del spec
        names = (*fields, *BACKWARD_OPERANDS) if backward else fields
        results = gradients_of(fields, bias_gradient) if backward else RESULTS
        return _partition(names, [a.shape for a in avals], results, backward=backward)

    operation = dispatch.Operation(
        name,
        public_name="flash_attention",
        family="attention",
        inputs=workload.inputs,
        abstract=abstract,
        batch=lambda arrays, dims, **params: _batch(operation, arrays, dims, **params),
        partition=partition,
    )
    ad.primitive_jvps[operation.primitive] = functools.partial(_no_derivative, operation)
    return operation


flash_attention_fwd = _define(
    "flash_attention_fwd",
    functools.partial(_forward_by, reference.forward, config=None),
    backward=False,
)
flash_attention_bwd = _define(
    "flash_attention_bwd",
    functools.partial(_backward_by, reference.backward, config=None),
    backward=True,
)

_CHUNKED = tuning.Tunable(
    chunked.Config, workload.key, candidates=chunked.candidates, heuristic=chunked.heuristic
)
for _operation, _by, _blocked, _plain in (
    (flash_attention_fwd, _forward_by, chunked.forward, reference.forward),
    (flash_attention_bwd, _backward_by, chunked.backward, reference.backward),
):
    _operation.register(
        "xla",
        dispatch.Implementation(
            functools.partial(_by, _blocked), refuse=chunked.refuse, tunable=_CHUNKED
        ),
    )
    _operation.register(
        "reference", dispatch.Implementation(functools.partial(_by, _plain), automatic=False)
    )


# These bring Pallas, which takes a while to import.
def _mosaic_forward(operands: Operands, spec: Spec, config):
    from pallas_ops.attention import mosaic_fwd

    return mosaic_fwd.forward(operands, spec, config)


def _mosaic_backward(*args):
    from pallas_ops.attention import mosaic_bwd

    return mosaic_bwd.backward(*args)


for _operation, _run, _refuse, _tunable in (
    (
        flash_attention_fwd,
        functools.partial(_forward_by, _mosaic_forward),
        mosaic_config.refuse,
        tuning.Tunable(
            mosaic_config.Config,
            workload.key,
            candidates=mosaic_config.candidates,
            heuristic=mosaic_config.heuristic,
        ),
    ),
    (
        flash_attention_bwd,
        functools.partial(_backward_by, _mosaic_backward),
        mosaic_config.refuse_backward,
        tuning.Tunable(
            mosaic_config.BackwardConfig,
            workload.key,
            candidates=mosaic_config.backward_candidates,
            heuristic=mosaic_config.backward_heuristic,
        ),
    ),
):
    _operation.register(
        "mosaic_gpu",
        dispatch.Implementation(
            _run,
            refuse=_refuse,
            refuse_device=chips.not_hopper,
            platforms=("cuda",),
            tunable=_tunable,
            interpretable=True,
        ),
    )
