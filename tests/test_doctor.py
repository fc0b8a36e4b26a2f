"""The doctor on machines of several kinds."""

import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from pallas_ops import doctor, toolchain, tuning
from pallas_ops.attention import chunked

ROOT = Path(__file__).parents[1]


@pytest.fixture
def machine(monkeypatch, capsys):
    """Runs the doctor on a machine with this driver and GPUs; its exit code and lines."""

    def run(*arguments, driver=None, gpus=(), lines=(), end="", devices=None):
        def present(platform):
            if not gpus:
                raise RuntimeError(f"no {platform} here\nat all")
            return [SimpleNamespace(device_kind=kind, platform="gpu") for kind in gpus]

        script = f"for x in {list(map(json.dumps, lines))!r}:\n  print(x, flush=True)\n{end}"
        monkeypatch.setattr(doctor, "_command", lambda chip: [sys.executable, "-c", script])
        monkeypatch.setattr(doctor, "_driver", lambda: driver)
        monkeypatch.setattr(jax, "devices", devices or present)
        code = doctor.main(list(arguments))
        return code, capsys.readouterr().out.splitlines()

    return run


def blamed(lines):
    return [line.strip() for line in lines if "WRONG" in line]


def call(**facts):
    base = {"what": "call", "call": "attention", "primitive": "fwd(1x2)", "choice": "xla; not a: b"}
    return base | {"kernels": [], "error": None} | facts


def test_no_gpu(machine):
    code, lines = machine()
    assert code == 0 and lines[-1] == "nothing is wrong"
    assert lines[0] == "device: no GPU, so that every call runs xla (--chip checks a named GPU)"
    assert f"jax {jax.__version__}, jaxlib" in lines[1] and "pallas_ops " in lines[1]
    assert lines[2] == "tuning cache: off (PALLAS_OPS_CACHE_DIR is empty)" and len(lines) == 4


def test_gpu_without_the_plugin(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "_plugins", list)
    code, lines = machine(driver="580.95")
    assert code == 1 and lines[0] == "device: a GPU with driver 580.95"
    assert blamed(lines) == [
        "WRONG: JAX doesn't see the GPU: its CUDA plugin is not installed (pip install jax[cuda13])"
    ]


def test_gpu_that_jax_may_not_use(machine, monkeypatch):
    monkeypatch.setattr(toolchain, "has_plugin", lambda: True)
    code, lines = machine(driver="580.95")
    assert code == 1 and blamed(lines) == ["WRONG: JAX doesn't see the GPU: JAX_PLATFORMS is cpu"]


def test_plugin_that_fails(machine, monkeypatch):
    def devices(platform):
        try:
            raise RuntimeError("Unable to load cuDNN.\nIs it installed?")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("a plugin has failed")
        raise RuntimeError(f"no {platform} here")

    monkeypatch.setattr(toolchain, "has_plugin", lambda: True)
    jax.config.update("jax_platforms", None)
    try:
        code, lines = machine(driver="580.95", devices=devices)
    finally:
        jax.config.update("jax_platforms", "cpu")
    assert code == 1 and blamed(lines) == ["WRONG: JAX doesn't see the GPU: Unable to load cuDNN."]


def test_healthy_gpu(machine):
    kernel = {"text": "k_0: 168 registers", "problems": []}
    lines = [
        {"what": "assembler", "text": "ptxas 13.0"},
        {"what": "start", "call": "attention", "primitive": "fwd(1x2)"},
        call(choice="mosaic_gpu", kernels=[kernel]),
        call(primitive="bwd(1x2)"),
        call(primitive="bwd(3x4)"),
        call(call="product", primitive="dot(5x6)"),
    ]
    code, lines = machine(driver="580.95", gpus=["NVIDIA H200"] * 2, lines=lines)
    assert code == 0 and lines[0] == "device: 2 x NVIDIA H200, driver 580.95"
    assert lines[3:] == [
        "assembler: ptxas 13.0",
        "attention",
        "  fwd(1x2): mosaic_gpu",
        "    k_0: 168 registers",
        "  bwd(1x2), bwd(3x4): xla; not a: b",
        "product",
        "  dot(5x6): xla; not a: b",
        "nothing is wrong",
    ]


def test_problems_of_kernels(machine):
    kernel = {"text": "k_0: 168 registers", "problems": ["it spills: take smaller tiles"]}
    lines = [
        call(choice="mosaic_gpu", kernels=[kernel]),
        call(primitive="bwd(1x2)", error="it can't be compiled: for a reason"),
    ]
    code, lines = machine(driver="1", gpus=["NVIDIA H200"], lines=lines)
    assert code == 1 and lines[-1] == "something is wrong: see above"
    assert blamed(lines) == [
        "WRONG: it spills: take smaller tiles",
        "WRONG: bwd(1x2): it can't be compiled: for a reason",
    ]


def test_unknown_gpu_is_not_compiled_for(machine):
    code, lines = machine(driver="1", gpus=["NVIDIA Q1"], lines=[call()])
    assert code == 0 and "attention" not in lines
    assert "kernels for a NVIDIA Q1 can't be checked; name a card like it with --chip" in lines


@pytest.mark.parametrize(
    "end, said",
    [
        ("import os; os.write(2, b'LLVM ERROR: no\\n0x1 main\\n'); os.abort()", "LLVM ERROR: no"),
        ("raise ValueError('why')", "ValueError: why"),
        ("import os; os._exit(1)", "it said nothing"),
    ],
)
def test_compiler_that_ends_its_process(machine, end, said):
    start = {"what": "start", "call": "attention", "primitive": "bwd(1x2)"}
    code, lines = machine("--chip", "h200", lines=[call(), start], end=end)
    assert code == 1 and lines[0] == "device: NVIDIA H200, by name"
    assert blamed(lines) == [
        f"WRONG: attention, bwd(1x2): the compiler has ended its process: {said}"
    ]


def test_unsupported_jax(machine, monkeypatch):
    monkeypatch.setattr(doctor, "SUPPORTED_JAX", ((0, 1, 2), (0, 2)))
    code, lines = machine()
    assert code == 1
    assert blamed(lines) == ["WRONG: pallas_ops is for JAX from 0.1.2 and below 0.2"]


def test_supported_jax_is_what_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, too_new = (".".join(map(str, v)) for v in doctor.SUPPORTED_JAX)
    assert f"jax>={oldest},<{too_new}" in project["dependencies"]


def test_plugin_of_another_version(machine, monkeypatch):
    def version(name):
        if name == "jax-cuda13-plugin":
            return "0.1.2"
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, lines = machine()
    assert code == 1 and "jax-cuda13-plugin 0.1.2" in lines[1]
    assert "is not of jaxlib's version" in blamed(lines)[0]


def test_damaged_tuning_cache(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path))
    folder = tuning.cache_directory() / "cpu"
    code, lines = machine()
    assert code == 0 and lines[2].endswith("0 entries")
    folder.mkdir(parents=True)
    (folder / "x.json").write_text("{")
    code, lines = machine()
    assert code == 1 and lines[2].endswith("1 entries")
    (found,) = blamed(lines)
    assert found.startswith(f"WRONG: {folder / 'x.json'} is ignored: ") and "tune again" in found


def test_cache_entries_that_calls_ignore(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path))
    call = tuning.Call("flash_attention_fwd", "xla", (), ())
    path = tuning.store("cpu", call, {}, chunked.Config(64, 64))
    assert machine()[0] == 0
    good = path.read_text()
    for value in ('"x"', "0", "-5", "64.5", "true", '64, "unknown": 1', "[" * 100_000):
        path.write_text(good.replace('"block_q": 64', f'"block_q": {value}'))
        code, lines = machine()
        assert code == 1 and f"{path} is ignored" in blamed(lines)[0], value
    path.write_text(good.replace('"key": {}', '"key": {"t": 8}'))
    assert "another entry" in blamed(machine()[1])[0]


def test_cache_that_cannot_be_written(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "file"))
    code, lines = machine()
    assert code == 1 and "can't be written" in blamed(lines)[0]


def test_jax_without_any_device(tmp_path):
    """In a process of its own, as JAX looks for devices once."""
    for platforms in ("cuda", "nope"):
        done = subprocess.run(
            [sys.executable, "-m", "pallas_ops.doctor"],
            env=os.environ | {"JAX_PLATFORMS": platforms},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1 and "Traceback" not in done.stderr
        (found,) = blamed(done.stdout.splitlines())
        assert found.startswith(f"WRONG: JAX fails with JAX_PLATFORMS={platforms}: ")


def test_choices_are_told_where_nothing_can_be_compiled(capsys, monkeypatch):
    """In a process of its own, as without the CUDA plugin."""
    script = "from pallas_ops import examine, toolchain; toolchain._plugins = list\n"
    script += "calls = examine._calls()\n"
    script += "examine._calls = lambda: {k: calls[k] for k in list(calls)[-3:]}\n"
    script += "examine.print_lines('h200')"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(doctor, "_command", lambda chip: [sys.executable, "-c", script])
    assert doctor.main(["--chip", "h200"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (found,) = blamed(lines)
    assert "nothing can be compiled for h200: JAX's CUDA plugin is not installed" in found
    for dot in (
        "  ragged_dot(16384x2048, 64x2048x1536): ",
        "  ragged_dot(16384x1536, 64x2048x1536): ",
        "  ragged_dot_contracting(16384x2048, 16384x1536): ",
    ):
        assert sum(line.startswith(dot) for line in lines) >= 1


def test_help(capsys):
    with pytest.raises(SystemExit) as end:
        doctor.main(["--help"])
    assert end.value.code == 0 and "--chip" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        doctor.main(["--chip", "v100"])
    assert end.value.code == 2
