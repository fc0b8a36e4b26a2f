"""The Hopper kernels in the interpreter, races detected: values, masks, NaN, what they refuse."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_ops
from pallas_ops import chips, testing
from pallas_ops.attention import mosaic_visibility as visibility
from pallas_ops.attention.mosaic_config import (
    BackwardConfig,
    Config,
    candidates,
    heuristic,
    registers,
)
from pallas_ops.attention.mosaic_consumer import Consumer
from pallas_ops.attention.validate import Spec
from tests import interpreter
from tests.attention import cases

SIZES = {"B": 1, "T": 130, "S": 200, "N": 2, "K": 1, "H": 64, "Hv": 64}
SMALL = Config(block_kv=64, blocks=2)

# By name: the config, and the call as in cases.CASES. Two blocks share three tiles or more.
CASES = {
    "plain": (SMALL, {}),
    "heads_of_72_and_40": (SMALL, {"H": 72, "Hv": 40, "is_causal": True, "q_offset": [70]}),
    "heads_of_256": (SMALL, {"H": 256, "Hv": 256, "is_causal": True}),
    "heads_of_64_and_192": (Config(64, stages=3), {"Hv": 192, "T": 64, "is_causal": True}),
    "three_consumers": (Config(128, consumers=3, blocks=1), {"T": 250, "is_causal": True}),
    "chained": (Config(128, blocks=2), {"is_causal": True, "T": 260, "S": 260, "N": 3}),
    "chained_lengths": (
        Config(128, stages=3, blocks=1),
        {"is_causal": True, "T": 200, "key_value_seq_lengths": [150], "query_seq_lengths": [140]},
    ),
    "latent": (Config(128, blocks=2), {"H": 192, "Hv": 128, "T": 250, "is_causal": True}),
    "one_consumer": (Config(128, consumers=1, blocks=2), {"scale": 2.0}),
    "one_query": (SMALL, {"T": 1, "B": 3, "key_value_seq_lengths": [200, 1, 77]}),
    "one_block_a_tile": (Config(64, blocks=0), {"B": 2, "is_causal": True, "q_offset": [3, 70]}),
    "no_producer": (Config(64, blocks=0, producer=False), {"is_causal": True, "q_offset": [70]}),
    "groups": (SMALL, {"N": 6, "K": 2, "T": 60, "is_causal": True}),
    "before_the_start": (SMALL, {"is_causal": True, "q_offset": [-100]}),
    "past_the_end": (SMALL, {"is_causal": True, "q_offset": [190]}),
    "first_seen_in_a_full_block": (SMALL, {"is_causal": True, "q_offset": [63], "N": 1}),
    "negative_scale": (SMALL, {"is_causal": True, "scale": -0.7, "T": 64}),
    "scale_of_nothing": (SMALL, {"is_causal": True, "scale": 0.0, "T": 64}),
    "window": (SMALL, {"local_window_size": (40, 7), "q_offset": [30]}),
    "window_left_open": (SMALL, {"local_window_size": (None, 9)}),
    "window_right_open": (SMALL, {"local_window_size": (9, None), "q_offset": [100]}),
    "lengths": (
        SMALL,
        {"B": 3, "query_seq_lengths": [99, 0, 130], "key_value_seq_lengths": [130, 200, 0]},
    ),
    "segments": (SMALL, {"segments": 3, "is_causal": True, "q_offset": [70]}),
    "segments_shuffled": (SMALL, {"segments": 3, "shuffled": True}),
    "soft_cap_and_sinks": (
        SMALL,
        {"logits_soft_cap": 1.5, "sinks": True, "query_seq_lengths": [70]},
    ),
    "sinks_of_no_weight": (SMALL, {"sinks": -np.inf, "key_value_seq_lengths": [0]}),
    "mask_and_bias": (SMALL, {"mask": "1NTS", "bias": "TS", "bias_inf": 0.3}),
    "mask_of_keys": (SMALL, {"mask": "B11S", "bias": "1NT1"}),
    "mask_of_rows": (SMALL, {"mask": "11T1", "bias": "1N11", "is_causal": True}),
    "bias_of_keys": (SMALL, {"bias": "1N1S", "mask": "N11", "logits_soft_cap": 1.5}),
    "dropout": (SMALL, {"dropout_rate": 0.4, "is_causal": True, "T": 64}),
    "everything": (
        SMALL,
        {"B": 2, "local_window_size": (60, 30), "logits_soft_cap": 1.5, "dropout_rate": 0.3}
        | {"q_offset": [3, -20], "query_seq_lengths": [100, 130], "bias": "B1TS", "bias_inf": 0.2}
        | {"key_value_seq_lengths": [180, 70], "segments": 2, "mask": "1NTS", "sinks": True},
    ),
}


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    interpreter.install(monkeypatch)
    with testing.interpret(races=True):
        yield


def run(config, inputs, dtype=jnp.bfloat16, **options):
    floats = {n: jnp.asarray(x, dtype) for n, x in inputs.floats.items()}
    arrays = {n: x if n == "dropout_key" else jnp.asarray(x) for n, x in inputs.arrays.items()}
    options = {"implementation": "mosaic_gpu", "config": config} | options
    out, lse = pallas_ops.flash_attention(
        **floats, **arrays, **inputs.statics, **options, return_residual=True
    )
    return np.asarray(out, np.float64), np.asarray(lse, np.float64)


@pytest.fixture
def no_careful_pass(monkeypatch):
    """What a second pass computes is NaN."""
    attend_guarded = Consumer.attend_guarded

    def spoilt(self):
        acc, top, total = attend_guarded(self)
        return acc * jnp.nan, top, total

    monkeypatch.setattr(Consumer, "attend_guarded", spoilt)


def assert_right(inputs, out, lse):
    """As close to float64 as the plain implementation in the same dtype, twice over."""
    expected = cases.truth(inputs)
    plain, _ = run(None, inputs, implementation="reference")
    finite = np.isfinite(expected["out"])
    np.testing.assert_array_equal(np.isnan(out), np.isnan(expected["out"]))
    error, allowed = (
        np.max(np.abs(x - expected["out"]), where=finite, initial=0) for x in (out, plain)
    )
    assert error <= 2 * allowed + 1e-3
    cases.assert_near(lse, expected["lse"], 1e-5, "lse")


DROPPED = {"dropout_rate": 0.3, "T": 70}

# Cases of the forward that say something about the backward, some with one head: half the time. And
# cases of the backward alone.
ONE_HEAD = (
    "plain",
    "heads_of_72_and_40",
    "heads_of_256",
    "heads_of_64_and_192",
    "past_the_end",
    "window",
    "window_right_open",
    "lengths",
    "segments",
    "segments_shuffled",
    "dropout",
)
ALL_HEADS = (
    "groups",
    "soft_cap_and_sinks",
    "mask_and_bias",
    "mask_of_keys",
    "mask_of_rows",
    "bias_of_keys",
    "everything",
)
BACKWARD_CASES = {
    name: (CASES[name][0], CASES[name][1] | ({"N": 1} if name in ONE_HEAD else {}))
    for name in ONE_HEAD + ALL_HEADS
} | {
    "wide_groups": (SMALL, {"H": 192, "Hv": 128, "N": 4, "K": 2, "T": 70, "segments": 2}),
    "wide_soft_cap": (SMALL, {"H": 136, "bias": "NT1", "logits_soft_cap": 1.5, "T": 70}),
    "wide_dropout": (SMALL, {"H": 256, "Hv": 72, "bias": "TS", "N": 1} | DROPPED),
    "no_producer_backward": (
        BackwardConfig(producer=False),
        {"H": 128, "N": 4, "K": 2, "is_causal": True, "q_offset": [70]},
    ),
    "wide_no_producer": (
        BackwardConfig(64, stages=2, do_stages=1, producer=False),
        {"H": 256, "Hv": 256, "N": 2, "K": 1, "T": 190, "S": 70},
    ),
    "three_stages": (BackwardConfig(64, stages=3), {"H": 72, "T": 250, "segments": 3}),
    "blocks_stay": (
        BackwardConfig(64, blocks=2),
        {"H": 72, "T": 250, "S": 300, "is_causal": True, "q_offset": [60]},
    ),
    "blocks_stay_lengths": (
        BackwardConfig(128, stages=3, blocks=1),
        {"B": 2, "T": 130, "key_value_seq_lengths": [0, 150], "query_seq_lengths": [99, 70]}
        | {"is_causal": True},
    ),
    "bias_of_all": (SMALL, {"B": 2, "bias": "BNTS", "S": 70, "H": 128}),
    "bias_of_nothing": (SMALL, {"B": 2, "bias": "", "S": 70}),
}


def gradients(inputs, implementation, config=None, **more):
    """Of all floats, by the public call; the forward takes what is chosen: few, large blocks."""
    config = config if isinstance(config, BackwardConfig) else None
    floats = {n: jnp.asarray(x, jnp.bfloat16) for n, x in inputs.floats.items()}
    arrays = {n: x if n == "dropout_key" else jnp.asarray(x) for n, x in inputs.arrays.items()}
    options = {"implementation": implementation, "config": config, "return_residual": True}
    options |= more

    def attend(floats):
        return pallas_ops.flash_attention(**floats, **arrays, **inputs.statics, **options)

    (out, _), pull = jax.vjp(attend, floats)
    (found,) = pull((jnp.asarray(inputs.dout, out.dtype), jnp.asarray(inputs.dlse, jnp.float32)))
    return {n: np.asarray(x, np.float64) for n, x in found.items()}


def assert_gradients_right(inputs, found):
    expected, plain = cases.truth(inputs), gradients(inputs, "reference")
    for operand, x in found.items():
        error, allowed = (np.max(np.abs(y - expected[operand])) for y in (x, plain[operand]))
        assert error <= 2 * allowed + 1e-3, operand


@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_gradients(name):
    config, case = BACKWARD_CASES[name]
    inputs = cases.inputs(name, SIZES | case, jnp.bfloat16)
    assert_gradients_right(inputs, gradients(inputs, "mosaic_gpu", config))


@pytest.mark.parametrize(
    "case",
    [
        {"is_causal": True, "q_offset": [-20]},
        {"mask": "1NTS", "density": 0.1},
        {"bias": "1N1S", "bias_inf": 0.9},
    ],
    ids=["causal", "mask", "bias"],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_gradients_of_what_is_masked(case):
    """NaN where some pairs see it: the same entries are NaN as in `xla`, and the rest is right."""
    inputs = cases.inputs("poisoned", SIZES | case, jnp.bfloat16)
    for name in ("query", "key", "value"):
        inputs.floats[name][:, 100, :, 3] = np.nan
    found = gradients(inputs, "mosaic_gpu", SMALL)
    expected = gradients(inputs, "xla")
    for operand, x in found.items():
        assert 0 < np.isnan(x).sum() < x.size
        np.testing.assert_array_equal(np.isnan(x), np.isnan(expected[operand]))
        np.testing.assert_allclose(x, expected[operand], rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("head", "sinks"), [(64, True), (136, False)])
def test_gradients_beside_what_is_not_finite(head, sinks):
    """NaN and Inf in rows that see nothing, and in keys that none sees, change only roundings:

    The forward goes through them with care, by other maxima.
    """
    case = {"is_causal": True, "q_offset": [-20], "H": head, "Hv": head, "sinks": sinks}
    case |= {"query_seq_lengths": [100], "key_value_seq_lengths": [70], "S": 190}
    inputs = cases.inputs("beside", SIZES | case, jnp.bfloat16)
    clean = gradients(inputs, "mosaic_gpu", SMALL)
    dout = inputs.dout.copy()
    for poisoned in (inputs.floats["query"], dout):
        poisoned[:, 5, :, 3] = np.nan
        poisoned[:, 18, :, 2] = np.inf
        poisoned[:, 100:] = np.nan
    for name in ("key", "value"):
        inputs.floats[name][:, 70:] = np.inf
    found = gradients(inputs.replace(dout=dout), "mosaic_gpu", SMALL)
    for operand, x in found.items():
        if operand != "sinks" or not sinks:  # the sink of row 5 takes what its cotangent brings
            np.testing.assert_allclose(x, clean[operand], 2**-6, 2**-7, err_msg=operand)


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    config, case = CASES[name]
    inputs = cases.inputs(name, SIZES | case, jnp.bfloat16)
    assert_right(inputs, *run(config, inputs))


@pytest.mark.parametrize(
    ("name", "chained"),
    [("chained", True), ("plain", True), ("three_consumers", False), ("heads_of_256", False)],
)
def test_first_scores_come_beside_the_last_product(name, chained, monkeypatch):
    """Of the tile before, where they may; `test_values` has the same calls' values."""
    follow, stores = Consumer.follow, []

    def noted(self, start, end, sums, store=None, suspect=None):
        stores.append(store)
        return follow(self, start, end, sums, store, suspect)

    monkeypatch.setattr(Consumer, "follow", noted)
    config, case = CASES[name]
    run(config, cases.inputs(name, SIZES | case, jnp.bfloat16))
    assert stores
    assert all((store is not None) == chained for store in stores)


@pytest.mark.parametrize("name", ["plain", "three_consumers"])
def test_float16(name):
    config, case = CASES[name]
    inputs = cases.inputs(name, SIZES | case, jnp.float16)
    assert_right(inputs, *run(config, inputs, jnp.float16))


RISES = {
    "by_little": (20.0, {}),
    "by_much": (60.0, {"is_causal": True, "q_offset": [90]}),
    "by_too_much": (400.0, {}),  # these take the careful pass
    "by_too_much_causal": (400.0, {"is_causal": True, "q_offset": [90], "sinks": True}),
}


@pytest.mark.parametrize("low", [-1e9, float(jnp.finfo(jnp.bfloat16).min)])
@pytest.mark.usefixtures("no_careful_pass")
def test_masks_by_a_low_bias(low):
    """All keys that are visited first in some rows, and all keys of one row where log2 has room."""
    inputs = cases.inputs("low", SIZES | {"T": 64, "bias": "TS"}, jnp.bfloat16)
    inputs.floats["bias"][:40, 70:] = cases.rounded(low, jnp.bfloat16)
    if low > -1e38:
        inputs.floats["bias"][3] = cases.rounded(low, jnp.bfloat16)
    assert_right(inputs, *run(SMALL, inputs))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", RISES)
def test_scores_that_rise(name, dtype, request):
    """From the last keys, which are visited first, to the first, within and beyond float32."""
    rise, case = RISES[name]
    if "too" not in name:
        request.getfixturevalue("no_careful_pass")
    inputs = cases.inputs(name, SIZES | {"T": 64, "N": 1} | case, dtype)
    query, key = inputs.floats["query"], inputs.floats["key"]
    query[:] = np.abs(query) + 0.5
    slope = np.linspace(1, 0, key.shape[1])[:, None, None]
    key[:] = key + rise * slope / query.shape[-1] * 8
    for x in (query, key):
        x[:] = cases.rounded(x, dtype)
    assert_right(inputs, *run(SMALL, inputs, dtype))


@pytest.mark.parametrize(
    ("config", "case"),
    [
        (SMALL, {"is_causal": True, "T": 200, "q_offset": [-10]}),
        (SMALL, {"is_causal": True, "q_offset": [-20], "dtype": jnp.float16}),
        (SMALL, {"is_causal": True, "q_offset": [-20], "H": 256, "Hv": 256}),
        (Config(64, consumers=3, blocks=1), {"segments": 2, "Hv": 128}),
        (Config(64, blocks=0, producer=False), {"local_window_size": (30, 30)}),
        (SMALL, {"mask": "1NTS", "dropout_rate": 0.3, "T": 64}),
        (SMALL, {"key_value_seq_lengths": [100], "query_seq_lengths": [50]}),
    ],
    ids=["causal", "float16", "wide", "segments", "window", "mask", "lengths"],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_masked_reaches_nothing(config, case):
    """NaN and Inf in rows that some queries see and others do not, and some that none does."""
    dtype = case.get("dtype", jnp.bfloat16)
    case = {name: x for name, x in case.items() if name != "dtype"}
    inputs = cases.inputs("poisoned", SIZES | case, dtype)
    inputs.floats["query"][:, 5] = np.nan
    inputs.floats["key"][:, 90:95, :, 3] = np.nan
    inputs.floats["value"][:, 70, :, 2] = np.nan
    inputs.floats["value"][:, 120, :, 1] = np.inf
    inputs.floats["value"][:, -1] = np.nan
    out, _ = run(config, inputs, dtype)
    expected = cases.truth(inputs)["out"]
    # The sum of a weight times Inf is NaN here, as in the other implementations.
    np.testing.assert_array_equal(np.isnan(out), ~np.isfinite(expected))
    finite = np.isfinite(expected)
    np.testing.assert_allclose(out[finite], expected[finite], rtol=0, atol=0.03)


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_no_more_registers_than_there_are(consumers):
    """One more than a block is launched with, and setmaxnreg waits for ever."""
    consumer, producer = registers(consumers)
    launched = min(65536 // (128 * (consumers + 1)) // 8 * 8, 255)
    assert consumers * consumer + producer <= (consumers + 1) * launched


def test_reductions_across_warps_are_refused():
    """They race on a card, where the interpreter sees nothing of it."""

    def sum_rows(x_ref, out_ref):
        out_ref[...] = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False).sum(axis=0)

    kernel = plgpu.kernel(sum_rows, out_type=jax.ShapeDtypeStruct((64,), jnp.float32))
    with pytest.raises(AssertionError, match="take mosaic_inline"):
        kernel(jnp.zeros((64, 64)))


@pytest.mark.parametrize(("group", "megabytes"), [(1, 1), (2, 3), (3, 2), (6, 99)])
def test_order_takes_each_tile_once(group, megabytes):
    section = visibility.section_of(18, group, megabytes * 2**20, 200)
    assert 18 % section == 0 and section % group == 0
    order = visibility.Order(3, 6, 5, section, descending=True)
    assert order.all == 90
    every = set(itertools.product(range(3), range(6), range(5)))
    places = np.asarray(jax.vmap(order.place)(jnp.arange(90, dtype=jnp.int32)))
    assert set(zip(*places)) == every
    share, second = (x.ravel() for x in np.indices((45, 2), np.int32))
    pairs = np.asarray(jax.vmap(order.place_in_pair)(share, second))
    assert set(zip(*pairs)) == every
    assert np.ptp(pairs[2].reshape(45, 2).sum(axis=1)) == 0


def test_sections_of_heads():
    """As many as the cache holds, but enough for all multiprocessors, and all alike."""
    megabytes = lambda n: n * 2**20
    assert visibility.section_of(32, 1, megabytes(5), 200) == 2
    assert visibility.section_of(32, 1, megabytes(99), 32) == 8
    assert visibility.section_of(18, 3, megabytes(99), 32) == 9
    assert visibility.section_of(6, 2, megabytes(99), 1) == 6


def test_processors():
    assert chips.processors("NVIDIA H100 PCIe") == 114
    assert chips.processors(None) == chips.processors("something new") == 132


def test_configs_fit():
    for h, hv in ((8, 8), (64, 64), (72, 128), (128, 128), (192, 128), (256, 256)):
        call = [jax.ShapeDtypeStruct((1, 512, 2, size), jnp.bfloat16) for size in (h, h, hv)]
        spec = Spec(1.0, None, None, None, 0.0, None, False, "context")
        chosen = heuristic("NVIDIA H200", *call, fields=("query", "key", "value"), spec=spec)
        for config in (chosen, *candidates(*call, fields=("query", "key", "value"), spec=spec)):
            attend = lambda *call, config=config: pallas_ops.flash_attention(
                *call, implementation="mosaic_gpu", config=config
            )
            assert jax.eval_shape(attend, *call).shape == (1, 512, 2, hv)


@pytest.mark.parametrize(
    ("dtype", "h", "options", "reason"),
    [
        (jnp.float32, 64, {}, "all in bfloat16 or all in float16, not float32"),
        (jnp.bfloat16, 36, {}, "multiples of 8 up to 256, not H=36"),
        (jnp.bfloat16, 264, {}, "multiples of 8 up to 256, not H=264"),
        (jnp.bfloat16, 256, {"config": Config(stages=3)}, "bytes of shared memory"),
    ],
    ids=["dtype", "odd", "wide", "config"],
)
def test_refuses_by_name(dtype, h, options, reason):
    x = jnp.zeros((1, 64, 1, h), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        pallas_ops.flash_attention(x, x, x, implementation="mosaic_gpu", **options)


def test_refuses_gradients_by_name():
    x = jnp.zeros((1, 64, 2, 64), jnp.bfloat16)

    def attend(bias, implementation, config=None):
        options = {"deterministic": True, "implementation": implementation, "config": config}
        return pallas_ops.flash_attention(x, x, x, bias, **options).sum()

    bias = jnp.zeros((64, 64))
    with pytest.raises(NotImplementedError, match="no deterministic gradient: heads or rows share"):
        jax.eval_shape(jax.grad(lambda b: attend(b, "mosaic_gpu")), bias)
    stay = BackwardConfig(128, blocks=2)
    with pytest.raises(NotImplementedError, match="take tiles in no order"):
        jax.eval_shape(jax.grad(lambda b: attend(b, "mosaic_gpu", stay)), jnp.zeros((1, 64)))
    # A sequence falls through, each operation by itself.
    fallen = jax.eval_shape(jax.grad(lambda b: attend(b, ("mosaic_gpu", "xla"))), bias)
    assert fallen.shape == bias.shape


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("three_stages", 300),
        ("window", 300),
        ("heads_of_256", 190),
        ("wide_groups", 190),
        ("bias_of_keys", 300),
    ],
)
def test_additions_keep_their_order(name, length, monkeypatch):
    """Each waits for those of tiles that the grid has started before, and for none else."""
    ran = interpreter.install_semaphores(monkeypatch)
    config, case = BACKWARD_CASES[name]
    inputs = cases.inputs(name, SIZES | {"S": length} | case, jnp.bfloat16)
    assert_gradients_right(inputs, gradients(inputs, "mosaic_gpu", config, deterministic=True))
    assert max(ran.waits) > 0


@pytest.mark.parametrize(
    "fields", [{"block_kv": 96}, {"consumers": 4}, {"stages": 1}, {"producer": False}]
)
def test_config_refuses(fields):
    with pytest.raises(ValueError, match="got Config"):
        Config(**fields)


@pytest.mark.parametrize("fields", [{"block_q": 96}, {"blocks": 1, "producer": False}])
def test_backward_config_refuses(fields):
    with pytest.raises(ValueError, match="got BackwardConfig"):
        BackwardConfig(**fields)
