"""The tuner with no GPU: candidates compiled in processes of their own, the bad ones dropped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEP = """
import dataclasses

import jax
import jax.numpy as jnp

import pallas_ops
from pallas_ops import dispatch, tuning
from pallas_ops.attention.primitive import flash_attention_fwd
from tests.compile import toys


@dataclasses.dataclass(frozen=True)
class Config:
    kind: str


def run(query, key, value, *rest, config, **params):
    if config.kind == "lethal":
        import os
        os._exit(7)
    x = toys.kernel(config.kind)()[0, 0].astype(query.dtype)
    return jnp.broadcast_to(x, query.shape), jnp.broadcast_to(x, query.shape[:3])


tunable = tuning.Tunable(
    Config,
    lambda *avals, **params: {},
    candidates=lambda *avals, **params: [Config(k) for k in ("spilling", "greedy", LETHAL)],
    heuristic=lambda kind, *avals, **params: Config("healthy"),
)
flash_attention_fwd.register(
    "mosaic_gpu", dispatch.Implementation(run, platforms=("cuda",), tunable=tunable)
)


def step():
    x = jax.ShapeDtypeStruct((1, 64, 1, 64), jnp.float32)
    return lambda q: pallas_ops.flash_attention(q, q, q), (x,)
"""


@pytest.mark.parametrize("lethal", [False, True])
def test_candidates_are_compiled_and_the_bad_ones_dropped(tmp_path, lethal):
    (tmp_path / "toy_step.py").write_text(
        STEP.replace("LETHAL", repr("lethal" if lethal else "healthy"))
    )
    command = [
        sys.executable,
        "-m",
        "pallas_ops.tune",
        "program",
        "toy_step:step",
        "--chip",
        "h200",
    ]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    lines = {
        line.partition("kind='")[2].partition("'")[0]: line.partition("): ")[2]
        for line in done.stdout.splitlines()
        if "Config(" in line
    }
    assert lines["healthy"] == "not timed"
    assert "registers are spilled" in lines["spilling"]
    assert "exceeds available shared memory" in lines["greedy"]
    if lethal:
        assert lines["lethal"] == "the compiler ended its process"
    assert "stored" not in done.stdout
    assert f"Compiled for h200: {len(lines)} candidates of GPU kernels" in done.stderr
