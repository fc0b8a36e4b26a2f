"""Times: spans of calls from device events, repeats within the budget, rotation of operands."""

import time
import types

import jax
import jax.numpy as jnp
import pytest

from pallas_ops import timing


def test_spans_keep_gaps_within_a_call_and_leave_out_those_between():
    # Two kernels a call, in nanoseconds; the second call's overlap, the third's come late.
    events = [(0, 1e6), (2e6, 3e6), (50e6, 52e6), (51e6, 53e6), (90e6, 91e6), (99e6, 100e6)]
    assert timing.spans(events, 3) == [3.0, 3.0, 10.0]
    assert timing.spans(events[::-1], 3) == [3.0, 3.0, 10.0]
    # A long first kernel may end last.
    assert timing.spans([(0, 9e6), (1e6, 2e6)], 1) == [9.0]


@pytest.mark.parametrize("events, calls", [([], 3), ([(0, 1), (2, 3), (4, 5)], 2)])
def test_spans_of_unequal_calls_are_unknown(events, calls):
    assert timing.spans(events, calls) == []


def test_rotation_passes_the_cache_between_two_uses():
    assert timing.rotation(2**30) == 1
    for size in (1, 2**20, 3 * 2**20, 2**28, 2**30 - 1):
        sets = timing.rotation(size)
        assert sets >= 2 and (sets - 1) * max(size, 2**20) >= timing._CACHE_BYTES


def test_measure_takes_the_sets_in_turn():
    seen = []

    def call(x):
        seen.append(int(x))
        time.sleep(0.002)
        return x

    sets = [(jnp.int32(i),) for i in range(3)]
    result = timing.measure(call, sets, budget_ms=25)
    assert result.timer == "wall" and 5 <= result.calls <= 13
    assert seen[2:] == [i % 3 for i in range(result.calls)]
    assert 2 <= result.ms < 20 and 0 <= result.spread_ms < 20


def test_measure_makes_few_long_calls_and_not_too_many_short_ones():
    short = timing.measure(lambda: None, [()], budget_ms=1000)
    assert short.calls == 200
    long = timing.measure(lambda: time.sleep(0.01), [()], budget_ms=1)
    assert long.calls == 5 and long.ms >= 10


def fake_gpu(monkeypatch, events_per_call):
    """What measure does on a GPU, with device events of 2 ms a call."""
    monkeypatch.setattr(timing, "_platform", lambda result: "gpu")
    events = []
    for i in range(500):
        events += [(i * 1e7, i * 1e7 + 2e6)] * events_per_call
    monkeypatch.setattr(
        timing, "_device_events", lambda queued_ms, order: events[: len(order) * events_per_call]
    )


def test_measure_on_a_gpu_reads_spans(monkeypatch):
    fake_gpu(monkeypatch, events_per_call=3)
    result = timing.measure(lambda: time.sleep(0.002), [()], budget_ms=100)
    assert (result.ms, result.spread_ms, result.timer) == (2.0, 0.0, "cupti")


def test_measure_on_a_gpu_without_a_profiler_queues(monkeypatch):
    fake_gpu(monkeypatch, events_per_call=0)
    result = timing.measure(lambda: time.sleep(0.002), [()], budget_ms=100)
    assert result.timer == "queued" and result.calls == 5 and result.ms >= 2


def test_measure_on_a_gpu_takes_the_wall_time_of_long_calls(monkeypatch):
    fake_gpu(monkeypatch, events_per_call=3)
    result = timing.measure(lambda: time.sleep(0.02), [()], budget_ms=1)
    assert result.timer == "wall" and result.calls == 5 and result.ms >= 20


def test_device_events_are_those_of_the_streams(monkeypatch, tmp_path):
    event = lambda start, length: types.SimpleNamespace(start_ns=start, duration_ns=length)
    line = lambda name, *events: types.SimpleNamespace(name=name, events=events)
    planes = [
        types.SimpleNamespace(
            name="/device:GPU:0",
            lines=[line("Stream #14(Compute)", event(5, 2)), line("XLA Ops", event(0, 99))],
        ),
        types.SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", event(0, 99))]),
    ]

    class Data:
        @staticmethod
        def from_file(path):
            return types.SimpleNamespace(planes=planes)

    def start(folder, **options):
        (tmp_path / "x").mkdir()
        with open(f"{folder}/host.xplane.pb", "w") as file:
            file.write("not read here")

    monkeypatch.setattr(jax.profiler, "start_trace", start)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, "ProfileData", Data)
    assert timing._device_events(lambda order: 1.0, [()]) == [(5, 7)]


def test_ceilings_on_a_cpu():
    tflops, gbps = timing.ceilings()
    assert 0 < tflops < 50 and 0.1 < gbps < 5000
