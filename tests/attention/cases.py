"""Named attention calls, their inputs, and one way to run each and to compare it with float64.

To test another implementation, add it to IMPLEMENTATIONS: every test that is about results reruns.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.attention import chunked
from tests.attention import numpy_reference


@dataclasses.dataclass(frozen=True)
class Implementation:
    name: str
    config: Any = None
    tolerance: float = 1e-5  # float32, relative to the largest value

    def __call__(self, *args, **kwargs):
        kwargs = {"implementation": self.name, "config": self.config} | kwargs
        return pallas_ops.flash_attention(*args, **kwargs)


# Blocks so small that every case runs several of them, the last one cut short.
BLOCKED = Implementation("xla", chunked.Config(block_q=4, block_kv=8))
REFERENCE = Implementation("reference")
IMPLEMENTATIONS = [BLOCKED, REFERENCE]

each_implementation = pytest.mark.parametrize(
    "implementation", IMPLEMENTATIONS, ids=lambda implementation: implementation.name
)

DIMENSIONS = {"B": 2, "T": 9, "S": 21, "N": 4, "K": 2, "H": 8, "Hv": 6}
FLOATS = ("query", "key", "value", "bias", "sinks")  # differentiable, in this order
ARRAYS = (
    "mask",
    "q_offset",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "q_segment_ids",
    "kv_segment_ids",
    "dropout_key",
)

# Cases that differ in values only (lengths, offsets, ids) share one compiled function: keep it so.
# "mask" and "bias" give shapes, one letter an axis, "1" where it broadcasts.
CASES: dict[str, dict] = {
    "plain": {},
    "mask_full": {"mask": "BNTS", "bias": "TS", "N": 3, "K": 1, "scale": 0.07},
    "mask_of_keys": {"mask": "B11S", "bias": "BNTS", "bias_inf": 0.3},
    "mask_of_rows": {"mask": "11T1", "bias": "1N11", "N": 3, "K": 3, "H": 4, "Hv": 20, "scale": 1},
    "mask_of_heads": {"mask": "N11", "density": 0.5, "bias": "B11S", "bias_inf": 0.3},
    "mask_rank2": {"mask": "TS", "bias": ""},
    "mask_rank1": {"mask": "S", "bias": "1NT1"},
    "mask_nothing": {"mask": "S", "bias": "1NT1", "density": 0.0},
    "causal": {"is_causal": True},
    "causal_offsets": {"is_causal": True, "q_offset": [12, -4]},
    "causal_past_the_end": {"is_causal": True, "q_offset": [40, 20]},
    "causal_before_the_start": {"is_causal": True, "q_offset": [-9, -6]},
    "window_left_open": {"local_window_size": (None, 1), "q_offset": [12, -3]},
    "window_right_open": {"local_window_size": (2, None), "q_offset": [3, -20]},
    "window_causal": {"local_window_size": (3, 5), "is_causal": True, "q_offset": [12, 3]},
    "kv_lengths": {"key_value_seq_lengths": [13, 0]},
    "kv_lengths_clamped": {"key_value_seq_lengths": [-3, 99]},
    "q_lengths": {"query_seq_lengths": [5, 0]},
    "q_lengths_clamped": {"query_seq_lengths": [99, -1]},
    "segments": {"segments": 3},
    "segments_shuffled": {"segments": 3, "shuffled": True},
    "soft_cap": {"logits_soft_cap": 1.5, "bias": "1NTS"},
    "sinks_and_dead_rows": {"sinks": True, "query_seq_lengths": [5, 0]},
    "dropout": {"dropout_rate": 0.4},
}

# Features in pairs: every static feature at once, and array features that are there in every case
# but, where they are not named, with values that do nothing.
TOGETHER = {
    "is_causal": True,
    "local_window_size": (14, 3),
    "logits_soft_cap": 1.5,
    "dropout_rate": 0.3,
    "scale": 0.4,
    "N": 6,
    "K": 2,
    "Hv": 11,
}
ARRAY_FEATURES = {
    "q_offset": ([10, 3], [12, 12]),
    "query_seq_lengths": ([7, 9], [9, 9]),
    "key_value_seq_lengths": ([20, 9], [21, 21]),
    "segments": (2, 1),
    "mask": (0.75, 1.0),
    "bias": (0.15, 0.0),
    "sinks": (True, -np.inf),
}


def _pairs():
    """Named cases in which any two array features meet, and each is absent beside every other."""
    names = list(ARRAY_FEATURES)
    wanted = {(a, b, x) for a, b in itertools.permutations(names, 2) for x in (True, False)}
    rng = np.random.default_rng(0)
    drawn = [{n: bool(rng.integers(2)) for n in names} for _ in range(100)]
    covers = lambda on: {(a, b, on[b]) for a, b in itertools.permutations(names, 2) if on[a]}
    while wanted:
        best = max(drawn, key=lambda on: len(wanted & covers(on)))
        wanted -= covers(best)
        value = {n: ARRAY_FEATURES[n][0 if on else 1] for n, on in best.items()}
        case = TOGETHER | {n: x for n, x in value.items() if n not in ("mask", "bias")}
        case |= {
            "mask": "B1TS",
            "density": value["mask"],
            "bias": "1NTS",
            "bias_inf": value["bias"],
        }
        yield "with_" + "_".join(n for n in names if best[n]), case


PAIRS = dict(_pairs())
CASES |= PAIRS

# What the plain implementation shares with the blocked one and needs no second compilation.
SHARED = ("mask_full", "mask_rank", "mask_nothing", "q_lengths", "window", "causal_")


def each_call(*needed, but=()):
    """Parametrises a test over implementations and the cases that have any of these arguments."""
    named = [n for n, case in CASES.items() if not needed or set(needed) & set(case)]
    named = [n for n in named if n not in but]
    skipped = lambda name, implementation: implementation is REFERENCE and name.startswith(SHARED)
    calls = [(n, i) for n in named for i in IMPLEMENTATIONS if not skipped(n, i)]
    return pytest.mark.parametrize(
        ("name", "implementation"), calls, ids=[f"{n}-{i.name}" for n, i in calls]
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    floats: dict  # FLOATS that the case has
    arrays: dict  # ARRAYS that the case has
    statics: dict  # Python arguments
    dout: Any
    dlse: Any

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)


def rounded(x, dtype):
    """x as float64, having gone through dtype."""
    return np.asarray(jnp.asarray(x, dtype)).astype(np.float64)


def inputs(name: str, case: dict | None = None, dtype=jnp.float32) -> Inputs:
    case = dict(CASES[name] if case is None else case)
    size = {n: case.pop(n, default) for n, default in DIMENSIONS.items()}
    B, T, S, N, K, H, Hv = size.values()
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    shaped = lambda letters: tuple(1 if a == "1" else size[a] for a in letters)
    normal = lambda *shape: rounded(rng.normal(size=shape), dtype)

    floats = {"query": normal(B, T, N, H), "key": normal(B, S, K, H), "value": normal(B, S, K, Hv)}
    arrays = {}
    holes = case.pop("bias_inf", 0)
    if "bias" in case:
        bias = normal(*shaped(case.pop("bias")))
        floats["bias"] = np.where(rng.random(bias.shape) < holes, -np.inf, bias)
    if sinks := case.pop("sinks", False):
        floats["sinks"] = normal(N) if sinks is True else np.full(N, sinks)
    density = case.pop("density", 0.75)
    if "mask" in case:
        arrays["mask"] = rng.random(shaped(case.pop("mask"))) < density
    for array in ("q_offset", "query_seq_lengths", "key_value_seq_lengths"):
        if isinstance(case.get(array), list):
            arrays[array] = np.resize(np.array(case.pop(array), np.int32), B)
    shuffled = case.pop("shuffled", False)
    if segments := case.pop("segments", 0):
        # Ids with no order, of which the keys lack the last where there are three.
        names = np.array([7, -1, 0][:segments], np.int32)
        for side, length, count in (("q", T, segments), ("kv", S, min(segments, 2))):
            ids = np.sort(rng.integers(0, count, (B, length)), axis=1)
            ids = rng.permuted(ids, axis=1) if shuffled else ids
            arrays[f"{side}_segment_ids"] = names[ids]
    if case.get("dropout_rate"):
        arrays["dropout_key"] = jax.random.key(len(name))
    return Inputs(floats, arrays, case, normal(B, T, N, Hv), normal(B, T, N))


@functools.cache
def _compiled(implementation, statics):
    def run(floats, arrays, dout, dlse):
        def call(floats):
            return implementation(**floats, **arrays, **dict(statics), return_residual=True)

        (out, lse), pull = jax.vjp(call, floats)
        (gradients,) = pull((dout, dlse))
        return {"out": out, "lse": lse} | gradients

    return jax.jit(run)


def run(implementation, inputs: Inputs, dtype=jnp.float32, **dtypes):
    """dict of out, lse and the gradient of every float operand; `dtypes` by operand name."""
    floats = {n: jnp.asarray(x, dtypes.get(n, dtype)) for n, x in inputs.floats.items()}
    arrays = {n: x if n == "dropout_key" else jnp.asarray(x) for n, x in inputs.arrays.items()}
    dlse = jnp.asarray(inputs.dlse, jnp.float64 if dtype == jnp.float64 else jnp.float32)
    compiled = _compiled(implementation, tuple(sorted(inputs.statics.items())))
    return compiled(floats, arrays, jnp.asarray(inputs.dout, dtype), dlse)


def kept(key, rate, B, T, S, N, K=1, implementation=REFERENCE, **kwargs):
    """The dropout mask bool[B, N, T, S], by the public call: uniform weights, one-hot values."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
    value = jnp.broadcast_to(jnp.eye(S, dtype=jnp.float32)[:, None], (B, S, K, S))
    out = implementation(
        zeros(B, T, N, 2), zeros(B, S, K, 2), value, dropout_rate=rate, dropout_key=key, **kwargs
    )
    return np.asarray(out).transpose(0, 2, 1, 3) > 0


def truth(inputs: Inputs):
    """What `run` should give, in float64."""
    statics, arrays = dict(inputs.statics), dict(inputs.arrays)
    shared = statics.pop("broadcast_dropout", False)
    if "dropout_key" in arrays:
        B, T, N, _ = inputs.floats["query"].shape
        S = inputs.floats["key"].shape[1]
        statics["dropout_keep"] = kept(
            arrays.pop("dropout_key"), statics["dropout_rate"], B, T, S, N, broadcast_dropout=shared
        )
    return numpy_reference.attention(
        **inputs.floats, **arrays, **statics, dout=inputs.dout, dlse=inputs.dlse
    )


def assert_near(actual, expected, tolerance=1e-5, name=""):
    """Equal up to `tolerance` times the largest finite value; the same infinities and NaNs."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    finite = np.isfinite(expected)
    size = 1 + np.max(np.abs(expected), where=finite, initial=0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size, err_msg=name)


def assert_all_near(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_near(actual[name], expected[name], tolerance, name)
