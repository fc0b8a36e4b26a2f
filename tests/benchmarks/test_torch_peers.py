"""The process of PyTorch: its rows without PyTorch, its timing and its failures."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from benchmarks import torch_libraries, torch_peers
from benchmarks.shapes import PRODUCTS, AttentionShape, GroupedShape
from pallas_ops import timing

ROOT = Path(__file__).parents[2]
ATTENTION = AttentionShape(2, 40, 40, 2, 2, 16, 16, "float32")
WINDOW = AttentionShape(1, 64, 64, 2, 2, 16, 16, causal=True, window=(7, 0))
GROUPED = GroupedShape(60, 16, 24, 4, "float32")
SHAPES = {s.case: s for s in (ATTENTION, WINDOW, GROUPED)}


def torch_rows(tmp_path):
    cases, out = tmp_path / "cases.json", tmp_path / "rows.json"
    lines = [
        dict(
            op=s.op,
            case=s.case,
            implementations=list(torch_libraries.LOADERS[s.op]),
            directions=["bwd"] if s is WINDOW else list(s.directions),
            **s.fields(),
        )
        for s in SHAPES.values()
    ]
    cases.write_text("".join(json.dumps(line) + "\n" for line in lines))
    limits = ["--budget-ms", "1", "--limit-s", "inf"]
    assert torch_peers.main(["--cases", str(cases), "--out", str(out), *limits]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    keys = ["case", "direction", "implementation", "jax", "error"]
    keys += ["ms", "ms_spread", "tflops", "compile_s", "temp_bytes", "timer"]
    assert all(set(row) == set(keys) for row in rows)
    return rows


def test_the_process_of_torch_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    rows = torch_rows(tmp_path)
    for row in rows:
        assert row["error"] == "not installed: torch is not installed"
        assert row["ms"] is row["jax"] is None
    found = [(row["case"], row["implementation"], row["direction"]) for row in rows]
    wanted = [
        *(
            (ATTENTION.case, n, d)
            for n in torch_libraries.LOADERS["attention"]
            for d in ("fwd", "bwd", "fwdbwd")
        ),
        *((WINDOW.case, n, "bwd") for n in torch_libraries.LOADERS["attention"]),
        *(
            (GROUPED.case, n, d)
            for n in torch_libraries.LOADERS["grouped_matmul"]
            for d in PRODUCTS
        ),
    ]
    assert sorted(found) == sorted(wanted)


def test_the_process_of_torch_without_a_gpu(tmp_path, monkeypatch):
    torch = stand_in_for_torch()
    torch.cuda.is_available = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    errors = {r["error"] for r in torch_rows(tmp_path) if r["implementation"].startswith("torch:")}
    assert errors == {"refused: needs an NVIDIA GPU"}


def test_the_process_of_torch_takes_no_jax_device(tmp_path):
    (tmp_path / "cases.json").write_text("")
    command = (
        "from benchmarks import torch_peers; "
        f"torch_peers.main(['--cases', {str(tmp_path / 'cases.json')!r}, '--out', 'unused',"
        " '--budget-ms', '1', '--limit-s', '1']);"
        "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, check=False, timeout=120)
    assert done.returncode == 0


def stand_in_for_torch(events=None):
    """As much of torch as is needed to time calls: `events` are what its profiler saw."""

    class Event:
        def __init__(self, start, end, kind="DeviceType.CUDA"):
            self.start, self.end, self.kind = start, end, kind

        def start_ns(self):
            return self.start

        def duration_ns(self):
            return self.end - self.start

        def device_type(self):
            return self.kind

    class Profile:
        def __init__(self, **_):
            seen = [Event(*event) for event in events or ()]
            results = types.SimpleNamespace(events=lambda: seen)
            self.profiler = types.SimpleNamespace(kineto_results=results)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    return types.SimpleNamespace(
        __version__="2.11.0+cu130",
        cuda=types.SimpleNamespace(synchronize=lambda: None, is_available=lambda: True),
        profiler=types.SimpleNamespace(
            profile=Profile, ProfilerActivity=types.SimpleNamespace(CUDA="cuda")
        ),
    )


def test_torch_is_timed_by_spans_on_the_device(monkeypatch):
    monkeypatch.setattr(timing, "_MOST_CALLS", 5)
    events = [
        (10_000_000 * i + a, 10_000_000 * i + b)
        for i in range(5)
        for a, b in ((0, 10**6), (2 * 10**6, 3 * 10**6))
    ]
    called = []
    calls = [lambda i=i: called.append(i) for i in range(3)]
    row = torch_peers.measure(
        stand_in_for_torch([*events, (0, 10**9, "DeviceType.CPU")]), calls, budget_ms=1
    )
    assert row == dict(ms=3.0, ms_spread=0.0, timer="cupti")
    assert called[:3] == [0, 1, 2] and called[-5:] == [0, 1, 2, 0, 1]  # once, then in turn

    row = torch_peers.measure(stand_in_for_torch(), calls, budget_ms=1)
    assert row["timer"] == "queued" and row["ms"] > 0


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotImplementedError("no windows"), "refused: no windows"),
        (AssertionError("head_dim 300 is not supported"), "refused: head_dim 300"),
        (RuntimeError("No available kernel. Aborting execution."), "refused: No available kernel"),
        (ImportError("quack is not installed"), "not installed: quack"),
        (RuntimeError("CUDA out of memory. Tried to"), "out of memory: CUDA out of memory"),
        (RuntimeError("a bug\nof two lines"), "failed: RuntimeError: a bug of two lines"),
    ],
)
def test_one_failure_leaves_the_other_rows(error, text, tmp_path, monkeypatch, capsys):
    def result(torch, operation, direction, budget_ms):
        if operation.shape == ATTENTION:
            raise error
        return dict(ms=1.0, ms_spread=0.1, tflops=2.0, compile_s=0.5, temp_bytes=0, timer="cupti")

    rows = run_with_stand_in(tmp_path, monkeypatch, result, broken=lambda: None)
    first = [row["error"] for row in rows if row["case"] == ATTENTION.case]
    assert len(first) == 3 and all(e.startswith(text) for e in first)
    rest = [row for row in rows if row["case"] != ATTENTION.case]
    assert {row["jax"] for row in rows} == {"torch 2.11.0"}
    assert rest and all(row["ms"] == 1.0 and row["error"] is None for row in rest)
    assert ("Traceback" in capsys.readouterr().err) == text.startswith("failed")


def test_a_device_that_fails_is_left_alone(tmp_path, monkeypatch):
    measured = []

    def result(torch, operation, direction, budget_ms):
        measured.append((operation.shape.case, direction))
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rows = run_with_stand_in(
        tmp_path, monkeypatch, result, broken=lambda: "failed: illegal memory access"
    )
    assert measured == [(ATTENTION.case, "fwd")]
    assert rows[0]["error"].startswith("failed: RuntimeError: CUDA error: an illegal")
    assert len(rows) == 9
    assert all("the device fails since a:b, " + ATTENTION.case in r["error"] for r in rows[1:])


def run_with_stand_in(tmp_path, monkeypatch, result, broken):
    """Rows of a run in which `result` measures and `broken` says what the device says."""
    loaders = {op: {"a:b": lambda: lambda shape: None} for op in ("attention", "grouped_matmul")}
    monkeypatch.setattr(torch_libraries, "LOADERS", loaders)
    monkeypatch.setitem(sys.modules, "torch", stand_in_for_torch())
    monkeypatch.setattr(torch_peers, "_result", result)
    monkeypatch.setattr(torch_peers, "_device_error", lambda torch: broken())
    return torch_rows(tmp_path)
