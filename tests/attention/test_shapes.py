"""Any size: drawn by hypothesis and picked by hand, forward and backward against float64."""

import dataclasses

import hypothesis
import pytest
from hypothesis import strategies as st

from pallas_ops.attention import chunked
from tests.attention import cases
from tests.attention.cases import IMPLEMENTATIONS

BLOCKED = dataclasses.replace(cases.BLOCKED, config=chunked.Config(16, 32))

ODD = [(1, 65), (65, 1), (17, 33), (63, 15)]


@pytest.mark.parametrize(("t", "s"), ODD)
def test_odd_lengths(t, s):
    case = {"T": t, "S": s, "N": 2, "K": 1, "H": 5, "Hv": 3, "is_causal": True}
    case |= {"q_offset": [s - t, s // 2], "bias": "1N1S"}
    inputs = cases.inputs("odd", case)
    cases.assert_all_near(cases.run(BLOCKED, inputs), cases.truth(inputs))


@pytest.mark.usefixtures("fully_optimised")
def test_more_than_one_default_block():
    inputs = cases.inputs("long", {"B": 1, "T": 700, "S": 1100, "N": 1, "K": 1, "is_causal": True,
                                   "q_offset": 300, "H": 3, "Hv": 2})  # fmt: skip
    whole = dataclasses.replace(cases.BLOCKED, config=None)
    cases.assert_all_near(cases.run(whole, inputs), cases.truth(inputs))


@pytest.mark.parametrize(
    "dims", [{"H": 1, "Hv": 1}, {"H": 129, "Hv": 3}, {"N": 0, "K": 2}, {"Hv": 0}]
)
def test_odd_features(dims):
    inputs = cases.inputs("features", {"T": 3, "S": 5} | dims)
    cases.assert_all_near(cases.run(cases.BLOCKED, inputs), cases.truth(inputs))


@st.composite
def calls(draw):
    one_of = lambda *values: draw(st.sampled_from(values))
    batch, kv_heads = one_of(1, 2, 3), one_of(1, 2)
    t, s = one_of(1, 2, 7, 16, 19), one_of(1, 3, 8, 17, 25)
    case = {
        "B": batch,
        "T": t,
        "S": s,
        "K": kv_heads,
        "N": kv_heads * one_of(1, 2, 3),
        "H": one_of(1, 2, 5),
        "Hv": one_of(1, 3, 4),
    }
    side = st.none() | st.integers(0, 9)
    numbers = lambda low, high: st.lists(st.integers(low, high), min_size=batch, max_size=batch)
    optional = {
        "is_causal": st.just(True),
        "local_window_size": st.tuples(side, side) | st.integers(0, 9),
        "q_offset": st.integers(-4, 20) | numbers(-4, 20),
        "query_seq_lengths": numbers(-1, t + 2),
        "key_value_seq_lengths": numbers(-1, s + 2),
        "segments": st.sampled_from([1, 2, 3]),
        "shuffled": st.booleans(),
        "mask": st.sampled_from(["BNTS", "1N1S", "B1T1", "TS", "S", ""]),
        "bias": st.sampled_from(["BNTS", "1NTS", "B11S", "T1", "S", "N11"]),
        "logits_soft_cap": st.sampled_from([0.5, 3.0]),
        "sinks": st.just(True),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(optional)), max_size=5, unique=True))
    return case | {n: draw(optional[n]) for n in chosen}


@pytest.mark.parametrize(
    ("implementation", "examples"), [(i, 8 if i.name == "xla" else 4) for i in IMPLEMENTATIONS]
)
def test_drawn_calls(implementation, examples):
    @hypothesis.settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @hypothesis.given(calls())
    def check(case):
        inputs = cases.inputs("drawn", case)
        actual = cases.run(implementation, inputs)
        cases.assert_all_near(actual, cases.truth(inputs), implementation.tolerance)

    check()
