"""Test set-up: eight virtual CPU devices, strict promotion for the ops, seeded random numbers."""

import os
import zlib
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest

DEVICES = 8
TESTS = Path(__file__).parent
# optax and bf16 Flax layers promote inside, so only the ops themselves are held to this.
STRICT = (TESTS / "attention", TESTS / "grouped_matmul")

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=20, print_blob=True
)
hypothesis.settings.load_profile("default")


def pytest_configure(config):
    os.environ["PALLAS_OPS_CACHE_DIR"] = ""  # whoever runs the tests may have tuned
    if config.option.markexpr == "gpu":
        return
    # Both: the environment is for the subprocesses that some tests start, and this process may have
    # imported jax before. Without the Eigen pool the workers of `-n auto` do not crowd the cores.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES} --xla_cpu_multi_thread_eigen=false"
    )
    jax.config.update("jax_platforms", "cpu")


@pytest.fixture(autouse=True)
def _gpu_present(request):
    if request.node.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU, and `-m gpu`, which alone leaves the platform to JAX")


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    if not any(folder in request.path.parents for folder in STRICT):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Each compiled program takes memory maps, of which Linux gives a process 65530."""
    yield
    jax.clear_caches()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the name of the test: the same numbers on any worker, in any order."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def make_mesh():
    """make_mesh((2, 4), ("data", "model"), explicit=False) over the first prod(shape) devices."""

    def make(shape=(DEVICES,), names=("x",), *, explicit=False):
        kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
        count = int(np.prod(shape))
        if len(jax.devices()) < count:
            pytest.skip(f"needs {count} devices, has {len(jax.devices())}")
        return jax.make_mesh(
            shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[:count]
        )

    return make


@pytest.fixture(params=["auto", "explicit"])
def mesh(request, make_mesh):
    """A mesh of 2 x 4 devices named ("data", "model"), once automatic and once explicit."""
    return make_mesh((2, 4), ("data", "model"), explicit=request.param == "explicit")
