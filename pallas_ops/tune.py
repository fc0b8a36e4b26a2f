"""Finds the fastest config of each kernel in a program and keeps it in the user's cache.

    python -m pallas_ops.tune attention --batch 4 --length 4096 --heads 16 --head-dim 128 --causal
    python -m pallas_ops.tune grouped --rows 65536 --k 2048 --n 1536 --groups 128
    python -m pallas_ops.tune program my_training:step

`program` takes what is given as `module:function`: a function of no arguments that returns `(f,
args)`, a program and the `jax.ShapeDtypeStruct`s to call it with; every call of this library in it
is tuned. Candidates for GPU kernels are compiled ahead of time, on any machine; those that spill
registers or do not fit are dropped. The rest are timed on this machine's device, and the fastest is
stored for its kind of device, this version of the library and of JAX.
"""

import argparse
import concurrent.futures
import concurrent.futures.process
import dataclasses
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

import pallas_ops
from pallas_ops import compile_report, dispatch, timing, tuning

# Relative root mean square by which a candidate's results may differ from the first one's.
_TOLERANCE = {2: 2e-2, 4: 1e-3, 8: 1e-3}  # by bytes of the dtype


@dataclasses.dataclass
class Trial:
    """A candidate: its time, or why it was dropped."""

    config: Any
    ms: float | None = None
    dropped: str | None = None


@dataclasses.dataclass
class Outcome:
    """What came of one call: the trials, the heuristic's choice first."""

    call: tuning.Call
    key: dict[str, Any]
    trials: list[Trial]
    stored: pathlib.Path | None = None

    @property
    def best(self) -> Trial | None:
        timed = [t for t in self.trials if t.ms is not None and t.dropped is None]
        return min(timed, key=lambda t: t.ms or 0, default=None)


def tune(
    f: Callable[..., Any],
    *args: Any,
    chip: str | None = None,
    budget_ms: float = 100.0,
    progress: bool = True,
) -> list[Outcome]:
    """Tunes every call of this library in `jax.jit(f)(*args)` that has no config of its own.

    Args:
      f: a program for one device.
      *args: its arguments, or their `jax.ShapeDtypeStruct`s.
      chip: a card of `compile_report.CHIPS` to compile candidates for, with nothing timed or
        stored. None: this machine's device.
      budget_ms: time to spend on repeats of a candidate.
      progress: show a progress bar on standard error.

    Returns:
      An outcome for each distinct call; what was fastest is in the user's cache.
    """
    device = jax.devices()[0]
    platform = "cuda" if chip or device.platform == "gpu" else device.platform
    kind = compile_report.CHIPS[chip].device_kind if chip else device.device_kind
    outcomes = [_candidates(call, kind) for call in calls_of(f, *args, platform=platform)]
    _drop_uncompilable(outcomes, chip or compile_report.chip_of(kind), progress)
    if chip is not None:
        return outcomes
    kept = [(o, t) for o in outcomes for t in o.trials if t.dropped is None]
    with tqdm.tqdm(total=len(kept), desc="timing", disable=not progress) as bar:
        for outcome in outcomes:
            _time(outcome, budget_ms, bar)
    for outcome in outcomes:
        if outcome.best is not None and tuning.cache_directory() is not None:
            outcome.stored = tuning.store(
                device.device_kind, outcome.call, outcome.key, outcome.best.config, **facts(outcome)
            )
    return outcomes


def calls_of(f: Callable[..., Any], *args: Any, platform: str) -> list[tuning.Call]:
    """The calls in a program for which a config would be looked up."""
    with tuning.collect() as calls:
        # A function of its own, so that no cache hides the lowering.
        jax.jit(lambda *args: f(*args)).trace(*args).lower(lowering_platforms=(platform,))
    return calls


def facts(outcome: Outcome) -> dict[str, Any]:
    """What is kept beside a config: its time, the heuristic's, JAX's version and the date."""
    best, default = outcome.best, outcome.trials[0]
    assert best is not None
    return dict(
        ms=best.ms,
        heuristic_ms=default.ms,
        jax=jax.__version__,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    )


def program(call: tuning.Call, config: Any) -> Callable[..., Sequence[jax.Array]]:
    """The call with a given config, as a function of its operands."""
    return functools.partial(
        dispatch.Operation.by_name[call.operation].bind,
        implementation=(call.implementation,),
        config=tuning.requested(config),
        **dict(call.params),
    )


def _entry(call: tuning.Call) -> tuple[dispatch.Implementation, tuning.Tunable]:
    entry = dispatch.Operation.by_name[call.operation].implementations[call.implementation]
    assert entry.tunable is not None
    return entry, entry.tunable


def _candidates(call: tuning.Call, device_kind: str) -> Outcome:
    entry, tunable = _entry(call)
    params = dict(call.params)
    configs = [tunable.heuristic(device_kind, *call.avals, **params)]
    configs += tunable.candidates(*call.avals, **params)
    fits = lambda c: entry.refuse(*call.avals, config=c, **params) is None
    trials = [Trial(c) for c in dict.fromkeys(configs) if fits(c)]
    return Outcome(call, tunable.key(*call.avals, **params), trials)


def _drop_uncompilable(outcomes: list[Outcome], chip: str | None, progress: bool) -> None:
    jobs = [(o.call, t) for o in outcomes if _is_kernel(o.call) for t in o.trials]
    if not jobs:
        return
    reason = compile_report.available() if chip else "this device is none that it knows"
    if chip is None or reason is not None:
        print(f"Candidates are not checked for spills: {reason}", file=sys.stderr)
        return
    with tqdm.tqdm(total=len(jobs), desc="compiling", disable=not progress) as bar:
        cut_off = _compile(chip, jobs, min(os.cpu_count() or 1, 8, len(jobs)), bar)
        for job in cut_off:  # one of them ended its process, and the pool with it
            if _compile(chip, [job], 1, bar):
                job[1].dropped = "the compiler ended its process"
                bar.update()


def _compile(chip: str, jobs, workers: int, bar: tqdm.tqdm) -> list[tuple[Any, Trial]]:
    """Compiles in processes of their own; returns the jobs cut off where one of these died."""
    cut_off = []
    spawn = multiprocessing.get_context("spawn")
    with (
        compile_report.environment(JAX_PLATFORMS="cpu"),
        concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool,
    ):
        futures = {pool.submit(compile_problem, chip, j[0], j[1].config): j for j in jobs}
        for future in concurrent.futures.as_completed(futures):
            job = futures[future]
            try:
                job[1].dropped = future.result()
                bar.update()
            except concurrent.futures.process.BrokenProcessPool:
                cut_off.append(job)
    return cut_off


def _is_kernel(call: tuning.Call) -> bool:
    return call.implementation == "mosaic_gpu"


def compile_problem(chip: str, call: tuning.Call, config: Any) -> str | None:
    """Why a candidate is no good on a card; compiles ahead of time, in a process of its own."""
    try:
        kernels = compile_report.report(program(call, config), call.avals, chip)
    except Exception as error:
        return _first_line(error)
    return "; ".join(problem for kernel in kernels for problem in kernel.problems()) or None


def _time(outcome: Outcome, budget_ms: float, bar: tqdm.tqdm) -> None:
    call = outcome.call
    operation = dispatch.Operation.by_name[call.operation]
    operands = operation.inputs(0, *call.avals, **dict(call.params))
    count = timing.rotation(sum(x.nbytes for x in operands))
    sets = [operands] + [list(map(jnp.copy, operands)) for _ in range(count - 1)]
    right = None
    for trial in outcome.trials:
        if trial.dropped is not None:
            continue
        try:
            compiled = jax.jit(program(call, trial.config)).lower(*operands).compile()
            results = compiled(*operands)
            right = results if right is None else right
            trial.dropped = _difference(results, right)
            if trial.dropped is None:
                trial.ms = timing.measure(compiled, sets, budget_ms=budget_ms).ms
        except Exception as error:  # out of memory, or a compiler's: the next may do better
            trial.dropped = _first_line(error)
        bar.update()


def _difference(results, right) -> str | None:
    for x, y in zip(results, right):
        error = float(_relative_error(x, y))
        if not error <= _TOLERANCE[y.dtype.itemsize]:
            return f"its results differ from the first candidate's by {error:.1e} (relative)"
    return None


@jax.jit
def _relative_error(x, y) -> jax.Array:
    """Root mean square of the difference over that of y; nan where one is infinite alone."""
    x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    difference = jnp.where(x == y, 0, x - y)
    scale = jnp.where(jnp.isinf(y), 0, y)
    tiny = np.finfo(np.float32).tiny
    return jnp.sqrt(jnp.mean(difference**2) / jnp.maximum(jnp.mean(scale**2), tiny))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


# The command line.


def _attention(options) -> tuple[Callable[..., Any], Sequence[Any]]:
    s, kv_heads = options.kv_length or options.length, options.kv_heads or options.heads
    v_dim = options.v_head_dim or options.head_dim
    shapes = [
        (options.batch, options.length, options.heads, options.head_dim),
        (options.batch, s, kv_heads, options.head_dim),
        (options.batch, s, kv_heads, v_dim),
    ]
    given = [jax.ShapeDtypeStruct(x, options.dtype) for x in shapes]
    keywords: dict[str, Any] = dict(
        is_causal=options.causal,
        local_window_size=tuple(options.window) if options.window else None,
        implementation=options.implementation,
    )
    if options.segments:
        given += [jax.ShapeDtypeStruct((options.batch, n), jnp.int32) for n in (options.length, s)]

    def attend(query, key, value, *segments):
        names = ("q_segment_ids", "kv_segment_ids")
        return pallas_ops.flash_attention(
            query, key, value, **dict(zip(names, segments)), **keywords
        )

    return attend, given


def _grouped(options) -> tuple[Callable[..., Any], Sequence[Any]]:
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


def _program(options) -> tuple[Callable[..., Any], Sequence[Any]]:
    module, _, name = options.function.partition(":")
    sys.path.insert(0, os.getcwd())
    return getattr(importlib.import_module(module), name)()


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_ops.tune", description=(__doc__ or "").partition("\n")[0]
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--chip",
        choices=compile_report.CHIPS,
        help="compile candidates for this card; time and store nothing",
    )
    common.add_argument("--budget-ms", type=float, default=100.0, help="for each candidate")
    common.add_argument("--table", type=pathlib.Path, help="also add the results to this table")
    shaped = argparse.ArgumentParser(add_help=False, parents=[common])
    shaped.add_argument("--implementation", help="one to tune; default: what None picks")
    shaped.add_argument("--dtype", default="bfloat16", help="bfloat16, float16, float32")
    shaped.add_argument("--forward-only", action="store_true", help="no gradients")
    kinds = parser.add_subparsers(dest="what", required=True)

    attention = kinds.add_parser("attention", parents=[shaped], help="flash_attention")
    for name in ("batch", "length", "heads", "head-dim"):
        attention.add_argument(f"--{name}", type=int, required=True)
    for name in ("kv-length", "kv-heads", "v-head-dim"):
        attention.add_argument(f"--{name}", type=int)
    attention.add_argument("--causal", action="store_true")
    attention.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"))
    attention.add_argument("--segments", action="store_true", help="packed documents")
    attention.set_defaults(build=_attention)

    grouped = kinds.add_parser("grouped", parents=[shaped], help="ragged_dot and its gradients")
    for name in ("rows", "k", "n", "groups"):
        grouped.add_argument(f"--{name}", type=int, required=True)
    grouped.add_argument("--activation", help="of the epilogue, as in ragged_dot")
    grouped.set_defaults(build=_grouped)

    whole = kinds.add_parser("program", parents=[common], help="all calls in a program")
    whole.add_argument("function", help="module:function that returns (f, args)")
    whole.set_defaults(build=_program, forward_only=True)
    return parser


def _show(outcomes: list[Outcome]) -> None:
    for o in outcomes:
        print(f"{o.call.operation}, {o.call.implementation}: {json.dumps(o.key)}")
        for trial in o.trials:
            result = trial.dropped or ("not timed" if trial.ms is None else f"{trial.ms:.4g} ms")
            print(f"  {'*' if trial is o.best else ' '} {trial.config}: {result}")
        if o.stored is not None:
            print(f"  stored in {o.stored}")


def _add_to_table(path: pathlib.Path, outcomes: list[Outcome]) -> None:
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    name = lambda e: (e["operation"], e["implementation"], json.dumps(e["key"], sort_keys=True))
    by_name = {name(e): e for e in entries}
    for o in outcomes:
        if o.best is not None:
            entry = dict(
                operation=o.call.operation,
                implementation=o.call.implementation,
                key=o.key,
                config=dataclasses.asdict(o.best.config),
                **facts(o),
            )
            by_name[name(entry)] = entry
    lines = ",\n".join(json.dumps(by_name[n]) for n in sorted(by_name))
    device = json.dumps(jax.devices()[0].device_kind)
    path.write_text(f'{{"device": {device}, "entries": [\n{lines}\n]}}\n')


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.chip and options.table:
        parser.error("--table takes times, and with --chip nothing is timed")
    f, given = options.build(options)
    if not options.forward_only:
        f = with_gradients(f)
    outcomes = tune(f, *given, chip=options.chip, budget_ms=options.budget_ms)
    _show(outcomes)
    if not outcomes:
        print("nothing to tune: no call of pallas_ops without a config of its own")
    if options.table:
        _add_to_table(options.table, outcomes)
    return 0 if all(any(t.dropped is None for t in o.trials) for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
