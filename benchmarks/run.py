"""The run: each case compiled, checked and timed by each implementation, one row a measurement."""

import argparse
import concurrent.futures
import dataclasses
import datetime
import itertools
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tqdm

from benchmarks import operations, processes, rows, selection, shapes, tables
from benchmarks.rows import MEASURED, Row, rounded
from benchmarks.selection import OPS, Cases, Shape, UsageError
from pallas_ops import dispatch, timing

_ROOT = pathlib.Path(__file__).parents[1]


class _OutOfTimeError(Exception):
    pass


class _DeviceLostError(Exception):
    pass


def run(args: argparse.Namespace) -> int:
    """Measures what the command line asks for; 1 where the device failed on the way."""
    started = time.monotonic()
    cases = selection.cases(args)
    if args.list:
        for name, shape in cases:
            print(f"{name}\t{shape.op}\t{shape.case}")
        return 0
    if args.out is None:
        raise UsageError("--out FILE says where the rows go")
    if args.share is not None:
        cases = cases[args.share.number :: args.share.of]
    elif args.processes > 1:
        if any(selection.torch_names(args, shape.op) for _, shape in cases):
            raise UsageError("--processes takes none of PyTorch's: those have one of their own")
        if args.compile_ahead > 1:
            raise UsageError("--processes compiles all cases ahead: leave out --compile-ahead")
        rows.begin(args.out)
        return processes.run(min(args.processes, len(cases)), args.argv)
    rows.begin(args.out)
    # PyTorch first: two processes with the card's memory and time between them measure neither.
    torch_rows = _torch_rows(cases, args)
    environment = {} if args.share is not None else _environment()
    runner = _Runner(args, environment, started + args.limit_s)
    status = 0
    try:
        runner.write_torch(cases, torch_rows)
        runner.measure_all(cases)
    except _OutOfTimeError as stop:
        print(f"stopped after {args.limit_s:g} s, before {stop}", file=sys.stderr)
    except _DeviceLostError as stop:
        print(f"stopped: the device fails since {stop}", file=sys.stderr)
        status = 1
    finally:
        runner.bar.close()
    _print_table(runner.rows)
    return status


def _torch_rows(cases: Cases, args: argparse.Namespace) -> dict[tuple[str, ...], Row]:
    """By case, direction and implementation what the second process, PyTorch's, measured."""
    wanted = [
        {
            "op": shape.op,
            "case": shape.case,
            "implementations": selection.torch_names(args, shape.op),
            "directions": selection.directions(args, shape),
            **shape.fields(),
        }
        for _, shape in cases
        if selection.torch_names(args, shape.op)
    ]
    if not wanted:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        given, out = (pathlib.Path(folder) / name for name in ("cases.json", "rows.json"))
        given.write_text("".join(json.dumps(case) + "\n" for case in wanted))
        command = [sys.executable, "-m", "benchmarks.torch_peers", "--cases", given, "--out", out]
        command += ["--budget-ms", str(args.budget_ms), "--limit-s", str(args.limit_s)]
        status = subprocess.run(command, check=False, cwd=_ROOT).returncode
        lines = out.read_text().splitlines() if out.exists() else []
    found: dict[tuple[str, ...], Row] = {}
    if status:  # with 0 only what there was no time for is missing
        error = {"error": f"failed: the process of PyTorch ended with status {status}"}
        found = {
            (case["case"], direction, name): error
            for case in wanted
            for name in case["implementations"]
            for direction in case["directions"]
        }
    for row in map(json.loads, lines):
        key = tuple(row.pop(name) for name in ("case", "direction", "implementation"))
        found[key] = {name: value for name, value in row.items() if value is not None}
    return found


def _command(*command: str) -> str | None:
    """Output of a program, None where it is absent or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=_ROOT)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None


def _cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _environment() -> Row:
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    driver = _command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    commit = os.environ.get("BENCHMARK_COMMIT")  # where the files are without their history
    commit = commit or _command("git", "describe", "--always", "--dirty", "--exclude=*")
    tflops, gbps = timing.ceilings()
    return dict(
        peak_tflops=rounded(tflops),
        peak_gbps=rounded(gbps),
        device=device.device_kind if gpu else _cpu_name(),
        jax=jax.__version__,
        driver=driver.splitlines()[0] if driver and gpu else None,
        commit=commit,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )


def _reason(error: BaseException, *, ours: bool) -> str:
    refused = isinstance(error, NotImplementedError) or (isinstance(error, ValueError) and not ours)
    return rows.reason(error, refused=refused)


class _Runner:
    """Measures case by case; each row is on disk before the next measurement begins."""

    def __init__(self, args: argparse.Namespace, environment: Row, deadline: float):
        self.args, self.environment, self.deadline = args, environment, deadline
        self.rows: list[Row] = []
        self.compiled: dict[Any, dict[str, Any]] = {}
        self.references: dict[Any, Any] = {}  # operands and check, or what was raised
        self.lost: str | None = None  # since when the device fails
        self.loaded: dict[str, dict[str, Any]] = {}
        for op in OPS:
            loaders = selection.loaders(args, op)
            self.loaded[op] = {n: operations.attempt(load) for n, load in loaders.items()}
        self.bar = tqdm.tqdm(total=0, file=sys.stderr, unit="row", smoothing=0)

    def write(self, set_name: str, shape: Shape, direction: str, name: str, measured: Row) -> None:
        row = dict(
            op=shape.op, direction=direction, implementation=name, case=shape.case, set=set_name
        )
        row |= shape.fields() | dict.fromkeys(MEASURED)
        row |= dict(flops=shape.flops(direction), bytes=shape.bytes(direction))
        row |= {**self.environment, "error": None} | measured
        self.rows.append(row)
        rows.append(self.args.out, row)

    def write_torch(self, cases: Cases, found: dict[tuple[str, ...], Row]) -> None:
        by_case = {shape.case: (set_name, shape) for set_name, shape in cases}
        for (case, direction, name), measured in found.items():
            self.write(*by_case[case], direction, name, measured)

    def measure_all(self, cases: Cases) -> None:
        self.bar.total = sum(
            len(selection.directions(self.args, shape)) * len(self.loaded[shape.op])
            for _, shape in cases
        )
        share = self.args.share
        ahead = self.args.compile_ahead if share is None else len(cases)
        for chunk in itertools.batched(cases, ahead):
            self._in_time(chunk[0][1].case)
            parts = [(c, operation, names) for c in chunk for operation, names in self._parts(c[1])]
            self._prepare([(operation, names) for _, operation, names in parts])
            if share is not None:
                share.wait_until_all_are_ready()
                self.environment = share.once(_environment)
            for i, ((set_name, shape), operation, names) in enumerate(parts):
                for direction, name, result in self._results(operation, names):
                    self.write(set_name, shape, direction, name, result)
                    self.bar.update()
                    if self.lost is not None:
                        raise _DeviceLostError(self.lost)
                if all(later != operation for _, later, _ in parts[i + 1 :]):
                    del self.references[operation]  # its operands may be large

    def _parts(self, shape: Shape) -> list[tuple[Any, list[str]]]:
        """What there is to measure for a case: operations and names of implementations."""
        names = list(self.loaded[shape.op])
        parts = [(operations.of(shape), [n for n in names if n != "dense"])]
        if "dense" in names and isinstance(shape, shapes.GroupedShape):
            one = dataclasses.replace(shape, m=shape.rows, g=1, distribution="uniform")
            parts.append((operations.of(one), ["dense"]))
        return [part for part in parts if part[1]]

    def _in_time(self, where: str) -> None:
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError(where)

    def _prepare(self, parts: Sequence[tuple[Any, list[str]]]) -> None:
        """Compiles all programs and computes the exact values, in threads."""
        signatures = {operation.signature for operation, _ in parts}
        self.compiled = {k: v for k, v in self.compiled.items() if k[0] in signatures}
        missing = {
            (operation.signature, name): operation
            for operation, names in parts
            for name in names
            if not isinstance(self.loaded[operation.shape.op][name], Exception)
            and (operation.signature, name) not in self.compiled
        }

        def build(key, operation) -> None:
            name = key[1]
            self._in_time(f"{operation.shape.case}, {name}")
            self.bar.set_postfix_str(f"{operation.shape.case}, compiling {name}")
            directions = selection.directions(self.args, operation.shape)
            programs = list(dict.fromkeys(p for d in directions for p in operation.programs(d)))
            self.compiled[key] = operation.compile(self.loaded[operation.shape.op][name], programs)

        def exact(operation) -> None:
            self._in_time(f"{operation.shape.case}, reference")
            directions = selection.directions(self.args, operation.shape)

            def compute():
                operands = operation.operands(0)
                return operands, operation.check(operands, directions)

            self.references[operation] = operations.attempt(compute)

        with concurrent.futures.ThreadPoolExecutor(self.args.compile_workers) as pool:
            jobs = [
                pool.submit(build, key, operation)
                for key, operation in missing.items()
                if key[1] != "dense"
            ]
            jobs += [pool.submit(exact, operation) for operation in dict(parts)]
            for job in jobs:
                job.result()
        # XLA chooses a product's kernel by timing some, which others on the card at the same time
        # make a lottery: one product came out 13 % apart.
        for key, operation in missing.items():
            if key[1] == "dense":
                build(key, operation)

    def _results(self, operation, names: Sequence[str]) -> Iterator[tuple[str, str, Row]]:
        directions = selection.directions(self.args, operation.shape)
        reference = self.references[operation]
        if isinstance(reference, Exception):
            self._check_device(reference, f"{operation.shape.case}, reference")
            reason = _reason(reference, ours=True)
            yield from ((d, name, {"error": reason}) for name in names for d in directions)
            return
        operands, check = reference
        sets = [operands]
        for name in names:
            implementation = self.loaded[operation.shape.op][name]
            self.bar.set_postfix_str(f"{operation.shape.case}, {name}")
            for direction in directions:
                self._in_time(f"{operation.shape.case}, {name}, {direction}")
                if isinstance(implementation, Exception):
                    result = {"error": _reason(implementation, ours=False)}
                else:
                    made = self.compiled[operation.signature, name]
                    result = self._result(operation, made, direction, check, sets, name)
                yield direction, name, result

    def _result(self, operation, made, direction, check, sets, name: str) -> Row:
        ours = name in dispatch.NAMES
        parts = [made[program] for program in operation.programs(direction)]
        if broken := [part for part in parts if isinstance(part, Exception)]:
            return {"error": _reason(broken[0], ours=ours)}
        call = operation.call(made, direction)
        result = dict(compile_s=round(call.compile_s, 3), temp_bytes=call.temp_bytes)
        free = _free_bytes()
        if free is not None and (call.temp_bytes or 0) > free:  # XLA would wait for it to be freed
            reason = f"{tables.size(call.temp_bytes)} of temporary memory are more than is free"
            return {**result, "error": f"out of memory: {reason}"}
        try:
            operands = call.prepare(sets[0])
            outputs = call.outputs(jax.block_until_ready(call.run(*operands)))
            fault = check.fault(outputs, ours=ours)
            del outputs
            if fault is not None:
                return {**result, "error": f"wrong: {fault}"[: rows.LONGEST_REASON]}
            size = sum(x.nbytes for x in jax.tree.leaves(operands))
            count = timing.rotation(size)
            sets += [operation.operands(seed) for seed in range(len(sets), count)]
            operand_sets = [operands, *(call.prepare(x) for x in sets[1:count])]
            time_ = timing.measure(call.run, operand_sets, budget_ms=self.args.budget_ms)
        except Exception as error:
            self._check_device(error, f"{operation.shape.case}, {name}, {direction}")
            return {**result, "error": _reason(error, ours=ours)}
        return dict(
            **result,
            ms=rounded(time_.ms),
            ms_spread=rounded(time_.spread_ms),
            tflops=rounded(operation.shape.flops(direction) / time_.ms / 1e9),
            timer=time_.timer,
        )

    def _check_device(self, error: Exception, where: str) -> None:
        """A kernel that faults leaves the whole process without its device."""
        try:
            jax.block_until_ready(jnp.zeros(8) + 1)
        except Exception:
            self.lost = f"{where}: {_reason(error, ours=True)}"


def _free_bytes() -> int | None:
    """Memory of the device that JAX may still take, where it says."""
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    return None if limit is None else limit - stats.get("bytes_in_use", 0)


def _print_table(written: Sequence[Row]) -> None:
    names = ("case", "direction", "implementation")
    lines = [
        [*(r[n] for n in names), tables.number(r["ms"], 4), tables.number(r["tflops"], 4)]
        + [(r["error"] or "")[:60]]
        for r in written
    ]
    print(tables.table([*names, "ms", "TFLOP/s", "error"], lines, left=3))
