"""jax.export for cpu and cuda together, read back and called in another process."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting
from tests.grouped_matmul.test_values import normal

M, K, N, G = 13, 3, 4, 4
SIZES = np.array([3, 0, 5, 2], np.int32)

# A cumsum in a lowering aborts the process that calls the program, hence a process of its own.
CALL = """
import sys
import jax
import numpy as np

folder = sys.argv[1]
for name in sys.argv[2:]:
    with open(f"{folder}/{name}.bin", "rb") as file:
        exported = jax.export.deserialize(bytearray(file.read()))
    data = np.load(f"{folder}/{name}.npz")
    operands = [data[f"arg{i}"] for i in range(len(exported.in_avals))]
    for i, out in enumerate(jax.tree.leaves(exported.call(*operands))):
        np.testing.assert_allclose(out, data[f"out{i}"], rtol=1e-5, atol=1e-5)
    assert set(exported.platforms) == {"cpu", "cuda"}, exported.platforms
print("called", len(sys.argv) - 2)
"""


def functions():
    def fused(lhs, rhs, sizes, bias):
        return ragged_dot(lhs, rhs, sizes, bias=bias, activation="swiglu")

    def grads(lhs, rhs, sizes, bias):
        return jax.grad(lambda *x: jnp.sum(jnp.sin(fused(x[0], x[1], sizes, x[2]))), (0, 1, 2))(
            lhs, rhs, bias
        )

    def vmapped(lhs, rhs, sizes, bias):
        many = jnp.stack([lhs, lhs[::-1]])
        return jax.vmap(fused, (0, None, None, None))(many, rhs, sizes, bias)

    def vmapped_rhs(lhs, rhs, sizes, bias):
        return jax.vmap(fused, (None, 0, None, None))(lhs, jnp.stack([rhs, -rhs]), sizes, bias)

    def offset(lhs, rhs, sizes, bias):
        return ragged_dot(lhs, rhs[:2], sizes, group_offset=sizes[0] - 2)

    def contracting(lhs, rhs, sizes, bias):
        other = lhs @ rhs[0]
        return ragged_dot_contracting(lhs, other, sizes, accumulate=rhs)

    def contracting_grad(lhs, rhs, sizes, bias):
        run = lambda x: jnp.sum(jnp.sin(ragged_dot_contracting(x, x, sizes)))
        return jax.grad(run)(lhs)

    return [fused, grads, vmapped, vmapped_rhs, offset, contracting, contracting_grad]


def test_exported_for_cpu_and_cuda_and_called_elsewhere(tmp_path, rng):
    pytest.importorskip("flatbuffers")
    args = normal(rng, (M, K)), normal(rng, (G, K, N)), jnp.asarray(SIZES), normal(rng, (G, N))
    names = []
    for f in functions():
        exported = jax.export.export(jax.jit(f), platforms=("cpu", "cuda"))(*args)
        used = [np.asarray(x) for x in args]
        outs = [np.asarray(x) for x in jax.tree.leaves(jax.jit(f)(*args))]
        (tmp_path / f"{f.__name__}.bin").write_bytes(exported.serialize())
        np.savez(
            tmp_path / f"{f.__name__}.npz",
            **{f"arg{i}": x for i, x in enumerate(used)},
            **{f"out{i}": x for i, x in enumerate(outs)},
        )
        names.append(f.__name__)
    done = subprocess.run(
        [sys.executable, "-c", CALL, str(tmp_path), *names],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"called {len(names)}" in done.stdout


def test_derivative_of_an_exported_function(rng):
    pytest.importorskip("flatbuffers")
    lhs, rhs = normal(rng, (M, K)), normal(rng, (G, K, N))
    f = lambda x, w: ragged_dot(x, w, SIZES, activation="silu")
    exported = jax.export.export(jax.jit(f))(lhs, rhs)
    loaded = jax.export.deserialize(exported.serialize(vjp_order=1))
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(loaded.call(x, rhs))))(lhs)
    right = jax.grad(lambda x: jnp.sum(jnp.sin(f(x, rhs))))(lhs)
    np.testing.assert_allclose(grad, right, rtol=1e-5, atol=1e-5)


def test_lowers_for_cuda():
    f = jax.jit(jax.grad(lambda w, x: jnp.sum(ragged_dot(x, w, SIZES, activation="geglu"))))
    args = jnp.ones((G, K, N)), jnp.ones((M, K))
    assert "stablehlo.while" in f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
