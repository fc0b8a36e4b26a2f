"""Kernels compiled for an H200 that is not there, and what is said of them."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import compile_report
from pallas_ops.attention.primitive import flash_attention_fwd
from pallas_ops.compile_report import CompileError
from tests.compile import toys

# What the pinned packages bring. JAX 0.11 knows no libnvJitLink.
ASSEMBLER = "ptxas" if jax.__version_info__ < (0, 12) else "libnvJitLink"


@pytest.fixture
def plugged(monkeypatch):
    """A function that plugs a toy in for the time of a test."""
    table = dict(flash_attention_fwd.implementations)
    monkeypatch.setattr(flash_attention_fwd, "implementations", table)
    jax.clear_caches()
    yield toys.plug
    jax.clear_caches()


def report(kind: str) -> compile_report.Kernel:
    (kernel,) = compile_report.report(toys.kernel(kind), (), "h200")
    return kernel


def test_example_from_the_command_line(capsys):
    assert compile_report.main([]) == 0
    text = capsys.readouterr().out
    assert "16 wgmma, 0 mma, 2 TMA loads, 1 TMA stores" in text
    assert "0/0 bytes spilled" in text and "98304 bytes of shared memory" in text
    assert f"assembler: {ASSEMBLER} 1" in text and "as XLA's log says" in text
    assert f"assembled by {ASSEMBLER}" in text


def test_function_from_the_command_line(capsys):
    assert compile_report.main(["tests.compile.toys:spilling"]) == 1
    assert "problem: registers are spilled to memory" in capsys.readouterr().out
    assert compile_report.main(["tests.compile.toys:greedy"]) == 1
    assert "can't be compiled for h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    "what, words",
    [
        ("nomodule:f", "nomodule can't be imported"),
        ("json", "module:function, got 'json'"),
        ("", "module:function, got ''"),
        ("json:nope", "must be a function of no arguments"),
        ("json:dumps", "must be a function of no arguments"),
        ("os:getcwd", "must return (f, args)"),
    ],
)
def test_command_line_refuses_what_names_no_program(what, words, capsys):
    with pytest.raises(SystemExit) as end:
        compile_report.main([what])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_help_says_what_is_left_out(capsys):
    with pytest.raises(SystemExit):
        compile_report.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for words in ("default: h200", "default: a small kernel for Hopper", "Exit codes: 1 where"):
        assert words in text


def test_unknown_chip_is_refused():
    for use in (compile_report.devices, lambda chip: compile_report.report(jnp.sin, (), chip)):
        with pytest.raises(ValueError, match=r"chip must be one of a100, .*, got 'nope'"):
            use("nope")


def test_healthy_kernel():
    kernel = report("healthy")
    assert kernel.problems() == [] and kernel.remarks() == []
    assert 64 < kernel.registers <= 168 and kernel.threads == 384
    assert kernel.spill_stores == kernel.spill_loads == kernel.stack_frame == 0
    assert kernel.shared_memory == 128 * 64 * 4 and kernel.setmaxnreg == 0
    assert kernel.assembler == ASSEMBLER and kernel.instructions.total() > 100


def test_spills_are_told():
    kernel = report("spilling")
    assert kernel.spill_stores > 0 and kernel.spill_loads > 0
    (problem,) = kernel.problems()
    assert problem.startswith("registers are spilled to memory") and "smaller tiles" in problem
    assert "384 threads of a block have at most 168 registers each" in problem


def test_ignored_setmaxnreg_is_told():
    fitting, starved = report("trading"), report("starved")
    assert fitting.setmaxnreg == starved.setmaxnreg == 2 and fitting.problems() == []
    if ASSEMBLER == "ptxas":
        assert fitting.remarks() == starved.problems() == []
        return
    (remark,) = fitting.remarks()
    assert "ignored by libnvJitLink" in remark and "its registers suffice" in remark
    spills, ignored = starved.problems()
    assert spills.startswith("registers are spilled")
    assert ignored.startswith("setmaxnreg") and "use JAX 0.11.2, which calls ptxas" in ignored


def test_too_much_shared_memory_is_an_error_that_says_so():
    with pytest.raises(
        CompileError, match=r"exceeds available shared memory: .*262144 > .* \(take smaller tiles"
    ):
        report("greedy")


def test_kernel_that_the_process_has_compiled_is_reported_again():
    f = toys.kernel("healthy")
    twice = lambda: f() + jnp.sin(f())
    first, second, third = (
        compile_report.report(g, (), "h200")[0] for g in (f, f, lambda: twice())
    )
    assert first.registers == second.registers == third.registers


def test_kernel_chosen_by_a_primitive(plugged):
    plugged("healthy")
    qkv = [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)] * 3
    attend = lambda *a: pallas_ops.flash_attention(*a, implementation="mosaic_gpu")
    compiled, (kernel,) = compile_report.compile_for(jax.jit(attend), *qkv)
    assert kernel.name.startswith("healthy") and "mosaic_gpu" in compiled.as_text()
    gradient = jax.grad(lambda *a: pallas_ops.flash_attention(*a).astype(jnp.float32).sum())
    text = compile_report.lower_for(gradient, *qkv, chip="h200").as_text()
    assert "mosaic_gpu" in text


def test_program_without_kernels():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    compiled, kernels = compile_report.compile_for(lambda x: x + 1, x)
    assert kernels == [] and compiled.memory_analysis() is not None


def test_errors_while_tracing_are_left_alone():
    def f():
        raise ValueError("a user's mistake")

    with pytest.raises(ValueError, match="a user's mistake"):
        compile_report.report(f, (), "h200")


def test_second_compute_capability_is_refused():
    report("healthy")
    with pytest.raises(CompileError, match=r"has compiled for compute capability \(9, 0\)"):
        compile_report.report(toys.kernel("healthy"), (), "b200")
    compile_report.report(toys.kernel("healthy"), (), "h100")


def test_other_platforms_are_refused():
    jax.config.update("jax_platforms", "cuda,cpu")
    try:
        with pytest.raises(CompileError, match="must be started with JAX_PLATFORMS=cpu"):
            report("healthy")
    finally:
        jax.config.update("jax_platforms", "cpu")


def test_kernel_for_another_chip_says_so():
    command = [sys.executable, "-m", "pallas_ops.compile_report", "--chip", "b200"]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 1
    (first,) = done.stdout.splitlines()
    assert "not supported on .target" in first and "another generation of GPUs" in first
    assert "ptxas" not in done.stderr
