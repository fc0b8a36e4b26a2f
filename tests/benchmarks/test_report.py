"""Result files become tables, plots and the documents' figures, and nothing else does."""

import json

import numpy as np
import pytest
from PIL import Image

from benchmarks import peers, plots, report, tables, torch_libraries

MARKED = f"# Title\n\nbefore {report.BEGIN}\nold\n{report.END} after\n"
GPU = dict(device="NVIDIA H200", driver="580.1", timer="cupti", peak_tflops=800.0, peak_gbps=4000.0)
CPU = dict(device="Some CPU, 2 cores", driver=None, timer="wall", peak_tflops=None, peak_gbps=None)


def attention(implementation="mosaic_gpu", ms=1.0, t=4096, **changed):
    """A row of 2 TFLOP and 2 GB."""
    error = changed.get("error")
    row = dict(op="attention", direction="fwd", implementation=implementation, set="fa3")
    row |= dict(case=f"b4 t{t} n16 h128 causal bfloat16", batch=4, q_len=t, kv_len=t, heads=16)
    row |= dict(kv_heads=16, head_dim=128, v_head_dim=128, dtype="bfloat16", causal=True)
    row |= dict(window=None, documents=None, lengths=False, flops=2e12, bytes=2e9)
    row |= dict(ms=ms, ms_spread=0.01, tflops=None if error else 2000 / ms, compile_s=1.5)
    row |= dict(temp_bytes=3 * 2**20, jax="0.11.2", commit="abc1234", date="2026-12-01")
    row |= dict.fromkeys(("ms", "ms_spread", "compile_s", "temp_bytes")) if error else {}
    return row | GPU | dict(error=None) | changed


def grouped(implementation="xla", ms=1.0, **changed):
    row = attention(implementation, ms, **changed)
    for key in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "v_head_dim"):
        del row[key]
    row |= dict(op="grouped_matmul", m=64, k=8, n=8, g=4, distribution="dirichlet", set="moe")
    return row | dict(case="mixtral m64 k8 n8 g4 dirichlet bfloat16") | changed


TRAIN = dict(op="train", implementation="xla", seconds=134.9)


@pytest.fixture
def repository(tmp_path):
    """write(name, rows) puts a result file into an otherwise empty repository at write.root."""

    def write(name, *rows, folder="benchmarks/results"):
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    (tmp_path / "README.md").write_text(MARKED)
    write.root = tmp_path
    return write


def cells(text, first):
    """Cells of the first line of a table whose second or first cell begins so."""
    lines = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line for line in lines if any(cell.startswith(first) for cell in line[:2]))


def test_printed_table(repository, capsys):
    path = repository(
        "h200.json",
        attention("dense", 2.6),
        attention("jax.nn:cudnn", 4.0),
        attention("xla", 40.0),
        attention("mosaic_gpu", 5.0),
        attention("tokamax:mosaic", 10.0),
    )
    report.main([path], root=repository.root)
    text = capsys.readouterr().out
    assert "NVIDIA H200: Attention, forward (`fwd`)" in text
    assert "driver 580.1; JAX 0.11.2; 2026-12-01; commit abc1234; timer cupti" in text
    header = ["set", "case", "mosaic_gpu", "xla", "jax.nn:cudnn", "tokamax:mosaic", "dense"]
    assert cells(text, "set") == [*header, "matmul", "copy", "ratio"]
    # 400 of 800 TFLOP/s; 2 GB in 5 ms are 400 of 4000 GB/s; 4 ms of the best peer over our 5.
    expected = ["400", "50.0", "500", "200", "769", "50 %", "10 %", "0.800"]
    assert cells(text, "fa3")[2:] == expected
    details = text[text.index("Milliseconds") :]
    assert cells(details, "b4 t4096")[1] == "5.00 ±0.01 ms, 1.50 s, 3.00 MiB"


def test_refused_and_wrong(repository, capsys):
    refused, wrong = "refused: head dim 128 | [x](y) `make nothing`", "wrong: error 0.3 of out"
    absent = "not installed: no flash-attn-4"
    path = repository(
        "h200.json",
        attention(ms=2.0),
        attention(t=512, error=wrong),
        attention("jax.nn:cudnn", error=refused),
        attention("jax.nn:cudnn", t=512, error=refused),
        attention("tokamax:mosaic", error=wrong),
        attention("tokamax:mosaic", t=512, ms=3.0),
        attention("flash-attn-4:fwd", error=absent),
    )
    report.main([path], root=repository.root)
    text = capsys.readouterr().out
    assert cells(text, "set")[2:5] == ["mosaic_gpu", "jax.nn:cudnn", "tokamax:mosaic"]
    # No ratio where no peer, or none of ours, is right.
    tail = ["125 %", "25 %", "-"]
    assert cells(text, "b4 t512")[2:] == ["wrong [1]", "- [2]", "667", "-", "-", "-"]
    assert cells(text, "b4 t4096")[2:] == ["1000", "- [2]", "wrong [1]", *tail]
    assert text.count(f"- [1] {wrong} (mosaic_gpu, tokamax:mosaic)\n") == 1
    assert text.count(f"- [2] {refused} (jax.nn:cudnn)\n") == 1
    assert f"- flash-attn-4:fwd: {absent}\n" in text
    document = (repository.root / "docs/benchmarks.md").read_text()
    assert "](y)" not in document and "`make nothing`" not in document
    assert cells(document, "jax.nn:cudnn")[2:] == ["0", "2", "0", "0", "0", "0"]


def test_ratio_and_geometric_mean():
    rows = [
        attention(ms=1.0),
        attention("xla", ms=9.0),
        attention("jax.nn:cudnn", ms=2.0),
        attention("tokamax:mosaic", ms=4.0),
        attention("dense", ms=0.1),
        attention(t=512, ms=16.0),
        attention("jax.nn:cudnn", t=512, ms=2.0),
        attention(t=1024),
    ]
    by_case = [tables.ratio(some) for some in tables.group(rows, "case").values()]
    assert by_case == [2.0, 0.125, None]
    assert tables.mean_ratio(rows) == (pytest.approx(0.5, rel=1e-12), 2, 3)
    half = attention("tokamax:mosaic", dtype="float16")
    lines = tables.means([*rows, half, grouped()]).splitlines()[2:]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert found == [
        ["attention", "fa3", "bfloat16", "0.500 (2 of 3)"],
        ["attention", "fa3", "float16", "- (0 of 1)"],
        ["grouped_matmul", "moe", "bfloat16", "- (0 of 1)"],
    ]


def test_cases_are_sorted_by_size(repository):
    sizes = [(128, 16384), (64, 512), (128, 512), (64, 16384)]
    path = repository("a.json", *(attention(case=f"h{h} t{t}", t=t, head_dim=h) for h, t in sizes))
    assert [row["case"] for row in tables.read([path])] == [f"h{h} t{t}" for h, t in sorted(sizes)]


def test_newest_row_wins(repository):
    newest = [
        repository("a.json", attention(ms=1.0, date="2026-12-03"), attention("xla", ms=4.0)),
        repository("b.json", attention(ms=2.0), attention("xla", ms=5.0)),
        repository("c.json", attention("xla", ms=6.0, jax="0.12.0.1")),
    ]
    rows = tables.read(newest)
    found = {(r["implementation"], r["jax"]): (r["ms"], r["file"]) for r in rows}
    assert found == {
        ("mosaic_gpu", "0.11.2"): (1.0, "a.json"),
        ("xla", "0.11.2"): (5.0, "b.json"),
        ("xla", "0.12.0.1"): (6.0, "c.json"),
    }
    assert list(tables.columns(rows)) == ["mosaic_gpu", "xla (JAX 0.11.2)", "xla (JAX 0.12.0.1)"]


def test_other_programs_are_left_out(repository):
    assert tables.read([repository("train.json", TRAIN)]) == []
    assert len(tables.read([repository("mixed.json", TRAIN, grouped())])) == 1


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"op": "attention"', "not JSON"),
        ("[1]", "no object with a name as `op`"),
        ({"op": ["a"]}, "no object with a name as `op`"),
        ("[" * 100_000, "not JSON"),
        (attention(case="\ud800"), "not JSON"),
        (b'{"op": "\xff"}', "not JSON"),
        ({k: v for k, v in grouped().items() if k not in ("timer", "n")}, "missing timer, n"),
        (attention(lengths=1), "`lengths` is 1"),
        (attention(tflops=float("nan")), "`tflops` is nan"),
        (attention() | dict(ms=0), "`ms` is 0, not between 1e-30 and 1e+30"),
        (attention() | dict(ms=10**400), "`ms` is 1000"),
        (attention() | dict(ms=1e-320), "`ms` is 1e-320"),
        (attention(ms_spread=-3), "`ms_spread` is -3"),
        (attention(temp_bytes=-1), "`temp_bytes` is -1"),
        (attention(heads=-1), "`heads` is -1"),
        (attention(window=["a", "b"]), "`window` is ['a', 'b']"),
        (attention(window=[1]), "`window` is [1]"),
        (attention(date="2026-99-99"), "`date` is '2026-99-99'"),
        (attention(direction="dlhs"), "`direction` is 'dlhs'"),
        (attention("cudnn"), "`implementation` is 'cudnn'"),
        (attention(date="1.12.2026"), "`date` is '1.12.2026'"),
        (attention(error="broken"), "`error` is 'broken'"),
        (attention(error="refused: x") | dict(ms=1.0), "one of them is null"),
        (attention() | dict(ms=None), "one of them is null"),
    ],
)
def test_damaged_lines_are_named(repository, line, fault):
    path = repository("bad.json", TRAIN, grouped())
    line = json.dumps(line) if isinstance(line, dict) else line
    with path.open("ab") as file:
        file.write(line if isinstance(line, bytes) else line.encode())
    before = (repository.root / "README.md").read_text()
    with pytest.raises(SystemExit, match=r"bad\.json, line 3: ") as stop:
        report.main([], root=repository.root)
    assert fault in str(stop.value)
    assert (repository.root / "README.md").read_text() == before


def test_missing_file_is_named(repository):
    with pytest.raises(SystemExit, match=r"nothing\.json"):
        report.main([repository.root / "nothing.json"], root=repository.root)


def test_named_files_are_printed_whatever_the_results_are(repository, capsys):
    repository("bad.json").write_text("garbage")
    good = repository("good.json", attention(ms=7.77), folder="elsewhere")
    with pytest.raises(SystemExit, match=r"bad\.json, line 1: "):
        report.main([good], root=repository.root)
    assert "7.77" in capsys.readouterr().out


def test_check_reads_the_files_that_are_named(repository, capsys):
    repository("h200.json", attention())
    report.main([], root=repository.root)
    capsys.readouterr()
    bad = repository("bad.json", {"op": "attention"}, folder="elsewhere")
    for path in (bad, repository.root / "nothing.json"):
        with pytest.raises(SystemExit, match=path.name):
            report.main([path], check=True, root=repository.root)
    report.main(
        [repository("good.json", grouped(), folder="elsewhere")], check=True, root=repository.root
    )
    assert capsys.readouterr().out == ""


def test_documents_come_from_results_alone(repository, capsys):
    repository("h200.json", attention(ms=2.0), attention("jax.nn:cudnn", ms=1.0))
    other = repository("other.json", attention(ms=7.77), folder="elsewhere")
    report.main([other], root=repository.root)
    assert "7.77" in capsys.readouterr().out
    for name in ("README.md", "docs/benchmarks.md"):
        text = (repository.root / name).read_text()
        assert "7.77" not in text and "other.json" not in text and "h200.json" in text


def test_rewriting_keeps_the_rest_and_itself(repository):
    repository("h200.json", attention(), attention("jax.nn:cudnn"), grouped())
    report.main([], root=repository.root)
    written = [path for path in repository.root.rglob("*") if path.suffix in (".md", ".png")]
    assert len(written) == 4
    once = {path: path.read_bytes() for path in written}
    text = once[repository.root / "README.md"].decode()
    assert text.startswith(f"# Title\n\nbefore {report.BEGIN}\n")
    assert text.endswith(f"\n{report.END} after\n") and "old" not in text
    report.main([], root=repository.root)
    assert {path: path.read_bytes() for path in written} == once


@pytest.mark.parametrize(
    "text",
    ["", f"{report.BEGIN}\n", f"{report.END}\n{report.BEGIN}\n", MARKED * 2],
    ids=["none", "no_end", "swapped", "twice"],
)
def test_missing_markers(repository, text):
    readme = repository.root / "README.md"
    readme.write_text(text)
    with pytest.raises(SystemExit, match=r"README\.md must hold"):
        report.main([], root=repository.root)
    assert readme.read_text() == text and not (repository.root / "docs").exists()


def test_readme_says_what_is_lacking(repository):
    def section(*rows):
        repository("results.json", *rows)
        report.main([], root=repository.root)
        return (repository.root / "README.md").read_text()

    assert "Nothing has been measured on a GPU" in section(grouped(**CPU))
    assert "| 2.00 (1) |" in section(grouped(**CPU), grouped("jax.lax:ragged_dot", 2.0, **CPU))
    floor = section(attention("xla", 50.0), attention("jax.nn:cudnn", 5.0))
    assert "Nothing has been measured" not in floor and report.NO_KERNEL in floor
    refused = section(attention(error="refused: to come"), attention("xla", 50.0))
    assert report.NO_KERNEL in refused
    # A case that is lost is shown, and which of ours it was.
    assert cells(floor, "b4 t4096")[1:] == ["40.0 xla", "400 jax.nn:cudnn", "0.100"]
    assert report.NO_KERNEL not in section(attention(), attention("jax.nn:cudnn"))


def test_readme_shows_known_cases_and_the_heaviest_of_other_sets(repository):
    window = dict(set="window", window=[127, 0])
    repository(
        "results.json",
        attention(t=512),
        attention(t=4096),
        attention(t=16384),
        attention(t=4096, case="light", **window),
        attention(t=4096, case="heavy", **window, flops=4e12),
    )
    report.main([], root=repository.root)
    text = (repository.root / "README.md").read_text()
    assert "heavy" in text and "t4096 n16" in text and "t16384 n16" in text
    assert "light" not in text and "t512" not in text
    assert text.count("![") == 1 and "docs/plots/nvidia-h200-attention-fwd-fa3-bfloat16.png" in text


def test_check(repository):
    path = repository("h200.json", attention(), attention("jax.nn:cudnn"))
    root = repository.root
    with pytest.raises(SystemExit, match=r"docs/benchmarks\.md, README\.md, docs/plots/nvidia"):
        report.main([], check=True, root=root)
    assert not (root / "docs").exists()
    report.main([], root=root)
    report.main([], check=True, root=root)
    for page in (root / "README.md", root / "docs/benchmarks.md"):
        right = page.read_text()
        page.write_text(right.replace("2000", "2001"))
        with pytest.raises(SystemExit, match=page.name):
            report.main([], check=True, root=root)
        page.write_text(right)
    path.write_text(path.read_text().replace("1.0", "1.5"))
    with pytest.raises(SystemExit, match="not up to date"):
        report.main([], check=True, root=root)


def test_plots(repository):
    path = repository(
        "h200.json",
        *(attention(name, ms, t=t) for name, ms in (("xla", 9.0), ("a:b", 3.0)) for t in (1, 2)),
        attention("jax.nn:cudnn", t=1, error="refused: x"),
        attention("tokamax:mosaic", t=1, error="wrong: x"),
        attention("tokamax:mosaic", t=1, direction="bwd", error="wrong: x"),
        grouped(**CPU),
    )
    report.main([], root=repository.root)
    folder = repository.root / "docs/plots"
    names = [
        "nvidia-h200-attention-fwd-fa3-bfloat16.png",
        "some-cpu-2-cores-grouped-matmul-fwd-moe-bfloat16.png",
    ]
    assert sorted(p.name for p in folder.iterdir()) == names
    document = (repository.root / "docs/benchmarks.md").read_text()
    for name in names:
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) < 100_000
        assert b"tEXt" not in data and b"tIME" not in data
        pixels = np.asarray(Image.open(folder / name).convert("RGB"))
        assert (pixels == list(bytes.fromhex(plots.OURS[1:]))).all(-1).any()
        assert f"](plots/{name})" in document
    path.write_text("")
    report.main([], root=repository.root)
    assert not list(folder.iterdir())


def test_a_chart_of_many_cases_is_small(tmp_path):
    names = ("mosaic_gpu", "xla", *(f"{library}:a" for library in plots.LIBRARIES), "dense")
    rows = [
        attention(name, 2 + (7 * i + 5 * t) % 11, t=t)
        for i, name in enumerate(names)
        for t in range(36)
    ]
    plots.draw(rows, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size < 100_000


def test_colours_are_fixed_for_each_library():
    assert {plots.colour(name) for name in tables.OURS} == {plots.OURS}
    peers_of_all = (peers.ATTENTION, peers.GROUPED, *torch_libraries.LOADERS.values())
    assert plots.OTHER not in {plots.colour(name) for table in peers_of_all for name in table}
    fixed = [plots.OURS, plots.YARDSTICK, plots.OTHER, *plots.LIBRARIES.values()]
    assert len(set(fixed)) == len(fixed)
    few = plots.styles(["tokamax:mosaic", "jax.nn:xla"])
    many = plots.styles(["xla", "jax.nn:cudnn", "jax.nn:xla", "tokamax:mosaic (JAX 0.12.0.1)"])
    assert few["jax.nn:xla"] == (plots.LIBRARIES["jax.nn"], "")
    assert many["jax.nn:cudnn"][0] == many["jax.nn:xla"][0] == plots.LIBRARIES["jax.nn"]
    assert many["jax.nn:cudnn"][1] != many["jax.nn:xla"][1]
    assert many["tokamax:mosaic (JAX 0.12.0.1)"] == few["tokamax:mosaic"]


def test_ceiling_is_the_lower_of_product_and_copy():
    assert plots.ceiling(attention(flops=2e12, bytes=2e9)) == 800
    assert plots.ceiling(attention(flops=2e11, bytes=2e9)) == 400
    assert plots.ceiling(grouped(**CPU)) is None


def test_repository_is_up_to_date():
    report.main([], check=True)
