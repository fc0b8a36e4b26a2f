"""What heuristics give is what kernels take, at any size."""

import functools
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp

import pallas_ops
from pallas_ops.attention.primitive import flash_attention_fwd
from pallas_ops.grouped_matmul.primitive import ragged_dot_op


@hypothesis.given(
    b=st.integers(1, 64),
    t=st.integers(1, 2**17),
    s=st.integers(1, 2**17),
    heads=st.sampled_from([1, 3, 8, 64]),
    h=st.sampled_from([1, 64, 80, 256]),
)
def test_attention_heuristics_fit(b, t, s, heads, h):
    avals = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((b, t, heads, h), (b, s, 1, h))]
    avals.append(avals[1])
    call = functools.partial(pallas_ops.flash_attention, is_causal=True)
    check_fit(flash_attention_fwd, avals, call)


@hypothesis.given(
    m=st.integers(1, 2**20),
    k=st.integers(1, 8192),
    n=st.integers(1, 8192),
    groups=st.integers(1, 1024),
)
def test_grouped_heuristics_fit(m, k, n, groups):
    avals = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in ((m, k), (groups, k, n))]
    avals.append(jax.ShapeDtypeStruct((groups,), jnp.int32))
    check_fit(ragged_dot_op, avals, pallas_ops.ragged_dot)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def check_fit(operation, avals, f):
    """Every implementation's heuristic gives a config that it does not refuse."""
    eqns = equations(jax.make_jaxpr(f)(*avals).jaxpr)
    eqn = next(e for e in eqns if e.primitive is operation.primitive)
    params = {k: v for k, v in eqn.params.items() if k not in ("implementation", "config")}
    types = [x.aval for x in eqn.invars]
    for entry in operation.implementations.values():
        if entry.tunable is None or entry.refuse(*types, config=None, **params) is not None:
            continue
        for kind in (None, "cpu", "NVIDIA H200"):
            chosen = entry.tunable.heuristic(kind, *types, **params)
            assert type(chosen) is entry.tunable.config_type
            assert entry.refuse(*types, config=chosen, **params) is None
        assert json.dumps(entry.tunable.key(*types, **params))
        tried = entry.tunable.candidates(*types, **params)
        assert all(type(c) is entry.tunable.config_type for c in tried)
