"""What became of a Mosaic GPU kernel: the files that its compilation leaves, read and judged."""

import collections
import dataclasses
import pathlib
import re

_INSTRUCTIONS = {"HGMMA": "wgmma", "HMMA": "mma", "UTMALDG": "TMA loads", "UTMASTG": "TMA stores"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One compiled kernel. None is what its files don't say.

    `registers` and the bytes of `stack_frame`, `spill_stores` and `spill_loads` are a thread's,
    those of `shared_memory` and `threads` a block's. `assembler` is "ptxas" or "libnvJitLink",
    `setmaxnreg` the number of such instructions asked for, `instructions` counts by opcode (empty
    without nvdisasm), `notes` the assembler's remarks.
    """

    name: str
    assembler: str
    registers: int | None
    stack_frame: int | None
    spill_stores: int | None
    spill_loads: int | None
    shared_memory: int | None
    threads: int | None
    setmaxnreg: int
    instructions: collections.Counter[str]
    notes: tuple[str, ...]

    @property
    def setmaxnreg_ignored(self) -> str | None:
        """Why the assembler ignores setmaxnreg, None where it doesn't."""
        return next(iter(self._reasons(r"'setmaxnreg' ignored;? *(.*?)\.?$")), None)

    @property
    def serialized(self) -> tuple[str, ...]:
        """Why wgmma instructions wait for each other; empty where they don't."""
        # Each reason is given for every function and line.
        pattern = r"wgmma.* serialized due to (?:the )?(.*?)(?: (?:for|in) the function.*)?$"
        return tuple(dict.fromkeys(self._reasons(pattern)))

    @property
    def injected(self) -> int:
        """How many waits for tensor cores, or fences before them, the assembler has added."""
        return sum(" is injected " in note for note in self.notes)

    def problems(self) -> list[str]:
        """What is wrong with the kernel, in plain words, each with what to do about it."""
        found = []
        if self.spill_stores or self.spill_loads:
            found.append(
                f"registers are spilled to memory, {self.spill_stores} bytes a thread written and"
                f" {self.spill_loads} read{self._cap()}: take smaller tiles"
            )
        for reason in self.serialized:
            advice = "the kernel uses products before it has waited for them: please report it"
            if "register resources" in reason:
                advice = "take smaller tiles"
            found.append(f"tensor core products wait for each other, {reason}: {advice}")
        if found and self.setmaxnreg_ignored is not None:
            advice = "take a config of one or two warpgroups"
            if self.assembler == "libnvJitLink":
                advice = f"use JAX 0.11.2, which calls ptxas, or {advice}"
            found.append(f"{self._ignored()}{self._cap()}: {advice}")
        return found

    def remarks(self) -> list[str]:
        """What is worth knowing of the kernel and no problem."""
        found = []
        if self.setmaxnreg_ignored is not None and not self.problems():
            found.append(f"{self._ignored()}, but its registers suffice")
        if self.injected:
            found.append(f"{self.assembler} adds {self.injected} waits or fences for tensor cores")
        return found

    def __str__(self):
        spilled = f"{self.spill_stores}/{self.spill_loads} bytes spilled (stores/loads)"
        lines = [
            self.name,
            f"{self.registers} registers, {spilled}, {self.stack_frame} bytes of stack,"
            f" {self.shared_memory} bytes of shared memory",
        ]
        if self.instructions:
            counts = [f"{self.instructions[op]} {text}" for op, text in _INSTRUCTIONS.items()]
            lines.append(f"{self.instructions.total()} instructions: {', '.join(counts)}")
        lines += self.notes
        lines += [f"assembled by {self.assembler}, {self.setmaxnreg} setmaxnreg"]
        lines += [f"note: {text}" for text in self.remarks()]
        lines += [f"problem: {text}" for text in self.problems()]
        return "\n  ".join(lines)

    def _reasons(self, pattern: str) -> list[str]:
        return [found[1] for note in self.notes if (found := re.search(pattern, note))]

    def _ignored(self) -> str:
        return (
            f"setmaxnreg, by which warpgroups trade registers, is ignored by {self.assembler}"
            f" {self.setmaxnreg_ignored}"
        )

    def _cap(self) -> str:
        shared_out = self.setmaxnreg and self.setmaxnreg_ignored is None
        if not self.threads or shared_out:
            return ""
        cap = min(65536 // self.threads // 8 * 8, 255)
        return f" ({self.threads} threads of a block have at most {cap} registers each)"


def read_dumps(folder: pathlib.Path) -> list[Kernel]:
    """The kernels whose files MOSAIC_GPU_DUMP_TO has put in a folder."""
    # Kernels of one name are numbered, on JAX 0.12 once as they are lowered and once as they are
    # compiled: one that was only lowered moves the two apart.
    resources = collections.defaultdict(list)
    for path in sorted(folder.glob("*.resources.txt"), key=_name_and_number):
        resources[_name_and_number(path)[0]].append(path.read_text())
    kernels = []
    for log in sorted(folder.glob("*.ptxas"), key=_name_and_number):
        files = [log.with_suffix(suffix) for suffix in (".ptx", ".sass", ".sass_ctrl")]
        ptx, *sass = [f.read_text() if f.exists() else "" for f in files]
        own = next(iter(resources[_name_and_number(log)[0]]), "")
        resources[_name_and_number(log)[0]][:1] = []
        kernels.append(parse(log.stem, log.read_text(), ptx, "".join(sass), own))
    return kernels


def _name_and_number(path: pathlib.Path) -> tuple[str, int]:
    found = re.fullmatch(r"(.*)_(\d+)\.\w+(?:\.txt)?", path.name)
    return (found[1], int(found[2])) if found else (path.name, 0)


def parse(name: str, log: str, ptx: str = "", sass: str = "", resources: str = "") -> Kernel:
    """A kernel from the texts of its assembler's log, PTX, disassembly and resources."""

    def number(pattern: str, text: str = log) -> int | None:
        found = re.search(pattern, text)
        return int(found[1]) if found else None

    return Kernel(
        name=name,
        # Its linker sums up what its assembler has said, which ptxas alone does not.
        assembler="libnvJitLink" if re.search(r"^info +: used", log, re.MULTILINE) else "ptxas",
        registers=number(r"Used (\d+) registers"),
        stack_frame=number(r"(\d+) bytes stack frame"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        shared_memory=number(r"smem_scratch_bytes=(\d+)", resources),
        threads=number(r"\.maxntid (\d+)", ptx),
        setmaxnreg=len(re.findall(r"setmaxnreg\.(?:inc|dec)", ptx)),
        instructions=collections.Counter(
            re.findall(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9_]+)", sass)
        ),
        notes=tuple(line for line in log.splitlines() if re.search(r"\(C\d{4}\)|warning", line)),
    )
