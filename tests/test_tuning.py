"""Where a kernel's config comes from: call, context, the user's cache, shipped table, heuristic."""

import dataclasses
import functools
import importlib.resources
import json
import logging
import multiprocessing
import os
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import pallas_ops
from pallas_ops import dispatch, tuning
from pallas_ops.attention import chunked
from pallas_ops.attention.primitive import flash_attention_bwd, flash_attention_fwd
from pallas_ops.grouped_matmul import xla

SHAPE = (1, 96, 2, 16)


@pytest.fixture
def arrays(rng):
    return [jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(3)]


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path))
    tuning._warn_once.cache_clear()
    return tmp_path


@pytest.fixture
def ran(monkeypatch):
    """Configs that `xla` ran with, by operation."""
    found = []

    def spy(operation, run, *operands, config, **params):
        found.append((operation.name, config))
        return run(*operands, config=config, **params)

    for operation in dispatch.Operation.by_name.values():
        entry = operation.implementations["xla"]
        table = dict(operation.implementations)
        table["xla"] = dataclasses.replace(entry, run=functools.partial(spy, operation, entry.run))
        monkeypatch.setattr(operation, "implementations", table)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def attend(*arrays, **options):
    return pallas_ops.flash_attention(*arrays, is_causal=True, **options)


def loss(*arrays, **options):
    return jnp.sum(attend(*arrays, **options) ** 2)


def call_of(arrays):
    with tuning.collect() as calls:
        jax.jit(lambda *a: attend(*a)).lower(*arrays)
    (call,) = calls
    return call


def stored(arrays, config, device="cpu"):
    """Puts a config into the cache for the call `attend(*arrays)`; its file."""
    call = call_of(arrays)
    tunable = flash_attention_fwd.implementations["xla"].tunable
    return tuning.store(device, call, tunable.key(*call.avals, **dict(call.params)), config)


def test_heuristic_without_anything_else(ran, arrays):
    attend(*arrays)
    assert ran == [("flash_attention_fwd", chunked.heuristic("cpu", *arrays))]


def test_cache_comes_before_the_heuristic(ran, cache, arrays):
    config = chunked.Config(16, 48)
    path = stored(arrays, config)
    assert cache in path.parents and path.parent.name == "cpu"
    ran.clear()
    attend(*arrays)
    assert ran == [("flash_attention_fwd", config)]
    # Lengths up to a power of two share it, others and another kind of device don't.
    attend(*(x[:, :70] for x in arrays))
    attend(*(x[:, :64] for x in arrays))
    assert [c for _, c in ran[1:]] == [config, chunked.heuristic("cpu", *arrays)]


def test_cache_of_another_device_is_not_read(ran, cache, arrays):
    stored(arrays, chunked.Config(16, 48), device="NVIDIA H200")
    attend(*arrays)
    assert ran[-1][1] == chunked.heuristic("cpu", *arrays)


def test_context_comes_before_the_cache_and_a_call_before_the_context(ran, cache, arrays):
    stored(arrays, chunked.Config(16, 48))
    ran.clear()
    outer, inner, own = chunked.Config(8, 8), chunked.Config(24, 24), chunked.Config(40, 40)
    with tuning.use(outer):
        attend(*arrays)
        with tuning.use(inner):
            attend(*arrays)
            attend(*arrays, config=own)
        attend(*arrays)
    assert [c for _, c in ran] == [outer, inner, own]  # the last was compiled before
    with tuning.use(outer):
        jax.grad(loss, argnums=(0, 1, 2))(*arrays)
    assert ran[-1] == ("flash_attention_bwd", outer)


def test_context_reaches_jitted_functions_and_later_pullbacks(ran, arrays):
    f = jax.jit(attend)
    f(*arrays)
    with tuning.use(chunked.Config(8, 8)):
        f(*arrays)
        _, pullback = jax.vjp(attend, *arrays)
    pullback(jnp.ones(SHAPE))
    assert [c.block_q for _, c in ran[1:]] == [8, 8, 8]
    assert ran[-1] == ("flash_attention_bwd", chunked.Config(8, 8))


def test_context_leaves_other_operations_alone(ran, rng):
    x, w = jnp.asarray(rng.normal(size=(20, 4))), jnp.asarray(rng.normal(size=(2, 4, 3)))
    sizes = jnp.array([12, 8])
    with tuning.use(chunked.Config(8, 8), xla.Config(5)):
        pallas_ops.ragged_dot(x, w, sizes)
        with tuning.use(chunked.Config(16, 16)):
            pallas_ops.ragged_dot_contracting(x, x, sizes)
    assert [c for _, c in ran] == [xla.Config(5)] * 2


def test_context_refuses_what_is_no_config():
    with (
        pytest.raises(TypeError, match=r"attention\.chunked\.Config.*got 'large'"),
        tuning.use("large"),
    ):
        pass
    pair = chunked.Config(8, 8), chunked.Config(16, 16)
    with pytest.raises(ValueError, match="different types"), tuning.use(*pair):
        pass


def test_configs_of_a_call_may_be_several(ran, arrays):
    attend(*arrays, config=(chunked.Config(8, 8),))
    assert ran[-1][1] == chunked.Config(8, 8)
    with pytest.raises(
        NotImplementedError, match=r"config of type pallas_ops\.grouped_matmul\.xla\.Config"
    ):
        attend(*arrays, config=(chunked.Config(8, 8), xla.Config(5)))


@dataclasses.dataclass(frozen=True)
class Small:
    """Of a kernel that takes sizes up to 64."""

    size: int


@pytest.fixture
def kernels(monkeypatch):
    """A kernel for each direction with a config type of its own, both run by plain JAX."""
    backward_type = dataclasses.make_dataclass("Backward", [("size", int)], frozen=True)
    seen = []

    def plug(operation, config_type):
        plain = operation.implementations["reference"].run

        def run(*operands, config, **params):
            seen.append(config)
            return plain(*operands, config=None, **params)

        def refuse(*avals, config, **params):
            return f"size {config.size} is over 64" if config and config.size > 64 else None

        tunable = tuning.Tunable(
            config_type,
            lambda *avals, **params: {"t": avals[0].shape[1]},
            candidates=lambda *avals, **params: [config_type(s) for s in (32, 64, 128)],
            heuristic=lambda kind, *avals, **params: config_type(48),
        )
        monkeypatch.setattr(operation, "implementations", dict(operation.implementations))
        operation.register("triton", dispatch.Implementation(run, refuse=refuse, tunable=tunable))

    plug(flash_attention_fwd, Small)
    plug(flash_attention_bwd, backward_type)
    jax.clear_caches()
    yield backward_type, seen
    jax.clear_caches()


def test_each_direction_takes_its_own_config(kernels, arrays):
    backward, seen = kernels
    jax.grad(loss)(*arrays, config=(Small(8), backward(16)), implementation="triton")
    assert seen == [Small(8), backward(16)]
    seen.clear()
    jax.grad(loss)(*arrays, config=Small(9))  # the backward looks its own up
    assert seen == [Small(9), backward(48)]
    seen.clear()
    with tuning.use(backward(17)):
        jax.grad(loss)(*arrays)
    assert seen == [Small(48), backward(17)]


def test_config_that_does_not_fit_raises(kernels, arrays):
    with pytest.raises(NotImplementedError, match="size 65 is over 64"):
        attend(*arrays, config=Small(65), implementation="triton")
    with tuning.use(Small(65)), pytest.raises(ValueError, match=r"Small\(size=65\).*over 64"):
        attend(*arrays)


def test_cached_config_that_does_not_fit_is_passed_over(kernels, cache, arrays, caplog):
    _, seen = kernels
    call = call_of(arrays)
    tuning.store("cpu", call, {"t": SHAPE[1]}, Small(65))
    seen.clear()
    attend(*arrays, scale=0.5)
    assert seen == [Small(48)]
    assert "size 65 is over 64" in caplog.text


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "can't be used"),
        ('{"config": {"block_q": 16, "block', "can't be used"),
        ("[" * 100_000, "can't be used"),
        ("[1, 2]", "holds no config"),
        ('{"format": 1}', "holds no config"),
        ('{"format": 0, "config": {}}', "format is 0"),
        ('{"format": 1, "config": {"block_q": 16, "block_kv": 16}}', "another entry"),
    ],
)
def test_damaged_cache_is_reported_and_ignored(ran, cache, arrays, caplog, text, reason):
    path = stored(arrays, chunked.Config(16, 48))
    path.write_text(text)
    ran.clear()
    for scale in (0.1, 0.2):
        attend(*arrays, scale=scale)
    assert [c for _, c in ran] == [chunked.heuristic("cpu", *arrays)] * 2
    messages = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(messages) == 1 and str(path) in caplog.text and reason in caplog.text
    ((damaged, why),) = tuning.damaged()
    assert damaged == path and reason in why


@pytest.mark.parametrize(
    "config",
    [
        {"block_q": 16},
        {"block_q": 16, "block_kv": 16, "x": 1},
        *({"block_q": value, "block_kv": 1} for value in (0, -5, 64.5, 64.0, "x", True, None, [])),
    ],
)
def test_cached_config_of_another_form_is_ignored(ran, cache, arrays, caplog, config):
    path = stored(arrays, chunked.Config(16, 48))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": config}))
    ran.clear()
    attend(*arrays)
    assert ran[-1][1] == chunked.heuristic("cpu", *arrays)
    assert f"{path} is ignored" in caplog.text
    assert [p for p, _ in tuning.damaged()] == [path]


@pytest.mark.parametrize("config", [{"block_q": 64.5, "block_kv": 16}, {"block_q": 16}, [1]])
def test_config_of_another_form_in_a_table_is_passed_over(
    ran, monkeypatch, cache, arrays, caplog, config
):
    call = call_of(arrays)
    key = flash_attention_fwd.implementations["xla"].tunable.key(*call.avals, **dict(call.params))
    table = {(call.operation, "xla", tuning._canonical(key)): config}
    monkeypatch.setattr(tuning, "shipped_table", lambda kind: table)
    attend(*arrays, scale=0.3)
    assert ran[-1][1] == chunked.heuristic("cpu", *arrays)
    assert "passed over" in caplog.text


def test_cache_entries_of_other_calls_are_damaged(cache, arrays):
    path = stored(arrays, chunked.Config(16, 48))
    other = path.with_name("flash_attention_fwd-xla-0123456789abcdef.json")
    other.write_text(path.read_text())
    unknown = tuning.store("cpu", tuning.Call("op", "xla", (), ()), {}, chunked.Config(8, 8))
    reasons = dict(tuning.damaged())
    assert reasons.keys() == {other, unknown}
    assert "another entry" in reasons[other] and "no config is known" in reasons[unknown]


@dataclasses.dataclass(frozen=True)
class Mixed:
    size: int
    order: str | None
    loads: bool = True
    stages: int | None = None


def test_fields_are_of_their_annotated_types():
    for right in (Mixed(1, "rows"), Mixed(1, None, False, 3)):
        tuning.check_fields(right)
    wrong: list[dict[str, Any]] = [
        dict(size=True),
        dict(size=None),
        dict(size=1.0),
        dict(order=3),
        dict(loads=1),
        dict(stages="2"),
    ]
    for fields in wrong:
        (name,) = fields
        with pytest.raises(TypeError, match=f"{name} must be of type .*, got {fields[name]!r}"):
            tuning.check_fields(Mixed(**{"size": 1, "order": None} | fields))
    with pytest.raises(TypeError, match="stages must be of type int or None, got False"):
        tuning.check_fields(Mixed(1, None, stages=False))


@pytest.mark.parametrize("value", [64.5, "a", None, True])
def test_fields_of_a_users_config_are_checked(kernels, arrays, value):
    with pytest.raises(TypeError, match="block_q must be of type int"):
        chunked.Config(value, 64)
    with pytest.raises(TypeError, match="block_m must be of type int"):
        xla.Config(value)
    with pytest.raises(TypeError, match="size must be of type int"):
        attend(*arrays, config=Small(value))
    with pytest.raises(TypeError, match="size must be of type int"), tuning.use(Small(value)):
        pass


@pytest.mark.parametrize(
    "config, words",
    [
        ([], "config must be None, a config or several"),
        ((), "config must be None, a config or several"),
        ([chunked.Config(8, 8), chunked.Config(16, 16)], "different types"),
    ],
)
def test_configs_of_a_call_that_have_no_meaning(arrays, config, words):
    with pytest.raises(ValueError, match=words):
        attend(*arrays, config=config)


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", "")
    assert tuning.cache_problem() is None
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / "new"))
    assert tuning.cache_problem() is None and not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", str(tmp_path / place))
        assert f"can't be written: {tmp_path / 'file'}: Not a directory" in tuning.cache_problem()


def test_cache_can_be_turned_off(monkeypatch, arrays):
    monkeypatch.setenv("PALLAS_OPS_CACHE_DIR", "")
    assert tuning.cache_directory() is None and tuning.damaged() == []
    with pytest.raises(ValueError, match="PALLAS_OPS_CACHE_DIR"):
        stored(arrays, chunked.Config(8, 8))


def test_cache_is_of_one_version_of_library_and_jax(cache, monkeypatch):
    name = tuning.cache_directory().name
    assert pallas_ops.__version__ in name and jax.__version__ in name
    monkeypatch.delenv("PALLAS_OPS_CACHE_DIR")
    assert tuning.cache_directory().is_relative_to(
        tuning.platformdirs.user_cache_path("pallas-ops")
    )


def test_interrupted_write_leaves_nothing(cache, arrays, monkeypatch):
    old = stored(arrays, chunked.Config(16, 48))
    before = old.read_text()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        stored(arrays, chunked.Config(8, 8))
    assert [p for p in cache.rglob("*") if p.is_file()] == [old] and old.read_text() == before


def write_many(root: str, writer: int, count: int) -> None:
    os.environ["PALLAS_OPS_CACHE_DIR"] = root
    for i in range(count):
        call = tuning.Call("flash_attention_fwd", "xla", (), ())
        tuning.store("cpu", call, {"shared": i % 5}, chunked.Config(writer + 1, i + 1))
        tuning.store("cpu", call, {"own": writer, "i": i}, chunked.Config(writer + 1, i + 1))


def test_concurrent_writers(cache):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(str(cache), w, 40)) for w in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert tuning.damaged() == []  # what a reader sees is whole
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert tuning.damaged() == []
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert len(files) == 5 + 3 * 40
    for i in range(5):
        call = tuning.Call("flash_attention_fwd", "xla", (), ())
        found = tuning._from_cache("cpu", call, {"shared": i})
        assert found is not None and found["block_kv"] % 5 == (i + 1) % 5


def test_shipped_tables_hold_what_the_kernels_take():
    folder = importlib.resources.files("pallas_ops") / "tables"
    files = [f for f in folder.iterdir() if f.name.endswith(".json")]
    assert files
    for file in files:
        table = json.loads(file.read_text())
        assert file.name == f"{tuning._slug(table['device'])}.json"
        for entry in table["entries"]:
            operation = dispatch.Operation.by_name[entry["operation"]]
            tunable = operation.implementations[entry["implementation"]].tunable
            assert dataclasses.asdict(tunable.config_type(**entry["config"])) == entry["config"]
            key = tuning._canonical(entry["key"])
            found = tuning.shipped_table(table["device"])
            assert found[entry["operation"], entry["implementation"], key] == entry["config"]


def test_shipped_table_is_used_on_its_device(monkeypatch, arrays):
    call = call_of(arrays)
    entry = flash_attention_fwd.implementations["xla"]
    key = entry.tunable.key(*call.avals, **dict(call.params))
    table = {(call.operation, "xla", tuning._canonical(key)): {"block_q": 32, "block_kv": 16}}
    monkeypatch.setattr(tuning, "shipped_table", lambda kind: table if kind == "X" else {})
    found = tuning.lookup(call, entry.tunable, entry.refuse, "X")
    assert found == chunked.Config(32, 16)
    for kind in ("Y", None):
        heuristic = chunked.heuristic(kind, *call.avals)
        assert tuning.lookup(call, entry.tunable, entry.refuse, kind) == heuristic


def test_rounded():
    assert [tuning.rounded(n) for n in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert tuning.rounded(0) == 0
    assert tuning.rounded("b") == "b"  # as a symbolic size of jax.export
