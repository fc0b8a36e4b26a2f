"""These tests need JAX's CUDA plugin and no GPU: `make test-compile`."""

from pallas_ops import toolchain

collect_ignore_glob = [] if toolchain.has_plugin() else ["test_*.py"]
