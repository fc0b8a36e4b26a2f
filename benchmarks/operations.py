"""The two operations as they are measured: their operands, and their programs by direction."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_ops
from benchmarks import check
from benchmarks.shapes import PRODUCTS, AttentionShape, GroupedShape

Arrays = dict[str, jax.Array]
_GRADIENTS = ("query", "key", "value")


class Program(NamedTuple):
    run: Any
    compile_s: float
    temp_bytes: int | None


class Call(NamedTuple):
    """`run(*prepare(operands))` is what is timed, `outputs` names its results."""

    run: Callable[..., Any]
    prepare: Callable[[Arrays], Sequence[Any]]
    outputs: Callable[[Any], Arrays]
    compile_s: float
    temp_bytes: int | None


class Products(NamedTuple):
    """A grouped matmul: `forward(lhs, rhs, group_sizes)`, `dlhs(ct, rhs, group_sizes)` and
    `drhs(lhs, ct, group_sizes)`.
    """

    forward: Callable[..., jax.Array]
    dlhs: Callable[..., jax.Array]
    drhs: Callable[..., jax.Array]


def by_vjp(forward: Callable[..., jax.Array]) -> Products:
    """Both gradients of a differentiable grouped product, which depend on no value of their own."""

    def dlhs(ct, rhs, group_sizes):
        lhs = jnp.zeros((ct.shape[0], rhs.shape[1]), ct.dtype)
        return jax.vjp(lambda lhs: forward(lhs, rhs, group_sizes), lhs)[1](ct)[0]

    def drhs(lhs, ct, group_sizes):
        rhs = jnp.zeros((group_sizes.shape[0], lhs.shape[1], ct.shape[1]), lhs.dtype)
        return jax.vjp(lambda rhs: forward(lhs, rhs, group_sizes), rhs)[1](ct)[0]

    return Products(forward, dlhs, drhs)


def our_attention(implementation: str | None):
    """`pallas_ops.flash_attention` by one implementation, or by the one that None chooses."""

    def attend(operands: Arrays, shape: AttentionShape) -> jax.Array:
        return pallas_ops.flash_attention(
            **{name: x for name, x in operands.items() if name != "cotangent"},  # pyright: ignore
            is_causal=shape.causal,
            local_window_size=shape.window,
            implementation=implementation,
        )

    return attend


def our_grouped(implementation: str | None) -> Products:
    """`pallas_ops.ragged_dot` by one implementation, or by the one that None chooses."""
    return by_vjp(functools.partial(pallas_ops.ragged_dot, implementation=implementation))


DENSE = Products(
    lambda lhs, rhs, group_sizes: lhs @ rhs[0],
    lambda ct, rhs, group_sizes: ct @ rhs[0].T,
    lambda lhs, ct, group_sizes: (lhs.T @ ct)[None],
)


def _compile(f: Callable, *args) -> Program:
    started = time.perf_counter()
    compiled = jax.jit(f).lower(*args).compile()
    seconds = time.perf_counter() - started
    return Program(
        compiled, seconds, getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    )


def _most(temp_bytes: Sequence[int | None]) -> int | None:
    return None if None in temp_bytes else max(x or 0 for x in temp_bytes)


def attempt(f: Callable[[], Any]) -> Any:
    """What `f` returns or raises."""
    try:
        return f()
    except Exception as error:
        return error.with_traceback(None)  # frames would keep arrays alive


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed, dims, dtype: str) -> Arrays:
    def array(key, shape):
        if len(shape) != 3:
            return jax.random.normal(key, shape, jnp.dtype(dtype))
        # One matrix at a time: the bits of all would need as much memory again.
        return jax.lax.map(lambda key: array(key, shape[1:]), jax.random.split(key, shape[0]))

    keys = jax.random.split(jax.random.key(seed), len(dims))
    return {name: array(key, shape) for key, (name, shape) in zip(keys, dims)}


def _types(dims, dtype: str) -> dict[str, Any]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in dims}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Programs: forward, residuals (the forward that keeps them), backward, and both in one."""

    shape: AttentionShape

    @property
    def signature(self) -> Any:
        """What the programs depend on."""
        return self.shape

    @staticmethod
    def programs(direction: str) -> tuple[str, ...]:
        return {"fwd": ("forward",), "bwd": ("residuals", "backward"), "fwdbwd": ("both",)}[
            direction
        ]

    @property
    def _dims(self):
        s = self.shape
        return (
            ("query", (s.batch, s.q_len, s.heads, s.head_dim)),
            ("key", (s.batch, s.kv_len, s.kv_heads, s.head_dim)),
            ("value", (s.batch, s.kv_len, s.kv_heads, s.v_head_dim)),
            ("cotangent", (s.batch, s.q_len, s.heads, s.v_head_dim)),
        )

    def operands(self, seed: int) -> Arrays:
        arrays = _normal(seed, self._dims, self.shape.dtype)
        first, end = self.shape.visible()
        live = (end > first)[:, :, None, None]
        if not live.all():  # what a row that sees nothing gives is for each library to say
            arrays["cotangent"] = jnp.where(live, arrays["cotangent"], 0)
        return arrays | {name: jnp.asarray(x) for name, x in self.shape.arrays().items()}

    def check(self, operands: Arrays, directions: Sequence[str]) -> check.Check:
        return check.attention(self.shape, operands, gradients=set(directions) != {"fwd"})

    def compile(self, implementation: Callable, programs: Sequence[str]) -> dict[str, Any]:
        """A Program, or what was raised instead of it, for each of `programs`, and the split."""

        def attend(operands):
            return implementation(operands, self.shape)

        def residuals(operands):
            rest = {n: x for n, x in operands.items() if n not in _GRADIENTS}
            of_gradients = lambda *x: attend({**dict(zip(_GRADIENTS, x)), **rest})
            return jax.vjp(of_gradients, *(operands[n] for n in _GRADIENTS))

        def both(operands, ct):
            out, pull = residuals(operands)
            return out, pull(ct)

        operands = _types(self._dims, self.shape.dtype) | self.shape.arrays()
        ct = operands.pop("cotangent")
        made = {}
        if "forward" in programs:
            made["forward"] = attempt(lambda: _compile(attend, operands))
        if "both" in programs:
            made["both"] = attempt(lambda: _compile(both, operands, ct))
        if "residuals" in programs:
            kept = made["residuals"] = attempt(lambda: _compile(residuals, operands))
            made["backward"] = kept
            if isinstance(kept, Program):
                pull = kept.run.out_info[1]
                made["backward"] = attempt(lambda: _compile(lambda p, ct: p(ct), pull, ct))
        return made

    def call(self, made: Mapping[str, Any], direction: str) -> Call:
        def inputs(operands):
            return {n: x for n, x in operands.items() if n != "cotangent"}

        if direction == "fwd":
            forward = made["forward"]
            return Call(
                forward.run,
                lambda operands: (inputs(operands),),
                lambda out: {"out": out},
                *forward[1:],
            )
        if direction == "fwdbwd":
            both = made["both"]
            return Call(
                both.run,
                lambda operands: (inputs(operands), operands["cotangent"]),
                lambda results: {"out": results[0], **dict(zip(_GRADIENTS, results[1]))},
                *both[1:],
            )
        residuals, backward = made["residuals"], made["backward"]
        return Call(
            backward.run,
            lambda operands: (residuals.run(inputs(operands))[1], operands["cotangent"]),
            lambda gradients: dict(zip(_GRADIENTS, gradients)),
            *backward[1:],
        )


_PRODUCTS = {
    "out": ("forward", ("lhs", "rhs", "group_sizes")),
    "dlhs": ("dlhs", ("cotangent", "rhs", "group_sizes")),
    "drhs": ("drhs", ("lhs", "cotangent", "group_sizes")),
}


@dataclasses.dataclass(frozen=True)
class Grouped:
    """Programs: out, dlhs and drhs. Directions of several run them one after another."""

    shape: GroupedShape

    @property
    def signature(self) -> Any:
        """What the programs depend on: the sizes of groups are an operand."""
        return dataclasses.replace(self.shape, distribution="", model="")

    @staticmethod
    def programs(direction: str) -> tuple[str, ...]:
        return PRODUCTS[direction]

    @property
    def _dims(self):
        s = self.shape
        return (("lhs", (s.m, s.k)), ("rhs", (s.g, s.k, s.n)), ("cotangent", (s.m, s.n)))

    def operands(self, seed: int) -> Arrays:
        sizes = jnp.asarray(self.shape.group_sizes())
        return _normal(seed, self._dims, self.shape.dtype) | {"group_sizes": sizes}

    def check(self, operands: Arrays, directions: Sequence[str]) -> check.Check:
        names = dict.fromkeys(name for d in directions for name in PRODUCTS[d])
        return check.grouped(self.shape, operands, tuple(names))

    def compile(self, implementation: Any, programs: Sequence[str]) -> dict[str, Any]:
        """A Program, or what was raised instead of it, for each of `programs`."""
        avals = _types(self._dims, self.shape.dtype) | {"group_sizes": self.shape.group_sizes()}
        made = {}
        for program in programs:
            function, operands = _PRODUCTS[program]
            f, args = getattr(implementation, function), [avals[name] for name in operands]
            made[program] = attempt(functools.partial(_compile, f, *args))
        return made

    def call(self, made: Mapping[str, Any], direction: str) -> Call:
        names = self.programs(direction)
        parts = [made[name] for name in names]

        def run(operands):
            return [
                part.run(*(operands[x] for x in _PRODUCTS[n][1])) for n, part in zip(names, parts)
            ]

        return Call(
            run,
            lambda operands: (operands,),
            lambda results: dict(zip(names, results)),
            sum(part.compile_s for part in parts),
            _most([part.temp_bytes for part in parts]),
        )


def of(shape: AttentionShape | GroupedShape) -> Attention | Grouped:
    return Attention(shape) if isinstance(shape, AttentionShape) else Grouped(shape)
