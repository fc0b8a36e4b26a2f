"""Result files: read strictly, the newest row of each measurement kept, and laid out as tables."""

import datetime
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import Row
from benchmarks.shapes import AttentionShape, GroupedShape

OURS = ("mosaic_gpu", "triton", "xla")
YARDSTICKS = ("dense", "reference")
DIRECTIONS = {shape.op: shape.directions for shape in (AttentionShape, GroupedShape)}
ERRORS = ("refused: ", "not installed: ", "wrong: ", "out of memory: ", "failed: ")
DASH = "-"
# What is computed of figures between these is finite.
_LEAST, _MOST = 1e-30, 1e30
_MAY_BE_0 = ("ms_spread", "compile_s", "temp_bytes")
_NONE = type(None)
_NUMBER = (int, float)
_COMMON = {
    **dict.fromkeys(("op", "direction", "implementation", "case", "set"), (str,)),
    **dict.fromkeys(("device", "jax", "date", "dtype"), (str,)),
    **dict.fromkeys(("driver", "commit", "error", "timer"), (str, _NONE)),
    **dict.fromkeys(("ms", "ms_spread", "tflops", "compile_s", "temp_bytes"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("peak_tflops", "peak_gbps"), (*_NUMBER, _NONE)),
    **dict.fromkeys(("flops", "bytes"), _NUMBER),
}
_SHAPES = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "v_head_dim")
_KEYS = {
    "attention": {
        **_COMMON,
        **dict.fromkeys(_SHAPES, (int,)),
        **dict.fromkeys(("causal", "lengths"), (bool,)),
        "window": (list, _NONE),
        "documents": (int, _NONE),
    },
    "grouped_matmul": {
        **_COMMON,
        **dict.fromkeys(("m", "k", "n", "g"), (int,)),
        "distribution": (str,),
    },
}


def read(paths: Iterable[Path]) -> list[Row]:
    """Rows of both operations, the newest of each measurement; other programs' are left out.

    Of two rows of one device, operation, case, direction, implementation and JAX the later date
    wins, then the later file. Each row names its file. They are sorted by the sizes of their cases,
    in whatever order they were measured. Raises ValueError with file and line.
    """
    kept = {}
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            where = f"{path}, line {number}"
            try:
                row = json.loads(line, parse_constant=float)
                json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error})") from None
            if fault := _fault(row):
                raise ValueError(f"{where}: {fault}")
            if row["op"] not in _KEYS:
                continue
            names = ("device", "op", "case", "direction", "implementation", "jax")
            key = tuple(row[name] for name in names)
            if key not in kept or row["date"] >= kept[key]["date"]:
                kept[key] = {**row, "file": path.name}
    return sorted(kept.values(), key=_sizes)


def _sizes(row: Row) -> tuple:
    if row["op"] == "attention":
        names = ("head_dim", "v_head_dim", "heads", "kv_heads", "causal", "q_len", "kv_len")
    else:
        names = ("g", "k", "n", "m")
    return row["op"], row["dtype"], *(row[name] for name in names)


def _fault(row: Any) -> str | None:
    if not isinstance(row, dict) or not isinstance(row.get("op"), str):
        return "no object with a name as `op`"
    if row["op"] not in _KEYS:
        return None
    keys = _KEYS[row["op"]]
    if missing := [key for key in keys if key not in row]:
        return f"missing {', '.join(missing)}"
    for key, types in keys.items():
        value = row[key]
        if type(value) not in types:
            return f"`{key}` is {value!r}"
        least = 0 if key in _MAY_BE_0 else _LEAST
        if type(value) in _NUMBER and not least <= value <= _MOST:
            return f"`{key}` is {value!r:.40}, not between {least:g} and {_MOST:g}"
    window = row["window"] if row["op"] == "attention" else None
    if window is not None and not (
        len(window) == 2 and all(type(side) is int and side >= 0 for side in window)
    ):
        return f"`window` is {window!r}, not two sizes"
    if row["direction"] not in DIRECTIONS[row["op"]]:
        return f"`direction` is {row['direction']!r}, none of {', '.join(DIRECTIONS[row['op']])}"
    if kind(row) == "peer" and ":" not in row["implementation"]:
        return f"`implementation` is {row['implementation']!r}, not ours and no library:variant"
    if not _is_date(row["date"]):
        return f"`date` is {row['date']!r}, no date as YYYY-MM-DD"
    if row["error"] is not None and not row["error"].startswith(ERRORS):
        return f"`error` is {row['error']!r}, which begins with none of {', '.join(ERRORS)}"
    for key in ("ms", "ms_spread", "tflops"):
        if (row[key] is None) != (row["error"] is not None):
            return f"`{key}` is {row[key]!r} with `error` {row['error']!r}: one of them is null"
    return None


def _is_date(text: str) -> bool:
    try:
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def kind(row: Row) -> str:
    """ "ours", "yardstick" (one dense product, or the plain reference) or "peer"."""
    name = row["implementation"]
    return "ours" if name in OURS else "yardstick" if name in YARDSTICKS else "peer"


def on_gpu(rows: Sequence[Row]) -> bool:
    return any(row["driver"] or row["timer"] in ("cupti", "queued") for row in rows)


def group(rows: Iterable[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Rows by the values of these keys, in order of appearance."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def columns(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by implementation: ours, the peers by name, yardsticks; JAX's version if several."""
    ranks = {name: i for i, name in enumerate((*OURS, "peers", *YARDSTICKS))}
    found = group(rows, "implementation", "jax")
    order = sorted(found, key=lambda pair: (ranks.get(pair[0], ranks["peers"]), *pair))
    names = [name for name, _ in order]
    return {
        name if names.count(name) == 1 else f"{name} ({version(jax)})": found[name, jax]
        for name, jax in order
    }


def version(jax: str) -> str:
    return jax if jax.startswith("torch ") else f"JAX {jax}"


def best(rows: Iterable[Row], which: str) -> Row | None:
    """The fastest of "ours" or of the peers that gave right values."""
    timed = [row for row in rows if kind(row) == which and row["ms"] is not None]
    return min(timed, key=lambda row: row["ms"], default=None)


def ratio(rows: Sequence[Row]) -> float | None:
    """Our speed over that of the best peer, of the rows of one case and direction."""
    ours, peer = best(rows, "ours"), best(rows, "peer")
    return peer["ms"] / ours["ms"] if ours and peer else None


def mean_ratio(rows: Sequence[Row]) -> tuple[float | None, int, int]:
    """Geometric mean of the ratio in one direction, how many cases have one, and of how many."""
    ratios = [ratio(case) for case in group(rows, "case").values()]
    found = [x for x in ratios if x is not None]
    return statistics.geometric_mean(found) if found else None, len(found), len(ratios)


def number(x: float | None, digits: int = 3) -> str:
    """So many significant digits, never an exponent."""
    if x is None:
        return DASH
    places = digits - 1 - math.floor(math.log10(abs(x))) if x else 0
    return f"{x:.{max(places, 0)}f}"


def size(x: float | None) -> str:
    if x is None:
        return DASH
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(int(math.log2(x) // 10) if x >= 1 else 0, len(units) - 1)
    return f"{number(x / 2 ** (10 * power)) if power else int(x)} {units[power]}"


def share(row: Row | None, of: str) -> str:
    """Percent of the matmul ("tflops") or the copy ("gbps") ceiling that a row reaches."""
    if row is None or row["ms"] is None or row[f"peak_{of}"] is None:
        return DASH
    reached = row["tflops"] if of == "tflops" else row["bytes"] / row["ms"] / 1e6
    return f"{number(100 * reached / row[f'peak_{of}'], 2)} %"


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, aligned so that it can be read in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *lines)]
    rules = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]

    def text(cells):
        placed = enumerate(zip(cells, widths))
        cells = [x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in placed]
        return f"| {' | '.join(cells)} |"

    return "\n".join([text(header), text(rules), *map(text, lines)])


def provenance(rows: Sequence[Row]) -> str:
    """Driver, versions, dates, commits and timers of some rows, in words."""

    def every(key):
        return sorted({row[key] for row in rows if row[key] is not None})

    parts = [f"driver {', '.join(every('driver'))}"] if every("driver") else []
    parts += map(version, every("jax"))
    parts += [", ".join(every("date")), f"commit {', '.join(every('commit')) or 'unknown'}"]
    parts += [f"timer {', '.join(every('timer'))}"] if every("timer") else []
    return "; ".join(parts)


def means(rows: Sequence[Row]) -> str:
    """Geometric means of the ratio by operation, set and dtype, a column for each direction."""
    directions = [d for d in DIRECTIONS["grouped_matmul"] if any(r["direction"] == d for r in rows)]
    lines = []
    for names, some in group(rows, "op", "set", "dtype").items():
        by_direction = group(some, "direction")
        line = [*names]
        for direction in directions:
            mean, found, cases = mean_ratio(by_direction.get((direction,), []))
            of = f"{found}" if found == cases else f"{found} of {cases}"
            line.append(f"{number(mean)} ({of})" if cases else "")
        lines.append(line)
    return table(["operation", "set", "dtype", *directions], lines, left=3)


def section(rows: Sequence[Row], quote: Callable[[str], str] = str) -> str:
    """All of one device, operation and direction; `quote` guards the text of errors."""
    named = columns(rows)
    absent = {
        name: some[0]["error"]
        for name, some in named.items()
        if all((row["error"] or "").startswith("not installed: ") for row in some)
    }
    shown = {name: some for name, some in named.items() if name not in absent}
    notes: dict[str, list[str]] = {}

    def cell(name: str, row: Row | None, text) -> str:
        if row is None:
            return ""
        if row["error"] is None:
            return text(row)
        names = notes.setdefault(row["error"], [])
        names += [name] * (name not in names)
        mark = list(notes).index(row["error"]) + 1
        return f"{'wrong' if row['error'].startswith('wrong: ') else DASH} [{mark}]"

    speeds, details = [], []
    for (group_name, case), some in group(rows, "set", "case").items():
        of_case = {n: next((r for r in c if r["case"] == case), None) for n, c in shown.items()}
        ours = best(some, "ours")
        speeds.append(
            [group_name, case]
            + [cell(name, row, lambda row: number(row["tflops"])) for name, row in of_case.items()]
            + [share(ours, "tflops"), share(ours, "gbps"), number(ratio(some))]
        )
        details.append([case, *(cell(name, row, _details) for name, row in of_case.items())])
    parts = [
        table(["set", "case", *shown, "matmul", "copy", "ratio"], speeds, left=2),
        "\n".join(
            [f"- [{i}] {quote(text)} ({', '.join(notes[text])})" for i, text in enumerate(notes, 1)]
            + [f"- {name}: {quote(text)}" for name, text in absent.items()]
        ),
        "Milliseconds ± spread, seconds to compile, temporary memory:",
        table(["case", *shown], details),
    ]
    return "\n\n".join(part for part in parts if part)


def _details(row: Row) -> str:
    times = f"{number(row['ms'])} ±{number(row['ms_spread'], 1)} ms"
    return f"{times}, {number(row['compile_s'])} s, {size(row['temp_bytes'])}"
