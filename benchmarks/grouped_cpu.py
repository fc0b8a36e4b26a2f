"""Grouped matmul on this CPU, ours beside `jax.lax.ragged_dot`: time and temporary memory.

    python -m benchmarks.grouped_cpu --out FILE.json

Writes one JSON object per line. `ms` is the median of the repeats, `ms_spread` the distance between
their quartiles, `temp_bytes` what the compiled program says that it needs beside its arguments and
results.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import subprocess
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_ops.grouped_matmul import ragged_dot, ragged_dot_contracting

CONTRACTING = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def lax_contracting(lhs, rhs, sizes):
    return lax.ragged_dot_general(lhs, rhs, sizes, CONTRACTING)


def backward(f):
    def run(lhs, rhs, ct, sizes):
        return jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes), lhs, rhs)[1](ct)

    return run


def cases(m, k, n, g, dtype, rng):
    """(case, direction, operands, right values, {implementation: function}, products)."""
    sizes = np.bincount(rng.integers(0, g, m), minlength=g).astype(np.int32)
    x, w, y, v = (rng.normal(size=s).astype(dtype) for s in ((m, k), (g, k, n), (m, n), (g, k, n)))
    rows = [slice(e - s, e) for s, e in zip(sizes, np.cumsum(sizes))]

    def by_group(f):
        return [
            f(*(np.asarray(a, np.float64) for a in (x[r], w[i], y[r], v[i])))
            for i, r in enumerate(rows)
        ]

    out = np.concatenate(by_group(lambda x, w, y, v: x @ w))
    dx = np.concatenate(by_group(lambda x, w, y, v: y @ w.T))
    dw = np.stack(by_group(lambda x, w, y, v: x.T @ y))
    cx = np.concatenate(by_group(lambda x, w, y, v: y @ v.T))
    cy = np.concatenate(by_group(lambda x, w, y, v: x @ v))
    shape = f"m{m} k{k} n{n} g{g} {dtype}"
    plain = {"xla": ragged_dot, "jax.lax:ragged_dot": lax.ragged_dot}
    contracting = {"xla": ragged_dot_contracting, "jax.lax:ragged_dot_general": lax_contracting}
    gradients = [{name: backward(f) for name, f in fs.items()} for fs in (plain, contracting)]
    return [
        (f"ragged_dot {shape}", "fwd", (x, w, sizes), (out,), plain, 1),
        (f"ragged_dot {shape}", "bwd", (x, w, y, sizes), (dx, dw), gradients[0], 2),
        (f"ragged_dot_contracting {shape}", "fwd", (x, y, sizes), (dw,), contracting, 1),
        (f"ragged_dot_contracting {shape}", "bwd", (x, y, v, sizes), (cx, cy), gradients[1], 2),
    ]


def measure(f, operands, right, repeats):
    started = time.perf_counter()
    compiled = jax.jit(f).lower(*operands).compile()
    result = {
        "compile_s": round(time.perf_counter() - started, 3),
        "temp_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    }
    operands = [jnp.asarray(x) for x in operands]
    for ours, exact in zip(jax.tree.leaves(compiled(*operands)), right):
        error = np.abs(np.asarray(ours, np.float64) - exact).max() / np.abs(exact).max()
        if not error < 1e-5:
            return {**result, "error": f"wrong: relative error {error:.1e}"}
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(compiled(*operands))
        times.append(1e3 * (time.perf_counter() - started))
    low, median, high = np.percentile(times, [25, 50, 75])
    return {**result, "ms": round(median, 3), "ms_spread": round(high - low, 3)}


def cpu_name():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    for name, default in (("m", 4096), ("k", 512), ("n", 512), ("g", 64), ("repeats", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    shape = dict(m=args.m, k=args.k, n=args.n, g=args.g)
    fixed = dict(
        device=cpu_name(),
        jax=jax.__version__,
        driver=None,
        commit=commit or None,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )
    lines = []
    rng = np.random.default_rng(0)
    for case, direction, operands, right, functions, products in cases(
        **shape, dtype="float32", rng=rng
    ):
        for implementation, f in functions.items():
            row = dict(
                op="grouped_matmul", direction=direction, implementation=implementation, case=case
            )
            row |= shape | dict.fromkeys(("ms", "ms_spread", "tflops", "compile_s", "temp_bytes"))
            row |= fixed | dict(error=None)
            try:
                row |= measure(f, operands, right, args.repeats)
            except NotImplementedError as e:
                row["error"] = f"refused: {str(e).splitlines()[0] if str(e) else type(e).__name__}"
            if row["ms"] is not None:
                operations = 2 * args.m * args.k * args.n * products
                row["tflops"] = round(operations / row["ms"] / 1e9, 4)
            lines.append(json.dumps(row))
            print(
                f"{case:55s} {direction} {implementation:27s} {row['ms']} ms (spread"
                f" {row['ms_spread']}), temporary {row['temp_bytes']} bytes {row['error'] or ''}"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
