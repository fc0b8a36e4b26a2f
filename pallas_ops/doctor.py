"""Finds out why kernels are slow, or not used at all.

    python -m pallas_ops.doctor
    python -m pallas_ops.doctor --chip h200

It looks at this machine's GPU, or at a named one that it has not: at the installation, at what
assembles kernels, at the tuning cache; and for a few typical calls at which implementation each
primitive takes there, why not a faster one, and what the compiler makes of its kernels. It exits
with 1 where something is wrong.
"""

import argparse
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jaxlib

import pallas_ops
from pallas_ops import toolchain, tuning
from pallas_ops.chips import CHIPS, chip_of

# From the oldest, inclusive, to the first that is too new.
SUPPORTED_JAX = ((0, 11, 2), (0, 13))
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt")


class Findings:
    """Prints what is found, and remembers whether something is wrong."""

    wrong = False

    def say(self, text: str) -> None:
        print(text)

    def blame(self, text: str, indent: str = "") -> None:
        self.wrong = True
        print(f"{indent}WRONG: {text}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chip", choices=CHIPS, help="a card to compile for, present or not")
    chip = parser.parse_args(arguments).chip
    found = Findings()
    if chip is None:
        # JAX would take most of the memory of a card that others may be using.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        chip = _present_chip(found)
    else:
        found.say(f"device: {CHIPS[chip].device_kind}, by name")
    _versions(found)
    _tuning_cache(found)
    if chip is not None:
        _kernels(found, chip)
    print("something is wrong: see above" if found.wrong else "nothing is wrong")
    return 1 if found.wrong else 0


def _present_chip(found: Findings) -> str | None:
    """The name of this machine's card, or None where there is none to compile for."""
    driver, log = _driver(), _Errors()
    try:
        with log:
            devices = jax.devices("gpu")
    except Exception as error:  # an AssertionError, where JAX_PLATFORMS leaves it nothing
        devices = []
        log.texts.append(str(error) or f"{type(error).__name__} in JAX")
    if devices:
        kind = devices[0].device_kind
        found.say(f"device: {len(devices)} x {kind}, driver {driver or 'unknown'}")
        if chip_of(kind) is None:
            found.say(f"kernels for a {kind} can't be checked; name a card like it with --chip")
        return chip_of(kind)
    if driver is None:
        try:
            jax.default_backend()
        except Exception:
            reason = log.texts[0].partition("\n")[0]
            found.say("device: none")
            found.blame(f"JAX fails with JAX_PLATFORMS={jax.config.jax_platforms}: {reason}")
            return None
        found.say("device: no GPU, so that every call runs xla (--chip checks a named GPU)")
        return None
    reason = log.texts[0].partition("\n")[0]
    if not toolchain.has_plugin():
        reason = "its CUDA plugin is not installed (pip install jax[cuda13])"
    elif jax.config.jax_platforms and "cuda" not in jax.config.jax_platforms:
        reason = f"JAX_PLATFORMS is {jax.config.jax_platforms}"
    found.say(f"device: a GPU with driver {driver}")
    found.blame(f"JAX doesn't see the GPU: {reason}")
    return None


class _Errors(logging.Handler):
    """The errors that JAX logs within, of which its plugins' say what is wrong with them."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record):
        self.texts.append(str(record.exc_info[1] if record.exc_info else record.getMessage()))

    def __enter__(self):
        logging.getLogger("jax").addHandler(self)

    def __exit__(self, *exception):
        logging.getLogger("jax").removeHandler(self)


def _driver() -> str | None:
    """The version of NVIDIA's driver, None where there is no card."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True)
        if result.returncode == 0 and result.stdout.strip():
            return result.stdout.split()[0]
    version = pathlib.Path("/proc/driver/nvidia/version")
    if not version.exists():
        return None
    number = re.search(r"\d+\.\d+(?:\.\d+)?", version.read_text())
    return number[0] if number else "of unknown version"


def _versions(found: Findings) -> None:
    plugins = {}
    for name in _PLUGINS:
        try:
            plugins[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions = {
        "pallas_ops": pallas_ops.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        **plugins,
    }
    found.say("versions: " + ", ".join(f"{name} {v}" for name, v in versions.items()))
    oldest, too_new = SUPPORTED_JAX
    if not oldest <= jax.__version_info__ < too_new:
        dotted = [".".join(map(str, v)) for v in SUPPORTED_JAX]
        found.blame(f"pallas_ops is for JAX from {dotted[0]} and below {dotted[1]}")
    for name, version in plugins.items():
        if version != jaxlib.__version__:
            found.blame(f"{name} {version} is not of jaxlib's version; install both of one version")


def _tuning_cache(found: Findings) -> None:
    folder = tuning.cache_directory()
    if folder is None:
        found.say("tuning cache: off (PALLAS_OPS_CACHE_DIR is empty)")
        return
    found.say(f"tuning cache: {folder}, {len(list(folder.rglob('*.json')))} entries")
    if problem := tuning.cache_problem():
        found.blame(problem, "  ")
    for path, reason in tuning.damaged():
        found.blame(f"{path} is ignored: {reason}; delete it or tune again", "  ")


# What becomes of typical calls.


def _kernels(found: Findings, chip: str) -> None:
    lines = _examined(chip)
    for call, group in itertools.groupby(lines, lambda line: line.get("call")):
        if call is not None:
            found.say(call)
            _call(found, list(group))
            continue
        for line in group:
            if line["what"] == "assembler":
                found.say(f"assembler: {line['text']}")
            else:
                found.blame(line["text"])


def _call(found: Findings, lines: list[dict[str, Any]]) -> None:
    for choice, group in itertools.groupby(lines, lambda line: line["choice"]):
        group = list(group)
        found.say(f"  {', '.join(line['primitive'] for line in group)}: {choice}")
        for line in group:
            for kernel in line["kernels"]:
                found.say(f"    {kernel['text']}")
                for problem in kernel["problems"]:
                    found.blame(problem, "    ")
            if line["error"] is not None:
                found.blame(f"{line['primitive']}: {line['error']}", "    ")


def _examined(chip: str) -> Iterator[dict[str, Any]]:
    """What `examine` prints in a process that no GPU has a part in."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            _command(chip),
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        last = {}
        for text in process.stdout:
            if text.startswith('{"what"'):
                last = json.loads(text)
                if last["what"] != "start":
                    yield last
        if process.wait():
            errors.seek(0)
            text = f"the compiler has ended its process: {_last_words(errors.read())}"
            if last.get("what") == "start":
                text = f"{last['call']}, {last['primitive']}: {text}"
            yield {"what": "failure", "text": text}


def _last_words(log: str) -> str:
    lines = log.strip().splitlines() or ["it said nothing"]
    fatal = [x for x in lines if re.search(r"error: |check failed|^F\d{4} ", x, re.IGNORECASE)]
    return (fatal or lines)[-1]


def _command(chip: str) -> list[str]:
    return [sys.executable, "-m", "pallas_ops.examine", chip]


if __name__ == "__main__":
    sys.exit(main())
