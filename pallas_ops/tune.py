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
import json
import math
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

from pallas_ops import compile_report, dispatch, programs, timing, tuning
from pallas_ops.grouped_matmul.epilogue import ACTIVATIONS

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
    """What came of one call: the trials, the heuristic's choice first; why none or not stored."""

    call: tuning.Call
    key: dict[str, Any]
    trials: list[Trial]
    stored: pathlib.Path | None = None
    note: str | None = None

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

    Raises:
      ValueError: there is no such chip, or `budget_ms` is not positive and finite.
      OSError: the user's cache can't be written.
    """
    platform = _ready(chip, budget_ms)
    return _tuned(calls_of(f, *args, platform=platform), chip, budget_ms, progress)


def _ready(chip: str | None, budget_ms: float) -> str:
    """The platform to lower for, once it is certain that the results can be had and kept."""
    if not 0 < budget_ms < math.inf:
        raise ValueError(f"budget_ms must be positive and finite, got {budget_ms}")
    if chip is not None:
        compile_report.card(chip)
        return "cuda"
    if problem := tuning.cache_problem():
        raise OSError(problem)
    platform = jax.devices()[0].platform
    return "cuda" if platform == "gpu" else platform


def _tuned(
    calls: Sequence[tuning.Call], chip: str | None, budget_ms: float, progress: bool
) -> list[Outcome]:
    device = jax.devices()[0]
    kind = compile_report.card(chip).device_kind if chip else device.device_kind
    outcomes = [_candidates(call, kind) for call in calls]
    _drop_uncompilable(outcomes, chip or compile_report.chip_of(kind), progress, asked=chip)
    if chip is not None:
        return outcomes
    kept = [(o, t) for o in outcomes for t in o.trials if t.dropped is None]
    with tqdm.tqdm(total=len(kept), desc="timing", disable=not (progress and kept)) as bar:
        for outcome in outcomes:
            if outcome.trials:
                _time(outcome, budget_ms, bar)
    for outcome in outcomes:
        if outcome.best is None:
            continue
        call, key, config = outcome.call, outcome.key, outcome.best.config
        try:
            outcome.stored = tuning.store(kind, call, key, config, **facts(outcome))
        except (OSError, ValueError) as error:  # the times are worth showing all the same
            outcome.note = f"not stored: {error}"
    return outcomes


def calls_of(f: Callable[..., Any], *args: Any, platform: str) -> list[tuning.Call]:
    """The calls in a program for which a config would be looked up."""
    return [call for call, reason in _all_calls(f, args, platform).items() if reason is None]


def _all_calls(f, args, platform: str) -> dict[tuning.Call, str | None]:
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
    key = tunable.key(*call.avals, **params)
    if any(0 in x.shape for x in call.avals):
        return Outcome(call, key, [], note="there is nothing to time in an empty call")
    configs = [tunable.heuristic(device_kind, *call.avals, **params)]
    configs += tunable.candidates(*call.avals, **params)
    fits = lambda c: entry.refuse(*call.avals, config=c, **params) is None
    trials = [Trial(c) for c in dict.fromkeys(configs) if fits(c)]
    return Outcome(call, key, trials)


def _drop_uncompilable(
    outcomes: list[Outcome], chip: str | None, progress: bool, asked: str | None
) -> None:
    jobs = [(o.call, t) for o in outcomes if _is_kernel(o.call) for t in o.trials]
    if not jobs:
        if asked:
            print("Nothing is compiled: no candidate is of a GPU kernel", file=sys.stderr)
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
    if asked:
        print(f"Compiled for {chip}: {len(jobs)} candidates of GPU kernels", file=sys.stderr)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_ops.tune",
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit codes: 1 where no candidate is left of some call; 2 where nothing was tried.",
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
    shaped.add_argument(
        "--implementation", choices=dispatch.NAMES, help="one to tune; default: what None picks"
    )
    shaped.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    shaped.add_argument("--forward-only", action="store_true", help="no gradients")
    kinds = parser.add_subparsers(dest="what", required=True)

    attention = kinds.add_parser("attention", parents=[shaped], help="flash_attention")
    for name in ("batch", "length", "heads", "head-dim"):
        attention.add_argument(f"--{name}", type=_size, required=True)
    for name in ("kv-length", "kv-heads", "v-head-dim"):
        attention.add_argument(f"--{name}", type=_size)
    attention.add_argument("--causal", action="store_true")
    attention.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"))
    attention.add_argument("--segments", action="store_true", help="packed documents")
    attention.set_defaults(build=programs.attention)

    grouped = kinds.add_parser("grouped", parents=[shaped], help="ragged_dot and its gradients")
    for name in ("rows", "k", "n", "groups"):
        grouped.add_argument(f"--{name}", type=_size, required=True)
    grouped.add_argument(
        "--activation", choices=ACTIVATIONS, help="of the epilogue, as in ragged_dot"
    )
    grouped.set_defaults(build=programs.grouped)

    whole = kinds.add_parser("program", parents=[common], help="all calls in a program")
    whole.add_argument("function", help="module:function that returns (f, args)")
    whole.set_defaults(build=lambda options: programs.named(options.function), forward_only=True)
    return parser


def _size(text: str) -> int:
    if (size := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"a size is 0 or more, got {text}")
    return size


def _show(outcomes: list[Outcome]) -> None:
    for o in outcomes:
        print(f"{o.call.operation}, {o.call.implementation}: {json.dumps(o.key)}")
        for trial in o.trials:
            result = trial.dropped or ("not timed" if trial.ms is None else f"{trial.ms:.4g} ms")
            print(f"  {'*' if trial is o.best else ' '} {trial.config}: {result}")
        if o.stored is not None:
            print(f"  stored in {o.stored}")
        if o.note is not None:
            print(f"  {o.note}")


def _table_entries(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    return [
        dict(
            operation=o.call.operation,
            implementation=o.call.implementation,
            key=o.key,
            config=dataclasses.asdict(o.best.config),
            **facts(o),
        )
        for o in outcomes
        if o.best is not None
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.chip and options.table:
        parser.error("--table takes times, and with --chip nothing is timed")
    kind, entries = jax.devices()[0].device_kind, []
    try:
        platform = _ready(options.chip, options.budget_ms)
        if options.table:
            entries = tuning.read_table(options.table, kind)
        f, args = options.build(options)
        f = f if options.forward_only else programs.with_gradients(f)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    try:
        calls = _all_calls(f, args, platform)
    except (ValueError, TypeError, NotImplementedError) as error:
        if options.what == "program":
            raise  # the traceback leads into it
        parser.error(str(error).partition("\n")[0])
    tunable = [call for call, reason in calls.items() if reason is None]
    outcomes = _tuned(tunable, options.chip, options.budget_ms, progress=True)
    _show(outcomes)
    if not outcomes:
        reasons = [f"{c.operation}, {c.implementation}: {reason}" for c, reason in calls.items()]
        reasons = list(dict.fromkeys(reasons)) or ["the program has no call of pallas_ops"]
        print("nothing to tune:", "; ".join(reasons))
    if options.table:
        tuning.write_table(options.table, kind, [*entries, *_table_entries(outcomes)])
    return 0 if all(any(t.dropped is None for t in o.trials) for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
