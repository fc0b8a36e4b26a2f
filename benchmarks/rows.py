"""What both processes write: the measured keys of a row, what it says of an exception, the file."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]

MEASURED = ("ms", "ms_spread", "tflops", "compile_s", "temp_bytes", "timer")
LONGEST_REASON = 300


class WriteError(Exception):
    """Rows cannot be written where they should be."""


@contextlib.contextmanager
def _named(out: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WriteError(f"--out {out}: {error.strerror}") from None


def begin(out: pathlib.Path) -> None:
    """Finds out whether rows can be written, and starts a line where another run was cut off."""
    with _named(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            lines = out.read_bytes().splitlines(keepends=True) if out.is_file() else []
            cut = bool(lines) and not lines[-1].endswith(b"\n")
            if cut or not out.is_file():  # a device opens whether or not it can be written
                file.write("\n")
    if cut:
        print(f"{out}: line {len(lines)} has no end, new rows start below it", file=sys.stderr)


def append(out: pathlib.Path, row: Row) -> None:
    with _named(out), out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def rounded(x: float) -> float:
    return float(f"{x:.6g}")


def reason(error: BaseException, *, refused: bool) -> str:
    """What a row says of an exception; `refused` where it means that a case is not supported."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ImportError):
        kind = "not installed"
    elif "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        kind = "out of memory"
    elif refused:
        kind = "refused"
    else:
        kind, text = "failed", f"{type(error).__name__}: {text}"
    return f"{kind}: {text}"[:LONGEST_REASON]
