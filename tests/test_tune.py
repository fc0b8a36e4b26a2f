"""The tuner on a CPU: what it times, what it drops, what it keeps."""

import dataclasses
import json
import logging
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_ops
from pallas_ops import compile_report, dispatch, tune, tuning
from pallas_ops.attention import chunked
from pallas_ops.attention.primitive import flash_attention_fwd
from pallas_ops.grouped_matmul import xla

QKV = [jax.ShapeDtypeStruct((1, 130, 2, 8), jnp.float32)] * 3


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path))
    return tmp_path


def attend(*arrays, **options):
    return pallas_ops.flash_attention(*arrays, **options)


def run(*args, **options):
    return tune.tune(*args, budget_ms=1, progress=False, **options)


@dataclasses.dataclass(frozen=True)
class Delay:
    """How long a call takes; `wrong` ones also compute something else."""

    seconds: float
    wrong: bool = False


@pytest.fixture
def sleeper(monkeypatch):
    """Attention by the plain implementation, after a pause in its config."""
    plain = flash_attention_fwd.implementations["reference"].run

    def pause(x, config):
        time.sleep(config.seconds)
        return np.asarray(x)

    def body(*operands, config, **params):
        if config.seconds < 0:
            raise ValueError("it does not compile\nfor a long reason")
        query = jax.pure_callback(lambda x: pause(x, config), jax.typeof(operands[0]), operands[0])
        out, lse = plain(query, *operands[1:], config=None, **params)
        return (out * 1.5 if config.wrong else out), lse

    tunable = tuning.Tunable(
        Delay,
        lambda *avals, **params: {"t": avals[0].shape[1]},
        candidates=lambda *avals, **params: [
            Delay(0.02),
            Delay(0.001),
            Delay(0.0, wrong=True),
            Delay(-1.0),
            Delay(9.0),
        ],
        heuristic=lambda kind, *avals, **params: Delay(0.01),
    )
    monkeypatch.setattr(flash_attention_fwd, "implementations", {})
    flash_attention_fwd.register(
        "triton",
        dispatch.Implementation(
            body,
            tunable=tunable,
            refuse=lambda *a, config, **p: "too slow" if config and config.seconds > 1 else None,
        ),
    )
    jax.clear_caches()
    yield
    jax.clear_caches()


def test_fastest_right_candidate_is_kept_and_used(sleeper, cache, caplog):
    (outcome,) = run(attend, *QKV)
    trials = {t.config: t for t in outcome.trials}
    assert list(trials) == [Delay(0.01), Delay(0.02), Delay(0.001), Delay(0.0, True), Delay(-1.0)]
    assert outcome.best is trials[Delay(0.001)]
    assert trials[Delay(0.02)].ms > trials[Delay(0.01)].ms > trials[Delay(0.001)].ms >= 1
    assert "differ" in trials[Delay(0.0, True)].dropped
    assert trials[Delay(-1.0)].dropped == "ValueError: it does not compile"
    entry = json.loads(outcome.stored.read_text())
    assert entry["config"] == {"seconds": 0.001, "wrong": False} and entry["key"] == {"t": 130}
    assert entry["ms"] < entry["heuristic_ms"] and entry["device"] == "cpu"
    assert entry["jax"] == jax.__version__
    caplog.set_level(logging.DEBUG, "pallas_ops")
    attend(*(jnp.ones(x.shape) for x in QKV))
    assert "Delay(seconds=0.001, wrong=False) from the cache" in caplog.text


def test_for_a_named_card_nothing_is_timed_or_stored(cache):
    (outcome,) = run(attend, *QKV, chip="h200")
    assert outcome.trials[0].config == chunked.heuristic("NVIDIA H200", *QKV)
    assert all(t.ms is None for t in outcome.trials)
    assert outcome.best is None and outcome.stored is None and not list(cache.rglob("*.json"))


@pytest.mark.parametrize(
    "arguments",
    [
        "program m:f --implementation xla",  # a program names its own
        "program m:f --chip h200 --table t.json",
        "program m:f --chip h2000",
    ],
)
def test_command_line_refuses_what_would_have_no_effect(arguments, capsys):
    with pytest.raises(SystemExit):
        tune.main(arguments.split())
    assert "error: " in capsys.readouterr().err


def test_without_a_cache_nothing_is_stored(sleeper, monkeypatch, capsys):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", "")
    (outcome,) = run(attend, *QKV)
    assert outcome.best is not None and outcome.stored is None
    tune._show([outcome])
    assert "\n  not stored: PALLAS_OPS_CACHE_DIR is empty" in capsys.readouterr().out


def test_times_are_kept_where_storing_fails(sleeper, cache, monkeypatch):
    def fail(*args, **facts):
        raise OSError("disk full")

    monkeypatch.setattr(tuning, "store", fail)
    (outcome,) = run(attend, *QKV)
    assert outcome.best is not None and outcome.note == "not stored: disk full"


SMALL = "attention --batch 1 --length 40 --heads 2 --head-dim 8 --dtype float32 --forward-only"


def refused(arguments, capsys):
    """The message with which a command line is refused before anything is timed."""
    with pytest.raises(SystemExit) as end:
        tune.main(arguments.split())
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert not shown.out and "Traceback" not in shown.err
    return shown.err.rpartition("error: ")[2]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (f"{SMALL} --dtype float33", "invalid choice"),
        (f"{SMALL} --dtype int32", "invalid choice"),
        (f"{SMALL} --implementation nope", "invalid choice"),
        (f"{SMALL} --implementation mosaic_gpu", "mosaic_gpu"),
        (f"{SMALL} --length -3", "a size is 0 or more"),
        (f"{SMALL} --heads 3 --kv-heads 2", "divides query's N=3, got K=2"),
        (f"{SMALL} --kv-heads 0", "divides query's N=2, got K=0"),
        (f"{SMALL} --window -1 3", "local_window_size must not be negative"),
        (f"{SMALL} --budget-ms nan", "budget_ms must be positive and finite, got nan"),
        (f"{SMALL} --budget-ms inf", "budget_ms must be positive"),
        (f"{SMALL} --budget-ms=-1", "budget_ms must be positive"),
        ("grouped --rows 8 --k 4 --n 4 --groups 2 --activation nope", "invalid choice"),
        ("program nomodule:step", "nomodule can't be imported"),
        ("program json", "module:function, got 'json'"),
        ("program .json:dumps", "module:function, got '.json:dumps'"),
        ("program json:nope", "json:nope must be a function of no arguments"),
        ("program json:dumps", "json:dumps must be a function of no arguments"),
        ("program os:getcwd", "os:getcwd must return (f, args)"),
    ],
)
def test_command_line_refuses_mistakes(cache, arguments, words, capsys):
    assert words in refused(arguments, capsys)


@pytest.mark.parametrize(
    "text, words",
    [
        ("garbage", "no table of configs"),
        ("[" * 100_000, "no table of configs"),
        ("{}", "no table of configs: KeyError('device')"),
        ('{"device": "cpu", "entries": [3]}', "no table of configs"),
        ('{"device": "cpu", "entries": [{"operation": "x"}]}', "no table of configs"),
        ('{"device": "NVIDIA H200", "entries": []}', "for 'NVIDIA H200', not for 'cpu'"),
    ],
)
def test_table_is_checked_before_anything_is_timed(cache, tmp_path, text, words, capsys):
    table = tmp_path / "table.json"
    table.write_text(text)
    assert words in refused(f"{SMALL} --table {table}", capsys)
    assert table.read_text() == text


def test_places_are_checked_before_anything_is_timed(cache, tmp_path, monkeypatch, capsys):
    assert "can't be written" in refused(f"{SMALL} --table {tmp_path}/none/t.json", capsys)
    assert "is no file" in refused(f"{SMALL} --table {tmp_path}", capsys)
    (tmp_path / "file").touch()
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "file"))
    assert "can't be written" in refused(SMALL, capsys)
    with pytest.raises(OSError, match="can't be written"):
        run(attend, *QKV)


@pytest.mark.parametrize(
    "arguments",
    [
        f"{SMALL} --batch 0",
        f"{SMALL} --kv-length 0",
        f"{SMALL} --v-head-dim 0",
        "grouped --rows 8 --k 4 --n 4 --groups 0",
    ],
)
def test_empty_calls_are_not_timed(cache, arguments, capsys):
    assert tune.main(arguments.split()) == 1
    shown = capsys.readouterr().out
    assert "there is nothing to time in an empty call" in shown and "Config(" not in shown


def test_why_nothing_is_tuned(cache, capsys):
    assert tune.main([*SMALL.split(), "--implementation", "reference"]) == 0
    assert (
        capsys.readouterr().out
        == "nothing to tune: flash_attention_fwd, reference: this implementation has no config\n"
    )
    with tuning.use(chunked.Config(64, 64)):
        assert tune.main(SMALL.split()) == 0
    assert "flash_attention_fwd, xla: a config is given" in capsys.readouterr().out


def test_for_a_named_card_it_says_what_was_compiled(cache, capsys):
    assert tune.main([*SMALL.split(), "--chip", "h200"]) == 0
    assert "Nothing is compiled: no candidate is of a GPU kernel" in capsys.readouterr().err


def test_unknown_chip():
    with pytest.raises(ValueError, match=r"chip must be one of a100, .*, got 'nope'"):
        run(attend, *QKV, chip="nope")


def test_errors_of_a_program_keep_their_traceback(cache, tmp_path, monkeypatch):
    (tmp_path / "broken_step.py").write_text(
        "import jax.numpy as jnp\ndef step():\n    return lambda: jnp.ones(3) + jnp.ones(4), ()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match="incompatible shapes"):
        tune.main(["program", "broken_step:step"])


def test_all_calls_of_a_program_are_tuned_once(cache):
    x, w = jax.ShapeDtypeStruct((40, 8), jnp.float32), jax.ShapeDtypeStruct((4, 8, 6), jnp.float32)

    def layer(x, w):
        sizes = jnp.array([10, 20, 0, 10])
        y = pallas_ops.ragged_dot(x, w, sizes) + pallas_ops.ragged_dot(x + 1, w, sizes)
        pallas_ops.ragged_dot(x, w, sizes, config=xla.Config(7))
        return jnp.sum(y**2)

    outcomes = run(jax.jit(jax.grad(layer, argnums=(0, 1))), x, w)
    found = [
        (o.call.operation, o.key["transpose_rhs"] if "rhs" in o.key else None) for o in outcomes
    ]
    assert sorted(o.call.operation for o in outcomes) == [
        "ragged_dot",
        "ragged_dot",  # the gradient of x: with transposed matrices
        "ragged_dot_contracting",
    ], found
    assert all(o.stored is not None and o.best is not None for o in outcomes)


def test_a_config_of_the_call_or_context_leaves_nothing_to_tune(cache):
    config = chunked.Config(64, 64)
    assert run(lambda *a: attend(*a, config=config), *QKV) == []
    with tuning.use(config):
        assert run(attend, *QKV) == []


def test_kernels_are_compiled_first_and_the_bad_ones_dropped(sleeper, monkeypatch, cache):
    """As for a GPU kernel, with a compiler that finds a spill in one and dies of another."""
    monkeypatch.setattr(tune, "_is_kernel", lambda call: True)
    monkeypatch.setattr(compile_report, "available", lambda: None)
    monkeypatch.setattr(compile_report, "chip_of", lambda kind: "h200")
    jobs = []

    class Pool:
        def __init__(self, *args):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def submit(self, function, chip, call, config):
            assert function is tune.compile_problem and chip == "h200"
            jobs.append(config)
            future = tune.concurrent.futures.Future()
            if config == Delay(0.02):
                future.set_exception(tune.concurrent.futures.process.BrokenProcessPool())
            else:
                future.set_result("it spills 40 bytes" if config == Delay(0.001) else None)
            return future

    monkeypatch.setattr(tune.concurrent.futures, "ProcessPoolExecutor", Pool)
    (outcome,) = run(attend, *QKV)
    trials = {t.config: t for t in outcome.trials}
    assert jobs == [*trials, Delay(0.02)]  # the one that takes its process along is tried alone
    assert trials[Delay(0.02)].dropped == "the compiler ended its process"
    assert trials[Delay(0.001)].dropped == "it spills 40 bytes"
    assert outcome.best is trials[Delay(0.01)]


def test_without_a_compiler_candidates_are_timed_and_the_user_told(
    sleeper, monkeypatch, cache, capsys
):
    monkeypatch.setattr(tune, "_is_kernel", lambda call: True)
    monkeypatch.setattr(compile_report, "chip_of", lambda kind: "h200")
    monkeypatch.setattr(compile_report, "available", lambda: "no ptxas")
    (outcome,) = run(attend, *QKV)
    assert outcome.best.config == Delay(0.001)
    assert "not checked for spills: no ptxas" in capsys.readouterr().err


def test_command_line_attention(cache, tmp_path, capsys):
    table = tmp_path / "table.json"
    arguments = "attention --batch 1 --length 40 --heads 2 --kv-heads 1 --head-dim 8 --causal"
    arguments += f" --segments --dtype float32 --budget-ms 1 --table {table}"
    assert tune.main(arguments.split()) == 0
    shown = capsys.readouterr().out
    assert "flash_attention_fwd, xla" in shown and "flash_attention_bwd, xla" in shown
    assert shown.count("stored in") == 2 and shown.count("* Config(") == 2
    first = json.loads(table.read_text())
    assert first["device"] == "cpu"
    assert [e["operation"] for e in first["entries"]] == [
        "flash_attention_bwd",
        "flash_attention_fwd",
    ]
    assert first["entries"][0]["key"]["operands"] == ["q_segments", "kv_segments"]
    # A second run adds to the table and replaces what it has.
    assert tune.main([*arguments.split(), "--forward-only", "--window", "3", "0"]) == 0
    assert len(json.loads(table.read_text())["entries"]) == 3
    assert tune.main(arguments.split()) == 0
    assert len(json.loads(table.read_text())["entries"]) == 3


def test_command_line_grouped(cache, capsys):
    arguments = "grouped --rows 50 --k 8 --n 12 --groups 3 --activation swiglu --dtype float32"
    assert tune.main([*arguments.split(), "--budget-ms", "1"]) == 0
    assert capsys.readouterr().out.count("stored in") >= 3


def test_command_line_program(cache, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_step.py").write_text(
        "import jax, jax.numpy as jnp, pallas_ops\n"
        "def step():\n"
        "    x = jax.ShapeDtypeStruct((1, 20, 1, 4), jnp.float32)\n"
        "    return lambda q: pallas_ops.flash_attention(q, q, q), (x,)\n"
        "def nothing():\n"
        "    return jnp.sin, (jax.ShapeDtypeStruct((3,), jnp.float32),)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert tune.main(["program", "my_step:step", "--budget-ms", "1"]) == 0
    assert tune.main(["program", "my_step:nothing"]) == 0
    assert "nothing to tune: the program has no call of pallas_ops" in capsys.readouterr().out


def test_inputs_are_usable(rng):
    """Every operand that the primitives take gets values with which the results are finite."""
    q = jnp.zeros((2, 12, 4, 8))
    k = jnp.zeros((2, 16, 2, 8))
    options = dict(
        bias=jnp.zeros((1, 4, 12, 16)),
        mask=jnp.ones((12, 16), bool),
        is_causal=True,
        q_offset=jnp.array([4, 4]),
        query_seq_lengths=jnp.array([3, 4]),
        key_value_seq_lengths=jnp.array([5, 6]),
        q_segment_ids=jnp.ones((2, 12), jnp.int32),
        kv_segment_ids=jnp.ones((2, 16), jnp.int32),
        sinks=jnp.zeros(4),
        dropout_rate=0.5,
        dropout_key=jax.random.key(0),
    )
    loss = lambda q, k, **o: jnp.sum(pallas_ops.flash_attention(q, k, k, **o))
    calls = tune.calls_of(
        lambda q, k: jax.value_and_grad(loss)(q, k, **options), q, k, platform="cpu"
    )
    w = jnp.zeros((3, 8, 6))
    product = lambda x, w, b: pallas_ops.ragged_dot(
        x, w, jnp.array([1, 2, 3]), bias=b, activation="swiglu"
    )
    calls += tune.calls_of(
        lambda *a: jax.vjp(product, *a)[1](jnp.ones((9, 3))),
        jnp.zeros((9, 8)), w, jnp.zeros((3, 6)), platform="cpu",
    )  # fmt: skip
    assert len({c.operation for c in calls}) == 4
    for call in calls:
        operation = dispatch.Operation.by_name[call.operation]
        operands = operation.inputs(0, *call.avals, **dict(call.params))
        assert [(x.shape, x.dtype) for x in operands] == [(a.shape, a.dtype) for a in call.avals]
        heuristic = operation.implementations["xla"].tunable.heuristic
        config = heuristic("cpu", *call.avals, **dict(call.params))
        for result in tune.program(call, config)(*operands):
            assert np.isfinite(result).all() and np.any(result)
