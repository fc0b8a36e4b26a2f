"""What the command line selects: cases, directions and implementations."""

import argparse
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from benchmarks import operations, peers, shapes, torch_libraries
from pallas_ops import dispatch
from pallas_ops.attention.primitive import flash_attention_fwd
from pallas_ops.grouped_matmul.primitive import ragged_dot_op

Shape = shapes.AttentionShape | shapes.GroupedShape
Cases = list[tuple[str, Shape]]  # with the name of the set

OPS = {"attention": flash_attention_fwd, "grouped_matmul": ragged_dot_op}


class UsageError(ValueError):
    """What was asked for does not exist, or comes to nothing."""


def choose(given: Sequence[str] | None, known: Sequence[str], what: str) -> list[str]:
    names = list(dict.fromkeys(given if given is not None else known))
    if not names:
        raise UsageError(f"no {what} is named; there are {', '.join(known)}")
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return names


def cases(args: argparse.Namespace) -> Cases:
    """The cases that there is something to measure of; raises where a name selects nothing."""
    if not args.set:
        raise UsageError(f"--set names one or more of {', '.join(shapes.SETS)}")
    ops = choose(args.op, tuple(OPS), "operation")
    choose(args.direction, [*dict.fromkeys([*shapes.FORWARD_AND, *shapes.PRODUCTS])], "direction")
    known = [name for op in OPS for name in _implementations(op)]
    choose(args.impl, [*dict.fromkeys([*known, *peers.ALIASES])], "implementation")
    found: dict[str, tuple[str, Shape]] = {}
    for name in choose(args.set, tuple(shapes.SETS), "set"):
        for part in shapes.GATHERED.get(name, (name,)):
            for shape in shapes.SETS[part]:
                shape = dataclasses.replace(shape, dtype=args.dtype or shape.dtype)
                if shape.op in ops and re.search(args.case, shape.case):
                    found.setdefault(shape.case, (part, shape))
    if not found:
        raise UsageError("no case is left; see --list")
    left = [
        (name, shape)
        for name, shape in found.values()
        if directions(args, shape) and set(requested(args)) & {*_implementations(shape.op)}
    ]
    possible = {d for _, shape in left for d in shape.directions}
    idle = [f"--direction {d}" for d in args.direction or () if d not in possible]
    possible = {n for _, shape in left for n in _implementations(shape.op)}
    idle += [f"--impl {n}" for n in args.impl or () if not possible & {*_spelled_out([n])}]
    if idle:
        ops = ", ".join(dict.fromkeys(shape.op for _, shape in found.values()))
        raise UsageError(f"nothing of {ops} is left to measure with {', '.join(idle)}")
    return left


def directions(args: argparse.Namespace, shape: Shape) -> list[str]:
    return [d for d in shape.directions if args.direction is None or d in args.direction]


def _theirs(op: str) -> dict[str, Callable[[], Any]]:
    return peers.ATTENTION if op == "attention" else peers.GROUPED


def _implementations(op: str) -> list[str]:
    """All that can be asked for of an operation, aliases of peers apart."""
    ours = ["ours", *["dense"] * (op == "grouped_matmul"), *dispatch.NAMES]
    return [*ours, *_theirs(op), *torch_libraries.LOADERS[op]]


def _spelled_out(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(n for name in names for n in peers.ALIASES.get(name, (name,))))


def requested(args: argparse.Namespace) -> list[str]:
    """Names as asked for, aliases of peers spelled out."""
    return _spelled_out(["ours"] if args.impl is None else args.impl)


def torch_names(args: argparse.Namespace, op: str) -> list[str]:
    return [name for name in requested(args) if name in torch_libraries.LOADERS[op]]


def loaders(args: argparse.Namespace, op: str) -> dict[str, Callable[[], Any]]:
    """How to get each implementation of an operation that runs in this process."""
    theirs = _theirs(op)
    ours = operations.our_attention if op == "attention" else operations.our_grouped
    device = jax.devices()[0]
    here = device.platform
    if here == "gpu":
        here = "rocm" if "rocm" in device.client.platform_version else "cuda"
    registered = [
        name
        for name, entry in OPS[op].implementations.items()
        if name != "reference" and (entry.platforms is None or here in entry.platforms)
    ]
    found: dict[str, Callable[[], Any]] = {}
    for given in requested(args):
        for name in registered if given == "ours" else [given]:
            if name in dispatch.NAMES:
                found[name] = functools.partial(ours, name)
            elif name == "dense" and op == "grouped_matmul":
                found[name] = lambda: operations.DENSE
            elif name in theirs:
                found[name] = theirs[name]
    return found
