"""What `implementation=None` chooses is right on every named shape, by the benchmarks' check."""

import dataclasses
import functools

import pytest

from benchmarks import operations
from benchmarks.shapes import GATHERED, SETS

LARGE = [name for name in SETS if name not in ("tiny", "cpu", *GATHERED)]


@functools.lru_cache(maxsize=1)
def _programs(signature):
    """Of shapes that differ in the sizes of groups alone: they are listed one after another."""
    operation = operations.of(signature)
    ours = operations.our_attention if signature.op == "attention" else operations.our_grouped
    made = operation.compile(ours(None), operation.programs("fwdbwd"))
    for program in made.values():
        if isinstance(program, Exception):
            raise program
    return made


def _fault(shape):
    operation = operations.of(shape)
    signature = shape
    if shape.op == "grouped_matmul":
        signature = dataclasses.replace(shape, distribution="uniform", model="")
    call = operation.call(_programs(signature), "fwdbwd")
    operands = operation.operands(0)
    outputs = call.outputs(call.run(*call.prepare(operands)))
    return operation.check(operands, shape.directions).fault(outputs, ours=True)


# Every third: in what the others differ, tests of the operations cover.
@pytest.mark.parametrize("shape", SETS["tiny"][::3], ids=lambda shape: shape.case)
def test_tiny(shape):
    assert _fault(shape) is None


# Attention of longer rows is checked where it is measured.
@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "shape",
    [s for n in LARGE for s in SETS[n] if s.op != "attention" or s.q_len <= 16384],
    ids=lambda shape: shape.case,
)
def test_large(shape):
    assert _fault(shape) is None
