"""Programs as command lines name them: functions and the types of their arguments."""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import pallas_ops

Program = tuple[Callable[..., Any], Sequence[Any]]


def named(name: str) -> Program:
    """The `(f, args)` that the function `module:function` returns; a ValueError says why none."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        raise ValueError(f"a program is named module:function, got {name!r}")
    module, _, attribute = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ValueError(f"{module} can't be imported: {error}") from error
    try:
        inspect.signature(function).bind()  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a function of no arguments: {error}") from error
    result = function()  # pyright: ignore[reportOptionalCall]
    pair = isinstance(result, tuple | list) and len(result) == 2
    if not pair or not callable(result[0]) or not isinstance(result[1], tuple | list):
        raise ValueError(f"{name} must return (f, args), a function and a sequence; got {result!r}")
    for x in jax.tree.leaves(result[1]):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise ValueError(f"the args of {name} must be jax.ShapeDtypeStructs, got {x!r}")
    return result[0], result[1]


def attention(options) -> Program:
    """The call that `pallas_ops.tune attention` describes."""
    given = lambda size, default: default if size is None else size
    s, kv_heads = given(options.kv_length, options.length), given(options.kv_heads, options.heads)
    shapes = [
        (options.batch, options.length, options.heads, options.head_dim),
        (options.batch, s, kv_heads, options.head_dim),
        (options.batch, s, kv_heads, given(options.v_head_dim, options.head_dim)),
    ]
    arrays = [jax.ShapeDtypeStruct(x, options.dtype) for x in shapes]
    keywords: dict[str, Any] = dict(
        is_causal=options.causal,
        local_window_size=tuple(options.window) if options.window else None,
        implementation=options.implementation,
    )
    if options.segments:
        arrays += [jax.ShapeDtypeStruct((options.batch, n), jnp.int32) for n in (options.length, s)]

    def attend(query, key, value, *segments):
        names = ("q_segment_ids", "kv_segment_ids")
        return pallas_ops.flash_attention(
            query, key, value, **dict(zip(names, segments)), **keywords
        )

    return attend, arrays


def grouped(options) -> Program:
    """The call that `pallas_ops.tune grouped` describes."""
    shapes = [(options.rows, options.k), (options.groups, options.k, options.n)]
    given = [jax.ShapeDtypeStruct(x, options.dtype) for x in shapes]

    def product(lhs, rhs, group_sizes):
        return pallas_ops.ragged_dot(
            lhs,
            rhs,
            group_sizes,
            activation=options.activation,
            implementation=options.implementation,
        )

    return product, [*given, jax.ShapeDtypeStruct((options.groups,), jnp.int32)]


def with_gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f`, and beside it its value with its gradients in all that is floating."""

    def run(*args):
        floating = [jnp.issubdtype(x.dtype, jnp.floating) for x in args]
        inputs = [x for x, is_float in zip(args, floating) if is_float]

        def of_floating(*inputs):
            rest = iter(inputs)
            return f(*(next(rest) if is_float else x for x, is_float in zip(args, floating)))

        value, pullback = jax.vjp(of_floating, *inputs)
        return f(*args), value, pullback(value)

    return run
