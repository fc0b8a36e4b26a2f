"""What a program is compiled with: the CUDA plugin's helpers found, and the assembler told."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import pathlib
import re
import shutil

import jax

# XLA's log says what it assembles with.
LOG = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "assemble_compilation_provider=3"}

_assembler: str | None = None


def has_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    return bool(_plugins())


def available() -> str | None:
    """Why programs can't be compiled ahead of time on this machine; None where they can."""
    if not has_plugin():
        return "JAX's CUDA plugin is not installed (pip install jax[cuda13] or jax[cuda12])"
    # XLA takes the first of these folders there is, and aborts where it holds no such file.
    folders = [root / "nvvm" / "libdevice" for root in _cuda_roots()]
    folder = next((f for f in folders if f.is_dir()), None)
    if folder is None or not (folder / "libdevice.10.bc").is_file():
        return "libdevice is missing (pip install nvidia-nvvm, or a CUDA toolkit)"
    if _ptxas() is None and not _nvjitlink_loads():
        return "ptxas is missing (pip install nvidia-cuda-nvcc, or a CUDA toolkit)"
    return None


def assembler() -> str | None:
    """What assembles this process's Mosaic GPU kernels and how that is known; None before one."""
    return _assembler


@functools.cache
def ignores_setmaxnreg() -> bool:
    """Whether what assembles Mosaic GPU kernels here leaves each warpgroup the same registers.

    libnvJitLink compiles relocatably, and JAX 0.12 takes it wherever it can be loaded.
    """
    return _nvjitlink_loads()


def note(log: str, kind: str) -> None:
    """Notes what the first compilation of a Mosaic GPU kernel has logged, with its assembler."""
    global _assembler
    if _assembler is not None:
        return
    # XLA may assemble its own kernels with another tool; it does so before Mosaic GPU's, and both
    # choose once in a process.
    said = re.findall(r"Using (libnvjitlink|ptxas)(?:\(path=(.*?), version=(.*?)\))?", log)
    if said and said[-1][0].lower() == kind.lower():
        _, path, version = said[-1]
        source = "as XLA's log says"
    else:
        path, version = _ptxas(), "of unknown version"
        source = f"going by the form of its messages{'; the path is a guess' * (kind == 'ptxas')}"
    if kind == "libnvJitLink":
        path, version = _loaded_nvjitlink()
        source += ", with the version that the library gives"
    _assembler = f"{kind} {version} at {path and os.path.normpath(path)} ({source})"


def _loaded_nvjitlink() -> tuple[str, str]:
    maps = pathlib.Path("/proc/self/maps").read_text()
    found = re.search(r"/.*libnvJitLink.*", maps)
    if found is None:
        return "an unknown place", "of unknown version"
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    ctypes.CDLL(found[0]).nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor))
    return found[0], f"{major.value}.{minor.value}"


# Where things are looked for, in Mosaic GPU's order.


def _plugins() -> list[pathlib.Path]:
    found = []
    for version in ("13", "12"):
        with contextlib.suppress(ModuleNotFoundError):  # of jax_plugins
            spec = importlib.util.find_spec(f"jax_plugins.xla_cuda{version}")
            if spec and spec.origin and importlib.util.find_spec(f"jax_cuda{version}_plugin"):
                found.append(pathlib.Path(spec.origin).parent)
    return found


def _wheels() -> list[pathlib.Path]:
    return [p.parents[i] / "nvidia" for p in _plugins() for i in (0, 1)]


def _cuda_roots() -> list[pathlib.Path]:
    fixed = [pathlib.Path(p) for p in ("cuda_sdk_lib", "/usr/local/cuda", "/opt/cuda")]
    return [*fixed, *(w / name for w in _wheels() for name in ("cu13", "cuda_nvcc"))]


def _ptxas() -> str | None:
    first, *others = [str(root / "bin") for root in _cuda_roots()]
    return shutil.which("ptxas", path=os.pathsep.join([first, os.environ["PATH"], *others]))


def _nvjitlink_loads() -> bool:
    if jax.__version_info__ < (0, 12):
        return False
    folders = [w / name / "lib" for w in _wheels() for name in ("cu13", "nvjitlink")]
    files = [f"libnvJitLink.so.{version}" for version in ("13", "12")]
    for path in [*files, *(str(folder / file) for folder in folders for file in files)]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(path)
            return True
    return False
