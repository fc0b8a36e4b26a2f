"""The harness: what a run writes, and what becomes of implementations that don't work."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__, operations, peers, run, shapes, tables
from benchmarks import rows as rows_module
from pallas_ops import timing

ROOT = Path(__file__).parents[2]
KEYS = ["op", "direction", "implementation", "case", "set"]
KEYS += ["ms", "ms_spread", "tflops", "compile_s", "temp_bytes", "timer", "flops", "bytes"]
KEYS += ["peak_tflops", "peak_gbps", "device", "jax", "driver", "commit", "date", "error"]
ATTENTION = "b2 t33 n4/2 h16 causal float32"
GROUPED = "m60 k16 n24 g4 tail float32"


def command(*args):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "benchmarks", *args],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "BENCHMARK_COMMIT": "abc1234"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_from_the_command_line(tmp_path):
    out = tmp_path / "new" / "rows.json"
    # Two of one product for `dense`, in one chunk with attention; the last case in one of its own.
    grouped = [GROUPED.replace("tail", name) for name in ("uniform", "zipf", "tail")]
    cases = f"^({'|'.join(map(re.escape, [ATTENTION, *grouped]))})$"
    names = "ours,jax.nn:xla,cudnn,lax,dense,torch:grouped_mm"
    done = command(
        *("run", "--set", "tiny", "--impl", names, "--case", cases, "--out", str(out)),
        *("--budget-ms", "1", "--compile-workers", "2", "--compile-ahead", "3"),
    )
    assert done.returncode == 0, done.stderr
    found = rows(out)
    for row in found:
        shape = next(s for s in shapes.SETS["tiny"] if s.case == row["case"])
        assert set(row) == set(KEYS) | set(shape.fields())
        assert {**row, **shape.fields()} == row
        assert row["flops"] == shape.flops(row["direction"])
        assert row["bytes"] == shape.bytes(row["direction"])
        assert row["set"] == "tiny" and row["jax"] == jax.__version__ and row["driver"] is None
        assert row["commit"] == "abc1234" and re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert row["peak_tflops"] > 0 and row["peak_gbps"] > 0 and "cores" in row["device"]
    measured = {(r["case"], r["implementation"], r["direction"]): r for r in found}
    assert len(measured) == len(found) == 3 * 3 + 3 * 4 * 5
    for (_, name, _), row in measured.items():
        absent = {"jax.nn:cudnn": "refused: ", "torch:grouped_mm": "not installed: "}
        if name in absent:
            assert row["error"].startswith(absent[name]) and row["ms"] is None
            continue
        assert row["error"] is None and row["timer"] == "wall"
        assert row["ms"] > 0 and row["ms_spread"] >= 0 and row["compile_s"] > 0
        assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] / 1e9, rel=1e-4)
        assert row["temp_bytes"] >= 0
    assert len(tables.read([out])) == len(found)
    assert done.stdout.count("\n") == 2 + len(found)
    assert "100%" in done.stderr


def test_several_processes(tmp_path):
    """Each case is measured once, by one of them at a time, in the same surroundings."""
    out = tmp_path / "rows.json"
    cases = ["b1 t37 n2 h8 window5,3 float32", GROUPED, GROUPED.replace("tail", "zipf")]
    asked = ("run", "--set", "tiny", "--case", f"^({'|'.join(map(re.escape, cases))})$")
    asked += ("--direction", "fwd", "--budget-ms", "1", "--processes", "2")
    done = command(*asked, "--impl", "xla", "--out", str(out))
    assert done.returncode == 0, done.stderr
    found = rows(out)
    assert sorted(row["case"] for row in found) == sorted(cases)
    assert all(row["ms"] > 0 for row in found)
    assert len({(row["peak_tflops"], row["peak_gbps"], row["commit"]) for row in found}) == 1


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [("--impl", "torch", "--processes takes none"), ("--compile-ahead", "2", "leave out")],
)
def test_several_processes_refuse(option, value, reason, tmp_path, capsys):
    asked = ["run", "--set", "tiny", "--processes", "2", "--out", str(tmp_path / "rows.json")]
    assert __main__.main([*asked, option, value]) == 2
    assert reason in capsys.readouterr().err


def test_list():
    done = command(
        "run", "--set", "fa3", "--set", "decode", "--case", "t512 .*causal|m512", "--list"
    )
    assert done.stdout.splitlines() == [
        "fa3\tattention\tb32 t512 n32 h64 causal bfloat16",
        "fa3\tattention\tb32 t512 n16 h128 causal bfloat16",
        "fa3\tattention\tb32 t512 n8 h256 causal bfloat16",
        "decode\tgrouped_matmul\tqwen3_30b_up m512 k2048 n1536 g128 dirichlet bfloat16",
    ]


@pytest.mark.parametrize("out", [".", "", "file/below.json", "/dev/full", "/proc/nope/x.json"])
def test_where_rows_cannot_be_written_nothing_is_measured(out, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "_Runner", _raises(AssertionError("measured")))
    assert __main__.main(["run", "--set", "tiny", "--out", out]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out {Path(out)}: ")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """bench(op, {name: loader}, *args): rows of one tiny case, with peers made up."""
    monkeypatch.setattr(timing, "ceilings", lambda: (1.0, 1.0))
    monkeypatch.setattr(timing, "rotation", lambda size: 2)
    out = tmp_path / "rows.json"

    def call(op, loaders, *args):
        table = "ATTENTION" if op == "attention" else "GROUPED"
        monkeypatch.setattr(peers, table, loaders)
        monkeypatch.setattr(peers, "ALIASES", {})
        case = ATTENTION if op == "attention" else GROUPED
        case = ["--set", "tiny", "--op", op, "--case", f"^{re.escape(case)}$", "--budget-ms", "1"]
        names = ["--impl", ",".join(loaders)] if loaders else []
        status = __main__.main(["run", *case, *names, "--out", str(out), *args])
        found = rows(out) if out.exists() else []
        return status, {(r["implementation"], r["direction"]): r for r in found}

    return call


def _attention(change):
    """jax.nn's attention with a fault."""

    def attend(operands, shape):
        qkv = [operands[name] for name in ("query", "key", "value")]
        return change(jax.nn.dot_product_attention, *qkv)

    return lambda: attend


def _raises(error):
    def f(*args):
        raise error

    return f


@jax.custom_vjp
def _no_gradient(x):
    return x


_no_gradient.defvjp(lambda x: (x, None), _raises(NotImplementedError("no backward here")))


def test_faults_become_rows(bench, capsys):
    causal = dict(is_causal=True)
    loaders = {
        "peer:right": _attention(lambda f, q, k, v: f(q, k, v, **causal)),
        "peer:scale": _attention(lambda f, q, k, v: f(q, k, v, scale=1 / 16, **causal)),
        "peer:mask": _attention(lambda f, q, k, v: f(q, k, v)),
        "peer:nan": _attention(lambda f, q, k, v: f(q, k, v, **causal) + jnp.nan),
        "peer:forward": _attention(lambda f, q, k, v: _no_gradient(f(q, k, v, **causal))),
        "peer:value": _attention(_raises(ValueError("head dim\n of 16"))),
        "peer:memory": _attention(_raises(RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"))),
        "peer:bug": _attention(_raises(KeyError("x"))),
        "peer:absent": _raises(ImportError("library is not installed")),
    }
    status, found = bench("attention", loaders)
    assert status == 0 and len(found) == len(loaders) * 3
    for (name, direction), row in found.items():
        expected = {
            "peer:scale": "wrong: ",
            "peer:mask": "wrong: ",
            "peer:nan": "wrong: out is not finite" if direction != "bwd" else None,
            "peer:forward": "refused: no backward here" if direction != "fwd" else None,
            "peer:value": "refused: head dim of 16",
            "peer:memory": "out of memory: RESOURCE_EXHAUSTED: 9 GiB",
            "peer:bug": "failed: KeyError: 'x'",
            "peer:absent": "not installed: library is not installed",
        }.get(name)
        if expected is None:
            assert row["error"] is None and row["ms"] > 0
        else:
            assert row["error"].startswith(expected), row["error"]
            assert row["ms"] is row["ms_spread"] is row["tflops"] is None
    wrong = found["peer:mask", "bwd"]
    assert re.search(r"largest error [\d.e+-]+, root mean square .*; allowed ", wrong["error"])
    assert wrong["compile_s"] > 0 and wrong["temp_bytes"] > 0
    assert "wrong: out is not finite" in capsys.readouterr().out


def test_a_group_without_gradient_is_wrong(bench):
    def zero_first(products):
        def drhs(lhs, ct, group_sizes):
            return products.drhs(lhs, ct, group_sizes).at[jnp.argmax(group_sizes)].set(0)

        return lambda: products._replace(drhs=drhs)

    peer = zero_first(operations.by_vjp(jax.lax.ragged_dot))
    _, found = bench("grouped_matmul", {"peer:zero": peer}, "--direction", "fwd,dlhs,drhs,fwdbwd")
    assert [d for (_, d), r in found.items() if r["error"] is None] == ["fwd", "dlhs"]
    assert found["peer:zero", "drhs"]["error"].startswith("wrong: drhs of group ")


def test_what_does_not_fit_is_not_run(bench, monkeypatch):
    def compile_(f, *args):
        return operations.Program(_raises(RuntimeError("was run")), 1.0, 5 * 2**30)

    monkeypatch.setattr(operations, "_compile", compile_)
    for free, error in (
        (5 * 2**30 - 1, "out of memory: 5.00 GiB of temporary memory are more than is free"),
        (5 * 2**30, "failed: RuntimeError: was run"),
        (None, "failed: RuntimeError: was run"),
    ):
        monkeypatch.setattr(run, "_free_bytes", lambda free=free: free)
        _, found = bench("attention", {}, "--impl", "xla", "--direction", "fwd")
        row = found["xla", "fwd"]
        assert row["error"] == error and row["ms"] is None and row["temp_bytes"] == 5 * 2**30


def test_the_commit(monkeypatch):
    monkeypatch.setattr(timing, "ceilings", lambda: (1.0, 1.0))
    monkeypatch.setattr(run, "_command", lambda *command: "of git")
    monkeypatch.setenv("BENCHMARK_COMMIT", "given")
    assert run._environment()["commit"] == "given"
    monkeypatch.delenv("BENCHMARK_COMMIT")
    assert run._environment()["commit"] == "of git"


def test_a_value_error_of_ours_is_a_failure():
    assert run._reason(ValueError("x"), ours=True) == "failed: ValueError: x"
    assert run._reason(ValueError("x"), ours=False) == "refused: x"
    assert run._reason(NotImplementedError(), ours=True) == "refused: NotImplementedError"


def test_what_this_platform_lacks_is_refused(bench):
    _, found = bench("attention", {}, "--impl", "mosaic_gpu", "--direction", "fwd")
    (row,) = found.values()
    assert row["error"].startswith("refused: flash_attention: ")


def test_rows_survive_what_ends_the_run(bench, monkeypatch, tmp_path):
    times = iter([timing.Timing(1.0, 0.1, "wall", 5)])

    def measure(*args, **kwargs):
        try:
            return next(times)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(timing, "measure", measure)
    right = _attention(lambda f, q, k, v: f(q, k, v, is_causal=True))
    with pytest.raises(KeyboardInterrupt):
        bench("attention", {"peer:right": right})
    (row,) = rows(tmp_path / "rows.json")
    assert row["ms"] == 1.0 and row["ms_spread"] == 0.1 and row["direction"] == "fwd"


def test_the_run_stops_where_the_device_is_lost(bench, monkeypatch, capsys):
    fault = RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    monkeypatch.setattr(timing, "measure", _raises(fault))
    right = _attention(lambda f, q, k, v: f(q, k, v, is_causal=True))
    status, found = bench("attention", {"peer:right": right})
    assert status == 0 and len(found) == 3  # the device answers: only this call failed
    monkeypatch.setattr(run.jax, "block_until_ready", _raises(fault))
    status, found = bench("attention", {"peer:other": right})
    assert status == 1 and len(found) == 3 + 1
    assert "the device fails since" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_an_error(bench, capsys, monkeypatch):
    monkeypatch.setattr(rows_module, "begin", lambda out: None)
    status, _ = bench("attention", {}, "--direction", "fwd", "--out", "/dev/full")
    assert status == 2 and "error: --out /dev/full: " in capsys.readouterr().err


def test_rows_begin_below_a_line_that_was_cut_off(bench, capsys, tmp_path):
    right = _attention(lambda f, q, k, v: f(q, k, v, is_causal=True))
    path = tmp_path / "rows.json"
    options = ["attention", {"peer:right": right}, "--direction", "fwd"]
    bench(*options)
    assert "has no end" not in capsys.readouterr().err
    whole = path.read_text()
    path.write_text(whole + whole[:99])
    with pytest.raises(json.JSONDecodeError):
        bench(*options)
    assert f"{path}: line 2 has no end" in capsys.readouterr().err
    first, cut, new = path.read_text().splitlines()
    assert [first, cut] == [whole.strip(), whole[:99]]
    assert json.loads(new)["implementation"] == "peer:right"
    with pytest.raises(ValueError, match=r"rows\.json, line 2: not JSON"):
        tables.read([path])


def test_no_time(bench, capsys):
    right = _attention(lambda f, q, k, v: f(q, k, v, is_causal=True))
    status, found = bench("attention", {"peer:right": right}, "--limit-s", "1e-9")
    assert status == 0 and not found
    assert f"stopped after 1e-09 s, before {ATTENTION}" in capsys.readouterr().err


def test_time_that_ends_between_two_measurements(bench, monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])

    def measure(*args, **kwargs):
        now[0] = 11.0
        return timing.Timing(1.0, 0.1, "wall", 5)

    monkeypatch.setattr(timing, "measure", measure)
    right = _attention(lambda f, q, k, v: f(q, k, v, is_causal=True))
    status, found = bench("attention", {"peer:right": right}, "--limit-s", "10")
    assert status == 0 and list(found) == [("peer:right", "fwd")]
    assert f"before {ATTENTION}, peer:right, bwd" in capsys.readouterr().err


def test_programs_are_compiled_once_for_all_distributions(bench, monkeypatch):
    compiled = []
    compile_ = operations._compile
    monkeypatch.setattr(
        operations, "_compile", lambda f, *args: compiled.append(f) or compile_(f, *args)
    )
    bench("grouped_matmul", {}, "--case", "(uniform|zipf) float32", "--direction", "fwd")
    assert len(compiled) == 1


def test_torch_rows_get_the_ceilings_of_the_run(bench, monkeypatch):
    """A second process that measures one direction and dies of the next."""

    def process(command, **kwargs):
        paths = dict(itertools.pairwise(command))
        (case,) = rows(paths["--cases"])
        assert case["implementations"] == ["torch:grouped_mm"]
        row = dict(case=case["case"], implementation="torch:grouped_mm", direction="fwd")
        row |= dict(ms=2.0, ms_spread=0.5, tflops=3.0, compile_s=0.1, temp_bytes=0, timer="cupti")
        row |= dict(jax="torch 2.11.0", error=None)
        paths["--out"].write_text(json.dumps(row) + "\n")
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(run.subprocess, "run", process)
    monkeypatch.setattr(run, "_command", lambda *command: None)
    options = ["--impl", "torch:grouped_mm", "--direction", "fwd,drhs"]
    _, found = bench("grouped_matmul", {}, *options)
    row = found["torch:grouped_mm", "fwd"]
    assert row["ms"] == 2.0 and row["jax"] == "torch 2.11.0" and row["peak_tflops"] == 1.0
    assert found["torch:grouped_mm", "drhs"]["error"].startswith("failed: the process of PyTorch")
