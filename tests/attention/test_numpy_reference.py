"""The truth is itself checked: its gradients by finite differences, its values by hand."""

import dataclasses

import numpy as np
import pytest

from tests.attention import cases, numpy_reference

NAMES = [*cases.PAIRS, "plain", "soft_cap", "sinks_and_dead_rows", "mask_of_rows", "mask_of_keys"]


def _inputs(name):
    # The dropout mask is drawn here: nothing of the library takes part.
    case = dict(cases.CASES[name])
    rate = case.pop("dropout_rate", 0.0)
    inputs = cases.inputs(name, case)
    options = dict(inputs.arrays) | inputs.statics
    if rate:
        B, T, N, _ = inputs.floats["query"].shape
        keep = np.random.default_rng(1).random((B, N, T, inputs.floats["key"].shape[1])) >= rate
        options |= {"dropout_rate": rate, "dropout_keep": keep}
    return inputs, options


@pytest.mark.parametrize("name", NAMES)
def test_gradients_by_finite_differences(name):
    inputs, options = _inputs(name)

    def loss(floats):
        result = numpy_reference.attention(**floats, **options)
        lse = np.where(np.isfinite(result["lse"]), result["lse"], 0)
        return (inputs.dout * result["out"]).sum() + (inputs.dlse * lse).sum()

    exact = numpy_reference.attention(
        **inputs.floats, **options, dout=inputs.dout, dlse=inputs.dlse
    )
    rng = np.random.default_rng(0)
    for operand, x in inputs.floats.items():
        step = 1e-5 * np.where(np.isfinite(x), rng.normal(size=x.shape), 0)
        there, back = (loss(inputs.floats | {operand: x + sign * step}) for sign in (1, -1))
        expected = (exact[operand] * step).sum()
        assert np.abs((there - back) / 2 - expected) < 1e-9 * (1 + np.abs(x[np.isfinite(x)]).sum())
        assert expected != 0 or not np.isfinite(x).any()


def test_gradient_check_can_fail():
    inputs, options = _inputs("plain")
    right = numpy_reference.attention(**inputs.floats, **options, dout=inputs.dout)
    wrong = numpy_reference.attention(
        **inputs.floats, **options, dout=inputs.dout, dlse=inputs.dlse
    )
    assert np.abs(right["query"] - wrong["query"]).max() > 1e-2


def test_values_by_hand():
    q, k = np.zeros((1, 8, 1, 4)), np.ones((1, 8, 1, 4))
    v = 2.0 ** np.arange(8).reshape(1, 8, 1, 1)
    out = numpy_reference.attention(q, k, v, local_window_size=(1, 0))
    np.testing.assert_array_equal(out["out"].ravel(), [1, 1.5, 3, 6, 12, 24, 48, 96])
    assert np.isclose(out["lse"][0, 5, 0], np.log(2))


@pytest.mark.parametrize("name", cases.PAIRS)
def test_pairs_leave_something_to_compare(name):
    inputs, options = _inputs(name)
    B, T, N, _ = inputs.floats["query"].shape
    known = {f.name for f in dataclasses.fields(inputs)} | {
        "scale",
        "logits_soft_cap",
        "dropout_rate",
        "dropout_keep",
    }
    masks = {n: x for n, x in options.items() if n not in known}
    shape = (B, N, T, inputs.floats["key"].shape[1])
    visible = numpy_reference.visible_pairs(shape, bias=inputs.floats.get("bias"), **masks)
    assert 0.02 < visible.mean()
