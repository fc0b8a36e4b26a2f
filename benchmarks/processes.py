"""Several processes that compile side by side and then measure one after the other.

Lowering a kernel is Python, of which the threads of one process run one at a time. Each process has
every n-th case, and compiles all of them before any process measures the first: nothing else runs
on the device then.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_POLL_S = 0.1
_PARENT = os.getppid()


class Share(NamedTuple):
    """One process of several, and the folder in which they leave word for each other."""

    number: int
    of: int
    folder: pathlib.Path

    @classmethod
    def parse(cls, text: str) -> "Share":
        number, of, folder = text.split(",", 2)
        return cls(int(number), int(of), pathlib.Path(folder))

    def __str__(self) -> str:
        return ",".join(map(str, self))

    def wait_until_all_are_ready(self):
        """And all before this one have measured."""
        self._file("ready", self.number).touch()
        for number in range(self.of):
            _until(self._file("ready", number).exists)
        for number in range(self.number):
            _until(self._file("done", number).exists)

    def once(self, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What the first of them that asks has computed."""
        path = self.folder / "environment"
        if not path.exists():
            path.write_text(json.dumps(compute()))
        return json.loads(path.read_text())

    def end(self):
        """Says, for a process that has ended, too, that it will do no more."""
        for word in ("ready", "done"):
            self._file(word, self.number).touch()

    def _file(self, word: str, number: int) -> pathlib.Path:
        return self.folder / f"{word}{number}"


def run(count: int, argv: Sequence[str]) -> int:
    """`python -m benchmarks` with these arguments in `count` processes; the worst exit status."""
    with tempfile.TemporaryDirectory() as folder:
        shares = [Share(number, count, pathlib.Path(folder)) for number in range(count)]
        command = [sys.executable, *_warnings(), "-m", "benchmarks", *argv]
        started = [subprocess.Popen([*command, "--share", str(share)]) for share in shares]
        try:
            while any(process.poll() is None for process in started):
                for share, process in zip(shares, started):
                    if process.poll() is not None:
                        share.end()
                time.sleep(_POLL_S)
        finally:
            for process in started:
                process.kill()
        return max(abs(process.wait()) for process in started)


def _warnings() -> list[str]:
    return [f"-W{option}" for option in sys.warnoptions]


def _until(condition: Callable[[], bool]):
    while not condition():
        time.sleep(_POLL_S)
        if os.getppid() != _PARENT:  # nobody is left to say who has ended
            raise SystemExit("the process that started this one has ended")
