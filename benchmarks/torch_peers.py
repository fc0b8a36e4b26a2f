"""Peers that need PyTorch, measured in a process of their own that takes no JAX device.

    python -m benchmarks.torch_peers --cases FILE --out FILE

Each line of the first FILE is a JSON object: `op`, the fields of the shape, and optionally `case`,
`set`, `implementations` and `directions`. A row for each measurement is appended to the second
FILE, before the next one begins.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import torch_check, torch_libraries
from benchmarks.shapes import PRODUCTS, AttentionShape, GroupedShape
from pallas_ops import timing

Row = dict[str, Any]
_MEASURED = ("ms", "ms_spread", "tflops", "compile_s", "temp_bytes", "timer")
_ENVIRONMENT = ("peak_tflops", "peak_gbps", "device", "jax", "driver", "commit", "date")
_QKV = ("query", "key", "value")
_NO_KERNEL = re.compile("No (available kernel|viable backend)")  # of scaled_dot_product_attention
_LONGEST_REASON = 300


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
    return dict(ms=_rounded(result.ms), ms_spread=_rounded(result.spread_ms), timer=result.timer)


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")


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
            return row | dict(error=f"wrong: {fault}"[:_LONGEST_REASON])
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
    return row | dict(tflops=_rounded(operation.shape.flops(direction) / row["ms"] / 1e9))


def _reason(error: BaseException) -> str:
    """What a row says of an exception."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        kind = "not installed"
    elif "out of memory" in text.lower():
        kind = "out of memory"
    elif isinstance(error, (NotImplementedError, AssertionError)) or _NO_KERNEL.search(text):
        kind = "refused"
    else:
        kind, text = "failed", f"{type(error).__name__}: {text}"
    return f"{kind}: {text}"[:_LONGEST_REASON]


def _device_error(torch: Any) -> str | None:
    """What the device says since a kernel faulted: nothing runs in this process any more."""
    try:
        torch.cuda.synchronize()
        torch.zeros(8, device="cuda").add_(1).sum().item()
    except Exception as error:
        return _reason(error)
    return None


def _ceilings(torch: Any) -> tuple[float, float]:
    """TFLOP/s of a large matrix product and GB/s, read and written, of a copy."""
    side, words = 8192, 2**29
    x, y = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = measure(torch, [lambda: x @ y, lambda: y @ x], 300)["ms"]
    data = torch.arange(words, device="cuda", dtype=torch.int32)
    copy = torch.empty_like(data)
    moved = measure(torch, [lambda: copy.copy_(data)], 300)["ms"]
    return _rounded(2 * side**3 / product / 1e9), _rounded(8 * words / moved / 1e6)


def _command(*command: str) -> str | None:
    """Output of a program, None where it is absent or fails."""
    folder = pathlib.Path(__file__).parent
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _environment() -> tuple[Any, Row]:
    """torch, or None where it cannot be used, and what every row says of this machine."""
    row: Row = dict.fromkeys(_ENVIRONMENT)
    row["date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    commit = _command("git", "describe", "--always", "--dirty", "--exclude=*")
    row["commit"] = commit or os.environ.get("BENCHMARK_COMMIT")
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None, row
    row["jax"] = f"torch {torch.__version__.split('+')[0]}"
    if torch.cuda.is_available():
        row["device"] = torch.cuda.get_device_name()
        driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        row["driver"] = driver.splitlines()[0] if driver else None
        peaks = _attempt(_ceilings, torch)
        if not isinstance(peaks, BaseException):
            row["peak_tflops"], row["peak_gbps"] = peaks
    return torch, row


def _shape(case: Row) -> AttentionShape | GroupedShape:
    cls = AttentionShape if case["op"] == "attention" else GroupedShape
    fields = {f.name: case[f.name] for f in dataclasses.fields(cls) if f.name in case}
    if fields.get("window") is not None:
        fields["window"] = tuple(fields["window"])
    return cls(**fields)


class _Writer:
    def __init__(self, path: pathlib.Path, environment: Row):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.environment = path, environment

    def __call__(self, case: Row, shape: Any, direction: str, name: str, measured: Row) -> None:
        row = dict(op=shape.op, direction=direction, implementation=name)
        row |= dict(case=case.get("case", shape.case), set=case.get("set"))
        row |= shape.fields() | dict.fromkeys(_MEASURED)
        row |= dict(flops=shape.flops(direction), bytes=shape.bytes(direction))
        row |= self.environment | dict(error=None) | measured
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        figures = f"{row['ms']} ms, {row['tflops']} TFLOP/s" if row["ms"] else row["error"]
        print(f"{row['case']}  {direction}  {name}  {figures}", file=sys.stderr, flush=True)


def _measure_all(args: argparse.Namespace, cases: Sequence[Row]) -> None:
    deadline = time.monotonic() + args.limit_s
    torch, environment = _environment()
    write = _Writer(args.out, environment)
    broken = None
    for op, loaders in torch_libraries.LOADERS.items():
        # One library after the other, so that one that faults leaves the rows of those before.
        for name, load in loaders.items():
            chosen = [
                case
                for case in cases
                if case["op"] == op and name in (args.impl or case.get("implementations", loaders))
            ]
            make = _attempt(load) if chosen else None
            for case in chosen:
                shape = _shape(case)
                directions = args.direction or case.get("directions", shape.directions)
                directions = [d for d in directions if d in shape.directions]
                operation = _attempt(_operation, torch, make, shape, directions)
                for direction in directions:
                    if time.monotonic() > deadline:
                        return
                    result = broken or operation
                    if not isinstance(result, BaseException):
                        result = _attempt(_result, torch, operation, direction, args.budget_ms)
                    if isinstance(result, BaseException):
                        write(case, shape, direction, name, dict(error=_reason(result)))
                    else:
                        write(case, shape, direction, name, result)
                    if broken is None and torch is not None and torch.cuda.is_available():
                        fault = _device_error(torch)
                        if fault is not None:
                            at = f"{name}, {shape.case}, {direction}"
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


def _commas(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    return [n for name in names for n in torch_libraries.ALIASES.get(name, (name,))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--impl", type=_commas, metavar="NAME,...", help="default: those of a case")
    parser.add_argument("--direction", type=_commas, metavar="NAME,...", help="default: likewise")
    parser.add_argument("--budget-ms", type=float, default=150.0)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    args = parser.parse_args(argv)
    known = [name for loaders in torch_libraries.LOADERS.values() for name in loaders]
    if unknown := [name for name in args.impl or () if name not in known]:
        parser.error(f"no implementation {', '.join(unknown)}; there are {', '.join(known)}")
    lines = args.cases.read_text().splitlines()
    _measure_all(args, [json.loads(line) for line in lines if line.strip()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
