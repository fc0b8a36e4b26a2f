"""Compiling takes most of the time here, and half of that is LLVM: do without its passes."""

import jax
import pytest


@pytest.fixture
def fully_optimised():
    """Asked for by a test that wants the code a user gets."""


@pytest.fixture(autouse=True)
def _quick_compilation(request):
    if "fully_optimised" in request.fixturenames:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
