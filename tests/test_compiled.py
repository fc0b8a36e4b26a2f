"""Compiler logs read and judged, cards by name, the tools that compiling needs."""

import pytest

from pallas_ops import chips, compile_report, compiled, toolchain

# Of JAX 0.11.2 and 0.12.0.1, shortened.
PTXAS = """\
ptxas info    : (C7519) warpgroup.arrive is injected in around line 1295 by compiler to allow use of registers in GMMA in function 'k'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Compile time = 337.595 ms
"""  # noqa: E501
NVJITLINK = """\

ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation units.
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the function 'k'
ptxas warning : Registers are spilled to local memory in function 'k', 192 bytes spill stores, 184 bytes spill loads
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     112 bytes stack frame, 192 bytes spill stores, 184 bytes spill loads
ptxas info    : Used 166 registers, used 16 barriers, 17 bytes smem
ptxas info    : Compile time = 382.338 ms
info    : 0 bytes gmem
info    : Function properties for 'k':
info    : used 166 registers, used 16 barriers, 112 stack, 1025 bytes smem, 1088 bytes cmem[0], 0 bytes lmem
"""  # noqa: E501
PTX = """\
.maxntid 384, 1, 1
setmaxnreg.inc.sync.aligned.u32 232;
setmaxnreg.dec.sync.aligned.u32 40;
"""
SASS = """\
        /*0000*/                   LDC R1, c[0x0][0x37c] ;       /* 0x0000df00ff017b82 */
        /*0010*/              @!P0 HGMMA.64x128x16.F32 R24, gdesc[UR4] ;
        /*0020*/                   HGMMA.64x128x16.F32 R24, gdesc[UR4] ;
"""
RESOURCES = "Resources(smem_scratch_bytes=165888, tmem_scratch_cols=0)"


def test_clean_log():
    kernel = compiled.parse("k_0", PTXAS, PTX, SASS, RESOURCES)
    assert (kernel.name, kernel.assembler, kernel.registers) == ("k_0", "ptxas", 168)
    assert (kernel.stack_frame, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert (kernel.shared_memory, kernel.threads, kernel.setmaxnreg) == (165888, 384, 2)
    assert kernel.instructions == {"LDC": 1, "HGMMA": 2}
    assert kernel.problems() == [] and kernel.setmaxnreg_ignored is None and not kernel.serialized
    assert kernel.injected == 1
    assert kernel.remarks() == ["ptxas adds 1 waits or fences for tensor cores"]
    assert "3 instructions: 2 wgmma, 0 mma" in str(kernel) and "problem" not in str(kernel)


def test_log_of_libnvjitlink():
    kernel = compiled.parse("k_0", NVJITLINK, PTX)
    assert (kernel.assembler, kernel.registers, kernel.stack_frame) == ("libnvJitLink", 166, 112)
    assert (kernel.spill_stores, kernel.spill_loads) == (192, 184)
    assert kernel.setmaxnreg_ignored == "to maintain compatibility across compilation units"
    assert kernel.serialized == ("insufficient register resources",)
    assert kernel.instructions.total() == 0 and kernel.shared_memory is None
    spills, serialized, ignored = kernel.problems()
    limit = "(384 threads of a block have at most 168 registers each)"
    assert spills == (
        "registers are spilled to memory, 192 bytes a thread written and 184 read"
        f" {limit}: take smaller tiles"
    )
    assert serialized == (
        "tensor core products wait for each other, insufficient register resources: take smaller"
        " tiles"
    )
    assert ignored == (
        "setmaxnreg, by which warpgroups trade registers, is ignored by libnvJitLink to maintain"
        f" compatibility across compilation units {limit}: use JAX 0.11.2, which calls ptxas, or"
        " take a config of one or two warpgroups"
    )
    assert str(kernel).count("problem: ") == 3


def test_ignored_setmaxnreg_alone_is_no_problem():
    lines = NVJITLINK.splitlines(keepends=True)
    log = "".join(lines[:2] + [line for line in lines[4:] if "spill" not in line])
    kernel = compiled.parse("k_0", log, PTX)
    assert kernel.problems() == [] and "its registers suffice" in kernel.remarks()[0]


@pytest.mark.parametrize(
    "note, reason",
    [
        ("insufficient register resources for the wgmma pipeline in the function 'k' in line 8",
         "insufficient register resources for the wgmma pipeline"),
        ("non wgmma instructions defining accumulator registers of a wgmma between start and end"
         " of the pipeline stage in the function 'k'",
         "non wgmma instructions defining accumulator registers of a wgmma between start and end"
         " of the pipeline stage"),
        ("the presence of Extern calls in the function 'k' in line 3", "presence of Extern calls"),
        ("ill formed pipeline stage in the function 'k'", "ill formed pipeline stage"),
    ],
)  # fmt: skip
def test_reasons_of_serialized_products(note, reason):
    text = "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
    kernel = compiled.parse("k_0", f"ptxas info : {text} {note}\n" * 2)
    assert kernel.serialized == (reason,)
    (problem,) = kernel.problems()
    assert ("take smaller tiles" in problem) == ("register resources" in reason)
    assert ("please report it" in problem) == ("register resources" not in reason)


def test_empty_log():
    kernel = compiled.parse("k_0", "")
    assert kernel.registers is None and kernel.problems() == kernel.remarks() == []
    assert "None registers" in str(kernel)


def test_files_of_several_kernels(tmp_path):
    for number in (2, 10):
        (tmp_path / f"a_{number}.ptxas").write_text(f"Used {number} registers")
        (tmp_path / f"a_{number}.ptx").write_text(f".maxntid {128 * number}, 1, 1")
    for number, size in ((7, 70), (11, 110)):  # numbered apart
        (tmp_path / f"a_{number}.resources.txt").write_text(f"smem_scratch_bytes={size},")
    (tmp_path / "b_3.ptxas").write_text("Used 3 registers")
    (tmp_path / "b_3.sass_ctrl").write_text(SASS)
    kernels = compiled.read_dumps(tmp_path)
    assert [k.name for k in kernels] == ["a_2", "a_10", "b_3"]
    assert [k.registers for k in kernels] == [2, 10, 3]
    assert [k.threads for k in kernels] == [256, 1280, None]
    assert [k.shared_memory for k in kernels] == [70, 110, None]
    assert [k.instructions["HGMMA"] for k in kernels] == [0, 0, 2]


def test_shared_memory_of_a_smaller_chip():
    kernel = compiled.parse("k_0", PTXAS, PTX, SASS, RESOURCES)
    compile_report._check_shared_memory(kernel, "a100")
    with pytest.raises(
        compile_report.CompileError,
        match=r"k_0 exceeds available shared memory: it needs 165888 bytes, a block on l4 has"
        r" 101376 \(take smaller tiles",
    ):
        compile_report._check_shared_memory(kernel, "l4")


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA RTX 4000 Ada Generation", None),
        ("cpu", None),
    ],
)
def test_chips_by_kind_of_device(kind, name):
    assert compile_report.chip_of(kind) == name


def test_every_chip_is_found_by_its_own_kind():
    for name, chip in compile_report.CHIPS.items():
        assert chips.chip_of(chip.device_kind) == name
        assert f"core_count: {chip.processors}\n" in chip.target_config()


# What is found on a machine.


@pytest.fixture
def installation(monkeypatch, tmp_path):
    """A CUDA plugin, and folders where its tools can be put."""
    monkeypatch.setattr(toolchain, "_plugins", lambda: [tmp_path / "jax_plugins" / "xla_cuda13"])
    roots = [tmp_path / name for name in ("first", "second")]
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: roots)
    monkeypatch.setattr(toolchain, "_nvjitlink_loads", lambda: False)
    monkeypatch.setenv("PATH", "")

    def put(root: str, file: str) -> None:
        path = tmp_path / root / file
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)

    return put


def test_what_compiling_needs(installation, monkeypatch):
    assert compile_report.available().startswith("libdevice is missing")
    installation("second", "nvvm/libdevice/libdevice.10.bc")
    assert compile_report.available().startswith("ptxas is missing")
    installation("second", "bin/ptxas")
    assert compile_report.available() is None
    # The compiler would look no further than an empty folder, and abort.
    installation("first", "nvvm/libdevice/README")
    assert compile_report.available().startswith("libdevice is missing")


def test_libnvjitlink_serves_for_ptxas(installation, monkeypatch):
    installation("second", "nvvm/libdevice/libdevice.10.bc")
    monkeypatch.setattr(toolchain, "_nvjitlink_loads", lambda: True)
    assert compile_report.available() is None


def test_no_plugin(monkeypatch):
    monkeypatch.setattr(toolchain, "_plugins", list)
    assert "plugin is not installed" in compile_report.available()
    with pytest.raises(compile_report.CompileError, match="nothing can be compiled for h200: JAX"):
        compile_report.report(lambda: 1, (), "h200")


USES = "I1130 assemble_compilation_provider.cc:226] Using {} for compilation and linking.\n"
TOOLS = "ptxas(path={0}/ptxas, version={1}) and nvlink(path={0}/nvlink, version={1})"


@pytest.mark.parametrize(
    "log, kind, told",
    [
        (USES.format(TOOLS.format("/a", "13.5.37")) + USES.format(TOOLS.format("/b", "13.0.88")),
         "ptxas", "ptxas 13.0.88 at /b/ptxas (as XLA's log says)"),
        ("", "ptxas", "ptxas of unknown version at /c/ptxas (going by the form of its messages;"
         " the path is a guess)"),
        (USES.format(TOOLS.format("/a", "13.5.37")) + USES.format("libnvjitlink"), "libnvJitLink",
         "libnvJitLink 13.5 at /d (as XLA's log says, with the version that the library gives)"),
        (USES.format(TOOLS.format("/a", "13.5.37")), "libnvJitLink",
         "libnvJitLink 13.5 at /d (going by the form of its messages, with the version that the"
         " library gives)"),
    ],
)  # fmt: skip
def test_assembler(monkeypatch, log, kind, told):
    monkeypatch.setattr(toolchain, "_assembler", None)
    monkeypatch.setattr(toolchain, "_ptxas", lambda: "/c/ptxas")
    monkeypatch.setattr(toolchain, "_loaded_nvjitlink", lambda: ("/d", "13.5"))
    toolchain.note(log, kind)
    assert toolchain.assembler() == told
    toolchain.note(USES.format("another"), "ptxas")
    assert toolchain.assembler() == told
