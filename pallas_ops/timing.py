"""Time that a program takes on the device that it runs on.

On a GPU calls are queued one after another under the profiler (CUPTI); the time of one is the span
from the start of its first kernel, copy or fill to the end of its last. That leaves out what the
host does before a call and keeps the gaps within it. On a CPU, and for calls of over 10 ms, it is
the wall time of a call.
"""

import functools
import math
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Bytes that must pass between two uses of an operand for nothing of it to be left in the largest
# second-level cache of today's cards, that of a B200 (126 MB).
_CACHE_BYTES = 2**28
_FEWEST_CALLS, _MOST_CALLS = 5, 200
# A card that was idle runs faster than its power limit lets it run on: an H200 did 817 TFLOP/s of
# bfloat16 products for 50 ms and 690 from then on.
_WARM_UP_MS = 100.0
# Of a longer call the host's part is below a hundredth, and its events may be a million.
_LONG_MS = 10.0


class Timing(NamedTuple):
    """`ms` is the median over `calls`, `spread_ms` the distance between their quartiles.

    `timer` is "cupti" (spans on the device), "queued" (wall time of queued calls over their number,
    where the profiler sees nothing) or "wall" (wall time of each call: on a CPU, or a long one).
    """

    ms: float
    spread_ms: float
    timer: str
    calls: int


def measure(
    call: Callable[..., Any], operand_sets: Sequence[Sequence[Any]], *, budget_ms: float = 150.0
) -> Timing:
    """Times `call(*operands)`, taking the sets of operands in turn.

    On a GPU calls of up to 10 ms are first run for 100 ms, 2000 of them at most; before longer
    ones, and on a CPU, a few calls run untimed.

    Args:
      call: compiled code, or Python that runs nothing else on the device.
      operand_sets: as many as `rotation` says keep a set from being found in the cache.
      budget_ms: time to spend on repeats; between 5 and 200 are made.
    """
    result = jax.block_until_ready(call(*operand_sets[0]))
    gpu = _platform(result) == "gpu"
    del result
    if gpu:
        queued = functools.partial(_queued_ms, call)
        return on_device(queued, functools.partial(_device_events, queued), operand_sets, budget_ms)
    once_ms = _queued_ms(call, operand_sets[-1:])
    count = _count(budget_ms, once_ms)
    times = [_queued_ms(call, [operand_sets[i % len(operand_sets)]]) for i in range(count)]
    return _timing(times, "wall")


def on_device(
    queued_ms: Callable[[Sequence[Any]], float],
    device_events: Callable[[Sequence[Any]], Sequence[tuple[float, float]]],
    calls: Sequence[Any],
    budget_ms: float,
) -> Timing:
    """Times calls on a GPU, taking those given in turn.

    Args:
      queued_ms: queues calls one after another and waits for the last; milliseconds for each.
      device_events: the same under a profiler; (start, end) in nanoseconds of all that ran.
      calls: as many as `rotation` says.
      budget_ms: time to spend on repeats; between 5 and 200 are made.
    """
    for call in calls[:2]:  # the second call meets no allocation
        queued_ms([call])
    once_ms = queued_ms(calls[-1:])
    if once_ms > _LONG_MS:
        count = _count(budget_ms, once_ms)
        return _timing([queued_ms([calls[i % len(calls)]]) for i in range(count)], "wall")
    rotated = lambda count: [calls[i % len(calls)] for i in range(count)]
    queued_ms(rotated(min(math.ceil(_WARM_UP_MS / once_ms), 10 * _MOST_CALLS)))
    order = rotated(_count(budget_ms, once_ms))
    times = spans(device_events(order), len(order))
    if times:
        return _timing(times, "cupti")
    batch = math.ceil(len(order) / _FEWEST_CALLS)
    parts = [order[i : i + batch] for i in range(0, len(order), batch)]
    return _timing([queued_ms(part) for part in parts], "queued")


def spans(events: Sequence[tuple[float, float]], calls: int) -> list[float]:
    """Milliseconds from first start to last end of each of `calls` calls that ran in order.

    `events` are (start, end) in nanoseconds of all that ran on the device. They must be equally
    many for each call, else no time can be told and the list is empty.
    """
    if not events or len(events) % calls:
        return []
    events = sorted(events)
    each = len(events) // calls
    parts = [events[i : i + each] for i in range(0, len(events), each)]
    return [(max(end for _, end in part) - part[0][0]) / 1e6 for part in parts]


def rotation(bytes_per_set: int) -> int:
    """How many sets of operands of this size to take in turn so that none is still in the cache."""
    if bytes_per_set >= 4 * _CACHE_BYTES:  # its end has driven its beginning out
        return 1
    return 1 + math.ceil(_CACHE_BYTES / max(bytes_per_set, 2**20))


def ceilings() -> tuple[float, float]:
    """TFLOP/s of a large matrix product and GB/s, read and written, of a copy on this device.

    bfloat16 with a float32 accumulator on a GPU, float32 on a CPU; random normal data.
    """
    gpu = jax.default_backend() == "gpu"
    side, words, dtype = (8192, 2**29, jnp.bfloat16) if gpu else (2048, 2**24, jnp.float32)
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (side, side), dtype) for key in keys)
    product = measure(jax.jit(jnp.dot), [(x, y), (y, x)], budget_ms=300)
    data = jnp.arange(words, dtype=jnp.int32)
    copy = measure(jax.jit(jnp.invert), [(data,)], budget_ms=300)
    return 2 * side**3 / product.ms / 1e9, 2 * data.nbytes / copy.ms / 1e6


def _platform(result: Any) -> str:
    arrays = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
    return next(iter(arrays[0].devices())).platform if arrays else jax.default_backend()


def _count(budget_ms: float, once_ms: float) -> int:
    return min(max(math.ceil(budget_ms / once_ms), _FEWEST_CALLS), _MOST_CALLS)


def _timing(times: list[float], timer: str) -> Timing:
    low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    return Timing(median, high - low, timer, len(times))


def _queued_ms(call, order) -> float:
    started = time.perf_counter()
    result = None
    for operands in order:
        result = call(*operands)
    jax.block_until_ready(result)
    return 1e3 * (time.perf_counter() - started) / len(order)


def _device_events(queued_ms, order) -> list[tuple[float, float]]:
    """Start and end of all that the GPU's streams ran during the calls."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            queued_ms(order)
        finally:
            jax.profiler.stop_trace()
        events = []
        for path in pathlib.Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if not plane.name.startswith("/device:GPU"):
                    continue
                for line in plane.lines:
                    if line.name.startswith("Stream"):
                        events += [(e.start_ns, e.start_ns + e.duration_ns) for e in line.events]
    return events
