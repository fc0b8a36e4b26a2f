"""jax.export: for CPU and CUDA together, called by another process; symbolic sizes."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import pallas_ops
from tests.attention import cases
from tests.attention.cases import BLOCKED, REFERENCE

SCRIPT = """
import sys
import numpy as np
from jax import export
for path in sys.argv[1:]:
    data = np.load(path)
    exported = export.deserialize(bytearray(data["exported"].tobytes()))
    assert exported.platforms == ("cpu", "cuda")
    outs = exported.call(*[data[f"in{i}"] for i in range(len(exported.in_avals))])
    for i, out in enumerate(outs):
        np.testing.assert_allclose(np.asarray(out), data[f"out{i}"], rtol=1e-4, atol=1e-5)
    print("same", len(outs))
"""


def _everything():
    """A call with every feature and its gradients, as a function of a flat list of arrays."""
    inputs = cases.inputs("export", next(iter(cases.PAIRS.values())))
    floats = {n: x.astype(np.float32) for n, x in inputs.floats.items()}
    arrays = {n: x for n, x in inputs.arrays.items() if n != "dropout_key"}
    raw = np.asarray(jax.random.key_data(inputs.arrays["dropout_key"]))
    dout = inputs.dout.astype(np.float32)

    def call(raw, dout, *rest):
        floats_ = dict(zip(floats, rest))
        arrays_ = dict(zip(arrays, rest[len(floats) :]))
        key = jax.random.wrap_key_data(raw)
        f = lambda floats: pallas_ops.flash_attention(
            **floats, **arrays_, **inputs.statics, dropout_key=key
        )
        out, pull = jax.vjp(f, floats_)
        return out, *pull(dout)[0].values()

    return call, [raw, dout, *floats.values(), *arrays.values()]


def _plain():
    inputs = cases.inputs("plain")
    qkv = [x.astype(np.float32) for x in inputs.floats.values()]
    return lambda *x: pallas_ops.flash_attention(*x, return_residual=True), qkv


def test_exported_program_runs_in_another_process(tmp_path):
    """Both, rule 7: for two platforms, deserialised, forward and backward."""
    paths = []
    for name, (f, args) in {"plain": _plain(), "everything": _everything()}.items():
        exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(*args)
        outs = jax.jit(f)(*args)
        data = {f"in{i}": x for i, x in enumerate(args)} | {
            f"out{i}": x for i, x in enumerate(outs)
        }
        blob = np.frombuffer(exported.serialize(), np.uint8)
        paths.append(tmp_path / f"{name}.npz")
        np.savez(paths[-1], exported=blob, **data)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["same 2", "same 6"]


def test_gradient_of_an_exported_call():
    _, qkv = _plain()
    f = lambda *x: REFERENCE(*x, return_residual=True)
    loss = lambda f: lambda *x: jnp.sum(jnp.sin(f(*x)[0]))
    exported = export.export(jax.jit(f))(*qkv)
    again = export.deserialize(exported.serialize(vjp_order=1))
    for a, b in zip(
        jax.grad(loss(again.call), (0, 1, 2))(*qkv), jax.grad(loss(f), (0, 1, 2))(*qkv)
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# The lengths must be known where they are cut into blocks.
BATCH, LENGTHS = "b, 9, 4, 8; b, 21, 2, 8; b, 21, 2, 6", "b, t, 4, 8; b, s, 2, 8; b, s, 2, 6"


@pytest.mark.parametrize(
    ("implementation", "shapes"),
    [(pallas_ops.flash_attention, BATCH), (BLOCKED, BATCH), (REFERENCE, LENGTHS)],
    ids=["default", "xla", "reference"],
)
def test_symbolic_sizes(implementation, shapes):
    _, qkv = _plain()
    scope = export.SymbolicScope()
    specs = [
        jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), jnp.float32)
        for s in shapes.split(";")
    ]
    f = lambda *x: implementation(*x, is_causal=True)
    exported = export.export(jax.jit(f), platforms=("cpu", "cuda"))(*specs)
    for b in (1, 2):
        args = [x[:b] for x in qkv]
        np.testing.assert_allclose(exported.call(*args), f(*args), rtol=1e-5, atol=1e-6)


def test_symbolic_lengths_are_refused_by_name_where_they_are_cut():
    specs = [
        jax.ShapeDtypeStruct(export.symbolic_shape(s), jnp.float32)
        for s in ("2, t, 4, 8", "2, 9, 2, 8", "2, 9, 2, 6")
    ]
    for implementation in (None, "xla"):
        f = functools.partial(pallas_ops.flash_attention, implementation=implementation)
        with pytest.raises(NotImplementedError, match="'xla' can't serve this call: it cuts T=t"):
            jax.eval_shape(f, *specs)


def test_export_of_a_shard_map(make_mesh):
    """A program for several devices leaves the process only from inside shard_map."""
    mesh, P = make_mesh((8,), ("x",)), jax.sharding.PartitionSpec
    x = np.random.default_rng(0).normal(size=(8, 4, 2, 3)).astype(np.float32)
    f = jax.jit(
        jax.shard_map(
            lambda x: pallas_ops.flash_attention(x, x, x),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )
    exported = export.deserialize(export.export(f, platforms=("cpu", "cuda"))(x).serialize())
    placed = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("x")))
    np.testing.assert_allclose(jax.jit(exported.call)(placed), f(x), rtol=1e-5, atol=1e-6)
