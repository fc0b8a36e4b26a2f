"""Peers that need PyTorch, measured in a process of their own that takes no JAX device.

`benchmarks.run` starts it. Each line of --cases is a JSON object: `op`, `case`, `implementations`,
`directions` and the fields of the shape. For each measurement a row is appended to --out before the
next one begins: `case`, `direction`, `implementation`, what was measured, PyTorch's version as
`jax`, and `error`. All else of a row is for `benchmarks.run` to say, the same for both processes.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import rows, torch_check, torch_libraries
from benchmarks.rows import MEASURED, Row, rounded
from benchmarks.shapes import PRODUCTS, AttentionShape, GroupedShape
from pallas_ops import timing

_QKV = ("query", "key", "value")
_NO_KERNEL = re.compile("No (available kernel|viable backend)")  # of scaled_dot_product_attention


def measure(torch: Any, calls: Sequence[Callable[[], Any]], budget_ms: float) -> Row:
    """Times `calls`, one for each set of operands, taken in turn."""

    def queued_ms(order: Sequence[Callable[[], Any]]) -> float:
        started = time.perf_counter()
        for call in order:
            call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - started) / len(order)

    def device_events(order: Sequence[Callable[[], Any]]) -> list[tuple[float, float]]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            queued_ms(order)
        return [
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in profile.profiler.kineto_results.events()
            if str(event.device_type()).endswith("CUDA")
            and not getattr(event, "is_user_annotation", bool)()
        ]

    result = timing.on_device(queued_ms, device_events, calls, budget_ms)
    return dict(ms=rounded(result.ms), ms_spread=rounded(result.spread_ms), timer=result.timer)


class Attention:
    """Operands, calls and checks of one case, for one implementation."""

    def __init__(self, torch: Any, shape: AttentionShape, library: Any, directions: Sequence[str]):
        self.torch, self.shape, self.library = torch, shape, library
        self.gradients = any(direction != "fwd" for direction in directions)
        self.check: torch_check.Check | None = None

    def operands(self, seed: int) -> dict[str, Any]:
        """Random normal, [batch, length, heads, dim]; no cotangent for rows that see nothing."""
        torch, s = self.torch, self.shape
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = {
            "query": (s.batch, s.q_len, s.heads, s.head_dim),
            "key": (s.batch, s.kv_len, s.kv_heads, s.head_dim),
            "value": (s.batch, s.kv_len, s.kv_heads, s.v_head_dim),
            "cotangent": (s.batch, s.q_len, s.heads, s.v_head_dim),
        }
        options = dict(generator=generator, device="cuda", dtype=getattr(torch, s.dtype))
        arrays = {name: torch.randn(size, **options) for name, size in shapes.items()}
        first, end = s.visible()
        arrays["cotangent"][torch.tensor(end <= first, device="cuda")] = 0
        return arrays

    def call(self, direction: str, operands: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """The program on these operands, in the library's layout; its results have names."""
        grad = self.torch.autograd.grad
        inputs = [self.library.enter(operands[name]) for name in _QKV]
        ct = self.library.enter(operands["cotangent"])
        if direction == "fwd":
            return lambda: {"out": self.library.call(*inputs)}
        inputs = [x.detach().requires_grad_() for x in inputs]
        if direction == "fwdbwd":

            def both():
                out = self.library.call(*inputs)
                return {"out": out, **dict(zip(_QKV, grad(out, inputs, ct)))}

            return both
        out = self.library.call(*inputs)
        return lambda: dict(zip(_QKV, grad(out, inputs, ct, retain_graph=True)))

    def fault(self, operands: dict[str, Any], outputs: dict[str, Any]) -> str | None:
        if self.check is None:
            self.check = torch_check.attention(self.torch, self.shape, operands, self.gradients)
        return self.check.fault({n: self.library.leave(x.detach()) for n, x in outputs.items()})


class Grouped:
    """Operands, calls and checks of one case, for one implementation."""

    def __init__(self, torch: Any, shape: GroupedShape, library: Any, directions: Sequence[str]):
        self.torch, self.shape, self.library = torch, shape, library

    def operands(self, seed: int) -> dict[str, Any]:
        torch, s = self.torch, self.shape
        generator = torch.Generator("cuda").manual_seed(seed)
        shapes = {"lhs": (s.m, s.k), "rhs": (s.g, s.k, s.n), "cotangent": (s.m, s.n)}
        options = dict(generator=generator, device="cuda", dtype=getattr(torch, s.dtype))
        return {name: torch.randn(size, **options) for name, size in shapes.items()}

    def call(self, direction: str, operands: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        lhs, rhs, ct = (operands[name] for name in ("lhs", "rhs", "cotangent"))
        products = {
            "out": lambda: self.library.forward(lhs, rhs),
            "dlhs": lambda: self.library.dlhs(ct, rhs),
            "drhs": lambda: self.library.drhs(lhs, ct),
        }
        chosen = {name: products[name] for name in PRODUCTS[direction]}
        return lambda: {name: product() for name, product in chosen.items()}

    def fault(self, operands: dict[str, Any], outputs: dict[str, Any]) -> str | None:
        check = torch_check.grouped(self.torch, self.shape, operands, tuple(outputs))
        return check.fault(outputs)


def _bytes(tensors: dict[str, Any]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _result(torch: Any, operation: Any, direction: str, budget_ms: float) -> Row:
    """The measured part of a row."""
    torch.cuda.empty_cache()
    operands = operation.operands(0)
    with torch.set_grad_enabled(direction != "fwd" and isinstance(operation, Attention)):
        started = time.perf_counter()
        call = operation.call(direction, operands)
        outputs = call()
        torch.cuda.synchronize()
        row: Row = dict(compile_s=round(time.perf_counter() - started, 3))
        fault = operation.fault(operands, outputs)
        if fault is not None:
            return row | dict(error=f"wrong: {fault}"[: rows.LONGEST_REASON])
        result_bytes = _bytes(outputs)
        del outputs
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        temporary = torch.cuda.max_memory_allocated() - held - result_bytes
        row["temp_bytes"] = max(temporary, 0)
        count = timing.rotation(_bytes(operands))
        del operands
        others = [operation.call(direction, operation.operands(i)) for i in range(1, count)]
        row |= measure(torch, [call, *others], budget_ms)
    return row | dict(tflops=rounded(operation.shape.flops(direction) / row["ms"] / 1e9))


def _reason(error: BaseException) -> str:
    refused = isinstance(error, (NotImplementedError, AssertionError))
    return rows.reason(error, refused=refused or bool(_NO_KERNEL.search(str(error))))


def _device_error(torch: Any) -> str | None:
    """What the device says since a kernel faulted: nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
        torch.zeros(8, device="cuda").add_(1).sum().item()
    except Exception as error:
        return _reason(error)
    return None


def _torch() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return torch


def _shape(case: Row) -> AttentionShape | GroupedShape:
    cls = AttentionShape if case["op"] == "attention" else GroupedShape
    fields = {f.name: case[f.name] for f in dataclasses.fields(cls) if f.name in case}
    if fields.get("window") is not None:
        fields["window"] = tuple(fields["window"])
    return cls(**fields)


def _measure_all(args: argparse.Namespace, cases: Sequence[Row]) -> None:
    deadline = time.monotonic() + args.limit_s
    torch = _torch()
    version = torch and f"torch {torch.__version__.split('+')[0]}"

    def write(case: Row, direction: str, name: str, measured: Row) -> None:
        row = dict(case=case["case"], direction=direction, implementation=name)
        row |= dict.fromkeys(MEASURED) | dict(jax=version, error=None) | measured
        rows.append(args.out, row)
        figures = f"{row['ms']} ms, {row['tflops']} TFLOP/s" if row["ms"] else row["error"]
        print(f"{row['case']}  {direction}  {name}  {figures}", file=sys.stderr, flush=True)

    broken = None
    for op, loaders in torch_libraries.LOADERS.items():
        # One library after the other, so that one that faults leaves the rows of those before.
        for name, load in loaders.items():
            chosen = [c for c in cases if c["op"] == op and name in c["implementations"]]
            make = _attempt(load) if chosen else None
            for case in chosen:
                operation = _attempt(_operation, torch, make, _shape(case), case["directions"])
                for direction in case["directions"]:
                    if time.monotonic() > deadline:
                        return
                    result = broken or operation
                    if not isinstance(result, BaseException):
                        result = _attempt(_result, torch, operation, direction, args.budget_ms)
                    if isinstance(result, BaseException):
                        result = dict(error=_reason(result))
                    write(case, direction, name, result)
                    if broken is None and torch is not None and torch.cuda.is_available():
                        fault = _device_error(torch)
                        if fault is not None:
                            at = f"{name}, {case['case']}, {direction}"
                            broken = RuntimeError(f"the device fails since {at}: {fault}")


def _operation(torch: Any, make: Any, shape: Any, directions: Sequence[str]) -> Any:
    if isinstance(make, BaseException):
        raise make
    cls = Attention if shape.op == "attention" else Grouped
    return cls(torch, shape, make(shape), directions)


def _attempt(f: Callable[..., Any], *args: Any) -> Any:
    """What `f` gives, or what it raised, with its traceback printed where it is unexpected."""
    try:
        return f(*args)
    except Exception as error:
        if _reason(error).startswith("failed"):
            traceback.print_exc()
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)  # frames would keep tensors alive


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--budget-ms", type=float, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    args = parser.parse_args(argv)
    lines = args.cases.read_text().splitlines()
    _measure_all(args, [json.loads(line) for line in lines])
    return 0


if __name__ == "__main__":
    sys.exit(main())
