"""What the command line selects, and what of it is refused."""

import pytest

from benchmarks import __main__, selection, shapes

NOT_ABOVE_0 = [
    f"{option} {value}"
    for option in ("--budget-ms", "--limit-s", "--compile-ahead", "--compile-workers")
    for value in ("0", "-5", "nan", "x")
]


@pytest.mark.parametrize(
    "wrong",
    [*NOT_ABOVE_0, "--budget-ms inf", "--compile-ahead 1.5", "--dtype int8", "--case ("],
)
def test_wrong_arguments_are_usage_errors(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["run", "--set", "tiny", "--list", *wrong.split()])
    assert wrong.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--set", "no"], "no set no; there are fa3"),
        ([], "--set names one or more of"),
        (["--set", "tiny"], "--out FILE"),
        (["--set", "tiny", "--op", "x"], "no operation x; there are attention, grouped_matmul"),
        (["--set", "tiny", "--impl", "x", "--out", "x"], "no implementation x; there are ours"),
        (["--set", "tiny", "--direction", "up", "--out", "x"], "no direction up; there are fwd"),
        (["--set", "tiny", "--case", "nothing"], "no case is left"),
        (["--set", "tiny", "--list", "--impl", "x"], "no implementation x; there are ours"),
        (["--set", "tiny", "--list", "--direction", "up"], "no direction up; there are fwd"),
    ],
)
def test_what_does_not_exist(capsys, args, message):
    assert __main__.main(["run", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--op attention --direction dlhs", "nothing of attention is left to measure with "),
        ("--op attention --direction fwd,dlhs", "--direction dlhs"),
        ("--op attention --impl dense", "--impl dense"),
        ("--op attention --impl ours,dense", "--impl dense"),
        ("--op attention --impl torch:grouped_mm", "--impl torch:grouped_mm"),
        ("--op grouped_matmul --impl cudnn", "--impl cudnn"),
        ("--direction dlhs --impl cudnn", "with --direction dlhs, --impl cudnn"),
        ("--direction ,", "no direction is named; there are fwd"),
        ("--impl ,", "no implementation is named; there are ours"),
        ("--op ,", "no operation is named; there are attention"),
        ("--set fa3,tiny --op grouped_matmul --case ^b", "no case is left"),
    ],
)
def test_what_selects_nothing_is_an_error(capsys, tmp_path, args, message):
    out = tmp_path / "rows.json"
    args = ["run", *args.split(), "--set", "tiny", "--out", str(out)]
    assert __main__.main(args) == __main__.main([*args, "--list"]) == 2
    assert capsys.readouterr().err.count(message) == 2
    assert not out.exists()


@pytest.mark.parametrize("args", ["--direction dlhs", "--impl dense", "--impl grouped_mm,lax"])
def test_only_cases_to_measure_are_listed(capsys, args):
    assert __main__.main(["run", "--set", "tiny", *args.split(), "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line.startswith("tiny\tgrouped_matmul\t") for line in lines)


def test_sets_that_gather_others_name_the_part():
    args = __main__.parser().parse_args(["run", "--set", "attention,gqa", "--dtype", "float16"])
    cases = selection.cases(args)
    assert [s for _, s in cases if s.op != "attention" or s.dtype != "float16"] == []
    assert {name for name, _ in cases} == set(shapes.GATHERED["attention"])
    assert len(cases) == len(shapes.SETS["attention"])


def test_ours_is_what_runs_here():
    args = __main__.parser().parse_args(["run", "--set", "tiny", "--impl", "ours,reference"])
    assert list(selection.loaders(args, "attention")) == ["xla", "reference"]
