"""The doctor on an H200 that is not there, with toys in the place of attention's kernel."""

import sys
from pathlib import Path

import jax
import pytest

from pallas_ops import doctor

ROOT = Path(__file__).parents[2]
IGNORES = jax.__version_info__ >= (0, 12)
SCRIPT = """
from pallas_ops import examine
from pallas_ops.attention.primitive import flash_attention_bwd
from tests.compile import toys

toys.plug({kind!r})
del flash_attention_bwd.implementations["mosaic_gpu"]  # the toys have no backward
calls = examine._calls()
examine._calls = lambda: dict(list(calls.items())[:{count}])
examine.print_lines({chip!r})
"""


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the doctor; gives its exit code and its lines."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(kind: str, count: int = 1, chip: str = "h200"):
        script = SCRIPT.format(kind=kind, count=count, chip=chip)
        monkeypatch.setattr(doctor, "_command", lambda chip: [sys.executable, "-c", script])
        code = doctor.main(["--chip", chip])
        return code, capsys.readouterr().out.splitlines()

    return run


def wrong(lines):
    return [line.strip() for line in lines if line.strip().startswith("WRONG: ")]


def test_healthy_kernel(run):
    code, lines = run("healthy", count=3)
    text = "\n".join(lines)
    assert code == 0 and wrong(lines) == [] and lines[-1] == "nothing is wrong"
    assert lines[0] == "device: NVIDIA H200, by name"
    (assembler,) = [line for line in lines if line.startswith("assembler: ")]
    assert assembler.endswith("ignores setmaxnreg" if IGNORES else "heeds setmaxnreg")
    assert "as XLA's log says" in assembler
    assert text.count("flash_attention_fwd(4x4096x16x128, 4x4096x16x128): mosaic_gpu\n") == 1
    assert text.count("    healthy_") == 2 and text.count(" registers, 0 bytes spilled") == 2
    assert "flash_attention_bwd(4x4096x16x128, 4x4096x16x128): xla; not mosaic_gpu: no " in text
    assert "8x256): xla; not mosaic_gpu: H=256 is over 128; not triton: " in text


def test_spilling_kernel(run):
    code, lines = run("spilling")
    (found,) = wrong(lines)
    assert code == 1 and found.startswith("WRONG: registers are spilled to memory")
    assert lines[-1] == "something is wrong: see above"


def test_kernel_that_does_not_fit(run):
    code, lines = run("greedy")
    (found,) = wrong(lines)
    assert code == 1 and "it can't be compiled" in found
    assert "exceeds available shared memory" in found and "take smaller tiles" in found


def test_ignored_setmaxnreg(run):
    code, lines = run("trading")
    assert code == 0 and IGNORES == ("its registers suffice" in "\n".join(lines))
    code, lines = run("starved")
    assert code == IGNORES and len(wrong(lines)) == 2 * IGNORES
    assert not IGNORES or wrong(lines)[1].startswith("WRONG: setmaxnreg")


def test_kernel_that_the_card_is_too_old_for(run):
    """LLVM ends the process on the newest JAX and gives an error on the oldest."""
    code, lines = run("healthy", chip="l4")
    (assembler,) = [line for line in lines if line.startswith("assembler: ")]
    assert code == 1 and "setmaxnreg" not in assembler
    (found,) = wrong(lines)
    assert "flash_attention_fwd(4x4096x32x64, 4x4096x32x64): " in found
    assert "the compiler has ended its process" in found or "it can't be compiled" in found
