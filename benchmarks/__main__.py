"""`python -m benchmarks run` measures, `python -m benchmarks report` shows what was measured."""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import processes

# Peers of other frameworks and large operands have to fit beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


def _commas(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _above_0(number: Callable[[str], float], most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:
            kind = "an integer" if number is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} above 0 and at most {most:g}")
        return value

    return parse


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="measure implementations on named shapes")
    several: dict[str, Any] = dict(action="extend", type=_commas, metavar="NAME,...")
    run.add_argument("--op", **several, help="attention, grouped_matmul; default: both")
    run.add_argument(
        "--impl",
        **several,
        help="names, library:variant or a group of these (`cudnn`, `torch`); `ours` (the default)"
        " is all of ours that run here, `dense` one dense product of the same FLOPs",
    )
    run.add_argument("--set", **several, help="named sets of shapes; one at least")
    run.add_argument(
        "--direction", **several, help="fwd, bwd, fwdbwd, dlhs, drhs; default: all of an operation"
    )
    run.add_argument(
        "--case", metavar="REGEX", type=_regex, default="", help="only cases that this finds"
    )
    dtypes = ("bfloat16", "float16", "float32")
    run.add_argument("--dtype", choices=dtypes, help="in place of that of the shapes")
    run.add_argument(
        "--out", type=Path, metavar="FILE", help="where rows are appended; needed without --list"
    )
    run.add_argument(
        "--budget-ms",
        type=_above_0(float, 1e9),
        default=150.0,
        metavar="MS",
        help="time for the repeats of each measurement, of which there are 5 at least and 200 at"
        " most; default: %(default)g",
    )
    run.add_argument(
        "--limit-s",
        type=_above_0(float, math.inf),
        default=math.inf,
        metavar="S",
        help="begin nothing after this time; default: no limit",
    )
    run.add_argument(
        "--compile-workers",
        type=_above_0(int, 1e6),
        default=1,
        metavar="N",
        help="threads that compile and compute exact values; default: %(default)s",
    )
    run.add_argument(
        "--compile-ahead",
        type=_above_0(int, 1e6),
        default=1,
        metavar="N",
        help="cases to compile before the first of them is measured; takes memory for the operands"
        " and exact values of as many; default: %(default)s",
    )
    run.add_argument(
        "--processes",
        type=_above_0(int, 1e3),
        default=1,
        metavar="N",
        help="processes that compile side by side, all cases before the first is measured, and then"
        " measure one after the other; default: %(default)s",
    )
    run.add_argument("--share", type=processes.Share.parse, help=argparse.SUPPRESS)
    run.add_argument("--list", action="store_true", help="print set, operation and case; stop")

    report = commands.add_parser("report", help="print tables, draw plots, rewrite the documents")
    report.add_argument("files", nargs="*", type=Path, metavar="FILE", help="default: all results")
    report.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit 1 where documents are outdated or a FILE is damaged",
    )
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "report":
        from benchmarks import report

        report.main(args.files, check=args.check)
        return 0
    args.argv = list(sys.argv[1:] if argv is None else argv)
    from benchmarks import rows, run

    try:
        return run.run(args)
    except (run.UsageError, rows.WriteError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
