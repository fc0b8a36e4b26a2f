"""Bar charts of one device, operation, direction, set and dtype: same bytes for the same rows."""

import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

from benchmarks.tables import DASH, Row, best, columns, group, kind, number, version

OURS = "#c1121f"
YARDSTICK = "#d9d9d9"
OTHER = "#7f7f7f"
LIBRARIES = {
    "jax.nn": "#1f77b4",
    "jax.lax": "#17becf",
    "jax": "#8c6bb1",
    "tokamax": "#2ca02c",
    "flash-attn3-jax": "#bcbd22",
    "flash-attn-4": "#e6a817",
    "torch": "#ff7f0e",
    "quack": "#8c564b",
}
KEYS = ("device", "op", "direction", "set", "dtype")  # what the rows of one chart share
HATCHES = ("", "///", "...", "xxx", "\\\\\\")
_CASES = 12  # in a row of the chart


def colour(implementation: str) -> str:
    """Fixed for each library, whatever its variant; one strong colour for all of ours."""
    fixed = {"ours": OURS, "yardstick": YARDSTICK}
    library = implementation.split(":")[0]
    return fixed.get(kind({"implementation": implementation}), LIBRARIES.get(library, OTHER))


def styles(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each column; variants of one library differ by the hatch."""
    chosen = {}
    for name in names:
        of_library = [c for c, _ in chosen.values()].count(colour(name.split(" (")[0]))
        chosen[name] = colour(name.split(" (")[0]), HATCHES[of_library % len(HATCHES)]
    return chosen


def ceiling(row: Row) -> float | None:
    """TFLOP/s that the matmul and the copy ceiling leave a case."""
    if row["peak_tflops"] is None or row["peak_gbps"] is None:
        return None
    return min(row["peak_tflops"], row["flops"] / row["bytes"] * row["peak_gbps"] / 1e3)


def file_name(row: Row) -> str:
    words = " ".join(row[key] for key in KEYS)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".png"


def title(row: Row) -> str:
    return ", ".join(row[key] for key in (*KEYS[1:], KEYS[0]))


def draw(rows: Sequence[Row], path: Path) -> None:
    """Writes the chart of rows that agree in `KEYS`."""
    with matplotlib.style.context("default"):
        canvas = FigureCanvasAgg(_figure(rows))
        canvas.draw()
    # 64 colours make a third of the bytes, this method keeps those of bars as they are, and Pillow
    # writes neither date nor version.
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image = image.quantize(64, Image.Quantize.MAXCOVERAGE)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)


def _figure(rows: Sequence[Row]) -> Figure:
    cases = group(rows, "case")
    names = [case for (case,) in cases]
    shown = {
        name: {row["case"]: row for row in some}
        for name, some in columns(rows).items()
        if any(row["ms"] is not None or _wrong(row) for row in some)
    }
    dtype = rows[0]["dtype"]
    common = set.intersection(*(set(name.split()) for name in names)) if len(names) > 1 else {dtype}
    looks = styles(list(shown))
    panels = [names[i : i + _CASES] for i in range(0, len(names), _CASES)]
    figure = Figure(figsize=(11, 1 + 2.4 * len(panels)), dpi=110, layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, sharey=True)[:, 0]
    width = 0.84 / max(len(shown), 1)
    for axis, panel in zip(axes, panels):
        for x, case in enumerate(panel):
            for i, (name, by_case) in enumerate(shown.items()):
                if row := by_case.get(case):
                    at = x - 0.42 + (i + 0.5) * width
                    _bar(axis, at, width, row, *looks[name])
                    if row is best(cases[case,], "ours"):
                        style = dict(ha="center", va="bottom", fontsize=6, color=OURS)
                        axis.text(at, row["tflops"], number(row["tflops"]), **style)
            if most := max(filter(None, map(ceiling, cases[case,])), default=None):
                axis.hlines(most, x - 0.46, x + 0.46, colors="black", linestyles="--", lw=1)
        own = [" ".join(word for word in case.split() if word not in common) for case in panel]
        labels = [textwrap.fill(words, 12, break_on_hyphens=False) for words in own]
        axis.set_xticks(range(len(panel)), labels, fontsize=7)
        axis.set_xlim(-0.5, min(len(names), _CASES) - 0.5)
        axis.tick_params(axis="y", labelsize=7)
        axis.set_ylabel("TFLOP/s", fontsize=8)
        axis.grid(axis="y", lw=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(bottom=0)  # of all, when all are drawn
    versions = sorted({version(row["jax"]) for row in rows if row["ms"] is not None})
    both = " ".join(word for word in names[0].split() if word in common - {dtype})
    subtitle = ", ".join([*versions, both]) if both else ", ".join(versions)
    axes[0].set_title(f"{title(rows[0])}\n{subtitle}", fontsize=9)
    handles: list[Any] = [
        Patch(facecolor=face, hatch=hatch, edgecolor="white", label=name)
        for name, (face, hatch) in looks.items()
    ]
    if any(map(ceiling, rows)):
        label = "ceiling of matmul or copy"
        handles.append(Line2D([], [], color="black", linestyle="--", lw=1, label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=7)
    return figure


def _bar(axis, x: float, width: float, row: Row, face: str, hatch: str) -> None:
    if row["ms"] is not None:
        axis.bar(x, row["tflops"], width, color=face, hatch=hatch, edgecolor="white", lw=0.3)
    elif _wrong(row):
        axis.text(x, 0, " wrong", ha="center", va="bottom", rotation=90, fontsize=6)
    else:
        axis.text(x, 0, DASH, ha="center", va="bottom", fontsize=6)


def _wrong(row: Row) -> bool:
    return (row["error"] or "").startswith("wrong: ")
