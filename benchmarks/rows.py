"""What both processes write in a row: the measured keys, and what it says of an exception."""

from typing import Any

Row = dict[str, Any]

MEASURED = ("ms", "ms_spread", "tflops", "compile_s", "temp_bytes", "timer")
LONGEST_REASON = 300


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
