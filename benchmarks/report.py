"""Prints the tables of result files; writes docs/benchmarks.md, its plots and the README's figures.

    python -m benchmarks report FILE...
    python -m benchmarks report --check

What is printed comes from the files named, and comes first. What is written comes from
benchmarks/results/ alone, so that a figure in the documents is always one that the repository
holds.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import plots, tables
from benchmarks.tables import Row, best, group, number

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- performance: begin -->", "<!-- performance: end -->"
NAMES = {"attention": "Attention", "grouped_matmul": "Grouped matmul"}
DIRECTIONS = {
    "fwd": "forward",
    "bwd": "gradients",
    "fwdbwd": "forward and gradients",
    "dlhs": "gradient of lhs",
    "drhs": "gradient of rhs",
}
GRADIENTS = (("bwd",), ("dlhs", "drhs"), ("fwdbwd",))
NO_KERNEL = "No GPU kernel yet: `xla` is what runs, and what is compared here."

DOCUMENT = """\
# Benchmarks

`python -m benchmarks report` writes this page, its plots and the README's figures from the result
files in [benchmarks/results](../benchmarks/results). Experiments, with what they taught, stand in
[benchmarks/LOG.md](../benchmarks/LOG.md).

## What is measured

- **Time** is the device's. On a GPU (`cupti`) calls are queued one after another under the
  profiler, and one lasts from the start of its first kernel to the end of its last: gaps within a
  call count, the host's work before it does not. Calls of over 10 ms, and all on a CPU, are timed
  one by one by the host (`wall`); `queued` is the host's time of queued calls over their number,
  where the profiler sees nothing. Repeats take `--budget-ms` (150 unless given), but are 5 at least
  and 200 at most; their median counts, and as spread the distance between their quartiles. Calls of
  up to 10 ms on a GPU are first run for 100 ms, 2000 of them at most, in which it settles under its
  power limit; before longer calls, and on a CPU, a few calls run untimed.
- **Operands** are random normal numbers. As many sets of them are taken in turn as it needs for
  none to be found in the second-level cache.
- **Values** are checked before anything is timed, against float64, on a sample of what a large case
  has. An implementation that is wrong is shown as wrong and has no time. One that cannot run a case
  is a dash, with its reason beneath the table.
- **Directions** of attention: `fwd`; `bwd`, the gradients of query, key and value from what the
  forward saved; `fwdbwd`, both. Of grouped matmul: `fwd`; `dlhs` and `drhs`, the gradient of one
  operand each; `bwd`, both; `fwdbwd`, all three products.
- **TFLOP/s** count what the mathematics needs, the same for every implementation. Attention:
  forward 2(H + Hv) for each head and each pair of query and key that may see each other (half of
  all pairs when causal), backward 2.5 times that. Grouped matmul: 2MKN for each product, M being
  the rows that belong to a group.
- **Ceilings** are measured in the same run on the same card: a large dense product (bfloat16 on a
  GPU, float32 on a CPU), and a copy with bytes read and written. "matmul" is the share of the first
  that the fastest of ours reaches; "copy" is that of the second, if each operand were read once and
  each result written once. `dense` is one dense product of as many FLOPs as the case.
- **Ratio** is the speed of the fastest of ours over that of the fastest peer with right values:
  below 1 ours is slower. Means are geometric, over the cases that have a ratio.
- **Seconds to compile** and **temporary memory**, beside arguments and results, are the compiler's;
  PyTorch's are its first call and the peak of its allocator.

Attention is named by batch `b`, length `t` (`s` of the keys, if another), heads `n` (after a stroke
those of the keys) and head dim `h` (after a stroke that of the values); a grouped matmul by rows
`m`, `g` matrices of `k` x `n` and how the sizes of the groups are distributed.

Ours are `mosaic_gpu`, `triton` and `xla`. All else is `library:variant`: JAX's run in one process
with ours, PyTorch's in a second one.

## Running it

```sh
python -m benchmarks run --op attention --impl ours,cudnn,tokamax --set fa3 --out FILE.json
python -m benchmarks report FILE.json   # tables of that file
python -m benchmarks report             # tables of all files; rewrites this page and the README
python -m benchmarks report --check     # exit 1 where they are not up to date
```

The first two rewrite them, from all files in benchmarks/results. Of two rows of one device, case,
direction, implementation and JAX the newer counts.
"""


def main(files: Sequence[Path], *, check: bool = False, root: Path = ROOT) -> None:
    """Prints tables of `files` (none: all results) and rewrites the documents, or checks."""
    results = sorted((root / "benchmarks" / "results").glob("*.json"))
    try:
        named = tables.read(files or results)
        if not check:
            _print(named)
        rows = tables.read(results)
        texts = {root / "docs" / "benchmarks.md": document(rows)}
        readme = root / "README.md"
        texts[readme] = _between_markers(readme, performance(rows))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    charts = {root / "docs" / "plots" / name: some for name, some in _charts(rows).items()}
    drawn = set((root / "docs" / "plots").glob("*.png"))
    if check:
        stale = [p for p, text in texts.items() if not p.exists() or p.read_text("utf-8") != text]
        stale += sorted(drawn ^ set(charts))
        if stale:
            names = ", ".join(str(path.relative_to(root)) for path in stale)
            sys.exit(f"not up to date, run `python -m benchmarks report`: {names}")
        return
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    for path in drawn - set(charts):
        path.unlink()
    for path, some in charts.items():
        plots.draw(some, path)


def _print(rows: Sequence[Row]) -> None:
    for (device,), of_device in _devices(rows):
        for title, some in _sections(of_device):
            print(f"{device}: {title}. {tables.provenance(some)}\n\n{tables.section(some)}\n")
        print(f"{device}: {_means(of_device)}\n")


def document(rows: Sequence[Row]) -> str:
    """docs/benchmarks.md: how it is measured, then everything that was, device by device."""
    parts = [DOCUMENT.strip()]
    for (device,), some in _devices(rows):
        parts += [f"## {device}", _source(some, "../benchmarks/results/")]
        parts += ["What ran:", _implementations(some), _means(some)]
        for title, of_section in _sections(some):
            pictures = [_picture(chart, "plots/") for chart in _charts(of_section).values()]
            parts += [f"### {title}", *pictures, tables.section(of_section, _quoted)]
    return "\n\n".join(parts) + "\n"


def performance(rows: Sequence[Row]) -> str:
    """The README's section: chosen cases of every GPU, means alone of a CPU."""
    parts = [
        "Written by `python -m benchmarks report` from the files that are named. A ratio is our\n"
        "speed over that of the fastest peer: above 1 ours is faster, below 1 slower. All cases,\n"
        "and how they are measured: [docs/benchmarks.md](docs/benchmarks.md)."
    ]
    devices = _devices(rows)
    if not any(tables.on_gpu(some) for _, some in devices):
        parts.append(f"Nothing has been measured on a GPU. {NO_KERNEL}")
    for (device,), some in devices:
        parts.append(f"**{device}**: {_source(some, 'benchmarks/results/')}")
        for (op,), of_op in group(some, "op").items() if tables.on_gpu(some) else ():
            parts += _highlights(op, of_op)
        parts.append(_means(some))
    return "\n\n".join(parts)


def _highlights(op: str, rows: Sequence[Row]) -> Iterator[str]:
    timed = {row["implementation"] for row in rows if row["ms"] is not None}
    yield f"*{NAMES[op]}*, TFLOP/s. " + ("" if timed & {"mosaic_gpu", "triton"} else NO_KERNEL)
    present = {row["direction"] for row in rows}
    gradients = next((g for g in GRADIENTS if present.issuperset(g)), ())
    directions = [d for d in ("fwd", *gradients) if d in present] or sorted(present)
    header = ["case"]
    for direction in directions:
        header += [f"{DIRECTIONS[direction]}: ours", "best peer", "ratio"]
    lines = []
    for (case,), some in group(_chosen(rows), "case").items():
        lines.append([case])
        for direction in directions:
            of_direction = [row for row in some if row["direction"] == direction]
            lines[-1] += [_fastest(of_direction, which) for which in ("ours", "peer")]
            lines[-1].append(number(tables.ratio(of_direction)))
    yield tables.table(header, lines)
    charts = _charts(row for row in rows if row["direction"] == directions[0]).values()
    if charts:
        most = max(charts, key=lambda some: sum(row["flops"] for row in some))
        yield _picture(most, "docs/plots/")


def _chosen(rows: Sequence[Row]) -> list[Row]:
    """Of each set the cases to show up front: well-known ones, or else the one of most work."""
    shown = []
    for some in group(rows, "set").values():
        known = [row for row in some if _well_known(row)]
        forward = [row for row in some if row["direction"] == "fwd"] or some
        heaviest = max(forward, key=lambda row: row["flops"])["case"]
        shown += known or [row for row in some if row["case"] == heaviest]
    return shown


def _well_known(row: Row) -> bool:
    if row["op"] == "grouped_matmul":
        return row["distribution"] == "dirichlet"
    same = row["heads"] == row["kv_heads"] and row["head_dim"] == row["v_head_dim"]
    plain = same and row["window"] is None and row["documents"] is None and not row["lengths"]
    known = row["head_dim"] in (64, 128, 256) and row["q_len"] in (4096, 16384)
    return plain and known and row["dtype"] == "bfloat16"


def _fastest(rows: Sequence[Row], which: str) -> str:
    if row := best(rows, which):
        return f"{number(row['tflops'])} {row['implementation']}"
    return tables.DASH if any(tables.kind(row) == which for row in rows) else "not measured"


def _devices(rows: Sequence[Row]) -> list[tuple[tuple, list[Row]]]:
    """GPUs first, then by name."""
    found = group(rows, "device").items()
    return sorted(found, key=lambda item: (not tables.on_gpu(item[1]), item[0]))


def _sections(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """Title and rows of each operation and direction of one device."""
    found = group(rows, "op", "direction")
    for op, name in NAMES.items():
        for direction in tables.DIRECTIONS[op]:
            if some := found.get((op, direction)):
                yield f"{name}, {DIRECTIONS[direction]} (`{direction}`)", some


def _charts(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of each plot by its file name."""
    groups = group(rows, *plots.KEYS).values()
    timed = [some for some in groups if any(row["ms"] is not None for row in some)]
    return {plots.file_name(some[0]): some for some in timed}


def _picture(rows: Sequence[Row], folder: str) -> str:
    return f"![{plots.title(rows[0])}]({folder}{plots.file_name(rows[0])})"


def _source(rows: Sequence[Row], folder: str) -> str:
    files = sorted({f"[{row['file']}]({folder}{row['file']})" for row in rows})
    text = f"{tables.provenance(rows)}; {', '.join(files)}."
    peaks = [sorted({r[key] for r in rows} - {None}) for key in ("peak_tflops", "peak_gbps")]
    if all(peaks):
        product, copy = (" to ".join(map(number, dict.fromkeys((p[0], p[-1])))) for p in peaks)
        text += f" Ceilings: a dense product {product} TFLOP/s, a copy {copy} GB/s."
    return text


def _means(rows: Sequence[Row]) -> str:
    timed = {row["implementation"] for row in rows if row["ms"] and tables.kind(row) == "peer"}
    peers = ", ".join(sorted(timed)) or "none"
    text = f"Geometric means of the ratio, with the number of cases; peers that ran: {peers}."
    return f"{text}\n\n{tables.means(rows)}"


def _implementations(rows: Sequence[Row]) -> str:
    """How many measurements of each implementation came to what."""
    lines = []
    for name, some in tables.columns(rows).items():
        counts = [sum((row["error"] or "").startswith(e) for row in some) for e in tables.ERRORS]
        versions = ", ".join(sorted({tables.version(row["jax"]) for row in some}))
        lines.append([name, versions, str(len(some) - sum(counts)), *map(str, counts)])
    header = ["implementation", "version", "timed", *(e.removesuffix(": ") for e in tables.ERRORS)]
    return tables.table(header, lines, left=2)


def _quoted(text: str) -> str:
    """Text of an error on one line, with nothing in it that Markdown would take for its own."""
    return " ".join(text.split()).translate({ord(c): f"&#{ord(c)};" for c in "&<>[]`*|"})


def _between_markers(path: Path, text: str) -> str:
    old = path.read_text("utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(END) < old.index(BEGIN):
        raise ValueError(f"{path} must hold {BEGIN} and then {END}, each once")
    return f"{old.split(BEGIN)[0]}{BEGIN}\n{text}\n{END}{old.split(END)[1]}"
