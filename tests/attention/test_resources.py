"""Memory, blocks visited and compilations: what a call costs beside its result."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops.attention import chunked
from tests.attention import cases
from tests.attention.cases import BLOCKED, REFERENCE, each_implementation

N, K, H = 4, 2, 16

MEMORY = {
    "causal": lambda t: {"is_causal": True, "q_offset": jnp.zeros((1,), jnp.int32)},
    "everything": lambda t: {
        "q_segment_ids": jnp.zeros((1, t), jnp.int32),
        "kv_segment_ids": jnp.zeros((1, t), jnp.int32),
        "key_value_seq_lengths": jnp.zeros((1,), jnp.int32),
        "bias": jnp.zeros((N, 1, t), jnp.float32),
        "mask": jnp.zeros((1, t), bool),
        "sinks": jnp.zeros((N,), jnp.float32),
        "local_window_size": (100, 0),
        "logits_soft_cap": 2.0,
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
    },
}


def _temporary(f, t, options):
    """Bytes of temporary memory, of shapes alone."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array)}
    statics = {n: x for n, x in options.items() if n not in arrays}
    arrays = jax.eval_shape(lambda: arrays)
    call = lambda q, k, v, arrays: f(lambda *x: pallas_ops.flash_attention(*x, **arrays, **statics),
                                     q, k, v)  # fmt: skip
    lowered = jax.jit(call).lower(shape(1, t, N, H), shape(1, t, K, H), shape(1, t, K, H), arrays)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def _forward(attention, *qkv):
    return attention(*qkv)


def _backward(attention, *qkv):
    return jax.grad(lambda qkv: jnp.sum(jnp.sin(attention(*qkv))))(qkv)


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("direction", [_forward, _backward])
@pytest.mark.parametrize("name", MEMORY)
def test_temporary_memory_is_linear(name, direction):
    lengths = (4096, 8192)
    short, long = (_temporary(direction, t, MEMORY[name](t)) for t in lengths)
    assert long < 2.3 * short
    # The matrix of scores would take N times this.
    assert long < lengths[1] ** 2 * 4 / 4


@pytest.mark.usefixtures("fully_optimised")
def test_memory_measure_sees_a_quadratic_call():
    plain = lambda attention, q, k, v: jax.nn.dot_product_attention(q, k, v)
    short, long = (_temporary(plain, t, {}) for t in (512, 1024))
    assert long > 3.5 * short


_VISITED = []  # shared by the tests, since they may share a compiled function


@pytest.fixture
def visits(monkeypatch):
    """Counts the tiles that a call computes, by a callback inside the function that scores one."""
    inner = chunked.tiles.logits

    def logits(*args, **kwargs):
        jax.debug.callback(lambda: _VISITED.append(1))
        return inner(*args, **kwargs)

    monkeypatch.setattr(chunked.tiles, "logits", logits)

    def visits(statics, arrays):
        _VISITED.clear()
        x = jnp.ones((1, 64, 1, 2), jnp.float32)
        blocked = dataclasses.replace(BLOCKED, config=chunked.Config(16, 16))
        _, pull = jax.vjp(lambda x: blocked(x, x, x, **statics, **arrays), x)
        jax.effects_barrier()
        forward = len(_VISITED)
        jax.block_until_ready(pull(x))
        jax.effects_barrier()
        return forward, len(_VISITED) - forward

    return visits


SEGMENTS = np.repeat(np.arange(4, dtype=np.int32), 16)[None]
NEUTRAL = {
    "q_offset": np.array([0], np.int32),
    "key_value_seq_lengths": np.array([64], np.int32),
    "query_seq_lengths": np.array([64], np.int32),
    "q_segment_ids": 0 * SEGMENTS,
    "kv_segment_ids": 0 * SEGMENTS,
}
# Of 4 x 4 blocks of 16: static arguments, arrays other than the neutral ones, blocks to visit.
BLOCKS = [
    ({}, {}, 16),
    ({}, {"key_value_seq_lengths": np.array([17], np.int32)}, 8),
    ({}, {"query_seq_lengths": np.array([16], np.int32)}, 4),
    ({}, {"key_value_seq_lengths": np.array([0], np.int32)}, 0),
    ({}, {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}, 4),
    ({}, {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS[:, ::-1]}, 4),
    ({"is_causal": True}, {}, 10),
    ({"is_causal": True}, {"q_offset": np.array([-32], np.int32)}, 3),
    ({"is_causal": True}, {"q_segment_ids": SEGMENTS // 2, "kv_segment_ids": SEGMENTS // 2}, 6),
    ({"local_window_size": (16, 0)}, {}, 7),
    ({"local_window_size": (0, 15)}, {}, 7),
    ({"local_window_size": (0, 15)}, {"q_offset": np.array([64], np.int32)}, 0),
]


@pytest.mark.parametrize(("statics", "arrays", "expected"), BLOCKS)
def test_blocks_that_nobody_sees_are_skipped(statics, arrays, expected, visits):
    assert visits(statics, NEUTRAL | arrays) == (expected, expected)


def _calls(count):
    """Operands whose values differ and whose shapes do not."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield {
            "key_value_seq_lengths": rng.integers(0, 9, 2).astype(np.int32),
            "query_seq_lengths": rng.integers(0, 6, 2).astype(np.int32),
            "q_segment_ids": rng.integers(0, 3, (2, 5)).astype(np.int32),
            "kv_segment_ids": rng.integers(0, 3, (2, 8)).astype(np.int32),
            "q_offset": rng.integers(-3, 9, 2).astype(np.int32),
            "mask": rng.random((2, 1, 1, 8)) < 0.5,
            "sinks": rng.normal(size=2).astype(np.float32),
            "dropout_key": jax.random.key(int(rng.integers(100))),
        }


QKV = [jnp.ones((2, t, 2, 4), jnp.float32) for t in (5, 8, 8)]


def _gradient(qkv, arrays, **options):
    f = lambda qkv: BLOCKED(*qkv, **arrays, is_causal=True, dropout_rate=0.1, **options)
    return jax.grad(lambda qkv: jnp.sum(jnp.sin(f(qkv))))(qkv)


def test_a18_values_never_recompile():
    """vllm#27178: one compilation for 50 values of every array argument."""
    traces = []

    @jax.jit
    def f(qkv, arrays):
        traces.append(1)
        return _gradient(qkv, arrays)

    for arrays in _calls(50):
        f(QKV, arrays)
    assert len(traces) == 1


@pytest.fixture
def compilations():
    """The number of compilations so far."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield lambda: len(seen)
    jax.monitoring.unregister_event_duration_listener(listen)


@each_implementation
def test_a18_values_never_recompile_outside_jit(implementation, compilations):
    run = lambda arrays, **options: implementation(*QKV, dropout_rate=0.1, **arrays, **options)
    calls = list(_calls(12))
    for arrays in calls[:2]:
        run(arrays)
    before = compilations()
    assert before > 0
    for arrays in calls:
        run(arrays)
    assert compilations() == before


def test_a18_python_offset_does_not_recompile(compilations):
    """A decode loop that counts in Python."""
    for i in (1, 2):
        BLOCKED(*QKV, is_causal=True, q_offset=i)
    before = compilations()
    for i in range(3, 20):
        BLOCKED(*QKV, is_causal=True, q_offset=i)
    assert compilations() == before


def test_a18_one_compilation_for_each_shape(compilations):
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return BLOCKED(x, x, x)

    for t in (3, 4, 5, 4, 3, 5):
        f(jnp.ones((1, t, 1, 2), jnp.float32))
    assert len(traces) == 3


def test_a18_static_values_are_part_of_the_key():
    """b12x#52: what is compiled for one scale, cap or window is not used for another."""
    inputs = cases.inputs("plain")
    floats = {n: jnp.asarray(x, jnp.float32) for n, x in inputs.floats.items()}
    first = REFERENCE(**floats, scale=1.0)
    outs = [
        first,
        REFERENCE(**floats, scale=0.5),
        REFERENCE(**floats, logits_soft_cap=1.0),
    ]
    outs += [REFERENCE(**floats, local_window_size=w, scale=1.0) for w in (1, (1, 2), (None, 1))]
    for i, a in enumerate(outs):
        assert all(np.abs(a - b).max() > 1e-3 for b in outs[:i])
    np.testing.assert_array_equal(REFERENCE(**floats, scale=1), first)
